"""The hours in which ranges are copied."""

from __future__ import annotations

import pytest

from subscriber.durations import DailyWindow
from subscriber.settings import parse_value


@pytest.mark.parametrize(
    ("window", "hour", "wait"),
    [
        ("22:00-06:00", 23, 0),
        ("22:00-06:00", 5, 0),
        ("22:00-06:00", 6, 16),
        ("1:00-02:30", 0.5, 0.5),
        ("7:00-7:00", 1, 0),
    ],
)
def test_a_window_of_the_day(window: str, hour: float, wait: float) -> None:
    assert DailyWindow.parse(window).seconds_until_open(hour * 3600) == wait * 3600
    assert parse_value("range_window", window) == DailyWindow.parse(window)


@pytest.mark.parametrize("window", ["22:00", "24:00-06:00", "22:60-06:00", "22-6", ""])
def test_no_window_of_the_day(window: str) -> None:
    with pytest.raises(ValueError, match="two times of the day are required"):
        parse_value("range_window", window)
