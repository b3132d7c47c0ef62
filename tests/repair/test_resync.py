"""One table is synchronized again, and tables that have rows already are compared instead of copied."""

from __future__ import annotations

import random

import anyio
import pytest

from subscriber.cli.commands.resync import resync
from subscriber.errors import StatementError
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriber
from tests.repair.test_repair import (
    DAMAGE,
    ROWS,
    SHAPES,
    TABLES,
    TYPES,
    assert_same,
    damage,
    prepare,
    written,
)

TABLE = "CREATE TABLE same (id int PRIMARY KEY, v text)"
LEFT = "SELECT count(*) FROM pg_replication_slots WHERE slot_name LIKE '%\\_sync\\_%'"
STATES = "SELECT string_agg(DISTINCT srsubstate::text, '') FROM subscriber.pg_subscription_rel"


async def assert_nothing_left(source: Database, target: Database) -> None:
    await source.wait_for(LEFT, 0)
    await target.wait_for("SELECT count(*) FROM subscriber.progress_record WHERE relid <> 0", 0)
    await target.wait_for("SELECT count(*) FROM pg_replication_origin WHERE roname LIKE 'pg\\_%\\_%'", 0)


async def test_tables_are_compared_again_under_load(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    await prepare(source_db, target_db, subscriber, streaming="parallel")
    async with written(source_db):
        await damage(target_db, *DAMAGE)
        await subscriber.execute(f"ALTER SUBSCRIPTION s REFRESH TABLE {', '.join(TABLES)}")
        assert await target_db.value(STATES) != "r"
        await target_db.wait_for(f"SELECT ({STATES}) = 'r'", True, timeout=60)
    await subscriber.wait_for_sync(source_db)
    await assert_same(source_db, target_db)
    await assert_nothing_left(source_db, target_db)
    recorded = "SELECT count(*) FROM subscriber.repairs WHERE relation = 'public.pair' AND command = 'resync'"
    assert await target_db.value(recorded) == 202
    assert not subscriber.log.has("ERROR:")


async def test_readers_see_the_old_rows_or_an_empty_table(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    for database in (source_db, target_db):
        await database.execute(TABLE, "CREATE TABLE other (id int PRIMARY KEY)")
    await source_db.execute("INSERT INTO same SELECT i, 'v' FROM generate_series(1, 2000) i")
    await source_db.execute("CREATE PUBLICATION p FOR ALL TABLES")
    await subscriber.create(source_db, "p", "s", copy_engine="snapshot")
    await subscriber.wait_for_sync(source_db)
    await damage(target_db, "UPDATE same SET v = 'old' WHERE id = 1", "DELETE FROM same WHERE id = 2")
    file = "SELECT pg_relation_filenode('same')"
    before = await target_db.value(file)
    async with source_db.connection() as writer:
        # The slot of the table waits for this transaction. Meanwhile readers see the old rows, and others stream.
        await writer.execute("BEGIN; UPDATE same SET v = 'new' WHERE id = 3; INSERT INTO other VALUES (1)")
        await subscriber.execute("ALTER SUBSCRIPTION s REFRESH TABLE same")
        await target_db.wait_for(f"SELECT ({STATES})", "dr")
        await source_db.execute("INSERT INTO other VALUES (2)", "UPDATE same SET v = 'later' WHERE id = 4")
        await target_db.wait_for("SELECT count(*) FROM other", 1)
        assert await target_db.value("SELECT count(*) FROM same WHERE v = 'old'") == 1
        await writer.execute("COMMIT")
    await subscriber.wait_for_ready(source_db)
    await assert_same(source_db, target_db, "same")
    assert await target_db.value(file) == before
    assert await target_db.value("SELECT count(*) FROM subscriber.repairs") <= 4

    await damage(target_db, "UPDATE same SET v = 'old'", "INSERT INTO same VALUES (-1)")
    await subscriber.execute('ALTER SUBSCRIPTION s REFRESH TABLE public."same" WITH (truncate)')
    await subscriber.wait_for_ready(source_db)
    await assert_same(source_db, target_db, "same")
    assert await target_db.value(file) != before
    await assert_nothing_left(source_db, target_db)


async def test_tables_that_failed_or_are_empty(
    source_db: Database, target_db: Database, subscriber: Subscriber, capsys: pytest.CaptureFixture[str]
) -> None:
    """The copy of a table that has rows fails. It is compared instead, and an empty one is copied."""
    for database in (source_db, target_db):
        await database.execute(TABLE, "CREATE TABLE empty (id int PRIMARY KEY)")
    await source_db.execute("INSERT INTO same VALUES (1, 'a'), (2, 'b')", "INSERT INTO empty VALUES (1)")
    await target_db.execute("INSERT INTO same VALUES (1, 'a'), (3, 'c')")
    await source_db.execute("CREATE PUBLICATION p FOR ALL TABLES")
    await subscriber.create(source_db, "p", "s", copy_engine="snapshot")
    await subscriber.log.wait_for("duplicate key value")
    await target_db.wait_for("SELECT count(*) FROM empty", 1)
    await damage(target_db, "TRUNCATE empty")
    capsys.readouterr()
    assert await resync(target_db.dsn(), "s", ["same", "public.empty"], delete_extra=True) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "synchronized  public.same: 2 rows repaired",
        "synchronized  public.empty: 0 rows repaired",
    ]
    assert shown.err
    with pytest.raises(StatementError, match='table "none" is not part of'):
        await resync(target_db.dsn(), "s", ["none"])
    await subscriber.wait_for_ready(source_db)
    await assert_same(source_db, target_db, "same", "empty")
    await assert_nothing_left(source_db, target_db)
    recorded = "SELECT array_agg(action ORDER BY action) FROM subscriber.repairs"
    assert await target_db.value(recorded) == ["delete", "insert"]


async def test_a_database_that_was_copied_by_other_means(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    for database in (source_db, target_db):
        await database.execute(*TYPES, *SHAPES, *ROWS)
    await damage(target_db, *DAMAGE)
    await source_db.execute("CREATE PUBLICATION p FOR ALL TABLES WITH (publish_via_partition_root = true)")
    async with written(source_db):
        await subscriber.create(source_db, "p", "s", copy_data="compare", delete_extra=True)
        await subscriber.wait_for_sync(source_db, timeout=60)
        for database in (target_db, source_db):
            await database.execute("CREATE TABLE later (id int PRIMARY KEY)", "INSERT INTO later VALUES (1)")
        await source_db.execute("INSERT INTO later VALUES (2)")
        await subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION WITH (copy_data = compare)")
        await target_db.wait_for("SELECT count(*) FROM later", 2)
    await subscriber.wait_for_ready(source_db)
    await assert_same(source_db, target_db)
    await assert_nothing_left(source_db, target_db)
    assert not subscriber.log.has("ERROR:")


@pytest.mark.soak
async def test_restarts_and_repetitions(source_db: Database, target_db: Database, subscriber: Subscriber) -> None:
    """The launcher ends, and the statement is repeated, at any time. No change is lost or applied twice."""
    for database in (source_db, target_db):
        await database.execute(*TYPES, *SHAPES)
    await source_db.execute(*ROWS)
    await source_db.execute("CREATE PUBLICATION p FOR ALL TABLES WITH (publish_via_partition_root = true)")
    await subscriber.create(source_db, "p", "s", copy_engine="snapshot", source_tag="'all'")
    await subscriber.wait_for_sync(source_db)
    chance = random.Random(2)
    async with written(source_db, pause=0.003):
        for _ in range(30):
            await damage(target_db, *chance.sample(DAMAGE[9:], 4))
            tables = ", ".join(chance.sample(list(TABLES), 4))
            truncate = " WITH (truncate)" * (chance.random() < 0.4 and "circle" not in tables)
            await subscriber.execute(f"ALTER SUBSCRIPTION s REFRESH TABLE {tables}{truncate}")
            await anyio.sleep(chance.uniform(0, 0.5))
            if chance.random() < 0.5:
                await subscriber.restart()
        await subscriber.execute(f"ALTER SUBSCRIPTION s REFRESH TABLE {', '.join(TABLES)}")
        await target_db.wait_for(f"SELECT ({STATES}) = 'r'", True, timeout=60)
    await subscriber.wait_for_sync(source_db)
    await assert_same(source_db, target_db)
    await assert_nothing_left(source_db, target_db)


async def test_resync_refuses_by_name(source_db: Database, target_db: Database, subscriber: Subscriber) -> None:
    for database in (source_db, target_db):
        await database.execute(TABLE)
    await target_db.execute("CREATE TABLE strange ()")
    await source_db.execute("CREATE PUBLICATION p FOR ALL TABLES")
    await subscriber.create(source_db, "p", "s", two_phase=True)
    await subscriber.wait_for_ready(source_db)
    await target_db.wait_for("SELECT subtwophasestate FROM subscriber.subscription", b"e")
    refresh = "ALTER SUBSCRIPTION s REFRESH TABLE"
    with pytest.raises(StatementError, match="not allowed when two_phase is enabled") as refused:
        await subscriber.execute(f"{refresh} same")
    assert refused.value.command == "subscriber repair s"
    await subscriber.execute("ALTER SUBSCRIPTION s DISABLE")
    with pytest.raises(StatementError, match="not allowed for disabled"):
        await subscriber.execute(f"{refresh} same")
    working = "SELECT count(*) FROM subscriber.session s JOIN pg_stat_activity a USING (pid) WHERE s.relid = 0"
    await target_db.wait_for(working, 0)
    await source_db.wait_for("SELECT bool_or(active) FROM pg_replication_slots WHERE slot_name = 's'", False)
    await subscriber.execute("ALTER SUBSCRIPTION s SET (two_phase = false)", "ALTER SUBSCRIPTION s ENABLE")
    with pytest.raises(StatementError, match='table "none" is not part of subscription "s"'):
        await subscriber.execute(f"{refresh} none")
    with pytest.raises(StatementError, match=r'table "public\.strange" is not part of subscription "s"'):
        await subscriber.execute(f"{refresh} public.strange")
    with pytest.raises(StatementError, match="unrecognized subscription parameter"):
        await subscriber.execute(f"{refresh} same WITH (copy_data)")
    await subscriber.execute(f"{refresh} same")
    await subscriber.wait_for_ready(source_db)
