"""Other sessions on the target change the same rows; large rows, and many rows."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from subscriber.apply.transaction import RemoteTransaction
from subscriber.errors import ServerError
from subscriber.lsn import Lsn
from subscriber.protocol.messages import ReplicaIdentity
from tests.plugins.fix_cluster import Database
from tests.targets.conftest import Applier, Sessions, Table

FULL = ReplicaIdentity.FULL


async def blocked(db: Database) -> None:
    await db.wait_for(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'subscriber: s' AND wait_event_type = 'Lock'", 1
    )


@pytest.mark.parametrize("identity", [ReplicaIdentity.DEFAULT, FULL], ids=["by key", "by the whole row"])
async def test_a_row_that_somebody_else_is_changing_is_waited_for(
    db: Database, applier: Applier, identity: ReplicaIdentity
) -> None:
    key = "" if identity is FULL else " PRIMARY KEY"
    await db.execute(f"CREATE TABLE t (a int{key}, b text, c text)", "INSERT INTO t VALUES (1, 'x'), (2, 'x')")
    # A column that the publisher does not have is changed by the target's own application.
    t = Table("t", "a*", "b", identity=identity)
    old = ("1", "x") if identity is FULL else None
    connection = await db.connect()
    transaction = connection.transaction()
    await transaction.start()
    await connection.execute("UPDATE t SET c = NULL")
    changes = asyncio.ensure_future(applier.apply(t.update("1", "y", old=old), t.delete("2", "x")))
    await blocked(db)
    await transaction.commit()
    with anyio.fail_after(10):
        await changes
    assert applier.missing == []
    assert await db.rows("SELECT a, b FROM t") == [(1, "y")]


async def test_a_row_that_somebody_else_deletes_is_missing(db: Database, applier: Applier) -> None:
    await db.execute("CREATE TABLE t (a int PRIMARY KEY, b text)", "INSERT INTO t VALUES (1, 'x')")
    connection = await db.connect()
    transaction = connection.transaction()
    await transaction.start()
    await connection.execute("DELETE FROM t")
    changes = asyncio.ensure_future(applier.apply(Table("t", "a*", "b").update("1", "y")))
    await blocked(db)
    await transaction.commit()
    with anyio.fail_after(10):
        await changes
    assert applier.missing == ["UPDATE public.t"]


async def test_a_deadlock_is_an_error_to_try_again_after(db: Database, sessions: Sessions) -> None:
    applier = await sessions.open()
    await applier.target.session.pipeline.rows("SET deadlock_timeout = '10ms'")
    await db.execute("CREATE TABLE t (a int PRIMARY KEY, b text)", "INSERT INTO t VALUES (1, 'x'), (2, 'x')")
    t = Table("t", "a*", "b")
    connection = await db.connect(deadlock_timeout="10s")
    relation, first = t.update("1", "y")
    transaction = RemoteTransaction(1, Lsn(150), 0)
    async with connection.transaction():
        await connection.execute("UPDATE t SET b = 'local' WHERE a = 2")
        await applier.target.change(transaction, await applier.mapping(relation), first)
        await applier.target.sync()
        own = asyncio.ensure_future(connection.execute("UPDATE t SET b = 'local' WHERE a = 1"))
        await db.wait_for("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'", 1)
        relation, second = t.update("2", "y")
        await applier.target.change(transaction, await applier.mapping(relation), second)
        with anyio.fail_after(20), pytest.raises(ServerError) as caught:
            await applier.target.sync()
        applier.target.session.pipeline.session.abort()
        await own
    assert caught.value.sqlstate == "40P01"
    again = await sessions.open()
    await again.apply(t.update("1", "y"), t.update("2", "y"))
    assert await db.rows("SELECT * FROM t ORDER BY a") == [(1, "y"), (2, "y")]


async def test_a_value_of_twenty_megabytes(db: Database, applier: Applier) -> None:
    await db.execute("CREATE TABLE t (a int PRIMARY KEY, b text)")
    t, value = Table("t", "a*", "b"), "ü" * 10_000_000
    await applier.apply(t.insert("1", value), t.update("1", value[1:]))
    assert await db.rows("SELECT length(b), b = repeat('ü', 9999999) FROM t") == [(9_999_999, True)]


async def test_a_table_with_as_many_columns_as_there_can_be(db: Database, applier: Applier) -> None:
    columns = [f"c{n}" for n in range(1599)]
    await db.execute(f"CREATE TABLE t (a int PRIMARY KEY, {', '.join(f'{c} bool' for c in columns)})")
    t = Table("t", "a*", *columns)
    await applier.apply(t.insert("1", *["t"] * 1599), t.insert("2", *["f"] * 1599))
    await applier.apply(t.update("1", *["f"] * 1599), t.delete("2", *[None] * 1599))
    assert await db.rows("SELECT a, c0, c1598 FROM t") == [(1, False, False)]


async def test_partitions_with_a_domain_that_refuses_null(db: Database, applier: Applier) -> None:
    """To say which partition a missing row belongs to must not fail."""
    await db.execute(
        "CREATE DOMAIN word AS text NOT NULL CHECK (VALUE <> '')",
        "CREATE TABLE t (a int PRIMARY KEY, b word, c int NOT NULL DEFAULT 1) PARTITION BY RANGE (a)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE rest PARTITION OF t DEFAULT",
    )
    t = Table("t", "a*", "b")
    await applier.apply(t.delete("1", None), t.update("50", "x"))
    await applier.target.sync()
    assert applier.missing == ["DELETE public.t1", "UPDATE public.rest"]


async def test_hash_partitions_and_partitions_of_partitions(db: Database, applier: Applier) -> None:
    await db.execute(
        "CREATE TABLE t (a int, b int, PRIMARY KEY (a, b)) PARTITION BY HASH (a)",
        "CREATE TABLE h0 PARTITION OF t FOR VALUES WITH (MODULUS 2, REMAINDER 0) PARTITION BY LIST (b)",
        "CREATE TABLE h1 PARTITION OF t FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
        "CREATE TABLE h01 PARTITION OF h0 FOR VALUES IN (1)",
        "CREATE TABLE h02 PARTITION OF h0 FOR VALUES IN (2)",
    )
    t = Table("t", "a*", "b*")
    await applier.apply(*(t.insert(str(a), str(b)) for a in range(20) for b in (1, 2)))
    homes = dict(await db.rows("SELECT a || ' ' || b, tableoid::regclass::text FROM t"))
    await db.execute("TRUNCATE t")
    await applier.apply(*(t.delete(str(a), str(b)) for a in range(20) for b in (1, 2)))
    await applier.target.sync()
    assert applier.missing == [f"DELETE public.{homes[f'{a} {b}']}" for a in range(20) for b in (1, 2)]
    assert set(homes.values()) == {"h01", "h02", "h1"}
