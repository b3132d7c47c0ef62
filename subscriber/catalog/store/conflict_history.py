"""Statements on `subscriber.conflict_history`: the conflicts of a subscription and what was done."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import asyncpg

from subscriber.lsn import Lsn

CONFLICTS = """
SELECT h.id, s.subname::text AS subscription, h.relation, h.conflict_type, h.key::text AS key, h.remote_xid,
       h.remote_finish_lsn::text AS finish_lsn, h.detected, h.last_detected, h.occurrences, h.policy, h.resolution,
       h.index_name, h.remote_commit_time, h.local_origin, h.local_commit_time, h.local_row::text AS local_row,
       h.remote_row::text AS remote_row
  FROM subscriber.conflict_history h JOIN subscriber.subscription s ON s.subid = h.subid
 WHERE ($1::text IS NULL OR s.subname = $1) AND ($2::timestamptz IS NULL OR h.last_detected >= $2)
 ORDER BY h.last_detected DESC, h.id DESC LIMIT $3
"""


@dataclass(frozen=True, slots=True)
class ConflictRecord:
    """A conflict, as recorded in `subscriber.conflict_history`. Values of rows are texts."""

    id: int
    subscription: str
    relation: str  # schema.table on the target
    conflict_type: str  # PostgreSQL's name
    key: Mapping[str, str | None] | None  # None: the whole row is the key
    remote_xid: int
    finish_lsn: Lsn  # the position that skip() takes
    detected: datetime  # the first time
    last_detected: datetime
    occurrences: int  # a conflict that stops the stream occurs again with each attempt
    policy: str  # that decided
    resolution: str  # what was done; "error": it stops the stream
    index_name: str | None = None  # the unique index
    remote_commit_time: datetime | None = None  # by the publisher's clock
    local_origin: str | None = None  # the replication origin that wrote the target's row
    local_commit_time: datetime | None = None
    local_row: Mapping[str, str | None] | None = None  # with conflict_log_rows
    remote_row: Mapping[str, str | None] | None = None


async def load_conflicts(
    connection: asyncpg.Connection, name: str | None, since: datetime | None, limit: int
) -> list[ConflictRecord]:
    """Return the newest conflicts first.

    Args:
        connection: A connection to the target.
        name: Only those of this subscription. None: of all.
        since: Only those that have occurred since this time. None: all.
        limit: At most this number.
    """
    return [_record(dict(row)) for row in await connection.fetch(CONFLICTS, name, since, limit)]


def _record(values: dict[str, Any]) -> ConflictRecord:
    for column in ("key", "local_row", "remote_row"):
        values[column] = None if values[column] is None else json.loads(values[column])
    values["finish_lsn"] = Lsn.parse(values["finish_lsn"])
    return ConflictRecord(**values)
