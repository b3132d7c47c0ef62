"""Applications that write to whichever server admits them, and know each transaction that was acknowledged."""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic

import asyncpg

from tests.plugins.fix_cluster import Database

SCHEMA = (
    "CREATE SEQUENCE ticket CACHE 5",
    'CREATE SEQUENCE "Down ""and"" down" INCREMENT -1',
    "CREATE SEQUENCE rare; SELECT setval('rare', 1000, false)",  # not used before the database has moved
    "CREATE TABLE item (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, token text, ticket bigint, down bigint)",
    "CREATE TABLE account (application int PRIMARY KEY, items int)",
    "CREATE TABLE part (id bigint, day int, PRIMARY KEY (id, day)) PARTITION BY LIST (day)",
    "CREATE TABLE part_1 PARTITION OF part FOR VALUES IN (1)",
    "CREATE TABLE part_2 PARTITION OF part FOR VALUES IN (2)",
    "INSERT INTO account SELECT n, 0 FROM generate_series(1, 9) n",
)
WORK = """
WITH done AS (UPDATE account SET items = items + 1 WHERE application = $1),
     row AS (INSERT INTO item (token, ticket, down)
             VALUES ($2, nextval('ticket'), nextval('"Down ""and"" down"')) RETURNING id, ticket, down),
     leaf AS (INSERT INTO part_1 SELECT id, 1 FROM row), root AS (INSERT INTO part SELECT id, 2 FROM row)
SELECT id, ticket, down FROM row
"""
# Errors of a fenced server, and of a session that ends at any moment. Their transaction is not acknowledged.
REFUSED = (
    asyncpg.InsufficientPrivilegeError,  # CONNECT is revoked
    asyncpg.ReadOnlySQLTransactionError,  # the trigger of the fence
    asyncpg.AdminShutdownError,
    asyncpg.ConnectionDoesNotExistError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.CannotConnectNowError,
    asyncpg.CrashShutdownError,
    OSError,
)


@dataclass
class Application:
    """One application."""

    number: int
    servers: Sequence[Database]
    role: str
    pooled: bool = False  # keeps a connection until it is refused
    settings: dict[str, str] = field(default_factory=dict)
    statement: str | None = None  # executed before each transaction
    pause: float = 0.0  # seconds after each transaction
    acknowledged: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # token: id, ticket, down
    moves: list[str] = field(default_factory=list)  # names of databases, each time another one
    unexpected: list[str] = field(default_factory=list)
    longest: float = 0.0  # seconds between two acknowledgements

    async def run(self) -> None:
        """Write until canceled."""
        connection: asyncpg.Connection[asyncpg.Record] | None = None
        server, last = self.servers[0], monotonic()
        try:
            for attempt in itertools.count():
                token = f"{self.number}-{attempt}"
                try:
                    async with asyncio.timeout(20):
                        if connection is None:
                            connection = await asyncpg.connect(
                                server.dsn(user=self.role), server_settings=self.settings
                            )
                        if self.statement is not None:
                            await connection.execute(self.statement)
                        row = await connection.fetchrow(WORK, self.number, token)
                except REFUSED:
                    server = random.choice(self.servers)
                    if connection is not None:
                        connection.terminate()
                    connection = None
                    await asyncio.sleep(0.01)
                    continue
                except Exception as error:
                    self.unexpected.append(repr(error))
                    continue
                assert row is not None
                self.longest, last = max(self.longest, monotonic() - last), monotonic()
                self.acknowledged[token] = tuple(row)
                if self.moves[-1:] != [server.name]:
                    self.moves.append(server.name)
                if not self.pooled:
                    connection.terminate()
                    connection = None
                await asyncio.sleep(self.pause)
        finally:
            if connection is not None:
                connection.terminate()


@asynccontextmanager
async def applications(
    servers: Sequence[Database], count: int = 3, *, pause: float = 0.03
) -> AsyncIterator[list[Application]]:
    """Run applications during the block, at least three and at most nine, as a role that is not a superuser.

    Without a `pause` after each transaction, in seconds, they take a processor, and the launchers another one.
    """
    role = f"app_{secrets.token_hex(4)}"
    for database in servers:
        await database.execute(f"CREATE ROLE {role} LOGIN")
    try:
        for database in servers:
            await database.execute(
                f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}",
                f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {role}",
            )
        writers = [
            Application(1, servers, role, pause=pause),
            Application(2, servers, role, pooled=True, pause=pause),
            Application(
                3, servers, role, pooled=True, statement="SET default_transaction_read_only = off", pause=pause
            ),
            *(Application(number, servers, role, pooled=True, pause=pause) for number in range(4, count + 1)),
        ]
        tasks = [asyncio.create_task(application.run()) for application in writers]
        try:
            yield writers
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for database in servers:
            with suppress(asyncpg.UndefinedObjectError):
                await database.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


Acknowledged = dict[str, tuple[int, int, int]]  # token: id, ticket and down of a transaction


async def check_acknowledged(acknowledged: Acknowledged, serving: Database) -> Acknowledged:
    """Compare acknowledged transactions with the rows of a server. Returns those that are there."""
    items = await serving.rows("SELECT token, id, ticket, down FROM item")
    there: Acknowledged = {token: (number, ticket, down) for token, number, ticket, down in items}
    assert len(there) == len(items), "a transaction was applied twice"
    assert {token for token, row in acknowledged.items() if there.get(token) != row} == set()
    for values in zip(*there.values(), strict=True):
        assert len(set(values)) == len(values), "a sequence has given a value twice"
    assert await serving.rows(
        "SELECT count(*) FROM account a WHERE items <> (SELECT count(*) FROM item i"
        " WHERE split_part(i.token, '-', 1)::int = a.application)"
    ) == [(0,)]
    return there


async def check_nothing_is_lost(found: Sequence[Application], serving: Database) -> None:
    """Compare the acknowledged transactions with the rows of the server that has the database now."""
    assert [error for application in found for error in application.unexpected] == []
    await check_acknowledged(
        {token: row for application in found for token, row in application.acknowledged.items()}, serving
    )
    assert (
        await serving.rows(
            "SELECT count(*) FROM part_1, (SELECT count(*) AS n FROM item) i GROUP BY n HAVING count(*) <> n"
        )
        == []
    )


async def rows_of(database: Database) -> list[list[tuple[object, ...]]]:
    """Return the rows of all tables."""
    return [await database.rows(f"SELECT * FROM {table} ORDER BY 1, 2") for table in ("item", "account", "part")]
