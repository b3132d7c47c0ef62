"""Statements on `subscriber.quarantine`: transactions that wait on the target, and their messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import asyncpg

from subscriber.lsn import Lsn
from subscriber.spool.record_format import HEADER_SIZE, end, first, split

CHUNK = 1024 * 1024  # bytes of messages that are read together

LOAD = """
SELECT q.finish_lsn::text AS finish_lsn, q.remote_xid, q.commit_time, q.parked, q.relations, q.changes, q.bytes,
       q.depends_on::text[] AS depends_on, q.error, q.error_detail, q.attempts, q.retry, q.edited
  FROM subscriber.quarantine q WHERE q.subid = $1 ORDER BY q.finish_lsn
"""
SUMMARIES = """
SELECT subid::bigint, count(*) AS number, count(error) AS failed, min(parked) AS since
  FROM subscriber.quarantine GROUP BY subid
"""
COUNT = "SELECT count(*) FROM subscriber.quarantine WHERE subid = $1"
READ = "SELECT subscriber.read_quarantine($1::oid, $2::text::pg_lsn, $3::bigint, $4::int4)"
# For RowApplier.execute_at_end(): put the transaction in quarantine instead of applying it, as a row of the table in
# JSON; add its messages at an offset; remove it, because the open transaction applies it.
PARK = "SELECT subscriber.park($1, $2, $3)"
PARK_CONTENT = "SELECT subscriber.park_content($1, $2, $3, $4, $5)"
UNPARK = "SELECT subscriber.unpark($1, $2, $3, $4)"
REQUEST = """
UPDATE subscriber.quarantine q SET retry = true
 WHERE q.subid = $1 AND q.finish_lsn = ANY ($2::text[]::pg_lsn[]) AND NOT q.retry
"""
FAILED = """
UPDATE subscriber.quarantine q SET retry = false, error = $3::text, error_detail = $4::text, attempts = q.attempts + 1
 WHERE q.subid = $1 AND q.finish_lsn = $2::text::pg_lsn
"""
WAITS = (
    "UPDATE subscriber.quarantine q SET retry = false WHERE q.subid = $1 AND q.finish_lsn = ANY ($2::text[]::pg_lsn[])"
)
REMOVE = "DELETE FROM subscriber.quarantine q WHERE q.subid = $1 AND q.finish_lsn = ANY ($2::text[]::pg_lsn[])"
EDIT = """
SELECT subscriber.edit_quarantine($1::oid, $2::text::pg_lsn, $3::int4, $4::bytea, $5::text[], $6::int8)
"""


@dataclass(frozen=True, slots=True)
class QuarantinedTransaction:
    """A row of `subscriber.quarantine`. `error` is None if the transaction only depends on others."""

    finish_lsn: Lsn
    xid: int
    commit_time: datetime | None
    parked: datetime
    relations: tuple[str, ...]
    changes: int
    bytes: int
    depends_on: frozenset[Lsn]
    error: str | None
    error_detail: str | None
    attempts: int
    retry: bool  # the worker is to retry it now
    edited: int  # number of edits


@dataclass(frozen=True, slots=True)
class QuarantineSummary:
    """The number of transactions of a subscription, those that have failed, and the time of the oldest."""

    number: int = 0
    failed: int = 0
    since: datetime | None = None


async def load_summaries(connection: asyncpg.Connection) -> dict[int, QuarantineSummary]:
    """Return the summary of each subscription that has transactions in quarantine, by its OID."""
    rows = await connection.fetch(SUMMARIES)
    return {row["subid"]: QuarantineSummary(row["number"], row["failed"], row["since"]) for row in rows}


async def load(connection: asyncpg.Connection, subid: int) -> list[QuarantinedTransaction]:
    """Return the transactions of a subscription in the publisher's order."""
    return [
        QuarantinedTransaction(
            Lsn.parse(row["finish_lsn"]),
            row["remote_xid"],
            row["commit_time"],
            row["parked"],
            tuple(row["relations"]),
            row["changes"],
            row["bytes"],
            frozenset(Lsn.parse(lsn) for lsn in row["depends_on"]),
            row["error"],
            row["error_detail"],
            row["attempts"],
            row["retry"],
            row["edited"],
        )
        for row in await connection.fetch(LOAD, subid)
    ]


async def count(connection: asyncpg.Connection, subid: int) -> int:
    """Return the number of transactions of a subscription."""
    number: int = await connection.fetchval(COUNT, subid)
    return number


async def read_messages(
    connection: asyncpg.Connection, subid: int, lsn: Lsn, place: int = 0
) -> tuple[list[bytes], int]:
    """Read messages of a transaction.

    Args:
        connection: a session of a role that may manage the subscription.
        subid: OID of the subscription.
        lsn: finish LSN of the transaction.
        place: offset of the first message.

    Returns:
        Whole messages of about one megabyte, and the offset after them. No messages: this is the end.
    """
    data = await connection.fetchval(READ, subid, str(lsn), place, CHUNK)
    if not data:
        return [], place
    wanted = HEADER_SIZE + first(data)[0]
    if wanted > CHUNK:
        data = await connection.fetchval(READ, subid, str(lsn), place, wanted)
    records = split(data, place)
    if not records:
        raise asyncpg.DataCorruptedError(f"quarantined transaction {lsn} ends within a message")
    return [message for _, _, message in records], end(records[-1])


async def request_retry(connection: asyncpg.Connection, subid: int, lsns: Sequence[Lsn]) -> None:
    """Have the worker retry these transactions."""
    await connection.execute(REQUEST, subid, [str(lsn) for lsn in lsns])


async def retry_failed(connection: asyncpg.Connection, subid: int, lsn: Lsn, error: str, detail: str | None) -> None:
    """Store the error of a retry."""
    await connection.execute(FAILED, subid, str(lsn), error, detail)


async def cancel_retry(connection: asyncpg.Connection, subid: int, lsns: Sequence[Lsn]) -> None:
    """Withdraw requests, because the transactions depend on others that stay in quarantine."""
    await connection.execute(WAITS, subid, [str(lsn) for lsn in lsns])


async def remove(connection: asyncpg.Connection, subid: int, lsns: Sequence[Lsn]) -> None:
    """Remove transactions without applying them."""
    await connection.execute(REMOVE, subid, [str(lsn) for lsn in lsns])


async def edit(
    connection: asyncpg.Connection,
    subid: int,
    parked: QuarantinedTransaction,
    records: bytes,
    relations: Sequence[str],
    changes: int,
) -> bool:
    """Replace the messages of a transaction. Returns False if it has been edited, retried or removed meanwhile."""
    lsn = str(parked.finish_lsn)
    done: bool = await connection.fetchval(EDIT, subid, lsn, parked.edited, records, list(relations), changes)
    return done
