"""A connection to the target's catalog, shared by the launcher's tasks; asyncpg's errors become ours in it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeAlias

import anyio
import asyncpg
from anyio import CancelScope, get_cancelled_exc_class

from subscriber.connection.connect import connect
from subscriber.connection.conninfo import Conninfo
from subscriber.connection.errors import ASYNCPG_ERRORS, server_fields
from subscriber.connection.settings import NO_TIMEOUTS
from subscriber.errors import ConnectionLost, ServerError, StatementError, SubscriberError
from subscriber.publisher.own_schema import IS_OURS
from subscriber.remedy import Remedy
from subscriber.sqlstate import INVALID_SCHEMA_NAME, UNDEFINED_FUNCTION, UNDEFINED_TABLE

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

# So that the server notices within a minute when we are gone without a word, and lets go of our locks.
KEEPALIVE = {"tcp_keepalives_idle": "20", "tcp_keepalives_interval": "10", "tcp_keepalives_count": "4"}

ROLLBACK_TIMEOUT = 5.0  # seconds
_MISSING = (UNDEFINED_FUNCTION, UNDEFINED_TABLE, INVALID_SCHEMA_NAME)
_IS_REMOVED = f"SELECT NOT EXISTS (SELECT FROM pg_catalog.pg_namespace n WHERE {IS_OURS})"


class CatalogConnection:
    """One asyncpg connection, used by one task at a time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = anyio.Lock()

    @classmethod
    @asynccontextmanager
    async def open(
        cls, target: Conninfo | str, name: str, *, lock_timeout: float = 0
    ) -> AsyncIterator[CatalogConnection]:
        """Connect to `target`. Commits are synchronous, independent of the database's default.

        `lock_timeout` is in seconds; 0: none.
        """
        connection = await _connect(target, name, lock_timeout)
        try:
            yield cls(connection)
        finally:
            connection.terminate()

    @property
    def pid(self) -> int:
        """The process ID of the session on the target."""
        return self._connection.get_server_pid()

    @property
    def encoding(self) -> str:
        """The encoding of the target's database, by PostgreSQL's name. Rows are sent in it."""
        return encoding_of(self._connection)

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Connection]:
        """The connection, for this task alone. Raises ServerError and ConnectionLost for asyncpg's errors.

        Cancellation: a transaction of the block is rolled back, although the block cannot wait for that any more.
        """
        async with self._lock:
            try:
                yield self._connection
            except get_cancelled_exc_class():
                await self._roll_back()
                raise
            # InternalClientError: used between a server's last words and the end of the connection
            except ASYNCPG_ERRORS as error:
                raise await self._explained(translate(error)) from error
            except ServerError as error:  # of a statement on subscriptions
                if (explained := await self._explained(error)) is error:
                    raise
                raise explained from error

    async def _explained(self, error: SubscriberError) -> SubscriberError:
        """Return the error, or another one if an object is missing because schema "subscriber" was removed."""
        if error.sqlstate in _MISSING and "subscriber" in error.message:
            with suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
                if await self._connection.fetchval(_IS_REMOVED):
                    return StatementError(
                        "subscriber is not installed in this database",
                        detail='The database has no schema "subscriber" of this program.',
                        hint=Remedy("connect() creates it, and so does", "subscriber run"),
                        sqlstate=INVALID_SCHEMA_NAME,
                    )
        return error

    async def _roll_back(self) -> None:
        """End a transaction that was cancelled anywhere in it, perhaps in its BEGIN; or else the connection."""
        with CancelScope(shield=True), anyio.move_on_after(ROLLBACK_TIMEOUT) as waiting:
            try:
                await self._connection.execute("ROLLBACK")  # a warning if there is no transaction
                self._connection._top_xact = None  # type: ignore[attr-defined]  # asyncpg keeps the one whose BEGIN was cancelled
            except ASYNCPG_ERRORS:
                self._connection.terminate()
        if waiting.cancelled_caught:
            self._connection.terminate()

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the connection ends, for any reason."""
        self._connection.add_termination_listener(lambda _connection: callback())

    async def listen(self, channel: str, callback: Callable[[str, bool], None]) -> None:
        """Call `callback` for each NOTIFY on `channel`, with its payload and True if this session sent it."""
        async with self.use() as connection:
            here = connection.get_server_pid()
            await connection.add_listener(
                channel, lambda _connection, pid, _channel, payload: callback(payload, pid == here)
            )


class ReconnectingCatalog(CatalogConnection):
    """One connection to the catalog that is opened again after the server has closed it.

    A statement that was being executed at that moment fails with ConnectionLost, because its outcome is unknown. The
    next use connects again. If that fails, the use after it tries again.
    """

    def __init__(self, connection: Connection, target: Conninfo | str, name: str) -> None:
        super().__init__(connection)
        self._target, self._name = target, name

    @classmethod
    @asynccontextmanager
    async def open(
        cls, target: Conninfo | str, name: str, *, lock_timeout: float = 0
    ) -> AsyncIterator[ReconnectingCatalog]:
        """Connect to `target`, as CatalogConnection.open()."""
        catalog = cls(await _connect(target, name, lock_timeout), target, name)
        try:
            yield catalog
        finally:
            catalog._connection.terminate()

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Connection]:
        """The connection, for this task alone, opened again if the server has closed it."""
        async with self._lock:
            if self._connection.is_closed():
                self._connection = await _connect(self._target, self._name, 0)
        async with super().use() as connection:
            yield connection


async def _connect(target: Conninfo | str, name: str, lock_timeout: float) -> Connection:
    settings = {
        "synchronous_commit": "on",
        **KEEPALIVE,
        **NO_TIMEOUTS,
        "lock_timeout": f"{lock_timeout * 1000:.0f}ms",
    }
    return await connect(target, application_name=name, settings=settings)


def encoding_of(connection: Connection) -> str:
    """Return the encoding of the connection's database, by PostgreSQL's name."""
    return getattr(connection.get_settings(), "server_encoding", "UTF8")


def translate(error: BaseException) -> SubscriberError:
    """Our error for one that asyncpg raised on a connection to the target."""
    if isinstance(error, asyncpg.PostgresError) and not isinstance(error, asyncpg.PostgresConnectionError):
        return ServerError(server_fields(error))
    return ConnectionLost(f"lost connection to the target: {error}")
