"""Copies by ranges of keys of all types, also if only the publisher can compare them."""

from __future__ import annotations

import random
from contextlib import suppress

import anyio
import anyio.lowlevel

from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriber
from tests.ranges.copies import (
    COLLISIONS,
)

# Table -> the definition of its key k, and a value of it for the number i.
KEYS = {
    "texts": ('k text COLLATE "C"', "chr(64 + {0} % 60) || {0}"),
    "numbers": ("k numeric", "{} / 7.0"),
    "moments": ("k timestamptz", "timestamptz '2000-01-01 BC' + {} * interval '1 day 1 microsecond'"),
    "bytes": ("k bytea", "decode(md5({}::text), 'hex')"),
    # Only the publisher can compare these.
    "words": ('k text COLLATE "C.utf8", d int DEFAULT 7', "md5({0}::text)"),
    "labels": ("k label", "('l' || {0})::label"),
    "composites": ("k varchar COLLATE \"POSIX\", d date DEFAULT '2020-01-01'", "md5({}::text)"),
}


async def write_keys(source: Database, stop: anyio.Event) -> None:
    """Change rows of the tables of KEYS, and move their keys."""
    chance = random.Random(8)
    async with source.connection() as connection:
        while not stop.is_set():
            for table, (_, key) in KEYS.items():
                one, other = key.format(chance.randrange(300)), key.format(chance.randrange(350))
                with suppress(*COLLISIONS):
                    await connection.execute(f"UPDATE {table} SET n = n + 1 WHERE k = {one}")
                    await connection.execute(f"UPDATE {table} SET k = {other} WHERE k = {one}")
                await connection.execute(f"DELETE FROM {table} WHERE k = {key.format(chance.randrange(300))}")
            await anyio.sleep(0.01)


async def test_tables_with_keys_of_any_type_are_copied_by_ranges(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    labels = [f"'l{number}'" for number in range(351)]
    random.Random(9).shuffle(labels)
    await source_db.execute(f"CREATE TYPE label AS ENUM ({', '.join(labels)})")
    await target_db.execute(
        "CREATE TYPE unrelated AS ENUM ()", f"CREATE TYPE label AS ENUM ({', '.join(sorted(labels))})"
    )
    for table, (columns, key) in KEYS.items():
        keys = ", ".join(column.split()[0] for column in columns.split(", "))
        definition = f"CREATE TABLE {table} ({columns}, n int, PRIMARY KEY ({keys}))"
        await source_db.execute(
            definition, f"INSERT INTO {table} (k, n) SELECT {key.format('i')}, i FROM generate_series(1, 300) i"
        )
        await target_db.execute(definition.replace(' COLLATE "C"', ""))
    await source_db.execute("ALTER TABLE numbers REPLICA IDENTITY FULL", "CREATE PUBLICATION p FOR ALL TABLES")
    stop = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write_keys, source_db, stop)
        await subscriber.create(source_db, "p", "s", copy_engine="ranges")
        await source_db.execute("TRUNCATE texts", "INSERT INTO texts VALUES ('z', 1), ('Z', 2)")
        await subscriber.wait_for_ready(source_db, timeout=60)
        stop.set()
    await source_db.wait_for_catchup("s")
    for table in KEYS:
        rows = f"SELECT t::text FROM {table} t ORDER BY 1"
        assert await target_db.rows(rows) == await source_db.rows(rows), table
    assert not subscriber.log.has("copied in one snapshot")
    assert not subscriber.log.has("ERROR")
