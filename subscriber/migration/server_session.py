"""ServerSession: the session with the lock of a move on one server, and the row of the move there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from subscriber.catalog import locks
from subscriber.catalog.commands.privileges import subscription_names
from subscriber.catalog.connection import CatalogConnection, Connection
from subscriber.catalog.identity import refuse_standby
from subscriber.catalog.schema import ensure_schema
from subscriber.catalog.store import migrations
from subscriber.catalog.store.subscriptions import find_subscription
from subscriber.display import nearest_word, shell_word, sql_identifier
from subscriber.errors import ConnectionLost, StatementError, SubscriberError
from subscriber.limited_wait import LimitedWait
from subscriber.migration import record
from subscriber.migration.plan import Phase, Side, Standing
from subscriber.migration.record import Change, ServerRecord, unchanged
from subscriber.migration.sessions import AppSession
from subscriber.remedy import Remedy
from subscriber.sql_text import sql_text
from subscriber.sqlstate import INSUFFICIENT_PRIVILEGE, OBJECT_IN_USE, UNDEFINED_OBJECT
from subscriber.subscription import Subscription

APPLICATION_NAME = "subscriber migrate"
LOCK_PATIENCE = 10.0  # seconds for another command to end

DATABASE = "SELECT pg_catalog.current_database()::text"
# The owner of the schema has all rights on the rows of a move; the fence needs those of the database's owner.
MAY_MOVE = """
SELECT pg_catalog.pg_has_role(n.nspowner, 'USAGE') AND pg_catalog.pg_has_role(d.datdba, 'USAGE')
  FROM pg_catalog.pg_namespace n, pg_catalog.pg_database d
 WHERE n.nspname = 'subscriber' AND d.datname = pg_catalog.current_database()
"""
HOLDER = """
SELECT l.pid FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_database d ON d.oid = l.database
 WHERE l.locktype = 'advisory' AND d.datname = pg_catalog.current_database()
   AND (l.classid::bigint, l.objid::bigint) = ($1::bigint, $2::bigint) AND l.granted
"""
USES_ORIGINS = """
SELECT r.rolsuper FROM pg_catalog.pg_namespace n JOIN pg_catalog.pg_roles r ON r.oid = n.nspowner
 WHERE n.nspname = 'subscriber'
"""


@dataclass(frozen=True, slots=True)
class Note:
    """A statement that has changed a server, or that a dry run would execute there. It has no password."""

    side: Side
    statement: str


class ServerSession:
    """The session of a move on one server, and a note of each statement that has changed the server.

    Changes pass through _change() and perform(). A PlannedServer overrides these methods, so that they note the
    statements and execute none.
    """

    def __init__(self, side: Side, dsn: str, migration: str, notes: list[Note]) -> None:
        """Create a server without connecting.

        Args:
            side: which of the two servers it is.
            dsn: the connection string of the database.
            migration: the name of the move.
            notes: where the statements of both servers are noted, in their order.
        """
        self._notes = notes
        self.side = side
        self.dsn = dsn
        self.database = ""
        self.version = 0  # as in server_version_num
        self.has_origins = False  # workers of this server mark changes with their origin
        self.unquiet: Sequence[AppSession] = ()  # the sessions that a canceled wait_until_quiet() has waited for
        self.unreachable: ConnectionLost | None = None  # the reason why a command continues without the server
        self.migration = migration
        self._stack = AsyncExitStack()
        self._catalog: CatalogConnection | None = None

    async def connect(self) -> None:
        """Connect, create or upgrade the schema, and take the lock. A former session is closed.

        Raises:
            ConnectionLost: the server cannot be reached, or is a standby.
            StatementError: the role may not move the database, or another command does.
        """
        await self.open()
        await self.prepare()
        await self.lock()

    async def open(self) -> None:
        """Connect. A former session is closed.

        Raises:
            ConnectionLost: the server cannot be reached, or is a standby.
        """
        await self.close()
        self._catalog = await self._stack.enter_async_context(CatalogConnection.open(self.dsn, APPLICATION_NAME))
        async with self.use() as connection:
            await refuse_standby(connection)
            self.database = await connection.fetchval(DATABASE)

    async def prepare(self) -> None:
        """Create or upgrade the schema."""
        async with self.use() as connection:
            await ensure_schema(connection)

    async def lock(self) -> None:
        """Take the lock of the move.

        Raises:
            StatementError: the role may not move the database, another command does, or the server is part of another
                move, or the other side of this one.
        """
        async with self.use() as connection:
            await self._lock(connection)
            if not await self._may_move(connection):
                raise StatementError(
                    f"permission denied to move database {self.database} on the {self.side}",
                    detail='The role must have the rights of the owners of the database and of schema "subscriber".',
                    hint="Connect as a superuser.",
                    sqlstate=INSUFFICIENT_PRIVILEGE,
                )
            await self._refuse_other_move(connection)
            self.version = int(await connection.fetchval("SELECT pg_catalog.current_setting('server_version_num')"))
            self.has_origins = bool(await connection.fetchval(USES_ORIGINS))

    async def close(self) -> None:
        """Close the session, which releases the lock."""
        self._catalog = None
        await self._stack.aclose()

    @property
    def is_connected(self) -> bool:
        """True if connect() has succeeded and the session has not been closed by close()."""
        return self._catalog is not None

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Connection]:
        """The session with the lock, for this task alone.

        Raises:
            ConnectionLost: the session is lost, or was never opened.
            ServerError: a statement failed.
        """
        if self._catalog is None:
            raise ConnectionLost(f"the {self.side} is not connected")
        try:
            async with self._catalog.use() as connection:
                yield connection
        except SubscriberError as error:
            error.context.append(f"on the {self.side}, database {self.database or '(unknown)'}")
            raise

    async def _lock(self, connection: Connection) -> None:
        wait = LimitedWait("another command that moves the database", LOCK_PATIENCE)
        while not await locks.try_lock(connection, locks.MIGRATION):
            if wait.is_over:
                pid = await connection.fetchval(HOLDER, *(key & 0xFFFFFFFF for key in locks.MIGRATION))
                raise StatementError(
                    f"another command moves this database on the {self.side}",
                    detail=f"Its session is process {pid} of the server.",
                    hint=f"Wait for its end. Or, on the {self.side}: SELECT pg_terminate_backend({pid});",
                    sqlstate=OBJECT_IN_USE,
                )
            await wait.pause()

    async def _refuse_other_move(self, connection: Connection) -> None:
        """Refuse exchanged connection strings, and another name: a database has one fence, which they would open."""
        known = await self._load(connection)
        if known is not None:
            record.refuse_other_side(known.facts, self.side, self.migration)
        others = await self._other_moves(connection)
        if others:
            raise StatementError(
                f'the {self.side} is part of another move, "{others[0]}"',
                hint=Remedy("A database has one fence. See", f"subscriber migrate status {shell_word(others[0])}"),
                sqlstate=OBJECT_IN_USE,
            )

    async def _other_moves(self, connection: Connection) -> list[str]:
        return await migrations.other_moves(connection, self.migration, Phase.FINISHED)

    async def _may_move(self, connection: Connection) -> bool:
        return bool(await connection.fetchval(MAY_MOVE))

    async def load(self) -> ServerRecord | None:
        """Return the row of the move."""
        async with self.use() as connection:
            return await self._load(connection)

    async def _load(self, connection: Connection) -> ServerRecord | None:
        return await record.load(connection, self.migration)

    async def save(self, standing: Standing, change: Change = unchanged) -> None:
        """Store where the move stands, see record.save()."""
        async with self.use() as connection:
            await self._change(connection, (), standing, change)

    def note(self, *statements: str) -> None:
        """Note statements. One that is repeated without another one between is noted once."""
        for statement in statements:
            noted = Note(self.side, sql_text(statement))
            if self._notes[-1:] != [noted]:
                self._notes.append(noted)

    async def perform(self, statements: str | Sequence[str], work: Callable[[], Awaitable[object]]) -> None:
        """Run `work`, which has the effect of these statements, and note them.

        Args:
            statements: without passwords.
            work: executes them, or changes the catalog as they do.
        """
        self.note(*([statements] if isinstance(statements, str) else statements))
        await work()

    async def _change(
        self, connection: Connection, statements: Sequence[str], standing: Standing, change: Change
    ) -> None:
        """Execute statements, and store where the move stands, in one transaction."""
        self.note(*statements)
        async with connection.transaction():
            for statement in statements:
                await connection.execute(statement)
            await record.save(connection, self.migration, self.side, standing, change)

    async def subscription(self, name: str) -> Subscription:
        """Return a subscription of this database.

        Raises:
            StatementError: it does not exist.
        """
        async with self.use() as connection:
            subscription = await find_subscription(connection, name)
            if subscription is None:
                raise unknown_subscription(name, self.side, await subscription_names(connection))
        return subscription


def unknown_subscription(name: str, side: Side, known: Sequence[str]) -> StatementError:
    """Return the error for a name that no subscription of a server has. `known` has the names of those that exist."""
    near = nearest_word(name, known)
    if near is not None:
        remedy = Remedy(f'perhaps you meant "{near}"', f"subscriber migrate status {shell_word(near)}")
    elif known:
        remedy = Remedy(f"the {side} has: {', '.join(map(sql_identifier, known))}.")
    else:
        start = f"subscriber migrate start {shell_word(name)}"
        remedy = Remedy("the name is that of the subscription on the target. Begin a move", start)
    message = f'subscription "{name}" does not exist on the {side}'
    return StatementError(message, hint=remedy, sqlstate=UNDEFINED_OBJECT)
