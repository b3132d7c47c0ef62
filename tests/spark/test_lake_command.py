"""`subscriber lake` as it is run: its exit status and what it prints. It uses the Spark session of the tests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from click.testing import Result
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from subscriber.cli.main import app
from subscriber.spark.lake.lake import Lake
from tests.plugins.fix_cluster import Database
from tests.spark.scene import Scene

Command = Callable[..., Awaitable[Result]]


@pytest.fixture
async def scene(source_db: Database, tmp_path: Path) -> Scene:
    await source_db.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, region text, amount numeric(8,2))",
        "CREATE TABLE customers (id int PRIMARY KEY, name text)",
        "INSERT INTO orders VALUES (1, 'eu', 1.5)",
        "INSERT INTO customers VALUES (1, 'a')",
        "CREATE PUBLICATION p FOR TABLE orders, customers",
    )
    scene = Scene(source_db, tmp_path)
    await scene.archive()
    return scene


@pytest.fixture
def lake_command(scene: Scene, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run the command for the log of the scene."""
    monkeypatch.setattr("subscriber.cli.commands.lake.spark_session", lambda **_: nullcontext(spark))

    async def run(*options: str, source: bool = True) -> Result:
        words = ["lake", "--log", str(scene.log.directory), "--to", str(scene.directory / "lake"), "--no-history"]
        words += ["--setting", "lake_wait_limit=500ms", *options]
        words += ["--source", scene.source.dsn()] if source else []
        return await anyio.to_thread.run_sync(partial(CliRunner().invoke, app, words))

    return run


async def test_a_table_that_was_loaded_again_can_be_read_at_the_end(scene: Scene, lake_command: Command) -> None:
    """The log has to reach the position of the load. A run that it does not reach says so."""
    lake = Lake(scene.directory / "lake")
    assert (await lake_command()).exit_code == 0
    await scene.source.execute("ALTER TABLE orders ALTER amount TYPE bigint USING 7", "UPDATE customers SET name = 'b'")
    await scene.source.execute("INSERT INTO orders VALUES (2, 'us', 8)")
    await scene.archive()
    early = await lake_command()
    loaded = lake.store.present()["public.orders"].loaded
    assert early.exit_code == 1
    assert f"table public.orders is ahead of the lake, and cannot be read before the log has reached {loaded}" in (
        early.stderr
    )
    assert "HINT:  Start `subscriber archive`, and run this command again." in early.stderr
    assert lake.store.present()["public.orders"].condition(lake.position()) == "ahead"

    await scene.source.execute("ALTER TABLE orders ALTER amount TYPE text USING 'x'")
    await scene.source.execute("INSERT INTO orders VALUES (3, 'us', 'y')")
    await scene.archive()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_archive_always, scene)
        late = await lake_command("--setting", "lake_wait_limit=60s")
        tasks.cancel_scope.cancel()
    assert late.exit_code == 0
    rows = lake.to_arrow("public.orders").to_pylist()
    assert sorted((row["id"], row["amount"]) for row in rows) == [(1, "x"), (2, "x"), (3, "y")]


async def _archive_always(scene: Scene) -> None:
    while True:
        await anyio.sleep(1)
        await scene.archive()
