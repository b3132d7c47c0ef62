"""Recordings of real servers: pgoutput messages, one `lsn hex` on each line. record.py creates them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from subscriber.lsn import Lsn

DIRECTORY = Path(__file__).parent


@dataclass(frozen=True, slots=True, eq=False)  # each is one file: identity is enough, and hashes
class Capture:
    """One recording: everything one slot sent of the same work, with one set of options."""

    name: str  # pg<major>-<mode>
    options: dict[str, str]  # of pgoutput
    messages: tuple[tuple[Lsn, bytes], ...]  # as sent; the position is the one the envelope would have

    @property
    def major(self) -> int:
        return int(self.name[2:4])

    @property
    def parallel(self) -> bool:
        """Return True if STREAM ABORT has its two additional fields."""
        return self.options.get("streaming") == "parallel"


@cache
def captures() -> tuple[Capture, ...]:
    """Return all recordings, ordered by name."""
    return tuple(_read(path) for path in sorted(DIRECTORY.glob("*.hex")))


def _read(path: Path) -> Capture:
    options: dict[str, str] = {}
    messages = []
    for line in path.read_text().splitlines():
        if line.startswith("# option "):
            name, value = line.removeprefix("# option ").split(" ", 1)
            options[name] = value
        elif not line.startswith("#"):
            lsn, data = line.split()
            messages.append((Lsn.parse(lsn), bytes.fromhex(data)))
    return Capture(path.stem, options, tuple(messages))
