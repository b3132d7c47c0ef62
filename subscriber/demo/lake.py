"""`make demo-lake`: the data pipeline on one machine, from a publisher to tables that are read as of a position.

    publisher ── subscriber archive ─▶ change log ──┐           subscriber lake, the driver
    PostgreSQL                         s3://…/log   └──▶ Spark: a master, two workers ──▶ Delta tables
                                                         an executor is killed             s3://…/lake

Each part is a process of its own. All that they have in common is in the object store. At four positions the tables of
the lake are compared with what the publisher had there. All processes and files are removed at the end.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread

from subscriber.changelog.files import IDENTITY
from subscriber.changelog.storage import location
from subscriber.connection.connect import connect
from subscriber.demo.object_store import BUCKET, ObjectStore
from subscriber.demo.processes import Process
from subscriber.demo.servers import Server, Servers, temporary_servers
from subscriber.demo.spark_cluster import executors, standalone
from subscriber.demo.view import View, open_view
from subscriber.errors import SubscriberError
from subscriber.formatting import count
from subscriber.lsn import Lsn
from subscriber.spark.environment import environment_variables
from subscriber.spark.java_runtime import java_home
from subscriber.spark.lake.lake import BATCH_FILE, Lake

ORDERS = 20_000  # at the start
ROUNDS = 3
BATCH = 10_000  # changes
TIMEOUT = 600.0  # seconds for one step
POLL = 0.2  # seconds
PUBLIC = {"search_path": "public"}
LOG, LAKE = f"s3://{BUCKET}/shop/log", f"s3://{BUCKET}/shop/lake"

_TABLES = """
CREATE TABLE customers (id int PRIMARY KEY, name text, city text);
CREATE TABLE orders (id int PRIMARY KEY, customer int, state text, amount numeric(12,2), at timestamptz DEFAULT now());
INSERT INTO customers SELECT i, 'customer ' || i, (ARRAY['Oslo', 'Lima', 'Kyoto', 'Accra'])[1 + i % 4]
  FROM generate_series(1, 1000) i;
INSERT INTO orders SELECT i, 1 + i % 1000, 'new', (i % 977) / 4.0 FROM generate_series(1, {orders}) i;
CREATE PUBLICATION shop FOR TABLE customers, orders;
"""
_ROUND = """
INSERT INTO orders SELECT i, 1 + i % 1000, 'new', (i % 977) / 4.0 FROM generate_series({first}, {first} + 1999) i;
UPDATE orders SET state = 'paid', amount = amount + 1 WHERE id % 7 = {round};
DELETE FROM orders WHERE id % 50 = {round};
UPDATE customers SET city = 'Turin' WHERE id % 9 = {round};
"""
_SUMS = "SELECT (SELECT count(*) FROM orders), (SELECT sum(amount) FROM orders), (SELECT count(*) FROM customers \
WHERE city = 'Turin')"


class Sums(NamedTuple):
    """The sums of the tables at a position."""

    orders: int
    amount: str
    in_turin: int

    def __str__(self) -> str:
        return f"{self.orders:>7,} orders  {self.amount:>14}  {self.in_turin:>4} customers in Turin"


class LakeDemo:
    """One run of the demo."""

    def __init__(self, publisher: Server, directory: Path, master: str, view: View) -> None:
        self.publisher, self.directory, self.view = publisher, directory, view
        source = ["--source", publisher.dsn()]
        command = [sys.executable, "-m", "subscriber"]
        archive = ["archive", "--directory", LOG, "--publication", "shop", "--segment-age", "1"]
        self.archive = Process("archive", [*command, *archive, *source], directory)
        lake = [LAKE, "--log", LOG, "--batch", str(BATCH), "--master", master, *source]
        self.load = Process("load", [*command, "lake", "load", *lake], directory)
        self.follow = Process("follow", [*command, "lake", "follow", *lake], directory)
        self.lake = Lake(LAKE)
        self.expected: dict[Lsn, Sums] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start the archiver, load the lake, and let it follow. The processes are stopped at the end of the block."""
        async with AsyncExitStack() as stack:
            for process in (self.archive, self.load, self.follow):
                process.start()
                stack.push_async_callback(process.stop)
                if process is self.archive:
                    await self._until((location(LOG) / IDENTITY).exists)
                    self.view.event(f"subscriber archive: the changes go to {LOG}")
                elif process is self.load:
                    await self._until(lambda: self.load.pid is None)
                    if await self.load.wait():
                        raise SubscriberError("the lake could not be loaded", detail=self.load.last_lines())
                    self.view.event(f"subscriber lake load: the tables are loaded into {LAKE}")
            yield

    async def run(self) -> None:
        """Write in rounds. Records what the publisher has at each of the lake's positions."""
        self.expected[self.lake.position()] = await self._sums()
        for number in range(1, ROUNDS + 1):
            position = await self._write(number)
            if number == 2:
                await self._kill_an_executor()
            await self._until(partial(self._has, position))
            reached = self.lake.position()
            self.expected[reached] = await self._sums()
            self.view.event(f"round {number}: the lake has everything up to {reached}")

    def _has(self, position: Lsn) -> bool:
        return self.lake.position() >= position

    async def _write(self, number: int) -> Lsn:
        connection = await connect(self.publisher.dsn(), settings=PUBLIC)
        try:
            first = ORDERS + 2000 * number
            await connection.execute(_ROUND.format(first=first, round=number))
            return Lsn.parse(await connection.fetchval("SELECT pg_current_wal_insert_lsn()::text"))
        finally:
            await connection.close()

    async def _sums(self) -> Sums:
        connection = await connect(self.publisher.dsn(), settings=PUBLIC)
        try:
            (row,) = await connection.fetch(_SUMS)
            orders, amount, in_turin = row
            return Sums(orders, str(amount), in_turin)
        finally:
            await connection.close()

    async def _kill_an_executor(self) -> None:
        """Kill an executor in the middle of a batch."""
        await self._until((self.lake.directory / BATCH_FILE).exists)
        pid = executors(self.directory)[0]
        os.kill(pid, signal.SIGKILL)
        self.view.event(f"kill -9 {pid}: an executor is gone, Spark repeats its tasks", style="bold red")

    def sums(self, position: Lsn) -> Sums:
        """Return what the lake has as of a position."""
        amounts, cities = (
            self.lake.table(f"public.{table}", position).to_pyarrow_table()[column].to_pylist()
            for table, column in (("orders", "amount"), ("customers", "city"))
        )
        return Sums(len(amounts), str(sum(amounts)), cities.count("Turin"))

    async def _until(self, is_there: Callable[[], bool]) -> None:
        with anyio.move_on_after(TIMEOUT):
            while not await anyio.to_thread.run_sync(is_there):
                for process in (self.archive, self.follow):
                    if process.lines() and process.pid is None:
                        raise SubscriberError(f"{process.name} has ended", detail=process.last_lines())
                await anyio.sleep(POLL)
            return
        raise SubscriberError(
            f"a step has taken more than {TIMEOUT:.0f} seconds",
            detail="\n".join(process.last_lines(5) for process in (self.archive, self.load, self.follow)),
        )


async def run_demo() -> int:
    """Run the demo. Returns 1 if the lake differs from the publisher at one of the positions."""
    async with temporary_servers() as servers, AsyncExitStack() as stack:
        with open_view() as view:
            publisher = await servers.create("publisher")
            await publisher.start()
            connection = await connect(publisher.dsn(), settings=PUBLIC)
            await connection.execute(_TABLES.format(orders=ORDERS))
            await connection.close()
            view.event(f"publisher: PostgreSQL with {ORDERS:,} orders of 1,000 customers")
            store = await _start_store(servers, stack)
            view.event(f"object store: SeaweedFS at {store.url}, bucket s3://{BUCKET}")
            master = await stack.enter_async_context(standalone(servers.directory))
            view.event(f"Spark: {master}, two workers of one core")
            demo = LakeDemo(publisher, servers.directory, master, view)
            async with demo.running():
                await demo.run()
        return 0 if _report(demo) else 1


async def _start_store(servers: Servers, stack: AsyncExitStack) -> ObjectStore:
    directory = servers.directory
    store, place = ObjectStore(), directory / "objects"
    place.mkdir()
    environment = {
        **store.environment(),
        "JAVA_HOME": str(java_home(directory)),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
    }
    stack.enter_context(environment_variables(environment))
    process = Process("store", store.command(place), directory)
    stack.callback(store.remove_sockets)
    process.start()
    stack.push_async_callback(process.stop)
    await anyio.to_thread.run_sync(store.wait, lambda: process.pid is not None, process.last_lines)
    return store


def _report(demo: LakeDemo) -> bool:
    """Print the tables as of each position. Returns True if all are the publisher's."""
    print("\nThe lake as of each position, read without Spark:")
    same = True
    for position, expected in demo.expected.items():
        sums = demo.sums(position)
        same &= sums == expected
        print(f"  {position!s:>10}  {sums}  {'as on the publisher' if sums == expected else f'NOT {expected}'}")
    files = [len(demo.lake.table(name).file_uris()) for name in demo.lake.tables()]
    print(f"{count(sum(files), 'file')} in {count(len(files), 'table')}; {'identical' if same else 'DIFFERENT'}")
    return same


def main() -> None:
    """Run the demo."""
    try:
        sys.exit(anyio.run(run_demo))
    except SubscriberError as error:
        print(f"ERROR:  {error.message}\nDETAIL:  {error.detail}", file=sys.stderr)
        sys.exit(3)


if __name__ == "__main__":
    main()
