"""connect() and Database: a target database and its subscriptions in an async program."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import anyio

from subscriber.apply.hooks.config import Hooks
from subscriber.catalog.commands import execute as _execute
from subscriber.catalog.connection import CatalogConnection, Connection
from subscriber.catalog.schema import ensure_schema
from subscriber.catalog.store import progress_records
from subscriber.catalog.store.subscription_rel import load_relation_states
from subscriber.catalog.store.subscriptions import find_subscription, load_subscriptions
from subscriber.catalog.store.workers import load_workers
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.settings import DEFAULTS, Settings
from subscriber.sqlstate import UNDEFINED_OBJECT
from subscriber.subscription import Subscription
from subscriber.targets.postgres.conflicts.resolution import Resolver
from subscriber.worker.supervision.launcher import Launcher

POLL = 0.05  # seconds between two reads of the catalog during a wait

Notice = Callable[[str, str, str | None, str | None], None]  # severity, message, detail, hint


@asynccontextmanager
async def connect(
    target: str,
    *,
    apply_target: str | None = None,
    hooks: Mapping[str, Hooks] | None = None,
    settings: Settings | None = None,
) -> AsyncIterator[Database]:
    """Connect to the target database, and create or upgrade schema "subscriber" in it if necessary.

    Args:
        target: a URI or libpq `key=value` string.
        apply_target: a connection string to the same database for the role that applies changes. This role needs no
            more rights than the owners of the tables. None: `target`.
        hooks: by the name of the subscription; they modify rows before these are applied. Pass them each time: when a
            subscription is created, and when it runs.
        settings: limits, intervals and time-outs. None: Settings.from_environment().

    Raises:
        ConninfoError: the connection string is invalid.
        ConnectionLost: the target cannot be reached.
        ServerError: the target rejects the connection or a statement.
        ValueError: a variable of the environment has an invalid value.
    """
    settings = Settings.from_environment() if settings is None else settings
    async with CatalogConnection.open(target, "subscriber") as catalog:
        async with catalog.use() as connection:
            await ensure_schema(connection)
        yield Database(target, catalog, hooks or {}, apply_target, settings)


class Database:
    """A target database and its subscriptions. connect() creates it. Several tasks can call its methods.

    After the target has closed the connection, the methods raise ConnectionLost. Call connect() again.
    """

    def __init__(
        self,
        target: str,
        catalog: CatalogConnection,
        hooks: Mapping[str, Hooks],
        apply_target: str | None = None,
        settings: Settings = DEFAULTS,
    ) -> None:
        self._target = target
        self._apply_target = apply_target
        self._hooks = hooks
        self._catalog = catalog
        self._settings = settings

    async def execute(self, statements: str, *, notice: Notice | None = None) -> None:
        """Execute CREATE, ALTER or DROP SUBSCRIPTION statements in the syntax of PostgreSQL 18.

        Each statement is a transaction. The first error ends the execution, and the failed statement has no effect.

        Args:
            statements: separated by semicolons.
            notice: called with the severity (NOTICE or WARNING), message, detail and hint of PostgreSQL's notices.
                None: they are discarded.

        Raises:
            SubscriberError: a statement failed, with PostgreSQL's message.
        """
        async with self._catalog.use() as connection:
            await _execute.execute(
                connection,
                statements,
                notice=notice or (lambda *_: None),
                hooks=self._hooks,
                settings=self._settings,
            )

    async def subscriptions(self) -> list[Subscription]:
        """Return all subscriptions of this database, oldest first."""
        async with self._catalog.use() as connection:
            return await load_subscriptions(connection)

    @asynccontextmanager
    async def running(self, *, resolvers: Mapping[str, Resolver] | None = None) -> AsyncIterator[None]:
        """Run the launcher, and with it all enabled subscriptions, until the end of the block.

        The next start resumes each subscription where it stopped.

        Args:
            resolvers: async functions for conflict_policy = 'call name', by name. A function receives a Conflict. It
                returns the name of a policy ("apply_remote", "keep_local", …), or a dict of column values for the row.
                An exception stops the subscription, which calls the function again a few seconds later.

        Raises:
            ExceptionGroup: with an error that the launcher cannot handle, or with the error of the block.
        """
        async with anyio.create_task_group() as tasks:
            launcher = Launcher(self._target, resolvers or {}, self._hooks, self._apply_target, self._settings)
            tasks.start_soon(launcher.run)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()

    async def wait_for_sync(self, name: str) -> None:
        """Wait until every table of the subscription has been copied and has caught up. There is no timeout.

        Raises:
            StatementError: the subscription does not exist.
        """
        while True:
            async with self._catalog.use() as connection:
                subscription = await _find(connection, name)
                states = await load_relation_states(connection, subscription.oid)
            if all(state.state in ("s", "r") for state in states):
                return
            await anyio.sleep(POLL)

    async def wait_for_lsn(self, name: str, lsn: Lsn) -> None:
        """Wait until all transactions that the publisher committed before `lsn` are visible on the target.

        The tables of the subscription must be in sync, see wait_for_sync(). There is no timeout.

        Args:
            name: the name of the subscription.
            lsn: a position of the publisher, for example pg_current_wal_lsn() after the commit to wait for.

        Raises:
            StatementError: the subscription does not exist.
        """
        while True:
            async with self._catalog.use() as connection:
                subscription = await _find(connection, name)
                progress = await progress_records.load(connection, subscription.oid)
                workers = await load_workers(connection)
            reached = [w.latest_end_lsn for w in workers if w.subid == subscription.oid and w.relid == 0]
            # The record has the last applied commit. Only the worker knows that no later change is published.
            reached.append(progress)
            if any(position is not None and position >= lsn for position in reached):
                return
            await anyio.sleep(POLL)


async def _find(connection: Connection, name: str) -> Subscription:
    found = await find_subscription(connection, name)
    if found is None:
        raise StatementError(f'subscription "{name}" does not exist', sqlstate=UNDEFINED_OBJECT)
    return found
