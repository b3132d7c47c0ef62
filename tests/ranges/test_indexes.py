"""copy_indexes = after: the publisher's indexes and constraints are built when the rows are copied."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Program, Subscriber, Subscriptions
from tests.ranges.copies import between_ranges, closing_program, same, writing

COLUMNS = "CREATE TABLE {} (id int {}, n int NOT NULL DEFAULT 0, note text)"
FILL = "INSERT INTO {} SELECT i, i, 'note ' || i FROM generate_series(1, 900) i"
INDEXES = (
    "ALTER TABLE t ADD PRIMARY KEY (id)",
    "CREATE INDEX t_note ON t (lower(note), n DESC) WHERE n >= 0",
    "ALTER TABLE u ADD PRIMARY KEY (id)",
    'ALTER TABLE u ADD CONSTRAINT "one of" UNIQUE (note, id) DEFERRABLE INITIALLY DEFERRED',
    "CREATE UNIQUE INDEX u_both ON u (n, id) INCLUDE (note)",
    "CREATE INDEX taken ON u (note)",
    "CREATE UNIQUE INDEX v_id ON v (id)",
    "ALTER TABLE v REPLICA IDENTITY USING INDEX v_id",
)
DEFINITIONS = """
SELECT i.relname::text, pg_get_indexdef(i.oid), x.indisvalid, x.indisreplident, pg_get_constraintdef(k.oid)
  FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid LEFT JOIN pg_constraint k ON k.conindid = i.oid
 WHERE i.relnamespace = 'public'::regnamespace ORDER BY 1
"""
SLOW = """
CREATE FUNCTION slow(i int) RETURNS int IMMUTABLE LANGUAGE plpgsql AS $$
  BEGIN IF EXISTS (SELECT FROM pg_catalog.pg_class WHERE relname = 'shut') THEN PERFORM pg_catalog.pg_sleep(0.02);
  END IF; RETURN i; END $$;
"""


async def prepare(source: Database, target: Database, *more: str) -> None:
    for table in ("t", "u", "v"):
        await source.execute(COLUMNS.format(table, "NOT NULL"), FILL.format(table))
        await target.execute(COLUMNS.format(table, ""))
    await source.execute(*INDEXES, *more, "CREATE PUBLICATION p FOR ALL TABLES")


@pytest.mark.parametrize("engine", ["snapshot", "ranges"])
async def test_missing_indexes_are_built(
    source_db: Database, target_db: Database, subscriber: Subscriber, engine: str
) -> None:
    await prepare(source_db, target_db)
    await target_db.execute(
        "ALTER TABLE v ALTER id SET NOT NULL", "CREATE TABLE others (a int)", "CREATE INDEX taken ON others (a)"
    )
    async with writing(source_db, "t", "u"):
        await subscriber.create(source_db, "p", "s", copy_engine=engine, copy_indexes="after")
        await subscriber.wait_for_ready(source_db, timeout=60)
    await source_db.execute("UPDATE v SET n = -1 WHERE id = 5")
    await source_db.wait_for_catchup("s")
    await same(source_db, target_db, "t", "u", "v")
    published, built = [
        {row[0]: row for row in await database.rows(DEFINITIONS)} for database in (source_db, target_db)
    ]
    assert "(a)" in built.pop("taken")[1]
    published.pop("taken")
    assert built == published
    assert not subscriber.log.has("copied in one snapshot")
    assert not subscriber.log.has("ERROR")


async def test_an_index_that_cannot_be_built(source_db: Database, target_db: Database, subscriber: Subscriber) -> None:
    await prepare(source_db, target_db, SLOW, "CREATE INDEX t_slow ON t (public.slow(id))")
    await target_db.execute("ALTER TABLE v ALTER id SET NOT NULL")
    await subscriber.create(source_db, "p", "s", copy_engine="snapshot", copy_indexes="after")
    await subscriber.log.wait_for('index "t_slow" of table "public.t" could not be built')
    assert subscriber.log.has(r"build it yourself on the target: CREATE INDEX \"t_slow\" ON \"public\".\"t\" USING")
    assert "t_note" in {row[0] for row in await target_db.rows(DEFINITIONS)}
    states = "SELECT srrelid::regclass::text, srsubstate::text FROM subscriber.subscription_rel ORDER BY 1"
    await target_db.wait_for(f'SELECT array_agg(s::text) = \'{{"(t,f)","(u,r)","(v,r)"}}\' FROM ({states}) s')
    await target_db.execute(SLOW)
    await subscriber.wait_for_ready(source_db)
    await same(source_db, target_db, "t", "u", "v")
    assert await target_db.rows(DEFINITIONS) == await source_db.rows(DEFINITIONS)


@pytest.mark.parametrize("engine", [pytest.param("snapshot", marks=pytest.mark.soak), "ranges"])
async def test_a_worker_killed_while_it_builds_indexes_continues(
    source_db: Database, target_db: Database, processes: Path, subscriptions: Subscriptions, engine: str
) -> None:
    unique = "CREATE UNIQUE INDEX t_slow ON t (public.slow(id))"
    await prepare(source_db, target_db, SLOW, unique)
    await target_db.execute("ALTER TABLE v ALTER id SET NOT NULL", SLOW, "CREATE TABLE shut ()")
    program = Program(target_db.dsn(), processes / "run.log", options=["--setting", "retry_interval=0.2s"])
    await subscriptions.create(source_db, "p", "s", copy_engine=engine, copy_indexes="after")
    building = "SELECT count(*) > 0 FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'CREATE UNIQUE%t_slow%'"
    with closing_program(program):
        for _ in range(2):
            await program.start("launcher started")
            await target_db.wait_for(building, timeout=30)
            # The other indexes of the table are there, so a kill loses one.
            await target_db.wait_for("SELECT to_regclass('t_note') IS NOT NULL", timeout=30)
            program.kill()
        await source_db.execute("UPDATE t SET n = n + 1 WHERE id % 2 = 0", "DELETE FROM t WHERE id > 800")
        await target_db.execute("DROP TABLE shut")
        await program.start("launcher started")
        await subscriptions.wait_for_ready(source_db, timeout=60)
        await source_db.wait_for_catchup("s")
    await same(source_db, target_db, "t", "u", "v")
    assert await target_db.rows(DEFINITIONS) == await source_db.rows(DEFINITIONS)
    assert "copied in one snapshot" not in program.text


@pytest.mark.parametrize(
    "change",
    [
        "INSERT INTO t VALUES (2000, 1, 'last')",
        "UPDATE t SET n = -1 WHERE id = 1",
        "UPDATE t SET id = 2000 WHERE id = 1",
        "DELETE FROM t WHERE id = 1",
        "TRUNCATE t",
    ],
)
async def test_a_change_while_the_last_indexes_are_built(
    source_db: Database, target_db: Database, subscriber: Subscriber, change: str
) -> None:
    """The apply worker waits for the build of the key's index. Then the copy has ended, and the change is its own."""
    slow = "CREATE INDEX t_slow ON t (public.slow(id))"
    await prepare(source_db, target_db, SLOW, slow, "DELETE FROM t WHERE id BETWEEN 2 AND 850")
    await target_db.execute("ALTER TABLE v ALTER id SET NOT NULL", SLOW, "CREATE TABLE shut ()")
    await subscriber.create(source_db, "p", "s", copy_engine="ranges", copy_indexes="after")
    await target_db.wait_for(
        "SELECT count(*) > 0 FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'CREATE %t_slow%'", timeout=30
    )
    await source_db.execute(change)
    await target_db.execute("DROP TABLE shut")
    await subscriber.wait_for_ready(source_db, timeout=60)
    await same(source_db, target_db, "t", "u", "v")


@pytest.mark.parametrize(
    "change", ["UPDATE t SET n = -1 WHERE id = 1", pytest.param("TRUNCATE t", marks=pytest.mark.soak)]
)
async def test_the_index_of_a_key_is_built_for_the_first_change_that_needs_it(
    source_db: Database, target_db: Database, subscriber: Subscriber, change: str
) -> None:
    await prepare(source_db, target_db)
    await target_db.execute("ALTER TABLE v ALTER id SET NOT NULL")
    await subscriber.create(source_db, "p", "s", copy_engine="ranges", copy_indexes="after")
    # The next range is read after the change. So the apply worker needs the index before the copy ends.
    async with between_ranges(source_db, target_db) as transaction:
        assert await target_db.value("SELECT to_regclass('t_pkey')") is None
        # Its key belongs to a range that is not copied.
        await transaction.execute("INSERT INTO t VALUES (2000, 1, 'last')")
        await transaction.execute(change)
    await subscriber.wait_for_ready(source_db, timeout=60)
    await source_db.wait_for_catchup("s")
    await same(source_db, target_db, "t", "u", "v")
    built = [await database.rows(DEFINITIONS) for database in (source_db, target_db)]
    assert built[0] == built[1]
    # The other index has more bytes or the first name, so it is built first in other cases.
    assert await target_db.value("SELECT 't_pkey'::regclass < 't_note'::regclass")
    assert not subscriber.log.has("copied in one snapshot")
    assert not subscriber.log.has("ERROR")
    assert not subscriber.log.has("restart")
