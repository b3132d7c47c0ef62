"""The messages about rows of the target that conflict with changes."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from tests.scenarios.conftest import Pair

AT = r"modified in transaction \d+\."
UPDATED, DELETED = "Could not find the row to be updated.", "Could not find the row to be deleted."


async def refused(pair: Pair, *details: str, kind: str, relation: str = "public.t") -> None:
    """Check that the ERROR with these pairs of lines is in the log, and the json log has the type and no row."""
    lines = r"\n.*".join(details)
    await pair.subscriber.log.wait_for(
        rf'ERROR:  conflict detected on relation "{relation}": conflict={kind}\n.*DETAIL:  {lines}\n.*CONTEXT:  '
    )
    text = pair.subscriber.log.text("json")
    assert f"conflict={kind}" in text
    assert "secret" not in text
    await pair.target.wait_for(f"SELECT confl_{kind} > 0 FROM subscriber.pg_stat_subscription_stats")


async def test_rows_that_are_missing_are_counted(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.source.execute("INSERT INTO t SELECT generate_series(1, 5)")
    await pair.subscribe("FOR TABLE t")
    await pair.target.execute("DELETE FROM t")
    await pair.change("UPDATE t SET id = 9 WHERE id = 1", "DELETE FROM t WHERE id < 4")
    await pair.target.wait_for(
        "SELECT (confl_update_missing, confl_delete_missing, apply_error_count) = (1, 2, 0)"
        " FROM subscriber.pg_stat_subscription_stats"
    )


@pytest.mark.parametrize("options", [{"binary": False}, {"binary": True}, {}], ids=["text", "binary", "unsaid"])
async def test_the_message_about_a_missing_row_is_the_same_in_every_format(
    pair: Pair, options: dict[str, bool]
) -> None:
    columns = "id int PRIMARY KEY, n numeric(6,2), at timestamp(0), f bool, b bytea, c char(3), d date"
    row = "i, '2024-05-01 12:00', true, 'x', 'c', '2024-05-02'"
    await pair.both(f"CREATE TABLE t ({columns})", f"CREATE TABLE u ({columns}) PARTITION BY RANGE (id)")
    await pair.both("CREATE TABLE u1 PARTITION OF u DEFAULT", "CREATE TABLE v (id int, n numeric)")
    await pair.source.execute("ALTER TABLE v REPLICA IDENTITY FULL", "INSERT INTO v VALUES (4, 4.50)")
    await pair.source.execute(*(f"INSERT INTO {t} SELECT i, {row} FROM generate_series(1, 2) i" for t in ("t", "u")))
    await pair.subscribe("FOR ALL TABLES WITH (publish_via_partition_root)", **options)
    await pair.target.execute("TRUNCATE t, u, v")
    await pair.change(
        "BEGIN; UPDATE t SET n = 1.5 WHERE id = 1; UPDATE u SET id = 3, d = NULL WHERE id = 1;"
        " DELETE FROM u WHERE id = 2; DELETE FROM v; COMMIT"
    )
    form = "text" if options.get("binary") is False else "binary"
    assert await pair.target.value("SELECT format FROM subscriber.worker WHERE relid = 0") == form
    # Queries about the rows follow the changes, so their transaction may be confirmed before its conflicts are logged.
    await pair.subscriber.log.wait_for("(?s)(conflict detected.*?){4}.*\n")
    said = re.findall(
        r"conflict detected on relation \"(.*)\"[^\n]*\n.*DETAIL:  (.*)\n\s*(.*)\n", pair.subscriber.log.text()
    )
    shown = r"2024-05-01 12:00:00, t, \x78, c  "
    assert sorted(said) == [
        ("public.t", UPDATED, rf"Remote row (1, 1.50, {shown}, 2024-05-02); replica identity (id)=(1)."),
        ("public.u1", DELETED, "Replica identity (id)=(2)."),
        ("public.u1", UPDATED, rf"Remote row (3, 1.00, {shown}, null); replica identity (id)=(1)."),
        ("public.v", DELETED, "Replica identity full (4, 4.50)."),
    ]


@pytest.fixture
async def t(pair: Pair) -> Pair:
    await pair.source.execute("CREATE TABLE t (id int PRIMARY KEY, a int, b text)")
    await pair.target.execute("CREATE TABLE t (b text, id int PRIMARY KEY, a int UNIQUE, more int DEFAULT 5)")
    return pair


async def test_a_table_that_is_locked_while_a_conflict_is_looked_into(t: Pair) -> None:
    """Reading facts for the message waits no longer for a lock than the lock timeout, and reports the wait."""
    await t.subscribe("FOR TABLE t")
    first, second = await t.target.connect(), await t.target.connect()
    await first.execute("BEGIN; INSERT INTO t (id, a) VALUES (1, 10)")
    await t.source.execute("INSERT INTO t VALUES (1, 20, 'x')")
    waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
    await t.target.wait_for(waiting, 1)  # for the row
    locked = asyncio.create_task(second.execute("BEGIN; LOCK TABLE t"))
    await t.target.wait_for(waiting, 2)
    await first.execute("COMMIT")
    await locked
    await t.subscriber.log.wait_for(
        "WARNING:  the conflicts of the transaction that failed are not all known\n.*canceling statement due to lock"
    )
    await t.subscriber.log.wait_for("duplicate key value violates unique constraint")
    await second.execute("COMMIT")
    await first.execute("DELETE FROM t")
    await t.source.wait_for_catchup("s")
    assert await t.target.value("SELECT a FROM t") == 20


@pytest.mark.parametrize("binary", [False, True])
async def test_an_insert_with_a_key_that_exists(t: Pair, binary: bool) -> None:
    await t.subscribe("FOR TABLE t", binary=binary)
    await t.target.execute("INSERT INTO t (id, a, b) VALUES (1, 10, 'secret')")
    await t.source.execute("INSERT INTO t VALUES (1, 20, 'secret too')")
    remote = r"\(secret too, 1, 20, null\)"
    await refused(
        t,
        rf'Key already exists in unique index "t_pkey", {AT}',
        rf"Key \(id\)=\(1\); existing local row \(secret, 1, 10, 5\); remote row {remote}\.",
        kind="insert_exists",
    )
    await t.target.execute("DELETE FROM t")
    await t.caught_up()
    assert await t.target.rows("SELECT id, a, b, more FROM t") == [(1, 20, "secret too", 5)]


async def test_an_update_to_a_key_that_exists_does_not_count_its_own_row(t: Pair) -> None:
    await t.subscribe("FOR TABLE t")
    await t.change("INSERT INTO t VALUES (1, 10, 'mine')")
    await t.target.execute("INSERT INTO t (id, a, b) VALUES (2, 20, 'secret')")
    await t.source.execute("UPDATE t SET a = 20 WHERE id = 1")
    await refused(
        t,
        rf'Key already exists in unique index "t_a_key", {AT}',
        r"Key \(a\)=\(20\); existing local row \(secret, 2, 20, 5\); "
        r"remote row \(mine, 1, 20, null\); replica identity \(id\)=\(1\)\.",
        kind="update_exists",
    )


async def test_more_than_one_index_refuses(t: Pair) -> None:
    await t.subscribe("FOR TABLE t")
    await t.target.execute("INSERT INTO t (id, a, b) VALUES (1, 10, 'x'), (2, 20, 'y')")
    await t.source.execute("INSERT INTO t VALUES (1, 20, 'z')")
    await refused(
        t,
        rf'Key already exists in unique index "t_pkey", {AT}',
        r"Key \(id\)=\(1\); existing local row \(x, 1, 10, 5\); remote row \(z, 1, 20, null\)\.",
        rf'Key already exists in unique index "t_a_key", {AT}',
        r"Key \(a\)=\(20\); existing local row \(y, 2, 20, 5\); remote row \(z, 1, 20, null\)\.",
        kind="multiple_unique_conflicts",
    )


async def test_a_partition_is_named_itself(pair: Pair) -> None:
    await pair.source.execute("CREATE TABLE t (id int PRIMARY KEY, b text)")
    await pair.target.execute(
        "CREATE TABLE t (id int PRIMARY KEY, b text) PARTITION BY RANGE (id)",
        "CREATE TABLE low PARTITION OF t FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE high PARTITION OF t DEFAULT",
    )
    await pair.subscribe("FOR TABLE t")
    await pair.target.execute("INSERT INTO t VALUES (7, 'secret')")
    await pair.source.execute("INSERT INTO t VALUES (7, 'new')")
    await refused(
        pair,
        rf'Key already exists in unique index "low_pkey", {AT}',
        r"Key \(id\)=\(7\); existing local row \(7, secret\); remote row \(7, new\)\.",
        kind="insert_exists",
        relation="public.low",
    )


async def test_a_policy_slows_only_its_table(pair: Pair) -> None:
    """Changes of other tables are applied in batches; a transaction with both keeps its order."""
    await pair.both("CREATE TABLE a (id int PRIMARY KEY, v text)", "CREATE TABLE b (id int PRIMARY KEY, v text)")
    await pair.subscribe("FOR TABLE a, b", conflict_policy="'public.a: keep_local'")
    await pair.target.execute("INSERT INTO a VALUES (1, 'target')")
    await pair.source.execute(
        "INSERT INTO b SELECT i, 'new' FROM generate_series(1, 5000) i",
        "UPDATE b SET v = 'changed' WHERE id <= 3000",
        "INSERT INTO a VALUES (1, 'source'), (2, 'source')",
        "BEGIN; DELETE FROM b WHERE id = 7; UPDATE a SET v = 'x' WHERE id = 2;"
        " INSERT INTO b VALUES (7, 'again'); COMMIT",
    )
    for number in range(200):
        await pair.source.execute(f"INSERT INTO b VALUES ({10_000 + number}, 'small')")
    await pair.change("DELETE FROM b WHERE id = 8")
    await pair.assert_same("SELECT * FROM b ORDER BY id")
    assert await pair.rows("SELECT * FROM a ORDER BY id") == [(1, "target"), (2, "x")]
    await pair.target.wait_for("SELECT changes >= 8000 FROM subscriber.worker WHERE relid = 0", True)
    counted = await pair.target.value("SELECT one_by_one::text FROM subscriber.worker WHERE relid = 0")
    reasons = json.loads(counted)
    assert reasons["conflict policy"] <= 5  # those of table a, and the rest of the transaction with both
    assert sum(reasons.values()) < 500
