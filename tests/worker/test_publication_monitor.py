"""What the launcher stores about the publications of a table, and when changes count as missed."""

from __future__ import annotations

import pytest

from subscriber.catalog.store.memberships import MembershipChange, TableMembership
from subscriber.errors import ProtocolError
from subscriber.publisher.memberships import PublishedTables
from subscriber.worker.supervision.publication_monitor import find_changes

HERE = ("public", "t")
ELSEWHERE = ("public", "moved")


def published(**entries: str) -> PublishedTables:
    return PublishedTables({("public", name): frozenset(text.split()) for name, text in entries.items()})


def table(stored: str | None) -> TableMembership:
    return TableMembership(7, HERE, HERE, stored, None)


@pytest.mark.parametrize(
    ("stored", "now", "change"),
    [
        (None, published(t="r1"), MembershipChange(7, None, "9 r1", True, False)),
        (None, published(), MembershipChange(7, None, "9", False, True)),
        ("9 r1", published(t="r1"), None),
        ("9 r1", published(t="p2 r1"), MembershipChange(7, "9 r1", "9 p2 r1", True, False)),
        ("9 p2 r1", published(t="p2"), MembershipChange(7, "9 p2 r1", "9 p2", True, False)),
        ("9 r1", published(), MembershipChange(7, "9 r1", "9", False, True)),
        ("9 r1", published(t="r3"), MembershipChange(7, "9 r1", "9 r3", True, True)),  # removed and added again
        ("9", published(t="r3"), MembershipChange(7, "9", "9 r3", True, False)),  # missed since before
        ("9", published(), None),
        # Tables that exchange their names keep their entries.
        ("9 r1", published(t="r2", moved="r1"), MembershipChange(7, "9 r1", "9 r2", True, False)),
        ("9 r1", published(moved="r1"), MembershipChange(7, "9 r1", "9", False, True)),
        # Another server has other OIDs.
        ("8 r1", published(t="r3"), MembershipChange(7, "8 r1", "9 r3", True, False)),
        ("8 r1", published(), MembershipChange(7, "8 r1", "9", False, True)),
    ],
)
def test_changes_of_a_publication_are_found(
    stored: str | None, now: PublishedTables, change: MembershipChange | None
) -> None:
    assert find_changes([table(stored)], now, "9") == ([] if change is None else [change])


def test_a_table_with_hooks_is_found_by_its_name_on_the_publisher() -> None:
    renamed = TableMembership(7, HERE, ELSEWHERE, "9 r1", None)
    assert find_changes([renamed], published(moved="r1"), "9") == []


def test_a_system_identifier_that_is_malformed() -> None:
    with pytest.raises(ProtocolError):
        find_changes([table(None)], published(t="r1"), "1 r1")
