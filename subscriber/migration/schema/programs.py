"""PostgreSQL's client programs that fit both servers of a migration.

pg_dump refuses a server that is newer than itself, and pg_restore refuses an archive of a newer pg_dump. So both are
taken from one directory. The major version of the target is the best choice, because its pg_dump writes the syntax of
the target. A newer one is next, and an older one that can still read the source is the last choice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio

from subscriber.errors import SubscriberError
from subscriber.sqlstate import UNDEFINED_FILE

TIMEOUT = 10.0  # seconds for `pg_dump --version`
# Directories of packages, beside PATH. A link to the newest version may be on PATH, and older versions are here.
_PLACES = (
    ("/usr/lib/postgresql", "*/bin"),  # Debian, Ubuntu
    ("/usr", "pgsql-*/bin"),  # PostgreSQL's own RPMs
    ("/opt/homebrew/opt", "postgresql@*/bin"),
    ("/usr/local/opt", "postgresql@*/bin"),
    ("/usr/local", "pgsql/bin"),
)
_VERSION = re.compile(r"\(PostgreSQL\) (\d+)")


@dataclass(frozen=True, slots=True)
class ClientPrograms:
    """pg_dump and pg_restore of one installation."""

    directory: Path
    major: int

    @property
    def pg_dump(self) -> str:
        return str(self.directory / "pg_dump")

    @property
    def pg_restore(self) -> str:
        return str(self.directory / "pg_restore")


async def find_programs(source: int, target: int, given: Path | None = None) -> ClientPrograms:
    """Return the programs that fit best.

    Args:
        source: the major version of the source.
        target: the major version of the target.
        given: the only directory to use. None: PATH, and the directories of packages.

    Raises:
        SubscriberError: no programs can read the source. The message names the versions that were found.
    """
    return choose(await _installed([given] if given is not None else _directories()), source, target)


def choose(found: Sequence[ClientPrograms], source: int, target: int) -> ClientPrograms:
    """Return the best of the installed programs. Raises SubscriberError if none can read the source."""
    fitting = [programs for programs in found if programs.major >= source]
    if fitting:
        return min(fitting, key=lambda programs: _distance(programs.major, target))
    versions = ", ".join(f"{programs.major} in {programs.directory}" for programs in found) or "none"
    raise SubscriberError(
        f"no pg_dump of PostgreSQL {source} or newer was found",
        detail=f"Found: {versions}.",
        hint=f"Install one, for example with: apt-get install postgresql-client-{max(source, target)}. Or name its"
        " directory with --programs.",
        sqlstate=UNDEFINED_FILE,
    )


def _distance(major: int, target: int) -> tuple[bool, int]:
    """Order versions by how well they fit: the target's first, then newer ones, then older ones."""
    return major < target, abs(major - target)


def _directories() -> Iterator[Path]:
    for entry in os.environ.get("PATH", os.defpath).split(os.pathsep):
        if entry:
            yield Path(entry)
    for base, pattern in _PLACES:
        yield from sorted(Path(base).glob(pattern))


async def _installed(directories: Iterable[Path]) -> list[ClientPrograms]:
    by_directory = {}
    for directory in directories:
        if directory in by_directory or not all(
            os.access(directory / name, os.X_OK) for name in ("pg_dump", "pg_restore")
        ):
            continue
        with anyio.move_on_after(TIMEOUT):
            done = await anyio.run_process([str(directory / "pg_dump"), "--version"], check=False)
            if (version := _VERSION.search(done.stdout.decode(errors="replace"))) is not None:
                by_directory[directory] = ClientPrograms(directory, int(version[1]))
    return list(by_directory.values())
