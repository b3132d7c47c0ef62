"""The part of `subscriber status` about tables whose changes do not arrive or cannot be applied. No I/O here.

published    in the subscription    on the target
yes          yes                    lost: the name belongs to another table, or to none
yes          no                     not subscribed: REFRESH PUBLICATION adds it
no           yes                    unpublished: no change arrives
again        yes                    missed: the changes in between did not arrive
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC
from typing import Any

from subscriber.catalog.store.memberships import Missed, TableMembership
from subscriber.catalog.table_names import LostTable
from subscriber.display import shell_word, sql_identifier, sql_name
from subscriber.publisher.memberships import PublishedTables
from subscriber.publisher.publications import missing_remedy
from subscriber.remedy import Remedy
from subscriber.subscription import Subscription, TwoPhaseState

NAMES_SHOWN = 10  # of published tables that are not subscribed; JSON has all


@dataclass(frozen=True, slots=True)
class UnpublishedTable:
    """A table of the subscription that is not published, or was not for a time.

    Attributes:
        name: schema and name on the target.
        source: schema and name on the publisher.
        published: whether it is published now.
        exists: whether the publisher has a table of the name.
        missed: since when changes are missing. None: the launcher has not noticed it yet.
    """

    name: tuple[str, str]
    source: tuple[str, str]
    published: bool
    exists: bool
    missed: Missed | None


@dataclass(frozen=True, slots=True)
class Absent:
    """Published tables that have no table or no row in the subscription, and tables of it that are not published."""

    lost: tuple[LostTable, ...] = ()  # a change of these tables is an error
    not_subscribed: tuple[str, ...] = ()  # schema.table; their changes are not applied
    unpublished: tuple[UnpublishedTable, ...] = ()  # by name
    missing_publications: tuple[str, ...] = ()
    other_publications: tuple[str, ...] = ()  # all of the publisher, if one is missing


def find(
    published: PublishedTables | None, memberships: Sequence[TableMembership], lost: Sequence[LostTable]
) -> Absent:
    """Compare the publications with the subscription's tables.

    Args:
        published: the publications' tables; None if the publisher does not answer.
        memberships: the tables of the subscription, as the launcher has last seen them on the publisher.
        lost: tables whose stored name leads to another table, or to none.
    """
    if published is None:
        unpublished = tuple(
            UnpublishedTable(
                membership.name, membership.source, membership.missed.until is not None, True, membership.missed
            )
            for membership in memberships
            if membership.missed is not None
        )
        return Absent(tuple(lost), unpublished=unpublished)
    sources = {membership.relid: membership.source for membership in memberships}
    names = {table: sources.get(table.relid, (table.namespace, table.name)) for table in lost}
    missing = sorted(published.tables.keys() - set(sources.values()) - set(names.values()))
    return Absent(
        tuple(table for table in lost if names[table] in published.tables),
        tuple(f"{schema}.{name}" for schema, name in missing),
        tuple(
            UnpublishedTable(
                membership.name,
                membership.source,
                membership.source in published.tables,
                membership.source not in published.dropped,
                membership.missed,
            )
            for membership in memberships
            if membership.source not in published.tables or membership.missed is not None
        ),
        published.missing_publications,
        published.other_publications,
    )


def find_problems(absent: Absent, subscription: Subscription) -> Iterator[tuple[str, Remedy]]:
    """Yield the message and the remedy of each problem: missing publications, and tables whose changes are missing."""
    gone = [table for table in absent.unpublished if not table.published and not table.exists]
    hidden = [table for table in absent.unpublished if not table.published and table.exists]
    back = [table for table in absent.unpublished if table.published]
    refresh = refresh_remedy(subscription.name)
    publish = _publish(absent, hidden, subscription) if hidden else None
    for name in absent.missing_publications:
        remedy = missing_remedy(name, absent.other_publications)
        yield (
            f'publication "{name}" does not exist on the publisher',
            remedy
            if publish is None
            else Remedy("on the publisher", publish, then=synchronize_remedy(subscription, hidden)),
        )
    if hidden:
        yield (
            f"{_are(hidden)} not published: changes{_since(hidden)} are not replicated",
            Remedy(
                "on the publisher",
                publish,
                then=synchronize_remedy(subscription, hidden),
                alternative=Remedy("if its changes are not wanted any more, on the target", refresh.command),
            ),
        )
    if gone:
        message = f"{_are(gone)} not on the publisher any more: changes{_since(gone)} are not replicated"
        yield message, Remedy("remove the table from the subscription, on the target", refresh.command)
    if back:
        untils = [table.missed.until for table in back if table.missed is not None and table.missed.until is not None]
        until = f" and before {max(untils)}" if untils else ""
        message = f"{_are(back, 'was', 'were')} not published for a time: changes{_since(back)}{until} may be missing"
        yield message, synchronize_remedy(subscription, back)


def _are(tables: Sequence[UnpublishedTable], one: str = "is", many: str = "are") -> str:
    names = names_of([table.source for table in tables])
    return f"table {names} {one}" if len(tables) == 1 else f"{len(tables):,} tables ({names}) {many}"


def _since(tables: Sequence[UnpublishedTable]) -> str:
    missed = [table.missed for table in tables if table.missed is not None]
    if not missed:
        return ""
    first = min(missed, key=lambda one: one.since)
    return f" since {first.since} (noticed {first.at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC)"


def _publish(absent: Absent, tables: Sequence[UnpublishedTable], subscription: Subscription) -> str:
    """Return the statement that publishes tables. It adds them to a publication of the subscription, or creates one."""
    names = ", ".join(sql_name(*table.source) for table in tables)
    existing = [name for name in subscription.publications if name not in absent.missing_publications]
    if existing:
        return f"ALTER PUBLICATION {sql_identifier(existing[0])} ADD TABLE {names};"
    return f"CREATE PUBLICATION {sql_identifier(subscription.publications[0])} FOR TABLE {names};"


def synchronize_remedy(
    subscription: Subscription, tables: Sequence[UnpublishedTable] | Sequence[TableMembership]
) -> Remedy:
    """Return the command that makes tables equal to the publisher's again."""
    name = shell_word(subscription.name)
    if subscription.two_phase is TwoPhaseState.ENABLED:  # which excludes REFRESH TABLE
        words = "".join(f" {shell_word('.'.join(table.source))}" for table in tables)
        return Remedy("repair the rows that differ", f"subscriber repair {name}{words}")
    words = "".join(f" {shell_word('.'.join(table.name))}" for table in tables)
    return Remedy("repair the rows that differ", f"subscriber resync {name}{words}")


def names_of(tables: Sequence[tuple[str, str]]) -> str:
    """Return the first names of tables, and the number of the others."""
    more = f" and {len(tables) - NAMES_SHOWN:,} more" if len(tables) > NAMES_SHOWN else ""
    return ", ".join(".".join(name) for name in tables[:NAMES_SHOWN]) + more


def describe(absent: Absent, subscription: str) -> list[tuple[str, str]]:
    """Return (label, text) of each line."""
    lines = []
    for table in absent.lost:
        error = table.error()
        lines += [("lost table", error.message), ("hint", error.hint or "")]
    if names := absent.not_subscribed:
        more = f" and {len(names) - NAMES_SHOWN:,} more" if len(names) > NAMES_SHOWN else ""
        lines.append(("not subscribed", ", ".join(names[:NAMES_SHOWN]) + more))
        lines.append(("hint", str(refresh_remedy(subscription))))
    return lines


def refresh_remedy(subscription: str) -> Remedy:
    """Return the statement that adds published tables to a subscription."""
    return Remedy(command=f"ALTER SUBSCRIPTION {sql_identifier(subscription)} REFRESH PUBLICATION;")


def as_json(absent: Absent) -> dict[str, Any]:
    """Return the tables as a JSON value."""
    return {
        "lost": [{"table": table.label, "what": table.what} for table in absent.lost],
        "not_subscribed": list(absent.not_subscribed),
        "missing_publications": list(absent.missing_publications),
        "unpublished": [
            {
                "table": ".".join(gone.name),
                "published": gone.published,
                "exists": gone.exists,
                "since_lsn": None if gone.missed is None else str(gone.missed.since),
                "until_lsn": None if gone.missed is None or gone.missed.until is None else str(gone.missed.until),
                "noticed": None if gone.missed is None else gone.missed.at.isoformat(timespec="milliseconds"),
            }
            for gone in absent.unpublished
        ],
    }
