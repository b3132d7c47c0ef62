"""A real PgBouncer in front of target and publisher: features that do not work with it raise a clear error."""

from __future__ import annotations

import io
from pathlib import Path

import anyio
import pytest

from subscriber.catalog.pause_requests import HOLDER
from subscriber.cli.commands.check import check
from subscriber.cli.commands.exec import execute_statements
from subscriber.comparison.comparison import verify
from subscriber.connection.connect import connect
from subscriber.connection.errors import ConnectError
from subscriber.errors import StatementError
from subscriber.publisher.connection import Publisher
from subscriber.repair.tables import repair
from subscriber.worker.supervision.launcher import Launcher
from tests.matrix.pgbouncer import pgbouncer, program, version
from tests.matrix.programs import NotAvailable
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriptions, running_subscriber


@pytest.fixture(autouse=True)
def _needs_pgbouncer() -> None:
    try:
        program()
    except NotAvailable as reason:
        pytest.skip(str(reason))


def through(port: int, database: Database) -> str:
    return f"postgresql://postgres@127.0.0.1:{port}/{database.name}"


async def test_a_parameter_of_the_connection_string_is_refused(target_db: Database, processes: Path) -> None:
    async with pgbouncer(processes, target_db.server.port) as port:
        with pytest.raises(ConnectError) as caught:
            await connect(f"{through(port, target_db)}?options=-cjit%3Don", settings={"statement_timeout": "0"})
    assert caught.value.message == "unsupported startup parameter: options"
    assert 'leave "options" out of the connection string' in (caught.value.hint or "")


async def test_settings_are_set_after_the_start_of_a_session(target_db: Database, processes: Path) -> None:
    settings = {"statement_timeout": "7s", "datestyle": "German, DMY"}
    async with pgbouncer(processes, target_db.server.port, more="log_connections = 1") as port:
        for _ in range(3):
            connection = await connect(through(port, target_db), application_name="mine", settings=settings)
            values = [await connection.fetchval(f"SHOW {name}") for name in ("statement_timeout", "datestyle", "jit")]
            name = await connection.fetchval("SHOW application_name")
            connection.terminate()
            assert (*values, name) == ("7s", "German, DMY", "off", "mine")
    # The pooler has refused the settings once.
    assert (processes / "pgbouncer.log").read_text().count("pooler error: unsupported startup parameter") == 1


async def test_a_replication_connection_through_pgbouncer_is_refused_with_a_hint(
    source_db: Database, processes: Path
) -> None:
    if version() >= (1, 23):
        pytest.skip("this PgBouncer passes replication connections on")
    async with pgbouncer(processes, source_db.server.port) as port:
        with pytest.raises(ConnectError, match="unsupported startup parameter: ") as caught:
            await Publisher.connect(through(port, source_db), application_name="test")
    assert "Connect to the publisher itself" in (caught.value.hint or "")


async def test_an_error_of_pgbouncer_keeps_its_message(target_db: Database, processes: Path) -> None:
    async with pgbouncer(processes, target_db.server.port, more="max_client_conn = 1") as port:
        first = await connect(through(port, target_db))
        try:
            with pytest.raises(ConnectError, match="no more connections allowed") as caught:
                await connect(through(port, target_db))
        finally:
            first.terminate()
    assert caught.value.sqlstate.startswith("08")


async def test_transaction_mode_is_refused(target_db: Database, processes: Path) -> None:
    async with pgbouncer(processes, target_db.server.port, pool_mode="transaction") as port:
        with anyio.fail_after(20), pytest.raises(StatementError) as caught:
            await Launcher(through(port, target_db)).run()
    assert caught.value.message == "the target is a connection pooler in transaction mode"
    assert "pool_mode = session" in (caught.value.hint or "")


async def test_session_mode_works(source_db: Database, target_db: Database, processes: Path) -> None:
    """Its configuration is that of a new installation."""
    for database in (source_db, target_db):
        await database.execute("CREATE TABLE t (id int PRIMARY KEY, v date)")
    await source_db.execute("CREATE PUBLICATION p FOR TABLE t", "INSERT INTO t VALUES (1, '2030-02-01')")
    async with pgbouncer(processes, target_db.server.port) as port:
        pooled = Database(target_db.server, target_db.name)
        pooled.dsn = lambda **_: through(port, target_db)  # type: ignore[method-assign]
        assert not await check(pooled.dsn(), None, source_db.dsn(), ["p"], json=True)
        async with running_subscriber(pooled):
            subscriptions = Subscriptions(pooled)
            await subscriptions.create(source_db, "p")
            await subscriptions.wait_for_ready(source_db)
            await source_db.execute("INSERT INTO t VALUES (2, '2030-02-02')")
            await source_db.wait_for_catchup("s")
            assert await target_db.rows("SELECT id, v::text FROM t") == [(1, "2030-02-01"), (2, "2030-02-02")]
            await target_db.execute("DELETE FROM t WHERE id = 1")
            output = io.StringIO()
            await execute_statements(pooled.dsn(), "ALTER SUBSCRIPTION s SET (streaming = parallel)", output)
            assert [table.missing_count for table in (await verify(pooled.dsn(), "s")).tables] == [1]
            # The pooler keeps the session, so the command has to give its place back.
            assert await target_db.rows(f"SELECT FROM subscriber.session WHERE relid = {HOLDER}") == []
            await repair(pooled.dsn(), "s")
            assert [table.missing_count for table in (await verify(pooled.dsn(), "s")).tables] == [0]
