"""Launcher: runs all enabled subscriptions of one target database.

Invariants.

- One launcher leads on a database at a time. It has the lease in table `launcher` (catalog/worker_sessions.py). It
  renews the lease on a separate connection, at least three times within `takeover_after`. Other launchers are standbys.
- Statements on subscriptions send a notification, which the launcher receives with LISTEN. At each
  `catalog_poll_interval` the launcher reads the catalog without one, in case a notification was lost.
- A database without subscriptions is not kept open, so that it can be dropped. The launcher disconnects
  `empty_database_linger` after the last subscription is dropped. It connects again at each
  `empty_database_poll_interval` to check for a subscription.

Failure cases.

- Leader's backend ends: a standby takes over within a second (`standby_poll_interval`).
- Leader does not renew its lease, because it is frozen or a proxy keeps its backend alive: a standby takes over after
  `takeover_after`. Later commits of the former leader's workers fail (targets/postgres/session/progress.py).
- Connection or lease lost: the launcher stops all workers before it connects again.
- Target does not answer a renewal within `target_timeout`: the same. A machine that has disappeared resets no
  connection, and TCP would continue to send for a quarter of an hour.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from contextlib import suppress
from functools import partial
from time import monotonic
from types import MappingProxyType
from typing import Any

import anyio
import asyncpg
from anyio.abc import TaskGroup

from subscriber import formatting, telemetry
from subscriber.apply.conflicts.rules import Resolver
from subscriber.apply.hooks.config import Hooks
from subscriber.catalog import identity, worker_sessions
from subscriber.catalog.connection import CatalogConnection
from subscriber.catalog.pooling import refuse_transaction_mode
from subscriber.catalog.schema import ensure_schema
from subscriber.catalog.store.subscriptions import load_subscriptions
from subscriber.catalog.worker_sessions import Backend
from subscriber.connection.conninfo import Conninfo
from subscriber.errors import ConnectionLost, ServerError, StatementError, SubscriberError
from subscriber.exception_groups import is_cancelled, root_cause
from subscriber.remedy import Remedy
from subscriber.retry import TRANSIENT, Reaction, RetryDelay
from subscriber.settings import DEFAULTS, Settings
from subscriber.sqlstate import INSUFFICIENT_PRIVILEGE
from subscriber.subscription import Subscription
from subscriber.worker.context import LauncherContext, OnError, ignore_error
from subscriber.worker.copy_rate import CopyRate
from subscriber.worker.error_hints import add_hint
from subscriber.worker.recovery import Recovery
from subscriber.worker.status import CANNOT_WRITE, Board
from subscriber.worker.supervision.publication_monitor import PublicationMonitor
from subscriber.worker.supervision.session_waits import SessionWaitMonitor
from subscriber.worker.supervision.supervisor import Supervisor
from subscriber.worker.supervision.wal_budget import WalBudgetMonitor
from subscriber.worker.wal_flush import Flusher

CHANNEL = "subscriber"
RESIGN_TIMEOUT = 1.0  # seconds to give the lease back when the launcher ends


class Launcher:
    """The launcher of one target database.

    Attributes:
        pid: process ID of the launcher's backend on the target when it last became the leader. None: it never led.
    """

    def __init__(
        self,
        target: Conninfo | str,
        resolvers: Mapping[str, Resolver] = MappingProxyType({}),
        hooks: Mapping[str, Hooks] = MappingProxyType({}),
        apply_target: Conninfo | str | None = None,
        settings: Settings = DEFAULTS,
        only: Collection[str] | None = None,
        on_error: OnError = ignore_error,
    ) -> None:
        """Create a launcher without connecting.

        Args:
            target: the connection string of the database whose subscriptions are run.
            resolvers: the functions that a conflict_policy may call, by name.
            hooks: the program's hooks, by name of the subscription.
            apply_target: the connection string of the role that applies changes, to the same database. None: `target`.
            settings: limits, intervals and time-outs.
            only: the names of the subscriptions that are run. None: all.
            on_error: called after each error of a worker that a retry alone cannot solve.
        """
        self._target = target
        self._apply_target = apply_target or target
        self._instance = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
        self._settings = settings
        self._resolvers = resolvers
        self._hooks = hooks
        self._only = None if only is None else frozenset(only)
        self._left_out: set[str] = set()  # enabled subscriptions that are not in `only`
        self._on_error = on_error
        self.pid: int | None = None
        self._supervisors: dict[int, tuple[Supervisor, anyio.CancelScope]] = {}
        self._recoveries: dict[int, Recovery] = {}  # of apply workers, by OID of the subscription
        self._wake = anyio.Event()
        self._was_ready = False
        self._last_used = monotonic()  # the last time that the database had a subscription, or the start

    def supervisor(self, name: str) -> Supervisor:
        """Return the supervisor of a running subscription.

        Raises:
            KeyError: no subscription with this name runs.
        """
        return {supervisor.subscription.name: supervisor for supervisor, _ in self._supervisors.values()}[name]

    async def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Run the subscriptions until canceled. Reconnects after errors.

        Args:
            on_ready: called each time that this launcher becomes the leader and the database has subscriptions.

        Raises:
            SubscriberError: a permanent error before the launcher was ready for the first time, for example a refused
                password or a missing privilege.

        Cancellation: all workers are stopped, and the lease is released.
        """
        settings = self._settings
        backoff = RetryDelay(settings)
        telemetry.log(telemetry.LOG, "logical replication launcher started", event="launcher.started")
        while True:
            started = monotonic()
            try:
                await self._work(on_ready)
                if monotonic() - self._last_used > settings.empty_database_linger:
                    await anyio.sleep(settings.empty_database_poll_interval)
            except Exception as group:
                # The errors of a group can hide a cancellation of this task.
                if is_cancelled():
                    raise
                error = root_cause(group)
                if not self._was_ready and _is_hopeless(error):
                    raise error from group
                add_hint(error)
                telemetry.log_error(error, telemetry.WARNING, worker="launcher", event="launcher.lost")
                for supervisor, _ in self._supervisors.values():
                    supervisor.interrupted(error)
                self._supervisors.clear()
                # If the target's server crashes repeatedly, a change that a worker applies may be the cause.
                lasted = monotonic() - started
                if lasted > settings.retry_interval and all(recovery.is_over for recovery in self._recoveries.values()):
                    backoff.reset()
                await anyio.sleep(backoff.next(Reaction.BACKOFF))

    async def _work(self, on_ready: Callable[[], None]) -> None:
        async with CatalogConnection.open(self._target, worker_sessions.LAUNCHER_NAME) as catalog:
            lost = anyio.Event()
            catalog.on_lost(lost.set)
            async with catalog.use() as connection:
                await refuse_transaction_mode(connection, self._target)
                await identity.refuse_standby(connection)
                await ensure_schema(connection)
                await identity.check(connection)
                sync_id = await identity.sync_id(connection)
            await self._become_leader(catalog)
            try:
                await catalog.listen(CHANNEL, self._notified)
                if not await self._wait_for_subscriptions(catalog):
                    return
                async with (
                    CatalogConnection.open(self._target, "subscriber flush") as flushing,
                    CatalogConnection.open(self._target, "subscriber watch") as watching,
                ):
                    for session in (flushing, watching):
                        async with session.use() as connection:
                            await worker_sessions.register_without_place(connection)
                    context = LauncherContext(
                        self._target,
                        self._apply_target,
                        sync_id,
                        catalog,
                        Flusher(flushing, self._settings.flush_interval),
                        Board(catalog, self._settings),
                        self._resolvers,
                        self._hooks,
                        self._settings,
                        self._on_error,
                        CopyRate(self._settings.copy_rate),
                        anyio.CapacityLimiter(self._settings.index_sessions),
                    )
                    own = {catalog.pid: "the launcher", flushing.pid: "what makes commits durable"}
                    lock_waits = SessionWaitMonitor(
                        lambda: own | dict.fromkeys(context.board.table_syncs(), "a table synchronization worker"),
                        self._settings,
                    )
                    beside = (
                        partial(self._renew_lease, watching),
                        partial(lock_waits.run, watching),
                        WalBudgetMonitor(context).run,
                        PublicationMonitor(context).run,
                    )
                    await self._run_subscriptions(context, lost, beside, on_ready)
            finally:
                if not lost.is_set():
                    await self._resign(catalog)

    async def _wait_for_subscriptions(self, catalog: CatalogConnection) -> bool:
        """Wait for a subscription. Returns False if there is none when `empty_database_linger` is over."""
        while True:
            self._wake = anyio.Event()
            async with catalog.use() as connection:
                if await load_subscriptions(connection):
                    return True
            left = self._last_used + self._settings.empty_database_linger - monotonic()
            if left <= 0:
                return False
            with anyio.move_on_after(left):
                await self._wake.wait()

    async def _run_subscriptions(
        self,
        context: LauncherContext,
        lost: anyio.Event,
        beside: Iterable[Callable[[], Coroutine[Any, Any, None]]],
        on_ready: Callable[[], None],
    ) -> None:
        self._supervisors.clear()
        self._was_ready = True
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(context.flusher.run)
            tasks.start_soon(context.board.run)
            tasks.start_soon(_fail_when, lost)
            for task in beside:
                tasks.start_soon(task)
            on_ready()
            await self._reconcile_while_any(tasks, context)
            tasks.cancel_scope.cancel()

    async def _become_leader(self, catalog: CatalogConnection) -> None:
        waiting = False
        while True:
            async with catalog.use() as connection:
                backend = await Backend.of(connection)
                silence = self._settings.takeover_after
                try:
                    await worker_sessions.register_without_place(connection)
                    leads = await worker_sessions.lead(connection, self._instance, backend, silence)
                except asyncpg.InsufficientPrivilegeError as error:
                    role = await connection.fetchval("SELECT pg_catalog.quote_literal(session_user)")
                    raise StatementError(
                        "permission denied to run subscriptions on this database",
                        detail=str(error),
                        hint=Remedy(
                            "on the target, as the owner of schema subscriber",
                            f"SELECT subscriber.admit({role}, 'launcher');",
                        ),
                        sqlstate=INSUFFICIENT_PRIVILEGE,
                    ) from error
                if leads:
                    self.pid = backend.pid
                    return
            if not waiting:
                waiting = True
                telemetry.log(
                    telemetry.LOG,
                    "another launcher works on this database; waiting as standby",
                    event="launcher.standby",
                )
            await anyio.sleep(self._settings.standby_poll_interval)

    async def _renew_lease(self, catalog: CatalogConnection) -> None:
        """Renew the lease until canceled, on a connection whose statements wait for no lock.

        Raises:
            ConnectionLost: another launcher leads, or the target has not answered within `target_timeout`.
        """
        interval = min(self._settings.lease_renewal_interval, self._settings.takeover_after / 3)
        while True:
            await anyio.sleep(interval)
            try:
                with anyio.fail_after(self._settings.target_timeout):
                    async with catalog.use() as connection:
                        leads = await worker_sessions.renew_lead(connection, self._instance, self.pid or 0)
            except TimeoutError:
                raise ConnectionLost("the target does not answer") from None
            except ServerError as error:
                if not error.sqlstate.startswith(CANNOT_WRITE):
                    raise
                # No other launcher can take the lease on a target that cannot write.
                continue
            if not leads:
                raise ConnectionLost("another launcher has taken over")

    async def _resign(self, catalog: CatalogConnection) -> None:
        """Release the lease, so that a standby can take over before this session has ended."""
        with anyio.move_on_after(RESIGN_TIMEOUT, shield=True), suppress(SubscriberError):
            async with catalog.use() as connection:
                await worker_sessions.resign(connection, self._instance, self.pid or 0)

    def _notified(self, table: str, by_us: bool) -> None:
        # A worker of this launcher that stores the state of a table also updates TableStates.
        if not (by_us and table in ("subscription_rel", "subscription_sequence")):
            self._wake.set()

    async def _reconcile_while_any(self, tasks: TaskGroup, context: LauncherContext) -> None:
        """Run the subscriptions of the catalog until the database has none."""
        while True:
            self._wake = anyio.Event()
            async with context.catalog.use() as connection:
                subscriptions = await load_subscriptions(connection)
            await self._reconcile(tasks, context, subscriptions)
            self._last_used = monotonic()
            if not subscriptions:
                return
            with anyio.move_on_after(self._settings.catalog_poll_interval):
                await self._wake.wait()

    async def _reconcile(self, tasks: TaskGroup, context: LauncherContext, subscriptions: list[Subscription]) -> None:
        """Start, update and stop supervisors, so that all enabled subscriptions run."""
        enabled = [s for s in subscriptions if s.enabled]
        wanted = {s.oid: s for s in enabled if self._only is None or s.name in self._only}
        self._log_left_out({s.name for s in enabled if s.oid not in wanted})
        known = {s.oid for s in subscriptions}
        for gone in self._recoveries.keys() - known:
            del self._recoveries[gone]
        for subid, (supervisor, scope) in list(self._supervisors.items()):
            if subid not in wanted:
                why = "the subscription was disabled" if subid in known else "the subscription was removed"
                if any(s.oid == subid for s in enabled):
                    why = "this program does not run a subscription of its new name"
                telemetry.log(
                    telemetry.LOG,
                    f'logical replication worker for subscription "{supervisor.subscription.name}" '
                    f"will stop because {why}",
                    event="worker.stopped",
                )
                scope.cancel()
                del self._supervisors[subid]
            else:
                await supervisor.update(wanted[subid])
        for subid, subscription in wanted.items():
            if subid not in self._supervisors:
                recovery = self._recoveries.setdefault(subid, Recovery(self._settings))
                supervisor, scope = Supervisor(subscription, context, recovery), anyio.CancelScope()
                self._supervisors[subid] = supervisor, scope
                tasks.start_soon(self._supervise, subid, supervisor, scope)

    def _log_left_out(self, names: set[str]) -> None:
        if new := sorted(names - self._left_out):
            telemetry.log(
                telemetry.LOG,
                f"this launcher does not run {formatting.count(len(new), 'subscription')} of this database: "
                + ", ".join(f'"{name}"' for name in new),
                detail="No other launcher runs on this database while this one leads.",
                event="launcher.left_out",
            )
        self._left_out = names

    async def _supervise(self, subid: int, supervisor: Supervisor, scope: anyio.CancelScope) -> None:
        with scope:
            await supervisor.run()
        if self._supervisors.get(subid, (None,))[0] is supervisor:
            del self._supervisors[subid]


def _is_hopeless(error: BaseException) -> bool:
    """Return True for an error of the first start that a retry cannot solve, so that run() has to raise it."""
    if isinstance(error, ServerError):
        return not error.sqlstate.startswith(TRANSIENT)
    return not isinstance(error, ConnectionLost | OSError | TimeoutError)


async def _fail_when(lost: anyio.Event) -> None:
    await lost.wait()
    raise ConnectionLost("the launcher has lost its connection to the target")
