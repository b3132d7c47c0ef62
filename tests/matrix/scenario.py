"""The scenario of each pair: a subscription with one set of options, from CREATE to DROP.

    copy            tables that already have rows
    changes         INSERT, UPDATE, DELETE, TRUNCATE; keys that change; REPLICA IDENTITY FULL; a large value that an
                    UPDATE does not change; a transaction that is larger than logical_decoding_work_mem, part of it
                    rolled back; with two_phase also prepared transactions
    schema change   a column added on both sides
    kill -9         of the worker, during writes
    compare         each table's rows by their exact text, including duplicates; and nothing is left behind

Each step raises an error that describes the failure. lost_slot() and dropped_publication() only use the publisher.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from subscriber.demo.servers import Server
from tests.faults.environment import Scene, scene
from tests.plugins.fix_cluster import fresh_database

SCHEMA = """
CREATE TABLE plain (id int PRIMARY KEY, n numeric, words text, at timestamptz, list int[]);
CREATE TABLE wide (id int PRIMARY KEY, big text, version int);
ALTER TABLE wide ALTER big SET STORAGE EXTERNAL;
CREATE TABLE no_key (a int, b text);
ALTER TABLE no_key REPLICA IDENTITY FULL;
CREATE TABLE cleared (id int);
"""
ROWS = """
INSERT INTO plain SELECT i, i / 7.0, 'row ' || i, now(), ARRAY[i, NULL] FROM generate_series(1, 500) i;
INSERT INTO wide SELECT i, repeat(md5(i::text), 500), 0 FROM generate_series(1, 5) i;
INSERT INTO no_key SELECT i % 10, NULL FROM generate_series(1, 20) i;
INSERT INTO cleared VALUES (1);
"""
CHANGES = [
    "INSERT INTO plain (id) VALUES (1001)",
    "UPDATE plain SET words = NULL WHERE id <= 10; UPDATE plain SET id = id + 5000 WHERE id BETWEEN 11 AND 20",
    "DELETE FROM plain WHERE id BETWEEN 21 AND 30",
    "UPDATE wide SET version = version + 1",
    "UPDATE no_key SET b = 'changed' WHERE a = 3; DELETE FROM no_key WHERE a = 4; INSERT INTO no_key VALUES (NULL, '')",
    "TRUNCATE cleared; INSERT INTO cleared VALUES (2)",
    """
    BEGIN;
    INSERT INTO plain (id, words) SELECT i, repeat('x', 100) FROM generate_series(10001, 13000) i;
    SAVEPOINT s; DELETE FROM plain; ROLLBACK TO s;
    SAVEPOINT t; UPDATE plain SET n = 1 WHERE id > 12000; RELEASE t;
    COMMIT
    """,
    "BEGIN; DELETE FROM plain; ROLLBACK",
]
PREPARE = [
    "BEGIN; INSERT INTO plain (id) VALUES (2001); PREPARE TRANSACTION 'kept'",
    "BEGIN; INSERT INTO plain (id) SELECT i FROM generate_series(20001, 23000) i; PREPARE TRANSACTION 'large'",
    "BEGIN; DELETE FROM plain; PREPARE TRANSACTION 'undone'",
]
RESOLVE = ["COMMIT PREPARED 'large'", "COMMIT PREPARED 'kept'", "ROLLBACK PREPARED 'undone'"]
ADD_COLUMN = "ALTER TABLE plain ADD COLUMN extra text DEFAULT 'new'"
# So that streaming and two_phase have something to do.
SETTINGS = {
    "logical_decoding_work_mem": "64kB",
    "max_prepared_transactions": "10",
    "wal_sender_timeout": "10s",
    "max_connections": "60",
    "shared_buffers": "32MB",
}


PATIENCE = 180.0  # seconds for one set of options
LEAST = 3_000  # rows that must have been compared


class Failed(Exception):
    """A check has failed; the text describes it."""


@dataclass(frozen=True)
class Variant:
    """Options of CREATE SUBSCRIPTION and the oldest publisher that understands them."""

    name: str
    options: str
    since: int
    two_phase: bool = False


VARIANTS = (
    Variant("default", "streaming = off", 13),
    Variant("binary", "binary = true", 14),
    Variant("streaming", "streaming = on", 14),
    Variant("parallel", "streaming = parallel", 16),
    Variant("two_phase", "two_phase = true, streaming = on", 15, two_phase=True),
    Variant("origin", "origin = none", 16),
    Variant("failover", "failover = true", 17),
)


async def subscribe_and_compare(publisher: Server, target: Server, variant: Variant, directory: Path) -> None:
    """Run the scenario with one set of options. Raises Failed, or SubscriberError for options that are refused."""
    async with _setting(publisher, target, directory) as found:
        await found.create_subscription(options=f"WITH ({variant.options})")
        found.worker.start()
        await found.append()
        for change in CHANGES:
            await found.source.execute(change)
        await found.target.execute(ADD_COLUMN)
        await found.source.execute(ADD_COLUMN, "INSERT INTO plain (id, extra) VALUES (3001, 'given')")
        if variant.two_phase:
            await found.target.wait_for("SELECT subtwophasestate::text FROM subscriber.subscription", "e")
            for prepare in PREPARE:
                await found.source.execute(prepare)
        await found.worker.kill9()
        await found.source.execute(*CHANGES[3:5])
        if variant.two_phase:
            await found.source.execute(*RESOLVE)
        stop = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(found.keep_appending, stop)
            found.worker.start()
            await anyio.sleep(0.7)
            await found.worker.kill9()
            found.worker.start()
            await anyio.sleep(0.7)
            stop.set()
        counts = await found.finish()
        await found.worker.stop()
        if sum(counts.values()) < LEAST or set(counts) != {"plain", "wide", "no_key", "cleared", "log"}:
            raise Failed(f"compared only {counts}")


async def lost_slot(publisher: Server, target: Server, directory: Path) -> str:
    """Let the slot fall too far behind, and check that the subscription stops. Returns the publisher's message."""
    async with _setting(publisher, target, directory) as found:
        await found.create_subscription()
        await found.source.execute("ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'", "SELECT pg_reload_conf()")
        try:
            for _ in range(3):
                await found.source.execute("INSERT INTO cleared VALUES (3)", "SELECT pg_switch_wal()")
            await found.source.execute("CHECKPOINT")
            await found.source.wait_for("SELECT wal_status FROM pg_replication_slots WHERE slot_name = 's'", "lost")
        finally:
            await found.source.execute("ALTER SYSTEM RESET max_slot_wal_keep_size", "SELECT pg_reload_conf()")
        found.worker.start()
        await found.target.wait_for("SELECT state FROM subscriber.worker WHERE relid = 0", "stopped")
        ((error, hint),) = await found.target.rows("SELECT error, error_hint FROM subscriber.worker WHERE relid = 0")
        if "fresh copy" not in hint:
            raise Failed(f"no hint for {error}")
        await found.worker.stop()
        await found.execute("DROP SUBSCRIPTION s")
        return str(re.sub(r"^could not start WAL streaming: ERROR:  ", "", error))


async def dropped_publication(publisher: Server, target: Server, directory: Path) -> str:
    """Drop the publication, and remove it from the subscription. Returns the publisher's message."""
    async with _setting(publisher, target, directory) as found:
        await found.source.execute("CREATE PUBLICATION other FOR TABLE cleared")
        await found.create_subscription()
        found.worker.start()
        await found.wait_until_equal()
        await found.source.execute("DROP PUBLICATION p", "INSERT INTO cleared VALUES (4)")
        with anyio.fail_after(20):
            while not (said := re.search(r"(?:ERROR|WARNING):  (.*publication \"p\".*)", found.worker.last_lines(100))):
                await anyio.sleep(0.1)
        await found.execute("ALTER SUBSCRIPTION s SET PUBLICATION other WITH (refresh = false)")
        await found.source.execute("INSERT INTO cleared VALUES (5)")
        await found.target.wait_for("SELECT count(*) FROM cleared WHERE id = 5", 1)
        await found.worker.stop()
        await found.execute("DROP SUBSCRIPTION s")
        return said[1].removeprefix("could not receive data from WAL stream: ERROR:  ")


@asynccontextmanager
async def _setting(publisher: Server, target: Server, directory: Path) -> AsyncIterator[Scene]:
    """Create databases with the tables on both sides, rows on the publisher's, and publication p of these tables."""
    directory.mkdir()
    async with fresh_database(publisher) as source, fresh_database(target) as copy:
        await source.execute(SCHEMA, ROWS)
        await copy.execute(SCHEMA)
        async with scene(source, copy, directory) as found:
            await source.execute("ALTER PUBLICATION p ADD TABLE plain, wide, no_key, cleared")
            try:
                yield found
            except (pytest.fail.Exception, AssertionError, TimeoutError) as failure:
                raise Failed(f"{failure}\n{found.worker.last_lines(30)}") from failure
