"""Passwords of connection strings do not appear in any output of Spark."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from subscriber.catalog.connection import CatalogConnection
from subscriber.cli.status.show import to_json
from subscriber.connection.conninfo import Conninfo
from subscriber.status import collect
from tests.cli.test_secrets import BROKEN, not_marked, printed
from tests.passwords import MARK
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Program, Subscriptions
from tests.processes import command_line, family
from tests.spark.scene import archived

UNREACHABLE = f"postgresql://app:{MARK}@127.0.0.1:1/db"


def marked(database: Database) -> str:
    """Return a connection string with a marked password. The server uses trust authentication and accepts any."""
    return str(Conninfo.parse(database.dsn()).with_(password=MARK))


async def prepare(source: Database, target: Database, **options: Any) -> None:
    for database in (source, target):
        await database.execute("CREATE TABLE t (a int PRIMARY KEY)")
    await source.execute("INSERT INTO t SELECT generate_series(1, 1000)", "CREATE PUBLICATION p FOR ALL TABLES")
    await Subscriptions(target).create(marked(source).replace("'", "''"), "p", **options)


def command_lines(pid: int) -> list[str]:
    return [" ".join(command_line(each)) for each in family(pid)]


async def watch(pid: int, lines: set[str]) -> None:
    """Collect the command lines of a process and its descendants, until cancelled."""
    while True:
        lines.update(command_lines(pid))
        await anyio.sleep(0.1)


async def test_a_session_shows_no_password(source_db: Database, target_db: Database, tmp_path: Path) -> None:
    await prepare(source_db, target_db)
    given = {"source": marked(source_db), "target": marked(target_db), "broken": BROKEN[0], "events": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.spark.marked_session"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(given) + "\n")
        process.stdin.flush()
        said, lines = "", set[str]()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch, process.pid, lines)
            while not said.endswith("\ndone\n"):
                line = await asyncio.to_thread(process.stdout.readline)
                assert line, said
                said += line
            tasks.cancel_scope.cancel()
        said += process.communicate("\n", timeout=60)[0]
    finally:
        process.kill()
        process.wait()
    for expected in ("rows 1000", "BatchScan pgsnapshot", 'relation "nowhere" does not exist', "URI scheme"):
        assert expected in said
    assert "TableProgress(name='public.t', rows=1000" in said
    not_marked(said)
    assert any("java" in line for line in lines)
    assert any("pyspark.daemon" in line or "pyspark/daemon" in line for line in lines)
    not_marked("\n".join(lines))
    logs = [file for file in tmp_path.rglob("*") if file.is_file() and file.stat().st_size]
    assert logs
    for log in logs:
        not_marked(log.read_text(errors="replace"))


async def test_the_copy_that_the_launcher_starts_shows_no_password(
    source_db: Database, target_db: Database, processes: Path
) -> None:
    await prepare(source_db, target_db, copy_engine="spark")
    program = Program(marked(target_db), processes / "run.log", "json")
    lines = set[str]()
    try:
        await program.start()
        assert program.pid is not None
        with anyio.fail_after(90):
            while await target_db.value("SELECT count(*) FROM subscriber.subscription_rel WHERE srsubstate = 'r'") < 1:
                lines.update(command_lines(program.pid))
                not_marked(json.dumps(await in_words(target_db)))
                await source_db.execute("SELECT pg_logical_emit_message(true, 'test', '')")
                await anyio.sleep(0.1)
        not_marked(program.text)
    finally:
        program.kill()
    for part in ("subscriber.spark.copy.launched_copy", "subscriber.spark.copy.driver_process", "java", "pyspark"):
        assert any(part in line for line in lines), part
    not_marked("\n".join(lines))


async def in_words(target: Database) -> list[str]:
    async with CatalogConnection.open(target.dsn(), "test") as catalog:
        look = await collect.read_catalog(catalog)
        return [to_json(look, await collect.assess_all(look))]


SPARK_FIRST = {
    "verify": ["verify", "s", "--target", "DSN"],
    "catchup": ["catchup", "s", "--log", "LOG", "--target", "DSN"],
    "lake": ["lake", "--log", "LOG", "--to", "LAKE", "--source", "DSN"],
}


@pytest.mark.parametrize(
    ("command", "dsn"),
    [
        ("verify", BROKEN[0]),
        pytest.param("catchup", BROKEN[0], marks=pytest.mark.soak),
        pytest.param("lake", BROKEN[0], marks=pytest.mark.soak),
        *(pytest.param(name, UNREACHABLE, marks=pytest.mark.soak) for name in SPARK_FIRST),
    ],
)
async def test_commands_that_start_spark_first(command: str, dsn: str, source_db: Database, tmp_path: Path) -> None:
    given = {"DSN": dsn, "LOG": str(tmp_path / "log"), "LAKE": str(tmp_path / "lake")}
    async with archived(source_db, tmp_path):
        said = await printed(*(given.get(word, word) for word in SPARK_FIRST[command]))
        assert "URI scheme" in said or "Connection refused" in said, said
