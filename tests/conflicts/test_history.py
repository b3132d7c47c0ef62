"""Recorded conflicts, and special tables: partitions, identity columns, tables of other owners."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from subscriber.errors import ConflictError, StatementError, SubscriberError
from subscriber.protocol.messages import ReplicaIdentity, Update
from subscriber.subscription import ConflictHistory
from tests.apply.build import UNSENT, row
from tests.conflicts.conftest import IN_FUTURE, SUBID, Deciders
from tests.conflicts.test_policies import HERE, HISTORY, ROWS, change, make
from tests.plugins.fix_cluster import Database
from tests.targets.conftest import Table

DECISIONS = "SELECT conflict_type, policy, resolution FROM subscriber.conflict_history ORDER BY id"
DEFAULTS = [
    ("update_missing", "default", "skipped"),
    ("delete_missing", "default", "skipped"),
    ("update_origin_differs", "default", "applied"),
]


@pytest.mark.parametrize(
    ("history", "passed_over", "stopped"),
    [
        (ConflictHistory.NONE, [], []),
        (ConflictHistory.DECIDED, [], [("insert_exists", "default", "error")]),
        (ConflictHistory.ALL, DEFAULTS, [*DEFAULTS, ("insert_exists", "default", "error")]),
    ],
)
async def test_conflicts_without_a_policy_are_recorded_as_the_option_says(
    db: Database, deciders: Deciders, history: ConflictHistory, passed_over: list[Any], stopped: list[Any]
) -> None:
    """The result and the messages are PostgreSQL's. The option determines the recorded conflicts."""
    t = await make(db, HERE)
    session = await deciders.open(history=history)
    kinds = ("update_missing", "delete_missing", "update_origin_differs")
    await session.apply(*[change(t, kind, binary=True) for kind in kinds])
    assert [conflict.type for conflict in session.reported] == list(kinds)
    assert "Resolution" not in session.reported[0].exact_detail
    assert await db.rows(ROWS) == [(1, 11, "remote"), (2, 20, "other")]
    assert await db.rows(DECISIONS) == passed_over
    with pytest.raises(ConflictError):
        await session.apply(t.insert("1", "12", "remote"))
    assert await db.rows(DECISIONS) == stopped


async def test_an_error_is_counted_with_each_attempt_and_so_is_the_next(db: Database, deciders: Deciders) -> None:
    t = await make(db, HERE)
    for attempt in range(3):
        session = await deciders.open(rows=attempt == 2)
        with pytest.raises(ConflictError):
            await session.apply(t.insert("1", "20", "remote"))
    expected = [
        ("multiple_unique_conflicts", "default", "error", index, *key, None, None, 200, True, True, 3)
        for index, key in (("t_pkey", ("1", None)), ("t_a_key", (None, "20")))
    ]
    assert await db.rows(HISTORY) == expected
    await db.execute("DELETE FROM t WHERE id = 1")  # half a repair is another conflict
    session = await deciders.open()
    with pytest.raises(ConflictError):
        await session.apply(t.insert("1", "20", "remote"))
    one = ("insert_exists", "default", "error", "t_a_key", None, "20", "other", "remote", 200, True, True, 1)
    assert await db.rows(HISTORY) == [*expected, one]


async def test_rows_are_recorded_only_if_asked_for(db: Database, deciders: Deciders) -> None:
    t = await make(db, HERE)
    session = await deciders.open("keep_local", rows=False)
    await session.apply(change(t, "insert_exists", binary=False))
    ((local, remote, key, relation, time),) = await db.rows(
        "SELECT local_row, remote_row, key, relation, remote_commit_time = '2000-01-01 00:00:01+00'"
        " FROM subscriber.conflict_history"
    )
    assert (local, remote, key, relation, time) == (None, None, '{"id": "1"}', "public.t", True)


async def test_a_conflict_is_recorded_with_its_transaction_or_not_at_all(db: Database, deciders: Deciders) -> None:
    t = await make(db, HERE)
    session = await deciders.open("public.t: skip")
    with pytest.raises(SubscriberError):  # the second change cannot be applied
        await session.apply(change(t, "insert_exists", binary=False), t.insert("5", "50000000000", "x"))
    assert await db.rows(DECISIONS) == []
    session = await deciders.open("public.t: skip")
    await session.apply(change(t, "insert_exists", binary=False), t.insert("5", "50", "x"))
    assert await db.rows(DECISIONS) == [("insert_exists", "skip", "skipped")]


async def test_every_column_is_documented(db: Database) -> None:
    text = (Path(__file__).parent.parent.parent / "docs" / "conflicts.md").read_text()
    columns = await db.rows(
        "SELECT attname::text FROM pg_attribute"
        " WHERE attrelid = 'subscriber.conflict_history'::regclass AND attnum > 1 AND NOT attisdropped"
        " AND attname <> 'kept'"
    )
    assert [name for (name,) in columns if f"`{name}`" not in text] == []


async def test_only_who_owns_the_subscription_reads_it(db: Database, deciders: Deciders) -> None:
    t = await make(db, HERE)
    await (await deciders.open("skip")).apply(change(t, "insert_exists", binary=False))
    await db.execute("DROP ROLE IF EXISTS stranger, mine", "CREATE ROLE stranger", "CREATE ROLE mine")
    count = "SELECT count(*) FROM subscriber.conflict_history"
    connection = await db.connect()
    try:
        await connection.execute("SET ROLE stranger")
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.fetchval(count)
        await connection.execute("RESET ROLE; UPDATE subscriber.subscription SET subowner = 'mine'::regrole")
        await connection.execute("SET ROLE mine")
        assert await connection.fetchval(count) == 1
        assert await connection.execute("DELETE FROM subscriber.conflict_history WHERE detected < now()") == "DELETE 1"
    finally:
        await connection.execute("RESET ROLE; UPDATE subscriber.subscription SET subowner = current_user::regrole")
        await connection.execute("DROP ROLE stranger, mine")
    await db.execute("DELETE FROM subscriber.subscription")
    assert await db.value(count) == 0


async def test_only_a_policy_that_says_so_deletes_several_rows(db: Database, deciders: Deciders) -> None:
    t = await make(db, HERE)
    for policy in ("apply_remote", "last_update_wins", "*: apply_remote, public.t: last_update_wins"):
        session = await deciders.open(policy)
        with pytest.raises(ConflictError, match="conflict=multiple_unique_conflicts"):
            await session.apply(t.insert("1", "20", "remote"), at=IN_FUTURE)
        assert await db.rows(ROWS) == HERE
    session = await deciders.open("apply_remote")
    await session.apply(t.insert("1", "10", "both keys"))  # one row, and it stays
    assert session.reported[0].type == "multiple_unique_conflicts"
    assert await db.rows(ROWS) == [(1, 10, "both keys"), (2, 20, "other")]


async def test_columns_that_only_the_target_has_keep_their_values(db: Database, deciders: Deciders) -> None:
    t = await make(db, HERE)
    await db.execute("UPDATE t SET more = id")
    session = await deciders.open("insert_exists: apply_remote, multiple_unique_conflicts: apply_remote")
    await session.apply(t.insert("7", "10", "by the other key"))
    assert await db.rows("SELECT id, a, b, more FROM t ORDER BY 1") == [
        (2, 20, "other", 2),
        (7, 10, "by the other key", 1),
    ]
    await session.apply(t.insert("2", "10", "one of two"))  # the row with its identity stays
    assert await db.rows("SELECT id, a, b, more FROM t") == [(2, 10, "one of two", 2)]


async def test_last_update_wins_ignores_rows_of_the_same_transaction(db: Database, deciders: Deciders) -> None:
    t = await make(db, [])
    session = await deciders.open("last_update_wins")
    await session.apply(t.insert("1", "10", "first"), t.update("1", "11", "second"))
    await session.apply(t.update("1", "12", "third"))
    assert await db.rows(ROWS) == [(1, 12, "third")]
    assert session.reported == []


async def test_a_row_that_is_not_whole_is_not_inserted(db: Database, deciders: Deciders) -> None:
    t = await make(db, HERE)
    session = await deciders.open("apply_remote")
    update = Update(None, t.relation.relid, None, None, row("3", "30", UNSENT))
    await session.apply((t.relation, update))
    assert await db.rows(ROWS) == HERE
    assert await db.rows(DECISIONS) == [("update_missing", "apply_remote", "skipped")]


async def test_a_missing_row_whose_key_somebody_else_holds(db: Database, deciders: Deciders) -> None:
    t = await make(db, HERE)
    session = await deciders.open("apply_remote")
    await session.apply(t.update("3", "20", "remote"))
    assert await db.rows(ROWS) == [(1, 10, "local"), (3, 20, "remote")]
    assert [line[0:3] for line in await db.rows(DECISIONS)] == [
        ("update_missing", "apply_remote", "inserted"),
        ("insert_exists", "apply_remote", "updated"),
    ]


async def test_a_conflict_in_a_partition_is_decided_and_recorded(db: Database, deciders: Deciders) -> None:
    await db.execute(
        "CREATE TABLE t (id int PRIMARY KEY, b text) PARTITION BY RANGE (id)",
        "CREATE TABLE low (b text, id int NOT NULL)",
        "ALTER TABLE t ATTACH PARTITION low FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE high PARTITION OF t DEFAULT",
        "INSERT INTO t VALUES (7, 'local'), (70, 'local')",
    )
    t = Table("t", "id*", "b")
    session = await deciders.open("apply_remote, public.t update_origin_differs: keep_local")
    await session.apply(t.insert("7", "remote"), t.update("70", "remote"), t.update("8", "new"), t.delete("9", None))
    assert await db.rows("SELECT tableoid::regclass::text, id, b FROM t ORDER BY id") == [
        ("low", 7, "remote"),
        ("low", 8, "new"),
        ("high", 70, "local"),
    ]
    assert await db.rows("SELECT relation, conflict_type, local_row::text FROM subscriber.conflict_history") == [
        ("public.low", "insert_exists", '{"b": "local", "id": "7"}'),
        ("public.high", "update_origin_differs", '{"b": "local", "id": "70"}'),
        ("public.low", "update_missing", None),
        ("public.low", "delete_missing", None),
    ]


async def test_identity_columns_that_update_may_not_name(db: Database, deciders: Deciders) -> None:
    await db.execute(
        "CREATE TABLE t (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, a int UNIQUE, b text, c int DEFAULT 5)",
        "INSERT INTO t (a, b) VALUES (10, 'local')",
    )
    t = Table("t", "id*", "a", "b")
    session = await deciders.open("apply_remote")
    await session.apply(t.insert("1", "10", "same id"))
    await session.apply(t.insert("2", "10", "other id"))
    assert await db.rows("SELECT * FROM t") == [(2, 10, "other id", 5)]


async def test_tables_of_others_are_changed_with_their_rights(db: Database, deciders: Deciders) -> None:
    """Rows are read and deleted as the table's owner, and recorded as the worker itself."""
    t = await make(db, HERE)
    await db.execute("DROP ROLE IF EXISTS mary", "CREATE ROLE mary", "GRANT USAGE ON SCHEMA public TO mary")
    await db.execute("ALTER TABLE t OWNER TO mary")
    session = await deciders.open("apply_remote, multiple_unique_conflicts: apply_remote")
    await session.apply(t.insert("1", "20", "remote"), t.update("9", "90", "new"), t.delete("9", None, None))
    assert await db.rows(ROWS) == [(1, 20, "remote")]
    assert len(await db.rows(DECISIONS)) == 3
    await db.execute("DROP TABLE t", "DROP OWNED BY mary", "DROP ROLE mary")


async def test_a_row_that_somebody_is_changing_is_waited_for(db: Database, deciders: Deciders) -> None:
    t = await make(db, HERE)
    session = await deciders.open("last_update_wins")
    connection = await db.connect()
    await connection.execute("BEGIN; UPDATE t SET b = 'later' WHERE id = 1")
    applying = asyncio.ensure_future(session.apply(t.insert("1", "11", "remote")))
    await db.wait_for("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'", 1)
    await connection.execute("COMMIT")
    await applying
    assert await db.rows(ROWS) == [(1, 10, "later"), (2, 20, "other")]
    assert session.reported[0].local == {"b": "later", "id": "1", "more": None, "a": "10"}


async def test_equal_rows_without_a_key(db: Database, deciders: Deciders) -> None:
    await db.execute("CREATE TABLE t (a int, b text)", "INSERT INTO t VALUES (1, 'x'), (1, 'x'), (NULL, 'y')")
    t = Table("t", "a", "b", identity=ReplicaIdentity.FULL)
    session = await deciders.open("update_origin_differs: apply_remote, delete_origin_differs: keep_local")
    await session.apply(t.update("1", "new", old=("1", "x")), t.delete(None, "y"))
    assert await db.rows("SELECT a, b FROM t ORDER BY a, b") == [(1, "new"), (1, "x"), (None, "y")]


async def test_a_policy_that_compares_times_does_not_start_without_commit_timestamps(
    target_db: Database, deciders: Deciders
) -> None:
    """track_commit_timestamp has been switched off: the shared target does not have it."""
    from contextlib import AsyncExitStack

    from subscriber.catalog.schema import ensure_schema

    connection = await target_db.connect()
    await ensure_schema(connection)
    async with AsyncExitStack() as stack:
        others = Deciders(target_db, stack)
        await target_db.execute(
            "INSERT INTO subscriber.subscription (subid, subname, subowner, subenabled, subconninfo, subsynccommit,"
            " subpublications, subbinary, substream, subtwophasestate, subdisableonerr, subpasswordrequired,"
            f" subrunasowner, suborigin, subfailover) VALUES ({SUBID}, 's', current_user::regrole, true, '', 'off',"
            " '{p}', false, 'p', 'd', false, true, false, 'any', false)",
            f"SELECT subscriber.set_progress({SUBID}, 0, '0/0')",
        )
        with pytest.raises(StatementError, match='policy "last_update_wins" needs track_commit_timestamp'):
            await others.open("last_update_wins")
        await others.open("keep_local")
