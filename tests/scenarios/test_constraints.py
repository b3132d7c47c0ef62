"""Constraints and triggers of the target: those of the replica role apply."""

from __future__ import annotations

from tests.scenarios.conftest import Pair

LOG_TRIGGER = """
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN INSERT INTO public.notes VALUES (tg_name || ' ' || tg_op); RETURN coalesce(new, old); END $$
"""


async def test_foreign_keys_are_not_checked(pair: Pair) -> None:
    await pair.both(
        "CREATE TABLE parent (id int PRIMARY KEY)",
        "CREATE TABLE child (id int PRIMARY KEY, parent int REFERENCES parent ON DELETE CASCADE)",
    )
    await pair.subscribe("FOR ALL TABLES")
    await pair.change(
        "BEGIN; INSERT INTO parent VALUES (1), (2); INSERT INTO child VALUES (1, 1), (2, 2); COMMIT",
        "DELETE FROM parent WHERE id = 1",  # the cascade is sent as a separate change
    )
    assert await pair.rows("SELECT id FROM child") == [(2,)]
    await pair.target.execute("DELETE FROM child; DELETE FROM parent")
    await pair.change("INSERT INTO child VALUES (3, 2)")
    assert await pair.rows("SELECT id, parent FROM child") == [(3, 2)]


async def test_check_constraints_and_domains_are_checked(pair: Pair) -> None:
    await pair.source.execute("CREATE TABLE t (id int PRIMARY KEY, n int)")
    await pair.target.execute("CREATE TABLE t (id int PRIMARY KEY, n int CONSTRAINT positive CHECK (n > 0))")
    await pair.subscribe("FOR TABLE t")
    await pair.source.execute("INSERT INTO t VALUES (1, 1), (2, -1)")
    await pair.fails('ERROR:  new row for relation "t" violates check constraint "positive"')
    assert await pair.rows("SELECT count(*) FROM t") == [(0,)]  # the whole transaction waits
    await pair.target.execute("ALTER TABLE t DROP CONSTRAINT positive")
    await pair.caught_up()
    await pair.assert_same("SELECT * FROM t ORDER BY id")


async def test_a_not_null_column_that_the_publisher_does_not_have(pair: Pair) -> None:
    await pair.source.execute("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.target.execute("CREATE TABLE t (id int PRIMARY KEY, extra int NOT NULL)")
    await pair.subscribe("FOR TABLE t")
    await pair.source.execute("INSERT INTO t VALUES (1)")
    await pair.fails('ERROR:  null value in column "extra" of relation "t" violates not-null constraint')
    await pair.target.execute("ALTER TABLE t ALTER extra SET DEFAULT 5")
    await pair.caught_up()
    assert await pair.rows("SELECT * FROM t") == [(1, 5)]


async def test_only_replica_and_always_triggers_fire(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, a int, b int)")
    await pair.target.execute(
        "CREATE TABLE notes (what text)",
        LOG_TRIGGER,
        "CREATE TRIGGER ordinary BEFORE INSERT OR UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION note()",
        "CREATE TRIGGER replica AFTER INSERT OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION note()",
        "ALTER TABLE t ENABLE REPLICA TRIGGER replica",
        "CREATE TRIGGER always BEFORE UPDATE OF b ON t FOR EACH ROW EXECUTE FUNCTION note()",
        "ALTER TABLE t ENABLE ALWAYS TRIGGER always",
    )
    await pair.subscribe("FOR TABLE t")
    # All columns are sent with an UPDATE, so UPDATE OF b fires though b is not named.
    await pair.change("INSERT INTO t VALUES (1, 1, 1)", "UPDATE t SET a = 2", "DELETE FROM t")
    assert await pair.rows("SELECT what FROM notes") == [("replica INSERT",), ("always UPDATE",), ("replica DELETE",)]


async def test_a_trigger_may_change_or_refuse_a_row(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, v text)")
    await pair.target.execute(
        "CREATE FUNCTION judge() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " IF new.v = 'refuse' THEN RETURN NULL; END IF; new.v := upper(new.v); RETURN new; END $$",
        "CREATE TRIGGER judge BEFORE INSERT OR UPDATE ON t FOR EACH ROW EXECUTE FUNCTION judge()",
        "ALTER TABLE t ENABLE ALWAYS TRIGGER judge",
    )
    await pair.subscribe("FOR TABLE t")
    await pair.change("INSERT INTO t VALUES (1, 'a'), (2, 'refuse')", "UPDATE t SET v = 'refuse' WHERE id = 1")
    assert await pair.rows("SELECT * FROM t") == [(1, "A")]
    assert not pair.subscriber.log.has("conflict")  # the row was there


async def test_an_error_caught_by_a_trigger_loses_no_progress(pair: Pair) -> None:
    """A subtransaction of the target that is rolled back moves the origin on 16 and later: only the row decides."""
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.target.execute(
        "CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " BEGIN INSERT INTO public.t VALUES (new.id); RAISE EXCEPTION 'no'; EXCEPTION WHEN OTHERS THEN NULL; END;"
        " IF new.id = 3 AND current_setting('subscriber.let', true) IS NULL"
        "   AND NOT EXISTS (SELECT FROM public.let) THEN RAISE 'not now'; END IF;"
        " RETURN new; END $$",
        "CREATE TABLE let ()",
        "CREATE TRIGGER swallow BEFORE INSERT ON t FOR EACH ROW"
        " WHEN (pg_trigger_depth() = 0) EXECUTE FUNCTION swallow()",
        "ALTER TABLE t ENABLE ALWAYS TRIGGER swallow",
    )
    await pair.subscribe("FOR TABLE t")
    await pair.source.execute("INSERT INTO t VALUES (1), (2)", "INSERT INTO t VALUES (3)", "INSERT INTO t VALUES (4)")
    await pair.fails("ERROR:  not now")
    await pair.target.execute("INSERT INTO let DEFAULT VALUES")
    await pair.caught_up()
    assert await pair.rows("SELECT id FROM t ORDER BY 1") == [(1,), (2,), (3,), (4,)]


async def test_deferred_constraints_are_not_enforced(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, u int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    await pair.subscribe("FOR TABLE t")
    await pair.target.execute("INSERT INTO t VALUES (10, 1)")
    await pair.change("INSERT INTO t VALUES (1, 1)")
    assert await pair.rows("SELECT count(*) FROM t WHERE u = 1") == [(2,)]
