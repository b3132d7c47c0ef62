"""Statements that involve a publisher, for PostgreSQL's own subscriptions and for ours: the same messages and results.

The target server executes a whole script itself, then we do, with the same publisher. After each statement the
messages, the subscription's options, its tables and the slot must be equal.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import asyncpg
import pytest

from tests.catalog.test_beside_postgresql import Said, by_us, natively, without_additional_hints
from tests.plugins.fix_cluster import Database

CREATE = "CREATE SUBSCRIPTION s CONNECTION '{conninfo}' PUBLICATION"
ALTER = "ALTER SUBSCRIPTION s"
DROP = "DROP SUBSCRIPTION s"

# For the target itself; {gid} is how the names of the subscription's prepared transactions begin.
PLAIN = "-- plain "
PREPARE = f"{PLAIN}BEGIN; INSERT INTO a VALUES (7); PREPARE TRANSACTION '{{gid}}7'"
ROLLBACK = f"{PLAIN}ROLLBACK PREPARED '{{gid}}7'"

SCRIPTS: dict[str, list[str]] = {
    "create": [
        step
        for options in (
            "p WITH (two_phase, enabled = false)",
            "p WITH (two_phase, copy_data = false, enabled = false)",
            "p WITH (two_phase, copy_data = false, failover, enabled = false)",
            "p WITH (two_phase, failover, enabled = false)",
            "p WITH (two_phase, copy_data = false, create_slot = false, slot_name = NONE, enabled = false)",
            "p WITH (two_phase, connect = false, slot_name = NONE)",
            "p WITH (two_phase, connect = false, copy_data = true)",
            "none WITH (two_phase, copy_data = false, enabled = false)",
            "later WITH (two_phase, copy_data = false, enabled = false)",
            "p WITH (two_phase = yes)",
            "p WITH (two_phase, two_phase = false)",
            "p WITH (two_phase, streaming = parallel, copy_data = false, enabled = false)",
            "p WITH (two_phase, streaming, copy_data = false, enabled = false)",
            "p WITH (streaming = off, enabled = false)",
            "p WITH (streaming = paralel)",
        )
        for step in (f"{CREATE} {options}", DROP)
    ],
    "set": [
        f"{CREATE} p WITH (two_phase, enabled = false)",
        f"{ALTER} SET (two_phase = false)",
        f"{ALTER} SET (two_phase = false)",
        f"{ALTER} SET (two_phase)",
        f"{ALTER} SET (two_phase = true, failover = true)",
        f"{ALTER} SET (two_phase = false, failover = false)",
        f"{ALTER} SET (two_phase = true, failover = false, streaming = off)",
        f"{ALTER} SET (two_phase = false, slot_name = s2)",
        f"{ALTER} SET (two_phase = false, slot_name = NONE)",
        f"{ALTER} SET (two_phase = true, slot_name = s2)",
        f"{ALTER} SET (two_phase = false)",
        f"{ALTER} SET (failover = true, two_phase = false)",
        f"{ALTER} SET (slot_name = NONE)",
        f"{ALTER} SET (two_phase = true)",
        f"{ALTER} SET (two_phase = true, failover = true)",
        f"{ALTER} SET (two_phase = false)",
        f"{ALTER} SET (slot_name = s)",
        f"{ALTER} SET (two_phase = 2)",
        f"{ALTER} SET (streaming = parallel)",
        f"{ALTER} SET (streaming = on)",
        DROP,
    ],
    "enabled": [
        f"{CREATE} p WITH (two_phase, copy_data = false)",
        f"{ALTER} SET (two_phase = true)",
        f"{ALTER} SET (two_phase = false)",
        f"{ALTER} SET (two_phase = false, slot_name = s2)",
        f"{ALTER} SET (failover = true, two_phase = true)",
        f"{ALTER} REFRESH PUBLICATION",
        f"{ALTER} REFRESH PUBLICATION WITH (copy_data)",
        f"{ALTER} REFRESH PUBLICATION WITH (copy_data = false)",
        f"{ALTER} SET PUBLICATION p, q",
        f"{ALTER} SET PUBLICATION p, q WITH (copy_data = false)",
        f"{ALTER} SET PUBLICATION p WITH (refresh = false)",
        f"{ALTER} ADD PUBLICATION q",
        f"{ALTER} ADD PUBLICATION q WITH (copy_data = false)",
        f"{ALTER} DROP PUBLICATION q",
        f"{ALTER} DROP PUBLICATION q WITH (copy_data = false)",
        f"{ALTER} DISABLE",
        f"{ALTER} REFRESH PUBLICATION",
        f"{ALTER} ADD PUBLICATION q",
        f"{ALTER} SET (two_phase = false)",
        DROP,
    ],
    "prepared": [
        f"{CREATE} p WITH (two_phase, copy_data = false, enabled = false)",
        PREPARE,
        f"{ALTER} SET (two_phase = false)",
        f"{ALTER} SET (two_phase = false, slot_name = s2)",
        f"{ALTER} SET (two_phase = true)",
        ROLLBACK,
        PREPARE.replace("{gid}", "other_"),
        f"{ALTER} SET (two_phase = false)",
        ROLLBACK.replace("{gid}", "other_"),
        PREPARE,
        DROP,
        ROLLBACK,
    ],
}


@dataclass
class Subscriptions:
    """One of the two kinds: how a statement is executed, and the schema of its catalogs."""

    execute: Callable[[asyncpg.Connection, str], Awaitable[list[Said]]]
    schema: str


OF_POSTGRESQL = Subscriptions(natively, "pg_catalog")
OURS = Subscriptions(by_us, "subscriber")

SUBSCRIPTION = """
SELECT s.oid, s.subenabled, s.substream, s.subtwophasestate, s.subfailover, s.subslotname, s.subpublications
  FROM {schema}.pg_subscription s JOIN pg_catalog.pg_database d ON d.oid = s.subdbid
 WHERE d.datname = pg_catalog.current_database()
"""
TABLES = """
SELECT r.srrelid::regclass::text, r.srsubstate FROM {schema}.pg_subscription_rel r WHERE r.srsubid = $1 ORDER BY 1
"""
SLOTS = """
SELECT slot_name, two_phase, failover FROM pg_replication_slots WHERE database = current_database() ORDER BY 1
"""
# The server's own workers outlive the statement that disables their subscription.
NATIVE_WORKERS = """
SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'logical replication %worker'
   AND datname = current_database()
"""


@pytest.fixture
async def conninfo(source_db: Database, target_db: Database) -> str:
    """Return the connection string of a publisher with publications p (table a), q (table b) and none (no table)."""
    if await target_db.value("SELECT current_setting('server_version_num')::int") < 180000:
        pytest.skip("messages are those of PostgreSQL 18")
    if await source_db.value("SELECT current_setting('server_version_num')::int") < 180000:
        pytest.skip("needs a publisher that can alter both options of a slot")
    for database in (source_db, target_db):
        await database.execute("CREATE TABLE a (i int PRIMARY KEY); CREATE TABLE b (i int PRIMARY KEY)")
    await source_db.execute(
        "CREATE PUBLICATION p FOR TABLE a", "CREATE PUBLICATION q FOR TABLE b", "CREATE PUBLICATION none"
    )
    return source_db.dsn()


async def left_behind(
    connection: asyncpg.Connection, source: Database, schema: str
) -> tuple[int, list[tuple[Any, ...]]]:
    """Return the subscription's OID (0 if there is none), and its visible state without the OID."""
    rows = [tuple(row) for row in await connection.fetch(SUBSCRIPTION.format(schema=schema))]
    seen = [row[1:] for row in rows] + await source.rows(SLOTS)
    for oid, *_ in rows:
        seen += [tuple(row) for row in await connection.fetch(TABLES.format(schema=schema), oid)]
    return (rows[0][0] if rows else 0), seen


def comparable(said: Said) -> Said:
    """Return the message without positions in the text, and without the SQLSTATE of a publisher's error."""
    said.position = None
    if "replication slot" in said.message:
        said.sqlstate = None
    return said


async def played(
    script: list[str], kind: Subscriptions, target: Database, source: Database, conninfo: str
) -> list[tuple[str, list[Said], object]]:
    """Return the messages and the result of each statement."""
    connection = await target.connect()
    story: list[tuple[str, list[Said], object]] = []
    oid, gid = 0, ""
    for step in script:
        if step.startswith(PLAIN):
            await connection.execute(step.removeprefix(PLAIN).format(gid=gid))
            continue
        said = [comparable(said) for said in await kind.execute(connection, step.format(conninfo=conninfo))]
        if "DISABLE" in step:
            await target.wait_for(NATIVE_WORKERS, 0)
        oid, seen = await left_behind(connection, source, kind.schema)
        gid = f"pg_gid_{oid}_" if oid else gid
        story.append((step, said, seen))
    return story


@pytest.mark.prints_password("the server logs a statement of its own that fails")
@pytest.mark.parametrize("name", SCRIPTS)
async def test_statements_with_a_publisher_have_the_messages_and_results_of_postgresql(
    database: asyncpg.Connection, source_db: Database, target_db: Database, conninfo: str, name: str
) -> None:
    script = SCRIPTS[name]
    theirs = await played(script, OF_POSTGRESQL, target_db, source_db, conninfo)
    ours = await played(script, OURS, target_db, source_db, conninfo)
    for their, our in zip(theirs, ours, strict=True):
        without_additional_hints(our[1], their[1])
        assert our == their
