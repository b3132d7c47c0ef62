"""Explore the interleavings of scenarios, or replay a schedule.

    python -m tests.interleavings                          all scenarios, 60 s each
    python -m tests.interleavings NAME… --seconds 600      these scenarios
    python -m tests.interleavings --stored DIRECTORY       continue what earlier runs have stored there
    python -m tests.interleavings NAME --schedule '…'      one schedule, with the log

The exit status is 1 if both sides differ after a schedule. The schedule is printed.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import anyio

from subscriber.catalog.schema import ensure_schema
from subscriber.demo.servers import temporary_servers
from tests.interleavings.scenarios import SCENARIOS
from tests.interleavings.stage import Stage, explore, run
from tests.plugins.fix_cluster import SETTINGS, Database, fresh_database
from tests.plugins.fix_subscriber import running_subscriber


async def main(names: list[str], seconds: float, depth: int, stored: Path | None, schedule: str | None) -> int:
    """Run the command. Returns its exit status."""
    tell = partial(print, flush=True)
    status = 0
    async with temporary_servers() as servers:
        publisher = await servers.create("publisher", {**SETTINGS, "wal_level": "logical"})
        await publisher.start()
        target = await servers.create("target", {**SETTINGS, "wal_level": "logical"})
        await target.start()
        for name in names:
            async with fresh_database(publisher) as source_db, fresh_database(target) as target_db:
                file = None if stored is None else stored / f"{name}.json"
                status |= await _explore(name, source_db, target_db, seconds, depth, file, schedule, tell)
    return status


async def _explore(
    name: str,
    source: Database,
    target: Database,
    seconds: float,
    depth: int,
    stored: Path | None,
    schedule: str | None,
    tell: partial[None],
) -> int:
    async with target.connection() as connection:
        await ensure_schema(connection)
    async with (
        running_subscriber(target, start=False) as subscriber,
        Stage.open(source, target, subscriber) as stage,
    ):
        if schedule is not None:
            outcome = await run(SCENARIOS[name], stage, tuple(schedule.split()))
            for choice in outcome.choices:
                tell(f"{choice.taken:40} of {', '.join(choice.options)}")
            tell(str(outcome) if outcome.differences else f"{name}: no difference")
            return bool(outcome.differences)
        result = await explore(SCENARIOS[name], stage, seconds=seconds, depth=depth, tell=tell, stored=stored)
        tell(str(result))
        return bool(result.failures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SCENARIOS))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--stored", type=Path, metavar="DIRECTORY")
    parser.add_argument("--schedule")
    given = parser.parse_args()
    sys.exit(anyio.run(main, given.names or list(SCENARIOS), given.seconds, given.depth, given.stored, given.schedule))
