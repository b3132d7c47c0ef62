"""Long texts of servers: the event loop is not blocked, no value gets into a log, and the log stays readable.

The worst text is one that redaction has to examine at every word. The time for which a text blocks the event loop is
compared with that of a harmless text of the same length, in processor time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import pytest

from subscriber import telemetry
from subscriber.display import TEXT_LIMIT
from subscriber.publisher.notices import NoticeLog
from subscriber.settings import Settings
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_hostile import Hostile
from tests.plugins.fix_subscriber import QUICK, Subscriber, running_subscriber

WORST = "password='a; "
HARMLESS = "lorem ipsum. "
NOTICES = 5  # in a minute


@pytest.fixture
def settings() -> Settings:
    return replace(QUICK, notices_per_minute=NOTICES)


class Heartbeat:
    """The longest time of the processor between two turns of a task, in seconds."""

    longest = 0.0

    async def run(self) -> None:
        last = time.thread_time()
        while True:
            await anyio.sleep(0.001)
            now = time.thread_time()
            self.longest, last = max(self.longest, now - last), now


@asynccontextmanager
async def heartbeat() -> AsyncIterator[Heartbeat]:
    beating = Heartbeat()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(beating.run)
        yield beating
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("rows", [1, 20])
async def test_an_error_with_a_value_of_three_megabytes(
    source_db: Database, target_db: Database, subscriber: Subscriber, rows: int
) -> None:
    blocked = {}
    for name, unit in (("harmless", HARMLESS), ("worst", WORST)):
        await source_db.execute(f"CREATE TABLE {name} (id int, v text); CREATE PUBLICATION {name} FOR TABLE {name}")
        await target_db.execute(f"CREATE TABLE {name} (id int, v int)")
        await subscriber.create(source_db, name, name, binary=False)
        await subscriber.wait_for_ready(source_db, name)
        subscriber.log.clear()
        async with heartbeat() as beats:
            await source_db.execute(
                f"INSERT INTO {name} SELECT n, repeat($${unit}$$, {3_000_000 // len(unit)})"
                f" FROM generate_series(1, {rows}) n"
            )
            # Once in a batch, and once when the change is applied alone; and again.
            await subscriber.log.wait_for(r'(?s)(ERROR:  invalid input syntax for type integer: "[^\n]*\n.*){2}')
        blocked[name] = beats.longest
        assert max(map(len, subscriber.log.text().splitlines())) < 2 * TEXT_LIMIT
        assert "characters in all)" in subscriber.log.text()
        shown = subscriber.log.text("json")
        assert unit[:6] not in shown
        assert "********" not in shown
        await subscriber.execute(f"ALTER SUBSCRIPTION {name} DISABLE")
    assert blocked["worst"] < 10 * blocked["harmless"], blocked


async def test_notices_of_a_publisher(
    source_db: Database, target_db: Database, subscriber: Subscriber, hostile: Hostile
) -> None:
    liar = await hostile.to(source_db.server.port)
    await source_db.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION p FOR TABLE t")
    await target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    blocked = {}
    for name, unit in (("harmless", HARMLESS), ("worst", WORST)):
        await subscriber.create(liar.dsn(source_db.dsn()), "p", name, copy_data=False)
        await subscriber.wait_for_ready(source_db, name)
        subscriber.log.clear()
        liar.tell("notice in the stream", unit * (700_000 // len(unit)))
        async with heartbeat() as beats:
            for row in range(4 * NOTICES):
                await source_db.execute(f"INSERT INTO t VALUES ({row})")
            await source_db.wait_for_catchup(name)
        liar.tell(None)
        blocked[name] = beats.longest
        notices = [record for record in subscriber.log.records if keys(record).get("event") == "publisher.notice"]
        assert len(notices) == NOTICES
        assert all(len(record.getMessage()) < 8 * TEXT_LIMIT for record in notices)
        assert await target_db.value("SELECT count(*) FROM t") == 4 * NOTICES
        await subscriber.execute(f"DROP SUBSCRIPTION {name}")
        for database in (source_db, target_db):
            await database.execute("TRUNCATE t")
    assert blocked["worst"] < 10 * blocked["harmless"], blocked


async def test_notices_that_were_not_logged_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    log = NoticeLog(2)
    notice = {"V": "NOTICE", "M": "hello"}
    with caplog.at_level(telemetry.LOG, "subscriber"):
        for _ in range(1_003):
            log(notice)
        log.end_minute()
        log(notice)
        log.end_minute()
    assert [record.getMessage().partition("  HINT")[0] for record in caplog.records] == [
        "hello",
        "hello",
        "1,001 messages of the publisher in the last minute were not logged",
        "hello",
    ]


NAMES = ["Relation.namespace", "Relation.name", "Relation.columns.name", "Type.name", "BeginPrepare.gid"]


@pytest.mark.parametrize("field", NAMES)
async def test_a_name_that_no_server_has(
    source_db: Database, target_db: Database, subscriber: Subscriber, hostile: Hostile, field: str
) -> None:
    liar = await hostile.to(source_db.server.port)
    tables = "CREATE TYPE mood AS ENUM ('sad'); CREATE TABLE t (id int PRIMARY KEY, feels mood)"
    await source_db.execute(tables, "CREATE PUBLICATION p FOR TABLE t")
    await target_db.execute(tables)
    await subscriber.create(liar.dsn(source_db.dsn()), "p", two_phase=True)
    await subscriber.wait_for_ready(source_db)
    liar.tell(field, WORST * 230_000)
    await source_db.execute("BEGIN; INSERT INTO t VALUES (1, 'sad'); PREPARE TRANSACTION 'its own'")
    await source_db.execute("COMMIT PREPARED 'its own'")
    match = await subscriber.log.wait_for(r"ERROR:  ([A-Z ]+) message has a name of ([0-9,]+) bytes")
    assert int(match[2].replace(",", "")) > 2_900_000
    liar.tell(None)
    await target_db.wait_for("SELECT count(*) FROM t", 1)


async def test_an_origin_with_a_long_name(
    source_db: Database, target_db: Database, subscriber: Subscriber, hostile: Hostile
) -> None:
    liar = await hostile.to(source_db.server.port)
    await source_db.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION p FOR TABLE t")
    await source_db.execute("SELECT pg_replication_origin_create('elsewhere')")
    await target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    await subscriber.create(liar.dsn(source_db.dsn()), "p")
    await subscriber.wait_for_ready(source_db)
    liar.tell("Origin.name", WORST * 230_000)
    async with source_db.connection() as connection:
        await connection.execute("SELECT pg_replication_origin_session_setup('elsewhere')")
        await connection.execute("INSERT INTO t VALUES (1)")
        await connection.execute("SELECT pg_replication_origin_session_reset()")
    await target_db.wait_for("SELECT count(*) FROM t", 1)
    await source_db.execute("SELECT pg_replication_origin_drop('elsewhere')")


async def test_descriptions_of_tables_have_a_limit(source_db: Database, target_db: Database) -> None:
    small = replace(QUICK, relation_cache_size=4_000)
    for database in (source_db, target_db):
        await database.execute(*(f"CREATE TABLE t{number} (id int PRIMARY KEY)" for number in range(10)))
    await source_db.execute("CREATE PUBLICATION p FOR ALL TABLES")
    async with running_subscriber(target_db, settings=small) as subscriber:
        await subscriber.create(source_db, "p", copy_data=False)
        for number in range(10):
            await source_db.execute(f"INSERT INTO t{number} VALUES (1)")
        await subscriber.log.wait_for(r"ERROR:  the publisher has described tables that need more than 4,000 bytes")
        await subscriber.log.wait_for("HINT:  .*relation_cache_size")
    async with running_subscriber(target_db) as subscriber:
        await source_db.wait_for_catchup("s")
    assert await target_db.value("SELECT count(*) FROM t9") == 1


def keys(record: logging.LogRecord) -> telemetry.LogKeys:
    log_keys: telemetry.LogKeys = record.__dict__["keys"]
    return log_keys
