"""Rounds of random damage under everything that can go wrong: kills, a slow standby, PREPARE and TRUNCATE.

Each round draws its own numbers from SUBSCRIBER_REPAIR_SEED and its number. SUBSCRIBER_REPAIR_FIRST continues with a
later round. The totals are printed after each round.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TypeVar

import anyio
import asyncpg
import pytest

from subscriber.cli.commands.repair import describe
from subscriber.cli.commands.verify import as_json
from subscriber.comparison import verify
from subscriber.errors import SubscriberError
from subscriber.repair import Repair, repair
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Program, Subscriptions
from tests.repair.test_repair import run_for

Result = TypeVar("Result")
ROUNDS = int(os.environ.get("SUBSCRIBER_REPAIR_ROUNDS", "1000"))
FIRST = int(os.environ.get("SUBSCRIBER_REPAIR_FIRST", "1"))
SEED = int(os.environ.get("SUBSCRIBER_REPAIR_SEED", "1"))
# A key that moves to another partition is an INSERT. Damage has left a row with its next key, and no row with this one.
POLICY = "public.moved insert_exists: apply_remote, public.moved update_exists: apply_remote"
VICTIMS = ("launcher", "publisher", "target")
LOST = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError)
COLLATION = "CREATE COLLATION alike (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
DEFINITIONS = (
    "CREATE TYPE pair AS (a int, b text)",
    "CREATE TABLE kinds (id int PRIMARY KEY, t text, c char(6), f float8, n numeric, j jsonb, l text COLLATE alike,"
    " p pair, big text, twice int GENERATED ALWAYS AS (id * 2) STORED)",
    "ALTER TABLE kinds ALTER big SET STORAGE EXTERNAL",
    "CREATE TABLE moved (id int, part int, big text, PRIMARY KEY (id, part)) PARTITION BY RANGE (part)",
    "CREATE TABLE moved_1 PARTITION OF moved FOR VALUES FROM (0) TO (50)",
    "CREATE TABLE moved_2 PARTITION OF moved FOR VALUES FROM (50) TO (100)",
    "ALTER TABLE moved_1 ALTER big SET STORAGE EXTERNAL",
    "ALTER TABLE moved_2 ALTER big SET STORAGE EXTERNAL",
    "CREATE TABLE bag (a int, n numeric, f float8)",
    "ALTER TABLE bag REPLICA IDENTITY FULL",
    "CREATE TABLE emptied (id int PRIMARY KEY, u int UNIQUE)",
    "CREATE TABLE child (id int PRIMARY KEY, parent int REFERENCES kinds)",
)
TABLES = ("kinds", "moved", "bag", "emptied", "child")
ROWS = (
    "INSERT INTO kinds (id, t, c, f, n, j, l, p, big) SELECT i, 't' || i, 'c', i, i, '{}', 'text', ROW(i, 'b')::pair,"
    " repeat(md5(i::text), 90) FROM generate_series(1, 300) i",
    "INSERT INTO moved SELECT i, i % 100, repeat(md5(i::text), 90) FROM generate_series(1, 300) i",
    "INSERT INTO bag SELECT i % 40, i % 3, i % 5 FROM generate_series(1, 200) i",
    "INSERT INTO emptied SELECT i, i FROM generate_series(1, 200) i",
    "INSERT INTO child SELECT i, i FROM generate_series(1, 100) i",
)
# Values that are easily mistaken for one another.
VALUES = {
    "t": ("NULL", "''", "' '", "'a'"),
    "c": ("NULL", "''", "'a'", "'a  b'"),
    "f": ("'-0'", "0", "'NaN'", "'Infinity'", "0.1", "NULL"),
    "n": ("1", "1.0", "1.00", "'NaN'", "0", "NULL"),
    "j": ("'{}'", "'null'", "NULL", "'1'", "'1.0'"),
    "l": ("'text'", "'TEXT'", "'Text'"),
    "p": ("NULL", "ROW(NULL, NULL)::pair", "ROW(1, NULL)::pair", "ROW(1, '')::pair"),
    "big": ("NULL", "''", "repeat('x', 3000)", "repeat('y', 9000)"),
}
RESET = ("ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")
CONTENT = "SELECT r::text FROM {} r ORDER BY 1"


def _damage(chance: random.Random) -> list[str]:
    column = chance.choice(list(VALUES))
    first, width = chance.randrange(300), chance.randrange(1, 60)
    ids = f"BETWEEN {first} AND {first + width}"
    statements = [
        f"UPDATE kinds SET {column} = {chance.choice(VALUES[column])} WHERE id {ids}",
        f"DELETE FROM kinds WHERE id {ids}",
        f"INSERT INTO kinds (id) SELECT -i FROM generate_series(1, {width}) i ON CONFLICT DO NOTHING",
        f"UPDATE moved SET part = (part + 50) % 100 WHERE id {ids}",
        f"UPDATE moved SET big = 'z' WHERE id {ids}",
        f"DELETE FROM bag WHERE ctid IN (SELECT ctid FROM bag LIMIT {width})",
        f"UPDATE bag SET n = {chance.choice(('1', '1.0', '1.00'))} WHERE a = {first % 40}",
        f"UPDATE bag SET f = '-0' WHERE a = {first % 40} AND f = 0",
        "UPDATE emptied SET u = -u",
        f"UPDATE emptied SET u = 100000 + (u + {width}) % 200",
        "TRUNCATE emptied",
        f"DELETE FROM child WHERE id {ids}",
    ]
    return chance.sample(statements, chance.randrange(1, 6))


@asynccontextmanager
async def _writing(  # noqa: PLR0915 - a writer for each kind of change
    source: Database, chance: random.Random, *, prepares: bool, standby: bool
) -> AsyncIterator[None]:
    """Write to the tables, for the length of the block. Writers connect again after a crash of the server."""
    stop = anyio.Event()

    async def repeatedly(work: object) -> None:
        while not stop.is_set():
            with suppress(*LOST):
                connection = await asyncpg.connect(source.dsn(), timeout=10)
                try:
                    while not stop.is_set():
                        with suppress(asyncpg.IntegrityConstraintViolationError, asyncpg.DeadlockDetectedError):
                            await work(connection)  # type: ignore[operator]
                finally:
                    connection.terminate()
            await anyio.sleep(0.1)

    async def change(connection: asyncpg.Connection) -> None:
        column, one = chance.choice(list(VALUES)), chance.randrange(1, 320)
        async with connection.transaction():
            await connection.execute(f"UPDATE kinds SET {column} = {chance.choice(VALUES[column])} WHERE id = {one}")
            await connection.execute(f"UPDATE moved SET part = {chance.randrange(100)} WHERE id = {one}")
            await connection.execute(f"DELETE FROM bag WHERE a = {one % 40}")
            await connection.execute(f"INSERT INTO bag VALUES ({one % 40}, 1.0, '-0'), ({one % 40}, 1, 0)")
            await connection.execute(f"UPDATE kinds SET id = {one + 400} - id WHERE id IN ({one}, {400 - one})")
            await connection.execute(f"DELETE FROM child WHERE id = {one}")
        await anyio.sleep(0.005)

    async def empty(connection: asyncpg.Connection) -> None:
        await connection.execute("TRUNCATE emptied")
        await connection.execute("INSERT INTO emptied SELECT i, 200 - i FROM generate_series(1, 150) i")
        await anyio.sleep(chance.uniform(0.3, 4))

    async def leave_open(connection: asyncpg.Connection) -> None:
        async with connection.transaction():
            await connection.execute(f"UPDATE moved SET big = big || 'o' WHERE id = {chance.randrange(1, 300)}")
            await anyio.sleep(_mostly_short(chance, 1.5))

    async def prepare(connection: asyncpg.Connection) -> None:
        await _end_prepared(connection)  # of a session that was lost
        gid = f"hostile_{chance.randrange(10**9)}"
        await connection.execute(
            f"BEGIN; UPDATE moved SET part = (part + 7) % 100 WHERE id = {chance.randrange(1, 300)};"
            f" PREPARE TRANSACTION '{gid}'"
        )
        await anyio.sleep(chance.uniform(0.05, 0.4))
        await connection.execute(f"{chance.choice(('COMMIT', 'ROLLBACK'))} PREPARED '{gid}'")

    async def delay(connection: asyncpg.Connection) -> None:
        await connection.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        await connection.execute("SELECT pg_reload_conf()")
        await anyio.sleep(_mostly_short(chance, 3))
        for statement in RESET:
            await connection.execute(statement)
        await anyio.sleep(chance.uniform(0.05, 0.3))

    async with anyio.create_task_group() as tasks:
        for work in (change, change, empty, leave_open, *[prepare] * prepares, *[delay] * standby):
            tasks.start_soon(repeatedly, work)
        try:
            yield
        finally:
            stop.set()
            with anyio.CancelScope(shield=True):
                await retried(lambda: source.execute(*RESET))
    await retried(lambda: source.execute(*RESET))
    await retried(lambda: _end_all_prepared(source))


def _mostly_short(chance: random.Random, longest: float) -> float:
    """Return a number of seconds. Each snapshot of the publisher waits for it, so one in five may be long."""
    return chance.uniform(0.05, longest if chance.random() < 0.2 else longest / 8)


async def _end_prepared(connection: asyncpg.Connection) -> None:
    for (gid,) in await connection.fetch("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"):
        await connection.execute(f"ROLLBACK PREPARED '{gid}'")


async def _end_all_prepared(source: Database) -> None:
    async with source.connection() as connection:
        await _end_prepared(connection)


async def retried(work: Callable[[], Awaitable[Result]], seconds: float = 60) -> Result:
    """Repeat `work` while a server recovers or the launcher starts."""
    with anyio.fail_after(seconds):
        while True:
            try:
                return await work()
            except (*LOST, SubscriberError) as error:
                if "refused" in str(error):
                    raise
                print(f"  again: {error}"[:300], flush=True)
            await anyio.sleep(0.2)


async def crash(database: Database) -> None:
    """Kill a backend with -9, after which the server ends all others and recovers."""
    with suppress(*LOST):
        pid = await database.value(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() LIMIT 1"
        )
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def closing(program: Program) -> Iterator[None]:
    try:
        yield
    finally:
        program.kill()


@dataclass
class Totals:
    """What the rounds of a run have done. Sums of seconds are those of the steps of all rounds."""

    rounds: Counter[str] = field(default_factory=Counter)  # by command
    kills: Counter[str] = field(default_factory=Counter)  # by process
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by step
    damaged: int = 0  # rows that statements on the target have changed
    repaired: int = 0  # rows of subscriber.repairs, of all commands
    counted: int = 0  # repaired rows whose bytes are known
    bytes_read: int = 0  # bytes of rows that the publisher has sent for them
    second_repairs: int = 0

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        started = monotonic()
        try:
            yield
        finally:
            self.seconds[step] += monotonic() - started

    def add(self, result: Repair) -> None:
        if repaired := sum(table.repaired for table in result.tables):
            self.counted += repaired
            self.bytes_read += result.bytes_read

    def __str__(self) -> str:
        rounds = max(1, self.rounds.total())
        seconds = ", ".join(f"{step} {value / rounds:.1f} s" for step, value in self.seconds.items())
        return (
            f"{rounds} clean rounds {dict(self.rounds)}; rows: {self.damaged} damaged, {self.repaired} repaired,"
            f" {self.bytes_read / max(1, self.counted):.0f} bytes sent for each; killed: {dict(self.kills)};"
            f" second repairs: {self.second_repairs}; a round: {seconds}"
        )


@dataclass
class HostileRounds:
    """The rounds of one subscription, whose launcher is `program`."""

    source: Database
    target: Database
    program: Program
    subscriptions: Subscriptions
    two_phase: bool
    totals: Totals = field(default_factory=Totals)

    async def round(self, number: int) -> None:
        """Damage, repair and compare. Each round begins and ends with equal tables."""
        chance, totals = random.Random(f"{SEED} {number}"), self.totals
        command = "repair" if self.two_phase else chance.choices(("repair", "resync", "reseed"), (6, 3, 1))[0]
        async with _writing(self.source, chance, prepares=self.two_phase, standby=chance.random() < 0.4):
            with totals.timed("commands"):
                await self._killed_commands(command, chance)
            if command == "reseed":
                with totals.timed("reseed"):
                    await retried(lambda: _reseed(self.target), 180)
            with totals.timed("repair"):
                totals.add(await retried(lambda: _repair(self.target), 900))
        with totals.timed("sync"):
            await retried(lambda: self.subscriptions.wait_for_sync(self.source, timeout=120), 240)
        with totals.timed("verify"):
            await self._compare(number)
        totals.repaired = await self.target.value("SELECT count(*) FROM subscriber.repairs")
        totals.rounds[command] += 1

    async def _killed_commands(self, command: str, chance: random.Random) -> None:
        """Run a command once or twice, each time after damage, and kill it. Kill other processes as well."""
        for _ in range(chance.randrange(1, 3)):
            statements = _damage(chance)
            self.totals.damaged += await retried(lambda: counted_damage(self.target, statements))  # noqa: B023
            tables = chance.sample(TABLES, 2) if command == "resync" else []
            line = [sys.executable, "-m", "subscriber", command, "s", *tables, "--target", self.target.dsn()]
            async with anyio.create_task_group() as tasks:
                for victim in chance.sample(VICTIMS, chance.choice((0, 0, 1, 1, 2))):
                    tasks.start_soon(self._kill, victim, chance.uniform(0, 1.5))
                killed = await run_for(line, chance.uniform(0.4, 2.5))
            self.totals.kills["command"] += killed

    async def _kill(self, victim: str, delay: float) -> None:
        await anyio.sleep(delay)
        if victim == "launcher":
            self.program.kill()
            await self.program.start()
        else:
            await crash(self.source if victim == "publisher" else self.target)
        self.totals.kills[victim] += 1

    async def _compare(self, number: int) -> None:
        comparison = await retried(lambda: verify(self.target.dsn(), "s"), 120)
        if not comparison.is_same:  # damage that the last repair has found locked, or that a slow writer hid
            print(f"  repaired again: {[table for table in comparison.tables if not table.is_same]}"[:600], flush=True)
            self.totals.add(await retried(lambda: _repair(self.target), 900))
            self.totals.second_repairs += 1
            comparison = await retried(lambda: verify(self.target.dsn(), "s"), 120)
        assert comparison.is_same, (number, as_json(comparison))
        for table in TABLES:
            contents = [await database.rows(CONTENT.format(table)) for database in (self.source, self.target)]
            assert contents[0] == contents[1], (number, table)


@pytest.mark.soak
@pytest.mark.timeout(36_000)
@pytest.mark.parametrize("two_phase", [False, True], ids=["plain", "two_phase"])
async def test_rounds_of_random_damage_are_repaired_under_kills_and_truncates(
    source_db: Database, target_db: Database, processes: Path, subscriptions: Subscriptions, two_phase: bool
) -> None:
    for database in (source_db, target_db):
        try:
            await database.execute(COLLATION, *DEFINITIONS)
        except asyncpg.FeatureNotSupportedError:  # a server without ICU
            await database.execute(*(definition.replace(" COLLATE alike", "") for definition in DEFINITIONS))
    await source_db.execute(*ROWS, "CREATE PUBLICATION p FOR ALL TABLES WITH (publish_via_partition_root = true)")
    program = Program(target_db.dsn(), processes / "run.log", options=["--setting", "retry_interval=0.2s"])
    with closing(program):
        await program.start()
        await subscriptions.create(
            source_db,
            "p",
            "s",
            two_phase=two_phase,
            streaming="parallel",
            conflict_policy=f"'{POLICY}'",
            source_tag="'all'",
        )
        await subscriptions.wait_for_ready(source_db, timeout=120)
        rounds = HostileRounds(source_db, target_db, program, subscriptions, two_phase)
        try:
            for number in range(FIRST, FIRST + ROUNDS):
                await rounds.round(number)
                print(f"round {number}: {rounds.totals}", flush=True)
        except BaseException:
            print(program.text[-10_000:])
            raise


async def counted_damage(target: Database, statements: list[str]) -> int:
    """Change rows without the subscription, as damage() does. Returns their number."""
    async with target.connection() as connection, connection.transaction():
        await connection.execute("SET LOCAL session_replication_role = replica")
        rows = 0
        for statement in statements:
            if statement.startswith("TRUNCATE"):
                rows += await connection.fetchval(f"SELECT count(*) FROM {statement.removeprefix('TRUNCATE ')}")
                await connection.execute(statement)
            else:
                rows += int((await connection.execute(statement)).split()[-1])
    return rows


async def _repair(target: Database) -> Repair:
    """Repair. A table that is emptied in each attempt is repaired when the writers have ended."""
    result = await repair(target.dsn(), "s", attempts=10)
    left = {table.name for table in result.tables if not table.is_complete} | result.compare_again
    if left - {"public.emptied"}:
        raise SubscriberError("; ".join(describe(result, dry_run=False)))
    return result


async def _reseed(target: Database) -> None:
    from subscriber.repair import reseed

    await reseed(target.dsn(), "s")
