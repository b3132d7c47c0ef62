"""A search index that follows a table: filled from a snapshot, then kept up to date.

    python examples/search_index.py SOURCE_DSN PUBLICATION SLOT INDEX_FILE

The index is an SQLite file with full-text search. It stands for any engine that stores documents by key. Each change
and its position are stored in one transaction of the index, so that every change is applied exactly once, even after a
kill.

Shows: reading a snapshot first; storing the position with the effects, and resuming from it; large values that did not
change and were not sent.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from pathlib import Path

import asyncpg

import subscriber
from subscriber import UNCHANGED, Delete, Insert, Lsn, Truncate, Update

TABLE = "public.article"


class Index:
    """Documents by id, and the position up to which the index has all changes."""

    def __init__(self, path: Path) -> None:
        self.database = sqlite3.connect(path)
        self.database.executescript(
            "CREATE VIRTUAL TABLE IF NOT EXISTS article USING fts5 (title, body);"
            "CREATE TABLE IF NOT EXISTS progress (one INTEGER PRIMARY KEY CHECK (one = 1), position TEXT);"
        )

    @property
    def position(self) -> Lsn | None:
        """Return the position; None if the index has never been filled completely."""
        row = self.database.execute("SELECT position FROM progress").fetchone()
        return Lsn.parse(row[0]) if row else None

    def clear(self) -> None:
        self.database.execute("DELETE FROM article")

    def put(self, key: int, title: str, body: str | None) -> None:
        """Store a document. `body` None keeps the existing body."""
        if body is None:
            self.database.execute("UPDATE article SET title = ? WHERE rowid = ?", (title, key))
        else:
            self.delete(key)
            self.database.execute("INSERT INTO article (rowid, title, body) VALUES (?, ?, ?)", (key, title, body))

    def delete(self, key: int) -> None:
        self.database.execute("DELETE FROM article WHERE rowid = ?", (key,))

    def commit(self, position: Lsn) -> None:
        self.database.execute("INSERT OR REPLACE INTO progress VALUES (1, ?)", (str(position),))
        self.database.commit()

    def search(self, words: str) -> list[int]:
        return [key for (key,) in self.database.execute("SELECT rowid FROM article WHERE article MATCH ?", (words,))]


async def fill(index: Index, source: str, snapshot: str) -> None:
    """Store all rows as of the start of the stream."""
    connection = await asyncpg.connect(source)
    try:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            await connection.execute(f"SET TRANSACTION SNAPSHOT '{snapshot}'")
            index.clear()
            async for row in connection.cursor(f"SELECT id, title, body FROM {TABLE}"):
                index.put(row["id"], row["title"], row["body"])
    finally:
        await connection.close()


def apply(index: Index, change: subscriber.Change) -> None:
    match change:
        case Insert(relation, new) if str(relation) == TABLE:
            index.put(new["id"], new["title"], new["body"])
        case Update(relation, old, new) if str(relation) == TABLE:
            if old is not None and old["id"] != new["id"]:
                index.delete(old["id"])
            index.put(new["id"], new["title"], None if new["body"] is UNCHANGED else new["body"])
        case Delete(relation, old) if str(relation) == TABLE:
            index.delete(old["id"])
        case Truncate(relations) if TABLE in map(str, relations):
            index.clear()


async def run(source: str, publication: str, slot: str, index: Index, *, until: Lsn | None = None) -> None:
    """Follow until cancelled, or until all changes before `until` are in the index."""
    position = index.position
    async with subscriber.stream(
        source,
        slot=slot,
        # If the process was killed before the index was filled completely, the index is filled again from the
        # beginning.
        create="replace" if position is None else "never",
        publications=[publication],
        start=position or Lsn(0),
        until=until,
    ) as stream:
        if stream.snapshot is not None:
            await fill(index, source, stream.snapshot)
            index.commit(stream.position)
        async for transaction in stream:
            async for change in transaction:
                apply(index, change)
            assert transaction.end_lsn is not None
            index.commit(transaction.end_lsn)
            await transaction.ack()


if __name__ == "__main__":
    dsn, publication, slot, file = sys.argv[1:]
    asyncio.run(run(dsn, publication, slot, Index(Path(file))))
