"""How far we are, in the three positions a standby status update reports.

    write  everything received has been looked at up to here
    apply  committed on the target up to here, perhaps not on disk yet
    flush  on the target's disk up to here: the publisher may forget everything before it

Commits of target transactions are numbered 1, 2, 3, … as they are sent. A position of the stream is
noted together with the number of the last commit sent before it, so a keepalive, an empty transaction
or a skipped one is confirmed exactly when everything that came before it in the stream is durable
(and at once when nothing is pending). Any received position may be confirmed that way, also one in the
middle of a transaction: that transaction's commit record lies at or above it.

Follows store_flush_position(), get_flush_position() and send_feedback() in worker.c, with commit numbers
in the place of local LSNs, because a client is told of a commit but not of its position.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from subscriber.lsn import Lsn


class Positions(NamedTuple):
    """What goes into a standby status update. None of the three ever goes back."""

    write: Lsn
    flush: Lsn
    apply: Lsn


class Progress:
    def __init__(self, start: Lsn) -> None:
        """`start`: durable before this connection, from the progress row."""
        self._noted: deque[tuple[int, Lsn]] = deque()  # (commit number, position), both rising
        self._write = self._flush = self._apply = start
        self.sent = 0  # commits sent to the target
        self.committed = 0  # of those, answered
        self.durable = 0  # of those, on disk

    def note(self, position: Lsn) -> None:
        """The stream has been processed up to `position`; nothing new was sent for it."""
        if position > self._write:
            self._write = position
        if self._noted and self._noted[-1][0] == self.sent:
            if position > self._noted[-1][1]:
                self._noted[-1] = (self.sent, position)
        else:
            self._noted.append((self.sent, position))
        self._settle()

    def commit_sent(self, end_lsn: Lsn) -> int:
        """A COMMIT that makes everything up to `end_lsn` present was sent; its number."""
        self.sent += 1
        self.note(end_lsn)
        return self.sent

    def commit_done(self, number: int) -> None:
        """The target has answered commit `number`, and so all before it."""
        self.committed = number
        for sent, position in self._noted:
            if sent > number:
                break
            self._apply = max(self._apply, position)

    def made_durable(self, number: int) -> None:
        """Everything up to commit `number` is on the target's disk."""
        self.durable = max(self.durable, number)
        self._settle()

    def _settle(self) -> None:
        while self._noted and self._noted[0][0] <= self.durable:
            _, position = self._noted.popleft()
            self._flush = max(self._flush, position)
            self._apply = max(self._apply, position)

    @property
    def positions(self) -> Positions:
        return Positions(self._write, self._flush, self._apply)
