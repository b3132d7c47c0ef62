"""connect() and Database: a target database and its subscriptions in an async program.

Failure cases.

- The target closes the connection of a Database, for example at a restart. A statement that was being executed fails
  with ConnectionLost, because its outcome is unknown. The next call connects again. Waits and events() connect again
  by themselves.
- The launcher of running() loses the target: it stops its workers, and connects again. The block continues.
- The block of running() raises: the launcher stops its workers, and the error of the block is raised, not a group.
- The launcher cannot start, for example because a privilege is missing: the block is cancelled, and the error of the
  launcher is raised.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from time import monotonic
from typing import Literal, TypeAlias, Unpack

import anyio

from subscriber import telemetry
from subscriber.app import App, OnError, RunningApp
from subscriber.apply.conflicts.rules import Resolver
from subscriber.apply.hooks.config import Hooks
from subscriber.catalog.commands.execute import execute_parsed
from subscriber.catalog.commands.privileges import does_not_exist
from subscriber.catalog.connection import CatalogConnection, ReconnectingCatalog
from subscriber.catalog.grammar.parser import (
    AlterConnection,
    AlterEnabled,
    AlterOptions,
    AlterOwner,
    AlterPublications,
    AlterRefresh,
    AlterRefreshSequences,
    AlterRefreshTables,
    AlterRename,
    AlterSkip,
    CreateSubscription,
    DropSubscription,
    Option,
    Statement,
    TableName,
    parse,
)
from subscriber.catalog.grammar.typed_options import typed_options
from subscriber.catalog.schema import ensure_schema
from subscriber.catalog.store.conflict_history import ConflictRecord, load_conflicts
from subscriber.catalog.store.subscriptions import find_subscription, load_subscriptions
from subscriber.change_stream.options import names as names_of
from subscriber.check.check import collect
from subscriber.check.model import Finding
from subscriber.check.rules import findings
from subscriber.comparison.comparison import verify
from subscriber.comparison.queries import JOBS
from subscriber.comparison.result import Comparison
from subscriber.connection.conninfo import Conninfo, conninfo_text
from subscriber.connection.dsn import Dsn, FixedDsn, resolve_dsn
from subscriber.errors import ConnectionLost, StatementError, WaitTimeout
from subscriber.lsn import Lsn
from subscriber.option_types import AlterOptionValues, CreateOptionValues
from subscriber.settings import DEFAULTS, Settings
from subscriber.sqlstate import DUPLICATE_OBJECT
from subscriber.status.collect import assess_all, read_catalog
from subscriber.status.committed_position import committed_position
from subscriber.status.events import Event, EventSnapshot, find_events
from subscriber.status.model import SubscriptionStatus, assess
from subscriber.status.snapshot import PublisherAnswer
from subscriber.status.waits import Wait, lsn_wait, sync_wait
from subscriber.subscription import Subscription
from subscriber.worker.supervision.launcher import Launcher

POLL = 0.05  # seconds between two reads of the catalog during a wait
RECONNECT_INTERVAL = 0.5  # seconds between two attempts to reach the target during a wait
WAIT_LOG_INTERVAL = 60.0  # seconds between two log lines of a wait
MOST_CONFLICTS = 1000  # of one snapshot for events()

Notice: TypeAlias = Callable[[str, str, str | None, str | None], None]  # severity, message, detail, hint
Parameter: TypeAlias = FixedDsn | int | bool


@asynccontextmanager
async def connect(
    target: Dsn,
    *,
    apply_target: Dsn | None = None,
    hooks: Mapping[str, Hooks] | None = None,
    settings: Settings | None = None,
) -> AsyncIterator[Database]:
    """Connect to the target database, and create or upgrade schema "subscriber" in it if necessary.

    Args:
        target: the connection string, see `Dsn`.
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
        TypeError: `target` is not a connection string.
        RuntimeError: the program runs on trio. The package needs asyncio.
    """
    settings = Settings.from_environment() if settings is None else settings
    conninfo = await resolve_dsn(target)
    apply_conninfo = None if apply_target is None else await resolve_dsn(apply_target)
    async with ReconnectingCatalog.open(conninfo, "subscriber") as catalog:
        async with catalog.use() as connection:
            await ensure_schema(connection)
        yield Database(conninfo, catalog, hooks or {}, apply_conninfo, settings)


class Database:
    """A target database and its subscriptions. connect() creates it. Several tasks can call its methods.

    After the target has closed the connection, the next call connects again.
    """

    def __init__(
        self,
        target: Conninfo | str,
        catalog: CatalogConnection,
        hooks: Mapping[str, Hooks],
        apply_target: Conninfo | str | None = None,
        settings: Settings = DEFAULTS,
    ) -> None:
        self._target = target
        self._apply_target = apply_target
        self._hooks = hooks
        self._catalog = catalog
        self._settings = settings

    # --- statements -------------------------------------------------------------------------------

    async def execute(
        self, statements: str, *, parameters: Sequence[Parameter] = (), notice: Notice | None = None
    ) -> None:
        """Execute CREATE, ALTER or DROP SUBSCRIPTION statements in the syntax of PostgreSQL 18.

        Each statement is a transaction. The first error ends the execution, and the failed statement has no effect.

        Args:
            statements: separated by semicolons.
            parameters: the values of $1, $2, … in the text, which stand for names, strings and values of options. They
                need no quotes, and errors do not show them.
            notice: called with the severity (NOTICE or WARNING), message, detail and hint of PostgreSQL's notices.
                None: they are logged.

        Raises:
            SubscriberError: a statement failed, with PostgreSQL's message.
        """
        values = [
            parameter if isinstance(parameter, str | int) else str(await resolve_dsn(parameter))
            for parameter in parameters
        ]
        await self._execute(parse(statements, values), notice)

    async def create_subscription(
        self,
        name: str,
        *,
        source: FixedDsn,
        publications: Sequence[str],
        exist_ok: bool = False,
        notice: Notice | None = None,
        **options: Unpack[CreateOptionValues],
    ) -> None:
        """Create a subscription, as CREATE SUBSCRIPTION.

        Args:
            name: the name of the subscription.
            source: the publisher's connection string. The catalog stores it, so a function is not allowed. For a
                password that expires use `passfile=…` in it, or SUBSCRIBER_PASSWORD_COMMAND.
            publications: the names of publications.
            exist_ok: with True, a subscription that exists is no error, and is not changed. Of several programs that
                start at a time, one creates it.
            notice: as in execute().
            options: the options of [CREATE SUBSCRIPTION](statements.md), with Python values.

        Raises:
            SubscriberError: the statement failed, with PostgreSQL's message.
            TypeError: an argument has the wrong type.
        """
        conninfo = await _stored_conninfo(source)
        statement = CreateSubscription(name, conninfo, names_of(publications), typed_options(options))
        try:
            await self._execute([statement], notice)
        except StatementError as error:
            # The SQLSTATE is also that of a publication that is named twice.
            exists = error.sqlstate == DUPLICATE_OBJECT and name in [
                subscription.name for subscription in await self.subscriptions()
            ]
            if not (exist_ok and exists):
                raise

    async def alter(
        self,
        name: str,
        *,
        source: FixedDsn | None = None,
        publications: Sequence[str] | None = None,
        refresh: bool = True,
        copy_data: bool | Literal["compare"] = True,
        owner: str | None = None,
        new_name: str | None = None,
        notice: Notice | None = None,
        **options: Unpack[AlterOptionValues],
    ) -> None:
        """Change a subscription, as ALTER SUBSCRIPTION. Each kind of change is a statement, in this order.

        Args:
            name: the name of the subscription.
            options: changed by SET.
            source: the publisher's connection string. None: unchanged.
            publications: the names of all publications from now on. None: unchanged.
            refresh: with `publications`, take over their tables now.
            copy_data: with `publications`, copy the rows of new tables, or with "compare" repair those that differ.
            owner: the role that owns it from now on. None: unchanged.
            new_name: its name from now on. None: unchanged.
            notice: as in execute().

        Raises:
            SubscriberError: a statement failed, with PostgreSQL's message. Earlier statements have their effect.
            TypeError: an argument has the wrong type, or there is nothing to change.
        """
        statements: list[Statement] = []
        if options:
            statements.append(AlterOptions(name, typed_options(options)))
        if source is not None:
            statements.append(AlterConnection(name, await _stored_conninfo(source)))
        if publications is not None:
            refreshing = typed_options({"refresh": refresh, "copy_data": copy_data})
            statements.append(AlterPublications(name, "set", names_of(publications), refreshing))
        if owner is not None:
            statements.append(AlterOwner(name, owner))
        if new_name is not None:
            statements.append(AlterRename(name, new_name))
        if not statements:
            raise TypeError("alter() needs an option, or one of source, publications, owner and new_name")
        await self._execute(statements, notice)

    async def drop(self, name: str, *, missing_ok: bool = False, notice: Notice | None = None) -> None:
        """Drop a subscription and its slots on the publisher, as DROP SUBSCRIPTION.

        Args:
            name: the name of the subscription.
            missing_ok: with True, a subscription that does not exist is no error.
            notice: as in execute().

        Raises:
            SubscriberError: the statement failed, with PostgreSQL's message.
        """
        await self._execute([DropSubscription(name, missing_ok)], notice)

    async def refresh(
        self,
        name: str,
        *,
        copy_data: bool | Literal["compare"] = True,
        sequences: bool = False,
        notice: Notice | None = None,
    ) -> None:
        """Take over tables that were added to the publications, as REFRESH PUBLICATION.

        Args:
            name: the name of the subscription.
            copy_data: copy the rows of new tables, or with "compare" repair those that differ.
            sequences: set the sequences again in place of that, as REFRESH SEQUENCES.
            notice: as in execute().

        Raises:
            SubscriberError: the statement failed, with PostgreSQL's message.
        """
        options = typed_options({"copy_data": copy_data})
        await self._execute([AlterRefreshSequences(name) if sequences else AlterRefresh(name, options)], notice)

    async def refresh_tables(
        self,
        name: str,
        tables: Sequence[str | tuple[str, str]],
        *,
        truncate: bool = False,
        delete_extra: bool = False,
        notice: Notice | None = None,
    ) -> None:
        """Synchronize tables again while the others stream, as REFRESH TABLE.

        wait_for_sync() waits for the end.

        Args:
            name: the name of the subscription.
            tables: tables of the target, as "table", "schema.table" or (schema, table).
            truncate: empty the tables and copy them. False: repair the rows that differ.
            delete_extra: delete rows that the publisher does not have. False: keep and count them.
            notice: as in execute().

        Raises:
            SubscriberError: the statement failed, with PostgreSQL's message.
            TypeError: `tables` is a string.
        """
        if isinstance(tables, str):
            raise TypeError(f"tables is a list: tables=[{tables!r}]")
        options = typed_options({"truncate": truncate, "delete_extra": delete_extra})
        await self._execute([AlterRefreshTables(name, tuple(map(_table_name, tables)), options)], notice)

    async def enable(self, name: str) -> None:
        """Let launchers run a subscription, as ENABLE.

        Raises:
            SubscriberError: the statement failed, with PostgreSQL's message.
        """
        await self._execute([AlterEnabled(name, True)])

    async def disable(self, name: str) -> None:
        """Stop a subscription, as DISABLE.

        Raises:
            SubscriberError: the statement failed, with PostgreSQL's message.
        """
        await self._execute([AlterEnabled(name, False)])

    async def skip(self, name: str, lsn: Lsn | None) -> None:
        """Skip the transaction that cannot be applied, as SKIP.

        Args:
            name: the name of the subscription.
            lsn: the finish position of the transaction, which the error and conflicts() have. None: skip nothing.

        Raises:
            SubscriberError: the statement failed, with PostgreSQL's message.
        """
        await self._execute([AlterSkip(name, (Option("lsn", "none" if lsn is None else str(lsn)),))])

    async def _execute(self, statements: Sequence[Statement], notice: Notice | None = None) -> None:
        async with self._catalog.use() as connection:
            await execute_parsed(
                connection, statements, notice=notice or _log_notice, hooks=self._hooks, settings=self._settings
            )

    # --- answers ----------------------------------------------------------------------------------

    async def subscriptions(self) -> list[Subscription]:
        """Return all subscriptions of this database, oldest first."""
        async with self._catalog.use() as connection:
            return await load_subscriptions(connection)

    async def status(self, *names: str) -> list[SubscriptionStatus]:
        """Return the status of subscriptions, as `subscriber status` shows it. It queries each publisher.

        Args:
            names: the names of the subscriptions. None given: all.

        Raises:
            StatementError: a subscription does not exist.
            ConnectionLost: the target cannot be reached.
        """
        snapshot = await read_catalog(self._catalog, names)
        return await assess_all(snapshot, self._settings)

    async def check(
        self,
        name: str | None = None,
        *,
        source: FixedDsn | None = None,
        publications: Sequence[str] = (),
        two_phase: bool = False,
    ) -> list[Finding]:
        """Find the problems that would keep a subscription from working, as `subscriber check` does.

        Args:
            name: an existing subscription. None: a new one, of `source` and `publications`.
            source: the publisher's connection string.
            publications: the names of publications.
            two_phase: also check for two_phase = true.

        Returns:
            The findings, with a fix for each. A finding of level `error` prevents replication.

        Raises:
            StatementError: there is no subscription called `name`.
            TypeError: there is neither `name`, nor `source` and `publications`.
        """
        if name is None and (source is None or not publications):
            raise TypeError("check() needs the name of a subscription, or source and publications")
        facts = await collect(
            await conninfo_text(self._target),
            None if source is None else str(await resolve_dsn(source)),
            names_of(publications),
            name,
            apply_target=None if self._apply_target is None else await conninfo_text(self._apply_target),
            two_phase=two_phase,
        )
        return findings(facts)

    async def verify(self, name: str, *, jobs: int = JOBS, max_rate: int | None = None) -> Comparison:
        """Compare all tables with the publisher's at one position, as `subscriber verify` does.

        A launcher must be running. Writes may continue.

        Args:
            name: the name of the subscription.
            jobs: the number of connections to each server.
            max_rate: bytes to read from each server in a second. None: no limit.

        Raises:
            SubscriberError: the subscription does not exist, or a server cannot be queried.
        """
        applying = None if self._apply_target is None else await conninfo_text(self._apply_target)
        target = await conninfo_text(self._target)
        return await verify(target, name, apply_target=applying, jobs=jobs, max_rate=max_rate)

    async def conflicts(
        self, name: str | None = None, *, since: datetime | None = None, limit: int = 1000
    ) -> list[ConflictRecord]:
        """Return the recorded conflicts, newest first.

        Args:
            name: the name of the subscription. None: of all.
            since: only conflicts that have occurred since this time. None: all.
            limit: at most this number.
        """
        async with self._catalog.use() as connection:
            return await load_conflicts(connection, name, since, limit)

    async def events(self, *, interval: float = 1.0, lag_limit: float | None = None) -> AsyncGenerator[Event, None]:
        """Yield changes of states and tables, failures of workers, and conflicts, without end.

        The first events are the differences from the moment of the call. While the target cannot be reached, there
        are none; then the iteration continues.

        Args:
            interval: seconds between two reads of the catalog.
            lag_limit: seconds of lag whose crossing is an event. It queries the publishers. None: no such events.
        """
        before = await self._event_snapshot(lag_limit, None)
        while True:
            await anyio.sleep(interval)
            try:
                now = await self._event_snapshot(lag_limit, before)
            except ConnectionLost:
                continue
            for event in find_events(before, now, lag_limit):
                yield event
            before = now

    async def _event_snapshot(self, lag_limit: float | None, before: EventSnapshot | None) -> EventSnapshot:
        snapshot = await read_catalog(self._catalog)
        if lag_limit is None:
            statuses = [assess(subscription, snapshot, PublisherAnswer()) for subscription in snapshot.subscriptions]
        else:
            statuses = await assess_all(snapshot, self._settings)
        since = snapshot.at if before is None else before.snapshot.at
        # A conflict that was recorded before this snapshot can become visible after it.
        conflicts = await self.conflicts(since=since - timedelta(seconds=60), limit=MOST_CONFLICTS)
        return EventSnapshot(snapshot, statuses, conflicts)

    # --- running ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def running(
        self,
        *,
        only: Sequence[str] | None = None,
        resolvers: Mapping[str, Resolver] | None = None,
        on_error: OnError = "retry",
    ) -> AsyncIterator[None]:
        """Run the launcher, and with it all enabled subscriptions, until the end of the block.

        The next start resumes each subscription where it stopped. One launcher leads on a database at a time. Those of
        other programs wait as standbys.

        Args:
            only: the names of the subscriptions to run. Others do not run while this launcher leads. None: all.
            resolvers: async functions for conflict_policy = 'call name', by name. A function receives a Conflict. It
                returns the name of a policy ("apply_remote", "keep_local", …), or a dict of column values for the row.
                An exception stops the subscription, which calls the function again a few seconds later.
            on_error: the reaction to an error of a worker that a retry alone cannot solve, such as a conflict or a
                lost slot. "retry": it is logged, and the worker retries. "raise": it ends the block and is raised. A
                function, async or not, is called with the name of the subscription and the error; its exception ends
                the block.

        Raises:
            SubscriberError: an error that the launcher cannot handle, or with on_error="raise" an error of a worker.
            TypeError: `only` is a string.
            ValueError: `on_error` has another value.
        """
        app = App(resolvers=resolvers or {}, only=only, on_error=on_error)
        error: Exception | None = None
        async with anyio.create_task_group() as tasks:
            program = RunningApp(app, tasks.cancel_scope.cancel)
            launcher = Launcher(
                self._target,
                app.resolvers,
                self._hooks,
                self._apply_target,
                self._settings,
                app.only,
                program.handle,
            )
            tasks.start_soon(program.run, launcher)
            try:
                yield
            except Exception as raised:  # raised below, outside of the group
                error = raised
            finally:
                tasks.cancel_scope.cancel()
        if program.error is not None:
            raise program.error from error
        if error is not None:
            raise error

    # --- waits ------------------------------------------------------------------------------------

    async def wait_for_sync(self, name: str, *, timeout: float | None = None) -> None:
        """Wait until every table of the subscription has been copied and has caught up.

        Args:
            name: the name of the subscription.
            timeout: seconds. None: no limit. A line is logged each minute.

        Raises:
            StatementError: the subscription does not exist.
            SubscriptionFailed: a worker has failed during the wait, and a retry alone cannot help.
            WaitTimeout: the timeout is over.
        """
        await self._wait(sync_wait(name), timeout)

    async def wait_for_lsn(self, name: str, lsn: Lsn, *, timeout: float | None = None) -> None:
        """Wait until all transactions that the publisher committed before `lsn` are visible on the target.

        This includes the initial copy of each table of the subscription.

        Args:
            name: the name of the subscription.
            lsn: a position of the publisher, for example pg_current_wal_lsn() after the commit to wait for.
            timeout: seconds. None: no limit. A line is logged each minute.

        Raises:
            StatementError: the subscription does not exist.
            SubscriptionFailed: a worker has failed during the wait, and a retry alone cannot help; or a transaction
                before `lsn` is in quarantine.
            WaitTimeout: the timeout is over.
        """
        await self._wait(lsn_wait(name, lsn), timeout)

    async def wait_for_source(self, name: str, *, timeout: float | None = None) -> Lsn:
        """Wait until all transactions that the publisher has committed by now are visible on the target.

        It asks the publisher for its position, and waits as wait_for_lsn(). After a commit of your own on the
        publisher, your change is visible when the wait ends.

        Args:
            name: the name of the subscription.
            timeout: seconds. None: no limit.

        Returns:
            The position.

        Raises:
            ConnectionLost: the publisher cannot be reached.
            ServerError: the publisher refuses the connection or the query.
            The errors of wait_for_lsn().
        """
        started = monotonic()
        async with self._catalog.use() as connection:
            subscription = await find_subscription(connection, name)
            if subscription is None:
                raise await does_not_exist(connection, name)
        try:
            with anyio.fail_after(timeout):
                lsn = await committed_position(subscription)
        except TimeoutError:
            what = f'the publisher of subscription "{name}" has not answered'
            raise WaitTimeout(f"{what} after {timeout:g} s") from None
        left = None if timeout is None else max(0.0, timeout - (monotonic() - started))
        await self.wait_for_lsn(name, lsn, timeout=left)
        return lsn

    async def _wait(self, wait: Wait, timeout: float | None) -> None:
        started = logged = monotonic()
        while True:
            pause = POLL
            try:
                async with self._catalog.use() as connection:
                    if await wait.is_over(connection):
                        return
            except ConnectionLost as error:
                wait.missing, pause = error.message, RECONNECT_INTERVAL
            now = monotonic()
            if timeout is not None and now - started >= timeout:
                raise WaitTimeout(f"{wait.what} after {timeout:g} s: {wait.missing}", hint=wait.hint)
            if now - logged >= WAIT_LOG_INTERVAL:
                logged = now
                message = f"{wait.what} after {now - started:.0f} s: {wait.missing}"
                telemetry.log(telemetry.LOG, message, event="database.waiting", subscription=wait.name)
            await anyio.sleep(pause if timeout is None else min(pause, max(0.0, started + timeout - now)))


async def _stored_conninfo(source: FixedDsn) -> str:
    """Return the connection string that the catalog stores: a URI or key=value pairs of libpq."""
    if callable(source):
        raise TypeError(
            "source is stored in the catalog, so it cannot be a function;"
            " use passfile=… in it, or SUBSCRIBER_PASSWORD_COMMAND"
        )
    return str(await resolve_dsn(source))


def _table_name(table: str | tuple[str, str]) -> TableName:
    if not isinstance(table, str):
        return TableName(*table)
    schema, _, name = table.rpartition(".")
    return TableName(schema or None, name)


def _log_notice(severity: str, message: str, detail: str | None, hint: str | None) -> None:
    level = telemetry.WARNING if severity == "WARNING" else telemetry.LOG
    telemetry.log(level, message, detail=detail, hint=hint, event="statement.notice")
