"""The net effect of a run of changes on one table: the differences at its end, row by row.

**Purpose.** A row is identified by the key that the publisher sends. `Net` lists the earlier rows that are deleted, the
earlier rows that have other values (and perhaps another key), and the new rows. The nets of two consecutive runs can be
combined into the net of both, so a long run can be split into pieces that are netted separately.

    kind   a row of the table before         and after
    gone   its key                           –
    row    origin: its key, unless the same  key, row; unsent values are those of the row at `origin`
    row    origin None: it did not exist     key, row; unsent values get the column's default

**Invariants.**

- A change that assumes a row which cannot exist (inserted twice, changed after it was deleted) raises ApplyError. The
  table then differs from the publisher's, and only row-by-row apply finds the row.
- Tables without a key (`key` is None) are multisets: a number of additional copies of a row, a number of missing
  copies.
- Rows and keys are the received bytes (raw_rows.py). The most frequent change, an update, replaces a row and reads only
  its key.
"""

from __future__ import annotations

import marshal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from zlib import crc32

from subscriber.errors import ApplyError
from subscriber.protocol.messages import Delete, Insert, OldPart, Update
from subscriber.spark.changes.raw_rows import Key, cells, key_of, lacks, nothing, over


@dataclass(slots=True)
class Net:
    """The net effect on one table, see the head of the module.

    `columns` are names, in the order of the rows. `key` are indexes of `columns`, or None. `overlaps`: the table may
    have some of the changes, so each key that a row had in between is in `gone`.
    """

    columns: tuple[str, ...]
    key: tuple[int, ...] | None
    truncated: bool = False  # all earlier rows are deleted
    rows: dict[Key, bytes] = field(default_factory=dict)
    origins: dict[Key, Key | None] = field(default_factory=dict)  # of rows that did not exist under the same key
    lacking: set[Key] = field(default_factory=set)  # rows with values that were not sent
    gone: set[Key] = field(default_factory=set)
    more: Counter[bytes] = field(default_factory=Counter)  # additional rows of a table without a key
    fewer: Counter[bytes] = field(default_factory=Counter)
    overlaps: bool = False

    @property
    def moved(self) -> bool:
        """Return True if the key of a row has changed."""
        return any(origin is not None for origin in self.origins.values())

    def __len__(self) -> int:
        return len(self.rows) + len(self.gone) + self.more.total() + self.fewer.total()

    # --- changes in sequence ------------------------------------------------------------------------

    def add(self, change: Insert | Update | Delete) -> None:
        """Add the next change. Raises ApplyError."""
        if isinstance(change, Insert):
            self.insert(change.new.raw)
        elif self.key is None:
            self._add_to_bag(change)
        elif isinstance(change, Delete):
            self.delete(key_of(change.old.raw, self.key, len(self.columns)))
        elif change.old is None:
            self.replace(change.new.raw)
        else:
            self._update(change.old.raw, change.new.raw, self.key, whole=change.old_part is OldPart.ROW)

    def insert(self, raw: bytes) -> None:
        """Add an inserted row. Raises ApplyError."""
        if self.key is None:
            _exchange(self.fewer, self.more, raw, 1)
        else:
            self._place(key_of(raw, self.key, len(self.columns)), None, raw)

    def replace(self, raw: bytes) -> None:
        """Add an update that keeps the row's key. Raises ApplyError."""
        if self.key is None:
            raise ApplyError("a row of a table without a key was changed, and the publisher does not send whole rows")
        ncols = len(self.columns)
        key = key_of(raw, self.key, ncols)
        before = self.rows.get(key)
        if before is None and (self.truncated or key in self.gone):
            raise ApplyError("a row was changed that does not exist")
        if b"u" in raw and lacks(raw, ncols):  # checked inline first: few rows need the call
            self._set(key, raw if before is None else over(before, raw, ncols))
        else:
            self.rows[key] = raw
            if self.lacking:
                self.lacking.discard(key)

    def delete(self, key: Key) -> None:
        """Add the deletion of the row with a key. Raises ApplyError."""
        if self.overlaps and key not in self.rows and (key in self.gone or self.truncated):
            return
        origin, _ = self._take(key)
        if origin is not None:
            self.gone.add(origin)

    def truncate(self) -> None:
        """Add a TRUNCATE: delete all rows."""
        self.truncated = True
        for kept in (self.rows, self.origins, self.lacking, self.gone, self.more, self.fewer):
            kept.clear()

    def _set(self, key: Key, raw: bytes) -> None:
        self.rows[key] = raw
        if lacks(raw, len(self.columns)):
            self.lacking.add(key)
        else:
            self.lacking.discard(key)

    def _place(self, key: Key, origin: Key | None, raw: bytes) -> None:
        if key in self.rows:
            raise ApplyError("a row was inserted that already exists")
        self._set(key, raw)
        if origin != key:
            self.origins[key] = origin

    def _update(self, old: bytes, new: bytes, key: tuple[int, ...], *, whole: bool) -> None:
        ncols = len(self.columns)
        # The old row has the values that were not sent, if it is whole; it always has the key.
        new = over(old, new, ncols, None if whole else key)
        before, after = key_of(old, key, ncols), key_of(new, key, ncols)
        if before == after:
            self.replace(new)
            return
        origin, row = self._take(before)
        self._place(after, origin, over(row, new, ncols))

    def _take(self, key: Key) -> tuple[Key | None, bytes]:
        """Remove the row with that key. Returns its origin and its current values."""
        row = self.rows.pop(key, None)
        if row is not None:
            self.lacking.discard(key)
            if self.overlaps:
                self.gone.add(key)
            return self.origins.pop(key, key), row
        if key in self.gone or self.truncated:
            raise ApplyError("a row was changed that does not exist")
        return key, nothing(len(self.columns))

    def _add_to_bag(self, change: Update | Delete) -> None:
        if change.old is None or change.old_part is not OldPart.ROW:
            raise ApplyError("a row of a table without a key was changed, and the publisher does not send whole rows")
        old = change.old.raw
        _exchange(self.more, self.fewer, old, 1)
        if isinstance(change, Update):
            _exchange(self.fewer, self.more, over(old, change.new.raw, len(self.columns)), 1)

    # --- combining nets -----------------------------------------------------------------------------

    def then(self, later: Net) -> None:
        """Combine this net with the net of the following changes. Raises ApplyError."""
        if later.truncated:
            self.truncate()
        if later.columns != self.columns:
            self.reshape(later.columns, later.key)
        for row, count in later.fewer.items():
            _exchange(self.more, self.fewer, row, count)
        for row, count in later.more.items():
            _exchange(self.fewer, self.more, row, count)
        if later.moved:
            self._then_moved(later)
        else:
            self._then_in_place(later)

    def _then_in_place(self, later: Net) -> None:
        """Combine with a net in which no row changes its key. Most rows of `later` replace one row here."""
        stay = later.rows.keys() - later.origins.keys()
        unknown = stay - self.rows.keys()
        if unknown and (self.truncated or not unknown.isdisjoint(self.gone)):
            raise ApplyError("a row was changed that does not exist")
        for key in later.gone:
            self.delete(key)
        for key in later.origins:
            self._place(key, None, later.rows[key])
        ncols = len(self.columns)
        completed = {
            key: over(self.rows[key], later.rows[key], ncols)
            for key in later.lacking
            if key in stay and key in self.rows
        }
        self.lacking -= later.rows.keys()
        self.lacking |= later.lacking
        self.rows.update(later.rows)
        for key, row in completed.items():
            self._set(key, row)

    def _then_moved(self, later: Net) -> None:
        # All rows leave their old keys before any row takes its new key.
        origins = {key: later.origins.get(key, key) for key in later.rows}
        taken = {origin: self._take(origin) for origin in origins.values() if origin is not None}
        for key in later.gone:
            self.delete(key)
        for key, row in later.rows.items():
            origin = origins[key]
            if origin is None:
                self._place(key, None, row)
            else:
                first, before = taken[origin]
                self._place(key, first, over(before, row, len(self.columns)))

    def reshape(self, columns: tuple[str, ...], key: tuple[int, ...] | None) -> None:
        """Change the columns of the table. Values of columns that a row did not have count as not sent.

        Raises:
            ApplyError: the key has changed, and there are rows.
        """
        identity = None if self.key is None else [self.columns[i] for i in self.key]
        if identity != (None if key is None else [columns[i] for i in key]) and len(self):
            raise ApplyError("the table's replica identity has changed")
        places = [self.columns.index(name) if name in self.columns else None for name in columns]
        had, unsent = len(self.columns), nothing(1)

        def moved(row: bytes) -> bytes:
            values = cells(row, had)
            return b"".join([unsent if place is None else values[place] for place in places])

        self.columns, self.key = columns, key
        for name, row in self.rows.items():
            self._set(name, moved(row))
        for bag in (self.more, self.fewer):
            kept = Counter[bytes]()
            for row, count in bag.items():
                kept[moved(row)] += count
            bag.clear()
            bag.update(kept)

    # --- transfer -----------------------------------------------------------------------------------

    def dump(self) -> bytes:
        """Return bytes that load() reads in the same Python version. Ten times as fast as pickling every row."""
        keyed = (self.rows, self.origins, self.lacking, self.gone)
        bags = dict(self.more), dict(self.fewer)
        return marshal.dumps((self.columns, self.key, self.truncated, *keyed, *bags, self.overlaps))

    @classmethod
    def load(cls, data: bytes) -> Net:
        columns, key, truncated, rows, origins, lacking, gone, more, fewer, overlaps = marshal.loads(data)
        return cls(columns, key, truncated, rows, origins, lacking, gone, Counter(more), Counter(fewer), overlaps)

    # --- partitions ---------------------------------------------------------------------------------

    def parts(self, number: int) -> Iterator[tuple[int, Net]]:
        """Divide by key into (0 to number - 1, net), so that the same key is in the same part of every net.

        A net that is `truncated` or has `moved` rows must not be divided.
        """
        parts = [Net(self.columns, self.key, overlaps=self.overlaps) for _ in range(number)]
        for key, row in self.rows.items():
            parts[crc32(key) % number].rows[key] = row
        for key in self.origins:
            parts[crc32(key) % number].origins[key] = None
        for key in self.lacking:
            parts[crc32(key) % number].lacking.add(key)
        for key in self.gone:
            parts[crc32(key) % number].gone.add(key)
        for row, count in self.more.items():
            parts[crc32(row) % number].more[row] = count
        for row, count in self.fewer.items():
            parts[crc32(row) % number].fewer[row] = count
        yield from ((index, net) for index, net in enumerate(parts) if len(net))


def _exchange(from_: Counter[bytes], to: Counter[bytes], row: bytes, count: int) -> None:
    """Add `count` of a row to `to`, after removing the ones in `from_` that they cancel."""
    cancelled = min(from_[row], count) if row in from_ else 0
    if cancelled:
        from_[row] -= cancelled
        if not from_[row]:
            del from_[row]
    if count > cancelled:
        to[row] = to.get(row, 0) + count - cancelled
