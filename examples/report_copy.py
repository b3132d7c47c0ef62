"""A copy of some tables in an SQLite file, without private columns: for reports, or a laptop.

    python examples/report_copy.py SOURCE_DSN PUBLICATION FILE

Runs until Ctrl-C, and resumes at the next start, even after a kill. Readers of the file see whole transactions of the
publisher. The publication has the table `customer`; its other tables are copied unchanged.

Shows: a mirror; hooks for a mirror; retry when a server is unreachable.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import subscriber
from subscriber import ConnectionLost, Hook, Hooks, Lsn

SLOT = "report_copy"
AGAIN = 5.0  # seconds until the next attempt

# Of customers, keep only the city and the date since when they are customers.
HOOKS = Hooks({"customer": Hook(keep=["id", "city", "since"])})


async def run(source: str, publication: str, file: Path, *, until: Lsn | None = None) -> None:
    """Copy and follow until cancelled, or until all changes before `until` are in the file.

    Permanent errors are raised: a table without a key, a lost slot, a full disk.
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
