"""TableRanges: the ranges of one table that is being copied, and the decision for each change of the table."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from subscriber.lsn import Lsn
from subscriber.ranges.keys import Key, RangeKey
from subscriber.ranges.snapshot import TransactionSnapshot

_MAX_FOUND = 100_000  # keys whose range the publisher has found


class RangeState(Enum):
    """The state of a range. `READING` returns to `UNREAD` if the copy of the range fails."""

    UNREAD = auto()
    READING = auto()  # in a snapshot that is known, but its rows are not committed on the target
    COMMITTING = auto()  # the COMMIT is sent
    COPIED = auto()


class Decision(Enum):
    """The decision for one key of a change."""

    APPLY = auto()
    SKIP = auto()
    WAIT = auto()  # until the range is copied; then decide again


class Effect(Enum):
    """The part of an UPDATE that is applied."""

    UPDATE = auto()
    DELETE = auto()  # of the old key
    INSERT = auto()  # of the new key
    NOTHING = auto()


@dataclass(frozen=True, slots=True)
class RangeSnapshot:
    """The snapshot of a range, and a WAL position behind the commits of all transactions that it sees."""

    snapshot: TransactionSnapshot
    lsn: Lsn

    def contains(self, xid: int, finish_lsn: Lsn) -> bool:
        """Return True if the rows of the range contain a transaction of the stream."""
        return finish_lsn < self.lsn and self.snapshot.sees(xid)


@dataclass(slots=True)
class KeyRange:
    """The rows with low <= key < high, or with key = low if `single`.

    Attributes:
        low: the lowest key. None: there is no limit.
        high: the first key behind the range. None: there is no limit. Not used if `single`.
        single: the range is one key.
        state: the state of its copy.
        read_in: its snapshot, from READING on.
        skipped: transactions (32 bits) whose changes were skipped and that its snapshot has to see.
        spoiled: a change was skipped that the snapshot does not see, so the range must be read again.
        row: the number of its row in the catalog. None: it has none.
        taken: a session is going to read the range, or reads it.
    """

    low: Key | None = None
    high: Key | None = None
    single: bool = False
    state: RangeState = RangeState.UNREAD
    read_in: RangeSnapshot | None = None
    skipped: set[int] = field(default_factory=set)
    spoiled: bool = False
    row: int | None = None
    taken: bool = False

    def condition(self, key: RangeKey, *, on_target: bool = False) -> str:
        """Return the condition of the range in SQL, for the publisher's table or for the target's."""
        if self.single and self.low is not None:
            return key.comparison("=", self.low, on_target=on_target)
        return key.condition(self.low, self.high, on_target=on_target)

    def contains(self, xid: int, finish_lsn: Lsn) -> bool:
        """Return True if the range has a snapshot that contains a transaction of the stream."""
        return self.read_in is not None and self.read_in.contains(xid, finish_lsn)

    def decide(self, xid: int, finish_lsn: Lsn) -> Decision:
        """Return the decision for a change. A skipped change is recorded if the range is not read."""
        if self.contains(xid, finish_lsn):
            return Decision.SKIP
        if self.state is RangeState.COPIED:
            return Decision.APPLY
        if self.is_waited_for(xid, finish_lsn):
            return Decision.WAIT
        self.skipped.add(xid)
        return Decision.SKIP

    def is_waited_for(self, xid: int, finish_lsn: Lsn) -> bool:
        """Return True if a change cannot be decided before the range is copied. Nothing is recorded."""
        is_read = self.state in (RangeState.READING, RangeState.COMMITTING)
        return is_read and not self.spoiled and not self.contains(xid, finish_lsn)

    def is_settled(self, position: Lsn) -> bool:
        """Return True if the range is copied, and contains no transaction that finishes at `position` or later."""
        return self.state is RangeState.COPIED and self.read_in is not None and self.read_in.lsn <= position

    def spoil(self) -> bool:
        """Give up waiting for the range: it is going to be read again. Returns False if its COMMIT is sent."""
        if self.state is RangeState.COMMITTING:
            return False
        self.spoiled = self.state is RangeState.READING
        return True

    def begin(self, read_in: RangeSnapshot) -> bool:
        """Start to read the range. Returns False if the snapshot does not see a transaction that was skipped."""
        unseen = {xid for xid in self.skipped if not read_in.snapshot.sees(xid)}
        if unseen:
            return False
        self.skipped.clear()
        self.state, self.read_in, self.spoiled = RangeState.READING, read_in, False
        return True

    def take(self) -> None:
        """A session is going to read the range."""
        self.taken = True

    def release(self) -> None:
        """No session reads the range any more."""
        self.taken = False

    def end(self) -> None:
        """The COMMIT of the range's rows is acknowledged."""
        self.state = RangeState.COPIED

    def accept(self) -> bool:
        """Announce the COMMIT of the range's rows. Returns False if the range has to be read again."""
        if self.spoiled:
            return False
        self.state = RangeState.COMMITTING
        return True

    def reset(self) -> None:
        """Return to UNREAD, because the rows have been rolled back."""
        self.state, self.read_in, self.spoiled = RangeState.UNREAD, None, False


def effect(old: Decision, new: Decision) -> Effect:
    """Return the part of an UPDATE that is applied, from the decisions for its old and its new key."""
    if old is Decision.APPLY:
        return Effect.UPDATE if new is Decision.APPLY else Effect.DELETE
    return Effect.INSERT if new is Decision.APPLY else Effect.NOTHING


@dataclass(frozen=True, slots=True)
class Truncation:
    """The effect of a TRUNCATE.

    Attributes:
        whole: no range contains the TRUNCATE, so it is executed.
        conditions: SQL conditions of the rows to delete otherwise.
    """

    whole: bool
    conditions: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """True if no row is deleted."""
        return not self.whole and not self.conditions


class TableRanges:
    """The ranges of one table, which together contain every key.

    Attributes:
        key: the columns of the ranges.
        singles: ranges of one key. They take precedence over the others.
        timeline: the publisher's timeline, whose transactions the snapshots name.
        unsettled: the apply worker has sent statements that affect more than the keys of copied ranges. No range may
            be read until their transaction has committed.
        awaited: the copy waits until the apply worker has applied all transactions that it has received.
        settled: a position before which the apply worker has applied all transactions.
    """

    def __init__(self, key: RangeKey, timeline: int = 1) -> None:
        """Create the ranges of a table of which nothing is copied."""
        self.key = key
        self.singles: dict[Key, KeyRange] = {}
        self.timeline = timeline
        self.unsettled = False
        self.awaited = False
        self.settled = Lsn(0)
        self._ranges = [KeyRange()]
        self._lows: list[Key] = []  # the low keys of all ranges but the first
        # Ranges that the publisher has found for keys, with their upper limits at that time.
        self._found: dict[Key, tuple[KeyRange, Key | None]] = {}

    def __iter__(self) -> Iterator[KeyRange]:
        yield from self._ranges
        yield from self.singles.values()

    def find(self, key: Key) -> KeyRange:
        """Return the range of a key."""
        if (single := self.singles.get(key)) is not None:
            return single
        if not self.key.is_compared_by_publisher or not self._lows:
            return self._ranges[bisect_right(self._lows, key)]
        return self._found[key][0]

    def lows_to_compare(self, key: Key, finish_lsn: Lsn) -> tuple[Key, ...]:
        """Return the limits with which the publisher has to compare a key before find() knows its range.

        Args:
            key: the key.
            finish_lsn: the position of its change. No change before it will be decided any more.

        Returns:
            No limits if the range is known.
        """
        if not self.key.is_compared_by_publisher or key in self.singles:
            return ()
        part, high = self._found.get(key, (None, None))
        if part is not None and part.high == high and any(part is table_range for table_range in self._ranges):
            return ()
        self._merge(finish_lsn)
        return tuple(self._lows)

    def found(self, key: Key, lows: tuple[Key, ...], place: int) -> None:
        """Record the answer of the publisher: `place` of the keys `lows` are not greater than `key`."""
        if lows == tuple(self._lows):
            if len(self._found) >= _MAX_FOUND:
                self._found.clear()
            part = self._ranges[place]
            self._found[key] = part, part.high

    def _merge(self, position: Lsn) -> None:
        """Merge adjacent ranges that contain no transaction from `position` on, so that fewer limits are compared."""
        merged: list[KeyRange] = []
        for following in self._ranges:
            before = merged[-1] if merged else None
            if before is not None and before.is_settled(position) and following.is_settled(position):
                assert before.read_in is not None
                assert following.read_in is not None
                before.read_in = max(before.read_in, following.read_in, key=lambda read_in: read_in.lsn)
                before.high = following.high
            else:
                merged.append(following)
        self._ranges = merged
        self._lows = [table_range.low for table_range in merged[1:] if table_range.low is not None]

    def restore(self, copied: KeyRange) -> None:
        """Add a range that the catalog has. Ranges that only the publisher can compare are added from the lowest on.

        Raises:
            ValueError: the range before it is missing.
        """
        if copied.single:
            assert copied.low is not None
            self.singles[copied.low] = copied
            return
        if copied.low is None or self.key.is_compared_by_publisher:
            rest = self._ranges[-1]
            if rest.low != copied.low:
                raise ValueError("the range before it is missing")
        else:
            rest = self.find(copied.low)
        if copied.low is not None and rest.low != copied.low:
            rest = self.split(rest, copied.low)
        if copied.high is not None and copied.high != rest.high:
            self.split(rest, copied.high)
        copied.skipped = rest.skipped
        self._ranges[self._ranges.index(rest)] = copied

    def split(self, part: KeyRange, at: Key) -> KeyRange:
        """Divide an unread range. Returns the upper part, which begins at the key `at`."""
        place = self._ranges.index(part)
        upper = KeyRange(at, part.high, skipped=set(part.skipped))
        part.high = at
        self._ranges.insert(place + 1, upper)
        self._lows.insert(place, at)
        return upper

    def next_unread(self) -> KeyRange | None:
        """Return the next range to copy. None: all are copied, or a session copies them."""
        return next(
            (table_range for table_range in self if table_range.state is RangeState.UNREAD and not table_range.taken),
            None,
        )

    @property
    def is_taken(self) -> bool:
        """True if a session is copying a range."""
        return any(table_range.taken for table_range in self)

    def forget_seen(self, snapshot: TransactionSnapshot) -> None:
        """Forget skipped transactions that every later snapshot sees, because `snapshot` sees them.

        A session that has taken a range may have an earlier snapshot for it.
        """
        for table_range in self:
            if table_range.state is RangeState.UNREAD and not table_range.taken:
                table_range.skipped = {xid for xid in table_range.skipped if not snapshot.sees(xid)}

    def add_single(self, key: Key, xid: int) -> KeyRange:
        """Make one key a range, whose snapshot has to see the transaction `xid`. Its row is not on the target."""
        single = self.singles[key] = KeyRange(key, single=True, skipped={xid})
        self.unsettled = True
        return single

    def waited_for(self, xid: int, finish_lsn: Lsn, keys: Iterable[Key] | None = None) -> KeyRange | None:
        """Return a range that has to be copied before a change can be decided. None: there is none.

        Args:
            xid: the transaction.
            finish_lsn: its position.
            keys: the keys of the change. None: all, because it is a TRUNCATE.
        """
        parts = self if keys is None else map(self.find, keys)
        return next((table_range for table_range in parts if table_range.is_waited_for(xid, finish_lsn)), None)

    def truncation(self, xid: int, finish_lsn: Lsn) -> Truncation:
        """Return the effect of a TRUNCATE that waits for no range, and record it for the ranges that are not read.

        Raises:
            ValueError: some ranges contain the TRUNCATE, and only the publisher can compare the keys of the others.
        """
        decisions = [(table_range, table_range.decide(xid, finish_lsn)) for table_range in self]
        containing = [table_range for table_range in self if table_range.contains(xid, finish_lsn)]
        if not containing:
            self.unsettled = True
            return Truncation(whole=True)
        kept = [table_range.condition(self.key, on_target=True) for table_range in containing if table_range.single]
        emptied = [table_range for table_range, decision in decisions if decision is Decision.APPLY]
        if emptied and self.key.is_compared_by_publisher:
            raise ValueError("the target cannot compare the keys of the ranges that do not contain a TRUNCATE")
        return Truncation(
            whole=False,
            conditions=tuple(
                " AND ".join(
                    [table_range.condition(self.key, on_target=True), *(f"NOT ({condition})" for condition in kept)]
                )
                for table_range in emptied
            ),
        )

    def succeed(self, former: TableRanges) -> None:
        """Take over the knowledge about the apply worker from the ranges of an earlier run of the copy."""
        self.unsettled, self.settled = former.unsettled, former.settled

    def settle(self, position: Lsn) -> None:
        """Record that the apply worker has applied all transactions before `position`."""
        self.unsettled = self.awaited = False
        self.settled = position

    @property
    def end(self) -> Lsn | None:
        """The position from which on all changes of the table are applied. None: a range is not copied."""
        if any(table_range.state is not RangeState.COPIED for table_range in self):
            return None
        return max((table_range.read_in.lsn for table_range in self if table_range.read_in is not None), default=Lsn(0))
