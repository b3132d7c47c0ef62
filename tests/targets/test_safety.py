"""Nothing is lost or applied twice: progress, the origin, tables that change their shape, and errors."""

from __future__ import annotations

from types import SimpleNamespace

import anyio
import pytest

from subscriber.apply.relation_map import LocalRelation
from subscriber.apply.transaction import RemoteTransaction
from subscriber.catalog.connection import CatalogConnection
from subscriber.connection.connect import open_session
from subscriber.connection.pipeline import Pipeline
from subscriber.errors import ConnectionLost, MappingError, ProtocolError, ServerError, StaleMapping
from subscriber.lsn import Lsn
from subscriber.protocol.messages import Delete, Insert, OldPart, ReplicaIdentity, Update
from subscriber.targets.postgres import copy_transaction
from subscriber.targets.postgres.row_applier import RowApplier
from subscriber.targets.postgres.session import introspection
from subscriber.targets.postgres.session.capabilities import TargetCapabilities
from subscriber.targets.postgres.session.introspection import Terms
from subscriber.targets.postgres.session.progress import ProgressRecord
from subscriber.targets.postgres.session.target_session import configure_session
from subscriber.targets.postgres.target import PostgresTarget
from subscriber.targets.postgres.worker_session import claim
from tests.apply.build import UNSENT, row
from tests.plugins.fix_cluster import Database
from tests.targets.conftest import SUBID, Applier, Change, Sessions, Table, subscription, truncate

ORIGIN = f"pg_{SUBID}"
ROW = "SELECT remote_lsn::text FROM subscriber.progress"
REMOTE = f"SELECT remote_lsn::text FROM pg_replication_origin_status WHERE external_id = '{ORIGIN}'"


@pytest.fixture
async def t(db: Database) -> Table:
    await db.execute("CREATE TABLE t (a int PRIMARY KEY, b text)")
    return Table("t", "a*", "b")


# --- progress -------------------------------------------------------------------------------------


async def test_progress_is_committed_with_the_rows(db: Database, applier: Applier, t: Table) -> None:
    await applier.apply(t.insert("1", "x"))
    assert applier.target.position == 200
    assert await db.value(ROW) == "0/C8"
    assert await db.value(REMOTE) == "0/C8"
    await applier.apply(t.insert("2", "x"))
    assert await db.value(ROW) == await db.value(REMOTE) == "0/12C"


async def test_commits_carry_the_remote_time_and_the_origin(db: Database, applier: Applier, t: Table) -> None:
    await applier.apply(t.insert("1", "x"))
    lag = await db.value("SELECT count(*) FROM pg_replication_origin_status WHERE remote_lsn = '0/C8'")
    assert lag == 1


async def test_a_session_whose_progress_was_moved_by_another_commits_nothing(
    db: Database, applier: Applier, t: Table
) -> None:
    await applier.apply(t.insert("1", "x"))
    await db.execute(f"SELECT subscriber.set_progress({SUBID}, 0, '0/1000')")
    await applier.send(t.insert("2", "x"))
    await applier.send(t.insert("3", "x"))
    with pytest.raises(ServerError) as caught:
        await applier.target.sync()
    assert caught.value.sqlstate == "SB002"
    assert await db.rows("SELECT a FROM t") == [(1,)]
    assert await db.value(ROW) == "0/1000"
    assert applier.committed == [200]


async def test_nothing_is_committed_without_the_progress_record(db: Database, applier: Applier, t: Table) -> None:
    """The subscription was dropped, and its tables may belong to another one now."""
    await applier.apply(t.insert("1", "x"))
    await db.execute("DELETE FROM subscriber.subscription")
    with pytest.raises(ServerError) as caught:
        await applier.apply(t.insert("2", "x"))
    assert caught.value.sqlstate == "SB002"
    assert await db.rows("SELECT a FROM t") == [(1,)]


DEFERRED = (
    "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
    " IF NEW.b = 'bad' THEN RAISE EXCEPTION 'deferred' USING ERRCODE = 'ZZ001'; END IF; RETURN NULL; END $$",
    "CREATE CONSTRAINT TRIGGER no AFTER INSERT ON t DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION no()",
    "ALTER TABLE t ENABLE ALWAYS TRIGGER no",
)
FAILURES = {
    "a duplicate key": ((), ("1", "x"), "23505"),
    "a value that cannot be read": ((), ("x", "x"), "22P02"),
    "a deferred constraint trigger at COMMIT": (DEFERRED, ("5", "bad"), "ZZ001"),
}


@pytest.mark.parametrize("failure", FAILURES)
async def test_no_later_transaction_becomes_visible_after_a_failure(
    db: Database, applier: Applier, t: Table, failure: str
) -> None:
    prepare, values, sqlstate = FAILURES[failure]
    await db.execute(*prepare)
    await applier.apply(t.insert("1", "x"))

    async def go_on() -> None:
        await applier.send(t.insert("2", "x"))
        await applier.send(t.insert("3", "x"), t.insert(*values))
        for number in range(10, 50):
            await applier.send(t.insert(str(number), "x"))
        await applier.target.sync()

    with pytest.raises(ServerError) as caught:
        await go_on()
    assert caught.value.sqlstate == sqlstate
    applier.target.session.pipeline.session.abort()
    await db.wait_for("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'subscriber: s'", 0)
    assert await db.rows("SELECT a FROM t ORDER BY a") == [(1,), (2,)]
    assert await db.value(ROW) == "0/12C"
    assert applier.committed == [200, 300]


async def test_each_failure_is_followed_by_a_restart_from_the_row(db: Database, sessions: Sessions, t: Table) -> None:
    """An aborted transaction has advanced the origin (PostgreSQL 16+).

    The row has the restart position, and repairs it.
    """
    await db.needs(16, "an aborted transaction moves the origin")
    await db.execute(*DEFERRED)
    applier = await sessions.open()
    await applier.apply(t.insert("1", "x"))
    await applier.send(t.insert("2", "bad"))
    with pytest.raises(ServerError):
        await applier.target.sync()
    applier.target.session.pipeline.session.abort()
    assert await db.value(ROW) == "0/C8"
    # The server reports the error before it aborts the transaction. This position would have lost a transaction.
    await db.wait_for(REMOTE, "0/12C")
    again = await sessions.open()
    assert again.target.position == 200
    assert await db.value(REMOTE) == "0/C8"
    await again.apply(t.insert("2", "good"))
    assert await db.value(ROW) == await db.value(REMOTE) == "0/12C"


async def test_a_new_worker_waits_for_the_old_ones_backend(db: Database, sessions: Sessions, t: Table) -> None:
    old = await sessions.open()
    await old.apply(t.insert("1", "x"))
    await old.send(t.insert("2", "x"))
    with anyio.fail_after(20):
        new = await sessions.open()  # ends the old one's backend
    assert new.target.position == 300
    with pytest.raises((ServerError, ConnectionLost)):
        await old.apply(t.insert("3", "x"))
    await new.apply(t.insert("3", "y"))
    assert await db.rows("SELECT * FROM t ORDER BY a") == [(1, "x"), (2, "x"), (3, "y")]


@pytest.mark.parametrize("number", [0, 1, 5, 30])
async def test_a_connection_that_breaks_anywhere_loses_nothing_that_was_answered(
    db: Database, sessions: Sessions, t: Table, number: int
) -> None:
    applier = await sessions.open()
    for n in range(40):
        await applier.send(t.insert(str(n), "x"))
        if n == number:
            applier.target.session.pipeline.session.transport.abort()
            break
    answered = list(applier.committed)
    with anyio.fail_after(20):
        again = await sessions.open()
    assert int(again.target.position) >= max(answered, default=0)
    count = await db.value("SELECT count(*) FROM t")
    assert int(again.target.position) == (100 + 100 * count if count else 0)
    await again.apply(t.insert(str(1000), "x"))


async def test_a_transaction_that_failed_is_applied_once_the_cause_is_gone(
    db: Database, sessions: Sessions, t: Table
) -> None:
    await db.execute("INSERT INTO t VALUES (2, 'in the way')")
    for attempt in range(3):
        applier = await sessions.open()
        if attempt == 2:
            await db.execute("DELETE FROM t")
            await applier.apply(t.insert("1", "x"), t.insert("2", "y"))
        else:
            with pytest.raises(ServerError):
                await applier.apply(t.insert("1", "x"), t.insert("2", "y"))
            applier.target.session.pipeline.session.abort()
    assert await db.rows("SELECT * FROM t ORDER BY a") == [(1, "x"), (2, "y")]


async def test_a_record_of_a_table_sync_worker_has_no_origin(db: Database, applier: Applier, t: Table) -> None:
    pipeline = applier.target.session.pipeline
    await db.execute(f"SELECT subscriber.set_progress({SUBID}, 4200000000, '1/0')")
    async with CatalogConnection.open(db.dsn(), "test") as catalog:
        claimed = await claim(catalog, subscription(), 4200000000)
    assert claimed is not None
    progress, rows = ProgressRecord(claimed, with_origin=False), applier.target.row_applier
    applier.target = PostgresTarget(RowApplier(rows.session, progress, rows.conflicts), batching=False)
    applier.end = (1 << 32) + 50
    await applier.apply(t.insert("1", "x"))
    assert await pipeline.rows("SELECT remote_lsn FROM subscriber.progress WHERE relid > 0") == [("1/96",)]
    assert await db.value(REMOTE) in (None, "0/0")


# --- shape ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    [
        "ALTER TABLE t ADD c int DEFAULT 5",
        "ALTER TABLE t ALTER b TYPE varchar(100)",
        "ALTER TABLE t ALTER a TYPE bigint",
        "ALTER TABLE t DROP b",
        "ALTER TABLE t RENAME b TO c",
        "ALTER TABLE t RENAME TO u",
        "ALTER TABLE t SET SCHEMA s",
        "DROP TABLE t",
        "DROP TABLE t; CREATE TABLE t (b text, a int PRIMARY KEY)",
        "ALTER TABLE t DROP CONSTRAINT t_pkey",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        "CREATE INDEX ON t (b)",
        "CREATE TRIGGER x BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()",
        "ALTER TABLE t ENABLE ROW LEVEL SECURITY",
        "ALTER TABLE t OWNER TO pg_monitor",
        "ALTER TABLE t ALTER a ADD GENERATED ALWAYS AS IDENTITY",
        "ALTER TABLE t ALTER b SET DEFAULT 'x'",
        "ALTER TABLE t ADD CHECK (a > 0)",
        "ALTER SCHEMA public RENAME TO u",
        "CREATE INDEX CONCURRENTLY ON t (b)",
        "CREATE UNIQUE INDEX CONCURRENTLY ON t (b)",
        "REINDEX TABLE CONCURRENTLY t",
        "DROP INDEX i",
        "DROP INDEX CONCURRENTLY i",
        "CREATE RULE r AS ON INSERT TO t DO ALSO NOTIFY x",
        "DROP TRIGGER y ON t",
        "ALTER TABLE t ENABLE ALWAYS TRIGGER y",
    ],
)
async def test_a_table_that_has_changed_is_mapped_again_without_a_word(
    db: Database, applier: Applier, t: Table, statement: str
) -> None:
    await db.execute(
        "CREATE SCHEMA s",
        "CREATE INDEX i ON t (b)",
        "CREATE TRIGGER y BEFORE UPDATE ON t FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()",
    )
    await applier.apply(t.insert("1", "x"))
    await db.execute(statement)
    with pytest.raises(StaleMapping):
        await applier.apply(t.insert("99999", "y"))
    assert applier.committed == [200]
    assert await db.value(ROW) == "0/C8"


async def test_a_value_for_the_old_type_is_no_error_of_the_data(db: Database, sessions: Sessions, t: Table) -> None:
    """The prepared statement still expects an integer: the error about a too large number does not concern the data."""
    applier = await sessions.open()
    await applier.apply(t.insert("1", "x"))
    await db.execute("ALTER TABLE t ALTER a TYPE bigint")
    with pytest.raises(StaleMapping):
        await applier.apply(t.insert("99999999999", "y"))
    applier.target.session.pipeline.session.abort()
    again = await sessions.open()
    await again.apply(t.insert("99999999999", "y"))
    assert await db.rows("SELECT a FROM t ORDER BY a") == [(1,), (99999999999,)]


async def test_an_error_that_stays_is_reported_at_the_second_attempt(
    db: Database, sessions: Sessions, t: Table
) -> None:
    """Only an error on a table mapped in an earlier transaction can be caused by its old shape."""
    applier = await sessions.open()
    await applier.apply(t.insert("1", "x"))
    with pytest.raises((StaleMapping, ServerError)):
        await applier.apply(t.insert("x", "y"))
    applier.target.session.pipeline.session.abort()
    again = await sessions.open()
    with pytest.raises(ServerError) as caught:
        await again.apply(t.insert("x", "y"))
    assert caught.value.sqlstate == "22P02"


async def test_a_copy_describes_the_table_that_it_has_locked(
    db: Database, applier: Applier, t: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It describes the table before it knows which lock to take, and again only if the table was altered meanwhile."""
    session, described = applier.target.session, list[str]()

    async def introspect(pipeline: Pipeline, schema: str, name: str, terms: Terms) -> LocalRelation:
        described.append(name)
        return await introspection.introspect(pipeline, schema, name, terms)

    monkeypatch.setattr(copy_transaction, "introspection", SimpleNamespace(introspect=introspect))
    local = await copy_transaction.begin(session, "public", "t")
    assert ([column.name for column in local.columns], described) == (["a", "b"], ["t"])
    await copy_transaction.roll_back(session)
    tables: list[LocalRelation] = []

    async def begin() -> None:
        tables.append(await copy_transaction.begin(session, "public", "t"))

    async with db.connection() as other:
        await other.execute("BEGIN; ALTER TABLE t ADD c int")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(begin)
            await db.wait_for("SELECT count(*) FROM pg_locks WHERE NOT granted", 1)
            await other.execute("COMMIT")
    assert ([column.name for column in tables[0].columns], described) == (["a", "b", "c"], ["t"] * 3)
    await copy_transaction.roll_back(session)


async def test_a_table_that_is_altered_waits_until_the_transaction_is_over(
    db: Database, applier: Applier, t: Table
) -> None:
    altered = False

    async def alter() -> None:
        nonlocal altered
        await db.execute("ALTER TABLE t ADD c int")
        altered = True

    await applier.apply(t.insert("1", "x"))
    async with anyio.create_task_group() as tasks:
        applier.target.session.pipeline.execute("BEGIN")
        applier.target.session.pipeline.execute("SELECT FROM public.t FOR UPDATE")
        await applier.target.sync()
        tasks.start_soon(alter)
        await anyio.sleep(0.1)
        assert not altered
        applier.target.session.pipeline.execute("COMMIT")
        await applier.target.sync()
    with pytest.raises(StaleMapping):
        await applier.apply(t.insert("2", "x"))


@pytest.mark.parametrize(
    "statement",
    [
        "TRUNCATE t",
        "VACUUM FULL t",
        "ANALYZE t",
        "CLUSTER t USING t_pkey",
        "REINDEX TABLE t",
        "COMMENT ON TABLE t IS 'x'",
    ],
)
async def test_ddl_that_keeps_the_shape_needs_no_new_mapping(
    db: Database, applier: Applier, t: Table, statement: str
) -> None:
    await db.execute("ALTER TABLE t CLUSTER ON t_pkey")
    await applier.apply(t.insert("1", "x"))
    await db.execute(statement)
    await applier.apply(t.insert("2", "x"))
    await applier.apply(truncate(t), t.insert("3", "x"))
    assert applier.committed == [200, 300, 400]


async def test_the_shape_is_looked_at_only_when_something_may_have_changed_it(
    db: Database, applier: Applier, t: Table
) -> None:
    await db.execute(
        "CREATE TABLE p (a int PRIMARY KEY) PARTITION BY RANGE (a)", "CREATE TABLE p1 PARTITION OF p DEFAULT"
    )
    pipeline = applier.target.session.pipeline
    await pipeline.rows("SELECT set_config('track_functions', 'all', false)")

    async def looks() -> int:
        await pipeline.rows("SELECT pg_stat_force_next_flush()")
        calls = await db.value("SELECT calls FROM pg_stat_user_functions WHERE funcname = 'table_shape'")
        assert isinstance(calls, int)
        return calls

    await applier.apply(t.insert("1", "x"))
    mapped = await looks()
    for key in range(2, 6):
        await applier.apply(t.insert(str(key), "x"))
    assert await looks() == mapped
    await db.execute("ANALYZE t")
    await applier.apply(t.insert("6", "x"))
    assert await looks() == mapped + 1
    await applier.apply(t.insert("7", "x"))
    assert await looks() == mapped + 1
    p = Table("p", "a*")
    await applier.apply(p.insert("1"))
    before = await looks()
    await applier.apply(p.insert("2"))
    assert await looks() == before + 1  # an index of a partition would not be noticed otherwise


async def test_a_table_that_is_altered_once_a_savepoint_has_let_go_of_it(
    db: Database, applier: Applier, t: Table
) -> None:
    target = applier.target
    mapping = await applier.mapping(t.insert("1", "x")[0])
    transaction = RemoteTransaction(1, Lsn(190), 1_000_000)
    await target.savepoint(transaction, "s")
    for number in range(2):
        await target.change(transaction, mapping, t.insert(str(number), "x")[1])
        await target.sync()  # it is seen to be as it was
        await target.roll_back_to(transaction, "s")
        await target.sync()
        await target.savepoint(transaction, "s")
    await db.execute("ALTER TABLE t ADD c int")
    await target.change(transaction, mapping, t.insert("3", "x")[1])
    with pytest.raises(ServerError) as caught:
        await target.sync()
    assert caught.value.sqlstate == "SB001"


async def test_a_truncated_table_is_checked_as_well(db: Database, applier: Applier, t: Table) -> None:
    await applier.apply(t.insert("1", "x"))
    await db.execute("ALTER TABLE t RENAME TO u", "CREATE TABLE t (a int PRIMARY KEY, b text)")
    with pytest.raises(StaleMapping):
        await applier.apply(truncate(t))
    assert await db.value("SELECT count(*) FROM u") == 1


async def test_a_table_is_checked_once_in_each_transaction(applier: Applier, t: Table) -> None:
    await applier.apply(t.insert("1", "x"))
    statements: list[str] = []
    pipeline = applier.target.session.pipeline
    execute = pipeline.execute

    def spy(sql: str, *arguments: object, **keywords: object) -> None:
        statements.append(sql)
        execute(sql, *arguments, **keywords)  # type: ignore[arg-type]

    pipeline.execute = spy  # type: ignore[method-assign]
    await applier.apply(t.insert("2", "x"), t.insert("3", "x"), t.delete("2", None))
    assert sum("raise_error('SB001'" in sql for sql in statements) == 1
    assert len(statements) == 7  # BEGIN, three changes, the check, progress, COMMIT


# --- errors ---------------------------------------------------------------------------------------


def context(message: str, column: str = "") -> str:
    return (
        f'processing remote data for replication origin "{ORIGIN}" during message type "{message}"'
        f' for replication target relation "public.t"{column} in transaction 200, finished at 0/BE'
    )


async def test_an_error_says_what_was_done_and_where_to_skip(applier: Applier, t: Table) -> None:
    with pytest.raises(ServerError) as caught:
        await applier.apply(t.insert("1", "x"), t.insert("1", "x"))
    assert caught.value.context == [context("INSERT")]


@pytest.mark.parametrize("logged", ["0", "-1"])
async def test_a_value_that_cannot_be_read_is_told_by_its_column_and_not_shown(
    db: Database, sessions: Sessions, logged: str
) -> None:
    await db.execute("CREATE TABLE t (a int PRIMARY KEY, b text, c int)")
    await db.execute(f"ALTER DATABASE {db.name} SET log_parameter_max_length_on_error = {logged}")
    t = Table("t", "a*", "b", "c")
    failures: list[tuple[Change, str, str]] = [
        (t.insert("1", "x", "secret"), "c", "INSERT"),
        (t.update("1", UNSENT, "secret"), "c", "UPDATE"),
        (t.delete("secret", None, None), "a", "DELETE"),
        (t.insert("1", "x", b"\0"), "c", "INSERT"),
    ]
    for change, column, message in failures:
        applier = await sessions.open()
        with pytest.raises(ServerError) as caught:
            await applier.apply(change)
        assert caught.value.context == [context(message, f' column "{column}"')]
        applier.target.session.pipeline.session.abort()


async def test_the_context_of_a_trigger_comes_first(db: Database, applier: Applier, t: Table) -> None:
    await db.execute(*DEFERRED)
    with pytest.raises(ServerError) as caught:
        await applier.apply(t.insert("1", "bad"))
    first, second = caught.value.context
    assert first.startswith("PL/pgSQL function public.no() line 1 at RAISE")
    assert second == (
        f'processing remote data for replication origin "{ORIGIN}" during message type "COMMIT"'
        " in transaction 200, finished at 0/BE"
    )


async def test_an_error_is_explained_once_and_others_not_at_all(applier: Applier, t: Table) -> None:
    other = MappingError("something else")
    assert applier.target.session.explain(other) is other
    with pytest.raises(ServerError):
        await applier.apply(t.insert("x", "x"))
    assert applier.target.session.explain(other) is other
    assert other.context == []


async def test_a_session_that_is_lost_is_not_the_datas_fault(applier: Applier, t: Table) -> None:
    await applier.send(t.insert("1", "x"))
    applier.target.session.pipeline.session.transport.abort()
    with anyio.fail_after(5), pytest.raises(ConnectionLost) as caught:
        await applier.apply(t.insert("2", "x"))
    assert caught.value.context == []


async def test_rows_with_too_few_columns_are_refused(applier: Applier, t: Table) -> None:
    relid = t.relation.relid
    for change in (
        Insert(None, relid, row("1")),
        Update(None, relid, None, None, row("1")),
        Update(None, relid, OldPart.KEY, row(), row("1", "x")),
        Delete(None, relid, OldPart.KEY, row()),
    ):
        with pytest.raises(ProtocolError, match=r"not found in tuple: only \d column\(s\) received"):
            await applier.send((t.relation, change))


async def test_changes_that_cannot_find_their_row_are_refused(db: Database, applier: Applier) -> None:
    await db.execute("CREATE TABLE t (a int, b text)")
    t = Table("t", "a*", "b")
    await applier.apply(t.insert("1", "x"))
    for change in (t.update("1", "y"), t.delete("1", None)):
        with pytest.raises(MappingError, match="has neither REPLICA IDENTITY index nor PRIMARY KEY"):
            await applier.send(change)
    nothing = Table("t", "a", "b", identity=ReplicaIdentity.NOTHING)
    with pytest.raises(MappingError):
        await applier.send(nothing.delete("1", None))


async def test_a_role_that_may_not_replicate_is_told_at_once(db: Database) -> None:
    role = f"role_{db.name}"
    await db.execute(f"CREATE ROLE {role} LOGIN")
    try:
        session = await open_session(db.dsn(user=role))
        with pytest.raises(ServerError) as caught:
            await configure_session(Pipeline(session), subscription(), TargetCapabilities())
        assert (caught.value.sqlstate, caught.value.context) == ("42501", [])
        session.abort()
    finally:
        await db.execute(f"DROP ROLE {role}")


async def test_many_statements_wait_for_one_answer(db: Database, applier: Applier, t: Table) -> None:
    """While a session waits for a lock, further transactions are sent, and all of them arrive."""
    connection = await db.connect()
    async with connection.transaction():
        await connection.execute("LOCK TABLE t")
        for number in range(200):
            await applier.send(t.insert(str(number), "x"))
        assert applier.committed == []
    await applier.target.sync()
    assert len(applier.committed) == 200
    assert isinstance(applier.target.session.pipeline, Pipeline)
