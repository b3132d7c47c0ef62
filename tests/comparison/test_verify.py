"""Comparison at one position while writes continue: all differences are found, and no others."""

from __future__ import annotations

import json
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from struct import pack

import anyio
import asyncpg
import pytest

from subscriber.catalog import pause_requests
from subscriber.cli.commands.verify import as_json, describe
from subscriber.comparison.checksums import add_up, buckets_for, differing
from subscriber.comparison.columns import ComparedColumn
from subscriber.comparison.comparison import verify
from subscriber.comparison.result import Comparison, Key
from subscriber.errors import SubscriberError
from subscriber.lsn import Lsn
from subscriber.repair import repair
from subscriber.settings import Settings
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriber

TABLES = 10
RESTING = f"t{TABLES - 1}"
SOURCE = (
    "CREATE TABLE t{n} (id int PRIMARY KEY, a int, note varchar(40), code char(5), f float4, at timestamptz, no int[])"
)

# Another order, other types that take the same values, and a column more.
TARGET = (
    "CREATE TABLE t{n} (at timestamptz, more text DEFAULT 'x', note text, id bigint PRIMARY KEY, f float8, code text,"
    " a numeric, no int[])"
)
ROWS = (
    "INSERT INTO t{n} SELECT i, i, nullif('Größe ' || i % 7, 'Größe 3'), 'ab', i / 3.0, now(), ARRAY[i, NULL]"
    " FROM generate_series(1, 2000) i"
)


@asynccontextmanager
async def subscribed(
    source: Database, target: Database, subscriber: Subscriber, *, pause: float = 0.02
) -> AsyncIterator[None]:
    """Ten tables on both sides that are written to, 4 rows of each all the time, for the length of the block."""
    for n in range(TABLES):
        await source.execute(SOURCE.format(n=n), ROWS.format(n=n))
        await target.execute(TARGET.format(n=n))
    await source.execute("CREATE TABLE no_key (a int, b text)", "ALTER TABLE no_key REPLICA IDENTITY FULL")
    await target.execute("CREATE TABLE no_key (b text, a int)")
    await source.execute("INSERT INTO no_key SELECT i % 10, 'b' FROM generate_series(1, 500) i")
    await source.execute("CREATE PUBLICATION p FOR ALL TABLES")
    await subscriber.create(source, "p", "s", copy_engine="snapshot")
    await subscriber.wait_for_ready(source, timeout=60)
    stop = anyio.Event()

    async def write() -> None:
        connection = await source.connect()
        chance = random.Random(1)
        number = 10_000
        while not stop.is_set():
            table = f"t{chance.randrange(TABLES - 1)}"  # the last one rests
            number += 1
            async with connection.transaction():
                await connection.execute(f"UPDATE {table} SET a = a + 1 WHERE id = 100")
                await connection.execute(
                    f"UPDATE {table} SET note = md5($1::text) WHERE id = $2", str(number), chance.randrange(200, 2000)
                )
                await connection.execute(f"INSERT INTO {table} (id, code) VALUES ($1, 'new')", number)
                await connection.execute(f"DELETE FROM {table} WHERE id = $1", number - 40)
            await anyio.sleep(pause)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write)
        yield
        stop.set()


async def on_target(target: Database, *statements: str) -> None:
    """Behind the subscription's back."""
    async with target.connection() as connection:
        await connection.execute("SET session_replication_role = replica")
        for statement in statements:
            await connection.execute(statement)


@pytest.mark.timeout(400)
async def test_exactly_what_differs_is_found_under_load(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    async with subscribed(source_db, target_db, subscriber):
        same = await verify(target_db.dsn(), "s")
        assert same.is_same, list(describe(same))
        assert len(same.tables) == TABLES + 1

        await on_target(
            target_db,
            "DELETE FROM t0 WHERE id = 5",
            "INSERT INTO t1 (id, a) VALUES (-1, 1)",
            "UPDATE t2 SET note = 'secret' WHERE id = 7",
            "UPDATE t3 SET a = -1, f = 0.5, no = NULL WHERE id = 8",
            "UPDATE t4 SET more = 'ours' WHERE id = 9",  # not the publisher's business
            "UPDATE no_key SET b = 'c' WHERE ctid = (SELECT min(ctid) FROM no_key)",
            f"DROP TABLE t{TABLES - 1}",
        )
        comparison = await verify(target_db.dsn(), "s", part_bytes=64 * 1024)
        gentle = await verify(target_db.dsn(), "s", jobs=1, max_rate=64 * 1024 * 1024)
    expect(comparison)
    expect(gentle)
    assert await target_db.value("SELECT count(*) FROM subscriber.hold") == 0
    await source_db.wait_for("SELECT count(*) FROM pg_replication_slots WHERE temporary", 0)


def expect(found: Comparison) -> None:
    tables = {table.name.removeprefix("public."): table for table in found.tables}
    differing_tables = {name for name, table in tables.items() if not table.is_same}
    assert differing_tables == {"t0", "t1", "t2", "t3", "no_key", f"t{TABLES - 1}"}
    assert (tables["t0"].missing, tables["t0"].missing_count, tables["t0"].changed) == ([("5",)], 1, {})
    assert (tables["t1"].extra, tables["t1"].extra_count) == ([("-1",)], 1)
    assert tables["t2"].changed == {("7",): ("note",)}
    assert tables["t3"].changed == {("8",): ("a", "f", "no")}
    assert (tables["no_key"].missing_count, tables["no_key"].extra_count) == (1, 1)
    assert "does not exist" in (tables[f"t{TABLES - 1}"].note or "")
    said = "\n".join(describe(found)) + json.dumps(as_json(found))
    assert "changed  id=8: a, f, no" in said
    assert "secret" not in said


# Rows 1 to 99 do not change; these values never occur in them.
COLUMNS = {"a": "-1", "note": "'ours'", "code": "'zz'", "f": "0.5", "at": "'2001-01-01'", "no": "NULL"}


async def plant(target: Database, chance: random.Random) -> tuple[dict[str, object], list[str]]:
    """Corrupt five tables of the target, each in another way.

    Returns the expected report, and the repair statements.
    """
    said, undo = dict[str, object](), list[str]()
    tables = chance.sample([f"t{n}" for n in range(TABLES - 1)], 4)
    for kind, table in zip(("missing", "extra", "row", "column"), tables, strict=True):
        key = chance.randrange(1, 100)
        where = f"WHERE id = {key}"
        if kind == "extra":
            await on_target(target, f"INSERT INTO {table} (id, a) VALUES ({-key}, 1)")
            undo.append(f"DELETE FROM {table} WHERE id = {-key}")
            said[table] = Said(extra=[(str(-key),)])
            continue
        await on_target(target, f"CREATE TABLE kept_{kind} AS SELECT * FROM {table} {where}")
        if kind == "missing":
            await on_target(target, f"DELETE FROM {table} {where}")
            said[table] = Said(missing=[(str(key),)])
        else:
            names = chance.sample(list(COLUMNS), 1 if kind == "column" else chance.randrange(2, 7))
            await on_target(
                target, f"UPDATE {table} SET {', '.join(f'{name} = {COLUMNS[name]}' for name in names)} {where}"
            )
            said[table] = Said(changed={(str(key),): tuple(name for name in COLUMNS if name in names)})
        undo += [
            f"DELETE FROM {table} {where}",
            f"INSERT INTO {table} SELECT * FROM kept_{kind}",
            f"DROP TABLE kept_{kind}",
        ]
    await on_target(target, f"ALTER TABLE {RESTING} RENAME TO away")
    said |= {RESTING: "gone", "away": "gone"}
    return said, [*undo, f"ALTER TABLE away RENAME TO {RESTING}"]


@dataclass
class Said:
    """Of a table that differs."""

    missing: list[Key] = field(default_factory=list)
    extra: list[Key] = field(default_factory=list)
    changed: dict[Key, tuple[str, ...]] = field(default_factory=dict)


def said_of(found: Comparison) -> dict[str, object]:
    for table in found.tables:
        assert table.note is None or "does not exist" in table.note or "the publications lack it" in table.note, table
        counts = (len(table.missing), len(table.extra), len(table.changed))
        assert counts == (table.missing_count, table.extra_count, table.changed_count), table
    return {
        table.name.removeprefix("public."): "gone" if table.note else Said(table.missing, table.extra, table.changed)
        for table in found.tables
        if not table.is_same
    }


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_verify_finds_exactly_the_planted_differences_in_a_hundred_rounds(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    """In every other round nothing differs. SUBSCRIBER_VERIFY_ROUNDS sets the number, 100 by default."""
    chance = random.Random(5)
    async with subscribed(source_db, target_db, subscriber, pause=0.002):
        for number in range(int(os.environ.get("SUBSCRIBER_VERIFY_ROUNDS", "100"))):
            expected, undo = await plant(target_db, chance) if number % 2 else ({}, [])
            written = await source_db.value("SELECT pg_current_wal_lsn()::text")
            comparison = await verify(target_db.dsn(), "s")
            assert said_of(comparison) == expected, (number, list(describe(comparison)))
            assert len(comparison.tables) == TABLES + 1 + ("away" in expected)
            assert comparison.lsn > Lsn.parse(written), "nobody writes"
            await on_target(target_db, *undo)


async def test_verify_without_a_launcher_names_the_next_command(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    await source_db.execute("CREATE PUBLICATION p")
    await subscriber.create(source_db, "p", "s", enabled=False)
    with pytest.raises(SubscriberError, match="does not reach the position") as caught:
        await verify(target_db.dsn(), "s")
    assert "subscriber status" in str(caught.value.hint)
    await subscriber.execute("DROP SUBSCRIPTION s")


async def test_a_hold_whose_owner_is_gone_is_given_up(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    await source_db.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION p FOR TABLE t")
    await target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    await subscriber.create(source_db, "p", "s")
    await subscriber.wait_for_ready(source_db)
    connection = await target_db.connect()
    subid = await connection.fetchval("SELECT subid FROM subscriber.subscription")
    await pause_requests.request(connection, subid, Lsn(0))  # without its lock, as after a kill -9
    await source_db.execute("INSERT INTO t VALUES (1)")
    await target_db.wait_for("SELECT count(*) FROM t", 1)
    await target_db.wait_for("SELECT count(*) FROM subscriber.hold", 0)


async def test_a_worker_with_an_error_is_named(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    """It does not reach the position of the comparison. The commands of the error make the rows equal."""
    for database in (source_db, target_db):
        await database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    await source_db.execute("CREATE PUBLICATION p FOR TABLE t")
    await subscriber.create(source_db, "p", "s", copy_engine="snapshot")
    await subscriber.wait_for_ready(source_db)
    await target_db.execute("INSERT INTO t VALUES (1)")
    await source_db.execute("INSERT INTO t VALUES (1)")
    await subscriber.log.wait_for("conflict=insert_exists")
    with pytest.raises(SubscriberError, match="has an error, and does not reach the position") as failed:
        await verify(target_db.dsn(), "s")
    assert "insert_exists" in (failed.value.detail or "")
    assert "subscriber reseed s" in (failed.value.hint or "")

    await subscriber.stop()
    subscriber.settings = Settings(retry_interval=30)  # no worker for some time
    subscriber.start()
    await target_db.wait_for("SELECT count(*) FROM subscriber.worker WHERE next_retry > now() + interval '10 s'", 1)
    with pytest.raises(SubscriberError, match="has an error, and does not reach the position") as failed:
        await repair(target_db.dsn(), "s")
    skip, then, _ = failed.value.remedy.commands if failed.value.remedy is not None else ()
    assert then == "subscriber repair s"
    await target_db.execute("UPDATE t SET v = 'x'")
    await source_db.execute("INSERT INTO t VALUES (2)")
    await subscriber.execute(skip)
    assert [table.updated for table in (await repair(target_db.dsn(), "s")).tables] == [1]
    assert await target_db.rows("SELECT id, v FROM t ORDER BY id") == [(1, None), (2, None)]

    await subscriber.execute("ALTER SUBSCRIPTION s SET (disable_on_error = true)")
    await target_db.execute("INSERT INTO t VALUES (3)")
    await source_db.execute("INSERT INTO t VALUES (3)")
    await target_db.wait_for("SELECT count(*) FROM subscriber.subscription WHERE NOT subenabled", 1)
    with pytest.raises(SubscriberError, match="is disabled") as refused:
        await repair(target_db.dsn(), "s")
    assert "insert_exists" in (refused.value.detail or "")
    assert "SKIP (lsn" in (refused.value.detail or "")


async def test_a_snapshot_with_too_many_subtransactions_is_taken_again(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    """A slot waits for two generations of transactions. The third one must fit into its snapshot."""
    for database in (source_db, target_db):
        await database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    await source_db.execute("CREATE PUBLICATION p FOR TABLE t")
    await subscriber.create(source_db, "p", "s", copy_engine="snapshot")
    await subscriber.wait_for_ready(source_db)
    waits_for = "SELECT count(*) FROM pg_locks WHERE NOT granted AND transactionid = '{}'::xid"
    first, second, third = [await source_db.connect() for _ in range(3)]
    most = await source_db.value("SHOW max_connections")

    async def begin(connection: asyncpg.Connection) -> str:
        await connection.execute("BEGIN")
        return str(await connection.fetchval("SELECT pg_current_xact_id()::xid::text"))

    async with anyio.create_task_group() as tasks:
        xid = await begin(first)
        tasks.start_soon(verify, target_db.dsn(), "s")
        await source_db.wait_for(waits_for.format(xid), 1)
        xid = await begin(second)
        await first.execute("COMMIT")
        await source_db.wait_for(waits_for.format(xid), 1)
        await begin(third)
        for number in range(2 * int(most)):
            await third.execute(f"SAVEPOINT one; INSERT INTO t VALUES ({number}); RELEASE SAVEPOINT one")
        await source_db.execute("INSERT INTO t VALUES (-1)")  # the snapshot ends behind the last commit
        await second.execute("COMMIT")
        await subscriber.log.wait_for("no snapshot of the publisher could be taken in attempt 1 of 5")
        await third.execute("COMMIT")
    assert subscriber.log.has("The publisher answers: .*initial slot snapshot too large")
    assert subscriber.log.has("HINT:  A retry succeeds when these transactions have ended")


async def test_a_composite_value_with_nulls_in_it_is_compared(source_db: Database) -> None:
    await source_db.execute("CREATE TYPE pair AS (a int, b text)")
    values = "(VALUES (NULL::pair), ('(,)'), ('(1,)'), ('(2,)')) t (p)"
    rows = await source_db.rows(f"SELECT {ComparedColumn('p').text} FROM {values}")
    assert rows == [(None,), ("(,)",), ("(1,)",), ("(2,)",)]


def test_sums_of_buckets_are_added_up() -> None:
    assert [buckets_for(rows) for rows in (0, 999, 1000, 5000, 10**9)] == [1, 1, 2, 8, 1 << 16]
    one = add_up(
        [[(pack(">2q", 0, 1), pack(">2q", 2, 1), pack(">2q", 10, -5))], [(pack(">q", 1), pack(">q", 1), pack(">q", 7))]]
    )
    assert one == {0: (2, 10), 1: (2, 2)}
    assert add_up([[(None, None, None)]]) == {}
    assert differing(one, {0: (2, 10), 1: (2, 3), 2: (1, 1)}) == [1, 2]
