"""The conflict policy add_delta: the columns of a mapping to which an UPDATE adds the publisher's difference.

Two servers that change one counter at the same time both lose nothing if each adds what the other has added.
The difference is the new value minus the old value, so the publisher must send old rows: REPLICA IDENTITY FULL. The
target finds the row by its primary key, because the old values may differ from its own.

Failure cases, each an error that stops the stream with the statement that mends it: the publisher sends no old row,
the target's table has no key, the column is not published, is not a number, or is a part of the key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from subscriber.apply.relation_map import RelationMapping
from subscriber.display import sql_name
from subscriber.errors import MappingError
from subscriber.protocol.messages import ReplicaIdentity

# Type by the OID of the column's type: the type in which the difference is computed. A difference of integers may
# exceed their type although the sum does not.
_COMPUTED_IN = {
    20: "pg_catalog.numeric",  # int8
    21: "pg_catalog.numeric",  # int2
    23: "pg_catalog.numeric",  # int4
    700: "pg_catalog.float4",
    701: "pg_catalog.float8",
    790: "pg_catalog.money",
    1700: "pg_catalog.numeric",
}


def delta_types(mapping: RelationMapping, names: Sequence[str]) -> Mapping[int, str]:
    """Find the columns of a policy add_delta in a mapping.

    Args:
        mapping: the table.
        names: the columns, as the policy names them.

    Returns:
        The type in which the difference is computed, by the column's index in `mapping.attributes`.

    Raises:
        MappingError: the differences of a column cannot be added.
    """
    if not names:
        return {}
    table = sql_name(mapping.local.schema, mapping.local.name)
    if mapping.remote.replica_identity is not ReplicaIdentity.FULL:
        raise old_row_missing(mapping)
    if mapping.search is None:
        raise MappingError(
            f'conflict policy "add_delta" needs a primary key of table "{mapping.label}"',
            detail="The row to be changed cannot be found by its old values, because they may differ on both sides.",
            hint=f"On the target: ALTER TABLE {table} ADD PRIMARY KEY (...);",
        )
    places = {column.name: index for index, column in enumerate(mapping.attributes)}
    types = {}
    for name in names:
        index = places.get(name)
        if index is None:
            raise _refused(mapping, name, "The publisher sends no column of this name.")
        if index in mapping.search:
            raise _refused(mapping, name, "The column is a part of the key by which rows are found.")
        info = mapping.attributes[index].batch_info
        computed_in = _COMPUTED_IN.get(info.element_oid) if info is not None else None
        if computed_in is None:
            raise _refused(mapping, name, f"Its type is {mapping.attributes[index].type_name}, which is not numeric.")
        types[index] = computed_in
    return types


def old_row_missing(mapping: RelationMapping) -> MappingError:
    """Return the error for an UPDATE whose old row the publisher does not send."""
    table = sql_name(mapping.remote.schema, mapping.remote.name)
    return MappingError(
        f'conflict policy "add_delta" needs the old rows of table "{mapping.label}", and the publisher does not send'
        " them",
        detail="The difference is the new value minus the old value.",
        hint=f"On the publisher: ALTER TABLE {table} REPLICA IDENTITY FULL; UPDATEs before that statement stay without"
        " old rows. To apply them, remove add_delta from conflict_policy until they are applied.",
    )


def _refused(mapping: RelationMapping, name: str, detail: str) -> MappingError:
    return MappingError(
        f'conflict policy "add_delta" cannot add to column "{name}" of table "{mapping.label}"',
        detail=detail,
        hint="Change the columns of add_delta with ALTER SUBSCRIPTION ... SET (conflict_policy = ...).",
    )
