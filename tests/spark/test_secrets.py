"""Passwords of connection strings do not appear in any output of Spark."""

from __future__ import annotations

import json
import os
import traceback
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import anyio
import pytest
from pyspark.sql import SparkSession

from subscriber.catalog.connection import CatalogConnection
from subscriber.cli.status_lines import to_json
from subscriber.spark.session import DAEMON
from subscriber.spark.sources.pgsnapshot import exported_snapshot, register
from subscriber.status import collect
from tests.cli.test_secrets import BROKEN, not_marked, printed
from tests.passwords import MARK
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriptions
from tests.processes import command_line, family
from tests.spark.scene import archived

UNREACHABLE = f"postgresql://app:{MARK}@127.0.0.1:1/db"


async def prepare(source: Database, target: Database, **options: Any) -> None:
    for database in (source, target):
        await database.execute("CREATE TABLE t (a int PRIMARY KEY)")
    await source.execute("INSERT INTO t SELECT generate_series(1, 1000)", "CREATE PUBLICATION p FOR ALL TABLES")
    await Subscriptions(target).create(source, "p", **options)


def command_lines(pid: int) -> list[str]:
    return [" ".join(command_line(each)) for each in family(pid)]


async def watch(pid: int, lines: set[str]) -> None:
    """Collect the command lines of a process and its descendants, until cancelled."""
    while True:
        lines.update(command_lines(pid))
        await anyio.sleep(0.1)


PAGES = (
    "/jobs/",
    "/stages/",
    "/environment/",
    "/executors/",
    "/SQL/",
    "/SQL/execution/?id={query}",
    "/api/v1/applications/{id}/environment",
    "/api/v1/applications/{id}/sql/{query}?details=true",
    "/api/v1/applications/{id}/stages",
)


def read(address: str) -> str:
    with urlopen(address, timeout=20) as answer:
        text: str = answer.read().decode()
    return text


async def test_a_session_shows_no_password(
    source_db: Database,
    target_db: Database,
    spark: SparkSession,
    spark_events: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Results, plans, errors, pages, settings, the event log, and the arguments of processes."""
    await prepare(source_db, target_db)
    register(spark)
    with exported_snapshot(source_db.dsn()) as snapshot:
        frame = spark.read.format("pgsnapshot").options(**snapshot).option("table", "public.t").load()
        print("rows", frame.count())
        frame.explain(extended=True)
        frame.explain("formatted")
        frame.createOrReplaceTempView("marked")
        spark.sql("DESCRIBE EXTENDED marked").show(truncate=False)
        spark.catalog.dropTempView("marked")
        for options in ({**snapshot, "table": "nowhere"}, snapshot, {"conninfo": BROKEN[0], "table": "t"}):
            try:
                spark.read.format("pgsnapshot").options(**options).load().count()
            except Exception:
                print(traceback.format_exc())
    options = {"conninfo": source_db.dsn(), "publications": "p", "tables": "public.t"}
    options |= {"snapshot": str(tmp_path / "snapshot")}
    frame = spark.read.format("pgcdc").options(**options).load(str(tmp_path / "log"))
    print("changes", frame.count())
    frame.explain(extended=True)
    stream = spark.readStream.format("pgcdc").options(**options).load(str(tmp_path / "log"))
    writer = stream.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint"))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    query.explain(extended=True)
    print(query.recentProgress)
    try:
        spark.read.format("pgcdc").options(**{**options, "publications": "nowhere", "slot": "b"}).load().count()
    except Exception:
        print(traceback.format_exc())
    for file in (file for file in tmp_path.rglob("*") if file.is_file()):
        not_marked(file.read_bytes().decode(errors="replace"))
    lines = command_lines(os.getpid())
    context = spark.sparkContext
    address = f"{context.uiWebUrl}/api/v1/applications/{context.applicationId}/sql?length=100000"
    query = max(query_entry["id"] for query_entry in json.loads(read(address)))
    for page in PAGES:
        address = f"{context.uiWebUrl}{page.format(id=context.applicationId, query=query)}"
        print(page, read(address))
    print("conf", context.getConf().getAll())
    out, err = capfd.readouterr()
    for expected in (
        "rows 1000",
        "changes 1000",
        "BatchScan pgsnapshot",
        "BatchScan pgcdc",
        'relation "nowhere" does not exist',
        "URI scheme",
    ):
        assert expected in out
    not_marked(out + err)
    assert any("java" in line for line in lines)
    assert any(DAEMON in line for line in lines)
    not_marked("\n".join(lines))
    logs = [file for file in spark_events.rglob("*") if file.is_file() and file.stat().st_size]
    assert logs
    for log in logs:
        not_marked(log.read_text(errors="replace"))


async def in_words(target: Database) -> list[str]:
    async with CatalogConnection.open(target.dsn(), "test") as catalog:
        look = await collect.read_catalog(catalog)
        return [to_json(look, await collect.assess_all(look))]


SPARK_FIRST = {
    "verify": ["verify", "s", "--target", "DSN"],
    "lake": ["lake", "load", "LAKE", "--log", "LOG", "--source", "DSN"],
}


@pytest.mark.parametrize(
    ("command", "dsn"),
    [
        ("verify", BROKEN[0]),
        pytest.param("lake", BROKEN[0], marks=pytest.mark.soak),
        *(pytest.param(name, UNREACHABLE, marks=pytest.mark.soak) for name in SPARK_FIRST),
    ],
)
async def test_commands_that_start_spark_first(command: str, dsn: str, source_db: Database, tmp_path: Path) -> None:
    given = {"DSN": dsn, "LOG": str(tmp_path / "log"), "LAKE": str(tmp_path / "lake")}
    async with archived(source_db, tmp_path):
        said = await printed(*(given.get(word, word) for word in SPARK_FIRST[command]))
        assert "URI scheme" in said or "Connection refused" in said, said
