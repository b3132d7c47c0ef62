"""Constraints, triggers and rules of the target that apply."""

from __future__ import annotations

import pytest

from subscriber.errors import ServerError
from subscriber.protocol.messages import ReplicaIdentity
from tests.apply.build import UNSENT
from tests.plugins.fix_cluster import Database
from tests.targets.conftest import Applier, Sessions, Table

FULL = ReplicaIdentity.FULL


async def test_checks_hold_and_foreign_keys_and_deferrable_uniqueness_do_not(db: Database, applier: Applier) -> None:
    await db.execute(
        "CREATE TABLE p (a int PRIMARY KEY)",
        "CREATE TABLE t (a int PRIMARY KEY, p int REFERENCES p ON DELETE CASCADE, c int CHECK (c > 0),"
        " u int UNIQUE DEFERRABLE)",
        "INSERT INTO p VALUES (1)",
    )
    p, t = Table("p", "a*"), Table("t", "a*", "p", "c", "u")
    await applier.apply(t.insert("1", "1", "1", "1"), t.insert("2", "999", "1", "1"), p.delete("1"))
    assert await db.rows("SELECT * FROM t ORDER BY a") == [(1, 1, 1, 1), (2, 999, 1, 1)]
    with pytest.raises(ServerError) as caught:
        await applier.apply(t.insert("3", None, "-1", None))
    assert caught.value.sqlstate == "23514"


async def test_unique_keys_and_exclusion_constraints_stop_replication(db: Database, sessions: Sessions) -> None:
    await db.execute(
        "CREATE TABLE t (a int PRIMARY KEY, u int UNIQUE, r int4range, EXCLUDE USING gist (r WITH &&))",
        "INSERT INTO t VALUES (1, 1, '[1,5)')",
    )
    for values, sqlstate in [(("1", "2", None), "23505"), (("2", "1", None), "23505"), (("2", "2", "[2,3)"), "23P01")]:
        applier = await sessions.open()
        with pytest.raises(ServerError) as caught:
            await applier.apply(Table("t", "a*", "u", "r").insert(*values))
        assert caught.value.sqlstate == sqlstate
        applier.target.session.pipeline.session.abort()


# --- triggers and rules ---------------------------------------------------------------------------


async def test_only_triggers_for_replicas_fire(db: Database, applier: Applier) -> None:
    await db.execute(
        "CREATE TABLE t (a int PRIMARY KEY, b text, c text)",
        "CREATE TABLE log (what text)",
        "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " INSERT INTO public.log VALUES (concat_ws(' ', TG_NAME, TG_OP)); RETURN coalesce(NEW, OLD); END $$",
        *(
            f"CREATE TRIGGER {name} BEFORE INSERT OR UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION note()"
            for name in ("ordinary", "replica", "always", "disabled")
        ),
        "CREATE TRIGGER of_b AFTER UPDATE OF b ON t FOR EACH ROW EXECUTE FUNCTION note()",
        "CREATE TRIGGER of_c AFTER UPDATE OF c ON t FOR EACH ROW EXECUTE FUNCTION note()",
        "ALTER TABLE t ENABLE REPLICA TRIGGER replica, ENABLE ALWAYS TRIGGER always, DISABLE TRIGGER disabled,"
        " ENABLE ALWAYS TRIGGER of_b, ENABLE REPLICA TRIGGER of_c",
    )
    t = Table("t", "a*", "b", "c")
    await applier.apply(t.insert("1", "x", "x"), t.update("1", "x", UNSENT), t.delete("1", None, None))
    assert [what for (what,) in await db.rows("SELECT what FROM log")] == [
        "always INSERT",
        "replica INSERT",
        "always UPDATE",
        "replica UPDATE",
        "of_b UPDATE",  # b was sent, though not changed; c was not
        "always DELETE",
        "replica DELETE",
    ]


async def test_a_row_that_a_trigger_keeps_from_changing_is_not_missing(db: Database, applier: Applier) -> None:
    await db.execute(
        "CREATE TABLE t (a int PRIMARY KEY, b text)",
        "CREATE TABLE f (a int, b text)",
        "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$",
        "CREATE TRIGGER no BEFORE UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION no()",
        "CREATE TRIGGER no BEFORE UPDATE OR DELETE ON f FOR EACH ROW EXECUTE FUNCTION no()",
        "ALTER TABLE t ENABLE ALWAYS TRIGGER no",
        "ALTER TABLE f ENABLE REPLICA TRIGGER no",
        "INSERT INTO t VALUES (1, 'x')",
        "INSERT INTO f VALUES (1, NULL)",
    )
    t, f = Table("t", "a*", "b"), Table("f", "a", "b", identity=FULL)
    await applier.apply(
        t.update("1", "y"), t.update("2", "y", old=("1", None)), t.delete("1", None), f.delete("1", None)
    )
    await applier.target.sync()
    assert applier.missing == []
    await applier.apply(
        t.update("5", "y"), t.update("6", "y", old=("7", None)), t.delete("5", None), f.delete("2", None)
    )
    await applier.target.sync()
    assert applier.missing == ["UPDATE public.t", "UPDATE public.t", "DELETE public.t", "DELETE public.f"]
    assert applier.committed == [200, 300]


@pytest.mark.parametrize("columns", ["a int PRIMARY KEY, b text", "a int, b text"], ids=["key", "no key"])
async def test_a_missing_row_is_detected_at_its_change_and_not_later(
    db: Database, applier: Applier, columns: str
) -> None:
    """And not as of later changes in the same transaction."""
    await db.execute(
        f"CREATE TABLE t ({columns})",
        "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$",
        "CREATE TRIGGER no BEFORE UPDATE ON t FOR EACH ROW EXECUTE FUNCTION no()",
        "ALTER TABLE t ENABLE ALWAYS TRIGGER no",
        "INSERT INTO t VALUES (1, 'x')",
    )
    t = Table("t", "a*", "b") if "KEY" in columns else Table("t", "a", "b", identity=FULL)
    await applier.apply(
        *(t.update("1", "y", old=("1", "x")), t.delete("1", "x")),
        *(t.update("5", "y", old=("5", "x")), t.insert("5", "x")),
        *(t.delete("6", "x"), t.insert("6", "x")),
    )
    await applier.target.sync()
    assert applier.missing == ["UPDATE public.t", "DELETE public.t"]


async def test_ordinary_rules_do_not_fire(db: Database, applier: Applier) -> None:
    await db.execute(
        "CREATE TABLE t (a int PRIMARY KEY)",
        "CREATE RULE r AS ON INSERT TO t DO INSTEAD NOTHING",
        "CREATE RULE d AS ON DELETE TO t DO INSTEAD NOTHING",
    )
    t = Table("t", "a*")
    await applier.apply(t.insert("1"), t.insert("2"), t.delete("1"))
    assert await db.rows("SELECT a FROM t") == [(2,)]


async def test_functions_run_with_an_empty_search_path_and_as_a_replica(db: Database, applier: Applier) -> None:
    await db.execute(
        "CREATE TABLE t (a int PRIMARY KEY, settings text DEFAULT concat_ws('/', current_setting('search_path'),"
        " current_setting('session_replication_role'), current_setting('transaction_isolation')))"
    )
    await db.execute(f"ALTER DATABASE {db.name} SET default_transaction_isolation = 'serializable'")
    await applier.apply(Table("t", "a*").insert("1"))
    assert await db.value("SELECT settings FROM t") in ("/replica/read committed", '""/replica/read committed')
