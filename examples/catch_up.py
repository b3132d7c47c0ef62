"""A bounded catch-up: print the changes since the last run, and end.

    python examples/catch_up.py SOURCE_DSN PUBLICATION SLOT > changes.jsonl

For a job that runs every hour. It stops at the position that the publisher had when the job started, so that it ends
even if the publisher is busy. Later changes are for the next run. Prints a JSON line for each change.

Shows: `until`; values as the publisher's text; NULL, unchanged and unsent values.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable

import asyncpg

import subscriber
from subscriber import Delete, Insert, Lsn, Missing, Row, Update


async def current_position(source: str) -> Lsn:
    connection = await asyncpg.connect(source)
    try:
        return Lsn.parse(await connection.fetchval("SELECT pg_current_wal_lsn()::text"))
    finally:
        await connection.close()


def as_json(row: Row | None) -> dict[str, str | None] | None:
    """Return the sent columns as text. NULL is null, and columns that were not sent are missing."""
    if row is None:
        return None
    return {name: value for name, value in row.texts().items() if not isinstance(value, Missing)}


async def run(source: str, publication: str, slot: str, write: Callable[[str], None]) -> int:
    """Write the changes up to now. Returns their number."""
    count = 0
    until = await current_position(source)
    async with subscriber.stream(
        source, slot=slot, create="missing", publications=[publication], until=until
    ) as stream:
        async for transaction in stream:
            async for change in transaction:
                if isinstance(change, Insert | Update | Delete):
                    count += 1
                    line = {"op": change.kind, "table": str(change.relation), "xid": transaction.xid}
                    write(json.dumps({**line, "old": as_json(change.old), "new": as_json(change.new)}))
            await transaction.ack()
    return count


def to_stdout(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()  # before the transaction is acknowledged


if __name__ == "__main__":
    dsn, publication, slot = sys.argv[1:]
    asyncio.run(run(dsn, publication, slot, to_stdout))
