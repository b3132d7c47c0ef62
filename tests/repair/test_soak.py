"""Rounds of random damage, repaired under writes while the command and the launcher are killed."""

from __future__ import annotations

import os
import random
import sys
from time import monotonic

import anyio
import pytest

from subscriber.cli.commands.verify import as_json
from subscriber.comparison import verify
from subscriber.errors import SubscriberError
from subscriber.repair import Repair, repair, reseed
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriber
from tests.repair.test_repair import DAMAGE, TABLES, assert_nothing_left, assert_same, damage, prepare, run_for, written
from tests.repair.test_reseed import lose_slot

SECONDS = float(os.environ.get("SUBSCRIBER_REPAIR_SECONDS", "120"))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("streaming", ["off", "parallel"])
async def test_random_damage(source_db: Database, target_db: Database, subscriber: Subscriber, streaming: str) -> None:
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
        async with written(source_db):
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
            found = await verify(target_db.dsn(), "s")
            assert found.is_same, as_json(found)
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
    statements = [one for one in DAMAGE if "INSERT INTO types" not in one and chance.random() < 0.5]
    circle = [one for one in DAMAGE if one.startswith("UPDATE circle")]  # the second needs the first
    statements = [one for one in statements if one not in circle]
    statements += [
        f"DELETE FROM {table} WHERE ctid IN (SELECT ctid FROM {table} ORDER BY random() LIMIT {chance.randrange(30)})"
        for table in TABLES
        if table != "parted" and chance.random() < 0.4
    ]
    chance.shuffle(statements)
    return statements + circle * (chance.random() < 0.3)
