"""Histories of timelines: where two of them part, and what follows for changes that were applied."""

from __future__ import annotations

import pytest

from subscriber.errors import ConnectionLost, PublisherReplaced
from subscriber.lsn import Lsn
from subscriber.publisher.timelines import check_history
from subscriber.timeline_history import TimelineHistory


def history(timeline: int, text: str = "") -> TimelineHistory:
    return TimelineHistory.parse(timeline, text)


@pytest.mark.parametrize(
    ("one", "two", "fork"),
    [
        (history(1), history(1), None),
        (history(3, "1:0/10 2:0/20"), history(3, "1:0/10 2:0/20"), None),
        (history(2, "1:0/10"), history(1), 0x10),
        (history(3, "1:0/10 2:0/20"), history(2, "1:0/10"), 0x20),
        (history(3, "1:0/10 2:0/20"), history(1), 0x10),
        # Two standbys were promoted to the same number.
        (history(2, "1:0/10"), history(2, "1:0/18"), 0x10),
        (history(3, "1:0/10 2:0/20"), history(2, "1:0/18"), 0x10),
        # Timeline 3 continues 1 here, and 2 there.
        (history(3, "1:0/30"), history(3, "1:0/10 2:0/20"), 0x10),
        (history(4, "1:0/10 2:0/20"), history(3, "1:0/10 2:0/28"), 0x20),
        (history(4, "1:0/10 3:0/20"), history(4, "1:0/10 2:0/20"), 0x10),
        (history(5, "2:0/10"), history(5, "1:0/10"), 0),
    ],
)
def test_two_histories_part_at_their_fork(one: TimelineHistory, two: TimelineHistory, fork: int | None) -> None:
    assert one.fork(two) == fork
    assert two.fork(one) == fork
    assert history(one.timeline, str(one)) == one


def test_the_history_of_an_ancestor_ends_at_the_fork() -> None:
    ancestor = history(4, "1:0/10 2:0/20")
    assert ancestor.until(4) is ancestor
    assert ancestor.until(2) == history(2, "1:0/10")
    assert ancestor.until(1) == history(1)
    assert ancestor.until(3) is None


def check(here: TimelineHistory, known: TimelineHistory | None, position: int, standby: bool = False) -> Lsn | None:
    return check_history(here, known, Lsn(position), in_recovery=standby, hint="the hint")


def test_a_publisher_without_applied_changes_is_refused() -> None:
    new, old = history(2, "1:0/10"), history(1)
    assert check(new, None, 0x99) is None
    assert check(new, new, 0x99) is None
    assert check(new, old, 0x10) == Lsn(0x10)
    with pytest.raises(PublisherReplaced, match="without all changes that were applied") as raised:
        check(new, old, 0x11)
    assert raised.value.detail == (
        "Changes up to 0/11 of timeline 1 were applied. The publisher, on timeline 2, has none of them after 0/10."
    )
    assert raised.value.hint == "The hint"
    with pytest.raises(PublisherReplaced, match="an earlier timeline"):
        check(old, new, 0)
    with pytest.raises(ConnectionLost):
        check(old, new, 0, standby=True)
    # The number is the same, the server is not.
    with pytest.raises(PublisherReplaced, match="without all changes that were applied"):
        check(history(2, "1:0/18"), new, 0x11)
