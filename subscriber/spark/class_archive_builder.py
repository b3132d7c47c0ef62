"""Makes the archive of Spark's classes: see class_archive.py.

    a session that does what our jobs do ─▶ the list of its classes ─▶ java -Xshare:dump ─▶ checked, renamed

**Invariants.**

- A file has the name of an archive only if the JVM has accepted it, and its contents are on disk.
- One process makes archives at a time. Others wait, and find the archive.
- The newest archives of the directory are kept, so that upgrades do not fill the disk.

**Failure cases.** Killed, disk full: the file has no name of an archive. The next process that makes one removes it.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from subscriber.errors import SubscriberError
from subscriber.spark.class_archive import SUFFIX, VARIABLE, ClassArchive, class_archive, replaceable_by_others
from subscriber.spark.environment import environment_variables
from subscriber.spark.java_runtime import find_java
from subscriber.spark.session import QUICK, spark_session
from subscriber.spark.tasks import run_tasks, run_tasks_of_rows
from subscriber.spark.work_directory import create_work_directory, remove_work_directory
from subscriber.sqlstate import INSUFFICIENT_PRIVILEGE, IO_ERROR, OBJECT_NOT_IN_PREREQUISITE_STATE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

KEPT = 3  # archives in a directory, of 200 MB each
_UNFINISHED = ".unfinished"
_LIMIT = 600.0  # seconds of the JVM that writes the archive, which takes 20 to 30


def create_class_archive() -> Path:
    """Make the archive of Spark's classes for the present Java runtime and pyspark, unless there is one.

    This process must have no Spark session. It takes a minute.

    Returns:
        The file of the archive.

    Raises:
        SubscriberError: pyspark or Java is missing, the directory cannot be written or others can write it, the
            disk is full, or the Java runtime makes no archives.
    """
    java = find_java()
    archive = class_archive(java)
    if archive is None:
        raise SubscriberError(
            "Spark's classes cannot be stored",
            detail=f"{VARIABLE} is empty or no absolute path, pyspark is not installed, or its path is too long.",
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )
    try:
        with _lock(archive.file.parent):
            if not (archive.is_usable() and _is_accepted(java, archive, archive.file)):
                _make(java, archive)
    except OSError as error:
        raise SubscriberError(
            f"could not store Spark's classes in {archive.file.parent}: {error.strerror}",
            hint=f"{VARIABLE} names another directory.",
            sqlstate=IO_ERROR,
        ) from error
    return archive.file


@contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """Create the directory for this user only, and keep other processes from it for the block."""
    for missing in [place for place in (*reversed(directory.parents), directory) if not place.exists()]:
        missing.mkdir(mode=0o700, exist_ok=True)
    if (shared := replaceable_by_others(directory)) is not None:
        raise SubscriberError(
            f"Spark's classes are not stored in {directory}",
            detail=f"Another user can write {shared}, and so exchange the code that Spark runs.",
            hint=f"{VARIABLE} names another directory.",
            sqlstate=INSUFFICIENT_PRIVILEGE,
        )
    lock = os.open(directory / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _make(java: Path, archive: ClassArchive) -> None:
    directory = archive.file.parent
    # Not the name that a killed process used: its JVM may still be writing.
    unfinished = archive.file.with_suffix(f".{os.getpid()}{_UNFINISHED}")
    work = create_work_directory()
    try:
        classes = work / "classes"
        _list_classes(classes)
        _java(java, archive, unfinished, "-Xshare:dump", f"-XX:SharedClassListFile={classes}")
        if not _is_accepted(java, archive, unfinished):
            raise SubscriberError("the Java runtime does not accept its archive of classes", sqlstate=IO_ERROR)
        _sync(unfinished)
        unfinished.rename(archive.file)
    finally:
        for left in directory.glob(f"*{_UNFINISHED}"):
            left.unlink()
        remove_work_directory(work)
    newest = sorted(directory.glob(f"*{SUFFIX}"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in newest[KEPT:]:
        file.unlink()


def _list_classes(classes: Path) -> None:
    """Write the names of the classes that a session loads for the kinds of work of our jobs."""
    options = f"{QUICK} -XX:DumpLoadedClassList={classes}"
    # The list has all classes only without an archive.
    with environment_variables({VARIABLE: ""}), spark_session(master="local[2]", java_options=options) as spark:
        run_tasks(spark, hex, [1, 2])
        run_tasks_of_rows(spark, hex, [1, 2])
        rows = spark.range(4).selectExpr("id % 2 AS key", "cast(id AS string) AS value").repartition(2, "key")
        rows.groupBy("key").count().collect()
        stream = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 2).load()
        writer = stream.writeStream.foreachBatch(_count).trigger(availableNow=True)
        writer.option("checkpointLocation", str(classes.with_name("checkpoint"))).start().awaitTermination()


def _count(batch: DataFrame, _: int) -> None:
    batch.count()


def _is_accepted(java: Path, archive: ClassArchive, file: Path) -> bool:
    """Return True if a JVM starts with the file and nothing else, and its checksums are right."""
    try:
        _java(java, archive, file, "-Xshare:on", "-XX:+VerifySharedSpaces", "-version")
    except SubscriberError:
        return False
    return True


def _java(java: Path, archive: ClassArchive, file: Path, *options: str) -> None:
    command = [str(java / "bin" / "java"), "-cp", archive.class_path, f"-XX:SharedArchiveFile={file}", *options]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    with process:
        try:
            output, _ = process.communicate(timeout=_LIMIT)
        except subprocess.TimeoutExpired:
            output = f"It ran longer than {_LIMIT:.0f} s."
        finally:
            process.kill()
    if process.returncode != 0:
        raise SubscriberError(
            f"the Java runtime in {java} cannot store Spark's classes",
            detail=(output.strip().splitlines() or ["It printed nothing."])[-1],
            sqlstate=IO_ERROR,
        )


def _sync(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
