"""Statements on columns of `subscriber.subscription_rel`: what publishes a table, and what it is known to lack.

A table may lack changes because it was not published for a time, and it may differ in the last comparison. Both remain
until a comparison finds the table equal, or until it is synchronized again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import asyncpg

from subscriber.lsn import Lsn, optional_lsn

LOAD = """
SELECT r.srrelid, r.srnspname::text AS nspname, r.srrelname::text AS relname, r.srsource, r.srmemberships,
       r.srmissedlsn::text AS srmissedlsn, r.srmisseduntil::text AS srmisseduntil, r.srmissedat
  FROM subscriber.subscription_rel r WHERE r.srsubid = $1 ORDER BY r.srnspname, r.srrelname
"""
# A table that is synchronized again meanwhile has no memberships, and stays without.
SAVE = """
UPDATE subscriber.subscription_rel r
   SET srmemberships = n.now,
       srmissedlsn = CASE WHEN n.missed THEN coalesce(r.srmissedlsn, $6::text::pg_lsn) ELSE r.srmissedlsn END,
       srmissedat = CASE WHEN n.missed THEN coalesce(r.srmissedat, clock_timestamp()) ELSE r.srmissedat END,
       srmisseduntil = CASE WHEN n.published AND (n.missed OR r.srmissedlsn IS NOT NULL) THEN $7::text::pg_lsn END
  FROM unnest($2::oid[], $3::text[], $4::text[], $5::boolean[], $8::boolean[])
       AS n (relid, before, now, missed, published)
 WHERE r.srsubid = $1 AND r.srrelid = n.relid AND r.srmemberships IS NOT DISTINCT FROM n.before
"""
FORGET_VERIFICATION = "DELETE FROM subscriber.verification v WHERE v.subid = $1"
LOAD_DIFFERENT = """
SELECT r.srnspname::text AS nspname, r.srrelname::text AS relname, r.srsource, r.srdifferentlsn::text AS lsn
  FROM subscriber.subscription_rel r WHERE r.srsubid = $1 AND r.srdifferentlsn IS NOT NULL
 ORDER BY r.srnspname, r.srrelname
"""
# A table that is synchronized again meanwhile keeps no result of an earlier position. Extra rows that a repair or a
# synchronization has kept are no difference.
SET_DIFFERENT = """
UPDATE subscriber.subscription_rel r
   SET srdifferentlsn = CASE WHEN n.differs OR n.extra > r.srextra THEN $5::text::pg_lsn END
  FROM unnest($2::oid[], $3::boolean[], $4::bigint[]) AS n (relid, differs, extra)
 WHERE r.srsubid = $1 AND r.srrelid = n.relid AND r.srsubstate = 'r'
       AND (r.srdifferentlsn IS NOT NULL OR n.differs OR n.extra > r.srextra)
"""
FORGET_MISSED = """
UPDATE subscriber.subscription_rel r SET srmissedlsn = NULL, srmisseduntil = NULL, srmissedat = NULL
 WHERE r.srsubid = $1 AND r.srrelid = ANY ($2::oid[]) AND r.srmisseduntil <= $3::text::pg_lsn
"""


@dataclass(frozen=True, slots=True)
class Missed:
    """The changes of a table that was not published for a time.

    Attributes:
        since: the publisher's position at which the table was last seen published.
        until: the position at which it was seen published again. None: it is not.
        at: the time at which the launcher has noticed it.
    """

    since: Lsn
    until: Lsn | None
    at: datetime


@dataclass(frozen=True, slots=True)
class TableMembership:
    """A table of a subscription, as the launcher has last seen it on the publisher.

    Attributes:
        relid: its OID on the target.
        name: schema and name on the target.
        source: schema and name on the publisher.
        stored: the publisher's system identifier and the entries that publish the table, with a space between two.
            Without entries, the table was not published. None: nobody has looked yet.
        missed: the changes that the table may lack. None: it was published all the time.
    """

    relid: int
    name: tuple[str, str]
    source: tuple[str, str]
    stored: str | None
    missed: Missed | None


@dataclass(frozen=True, slots=True)
class DifferentTable:
    """A table that differed from the publisher's in the last comparison of its rows.

    Attributes:
        source: schema and name on the publisher.
        lsn: the position of the comparison.
    """

    source: tuple[str, str]
    lsn: Lsn


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """A change of what publishes a table. `missed`: changes of the table may be missing on the target."""

    relid: int
    before: str | None
    now: str
    published: bool
    missed: bool


async def load_memberships(connection: asyncpg.Connection, subid: int) -> list[TableMembership]:
    """Return the tables of a subscription, by name."""
    return [_membership(row) for row in await connection.fetch(LOAD, subid)]


def _membership(row: asyncpg.Record) -> TableMembership:
    name = (row["nspname"], row["relname"])
    since = optional_lsn(row["srmissedlsn"])
    return TableMembership(
        row["srrelid"],
        name,
        name if row["srsource"] is None else tuple(row["srsource"]),
        row["srmemberships"],
        None if since is None else Missed(since, optional_lsn(row["srmisseduntil"]), row["srmissedat"]),
    )


async def save_memberships(
    connection: asyncpg.Connection, subid: int, changes: Sequence[MembershipChange], since: Lsn, position: Lsn
) -> None:
    """Store what publishes tables now.

    Args:
        connection: a connection to the target.
        subid: OID of the subscription.
        changes: the tables. One whose memberships another command has changed is ignored.
        since: the position since which changes may be missing, for tables that have no earlier one.
        position: the publisher's position now.
    """
    relids, before, now, missed, published = (
        [getattr(change, name) for change in changes] for name in ("relid", "before", "now", "missed", "published")
    )
    async with connection.transaction():
        if any(missed):
            # A comparison since the last one reads only rows that the stream has changed.
            await connection.execute(FORGET_VERIFICATION, subid)
        await connection.execute(SAVE, subid, relids, before, now, missed, str(since), str(position), published)


async def load_different(connection: asyncpg.Connection, subid: int) -> list[DifferentTable]:
    """Return the tables that differed in the last comparison of their rows, by name."""
    return [
        DifferentTable(
            (row["nspname"], row["relname"]) if row["srsource"] is None else tuple(row["srsource"]),
            Lsn.parse(row["lsn"]),
        )
        for row in await connection.fetch(LOAD_DIFFERENT, subid)
    ]


@dataclass(frozen=True, slots=True)
class ComparisonResult:
    """The result of a comparison of all rows of a table.

    Attributes:
        is_same: no row differs.
        differs: rows are missing or changed on the target, or too many differ to list them.
        extra: the number of rows that only the target has, without those that a repair keeps now.
    """

    is_same: bool
    differs: bool
    extra: int


async def record_comparison(
    connection: asyncpg.Connection, subid: int, results: Mapping[str, ComparisonResult], lsn: Lsn
) -> None:
    """Store the results of a comparison.

    Args:
        connection: a connection to the target.
        subid: OID of the subscription.
        results: by table, as schema.table on the publisher. A table without a difference lacks no change before `lsn`.
        lsn: the position of the comparison.
    """
    known = {".".join(membership.source): membership.relid for membership in await load_memberships(connection, subid)}
    compared = [(known[name], result) for name, result in results.items() if name in known]
    async with connection.transaction():
        same = [relid for relid, result in compared if result.is_same]
        await connection.execute(FORGET_MISSED, subid, same, str(lsn))
        relids, differs, extra = (
            [relid for relid, _ in compared],
            [r.differs for _, r in compared],
            [r.extra for _, r in compared],
        )
        await connection.execute(SET_DIFFERENT, subid, relids, differs, extra, str(lsn))
