"""A subscription inside an async program: copy a database, follow it, and end.

    python examples/embedded.py SOURCE_DSN TARGET_DSN PUBLICATION

Creates the subscription `embedded` if it does not exist. Waits until all tables are copied and all transactions that
are committed by then on the publisher have arrived, and prints the position. Run it again to resume from there. The
tables must exist on the target.
"""

from __future__ import annotations

import asyncio
import sys

import asyncpg

import subscriber

NAME = "embedded"


async def follow(source: str, target: str, publication: str) -> subscriber.Lsn:
    """Bring the target up to the source's current position. Returns that position."""
    async with subscriber.connect(target) as db:
        await db.create_subscription(NAME, source=source, publications=[publication], exist_ok=True)
        async with db.running():
            await db.wait_for_sync(NAME)
            position = await current_position(source)
            await db.wait_for_lsn(NAME, position)
    return position


async def current_position(source: str) -> subscriber.Lsn:
    publisher = await asyncpg.connect(source)
    try:
        return subscriber.Lsn.parse(await publisher.fetchval("SELECT pg_current_wal_lsn()::text"))
    finally:
        await publisher.close()


if __name__ == "__main__":
    print(f"the target has everything up to {asyncio.run(follow(*sys.argv[1:4]))}")
