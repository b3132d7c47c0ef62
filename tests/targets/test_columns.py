"""Columns of the target's tables: additional ones, unsent ones, identity columns."""

from __future__ import annotations

from subscriber.protocol.messages import ReplicaIdentity
from tests.apply.build import UNSENT
from tests.plugins.fix_cluster import Database
from tests.targets.conftest import Applier, Table

FULL = ReplicaIdentity.FULL


async def test_rows_are_inserted_updated_and_deleted(db: Database, applier: Applier) -> None:
    await db.execute('CREATE TABLE "T ""1" ("A b" int PRIMARY KEY, "c" text)')
    t = Table('T "1', "A b*", "c")
    await applier.apply(t.insert("1", "x"), t.insert("2", None), t.insert("3", ""))
    await applier.apply(t.update("1", "y"), t.update("4", "key", old=("2", None)), t.delete("3", None))
    assert await db.rows('SELECT * FROM "T ""1" ORDER BY 1') == [(1, "y"), (4, "key")]
    assert applier.missing == []
    assert applier.committed == [200, 300]


async def test_columns_only_the_target_has_get_their_defaults_and_keep_their_values(
    db: Database, applier: Applier
) -> None:
    await db.needs(18, "generated columns can be virtual")
    await db.execute(
        "CREATE SEQUENCE q",
        "CREATE TABLE t (extra text DEFAULT 'd' || nextval('public.q'), dropped int, a int PRIMARY KEY, b text,"
        " serial serial, g int GENERATED ALWAYS AS (a * 2) STORED, v int GENERATED ALWAYS AS (a * 3) VIRTUAL,"
        " i int GENERATED ALWAYS AS IDENTITY)",
        "ALTER TABLE t DROP dropped",
    )
    t = Table("t", "b", "a*")
    await applier.apply(t.insert("x", "1"), t.insert("x", "2"))
    await db.execute("UPDATE t SET extra = 'mine' WHERE a = 1")
    await applier.apply(t.update("y", "1"), t.update("z", "3", old=(None, "2")))
    assert await db.rows("SELECT extra, a, b, serial, g, v, i FROM t ORDER BY a") == [
        ("mine", 1, "y", 1, 2, 3, 1),
        ("d2", 3, "z", 2, 6, 9, 2),
    ]


async def test_a_table_without_columns_and_one_without_published_columns(db: Database, applier: Applier) -> None:
    await db.execute("CREATE TABLE none ()", "CREATE TABLE t (a int DEFAULT 7)")
    none, t = Table("none", identity=FULL), Table("t", identity=FULL)
    await applier.apply(none.insert(), none.insert(), t.insert(), none.delete())
    assert await db.rows("SELECT a, (SELECT count(*) FROM none) FROM t") == [(7, 1)]


async def test_a_value_that_was_not_sent_is_kept(db: Database, applier: Applier) -> None:
    await db.execute("CREATE TABLE t (a int PRIMARY KEY, b text, c text)")
    t = Table("t", "a*", "b", "c")
    await applier.apply(t.insert("1", "long", "x"), t.insert("2", UNSENT, "x"))
    await applier.apply(t.update("1", UNSENT, "y"), t.update("3", UNSENT, None, old=("2", None, None)))
    await applier.apply(t.update("1", UNSENT, UNSENT))
    await applier.apply(t.update(UNSENT, UNSENT, UNSENT, old=("1", None, None)))
    assert await db.rows("SELECT * FROM t ORDER BY a") == [(1, "long", "y"), (3, None, None)]
    assert applier.missing == []
    await applier.apply(t.update(UNSENT, UNSENT, UNSENT, old=("9", None, None)))
    assert applier.missing == ["UPDATE public.t"]


async def test_an_identity_column_that_is_the_key(db: Database, applier: Applier) -> None:
    await db.execute("CREATE TABLE t (a int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, b text, extra int DEFAULT 5)")
    t = Table("t", "a*", "b")
    await applier.apply(t.insert("10", "x"), t.insert("11", "y"))
    await db.execute("UPDATE t SET extra = a")
    await applier.apply(t.update("10", "same key"), t.update("20", UNSENT, old=("11", None)))
    assert await db.rows("SELECT * FROM t ORDER BY a") == [(10, "same key", 10), (20, "y", 11)]
    await applier.apply(t.update("30", "z", old=("9", None)), t.update("9", "z"), t.delete("9", None))
    assert applier.missing == ["UPDATE public.t", "UPDATE public.t", "DELETE public.t"]


async def test_an_identity_column_that_is_not_the_key(db: Database, applier: Applier) -> None:
    await db.execute("CREATE TABLE t (k int PRIMARY KEY, a int GENERATED ALWAYS AS IDENTITY, b text, extra int)")
    t = Table("t", "k*", "a", "b")
    await applier.apply(*(t.insert(str(n), str(n), "x") for n in range(1, 5)))
    await db.execute("UPDATE t SET extra = a")
    await applier.apply(
        t.update("1", "1", "unchanged"),
        t.update("2", "22", "changed"),
        t.update("33", "3", "key changed", old=("3", None, None)),
        t.update("44", "444", "both", old=("4", None, None)),
    )
    assert await db.rows("SELECT * FROM t ORDER BY k") == [
        (1, 1, "unchanged", 1),
        (2, 22, "changed", 2),
        (33, 3, "key changed", 3),
        (44, 444, "both", 4),
    ]
    assert applier.missing == []
    await applier.apply(t.update("9", "9", "z"))
    assert applier.missing == ["UPDATE public.t"]


async def test_a_composite_key_with_an_identity_column_in_it(db: Database, applier: Applier) -> None:
    await db.execute("CREATE TABLE t (a int GENERATED ALWAYS AS IDENTITY, k int, b text, PRIMARY KEY (a, k))")
    t = Table("t", "a*", "k*", "b")
    await applier.apply(t.insert("1", "1", "x"), t.insert("2", "1", "x"))
    await applier.apply(t.update("1", "2", "y", old=("1", "1", None)), t.update("3", "1", "y", old=("2", "1", None)))
    assert await db.rows("SELECT * FROM t ORDER BY a") == [(1, 2, "y"), (3, 1, "y")]


async def test_an_identity_column_of_a_table_without_key(db: Database, applier: Applier) -> None:
    await db.execute("CREATE TABLE t (a int GENERATED ALWAYS AS IDENTITY, b text)")
    t = Table("t", "a", "b", identity=FULL)
    await applier.apply(t.insert("1", "x"), t.insert("2", None))
    await applier.apply(t.update("1", "y", old=("1", "x")), t.update("3", "z", old=("2", None)))
    assert await db.rows("SELECT * FROM t ORDER BY a") == [(1, "y"), (3, "z")]


async def test_another_rows_key_is_not_mistaken_when_key_and_identity_column_change(
    db: Database, applier: Applier
) -> None:
    """The new key is that of a row which is deleted later in the transaction: found is the old one all the same."""
    await db.execute("CREATE TABLE t (k int PRIMARY KEY DEFERRABLE, a int GENERATED ALWAYS AS IDENTITY)")
    await db.execute("CREATE UNIQUE INDEX i ON t (k)", "ALTER TABLE t REPLICA IDENTITY USING INDEX i")
    t = Table("t", "k*", "a")
    await applier.apply(t.insert("1", "10"), t.insert("2", "20"))
    await applier.apply(t.delete("2", None), t.update("2", "11", old=("1", None)))
    assert await db.rows("SELECT * FROM t") == [(2, 11)]
