"""Cache invalidation: drop entries when their rows change, no matter which program changed them.

    python examples/cache_invalidation.py SOURCE_DSN PUBLICATION

Keeps a dictionary of rows by table and key, filled on demand, and drops an entry when its row changes. The slot is
temporary: a cache starts empty and needs no history.

Shows: a stream with a temporary slot; the key before a change; TRUNCATE.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import asyncpg

import subscriber
from subscriber import Delete, Insert, Truncate, Update

Key = tuple[Any, ...]


class Cache:
    """Rows by table and primary key."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._rows: dict[str, dict[Key, dict[str, Any]]] = {}

    async def get(self, table: str, **key: Any) -> dict[str, Any] | None:
        """Return a row, from the database if it is not cached. None if it does not exist."""
        rows = self._rows.setdefault(table, {})
        wanted = tuple(key.values())
        if wanted not in rows:
            row = await self._load(table, key)
            if row is None:
                return None
            rows[wanted] = row
        return rows[wanted]

    async def _load(self, table: str, key: dict[str, Any]) -> dict[str, Any] | None:
        connection = await asyncpg.connect(self._source)
        try:
            where = " AND ".join(f"{name} = ${number}" for number, name in enumerate(key, 1))
            row = await connection.fetchrow(f"SELECT * FROM {table} WHERE {where}", *key.values())
            return None if row is None else dict(row)
        finally:
            await connection.close()

    async def follow(self, publication: str, *, ready: asyncio.Event | None = None) -> None:
        """Drop rows as they change, until cancelled.

        Entries that were cached before the stream began may be out of date.
        """
        async with subscriber.stream(self._source, publications=[publication]) as stream:
            self._rows.clear()
            if ready is not None:
                ready.set()
            async for transaction in stream:
                async for change in transaction:
                    match change:
                        case Insert() | Update() | Delete():
                            self._rows.get(str(change.relation), {}).pop(tuple(change.key.values()), None)
                        case Truncate(relations):
                            for relation in relations:
                                self._rows.pop(str(relation), None)
                await transaction.ack()


if __name__ == "__main__":
    asyncio.run(Cache(sys.argv[1]).follow(sys.argv[2]))
