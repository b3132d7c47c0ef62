"""AcknowledgementTracker: turns acknowledgements into the position that can be confirmed to the publisher.

Delivered transactions are numbered 1, 2, 3, … Each position of the stream is recorded with the number of the last
transaction that was delivered before it. The position can be confirmed when this transaction and all earlier ones are
acknowledged. So the lowest missing acknowledgement holds the position back.

Positions without a number of their own are those of keepalives, of empty transactions and of filtered ones.
"""

from __future__ import annotations

from collections import deque

from subscriber.lsn import Lsn


class AcknowledgementTracker:
    """The positions of one stream.

    Attributes:
        passed: all transactions before this position have been delivered.
        flush: all transactions before this position have been acknowledged.
    """

    __slots__ = ("_acked", "_lowest", "_opened", "_waiting", "flush", "passed")

    def __init__(self, start: Lsn = Lsn(0)) -> None:
        self.passed = self.flush = start
        self._opened = 0
        self._lowest = 0  # all numbers up to this one are acknowledged
        self._acked: set[int] = set()  # acknowledged numbers above `_lowest`
        self._waiting: deque[tuple[int, Lsn]] = deque()  # (number, position after it), both ascending

    @property
    def open(self) -> int:
        """The number of transactions that have been delivered and not acknowledged."""
        return self._opened - self._lowest - len(self._acked)

    def handed_out(self) -> int:
        """Record the delivery of a transaction and return its number."""
        self._opened += 1
        return self._opened

    def whole(self, end: Lsn) -> int:
        """Record the delivery of a transaction that has arrived to its end, and return its number.

        This is handed_out() and note() in one call.
        """
        self._opened = number = self._opened + 1
        if end > self.passed:
            self.passed = end
            self._waiting.append((number, end))
        return number

    def note(self, position: Lsn) -> None:
        """Record that all transactions before `position` have been delivered to their end."""
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
        """Acknowledge transaction `number`. A second call for the same number does nothing.

        Returns:
            True if `flush` has moved.
        """
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
