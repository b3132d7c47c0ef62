"""The copy in parts: exact rows afterwards, with concurrent writes and kills."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import pytest
from pyspark.sql import SparkSession

from subscriber.demo.compare import compare
from subscriber.errors import SubscriberError
from subscriber.exception_groups import root_cause
from subscriber.spark.copy.job import TableProgress, copy_tables
from subscriber.spark.session import DAEMON
from tests.cli.test_secrets import not_marked
from tests.faults.environment import Scene, scene
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriber
from tests.processes import command_line, family
from tests.spark.test_secrets import in_words, watch

PART = 256 * 1024  # bytes, so that small tables have parts

TABLES = """
CREATE TYPE mood AS ENUM ('sad', 'ok');
CREATE TABLE big (id int PRIMARY KEY, a int, note text, price numeric(10,2), at timestamptz DEFAULT now());
CREATE TABLE "Odd ""one" (id int PRIMARY KEY, "select" mood, words text[]);
CREATE TABLE no_key (a int, b text);
CREATE TABLE empty (id int PRIMARY KEY);
CREATE TABLE parts (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (2000);
CREATE TABLE parts_2 PARTITION OF parts FOR VALUES FROM (2000) TO (1000000);
CREATE TABLE referring (id int PRIMARY KEY REFERENCES big);
"""
ROWS = """
INSERT INTO big SELECT i, i, nullif(repeat(md5(i::text), 2), ''), i / 3.0 FROM generate_series(1, 20000) i;
INSERT INTO "Odd ""one" SELECT i, 'ok', ARRAY['x', NULL, i::text] FROM generate_series(1, 3000) i;
INSERT INTO no_key SELECT i % 10, nullif('b' || i % 3, 'b0') FROM generate_series(1, 5000) i;
INSERT INTO parts SELECT i, 'v' || i FROM generate_series(1, 4000) i;
INSERT INTO referring SELECT generate_series(1, 500);
"""
CHANGES = [
    "UPDATE big SET a = a + 1, note = NULL WHERE id = {n}",
    "DELETE FROM big WHERE id = 501 + {n}",
    "INSERT INTO big (id, a) VALUES (100000 + {n}, 1)",
    "INSERT INTO no_key VALUES ({n}, 'new')",
    "UPDATE parts SET id = id + 50000 WHERE id = {n}",
]


# Of a copy of t, some ranges are complete for a while, and not all.
SLOW_ROWS = (
    "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.002); RETURN NEW; END'",
    "CREATE TRIGGER slow BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION slow()",
    "ALTER TABLE t ENABLE ALWAYS TRIGGER slow",
)
SLOW = """
CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(2); RETURN NULL; END';
CREATE TRIGGER slow BEFORE INSERT ON big EXECUTE FUNCTION slow();
ALTER TABLE big ENABLE ALWAYS TRIGGER slow;
"""


class GivenUp(Exception):
    """The user has stopped the copy."""


@dataclass
class Pair:
    source: Database
    target: Database
    subscriber: Subscriber

    async def subscribe(self, **options: object) -> None:
        await self.source.execute(TABLES, ROWS, "CREATE PUBLICATION p FOR ALL TABLES WITH (publish_via_partition_root)")
        await self.target.execute(TABLES)
        await self.subscriber.create(self.source, "p", "s", **options)

    async def copy(self, spark: SparkSession) -> list[TableProgress]:
        return await copy_tables(self.target.dsn(), "s", spark=spark, part_bytes=PART)

    async def hand_over(self) -> None:
        """Let the launcher have it, until it has all tables."""
        await self.subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
        await self.subscriber.wait_for_ready(self.source, timeout=60)

    async def assert_same(self) -> dict[str, int]:
        rows = {}
        async for result in compare(self.source.dsn(), self.target.dsn()):
            assert not result.differs, result
            rows[result.name] = result.same
        return rows

    async def left(self) -> tuple[list[str], int]:
        """Slots on the publisher, and rows about the copy in the catalog."""
        slots = await self.source.rows("SELECT slot_name FROM pg_replication_slots WHERE database = current_database()")
        count = "SELECT (SELECT count(*) FROM subscriber.bulk_copy) + (SELECT count(*) FROM subscriber.progress)"
        return [slot for (slot,) in slots], await self.target.value(count)

    @asynccontextmanager
    async def written_to(self) -> AsyncIterator[None]:
        """Changes on the source for the length of the block."""
        stop = anyio.Event()

        async def write() -> None:
            connection = await self.source.connect()
            number = 0
            while not stop.is_set():
                number += 1
                for change in CHANGES:
                    await connection.execute(change.format(n=number))
                await anyio.sleep(0.005)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write)
            yield
            stop.set()


@pytest.fixture
def pair(source_db: Database, target_db: Database, subscriber: Subscriber) -> Pair:
    return Pair(source_db, target_db, subscriber)


@pytest.mark.timeout(300)
async def test_all_tables_are_copied_in_parts_and_handed_over(pair: Pair, spark: SparkSession) -> None:
    await pair.subscribe(enabled=False)
    async with pair.written_to():
        tables = {table.name: table for table in await pair.copy(spark)}
        assert tables["public.big"].parts > 3
        assert tables["public.parts"].parts == 2
        assert {table.parts_done - table.parts for table in tables.values()} == {0}
        assert set(await pair.target.rows("SELECT srsubstate::text FROM subscriber.subscription_rel")) == {("f",)}
        await pair.hand_over()
    await pair.subscriber.wait_for_ready(pair.source, timeout=60)
    rows = await pair.assert_same()
    assert rows["big"] > 19000
    assert await pair.left() == (["s"], 1)
    positions = await pair.target.rows("SELECT DISTINCT srsublsn::text FROM subscriber.subscription_rel")
    assert len(positions) == 1  # all tables together
    assert await pair.copy(spark) == []


@pytest.mark.timeout(300)
async def test_a_table_of_which_ranges_are_copied_is_the_launchers(pair: Pair, spark: SparkSession) -> None:
    """Spark would copy rows again that are on the target."""
    for database in (pair.source, pair.target):
        await database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE other (id int PRIMARY KEY)")
    await pair.target.execute(*SLOW_ROWS)
    await pair.source.execute(
        "INSERT INTO t SELECT generate_series(1, 1000)",
        "INSERT INTO other SELECT generate_series(1, 10)",
        "CREATE PUBLICATION p FOR TABLE t",
    )
    subscriber = pair.subscriber
    await subscriber.stop()
    subscriber.settings = replace(subscriber.settings, range_rows=20, range_duration=0.02)
    subscriber.start()
    await subscriber.create(pair.source, "p", "s", copy_engine="ranges")
    await pair.target.wait_for("SELECT count(*) > 2 FROM subscriber.copied_range")
    async with pair.source.connection() as connection, connection.transaction():
        await connection.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")  # no further range
        await subscriber.stop()
        assert await pair.target.value("SELECT srsubstate::text FROM subscriber.subscription_rel") == "d"
    await pair.source.execute("ALTER PUBLICATION p ADD TABLE other")
    await subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
    assert [table.name for table in await pair.copy(spark)] == ["public.other"]
    subscriber.start()
    await subscriber.wait_for_ready(pair.source, timeout=60)
    assert await pair.assert_same() == {"t": 1000, "other": 10}


@pytest.mark.timeout(300)
async def test_a_copy_that_was_given_up_is_done_again(pair: Pair, spark: SparkSession) -> None:
    """Complete tables are kept, the others are emptied; rows from before the copy are never removed."""
    await pair.subscribe(enabled=False)
    await pair.target.execute("INSERT INTO no_key VALUES (-1, 'ours')", SLOW)

    def look(_phase: str, tables: Sequence[TableProgress]) -> None:
        if 0 < sum(table.parts_done for table in tables) < sum(table.parts for table in tables):
            raise GivenUp

    with pytest.raises(BaseExceptionGroup) as given_up:
        await copy_tables(pair.target.dsn(), "s", spark=spark, part_bytes=PART, on_progress=look)
    assert isinstance(root_cause(given_up.value), GivenUp)
    await pair.target.execute("DROP TRIGGER slow ON big")
    async with pair.written_to():
        await pair.subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
        await pair.copy(spark)
        await pair.hand_over()
    await pair.subscriber.wait_for_ready(pair.source, timeout=60)
    assert await pair.target.value("SELECT count(*) FROM no_key WHERE a = -1") == 1
    await pair.target.execute("DELETE FROM no_key WHERE a = -1")
    await pair.assert_same()
    assert await pair.left() == (["s"], 1)


@pytest.mark.timeout(300)
async def test_a_table_that_cannot_be_copied_is_named_and_the_others_are(pair: Pair, spark: SparkSession) -> None:
    await pair.subscribe(enabled=False)
    await pair.target.execute("ALTER TABLE no_key ADD CHECK (a <> 7)")
    with pytest.raises(SubscriberError, match=r'could not copy table "public\.no_key"') as caught:
        await pair.copy(spark)
    assert caught.value.sqlstate == "23514"
    states = dict(
        await pair.target.rows("SELECT srrelid::regclass::text, srsubstate::text FROM subscriber.subscription_rel")
    )
    assert states.pop("no_key") == "d"
    assert set(states.values()) == {"f"}
    await pair.subscriber.execute("DROP SUBSCRIPTION s")
    assert await pair.source.value("SELECT count(*) FROM pg_replication_slots WHERE slot_name LIKE 'pg\\_%'") == 0


@pytest.mark.timeout(300)
async def test_tables_that_one_side_refuses_are_left_out(pair: Pair, spark: SparkSession) -> None:
    """Three that no plan can be made for, of either server's fault; the others are copied."""
    await pair.subscribe(enabled=False)
    await pair.source.execute("ALTER TABLE no_key RENAME TO elsewhere")
    await pair.target.execute("ALTER TABLE referring RENAME id TO other", "ALTER TABLE empty RENAME id TO other")
    with pytest.raises(SubscriberError, match=r'"public\.no_key" not found on publisher'):
        await pair.copy(spark)
    states = "SELECT srrelid::regclass::text FROM subscriber.subscription_rel WHERE srsubstate <> 'f'"
    assert {name for (name,) in await pair.target.rows(states)} == {"no_key", "referring", "empty"}
    await pair.subscriber.execute("DROP SUBSCRIPTION s")


@pytest.mark.timeout(300)
async def test_indexes_that_are_missing_are_built_after_the_copy(pair: Pair, spark: SparkSession) -> None:
    """Also if the keeper dies between the copy and the index. An index that cannot be built is only reported."""
    await pair.subscribe(enabled=False)
    await pair.source.execute(
        "CREATE INDEX by_note ON big (lower(note)) WHERE a > 3",
        "CREATE INDEX known ON big (a)",
        "CREATE UNIQUE INDEX on_parts ON parts (id, v)",
        "CREATE FUNCTION ours(int) RETURNS int IMMUTABLE LANGUAGE sql AS 'SELECT $1'",
        "CREATE INDEX elsewhere_unknown ON no_key (ours(a))",
    )
    await pair.target.execute("CREATE INDEX known ON big (price)")

    def go(phase: str, _tables: Sequence[TableProgress]) -> None:
        if phase == "building indexes":
            raise GivenUp

    with pytest.raises(GivenUp):
        await copy_tables(pair.target.dsn(), "s", spark=spark, part_bytes=PART, indexes=True, on_progress=go)
    states = "SELECT DISTINCT srsubstate::text FROM subscriber.subscription_rel"
    assert await pair.target.rows(states) == [("d",)]
    with pytest.raises(SubscriberError, match=r'an index of table "public\.no_key" was not built') as caught:
        await copy_tables(pair.target.dsn(), "s", spark=spark, part_bytes=PART, indexes=True)
    assert await pair.target.rows(states) == [("f",)]
    assert caught.value.sqlstate == "42883"
    await pair.hand_over()
    definitions = dict(await pair.target.rows("SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'"))
    assert "WHERE (a > 3)" in definitions["by_note"]
    assert "(price)" in definitions["known"]
    assert definitions.keys().isdisjoint({"elsewhere_unknown", "on_parts"})
    await pair.assert_same()


# --- kill -9 ----------------------------------------------------------------------------------------


def processes(pattern: str, above: int) -> list[int]:
    """Return the descendants of a process whose command line matches."""
    parents, lines = {}, {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            pid = int(entry.name)
            parents[pid] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            lines[pid] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()

    def is_below(pid: int) -> bool:
        while pid := parents.get(pid, 0):
            if pid == above:
                return True
        return False

    return [pid for pid, line in lines.items() if pattern in line and is_below(pid)]


@pytest.fixture
async def faults(source_db: Database, target_db: Database, tmp_path: Path) -> AsyncIterator[Scene]:
    async with scene(source_db, target_db, tmp_path) as found:
        yield found


VICTIMS = {
    "Python worker": DAEMON,
    "JVM": "org.apache.spark.deploy.SparkSubmit",
    "driver": "subscriber.spark.copy.driver_process",
    "keeper": "subscriber.spark.copy.launched_copy",
    "launcher": "",
    "publisher": "",
    "target": "",
}


@pytest.mark.timeout(300)
async def test_a_copy_ends_with_the_launcher_that_has_started_it(faults: Scene) -> None:
    """A kill -9 of the launcher ends the copy, its driver, the JVM and the workers. The next launcher continues.

    Arguments of processes, the log and the status show no password.
    """
    await faults.append(10_000)
    await faults.create_subscription(options="WITH (copy_engine = spark)")
    faults.worker.start()
    assert faults.worker.pid is not None
    with anyio.fail_after(60):  # a program hides its arguments soon after its start
        while "launcher started" not in faults.worker.last_lines():
            await anyio.sleep(0.05)
    lines = set[str]()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch, faults.worker.pid, lines)
        await faults.target.wait_for("SELECT count(rows) > 0 FROM subscriber.copy_done", timeout=100)
        tasks.cancel_scope.cancel()
    started = family(faults.worker.pid) - {faults.worker.pid}
    modules = ("subscriber.spark.copy.launched_copy", "subscriber.spark.copy.driver_process")
    for word in (*modules, "SparkSubmit", DAEMON):
        assert any(word in line for line in lines), word
    not_marked("\n".join(lines))
    not_marked(json.dumps(await in_words(faults.target)))
    await faults.worker.kill9()
    with anyio.move_on_after(10):
        while any(map(command_line, started)):
            await anyio.sleep(0.1)
    left = [command_line(pid) for pid in started if command_line(pid)]
    assert not left
    faults.worker.start()
    assert await faults.finish(timeout=120) == {"log": 10_000}
    not_marked("\n".join(faults.worker.lines()))


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", list(VICTIMS))
async def test_a_copy_killed_in_the_middle_continues(faults: Scene, victim: str) -> None:
    await faults.source.execute(
        "ALTER TABLE log REPLICA IDENTITY FULL",
        "INSERT INTO log (writer, number, text) SELECT 7, i, repeat('y', 500) FROM generate_series(1, 600000) i",
    )
    await faults.create_subscription(options="WITH (copy_engine = spark)")
    done = "SELECT count(rows) FROM subscriber.copy_done"
    stop = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(faults.keep_appending, stop)
        faults.worker.start()
        await faults.target.wait_for(f"SELECT ({done}) > 0", timeout=180)
        await anyio.sleep(random.random() / 2)
        assert faults.worker.pid is not None
        if victim in ("publisher", "target"):
            server = getattr(faults, "source" if victim == "publisher" else "target").server
            await server.kill9()
            await server.start()
        elif victim == "launcher":
            await faults.worker.kill9()
            faults.worker.start()
        else:
            pids = processes(VICTIMS[victim], faults.worker.pid)
            assert pids
            os.kill(random.choice(pids), signal.SIGKILL)
        synced = "SELECT bool_and(srsubstate IN ('s', 'r')) FROM subscriber.subscription_rel"
        await faults.target.wait_for(synced, timeout=240)
        stop.set()
    counts = await faults.finish(timeout=120)
    assert counts["log"] > 600_000
