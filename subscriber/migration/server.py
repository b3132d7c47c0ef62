"""MoveServer: one server of a move, with changes of its fence and positions of its WAL."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime

import anyio
import asyncpg

from subscriber.catalog.connection import Connection
from subscriber.errors import StatementError, SubscriberError
from subscriber.limited_wait import LimitedWait
from subscriber.lsn import Lsn
from subscriber.migration import fence, record
from subscriber.migration.fence import Grant
from subscriber.migration.plan import Side, Standing
from subscriber.migration.record import Change, ClosedFence, unchanged
from subscriber.migration.server_session import ServerSession
from subscriber.migration.sessions import (
    AppSession,
    FoundSessions,
    end_sessions,
    registered_sessions,
    terminate_statement,
)
from subscriber.publisher.own_schema import MESSAGE_PREFIX
from subscriber.quoting import identifier
from subscriber.sqlstate import LOCK_NOT_AVAILABLE, UNDEFINED_OBJECT

POLL = 0.01  # seconds
TRIGGER_WAIT = "100ms"  # for which writers of a table may wait behind a CREATE TRIGGER that waits for others
TRIGGER_PATIENCE = 300.0  # seconds for the locks of all tables
TRIGGER_PAUSE = 0.3  # seconds between two attempts

MARK = [
    "SET LOCAL synchronous_commit = local",
    f"SELECT pg_catalog.pg_logical_emit_message(true, '{MESSAGE_PREFIX}', '')",
]
FLUSHED = "SELECT pg_catalog.pg_current_wal_flush_lsn()::text"
CONFIRMED = """
SELECT s.confirmed_flush_lsn >= $2::text::pg_lsn FROM pg_catalog.pg_replication_slots s
 WHERE s.slot_name = $1 AND s.database = pg_catalog.current_database()
"""
PUBLICATION_OID = "SELECT p.oid::bigint FROM pg_catalog.pg_publication p WHERE p.pubname = $1"


class MoveServer(ServerSession):
    """One server of a move. A dry run replaces it by a PlannedServer, which changes nothing."""

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
            closed = None if known is None else known.facts.fence
            if not await self._is_closed(connection) or closed is None:
                rows = await connection.fetch(fence.GRANTS)
                _refuse_other_grantors(rows, self.side)
                grants = [Grant(row["role"], row["grantable"]) for row in rows]
                kept = [
                    row["role"] for row in await connection.fetch(fence.ROLES, await registered_sessions(connection))
                ]
                statements = fence.close_statements(self.database, grants, kept)
                closed = ClosedFence(tuple(grants), tuple(kept))
            await self._change(connection, statements, standing, lambda facts: replace(facts, fence=closed))
            now: datetime = await connection.fetchval("SELECT pg_catalog.clock_timestamp()")
            return now

    async def open_fence(self, standing: Standing, change: Change = unchanged) -> None:
        """Open the fence and store where the move stands, in one transaction. `change`: see record.save()."""
        statements: list[str] = []
        async with self.use() as connection:
            known = await self._load(connection)
            if await self._is_closed(connection) is not None:
                former = (known.facts.fence if known else None) or ClosedFence((), ())
                statements = fence.open_statements(self.database, former.grants, former.kept)
            await self._change(connection, statements, standing, lambda facts: change(replace(facts, fence=None)))

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
        wait = LimitedWait("locks of tables", TRIGGER_PATIENCE)
        for statement in statements:
            while True:
                try:
                    async with connection.transaction():
                        await connection.execute(f"SET LOCAL lock_timeout = '{TRIGGER_WAIT}'")
                        await connection.execute(statement)
                    self.note(statement)
                    break
                except asyncpg.LockNotAvailableError as error:
                    if wait.is_over:
                        raise SubscriberError(
                            f"a table of the {self.side} is locked by a long transaction",
                            detail=f"This statement waits for it: {statement}.",
                            hint="Find the transaction: SELECT * FROM pg_stat_activity ORDER BY xact_start;",
                            sqlstate=LOCK_NOT_AVAILABLE,
                        ) from error
                    await wait.pause(TRIGGER_PAUSE)

    async def end_sessions(self, closed: datetime) -> FoundSessions:
        """End sessions that the fence does not admit. Returns those that were there, see sessions.py."""
        known = await self.load()
        async with self.use() as connection:
            return await end_sessions(connection, closed, known.facts.admitted if known else ())

    async def wait_until_quiet(self, closed: datetime) -> int:
        """End sessions until none is left that the fence does not admit. The caller limits the time.

        Returns:
            The number of ended sessions.
        """
        ended: set[int] = set()
        left: Sequence[AppSession] = ()
        try:
            while left := (sessions := await self.end_sessions(closed)).all():
                ended.update(session.pid for session in sessions.ended)
                await anyio.sleep(POLL)
        except anyio.get_cancelled_exc_class():
            self.unquiet = left
            raise
        self.unquiet = ()
        if ended:
            self.note(terminate_statement(ended))
        return len(ended)

    # --- publications ---------------------------------------------------------------------------------

    async def created_publications(self) -> list[str]:
        """Return the names of the publications that the move has created here. Others belong to the database."""
        async with self.use() as connection:
            known = await self._load(connection)
            return [] if known is None else await record.publication_names(connection, known.facts)

    async def create_publication(self, name: str, statement: str, standing: Standing) -> None:
        """Create a publication, and store that the move has created it, in one transaction."""
        async with self.use() as connection, connection.transaction():
            await self._change(connection, [statement], standing, unchanged)
            oid: int = await connection.fetchval(PUBLICATION_OID, name) or 0  # 0: it is only planned
            await self._change(
                connection, (), standing, lambda facts: replace(facts, publications=(*facts.publications, oid))
            )

    async def drop_publications(self, standing: Standing) -> None:
        """Drop the publications that the move has created here."""
        statements = [f"DROP PUBLICATION IF EXISTS {identifier(name)}" for name in await self.created_publications()]
        async with self.use() as connection:
            await self._change(connection, statements, standing, lambda facts: replace(facts, publications=()))

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
