"""StreamingSetup: creates the spool and the parallel workers of an apply worker, as subscription and servers allow.

Settings of the target apply, as for PostgreSQL's own worker:

- max_parallel_apply_workers_per_subscription limits the number of parallel workers.
- debug_logical_replication_streaming = immediate: no transaction is applied before it ends.
- log_min_messages can lower the level of this log, for users who read it in place of the server's (telemetry.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from time import monotonic

import anyio

from subscriber import telemetry
from subscriber.apply.relation_map import LocalRelation
from subscriber.apply.table_states import NOWHERE, TableState
from subscriber.catalog import worker_sessions
from subscriber.catalog.connection import CatalogConnection
from subscriber.errors import ApplyError, ConnectionLost
from subscriber.lsn import Lsn
from subscriber.publisher.commands import StreamOptions, negotiated_streaming
from subscriber.subscription import Subscription
from subscriber.targets.postgres.session.statement_context import OnConflict
from subscriber.targets.postgres.target import PostgresTarget
from subscriber.targets.postgres.two_phase import TwoPhase
from subscriber.worker.apply_hooks import ApplyRules
from subscriber.worker.context import LauncherContext, open_spool
from subscriber.worker.session.parallel_session import parallel_session
from subscriber.worker.streaming.parallel_worker import Pool
from subscriber.worker.streaming.spooled_transactions import SpooledTransactions
from subscriber.worker.table_states import TableStates

_SETTINGS = """
SELECT pg_catalog.current_setting('max_parallel_apply_workers_per_subscription', true)::int,
       pg_catalog.current_setting('debug_logical_replication_streaming', true),
       pg_catalog.current_setting('log_min_messages')
"""

_POLL = 0.05  # seconds


async def end_earlier_workers(catalog: CatalogConnection, subid: int, timeout: float) -> None:
    """End the parallel sessions of an earlier apply worker, and wait until they have ended.

    Such a backend can still prepare a transaction or hold locks, although no worker reads its results. The caller has
    the apply worker's place (catalog/worker_sessions.py).

    Args:
        catalog: runs the statements.
        subid: OID of the subscription.
        timeout: seconds to wait.

    Raises:
        ConnectionLost: a session has not ended within `timeout` seconds.
    """
    deadline = monotonic() + timeout
    while True:
        async with catalog.use() as connection:
            living = await worker_sessions.living(connection, subid)
            earlier = {
                number: pid for number, pid in living.items() if 0 < number < worker_sessions.FIRST_RANGE_SESSION
            }
            for number in earlier:
                await worker_sessions.terminate(connection, subid, number)
        if not earlier:
            return
        if monotonic() > deadline:
            backends = ", ".join(map(str, earlier.values()))
            raise ConnectionLost(f"backends of an earlier worker of this subscription do not end: {backends}")
        await anyio.sleep(_POLL)


class StreamingSetup(ApplyRules):
    """The streamed transactions of one apply worker, and the rules of its parallel workers.

    Attributes:
        streamed: the store of streamed transactions. None: streaming is off.
        pool: the parallel workers. None: streaming is not parallel.
        parallel: the stream uses streaming = parallel.
        position: returns the processed position of the stream. Set when the apply loop exists.
    """

    def __init__(
        self,
        subscription: Subscription,
        context: LauncherContext,
        leader: ApplyRules,
        tables: TableStates,
        two_phase: TwoPhase | None,
        skip_lsn: Callable[[], Lsn],
    ) -> None:
        """Create the setup. prepare() creates the store and the pool.

        Args:
            subscription: the subscription.
            context: the launcher's context.
            leader: the rules of the apply worker, whose hooks and checks the parallel workers share.
            tables: the states of the subscription's tables.
            two_phase: the prepared transactions. None: two-phase commit is off.
            skip_lsn: returns the position of ALTER SUBSCRIPTION … SKIP. 0: there is none.
        """
        self.table_hooks, self.verify_binary_types = leader.table_hooks, leader.verify_binary_types
        self.own_tables = leader.own_tables
        self.streamed: SpooledTransactions | None = None
        self.pool: Pool | None = None
        self.parallel = False
        self.position: Callable[[], Lsn] = lambda: NOWHERE
        self._subscription = subscription
        self._context = context
        self._tables = tables
        self._two_phase = two_phase
        self._skip_lsn = skip_lsn
        self._leader: PostgresTarget

    async def prepare(
        self, leader: PostgresTarget, options: StreamOptions, publisher_version: int, on_conflict: OnConflict
    ) -> None:
        """Create the store and the pool that the stream needs. Must be awaited before the stream starts.

        Args:
            leader: the apply worker's target, whose definitions of tables the parallel workers share.
            options: the options of the stream.
            publisher_version: the publisher's server_version_num.
            on_conflict: called with each conflict of a parallel worker's transaction after its commit.
        """
        streaming = negotiated_streaming(options, publisher_version)
        if streaming == "off":
            return
        context, subid = self._context, self._subscription.oid
        self._leader = leader
        self.parallel = streaming == "parallel"
        if self.parallel:
            size, _, _ = await self._settings()
            self.pool = Pool(
                context.settings.default_parallel_workers if size is None else size, self._connect, on_conflict
            )
            leader.rows.others_in_progress = self.pool.is_busy
        spool = open_spool(context.settings, context.sync_id, subid, 0)
        self.streamed = SpooledTransactions(spool, subid, self.pool, self._may_go_ahead, self, context.settings)

    async def _settings(self) -> tuple[int | None, str | None, str]:
        async with self._context.catalog.use() as connection:
            ((size, debug, messages),) = await connection.fetch(_SETTINGS)
            return size, debug, messages

    async def _may_go_ahead(self, xid: int) -> bool:
        """Return True if a parallel worker may apply the transaction while it is streamed.

        A parallel worker may not apply it in these cases:

        - a setting of the target forbids it;
        - a transaction is to be skipped;
        - tables are not ready;
        - it was prepared before a restart, so the prepared transaction has locked its rows;
        - the subscription compares changes with the target's rows to decide conflicts.
        """
        _, debug, messages = await self._settings()
        telemetry.follow_server(messages)
        if debug == "immediate":
            telemetry.log(
                telemetry.LOG,
                "logical replication apply worker will serialize the remaining changes of remote transaction"
                f" {xid} to a file",
                event="parallel.serialize",
                xid=xid,
            )
            return False
        prepared_before = self._two_phase is not None and self._two_phase.is_prepared(xid)
        # A policy may need the commit time, which is not known before the end of the transaction.
        decides = self._subscription.decides_conflicts
        return not (self._skip_lsn() or self._tables.unready or prepared_before or decides)

    def should_apply(self, table: LocalRelation, finish_lsn: Lsn) -> bool:
        """Return True if a parallel worker applies changes of a table.

        Raises:
            ApplyError: the table is not ready, so the answer depends on the end of the transaction.
            StaleCatalog: the table was replaced, and the launcher has not loaded its successor yet.
        """
        state = self._tables.find(table)
        if state is None:
            return False
        if state.state is not TableState.READY or not state.applies(self.position()):
            raise ApplyError(
                f'logical replication parallel apply worker for subscription "{self._subscription.name}" will stop',
                detail="Cannot handle streamed replication transactions using parallel apply workers until all"
                " tables have been synchronized.",
            )
        return True

    def _connect(self, number: int, on_conflict: OnConflict) -> AbstractAsyncContextManager[PostgresTarget]:
        return parallel_session(self._subscription, self._context, self._leader, number, on_conflict)
