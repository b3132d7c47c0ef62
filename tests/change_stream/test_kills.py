"""A consumer is killed with SIGKILL at random while the server is busy: no transaction is lost.

There are two consumers. One only acknowledges, so unconfirmed transactions are delivered to it again, but confirmed
ones are not. The other one stores its position together with its results, and starts there: it gets each transaction
once.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from subscriber import Lsn
from subscriber.demo.processes import Process
from tests.plugins.fix_cluster import Database

STUCK = 300  # tenths of a second without a transaction

# Larger transactions are sent in blocks while they are in progress.
OPTIONS = "-c logical_decoding_work_mem=64kB"

WRITE = """
WITH numbers AS (SELECT nextval('numbers') AS number FROM generate_series(1, $1::int))
INSERT INTO log SELECT number, repeat('x', 50) FROM numbers
"""


@dataclass
class Line:
    """A consumer's record of one transaction."""

    end_lsn: Lsn
    xid: int
    numbers: list[int]


class Killed:
    """One consumer, over all its lives."""

    def __init__(self, db: Database, how: str, directory: Path) -> None:
        self.db = db
        self.how = how
        self.file = directory / how
        self.directory = directory
        self.seen_again = 0
        self.interrupted = 0  # lives that got something done
        self._process = self._program()

    def _program(self, until: str = "") -> Process:
        arguments = [self.db.dsn(options=OPTIONS), self.how, str(self.file), self.how, *([until] if until else [])]
        return Process(
            self.how, [sys.executable, "-m", "tests.change_stream.victim_process", *arguments], self.directory
        )

    def lines(self) -> list[Line]:
        if not self.file.exists():
            return []
        written = self.file.read_text()
        lines = []
        for line in written[: written.rfind("\n") + 1].splitlines():
            end_lsn, xid, numbers = line.split()
            lines.append(Line(Lsn.parse(end_lsn), int(xid), [int(number) for number in numbers.split(",")]))
        return lines

    async def live(self, seconds: float) -> None:
        """Run the consumer, and kill it `seconds` after its first progress.

        Then compare its output with the position confirmed before.
        """
        before = self.lines()
        confirmed = await self.confirmed()
        size = self.file.stat().st_size if self.file.exists() else 0
        self._process.start()
        with anyio.move_on_after(20):
            while not self.file.exists() or self.file.stat().st_size <= size:
                await anyio.sleep(0.01)
        await anyio.sleep(seconds)
        assert self._process.pid is not None, self._process.last_lines()
        await self._process.kill9()
        self.check(before, confirmed)
        self.interrupted += len(self.lines()) > len(before)

    async def finish(self, until: str) -> None:
        """Run the consumer to its normal end."""
        before, confirmed = self.lines(), await self.confirmed()
        self._process = self._program(until)
        self._process.start()
        size, left = -1, STUCK
        while self._process.pid is not None:
            size, left = (size, left - 1) if self.file.stat().st_size == size else (self.file.stat().st_size, STUCK)
            assert left, "it does not get any further"
            await anyio.sleep(0.1)
        self.check(before, confirmed)

    def check(self, before: list[Line], confirmed: Lsn) -> None:
        fresh = self.lines()[len(before) :]
        assert all(line.end_lsn > confirmed for line in fresh)
        known = {line.xid for line in before}
        again = [line for line in fresh if line.xid in known]
        self.seen_again += len(again)
        assert not again or self.how == "again"

    async def confirmed(self) -> Lsn:
        """Return the slot's confirmed position after its reader has gone."""
        await self.db.wait_for(f"SELECT active FROM pg_replication_slots WHERE slot_name = '{self.how}'", False)
        return Lsn.parse(
            await self.db.value(
                "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = $1", self.how
            )
        )


async def keep_writing(db: Database, stop: anyio.Event, seed: int) -> None:
    """Write transactions, mostly of one row, some of a thousand. Every tenth is rolled back."""
    chance = random.Random(seed)
    connection = await db.connect()
    while not stop.is_set():
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(WRITE, chance.choice([1, 1, 1, 1, 1, 2, 5, 20, 1000]))
        await (transaction.rollback() if chance.random() < 0.1 else transaction.commit())
        await anyio.sleep(0.005)


@pytest.mark.parametrize("times", [4, pytest.param(60, marks=[pytest.mark.soak, pytest.mark.timeout(600)])])
async def test_a_consumer_is_killed(source_db: Database, tmp_path: Path, times: int) -> None:
    seed = random.randrange(10_000)
    print(f"seed {seed}")
    chance = random.Random(seed)
    await source_db.execute(
        "CREATE TABLE log (number bigint, text text)",
        "CREATE SEQUENCE numbers",
        "CREATE PUBLICATION p FOR TABLE log",
        *(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')" for slot in ("once", "again")),
    )
    consumers = [Killed(source_db, how, tmp_path) for how in ("once", "again")]
    stop = anyio.Event()
    async with anyio.create_task_group() as writers:
        writers.start_soon(keep_writing, source_db, stop, seed)
        writers.start_soon(keep_writing, source_db, stop, seed + 1)
        for _ in range(times):
            async with anyio.create_task_group() as lives:
                for consumer in consumers:
                    lives.start_soon(consumer.live, chance.uniform(0.0, 0.7))
        stop.set()
    end = await source_db.value("SELECT pg_current_wal_lsn()::text")
    expected = [number for (number,) in await source_db.rows("SELECT number FROM log ORDER BY number")]
    assert len(expected) > 1000
    for consumer in consumers:
        assert consumer.interrupted
        await consumer.finish(end)
        lines = consumer.lines()
        if consumer.how == "once":
            assert sorted(number for line in lines for number in line.numbers) == expected
            assert [line.end_lsn for line in lines] == sorted(line.end_lsn for line in lines)
        else:
            assert sorted({number for line in lines for number in line.numbers}) == expected
    print(f"{len(expected)} rows in {len(lines)} transactions, of which {consumer.seen_again} were seen again")
