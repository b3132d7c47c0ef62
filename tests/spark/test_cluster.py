"""A standalone master with two workers, whose executors have only the code that the driver sends.

All processes run on one machine. But executors have their own directories and their own Python, with asyncpg and anyio,
and without this package and pyspark, which their own Spark provides. That Python writes a record when it starts, which
proves that it was used.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest

from subscriber.demo.processes import Process
from subscriber.demo.spark_cluster import standalone
from subscriber.spark.copy.job import copy_tables
from subscriber.spark.java_runtime import java_home
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriber
from tests.spark.test_copy import PART, Pair

LIBRARIES = ("asyncpg", "anyio")
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
async def test_a_standalone_cluster_copies_and_compares(
    source_db: Database, target_db: Database, subscriber: Subscriber, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(java_home(tmp_path)))
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    python = bare_python(tmp_path / "bare")
    assert [can_import(python, name) for name in (*LIBRARIES, "subscriber", "pyspark")] == [True, True, False, False]
    monkeypatch.setenv("PYSPARK_PYTHON", str(python))
    started = tmp_path / "bare" / "started"
    started.write_text("")
    pair = Pair(source_db, target_db, subscriber)
    await pair.subscribe(enabled=False)
    async with standalone(tmp_path) as master:
        tables = await copy_tables(target_db.dsn(), "s", master=master, part_bytes=PART)
        used = [name for name in ("one", "two") if list((tmp_path / name).glob("app-*"))]
        assert {table.parts_done - table.parts for table in tables} == {0}
        assert used == ["one", "two"]
        assert "pyspark.daemon" in started.read_text()
        await pair.hand_over()
        rows = await pair.assert_same()
        assert rows["big"] == 20_000

        started.write_text("")
        command = [sys.executable, "-m", "subscriber", "verify", "s", "--target", target_db.dsn(), "--master", master]
        verify = Process("verify", command, tmp_path)
        verify.start()
        assert await verify.wait() == 0, verify.last_lines()
        assert "pyspark.daemon" in started.read_text()
