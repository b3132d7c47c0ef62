"""`subscriber demo`: replicate between two temporary servers, kill the worker in the middle, and verify the result.

    publisher ◀── pgbench, a writer of many types        two temporary servers, PostgreSQL 18
        │
    subscriber run   (a real process, killed with SIGKILL twice and restarted)
        ▼
    target    ── compared with the publisher row by row when all changes have arrived

If Spark is installed, it also writes pgbench's tables to a lake (pgbench_lake.py).

Writing begins before the subscription is created, so that the tables change while they are copied. The first kill
follows soon after that, the second in the middle of streaming.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from time import monotonic

import anyio

from subscriber import formatting
from subscriber.apply.table_states import TableState
from subscriber.catalog.connection import CatalogConnection, Connection
from subscriber.catalog.store import progress_records
from subscriber.catalog.store.subscription_sequence import load_sequences
from subscriber.catalog.store.subscriptions import find_subscription
from subscriber.catalog.store.workers import WorkerState
from subscriber.comparison.comparison import verify
from subscriber.comparison.result import TableComparison
from subscriber.connection.connect import connect
from subscriber.demo import processes
from subscriber.demo import schema as demo_schema
from subscriber.demo.compare import TableResult
from subscriber.demo.pgbench_lake import PUBLICATION as LAKE_PUBLICATION
from subscriber.demo.pgbench_lake import TABLES as LAKE_TABLES
from subscriber.demo.pgbench_lake import PgbenchLake, describe_spark, has_spark
from subscriber.demo.servers import Server, Servers, temporary_servers
from subscriber.demo.view import View, open_view
from subscriber.demo.writer import DemoWriter, prepare
from subscriber.errors import SubscriberError
from subscriber.lsn import Lsn
from subscriber.quoting import literal, qualified
from subscriber.status.collect import assess_all, read_catalog
from subscriber.status.history import StatusHistory
from subscriber.status.model import SubscriptionStatus
from subscriber.status.snapshot import StatusSnapshot

RATE = 1000  # pgbench transactions per second: all servers and clients share one machine
LATEST_FIRST_KILL = 0.3  # fraction of the run after which the worker is killed even if it is not copying
SECOND_KILL = 0.6  # fraction of the run after which it is killed again, as soon as it is streaming
LATEST_SECOND_KILL = 0.85  # fraction after which it is killed even if it is not streaming
DOWN = 1.0  # seconds until it is restarted
STUCK = 120.0  # seconds without any progress after the last write
LOOK = 0.3  # seconds between two status checks
DIFFERENT = 1  # the exit status

# Sums that pgbench keeps equal in each transaction, and the position of the target.
_BALANCES = f"""
SELECT (SELECT coalesce(sum(abalance), 0) FROM public.pgbench_accounts),
       (SELECT coalesce(sum(tbalance), 0) FROM public.pgbench_tellers),
       (SELECT coalesce(sum(bbalance), 0) FROM public.pgbench_branches),
       (SELECT coalesce(sum(delta), 0) FROM public.pgbench_history),
       (SELECT p.remote_lsn FROM ({progress_records.APPLY_PROGRESS}) p)
"""
_CONFLICT = "conflict detected on relation"  # in the worker's log only if a change was applied to the wrong row


class Demo:
    """One run of the demo.

    `kills` describes when the worker was killed. `checks` counts the checks of the target, `torn` those that saw part
    of a transaction.
    """

    def __init__(self, source: Server, target: Server, view: View, servers: Servers, seconds: int) -> None:
        self.source, self.target, self.view, self.seconds = source, target, view, seconds
        self.launcher = processes.launcher(target.dsn(), servers.directory)
        self.pgbench = processes.pgbench(source, seconds, RATE, servers.directory)
        self.writer = DemoWriter(source.dsn())
        self.lake = PgbenchLake(source, view, servers.directory) if has_spark() else None
        self.kills: list[str] = []
        self.checks = 0
        self.torn = 0
        self.sequences = 0  # number of those that were compared
        self.other_sequences: list[str] = []  # those that differ
        self.latest: tuple[StatusSnapshot, list[SubscriptionStatus]] | None = None
        self._stop_writing = anyio.Event()
        self._ready = False

    async def run(self) -> Lsn:
        """Write, subscribe, kill and catch up. Returns the position at which both sides must be equal."""
        if self.lake is not None:
            self.lake.start()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.writer.run, self._stop_writing)
            self.pgbench.start()
            self.view.event(
                f"writing: pgbench, {RATE} transactions/s, and a writer for {len(demo_schema.START)} tables"
            )
            await self._subscribe()
            tasks.start_soon(self._watch)
            await self._kill_now_and_then()
            position = await self._finish_writing()
            await self._catch_up(position)
            await self._refresh_sequences()
            tasks.cancel_scope.cancel()
        return position

    async def stop(self) -> None:
        """End all processes but the servers."""
        await self.launcher.stop()
        await self.pgbench.stop()
        if self.lake is not None:
            await self.lake.stop()

    async def _subscribe(self) -> None:
        statement = (
            f"CREATE SUBSCRIPTION {demo_schema.SUBSCRIPTION} CONNECTION '{self.source.dsn()}' "
            f"PUBLICATION {demo_schema.PUBLICATION} WITH (sequence_names = 'demo.tickets')"
        )
        await processes.execute(self.target.dsn(), statement)
        self.view.event(f"subscriber exec: {statement}")
        self.launcher.start()
        self.view.event(f"subscriber run: started, pid {self.launcher.pid}")

    async def _kill_now_and_then(self) -> None:
        start = monotonic()
        with anyio.move_on_after(LATEST_FIRST_KILL * self.seconds):
            while not self._is_copying():
                await anyio.sleep(LOOK / 10)
        await self._kill()
        await anyio.sleep(max(0.0, start + SECOND_KILL * self.seconds - monotonic()))
        with anyio.move_on_after(max(0.0, start + LATEST_SECOND_KILL * self.seconds - monotonic())):
            while not self._ready:
                await anyio.sleep(LOOK / 10)
        await self._kill()
        if self.lake is not None:
            self.lake.load()
        await anyio.sleep(max(0.0, start + self.seconds - monotonic()))

    async def _kill(self) -> None:
        self._check_launcher()
        pid = self.launcher.pid
        await self.launcher.kill9()
        self.kills.append("while it was streaming" if self._ready else "while tables were copied")
        self.view.event(f"kill -9 {pid}: the worker is gone, {self._tables()}", style="bold red")
        await anyio.sleep(DOWN)
        self.launcher.start()
        self.view.event(f"subscriber run: restarted, pid {self.launcher.pid}")

    def _is_copying(self) -> bool:
        status = self._status()
        return status is not None and status.tables.keys() - {"waiting"} != set()

    def _check_launcher(self) -> None:
        if self.launcher.pid is None:
            raise SubscriberError("subscriber run has ended unexpectedly", detail=self.launcher.last_lines())

    def _tables(self) -> str:
        status = self._status()
        if status is None or not status.tables:
            return "nothing copied yet"
        return "tables: " + ", ".join(f"{number} {state}" for state, number in status.tables.items())

    def _status(self) -> SubscriptionStatus | None:
        return self.latest[1][0] if self.latest and self.latest[1] else None

    async def _finish_writing(self) -> Lsn:
        self._stop_writing.set()
        await self.pgbench.wait()
        async with _connection(self.source) as connection:
            position = Lsn.parse(await connection.fetchval("SELECT pg_current_wal_lsn()::text"))
        self.view.event(f"writers stopped; the publisher is at {position}")
        return position

    async def _catch_up(self, position: Lsn) -> None:
        """Wait until all tables are ready and all changes before `position` are durable on the target."""
        started = moved = monotonic()
        seen: object = None
        while not self._has_reached(position):
            self._check_launcher()
            status = self._status()
            now = (status.confirmed, dict(status.tables)) if status else None
            if now != seen:
                seen, moved = now, monotonic()
            if monotonic() - moved > STUCK:
                raise SubscriberError(
                    f"the target does not reach {position}",
                    detail=f"It is at {status.confirmed if status else None}; {self._tables()}.\n"
                    + self.launcher.last_lines(),
                )
            await anyio.sleep(LOOK / 2)
        self.view.event(f"the target has reached {position}, {monotonic() - started:.1f} s later")

    async def _refresh_sequences(self) -> None:
        """Set the target's sequences to their last values, and compare them."""
        statement = f"ALTER SUBSCRIPTION {demo_schema.SUBSCRIPTION} REFRESH SEQUENCES"
        await processes.execute(self.target.dsn(), statement)
        self.view.event(f"subscriber exec: {statement}")
        async with _connection(self.target) as target, _connection(self.source) as source:
            subscription = await find_subscription(target, demo_schema.SUBSCRIPTION)
            assert subscription is not None
            with anyio.fail_after(STUCK):
                sequences = await load_sequences(target, subscription.oid)
                while any(sequence.state != TableState.READY for sequence in sequences):
                    self._check_launcher()
                    await anyio.sleep(LOOK)
                    sequences = await load_sequences(target, subscription.oid)
            names = [qualified(behind.schema, behind.name) for behind in sequences]
            here, there = await source.fetch(_values(names)), await target.fetch(_values(names))
        self.sequences = len(names)
        self.other_sequences = [row["name"] for row, other in zip(here, there, strict=True) if row != other]

    def _has_reached(self, position: Lsn) -> bool:
        status = self._status()
        if status is None or status.state != WorkerState.STREAMING or status.not_ready or not status.tables:
            return False
        return status.publisher.confirmed is not None and status.publisher.confirmed >= position

    async def _watch(self) -> None:
        """Check the status and the target repeatedly, and show the status."""
        async with (
            CatalogConnection.open(self.target.dsn(), "subscriber demo") as catalog,
            _connection(self.target) as connection,
        ):
            history = StatusHistory()
            while True:
                look = await read_catalog(catalog)
                statuses = history.add(look, await assess_all(look))
                self.latest = look, statuses
                await self._look_at_balances(connection)
                self.view.show(look, statuses, self._header())
                await anyio.sleep(LOOK)

    async def _look_at_balances(self, connection: Connection) -> None:
        """Check that source transactions are visible as a whole or not at all, once the tables are handed over."""
        if not self._ready and self.latest is not None and _is_handed_over(self.latest[0]):
            self._ready = self.writer.may_truncate = True
        if self._ready:
            row = await connection.fetchrow(_BALANCES)
            assert row is not None
            *sums, position = row
            self.checks += 1
            if len(set(sums)) != 1:
                self.torn += 1
                self.view.event(f"at {position} the balances do not agree: {sums}", style="bold red")

    def _header(self) -> str:
        return f"writer: {formatting.count(self.writer.transactions, 'transaction')}, kills: {len(self.kills)}"


def _values(names: Sequence[str]) -> str:
    """Build a query for name, last_value and is_called of sequences."""
    return " UNION ALL ".join(f"SELECT {literal(name)} AS name, last_value, is_called FROM {name}" for name in names)


def _is_handed_over(look: StatusSnapshot) -> bool:
    """Return True if all tables have reached the apply worker's position.

    Each table was copied at a position of its own.
    """
    (subscription,) = look.subscriptions
    relations = look.relations[subscription.oid]
    progress = look.progress.get(subscription.oid, Lsn(0))
    return all(relation.state is TableState.READY and (relation.lsn or Lsn(0)) <= progress for relation in relations)


@asynccontextmanager
async def _connection(server: Server) -> AsyncIterator[Connection]:
    connection = await connect(server.dsn(), application_name="subscriber demo")
    try:
        yield connection
    finally:
        connection.terminate()


async def run_demo(*, seconds: int, scale: int, keep: bool) -> int:
    """Run the demo and print its result. Returns DIFFERENT if the sides differ."""
    async with temporary_servers() as servers:
        with open_view() as view:
            source, target = await start_servers(servers, view, ("publisher", "target"))
            await _prepare(source, target, scale, view)
            demo = Demo(source, target, view, servers, seconds)
            try:
                position = await demo.run()
                results = await _compare(demo)
                if demo.lake is not None:
                    await demo.lake.finish()
            except BaseException:
                await demo.stop()
                raise
        try:
            same = _report(demo, position, results)
            if keep:
                await _keep(demo)
        finally:
            await demo.stop()
        return 0 if same else DIFFERENT


async def start_servers(servers: Servers, view: View, names: tuple[str, str]) -> tuple[Server, Server]:
    """Create two servers, and start them."""
    started = monotonic()
    made: dict[str, Server] = {}

    async def make(name: str) -> None:
        made[name] = await servers.create(name)
        await made[name].start()

    async with anyio.create_task_group() as tasks:
        for name in names:
            tasks.start_soon(make, name)
    source, target = (made[name] for name in names)
    version = (await source.program("psql", "-XAtc", "SHOW server_version")).strip()
    view.event(
        f"two servers, PostgreSQL {version}, ports {source.port} and {target.port}, in {monotonic() - started:.1f} s"
    )
    return source, target


async def _prepare(source: Server, target: Server, scale: int, view: View) -> None:
    await source.program("pgbench", "--initialize", "--quiet", f"--scale={scale}")
    async with _connection(source) as connection:
        await connection.execute(demo_schema.SCHEMA)
        await prepare(connection)
        await connection.execute(f"CREATE PUBLICATION {demo_schema.PUBLICATION} FOR ALL TABLES")
        await connection.execute(f"CREATE PUBLICATION {LAKE_PUBLICATION} FOR TABLE {', '.join(LAKE_TABLES)}")
    await processes.copy_schema(source, target)
    view.event(f"schema on both sides, rows on the publisher: pgbench at scale {scale}, and tables of many types")


async def _compare(demo: Demo) -> list[TableResult]:
    name = demo_schema.SUBSCRIPTION
    demo.view.event(f"subscriber verify {name}")
    comparison = await verify(demo.target.dsn(), name)
    demo.view.event(f"  compared at {comparison.lsn}")
    results = [_result(table) for table in comparison.tables]
    for result in results:
        demo.view.compared(result)
    return results


def _result(table: TableComparison) -> TableResult:
    schema, _, name = table.name.partition(".")
    result = TableResult(schema, name, note=table.note)
    result.only_source = table.missing_count + table.changed_count
    result.only_target = table.extra_count + table.changed_count
    result.same = table.rows - result.only_source
    if table.differing_buckets:
        result.note = "differs in too many rows to name them"
    return result


def _report(demo: Demo, position: Lsn, results: list[TableResult]) -> bool:
    """Print the result. Returns True if both sides are equal."""
    different = [result for result in results if result.differs]
    rows = sum(result.same for result in results)
    done = processes.transactions_of(demo.pgbench.log.read_text())
    log = demo.launcher.log.read_text(errors="replace").splitlines()
    conflicts = [line for line in log if _CONFLICT in line]
    print()
    for result in different:
        print(
            f"{result.schema}.{result.name}: "
            + (
                result.note
                or f"{result.only_source:,} rows only on the publisher, {result.only_target:,} on the target"
            )
        )
    print(f"{'identical' if not different else 'DIFFERENT'} at {position}:")
    print(f"  {formatting.count(rows, 'row')} in {formatting.count(len(results), 'table')} compared")
    if demo.lake is not None:
        print(f"  {formatting.count(len(LAKE_TABLES), 'table')} of a lake compared, written by {describe_spark()}")
    equal = formatting.count(demo.sequences - len(demo.other_sequences), "sequence")
    print(f"  {equal} with the publisher's values after REFRESH SEQUENCES")
    print(
        f"  {formatting.count(done, 'transaction')} of pgbench and {demo.writer.transactions:,} of a writer of "
        f"many types ({demo.writer.rolled_back:,} more rolled back)"
    )
    print(f"  kill -9 of the worker, {len(demo.kills)} times: {', '.join(demo.kills)}")
    if demo.other_sequences:
        print(f"WRONG: sequences with other values: {', '.join(demo.other_sequences)}")
    if demo.torn:
        print(f"WRONG: {demo.torn} of {demo.checks} checks of the target saw part of a transaction")
    elif demo.checks:
        print(f"  {formatting.count(demo.checks, 'check')} of the target meanwhile saw only whole transactions")
    if conflicts:
        print(f"WRONG: {formatting.count(len(conflicts), 'conflict')} where none should be, first {conflicts[0]}")
    return not (different or demo.torn or conflicts or demo.other_sequences)


async def _keep(demo: Demo) -> None:
    """Print the addresses and files, and wait for an interrupt."""
    print(
        f"\nThe servers and the worker run until Ctrl-C (or: kill {os.getpid()}).\n"
        f"  publisher  {demo.source.dsn()}\n"
        f"  target     {demo.target.dsn()}\n"
        f"  log        {demo.launcher.log}\n"
        f"Try:\n"
        f"  subscriber status --watch --target {demo.target.dsn()}\n"
        f"  {demo.source.bin / 'psql'} {demo.source.dsn()}",
        flush=True,
    )
    await anyio.sleep_forever()
