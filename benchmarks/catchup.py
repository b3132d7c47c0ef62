"""A backlog of a million changes: caught up from the change log, applied live, and applied by PostgreSQL's own worker.

    python -m benchmarks.catchup [--changes 1000000] [--keys 100000] [--json]

One publisher, and three databases on one target server with the same rows. The backlog is small transactions of two
updates and an insert, over `--keys` rows, so that rows change many times. It is archived from the log's own slot
(timed), then caught up in one batch. Then our subscription and PostgreSQL's own are enabled, one after the other, and
timed until everything is confirmed as durable. The benchmark fails if the three databases do not end with the same
rows.

The start of Spark is not included; it is reported separately.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from time import monotonic

import anyio

from benchmarks.environment import Stage, caught_up, connection, execute, stage, wait_for
from subscriber.archive.worker import Archiver
from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.writer import log_writer
from subscriber.demo import processes
from subscriber.demo.compare import compare
from subscriber.lsn import Lsn
from subscriber.spark.catchup.job import CaughtUp, catch_up
from subscriber.spark.changes.net_job import JAVA_OPTIONS
from subscriber.spark.session import spark_session
from subscriber.spark.tasks import run_tasks

CATCHUP, OURS, NATIVE = "catchup", "ours", "native"
TABLES = (
    "CREATE TABLE account (id int PRIMARY KEY, balance bigint, note text)",
    "CREATE TABLE history (account int, delta int, at timestamptz)",
)
FILL = "INSERT INTO account SELECT i, 0, 'account number ' || i FROM generate_series(1, {keys}) i"
WRITE = """
CREATE PROCEDURE write(n int, keys int) LANGUAGE plpgsql AS $$
BEGIN
    FOR i IN 1..n LOOP
        UPDATE account SET balance = balance + i WHERE id = 1 + (i::bigint * 7919) % keys;
        UPDATE account SET balance = balance - i WHERE id = 1 + (i::bigint * 104729) % keys;
        INSERT INTO history VALUES (1 + i % keys, i, clock_timestamp());
        COMMIT;
    END LOOP;
END $$
"""


async def measure(changes: int, keys: int) -> dict[str, float]:
    """Return the seconds of each step."""
    async with stage() as where:
        try:
            return await _measure(where, changes, keys)
        finally:
            await where.launcher.stop()  # this benchmark starts its own launcher


async def _measure(where: Stage, changes: int, keys: int) -> dict[str, float]:
    log = where.directory / "log"
    await _prepare(where, keys, log)
    found: dict[str, float] = {}
    async with connection(where.source) as one:
        await one.execute("SET synchronous_commit = off")
        await one.execute(f"CALL write({changes // 3}, {keys})", timeout=None)
        await one.execute("SET synchronous_commit = on; SELECT pg_logical_emit_message(true, 'end', '')")
        position = await one.fetchval("SELECT pg_current_wal_lsn()::text")
    found["archive"] = await _archive(where, log)
    await execute(where.target, "CHECKPOINT")
    began = monotonic()
    with spark_session(java_options=JAVA_OPTIONS) as spark:
        run_tasks(spark, abs, [0, 1])
        found["start of Spark"] = monotonic() - began
        began, batches = monotonic(), list[CaughtUp]()
        await catch_up(where.target.dsn(CATCHUP), CATCHUP, ChangeLog(log), spark, on_batch=batches.append)
        found["catch-up"] = monotonic() - began
    for name, what in ((NATIVE, "PostgreSQL's own worker"), (OURS, "live apply")):
        found[what] = await _live(where, name, position)
    for name in (CATCHUP, OURS):
        async for result in compare(where.target.dsn(NATIVE), where.target.dsn(name)):
            if result.differs:
                raise RuntimeError(f"targets differ: {result}")
    return found


async def _prepare(where: Stage, keys: int, log: Path) -> None:
    await execute(where.source, *TABLES, WRITE, FILL.format(keys=keys), "CREATE PUBLICATION p FOR ALL TABLES")
    await _archive(where, log)  # the log has to reach back to the subscriptions' start
    create = f"CREATE SUBSCRIPTION {{}} CONNECTION '{where.source.dsn()}' PUBLICATION p WITH (streaming = off)"
    for name in (CATCHUP, OURS, NATIVE):
        await execute(where.target, f"CREATE DATABASE {name}")
        await execute(where.target, *TABLES, dbname=name)
    await execute(where.target, create.format(NATIVE), dbname=NATIVE)
    for name in (CATCHUP, OURS):
        await processes.execute(where.target.dsn(name), create.format(name))
        where.launcher = processes.launcher(where.target.dsn(name), where.directory)
        where.launcher.start()
        await _ready(where, name, "subscriber.subscription_rel")
        if name == CATCHUP:
            await where.launcher.stop()
    await _ready(where, NATIVE, "pg_catalog.pg_subscription_rel")


async def _ready(where: Stage, name: str, states: str) -> None:
    """Wait until all tables are handed over, then disable the subscription."""
    await execute(where.source, "SELECT pg_logical_emit_message(true, 'ready', '')")
    ready = f"SELECT count(*) = 2 AND bool_and(srsubstate = 'r') FROM {states}"
    await wait_for(where.target, ready, where.launcher, dbname=name)
    await _alter(where, name, enabled=False)
    inactive = f"SELECT NOT active FROM pg_replication_slots WHERE slot_name = '{name}'"
    await wait_for(where.source, inactive, where.launcher)


async def _alter(where: Stage, name: str, *, enabled: bool) -> None:
    statement = f"UPDATE subscriber.subscription SET subenabled = {enabled}"
    if name == NATIVE:
        statement = f"ALTER SUBSCRIPTION {name} {'ENABLE' if enabled else 'DISABLE'}"
    await execute(where.target, statement, dbname=name)


async def _archive(where: Stage, log: Path) -> float:
    async with connection(where.source) as one:
        await one.execute("SELECT pg_logical_emit_message(true, 'end', '')")
        now = Lsn.parse(await one.fetchval("SELECT pg_current_wal_lsn()::text"))
    began = monotonic()
    writer = log_writer(log)
    writer.open()
    try:
        await Archiver(where.source.dsn(), "archive", ["p"], writer, now).run()
    finally:
        writer.close()
    return monotonic() - began


async def _live(where: Stage, name: str, position: str) -> float:
    await execute(where.target, "CHECKPOINT")
    began = monotonic()
    await _alter(where, name, enabled=True)
    await wait_for(where.source, caught_up(name, position), where.launcher)
    seconds = monotonic() - began
    await _alter(where, name, enabled=False)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.catchup", description=__doc__)
    parser.add_argument("--changes", type=int, default=1_000_000)
    parser.add_argument("--keys", type=int, default=100_000, help="rows that change")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    arguments = parser.parse_args()
    found = anyio.run(measure, arguments.changes, arguments.keys)
    ratios = {
        f"{what} / catch-up": found[what] / found["catch-up"] for what in ("live apply", "PostgreSQL's own worker")
    }
    if arguments.json:
        print(json.dumps({"cpus": os.cpu_count(), "changes": arguments.changes, "seconds": found, "ratios": ratios}))
        return 0
    for what, seconds in found.items():
        print(f"{what:28} {seconds:8.2f} s  {arguments.changes / seconds:>12,.0f} changes/s")
    for what, ratio in ratios.items():
        print(f"{what:40} {ratio:6.2f}")
    print(f"{arguments.changes:,} changes, {os.cpu_count()} processors shared with both servers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
