"""Random tables, under random options, applied by PostgreSQL's own subscription and by ours.

The seed determines everything except the order of concurrent events. A failure names its seed: SUBSCRIBER_RANDOM_SEED=…
repeats that run. The soak runs for SUBSCRIBER_RANDOM_SECONDS, by default ten minutes, from that seed on.
"""

from __future__ import annotations

import os
from time import monotonic

import pytest

from subscriber.demo.servers import Server, Servers
from tests.differential.beside import beside
from tests.differential.rounds import Course, Played, Round, tables_of
from tests.plugins.fix_cluster import SETTINGS, fresh_database

SEED = int(os.environ.get("SUBSCRIBER_RANDOM_SEED", "193"))  # commit timestamps, two_phase, parallel, two sessions
SECONDS = float(os.environ.get("SUBSCRIBER_RANDOM_SECONDS", "600"))
STEPS = 100  # statements between two stops
QUICK = 50  # of the rounds that are part of every run
# Settings for both subscriptions together.
MORE = {
    **SETTINGS,
    "max_prepared_transactions": "60",
    "max_replication_slots": "60",
    "max_wal_senders": "40",
    "max_worker_processes": "40",
    "max_logical_replication_workers": "24",
    "max_sync_workers_per_subscription": "4",
    "max_parallel_apply_workers_per_subscription": "3",
    "max_active_replication_origins": "60",
}


async def play(publisher: Server, target: Server, round: Round, steps: int, played: Played) -> None:
    print(f"\n{round}", flush=True)
    async with (
        fresh_database(publisher) as source,
        fresh_database(target) as native,
        fresh_database(target) as ours,
    ):
        pair = beside(
            source,
            native,
            ours,
            binary=round.binary,
            sessions=round.sessions,
            options=round.options,
            tables=await tables_of(round, source),
            settings=round.settings(),
        )
        async with pair as both:
            await Course(both, round, steps, played).run()


async def start(servers: Servers, name: str, **settings: str) -> Server:
    server = await servers.create(name, {**MORE, **settings})
    await server.start()
    return server


@pytest.mark.parametrize("seed", [SEED])
async def test_rows_and_conflicts_are_the_same(servers: Servers, seed: int) -> None:
    round = Round.of(seed)
    publisher = await start(servers, "publisher")
    target = await start(servers, "target", track_commit_timestamp="on" if round.tracking else "off")
    await play(publisher, target, round, QUICK, Played())


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 600)
async def test_rows_and_conflicts_are_the_same_for_a_long_time(
    servers: Servers, capsys: pytest.CaptureFixture[str]
) -> None:
    publisher = await start(servers, "publisher")
    targets = {
        False: await start(servers, "target"),
        True: await start(servers, "tracking", track_commit_timestamp="on"),
    }
    end, seed, played = monotonic() + SECONDS, SEED, Played()
    while monotonic() < end:
        round, began = Round.of(seed), monotonic()
        skipped = ""
        try:
            await play(publisher, targets[round.tracking], round, STEPS, played)
        except pytest.skip.Exception as skip:  # features that PostgreSQL itself does not have
            skipped = f" — {skip}"
        except BaseException:
            with capsys.disabled():
                print(f"\nfailed: {round}\n{played}\nto repeat it: {repeat(seed)}", flush=True)
            raise
        with capsys.disabled():
            print(f"{monotonic() - began:5.1f} s for {round}{skipped}", flush=True)
        capsys.readouterr()
        seed += 1
    with capsys.disabled():
        print(f"\nseeds {SEED} to {seed - 1}: {played}")
    assert played.rounds > 0


def repeat(seed: int) -> str:
    settings = f"SUBSCRIBER_RANDOM_SEED={seed} SUBSCRIBER_RANDOM_SECONDS=1"
    return f"{settings} pytest -m soak tests/differential/test_random_tables.py"
