"""Copies by ranges that are killed, beside a synchronous standby that delays and writers of all kinds."""

from __future__ import annotations

import os
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import pytest

from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Program, Subscriptions
from tests.ranges.copies import (
    COLLISIONS,
    FILL,
    closing_program,
    prepare,
    same,
    watch_snapshots,
    write,
)
from tests.synchronous import release_commits


async def delay_commits(source: Database, stop: anyio.Event, longest: float) -> None:
    """Let commits wait for a synchronous standby, again and again, for up to `longest` seconds."""
    chance = random.Random(5)
    async with source.connection() as connection:
        try:
            while not stop.is_set():
                await connection.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
                await connection.execute("SELECT pg_reload_conf()")
                await anyio.sleep(chance.uniform(0.1, longest))
                await release_commits(connection)
                await anyio.sleep(chance.uniform(0.05, 0.3))
        finally:
            with anyio.CancelScope(shield=True):
                await release_commits(connection)


async def prepare_transactions(source: Database, table: str, stop: anyio.Event) -> None:
    """Keep transactions prepared for a while. Some change a large value's row, some move keys, some roll back."""
    chance, number = random.Random(6), 0
    async with source.connection() as connection:
        while not stop.is_set():
            number += 1
            gid = f"{table}_{number}"
            one = chance.randrange(1, 1000)
            await connection.execute("BEGIN")
            try:
                await connection.execute(f"UPDATE {table} SET n = n + 1 WHERE id BETWEEN {one} AND {one + 3}")
            except COLLISIONS:
                await connection.execute("ROLLBACK")
                continue
            await connection.execute(f"PREPARE TRANSACTION '{gid}'")
            await anyio.sleep(chance.uniform(0.05, 0.4))
            await connection.execute(f"{'COMMIT' if number % 3 else 'ROLLBACK'} PREPARED '{gid}'")


async def truncate(source: Database, table: str, stop: anyio.Event) -> None:
    """Replace all rows of a table, in one transaction and in two."""
    chance = random.Random(7)
    async with source.connection() as connection:
        while not stop.is_set():
            await anyio.sleep(chance.uniform(0.3, 0.8))
            with suppress(*COLLISIONS):
                if chance.random() < 0.5:
                    await connection.execute(f"TRUNCATE {table}")
                    await connection.execute(FILL.format(table, 700) + " ON CONFLICT DO NOTHING")
                else:
                    async with connection.transaction():
                        await connection.execute(f"TRUNCATE {table}")
                        await connection.execute(FILL.format(table, 700))


UNCOPIED = "SELECT count(*) FROM subscriber.subscription_rel WHERE srsubstate NOT IN ('s', 'r')"


@asynccontextmanager
async def hostile_writing(source: Database, longest: float, pause: float) -> AsyncIterator[list[float]]:
    """Everything that can go wrong with tables t, u and v, for the length of the block. Yields watch_snapshots()."""
    stop, ages = anyio.Event(), list[float]()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch_snapshots, source, stop, ages)
        for seed, table in enumerate(("t", "u", "v")):
            tasks.start_soon(write, source, table, seed, stop, pause)
        tasks.start_soon(prepare_transactions, source, "t", stop)
        tasks.start_soon(prepare_transactions, source, "u", stop)
        tasks.start_soon(truncate, source, "v", stop)
        tasks.start_soon(delay_commits, source, stop, longest)
        await anyio.sleep(0.2)
        try:
            yield ages
        finally:
            stop.set()


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(2, marks=pytest.mark.timeout(300)),  # ten seconds, and some for each other busy process
        pytest.param(100, marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
    ],
)
async def test_kills_during_a_copy_lose_nothing_with_a_slow_standby(
    source_db: Database, target_db: Database, processes: Path, subscriptions: Subscriptions, kills: int
) -> None:
    settings = ("range_rows=20", "range_duration=0.02s", "retry_interval=0.2s", "max_sync_workers=6")
    options = ["--debug", *(option for setting in settings for option in ("--setting", setting))]
    program = Program(target_db.dsn(), processes / "run.log", options=options)
    chance = random.Random(kills)
    rows = 1000 if kills < 10 else 12_000
    await prepare(source_db, target_db, "t", "u", "v", rows=rows)
    await subscriptions.create(source_db, "p", "s", copy_engine="ranges")
    copied = "SELECT relid, count(*) FROM subscriber.copied_range GROUP BY relid"
    cut_off = 0
    with closing_program(program):
        # Without a pause the writers of a slow machine would be faster than the worker.
        async with hostile_writing(source_db, *((0.4, 0.02) if kills < 10 else (3.0, 0.0))) as ages:
            before: dict[int, int] = {}
            for _ in range(kills):
                is_copied = not await target_db.value(UNCOPIED)
                expected = "launcher started" if is_copied else "table synchronization worker .* has started"
                # The writers compete with the process for the processors.
                await program.start(expected, timeout=60)
                await anyio.sleep(chance.uniform(0.8, 2.5))
                program.kill()
                states = dict(await target_db.rows("SELECT srrelid, srsubstate::text FROM subscriber.subscription_rel"))
                cut_off += "d" in states.values()
                after = dict(await target_db.rows(copied))
                for relid, state in states.items():
                    assert state in "sr" or after.get(relid, 0) >= before.get(relid, 0), "ranges that were copied stay"
                before = after
            await program.start("launcher started")
        await subscriptions.wait_for_ready(source_db, timeout=120 if kills < 10 else 600)
        await source_db.wait_for_catchup("s", timeout=60)
        await same(source_db, target_db, "t", "u", "v")
    assert cut_off >= min(1, kills // 3)
    longest = max(map(float, re.findall(r"a range of table .* is copied in ([0-9.]+) s", program.text)))
    oldest, load = max(ages, default=0.0), os.getloadavg()[0]
    print(
        f"{cut_off} of {kills} kills during copies, oldest of {len(ages)} snapshots {oldest:.2f} s,"
        f" longest range {longest:.2f} s, load {load:.0f}"
    )
    # A range that was killed is not logged, and the server notices the end of its session later.
    assert oldest < longest + 0.5
    assert ages or kills < 10
    assert "copied in one snapshot" not in program.text
    assert "ERROR" not in program.text
