"""A subscription inside an async program: copy a database, follow it, and leave.

    python examples/embedded.py SOURCE_DSN TARGET_DSN PUBLICATION

Creates the subscription `embedded` if it isn't there, waits until all tables are copied and everything
committed on the publisher by then has arrived, and prints where it stands. Run it again to go on from
there. The tables must exist on the target.
"""

from __future__ import annotations

import asyncio
import sys

import asyncpg

import subscriber

NAME = "embedded"


async def follow(source: str, target: str, publication: str) -> subscriber.Lsn:
    """Bring the target up to what the source has now; the position reached."""
    async with subscriber.connect(target) as db:
        if NAME not in [subscription.name for subscription in await db.subscriptions()]:
            connection = source.replace("'", "''")
            await db.execute(f"CREATE SUBSCRIPTION {NAME} CONNECTION '{connection}' PUBLICATION {publication}")
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
