"""Progress of a stream: the three positions that a standby status update reports.

    write  all received messages before it have been processed
    apply  all transactions before it are committed on the target, perhaps not yet on disk
    flush  all transactions before it are on the target's disk: the publisher may discard its WAL before it

Commits of target transactions are numbered 1, 2, 3, … as they are sent. A position of the stream is
stored together with the number of the last commit sent before it. So a keepalive, an empty transaction
or a skipped one is confirmed exactly when everything before it in the stream is durable
(and immediately if no commit is pending). Any received position may be confirmed that way, also one in the
middle of a transaction: that transaction's commit record lies at or above it.

Source: store_flush_position(), get_flush_position() and send_feedback() in worker.c, with commit numbers
in place of local LSNs, because a client receives the result of a commit but not its position.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from subscriber.lsn import Lsn


@dataclass(frozen=True, slots=True)
class ProgressClaim:
    """A worker's progress record on the target, which only this worker can move from now on."""

    subid: int
    generation: int  # of the settings that the worker has; with others it can commit nothing
    record: int  # OID of the large object
    fence: bytes  # to be shown with every change of the record
    position: Lsn  # everything that the publisher committed before it is on the target, durably
    confirmed: Lsn | None = None  # highest position confirmed to the publisher; None: unknown


class Positions(NamedTuple):
    """The positions of a standby status update. No position ever decreases."""

    write: Lsn
    flush: Lsn
    apply: Lsn


Waiting = deque[tuple[int, Lsn]]  # (commit number, position), the numbers rising


class Progress:
    """The positions of one stream.

    Attributes:
        position: the end of the processed part of the stream. note() stores it in the reported positions.
    """

    def __init__(self, start: Lsn, on_advance: Callable[[Positions], None] | None = None) -> None:
        """Create the positions.

        Args:
            start: durable before this connection, from the progress row.
            on_advance: called when positions may have advanced. None: nobody asks.
        """
        self.position = start
        self._uncommitted: Waiting = deque()
        self._volatile: Waiting = deque()
        self._unrecorded: Waiting = deque()
        self._write = self._flush = self._apply = start
        self.recorded = start  # the progress row on the target's disk says at least this
        self.sent = 0  # commits sent to the target
        self.committed = 0  # acknowledged commits
        self.durable = 0  # commits on disk
        self._on_advance = on_advance

    def move_on(self, position: Lsn) -> None:
        """The stream has been processed up to `position`."""
        if position > self.position:
            self.position = position

    def note(self, position: Lsn) -> None:
        """The stream has been processed up to `position`; nothing new was sent for it."""
        if position > self._write:
            self._write = position
        _append(self._uncommitted, self.sent, position)
        _append(self._volatile, self.sent, position)
        self._settle()

    def commit_sent(self, end_lsn: Lsn, commits: int = 1) -> int:
        """`commits` that together make everything up to `end_lsn` present were sent; the number of the last.

        Of several the position is reached with the last; until then the one from before counts.
        """
        self.sent += commits
        _append(self._unrecorded, self.sent, end_lsn)
        self.note(end_lsn)
        return self.sent

    def commit_done(self, number: int) -> None:
        """The target has answered commit `number`, and so all before it."""
        self.committed = max(self.committed, number)
        self._settle()

    def made_durable(self, number: int) -> None:
        """Everything up to commit `number` is on the target's disk."""
        self.durable = max(self.durable, number)
        self.committed = max(self.committed, number)
        self._settle()

    def _settle(self) -> None:
        self._apply = _reached(self._uncommitted, self.committed, self._apply)
        self._flush = _reached(self._volatile, self.durable, self._flush)
        self.recorded = _reached(self._unrecorded, self.durable, self.recorded)
        if self._on_advance is not None:
            self._on_advance(self.positions)

    @property
    def positions(self) -> Positions:
        return Positions(self._write, self._flush, self._apply)


def _append(waiting: Waiting, number: int, position: Lsn) -> None:
    if not waiting or waiting[-1][0] != number:
        waiting.append((number, position))
    elif position > waiting[-1][1]:
        waiting[-1] = (number, position)


def _reached(waiting: Waiting, number: int, position: Lsn) -> Lsn:
    """Remove the entries for commits up to `number`. Returns the highest position of these and `position`."""
    while waiting and waiting[0][0] <= number:
        position = max(position, waiting.popleft()[1])
    return position
