"""Programs that read a target's table with the launcher's rights do not run its owner's code."""

from __future__ import annotations

from subscriber.comparison.checksums import TableSide, add_up
from subscriber.comparison.columns import ComparedColumn
from subscriber.comparison.queries import ChecksumTask, QueryPool, ServerSnapshot
from subscriber.connection.connect import open_session
from subscriber.errors import SubscriberError
from subscriber.publisher.partitions import partition_table
from tests.privileges.conftest import Attacked


async def test_a_table_that_becomes_a_view_before_it_is_compared(attacked: Attacked) -> None:
    await attacked.as_owner("CREATE TABLE app.t (id int PRIMARY KEY)", "INSERT INTO app.t VALUES (1)")
    session = await open_session(attacked.target.dsn())
    try:
        ((relid,),) = await session.rows("SELECT 'app.t'::regclass::oid")
        (part,) = await partition_table(session, int(relid or 0), 1 << 20)
        await session.query("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        ((snapshot,),) = await session.rows("SELECT pg_export_snapshot()")
        sql = TableSide((ComparedColumn("id"),), (0,)).sums(part, 1)
        question = ChecksumTask(ServerSnapshot(attacked.target.dsn(), False, snapshot or ""), part, sql)
        (answer,) = await QueryPool(1).run([question])
        assert not isinstance(answer, SubscriberError)
        assert [rows for rows, _ in add_up([answer]).values()] == [1]
        await attacked.as_owner(
            "ALTER TABLE app.t RENAME TO hidden", "CREATE VIEW app.t AS SELECT app.attack() AS id, 1 AS ctid"
        )
        (answer,) = await QueryPool(1).run([question])
        assert isinstance(answer, SubscriberError)
        assert answer.message == 'table "app.t" was rewritten while it was compared'
        assert await attacked.loot() == set()
    finally:
        session.abort()


async def test_a_cast_of_the_owner_is_not_used(attacked: Attacked) -> None:
    """Values are printed by their types' own functions."""
    await attacked.as_owner(
        "CREATE TYPE app.mood AS ENUM ('a', 'b')",
        "CREATE FUNCTION app.say(app.mood) RETURNS text LANGUAGE sql AS $$ SELECT app.attack()::text $$",
        "CREATE CAST (app.mood AS text) WITH FUNCTION app.say(app.mood) AS ASSIGNMENT",
        "CREATE TABLE app.t (id int PRIMARY KEY, m app.mood)",
        "INSERT INTO app.t VALUES (1, 'a')",
    )
    session = await open_session(attacked.target.dsn())
    try:
        ((relid,),) = await session.rows("SELECT 'app.t'::regclass::oid")
        (part,) = await partition_table(session, int(relid or 0), 1 << 20)
        await session.query("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        ((snapshot,),) = await session.rows("SELECT pg_export_snapshot()")
        sql = TableSide((ComparedColumn("id"), ComparedColumn("m")), (0,)).rows(part, 1, [0])
        question = ChecksumTask(ServerSnapshot(attacked.target.dsn(), False, snapshot or ""), part, sql)
        (answer,) = await QueryPool(1).run([question])
        assert not isinstance(answer, SubscriberError), answer
        assert await attacked.loot() == set()
    finally:
        session.abort()
