"""Replay of a backlog by PostgreSQL's own subscription and by ours, on the same servers, alternately.

    python -m benchmarks.replay [--rows 200000] [--rounds 3] [--only NAME] [--format FORMAT] [--sessions N]
                                [--policy POLICY] [--json FILE] [--plot FILE]

Both targets are databases of one server and subscribe to the same publication. In each round the changes are committed
while both subscriptions are disabled. One is then enabled and timed until the last change can be read on the target,
and until all changes are confirmed as durable. Then the other one is measured. The order changes from round to round.

By default the statements for both do not set a format: PostgreSQL's own then receives text, and ours binary if
possible. Between the two, pg_recvlogical writes the same changes, in our format, to a file. This is the drain, the
minimum for a reader of one slot. "nothing" is the time for enabling, with one row; all others except the drain include
it. Ratios compare the times until all changes can be read.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic

import anyio

from benchmarks.environment import (
    NATIVE,
    OURS,
    Stage,
    caught_up,
    connection,
    cpu_seconds,
    execute,
    memory,
    reset_peak,
    server_cpu_seconds,
    stage,
    subscribe_both,
    wait_for,
)
from benchmarks.plot import bars
from benchmarks.workloads import TABLES, Workload, workloads
from subscriber.demo.compare import compare
from subscriber.display import sql_literal

DRAIN = "drain"
TEXT = "text"
UNSAID = "unsaid"
FORMATS = {UNSAID: [], TEXT: ["binary = false"], "binary": ["binary = true"]}  # options of both subscriptions
MIB = 1024 * 1024


@dataclass
class Result:
    """Seconds of each round. For ours and native, until all changes can be read on the target."""

    name: str
    rows: int
    ours: list[float] = field(default_factory=list)
    native: list[float] = field(default_factory=list)
    drain: list[float] = field(default_factory=list)
    our_confirmed: list[float] = field(default_factory=list)  # until all are confirmed to the publisher as durable
    native_confirmed: list[float] = field(default_factory=list)
    our_cpu: list[float] = field(default_factory=list)  # processor seconds of our process, without the servers
    our_target_cpu: list[float] = field(default_factory=list)  # of the target's server, including all its processes
    our_source_cpu: list[float] = field(default_factory=list)
    native_target_cpu: list[float] = field(default_factory=list)  # includes the worker, which is part of the server
    our_peak: int = 0  # bytes of resident memory

    @property
    def by_native(self) -> float:
        """Return the ratio of our median to native's: below 1 ours is faster."""
        return statistics.median(self.ours) / statistics.median(self.native)

    @property
    def by_drain(self) -> float:
        return statistics.median(self.ours) / statistics.median(self.drain)


async def measure(rows: int, rounds: int, only: str | None, *, format: str, sessions: int, policy: str) -> list[Result]:
    """Measure all workloads, `rounds` times. Returns those with `only` in their name."""
    async with stage() as where:
        await _prepare(where, format, sessions, policy)
        results: dict[str, Result] = {}
        for number in range(rounds):
            for workload in workloads(rows):
                result = results.setdefault(workload.name, Result(workload.name, workload.rows))
                order = (OURS, DRAIN, NATIVE) if number % 2 == 0 else (NATIVE, DRAIN, OURS)
                await _round(where, result, workload, order, binary=format != TEXT)
                await _check(where)
        return [result for result in results.values() if only is None or only in result.name]


async def _prepare(where: Stage, format: str, sessions: int, policy: str) -> None:
    await execute(where.source, *TABLES, "INSERT INTO items SELECT i FROM generate_series(1, 1000) i")
    await execute(where.source, "CREATE PUBLICATION p FOR ALL TABLES")
    await execute(where.source, f"SELECT pg_create_logical_replication_slot('{DRAIN}', 'pgoutput')")
    await subscribe_both(where, TABLES, ", ".join(["streaming = off", *FORMATS[format]]))
    for name in (OURS, NATIVE):
        await disable(where, name)
    changed = f"subapplysessions = {sessions}, subconflictpolicy = {sql_literal(policy)}"
    await execute(where.target, f"UPDATE subscriber.subscription SET {changed}", dbname=OURS)


async def _round(where: Stage, result: Result, workload: Workload, order: tuple[str, ...], *, binary: bool) -> None:
    await workload.write(where)
    async with connection(where.source) as publisher:
        mark = await publisher.fetchval("INSERT INTO marks DEFAULT VALUES RETURNING id")
        await publisher.execute("CHECKPOINT")
        position = await publisher.fetchval("SELECT pg_current_wal_lsn()::text")
    for name in order:
        await execute(where.target, "CHECKPOINT")
        if name == DRAIN:
            result.drain.append(await _drain(where, position, binary=binary))
            continue
        pid = where.launcher.pid
        assert pid is not None
        reset_peak(pid)
        cpu, at_target, at_source = cpu_seconds(pid), server_cpu_seconds(where.target), server_cpu_seconds(where.source)
        started = monotonic()
        await enable(where, name)
        visible = f"SELECT EXISTS (SELECT FROM marks WHERE id = {mark})"
        await wait_for(where.target, visible, where.launcher, dbname=name)
        seconds = monotonic() - started
        await wait_for(where.source, caught_up(name, position), where.launcher)
        confirmed = monotonic() - started
        if name == OURS:
            result.ours.append(seconds)
            result.our_confirmed.append(confirmed)
            result.our_cpu.append(cpu_seconds(pid) - cpu)
            result.our_target_cpu.append(server_cpu_seconds(where.target) - at_target)
            result.our_source_cpu.append(server_cpu_seconds(where.source) - at_source)
            result.our_peak = max(result.our_peak, memory(pid).peak)
        else:
            result.native.append(seconds)
            result.native_confirmed.append(confirmed)
            result.native_target_cpu.append(server_cpu_seconds(where.target) - at_target)
        await disable(where, name)


async def _drain(where: Stage, position: str, *, binary: bool) -> float:
    options = ("proto_version=1", "publication_names=p", f"binary={'on' if binary else 'off'}")
    started = monotonic()
    await where.source.program(
        "pg_recvlogical",
        *("--slot", DRAIN, "--start", "--no-loop", "--endpos", position, "--file", os.devnull, "-d", "postgres"),
        *(word for option in options for word in ("-o", option)),
    )
    return monotonic() - started


async def enable(where: Stage, name: str) -> None:
    """Enable one of the two subscriptions."""
    if name == NATIVE:
        await execute(where.target, f"ALTER SUBSCRIPTION {name} ENABLE", dbname=name)
    else:  # update the catalog's row directly: the start of a program would be part of the measurement
        await execute(where.target, "UPDATE subscriber.subscription SET subenabled = true", dbname=name)


async def disable(where: Stage, name: str) -> None:
    """Disable the subscription, and wait until its worker has ended."""
    if name == NATIVE:
        await execute(where.target, f"ALTER SUBSCRIPTION {name} DISABLE", dbname=name)
    else:
        await execute(where.target, "UPDATE subscriber.subscription SET subenabled = false", dbname=name)
    inactive = f"SELECT NOT active FROM pg_replication_slots WHERE slot_name = '{name}'"
    await wait_for(where.source, inactive, where.launcher)


async def _check(where: Stage) -> None:
    for name in (OURS, NATIVE):
        async for result in compare(where.source.dsn(), where.target.dsn(name)):
            if result.differs:
                raise RuntimeError(f"{name} differs from the source: {result}")


def _report(results: list[Result], rounds: int) -> None:
    print(
        f"{'':34} {'':>8} {'read, s':>15} {'confirmed, s':>15} {'':>7} {'ours to':>13}"
        f" {'CPU s of ours at the':>23} {'native':>7} {'peak':>6}"
    )
    print(
        f"{'workload':34} {'rows':>8} {'ours':>7} {'native':>7} {'ours':>7} {'native':>7} {'drain':>7}"
        f" {'native':>6} {'drain':>6} {'worker':>7} {'target':>7} {'source':>7} {'target':>7} {'MiB':>6}"
    )
    for r in results:
        seconds = (r.ours, r.native, r.our_confirmed, r.native_confirmed, r.drain)
        processors = (r.our_cpu, r.our_target_cpu, r.our_source_cpu, r.native_target_cpu)
        print(
            f"{r.name:34} {r.rows:>8,}",
            *[f"{statistics.median(values):>7.2f}" for values in seconds],
            *[f"{ratio:>6.2f}" for ratio in (r.by_native, r.by_drain)],
            *[f"{statistics.median(values):>7.2f}" for values in processors],
            f"{r.our_peak / MIB:>6.0f}",
        )
    print(f"medians of {rounds} rounds, on {os.cpu_count()} processors shared with both servers")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the large transactions")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", metavar="NAME", help="report only workloads whose name contains this")
    parser.add_argument("--format", choices=FORMATS, default=UNSAID, help="value format (default: %(default)s)")
    parser.add_argument("--sessions", type=int, default=1, metavar="N", help="our subscription with apply_sessions = N")
    parser.add_argument("--policy", default="", help="our subscription with this conflict_policy, for public.users")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the seconds of every round")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw the ratios, as SVG")
    arguments = parser.parse_args()
    how = {"format": arguments.format, "sessions": arguments.sessions, "policy": arguments.policy}
    results = anyio.run(lambda: measure(arguments.rows, arguments.rounds, arguments.only, **how))
    _report(results, arguments.rounds)
    if arguments.json:
        found = [{**asdict(r), "by_native": r.by_native, "by_drain": r.by_drain} for r in results]
        document = {"cpus": os.cpu_count(), **how, "workloads": found}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    if arguments.plot:
        shown = [r for r in results if r.rows]
        times = [(r.name, statistics.median(r.native), statistics.median(r.ours)) for r in shown]
        title = "Time to replay a backlog, by that of PostgreSQL's own subscription"
        arguments.plot.write_text(bars(title, [(name, ours / native) for name, native, ours in times], mark=1.0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
