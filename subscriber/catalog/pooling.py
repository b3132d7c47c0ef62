"""Connection poolers between this program and the target.

A pooler in transaction mode gives each transaction any backend. Places of workers, prepared statements, settings,
replication origins and LISTEN belong to a backend, so nothing works there. A pooler in session mode is transparent.
"""

from __future__ import annotations

import asyncpg

from subscriber.catalog.connection import Connection
from subscriber.connection.connect import connect
from subscriber.connection.conninfo import Conninfo
from subscriber.errors import StatementError
from subscriber.sqlstate import FEATURE_NOT_SUPPORTED

_BACKEND = "SELECT pg_catalog.pg_backend_pid()"
# A prepared statement that is missing, or exists already: another backend answers.
_OTHER_BACKEND = (asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError)


async def refuse_transaction_mode(connection: Connection, target: Conninfo | str) -> None:
    """Refuse a pooler that gives each transaction another backend, or two sessions the same one.

    Args:
        connection: an idle connection to `target`.

    Raises:
        StatementError: `target` is such a pooler.
    """
    try:
        backend = await connection.fetchval(_BACKEND)
        if backend == connection.get_server_pid():  # a pooler makes the process ID up
            return
        other = await connect(target, application_name="subscriber launcher")
        try:
            shared = await other.fetchval(_BACKEND) == backend
        finally:
            other.terminate()
        if not shared and await connection.fetchval(_BACKEND) == backend:
            return
    except _OTHER_BACKEND:
        pass
    raise StatementError(
        "the target is a connection pooler in transaction mode",
        detail="Each session needs a backend of its own, which has its locks, settings and replication origin.",
        hint="Connect to the server itself, or to a pooler with pool_mode = session.",
        sqlstate=FEATURE_NOT_SUPPORTED,
    )
