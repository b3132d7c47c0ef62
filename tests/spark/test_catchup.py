"""A backlog applied in batches: the same rows and position as the apply worker's, which resumes from there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import subscriber as library
from subscriber import Hook, Hooks
from subscriber.changelog.consumers import read_consumers
from subscriber.errors import ApplyError, StatementError
from subscriber.lsn import Lsn
from subscriber.spark.catchup.job import CaughtUp, catch_up
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriber
from tests.spark.scene import NAMES, TABLES, Scene, archived


@pytest.fixture
async def scene(
    source_db: Database, target_db: Database, subscriber: Subscriber, tmp_path: Path
) -> AsyncIterator[Scene]:
    """Create a subscription `s` in sync, disable it, and archive its backlog."""
    await target_db.execute(TABLES)
    async with archived(source_db, tmp_path) as scene:
        await subscriber.create(source_db, "p")
        await subscriber.wait_for_ready(source_db)
        await disable(subscriber, source_db)
        yield scene


async def disable(subscriber: Subscriber, source: Database) -> None:
    await subscriber.execute("ALTER SUBSCRIPTION s DISABLE")
    await source.wait_for("SELECT NOT active FROM pg_replication_slots WHERE slot_name = 's'")
    await subscriber.stop()


async def check(scene: Scene, target: Database) -> None:
    for table in NAMES:
        assert await scene.rows(target, table) == await scene.rows(scene.source, table), table


async def position(target: Database) -> Lsn:
    return Lsn.parse(await target.value("SELECT remote_lsn::text FROM subscriber.progress WHERE relid = 0"))


async def test_a_backlog_in_batches_and_then_the_worker(
    scene: Scene, target_db: Database, subscriber: Subscriber, spark: SparkSession
) -> None:
    await target_db.execute(
        "ALTER TABLE item ADD local text DEFAULT 'd'", "UPDATE item SET local = 'kept' WHERE id % 2 = 0"
    )
    await scene.write(200)
    await scene.archive()  # a batch ends where one run of the archiver ended
    await scene.write(200)
    await scene.source.execute("ALTER TABLE pair ADD later int", "UPDATE pair SET later = a WHERE a < 20")
    await target_db.execute("ALTER TABLE pair ADD later int")
    end = await scene.archive()
    batches: list[CaughtUp] = []

    def check_consumer(batch: CaughtUp) -> None:
        (consumer,) = read_consumers(scene.log.directory)
        assert (consumer.program, consumer.position) == ('catch-up of subscription "s"', batch.end)
        batches.append(batch)

    done = await catch_up(target_db.dsn(), "s", scene.log, spark, batch=100, on_batch=check_consumer)
    assert read_consumers(scene.log.directory) == []
    assert done == await position(target_db) >= end
    assert len(batches) > 1
    assert [batch.start for batch in batches[1:]] == [batch.end for batch in batches[:-1]]
    for table in NAMES[1:]:
        assert await scene.rows(target_db, table) == await scene.rows(scene.source, table), table
    names = "id, number, note, big, at, ok, raw"
    query = f"SELECT {names} FROM item ORDER BY id"
    assert await target_db.rows(query) == await scene.source.rows(query)
    assert set(await target_db.rows("SELECT local FROM item")) == {("kept",), ("d",)}
    assert await target_db.value("SELECT count(*) FROM pg_class WHERE relname LIKE 'catchup%'") == 0

    subscriber.start()
    await scene.write(50)
    await subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
    await scene.source.wait_for_catchup("s")
    assert await target_db.rows(query) == await scene.source.rows(query)
    for table in NAMES[1:]:
        assert await scene.rows(target_db, table) == await scene.rows(scene.source, table), table
    assert not subscriber.log.has("ERROR|conflict")


async def test_rows_that_the_target_does_not_have_roll_the_batch_back(
    scene: Scene, target_db: Database, spark: SparkSession
) -> None:
    await target_db.execute("DELETE FROM item WHERE id = 5")
    before = await position(target_db)
    await scene.source.execute("INSERT INTO log VALUES (1, 'a')", "UPDATE item SET note = 'x' WHERE id = 5")
    await scene.archive()
    with pytest.raises(ApplyError, match="are not the rows that the changes expect"):
        await catch_up(target_db.dsn(), "s", scene.log, spark)
    assert await target_db.value("SELECT count(*) FROM log") == 0
    assert await position(target_db) == before


async def test_a_truncate_deletes_the_rows_of_the_subscription(
    scene: Scene, target_db: Database, subscriber: Subscriber, spark: SparkSession
) -> None:
    """The table has rows of others, too, and the rule of ownership leaves them."""
    await subscriber.execute("ALTER SUBSCRIPTION s SET (source_tag = 'public.pair: a < 1000000')")
    await target_db.execute("INSERT INTO pair (a, b) VALUES (1000000, 'other')")
    await scene.source.execute("TRUNCATE pair", "INSERT INTO pair (a, b) VALUES (1, 'later')")
    await scene.archive()
    await catch_up(target_db.dsn(), "s", scene.log, spark)
    assert await target_db.rows("SELECT a, b FROM pair ORDER BY a") == [(1, "later"), (1000000, "other")]


async def test_tables_that_inherit_keep_their_rows(scene: Scene, target_db: Database, spark: SparkSession) -> None:
    """Rows of an heir have the keys, the texts and the places of rows that change."""
    heirs = ("item", "pair", "bag", "log")
    for table in heirs:
        await target_db.execute(
            f"CREATE TABLE heir_of_{table} () INHERITS ({table})",
            f"INSERT INTO heir_of_{table} SELECT * FROM ONLY {table}",
        )
    before = [await target_db.rows(f"SELECT t::text FROM heir_of_{table} t ORDER BY 1") for table in heirs]
    await scene.source.execute(
        "UPDATE item SET note = 'x' WHERE id = 5",
        "DELETE FROM item WHERE id = 6",
        "DELETE FROM bag WHERE a = 1",
        "TRUNCATE pair",
        "INSERT INTO pair (a, b) VALUES (1, 'later')",
    )
    await scene.archive()
    await catch_up(target_db.dsn(), "s", scene.log, spark)
    after = [await target_db.rows(f"SELECT t::text FROM heir_of_{table} t ORDER BY 1") for table in heirs]
    assert after == before
    for table in heirs:
        query = f"SELECT t::text FROM ONLY {table} t ORDER BY 1"
        assert await target_db.rows(query) == await scene.source.rows(query)


async def test_a_table_that_needs_changes_one_by_one_is_refused(
    scene: Scene, target_db: Database, subscriber: Subscriber, spark: SparkSession
) -> None:
    number = await target_db.value("SELECT max(attnum)::int FROM pg_attribute WHERE attrelid = 'pair'::regclass")
    added = range(number, 1600)
    await target_db.execute(f"ALTER TABLE pair {', '.join(f'ADD x{n} int' for n in added)}")
    with pytest.raises(StatementError, match="row by row") as refused:
        await catch_up(target_db.dsn(), "s", scene.log, spark)
    assert "too many columns for a staging table" in str(refused.value.detail)
    await target_db.execute(
        f"ALTER TABLE pair {', '.join(f'DROP x{n}' for n in added)}",
        "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'",
        "CREATE TRIGGER t BEFORE INSERT ON log FOR EACH ROW EXECUTE FUNCTION f()",
        "ALTER TABLE log ENABLE ALWAYS TRIGGER t",
    )
    with pytest.raises(StatementError, match="row by row") as refused:
        await catch_up(target_db.dsn(), "s", scene.log, spark)
    assert refused.value.detail == "It has a trigger that fires for replicated changes."
    assert await target_db.value("SELECT count(*) FROM pg_class WHERE relname LIKE 'catchup%'") == 0
    await subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
    with pytest.raises(StatementError, match="is enabled"):
        await catch_up(target_db.dsn(), "s", scene.log, spark)


async def test_a_subscription_with_hooks_is_refused(scene: Scene, target_db: Database, spark: SparkSession) -> None:
    """Its rows have to go through functions that only the program has."""
    async with library.connect(target_db.dsn(), hooks={"s": Hooks({"log": Hook(mask={"text": "x"})})}) as db:
        await db.execute("ALTER SUBSCRIPTION s ENABLE")
        async with db.running():
            await scene.source.wait_for_catchup("s")
        await db.execute("ALTER SUBSCRIPTION s DISABLE")
    before = await position(target_db)
    await scene.archive()
    with pytest.raises(StatementError, match='1 tables of subscription "s" have hooks') as refused:
        await catch_up(target_db.dsn(), "s", scene.log, spark)
    assert refused.value.sqlstate == "0A000"
    assert await position(target_db) == before
