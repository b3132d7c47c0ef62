"""Collect the entries of a report from both servers.

Rows are counted, and their checksums added, in one snapshot of each server. The following server may not have applied
the last changes of the serving one yet. So a table that differs is read again, ATTEMPTS times at most.

Values are hashed as text under the same settings on both servers. Equal rows have equal checksums on all supported
versions, independent of their order and of the order of the columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any

import anyio

from subscriber.catalog import schema
from subscriber.catalog.connection import CatalogConnection, Connection
from subscriber.catalog.store import migrations
from subscriber.catalog.store.migrations import StepRecord
from subscriber.connection.settings import READ_NO_VIEW
from subscriber.errors import StatementError
from subscriber.migration import record
from subscriber.migration.plan import STEPS, Side, StepStage
from subscriber.migration.record import ServerRecord
from subscriber.migration.report.document import FORMAT, Entry, chained
from subscriber.quoting import identifier, qualified
from subscriber.redaction import redact
from subscriber.sqlstate import UNDEFINED_OBJECT

NAME = "subscriber migrate"
ATTEMPTS = 5  # readings of a table that differs
PAUSE = 1.0  # seconds between two readings
# Texts of values depend on these settings. Sessions of ours have a fixed search_path already.
_SETTINGS = (
    "SET datestyle = 'ISO, YMD'; SET intervalstyle = 'postgres'; SET timezone = 'UTC'; SET extra_float_digits = 1;"
    " SET bytea_output = 'hex'; SET lc_monetary = 'C'; SET row_security = off"
)
_SERVER = """
SELECT pg_catalog.current_setting('server_version'), pg_catalog.current_database()::text,
       (SELECT system_identifier::text FROM pg_catalog.pg_control_system()),
       pg_catalog.pg_current_wal_flush_lsn()::text
"""
_TABLES = """
SELECT n.nspname::text, c.relname::text, pg_catalog.array_agg(a.attname::text ORDER BY a.attname)
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
  LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
 WHERE c.relkind = 'r' AND c.relpersistence = 'p' AND n.nspname !~ '^pg_'
   AND n.nspname NOT IN ('information_schema', 'subscriber')
   AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend x WHERE x.classid = 'pg_catalog.pg_class'::pg_catalog.regclass
                      AND x.objid = c.oid AND x.deptype = 'e')
 GROUP BY 1, 2 ORDER BY 1, 2
"""

Table = tuple[str, str]


async def collect_report(source: str, target: str, name: str, *, checksums: bool = True) -> list[Entry]:
    """Return the report of a move, from what both servers have recorded and from their rows.

    Args:
        source: the connection string of the source.
        target: the connection string of the target.
        name: of the move.
        checksums: False: the rows are neither counted nor read.

    Raises:
        StatementError: neither server has a move of that name.
        SubscriberError: a server cannot be reached, or refuses a query.
    """
    async with AsyncExitStack() as stack:
        sides = {}
        for side, dsn in ((Side.SOURCE, source), (Side.TARGET, target)):
            connection = await stack.enter_async_context(CatalogConnection.open(dsn, NAME))
            sides[side] = await stack.enter_async_context(connection.use())
            await sides[side].execute(_SETTINGS)
        entries = await _recorded(sides, name)
        if checksums:
            entries += await _tables(sides)
    return chained(entries)


async def _recorded(sides: Mapping[Side, Connection], name: str) -> list[Entry]:
    rows: dict[Side, ServerRecord | None] = dict.fromkeys(sides)
    steps: list[tuple[Side, StepRecord]] = []
    for side, connection in sides.items():
        if await schema.current_revision(connection) is not None:
            rows[side] = row = await record.load(connection, name)
            if row is not None:
                record.refuse_other_side(row.facts, side, name)
            steps += [(side, step) for step in await migrations.load_steps(connection, name)]
    if not any(rows.values()):
        raise StatementError(
            f'neither server has a move "{name}"',
            hint="The name is that of the subscription on the target.",
            sqlstate=UNDEFINED_OBJECT,
        )
    steps.sort(key=lambda found: found[1].began)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    entries: list[Entry] = [
        {"kind": "report", "format": FORMAT, "name": name, "created": created, "pause": _pause(steps)}
    ]
    for side, connection in sides.items():
        version, database, system, lsn = await _server(connection)
        row = rows[side]
        entries.append(
            {
                "kind": "server",
                "side": side.value,
                "version": version,
                "database": database,
                "system": system,
                "lsn": lsn,
                "serving": None if row is None else row.standing.serving,
                "phase": None if row is None else row.standing.phase,
                "stopped_at": None if row is None or row.facts.stopped is None else str(row.facts.stopped.at),
            }
        )
    waived = {finding for _, step in steps for finding in step.detail.get("waived", ())}
    entries += [{"kind": "waived", "name": finding} for finding in sorted(waived)]
    entries += [_step(side, step) for side, step in steps]
    return entries


async def _server(connection: Connection) -> Sequence[Any]:
    row = await connection.fetchrow(_SERVER)
    assert row is not None
    return tuple(row)


def _step(side: Side, step: StepRecord) -> Entry:
    detail = dict(step.detail)
    return {
        "kind": "step",
        "side": side.value,
        "id": step.stepid,
        "command": step.command,
        "step": step.step,
        "began": step.began.isoformat(),
        "ended": None if step.ended is None else step.ended.isoformat(),
        "seconds": detail.pop("seconds", None),
        "lsn": detail.pop("lsn", None),
        "error": None if step.error is None else redact(step.error),
        "statements": [_statement(noted) for noted in detail.pop("statements", None) or ()],
        "detail": detail,
    }


def _statement(noted: Mapping[str, str]) -> str:
    """Return a statement with its server, without passwords."""
    return redact(f"{noted['on']}: {noted['statement']}")


def _pause(steps: Sequence[tuple[Side, StepRecord]]) -> float | None:
    """Return the seconds without writes of the last move that has opened a server. None: there was no such move."""
    *_, before = (step.name for step in STEPS if step.stage is StepStage.BEFORE)
    names = [step.name for step in STEPS if step.stage is StepStage.PAUSE]
    total: float | None = None
    current = 0.0
    for _, step in steps:
        if step.step == before:  # two sessions store the first steps of the pause, so their order is not exact
            current = 0.0
        if step.step in names:
            current += float(step.detail.get("seconds") or 0)
        if step.step == names[-1] and step.error is None and step.ended is not None:
            total = round(current, 3)
    return total


# --- rows -----------------------------------------------------------------------------------------


async def _tables(sides: Mapping[Side, Connection]) -> list[Entry]:
    """Return the number of rows and their checksum for each table of both servers."""
    columns = {side: await _columns(connection) for side, connection in sides.items()}
    names = sorted({*columns[Side.SOURCE], *columns[Side.TARGET]})
    read: dict[Side, dict[Table, Entry]] = {Side.SOURCE: {}, Side.TARGET: {}}
    waiting = names
    for attempt in range(ATTEMPTS):
        if attempt:
            await anyio.sleep(PAUSE)
        for side, connection in sides.items():
            wanted = {name: columns[side][name] for name in waiting if name in columns[side]}
            read[side] |= await _read(connection, wanted)
        waiting = [name for name in names if read[Side.SOURCE].get(name) != read[Side.TARGET].get(name)]
        if not waiting:
            break
    return [
        {
            "kind": "table",
            "name": ".".join(name),
            "source": read[Side.SOURCE].get(name),
            "target": read[Side.TARGET].get(name),
            "same": name not in waiting,
        }
        for name in names
    ]


async def _columns(connection: Connection) -> dict[Table, list[str]]:
    return {(row[0], row[1]): [name for name in row[2] if name] for row in await connection.fetch(_TABLES)}


async def _read(connection: Connection, tables: Mapping[Table, Sequence[str]]) -> dict[Table, Entry]:
    counts: dict[Table, Entry] = {}
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        await connection.execute(READ_NO_VIEW)
        for (schema, name), columns in tables.items():
            row = f"ROW({', '.join(f't.{identifier(column)}' for column in columns)})::pg_catalog.text"
            rows, checksum = await connection.fetchrow(  # type: ignore[misc]
                f'SELECT count(*), coalesce(sum(pg_catalog.hashtextextended({row} COLLATE "C", 0)), 0)::text'
                f" FROM ONLY {qualified(schema, name)} t"
            )
            counts[schema, name] = {"rows": rows, "checksum": checksum}
    return counts
