"""A standalone master with two workers, whose executors have only the code that the driver sends.

All processes run on one machine. But executors have their own directories and their own Python, with asyncpg, anyio and
pyarrow, and without this package and pyspark, which their own Spark provides. That Python writes a record when it
starts, which proves that it was used.
"""

from __future__ import annotations

import subprocess
import venv
from importlib.util import find_spec
from pathlib import Path

import anyio.to_thread
import pytest

from subscriber.demo.spark_cluster import standalone
from subscriber.spark.java_runtime import java_home
from subscriber.spark.session import spark_session
from subscriber.spark.sources.pgsnapshot import exported_snapshot, register
from tests.plugins.fix_cluster import Database

LIBRARIES = ("asyncpg", "anyio", "pyarrow")
THEIR_OWN = ("idna", "sniffio", "typing_extensions")  # their dependencies


def bare_python(directory: Path) -> Path:
    """Create an interpreter with only LIBRARIES, which appends its command line to the file `started` at each start."""
    venv.create(directory, symlinks=True)
    packages = next((directory / "lib").glob("python*/site-packages"))
    for name in (*LIBRARIES, *THEIR_OWN):
        if (spec := find_spec(name)) is not None and spec.origin is not None:
            origin = Path(spec.origin)
            origin = origin.parent if origin.name == "__init__.py" else origin
            (packages / origin.name).symlink_to(origin)
    (packages / "sitecustomize.py").write_text(
        f"import sys\nwith open({str(directory / 'started')!r}, 'a') as file:\n    print(*sys.orig_argv, file=file)\n"
    )
    return directory / "bin" / "python"


def can_import(python: Path, name: str) -> bool:
    return (
        subprocess.run([python, "-I", "-c", f"import {name}"], stderr=subprocess.DEVNULL, check=False).returncode == 0
    )


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_a_standalone_cluster_reads_a_table(
    source_db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(java_home(tmp_path)))
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    python = bare_python(tmp_path / "bare")
    assert [can_import(python, name) for name in (*LIBRARIES, "subscriber", "pyspark")] == [
        True,
        True,
        True,
        False,
        False,
    ]
    monkeypatch.setenv("PYSPARK_PYTHON", str(python))
    started = tmp_path / "bare" / "started"
    await source_db.execute(
        "CREATE TABLE big (id int PRIMARY KEY, note text)",
        "INSERT INTO big SELECT i, repeat('x', 100) FROM generate_series(1, 20000) i",
    )

    def read(master: str) -> int:
        with spark_session(master=master) as spark, exported_snapshot(source_db.dsn()) as snapshot:
            register(spark)
            options = {**snapshot, "table": "public.big", "partitions": "8"}
            frame = spark.read.format("pgsnapshot").options(**options).load()
            return int(frame.selectExpr("sum(id + length(note))").collect()[0][0])

    async with standalone(tmp_path) as master:
        assert await anyio.to_thread.run_sync(read, master) == 20_000 * 20_001 // 2 + 20_000 * 100
        assert [name for name in ("one", "two") if list((tmp_path / name).glob("app-*"))] == ["one", "two"]
        assert "pyspark.daemon" in started.read_text()
