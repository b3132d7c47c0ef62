"""Rounds of random damage, repaired under writes while the command and the launcher are killed."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from time import monotonic

import anyio
import pytest

from subscriber.cli.commands.verify import as_json
from subscriber.comparison import verify
from subscriber.errors import SubscriberError
from subscriber.repair import Repair, repair, reseed
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Program, Subscriber, Subscriptions
from tests.repair.test_hostile import closing, crash, retried
from tests.repair.test_repair import DAMAGE, TABLES, assert_nothing_left, assert_same, damage, prepare, run_for, written
from tests.repair.test_reseed import lose_slot

ROWS = int(os.environ.get("SUBSCRIBER_RESEED_ROWS", "10_000_000"))
RESEEDED = [f"large_{number}" for number in range(5)]
KILLS = ("command", "launcher", "publisher", "target", "command")
STATES = "SELECT srrelname || ' ' || srsubstate::text FROM subscriber.subscription_rel ORDER BY 1"
SECONDS = float(os.environ.get("SUBSCRIBER_REPAIR_SECONDS", "120"))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("streaming", ["off", "parallel"])
async def test_rounds_of_random_damage_are_repaired_under_writes_and_kills(
    source_db: Database, target_db: Database, subscriber: Subscriber, streaming: str
) -> None:
    await prepare(source_db, target_db, subscriber, streaming=streaming)
    chance = random.Random(int(os.environ.get("SUBSCRIBER_REPAIR_SEED", "1")))
    ends = monotonic() + SECONDS
    rounds = killed = reseeded = 0
    while monotonic() < ends:
        rounds += 1
        new_slot = chance.random() < 0.2
        command = "reseed" if new_slot else "repair"
        if new_slot:
            await lose_slot(source_db, subscriber)
        async with written(source_db, pause=0.003):
            await damage(target_db, *_damage(chance))
            for _ in range(chance.randrange(3)):
                command_line = [sys.executable, "-m", "subscriber", command, "s", "--target", target_db.dsn()]
                async with anyio.create_task_group() as tasks:
                    if not new_slot and chance.random() < 0.3:
                        tasks.start_soon(subscriber.restart)
                    killed += await run_for(command_line, chance.uniform(0.3, 1.5))
            if new_slot:
                result = await reseed(target_db.dsn(), "s")
                reseeded += 1
            else:
                result = await _repair(target_db)
            assert result.is_complete
            comparison = await verify(target_db.dsn(), "s")
            assert comparison.is_same, as_json(comparison)
        await subscriber.wait_for_sync(source_db)
        await assert_same(source_db, target_db)
        await assert_nothing_left(source_db, target_db)
    print(f"{rounds} rounds, {killed} kills, {reseeded} new slots")


async def _repair(target: Database) -> Repair:
    """Repair. A launcher that restarts needs a moment."""
    for _ in range(4):
        try:
            return await repair(target.dsn(), "s")
        except SubscriberError as error:
            if "apply worker" not in error.message:
                raise
            await anyio.sleep(1)
    return await repair(target.dsn(), "s")


def _damage(chance: random.Random) -> list[str]:
    statements = [statement for statement in DAMAGE if "INSERT INTO types" not in statement and chance.random() < 0.5]
    circle = [statement for statement in DAMAGE if statement.startswith("UPDATE circle")]  # the second needs the first
    statements = [statement for statement in statements if statement not in circle]
    statements += [
        f"DELETE FROM {table} WHERE ctid IN (SELECT ctid FROM {table} ORDER BY random() LIMIT {chance.randrange(30)})"
        for table in TABLES
        if table != "parted" and chance.random() < 0.4
    ]
    chance.shuffle(statements)
    return statements + circle * (chance.random() < 0.3)


@pytest.mark.soak
@pytest.mark.timeout(7200)
async def test_a_reseed_that_is_killed_ten_times(
    source_db: Database, target_db: Database, processes: Path, subscriptions: Subscriptions
) -> None:
    """A kill costs at most the comparison of the tables that are being compared. A table that is ready stays so."""
    for database in (source_db, target_db):
        await database.execute(*(f"CREATE TABLE {name} (id int PRIMARY KEY, v text)" for name in RESEEDED))
    for name in RESEEDED:
        rows = f"SELECT i, md5(i::text) FROM generate_series(1, {ROWS // len(RESEEDED)}) i"
        await source_db.execute(f"INSERT INTO {name} {rows}", f"VACUUM ANALYZE {name}")
    await source_db.execute("CREATE PUBLICATION p FOR ALL TABLES")
    options = ["--setting", "retry_interval=0.2s"]
    program = Program(target_db.dsn(), processes / "run.log", options=options)
    chance = random.Random(int(os.environ.get("SUBSCRIBER_REPAIR_SEED", "1")))
    with closing(program):
        await program.start()
        started = monotonic()
        await subscriptions.create(source_db, "p", "s", source_tag="'all'")
        await subscriptions.wait_for_ready(source_db, timeout=3600)
        print(f"{ROWS} rows copied in {monotonic() - started:.1f} s", flush=True)
        await subscriptions.execute("ALTER SUBSCRIPTION s DISABLE")
        await source_db.wait_for("SELECT active FROM pg_replication_slots WHERE slot_name = 's'", False)
        await source_db.execute("SELECT pg_drop_replication_slot('s')")
        await source_db.execute(*(f"UPDATE {name} SET v = 'new' WHERE id % 1000 = 0" for name in RESEEDED))
        await damage(target_db, *(f"DELETE FROM {name} WHERE id % 5000 = 1" for name in RESEEDED))
        line = [sys.executable, "-m", "subscriber", "reseed", "s", "--target", target_db.dsn()]
        started = monotonic()
        for number in range(10):
            kill = KILLS[number % len(KILLS)]
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run_for, line, seconds := chance.uniform(2, 6))
                if kill != "command":
                    await anyio.sleep(seconds / 2)
                if kill == "launcher":
                    program.kill()
                    tasks.start_soon(program.start)
                elif kill != "command":
                    tasks.start_soon(crash, source_db if kill == "publisher" else target_db)
            states = await retried(lambda: target_db.rows(STATES))
            print(f"{monotonic() - started:6.1f} s: {kill} killed; {states}", flush=True)
        await retried(lambda: reseed(target_db.dsn(), "s"), 3600)
        print(f"reseeded in {monotonic() - started:.1f} s", flush=True)
        assert (await retried(lambda: verify(target_db.dsn(), "s"), 600)).is_same
        repaired = await target_db.value("SELECT count(*) FROM subscriber.repairs")
        print(f"{repaired} rows repaired", flush=True)
        for name in RESEEDED:
            content = f"SELECT count(*), sum(hashtext(r::text)) FROM {name} r"
            assert await source_db.rows(content) == await target_db.rows(content)
