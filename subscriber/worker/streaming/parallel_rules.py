"""Decisions about streamed transactions: which ones parallel workers apply, and what these workers apply.

Settings of the target apply, as for PostgreSQL's own worker:

- max_parallel_apply_workers_per_subscription limits the number of parallel workers.
- debug_logical_replication_streaming = immediate: no transaction is applied before it ends.
- log_min_messages can lower the level of this log, for users who read it in place of the server's (telemetry.py).
"""

from __future__ import annotations

from collections.abc import Callable

from subscriber import telemetry
from subscriber.apply.progress import Progress
from subscriber.apply.relation_map import LocalRelation
from subscriber.apply.table_states import TableState
from subscriber.catalog.connection import CatalogConnection
from subscriber.errors import ApplyError
from subscriber.lsn import Lsn
from subscriber.settings import Settings
from subscriber.subscription import Subscription
from subscriber.targets.postgres.two_phase import TwoPhase
from subscriber.worker.apply_hooks import ApplyRules
from subscriber.worker.table_states import TableStates

_SETTINGS = """
SELECT pg_catalog.current_setting('max_parallel_apply_workers_per_subscription', true)::int,
       pg_catalog.current_setting('debug_logical_replication_streaming', true),
       pg_catalog.current_setting('log_min_messages')
"""


class ParallelRules(ApplyRules):
    """The rules by which parallel workers apply changes: those of their apply worker, for tables that are ready."""

    def __init__(self, leader: ApplyRules, subscription: str, tables: TableStates, progress: Progress) -> None:
        """Create the rules.

        Args:
            leader: the rules of the apply worker, whose hooks and checks the parallel workers share.
            subscription: the name of the subscription.
            tables: the states of the subscription's tables.
            progress: the positions of the apply loop.
        """
        self.table_hooks, self.verify_binary_types = leader.table_hooks, leader.verify_binary_types
        self._subscription = subscription
        self._tables = tables
        self._progress = progress

    def should_apply(self, table: LocalRelation, finish_lsn: Lsn) -> bool:
        """Return True if a parallel worker applies changes of a table.

        Raises:
            ApplyError: the table is not ready, so the answer depends on the end of the transaction.
            StaleCatalog: the table was replaced, and the launcher has not loaded its successor yet.
        """
        state = self._tables.find(table)
        if state is None:
            return False
        if state.state is not TableState.READY or not state.applies(self._progress.position):
            raise ApplyError(
                f'logical replication parallel apply worker for subscription "{self._subscription}" will stop',
                detail="Cannot handle streamed replication transactions using parallel apply workers until all"
                " tables have been synchronized.",
            )
        return True


class ParallelAdmission:
    """Decides whether parallel workers apply a streamed transaction before it ends."""

    def __init__(
        self,
        subscription: Subscription,
        catalog: CatalogConnection,
        tables: TableStates,
        two_phase: TwoPhase | None,
        skip_lsn: Callable[[], Lsn],
    ) -> None:
        """Create the decision.

        Args:
            subscription: the subscription.
            catalog: reads settings of the target.
            tables: the states of the subscription's tables.
            two_phase: the prepared transactions. None: two-phase commit is off.
            skip_lsn: returns the position of ALTER SUBSCRIPTION … SKIP. 0: there is none.
        """
        self._subscription = subscription
        self._catalog = catalog
        self._tables = tables
        self._two_phase = two_phase
        self._skip_lsn = skip_lsn

    async def admits(self, xid: int) -> bool:
        """Return True if a parallel worker may apply the transaction while it is streamed.

        A parallel worker may not apply it in these cases:

        - a setting of the target forbids it;
        - a transaction is to be skipped;
        - tables are not ready;
        - it was prepared before a restart, so the prepared transaction has locked its rows;
        - the subscription compares changes with the target's rows to decide conflicts.
        """
        _, debug, messages = await _read_settings(self._catalog)
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


async def read_pool_size(catalog: CatalogConnection, settings: Settings) -> int:
    """Return the number of parallel workers that the target allows a subscription."""
    size, _, _ = await _read_settings(catalog)
    return settings.default_parallel_workers if size is None else size


async def _read_settings(catalog: CatalogConnection) -> tuple[int | None, str | None, str]:
    async with catalog.use() as connection:
        ((size, debug, messages),) = await connection.fetch(_SETTINGS)
        return size, debug, messages
