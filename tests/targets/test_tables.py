"""Special tables: partitions, TRUNCATE, views, row security."""

from __future__ import annotations

import pytest

from subscriber.errors import MappingError, ServerError
from subscriber.protocol.messages import ReplicaIdentity
from tests.apply.build import UNSENT
from tests.plugins.fix_cluster import Database
from tests.targets.conftest import Applier, Sessions, Table, truncate

FULL = ReplicaIdentity.FULL


async def test_rows_of_partitioned_tables_are_changed(db: Database, applier: Applier) -> None:
    await db.execute(
        "CREATE TABLE t (a int, b text, PRIMARY KEY (a)) PARTITION BY RANGE (a)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE t2 (gone int, b text, a int NOT NULL)",
        "ALTER TABLE t2 DROP gone",
        "ALTER TABLE t ATTACH PARTITION t2 FOR VALUES FROM (10) TO (20)",
    )
    t = Table("t", "a*", "b")
    await applier.apply(t.insert("1", "x"), t.insert("11", "y"), t.insert("2", "z"))
    await applier.apply(
        t.update("1", "x2"), t.update("12", UNSENT, old=("2", None)), t.delete("11", None), t.delete("19", None)
    )
    assert await db.rows("SELECT tableoid::regclass::text, a, b FROM t ORDER BY a") == [
        ("t1", 1, "x2"),
        ("t2", 12, "z"),
    ]
    assert applier.missing == ["DELETE public.t2"]
    with pytest.raises(ServerError, match='no partition of relation "t" found for row') as caught:
        await applier.apply(t.insert("99", "x"))
    assert caught.value.sqlstate == "23514"


async def test_partitioned_tables_without_key(db: Database, applier: Applier) -> None:
    await db.execute(
        "CREATE TABLE t (a int, b text) PARTITION BY LIST (a)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES IN (1)",
        "CREATE TABLE t2 PARTITION OF t FOR VALUES IN (2)",
    )
    t = Table("t", "a", "b", identity=FULL)
    await applier.apply(t.insert("1", None), t.insert("1", None), t.insert("2", None), t.insert("2", "x"))
    await applier.apply(t.update("2", "y", old=("1", None)), t.delete("2", None), t.delete("2", None))
    assert await db.rows("SELECT a, b FROM t ORDER BY 1, 2") == [(1, None), (2, "x"), (2, "y")]
    assert applier.missing == ["DELETE public.t2"]


async def test_children_are_left_alone(db: Database, applier: Applier) -> None:
    await db.execute(
        "CREATE TABLE t (a int PRIMARY KEY)",
        "CREATE TABLE child (PRIMARY KEY (a)) INHERITS (t)",
        "INSERT INTO child VALUES (1), (2)",
        "INSERT INTO t VALUES (2), (3)",
    )
    t = Table("t", "a*")
    await applier.apply(t.delete("1"), t.delete("2"), t.update("4", old=("2",)), truncate(t))
    assert await db.rows("SELECT tableoid::regclass::text, a FROM t ORDER BY a") == [("child", 1), ("child", 2)]
    assert applier.missing == ["DELETE public.t", "UPDATE public.t"]


async def test_truncate_of_several_tables(db: Database, sessions: Sessions) -> None:
    applier = await sessions.open()
    await db.execute(
        "CREATE TABLE p (a int PRIMARY KEY)",
        "CREATE TABLE t (a serial PRIMARY KEY, p int REFERENCES p)",
        "CREATE TABLE r (a int) PARTITION BY LIST (a)",
        "CREATE TABLE r1 PARTITION OF r FOR VALUES IN (1)",
        "INSERT INTO p VALUES (1)",
        "INSERT INTO t (p) VALUES (1), (1)",
        "INSERT INTO r VALUES (1)",
    )
    p, t, r = Table("p", "a*"), Table("t", "a*", "p"), Table("r", "a", identity=FULL)
    await applier.apply(truncate(p, t, r))
    assert await db.rows("SELECT (SELECT count(*) FROM p), (SELECT count(*) FROM t), (SELECT count(*) FROM r)") == [
        (0, 0, 0)
    ]
    assert await db.value("SELECT nextval('t_a_seq')") == 3
    await applier.apply(truncate(p, t, restart_identity=True), p.insert("5"))
    assert await db.value("SELECT nextval('t_a_seq')") == 1
    applier.target.session.pipeline.session.abort()
    applier = await sessions.open()
    with pytest.raises(ServerError) as caught:
        await applier.apply(truncate(p, cascade=True))
    assert caught.value.sqlstate == "0A000"
    assert caught.value.message == "cannot truncate a table referenced in a foreign key constraint"


# --- targets that are none ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "detail"),
    [
        ("CREATE VIEW t AS SELECT 1 AS a", "This operation is not supported for views."),
        ("CREATE MATERIALIZED VIEW t AS SELECT 1 AS a", "This operation is not supported for materialized views."),
        ("CREATE SEQUENCE t", "This operation is not supported for sequences."),
        ("CREATE TYPE t AS (a int)", "This operation is not supported for composite types."),
    ],
)
async def test_a_relation_that_is_no_table_is_refused(
    db: Database, applier: Applier, statement: str, detail: str
) -> None:
    await db.execute(statement)
    with pytest.raises(MappingError) as caught:
        await applier.apply(Table("t", "a*").insert("1"))
    assert caught.value.message == 'cannot use relation "public.t" as logical replication target'
    assert (caught.value.detail, caught.value.sqlstate) == (detail, "42809")


async def test_a_table_that_is_not_there(db: Database, applier: Applier) -> None:
    await db.execute("CREATE TABLE other (a int)", "CREATE SCHEMA s", "CREATE TABLE s.t (a int)")
    with pytest.raises(MappingError) as caught:
        await applier.apply(Table("t", "a*").insert("1"))
    assert caught.value.message == 'logical replication target relation "public.t" does not exist'
    assert caught.value.sqlstate == "55000"


async def test_row_level_security_is_an_error_and_not_a_filter(db: Database, sessions: Sessions) -> None:
    role = f"role_{db.name}"
    await db.execute(
        f"CREATE ROLE {role} LOGIN",
        "CREATE TABLE t (a int PRIMARY KEY)",
        "INSERT INTO t VALUES (1)",
        "ALTER TABLE t ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY p ON t USING (a > 5)",
        f"GRANT ALL ON t TO {role}; GRANT USAGE ON SCHEMA subscriber TO {role}",
    )
    try:
        for change in (Table("t", "a*").insert("7"), Table("t", "a*").delete("1"), Table("t", "a*").update("1")):
            applier = await sessions.open()
            await applier.target.session.pipeline.rows(f"SET ROLE {role}")
            with pytest.raises(ServerError) as caught:
                await applier.apply(change)
            assert caught.value.sqlstate == "42501"
            applier.target.session.pipeline.session.abort()
        assert await db.rows("SELECT a FROM t") == [(1,)]
    finally:
        await db.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
