"""Comparison of touched ranges: every path of changes records them, and a comparison reads no others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from random import Random

import pytest

from subscriber.apply.touched_ranges import SINGLE_KEYS, WHOLE_TABLE, TouchedTable
from subscriber.catalog.store import verifications
from subscriber.cli.commands.verify import describe
from subscriber.comparison.comparison import verify
from subscriber.comparison.result import ComparedRows, Comparison, TableComparison
from subscriber.errors import StatementError
from subscriber.settings import Settings
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import QUICK, running_subscriber
from tests.scenarios.conftest import Pair

pytestmark = pytest.mark.usefixtures("with_schema")

ROWS = 5_000
ON_TARGET = "SET session_replication_role = replica"


@pytest.fixture
async def pair(source_db: Database, target_db: Database) -> AsyncIterator[Pair]:
    async with running_subscriber(target_db) as subscriber:
        yield Pair(source_db, target_db, subscriber)


async def since_last(pair: Pair) -> dict[str, TableComparison]:
    comparison = await verify(pair.target.dsn(), "s", since_last=True)
    return tables_of(comparison)


def tables_of(found: Comparison) -> dict[str, TableComparison]:
    return {table.name.removeprefix("public."): table for table in found.tables}


async def complete(pair: Pair) -> None:
    comparison = await verify(pair.target.dsn(), "s")
    assert comparison.is_same, "\n".join(describe(comparison))
    assert comparison.is_complete


async def damage(pair: Pair, *statements: str) -> None:
    async with pair.target.connection() as connection:
        for statement in (ON_TARGET, *statements):
            await connection.execute(statement)


async def subscribe(pair: Pair, *tables: str, **options: object) -> None:
    """Create the tables with ROWS rows each, subscribe to them, and compare all rows."""
    for table in tables:
        await pair.both(table)
    await pair.subscribe("FOR ALL TABLES", track_ranges="true", copy_engine="snapshot", **options)
    await pair.subscriber.wait_for_ready(pair.source)


TABLE = "CREATE TABLE {} (id {} PRIMARY KEY, v int, note text)"
INSERT = "INSERT INTO {} SELECT {}, i, repeat('x', 100) FROM generate_series(1, {}) i"
KEYS = {
    "ints": ("int", "i"),
    "longs": ("bigint", "i * 1000000007::bigint"),
    "uuids": ("uuid", "md5(i::text)::uuid"),
    "texts": ("text", "'k ''' || i"),
    "dates": ("timestamptz", "'2024-01-01'::timestamptz + i * '1 min 1 us'::interval"),
}


@pytest.mark.parametrize("binary", [pytest.param("false", marks=pytest.mark.soak), "true"])
async def test_each_kind_of_key(pair: Pair, binary: str) -> None:
    await pair.both(*(TABLE.format(name, type_name) for name, (type_name, _) in KEYS.items()))
    await pair.both("CREATE TABLE two (a int, b uuid, v int, note text, PRIMARY KEY (a, b))")
    await pair.both("CREATE TABLE idle (id int PRIMARY KEY)", "CREATE TABLE no_key (v int, note text)")
    await pair.source.execute(
        *(INSERT.format(name, key, ROWS) for name, (_, key) in KEYS.items()),
        f"INSERT INTO two SELECT i % 5, md5(i::text)::uuid, i, repeat('x', 100) FROM generate_series(1, {ROWS}) i",
        "ALTER TABLE no_key REPLICA IDENTITY FULL",
        "INSERT INTO no_key SELECT i FROM generate_series(1, 100) i",
    )
    await subscribe(pair, binary=binary)
    await complete(pair)
    everything = [*KEYS, "two", "idle", "no_key"]
    nothing = await since_last(pair)
    assert {name: table.compared for name, table in nothing.items()} == dict.fromkeys(everything, ComparedRows.NONE)

    changed = ("UPDATE {0} SET v = -1 WHERE v IN (5, 6, 77)", "DELETE FROM {0} WHERE v = 8")
    await pair.change(*(statement.format(name) for name in [*KEYS, "two"] for statement in changed))
    await pair.change("INSERT INTO no_key VALUES (1000)", "UPDATE ints SET id = 1000000 WHERE v = 9")
    await damage(pair, *(f"UPDATE {name} SET note = 'damaged' WHERE v = -1" for name in [*KEYS, "two"]))
    await damage(pair, "UPDATE longs SET v = 0 WHERE v = 4999", "DELETE FROM ints WHERE id = 1000000")
    tables = await since_last(pair)
    assert tables["idle"].compared is ComparedRows.NONE
    assert (tables["no_key"].compared, tables["no_key"].is_same) == (ComparedRows.ALL, True)
    for name in [*KEYS, "two"]:
        table = tables[name]
        whole = name == "dates" and binary == "true"  # no text for a key in binary
        assert table.compared is (ComparedRows.ALL if whole else ComparedRows.TOUCHED), table
        assert (table.changed_count, table.missing_count) == (3, name == "ints"), table
        assert set(table.changed.values()) == {("note",)}
    # A table that differs is read as a whole the next time, and finds the row that the stream has not touched.
    again = await since_last(pair)
    assert again["longs"].compared is ComparedRows.ALL
    assert again["longs"].changed_count == 4


PATHS: dict[str, dict[str, object]] = {
    "lanes": {"apply_sessions": 3},
    "prepared, streamed": {"two_phase": "true", "streaming": "parallel", "prepare": True, "large": True},
    "batch": {},
    "row by row": {"row_by_row": True},
    "streamed": {"streaming": "on", "large": True},
    "parallel": {"streaming": "parallel", "large": True},
    "prepared": {"two_phase": "true", "prepare": True},
}
AT_LENGTH = list(PATHS)[2:]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak if name in AT_LENGTH else ()) for name in PATHS]
)
async def test_each_path_of_changes(source_db: Database, target_db: Database, name: str) -> None:
    options = dict(PATHS[name])
    row_by_row, large, prepare = (bool(options.pop(what, False)) for what in ("row_by_row", "large", "prepare"))
    settings = Settings(retry_interval=0.2, empty_database_poll_interval=0.1, one_by_one=row_by_row)
    if large:
        await source_db.stream_everything()
    async with running_subscriber(target_db, settings=settings) as subscriber:
        pair = Pair(source_db, target_db, subscriber)
        await pair.both(TABLE.format("t", "int"), TABLE.format("u", "int"))
        await pair.source.execute(INSERT.format("t", "i", ROWS), INSERT.format("u", "i", ROWS))
        await subscribe(pair, **options)
        await complete(pair)
        statements = [
            "BEGIN",
            "UPDATE t SET v = -1 WHERE id BETWEEN 101 AND 400",
            "SAVEPOINT a",
            "DELETE FROM t WHERE id = 500",
            "ROLLBACK TO a",
            "SAVEPOINT b",
            "INSERT INTO t SELECT i FROM generate_series(30001, 30300) i",
            "RELEASE b",
        ]
        await pair.source.execute("; ".join([*statements, "PREPARE TRANSACTION 'p'" if prepare else "COMMIT"]))
        if prepare:
            # A comparison that begins between PREPARE and COMMIT PREPARED does not take its ranges.
            await pair.target.wait_for("SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()", 1)
            async with pair.target.connection() as connection:
                subid = await connection.fetchval("SELECT subid FROM subscriber.subscription")
                _, touched, _ = await verifications.begin(connection, subid)
            assert not touched
            await pair.source.execute("COMMIT PREPARED 'p'")
        await pair.change(*(f"UPDATE t SET v = -2 WHERE id = {i}" for i in range(1001, 1011)), "TRUNCATE u")
        await damage(
            pair, "UPDATE t SET note = 'x' WHERE id IN (101, 400, 30001, 1010, 2000)", "INSERT INTO u VALUES (1)"
        )
        tables = await since_last(pair)
        assert tables["t"].compared is ComparedRows.TOUCHED
        assert sorted(tables["t"].changed, key=str) == [("101",), ("1010",), ("30001",), ("400",)]
        assert (tables["u"].compared, tables["u"].extra_count) == (ComparedRows.ALL, 1)


async def test_last_comparison_that_does_not_count(pair: Pair) -> None:
    await pair.both(TABLE.format("t", "int"), "CREATE TABLE u (id int PRIMARY KEY)")
    await pair.source.execute(INSERT.format("t", "i", ROWS), "CREATE PUBLICATION p FOR TABLE t")
    await pair.subscriber.create(pair.source, "p", "s", copy_engine="snapshot")
    await pair.subscriber.wait_for_ready(pair.source)
    with pytest.raises(StatementError, match="does not record") as caught:
        await since_last(pair)
    assert "SET (track_ranges = true)" in str(caught.value.hint)
    await pair.subscriber.execute("ALTER SUBSCRIPTION s SET (track_ranges = true)")
    with pytest.raises(StatementError, match="no valid last comparison"):
        await since_last(pair)
    await complete(pair)
    # Nothing is recorded while the option is off.
    await pair.subscriber.execute("ALTER SUBSCRIPTION s SET (track_ranges = false)")
    await pair.change("UPDATE t SET v = -1 WHERE id = 1")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s SET (track_ranges = true)")
    with pytest.raises(StatementError, match="no valid last comparison"):
        await since_last(pair)
    await complete(pair)
    # A table that is added or copied again is read as a whole.
    await pair.source.execute("ALTER PUBLICATION p ADD TABLE u")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION WITH (copy_data = true)")
    await pair.subscriber.wait_for_ready(pair.source)
    tables = await since_last(pair)
    assert {name: table.compared for name, table in tables.items()} == {"t": ComparedRows.NONE, "u": ComparedRows.ALL}
    assert all(table.is_same for table in tables.values())
    # A transaction that is skipped touches no range.
    await pair.subscriber.execute("ALTER SUBSCRIPTION s SKIP (lsn = 'FF/1')")
    with pytest.raises(StatementError, match="no valid last comparison"):
        await since_last(pair)


async def test_kills_and_comparisons_that_overlap(pair: Pair) -> None:
    await pair.both(TABLE.format("t", "int"))
    await pair.source.execute(INSERT.format("t", "i", ROWS))
    await subscribe(pair)
    await complete(pair)
    await pair.change("UPDATE t SET v = -1 WHERE id = 1")
    subid = await pair.target.value("SELECT subid FROM subscriber.subscription")
    connection = await pair.target.connect()
    # A comparison that was killed has taken the ranges, and the worker records later ones again.
    first, touched, _ = await verifications.begin(connection, subid)
    assert [list(table.ranges) for table in touched] == [[1]]
    await pair.subscriber.restart()
    await pair.change("UPDATE t SET v = -2 WHERE id IN (1, 2)")
    second, touched, last = await verifications.begin(connection, subid)
    assert sorted(value for table in touched for value in table.ranges) == [1, 1, 2]
    assert last is not None
    assert not await verifications.end(connection, subid, first, "", [])
    await pair.subscriber.stop()
    pair.subscriber.start()
    await pair.change("UPDATE t SET v = -3 WHERE id = 3")
    await damage(pair, "UPDATE t SET note = '' WHERE id < 6")
    tables = (await since_last(pair))["t"]
    assert sorted(tables.changed) == [("1",), ("2",), ("3",)]
    assert not await verifications.end(connection, subid, second, "", [])


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", range(4))
async def test_all_changed_keys_are_recorded_under_kills(source_db: Database, target_db: Database, number: int) -> None:
    """A trigger on the publisher logs the keys of all changes, while comparisons begin and the launcher is killed."""
    chance = Random(number)
    settings = Settings(
        retry_interval=0.2, empty_database_poll_interval=0.1, touched_ranges=64, batch_rows=chance.choice([50, 10_000])
    )
    await source_db.stream_everything()
    async with running_subscriber(target_db, settings=settings) as subscriber:
        pair = Pair(source_db, target_db, subscriber)
        await pair.both(TABLE.format("t", "int"), TABLE.format("k", "text"))
        await source_db.execute(
            INSERT.format("t", "i", ROWS),
            INSERT.format("k", "i::text", ROWS),
            "CREATE TABLE log (name text, id text)",
            "CREATE FUNCTION log() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " INSERT INTO log SELECT TG_TABLE_NAME, id FROM unnest(ARRAY[OLD.id::text, NEW.id::text]) id"
            " WHERE id IS NOT NULL; RETURN NULL; END $$",
            *(
                f"CREATE TRIGGER log AFTER INSERT OR UPDATE OR DELETE ON {name} FOR EACH ROW EXECUTE FUNCTION log()"
                for name in ("t", "k")
            ),
        )
        streaming = ("on", "parallel")[number % 2]
        await pair.subscribe(
            "FOR TABLE t, k", track_ranges="true", copy_engine="snapshot", streaming=streaming, apply_sessions=2
        )
        await subscriber.wait_for_ready(source_db)
        await complete(pair)
        subid = await target_db.value("SELECT subid FROM subscriber.subscription")
        connection = await target_db.connect()
        for _ in range(40):
            for _ in range(chance.randint(1, 10)):
                await source_db.execute(random_transaction(chance))
            if chance.random() < 0.3:
                await subscriber.restart()
            if chance.random() < 0.2:
                # Comparisons that are killed. Ranges that they have taken are given to the next one.
                await verifications.begin(connection, subid)
                await subscriber.restart()
        await source_db.wait_for_catchup("s", timeout=120)
        _, touched, last = await verifications.begin(connection, subid)
        assert last is not None
        oids = dict(await target_db.rows("SELECT relname, oid::int FROM pg_class WHERE relname IN ('t', 'k')"))
        for name, key in await source_db.rows("SELECT DISTINCT name, id FROM log"):
            stored = [table for table in touched if table.relid == oids[name]]
            assert any(has_key(table, key) for table in stored), (name, key, stored)


def random_transaction(chance: Random) -> str:
    """Return statements that change rows, and roll back a few."""
    statements = ["BEGIN"]
    for place in range(chance.choice([1, 1, 2, 5])):
        name, first = chance.choice("tk"), chance.randint(1, ROWS)
        last = first + chance.choice([0, 0, 5, 300])
        if chance.random() < 0.3:
            statements.append(f"SAVEPOINT s{place}")
        some = f"WHERE v BETWEEN {first} AND {last}"
        statements.append(
            chance.choice(
                (
                    f"UPDATE {name} SET note = 'x' {some}",
                    f"DELETE FROM {name} {some}",
                    f"INSERT INTO {name} SELECT i, i FROM generate_series({first}, {last}) i ON CONFLICT DO NOTHING",
                    "UPDATE t SET id = id + 1000000 WHERE id < 1000000 AND v = 7",
                )
            )
        )
        if f"SAVEPOINT s{place}" in statements and chance.random() < 0.5:
            statements.append(f"ROLLBACK TO s{place}")
    return "; ".join([*statements, "COMMIT"])


def has_key(table: TouchedTable, key: str) -> bool:
    if table.width == WHOLE_TABLE:
        return True
    if table.width == SINGLE_KEYS:
        return (key.encode().hex(),) in table.ranges
    return int(key) >> table.width in table.ranges


async def test_many_ranges_become_wider(source_db: Database, target_db: Database) -> None:
    settings = Settings(retry_interval=QUICK.retry_interval, empty_database_poll_interval=0.1, touched_ranges=64)
    async with running_subscriber(target_db, settings=settings) as subscriber:
        pair = Pair(source_db, target_db, subscriber)
        await pair.both(TABLE.format("t", "int"), TABLE.format("k", "text"))
        await pair.source.execute(INSERT.format("t", "i", 4 * ROWS), INSERT.format("k", "i::text", ROWS))
        await subscribe(pair)
        await complete(pair)
        await pair.change(
            *(f"UPDATE t SET v = -1 WHERE id = {i}" for i in range(1, 2000, 13)),
            *(f"UPDATE k SET v = -1 WHERE id = '{i}'" for i in range(1, 2000, 13)),
        )
        await damage(pair, "UPDATE t SET note = '' WHERE v = -1 OR id > 4000", "UPDATE k SET note = '' WHERE v = -1")
        tables = await since_last(pair)
        touched = len(range(1, 2000, 13))
        assert (tables["t"].compared, tables["t"].changed_count) == (ComparedRows.TOUCHED, touched)
        assert (tables["k"].compared, tables["k"].changed_count) == (ComparedRows.ALL, touched)
        rows = await target_db.value("SELECT count(*) FROM subscriber.touched_range")
        assert rows < 3 * 64
