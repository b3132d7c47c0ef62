"""Processor time and memory of this process and its descendants, by kind: Spark's JVMs and Python processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import sleep

from benchmarks.environment import memory

INTERVAL = 0.05  # seconds between two samples of memory
DRIVER, CHILD = "driver's Python", "child's Python"  # this process, and processes of multiprocessing


def descendants() -> list[int]:
    """Return this process and its descendants."""
    parents: dict[int, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(process.name)] = int(_stat(process)[1])
    found = [os.getpid()]
    for parent in found:
        found += [child for child, one in parents.items() if one == parent]
    return found


def spark_seconds() -> float:
    """Return the processor time of Spark's processes and of this one. Ended children of them are included."""
    found = 0.0
    for pid in descendants():
        with suppress(OSError):
            if kind_of(pid) is not None:
                found += sum(map(int, _stat(Path("/proc") / str(pid))[11:15])) / os.sysconf("SC_CLK_TCK")
    return found


def kind_of(pid: int) -> str | None:
    """Return what a descendant is; None: it is not one of Spark's processes."""
    if pid == os.getpid():
        return DRIVER
    line = (Path("/proc") / str(pid) / "cmdline").read_bytes()
    if b"pyspark.daemon" in line or b"pyspark.worker" in line:
        return "worker's Python"
    if b"spawn_main" in line:
        return CHILD
    if b"CoarseGrainedExecutorBackend" in line:
        return "executor's JVM"
    return "driver's JVM" if b"PythonGatewayServer" in line or b"pyspark-shell" in line else None


@contextmanager
def peak_memory() -> Iterator[dict[str, int]]:
    """Sample the resident memory during the block. Yields a dict, which gets the largest process of each kind."""
    found: dict[str, int] = {}
    ended = threading.Event()

    def sample() -> None:
        while not ended.is_set():
            for pid in descendants():
                with suppress(OSError, KeyError):
                    if (kind := kind_of(pid)) is not None:
                        found[kind] = max(found.get(kind, 0), memory(pid).now)
            sleep(INTERVAL)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def _stat(process: Path) -> list[str]:
    return (process / "stat").read_text().rpartition(")")[2].split()
