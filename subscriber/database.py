"""One target database and its subscriptions, from inside an async program."""

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

POLL = 0.05  # seconds between two looks at the catalog while waiting

Notice = Callable[[str, str, str | None, str | None], None]


@asynccontextmanager
async def connect(
    target: str,
    *,
    apply_target: str | None = None,
    hooks: Mapping[str, Hooks] | None = None,
    settings: Settings | None = None,
) -> AsyncIterator[Database]:
    """Connect to the target database, and create or upgrade schema "subscriber" in it if need be.

    `target` is a URI or libpq `key=value` string; `apply_target` is another one to the same database, of the role that
    applies changes: one that may do no more than the tables' owners. None: that of `target`. `hooks`, by the
    subscription's name, change rows on their way; give them each time, to create a subscription as well as to run it.
    `settings` are limits, intervals and time-outs; None: those of the environment, Settings.from_environment().

    Raises ConninfoError, ConnectionLost, ServerError; ValueError for a variable of the environment with a wrong value.
    """
    settings = Settings.from_environment() if settings is None else settings
    async with CatalogConnection.open(target, "subscriber") as catalog:
        async with catalog.use() as connection:
            await ensure_schema(connection)
        yield Database(target, catalog, hooks or {}, apply_target, settings)


class Database:
    """Made by connect(). Its methods may be called from several tasks."""

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
        """Run CREATE, ALTER or DROP SUBSCRIPTION statements, spelled as PostgreSQL 18 spells them.

        `notice(severity, message, detail, hint)` gets what the server would say besides; None drops it.
        Raises SubscriberError with PostgreSQL's own message; nothing is left half done.
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
        """All subscriptions of this database, oldest first."""
        async with self._catalog.use() as connection:
            return await load_subscriptions(connection)

    @asynccontextmanager
    async def running(self, *, resolvers: Mapping[str, Resolver] | None = None) -> AsyncIterator[None]:
        """Run the launcher in this task group: all enabled subscriptions work while the block lasts.

        `resolvers` are async functions for conflict_policy = 'call name', by their names: each is given a Conflict,
        and returns the name of a policy ("apply_remote", "keep_local", …) or a dict with values, by column, that
        the row shall have. One that raises stops the subscription, which asks again a few seconds later.
        Leaving the block stops them; the next start goes on where they stopped. The first error that
        the launcher cannot get over is raised here.
        """
        async with anyio.create_task_group() as tasks:
            launcher = Launcher(self._target, resolvers or {}, self._hooks, self._apply_target, self._settings)
            tasks.start_soon(launcher.run)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()

    async def wait_for_sync(self, name: str) -> None:
        """Wait until every table of the subscription has been copied and caught up.

        Raises StatementError if there is no such subscription. Put a timeout around it if you want one.
        """
        while True:
            async with self._catalog.use() as connection:
                subscription = await _find(connection, name)
                states = await load_relation_states(connection, subscription.oid)
            if all(state.state in ("s", "r") for state in states):
                return
            await anyio.sleep(POLL)

    async def wait_for_lsn(self, name: str, lsn: Lsn) -> None:
        """Wait until everything the publisher committed before `lsn` is visible on the target.

        The subscription's tables must be in sync; see wait_for_sync(). Take `lsn` from the publisher's
        pg_current_wal_lsn() after the commit to wait for.
        """
        while True:
            async with self._catalog.use() as connection:
                subscription = await _find(connection, name)
                progress = await progress_records.load(connection, subscription.oid)
                workers = await load_workers(connection)
            reached = [w.latest_end_lsn for w in workers if w.subid == subscription.oid and w.relid == 0]
            # The record has the last commit; behind it, only the worker knows that there was nothing for us.
            reached.append(progress)
            if any(position is not None and position >= lsn for position in reached):
                return
            await anyio.sleep(POLL)


async def _find(connection: Connection, name: str) -> Subscription:
    found = await find_subscription(connection, name)
    if found is None:
        raise StatementError(f'subscription "{name}" does not exist', sqlstate=UNDEFINED_OBJECT)
    return found
