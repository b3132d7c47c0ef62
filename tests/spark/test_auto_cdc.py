"""The template of examples/auto_cdc, run by spark-pipelines: its tables equal the source.

It needs the JDK's compiler, and the libraries of Spark Connect: pip install 'pyspark[pipelines]'. The tables are of
MergeCatalog.java, because the connectors for Delta and Iceberg are not in the package registry of Python.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from subscriber.spark.java_runtime import java_home
from tests.plugins.fix_cluster import Database

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("grpc") is None, reason="pyspark[pipelines] is not installed"),
    pytest.mark.skipif(shutil.which("javac") is None, reason="there is no javac"),
]

TEMPLATE = Path(__file__).parents[2] / "examples" / "auto_cdc"
CATALOG = Path(__file__).parent / "pipelines" / "MergeCatalog.java"
CUSTOMERS = """
CREATE TABLE customers (id int PRIMARY KEY, name text, big text, at timestamptz);
ALTER TABLE customers ALTER big SET STORAGE EXTERNAL;
ALTER TABLE customers REPLICA IDENTITY FULL;
CREATE PUBLICATION p FOR TABLE customers;
INSERT INTO customers SELECT i, 'n' || i, repeat('big', 1000), now() FROM generate_series(1, 20) i;
"""
FIRST = """
UPDATE customers SET name = 'new' WHERE id <= 3; UPDATE customers SET id = 102 WHERE id = 2;
DELETE FROM customers WHERE id = 5; INSERT INTO customers VALUES (5, 'again');
UPDATE customers SET name = 'newer' WHERE id = 1
"""
SECOND = """
UPDATE customers SET id = 2 WHERE id = 102; DELETE FROM customers WHERE id = 1;
UPDATE customers SET big = 'b' WHERE id = 6
"""
READ = """
import json, sys
from pyspark.sql import SparkSession
builder = SparkSession.builder.master("local[1]")
for setting in sys.argv[2:]:
    builder = builder.config(*setting.split("=", 1))
for row in builder.getOrCreate().table(f"lake.shop.{sys.argv[1]}").orderBy("id").collect():
    print(json.dumps(row.asDict(), default=str))
"""


class CdcPipeline:
    def __init__(self, source: Database, directory: Path) -> None:
        self._directory = directory
        spec = find_spec("pyspark")
        assert spec is not None
        assert spec.origin is not None
        home = Path(spec.origin).parent
        self._program = home / "bin" / "spark-pipelines"
        self._environment = {
            **os.environ,
            "SPARK_HOME": str(home),
            "JAVA_HOME": str(java_home(directory / "java")),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        subprocess.run(["javac", "-cp", f"{home}/jars/*", "-d", directory / "classes", CATALOG], check=True)
        self._jar = directory / "merge.jar"
        shutil.make_archive(str(self._jar), "zip", directory / "classes")
        (directory / "merge.jar.zip").rename(self._jar)
        (directory / "lake").mkdir()
        shutil.copytree(TEMPLATE, directory / "pipeline")
        text = (TEMPLATE / "spark-pipeline.yml").read_text().replace("/srv/", f"{directory}/")
        text = text.replace("org.apache.iceberg.spark.SparkCatalog", "MergeCatalog").replace(".warehouse:", ".path:")
        # Spark hides a setting with the word "password" in its value from the program, too.
        publisher = source.dsn().partition("?")[0]
        text = text.replace("host=publisher.example dbname=shop user=repl", publisher).replace("shop_pub", "p")
        (directory / "pipeline" / "spark-pipeline.yml").write_text(text)

    def run(self) -> None:
        settings = ["--conf", "spark.ui.enabled=false", "--conf", "spark.sql.shuffle.partitions=2"]
        self._call([str(self._program), "--jars", str(self._jar), *settings, "run"])

    def rows(self, table: str) -> list[dict[str, Any]]:
        catalog = f"spark.sql.catalog.lake=MergeCatalog|spark.sql.catalog.lake.path={self._directory}/lake"
        settings = ["spark.ui.enabled=false", f"spark.jars={self._jar}", *catalog.split("|")]
        return [json.loads(line) for line in self._call([sys.executable, "-c", READ, table, *settings]).splitlines()]

    def _call(self, command: list[str]) -> str:
        done = subprocess.run(
            command,
            cwd=self._directory / "pipeline",
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return done.stdout


async def compare(db: Database, pipeline: CdcPipeline) -> None:
    source = await db.rows("SELECT id, name, big FROM customers ORDER BY id")
    synced = await anyio.to_thread.run_sync(pipeline.rows, "customers")
    assert [(row["id"], row["name"], row["big"]) for row in synced] == [tuple(row) for row in source]
    history = await anyio.to_thread.run_sync(pipeline.rows, "customer_history")
    current = [(row["id"], row["name"], row["big"]) for row in history if row["__END_AT"] is None]
    assert current == [tuple(row) for row in source]
    for _, versions in groupby(history, lambda row: row["id"]):
        spans = sorted((row["__START_AT"], row["__END_AT"] or "G") for row in versions)
        assert all(start < end for start, end in spans)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))


async def test_tables_of_a_pipeline_equal_the_source(source_db: Database, tmp_path: Path) -> None:
    await source_db.execute(CUSTOMERS)
    pipeline = await anyio.to_thread.run_sync(CdcPipeline, source_db, tmp_path)
    for changes, versions in (("SELECT", 20), (FIRST, 26), (SECOND, 28)):
        for statement in changes.split(";"):
            await source_db.execute(statement)
        await anyio.to_thread.run_sync(pipeline.run)
        await compare(source_db, pipeline)
        assert len(await anyio.to_thread.run_sync(pipeline.rows, "customer_history")) == versions
