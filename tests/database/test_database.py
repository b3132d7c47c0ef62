"""Database: statements, answers, waits and the launcher in a program, with real servers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

import subscriber
from subscriber.settings import Settings
from tests.passwords import MARK
from tests.plugins.fix_cluster import Database

pytestmark = pytest.mark.usefixtures("with_schema")

QUICK = Settings(retry_interval=0.2, empty_database_poll_interval=0.1)


async def two_tables(source: Database, target: Database) -> None:
    for database in (source, target):
        await database.execute("CREATE TABLE city (id int PRIMARY KEY, name text)")
    await source.execute("INSERT INTO city VALUES (1, 'Ulm')", "CREATE PUBLICATION atlas FOR ALL TABLES")


@pytest.fixture
async def db(source_db: Database, target_db: Database) -> AsyncIterator[subscriber.Database]:
    await two_tables(source_db, target_db)
    async with subscriber.connect(target_db.dsn(), settings=QUICK) as db:
        yield db


async def test_the_error_of_a_block_is_raised_as_itself(db: subscriber.Database) -> None:
    with pytest.raises(TimeoutError):
        async with db.running(), asyncio.timeout(0.1):
            await asyncio.sleep(10)
    with pytest.raises(KeyError, match="mine"):
        async with db.running():
            raise KeyError("mine")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1), db.running():
            await asyncio.sleep(10)


async def test_the_error_of_the_launcher_is_raised_as_itself(db: subscriber.Database, target_db: Database) -> None:
    await target_db.execute(
        "CREATE ROLE guest_of_launcher LOGIN",
        "GRANT USAGE ON SCHEMA subscriber TO guest_of_launcher",
        "GRANT SELECT ON ALL TABLES IN SCHEMA subscriber TO guest_of_launcher",
    )
    try:
        async with subscriber.connect(target_db.dsn(user="guest_of_launcher"), settings=QUICK) as guest:
            with pytest.raises(subscriber.StatementError, match="permission denied to run subscriptions"):
                async with guest.running():
                    await asyncio.sleep(30)
    finally:
        await target_db.execute("DROP OWNED BY guest_of_launcher", "DROP ROLE guest_of_launcher")


async def test_a_lost_connection_is_opened_again(db: subscriber.Database, target_db: Database) -> None:
    for _ in range(2):
        await target_db.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'subscriber' AND datname = current_database()"
        )
        await target_db.wait_for(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'subscriber'"
            " AND datname = current_database()",
            0,
        )
        async with asyncio.timeout(20):
            while True:
                try:
                    assert await db.subscriptions() == []
                    break
                except subscriber.ConnectionLost:  # the socket's end has not been read yet
                    await asyncio.sleep(0.01)


async def test_methods_of_database_execute_statements_and_report_errors(
    db: subscriber.Database, source_db: Database, target_db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "subscriber")
    await db.create_subscription("Shop's", source=source_db.dsn(), publications=["atlas", "ATLAS"], slot_name="shop")
    assert "WARNING" in {record.levelname for record in caplog.records}
    assert 'publication "ATLAS" does not exist on the publisher' in caplog.text
    with pytest.raises(subscriber.StatementError, match="cannot set slot_name = NONE for enabled subscription"):
        await db.alter("Shop's", slot_name=None)
    await db.disable("Shop's")
    await source_db.execute('CREATE SEQUENCE "b"""')
    await target_db.execute('CREATE SEQUENCE "b"""')
    await db.alter(
        "Shop's", streaming="on", disable_on_error=True, trusted_owners=(), sequence_names=[("public", 'b"')]
    )
    await db.alter("Shop's", publications=["atlas"], refresh=False, new_name="shop", source=source_db.dsn())
    await db.skip("shop", subscriber.Lsn(16))
    (one,) = await db.subscriptions()
    assert (one.name, one.publications, one.disable_on_error, one.enabled) == ("shop", ("atlas",), True, False)
    assert (one.sequence_names, one.skip_lsn) == ((("public", 'b"'),), subscriber.Lsn(16))
    await db.skip("shop", None)
    await db.enable("shop")
    await db.refresh("shop")
    await db.refresh_tables("shop", ["city", "public.city", ("public", "city")], truncate=True)
    with pytest.raises(subscriber.StatementError, match=r'"nowhere\.city"'):
        await db.refresh_tables("shop", ["nowhere.city"])
    with pytest.raises(TypeError, match=r"tables=\['city'\]"):
        await db.refresh_tables("shop", "city")
    await db.drop("shop")
    await db.drop("shop", missing_ok=True)
    assert await db.subscriptions() == []
    assert await source_db.value("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == 0


async def test_parameters_stand_for_names_strings_and_values(db: subscriber.Database, source_db: Database) -> None:
    options = "copy_data = $4, conflict_history = $5, slot_name = one"
    create = f"CREATE SUBSCRIPTION $1 CONNECTION $2 PUBLICATION $3 WITH ({options})"
    await db.execute(create, parameters=['a "b"', source_db.dsn(), "atlas", False, "all"])
    assert [(subscription.name, subscription.publications) for subscription in await db.subscriptions()] == [
        ('a "b"', ("atlas",))
    ]
    with pytest.raises(subscriber.StatementError, match=r"there is no parameter \$2"):
        await db.execute("ALTER SUBSCRIPTION $1 RENAME TO $2", parameters=["s"])
    with pytest.raises(subscriber.StatementError, match=r'syntax error at or near "\$1"'):
        await db.execute("DROP SUBSCRIPTION $1")
    with pytest.raises(subscriber.StatementError) as raised:
        await db.execute(
            "CREATE SUBSCRIPTION s CONNECTION $1 PUBLICATION $1 $1", parameters=[f"{MARK} password={MARK}"]
        )
    assert MARK not in f"{raised.value!r}{raised.value}"
    await db.execute("DROP SUBSCRIPTION $1", parameters=['a "b"'])


async def test_wrong_arguments_are_refused(db: subscriber.Database, source_db: Database) -> None:
    with pytest.raises(TypeError, match=r"publications=\['atlas'\]"):
        await db.create_subscription("s", source=source_db.dsn(), publications="atlas")
    with pytest.raises(TypeError, match="cannot be a function"):
        await db.create_subscription("s", source=source_db.dsn, publications=["atlas"])  # type: ignore[arg-type]
    with pytest.raises(subscriber.StatementError, match='unrecognized subscription parameter: "copy_dta"') as raised:
        await db.create_subscription("s", source=source_db.dsn(), publications=["atlas"], copy_dta=False)  # type: ignore[call-arg]
    assert raised.value.hint == 'Perhaps you meant "copy_data".'
    with pytest.raises(subscriber.StatementError) as raised:
        await db.create_subscription("s", source=source_db.dsn(), publications=["atlas"], copy_engine="range")  # type: ignore[arg-type]
    assert (raised.value.hint or "").startswith('Perhaps you meant "ranges".')
    with pytest.raises(ValueError, match="on_error is 'rais'"):
        async with db.running(on_error="rais"):  # type: ignore[arg-type]
            pass
    with pytest.raises(TypeError, match=r"only=\['shop'\]"):
        async with db.running(only="shop"):
            pass
    with pytest.raises(TypeError, match="needs an option"):
        await db.alter("s")
    with pytest.raises(TypeError, match="not int"):
        async with subscriber.connect(5):  # type: ignore[arg-type]
            pass


async def test_methods_of_database_return_typed_results(
    db: subscriber.Database, source_db: Database, target_db: Database
) -> None:
    assert [
        finding.level
        for finding in await db.check(source=source_db.dsn(), publications=["atlas"])
        if finding.level == "error"
    ] == []
    await db.create_subscription("s", source=source_db.dsn(), publications=["atlas"])
    async with db.running():
        await db.wait_for_sync("s", timeout=60)
        await source_db.execute("INSERT INTO city VALUES (2, 'Brno')")
        position = subscriber.Lsn.parse(await source_db.value("SELECT pg_current_wal_lsn()::text"))
        await db.wait_for_lsn("s", position, timeout=60)
        (status,) = await db.status("s")
        assert (status.name, status.problems, status.error) == ("s", (), None)
        compared = await db.verify("s")
        assert compared.is_same
        assert [table.rows for table in compared.tables] == [2]
    assert not [finding for finding in await db.check("s") if finding.level == "error"]
    with pytest.raises(subscriber.StatementError, match='subscription "t" does not exist'):
        await db.status("t")
    with pytest.raises(subscriber.StatementError, match='subscription "t" does not exist'):
        await db.wait_for_sync("t")


async def test_a_wait_raises_the_error_of_a_table(
    db: subscriber.Database, source_db: Database, target_db: Database
) -> None:
    await target_db.execute("INSERT INTO city VALUES (1, 'in the way')")
    await db.create_subscription("s", source=source_db.dsn(), publications=["atlas"])
    async with db.running():
        with pytest.raises(subscriber.SubscriptionFailed, match=r'subscription "s", table public\.city: ') as raised:
            await db.wait_for_sync("s", timeout=60)
        assert (raised.value.table, raised.value.sqlstate) == ("public.city", "23505")
        await target_db.execute("DELETE FROM city")
        await db.wait_for_sync("s", timeout=60)  # the error of before is over


async def test_a_wait_says_what_it_has_waited_for(db: subscriber.Database, source_db: Database) -> None:
    await db.create_subscription("s", source=source_db.dsn(), publications=["atlas"])
    with pytest.raises(subscriber.WaitTimeout) as raised:
        await db.wait_for_sync("s", timeout=0.1)
    assert isinstance(raised.value, TimeoutError)
    assert raised.value.message == (
        'subscription "s" is not in sync after 0.1 s: table public.city is waiting; no launcher is running'
    )
    await db.disable("s")
    with pytest.raises(subscriber.WaitTimeout, match=r"has not reached 1/0 after 0 s: .*the subscription is disabled"):
        await db.wait_for_lsn("s", subscriber.Lsn(1 << 32), timeout=0)


async def test_a_wait_for_a_position_waits_for_the_copies(
    db: subscriber.Database, source_db: Database, target_db: Database
) -> None:
    """The apply worker passes the position of a change that the copy of its table contains."""
    await db.create_subscription("s", source=source_db.dsn(), publications=["atlas"])
    stranger = await source_db.connect()
    async with db.running():
        transaction = stranger.transaction()
        await transaction.start()
        await stranger.execute("LOCK TABLE city IN ACCESS EXCLUSIVE MODE")
        position = subscriber.Lsn.parse(await source_db.value("SELECT pg_current_wal_lsn()::text"))
        reached = "SELECT latest_end_lsn >= $1::text::pg_lsn FROM subscriber.worker WHERE relid = 0"
        with pytest.raises(subscriber.WaitTimeout, match=r"table public\.city is (waiting|copying)"):
            await db.wait_for_lsn("s", position, timeout=3)
        async with target_db.connection() as connection:
            assert await connection.fetchval(reached, str(position))
        await stranger.execute("INSERT INTO city VALUES (2, 'Brno')")
        await transaction.commit()
        waited = await db.wait_for_source("s", timeout=60)
        assert waited > position
        assert await target_db.value("SELECT count(*) FROM city") == 2
    await stranger.close()


async def test_a_wait_for_the_publisher(db: subscriber.Database, source_db: Database, target_db: Database) -> None:
    """Each change is visible after the wait, also one that was committed asynchronously."""
    await db.create_subscription("s", source=source_db.dsn(), publications=["atlas"])
    stranger = await source_db.connect()
    async with db.running():
        await db.wait_for_sync("s", timeout=60)
        await stranger.execute("BEGIN; INSERT INTO city VALUES (1000, 'Graz')")  # its record stays in memory
        for number in range(2, 40):
            await source_db.execute(
                "SET synchronous_commit = off" if number % 2 else "SET synchronous_commit = on",
                f"INSERT INTO city VALUES ({number}, repeat('x', {number * 211}))",
            )
            await db.wait_for_source("s", timeout=60)
            assert await target_db.value("SELECT max(id) FROM city") == number
    await stranger.close()
    await db.disable("s")
    await source_db.execute("INSERT INTO city VALUES (100, 'Linz')")
    with pytest.raises(subscriber.WaitTimeout, match="the subscription is disabled"):
        await db.wait_for_source("s", timeout=0.5)
    with pytest.raises(subscriber.StatementError, match='subscription "t" does not exist'):
        await db.wait_for_source("t")


async def test_a_wait_for_a_position_with_transactions_in_quarantine(
    db: subscriber.Database, source_db: Database, target_db: Database
) -> None:
    await db.create_subscription("s", source=source_db.dsn(), publications=["atlas"], on_error="quarantine")
    async with db.running():
        await db.wait_for_source("s", timeout=60)
        await target_db.execute("INSERT INTO city VALUES (2, 'in the way')")
        await source_db.execute("INSERT INTO city VALUES (2, 'Brno')")
        await target_db.wait_for("SELECT count(*) FROM subscriber.quarantine", 1)
        with pytest.raises(subscriber.SubscriptionFailed, match=r"1 transaction before .* in quarantine") as raised:
            await db.wait_for_source("s", timeout=60)
        assert raised.value.command == "subscriber quarantine list s"


async def stopped_by_a_conflict(db: subscriber.Database, source: Database, target: Database) -> None:
    await db.create_subscription("s", source=source.dsn(), publications=["atlas"])
    async with db.running():
        await db.wait_for_sync("s", timeout=60)
    await target.execute("INSERT INTO city VALUES (2, 'in the way')")
    await source.execute("INSERT INTO city VALUES (2, 'Brno')")


async def test_an_error_ends_the_program_only_if_asked(
    db: subscriber.Database, source_db: Database, target_db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    await stopped_by_a_conflict(db, source_db, target_db)
    with pytest.raises(subscriber.ApplyError, match="conflict detected on relation"):
        async with db.running(on_error="raise"):
            await asyncio.sleep(60)
    seen: list[tuple[str, str]] = []

    async def remember(name: str, error: BaseException) -> None:
        seen.append((name, type(error).__name__))
        if len(seen) == 2:
            raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        async with db.running(on_error=remember):
            await asyncio.sleep(60)
    assert seen == [("s", "ConflictError")] * 2
    position = subscriber.Lsn.parse(await source_db.value("SELECT pg_current_wal_lsn()::text"))
    async with db.running():
        with pytest.raises(subscriber.SubscriptionFailed) as raised:
            await db.wait_for_lsn("s", position, timeout=60)
        (conflict,) = await db.conflicts("s")
        assert (conflict.conflict_type, conflict.key, conflict.resolution) == ("insert_exists", {"id": "2"}, "error")
        command = f"""ALTER SUBSCRIPTION "s" SKIP (lsn = '{conflict.finish_lsn}');"""
        assert command in (raised.value.hint or "")
        line = next(record.getMessage() for record in caplog.records if "conflict detected" in record.getMessage())
        for part in ('"public.city"', "conflict=insert_exists", 'index "city_pkey"', "in transaction ", command):
            assert part in line  # a program with ordinary logging
        assert f"finished at {conflict.finish_lsn}" in line
        assert "\n" not in line
        assert raised.value.command == command
        await db.execute(command)
        await db.wait_for_lsn("s", position, timeout=60)


async def test_only_some_subscriptions_run(
    db: subscriber.Database, source_db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "subscriber")
    for name in ("mine", "theirs"):
        await db.create_subscription(name, source=source_db.dsn(), publications=["atlas"], copy_data=False)
    async with db.running(only=["mine"]), aclosing(db.events(interval=0.1)) as events:
        async with asyncio.timeout(60):
            while [status.state for status in await db.status("mine")] != ["streaming"]:
                await asyncio.sleep(0.1)
        assert [status.state for status in await db.status("theirs")] == ["connecting"]
        assert 'this launcher does not run 1 subscription of this database: "theirs"' in caplog.text
        next_event = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0.5)
        await db.disable("mine")
        assert await asyncio.wait_for(next_event, 30) == subscriber.StateChanged("mine", "disabled", "streaming")


async def test_events_of_tables_and_conflicts(
    db: subscriber.Database, source_db: Database, target_db: Database
) -> None:
    seen: list[subscriber.Event] = []

    async def watch() -> None:
        async for event in db.events(interval=0.05, lag_limit=3600):
            seen.append(event)  # noqa: PERF401  read while it grows

    watcher = asyncio.ensure_future(watch())
    try:
        await asyncio.sleep(0.3)
        await stopped_by_a_conflict(db, source_db, target_db)
        async with db.running(), asyncio.timeout(60):
            while not any(isinstance(event, subscriber.ConflictDetected) for event in seen):
                assert not watcher.done()
                await asyncio.sleep(0.05)
            while not any(isinstance(event, subscriber.WorkerFailed) for event in seen):
                await asyncio.sleep(0.05)
    finally:
        watcher.cancel()
    created = next(event for event in seen if isinstance(event, subscriber.StateChanged))
    assert (created.subscription, created.before) == ("s", None)
    table = [event for event in seen if isinstance(event, subscriber.TableStateChanged)]
    assert (table[0].table, table[0].before) == ("public.city", None)
    assert table[-1].state in ("caught up", "ready")
    (failure, *_) = [event for event in seen if isinstance(event, subscriber.WorkerFailed)]
    assert (failure.table, failure.is_transient) == (None, False)
    assert "SKIP" in (failure.hint or "")
