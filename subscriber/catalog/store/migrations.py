"""Statements on `subscriber.migration` and `subscriber.migration_step`: moves of this database to or from a server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import asyncpg

from subscriber.catalog.schema import current_revision
from subscriber.publisher import own_schema

LOAD = "SELECT m.serving, m.phase, m.facts::text AS facts, m.changed FROM subscriber.migration m WHERE m.name = $1"
SAVE = """
INSERT INTO subscriber.migration (name, serving, phase, facts) VALUES ($1, $2, $3, $4::text::jsonb)
ON CONFLICT (name) DO UPDATE SET serving = excluded.serving, phase = excluded.phase,
    facts = excluded.facts, changed = pg_catalog.clock_timestamp()
"""
BEGIN_STEP = """
INSERT INTO subscriber.migration_step (migration, command, step) VALUES ($1, $2, $3) RETURNING stepid
"""
ADD_STEP = """
INSERT INTO subscriber.migration_step (migration, command, step, began, ended, error, detail)
VALUES ($1, $2, $3, pg_catalog.clock_timestamp() - $4::float8 * interval '1 second',
        pg_catalog.clock_timestamp() - $5::float8 * interval '1 second', $6, $7::text::jsonb)
"""
END_STEP = """
UPDATE subscriber.migration_step SET ended = pg_catalog.clock_timestamp(), error = $2, detail = $3::text::jsonb
 WHERE stepid = $1
"""
STEPS = """
SELECT s.stepid, s.command, s.step, s.began, s.ended, s.error, s.detail::text AS detail
  FROM subscriber.migration_step s WHERE s.migration = $1 ORDER BY s.stepid
"""
HAS_MOVES = f"""
SELECT EXISTS (SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
                WHERE {own_schema.IS_OURS} AND c.relname = 'migration')
"""
FACTS = "SELECT m.name, m.facts::text FROM subscriber.migration m ORDER BY 1"
NAMES = "SELECT m.name FROM subscriber.migration m ORDER BY 1"
UNFINISHED = "SELECT m.name FROM subscriber.migration m WHERE m.phase <> $1 ORDER BY 1"
OTHERS = "SELECT m.name FROM subscriber.migration m WHERE m.name <> $1 AND m.phase <> $2 ORDER BY m.changed DESC"


@dataclass(frozen=True, slots=True)
class MigrationRow:
    """The row of a move on one server.

    Attributes:
        serving: the server that applications write to, as far as this one knows (migration/plan.py:Side).
        phase: how far the present move is (migration/plan.py:Phase).
        facts: of this server, as JSON (migration/record.py:MoveFacts).
        changed: the time of the last change.
    """

    serving: str
    phase: str
    facts: str
    changed: datetime


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One execution of a step, on the server that it was stored on.

    Attributes:
        stepid: orders the steps by time.
        command: of `subscriber migrate`.
        step: its name (plan.py).
        began: its start, by the server's clock.
        ended: its end. None: it runs, or its command was killed.
        error: the reason why it failed. None: it did not.
        detail: `statements`, `lsn`, `seconds` and other figures.
    """

    stepid: int
    command: str
    step: str
    began: datetime
    ended: datetime | None
    error: str | None
    detail: Mapping[str, Any] = field(default_factory=dict)


async def load(connection: asyncpg.Connection, name: str) -> MigrationRow | None:
    """Return the row of a move, or None if the server has none."""
    row = await connection.fetchrow(LOAD, name)
    if row is None:
        return None
    return MigrationRow(row["serving"], row["phase"], row["facts"], row["changed"])


async def save(connection: asyncpg.Connection, name: str, serving: str, phase: str, facts: str) -> None:
    """Store where a move stands.

    Args:
        connection: may be in a transaction.
        name: of the move.
        serving: the server that applications write to.
        phase: how far the present move is.
        facts: of this server, as JSON.
    """
    await connection.execute(SAVE, name, serving, phase, facts)


async def begin_step(connection: asyncpg.Connection, name: str, command: str, step: str) -> int:
    """Store that a step begins. Returns its number."""
    stepid: int = await connection.fetchval(BEGIN_STEP, name, command, step)
    return stepid


async def add_step(
    connection: asyncpg.Connection,
    name: str,
    command: str,
    step: str,
    ago: tuple[float, float],
    error: str | None,
    detail: Mapping[str, object],
) -> None:
    """Store a step that has ended. `ago`: its beginning and its end, in seconds before now."""
    await connection.execute(ADD_STEP, name, command, step, *ago, error, _as_text(detail))


async def end_step(
    connection: asyncpg.Connection, stepid: int, error: str | None, detail: Mapping[str, object]
) -> None:
    """Store that a step has ended, with its error or None."""
    await connection.execute(END_STEP, stepid, error, _as_text(detail))


def _as_text(detail: Mapping[str, object]) -> str:
    """Return JSON that each encoding of a database has: names are its own, and the ellipsis hides a password."""
    return json.dumps(detail, ensure_ascii=False).replace("\N{HORIZONTAL ELLIPSIS}", "...")


async def load_steps(connection: asyncpg.Connection, name: str) -> list[StepRecord]:
    """Return the steps of a move that the server has, by time."""
    return [
        StepRecord(
            row["stepid"],
            row["command"],
            row["step"],
            row["began"],
            row["ended"],
            row["error"],
            json.loads(row["detail"]),
        )
        for row in await connection.fetch(STEPS, name)
    ]


async def unfinished_moves(connection: asyncpg.Connection, finished: str) -> list[str]:
    """Return the names of the moves of this database in another phase than `finished`."""
    return [name for (name,) in await connection.fetch(UNFINISHED, finished)]


async def other_moves(connection: asyncpg.Connection, name: str, finished: str) -> list[str]:
    """Return the names of other moves of this database, the last one first.

    Args:
        connection: to a database with schema "subscriber".
        name: of the move that is left out.
        finished: the phase of moves that have ended, which are left out, too.
    """
    return [row["name"] for row in await connection.fetch(OTHERS, name, finished)]


def show_facts(move: str) -> str:
    """Return the statement by which a person reads the facts of a move. `move`: a literal."""
    return f"SELECT facts FROM subscriber.migration WHERE name = {move};"


def drop_fact(move: str, fact: str) -> str:
    """Return the statement by which a person removes a fact of a move. Both arguments are literals."""
    return f"UPDATE subscriber.migration SET facts = facts - {fact} WHERE name = {move};"


async def load_facts(connection: asyncpg.Connection) -> list[tuple[str, str]]:
    """Return the name and the facts of each move. A database without schema "subscriber" has none."""
    if await current_revision(connection) is None or not await connection.fetchval(HAS_MOVES):
        return []
    return [(name, facts) for name, facts in await connection.fetch(FACTS)]
