"""The net effect of a run of changes on one table: what is different at its end, row by row.

A row is known by the key that the publisher sends. `Net` says which rows that were there before are gone,
which are there with other values (and perhaps under another key), and which are new. Two nets of runs that
follow each other make the net of both, so a long run can be cut into pieces, each netted by itself.

    kind   a row of the table before         and after
    gone   its key                           –
    row    origin: its key, unless the same  key, row; what was not sent is as the row at `origin` has it
    row    origin None: it was not there     key, row; what was not sent gets the column's default

A change that supposes a row which cannot be there (inserted twice, changed after it was deleted) is an
ApplyError: then the table is not as the publisher's was, and only applying one change at a time tells where.

Tables without a key (`key` is None) are bags of rows: so many more of this row, so many fewer of that.

Rows and keys are bytes as they came (raw_rows.py). The update that most changes are replaces a row and looks into
nothing but its key.
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
    """See the top of the file. `columns` are names, in the order of the rows; `key` are indexes of them, or None."""

    columns: tuple[str, ...]
    key: tuple[int, ...] | None
    truncated: bool = False  # everything before is gone
    rows: dict[Key, bytes] = field(default_factory=dict)
    origins: dict[Key, Key | None] = field(default_factory=dict)  # of rows that were not there under the same key
    lacking: set[Key] = field(default_factory=set)  # rows of which not all was sent
    gone: set[Key] = field(default_factory=set)
    more: Counter[bytes] = field(default_factory=Counter)  # of a table without a key
    fewer: Counter[bytes] = field(default_factory=Counter)

    @property
    def moved(self) -> bool:
        """Whether a row has another key at the end than at the beginning."""
        return any(origin is not None for origin in self.origins.values())

    def __len__(self) -> int:
        return len(self.rows) + len(self.gone) + self.more.total() + self.fewer.total()

    # --- one change after the other -------------------------------------------------------------

    def add(self, change: Insert | Update | Delete) -> None:
        """Take the next change. Raises ApplyError."""
        if isinstance(change, Insert):
            self.insert(change.new.raw)
        elif self.key is None:
            self._add_to_bag(change)
        elif isinstance(change, Delete):
            self._delete(key_of(change.old.raw, self.key, len(self.columns)))
        elif change.old is None:
            self.replace(change.new.raw)
        else:
            self._update(change.old.raw, change.new.raw, self.key, whole=change.old_part is OldPart.ROW)

    def insert(self, raw: bytes) -> None:
        """A row was added. Raises ApplyError."""
        if self.key is None:
            _exchange(self.fewer, self.more, raw, 1)
        else:
            self._place(key_of(raw, self.key, len(self.columns)), None, raw)

    def replace(self, raw: bytes) -> None:
        """A row was updated, and kept its key. Raises ApplyError."""
        if self.key is None:
            raise ApplyError("a row of a table without a key was changed, and the publisher does not send whole rows")
        ncols = len(self.columns)
        key = key_of(raw, self.key, ncols)
        before = self.rows.get(key)
        if before is None and (self.truncated or key in self.gone):
            raise ApplyError("a row was changed that is not there")
        if b"u" in raw and lacks(raw, ncols):  # asked here first: it is said of few rows, and a call takes longer
            self._set(key, raw if before is None else over(before, raw, ncols))
        else:
            self.rows[key] = raw
            if self.lacking:
                self.lacking.discard(key)

    def truncate(self) -> None:
        """All rows are gone."""
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
            raise ApplyError("a row was inserted that is there already")
        self._set(key, raw)
        if origin != key:
            self.origins[key] = origin

    def _update(self, old: bytes, new: bytes, key: tuple[int, ...], *, whole: bool) -> None:
        ncols = len(self.columns)
        # A column that was not sent is in the old row, if that is whole; and a key always is.
        new = over(old, new, ncols, None if whole else key)
        before, after = key_of(old, key, ncols), key_of(new, key, ncols)
        if before == after:
            self.replace(new)
            return
        origin, row = self._take(before)
        self._place(after, origin, over(row, new, ncols))

    def _take(self, key: Key) -> tuple[Key | None, bytes]:
        """Origin and row of that key as it is now, taken out."""
        row = self.rows.pop(key, None)
        if row is not None:
            self.lacking.discard(key)
            return self.origins.pop(key, key), row
        if key in self.gone or self.truncated:
            raise ApplyError("a row was changed that is not there")
        return key, nothing(len(self.columns))

    def _delete(self, key: Key) -> None:
        origin, _ = self._take(key)
        if origin is not None:
            self.gone.add(origin)

    def _add_to_bag(self, change: Update | Delete) -> None:
        if change.old is None or change.old_part is not OldPart.ROW:
            raise ApplyError("a row of a table without a key was changed, and the publisher does not send whole rows")
        old = change.old.raw
        _exchange(self.more, self.fewer, old, 1)
        if isinstance(change, Update):
            _exchange(self.fewer, self.more, over(old, change.new.raw, len(self.columns)), 1)

    # --- one net after the other ----------------------------------------------------------------

    def then(self, later: Net) -> None:
        """Make this the net of both. Raises ApplyError."""
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
        """No row of `later` changes its key, so each concerns one row here: most by replacing it."""
        stay = later.rows.keys() - later.origins.keys()
        unknown = stay - self.rows.keys()
        if unknown and (self.truncated or not unknown.isdisjoint(self.gone)):
            raise ApplyError("a row was changed that is not there")
        for key in later.gone:
            self._delete(key)
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
        # All rows that leave their places leave them before any comes to its new one.
        origins = {key: later.origins.get(key, key) for key in later.rows}
        taken = {origin: self._take(origin) for origin in origins.values() if origin is not None}
        for key in later.gone:
            self._delete(key)
        for key, row in later.rows.items():
            origin = origins[key]
            if origin is None:
                self._place(key, None, row)
            else:
                first, before = taken[origin]
                self._place(key, first, over(before, row, len(self.columns)))

    def reshape(self, columns: tuple[str, ...], key: tuple[int, ...] | None) -> None:
        """The table has other columns from here on; what a row did not have counts as not sent. Raises ApplyError."""
        identity = None if self.key is None else [self.columns[i] for i in self.key]
        if identity != (None if key is None else [columns[i] for i in key]) and len(self):
            raise ApplyError("the table's replica identity has changed")
        places = [self.columns.index(name) if name in self.columns else None for name in columns]
        had, unsent = len(self.columns), nothing(1)

        def moved(row: bytes) -> bytes:
            found = cells(row, had)
            return b"".join([unsent if place is None else found[place] for place in places])

        self.columns, self.key = columns, key
        for name, row in self.rows.items():
            self._set(name, moved(row))
        for bag in (self.more, self.fewer):
            kept = Counter[bytes]()
            for row, count in bag.items():
                kept[moved(row)] += count
            bag.clear()
            bag.update(kept)

    # --- travelling -----------------------------------------------------------------------------

    def dump(self) -> bytes:
        """As bytes that load() reads, in the same version of Python; ten times as fast as pickling rows one by one."""
        keyed = (self.rows, self.origins, self.lacking, self.gone)
        return marshal.dumps((self.columns, self.key, self.truncated, *keyed, dict(self.more), dict(self.fewer)))

    @classmethod
    def load(cls, data: bytes) -> Net:
        columns, key, truncated, rows, origins, lacking, gone, more, fewer = marshal.loads(data)
        return cls(columns, key, truncated, rows, origins, lacking, gone, Counter(more), Counter(fewer))

    # --- dividing -------------------------------------------------------------------------------

    def parts(self, number: int) -> Iterator[tuple[int, Net]]:
        """Divide by key into (0 to number - 1, net), so that the same key is in the same part of every net.

        Not for a net that is `truncated`, or has `moved` rows: those belong together.
        """
        found = [Net(self.columns, self.key) for _ in range(number)]
        for key, row in self.rows.items():
            found[crc32(key) % number].rows[key] = row
        for key in self.origins:
            found[crc32(key) % number].origins[key] = None
        for key in self.lacking:
            found[crc32(key) % number].lacking.add(key)
        for key in self.gone:
            found[crc32(key) % number].gone.add(key)
        for row, count in self.more.items():
            found[crc32(row) % number].more[row] = count
        for row, count in self.fewer.items():
            found[crc32(row) % number].fewer[row] = count
        yield from ((index, net) for index, net in enumerate(found) if len(net))


def _exchange(from_: Counter[bytes], to: Counter[bytes], row: bytes, count: int) -> None:
    """So many of a row in `to`, after those in `from_` that cancel them."""
    cancelled = min(from_[row], count) if row in from_ else 0
    if cancelled:
        from_[row] -= cancelled
        if not from_[row]:
            del from_[row]
    if count > cancelled:
        to[row] = to.get(row, 0) + count - cancelled
