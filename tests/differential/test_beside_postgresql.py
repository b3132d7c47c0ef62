"""Random workloads for PostgreSQL's own subscription and ours: at the end both targets have the same rows.

A failure names its seed: SUBSCRIBER_RANDOM_SEED=… repeats that run. The soak runs for SUBSCRIBER_RANDOM_SECONDS.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from random import Random
from time import monotonic

import anyio
import pytest

from subscriber.demo.servers import Server
from subscriber.settings import Settings
from tests.differential.beside import Beside, beside, disturb, run
from tests.plugins.fix_cluster import Database, fresh_database
from tests.plugins.fix_subscriber import QUICK

SEED = int(os.environ.get("SUBSCRIBER_RANDOM_SEED", "1"))
SECONDS = float(os.environ.get("SUBSCRIBER_RANDOM_SECONDS", "600"))
STEPS = 120  # statements between two stops
FEW_STEPS = 60  # of the tests that are part of every run


@pytest.fixture
async def native_db(target: Server) -> AsyncIterator[Database]:
    async with fresh_database(target) as database:
        yield database


def choose_path(seed: int) -> Settings:
    """Return settings: half of the seeds use batches whenever possible, the others never."""
    if not seed % 2:
        return replace(QUICK, one_by_one=True)
    return replace(
        QUICK,
        batch_rows=100,
        batch_small_transaction=20,
        batch_min_rows=2,
        batch_min_rows_per_step=0,
        batch_retry_rows=0,
        parallel_batch_min_rows=1,
    )


@pytest.mark.parametrize(
    ("seed", "binary", "steps"),
    [
        (SEED, True, FEW_STEPS),
        pytest.param(SEED, True, STEPS, marks=pytest.mark.soak),
        pytest.param(SEED, False, STEPS, marks=pytest.mark.soak),
        pytest.param(SEED + 1, True, STEPS, marks=pytest.mark.soak),
        pytest.param(SEED + 1, False, STEPS, marks=pytest.mark.soak),
    ],
)
async def test_both_targets_have_the_same_rows(
    source_db: Database,
    native_db: Database,
    target_db: Database,
    seed: int,
    binary: bool,
    steps: int,
) -> None:
    print(f"seed {seed}")
    settings = choose_path(seed)
    sessions = 3 if binary else 1
    async with beside(source_db, native_db, target_db, binary=binary, sessions=sessions, settings=settings) as pair:
        work = await run(pair, seed, steps)
        assert sum(writer.committed for writer in work.writers) > steps / 2


async def run_disturbed(pair: Beside, seed: int, steps: int) -> None:
    """Run the test while our launcher and its connections are interrupted at random moments."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(disturb, pair, Random(seed))
        await run(pair, seed, steps, undisturbed=False)
        tasks.cancel_scope.cancel()


async def test_both_targets_have_the_same_rows_after_lost_connections(
    source_db: Database,
    native_db: Database,
    target_db: Database,
) -> None:
    print(f"seed {SEED}")
    settings = choose_path(SEED)
    async with beside(source_db, native_db, target_db, binary=False, sessions=3, settings=settings) as pair:
        await run_disturbed(pair, SEED, FEW_STEPS)
        assert pair.disturbances > 0


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 300)
async def test_both_targets_have_the_same_rows_for_a_long_time(publisher: Server, target: Server) -> None:
    end, seed, compared = monotonic() + SECONDS, SEED, 0
    while monotonic() < end:
        print(f"seed {seed}")
        with suppress(pytest.skip.Exception):  # one that PostgreSQL itself cannot do
            settings = choose_path(seed // 2)  # in text and in binary
            async with (
                fresh_database(publisher) as source,
                fresh_database(target) as native,
                fresh_database(target) as ours,
                beside(
                    source,
                    native,
                    ours,
                    binary=seed % 2 == 0,
                    sessions=1 + 2 * (seed // 4 % 2),
                    settings=settings,
                ) as pair,
            ):
                await (run_disturbed if seed % 3 == 0 else run)(pair, seed, STEPS * 3)
            compared += 1
        seed += 1
    assert compared > 0
