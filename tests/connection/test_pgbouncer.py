"""A real PgBouncer in front of target and publisher: features that do not work with it raise a clear error."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from subscriber.connection.connect import connect
from subscriber.connection.errors import ConnectError
from subscriber.errors import StatementError
from subscriber.publisher.connection import Publisher
from subscriber.worker.supervision.launcher import Launcher
from tests.matrix.pgbouncer import pgbouncer, program, version
from tests.matrix.programs import NotAvailable
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriptions, running_subscriber

# Of the settings that our sessions send when they connect.
PARAMETERS = (
    "jit,statement_timeout,lock_timeout,idle_in_transaction_session_timeout,idle_session_timeout,synchronous_commit,"
    "tcp_keepalives_idle,tcp_keepalives_interval,tcp_keepalives_count,extra_float_digits,datestyle,intervalstyle,options"
)
IGNORE = f"ignore_startup_parameters = {PARAMETERS}"


@pytest.fixture(autouse=True)
def _needs_pgbouncer() -> None:
    try:
        program()
    except NotAvailable as reason:
        pytest.skip(str(reason))


def through(port: int, database: Database) -> str:
    return f"postgresql://postgres@127.0.0.1:{port}/{database.name}"


async def test_an_unsupported_startup_parameter(target_db: Database, processes: Path) -> None:
    async with pgbouncer(processes, target_db.server.port) as port:
        with pytest.raises(ConnectError) as caught:
            await connect(through(port, target_db), settings={"statement_timeout": "0"})
    assert caught.value.message == "unsupported startup parameter: statement_timeout"
    assert 'add "statement_timeout" to ignore_startup_parameters' in (caught.value.hint or "")


@pytest.mark.parametrize("more", ["", IGNORE])
async def test_a_walsender(source_db: Database, processes: Path, more: str) -> None:
    if version() >= (1, 23):
        pytest.skip("this PgBouncer passes replication connections on")
    async with pgbouncer(processes, source_db.server.port, more=more) as port:
        with pytest.raises(ConnectError, match="unsupported startup parameter: ") as caught:
            await Publisher.connect(through(port, source_db), application_name="test")
    assert "Connect to the publisher itself" in (caught.value.hint or "")


async def test_what_a_pooler_says_is_kept(target_db: Database, processes: Path) -> None:
    async with pgbouncer(processes, target_db.server.port, more="max_client_conn = 1") as port:
        first = await connect(through(port, target_db))
        try:
            with pytest.raises(ConnectError, match="no more connections allowed") as caught:
                await connect(through(port, target_db))
        finally:
            first.terminate()
    assert caught.value.sqlstate.startswith("08")


async def test_transaction_mode_is_refused(target_db: Database, processes: Path) -> None:
    async with pgbouncer(processes, target_db.server.port, pool_mode="transaction", more=IGNORE) as port:
        with anyio.fail_after(20), pytest.raises(StatementError) as caught:
            await Launcher(through(port, target_db)).run()
    assert caught.value.message == "the target is a connection pooler in transaction mode"
    assert "pool_mode = session" in (caught.value.hint or "")


async def test_session_mode_works(source_db: Database, target_db: Database, processes: Path) -> None:
    for database in (source_db, target_db):
        await database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    await source_db.execute("CREATE PUBLICATION p FOR TABLE t")
    async with pgbouncer(processes, target_db.server.port, more=IGNORE) as port:
        pooled = Database(target_db.server, target_db.name)
        pooled.dsn = lambda **_: through(port, target_db)  # type: ignore[method-assign]
        async with running_subscriber(pooled):
            subscriptions = Subscriptions(target_db)
            await subscriptions.create(source_db, "p")
            await subscriptions.wait_for_sync(source_db)
            await source_db.execute("INSERT INTO t VALUES (1)")
            await source_db.wait_for_catchup("s")
            assert await target_db.rows("SELECT id FROM t") == [(1,)]
