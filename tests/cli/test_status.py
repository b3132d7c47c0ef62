from __future__ import annotations

import io
import json
from typing import Any

import anyio
import pytest

from subscriber.cli.commands.check import check
from subscriber.cli.commands.exec import execute_statements
from subscriber.cli.commands.status import status as show_status
from subscriber.errors import StatementError
from subscriber.worker.supervision.launcher import Launcher
from tests.plugins.fix_cluster import Database

pytestmark = pytest.mark.usefixtures("with_schema")


async def look(database: Database, capsys: pytest.CaptureFixture[str], *names: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    status = await show_status(database.dsn(), list(names), json=True)
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status, document


async def wait_for_state(database: Database, capsys: pytest.CaptureFixture[str], state: str) -> dict[str, Any]:
    with anyio.fail_after(30):
        while True:
            _, document = await look(database, capsys)
            (subscription,) = document["subscriptions"]
            if subscription["state"] == state and not subscription["not_ready"]:
                return dict(subscription)
            await anyio.sleep(0.1)


async def test_a_target_without_subscriptions(target_db: Database, capsys: pytest.CaptureFixture[str]) -> None:
    assert await show_status(target_db.dsn()) == 0
    assert capsys.readouterr().out == "no subscriptions\n"
    with pytest.raises(StatementError, match='subscription "s" does not exist'):
        await show_status(target_db.dsn(), ["s"], json=False)


async def test_a_subscription_from_creation_to_failure(
    source_db: Database, target_db: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    for database in (source_db, target_db):
        await database.execute("CREATE TABLE t (a int PRIMARY KEY)")
    await source_db.execute("INSERT INTO t SELECT generate_series(1, 100)", "CREATE PUBLICATION p FOR ALL TABLES")
    statement = f"CREATE SUBSCRIPTION s CONNECTION '{source_db.dsn()}' PUBLICATION p"
    await execute_statements(target_db.dsn(), statement, io.StringIO())
    status, document = await look(target_db, capsys)
    assert (status, document["launcher_pid"]) == (1, None)
    assert (document["subscriptions"][0]["state"], document["subscriptions"][0]["tables"]) == (
        "no launcher",
        {"waiting": 1},
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Launcher(target_db.dsn()).run)
        shown = await wait_for_state(target_db, capsys, "streaming")
        assert shown["tables"] == {"ready": 1}
        assert shown["publisher"]["slot_exists"]
        assert (await look(target_db, capsys, "s"))[0] == 0
        assert await check(target_db.dsn(), "s") == 0
        await target_db.execute("INSERT INTO t VALUES (200)")
        await source_db.execute("INSERT INTO t VALUES (200)")
        shown = await wait_for_state(target_db, capsys, "waiting to retry")
        assert "public.t" in shown["error"] or "t_pkey" in shown["error"]
        assert shown["error_time"] is not None
        assert (await look(target_db, capsys))[0] == 1
        tasks.cancel_scope.cancel()
    await execute_statements(target_db.dsn(), "DROP SUBSCRIPTION s", io.StringIO())
