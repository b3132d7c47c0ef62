"""OwnerStatements: statements that build indexes and constraints of the target's tables (copy_indexes = after).

Each statement is a transaction of its own, and runs as the owner of its table (targets/postgres/index_builds.py). The
owner of the subscription must be able to act as that role, as for changes of the table.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import asyncpg

from subscriber import server_features as features
from subscriber.catalog import worker_sessions
from subscriber.catalog.connection import Connection, translate
from subscriber.connection.connect import connect
from subscriber.connection.errors import ASYNCPG_ERRORS
from subscriber.errors import MappingError, SubscriberError
from subscriber.quoting import identifier
from subscriber.remedy import Remedy
from subscriber.sqlstate import INSUFFICIENT_PRIVILEGE
from subscriber.subscription import Subscription
from subscriber.targets.postgres.index_builds import run_as_owner
from subscriber.worker.context import LauncherContext

_MAY_SET_ROLE = f"SELECT pg_catalog.pg_has_role($1::pg_catalog.name, $2::pg_catalog.name, {features.MAY_SET_ROLE})"


class BuiltTable(NamedTuple):
    """A table of the target, and its owner."""

    schema: str
    name: str
    owner: str


class OwnerStatements:
    """Runs statements about tables of one subscription."""

    def __init__(self, subscription: Subscription, context: LauncherContext) -> None:
        """Create the runner. It opens no connection."""
        self._subscription = subscription
        self._conninfo = context.apply_target
        self._settings = context.settings

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Open a connection to the target for the block, which the fence of a move admits."""
        name = f"subscriber: {self._subscription.name} indexes"
        connection = await connect(self._conninfo, application_name=name, settings={"statement_timeout": "0"})
        try:
            try:
                await worker_sessions.register_without_place(connection)
            except ASYNCPG_ERRORS as error:
                raise translate(error) from error
            yield connection
        finally:
            connection.terminate()

    async def run(
        self, connection: Connection, table: BuiltTable, statement: str, what: str, correction: Remedy | None = None
    ) -> None:
        """Run one statement.

        Args:
            connection: from connection().
            table: the table of the statement.
            statement: the statement.
            what: the object, as the subject of an error message.
            correction: how to correct the cause of an error. None: by running the statement.

        Raises:
            SubscriberError: the target refuses the statement. The hint has the statement.
            MappingError: the subscription's owner may not act as the owner of the table.
        """
        settings, subscription = self._settings, self._subscription
        try:
            async with connection.transaction():
                if not await connection.fetchval(_MAY_SET_ROLE, subscription.owner, table.owner):
                    message = f'role "{subscription.owner}" cannot SET ROLE to "{table.owner}"'
                    raise MappingError(message, sqlstate=INSUFFICIENT_PRIVILEGE)
                await connection.execute(f"SET LOCAL maintenance_work_mem = '{settings.index_memory // 1024}kB'")
                await connection.execute(f"SET LOCAL lock_timeout = {int(settings.index_lock_timeout * 1000)}")
                await run_as_owner(connection, table.owner, [statement], trusted_owners=subscription.trusted_owners)
        except asyncpg.PostgresError as error:
            failure = translate(error)
            if connection.is_closed():
                raise failure from error
            name = identifier(subscription.name)
            leave_out = Remedy("leave it out", f"ALTER SUBSCRIPTION {name} SET (copy_indexes = none);")
            build = Remedy("correct the cause, or build it yourself on the target", f"{statement};")
            remedy = correction or build
            raise SubscriberError(
                f'{what} of table "{table.schema}.{table.name}" could not be built: {failure.message}',
                detail=failure.detail,
                hint=remedy.with_alternative(leave_out),
                sqlstate=failure.sqlstate,
            ) from error
