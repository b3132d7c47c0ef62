"""SyncPlaces: the sessions that copy tables of one subscription, at most `max_sync_workers`.

A synchronization worker has one place. The copy of a table by ranges takes more if no other table needs them, and gives
them back when one does. Each of these has a number for its place and its origin on the target
(catalog/worker_sessions.py).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from subscriber.catalog.worker_sessions import FIRST_RANGE_SESSION


class SyncPlaces:
    """The places of one subscription."""

    def __init__(self, limit: int, needed: Callable[[], int]) -> None:
        """Create the places.

        Args:
            limit: the number of places.
            needed: returns how many are needed by synchronization workers that run or are going to be started.
        """
        self._limit = limit
        self._needed = needed
        self._numbers: set[int] = set()

    @property
    def taken(self) -> int:
        """The number of places that copies have in addition to those of their workers."""
        return len(self._numbers)

    def suffice(self) -> bool:
        """Return False if a table needs a place that a copy has in addition."""
        return self._needed() + self.taken <= self._limit

    def take(self) -> int | None:
        """Take a place for another session of a copy. Returns its number; None: no place is free."""
        if self._needed() + self.taken >= self._limit:
            return None
        number = next(number for number in count(FIRST_RANGE_SESSION) if number not in self._numbers)
        self._numbers.add(number)
        return number

    def give_back(self, number: int) -> None:
        """Give a place back that take() has returned."""
        self._numbers.discard(number)
