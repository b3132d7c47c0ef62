"""Decoded rows in a program: stream(), psycopg2's replication cursor and pg_recvlogical, in one run.

    python -m benchmarks.consume [--rows 200000] [--rounds 3] [--only NAME …] [--dam] [--json]

Each program has its own slot on the same publisher. The backlog is written once. Then each program reads its slot to
the end, in a process of its own. The order changes from round to round.

    pg_recvlogical       writes the messages to a file: the minimum for one slot
    psycopg2, bytes      consume_stream(), which returns each message's bytes without decoding
    psycopg2, rows       and each row decoded into a dictionary of Python values, by a decoder written for this
    stream, changes      subscriber.stream(), a Change object for each row, which is not read
    stream, rows         and row.dict() of each
    stream, rows, pure   the same without the compiled part
    stream, one by one   the same with `async for change in transaction` instead of batches
    stream, binary rows  row.dict() with binary=True
    stream, spooled      the same with streaming, and a publisher that keeps 1 MB of a transaction in memory

With --dam a proxy receives the whole backlog first (burst_proxy.py). No program waits for the publisher then, and
processor time is that of reading at full speed.

Rows have six columns: bigint, integer, numeric, timestamptz, boolean, text. The extra `benchmark` installs psycopg2.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from functools import partial
from struct import Struct
from time import monotonic
from typing import Any

import anyio

import subscriber
from benchmarks.burst_proxy import dammed
from benchmarks.environment import INSERT, TABLE, Stage, connection, execute, memory, stage
from subscriber import Insert, Lsn, Update

Contender = Callable[[str, str, int, str], int]  # DSN, slot, rows to read, end position; returns the rows read


# --- the programs ---------------------------------------------------------------------------------


def ours(how: str, *, binary: bool = False, spooled: bool = False) -> Contender:
    def run(dsn: str, slot: str, rows: int, end: str) -> int:
        async def read() -> int:
            count = 0
            until = Lsn.parse(end)
            async with subscriber.stream(
                f"{dsn}?options=-c%20logical_decoding_work_mem%3D1MB" if spooled else dsn,
                slot=slot,
                publications=["p"],
                until=until,
                binary=binary,
                streaming="on" if spooled else "off",
            ) as stream:
                async for transaction in stream:
                    count += await READ[how](transaction)
                    await transaction.ack()
            return count

        return anyio.run(read, backend_options={"use_uvloop": True})

    return run


async def _changes(transaction: subscriber.Transaction) -> int:
    return sum([len(batch) async for batch in transaction.batches()])


async def _rows(transaction: subscriber.Transaction) -> int:
    count = 0
    async for batch in transaction.batches():
        for change in batch:
            if isinstance(change, ROWS):
                change.new.dict()
                count += 1
    return count


async def _one_by_one(transaction: subscriber.Transaction) -> int:
    count = 0
    async for change in transaction:
        if isinstance(change, ROWS):
            change.new.dict()
            count += 1
    return count


ROWS = (Insert, Update)

READ: dict[str, Callable[[subscriber.Transaction], Awaitable[int]]] = {
    "changes": _changes,
    "rows": _rows,
    "one by one": _one_by_one,
}


def psycopg2(*, decode: bool) -> Contender:
    def run(dsn: str, slot: str, rows: int, end: str) -> int:
        library: Any = importlib.import_module("psycopg2")
        extras: Any = importlib.import_module("psycopg2.extras")
        link = library.connect(dsn, connection_factory=extras.LogicalReplicationConnection)
        cursor = link.cursor()
        options = {"proto_version": "1", "publication_names": "p"}
        cursor.start_replication(slot_name=slot, options=options, decode=False)
        count = 0
        decoder = Decoder()

        def take(message: Any) -> None:
            nonlocal count
            payload = message.payload
            if decode:
                row = decoder.decode(payload)
                count += row is not None
            elif payload[0] in b"IU":
                count += 1
            if payload[0] == 0x43:  # C
                message.cursor.send_feedback(flush_lsn=message.data_start)
                if count >= rows:
                    raise extras.StopReplication

        with suppress(extras.StopReplication):
            cursor.consume_stream(take)
        link.close()
        return count

    return run


class Decoder:
    """Decodes pgoutput's inserts and updates into dictionaries, without checks.

    A user of psycopg2 would write it in this way.
    """

    def __init__(self) -> None:
        self._columns: dict[int, list[tuple[str, Callable[[bytes], Any]]]] = {}

    def decode(self, data: bytes) -> dict[str, Any] | None:
        kind = data[0]
        if kind == 0x52:
            self._relation(data)
        if kind not in b"IU":
            return None
        relid, marker, ncols = _ROW.unpack_from(data, 1)
        pos = 8
        if marker != 0x4E:
            for _ in range(ncols):
                pos += 5 + _LENGTH.unpack_from(data, pos + 1)[0] if data[pos] in b"tb" else 1
            pos += 3
        row: dict[str, Any] = {}
        for name, convert in self._columns[relid]:
            if data[pos] == 0x74:
                end = pos + 5 + _LENGTH.unpack_from(data, pos + 1)[0]
                row[name] = convert(data[pos + 5 : end])
                pos = end
            else:
                row[name] = None
                pos += 1
        return row

    def _relation(self, data: bytes) -> None:
        relid = int.from_bytes(data[1:5], "big")
        pos = data.index(b"\0", data.index(b"\0", 5) + 1) + 2
        ncols = int.from_bytes(data[pos : pos + 2], "big")
        pos += 2
        columns = []
        for _ in range(ncols):
            end = data.index(b"\0", pos + 1)
            oid = int.from_bytes(data[end + 1 : end + 5], "big")
            columns.append((data[pos + 1 : end].decode(), CONVERT.get(oid, bytes.decode)))
            pos = end + 9
        self._columns[relid] = columns


_ROW = Struct(">IBH")
_LENGTH = Struct(">I")
CONVERT: dict[int, Callable[[bytes], Any]] = {
    16: lambda value: value == b"t",
    20: int,
    23: int,
    1184: lambda value: datetime.fromisoformat(value.decode()),
    1700: lambda value: Decimal(value.decode()),
}

CONTENDERS: dict[str, Contender] = {
    "psycopg2, bytes": psycopg2(decode=False),
    "psycopg2, rows": psycopg2(decode=True),
    "stream, changes": ours("changes"),
    "stream, rows": ours("rows"),
    "stream, rows, pure": ours("rows"),  # SUBSCRIBER_PURE is set for it
    "stream, one by one": ours("one by one"),
    "stream, binary rows": ours("rows", binary=True),
    "stream, spooled": ours("rows", spooled=True),
}
FLOOR = "pg_recvlogical"
NAMES = [FLOOR, *CONTENDERS]


def read(name: str, dsn: str, slot: str, rows: int, end: str) -> None:
    """Read the slot in a process of its own, and print its costs without those of imports."""
    importlib.import_module("psycopg2.extras" if name.startswith("psycopg2") else "subscriber.change_stream.api")
    started, cpu = monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    count = CONTENDERS[name](dsn, slot, rows, end)
    seconds, used = monotonic() - started, resource.getrusage(resource.RUSAGE_SELF)
    if count < rows:
        raise RuntimeError(f"{name} has read {count} rows of {rows}")
    processor = used.ru_utime + used.ru_stime - cpu.ru_utime - cpu.ru_stime
    # Not ru_maxrss, which starts with the memory of the parent process.
    print(json.dumps({"seconds": seconds, "cpu": processor, "peak": memory(os.getpid()).peak}))


# --- the measurement ------------------------------------------------------------------------------


@dataclass
class Result:
    """The results of one program and one workload: seconds, processor seconds and bytes of each round."""

    workload: str
    rows: int
    name: str
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    peak: list[float] = field(default_factory=list)


async def _insert(where: Stage, rows: int) -> int:
    await execute(where.source, INSERT.format(first=1_000_001, last=1_000_000 + rows))
    return rows


async def _update(where: Stage, rows: int) -> int:
    await execute(where.source, "UPDATE items SET number = number + 1 WHERE id > 1000000")
    return rows


async def _transactions(where: Stage, rows: int) -> int:
    count = rows // 4
    async with connection(where.source) as one:
        await one.execute("SET synchronous_commit = off")
        await one.execute(
            "CREATE PROCEDURE pg_temp.small(n int) LANGUAGE plpgsql AS $$ BEGIN "
            "FOR i IN 1..n LOOP UPDATE items SET number = number + 1 WHERE id = 1 + i % 1000; "
            "INSERT INTO history VALUES (i, 'row'); COMMIT; END LOOP; END $$"
        )
        await one.execute(f"CALL pg_temp.small({count})")
        await one.execute("SET synchronous_commit = on; SELECT pg_logical_emit_message(true, 'flush', '')")
    return count * 2


WORKLOADS: list[tuple[str, Callable[[Stage, int], Awaitable[int]]]] = [
    ("insert, one transaction", _insert),
    ("update by key, one transaction", _update),
    ("transactions of an update and an insert", _transactions),
]


async def measure(rows: int, rounds: int, names: list[str], *, dam: bool) -> list[Result]:
    results: dict[tuple[str, str], Result] = {}
    async with stage() as where:
        tables = [TABLE, "CREATE TABLE history (i int, text text)"]
        await execute(where.source, *tables, INSERT.format(first=1, last=1000), "CREATE PUBLICATION p FOR ALL TABLES")
        for number in range(rounds):
            await execute(where.source, "DELETE FROM items WHERE id > 1000000")
            for workload, write in WORKLOADS:
                async with connection(where.source) as publisher:
                    for name in names:
                        await publisher.execute(
                            "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", _slot(name)
                        )
                    count = await write(where, rows)
                    await publisher.execute("CHECKPOINT")
                    end = await publisher.fetchval("SELECT pg_current_wal_lsn()::text")
                    shift = number % len(names)
                    for name in names[shift:] + names[:shift]:
                        result = results.setdefault((workload, name), Result(workload, count, name))
                        async with dammed(where.source.port) if dam else nullcontext(where.source.port) as port:
                            await _run(where, result, end, port)
                        await _drop(publisher, _slot(name))
    return list(results.values())


def _slot(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)


async def _drop(publisher: Any, slot: str) -> None:
    active = "SELECT active FROM pg_replication_slots WHERE slot_name = $1"
    while await publisher.fetchval(active, slot):
        await anyio.sleep(0.01)
    await publisher.execute("SELECT pg_drop_replication_slot($1)", slot)


async def _run(where: Stage, result: Result, end: str, port: int) -> None:
    if result.name == FLOOR:
        options = [
            "--slot",
            _slot(FLOOR),
            "--start",
            "--endpos",
            end,
            "-o",
            "proto_version=1",
            "-o",
            "publication_names=p",
        ]
        started = monotonic()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        await where.source.program("pg_recvlogical", "-d", "postgres", "-p", str(port), *options, "-f", "/dev/null")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        result.seconds.append(monotonic() - started)
        result.cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return
    dsn = where.source.dsn().replace(f":{where.source.port}/", f":{port}/")
    command = [sys.executable, "-m", "benchmarks.consume", "--read", result.name, dsn]
    command += [_slot(result.name), str(result.rows), end]
    env = os.environ | ({"SUBSCRIBER_PURE": "1"} if result.name.endswith("pure") else {})
    done = await anyio.run_process(command, stderr=subprocess.STDOUT, check=False, env=env)
    if done.returncode:
        raise RuntimeError(done.stdout.decode())
    found = json.loads(done.stdout)
    result.seconds.append(found["seconds"])
    result.cpu.append(found["cpu"])
    result.peak.append(found["peak"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.consume", description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the large transactions")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help="these contenders")
    parser.add_argument("--dam", action="store_true", help="let a proxy receive the backlog before it is read")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--read", nargs=5, metavar=("NAME", "DSN", "SLOT", "ROWS", "END"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        name, dsn, slot, rows, end = arguments.read
        read(name, dsn, slot, int(rows), end)
        return 0
    results = anyio.run(partial(measure, arguments.rows, arguments.rounds, arguments.only, dam=arguments.dam))
    if arguments.json:
        print(json.dumps({"cpus": os.cpu_count(), "results": [vars(result) for result in results]}, indent=2))
        return 0
    print(f"{'workload':40} {'rows':>8}  {'who':20} {'seconds':>8} {'CPU s':>6} {'µs/row':>7} {'peak MiB':>8}")
    for r in results:
        seconds, cpu = statistics.median(r.seconds), statistics.median(r.cpu)
        peak = f"{max(r.peak) / 2**20:8.0f}" if r.peak else ""
        print(
            f"{r.workload:40} {r.rows:>8,}  {r.name:20} {seconds:>8.2f} {cpu:>6.2f} {cpu / r.rows * 1e6:>7.1f} {peak}"
        )
    print(f"medians of {arguments.rounds} rounds, on {os.cpu_count()} processors shared with the publisher")
    return 0


if __name__ == "__main__":
    sys.exit(main())
