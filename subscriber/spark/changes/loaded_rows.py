"""LoadedRows: the changes that follow rows which were read by ranges of their key, each in a snapshot of its own.

The rows are of no single position. After all changes from a position before the snapshots up to one behind them, they
are those of the latter.

**Invariants.**

- A change is applied whether or not the snapshot of its key's range has it. It says what its row is afterwards, so it
  does not matter which version of the row was read.
- A row without a change is the same in all snapshots, so exactly one range has it.
- A value that an UPDATE does not send is that of the row which was read, if the key stays: the row has had this key
  since before the snapshots, so its range has a version of it, and all versions have this value.
- If the key changes, perhaps no range has the row: the range of the new key was read before, that of the old key
  afterwards. Or another row has the old key. So the row counts as new, and values that were not sent are not known.
  Such a row is read once more, by its new key. The net begins with these rows, and they get the changes that their own
  snapshots do not see.

Keys are compared by their bytes only, so their type and its order are of no importance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from subscriber.protocol.messages import Begin, Delete, Insert, OldPart, Relation, Update
from subscriber.ranges.table_ranges import RangeSnapshot
from subscriber.spark.changes.net_effect import Net
from subscriber.spark.changes.raw_rows import Key, key_of, lacks, over


class ReadRow(NamedTuple):
    """A row that was read once more, as the log would have it. `row` is None if there was no row with the key."""

    row: bytes | None
    read_in: RangeSnapshot


@dataclass(frozen=True, slots=True)
class LoadedRows:
    """The rows of one table. Picklable.

    Attributes:
        relation: the description of the table.
        again: the rows that were read once more, by key.
    """

    relation: Relation
    again: Mapping[Key, ReadRow] = field(default_factory=dict)

    def start(self, net: Net) -> None:
        """Add the rows that were read once more to an empty net. The table may have another row with such a key."""
        for key, loaded in self.again.items():
            if loaded.row is None:
                net.gone.add(key)
            else:
                net.rows[key] = loaded.row

    def add(self, net: Net, change: Insert | Update | Delete, begin: Begin) -> None:
        """Add the next change of a transaction to a net. Raises ApplyError if the change does not have the key."""
        if not isinstance(change, Update):
            raw = change.new.raw if isinstance(change, Insert) else change.old.raw
            if not self._has(_key(net, raw), begin):
                net.add(change)
        elif change.old is None:
            if not self._has(_key(net, change.new.raw), begin):
                net.add(change)
        else:
            self._update(net, change, change.old.raw, begin)

    def _update(self, net: Net, change: Update, old: bytes, begin: Begin) -> None:
        columns = None if change.old_part is OldPart.ROW else net.key
        new = over(old, change.new.raw, len(net.columns), columns)
        before, after = _key(net, old), _key(net, new)
        leaves, enters = not self._has(before, begin), not self._has(after, begin)
        if before == after or (leaves and enters and (before in self.again or not lacks(new, len(net.columns)))):
            if enters:
                net.add(change)
            return
        if leaves:
            net.delete(before)
        if enters:
            net.insert(new)

    def truncate(self, net: Net, begin: Begin) -> None:
        """Add a TRUNCATE to a net."""
        net.truncate()
        for loaded in self.again.values():
            if loaded.row is not None and loaded.read_in.contains(begin.xid, begin.final_lsn):
                net.insert(loaded.row)

    def _has(self, key: Key, begin: Begin) -> bool:
        """Return True if a row was read once more with a key, and has a transaction."""
        loaded = self.again.get(key)
        return loaded is not None and loaded.read_in.contains(begin.xid, begin.final_lsn)


def _key(net: Net, raw: bytes) -> Key:
    assert net.key is not None  # the rows were read by its ranges
    return key_of(raw, net.key, len(net.columns))
