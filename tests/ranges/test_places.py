"""The places that copies by ranges have in addition to those of their synchronization workers."""

from __future__ import annotations

from subscriber.catalog.worker_sessions import FIRST_RANGE_SESSION
from subscriber.worker.tablesync.places import SyncPlaces


def test_a_copy_takes_places_that_no_table_needs() -> None:
    needed = 1
    places = SyncPlaces(4, lambda: needed)
    first, second, third = (places.take() for _ in range(3))
    assert (first, second, third) == (FIRST_RANGE_SESSION, FIRST_RANGE_SESSION + 1, FIRST_RANGE_SESSION + 2)
    assert places.take() is None
    assert places.suffice()
    needed = 2
    assert not places.suffice()
    assert second is not None
    places.give_back(second)
    assert places.suffice()
    assert places.take() is None
    needed = 1
    assert places.take() == second
    assert places.taken == 3
