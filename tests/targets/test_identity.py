"""The row that a change identifies: by key, by the whole row, by the operators of its types."""

from __future__ import annotations

import pytest

from subscriber.errors import MappingError
from subscriber.protocol.messages import ReplicaIdentity
from tests.plugins.fix_cluster import Database
from tests.targets.conftest import Applier, Table

FULL = ReplicaIdentity.FULL


async def test_one_of_several_equal_rows_is_changed(db: Database, applier: Applier) -> None:
    await db.execute("CREATE TABLE t (a int, b text)")
    t = Table("t", "a", "b", identity=FULL)
    await applier.apply(*(t.insert("1", None) for _ in range(4)))
    await applier.apply(t.update("1", "u", old=("1", None)), t.delete("1", None))
    assert await db.rows("SELECT * FROM t ORDER BY b NULLS FIRST") == [(1, None), (1, None), (1, "u")]
    await applier.apply(t.update("2", "u", old=("1", "u")), t.delete("1", "u"), t.delete(None, None))
    assert applier.missing == ["DELETE public.t", "DELETE public.t"]


async def test_a_composite_value_without_fields_is_no_null(db: Database, applier: Applier) -> None:
    await db.execute("CREATE TYPE pair AS (a int, b text)", "CREATE TABLE t (id int, p pair)")
    t = Table("t", "id", "p", identity=FULL)
    await applier.apply(*(t.insert("1", value) for value in ("(,)", None, "(,)", None)))
    await applier.apply(
        t.update("2", None, old=("1", None)), t.delete("1", None), t.update("3", "(,)", old=("1", "(,)"))
    )
    assert await db.rows("SELECT id, p::text FROM t ORDER BY id") == [(1, "(,)"), (2, None), (3, "(,)")]
    assert not applier.missing


async def test_the_whole_row_counts_and_what_the_publisher_does_not_know_is_null(
    db: Database, applier: Applier
) -> None:
    await db.execute("CREATE TABLE t (a int, extra int, g int GENERATED ALWAYS AS (a) STORED)")
    await db.execute("INSERT INTO t (a, extra) VALUES (1, 5), (1, NULL), (2, 5)")
    t = Table("t", "a", identity=FULL)
    await applier.apply(t.update("3", old=("1",)), t.delete("2"))
    assert await db.rows("SELECT a, extra FROM t ORDER BY a") == [(1, 5), (2, 5), (3, None)]
    assert applier.missing == ["DELETE public.t"]


async def test_full_with_a_key_on_the_target_is_searched_by_the_key(db: Database, applier: Applier) -> None:
    await db.execute("CREATE TABLE t (a int PRIMARY KEY, b text)", "INSERT INTO t VALUES (1, 'differs'), (2, 'too')")
    t = Table("t", "a", "b", identity=FULL)
    await applier.apply(t.update("1", "new", old=("1", "old")), t.delete("2", "old"))
    assert await db.rows("SELECT * FROM t") == [(1, "new")]


async def test_the_targets_identity_decides(db: Database, applier: Applier) -> None:
    await db.execute(
        "CREATE TABLE t (a int PRIMARY KEY, b int NOT NULL, c text)",
        "CREATE UNIQUE INDEX i ON t (b) INCLUDE (c)",
        "ALTER TABLE t REPLICA IDENTITY USING INDEX i",
        "INSERT INTO t VALUES (1, 10, 'x')",
    )
    t = Table("t", "a*", "b*", "c")
    await applier.apply(t.update("2", "10", "y"))
    assert await db.rows("SELECT * FROM t") == [(2, 10, "y")]
    no = Table("t", "a*", "b", "c")
    with pytest.raises(MappingError, match="publisher did not send replica identity column expected"):
        await applier.apply(no.update("1", "10", "y"))


async def test_a_deferrable_key_identifies_nothing(db: Database, applier: Applier) -> None:
    await db.execute("CREATE TABLE t (a int PRIMARY KEY DEFERRABLE)")
    t = Table("t", "a*")
    await applier.apply(t.insert("1"))
    with pytest.raises(MappingError, match="is DEFERRABLE, so it does not identify a row"):
        await applier.apply(t.delete("1"))


async def test_a_type_without_equality_operator(db: Database, applier: Applier) -> None:
    await db.execute("CREATE TABLE t (a int, j json)", "CREATE TABLE k (a int PRIMARY KEY, j json)")
    t, k = Table("t", "a", "j", identity=FULL), Table("k", "a", "j", identity=FULL)
    await applier.apply(
        t.insert("1", "{}"), k.insert("1", "{}"), k.update("1", "[]", old=("1", "{}")), t.insert("2", None)
    )
    await applier.apply(t.delete("2", None))  # nothing to compare
    with pytest.raises(MappingError) as caught:
        await applier.apply(t.delete("1", "{}"))
    assert caught.value.message == "could not identify an equality operator for type json"
    assert caught.value.sqlstate == "42883"


async def test_operators_of_an_extension_in_another_schema(db: Database, applier: Applier) -> None:
    """A type with a comparison of its own, as citext has, and search_path is empty all the while."""
    await db.execute(
        "CREATE SCHEMA ext",
        "CREATE TYPE ext.ci",
        "CREATE FUNCTION ext.ci_in(cstring) RETURNS ext.ci LANGUAGE internal IMMUTABLE STRICT AS 'textin'",
        "CREATE FUNCTION ext.ci_out(ext.ci) RETURNS cstring LANGUAGE internal IMMUTABLE STRICT AS 'textout'",
        "CREATE TYPE ext.ci (INPUT = ext.ci_in, OUTPUT = ext.ci_out, LIKE = text, CATEGORY = 'S')",
        "CREATE CAST (ext.ci AS text) WITHOUT FUNCTION AS IMPLICIT",
        "CREATE FUNCTION ext.ci_cmp(ext.ci, ext.ci) RETURNS int LANGUAGE sql IMMUTABLE"
        " AS 'SELECT pg_catalog.bttextcmp(pg_catalog.lower($1::text), pg_catalog.lower($2::text))'",
        *(
            f"CREATE FUNCTION ext.ci_{name}(ext.ci, ext.ci) RETURNS bool LANGUAGE sql IMMUTABLE"
            f" AS 'SELECT ext.ci_cmp($1, $2) {operator} 0';"
            f"CREATE OPERATOR ext.{operator} (LEFTARG = ext.ci, RIGHTARG = ext.ci, FUNCTION = ext.ci_{name})"
            for name, operator in [("lt", "<"), ("le", "<="), ("eq", "="), ("ge", ">="), ("gt", ">")]
        ),
        "CREATE OPERATOR CLASS ext.ci_ops DEFAULT FOR TYPE ext.ci USING btree AS OPERATOR 1 ext.<, OPERATOR 2 ext.<=,"
        " OPERATOR 3 ext.=, OPERATOR 4 ext.>=, OPERATOR 5 ext.>, FUNCTION 1 ext.ci_cmp(ext.ci, ext.ci)",
        "CREATE TABLE t (a ext.ci PRIMARY KEY, b text)",
        "CREATE TABLE f (a ext.ci, b text)",
    )
    t, f = Table("t", "a*", "b"), Table("f", "a", "b", identity=FULL)
    await applier.apply(t.insert("One", "x"), t.insert("Two", "x"), f.insert("One", "x"), f.insert("one", "y"))
    await applier.apply(t.update("ONE", "y"), t.delete("tWO", None), f.delete("ONE", "y"))
    assert await db.rows("SELECT a::text, b FROM t") == [("ONE", "y")]
    assert await db.rows("SELECT a::text, b FROM f") == [("One", "x")]
    assert applier.missing == []
