"""Statements on `subscriber.audit`: the actions of people on subscriptions, and their results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import asyncpg

BEGIN = "SELECT subscriber.begin_action($1::oid, $2::text, $3::text, $4::text, $5::text::jsonb)"
END = "SELECT subscriber.end_action($1::bigint, $2::text, $3::text::jsonb)"
LOAD = """
SELECT a.id, a.began, a.ended, a.who, a.address, a.action, a.arguments::text AS arguments, a.result,
       a.summary::text AS summary
  FROM subscriber.audit a WHERE a.subid = $1::oid ORDER BY a.id DESC LIMIT $2
"""


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One action.

    Attributes:
        id: orders the actions by time.
        began: its start, by the target's clock.
        ended: its end. None: it runs, or its process was killed.
        who: the label of the person's token.
        address: the address of the client.
        action: the name of the action.
        arguments: its arguments.
        result: `done`, or the reason why it failed. None: it has not ended.
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
