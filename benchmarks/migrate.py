"""A move of a database, from an empty target to writes on it, beside pgcopydb if it is there.

    python -m benchmarks.migrate [--rows 1900000] [--rate 100] [--rounds 3] [--pgcopydb COMMAND]
        [--with OPTIONS] [--json FILE]

The database has one large table and four of half its rows, each with a primary key and two secondary indexes; 1,900,000
rows take 2.2 GB. An application writes all the time, --rate transactions a second. Each round has a new database on the
target for each program. The order changes.

Measures from the start of the program until the target has all rows and indexes, and until it has applied a row that
was written after that. `subscriber run` runs before, as for every move. Then the application moves. The pause of writes
is the time between the last acknowledgement of the old server and the first of the new one:

- ours: `migrate start`, and `migrate cutover` while the application writes. Then `back` and `finish`.
- pgcopydb: `clone --follow`. The application stops, `stream sentinel set endpos --current` says where the stream ends,
  and the application continues when the program has ended and `copy sequences` has run.

A program that has not caught up, or does not end, --patience seconds later is killed.

Both sides are compared at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic

import anyio
import asyncpg

from benchmarks.environment import OURS, POLL, Stage, connection, execute, stage
from subscriber.demo import processes
from subscriber.demo.compare import compare
from subscriber.demo.processes import Process

PGCOPYDB = "pgcopydb"
ROLE = "app"
SCHEMA = """
CREATE TABLE {name} (
  id bigint PRIMARY KEY, number integer NOT NULL, amount numeric(12,2), at timestamptz NOT NULL, label text, note text);
INSERT INTO {name} SELECT i, (i::bigint * 7919) % 1000000, (i % 100000) / 100.0,
       '2020-01-01'::timestamptz + i * interval '1 second', 'label of item ' || md5(i::text), repeat(md5(i::text), 4)
  FROM generate_series(1, {rows}) i;
CREATE INDEX ON {name} (label, id);
CREATE INDEX ON {name} (number, at);
"""
ORDERS = f"""
CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, number integer, note text);
GRANT ALL ON ALL TABLES IN SCHEMA public TO {ROLE}; GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {ROLE};
"""
WORK = """
WITH changed AS (UPDATE items SET number = number + 1 WHERE id = 1 + $1 % 1000)
INSERT INTO orders (number, note) VALUES ($1, 'an order') RETURNING id
"""
INDEXES = (
    "SELECT count(*) FROM pg_index i JOIN pg_class c ON c.oid = indrelid WHERE relnamespace = 'public'::regnamespace"
)


@dataclass
class Run:
    """One move: seconds until all rows and indexes are there, until the target has caught up, and of both pauses."""

    copied: float
    caught_up: float | None = None
    pause: float | None = None
    back: float | None = None
    different: list[str] = field(default_factory=list)
    note: str = ""


class Application:
    """Writes `rate` transactions a second to the server that admits it."""

    def __init__(self, dsns: Sequence[str], rate: int) -> None:
        self.dsns = dsns  # the old server first
        self.written = 0
        self.refused = 0
        self.longest = 0.0  # seconds between two acknowledgements, since reset()
        self.at = 0  # the server of the last acknowledgement
        self.stopped = anyio.Event()
        self.stop = False
        self._rate = rate
        self._last = monotonic()

    def reset(self) -> None:
        self.longest, self._last = 0.0, monotonic()

    async def run(self) -> None:
        """Write until `stop` is true, then set `stopped`."""
        one: asyncpg.Connection[asyncpg.Record] | None = None
        self.stop, self.stopped = False, anyio.Event()
        at = self.at
        while not self.stop:
            try:
                one = one or await asyncpg.connect(self.dsns[at])
                await one.fetchval(WORK, self.written, timeout=30)
            except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
                self.refused += 1
                if one is not None:
                    one.terminate()
                one, at = None, (at + 1) % len(self.dsns)
                await anyio.sleep(POLL)
                continue
            self.at, self.written = at, self.written + 1
            self.longest, self._last = max(self.longest, monotonic() - self._last), monotonic()
            await anyio.sleep(1 / self._rate)
        if one is not None:
            one.terminate()
        self.stopped.set()


async def measure(
    rows: int, rate: int, rounds: int, pgcopydb: Sequence[str] | None, patience: float, options: str
) -> dict[str, list[Run]]:
    """Move the database `rounds` times with each program."""
    runs: dict[str, list[Run]] = {}
    tables = {"items": rows, **{f"items_{number}": rows // 2 for number in range(4)}}
    async with stage() as where:
        for server in (where.source, where.target):
            await execute(server, f"CREATE ROLE {ROLE} LOGIN")
        await execute(where.source, "CREATE DATABASE shop")
        statements = [SCHEMA.format(name=name, rows=count) for name, count in tables.items()]
        await execute(where.source, *statements, ORDERS, "VACUUM ANALYZE", dbname="shop")
        async with connection(where.source, "shop") as source:
            print(await source.fetchval("SELECT pg_size_pretty(pg_database_size(current_database()))"), flush=True)
        names = [OURS, *([PGCOPYDB] if pgcopydb else [])]
        for number in range(rounds):
            for name in names if number % 2 == 0 else reversed(names):
                database = f"{name}_{number}"
                await execute(where.target, f"CREATE DATABASE {database}", "CHECKPOINT")
                await execute(where.source, "CHECKPOINT")
                dsns = [where.source.dsn("shop", user=ROLE), where.target.dsn(database, user=ROLE)]
                async with anyio.create_task_group() as tasks:
                    application = Application(dsns, rate)
                    tasks.start_soon(application.run)
                    if name == OURS:
                        run = await _move(where, database, application, options)
                    else:
                        run = await _clone(where, database, application, pgcopydb or (), patience)
                    tasks.cancel_scope.cancel()
                runs.setdefault(name, []).append(run)
                print(f"round {number + 1}: {name} {run}; {application.written} written", flush=True)
                await execute(where.target, f"DROP DATABASE IF EXISTS {database} WITH (FORCE)")
    return runs


async def _move(where: Stage, database: str, application: Application, subscription_options: str) -> Run:
    source, target = where.source.dsn("shop"), where.target.dsn(database)
    servers = ["--source", source, "--target", target]
    launcher = processes.launcher(target, where.directory)
    launcher.start()
    with anyio.fail_after(60):
        while not any("launcher started" in line for line in launcher.lines()):
            await anyio.sleep(POLL)
    await anyio.sleep(1)  # it has found no subscription, and waits for one

    async def migrate(command: str, *options: str) -> None:
        program = [sys.executable, "-m", "subscriber", "migrate", command, "move", *servers, *options]
        with (where.directory / "migrate.log").open("ab") as log:
            done = await anyio.run_process(program, check=False, stdout=log, stderr=subprocess.STDOUT)
        if done.returncode:
            raise RuntimeError((where.directory / "migrate.log").read_text()[-3000:] + launcher.last_lines())

    try:
        started, run = monotonic(), Run(0)

        async def measure_copy() -> None:
            await _copied(where, database, launcher)
            run.copied = monotonic() - started

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(measure_copy)
            await migrate("start", "--jobs", "4", "--programs", str(where.source.bin), "--with", subscription_options)
        print((where.directory / "migrate.log").read_text(), flush=True)
        await _caught_up(where, database)
        run.caught_up = monotonic() - started
        application.reset()
        await migrate("cutover", "--lag-window", "1")
        await _written_on(application, 1)
        run.pause = application.longest
        application.reset()
        await migrate("back", "--lag-window", "1")
        await _written_on(application, 0)
        run.back = application.longest
        application.stop = True
        await application.stopped.wait()
        await _caught_up(where, database)
        run.different = await _differences(where, database)
        await migrate("finish")
        await execute(where.source, "DROP SCHEMA IF EXISTS subscriber CASCADE", dbname="shop")
        return run
    finally:
        await launcher.stop()


async def _clone(where: Stage, database: str, application: Application, command: Sequence[str], patience: float) -> Run:
    directory = f"/tmp/{database}_{os.getpid()}"
    servers = ["--source", where.source.dsn("shop"), "--target", where.target.dsn(database), "--dir", directory]
    jobs = ["--table-jobs", "4", "--index-jobs", "4"]
    clone = Process(PGCOPYDB, [*command, "clone", "--follow", *servers, *jobs], where.directory)
    started = monotonic()
    clone.start()
    pid = clone.pid
    assert pid is not None
    try:
        await _copied(where, database, clone)
        run = Run(monotonic() - started)
        with anyio.move_on_after(patience) as scope:
            await _caught_up(where, database, clone)
            run.caught_up = monotonic() - started
        if scope.cancelled_caught:
            run.note = f"has not caught up {patience:.0f} s later"
            return run
        application.stop = True
        await application.stopped.wait()
        last = monotonic()
        endpos = [*command, "stream", "sentinel", "set", "endpos", *servers[:2], "--dir", directory, "--current"]
        done = await anyio.run_process(endpos, check=False, stderr=subprocess.STDOUT)
        if done.returncode:
            run.note = f"sentinel: {done.stdout.decode(errors='replace')[-300:]}"
        with anyio.move_on_after(patience) as scope:
            if status := await clone.wait():
                run.note += f"pgcopydb has ended with {status}: {clone.last_lines(3)}"
        if scope.cancelled_caught:
            run.note += f"did not end within {patience:.0f} s"
        else:
            sequences = [*command, "copy", "sequences", *servers[:4], "--dir", f"{directory}_sequences"]
            await anyio.run_process(sequences, check=False)
            run.pause = monotonic() - last
        await clone.stop()
        run.different = await _differences(where, database)
        return run
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # its other processes have its session, and may outlive it
        await clone.stop()
        await execute(
            where.source,
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active",
            "SELECT pg_sleep(1)",
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots",
            "DROP SCHEMA IF EXISTS pgcopydb CASCADE",
            "DROP PUBLICATION IF EXISTS pgcopydb",
            dbname="shop",
        )
        await execute(
            where.target,
            f"DROP DATABASE {database} WITH (FORCE)",
            "SELECT pg_replication_origin_drop(roname) FROM pg_replication_origin",
        )


async def _copied(where: Stage, database: str, process: Process) -> None:
    """Wait until the target has all indexes, which are built after the rows are copied."""
    async with connection(where.source, "shop") as source:
        wanted = await source.fetchval(INDEXES)
    await _wait_for(where, database, f"SELECT ({INDEXES} AND indisvalid) = {wanted}", process)


async def _caught_up(where: Stage, database: str, process: Process | None = None) -> None:
    """Wait until the target has a row that is written now."""
    async with connection(where.source, "shop") as source:
        marker = await source.fetchval("INSERT INTO orders (note) VALUES ('marker') RETURNING id")
    await _wait_for(where, database, f"SELECT EXISTS (SELECT FROM orders WHERE id = {marker})", process)


async def _wait_for(where: Stage, database: str, query: str, process: Process | None) -> None:
    while True:
        with suppress(asyncpg.PostgresError, asyncpg.InterfaceError):  # `start` ends other sessions of the target
            async with connection(where.target, database) as target:
                if await target.fetchval(query):
                    return
        if process is not None and process.pid is None:
            raise RuntimeError(f"{process.name} has ended: {process.last_lines()}")
        await anyio.sleep(10 * POLL)


async def _written_on(application: Application, server: int) -> None:
    with anyio.fail_after(60):
        while application.at != server:
            await anyio.sleep(POLL)


async def _differences(where: Stage, database: str) -> list[str]:
    return [
        f"{result.name}: {result.note or (result.only_source, result.only_target)}"
        async for result in compare(where.source.dsn("shop"), where.target.dsn(database))
        if result.differs and result.schema == "public"
    ]


def _median(seconds: Iterable[float | None]) -> str:
    found = [value for value in seconds if value is not None]
    return f"{statistics.median(found):.2f} s" if found else "never"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.migrate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_900_000)
    parser.add_argument("--rate", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patience", type=float, default=60)
    parser.add_argument("--with", dest="options", default="", help="options of the subscription, as of migrate start")
    parser.add_argument("--pgcopydb", metavar="COMMAND", default=shutil.which("pgcopydb"))
    parser.add_argument("--json", metavar="FILE", type=Path)
    arguments = parser.parse_args()
    pgcopydb = shlex.split(arguments.pgcopydb) if arguments.pgcopydb else None
    if pgcopydb is None:
        print("pgcopydb is not measured: it is not on PATH, and --pgcopydb does not name it")
    runs = anyio.run(
        measure, arguments.rows, arguments.rate, arguments.rounds, pgcopydb, arguments.patience, arguments.options
    )
    for name, found in runs.items():
        copied = statistics.median(run.copied for run in found)
        caught_up = _median(run.caught_up for run in found)
        pause = _median(run.pause for run in found)
        different = sum(bool(run.different) for run in found)
        print(
            f"{name}: copied after {copied:.1f} s, caught up after {caught_up}, pause {pause};"
            f" {different} of {len(found)} differ"
        )
    if arguments.json:
        found_json = {name: [asdict(run) for run in found] for name, found in runs.items()}
        arguments.json.write_text(json.dumps({"cpus": os.cpu_count(), "runs": found_json}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
