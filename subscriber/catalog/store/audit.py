"""Statements on `subscriber.audit`: the actions of people on subscriptions, and their results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import asyncpg

DONE = "done"  # the result of an action that has not failed
COMMAND_LINE = "command line"  # who runs a command that records its result
VERIFY = "verify"

BEGIN = "SELECT subscriber.begin_action($1::oid, $2::text, $3::text, $4::text, $5::text::jsonb)"
END = "SELECT subscriber.end_action($1::bigint, $2::text, $3::text::jsonb)"
LOAD = """
SELECT a.id, a.began, a.ended, a.who, a.address, a.action, a.arguments::text AS arguments, a.result,
       a.summary::text AS summary
  FROM subscriber.audit a WHERE a.subid = $1::oid ORDER BY a.id DESC LIMIT $2
"""

LAST_COMPARISONS = f"""
SELECT s.subid, a.ended, a.summary::text AS summary
  FROM subscriber.subscription s,
       LATERAL (SELECT a.ended, a.summary FROM subscriber.audit a
                 WHERE a.subid = s.subid AND a.action = '{VERIFY}' AND a.result = '{DONE}'
                 ORDER BY a.id DESC LIMIT 1) a
"""
CLIENT = "SELECT coalesce(pg_catalog.host(pg_catalog.inet_client_addr()), 'local')"


@dataclass(frozen=True, slots=True)
class ComparedTables:
    """The figures of a comparison that has ended.

    Attributes:
        ended: its end, by the target's clock.
        lsn: its position on the publisher.
        tables: the number of tables.
        different: the number of those that differ, or could not be compared.
        complete: all rows were read on both sides.
    """

    ended: datetime
    lsn: str
    tables: int
    different: int
    complete: bool


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One action.

    Attributes:
        id: orders the actions by time.
        began: its start, by the target's clock.
        ended: its end. None: it runs, or its process was killed.
        who: the label of the person's token, or COMMAND_LINE.
        address: the address of the client, or `local`.
        action: the name of the action.
        arguments: its arguments.
        result: DONE, or the reason why it failed. None: it has not ended.
        summary: the figures of a comparison or a repair. None: there are none.
    """

    id: int
    began: datetime
    ended: datetime | None
    who: str
    address: str
    action: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    result: str | None = None
    summary: Mapping[str, Any] | None = None


async def begin(
    connection: asyncpg.Connection, subid: int, who: str, address: str, action: str, arguments: Mapping[str, object]
) -> int:
    """Record that an action begins. Returns its number."""
    number: int = await connection.fetchval(BEGIN, subid, who, address, action, json.dumps(arguments))
    return number


async def end(
    connection: asyncpg.Connection, number: int, result: str, summary: Mapping[str, object] | None = None
) -> None:
    """Record the result of an action."""
    await connection.execute(END, number, result, None if summary is None else json.dumps(summary))


async def load(connection: asyncpg.Connection, subid: int, limit: int) -> list[AuditRecord]:
    """Return the last actions on a subscription, the newest first."""
    return [
        AuditRecord(
            row["id"],
            row["began"],
            row["ended"],
            row["who"],
            row["address"],
            row["action"],
            json.loads(row["arguments"]),
            row["result"],
            None if row["summary"] is None else json.loads(row["summary"]),
        )
        for row in await connection.fetch(LOAD, subid, limit)
    ]


async def load_last_comparisons(connection: asyncpg.Connection) -> dict[int, ComparedTables]:
    """Return the last comparison of each subscription that has ended, by `subid`."""
    comparisons = {}
    for row in await connection.fetch(LAST_COMPARISONS):
        figures = json.loads(row["summary"])
        comparisons[row["subid"]] = ComparedTables(
            row["ended"], figures["lsn"], figures["tables"], figures["different"], figures["complete"]
        )
    return comparisons


async def client_address(connection: asyncpg.Connection) -> str:
    """Return the address of the connection's client, as the target sees it."""
    address: str = await connection.fetchval(CLIENT)
    return address
