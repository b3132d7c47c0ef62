"""The initial copy by ranges, with a writer: every row arrives once, and no change is lost."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any

import anyio
import anyio.lowlevel
import asyncpg
import pytest

from subscriber.catalog import pause_requests, worker_sessions
from subscriber.lsn import Lsn
from subscriber.settings import Settings
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import QUICK, Program, Subscriber, Subscriptions

COLLISIONS = asyncpg.DeadlockDetectedError, asyncpg.UniqueViolationError  # of the writers
TABLE = "CREATE TABLE {} (id int PRIMARY KEY, n int NOT NULL DEFAULT 0, note text)"
LARGE = "(SELECT string_agg(md5(({} * 100 + j)::text), '') FROM generate_series(1, 100) j)"
FILL = f"INSERT INTO {{}} SELECT i, 0, {LARGE.format('i')} FROM generate_series(1, {{}}) i"
CONTENT = "SELECT count(*), coalesce(md5(string_agg(t::text, ',' ORDER BY id)), '') FROM {} t"

# Ranges of one key are deleted when the table is ready.
NOTE_SINGLES = (
    "CREATE TABLE singles (key text)",
    "CREATE FUNCTION note_single() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS"
    " 'BEGIN INSERT INTO public.singles VALUES (NEW.low[1]); RETURN NULL; END'",
    "CREATE TRIGGER note_single AFTER INSERT ON subscriber.copied_range"
    " FOR EACH ROW WHEN (NEW.single) EXECUTE FUNCTION note_single()",
    "ALTER TABLE subscriber.copied_range ENABLE ALWAYS TRIGGER note_single",
)


@pytest.fixture
def settings() -> Settings:
    """Ranges of few rows."""
    return Settings(
        retry_interval=QUICK.retry_interval,
        empty_database_poll_interval=QUICK.empty_database_poll_interval,
        range_rows=25,
        range_duration=0.025,
    )


async def prepare(source: Database, target: Database, *tables: str, rows: int = 1500) -> None:
    """Create tables on both sides, with rows on the publisher, and a publication."""
    for table in tables:
        await prepare_table(source, target, table, rows)
    await source.execute("CREATE PUBLICATION p FOR ALL TABLES")


async def prepare_table(source: Database, target: Database, table: str, rows: int = 100) -> None:
    """Create a table on both sides, with rows on the publisher."""
    await source.execute(TABLE.format(table), FILL.format(table, rows))
    await source.execute(f"ALTER TABLE {table} ALTER note SET STORAGE EXTERNAL")
    await target.execute(TABLE.format(table))


async def write(source: Database, table: str, seed: int, stop: anyio.Event) -> int:
    """Change random rows until `stop`. Returns the number of transactions."""
    chance, done = random.Random(seed), 0
    async with source.connection() as connection:
        while not stop.is_set():
            with suppress(*COLLISIONS):
                async with connection.transaction():
                    for _ in range(chance.randrange(1, 4)):
                        one, other = chance.randrange(1, 1600), chance.randrange(1, 1600)
                        statement = chance.choice(
                            [
                                f"UPDATE {table} SET n = n + 1 WHERE id = {one}",
                                f"DELETE FROM {table} WHERE id = {one}",
                                f"INSERT INTO {table} VALUES ({one}, 1, 'new') ON CONFLICT (id) DO NOTHING",
                                # A key that moves to another range, with a large value that does not change.
                                f"UPDATE {table} SET id = {one} WHERE id = {other}"
                                f" AND NOT EXISTS (SELECT FROM {table} WHERE id = {one})",
                            ]
                        )
                        await connection.execute(statement)
            done += 1
            await anyio.lowlevel.checkpoint()
    return done


@asynccontextmanager
async def writing(source: Database, *tables: str) -> AsyncIterator[None]:
    """Write to the tables for the length of the block."""
    stop = anyio.Event()
    async with anyio.create_task_group() as tasks:
        for seed, table in enumerate(tables):
            tasks.start_soon(write, source, table, seed, stop)
        await anyio.sleep(0.1)
        try:
            yield
        finally:
            stop.set()


async def same(source: Database, target: Database, *tables: str) -> None:
    """Assert that the tables have the same rows on both sides."""
    for table in tables:
        rows = [await database.rows(CONTENT.format(table)) for database in (source, target)]
        assert rows[0] == rows[1], table


async def test_rows_that_change_during_the_copy(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    await prepare(source_db, target_db, "t", "u")
    async with writing(source_db, "t", "u"):
        await subscriber.create(source_db, "p", "s", copy_engine="ranges")
        await subscriber.wait_for_ready(source_db, timeout=60)
    await source_db.wait_for_catchup("s")
    await same(source_db, target_db, "t", "u")
    assert not subscriber.log.has("copied in one snapshot")
    assert not subscriber.log.has("ERROR")
    assert await target_db.value("SELECT count(*) FROM subscriber.copied_range") == 0
    slots = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"
    assert await source_db.value(slots) == 1


async def test_several_ranges_of_a_table_at_a_time(
    source_db: Database, target_db: Database, processes: Path, subscriptions: Subscriptions
) -> None:
    """Places for synchronization workers that no table needs copy other ranges. Another table gets one back."""
    settings = ("range_rows=20", "range_duration=0.02s", "retry_interval=0.2s", "max_sync_workers=3")
    options = [option for setting in settings for option in ("--setting", setting)]
    program = Program(target_db.dsn(), processes / "run.log", options=options)
    await prepare(source_db, target_db, "t", rows=2500)
    await subscriptions.create(source_db, "p", "s", copy_engine="ranges")
    sessions = "SELECT count(DISTINCT relid) FROM subscriber.living_sessions({}) WHERE relid > 12288"
    sessions = sessions.format(await target_db.value("SELECT subid FROM subscriber.subscription"))
    origins = "SELECT count(*) FROM pg_replication_origin WHERE roname LIKE 'pg\\_%\\_%'"
    earlier = await target_db.value(origins)
    with closing_program(program):
        async with writing(source_db, "t"):
            await program.start("launcher started")
            await target_db.wait_for(sessions, 3)
            program.kill()
            copied = await target_db.value("SELECT count(*) FROM subscriber.copied_range")
            await prepare_table(source_db, target_db, "u")
            await subscriptions.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
            await program.start("launcher started")
            await target_db.wait_for(
                "SELECT srsubstate = 'r' FROM subscriber.subscription_rel WHERE srrelid = 'u'::regclass"
            )
            assert await target_db.value("SELECT count(*) FROM subscriber.copied_range") >= copied
            await subscriptions.wait_for_ready(source_db)
        await source_db.wait_for_catchup("s")
        await same(source_db, target_db, "t", "u")
        assert await target_db.value(origins) == earlier
    assert "ERROR" not in program.text


async def test_a_session_that_cannot_be_opened(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    """Another session uses its origin. The copy continues with its own session."""
    await prepare(source_db, target_db, "t", rows=300)
    await subscriber.create(source_db, "p", "s", copy_engine="ranges", enabled=False)
    subid = await target_db.value("SELECT subid FROM subscriber.subscription")
    origin = f"pg_{subid}_{worker_sessions.FIRST_RANGE_SESSION}"
    async with target_db.connection() as holder:
        await holder.execute("SELECT subscriber.make_origin($1)", origin)
        await holder.execute("SELECT pg_replication_origin_session_setup($1)", origin)
        await subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
        await subscriber.log.wait_for("is copied in fewer sessions than max_sync_workers allows")
        await subscriber.wait_for_ready(source_db)
    await same(source_db, target_db, "t")
    assert not subscriber.log.has("ERROR")


async def delay_commits(source: Database, stop: anyio.Event, longest: float) -> None:
    """Let commits wait for a synchronous standby, again and again, for up to `longest` seconds."""
    chance = random.Random(5)
    async with source.connection() as connection:
        try:
            while not stop.is_set():
                await connection.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
                await connection.execute("SELECT pg_reload_conf()")
                await anyio.sleep(chance.uniform(0.1, longest))
                await connection.execute("ALTER SYSTEM RESET synchronous_standby_names")
                await connection.execute("SELECT pg_reload_conf()")
                await anyio.sleep(chance.uniform(0.05, 0.3))
        finally:
            with anyio.CancelScope(shield=True):
                await connection.execute("ALTER SYSTEM RESET synchronous_standby_names")
                await connection.execute("SELECT pg_reload_conf()")


async def prepare_transactions(source: Database, table: str, stop: anyio.Event) -> None:
    """Keep transactions prepared for a while. Some change a large value's row, some move keys, some roll back."""
    chance, number = random.Random(6), 0
    async with source.connection() as connection:
        while not stop.is_set():
            number += 1
            gid = f"{table}_{number}"
            one = chance.randrange(1, 1600)
            await connection.execute("BEGIN")
            try:
                await connection.execute(f"UPDATE {table} SET n = n + 1 WHERE id BETWEEN {one} AND {one + 3}")
            except COLLISIONS:
                await connection.execute("ROLLBACK")
                continue
            await connection.execute(f"PREPARE TRANSACTION '{gid}'")
            await anyio.sleep(chance.uniform(0.05, 0.4))
            await connection.execute(f"{'COMMIT' if number % 3 else 'ROLLBACK'} PREPARED '{gid}'")


async def truncate(source: Database, table: str, stop: anyio.Event) -> None:
    """Replace all rows of a table, in one transaction and in two."""
    chance = random.Random(7)
    async with source.connection() as connection:
        while not stop.is_set():
            await anyio.sleep(chance.uniform(0.3, 0.8))
            if chance.random() < 0.5:
                await connection.execute(f"TRUNCATE {table}")
                await connection.execute(FILL.format(table, 700) + " ON CONFLICT DO NOTHING")
            else:
                with suppress(*COLLISIONS):
                    async with connection.transaction():
                        await connection.execute(f"TRUNCATE {table}")
                        await connection.execute(FILL.format(table, 700))


@asynccontextmanager
async def hostile_writing(source: Database, longest: float) -> AsyncIterator[list[float]]:
    """Everything that can go wrong with tables t, u and v, for the length of the block. Yields watch_snapshots()."""
    stop, ages = anyio.Event(), list[float]()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch_snapshots, source, stop, ages)
        for seed, table in enumerate(("t", "u", "v")):
            tasks.start_soon(write, source, table, seed, stop)
        tasks.start_soon(prepare_transactions, source, "t", stop)
        tasks.start_soon(prepare_transactions, source, "u", stop)
        tasks.start_soon(truncate, source, "v", stop)
        tasks.start_soon(delay_commits, source, stop, longest)
        await anyio.sleep(0.2)
        try:
            yield ages
        finally:
            stop.set()


async def watch_snapshots(source: Database, stop: anyio.Event, ages: list[float]) -> None:
    """Add the age of the oldest snapshot of a copy, in seconds, again and again.

    A walsender shows no start of its transaction. The writers move xmin, so each snapshot has another one.
    """
    snapshots = (
        "SELECT pid, backend_xmin::text FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name LIKE 's _' AND backend_xmin IS NOT NULL"
    )
    since: dict[tuple[int, str], float] = {}
    async with source.connection() as connection:
        while not stop.is_set():
            found = {tuple(row) for row in await connection.fetch(snapshots)}
            since = {snapshot: since.get(snapshot, monotonic()) for snapshot in found}
            ages.append(max((monotonic() - start for start in since.values()), default=0.0))
            await anyio.sleep(0.01)


@contextmanager
def closing_program(program: Program) -> Iterator[None]:
    """Kill the program at the end of the block."""
    try:
        yield
    finally:
        program.kill()


@pytest.mark.parametrize("kills", [2, pytest.param(100, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
async def test_kills_with_a_slow_standby(
    source_db: Database, target_db: Database, processes: Path, subscriptions: Subscriptions, kills: int
) -> None:
    settings = ("range_rows=20", "range_duration=0.02s", "retry_interval=0.2s", "max_sync_workers=6")
    options = [option for setting in settings for option in ("--setting", setting)]
    program = Program(target_db.dsn(), processes / "run.log", options=options)
    chance = random.Random(kills)
    rows = 2000 if kills < 10 else 12_000
    await prepare(source_db, target_db, "t", "u", "v", rows=rows)
    await subscriptions.create(source_db, "p", "s", copy_engine="ranges")
    copied = "SELECT relid, count(*) FROM subscriber.copied_range GROUP BY relid"
    cut_off = 0
    with closing_program(program):
        async with hostile_writing(source_db, 0.4 if kills < 10 else 3.0) as ages:
            before: dict[int, int] = {}
            for _ in range(kills):
                await program.start("launcher started")
                await anyio.sleep(chance.uniform(0.8, 2.5))
                program.kill()
                states = dict(await target_db.rows("SELECT srrelid, srsubstate::text FROM subscriber.subscription_rel"))
                cut_off += "d" in states.values()
                after = dict(await target_db.rows(copied))
                for relid, state in states.items():
                    assert state in "sr" or after.get(relid, 0) >= before.get(relid, 0), "ranges that were copied stay"
                before = after
            await program.start("launcher started")
        await subscriptions.wait_for_ready(source_db, timeout=120 if kills < 10 else 600)
        await source_db.wait_for_catchup("s", timeout=60)
        await same(source_db, target_db, "t", "u", "v")
    assert cut_off >= min(1, kills // 3)
    print(f"{cut_off} of {kills} kills during copies, oldest snapshot {max(ages):.2f} s")
    # A range takes 0.02 s on a quiet machine.
    assert 0 < max(ages) < 10
    assert "copied in one snapshot" not in program.text
    assert "ERROR" not in program.text


# Table -> the definition of its key k, and a value of it for the number i.
KEYS = {
    "texts": ('k text COLLATE "C"', "chr(64 + {0} % 60) || {0}"),
    "numbers": ("k numeric", "{} / 7.0"),
    "moments": ("k timestamptz", "timestamptz '2000-01-01 BC' + {} * interval '1 day 1 microsecond'"),
    "bytes": ("k bytea", "decode(md5({}::text), 'hex')"),
    # Only the publisher can compare these.
    "words": ('k text COLLATE "C.utf8", d int DEFAULT 7', "md5({0}::text)"),
    "labels": ("k label", "('l' || {0})::label"),
    "composites": ("k varchar COLLATE \"POSIX\", d date DEFAULT '2020-01-01'", "md5({}::text)"),
}


async def write_keys(source: Database, stop: anyio.Event) -> None:
    """Change rows of the tables of KEYS, and move their keys."""
    chance = random.Random(8)
    async with source.connection() as connection:
        while not stop.is_set():
            for table, (_, key) in KEYS.items():
                one, other = key.format(chance.randrange(600)), key.format(chance.randrange(700))
                with suppress(*COLLISIONS):
                    await connection.execute(f"UPDATE {table} SET n = n + 1 WHERE k = {one}")
                    await connection.execute(f"UPDATE {table} SET k = {other} WHERE k = {one}")
                await connection.execute(f"DELETE FROM {table} WHERE k = {key.format(chance.randrange(600))}")


async def test_keys_of_other_types(source_db: Database, target_db: Database, subscriber: Subscriber) -> None:
    labels = [f"'l{number}'" for number in range(701)]
    random.Random(9).shuffle(labels)
    await source_db.execute(f"CREATE TYPE label AS ENUM ({', '.join(labels)})")
    await target_db.execute(
        "CREATE TYPE unrelated AS ENUM ()", f"CREATE TYPE label AS ENUM ({', '.join(sorted(labels))})"
    )
    for table, (columns, key) in KEYS.items():
        keys = ", ".join(column.split()[0] for column in columns.split(", "))
        definition = f"CREATE TABLE {table} ({columns}, n int, PRIMARY KEY ({keys}))"
        await source_db.execute(
            definition, f"INSERT INTO {table} (k, n) SELECT {key.format('i')}, i FROM generate_series(1, 600) i"
        )
        await target_db.execute(definition.replace(' COLLATE "C"', ""))
    await source_db.execute("ALTER TABLE numbers REPLICA IDENTITY FULL", "CREATE PUBLICATION p FOR ALL TABLES")
    stop = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write_keys, source_db, stop)
        await subscriber.create(source_db, "p", "s", copy_engine="ranges")
        await source_db.execute("TRUNCATE texts", "INSERT INTO texts VALUES ('z', 1), ('Z', 2)")
        await subscriber.wait_for_ready(source_db, timeout=60)
        stop.set()
    await source_db.wait_for_catchup("s")
    for table in KEYS:
        rows = f"SELECT t::text FROM {table} t ORDER BY 1"
        assert await target_db.rows(rows) == await source_db.rows(rows), table
    assert not subscriber.log.has("copied in one snapshot")
    assert not subscriber.log.has("ERROR")


async def test_tables_that_cannot_be_divided(source_db: Database, target_db: Database, subscriber: Subscriber) -> None:
    tables = (
        "CREATE TABLE spans (k interval PRIMARY KEY)",
        "CREATE TABLE wholes (a int)",
        "CREATE TABLE others (id int PRIMARY KEY, u int UNIQUE)",
        "CREATE TABLE keys (a int, b uuid, PRIMARY KEY (b, a))",
    )
    await source_db.execute(
        *tables,
        "ALTER TABLE wholes REPLICA IDENTITY FULL",
        "INSERT INTO spans SELECT make_interval(hours => i) FROM generate_series(1, 300) i",
        "INSERT INTO wholes SELECT i FROM generate_series(1, 300) i",
        "INSERT INTO others SELECT i, i FROM generate_series(1, 300) i",
        "INSERT INTO keys SELECT i, md5((i / 3)::text)::uuid FROM generate_series(1, 300) i",
        "CREATE PUBLICATION p FOR ALL TABLES",
    )
    await target_db.execute(*tables)
    await subscriber.create(source_db, "p", "s", copy_engine="ranges")
    await subscriber.wait_for_ready(source_db)
    for table in ("spans", "wholes", "others", "keys"):
        rows = f"SELECT * FROM {table} t ORDER BY t"
        assert await target_db.rows(rows) == await source_db.rows(rows)
    reasons = {
        "spans": 'the order of the type of key column "k" is not known',
        "wholes": "the table has no replica identity that is an index, and no primary key",
        "others": "the table of the target has another unique index or an exclusion constraint",
    }
    for table, reason in reasons.items():
        assert subscriber.log.has(f'table "public.{table}" is copied in one snapshot, because {reason}')
    assert not subscriber.log.has('"public.keys" is copied in one snapshot')


async def test_a_truncate_of_a_table_that_the_publisher_compares(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    table = 'CREATE TABLE t (id text COLLATE "C.utf8" PRIMARY KEY, n int, note text)'
    await source_db.execute(table, FILL.format("t", 1500), "CREATE PUBLICATION p FOR ALL TABLES")
    await target_db.execute(table)
    await subscriber.create(source_db, "p", "s", copy_engine="ranges")
    for rows in (700, 50):
        await target_db.wait_for("SELECT count(*) > 2 FROM subscriber.copied_range")
        await source_db.execute("TRUNCATE t", FILL.format("t", rows))
    await subscriber.wait_for_ready(source_db)
    await source_db.wait_for_catchup("s")
    await same(source_db, target_db, "t")
    assert not subscriber.log.has("ERROR")


@asynccontextmanager
async def between_ranges(source: Database, target: Database) -> AsyncIterator[asyncpg.Connection[Any]]:
    """Yield a transaction of the publisher while some ranges of table t are copied, and the next one cannot be read."""
    async with source.connection() as connection:
        await target.wait_for("SELECT count(*) > 2 FROM subscriber.copied_range")
        async with connection.transaction():
            await connection.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
            copied = await target.value("SELECT count(*) FILTER (WHERE high IS NOT NULL) FROM subscriber.copied_range")
            assert 2 < copied < 50, "the last range is not copied"
            yield connection


async def test_a_key_that_moves_to_a_copied_range_with_a_large_value(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    await prepare(source_db, target_db, "t")
    await subscriber.create(source_db, "p", "s", copy_engine="ranges")
    await target_db.execute(*NOTE_SINGLES)
    async with between_ranges(source_db, target_db) as transaction:
        await transaction.execute("DELETE FROM t WHERE id IN (1, 1490)")
        await transaction.execute("UPDATE t SET id = 1 WHERE id = 1500")  # from an unread range to a copied one
        await transaction.execute("UPDATE t SET id = 1490 WHERE id = 3")  # from a copied range to an unread one
        await transaction.execute("UPDATE t SET n = 7 WHERE id IN (1, 2, 1490, 1491)")
    await subscriber.wait_for_ready(source_db)
    await source_db.wait_for_catchup("s")
    await same(source_db, target_db, "t")
    assert await target_db.rows("SELECT DISTINCT key FROM singles") == [("1",)]
    assert await target_db.rows("SELECT id, n FROM t WHERE n = 7 ORDER BY id") == [(1, 7), (2, 7), (1490, 7), (1491, 7)]
    assert not subscriber.log.has("ERROR")


async def test_a_truncate_that_later_ranges_contain(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    """The apply worker stands before the TRUNCATE, while ranges are read that contain it."""
    await prepare(source_db, target_db, "t")
    await subscriber.create(source_db, "p", "s", copy_engine="ranges")
    subid = await target_db.value("SELECT oid::bigint FROM subscriber.pg_subscription")
    async with target_db.connection() as holder:
        async with between_ranges(source_db, target_db) as transaction:
            assert await worker_sessions.register_own(holder, subid, pause_requests.HOLDER)
            await pause_requests.request(holder, subid, Lsn(0))
            await target_db.wait_for("SELECT held_at IS NOT NULL FROM subscriber.hold")
            await transaction.execute("TRUNCATE t")
            await transaction.execute(FILL.format("t", 2000))
        await target_db.wait_for("SELECT bool_or(high IS NULL) FROM subscriber.copied_range")
        await pause_requests.release(holder, subid)
    await subscriber.wait_for_ready(source_db)
    await source_db.wait_for_catchup("s")
    await same(source_db, target_db, "t")
    assert not subscriber.log.has("ERROR")


async def test_a_commit_that_waits_for_a_standby(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    """The apply worker receives the change before a snapshot of the publisher sees it."""
    await prepare(source_db, target_db, "t", rows=3000)
    await subscriber.create(source_db, "p", "s", copy_engine="ranges")
    last = "SELECT coalesce(bool_or(high IS NULL), false) FROM subscriber.copied_range"
    async with source_db.connection() as root:
        async with between_ranges(source_db, target_db):
            pass
        try:
            await root.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
            await root.execute("SELECT pg_reload_conf()")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(source_db.execute, "UPDATE t SET n = 9 WHERE id = 3000")
                await anyio.sleep(1)
                assert not await target_db.value(last)
                assert await target_db.value("SELECT srsubstate = 'd' FROM subscriber.subscription_rel")
                await root.execute("ALTER SYSTEM RESET synchronous_standby_names")
                await root.execute("SELECT pg_reload_conf()")
        finally:
            await root.execute("ALTER SYSTEM RESET synchronous_standby_names")
            await root.execute("SELECT pg_reload_conf()")
    await subscriber.wait_for_ready(source_db)
    await source_db.wait_for_catchup("s")
    await same(source_db, target_db, "t")
    assert await target_db.value("SELECT n FROM t WHERE id = 3000") == 9


async def test_a_range_is_committed_after_the_publisher_has_flushed_its_transactions(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    """A crash of the publisher would undo transactions that a snapshot sees, and use their numbers again."""
    await source_db.execute(f"ALTER DATABASE {source_db.name} SET synchronous_commit = off")
    await prepare(source_db, target_db, "t", rows=300)
    unflushed = "SELECT pg_current_wal_flush_lsn()::text"
    async with writing(source_db, "t"):
        await subscriber.create(source_db, "p", "s", copy_engine="ranges")
        seen = 0
        while await target_db.value("SELECT bool_or(srsubstate IN ('i', 'd')) FROM subscriber.subscription_rel"):
            copied = await target_db.value("SELECT max(lsn)::text FROM subscriber.copied_range")
            flushed = await source_db.value(unflushed)
            if copied is not None:
                assert Lsn.parse(copied) <= Lsn.parse(flushed)
                seen += 1
    assert seen > 2
    await subscriber.wait_for_ready(source_db)
    await source_db.flush_wal()
    await source_db.wait_for_catchup("s")
    await same(source_db, target_db, "t")


async def test_a_transaction_that_was_received_before_the_table_was_added(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    """Nothing has recorded that its change was skipped. No snapshot sees it while it waits for a standby."""
    await prepare(source_db, target_db, "t", rows=100)
    await subscriber.create(source_db, "p", "s", copy_engine="ranges")
    await subscriber.wait_for_ready(source_db)
    await prepare_table(source_db, target_db, "u")
    state = "SELECT srsubstate::text FROM subscriber.subscription_rel WHERE srrelid = 'u'::regclass"
    async with source_db.connection() as root:
        try:
            await root.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
            await root.execute("SELECT pg_reload_conf()")
            await anyio.sleep(0.2)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(source_db.execute, "UPDATE u SET n = 9 WHERE id = 50")
                await source_db.wait_for("SELECT count(*) = 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
                await source_db.wait_for_catchup("s")
                await subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
                await target_db.wait_for(state, "d")
                await anyio.sleep(0.5)
                assert await target_db.value("SELECT count(*) FROM u") == 0
                await root.execute("ALTER SYSTEM RESET synchronous_standby_names")
                await root.execute("SELECT pg_reload_conf()")
        finally:
            await root.execute("ALTER SYSTEM RESET synchronous_standby_names")
            await root.execute("SELECT pg_reload_conf()")
    await subscriber.wait_for_ready(source_db)
    await source_db.wait_for_catchup("s")
    await same(source_db, target_db, "t", "u")


async def test_a_commit_that_precedes_a_snapshot_which_does_not_see_it(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    """It waits for a standby when its range is read, and the apply worker receives it later."""
    await prepare(source_db, target_db, "t", rows=3000)
    await subscriber.create(source_db, "p", "s", copy_engine="ranges")
    subid = await target_db.value("SELECT subid FROM subscriber.subscription")
    async with source_db.connection() as root, target_db.connection() as holder:
        async with between_ranges(source_db, target_db):
            assert await worker_sessions.register_own(holder, subid, pause_requests.HOLDER)
            await pause_requests.request(holder, subid, Lsn(0))
            await target_db.wait_for("SELECT held_at IS NOT NULL FROM subscriber.hold")
        try:
            async with anyio.create_task_group() as tasks:
                await root.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
                await root.execute("SELECT pg_reload_conf()")
                tasks.start_soon(source_db.execute, "UPDATE t SET n = 9 WHERE id = 3000")
                await target_db.wait_for("SELECT bool_or(high IS NULL) FROM subscriber.copied_range")
                assert await target_db.value("SELECT n FROM t WHERE id = 3000") == 0
                await root.execute("ALTER SYSTEM RESET synchronous_standby_names")
                await root.execute("SELECT pg_reload_conf()")
            await pause_requests.release(holder, subid)
        finally:
            await root.execute("ALTER SYSTEM RESET synchronous_standby_names")
            await root.execute("SELECT pg_reload_conf()")
        await subscriber.wait_for_ready(source_db)
    await source_db.wait_for_catchup("s")
    await same(source_db, target_db, "t")


async def test_a_copy_pauses_and_has_a_rate(
    source_db: Database, target_db: Database, processes: Path, subscriptions: Subscriptions
) -> None:
    await prepare(source_db, target_db, "t", rows=400)
    hour = int(await target_db.value("SELECT extract(hour FROM localtime)::int"))
    closed, opened = (f"range_window={(hour + shift) % 24}:00-{(hour + shift + 2) % 24}:00" for shift in (12, 23))
    settings = {"range_rows": "20", "copy_rate": "1MB", "retry_interval": "0.2s"}
    options = [part for name, value in settings.items() for part in ("--setting", f"{name}={value}")]
    program = Program(target_db.dsn(), processes / "run.log", options=[*options, "--setting", closed])
    await subscriptions.create(source_db, "p", "s", copy_engine="ranges")
    with closing_program(program):
        await program.start("pauses outside of range_window")
        await target_db.wait_for("SELECT count(*) > 0 FROM subscriber.worker WHERE state LIKE 'paused outside%'")
        await source_db.execute("UPDATE t SET n = 1 WHERE id < 100")
        assert await target_db.value("SELECT count(*) FROM t") == 0
        program.kill()
    program = Program(target_db.dsn(), processes / "again.log", options=[*options, "--setting", opened])
    with closing_program(program):
        await program.start("launcher started")
        await target_db.wait_for("SELECT count(*) > 1 FROM subscriber.copied_range")
        started = monotonic()
        await subscriptions.wait_for_ready(source_db)
        # 400 rows of 3.2 kB, without those of the first ranges.
        assert monotonic() - started > 0.6
        await source_db.wait_for_catchup("s")
        await same(source_db, target_db, "t")
