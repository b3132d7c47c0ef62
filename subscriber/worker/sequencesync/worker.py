"""The sequence synchronization worker of one subscription.

It sleeps while every sequence is READY. Sequences in state INIT wake it; with `sequences = follow` it also polls the
publisher. PostgreSQL starts such a worker for each synchronization. Like those, it counts as one of max_sync_workers
while it synchronizes, and then has a row in pg_stat_subscription.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from subscriber import telemetry
from subscriber.catalog.store.subscription_sequence import SubscriptionSequence, load_sequences
from subscriber.catalog.store.workers import WorkerState
from subscriber.errors import SubscriberError
from subscriber.exception_groups import root_cause
from subscriber.names import sequence_sync_name
from subscriber.publisher.connection import Publisher
from subscriber.publisher.subscriptions import connect_publisher
from subscriber.retry import Reaction, reaction
from subscriber.subscription import SequenceMode, Subscription
from subscriber.worker.context import LauncherContext
from subscriber.worker.error_hints import add_hint
from subscriber.worker.recovery import Recovery
from subscriber.worker.sequencesync.follower import SequenceFollower
from subscriber.worker.sequencesync.synchronization import synchronize
from subscriber.worker.status import Report

SEQUENCE_SYNC = "sequence synchronization"
SEQUENCE_SYNC_RELID = 0xFFFFFFFE  # the relid of the worker's reports; no relation has this OID
INIT = "i"
TURN_POLL = 0.1  # seconds


class SequenceSync:
    """Synchronizes the sequences of one subscription until it is cancelled."""

    def __init__(
        self, subscription: Subscription, context: LauncherContext, running_table_syncs: Callable[[], int]
    ) -> None:
        """`running_table_syncs` returns the number of the subscription's table sync workers."""
        self.is_running = False  # synchronizes, or waits for its turn: counts as one of max_sync_workers
        self._running_table_syncs = running_table_syncs
        self._subscription = subscription
        self._context = context
        self._recovery = Recovery(context.settings)
        self._report: Report | None = None
        self._changed = anyio.Event()
        self._publisher: Publisher | None = None
        self._follower: SequenceFollower | None = None

    def update(self, subscription: Subscription) -> None:
        """Read the sequences again: a statement may have changed them, or the subscription."""
        if subscription != self._subscription:
            self._close()
            self._follower = None
        self._subscription = subscription
        self._changed.set()

    async def run(self) -> None:
        """Synchronize and follow, until cancelled.

        Raises:
            SequenceSyncError: A synchronization failed, and `disable_on_error` is set.
        """
        try:
            while True:
                self._changed = anyio.Event()
                wait = await self._attempt()
                with anyio.move_on_after(wait):
                    await self._changed.wait()
        finally:
            self._close()
            self._remove_report()

    async def _attempt(self) -> float | None:
        """Do what is to be done now. Returns the seconds until the next attempt; None: until something changes."""
        async with self._context.catalog.use() as connection:
            sequences = await load_sequences(connection, self._subscription.oid)
        waiting = [sequence for sequence in sequences if sequence.state == INIT]
        ready = [sequence for sequence in sequences if sequence.state != INIT]
        follows = self._subscription.sequences is SequenceMode.FOLLOW and bool(ready)
        try:
            if waiting:
                await self._synchronize(waiting)
                return 0.0
            if follows:
                await self._follow(ready)
                return self._context.settings.sequence_interval
        except SubscriberError as error:
            return self._failed(error)
        self._close()
        self._remove_report()
        return None

    async def _synchronize(self, waiting: list[SubscriptionSequence]) -> None:
        report = self._start_report(WorkerState.STARTING)
        self.is_running = True
        try:
            while self._running_table_syncs() >= self._context.settings.max_sync_workers:
                report.enter(WorkerState.WAITING_FOR_TABLES)
                await anyio.sleep(TURN_POLL)
            self._follower = None  # it would compare with values from before
            report.connected(self._context.catalog.pid)
            report.enter(WorkerState.SYNCHRONIZING)
            self._context.board.publish()
            telemetry.log(telemetry.LOG, f"{self._label} has started", event="sequencesync.started")
            publisher = await self._connect()
            names = [(sequence.schema, sequence.name) for sequence in waiting]
            await synchronize(self._subscription, names, self._context.catalog, publisher)
            telemetry.log(telemetry.LOG, f"{self._label} has finished", event="sequencesync.finished")
            self._recovery.clear()
        finally:
            self.is_running = False
            report.connected(None)
        if self._subscription.sequences is not SequenceMode.FOLLOW:
            self._close()
            self._remove_report()

    async def _follow(self, ready: list[SubscriptionSequence]) -> None:
        report = self._start_report(WorkerState.FOLLOWING)
        publisher = await self._connect()
        if self._follower is None:
            self._follower = SequenceFollower(self._subscription, self._context.catalog, self._context.settings)
        await self._follower.poll(publisher, ready)
        self._recovery.clear()
        report.enter(WorkerState.FOLLOWING)

    def _failed(self, error: SubscriberError) -> float:
        """Report an error. Returns the seconds until the next attempt."""
        self._close()
        cause = root_cause(error)
        add_hint(cause)
        how = reaction(cause)
        report = self._start_report(WorkerState.WAITING_TO_RETRY)
        self._recovery.failed(cause, None, how)
        telemetry.log_error(cause)
        report.counts["sync_seq_error_count"] += 1
        delay = self._context.settings.retry_interval
        report.connected(None)
        report.wait(delay)
        self._context.board.publish()
        if self._subscription.disable_on_error and how is Reaction.INTERVAL:
            raise error
        return delay

    async def _connect(self) -> Publisher:
        if self._publisher is None:
            name = sequence_sync_name(self._subscription.oid, self._context.sync_id)
            encoding = self._context.catalog.encoding
            self._publisher = await connect_publisher(self._subscription, name, "sequencesync worker", encoding)
        return self._publisher

    def _close(self) -> None:
        if self._publisher is not None:
            self._publisher.session.abort()
            self._publisher = None

    def _start_report(self, state: WorkerState) -> Report:
        if self._report is None:
            board, subid = self._context.board, self._subscription.oid
            self._report = board.add(subid, SEQUENCE_SYNC_RELID, SEQUENCE_SYNC, self._recovery)
            self._report.enter(state)
        return self._report

    def _remove_report(self) -> None:
        if self._report is not None:
            self._context.board.remove(self._report)
            self._report = None

    @property
    def _label(self) -> str:
        return f'logical replication sequence synchronization worker for subscription "{self._subscription.name}"'
