"""The PostgreSQL target: applies a transaction in batches where it can, and row by row where it must.

Purpose. PostgresTarget decides which path a transaction takes. It has the batch that is being gathered, the batches
that were sent (targets/postgres/in_flight_batches.py), and the row applier of the worker's own session, which is the
reference (targets/postgres/row_applier.py).

Invariants.

- A transaction is applied either entirely in batches or entirely row by row, apart from slices that were sent before.
- No statement of the row applier is sent behind a batch that may be rejected. The first change of a transaction that is
  applied row by row waits until nothing is in flight.
- A rejected batch is replayed row by row. The replay reports the cause: a conflict that is logged, an error with its
  position, or nothing at all.

The path of a transaction:

    event                                                    from                    to
    a change that fits a batch                               –                       BATCHED
    the batch is full before the transaction has ended       BATCHED, PARTLY_SENT    PARTLY_SENT
    a change that fits no batch; few changes are expected    BATCHED, PARTLY_SENT    ROW_BY_ROW
    a slice is rejected                                      PARTLY_SENT             ROW_BY_ROW
    a savepoint was set, or everything was flushed           ROW_BY_ROW              PARTLY_SENT
    COMMIT, ROLLBACK                                         any                     –

Few changes are not worth a batch. They are applied row by row if no more have arrived (set_small_backlog()). After a
rejection the next changes are applied row by row, twice as many after each rejection in a row.

Failure cases: see targets/postgres/in_flight_batches.py.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from enum import Enum, auto
from typing import Final

from subscriber.apply.batch.batch import (
    AppendedChanges,
    AppendResult,
    Batch,
    BatchLimits,
    CommitCallbacks,
    TransactionSlice,
    decoded,
    why_not_batched,
)
from subscriber.apply.batch.table_batch import TableBatch
from subscriber.apply.relation_map import RelationMap, RelationMapping
from subscriber.apply.transaction import RemoteTransaction
from subscriber.connection.pipeline import Pipeline
from subscriber.errors import MappingError
from subscriber.failpoints import Point, reach
from subscriber.lsn import Lsn
from subscriber.protocol.messages import Delete, Insert, Relation, Truncate, Update
from subscriber.settings import DEFAULTS, Settings
from subscriber.targets.base import ShouldApply, Target
from subscriber.targets.postgres.in_flight_batches import InFlightBatches
from subscriber.targets.postgres.row_applier import RowApplier
from subscriber.targets.postgres.session.target_session import TargetSession

LONGEST_PAUSE = 1_000_000  # changes applied row by row after many rejections in a row

FEW = "few at a time"


class Path(Enum):
    """The path of the open transaction. The table at the top of the file has the transitions."""

    BATCHED = auto()  # in the batch
    PARTLY_SENT = auto()  # some slices have been sent, its COMMIT has not
    ROW_BY_ROW = auto()


class PostgresTarget(Target):
    """One worker's target. `row_applier` applies changes in its own session."""

    takes_payloads = True

    def __init__(self, row_applier: RowApplier, *, batching: bool, settings: Settings = DEFAULTS) -> None:
        self.row_applier: Final = row_applier
        self.origin = row_applier.session.origin
        self.wording = row_applier.session.wording
        self.batching: Final = batching
        self.row_by_row_reasons: Counter[str] = Counter()
        self.on_progress: Callable[[], None] = lambda: None
        self._settings = settings
        self._limits = batch_limits(settings)
        self._batch = Batch(self._limits)  # is being gathered
        self._in_flight = InFlightBatches(row_applier, lambda: self.on_progress(), settings)  # noqa: PLW0108  set later
        self._transaction: RemoteTransaction | None = None  # the one that `_path` is of
        self._path = Path.BATCHED
        self._reason = ""  # why it is applied row by row
        self._small_backlog = False  # see set_small_backlog()
        self._pause = 0  # changes that are still to be applied row by row

    @property
    def session(self) -> TargetSession:
        """The worker's own session."""
        return self.row_applier.session

    @property
    def codec(self) -> str:
        return self.session.pipeline.codec

    @property
    def position(self) -> Lsn:
        return self._batch.end_lsn or self._in_flight.position

    @property
    def batched_changes(self) -> tuple[int, int]:
        """Number of changes applied in batches, and how many of these in further sessions."""
        return self._in_flight.applied, self._in_flight.applied_beside

    # --- which path -----------------------------------------------------------------------------

    def _path_of(self, transaction: RemoteTransaction) -> Path:
        return self._path if transaction is self._transaction else Path.BATCHED

    def _take_path(self, transaction: RemoteTransaction | None, path: Path) -> None:
        self._transaction, self._path = transaction, path

    def _leave_path(self) -> None:
        """The transaction has ended, or has nothing on the target."""
        self._take_path(None, Path.BATCHED)

    def _why_not(
        self, transaction: RemoteTransaction, mapping: RelationMapping, change: Insert | Update | Delete
    ) -> str | None:
        """Why a change cannot be part of a batch; None: it can."""
        reason = self._why_none()
        if reason is not None:
            return reason
        try:
            self.session.roles.role([mapping.local])
        except MappingError:
            return "role"
        return why_not_batched(mapping, change)

    def _why_none(self) -> str | None:
        """Why no change can be part of a batch now; None: some can."""
        if not self.batching:
            return "switched off"
        if self._pause:
            return self._reason
        if self.row_applier.conflicts.origin_id is not None:
            return "track_commit_timestamp"
        return None

    # --- changes --------------------------------------------------------------------------------

    async def map_relation(self, remote: Relation) -> RelationMapping:
        await self._await_results()
        return await self.session.map_relation(remote)

    def append_raw_changes(
        self,
        transaction: RemoteTransaction,
        waiting: deque[bytes],
        limit: int,
        relations: RelationMap,
        should_apply: ShouldApply,
    ) -> AppendedChanges:
        if not self.batching or self._pause or self._path_of(transaction) is Path.ROW_BY_ROW:
            return AppendedChanges(0, 0)
        find = self._finder(relations, should_apply, transaction.finish_lsn)
        taken = self._batch.append_raw(transaction, waiting, limit, find)
        if taken.changes:
            transaction.is_open_on_target = True
        return taken

    def append_raw_transactions(
        self,
        waiting: deque[bytes],
        limit: int,
        relations: RelationMap,
        should_apply: ShouldApply,
        ends: CommitCallbacks,
    ) -> AppendResult | None:
        if not self.batching or self._pause:
            return None
        find = self._finder(relations, should_apply, self.position)
        return self._batch.append_raw_transactions(waiting, limit, find, ends)

    def _finder(
        self, relations: RelationMap, should_apply: ShouldApply, finish_lsn: Lsn
    ) -> Callable[[bytes], TableBatch | None]:
        """Return a function that finds the batch of a table by its relid, if its mapping is the same."""

        def find(relid: bytes) -> TableBatch | None:
            table = self._batch.tables.get(relid)
            if table is None or relations.get(table.mapping.remote.relid) is not table.mapping:
                return None
            return table if should_apply(table.mapping.local, finish_lsn) else None

        return find

    async def change(
        self, transaction: RemoteTransaction, mapping: RelationMapping, change: Insert | Update | Delete
    ) -> None:
        if self._small_backlog:
            self._take_path(transaction, Path.ROW_BY_ROW)
            self._reason = self._why_none() or mapping.local.batch_exclusion or FEW
        elif self._path_of(transaction) is not Path.ROW_BY_ROW:
            await self.flush_if_full()
        if self._path_of(transaction) is not Path.ROW_BY_ROW:
            reason = self._why_not(transaction, mapping, change)
            if reason is None:
                if not self._batch.fits(mapping):
                    await self._send(with_open=True)
                if self._batch.add(transaction, self._batch.table(mapping, change), change):
                    transaction.is_open_on_target = True
                    return
                reason = "row"
            await self._switch_to_row_by_row(transaction, reason)
        await self._change_row(transaction, mapping, change)

    async def _change_row(
        self, transaction: RemoteTransaction, mapping: RelationMapping, change: Insert | Update | Delete
    ) -> None:
        self.row_by_row_reasons[self._reason] += 1
        if self._pause:
            self._pause -= 1
        await self.row_applier.change(transaction, mapping, change)

    async def truncate(
        self, transaction: RemoteTransaction, mappings: list[RelationMapping], truncate: Truncate
    ) -> None:
        await self._switch_to_row_by_row(transaction, "TRUNCATE")
        await self.row_applier.truncate(transaction, mappings, truncate)

    async def delete_rows(self, transaction: RemoteTransaction, mapping: RelationMapping, condition: str) -> None:
        """Delete the rows of a table that satisfy a condition in SQL, as a part of a TRUNCATE."""
        await self._switch_to_row_by_row(transaction, "TRUNCATE")
        await self.row_applier.delete_rows(transaction, mapping, condition)

    # --- the end of a transaction -------------------------------------------------------------------

    async def commit(self, transaction: RemoteTransaction, end_lsn: Lsn, on_committed: Callable[[], None]) -> None:
        if self._path_of(transaction) is Path.PARTLY_SENT:
            self._batch.end(transaction, end_lsn, on_committed)
            await self._send()
        elif self._batch.ends_with(transaction):
            self._batch.end(transaction, end_lsn, on_committed)
            await self.flush_if_full()
        else:
            await self._switch_to_row_by_row(transaction, "nothing")
            self._leave_path()
            await self.row_applier.commit(transaction, end_lsn, on_committed)

    async def roll_back(self, transaction: RemoteTransaction) -> None:
        """Undo the transaction."""
        self._take_batch()
        await self._await_results()
        if self._path_of(transaction) is Path.BATCHED:
            transaction.is_open_on_target = False  # its changes were only in the batch
        self._leave_path()
        self.row_applier.roll_back(transaction)

    # --- subtransactions --------------------------------------------------------------------------

    async def savepoint(self, transaction: RemoteTransaction, name: str) -> None:
        """Begin a subtransaction; `name` needs no quotes."""
        await self.flush_transaction(transaction)
        self.row_applier.savepoint(transaction, name)
        self._resume_batching(transaction)

    async def roll_back_to(self, transaction: RemoteTransaction, name: str) -> None:
        """Undo everything since savepoint() of that name, which ends with it."""
        self._take_batch()  # the whole batch is newer than the savepoint
        await self._await_results()
        self.row_applier.roll_back_to(transaction, name)
        self._resume_batching(transaction)

    async def flush_transaction(self, transaction: RemoteTransaction) -> None:
        """Apply the changes of `transaction` received so far, and hold its locks, although it has not ended."""
        await self._switch_to_row_by_row(transaction, FEW)
        self._resume_batching(transaction)

    def _resume_batching(self, transaction: RemoteTransaction) -> None:
        """Let the next changes of the transaction be a slice again: none of its changes is in flight."""
        if transaction.is_open_on_target:
            self._take_path(transaction, Path.PARTLY_SENT)
        else:
            self._leave_path()

    # --- when it is done --------------------------------------------------------------------------

    def flush(self) -> None:
        self.session.pipeline.flush()

    async def flush_if_full(self) -> None:
        if self._batch.is_due:
            await self._send(with_open=True)
        elif self._in_flight.rejected:
            await self._await_results()

    def set_small_backlog(self, few: bool) -> bool:
        idle = not self._batch.slices and self._in_flight.is_empty and not self._in_flight.rejected
        self._small_backlog = few and idle
        return self._small_backlog

    async def on_idle(self) -> None:
        if not self._small_backlog:  # otherwise the batch is empty
            if self._in_flight.rejected:
                await self._await_results()
            # Otherwise later changes are appended as well, until a result wakes the loop.
            if self._in_flight.is_empty or self._in_flight.should_send_early(self._batch):
                await self._send()
        if await self.session.check_some_shapes():
            self.on_progress()

    async def sync(self) -> None:
        await self._send()
        await self._await_results()
        await self.session.pipeline.sync()

    async def watch(self) -> None:
        await self.session.pipeline.watch()

    async def _send(self, *, with_open: bool = False) -> None:
        """Send the whole transactions of the batch; `with_open`: and the open one."""
        batch, self._batch = self._batch.split(with_open=with_open)
        if not batch.slices:
            return
        first, last = batch.slices[0].transaction, batch.slices[-1].transaction
        whole = not batch.is_open and self._path_of(first) is not Path.PARTLY_SENT
        applier = await self._in_flight.wait_for_session(batch, whole=whole)
        if applier is None:
            await self._await_results()
        path = self._path_of(first)
        if path is Path.PARTLY_SENT or (path is Path.BATCHED and (batch.is_open or self._is_worthwhile(batch))):
            continues = self._path_of(last) is Path.PARTLY_SENT
            if batch.is_open:
                self._take_path(last, Path.PARTLY_SENT)
            else:
                self._leave_path()
            await self._in_flight.send(batch, applier or self.row_applier, continues=continues)
            return
        if path is Path.BATCHED:
            await self._await_results()
            self._reason = FEW
        await self._apply_again(batch.slices, batch.mappings)

    async def _await_results(self) -> None:
        """Wait until nothing is in flight. A rejected batch is then replayed row by row."""
        rejection = await self._in_flight.wait_for_results()
        if rejection is None:
            return
        self._reason = rejection.reason
        if rejection.pauses:
            self._pause = min(self._settings.batch_retry_rows * 2**rejection.earlier, LONGEST_PAUSE)
        if rejection.open_transaction is not None:
            self._take_path(rejection.open_transaction, Path.ROW_BY_ROW)
        elif rejection.batches and self._path is Path.PARTLY_SENT:
            self._leave_path()
        for batch in rejection.batches:
            await self._apply_again(batch.slices, batch.mappings)
        slices = self._batch.slices
        if slices and self._path_of(slices[0].transaction) is Path.ROW_BY_ROW:
            await self._apply_gathered()

    async def _switch_to_row_by_row(self, transaction: RemoteTransaction, reason: str) -> None:
        """Apply `transaction` row by row, apart from slices already sent. Earlier transactions are applied first."""
        if self._path_of(transaction) is Path.ROW_BY_ROW:
            return
        await self._send()
        if self._is_worthwhile(self._batch):
            await self._send(with_open=True)
        await self._await_results()
        if self._path_of(transaction) is Path.ROW_BY_ROW:  # because slices of this transaction were rejected
            return
        self._reason = reason
        if self._path_of(transaction) is Path.PARTLY_SENT:
            self._take_path(transaction, Path.ROW_BY_ROW)
        await self._apply_gathered()
        self._take_path(transaction, Path.ROW_BY_ROW)

    def _take_batch(self) -> Batch:
        """Return the batch that was gathered, and begin another one."""
        batch, self._batch = self._batch, Batch(self._limits)
        return batch

    def _is_worthwhile(self, batch: Batch) -> bool:
        """Return True if a batch is faster than its changes row by row."""
        settings = self._settings
        return batch.rows >= settings.batch_min_rows and batch.rows >= batch.steps * settings.batch_min_rows_per_step

    async def _apply_gathered(self) -> None:
        """Apply the batch that was gathered row by row."""
        batch = self._take_batch()
        await self._apply_again(batch.slices, batch.mappings)

    async def _apply_again(self, slices: list[TransactionSlice], mappings: dict[int, RelationMapping]) -> None:
        """Apply the changes of slices row by row, one transaction after another."""
        for part in [part for several in slices for part in several.transactions()]:
            transaction = part.transaction
            if self._path_of(transaction) is not Path.ROW_BY_ROW:
                transaction.is_open_on_target = False
                self._take_path(transaction, Path.ROW_BY_ROW)
            for payload in part.changes:
                change = decoded(payload)
                await self._change_row(transaction, mappings[change.relid], change)
                reach(Point.BATCH_APPLIED_AGAIN, self.flush)
            if part.end_lsn is not None:
                self._leave_path()
                assert part.on_committed is not None
                await self.row_applier.commit(transaction, part.end_lsn, part.on_committed)

    # --- for the worker that has it -----------------------------------------------------------------

    async def leave_batch_mode(self, transaction: RemoteTransaction) -> None:
        """Await this before another object uses `row_applier`, inside of `transaction` or not."""
        await self._switch_to_row_by_row(transaction, "not a plain transaction")

    def join(self, session: PostgresTarget) -> None:
        """Apply batches through this session as well from now on. It is configured, and has an origin."""
        self._in_flight.join(session.row_applier)

    @property
    def pipelines(self) -> list[Pipeline]:
        """The pipelines of all sessions with work in flight. The one that commits first is the first."""
        return self._in_flight.pipelines

    def roll_back_for_lock(self) -> bool:
        """Roll back all sessions but the first of `pipelines`, which waits for a lock. False: nothing to do."""
        return self._in_flight.roll_back_for_lock()


def batch_limits(settings: Settings) -> BatchLimits:
    """Return the limits of a batch as the settings have them."""
    return BatchLimits(
        rows=settings.batch_rows,
        bytes=settings.batch_size,
        steps=settings.batch_steps,
        small_transaction=settings.batch_small_transaction,
        run=settings.batch_run,
        largest_message=settings.batch_largest_message,
    )
