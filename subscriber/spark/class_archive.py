"""The archive of Spark's classes, with which Spark starts in half of the processor time.

    subscriber prepare-spark ─▶ class_archive_builder.py ─▶ ~/.cache/subscriber/spark/….jsa ─▶ JVMs of java_runtime.py

An archive has the classes as the JVM keeps them in memory: read from the jars, parsed and verified. Java calls this
class data sharing. An archive belongs to one Java runtime and to one installation of pyspark.

**Invariants.**

- The archive is code. It is used only if no user but root and this one can write it, or replace a directory above it.
- The JVM compares the runtime, and the order, sizes and times of the jars. If they differ, it starts without the
  archive. Whatever is wrong with an archive, Spark starts.

**Failure cases.** No archive, a directory that cannot be read, an account without a home: Spark starts without one.
"""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

VARIABLE = "SUBSCRIBER_SPARK_CLASSES"
SUFFIX = ".jsa"
_LONGEST_CLASS_PATH = 100_000  # bytes; Linux limits an argument to 128 KiB


@dataclass(frozen=True, slots=True)
class ClassArchive:
    """An archive for one Java runtime and one installation of pyspark. The file may not exist.

    Attributes:
        file: its place.
        spark: the directory of pyspark.
        jars: Spark's class path, in the order of the archive.
    """

    file: Path
    spark: Path
    jars: tuple[Path, ...]

    @property
    def class_path(self) -> str:
        """The jars as an argument of Java."""
        return os.pathsep.join(map(str, self.jars))

    def is_usable(self) -> bool:
        """Return True if the file exists, and only this user and root can write or replace it."""
        try:
            return replaceable_by_others(self.file) is None and os.access(self.file, os.R_OK)
        except OSError:
            return False


def spark_directory() -> Path | None:
    """Return the directory of pyspark, with Spark's jars; None if it is not installed."""
    spec = find_spec("pyspark")
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places))) if places else None


def archive_directory() -> Path | None:
    """Return the directory of archives: $SUBSCRIBER_SPARK_CLASSES, or one in the user's cache. None: none is used."""
    given = os.environ.get(VARIABLE)
    if given is not None:
        place = Path(given)
    else:
        cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
        try:
            place = (cache if cache.is_absolute() else Path.home() / ".cache") / "subscriber" / "spark"
        except RuntimeError:  # this account has no home
            return None
    return place if place.is_absolute() else None


def class_archive(java: Path) -> ClassArchive | None:
    """Return the archive for the Java runtime in `java`; None if there can be none."""
    directory, spark = archive_directory(), spark_directory()
    if directory is None or spark is None:
        return None
    try:
        # As Spark orders them, whose launcher names the jar of slf4j first. The order of the others is any.
        jars = tuple(
            sorted((spark / "jars").glob("*.jar"), key=lambda jar: (not jar.name.startswith("slf4j-api-"), jar))
        )
        installed = int((spark / "jars").stat().st_mtime)
        runtime = f"{java.resolve()}\n{(java / 'release').read_text()}"
    except OSError:
        return None
    belongs_to = "\n".join((runtime, str(installed), *map(str, jars)))
    digest = hashlib.sha256(os.fsencode(belongs_to)).hexdigest()[:16]
    archive = ClassArchive(directory / f"{digest}{SUFFIX}", spark, jars)
    return archive if jars and len(os.fsencode(archive.class_path)) <= _LONGEST_CLASS_PATH else None


def replaceable_by_others(path: Path) -> Path | None:
    """Return `path` or the directory above it that another user than root can write; None if there is none.

    Raises OSError: `path` does not exist, or cannot be reached.
    """
    real = path.resolve(strict=True)
    for place in (real, *real.parents):
        status = place.lstat()
        shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX  # others cannot replace what is ours
        if status.st_uid not in (0, os.getuid()) or (shared and not sticky):
            return place
    return None
