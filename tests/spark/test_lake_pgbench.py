"""pgbench writes continuously. At five positions the Delta tables equal a snapshot of the source."""

from __future__ import annotations

import random
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from pyspark.sql import SparkSession

from subscriber.demo.processes import Process
from subscriber.lsn import Lsn
from subscriber.publisher.connection import Publisher
from subscriber.spark.lake.lake import Lake
from subscriber.spark.lake.load import load
from tests.plugins.fix_cluster import Database
from tests.spark.scene import Scene

Rows = Counter[tuple[Any, ...]]

TABLES = ("toasted", "pgbench_accounts", "pgbench_branches", "pgbench_tellers", "pgbench_history")
# big is stored outside the row and hardly compresses. Updates of others leave it out, also those of the key.
TOASTED = """
CREATE FUNCTION big(int) RETURNS text LANGUAGE sql
    AS 'SELECT string_agg(md5(($1 * i)::text), '''') FROM generate_series(1, 300) i';
CREATE TABLE toasted (id int PRIMARY KEY, number bigint NOT NULL, big text, small text);
INSERT INTO toasted SELECT i, 0, big(i), 'small' FROM generate_series(1, 200) i;
"""
SCRIPT = r"""
\set id random(1, 200)
\set seed random(1, 1000000)
\set kind random(1, 5)
\if :kind = 1
UPDATE toasted SET big = big(:seed) WHERE abs(id) = :id;
\elif :kind = 2
UPDATE toasted SET number = number + 1 WHERE abs(id) = :id;
\elif :kind = 3
UPDATE toasted SET id = -id WHERE abs(id) = :id;
\elif :kind = 4
BEGIN;
UPDATE toasted SET id = -id, small = NULL WHERE abs(id) = :id;
UPDATE toasted SET number = number + :seed WHERE abs(id) = :id;
COMMIT;
\else
BEGIN;
DELETE FROM toasted WHERE abs(id) = :id;
INSERT INTO toasted VALUES (:id, :seed, big(:id), E'tab\t, back\\slash');
COMMIT;
\endif
"""


@asynccontextmanager
async def pgbench(source: Database, directory: Path) -> AsyncIterator[None]:
    """Run pgbench's own transactions and those above during the block, from two clients."""
    script = directory / "toasted.sql"
    script.write_text(SCRIPT)
    options = ["--client=2", "--time=3600", "--rate=300", "--no-vacuum", "--username=postgres"]
    what = ["--builtin=tpcb-like@1", f"--file={script}@2", "--host=127.0.0.1", f"--port={source.server.port}"]
    process = Process("pgbench", [str(source.server.bin / "pgbench"), *options, *what, source.name], directory)
    process.start()
    try:
        yield
        assert process.pid is not None, process.last_lines()
    finally:
        await process.stop()


async def snapshot(source: Database) -> tuple[Lsn, dict[str, Rows]]:
    """Return a position, and all rows as of it."""
    publisher = await Publisher.connect(source.dsn(), application_name="test")
    try:
        slot = await publisher.create_slot(f"test_{secrets.token_hex(4)}", snapshot="export", temporary=True)
        async with source.connection() as one, one.transaction(isolation="repeatable_read", readonly=True):
            await one.execute(f"SET TRANSACTION SNAPSHOT '{slot.snapshot_name}'")
            rows = {table: Counter(map(tuple, await one.fetch(f"SELECT * FROM {table}"))) for table in TABLES}
        return slot.consistent_point, rows
    finally:
        publisher.session.abort()


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_delta_tables_are_the_source_at_five_random_positions(
    source_db: Database, tmp_path: Path, spark: SparkSession
) -> None:
    lake, scene = Lake(tmp_path / "lake"), Scene(source_db, tmp_path)
    await source_db.server.program("pgbench", "-i", "-q", dbname=source_db.name)
    await source_db.execute(TOASTED, f"CREATE PUBLICATION p FOR TABLE {', '.join(TABLES)}")
    await scene.archive()
    seen: dict[Lsn, dict[str, Rows]] = {}
    async with pgbench(source_db, tmp_path):
        await load(lake, scene.log, source_db.dsn())
        for _ in range(5):
            await anyio.sleep(random.uniform(1.0, 5.0))
            position, rows = await snapshot(source_db)
            seen[position] = rows
            await scene.archive()
            while (batch := lake.next_batch(scene.log, position)) is not None:
                await anyio.to_thread.run_sync(partial(lake.advance, spark, scene.log, *batch, history=False))
    for position, rows in seen.items():
        for table in TABLES:
            rows_read = lake.table(f"public.{table}", position).to_pyarrow_table().to_pylist()
            assert Counter(tuple(row.values()) for row in rows_read) == rows[table], (table, position)
    changed = [rows["toasted"] for rows in seen.values()]
    assert all(before != after for before, after in pairwise(changed))
