"""How far the consumer has acknowledged, as one position that may be confirmed to the publisher.

Transactions are numbered 1, 2, 3, … as they are handed out. A position of the stream is noted together
with the number of the last transaction handed out before it, so it may be confirmed exactly when that one
and all before it are acknowledged: acknowledgements out of order are held to the lowest one missing.
Keepalives, empty transactions and those that were filtered out bring positions without a number of their own.
"""

from __future__ import annotations

from collections import deque

from subscriber.lsn import Lsn


class AcknowledgementTracker:
    """Everything before `passed` was handed out, and everything before `flush` was acknowledged, too."""

    __slots__ = ("_acked", "_lowest", "_opened", "_waiting", "flush", "passed")

    def __init__(self, start: Lsn = Lsn(0)) -> None:
        self.passed = self.flush = start
        self._opened = 0
        self._lowest = 0  # all up to here are acknowledged
        self._acked: set[int] = set()  # above `_lowest`
        self._waiting: deque[tuple[int, Lsn]] = deque()  # (number, position behind it), both rising

    @property
    def open(self) -> int:
        """How many transactions are handed out and not acknowledged."""
        return self._opened - self._lowest - len(self._acked)

    def handed_out(self) -> int:
        """A transaction is handed out; its number."""
        self._opened += 1
        return self._opened

    def whole(self, end: Lsn) -> int:
        """handed_out() and note() for a transaction that is there up to its end."""
        self._opened = number = self._opened + 1
        if end > self.passed:
            self.passed = end
            self._waiting.append((number, end))
        return number

    def note(self, position: Lsn) -> None:
        """Everything before `position` has been handed out, to its end."""
        if position <= self.passed:
            return
        self.passed = position
        if self._lowest == self._opened:
            self.flush = position
        elif self._waiting and self._waiting[-1][0] == self._opened:
            self._waiting[-1] = (self._opened, position)
        else:
            self._waiting.append((self._opened, position))

    def ack(self, number: int) -> bool:
        """Transaction `number` is dealt with; whether `flush` has moved. A second time changes nothing."""
        lowest, acked, waiting = self._lowest, self._acked, self._waiting
        if number <= lowest:
            return False
        if number != lowest + 1:
            acked.add(number)
            return False
        lowest = number
        while acked and lowest + 1 in acked:
            lowest += 1
            acked.discard(lowest)
        self._lowest = lowest
        moved = False
        while waiting and waiting[0][0] <= lowest:
            self.flush = waiting.popleft()[1]
            moved = True
        return moved
