"""TransactionSnapshot: which transactions a snapshot of the publisher sees."""

from __future__ import annotations

from dataclasses import dataclass

_XIDS = 1 << 32


@dataclass(frozen=True, slots=True)
class TransactionSnapshot:
    """A `pg_snapshot`. Its transactions have 64 bits: epoch and number.

    Attributes:
        xmin: all transactions before it have ended.
        xmax: no transaction from here on has ended.
        running: the transactions between these that have not ended.
    """

    xmin: int
    xmax: int
    running: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> TransactionSnapshot:
        """Parse the text of a `pg_snapshot`, such as "10:20:10,14,15".

        Raises:
            ValueError: the text is no snapshot.
        """
        xmin, xmax, running = text.split(":")
        snapshot = cls(int(xmin), int(xmax), frozenset(map(int, filter(None, running.split(",")))))
        if not 0 < snapshot.xmin <= snapshot.xmax or not all(
            snapshot.xmin <= xid < snapshot.xmax for xid in snapshot.running
        ):
            raise ValueError(f"invalid snapshot: {text}")
        return snapshot

    def __str__(self) -> str:
        return f"{self.xmin}:{self.xmax}:{','.join(map(str, sorted(self.running)))}"

    def widen(self, xid: int) -> int:
        """Return the 64-bit number of a transaction from its lower 32 bits: the nearest one to `xmax`."""
        distance = (xid - self.xmax + _XIDS // 2) % _XIDS - _XIDS // 2
        return self.xmax + distance

    def sees(self, xid: int) -> bool:
        """Return True if the snapshot sees a committed top-level transaction, given by its lower 32 bits."""
        number = self.widen(xid)
        return number < self.xmax and number not in self.running
