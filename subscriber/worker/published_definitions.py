"""Queries for the definition of a published table, with a snapshot that does not wait for locks.

Purpose. pg_get_publication_tables() opens all tables of a publication. pg_table_size() and
pg_get_replica_identity_index() open one. Their query takes a snapshot first, and holds it while it waits for the lock
of a table. A TRUNCATE has such a lock until a synchronous standby has acknowledged its COMMIT. So a query waits for a
short time only, and is repeated.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from subscriber.errors import ServerError
from subscriber.limited_wait import POLL, LimitedWait
from subscriber.publisher.connection import Publisher
from subscriber.sqlstate import LOCK_NOT_AVAILABLE

_LOCK_TIMEOUT = "100ms"
_LONGEST_PAUSE = 1.0  # seconds

_Result = TypeVar("_Result")


async def read_definition(publisher: Publisher, label: str, query: Callable[[], Awaitable[_Result]]) -> _Result:
    """Return the result of `query`, which is repeated while a table is locked.

    Args:
        publisher: the session of the query, without an open transaction.
        label: the name of the table, for the log.
        query: the query.

    Raises:
        SubscriberError: a table has been locked for too long, or an error of `query`.

    Cancellation: the session must be closed.
    """
    wait, pause = LimitedWait(f'locks of published tables to read the definition of table "{label}"'), POLL
    while True:
        before = await publisher.set_lock_timeout(_LOCK_TIMEOUT)
        try:
            result = await query()
        except Exception as error:
            # If the connection is lost, this raises the same error.
            await publisher.set_lock_timeout(before)
            if not isinstance(error, ServerError) or error.sqlstate != LOCK_NOT_AVAILABLE:
                raise
        else:
            await publisher.set_lock_timeout(before)
            return result
        await wait.poll(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
