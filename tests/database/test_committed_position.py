"""The position of the last record, where a walsender reaches the start of the next page."""

from __future__ import annotations

import pytest

from subscriber.lsn import Lsn
from subscriber.status.committed_position import end_of_record

PAGE, SEGMENT = 8192, 16 * 1024 * 1024


@pytest.mark.parametrize(
    ("position", "end"),
    [
        (3 * PAGE + 24, 3 * PAGE),
        (3 * PAGE + 32, 3 * PAGE + 32),  # a record continues there, and ends
        (3 * PAGE + 40, 3 * PAGE + 40),
        (3 * PAGE, 3 * PAGE),
        (2 * SEGMENT + 40, 2 * SEGMENT),
        (2 * SEGMENT + 48, 2 * SEGMENT + 48),
        (2 * SEGMENT + 5000, 2 * SEGMENT + 5000),
    ],
)
def test_the_end_of_the_last_record(position: int, end: int) -> None:
    assert end_of_record(Lsn(position), PAGE, SEGMENT) == end
