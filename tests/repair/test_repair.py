"""Rows of the target that differ are made equal, while both sides are written to."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import asyncpg
import pytest

from subscriber.cli.commands.repair import as_json, describe, read_differences, repair_
from subscriber.cli.commands.verify import as_json as comparison_as_json
from subscriber.comparison import verify
from subscriber.comparison.differences import ComparisonLimits
from subscriber.comparison.progress import ComparisonProgress
from subscriber.display import printable
from subscriber.errors import StatementError, SubscriberError
from subscriber.quoting import literal
from subscriber.repair import repair, reseed
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriber
from tests.test_sql_text import NAMES

TYPES = (
    "CREATE TABLE types (id int PRIMARY KEY, t text, c char(6), v varchar(9), n numeric, f float8, j jsonb, b bytea,"
    " a text[], at timestamptz, i interval, flag bool, big text)",
    "ALTER TABLE types ALTER big SET STORAGE EXTERNAL",
)
SHAPES = (
    "CREATE TABLE circle (id int PRIMARY KEY, u int UNIQUE, note text)",
    "CREATE TABLE pair (a text, b int, v text, PRIMARY KEY (a, b))",
    "CREATE TABLE parted (id int, v text, PRIMARY KEY (id)) PARTITION BY RANGE (id)",
    "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (500)",
    "CREATE TABLE parted_2 PARTITION OF parted FOR VALUES FROM (500) TO (100000)",
    "CREATE TABLE bag (a int, b text)",
    "ALTER TABLE bag REPLICA IDENTITY FULL",
    "CREATE TABLE same (id int PRIMARY KEY, v text)",
    'CREATE TABLE "Odd ""name" ("Key %" numeric(8,2) PRIMARY KEY, "a\'b" text)',
    "CREATE TABLE generated (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v int,"
    " twice int GENERATED ALWAYS AS (v * 2) STORED)",
    "CREATE TABLE child (id int PRIMARY KEY, parent int REFERENCES circle)",
)
ROWS = (
    "INSERT INTO types SELECT i, nullif('t' || i, 't3'), 'c' || i % 10, 'v' || i % 10, i / 7.0, i / 3.0,"
    " jsonb_build_object('i', i), decode(md5(i::text), 'hex'), ARRAY['x', NULL, i::text], now(), i * interval '1 hour',"
    " i % 2 = 0, repeat(md5(i::text), 100) FROM generate_series(1, 300) i",
    "INSERT INTO circle SELECT i, i, 'n' FROM generate_series(1, 2500) i",
    "INSERT INTO pair SELECT 'a' || i % 7, i, 'v' FROM generate_series(1, 500) i",
    "INSERT INTO parted SELECT i, 'v' FROM generate_series(1, 1000) i",
    "INSERT INTO bag SELECT i % 50, nullif('b' || i % 3, 'b2') FROM generate_series(1, 300) i",
    "INSERT INTO same SELECT i, 'v' FROM generate_series(1, 1000) i",
    'INSERT INTO "Odd ""name" SELECT i, \'x\' FROM generate_series(1, 50) i',
    "INSERT INTO generated (v) SELECT i FROM generate_series(1, 100) i",
    "INSERT INTO child SELECT i, i FROM generate_series(1, 100) i",
)
DAMAGE = (
    "DELETE FROM types WHERE id % 10 = 1",
    "UPDATE types SET t = '', c = 'zz' WHERE id % 10 = 2",
    "UPDATE types SET t = NULL, j = NULL, a = NULL WHERE id % 10 = 3",
    "UPDATE types SET n = n + 0.10, f = 'NaN', big = 'short' WHERE id % 10 = 4",
    "UPDATE types SET i = '1 month', at = 'infinity', b = '' WHERE id % 10 = 5",
    "INSERT INTO types (id) SELECT -i FROM generate_series(1, 20) i",
    # A circle of unique values over more rows than a batch has.
    "UPDATE circle SET u = -u",
    "UPDATE circle SET u = CASE id WHEN 1 THEN 2500 ELSE id - 1 END",
    "DELETE FROM pair WHERE b % 5 = 0",
    "UPDATE pair SET v = 'w' WHERE b % 5 = 1",
    "INSERT INTO pair VALUES ('', 0, ''), ('ä', 1, 'ü')",
    "UPDATE parted SET id = id + 5000 WHERE id % 100 = 7",
    "DELETE FROM bag WHERE a < 5",
    "INSERT INTO bag SELECT 1, NULL FROM generate_series(1, 5)",
    "UPDATE bag SET b = 'other' WHERE a = 9",
    'UPDATE "Odd ""name" SET "a\'b" = \'y\\\' WHERE "Key %" < 10',
    'DELETE FROM "Odd ""name" WHERE "Key %" > 40',
    "UPDATE generated SET v = v + 1 WHERE id > 90",
    "DELETE FROM generated WHERE id < 10",
    "TRUNCATE child",
)
TABLES = {
    "types": "id", "circle": "id", "pair": "a, b", "parted": "id", "bag": "a, b", "same": "id",
    '"Odd ""name"': '"Key %"', "generated": "id", "child": "id",
}  # fmt: skip


# Enough for tests of single rows. Each table takes 0.1 s of a processor until it is copied.
FEW_TABLES = (
    "CREATE TABLE bag (a int, b text)",
    "ALTER TABLE bag REPLICA IDENTITY FULL",
    "CREATE TABLE same (id int PRIMARY KEY, v text)",
    "CREATE TABLE child (id int PRIMARY KEY, parent int)",
)
FEW_ROWS = (
    "INSERT INTO bag SELECT i % 50, nullif('b' || i % 3, 'b2') FROM generate_series(1, 300) i",
    "INSERT INTO same SELECT i, 'v' FROM generate_series(1, 1000) i",
    "INSERT INTO child SELECT i, i FROM generate_series(1, 100) i",
)


async def prepare(source: Database, target: Database, subscriber: Subscriber, **options: object) -> None:
    """Create all tables on both sides, and wait until they are copied."""
    await prepare_tables(source, target, subscriber, (*TYPES, *SHAPES), ROWS, **options)


async def prepare_tables(
    source: Database,
    target: Database,
    subscriber: Subscriber,
    tables: Iterable[str],
    rows: Iterable[str],
    **options: object,
) -> None:
    """Create tables on both sides and rows on the publisher, and wait until these are copied.

    All rows of the target belong to the subscription, so a repair deletes extra ones (test_consolidation.py).
    """
    await target.execute(*tables)
    await source.execute(*tables, *rows)
    await source.execute("CREATE PUBLICATION p FOR ALL TABLES WITH (publish_via_partition_root = true)")
    await subscriber.create(source, "p", "s", copy_engine="snapshot", source_tag="'all'", **options)
    await subscriber.wait_for_sync(source)


async def damage(target: Database, *statements: str) -> None:
    """Change rows without the subscription."""
    async with target.connection() as connection:
        await connection.execute("SET session_replication_role = replica")
        for statement in statements:
            await connection.execute(statement)


@asynccontextmanager
async def written(source: Database, *, pause: float = 0.02) -> AsyncIterator[None]:
    """Write to rows that are damaged and to others, for the length of the block.

    A transaction takes 6 ms of the processors, with its way to the target. `pause` is the time in seconds between two.
    """
    stop = anyio.Event()

    async def write() -> None:
        connection = await source.connect()
        chance = random.Random(1)
        number = max(10_000, await connection.fetchval("SELECT coalesce(max(id), 0) FROM types"))
        while not stop.is_set():
            number += 1
            async with connection.transaction():
                await connection.execute(
                    "UPDATE types SET t = $1::text WHERE id = $2", str(number), chance.randrange(1, 300)
                )
                await connection.execute("INSERT INTO types (id) VALUES ($1)", number)
                await connection.execute("DELETE FROM types WHERE id = $1", chance.randrange(1, 300))
                await connection.execute("UPDATE parted SET v = v || 'x' WHERE id = $1", chance.randrange(1, 1000))
                await connection.execute("DELETE FROM bag WHERE a = $1", number % 50)
                await connection.execute("INSERT INTO bag VALUES ($1, 'new')", number % 50)
            await anyio.sleep(pause)
        await connection.close()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write)
        yield
        stop.set()


async def assert_same(source: Database, target: Database, *tables: str) -> None:
    for table in tables or TABLES:
        query = f"SELECT * FROM {table} ORDER BY {TABLES.get(table, '1')}"
        assert await target.rows(query) == await source.rows(query), table


async def run_for(command: list[str], seconds: float) -> bool:
    """Run a command, and kill it after some seconds. Returns False if it has ended before."""
    process = await anyio.open_process(command)
    with anyio.move_on_after(seconds):
        await process.wait()
    killed = process.returncode is None
    with suppress(ProcessLookupError):  # it ends at this moment
        process.kill()
    await process.wait()
    await process.aclose()
    return killed


async def assert_nothing_left(source: Database, target: Database) -> None:
    assert await target.value("SELECT count(*) FROM subscriber.hold") == 0
    assert await target.value("SELECT count(*) FROM pg_replication_origin WHERE roname LIKE 'pg\\_%\\_16383'") == 0
    assert await target.value("SELECT count(*) FROM subscriber.progress_record WHERE relid = 16383") == 0
    await source.wait_for("SELECT count(*) FROM pg_replication_slots WHERE temporary", 0)


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.soak), {"streaming": "parallel", "binary": True}],
    ids=["text", "parallel"],
)
async def test_every_row_becomes_the_publishers_under_load(
    source_db: Database, target_db: Database, subscriber: Subscriber, options: dict[str, object]
) -> None:
    await prepare(source_db, target_db, subscriber, **options)
    async with written(source_db):
        await damage(target_db, *DAMAGE)
        result = await repair(target_db.dsn(), "s")
        assert result.is_complete, list(describe(result, dry_run=False))
        comparison = await verify(target_db.dsn(), "s")
        assert comparison.is_same, comparison_as_json(comparison)
    await subscriber.wait_for_sync(source_db)
    await assert_same(source_db, target_db)
    await assert_nothing_left(source_db, target_db)
    counts = {table.name: (table.inserted, table.updated, table.deleted) for table in result.tables}
    assert counts["public.same"] == (0, 0, 0)
    assert counts["public.circle"] == (0, 2500, 0)
    assert counts["public.child"] == (100, 0, 0)
    assert counts["public.pair"] == (100, 100, 2)
    assert not subscriber.log.has("ERROR:")


async def test_statements_of_a_dry_run_repair_the_tables(
    source_db: Database, target_db: Database, subscriber: Subscriber, tmp_path: Path
) -> None:
    """They run in psql, in any session: unique values do not collide, and rows without a key are found by texts."""
    odd = "CREATE TABLE odd (j json, n numeric, f float8, at timestamptz, i interval, b bytea, p point)"
    for database in (target_db, source_db):
        await database.execute(odd, "ALTER TABLE odd REPLICA IDENTITY FULL")
    await source_db.execute(
        "INSERT INTO odd SELECT '{\"a\": 1}', 1, 0, '2026-01-02', '1 day', '\\x00', '(1,2)' FROM generate_series(1, 3)",
        "INSERT INTO odd (j) VALUES (NULL)",
        "INSERT INTO odd VALUES ('{\"a\":1}', 1.00, '-0', '2026-01-02', '24:00', '', NULL)",
    )
    seen = "CREATE TABLE seen (id int PRIMARY KEY, v text)"
    values = [f"INSERT INTO seen VALUES ({number}, {literal(name)})" for number, name in enumerate(NAMES)]
    await source_db.execute(seen, *values)
    await target_db.execute(seen)
    await prepare(source_db, target_db, subscriber)
    await damage(
        target_db,
        *DAMAGE,
        "DELETE FROM seen",
        "INSERT INTO odd SELECT j, n + 0.0, f, at, i, b, p FROM odd",
        "DELETE FROM odd WHERE n = 1.00 AND j::text = '{\"a\":1}' AND f::text = '-0' AND n::text = '1.00'",
    )
    result = await repair(target_db.dsn(), "s", dry_run=True)
    before = as_json(result)
    assert [line for line in describe(result, dry_run=True) if printable(line) != line] == []
    assert not (await verify(target_db.dsn(), "s")).is_same
    script = tmp_path / "repair.sql"
    script.write_text("\n".join(("SET session_replication_role = replica;", *result.statements)))
    options = "-c datestyle=German -c timezone=Asia/Tokyo -c extra_float_digits=0 -c intervalstyle=iso_8601"
    command = [str(target_db.server.bin / "psql"), target_db.dsn(options=options), "-Xq", "-v", "ON_ERROR_STOP=1"]
    done = await anyio.run_process([*command, "-f", str(script)], check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    await assert_same(source_db, target_db)
    again = await repair(target_db.dsn(), "s", dry_run=True)
    assert (again.statements, before["complete"]) == ([], True)
    assert list(tmp_path.iterdir()) == [script]


async def test_tables_that_inherit_keep_their_rows(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    """Rows of an heir have the keys, the texts and the places of rows that are repaired."""
    for database in (source_db, target_db):
        await database.execute("CREATE TABLE keyed (id int PRIMARY KEY, v int)", "CREATE TABLE bag (v int)")
    await source_db.execute("INSERT INTO keyed VALUES (1, 1)", "INSERT INTO bag VALUES (1)")
    await source_db.execute("ALTER TABLE bag REPLICA IDENTITY FULL", "CREATE PUBLICATION p FOR TABLE keyed, bag")
    await subscriber.create(source_db, "p", "s", source_tag="all")
    await subscriber.wait_for_ready(source_db)
    await target_db.execute(
        "CREATE TABLE heir_of_keyed () INHERITS (keyed)",
        "CREATE TABLE heir_of_bag () INHERITS (bag)",
        "UPDATE keyed SET v = 2",
        "INSERT INTO keyed VALUES (2, 2)",
        "INSERT INTO bag VALUES (2)",
        "INSERT INTO heir_of_keyed VALUES (1, 2), (2, 2)",
        "INSERT INTO heir_of_bag VALUES (1), (2)",
    )
    heirs = "SELECT id, v FROM heir_of_keyed UNION ALL SELECT NULL, v FROM heir_of_bag ORDER BY 1, 2"
    before = await target_db.rows(heirs)
    result = await repair(target_db.dsn(), "s", dry_run=True)
    await target_db.execute(*result.statements)
    assert await target_db.rows(heirs) == before
    assert (await verify(target_db.dsn(), "s")).is_same


async def test_rows_that_verify_has_named(
    source_db: Database, target_db: Database, subscriber: Subscriber, tmp_path: Path
) -> None:
    await prepare_tables(source_db, target_db, subscriber, FEW_TABLES, FEW_ROWS)
    await damage(
        target_db,
        "UPDATE same SET v = 'w' WHERE id < 5",
        "DELETE FROM same WHERE id = 9",
        "INSERT INTO same VALUES (-1)",
        "DELETE FROM child WHERE id = 1",
    )
    file = tmp_path / "found.json"
    file.write_text(json.dumps(comparison_as_json(await verify(target_db.dsn(), "s"))))
    await damage(target_db, "DELETE FROM same WHERE id = 10")
    result = await repair(target_db.dsn(), "s", keys=read_differences(file))
    counts = {table.name: (table.inserted, table.updated, table.deleted) for table in result.tables}
    assert counts == {"public.same": (1, 4, 1), "public.child": (1, 0, 0)}
    assert await target_db.value("SELECT count(*) FROM same WHERE id = 10") == 0  # verify has not named it
    await repair(target_db.dsn(), "s", tables=["public.same"])
    await assert_same(source_db, target_db, "same", "child")

    await damage(target_db, "DELETE FROM bag WHERE a < 3")
    file.write_text(json.dumps(comparison_as_json(await verify(target_db.dsn(), "s"))))
    with pytest.raises(StatementError, match="does not name all rows"):
        read_differences(file)
    for content in (b"", b"[]", b'{"tables": 1}', b'{"tables": [{"table": "a"}]}', b"\xff"):
        file.write_bytes(content)
        with pytest.raises(StatementError, match="not the output of verify"):
            read_differences(file)


async def test_repaired_rows_are_recorded(
    source_db: Database, target_db: Database, subscriber: Subscriber, capsys: pytest.CaptureFixture[str]
) -> None:
    """The owner reads the record. Nobody writes to it but the transaction of the repair."""
    for database in (source_db, target_db):
        await database.execute(
            "CREATE TABLE same (id int PRIMARY KEY, v text)",
            "CREATE TABLE bag (a int, b text)",
            "ALTER TABLE bag REPLICA IDENTITY FULL",
        )
    await source_db.execute("INSERT INTO same VALUES (1, 'a'), (2, 'it''s'), (3, NULL)", "INSERT INTO bag VALUES (1)")
    await source_db.execute("CREATE PUBLICATION p FOR ALL TABLES")
    await subscriber.create(source_db, "p", "s", copy_engine="snapshot")
    await subscriber.wait_for_sync(source_db)
    await damage(
        target_db,
        "DELETE FROM same WHERE id = 1",
        "UPDATE same SET v = 'b' WHERE id = 2",
        "INSERT INTO same VALUES (4)",
    )
    result = await repair(target_db.dsn(), "s", delete_extra=True, record_rows=True)
    await damage(target_db, "INSERT INTO bag VALUES (2)")
    await repair(target_db.dsn(), "s", delete_extra=True)
    recorded = "SELECT command, relation, action, key, row_before, row_after FROM subscriber.repairs"
    assert await target_db.rows(f"{recorded} ORDER BY repaired_at, action") == [
        ("repair", "public.same", "delete", '{"id": "4"}', '{"v": null, "id": "4"}', None),
        ("repair", "public.same", "insert", '{"id": "1"}', None, '{"v": "a", "id": "1"}'),
        ("repair", "public.same", "update", '{"id": "2"}', '{"v": "b", "id": "2"}', '{"v": "it\'s", "id": "2"}'),
        ("repair", "public.bag", "delete", None, None, None),
    ]
    positions = "SELECT bool_and(lsn >= $1::text::pg_lsn AND role = session_user) FROM subscriber.repairs"
    assert await target_db.value(positions, str(result.lsn))
    await repair_(target_db.dsn(), "s", history=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith("delete public.bag a row without a key")
    assert any(line.endswith("before (v='b', id='2')  after (v='it''s', id='2')") for line in lines)
    await repair_(target_db.dsn(), "s", ["public.bag"], history=True, json=True)
    (line,) = capsys.readouterr().out.splitlines()
    assert (json.loads(line)["action"], json.loads(line)["key"]) == ("delete", None)

    role = f"reader_{target_db.name}"
    await target_db.execute(f"CREATE ROLE {role}")
    try:
        await target_db.execute(f"SELECT subscriber.admit('{role}', 'owner')")
        async with target_db.connection() as connection:
            await connection.execute(f"SET SESSION AUTHORIZATION {role}")
            assert await connection.fetch("SELECT FROM subscriber.repairs") == []
            assert await connection.fetch("SELECT FROM subscriber.repair_transaction") == []
            for statement in (
                "DELETE FROM subscriber.repair_transaction",
                "UPDATE subscriber.repair_transaction SET role = 'postgres'",
                "SELECT subscriber.forget_repairs('s', now())",
            ):
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await connection.execute(statement)
    finally:
        await target_db.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")
    await target_db.execute("TRUNCATE subscriber.complete, subscriber.repair_transaction")  # as a crash does
    await subscriber.restart()
    await target_db.wait_for("SELECT count(*) FROM subscriber.repairs", 4)
    assert await target_db.value("SELECT subscriber.forget_repairs('s', now() - interval '1 day')") == 0
    assert await target_db.value("SELECT subscriber.forget_repairs('s', now())") == 2
    assert await target_db.value("SELECT count(*) FROM subscriber.repairs") == 0


async def test_the_key_of_a_missing_row_changes_before_its_repair(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    """The apply worker does not find the row, and the first comparison has not seen its new key."""
    for database in (source_db, target_db):
        await database.execute("CREATE TABLE same (id int PRIMARY KEY, v text)")
    await source_db.execute("INSERT INTO same SELECT i, 'v' FROM generate_series(1, 9) i")
    await source_db.execute("CREATE PUBLICATION p FOR ALL TABLES")
    await subscriber.create(source_db, "p", "s", copy_engine="snapshot")
    await subscriber.wait_for_sync(source_db)
    await damage(target_db, "DELETE FROM same WHERE id = 1")
    psql = [str(source_db.server.bin / "psql"), source_db.dsn(), "-Xqc", "UPDATE same SET id = id + 100 WHERE id = 1"]

    def change_the_key(progress: ComparisonProgress) -> None:
        if progress.phase == "repairing public.same":
            subprocess.run(psql, check=True)

    result = await repair(target_db.dsn(), "s", on_progress=change_the_key)
    assert result.is_complete
    await subscriber.wait_for_sync(source_db)
    await assert_same(source_db, target_db, "same")


async def test_many_differences_are_read_in_small_buckets(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    """Differences that are spread over a table need few of its rows, and more than a list may have need rounds."""
    for database in (source_db, target_db):
        await database.execute("CREATE TABLE same (id int PRIMARY KEY, v text)")
    await source_db.execute("INSERT INTO same SELECT i, repeat('v', 400) FROM generate_series(1, 10000) i")
    await source_db.execute("CREATE PUBLICATION p FOR ALL TABLES")
    await subscriber.create(source_db, "p", "s", copy_engine="snapshot")
    await subscriber.wait_for_sync(source_db)
    await damage(target_db, "UPDATE same SET v = '' WHERE id % 50 = 0")
    result = await repair(target_db.dsn(), "s", limits=ComparisonLimits(buckets=4, rows=200, keys=50))
    (table,) = result.tables
    assert (table.updated, table.unrepaired) == (200, 0)
    await assert_same(source_db, target_db, "same")
    assert result.bytes_read < 200 * 500


async def test_tables_with_few_rows_share_a_batch(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    """They are repaired at one position. A table whose rows cannot be repaired leaves the others as they were."""
    tables = [f"t{number}" for number in range(1, 8)]
    for database in (source_db, target_db):
        await database.execute(*(f"CREATE TABLE {name} (id int PRIMARY KEY, u int UNIQUE, v text)" for name in tables))
    await source_db.execute(*(f"INSERT INTO {name} SELECT i, i, 'v' FROM generate_series(1, 9) i" for name in tables))
    await source_db.execute("CREATE PUBLICATION p FOR ALL TABLES")
    await subscriber.create(source_db, "p", "s", copy_engine="snapshot")
    await subscriber.wait_for_sync(source_db)
    statements = [f"UPDATE {name} SET v = 'w' WHERE id < 5" for name in tables]
    statements += [f"DELETE FROM {name} WHERE id = 5" for name in tables]
    statements += [f"INSERT INTO {name} VALUES (10)" for name in tables]
    positions = "SELECT count(DISTINCT lsn), count(DISTINCT relation), count(*) FROM subscriber.repairs"
    await damage(target_db, *statements)
    assert (await repair(target_db.dsn(), "s", delete_extra=True)).is_complete
    await assert_same(source_db, target_db, *tables)
    assert await target_db.rows(positions) == [(1, 7, 42)]

    circle = ("UPDATE t3 SET u = -u WHERE id > 7", "UPDATE t3 SET u = 17 + u WHERE u < 0")
    await damage(target_db, *statements, *circle)
    psql = [str(source_db.server.bin / "psql"), source_db.dsn(), "-Xqc", "TRUNCATE t5"]
    once = ["repairing 7 tables"]

    def empty(progress: ComparisonProgress) -> None:
        if progress.phase in once:
            once.clear()
            subprocess.run(psql, check=True)

    async with target_db.connection() as other, other.transaction():
        await other.execute("SELECT FROM t2 WHERE id = 3 FOR UPDATE")
        result = await repair(target_db.dsn(), "s", delete_extra=True, attempts=2, on_progress=empty)
    assert {table.name: table.unrepaired for table in result.tables if table.unrepaired} == {"public.t2": 1}
    assert [table.note for table in result.tables] == [None] * 7
    await subscriber.wait_for_sync(source_db)
    await assert_same(source_db, target_db, *(name for name in tables if name != "t2"))
    comparison = await verify(target_db.dsn(), "s")
    assert {table.name: len(table.changed) for table in comparison.tables if not table.is_same} == {"public.t2": 1}


async def test_uuids_are_read_by_ranges_of_their_first_bytes(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    """Unless these have no use: they are the same in many keys, or the other side has texts."""
    random_id, sequence = "md5(i::text)::uuid", "lpad(i::text, 32, '0')::uuid"
    tables = {
        "random": f"SELECT {random_id}, 'v' FROM generate_series(1, 2000) i",
        "domains": f"SELECT {random_id}, 'v' FROM generate_series(1, 500) i",
        "parted": f"SELECT {random_id}, 'v' FROM generate_series(1, 500) i",
        "sequences": f"SELECT {sequence}, 'v' FROM generate_series(1, 500) i",
        "texts": f"SELECT {random_id}, 'v' FROM generate_series(1, 500) i",
        "letters": f"SELECT {random_id}::text, 'v' FROM generate_series(1, 5000) i",
    }
    for database in (source_db, target_db):
        text = "text" if database is target_db else "uuid"
        await database.execute(
            "CREATE DOMAIN id AS uuid",
            "CREATE TABLE random (id uuid PRIMARY KEY, v text)",
            "CREATE TABLE domains (id id PRIMARY KEY, v text)",
            "CREATE TABLE parted (id uuid PRIMARY KEY, v text) PARTITION BY HASH (id)",
            "CREATE TABLE parted_0 PARTITION OF parted FOR VALUES WITH (MODULUS 2, REMAINDER 0)",
            "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
            "CREATE TABLE sequences (id uuid PRIMARY KEY, v text)",
            f"CREATE TABLE texts (id {text} PRIMARY KEY, v text)",
            "CREATE TABLE letters (id text PRIMARY KEY, v text)",
        )
    first, last = "00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff"
    for name, rows in tables.items():
        await source_db.execute(f"INSERT INTO {name} {rows}", f"INSERT INTO {name} VALUES ('{last}')")
        await source_db.execute(f"INSERT INTO {name} VALUES ('7fffffff-ffff-ffff-{last[19:]}'), ('80{first[2:]}')")
    await source_db.execute("CREATE PUBLICATION p FOR ALL TABLES WITH (publish_via_partition_root = true)")
    await subscriber.create(source_db, "p", "s", copy_engine="snapshot")
    await subscriber.wait_for_sync(source_db)
    for name in tables:
        await damage(
            target_db,
            f"DELETE FROM {name} WHERE id IN ('{last}', '80{first[2:]}')",
            f"UPDATE {name} SET v = 'w' WHERE id::text LIKE '%1'",
            # These have the first bytes of others.
            f"INSERT INTO {name} VALUES ('{first}'), ('fffffffe-{last[9:]}'), ('7fffffff-ffff-ffff-{first[19:]}')",
        )
    phases = set[str]()

    def note(progress: ComparisonProgress) -> None:
        phases.add(progress.phase.removeprefix("comparing ranges of public."))

    comparison = await verify(target_db.dsn(), "s", on_progress=note)
    changed = "SELECT count(*) FROM {} WHERE v = 'w'"
    for table in comparison.tables:
        assert {key for (key,) in table.missing} == {last, f"80{first[2:]}"}, table.name
        extra = {first, f"fffffffe-{last[9:]}", f"7fffffff-ffff-ffff-{first[19:]}"}
        assert {key for (key,) in table.extra} == extra, table.name
        assert len(table.changed) == await target_db.value(changed.format(table.name)) > 10, table.name
    assert phases & tables.keys() == {"random", "domains", "parted", "sequences"}
    assert "comparing parts of 1 tables" in phases  # many rows of letters would have to be read

    phases.clear()
    assert (
        await repair(target_db.dsn(), "s", delete_extra=True, limits=ComparisonLimits(rows=100), on_progress=note)
    ).is_complete
    await target_db.execute("ALTER TABLE texts ALTER id TYPE uuid USING id::uuid")
    await assert_same(source_db, target_db, *tables)
    assert phases & tables.keys() == {"random", "domains", "parted"}


async def test_locked_rows_are_named_and_the_others_repaired(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    await prepare_tables(source_db, target_db, subscriber, FEW_TABLES, FEW_ROWS)
    await damage(target_db, "UPDATE same SET v = 'w' WHERE id < 9")
    async with target_db.connection() as other, other.transaction():
        await other.execute("SELECT FROM same WHERE id = 3 FOR UPDATE")
        result = await repair(target_db.dsn(), "s", tables=["public.same"], attempts=2)
    assert [(table.updated, table.unrepaired) for table in result.tables] == [(7, 1)]
    assert not result.is_complete
    assert subscriber.log.has("is not repaired, because another transaction has locked it")
    assert (await repair(target_db.dsn(), "s", tables=["public.same"])).tables[0].updated == 1
    await assert_same(source_db, target_db, "same")


async def test_tables_without_identity_and_what_is_refused(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    for database in (source_db, target_db):
        await database.execute("CREATE TABLE log (a int)", "CREATE TABLE same (id int PRIMARY KEY, v text)")
    await source_db.execute("INSERT INTO log VALUES (1)", "CREATE PUBLICATION p FOR ALL TABLES")
    await subscriber.create(source_db, "p", "s", copy_engine="snapshot")
    await subscriber.wait_for_sync(source_db)
    await damage(target_db, "INSERT INTO log VALUES (2)")
    result = await repair(target_db.dsn(), "s", delete_extra=True)
    assert result.is_complete
    assert {table.name: table.deleted for table in result.tables} == {"public.same": 0, "public.log": 1}
    assert await target_db.rows("SELECT a FROM log") == [(1,)]
    for wrong, hint in (
        ("public.sane", "repair s public.same"),
        ("log", "repair s public.log"),
        ("x.y", "REFRESH PUB"),
    ):
        with pytest.raises(StatementError, match=f'table "{wrong}" is not part of subscription "s"') as refused:
            await repair(target_db.dsn(), "s", tables=[wrong])
        assert hint in (refused.value.hint or "")
    with pytest.raises(StatementError, match="does not exist"):
        await repair(target_db.dsn(), "none")
    await subscriber.execute("ALTER SUBSCRIPTION s DISABLE")
    with pytest.raises(StatementError, match="is disabled"):
        await repair(target_db.dsn(), "s")
    await subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
    await subscriber.stop()
    with pytest.raises(StatementError, match="is not part of"):  # before a launcher is needed
        await repair(target_db.dsn(), "s", tables=["public.none"])
    with pytest.raises(SubscriberError, match="no launcher runs subscription"):
        await repair(target_db.dsn(), "s")
    subscriber.start()
    await assert_nothing_left(source_db, target_db)


async def test_a_killed_repair_leaves_nothing_that_disturbs(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    """The command is killed again and again in the middle of its work. The last run repairs the rest."""
    await prepare(source_db, target_db, subscriber)
    command = [sys.executable, "-m", "subscriber", "repair", "s", "--target", target_db.dsn()]
    chance = random.Random(3)
    async with written(source_db):
        await damage(target_db, *DAMAGE)
        for _ in range(2):
            await run_for(command, chance.uniform(0.4, 1.5))
        with anyio.fail_after(60):
            result = await repair(target_db.dsn(), "s")
        assert result.is_complete
    await subscriber.wait_for_sync(source_db)
    await assert_same(source_db, target_db)
    await assert_nothing_left(source_db, target_db)


async def test_transactions_in_quarantine_come_first(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    for database in (source_db, target_db):
        await database.execute("CREATE TABLE same (id int PRIMARY KEY, v text)")
    await target_db.execute("ALTER TABLE same ADD CHECK (v <> 'poison')")
    await source_db.execute("CREATE PUBLICATION p FOR ALL TABLES")
    await subscriber.create(source_db, "p", "s", on_error="quarantine")
    await subscriber.wait_for_sync(source_db)
    await source_db.execute("INSERT INTO same VALUES (1, 'poison')", "INSERT INTO same VALUES (2, 'v')")
    await target_db.wait_for("SELECT count(*) FROM same", 1)
    for command in (repair, reseed):
        with pytest.raises(StatementError, match="transactions in quarantine") as refused:
            await command(target_db.dsn(), "s")
        assert "subscriber quarantine list s" in (refused.value.hint or "")
