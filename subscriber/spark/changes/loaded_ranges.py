"""LoadedRanges: which changes of the log the rows of a table do not have yet, after a load by ranges of its key.

Each range was read in a snapshot of its own, so the rows of the table are of no single position. A change is applied
if the snapshot of its key's range does not see its transaction (subscriber/ranges/__init__.py). After the changes up to
a position behind all snapshots, the rows are those of this position.

A row whose key moves between two ranges can have values that neither the change nor the table has. Such a key is a
range of its own: its row is read once more, in a later snapshot. The net of the changes begins with these rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from operator import attrgetter

from subscriber.errors import ApplyError, LoadNeeded
from subscriber.lsn import Lsn
from subscriber.protocol.decode import Decoder
from subscriber.protocol.messages import Begin, Delete, Insert, Relation, Update
from subscriber.ranges.changes import applied_part, keys_of
from subscriber.ranges.snapshot import TransactionSnapshot
from subscriber.ranges.table_ranges import Decision, TableRanges, effect
from subscriber.spark.changes.net_effect import Net
from subscriber.spark.changes.raw_rows import Key


class _Contained(Enum):
    """How much of a transaction the loaded rows have."""

    NOTHING = auto()
    PART = auto()  # perhaps: its keys decide
    ALL = auto()


@dataclass(slots=True)
class LoadedRanges:
    """The ranges of one table, all of which have been read. Picklable.

    Attributes:
        ranges: the ranges, whose keys Python can compare.
        relation: the description of the table.
        rows: the rows of ranges that are single keys, by key, both as the log has them. None: there is no such row.
    """

    ranges: TableRanges
    relation: Relation
    rows: Mapping[Key, bytes | None] = field(default_factory=dict)
    _lowest: Lsn = field(init=False)  # of the positions behind the snapshots
    _highest: Lsn = field(init=False)
    _oldest: TransactionSnapshot = field(init=False)  # whose xmin is the lowest

    def __post_init__(self) -> None:
        snapshots = [one.read_in for one in self.ranges if one.read_in is not None]
        self._lowest = min(one.lsn for one in snapshots)
        self._highest = max(one.lsn for one in snapshots)
        self._oldest = min((one.snapshot for one in snapshots), key=attrgetter("xmin"))

    @property
    def _columns(self) -> list[str]:
        return [column.name for column in self.relation.columns]

    def start(self, net: Net) -> None:
        """Add the rows of single keys to an empty net. The table may have another row with such a key."""
        for key, row in self.rows.items():
            if row is None:
                net.gone.add(key)
            else:
                net.rows[key] = row

    def applied(self, payload: bytes, begin: Begin) -> Insert | Update | Delete | None:
        """Return the part of a change that the loaded rows do not have. None: they have all of it.

        Args:
            payload: the change of a row.
            begin: its transaction.

        Raises:
            ApplyError: the change does not have the key.
        """
        if self._compared(begin) is _Contained.ALL:
            return None
        change = Decoder().decode(payload)
        assert isinstance(change, Insert | Update | Delete)
        return self.part(change, begin)

    def part(self, change: Insert | Update | Delete, begin: Begin) -> Insert | Update | Delete | None:
        """Return the part of a decoded change, as applied() does."""
        contained = self._compared(begin)
        if contained is not _Contained.PART:
            return change if contained is _Contained.NOTHING else None
        try:
            old, new = keys_of(self.ranges.key, self._columns, change)
        except ValueError as error:
            raise ApplyError("a change does not identify its row", detail=str(error)) from error
        decisions = [self.ranges.find(key).decide(begin.xid, begin.final_lsn) for key in (old, new) if key is not None]
        if isinstance(change, Update) and len(decisions) == 2 and old != new:
            return applied_part(change, effect(*decisions))
        return change if decisions[-1] is Decision.APPLY else None

    def truncates(self, begin: Begin) -> bool:
        """Return True if the loaded rows do not have a TRUNCATE, False if they have it.

        Raises:
            LoadNeeded: a part of the ranges has it.
        """
        found = [one.contains(begin.xid, begin.final_lsn) for one in self.ranges]
        if any(found) and not all(found):
            raise LoadNeeded("the table was truncated while its ranges were loaded")
        return not any(found)

    def _compared(self, begin: Begin) -> _Contained:
        """Return how much of a transaction the loaded rows have. There may be too many ranges to compare with each."""
        if begin.final_lsn >= self._highest:
            return _Contained.NOTHING
        if begin.final_lsn < self._lowest and self._oldest.widen(begin.xid) < self._oldest.xmin:
            return _Contained.ALL
        return _Contained.PART
