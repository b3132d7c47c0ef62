"""The keys of a change, and the part of an UPDATE that is applied to a table whose ranges have different snapshots."""

from __future__ import annotations

from collections.abc import Sequence

from subscriber.protocol.messages import Delete, Insert, Update
from subscriber.ranges.keys import Key, RangeKey
from subscriber.ranges.table_ranges import Effect


def keys_of(key: RangeKey, published: Sequence[str], change: Insert | Update | Delete) -> tuple[Key | None, Key | None]:
    """Return the old and the new key of a change. None: it has none, or the key has not changed.

    Args:
        key: the columns of the key.
        published: the names of the row's columns.
        change: the change.

    Raises:
        ValueError: the change does not have the key.
    """
    if isinstance(change, Insert):
        return None, key.of_row(published, change.new)
    old = None if change.old is None else key.of_row(published, change.old)
    return old, None if isinstance(change, Delete) else key.of_row(published, change.new, change.old)


def applied_part(update: Update, effect: Effect) -> Insert | Update | Delete | None:
    """Return the part of an UPDATE that changes the key. An INSERT may have values that were not sent.

    Args:
        update: the UPDATE.
        effect: the part.

    Returns:
        None if nothing is applied.
    """
    match effect:
        case Effect.UPDATE:
            return update
        case Effect.DELETE:
            assert update.old_part is not None
            assert update.old is not None
            return Delete(update.xid, update.relid, update.old_part, update.old)
        case Effect.INSERT:
            return Insert(update.xid, update.relid, update.new)
        case Effect.NOTHING:
            return None
