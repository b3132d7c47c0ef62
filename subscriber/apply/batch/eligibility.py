"""Which changes of a table can be part of a batch (table_batch.py), and which versions of its rows need not be seen."""

from __future__ import annotations

from subscriber.apply.relation_map import RelationMapping

# FirstNormalObjectId: types below are the same on every server, and no table of a user has a smaller one.
FIRST_NORMAL_OID = 16384

_INSERT, _UPDATE, _DELETE = 0x49, 0x55, 0x44


def ineligible_reason(mapping: RelationMapping, letter: int, *, with_old: bool, binary: bool) -> str | None:
    """Return the reason why changes that begin with `letter` cannot be part of a batch; None if they can.

    `with_old`: an update has the old row, or a part of it.
    """
    local, search = mapping.local, mapping.search
    if local.batch_exclusion is not None:
        return local.batch_exclusion
    if not mapping.attributes:
        return "no columns"
    if letter == _INSERT:
        return None
    if mapping.unsearchable is not None or search is None:
        return "no key"
    if letter == _UPDATE and local.other_unique and (mapping.unique_values_change or fixed_columns(mapping) is None):
        return "several unique indexes"
    needed = search if letter == _DELETE else range(len(mapping.attributes))
    for index in needed:
        column = mapping.attributes[index]
        if column.batch_info is None or not (
            column.batch_info.binary_array if binary else column.batch_info.text_array
        ):
            return "column type"
        if letter == _UPDATE and column.identity_always and (with_old or index not in search):
            return "identity column"  # which UPDATE may not set, and may have to
    if any(mapping.attributes[index].equality is None for index in search):
        return "column type"
    return None


def fixed_columns(mapping: RelationMapping) -> tuple[int, ...] | None:
    """Return the columns that a batched update of a table with several unique indexes must leave unchanged.

    Then different rows cannot conflict in these indexes, in any order. None: no update may be part of a batch.
    """
    names = mapping.local.unique_columns
    if names is None:
        return None
    fixed = tuple(i for i, column in enumerate(mapping.attributes) if column.name in names)
    return fixed if all(mapping.attributes[i].equality is not None for i in fixed) else None


def may_skip_versions(mapping: RelationMapping) -> bool:
    """Return True if the target accepts every row version of the publisher, also those replaced later; NULLs apart."""
    return mapping.local.has_only_type_checks and all(
        column.batch_info is not None
        and column.base_type is None
        and remote.type_oid == column.batch_info.type_oid < FIRST_NORMAL_OID
        and column.batch_info.type_modifier in (-1, remote.type_modifier)
        for column, remote in zip(mapping.attributes, mapping.remote.columns, strict=True)
    )
