"""A copy of some tables in a file of SQLite, without what is nobody's business there: for reports, or a laptop.

    python examples/report_copy.py SOURCE_DSN PUBLICATION FILE

Runs until Ctrl-C, and goes on from where it was the next time, killed or not. Whoever reads the file sees whole
transactions of the publisher. The publication has the table `customer`; others in it come as they are.

Shows: a mirror; hooks for it; beginning again when a server is away.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import subscriber
from subscriber import ConnectionLost, Hook, Hooks, Lsn

SLOT = "report_copy"
AGAIN = 5.0  # seconds until the next attempt

# Of customers only where they live, and since when they are there.
HOOKS = Hooks({"customer": Hook(keep=["id", "city", "since"])})


async def run(source: str, publication: str, file: Path, *, until: Lsn | None = None) -> None:
    """Copy and follow until cancelled, or everything before `until` is in the file.

    What will not pass by itself is raised: a table without a key, a slot that is gone, a disk that is full.
    """
    while True:
        try:
            await subscriber.mirror(
                source,
                slot=SLOT,
                publications=[publication],
                target=f"sqlite+aiosqlite:///{file}",
                hooks=HOOKS,
                until=until,
            )
            return
        except ConnectionLost as error:
            print(f"{error}; again in {AGAIN:.0f} s", file=sys.stderr)
            await asyncio.sleep(AGAIN)


if __name__ == "__main__":
    dsn, publication, path = sys.argv[1:]
    asyncio.run(run(dsn, publication, Path(path)))
