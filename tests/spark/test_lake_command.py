"""`subscriber lake` as it is run: its exit status and what it prints. It uses the Spark session of the tests."""

from __future__ import annotations

import os
import secrets
import shlex
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner, Result

from subscriber.changelog.consumers import read_consumers
from subscriber.changelog.files import Identity
from subscriber.changelog.writer import log_writer
from subscriber.cli.main import app
from subscriber.errors import LoadNeeded, StatementError
from subscriber.lsn import Lsn
from subscriber.spark.lake.lake import BOUNDARIES, Lake
from subscriber.spark.lake.load import load
from subscriber.spark.pgcdc import register
from subscriber.spark.scd.apply import apply_changes
from tests.plugins.fix_cluster import Database
from tests.spark.scene import Scene

SHORT = "lake_wait_limit=500ms"
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
    monkeypatch.setattr("subscriber.cli.commands.lake.run.spark_session", lambda **_: nullcontext(spark))

    async def run(verb: str, *options: str, lake: Path | None = None, source: bool = True) -> Result:
        words = ["lake", verb, str(lake or scene.directory / "lake"), "--log", str(scene.log.directory)]
        words += ["--no-history", "--setting", SHORT, *options]
        words += ["--source", scene.source.dsn()] if source else []
        return await anyio.to_thread.run_sync(partial(CliRunner().invoke, app, words))

    return run


async def test_a_table_that_was_loaded_again_can_be_read_at_the_end(scene: Scene, lake_command: Command) -> None:
    """The log has to reach the position of the load. A run that it does not reach says so."""
    lake = Lake(scene.directory / "lake")
    assert (await lake_command("load")).exit_code == 0
    await scene.source.execute("ALTER TABLE orders ALTER amount TYPE bigint USING 7", "UPDATE customers SET name = 'b'")
    await scene.source.execute("INSERT INTO orders VALUES (2, 'us', 8)")
    await scene.archive()
    early = await lake_command("advance")
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
        late = await lake_command("advance", "--setting", "lake_wait_limit=60s")
        tasks.cancel_scope.cancel()
    assert late.exit_code == 0
    reason = 'table "public"."orders" was rewritten, because column "amount" was changed'
    assert late.stderr == f"NOTICE:  table public.orders is loaded again: {reason}\n"
    rows = lake.to_arrow("public.orders").to_pylist()
    assert sorted((row["id"], row["amount"]) for row in rows) == [(1, "x"), (2, "x"), (3, "y")]


async def test_a_publisher_that_cannot_be_read_is_not_tried_again(scene: Scene, lake_command: Command) -> None:
    await lake_command("load")
    result = await lake_command("advance", "--source", scene.source.server.dsn("nowhere"), source=False)
    assert "WARNING:  new tables cannot be loaded now: " in result.stderr
    assert "HINT:  Correct dbname." in result.stderr
    assert "again in" not in result.stderr
    assert result.exit_code == 1, "new tables may be missing"
    assert (await lake_command("advance", "--master", "locl")).exception is not None


async def error(command: Command, verb: str, *options: str, **given: Any) -> StatementError:
    exception = (await command(verb, *options, **given)).exception
    assert isinstance(exception, StatementError)
    return exception


async def test_names_that_do_not_exist_are_errors_before_the_first_write(scene: Scene, lake_command: Command) -> None:
    """Nothing is created, and the log does not keep segments for the lake."""
    near = 'Perhaps you meant "public.orders".'
    for option, name in (
        ("--table", "public.order"),
        ("--partition", "public.order.region"),
        ("--cluster", "none(public.order)"),
        ("--text", "public.order.region"),
    ):
        failure = await error(lake_command, "load", option, name)
        assert (failure.message.startswith('there is no table "public.order"'), failure.hint) == (True, near), option
    for option in ("--partition", "--cluster", "--text"):
        failure = await error(lake_command, "load", option, "public.orders.regio")
        assert failure.message == 'table "public.orders" has no column "regio"', option
        assert failure.hint == 'Perhaps you meant "region".'
    assert "schema.table.column" in (await error(lake_command, "load", "--text", "region")).message
    assert (await error(lake_command, "load", "--table", "public.orders", "--text", "public.customers.name")).hint == (
        "There are public.orders."
    )
    for verb, *words in (["advance"], ["follow"], ["verify"], ["reload", "public.orders"]):
        missing = await error(lake_command, verb, *words)
        assert missing.message == f'there is no lake in "{scene.directory / "lake"}"'
        where = f"--log {scene.log.directory} --source DSN {scene.directory}/lake"
        assert missing.hint == (f"Correct its directory. Or load a new lake there: subscriber lake load {where}")
    assert not (scene.directory / "lake").exists()
    assert read_consumers(scene.log.directory) == []
    with pytest.raises(StatementError, match="is not published"):
        await load(Lake(scene.directory / "lake"), scene.log, scene.source.dsn(), tables=frozenset({"public.order"}))
    assert read_consumers(scene.log.directory) == []


async def test_names_that_the_lake_does_not_have_are_errors(scene: Scene, lake_command: Command) -> None:
    assert (await lake_command("load", "--table", "public.orders", "--text", "public.orders.region")).exit_code == 0
    assert (await lake_command("load", "--table", "public.orders")).exit_code == 0
    other = await error(lake_command, "load", "--table", "public.order")
    assert (other.detail, other.hint) == ("It has public.orders.", 'Perhaps you meant "public.orders".')
    added = await error(lake_command, "load", "--table", "public.customers", "--table", "public.orders")
    reload = f"subscriber lake reload --log {scene.log.directory} {scene.directory}/lake public.customers"
    assert (added.hint or "").endswith(f"To add a table: {reload}")
    near = await error(lake_command, "reload", "public.order")
    assert near.message.startswith('there is no table "public.order"')
    for source in (True, False):
        assert (
            "no column"
            in (await error(lake_command, "advance", "--text", "public.orders.amout", source=source)).message
        )
        assert (
            "no table"
            in (await error(lake_command, "advance", "--partition", "public.order.region", source=source)).message
        )
    kept = await error(lake_command, "advance", "--text", "public.orders.amount", source=False)
    assert kept.message == 'column "public.orders.amount" is not text in the lake'
    assert (await lake_command("advance", "--text", "public.orders.region", source=False)).exit_code == 0
    later = await lake_command("advance", "--partition", "public.invoices.region")
    assert (later.exit_code, later.stderr) == (
        0,
        "NOTICE:  the lake has no table for --partition public.invoices.region\n",
    )

    lake = Lake(scene.directory / "lake")
    lake.fail_load("public.orders", LoadNeeded("it was renamed"), scene.log)
    aside = await error(lake_command, "advance", "--partition", "public.orders.region", source=False)
    assert aside.message == "table public.orders has other partitions than the given ones"


async def test_a_lake_of_another_log_is_no_consumer_of_the_given_one(scene: Scene, lake_command: Command) -> None:
    await lake_command("load")
    other = scene.directory / "other"
    writer = log_writer(other)
    writer.open()
    writer.create(Identity(7, "b", ("p",), Lsn(0x1000)))
    writer.close()
    failure = await error(lake_command, "advance", "--log", str(other), source=False)
    assert "is fed from another log" in failure.message
    assert f'The log in "{other}" is from slot "b" of system 7.' in (failure.detail or "")
    assert "Correct --log" in (failure.hint or "")
    assert read_consumers(other) == []


async def test_a_table_that_is_set_aside_has_a_command_that_loads_it(
    scene: Scene, lake_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command needs no connection string, and a privilege that is missing is named first."""
    role = f"lake_reader_{secrets.token_hex(4)}"
    await scene.source.execute(
        f"CREATE ROLE {role} LOGIN REPLICATION",
        f"REVOKE USAGE ON SCHEMA public FROM PUBLIC; GRANT SELECT ON orders TO {role}",
    )
    try:
        source = scene.source.dsn(user=role)
        first = await lake_command("load", "--source", source, source=False)
        assert first.exit_code == 1
        assert "table as of" not in first.stdout
        assert f'HINT:  On the publisher: GRANT USAGE ON SCHEMA "public" TO "{role}"; ' in first.stderr
        await scene.source.execute(f"GRANT USAGE ON SCHEMA public TO {role}")
        second = await lake_command("reload", "public.customers", "--source", source, source=False)
        hint = f'HINT:  On the publisher: GRANT SELECT ON "public"."customers" TO "{role}"; Then load the table again'
        assert hint in second.stderr
        assert "table as of" not in second.stdout
        await scene.source.execute(f"GRANT SELECT ON customers TO {role}")
        monkeypatch.setenv("SUBSCRIBER_SOURCE_DSN", source)
        for problem in Lake(scene.directory / "lake").problems().values():
            assert "CONNECTION" not in problem.hint
            words = shlex.split(problem.hint.partition("`")[2].rstrip("`."))
            assert words[:2] == ["subscriber", "lake"]
            loaded = await anyio.to_thread.run_sync(partial(CliRunner().invoke, app, [*words[1:], "--setting", SHORT]))
            assert "1 table as of" in loaded.stdout
    finally:
        await scene.source.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


async def test_a_table_that_is_not_published_any_more_is_named(scene: Scene, lake_command: Command) -> None:
    await lake_command("load")
    await scene.source.execute("ALTER PUBLICATION p DROP TABLE orders")
    await scene.archive()
    result = await lake_command("advance")
    assert "as of" not in result.stdout
    assert result.stderr == (
        "NOTICE:  table public.orders is no longer published, and the lake keeps its earlier rows only\n"
    )


async def test_a_directory_has_one_use(scene: Scene, lake_command: Command, spark: SparkSession) -> None:
    log, lake, table = (scene.directory / name for name in ("log", "lake", "table"))
    assert (await lake_command("load")).exit_code == 0
    (table / "_delta_log").mkdir(parents=True)
    for directory, noun in ((log, "change log"), (table, "Delta table")):
        failure = await error(lake_command, "load", lake=directory)
        assert failure.message == f'the directory "{directory}" has a {noun}'
        assert failure.hint == "Choose another directory for the lake."
        assert not (directory / "lake.json").exists()
    for directory, noun in ((lake, "lake"), (table, "Delta table")):
        words = ["archive", "--directory", str(directory), "--publication", "p", "--source", scene.source.dsn()]
        for options in ([], ["--standby"]):
            result = await anyio.to_thread.run_sync(partial(CliRunner().invoke, app, [*words, *options]))
            assert str(result.exception).startswith(f'the directory "{directory}" has a {noun}')
    await scene.source.execute("INSERT INTO orders VALUES (2, 'us', 8)")
    await scene.archive()
    register(spark)
    stream = spark.readStream.format("pgcdc").option("tables", "public.orders").load(str(log))
    for directory in (log, lake):
        with pytest.raises(StatementError, match="Choose another directory for the Delta table"):
            apply_changes(stream, directory, keys=["id"])
        assert not (directory / "_delta_log").exists()


async def test_positions_are_forgotten_and_files_are_ordered_without_the_log(
    scene: Scene, lake_command: Command
) -> None:
    async def run(*words: str) -> Result:
        return await anyio.to_thread.run_sync(partial(CliRunner().invoke, app, ["lake", *words]))

    where, lake = str(scene.directory / "lake"), Lake(scene.directory / "lake")
    for words in (["forget", where, "--keep-age", "1"], ["recluster", where, "public.orders"], ["show", where]):
        absent = (await run(*words)).exception
        assert str(absent).startswith(f'there is no lake in "{where}"'), words
    assert not Path(where).exists()
    assert (await lake_command("load", "--cluster", "public.orders.region")).exit_code == 0
    await scene.source.execute("INSERT INTO orders VALUES (2, 'as', 8)")
    await scene.archive()
    assert (await lake_command("advance", source=False)).exit_code == 0
    assert len(lake.boundaries()) == 2
    position, old = lake.position(), time.time() - 7200
    for file in (scene.directory / "lake" / BOUNDARIES).iterdir():
        os.utime(file, (old, old))
    forgotten = await run("forget", where, "--keep-age", "1")
    assert (forgotten.exit_code, forgotten.stdout) == (0, "removed 1 old position and 0 files\n")
    assert lake.boundaries() == [position]
    ordered = await run("recluster", where, "public.orders")
    assert (ordered.exit_code, ordered.stdout.partition(":")[0]) == (0, "public.orders"), ordered
    shown = await run("show", where)
    assert (shown.exit_code, f"Delta tables as of {position}" in shown.stdout) == (0, True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_archive_always, scene)
        same = await lake_command("verify", "--setting", "lake_wait_limit=60s")
        tasks.cancel_scope.cancel()
    assert (same.exit_code, "identical at" in same.stdout) == (0, True), same.output


async def _archive_always(scene: Scene) -> None:
    while True:
        await anyio.sleep(1)
        await scene.archive()
