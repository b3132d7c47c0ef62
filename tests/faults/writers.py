"""Concurrent transactions of every kind, by several sessions that survive the publisher's crashes.

    nested savepoints, rolled back and released · rolled back as a whole · a few rows, or thousands · PREPARE
    TRANSACTION, and later COMMIT PREPARED or ROLLBACK PREPARED by any session

Table `keyed` has a key; `equal` has equal rows under REPLICA IDENTITY FULL. Two sessions never wait for each other's
rows: applying transactions while they are in progress must not depend on the order in which they end.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from random import Random

import anyio
import asyncpg

from tests.faults.environment import Scene
from tests.plugins.fix_cluster import Database

TABLES = (
    "CREATE TABLE keyed (id bigint PRIMARY KEY, writer int, number int, text text)",
    "CREATE TABLE equal (a int, b text)",
    "ALTER TABLE equal REPLICA IDENTITY FULL",
)
ON_SOURCE = (
    "CREATE SEQUENCE ids CACHE 100",
    "INSERT INTO equal SELECT 1, 'same' FROM generate_series(1, 200)",
    "ALTER PUBLICATION p ADD TABLE keyed, equal",
)
GIDS = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
MOST_PREPARED = 4  # of the servers' ten

# asyncpg sometimes raises the last one when a server dies in the middle of a response.
_GONE = (
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.CannotConnectNowError,
    asyncpg.InternalClientError,
    OSError,
)
# Another session has resolved it, or holds it now; or a crash happened between the two phases.
_NOT_NOW = (asyncpg.UndefinedObjectError, asyncpg.ObjectInUseError, asyncpg.ObjectNotInPrerequisiteStateError)


class Writer:
    """One session with one transaction after another."""

    def __init__(self, number: int, seed: int, source: Database, largest: int) -> None:
        self.ended = 0  # transactions
        self._number = number
        self._random = Random(f"{seed}/{number}")
        self._source = source
        self._largest = largest  # rows of a statement
        self._savepoints: list[str] = []

    async def run(self, stop: anyio.Event, pause: float) -> None:
        """Write until `stop` is set. Waits for a publisher that is down."""
        while not stop.is_set():
            try:
                connection = await asyncpg.connect(self._source.dsn())
                try:
                    while not stop.is_set():
                        await self._transaction(connection)
                        await self._resolve(connection)
                        self.ended += 1
                        await anyio.sleep(self._random.uniform(0, 2 * pause))
                finally:
                    connection.terminate()
            except _GONE:
                await anyio.sleep(0.05)

    async def _transaction(self, connection: asyncpg.Connection[asyncpg.Record]) -> None:
        self._savepoints = []
        await connection.execute("BEGIN")
        for _ in range(self._random.choice([1, 2, 5, 12])):
            await connection.execute(self._statement())
            if self._random.random() < 0.1:
                await anyio.sleep(self._random.uniform(0, 0.1))
        await self._end(connection)

    async def _end(self, connection: asyncpg.Connection[asyncpg.Record]) -> None:
        dice = self._random.random()
        if dice < 0.15:
            await connection.execute("ROLLBACK")
        elif dice < 0.45 and len(await connection.fetch(GIDS)) < MOST_PREPARED:
            await connection.execute(f"PREPARE TRANSACTION 'w{self._number} {self._random.getrandbits(60)}'")
        else:
            await connection.execute("COMMIT")

    async def _resolve(self, connection: asyncpg.Connection[asyncpg.Record]) -> None:
        """Resolve some prepared transactions of any session."""
        for (gid,) in await connection.fetch(GIDS):
            if self._random.random() < 0.2:
                await resolve(connection, gid, self._random)

    def _statement(self) -> str:
        dice = self._random.random()
        if dice < 0.2:
            self._savepoints.append(f"s{len(self._savepoints)}")
            return f"SAVEPOINT {self._savepoints[-1]}"
        if dice < 0.4 and self._savepoints:
            place = self._random.randrange(len(self._savepoints))
            name = self._savepoints[place]
            if dice < 0.3:
                del self._savepoints[place:]
                return f"RELEASE {name}"
            del self._savepoints[place + 1 :]
            return f"ROLLBACK TO {name}"
        return self._keyed() if dice < 0.75 else self._equal()

    def _keyed(self) -> str:
        """Return a statement for rows of this writer, which no other writer changes."""
        random = self._random
        own = f"writer = {self._number} AND id % 5 = {random.randrange(5)}"
        held = "FOR UPDATE SKIP LOCKED"  # rows of this writer's own prepared transactions
        match random.randint(1, 6):
            case 1 | 2 | 3:
                rows = random.choice([1, 10, self._largest])
                return (
                    f"INSERT INTO keyed SELECT nextval('ids'), {self._number}, i, repeat('x', i % 100)"
                    f" FROM generate_series(1, {rows}) i"
                )
            case 4:
                return (
                    "UPDATE keyed SET number = number + 1"
                    f" WHERE id IN (SELECT id FROM keyed WHERE {own} LIMIT {self._largest} {held})"
                )
            case 5:
                some = f"SELECT id FROM keyed WHERE {own} LIMIT 20 {held}"
                return f"UPDATE keyed SET id = nextval('ids') WHERE id IN ({some})"
            case _:
                limit = random.choice([10, self._largest])
                return f"DELETE FROM keyed WHERE id IN (SELECT id FROM keyed WHERE {own} LIMIT {limit} {held})"

    def _equal(self) -> str:
        """Return a statement for rows that have duplicates, which other writers change at the same time."""
        random = self._random
        some = f"ctid IN (SELECT ctid FROM equal LIMIT {random.randint(1, 40)} FOR UPDATE SKIP LOCKED)"
        match random.randint(1, 3):
            case 1:
                rows = random.randint(1, 40)
                return f"INSERT INTO equal SELECT {random.randint(1, 2)}, 'same' FROM generate_series(1, {rows})"
            case 2:
                return f"UPDATE equal SET a = {random.randint(1, 2)} WHERE {some}"
            case _:
                return f"DELETE FROM equal WHERE {some}"


async def resolve(connection: asyncpg.Connection[asyncpg.Record], gid: str, random: Random) -> None:
    """Commit the prepared transaction, or roll it back. Does nothing if another session resolves it."""
    with suppress(*_NOT_NOW):
        await connection.execute(f"{random.choice(['COMMIT', 'ROLLBACK'])} PREPARED '{gid}'")


async def prepare(scene: Scene) -> None:
    """Create the tables on both sides, and make the publisher stream transactions of more than a few hundred rows."""
    await scene.source.execute(*TABLES, *ON_SOURCE)
    await scene.target.execute(*TABLES)
    await scene.source.execute(f"ALTER DATABASE {scene.source.name} SET logical_decoding_work_mem = '64kB'")


@asynccontextmanager
async def writing(scene: Scene, seed: int, *, sessions: int, largest: int, pause: float) -> AsyncIterator[list[Writer]]:
    """Run `sessions` writers during the block. Afterwards no transaction is prepared on the publisher.

    `largest`: rows of their largest statements; `pause`: average seconds between two transactions.
    """
    stop = anyio.Event()
    writers = [Writer(number, seed, scene.source, largest) for number in range(1, sessions + 1)]
    async with anyio.create_task_group() as tasks:
        for writer in writers:
            tasks.start_soon(writer.run, stop, pause)
        yield writers
        stop.set()
    random = Random(seed)
    connection = await scene.source.connect()
    for (gid,) in await connection.fetch(GIDS):
        await resolve(connection, gid, random)
    await connection.close()
