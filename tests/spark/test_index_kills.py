"""Kills while `subscriber copy --indexes` builds indexes: afterwards rows are exact, and all indexes are valid."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import anyio
import pytest

from subscriber.demo.processes import Process
from tests.plugins.fix_cluster import Database
from tests.spark.test_copy import Pair, pair

__all__ = ["pair"]

# Building the index with slow() takes half a minute on a target with a table `shut`. The kill happens meanwhile.
SLOW = """
CREATE FUNCTION slow(i int) RETURNS int IMMUTABLE LANGUAGE plpgsql AS $$
  BEGIN IF EXISTS (SELECT FROM pg_class WHERE relname = 'shut') THEN PERFORM pg_sleep(0.001); END IF; RETURN i; END $$;
"""
INDEXES = (
    "CREATE INDEX a_first ON big (lower(note)) WHERE a > 3",
    "CREATE INDEX b_slow ON big (slow(id), a DESC)",
    "CREATE UNIQUE INDEX c_last ON big (price, id) INCLUDE (a)",
    'CREATE INDEX words ON "Odd ""one" USING gin (words)',
    "CREATE INDEX no_key_both ON no_key (a, b)",
)
DEFINITIONS = """
SELECT i.relname::text, pg_get_indexdef(i.oid), x.indisvalid AND x.indisready AND x.indislive
  FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid WHERE i.relnamespace = 'public'::regnamespace ORDER BY 1
"""
# Raises for an index that is damaged, or lacks a row of its table.
CHECK = """
SELECT bt_index_check(i.oid, true)
  FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid JOIN pg_am m ON m.oid = i.relam
 WHERE i.relnamespace = 'public'::regnamespace AND m.amname = 'btree' AND i.relkind = 'i'
"""
BUILDING = (
    "SELECT count(*) > 0 FROM pg_stat_progress_create_index WHERE datname = current_database()"
    " AND index_relid NOT IN (SELECT indexrelid FROM pg_index) AND phase <> 'initializing'"
)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["the command", "target", "publisher"])
async def test_a_command_killed_while_it_builds_indexes_continues(pair: Pair, tmp_path: Path, victim: str) -> None:
    await pair.subscribe(enabled=False)
    await pair.source.execute(SLOW, *INDEXES)
    await pair.target.execute(SLOW, "CREATE TABLE shut ()", "CREATE EXTENSION amcheck")
    command = [sys.executable, "-m", "subscriber", "copy", "s", "--indexes", "--target", pair.target.dsn()]
    process = Process("copy", command, tmp_path)
    process.start()
    try:
        await pair.target.wait_for(BUILDING, timeout=120)
        await anyio.sleep(random.random())
        if victim == "the command":
            await process.kill9()
        else:
            server = (pair.target if victim == "target" else pair.source).server
            await server.kill9()
            await server.start()
            if victim == "publisher":  # it is queried again only for the next table
                await no_longer_slow(pair.target)
            assert await process.wait() == 3, process.last_lines()
        await no_longer_slow(pair.target)
        # The end of the killed process is noticed within a second. Until then, its lock is still held.
        with anyio.fail_after(15):
            while (status := await again(process)) == 3 and "another process" in process.last_lines(2):
                await anyio.sleep(0.2)
        assert status == 0, process.last_lines()
    finally:
        await process.stop()
    assert await pair.target.rows("SELECT DISTINCT srsubstate::text FROM subscriber.subscription_rel") == [("f",)]
    await pair.hand_over()
    published = await pair.source.rows(DEFINITIONS)
    assert {name for name, _, _ in published} >= {"a_first", "b_slow", "c_last", "words", "no_key_both"}
    assert await pair.target.rows(DEFINITIONS) == published
    assert len(await pair.target.rows(CHECK)) == len(published) - 2  # one is of a partitioned table, one is no btree
    rows = await pair.assert_same()
    assert rows["big"] == 20_000


async def no_longer_slow(target: Database) -> None:
    await target.execute("DROP TABLE IF EXISTS shut")


async def again(process: Process) -> int:
    process.start()
    return await process.wait()
