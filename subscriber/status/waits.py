"""Waits for a state of a subscription, and the errors that make a wait hopeless.

A worker's error stays in its report until the worker is past it. So the cause of an error that the first read finds may
be repaired already. Such an error ends the wait after STALE_AFTER, if the worker does not retry by itself. Each new
error that a retry alone cannot solve ends the wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection
from time import monotonic

from subscriber.catalog import worker_sessions
from subscriber.catalog.commands.privileges import does_not_exist
from subscriber.catalog.connection import Connection
from subscriber.catalog.store import progress_records, quarantine
from subscriber.catalog.store.subscription_rel import load_relation_states
from subscriber.catalog.store.subscriptions import find_subscription
from subscriber.catalog.store.workers import APPLY_WORKER, WorkerStatus, load_workers
from subscriber.display import shell_word
from subscriber.errors import SubscriptionFailed
from subscriber.formatting import count
from subscriber.lsn import Lsn
from subscriber.quoting import identifier
from subscriber.remedy import Remedy
from subscriber.status.model import TABLE_STATES
from subscriber.subscription import Subscription

STALE_AFTER = 2.0  # seconds
IN_SYNC = ("s", "r")
READY = ("r",)


class Wait(ABC):
    """One wait.

    Attributes:
        name: the name of the subscription.
        what: the unmet condition, for messages.
        missing: the state that the last read found, for messages.
        hint: what to do. None: there is nothing to do.
    """

    def __init__(self, name: str, what: str) -> None:
        self.name = name
        self.what = what
        self.missing = "the catalog has not been read"
        self.hint: Remedy | None = None
        self._started = monotonic()
        self._known: set[tuple[object, ...]] | None = None  # errors of the first read

    async def is_over(self, connection: Connection) -> bool:
        """Read the catalog, and return True if the condition is met.

        Raises:
            StatementError: the subscription does not exist.
            SubscriptionFailed: a worker has failed, and a retry alone cannot help.
        """
        subscription = await find_subscription(connection, self.name)
        if subscription is None:
            raise await does_not_exist(connection, self.name)
        workers = [worker for worker in await load_workers(connection) if worker.subid == subscription.oid]
        if await self._is_met(connection, subscription, workers):
            return True
        await self._raise_failure(connection, subscription, workers)
        if not subscription.enabled:
            self.missing += "; the subscription is disabled"
            self.hint = Remedy(command=f"ALTER SUBSCRIPTION {identifier(self.name)} ENABLE;")
        elif await worker_sessions.leader(connection) is None:
            self.missing += "; no launcher is running"
            self.hint = Remedy(
                "start one", "subscriber run", alternative=Remedy("run it here: async with db.running().")
            )
        else:
            self.hint = None
        return False

    @abstractmethod
    async def _is_met(
        self, connection: Connection, subscription: Subscription, workers: list[WorkerStatus]
    ) -> bool: ...

    def _concerns(self, worker: WorkerStatus) -> bool:
        """Return True if an error of `worker` makes the wait hopeless."""
        return worker.relid == APPLY_WORKER

    async def _raise_failure(
        self, connection: Connection, subscription: Subscription, workers: list[WorkerStatus]
    ) -> None:
        failed = [row for row in workers if row.error is not None and self._concerns(row)]
        if failed:
            self.missing += f"; last error: {failed[0].error}"
        permanent = [row for row in failed if row.error_is_transient is False]
        errors = {(row.relid, row.error_time): row for row in permanent}
        if self._known is None:
            self._known = set(errors)
        is_stale = monotonic() - self._started < STALE_AFTER
        for key, worker in errors.items():
            if key in self._known and (is_stale or worker.state not in ("stopped", "disabled")):
                continue
            relations = await load_relation_states(connection, subscription.oid)
            table = next(
                (f"{relation.namespace}.{relation.name}" for relation in relations if relation.relid == worker.relid),
                None,
            )
            raise SubscriptionFailed(
                self.name, table, worker.error or "", hint=worker.error_remedy, sqlstate=worker.error_sqlstate
            )


class TablesWait(Wait):
    """Waits until all tables are in one of some states."""

    def __init__(self, name: str, what: str, states: Collection[str], *, with_foreign_keys: bool = False) -> None:
        super().__init__(name, what)
        self._states = states
        self._with_foreign_keys = with_foreign_keys

    async def _is_met(self, connection: Connection, subscription: Subscription, workers: list[WorkerStatus]) -> bool:
        relations = await load_relation_states(connection, subscription.oid)
        states = [relation for relation in relations if relation.state not in self._states]
        if not states and self._with_foreign_keys:
            states = [relation for relation in relations if relation.lacks_foreign_keys]
            self.missing = f"{len(states)} tables lack foreign keys"
            self._unready = {relation.relid for relation in states}
            return not states
        counted = Counter(TABLE_STATES.get(relation.state, relation.state) for relation in states)
        self.missing = "tables " + ", ".join(f"{number} {state}" for state, number in counted.items())
        if len(states) == 1:
            self.missing = f"table {states[0].namespace}.{states[0].name} is {next(iter(counted))}"
        self._unready = {relation.relid for relation in states}
        return not states

    def _concerns(self, worker: WorkerStatus) -> bool:
        return worker.relid == APPLY_WORKER or worker.relid in self._unready


class LsnWait(TablesWait):
    """Waits until all transactions before a position are visible.

    The position of the apply worker alone does not show it. The worker skips changes of a table that is being copied,
    and those of a transaction in quarantine, and passes their positions.
    """

    def __init__(self, name: str, lsn: Lsn) -> None:
        super().__init__(name, f'subscription "{name}" has not reached {lsn}', IN_SYNC)
        self._lsn = lsn

    async def _is_met(self, connection: Connection, subscription: Subscription, workers: list[WorkerStatus]) -> bool:
        # The record has the last applied commit. Only the worker knows that no later change is published.
        reached = [worker.latest_end_lsn for worker in workers if worker.relid == APPLY_WORKER]
        reached.append(await progress_records.load(connection, subscription.oid))
        position = max((lsn for lsn in reached if lsn is not None), default=None)
        # The tables are read after the position, so a table that is synchronized again meanwhile is not in sync.
        is_in_sync = await super()._is_met(connection, subscription, workers)
        await self._refuse_quarantined(connection, subscription)
        if position is None or position < self._lsn:
            self.missing = "nothing is applied yet" if position is None else f"applied up to {position}"
            return False
        return is_in_sync

    async def _refuse_quarantined(self, connection: Connection, subscription: Subscription) -> None:
        parked = [
            transaction
            for transaction in await quarantine.load(connection, subscription.oid)
            if transaction.finish_lsn <= self._lsn
        ]
        if parked:
            name = shell_word(self.name)
            raise SubscriptionFailed(
                self.name,
                None,
                f"{count(len(parked), 'transaction')} before {self._lsn} in quarantine: {parked[0].error or ''}",
                hint=Remedy(
                    "see the errors",
                    f"subscriber quarantine list {name}",
                    then=Remedy("repair their cause, and retry", f"subscriber quarantine retry {name}"),
                ),
                sqlstate=None,
            )


def sync_wait(name: str) -> Wait:
    """Return a wait until every table of a subscription is copied and has caught up."""
    return TablesWait(name, f'subscription "{name}" is not in sync', IN_SYNC)


def ready_wait(name: str) -> Wait:
    """Return a wait until the apply worker has all tables of a subscription."""
    return TablesWait(name, f'tables of subscription "{name}" are not ready', READY)


def built_wait(name: str) -> Wait:
    """Return a wait until all tables of a subscription are ready, and have the foreign keys of copy_indexes = after."""
    return TablesWait(name, f'tables of subscription "{name}" are not ready', READY, with_foreign_keys=True)


def lsn_wait(name: str, lsn: Lsn) -> Wait:
    """Return a wait until a subscription has applied all transactions before a position."""
    return LsnWait(name, lsn)
