"""Mirrors in SQLite: the stored tables and values, and the refused ones."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

import anyio
import pytest

import subscriber
from subscriber import ApplyError, ConninfoError, Hook, HookError, Hooks, PublisherError, SubscriberError
from subscriber.errors import MappingError, PublisherReplaced, SlotLost
from subscriber.settings import Settings
from subscriber.targets.sqlalchemy.database import MirrorDatabase
from subscriber.targets.sqlalchemy.row_buffer import RowBuffer
from subscriber.targets.sqlalchemy.transaction import SqlTransaction
from tests.mirror.conftest import AS_TEXT, Mirror, rows_of_types

# PostgreSQL's text -> SQLite's value.
TYPES: list[tuple[str, str, Any]] = [
    ("bool", "t", 1),
    ("int2", "-32768", -32768),
    ("int8", "9223372036854775807", 9223372036854775807),
    ("oid", "4294967295", 4294967295),
    ("float4", "0.1", 0.1),
    ("float8", "1e-300", 1e-300),
    ("numeric(30,10)", "12345678901234567890.0123456789", "12345678901234567890.0123456789"),
    ("text", "a\tb\\c\n'é", "a\tb\\c\n'é"),
    ("bytea", "\\x00ff", b"\0\xff"),
    *AS_TEXT,
]


async def test_types_are_the_same_by_copy_and_by_stream(mirror: Mirror) -> None:
    await rows_of_types(mirror, TYPES, mirror.url)
    copied, nulls, streamed = mirror.rows("SELECT * FROM t ORDER BY id")
    assert copied[1:] == tuple(value for _, _, value in TYPES)
    assert nulls[1:] == (None,) * len(TYPES)
    assert streamed[1:] == copied[1:]


async def test_changes_of_each_kind_arrive_in_sqlite(mirror: Mirror) -> None:
    await mirror.source.execute(
        "CREATE TABLE t (a int, b text, c text, PRIMARY KEY (b, a))",
        "ALTER TABLE t ALTER c SET STORAGE external",
        "CREATE SCHEMA x; CREATE TABLE x.f (a int PRIMARY KEY, b int); ALTER TABLE x.f REPLICA IDENTITY FULL",
        "INSERT INTO t SELECT i, 'x', repeat('c', 3000) FROM generate_series(1, 5) i",
    )
    await mirror.run()
    await mirror.source.execute(
        "UPDATE t SET a = a + 10 WHERE a > 2; DELETE FROM t WHERE a = 1; INSERT INTO t VALUES (1, 'x', 'again')",
        "UPDATE t SET c = 'short' WHERE a = 15; UPDATE t SET b = 'y' WHERE a = 14; UPDATE t SET c = 'c' WHERE a = 14",
        "INSERT INTO x.f SELECT i, i FROM generate_series(1, 3000) i",  # arrives in blocks
        "UPDATE x.f SET b = 0 WHERE a % 2 = 0; UPDATE x.f SET a = a + 5000 WHERE a > 2999; DELETE FROM x.f WHERE a = 1",
    )
    await mirror.run()
    assert mirror.rows("SELECT a, b, substr(c, 1, 5), length(c) FROM t ORDER BY a") == [
        (1, "x", "again", 5),
        (2, "x", "ccccc", 3000),
        (13, "x", "ccccc", 3000),
        (14, "y", "c", 1),
        (15, "x", "short", 5),
    ]
    assert await mirror.source.value("SELECT stream_txns > 0 FROM pg_stat_replication_slots WHERE slot_name = 'm'")
    expected = await mirror.source.rows("SELECT a, b FROM x.f ORDER BY a")
    assert mirror.rows("SELECT a, b FROM x_f ORDER BY a") == expected
    await mirror.source.execute("TRUNCATE t, x.f", "INSERT INTO t VALUES (1, 'z', NULL)")
    await mirror.run()
    assert mirror.rows("SELECT * FROM t") == [(1, "z", None)]
    assert mirror.rows("SELECT * FROM x_f") == []


async def test_texts_do_not_depend_on_the_time_zone_of_the_publisher(mirror: Mirror) -> None:
    mirror.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, at TEXT, many TEXT)")
    await mirror.source.execute(
        f"ALTER DATABASE {mirror.source.name} SET timezone = 'Asia/Kolkata'",
        "CREATE TABLE t (id int PRIMARY KEY, at timestamptz, many timestamptz[])",
        "INSERT INTO t VALUES (1, '2000-01-01 00:00+00', '{2000-01-01 00:00+00}')",
    )
    await mirror.run()
    await mirror.source.execute("INSERT INTO t VALUES (2, '2000-01-01 00:00+00', '{2000-01-01 00:00+00}')")
    await mirror.run()
    moment = "2000-01-01 00:00:00+00"
    assert mirror.rows("SELECT at, many FROM t") == [(moment, f'{{"{moment}"}}')] * 2


async def test_a_lost_connection_to_the_publisher(mirror: Mirror) -> None:
    """The mirror connects again, and repeats the transaction that it had not committed."""
    settings = Settings(first_retry_delay=0.01, retry_interval=0.1)
    end = "SELECT pg_terminate_backend(pid) FROM pg_stat_replication WHERE application_name = 'm'"
    await mirror.source.execute("CREATE TABLE t (a int PRIMARY KEY, b text)")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(mirror.run, until=subscriber.Lsn.parse("F/0"), settings=settings))
        for number in range(3):
            await mirror.source.wait_for("SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'", 1)
            await mirror.source.execute(
                f"INSERT INTO t SELECT {number} * 10000 + i, 'x' FROM generate_series(1, 5000) i", end
            )
        with anyio.fail_after(20):
            while len(mirror.rows("SELECT a FROM t")) < 15000:
                await anyio.sleep(0.05)
        tasks.cancel_scope.cancel()
    assert mirror.rows("SELECT count(DISTINCT a) FROM t") == [(15000,)]


async def test_a_connection_is_lost_while_a_transaction_is_committed(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transaction is committed, and nobody has received the result. The next attempt reads the position."""
    commit, lost = SqlTransaction.commit, list[int]()

    async def commit_and_lose(transaction: SqlTransaction) -> None:
        await commit(transaction)
        if not lost and mirror.rows("SELECT a FROM t"):
            lost.append(1)
            await mirror.source.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_replication")
            await anyio.sleep(10)

    await mirror.source.execute("CREATE TABLE t (a int PRIMARY KEY)")
    await mirror.run()
    monkeypatch.setattr(SqlTransaction, "commit", commit_and_lose)
    await mirror.source.execute("INSERT INTO t VALUES (1)")
    await mirror.source.execute("INSERT INTO t VALUES (2)")
    await mirror.run(settings=Settings(first_retry_delay=0.01, retry_interval=0.1))
    assert lost
    assert mirror.rows("SELECT a FROM t ORDER BY a") == [(1,), (2,)]


async def test_the_position_is_confirmed_at_the_end(mirror: Mirror) -> None:
    """Also where no transaction was applied: the publisher need not retain its WAL."""
    await mirror.source.execute("CREATE TABLE t (a int PRIMARY KEY)")
    await mirror.run()
    await mirror.source.execute("CREATE TABLE not_published_yet (a int)")
    end = subscriber.Lsn.parse(await mirror.source.value("SELECT pg_current_wal_insert_lsn()::text"))
    await mirror.run(until=end)
    confirmed = await mirror.source.value("SELECT confirmed_flush_lsn::text FROM pg_replication_slots")
    assert subscriber.Lsn.parse(confirmed) >= end


async def test_a_table_that_was_there_before(mirror: Mirror) -> None:
    """A text column gets PostgreSQL's text; additional columns are not changed."""
    mirror.execute("CREATE TABLE t (own TEXT DEFAULT 'mine', at TEXT, id INTEGER PRIMARY KEY)")
    await mirror.source.execute("CREATE TABLE t (id int PRIMARY KEY, at date)", "INSERT INTO t VALUES (1, 'infinity')")
    await mirror.run(create_tables=False)
    mirror.execute("UPDATE t SET own = 'kept'")
    await mirror.source.execute("UPDATE t SET at = '0044-03-15 BC'")
    await mirror.run()
    assert mirror.rows("SELECT * FROM t") == [("kept", "0044-03-15 BC", 1)]


async def test_a_column_that_comes_later(mirror: Mirror) -> None:
    await mirror.source.execute("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    await mirror.run()
    await mirror.source.execute("ALTER TABLE t ADD b int", "INSERT INTO t VALUES (2, 2)")
    with pytest.raises(MappingError, match="is missing replicated columns: b") as caught:
        await mirror.run()
    assert 'for replication origin "m"' in str(caught.value.context)
    mirror.execute("ALTER TABLE t ADD b INTEGER")
    await mirror.run()
    assert mirror.rows("SELECT * FROM t") == [(1, None), (2, 2)]


async def test_a_table_that_comes_later_is_passed_over(mirror: Mirror, caplog: pytest.LogCaptureFixture) -> None:
    await mirror.source.execute("CREATE TABLE t (id int PRIMARY KEY)")
    await mirror.run()
    await mirror.source.execute(
        "CREATE TABLE u (id int PRIMARY KEY)", "INSERT INTO u VALUES (1)", "INSERT INTO u VALUES (2)"
    )
    await mirror.source.execute("INSERT INTO t VALUES (1)")
    await mirror.run()
    assert [r.message for r in caplog.records if "passed over" in r.message] == [
        'changes of table "public.u" are passed over: the mirror began without it'
    ]
    assert mirror.rows("SELECT * FROM t") == [(1,)]


@pytest.mark.parametrize(
    ("table", "there", "message"),
    [
        ("t (a int)", "", 'table "public.t" has no key'),
        ("t (a int PRIMARY KEY)", "t (a INTEGER)", "the primary key of table"),
        ("t (a int PRIMARY KEY)", "t (b INTEGER PRIMARY KEY)", "missing replicated columns: a"),
        ("t (a int PRIMARY KEY, b int)", "t (a INTEGER PRIMARY KEY)", "missing replicated columns: b"),
        ("t (a int PRIMARY KEY, b int)", "t (a INTEGER PRIMARY KEY, b NUMERIC)", 'values can be made for column "b"'),
        ("t (a int PRIMARY KEY)", "t (a INTEGER PRIMARY KEY); INSERT INTO t VALUES (7)", "is not empty"),
        (
            "x_y (a int PRIMARY KEY); CREATE SCHEMA x; CREATE TABLE x.y (a int PRIMARY KEY)",
            "",
            "would be one on the target",
        ),
        ('t (a int PRIMARY KEY); CREATE TABLE "T" (a int PRIMARY KEY)', "", "would be one on the target"),
        ('t (a int PRIMARY KEY, "A" int)', "", 'columns "a" of table "public.t" differ in case only'),
    ],
)
async def test_a_table_that_sqlite_cannot_keep_is_refused(mirror: Mirror, table: str, there: str, message: str) -> None:
    await mirror.source.execute(f"CREATE TABLE {table}")
    if there:
        mirror.execute(f"CREATE TABLE {there}")
    for _ in range(2):  # and the next time
        with pytest.raises(MappingError, match=message):
            await mirror.run()


@pytest.mark.parametrize("changes", [0, 5000], ids=["alone", "together"])
async def test_a_value_that_sqlite_cannot_keep_stops_the_mirror_and_is_not_shown(mirror: Mirror, changes: int) -> None:
    """Earlier transactions are committed, although they were in the same target transaction."""
    settings = Settings(mirror_batch_changes=changes)
    await mirror.source.execute("CREATE TABLE t (a int PRIMARY KEY, b float8)", "INSERT INTO t VALUES (1, 2)")
    await mirror.run(settings=settings)
    await mirror.source.execute("INSERT INTO t VALUES (2, 3)", "INSERT INTO t VALUES (3, 'NaN')")
    for _ in range(2):
        with pytest.raises(ApplyError, match=r'value of column "b" of ".*" cannot be kept') as caught:
            await mirror.run(settings=settings)
        assert "nan" not in str(caught.value).lower()
    assert mirror.rows("SELECT a FROM t") == [(1,), (2,)]


async def test_a_mirror_refuses_a_slot_that_is_not_its_own(mirror: Mirror) -> None:
    await mirror.source.execute("CREATE TABLE t (a int PRIMARY KEY)")
    await mirror.source.execute("SELECT pg_create_logical_replication_slot('m', 'pgoutput')")
    with pytest.raises(PublisherError, match='slot "m" exists, and the target has no mirror'):
        await mirror.run()
    await mirror.source.execute("SELECT pg_drop_replication_slot('m')")
    await mirror.run()
    await mirror.source.execute("SELECT pg_drop_replication_slot('m')")
    with pytest.raises(SlotLost, match='slot "m" does not exist any more'):
        await mirror.run()
    mirror.execute("UPDATE subscriber_mirror SET system_id = '7'")
    with pytest.raises(PublisherReplaced):
        await mirror.run()


async def test_a_mirror_stops_when_another_one_has_moved_its_position(mirror: Mirror) -> None:
    await mirror.source.execute("CREATE TABLE t (a int PRIMARY KEY)")
    await mirror.run()
    await mirror.source.execute("INSERT INTO t VALUES (1)")
    with pytest.raises(ApplyError, match="is not where it was"):
        await mirror.run(on_position=lambda _: mirror.execute("UPDATE subscriber_mirror SET lsn = '0/1'"))
    assert mirror.rows("SELECT * FROM t") == []


@pytest.mark.parametrize("url", ["nonsense", "nosuch://x", "sqlite:///x.db"])
async def test_a_url_that_cannot_be_used_is_refused(mirror: Mirror, url: str) -> None:
    with pytest.raises(ConninfoError, match="URL cannot be used"):
        await mirror.run(target=url)


async def test_errors_of_the_driver_have_no_values(mirror: Mirror) -> None:
    mirror.execute("CREATE TABLE t (a INTEGER PRIMARY KEY, b TEXT CHECK (b <> 'secret'))")
    await mirror.source.execute("CREATE TABLE t (a int PRIMARY KEY, b text)", "INSERT INTO t VALUES (1, 'secret')")
    with pytest.raises(SubscriberError, match="refused a statement: IntegrityError") as caught:
        await mirror.run()
    assert "secret" not in str(caught.value)


async def test_bytes_that_are_no_text(mirror: Mirror) -> None:
    """A database of encoding SQL_ASCII has texts that are none."""
    await mirror.source.execute("CREATE TABLE t (a int PRIMARY KEY, b text)")
    await mirror.run()
    async with MirrorDatabase.open(mirror.url, "m") as there:
        await there.load()
        async with there.begin() as transaction:
            rows = RowBuffer(transaction)
            await rows.upsert(there.tables["public", "t"], {"a": "1", "b": "\udcff"})
            with pytest.raises(ApplyError, match="cannot be written in the encoding"):
                await rows.flush()
    assert mirror.rows("SELECT * FROM t") == []


async def test_nothing_is_left_behind(mirror: Mirror) -> None:
    """No task, thread or connection, however it ends."""
    await mirror.source.execute("CREATE TABLE t (a int PRIMARY KEY, b float8)")
    tasks, threads = asyncio.all_tasks(), set(threading.enumerate())
    await mirror.run()
    with pytest.raises(HookError):
        await mirror.run(hooks=Hooks({"nosuch": Hook()}))
    with anyio.move_on_after(0.3):
        await mirror.run(until=subscriber.Lsn.parse("F/0"), hooks=Hooks())
    await mirror.source.execute("INSERT INTO t VALUES (1, 'NaN')")
    with pytest.raises(ApplyError):
        await mirror.run()
    assert asyncio.all_tasks() == tasks
    with anyio.fail_after(5):  # the thread was requested to end
        # anyio keeps the threads of its pool, which the folder of large transactions uses.
        while {thread for thread in threading.enumerate() if "AnyIO worker" not in thread.name} - threads:
            await anyio.sleep(0.01)
    await mirror.source.wait_for("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'm'", 0)


async def test_a_mirror_can_be_cancelled_anywhere(mirror: Mirror) -> None:
    await mirror.source.execute(
        "CREATE TABLE t (a int PRIMARY KEY, b text)", "INSERT INTO t SELECT i, 'x' FROM generate_series(1, 5000) i"
    )

    for turn in range(1, 13):
        with anyio.move_on_after(turn * 0.03):
            await subscriber.mirror(mirror.source.dsn(), slot="m", publications=["p"], target=mirror.url)
        mirror.require_unlocked()
        await mirror.source.execute(f"INSERT INTO t SELECT {turn} * 10000 + i, 'y' FROM generate_series(1, 2000) i")
    await mirror.run()
    assert mirror.rows("SELECT count(*), count(DISTINCT a) FROM t") == [(29000, 29000)]


@pytest.mark.parametrize(
    "table",
    ["subscriber_mirror_table", '"Subscriber_Mirror"', "subscriber.mirror"],
    ids=["tables", "case", "schema"],
)
async def test_a_mirror_does_not_write_to_tables_of_the_program(mirror: Mirror, table: str) -> None:
    """The publisher chooses its tables' names. Rows of our tables determine the target tables that are written."""
    await mirror.source.execute(
        "CREATE SCHEMA subscriber",  # of an application
        f"CREATE TABLE {table} (slot text, schema_name text, table_name text, target text, key_columns text,"
        " PRIMARY KEY (slot, schema_name, table_name))",
        f"INSERT INTO {table} VALUES ('m', 'public', 'x', 'accounts', '[\"id\"]')",
    )
    with pytest.raises(MappingError, match="has the name of a table of ours"):
        await mirror.run()
    assert mirror.rows("SELECT * FROM subscriber_mirror_table") == []


async def test_odd_names_are_names(mirror: Mirror) -> None:
    schema, table, column = ('"' + f'{kind}\'); DROP TABLE x; --%(a)s :b ""\n' + '"' for kind in "stc")
    await mirror.source.execute(
        f"CREATE SCHEMA {schema}",
        f"CREATE TABLE {schema}.{table} ({column} int PRIMARY KEY, v text)",
        f"INSERT INTO {schema}.{table} VALUES (1, 'a'), (2, 'b')",
    )
    await mirror.run()
    await mirror.source.execute(f"UPDATE {schema}.{table} SET v = 'c' WHERE {column} = 1")
    await mirror.source.execute(f"UPDATE {schema}.{table} SET {column} = 3 WHERE {column} = 2")
    await mirror.run()
    name = f"{schema[1:-1]}_{table[1:-1]}"
    assert mirror.rows(f'SELECT * FROM "{name}" ORDER BY 1') == [(1, "c"), (3, "b")]
