"""Statements that connect to a publisher: their effects on both servers, and that failures leave nothing behind."""

from __future__ import annotations

import asyncio
import io

import anyio
import asyncpg
import pytest

from subscriber.catalog import worker_sessions
from subscriber.catalog.commands.execute import execute
from subscriber.catalog.store.workers import APPLY_WORKER
from subscriber.cli.commands.exec import exec_, execute_statements
from subscriber.cli.messages import point_at
from subscriber.errors import SubscriberError
from subscriber.settings import DEFAULTS, Settings
from tests.plugins.fix_cluster import Database

Notices = list[tuple[str, str, str | None, str | None]]

SLOTS = "SELECT array_agg(slot_name::text ORDER BY 1) FROM pg_replication_slots WHERE database = current_database()"
STATES = (
    "SELECT array_agg(srrelid::regclass::text || srsubstate::text ORDER BY srrelid::regclass::text)"
    " FROM subscriber.pg_subscription_rel"
)


async def run(connection: asyncpg.Connection, sql: str, settings: Settings = DEFAULTS) -> list[str]:
    """Execute the statements. Returns their messages without DETAIL and HINT."""
    notices: list[str] = []

    def notice(severity: str, message: str, _detail: str | None, _hint: str | None) -> None:
        notices.append(f"{severity}: {message}")

    await execute(connection, sql, notice=notice, settings=settings)
    return notices


async def fails(connection: asyncpg.Connection, sql: str) -> SubscriberError:
    with pytest.raises(SubscriberError) as caught:
        await run(connection, sql)
    return caught.value


BLOCKED = "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND pid = $1)"


@pytest.fixture
async def conninfo(source_db: Database, target_db: Database) -> str:
    """Return the connection string of a publisher with publication p of tables a and b, which the target also has."""
    for database in (source_db, target_db):
        await database.execute("CREATE TABLE a (i int PRIMARY KEY); CREATE TABLE b (i int PRIMARY KEY)")
    await source_db.execute("CREATE PUBLICATION p FOR TABLE a, b", "CREATE PUBLICATION none")
    return source_db.dsn()


async def test_create_and_drop(database: asyncpg.Connection, source_db: Database, conninfo: str) -> None:
    said = await run(database, f"CREATE SUBSCRIPTION s CONNECTION '{conninfo}' PUBLICATION p")
    assert said == ['NOTICE: created replication slot "s" on publisher']
    assert await source_db.value(SLOTS) == ["s"]
    assert await database.fetchval(STATES) == ["ai", "bi"]
    assert await database.fetchval("SELECT subenabled FROM subscriber.pg_subscription")
    identifier = await source_db.value("SELECT system_identifier::text FROM pg_control_system()")
    assert await database.fetchval("SELECT subsystemid FROM subscriber.subscription") == identifier
    assert await run(database, "DROP SUBSCRIPTION s") == ['NOTICE: dropped replication slot "s" on publisher']
    assert await source_db.value(SLOTS) is None
    assert await database.fetchval("SELECT count(*) FROM subscriber.subscription_rel") == 0
    assert await database.fetchval("SELECT count(*) FROM subscriber.progress") == 0


@pytest.mark.parametrize(
    ("options", "slots", "states"),
    [
        ("copy_data = false", ["s"], ["ar", "br"]),
        ("slot_name = other", ["other"], ["ai", "bi"]),
        ("create_slot = false", None, ["ai", "bi"]),
        ("enabled = false, binary, streaming = on, origin = any", ["s"], ["ai", "bi"]),
    ],
)
async def test_options_of_create(
    database: asyncpg.Connection,
    source_db: Database,
    conninfo: str,
    options: str,
    slots: list[str] | None,
    states: list[str],
) -> None:
    await run(database, f"CREATE SUBSCRIPTION s CONNECTION '{conninfo}' PUBLICATION p WITH ({options})")
    assert await source_db.value(SLOTS) == slots
    assert await database.fetchval(STATES) == states


async def test_publications_that_do_not_exist_are_warned_of(database: asyncpg.Connection, conninfo: str) -> None:
    said = await run(database, f"CREATE SUBSCRIPTION s CONNECTION '{conninfo}' PUBLICATION p, later")
    assert said[0] == 'WARNING: publication "later" does not exist on the publisher'
    said = await run(database, "ALTER SUBSCRIPTION s ADD PUBLICATION x, y")
    assert said == ['WARNING: publications "x", "y" do not exist on the publisher']
    said = await run(database, "ALTER SUBSCRIPTION s SET PUBLICATION z")
    assert said == ['WARNING: publication "z" does not exist on the publisher']


@pytest.mark.parametrize(
    ("change", "message", "detail"),
    [
        ("DROP TABLE b", 'relation "public.b" does not exist', None),
        (
            "DROP TABLE b; CREATE VIEW b AS SELECT 1 AS i",
            'cannot use relation "public.b" as logical replication target',
            "This operation is not supported for views.",
        ),
        ("DROP SCHEMA public CASCADE", 'schema "public" does not exist', None),
    ],
)
async def test_the_tables_must_be_there(
    database: asyncpg.Connection, source_db: Database, conninfo: str, change: str, message: str, detail: str | None
) -> None:
    await database.execute(change)
    error = await fails(database, f"CREATE SUBSCRIPTION s CONNECTION '{conninfo}' PUBLICATION p")
    assert (error.message, error.detail) == (message, detail)
    assert await source_db.value(SLOTS) is None
    assert await database.fetchval("SELECT count(*) FROM subscriber.subscription") == 0


async def test_a_slot_that_exists(database: asyncpg.Connection, source_db: Database, conninfo: str) -> None:
    await source_db.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    error = await fails(database, f"CREATE SUBSCRIPTION s CONNECTION '{conninfo}' PUBLICATION p")
    assert error.message == ('could not create replication slot "s": ERROR:  replication slot "s" already exists')
    assert await source_db.value(SLOTS) == ["s"]
    assert await database.fetchval("SELECT count(*) FROM subscriber.subscription") == 0


async def test_the_slot_goes_again_when_the_commit_fails(
    database: asyncpg.Connection, source_db: Database, conninfo: str
) -> None:
    await database.execute("""
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION $$not today$$; END';
        CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON subscriber.subscription DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION refuse()
    """)
    before = await database.fetchval("SELECT count(*) FROM pg_replication_origin")
    error = await fails(database, f"CREATE SUBSCRIPTION s CONNECTION '{conninfo}' PUBLICATION p")
    assert error.message == "not today"
    assert await source_db.value(SLOTS) is None
    assert await database.fetchval("SELECT count(*) FROM subscriber.subscription") == 0
    assert await database.fetchval("SELECT count(*) FROM pg_replication_origin") == before


async def test_refresh_adds_and_removes_tables(
    database: asyncpg.Connection, source_db: Database, target_db: Database, conninfo: str
) -> None:
    await source_db.execute("CREATE PUBLICATION q FOR TABLE a")
    await run(database, f"CREATE SUBSCRIPTION s CONNECTION '{conninfo}' PUBLICATION q WITH (copy_data = false)")
    assert await database.fetchval(STATES) == ["ar"]
    await source_db.execute("ALTER PUBLICATION q ADD TABLE b")
    assert await run(database, "ALTER SUBSCRIPTION s REFRESH PUBLICATION") == []
    assert await database.fetchval(STATES) == ["ar", "bi"]

    # The leftovers of an interrupted copy.
    subid, relid = await database.fetchval("SELECT oid FROM subscriber.pg_subscription"), "b"
    relid = await database.fetchval("SELECT 'b'::regclass::oid")
    target_id = await database.fetchval("SELECT sync_id FROM subscriber.identity")
    slot = f"pg_{subid}_sync_{relid}_{target_id}"
    await source_db.execute(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    await database.execute("SELECT subscriber.create_origin($1)", f"pg_{subid}_{relid}")
    await database.execute("UPDATE subscriber.subscription_rel SET srsubstate = 'd' WHERE srrelid = $1", relid)
    await source_db.execute("ALTER PUBLICATION q DROP TABLE b")
    said = await run(database, "ALTER SUBSCRIPTION s REFRESH PUBLICATION")
    assert said == [f'NOTICE: dropped replication slot "{slot}" on publisher']
    assert await database.fetchval(STATES) == ["ar"]
    assert (
        await database.fetchval("SELECT count(*) FROM pg_replication_origin WHERE roname LIKE $1", f"pg_{subid}%") == 1
    )

    await run(database, "ALTER SUBSCRIPTION s SET PUBLICATION p WITH (copy_data = false)")
    assert await database.fetchval(STATES) == ["ar", "br"]
    await run(database, "ALTER SUBSCRIPTION s ADD PUBLICATION none; ALTER SUBSCRIPTION s DROP PUBLICATION p")
    assert await database.fetchval(STATES) is None


async def test_dropping_takes_leftovers_of_table_synchronization_along(
    database: asyncpg.Connection, source_db: Database, conninfo: str
) -> None:
    await run(database, f"CREATE SUBSCRIPTION s CONNECTION '{conninfo}' PUBLICATION p")
    subid = await database.fetchval("SELECT oid FROM subscriber.pg_subscription")
    relid = await database.fetchval("SELECT 'a'::regclass::oid")
    target_id = await database.fetchval("SELECT sync_id FROM subscriber.identity")
    slot = f"pg_{subid}_sync_{relid}_{target_id}"
    await source_db.execute(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    await database.execute("SELECT subscriber.create_origin($1)", f"pg_{subid}_{relid}")
    said = await run(database, "DROP SUBSCRIPTION s")
    assert said == [f'NOTICE: dropped replication slot "{name}" on publisher' for name in (slot, "s")]
    assert await source_db.value(SLOTS) is None
    assert (
        await database.fetchval("SELECT count(*) FROM pg_replication_origin WHERE roname LIKE $1", f"pg_{subid}%") == 0
    )


async def test_a_slot_that_is_gone_already(database: asyncpg.Connection, source_db: Database, conninfo: str) -> None:
    await run(database, f"CREATE SUBSCRIPTION s CONNECTION '{conninfo}' PUBLICATION p")
    await source_db.execute("SELECT pg_drop_replication_slot('s')")
    await database.execute("UPDATE subscriber.subscription SET subsystemid = '1'")  # another server has the slot
    error = await fails(database, "DROP SUBSCRIPTION s")
    assert error.message == (
        'could not drop replication slot "s" on publisher: ERROR:  replication slot "s" does not exist'
    )
    assert await database.fetchval("SELECT subenabled FROM subscriber.subscription")
    system_id = await source_db.value("SELECT system_identifier::text FROM pg_control_system()")
    await database.execute("UPDATE subscriber.subscription SET subsystemid = $1", system_id)
    said = await run(database, "DROP SUBSCRIPTION s")
    assert said == ['NOTICE: replication slot "s" does not exist on publisher, skipping']
    assert await database.fetchval("SELECT count(*) FROM subscriber.subscription") == 0


async def test_failover_is_set_on_the_slot_too(
    database: asyncpg.Connection, source_db: Database, conninfo: str
) -> None:
    if await source_db.value("SELECT current_setting('server_version_num')::int") < 180000:
        pytest.skip("needs a publisher that can alter both options")
    await run(database, f"CREATE SUBSCRIPTION s CONNECTION '{conninfo}' PUBLICATION p WITH (enabled = false)")
    failover = "SELECT bool_or(failover) FROM pg_replication_slots WHERE slot_name IN ('s', 't')"
    await run(database, f"CREATE SUBSCRIPTION t CONNECTION '{conninfo}' PUBLICATION p WITH (failover)")
    assert await source_db.value(failover) is True
    await run(database, "DROP SUBSCRIPTION t")
    assert await source_db.value(failover) is False
    await run(database, "ALTER SUBSCRIPTION s SET (failover = true)")
    assert await source_db.value(failover) is True
    await run(database, "ALTER SUBSCRIPTION s SET (failover = false, two_phase = false)")
    assert await source_db.value(failover) is False
    await run(database, "ALTER SUBSCRIPTION s SET (slot_name = other)")
    error = await fails(database, "ALTER SUBSCRIPTION s SET (failover = true)")
    assert error.message.startswith('could not alter replication slot "other": ERROR:  ')
    assert not await database.fetchval("SELECT subfailover FROM subscriber.subscription")


@pytest.mark.parametrize("obedient", [True, False])
async def test_workers_are_gone_before_anything_is_dropped(
    database: asyncpg.Connection,
    target_db: Database,
    source_db: Database,
    conninfo: str,
    obedient: bool,
) -> None:
    """An obedient worker ends when its subscription is disabled; the other holds on to its origin until it is ended."""
    settings = Settings() if obedient else Settings(worker_shutdown_grace=0.2)
    await run(database, f"CREATE SUBSCRIPTION s CONNECTION '{conninfo}' PUBLICATION p")
    subid = await database.fetchval("SELECT oid FROM subscriber.pg_subscription")
    worker = await target_db.connect()
    disabled = asyncio.Event()
    await worker.add_listener("subscriber", lambda *_: disabled.set())
    assert await worker_sessions.register_own(worker, subid, APPLY_WORKER)
    await worker.execute("SELECT pg_replication_origin_session_setup($1)", f"pg_{subid}")

    async def obey() -> None:
        await disabled.wait()
        assert not await worker.fetchval("SELECT subenabled FROM subscriber.subscription")
        await anyio.sleep(0.1)
        await worker.close()

    async with anyio.create_task_group() as tasks:
        if obedient:
            tasks.start_soon(obey)
        assert await run(database, "DROP SUBSCRIPTION s", settings) == [
            'NOTICE: dropped replication slot "s" on publisher'
        ]
    assert worker.is_closed()
    assert await source_db.value(SLOTS) is None


async def test_no_worker_starts_while_its_subscription_is_dropped(
    database: asyncpg.Connection, target_db: Database, conninfo: str
) -> None:
    await run(database, f"CREATE SUBSCRIPTION s CONNECTION '{conninfo}' PUBLICATION p WITH (create_slot = false)")
    await run(database, "ALTER SUBSCRIPTION s DISABLE; ALTER SUBSCRIPTION s SET (slot_name = NONE)")
    subid = await database.fetchval("SELECT oid FROM subscriber.pg_subscription")
    other = await target_db.connect()

    async def start() -> None:
        with pytest.raises(asyncpg.UndefinedObjectError, match="does not exist"):
            await worker_sessions.register_own(other, subid, APPLY_WORKER)

    async with anyio.create_task_group() as tasks, database.transaction():
        await run(database, "DROP SUBSCRIPTION s")
        tasks.start_soon(start)
        while not await database.fetchval(BLOCKED, other.get_server_pid()):
            await anyio.sleep(0.01)


async def test_origin_none_warns_of_data_from_elsewhere(
    database: asyncpg.Connection, source_db: Database, conninfo: str
) -> None:
    await source_db.execute(
        "CREATE SUBSCRIPTION upstream CONNECTION 'dbname=nowhere' PUBLICATION x WITH (connect = false)",
        "INSERT INTO pg_subscription_rel (srsubid, srrelid, srsubstate)"
        " SELECT s.oid, 'a'::regclass, 'r' FROM pg_subscription s WHERE subname = 'upstream'",
    )
    notices: Notices = []
    sql = f"CREATE SUBSCRIPTION s CONNECTION '{conninfo}' PUBLICATION p WITH (origin = none)"
    await execute(database, sql, notice=lambda *parts: notices.append(parts))
    assert notices[0] == (
        "WARNING",
        'subscription "s" requested copy_data with origin = NONE but might copy data that had a different origin',
        'The subscription being created subscribes to a publication ("p") that contains tables that are written to by'
        " other subscriptions.",
        "Verify that initial data copied from the publisher tables did not come from other origins.",
    )
    assert await run(database, "ALTER SUBSCRIPTION s REFRESH PUBLICATION") == []
    await run(database, "ALTER SUBSCRIPTION s DISABLE")
    notices.clear()
    keep = "ALTER SUBSCRIPTION s SET (retain_dead_tuples = true)"
    await execute(database, keep, notice=lambda *parts: notices.append(parts))
    assert not any("different origins" in message for _, message, _, _ in notices)
    sql = "ALTER SUBSCRIPTION s SET (origin = any)"
    await execute(database, sql, notice=lambda *parts: notices.append(parts))
    unreliable = (
        "WARNING",
        'subscription "s" enabled retain_dead_tuples but might not reliably detect conflicts for changes from different'
        " origins",
        'The subscription subscribes to a publication ("p") that contains tables that are written to by other'
        " subscriptions.",
        "Consider using origin = NONE or disabling retain_dead_tuples.",
    )
    assert notices[-1] == unreliable
    await run(database, "ALTER SUBSCRIPTION s ENABLE")
    notices.clear()
    sql = "ALTER SUBSCRIPTION s REFRESH PUBLICATION"
    await execute(database, sql, notice=lambda *parts: notices.append(parts))
    assert unreliable in notices
    await run(database, "ALTER SUBSCRIPTION s CONNECTION 'host=127.0.0.1 port=1 dbname=nowhere user=nobody'")
    notices.clear()
    sql = "ALTER SUBSCRIPTION s SET (origin = any)"
    await execute(database, sql, notice=lambda *parts: notices.append(parts))
    assert notices[-1][1] == "could not check whether the publisher has changes from different origins"
    await run(database, f"ALTER SUBSCRIPTION s CONNECTION '{conninfo}'")
    await source_db.execute(
        "DELETE FROM pg_subscription_rel r USING pg_subscription s WHERE s.oid = r.srsubid AND subname = 'upstream'",
        "ALTER SUBSCRIPTION upstream SET (slot_name = NONE)",
        "DROP SUBSCRIPTION upstream",
    )


async def test_exec_prints_what_psql_prints(
    target_db: Database, conninfo: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = io.StringIO()
    sql = f"CREATE SUBSCRIPTION s CONNECTION '{conninfo}' PUBLICATION p, q WITH (enabled = false)"
    await execute_statements(target_db.dsn(), sql, output)
    assert output.getvalue() == (
        'WARNING:  publication "q" does not exist on the publisher\n'
        'HINT:  The publisher has: "none", "p". Or on the publisher:'
        ' CREATE PUBLICATION "q" FOR ALL TABLES;\n'
        'NOTICE:  created replication slot "s" on publisher\n'
    )

    def failing(sql: str) -> str:
        assert exec_(target_db.dsn(), sql) == 3
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err

    assert await anyio.to_thread.run_sync(failing, "ALTER SUBSCRIPTION s SET PUBLICATION q") == (
        "ERROR:  ALTER SUBSCRIPTION with refresh is not allowed for disabled subscriptions\n"
        "HINT:  Use ALTER SUBSCRIPTION ... SET PUBLICATION ... WITH (refresh = false).\n"
    )
    assert await anyio.to_thread.run_sync(failing, "ALTER SUBSCRIPTION s\nENABLED") == (
        'ERROR:  syntax error at or near "ENABLED"\nLINE 2: ENABLED\n        ^\nHINT:  Perhaps you meant "ENABLE".\n'
    )


async def test_exec_says_which_server_did_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    status = await anyio.to_thread.run_sync(exec_, "host=127.0.0.1 port=1 user=u", "DROP SUBSCRIPTION s")
    assert status == 3
    assert capsys.readouterr().err.startswith('ERROR:  connection to server at "127.0.0.1"')


@pytest.mark.parametrize(
    ("text", "position", "expected"),
    [
        ("short", 2, "LINE 1: short\n          ^"),
        ("a\nbc", 3, "LINE 2: bc\n         ^"),
        ("x" * 70, 5, f"LINE 1: {'x' * 60}...\n             ^"),
        ("x" * 100, 70, f"LINE 1: ...{'x' * 60}...\n{' ' * (11 + 50)}^"),
        ("x" * 100, 100, f"LINE 1: ...{'x' * 60}\n{' ' * (11 + 60)}^"),
    ],
)
def test_the_place_of_a_syntax_error(text: str, position: int, expected: str) -> None:
    assert point_at(text, position) == expected
