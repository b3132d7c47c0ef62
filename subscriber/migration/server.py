"""MoveServer: one server of a move, with the session that has its lock, its facts, and changes of its fence."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from time import monotonic

import anyio
import asyncpg

from subscriber.catalog import locks
from subscriber.catalog.connection import CatalogConnection, Connection
from subscriber.catalog.identity import refuse_standby
from subscriber.catalog.schema import ensure_schema
from subscriber.catalog.store.subscriptions import find_subscription
from subscriber.errors import ConnectionLost, StatementError, SubscriberError
from subscriber.lsn import Lsn
from subscriber.migration import fence, record
from subscriber.migration.fence import Grant
from subscriber.migration.plan import Side, Standing
from subscriber.migration.record import ServerRecord
from subscriber.migration.sessions import AppSession, end_sessions, terminate_statement
from subscriber.publisher.own_schema import MESSAGE_PREFIX
from subscriber.sqlstate import INSUFFICIENT_PRIVILEGE, LOCK_NOT_AVAILABLE, OBJECT_IN_USE, UNDEFINED_OBJECT
from subscriber.subscription import Subscription

APPLICATION_NAME = "subscriber migrate"
LOCK_PATIENCE = 10.0  # seconds for another command to end
POLL = 0.01  # seconds
TRIGGER_WAIT = "100ms"  # for which writers of a table may wait behind a CREATE TRIGGER that waits for others
TRIGGER_PATIENCE = 300.0  # seconds for the locks of all tables
TRIGGER_PAUSE = 0.3  # seconds between two attempts

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
MARK = [
    "SET LOCAL synchronous_commit = local",
    f"SELECT pg_catalog.pg_logical_emit_message(true, '{MESSAGE_PREFIX}', '')",
]
FLUSHED = "SELECT pg_catalog.pg_current_wal_flush_lsn()::text"
CONFIRMED = """
SELECT s.confirmed_flush_lsn >= $2::text::pg_lsn FROM pg_catalog.pg_replication_slots s
 WHERE s.slot_name = $1 AND s.database = pg_catalog.current_database()
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


class MoveServer:
    """One server of a move. Its session has the lock of the move, and executes each change of the fence.

    All changes of a server pass through this class: as methods, or as an argument of perform(). A PlannedServer notes
    their statements and executes none. So a dry run has the statements of the move.
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
        await self.close()
        self._catalog = await self._stack.enter_async_context(CatalogConnection.open(self.dsn, APPLICATION_NAME))
        async with self.use() as connection:
            await refuse_standby(connection)
            self.database = await connection.fetchval(DATABASE)
            await self._prepare(connection)
            if not await self._may_move(connection):
                raise StatementError(
                    f"permission denied to move database {self.database} on the {self.side}",
                    detail='The role must have the rights of the owners of the database and of schema "subscriber".',
                    hint="Connect as a superuser.",
                    sqlstate=INSUFFICIENT_PRIVILEGE,
                )
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

    async def _prepare(self, connection: Connection) -> None:
        """Create or upgrade the schema, and take the lock of the move."""
        await ensure_schema(connection)
        deadline = monotonic() + LOCK_PATIENCE
        while not await locks.try_lock(connection, locks.MIGRATION):
            if monotonic() >= deadline:
                pid = await connection.fetchval(HOLDER, *(key & 0xFFFFFFFF for key in locks.MIGRATION))
                raise StatementError(
                    f"another command moves this database on the {self.side}",
                    detail=f"Its session is process {pid} of the server.",
                    hint=f"Wait for its end. Or, on the {self.side}: SELECT pg_terminate_backend({pid});",
                    sqlstate=OBJECT_IN_USE,
                )
            await anyio.sleep(0.1)

    async def _may_move(self, connection: Connection) -> bool:
        return bool(await connection.fetchval(MAY_MOVE))

    async def load(self) -> ServerRecord | None:
        """Return the row of the move."""
        async with self.use() as connection:
            return await self._load(connection)

    async def _load(self, connection: Connection) -> ServerRecord | None:
        return await record.load(connection, self.migration)

    async def save(self, standing: Standing, *forgotten: str, **facts: object) -> None:
        """Store where the move stands, see record.save()."""
        async with self.use() as connection:
            await self._change(connection, (), standing, *forgotten, **facts)

    def note(self, *statements: str) -> None:
        """Note statements. One that is repeated without another one between is noted once."""
        for statement in statements:
            found = Note(self.side, statement)
            if self._notes[-1:] != [found]:
                self._notes.append(found)

    async def perform(self, statements: str | Sequence[str], work: Callable[[], Awaitable[object]]) -> None:
        """Run `work`, which has the effect of these statements, and note them.

        Args:
            statements: without passwords.
            work: executes them, or changes the catalog as they do.
        """
        self.note(*([statements] if isinstance(statements, str) else statements))
        await work()

    async def execute(self, *statements: str) -> None:
        """Execute statements, each in a transaction of its own, and note them."""

        async def work() -> None:
            async with self.use() as connection:
                for statement in statements:
                    await connection.execute(statement)

        await self.perform(statements, work)

    async def _change(
        self, connection: Connection, statements: Sequence[str], standing: Standing, *forgotten: str, **facts: object
    ) -> None:
        """Execute statements, and store where the move stands, in one transaction."""
        self.note(*statements)
        async with connection.transaction():
            for statement in statements:
                await connection.execute(statement)
            await record.save(connection, self.migration, standing, *forgotten, **facts)

    async def subscription(self, name: str) -> Subscription:
        """Return a subscription of this database.

        Raises:
            StatementError: it does not exist.
        """
        async with self.use() as connection:
            found = await find_subscription(connection, name)
        if found is None:
            raise StatementError(f'subscription "{name}" does not exist on the {self.side}', sqlstate=UNDEFINED_OBJECT)
        return found

    # --- the fence ------------------------------------------------------------------------------------

    async def is_closed(self) -> bool | None:
        """Return True if the fence is closed, False if it is open, None if there is none."""
        async with self.use() as connection:
            return await self._is_closed(connection)

    async def _is_closed(self, connection: Connection) -> bool | None:
        closed: bool | None = await connection.fetchval(fence.IS_CLOSED)
        return closed

    async def close_fence(self, standing: Standing) -> datetime:
        """Close the fence and store where the move stands, in one transaction. A closed fence stays closed.

        Returns:
            The time, by the server's clock, after which no transaction begins that sees an open fence.
        """
        statements: list[str] = []
        async with self.use() as connection:
            known = await self._load(connection)
            facts: dict[str, object] = {}
            if not await self._is_closed(connection) or known is None or "grants" not in known.facts:
                rows = await connection.fetch(fence.GRANTS)
                _refuse_other_grantors(rows, self.side)
                grants = [Grant(row["role"], row["grantable"]) for row in rows]
                kept = [row["role"] for row in await connection.fetch(fence.ROLES)]
                statements = fence.close_statements(self.database, grants, kept)
                facts = {"grants": [grant.as_json() for grant in grants], "kept": kept}
            await self._change(connection, statements, standing, **facts)
            closed: datetime = await connection.fetchval("SELECT pg_catalog.clock_timestamp()")
            return closed

    async def open_fence(self, standing: Standing, **facts: object) -> None:
        """Open the fence and store where the move stands, in one transaction."""
        statements: list[str] = []
        async with self.use() as connection:
            known = await self._load(connection)
            if await self._is_closed(connection) is not None:
                former = {} if known is None else known.facts
                grants = [Grant(role, grantable) for role, grantable in former.get("grants", [])]
                statements = fence.open_statements(self.database, grants, former.get("kept", []))
            await self._change(connection, statements, standing, "grants", "kept", **facts)

    async def create_fence(self, relids: Sequence[int]) -> None:
        """Create the function of the fence, open, and the triggers on tables that have none.

        A table's writers wait at most TRIGGER_WAIT for an attempt.

        Args:
            relids: OIDs of tables. All partitions and partitioned tables of their trees get the trigger.

        Raises:
            SubscriberError: a table was locked for TRIGGER_PATIENCE seconds.
        """
        async with self.use() as connection:
            function = [fence.OPEN] if await self._is_closed(connection) is None else []
            missing = [
                fence.create_trigger(row["schema"], row["name"])
                for row in await connection.fetch(fence.TABLES, list(relids))
                if not row["fenced"]
            ]
            await self._execute_each(connection, function + missing)

    async def drop_fence(self) -> None:
        """Drop the triggers and the function of the fence, which must be open."""
        async with self.use() as connection:
            statements = [
                fence.drop_trigger(row["schema"], row["name"]) for row in await connection.fetch(fence.FENCED)
            ]
            await self._execute_each(connection, [*statements, fence.DROP])

    async def _execute_each(self, connection: Connection, statements: Iterable[str]) -> None:
        """Execute statements that lock tables, each in a transaction of its own, and again if a lock is taken."""
        deadline = monotonic() + TRIGGER_PATIENCE
        for statement in statements:
            while True:
                try:
                    async with connection.transaction():
                        await connection.execute(f"SET LOCAL lock_timeout = '{TRIGGER_WAIT}'")
                        await connection.execute(statement)
                    self.note(statement)
                    break
                except asyncpg.LockNotAvailableError as error:
                    if monotonic() >= deadline:
                        raise SubscriberError(
                            f"a table of the {self.side} is locked by a long transaction",
                            detail=f"This statement waits for it: {statement}.",
                            hint="Find the transaction: SELECT * FROM pg_stat_activity ORDER BY xact_start;",
                            sqlstate=LOCK_NOT_AVAILABLE,
                        ) from error
                    await anyio.sleep(TRIGGER_PAUSE)

    async def end_sessions(self, closed: datetime) -> list[AppSession]:
        """End sessions that the fence does not admit. Returns those that were there, see sessions.py."""
        known = await self.load()
        async with self.use() as connection:
            return await end_sessions(connection, closed, known.facts.get("kept", ()) if known else ())

    async def wait_until_quiet(self, closed: datetime) -> int:
        """End sessions until none is left that the fence does not admit. The caller limits the time.

        Returns:
            The number of ended sessions.
        """
        ended: set[int] = set()
        left: Sequence[AppSession] = ()
        try:
            while left := await self.end_sessions(closed):
                ended.update(session.pid for session in left)
                await anyio.sleep(POLL)
        except anyio.get_cancelled_exc_class():
            self.unquiet = left
            raise
        self.unquiet = ()
        if ended:
            self.note(terminate_statement(ended))
        return len(ended)

    # --- positions ------------------------------------------------------------------------------------

    async def mark(self) -> Lsn:
        """Commit a marker, and return a position behind everything that has been committed, flushed."""
        async with self.use() as connection:
            async with connection.transaction():
                for statement in MARK:
                    await connection.execute(statement)
            self.note(MARK[-1])
            return Lsn.parse(await connection.fetchval(FLUSHED))

    async def wait_until_confirmed(self, slot: str, position: Lsn) -> None:
        """Wait until the subscriber of a slot of this server has everything before `position`, durably.

        The caller limits the time.

        Raises:
            StatementError: the slot does not exist.
        """
        while True:
            async with self.use() as connection:
                confirmed = await connection.fetchval(CONFIRMED, slot, str(position))
            if confirmed:
                return
            if confirmed is None:
                raise StatementError(
                    f'replication slot "{slot}" does not exist on the {self.side}',
                    hint=f"If the slot is lost: subscriber reseed {slot}",
                    sqlstate=UNDEFINED_OBJECT,
                )
            await anyio.sleep(POLL)


def _refuse_other_grantors(rows: Iterable[asyncpg.Record], side: Side) -> None:
    """Refuse grants that only their grantor can revoke."""
    for row in rows:
        if not row["is_owners"]:
            raise StatementError(
                f'role "{row["grantor"]}" has granted CONNECT on the {side}, and is not the owner of the database',
                hint="Let the owner grant it: REVOKE it as that role, then GRANT it as the owner.",
            )
