"""two_phase of a subscription: from pending to enabled and back, and statements blocked by prepared transactions."""

from __future__ import annotations

import anyio
import asyncpg
import pytest

from subscriber import names
from subscriber.apply.table_states import TableState
from subscriber.catalog import origins, worker_sessions
from subscriber.catalog.commands.execute import execute
from subscriber.catalog.store.subscription_rel import add_relation
from subscriber.catalog.store.subscriptions import enable_two_phase, load_subscription, set_two_phase_state
from subscriber.catalog.store.workers import APPLY_WORKER
from subscriber.errors import ConnectionLost, StatementError
from subscriber.subscription import TwoPhaseState
from tests.plugins.fix_cluster import Database

OFF = "ALTER SUBSCRIPTION s SET (two_phase = false)"
EXIST = 'cannot disable "two_phase" when prepared transactions exist'
RUNNING = 'cannot alter "two_phase" when logical replication worker is still running'
SLOT = "SELECT two_phase FROM pg_replication_slots WHERE slot_name = 's'"
# The record that the apply worker writes inside a transaction that it prepares.
BLOCKED = "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND pid = $1)"
NOTE = "SELECT subscriber.add_prepared({subid}, 7, {committed}, '{gid}', NULL, NULL, NULL)"


async def run(connection: asyncpg.Connection, sql: str) -> None:
    await execute(connection, sql, notice=lambda *_: None)


async def refused(connection: asyncpg.Connection, sql: str) -> StatementError:
    with pytest.raises(StatementError) as caught:
        await run(connection, sql)
    return caught.value


async def state_of(connection: asyncpg.Connection, subid: int) -> TwoPhaseState:
    subscription = await load_subscription(connection, subid)
    assert subscription is not None
    return subscription.two_phase


@pytest.fixture
async def enabled(database: asyncpg.Connection, source_db: Database) -> int:
    """Create a disabled subscription "s" with two_phase enabled and one table. Returns its OID."""
    if await source_db.value("SELECT current_setting('server_version_num')::int") < 180000:
        pytest.skip("needs a publisher that can alter two_phase of a slot")
    await source_db.execute("CREATE TABLE a (i int PRIMARY KEY)", "CREATE PUBLICATION p FOR TABLE a")
    await database.execute("CREATE TABLE a (i int PRIMARY KEY)")
    options = "two_phase, copy_data = false, enabled = false"
    await run(database, f"CREATE SUBSCRIPTION s CONNECTION '{source_db.dsn()}' PUBLICATION p WITH ({options})")
    subid: int = await database.fetchval("SELECT subid FROM subscriber.subscription")
    assert await state_of(database, subid) is TwoPhaseState.ENABLED
    return subid


# --- becoming enabled -----------------------------------------------------------------------------


async def test_two_phase_is_enabled_when_all_tables_are_ready(database: asyncpg.Connection, subid: int) -> None:
    await set_two_phase_state(database, subid, TwoPhaseState.PENDING)
    assert not await enable_two_phase(database, subid)  # no table yet
    await database.execute("CREATE TABLE a (); CREATE TABLE b ()")
    a, b = [await database.fetchval("SELECT $1::text::regclass::oid", name) for name in "ab"]
    await add_relation(database, subid, a, TableState.READY)
    await add_relation(database, subid, b, TableState.SYNCDONE)
    assert not await enable_two_phase(database, subid)
    assert await state_of(database, subid) is TwoPhaseState.PENDING
    await database.execute("DROP TABLE b")  # its row stays until the launcher removes it
    assert await enable_two_phase(database, subid)
    assert await state_of(database, subid) is TwoPhaseState.ENABLED
    await set_two_phase_state(database, subid, TwoPhaseState.DISABLED)
    assert not await enable_two_phase(database, subid)
    assert await state_of(database, subid) is TwoPhaseState.DISABLED


async def test_a_table_that_is_just_being_added_is_waited_for(
    database: asyncpg.Connection, target_db: Database, subid: int
) -> None:
    await set_two_phase_state(database, subid, TwoPhaseState.PENDING)
    await database.execute("CREATE TABLE a (); CREATE TABLE b ()")
    a, b = [await database.fetchval("SELECT $1::text::regclass::oid", name) for name in "ab"]
    await add_relation(database, subid, a, TableState.READY)
    worker = await target_db.connect()
    enabled: list[bool] = []

    async def enable() -> None:
        enabled.append(await enable_two_phase(worker, subid))

    async with anyio.create_task_group() as tasks, database.transaction():  # as in REFRESH PUBLICATION
        await database.execute("SELECT 1 FROM subscriber.subscription WHERE subid = $1 FOR NO KEY UPDATE", subid)
        tasks.start_soon(enable)
        while not await database.fetchval(BLOCKED, worker.get_server_pid()):
            await anyio.sleep(0.01)
        await add_relation(database, subid, b, TableState.INIT)
    assert enabled == [False]


# --- being switched off ---------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["true", "false"])
async def test_no_worker_may_be_running(
    database: asyncpg.Connection, target_db: Database, enabled: int, setting: str
) -> None:
    sql = f"ALTER SUBSCRIPTION s SET (two_phase = {setting})"
    worker = await target_db.connect()
    for relid in (APPLY_WORKER, 1, 20000):
        assert await worker_sessions.register_own(worker, enabled, relid)
        error = await refused(database, sql)
        assert (error.message, error.hint, error.sqlstate) == (RUNNING, "Try again after some time.", "55000")
        await worker_sessions.release(worker, enabled, relid, worker.get_server_pid())
    await run(database, sql)


async def test_no_worker_starts_while_two_phase_is_changed(
    database: asyncpg.Connection, target_db: Database, enabled: int
) -> None:
    worker = await target_db.connect()
    started: list[bool] = []

    async def start() -> None:
        started.append(await worker_sessions.register_own(worker, enabled, APPLY_WORKER))

    async with anyio.create_task_group() as tasks, database.transaction():
        await run(database, "ALTER SUBSCRIPTION s SET (two_phase = true)")
        tasks.start_soon(start)
        while not await database.fetchval(BLOCKED, worker.get_server_pid()):
            await anyio.sleep(0.01)
        assert not started
    assert started == [True]


@pytest.mark.parametrize("pending", [False, True])
async def test_two_phase_is_not_disabled_while_prepared_transactions_exist(
    database: asyncpg.Connection, source_db: Database, enabled: int, pending: bool
) -> None:
    """Also when it is pending once more: they were prepared while it was enabled."""
    if pending:
        await run(database, "ALTER SUBSCRIPTION s SET (two_phase = true)")
    gid = f"pg_gid_{enabled}_7"
    note = NOTE.format(subid=enabled, committed=True, gid=gid)
    await database.execute(f"BEGIN; {note}; PREPARE TRANSACTION '{gid}'")
    error = await refused(database, OFF)
    assert (error.message, error.hint) == (EXIST, "Resolve these transactions and try again.")

    # Committed, but unknown to the worker: its COMMIT PREPARED would fail, and the transaction would be sent again.
    await database.execute(f"COMMIT PREPARED '{gid}'")
    error = await refused(database, OFF)
    assert (error.message, error.hint) == (EXIST, "Enable the subscription until it has, and try again.")
    assert await source_db.value(SLOT) is True

    # Rolled back manually: the record that was written separately blocks nothing, and is deleted.
    await database.execute("SELECT subscriber.forget_prepared($1::oid)", enabled)
    await database.execute(NOTE.format(subid=enabled, committed=False, gid=gid))
    await run(database, OFF)
    assert await state_of(database, enabled) is TwoPhaseState.DISABLED
    assert await source_db.value(SLOT) is False
    assert await database.fetchval("SELECT count(*) FROM subscriber.prepared") == 0


async def test_transactions_of_others_are_in_nobodys_way(database: asyncpg.Connection, enabled: int) -> None:
    gids = ["something", f"pg_gid_{enabled + 1}_7", f"pg_gid_{enabled}0_7"]
    for number, gid in enumerate(gids):
        await database.execute(f"BEGIN; INSERT INTO a VALUES ({number}); PREPARE TRANSACTION '{gid}'")
    await run(database, OFF)
    assert await state_of(database, enabled) is TwoPhaseState.DISABLED
    for gid in gids:
        await database.execute(f"ROLLBACK PREPARED '{gid}'")


async def test_a_statement_killed_between_slot_and_catalog_can_be_repeated(
    database: asyncpg.Connection, target_db: Database, source_db: Database, enabled: int
) -> None:
    """The slot's two_phase is already off, and the catalog's commit is missing: the statement can be repeated."""
    await database.execute("""
        CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(60); RETURN NULL; END';
        CREATE CONSTRAINT TRIGGER wait AFTER UPDATE ON subscriber.subscription DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION wait()
    """)
    killed = await target_db.connect()

    async def begin() -> None:
        with pytest.raises(ConnectionLost):
            await run(killed, OFF)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(begin)
        await source_db.wait_for(SLOT, False)
        await database.execute("SELECT pg_terminate_backend($1, 5000)", killed.get_server_pid())
    assert await state_of(database, enabled) is TwoPhaseState.ENABLED
    await database.execute("DROP TRIGGER wait ON subscriber.subscription")
    await run(database, OFF)
    assert await state_of(database, enabled) is TwoPhaseState.DISABLED


# --- DROP SUBSCRIPTION ----------------------------------------------------------------------------


async def test_dropping_leaves_prepared_transactions_and_waits_for_none(
    database: asyncpg.Connection, enabled: int
) -> None:
    gid = f"pg_gid_{enabled}_7"
    inside, beside = (NOTE.format(subid=enabled, committed=committed, gid=gid) for committed in (True, False))
    await database.execute(f"BEGIN; INSERT INTO a VALUES (7); {inside}; PREPARE TRANSACTION '{gid}'")
    await database.execute(beside)
    with anyio.fail_after(10):
        await run(database, "DROP SUBSCRIPTION s")
    assert await database.fetchval("SELECT count(*) FROM subscriber.prepared") == 0
    await database.execute(f"COMMIT PREPARED '{gid}'")
    assert await database.fetchval("SELECT count(*) FROM a") == 1


async def test_dropping_takes_parallel_apply_workers_along(
    database: asyncpg.Connection, target_db: Database, enabled: int
) -> None:
    """One hanging worker has its lock and its origin; one has ended and left its origin."""
    for number in (1, 2):
        await origins.create_origin(database, names.table_sync_origin(enabled, number))
    assert await origins.find_origins(database, enabled) == [f"pg_{enabled}{end}" for end in ("", "_1", "_2")]
    worker = await target_db.connect()
    assert await worker_sessions.register_own(worker, enabled, 1)
    await worker.execute("SELECT pg_replication_origin_session_setup($1)", f"pg_{enabled}_1")
    await run(database, "ALTER SUBSCRIPTION s SET (slot_name = NONE)")
    async with database.transaction():  # where workers are not asked to go, but ended
        await run(database, "DROP SUBSCRIPTION s")
    assert worker.is_closed()
    assert await origins.find_origins(database, enabled) == []
