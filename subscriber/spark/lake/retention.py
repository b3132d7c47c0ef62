"""What a lake forgets: positions that are older than a limit, with the rows and changes that only they need.

**Invariants.**

- The newest position stays, and each one that is younger than the limit: its tables can be read.
- Positions go first, then what only they need. So a reader finds no position whose rows are gone.
- Files of a table stay MARGIN longer than the positions, because the clock of the storage may differ from ours.

**Failure cases.**

- Killed in the middle: the next call does the rest. What goes depends on the oldest position that is left.
- Table that cannot be cleaned up: the error is returned, and the other tables are cleaned up.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from subscriber.changelog.storage import directory_names, modified_times, remove_directory
from subscriber.errors import ApplyError
from subscriber.lsn import Lsn
from subscriber.spark.lake.lake import BOUNDARIES, Lake, boundary_file

HOUR = 3600.0
MARGIN = HOUR


@dataclass(slots=True)
class ForgottenPositions:
    """The removed positions and files of tables. `errors` has the errors of tables, by label."""

    positions: int = 0
    files: int = 0
    errors: dict[str, ApplyError] = field(default_factory=dict)


def forget_older(lake: Lake, age: float, margin: float = MARGIN) -> ForgottenPositions:
    """Remove the positions that were added more than `age` seconds ago, and what only they need.

    Args:
        lake: the lake, which this process has locked.
        age: in seconds.
        margin: seconds that files stay longer than positions.

    Returns:
        What was removed.
    """
    done = ForgottenPositions()
    oldest = _forget_positions(lake, time.time() - age, done)
    history = lake.directory / "history"
    for name in directory_names(history):
        if name.startswith("upto=") and int(name.removeprefix("upto="), 16) <= oldest:
            remove_directory(history / name)
    hours = math.ceil((age + margin) / HOUR)
    for label, state in lake.store.states().items():
        if not state.is_present and not state.has(oldest):
            lake.store.remove(label)
            continue
        lake.store.forget_versions(label, oldest)
        if state.version is None and not lake.store.versions(label):
            continue
        try:
            with lake.store.storing():
                versions = frozenset(version.version for version in lake.store.versions(label))
                done.files += lake.store.open(label).clean_up(hours, versions)
        except ApplyError as error:
            done.errors[label] = error
    return done


def _forget_positions(lake: Lake, before: float, done: ForgottenPositions) -> Lsn:
    """Remove the positions that were added before a time, in seconds since 1970. Returns the oldest that is left."""
    positions = lake.boundaries()
    added = modified_times(lake.directory / BOUNDARIES)
    while len(positions) > 1 and added[boundary_file(lake.directory, positions[0]).name] < before:
        boundary_file(lake.directory, positions.pop(0)).unlink()
        done.positions += 1
    return positions[0]
