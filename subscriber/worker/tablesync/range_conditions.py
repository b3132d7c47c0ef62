"""The conditions under which a table of the target can be copied by ranges."""

from __future__ import annotations

from subscriber.apply.relation_map import RelationMapping
from subscriber.ranges.key_types import ENUM
from subscriber.ranges.keys import KeyRangeError, RangeKey
from subscriber.targets.postgres.copy_transaction import TableChecks


def check_target(
    mapping: RelationMapping,
    key: RangeKey,
    checks: TableChecks,
    *,
    allow_unique: bool = False,
    builds_key: bool = False,
) -> None:
    """Check that rows of different snapshots can be in the target's table together.

    Args:
        mapping: the table.
        key: the columns of the ranges.
        checks: the table's checks of several rows.
        allow_unique: all ranges are copied, so other unique indexes are allowed.
        builds_key: an index on the key is built later, or when a change needs it.

    Raises:
        KeyRangeError: they cannot. The message is the reason.
    """
    local = mapping.local
    if local.partitioned:
        raise KeyRangeError("the table of the target is partitioned")
    if checks.foreign_keys:
        raise KeyRangeError("foreign keys of the target's table are checked for replicated changes")
    if (local.other_unique or checks.deferrable_unique) and not allow_unique:
        raise KeyRangeError("the table of the target has another unique index or an exclusion constraint")
    if mapping.unsearchable is not None if local.identity else not builds_key:
        raise KeyRangeError("the table of the target has no index on the key")
    by_name = {column.name: column.batch_info for column in mapping.attributes}
    for column in key.columns:
        info = by_name[column.name]
        if info is None or (column.type is not ENUM and info.type_oid != column.type_oid):
            raise KeyRangeError(f'key column "{column.name}" has another type on the target')
