"""Transactions: starts, applies and ends each kind of transaction of the stream.

    BEGIN … COMMIT                     apply on arrival; commit
    BEGIN PREPARE … PREPARE            apply on arrival; prepare (targets/postgres/two_phase.py)
    COMMIT / ROLLBACK PREPARED         commit or roll back the prepared transaction
    STREAM … STREAM COMMIT / PREPARE   store; apply at the end, or on arrival in a parallel worker; commit or prepare
                                       (worker/streaming/)

Invariants.

- Transactions end in the publisher's order.
- The transaction of the target that ends one of the stream also moves the progress record. PREPARE TRANSACTION, COMMIT
  PREPARED and ROLLBACK PREPARED cannot do so, and are followed by a transaction that does.
- A transaction that was not opened on the target has no commit there. Its end is only noted (apply/progress.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

import anyio.lowlevel

from subscriber import telemetry
from subscriber.apply.batch.batch import CommitCallbacks
from subscriber.apply.dispatcher import (
    AbortStreamed,
    Action,
    ApplySpooled,
    BeginStreamBlock,
    BeginTransaction,
    Dispatcher,
    EndStreamBlock,
    EndTransaction,
    FinishPrepared,
)
from subscriber.apply.progress import Progress
from subscriber.apply.table_states import NOWHERE
from subscriber.apply.transaction import RemoteTransaction, TransactionState
from subscriber.errors import ProtocolError
from subscriber.failpoints import Point, reach, reached
from subscriber.lsn import Lsn
from subscriber.protocol.decode import Decoder, in_place
from subscriber.protocol.messages import Begin, Commit, CommitPrepared, RollbackPrepared
from subscriber.targets.base import Target
from subscriber.targets.postgres.two_phase import TwoPhase
from subscriber.worker.apply.parallel_commit import ParallelCommit
from subscriber.worker.apply.quarantine import Messages, Quarantine
from subscriber.worker.apply.skip import TransactionSkipper
from subscriber.worker.apply_hooks import ApplyHooks
from subscriber.worker.session.applier import Applier, Counters
from subscriber.worker.streaming.spooled_transactions import SpooledTransactions


@dataclass(frozen=True, slots=True)
class TransactionKinds:
    """The kinds of transactions that were requested from the publisher, in addition to ordinary ones.

    Attributes:
        streamed: stores streamed transactions. None: streaming is off.
        parallel: streaming is parallel, so its messages have more fields.
        parallel_commit: ends transactions that a parallel worker has applied. None: there are no parallel workers.
        two_phase: prepares transactions. None: two-phase commit is off.
        skipper: skips a transaction for ALTER SUBSCRIPTION … SKIP. None: transactions cannot be skipped.
        quarantine: parks transactions that cannot be applied. None: there are none.
    """

    streamed: SpooledTransactions | None = None
    parallel: bool = False
    parallel_commit: ParallelCommit | None = None
    two_phase: TwoPhase | None = None
    skipper: TransactionSkipper | None = None
    quarantine: Quarantine | None = None


@dataclass(slots=True)
class CollectedTransaction:
    """A transaction that is collected before any of its changes is applied."""

    transaction: RemoteTransaction
    messages: list[bytes]  # with BEGIN and COMMIT
    size: int = 0  # bytes

    async def read(self) -> AsyncIterator[list[bytes]]:
        """Yield the messages between BEGIN and COMMIT."""
        yield self.messages[1:-1]


async def _read(streamed: SpooledTransactions, xid: int) -> AsyncIterator[list[bytes]]:
    """Yield the messages of a streamed transaction."""
    async for records in streamed.read(xid):
        yield [message for _, _, message in records]


class Transactions:
    """Starts, applies and ends the transactions of one apply loop.

    Attributes:
        ended: the end of the last transaction that append_raw() has taken.
    """

    def __init__(
        self,
        target: Target,
        hooks: ApplyHooks,
        kinds: TransactionKinds,
        progress: Progress,
        counters: Counters,
        on_committed: Callable[[int], None],
        relation_limit: int | None = None,
    ) -> None:
        """Create the transactions of a loop.

        Args:
            target: the target of the loop.
            hooks: the rules and boundaries of the worker.
            kinds: the kinds of transactions that were requested.
            progress: numbers the commits.
            counters: counts transactions and changes.
            on_committed: called with the number of a commit when the target has acknowledged it.
            relation_limit: bytes of memory for descriptions of tables. None: there is no limit.
        """
        self.ended = NOWHERE
        self._target = target
        self._hooks = hooks
        self._kinds = kinds
        self._progress = progress
        self._counters = counters
        self._on_committed = on_committed
        self._relation_limit = relation_limit
        self._dispatcher = Dispatcher(codec=target.codec, relation_limit=relation_limit)
        self._applier = Applier(target, self._dispatcher, hooks, counters)
        self._decoder = Decoder(parallel=kinds.parallel)
        self._collected: CollectedTransaction | None = None  # to be compared with parked transactions

    @property
    def idle(self) -> bool:
        """True if the stream is between two transactions."""
        return self._dispatcher.idle and self._collected is None

    @property
    def open(self) -> RemoteTransaction | None:
        """The transaction that is being received. None: between two, or in a stream block."""
        return self._dispatcher.transaction if self._collected is None else self._collected.transaction

    # --- fast path: payloads that need no decoding ------------------------------------------------

    @property
    def takes_payloads(self) -> bool:
        """True if append_raw() may take payloads now."""
        return self._dispatcher.block is not None or (self._target.takes_payloads and self._quarantine is None)

    def append_raw(self, waiting: deque[bytes], limit: int) -> int:
        """Pass payloads to the target without decoding them, or to the spool file in a stream block.

        The payloads are changes of rows and whole small transactions. Decoding and dispatching each message would take
        longer than applying it. flush_if_full() must be awaited after this call.

        Args:
            waiting: payloads of the stream. Those that were taken are removed from the front.
            limit: the maximum number of payloads.

        Returns:
            The bytes that were taken. 0: receive() has to process the next message.
        """
        if self._dispatcher.block is not None:
            return self._streamed().append_raw(waiting, limit)
        size, stop = 0, max(0, len(waiting) - limit)
        while (left := len(waiting) - stop) > 0:
            taken = self._take_transactions(waiting, left) if self.idle else self._applier.append_raw(waiting, left)
            if not taken:
                break
            size += taken
        return size

    async def flush_if_full(self) -> None:
        """Flush the batch or the spool buffer if it has reached its size limit."""
        if self._dispatcher.block is not None:
            await self._streamed().flush_if_full()
        else:
            await self._target.flush_if_full()

    def _take_transactions(self, waiting: deque[bytes], limit: int) -> int:
        """Pass whole small transactions, from BEGIN to COMMIT, to the target. Returns their bytes."""
        if self._hooks.needs_boundary(self._target.position):
            return 0
        ends = CommitCallbacks(self._hooks.needs_boundary, self._on_committed, self._progress.sent + 1)
        taken = self._applier.append_raw_transactions(waiting, limit, ends)
        if taken is None:
            return 0
        reach(Point.COMMIT_READY, self._target.flush)
        self._progress.commit_sent(taken.end_lsn, taken.transactions)
        reach(Point.COMMIT_SENT, self._target.flush)
        self.ended = taken.end_lsn
        return taken.bytes

    # --- slow path: single messages -----------------------------------------------------------------

    async def receive(self, payload: bytes) -> Lsn | None:
        """Process one pgoutput message.

        Returns:
            The end of the transaction that the message ends. None: it ends none.

        Raises:
            ProtocolError: the message is damaged, out of order, or of a kind that was not requested.
            SubscriberError: an error of the target, the spool or a hook.
        """
        if payload and self._dispatcher.must_spool(payload[0]):
            streamed = self._streamed()
            if streamed.append(payload):
                await streamed.flush()
            return None
        if self._quarantine is not None and (self._collected is not None or payload[:1] == b"B"):
            return await self._collect(self._quarantine, payload)
        return await self._handle(payload)

    async def _handle(self, payload: bytes) -> Lsn | None:
        action = await self._applier.handle(self._decoder.decode(in_place(payload)))
        return None if action is None else await self._act(action)

    async def _act(self, action: Action) -> Lsn | None:
        """Run an action of the dispatcher that is not a change. Returns the end of the transaction if it ends one."""
        match action:
            case BeginTransaction():
                await self._hooks.before_transaction(action.transaction.finish_lsn)
                await reached(Point.TRANSACTION_BEGUN)
                self._open(action.transaction)
            case EndTransaction():
                await self._close(action.transaction, action.end_lsn)
                return action.end_lsn
            case FinishPrepared():
                return await self._resolve(action.message)
            case BeginStreamBlock():
                await self._streamed().open_block(action)
            case EndStreamBlock():
                await self._streamed().close_block()
            case AbortStreamed() if self._kinds.streamed is None:
                # A publisher since 18 reports the rollback of a large transaction that it has not streamed.
                return None
            case AbortStreamed():
                # A parallel worker that rolls it back may wait for a lock that is held until our queued COMMIT.
                self._target.flush()
                await self._streamed().abort(action.message)
            case ApplySpooled():
                await self._hooks.before_transaction(action.transaction.finish_lsn)
                await self._replay(self._streamed(), action.transaction, action.end_lsn)
                return action.end_lsn
        return None

    def _open(self, transaction: RemoteTransaction) -> None:
        if self._kinds.skipper is not None:
            self._kinds.skipper.on_begin(transaction)
        again = transaction.gid is not None and self._two_phase().is_prepared(transaction.xid)
        if again and transaction.state is TransactionState.APPLY:
            transaction.state = TransactionState.ALREADY_PREPARED

    async def _close(self, transaction: RemoteTransaction, end_lsn: Lsn) -> None:
        """Commit or prepare the transaction. All its changes have been applied or queued."""
        self._counters.transactions += 1
        if transaction.gid is not None:
            two_phase = self._two_phase()
            reach(Point.COMMIT_READY, self._target.flush)
            await two_phase.prepare(transaction, end_lsn)
            await reached(Point.PREPARED)
            transaction = two_phase.note(transaction, end_lsn)
        await self._commit(transaction, end_lsn)

    async def _commit(self, transaction: RemoteTransaction, end_lsn: Lsn) -> None:
        if self._kinds.skipper is not None:
            await self._kinds.skipper.on_commit(transaction)
        if transaction.is_open_on_target:
            await reached(Point.COMMIT_READY, self._target.flush)
            number = self._progress.commit_sent(end_lsn)
            await self._target.commit(transaction, end_lsn, partial(self._on_committed, number))
            reach(Point.COMMIT_SENT, self._target.flush)
        else:
            self._progress.note(end_lsn)

    async def _resolve(self, message: CommitPrepared | RollbackPrepared) -> Lsn:
        """Commit or roll back a prepared transaction, then move the progress. Returns its end."""
        self._counters.transactions += 1
        if isinstance(message, CommitPrepared):
            transaction = RemoteTransaction(message.xid, message.commit_lsn, message.commit_time)
            end_lsn = message.end_lsn
            await self._hooks.before_transaction(transaction.finish_lsn)
            self._open(transaction)
            own = await self._two_phase().commit(message, transaction)
        else:
            transaction = RemoteTransaction(message.xid, message.rollback_end_lsn, message.rollback_time)
            end_lsn = message.rollback_end_lsn
            await self._hooks.before_transaction(transaction.finish_lsn)
            own = await self._two_phase().rollback(message, transaction)
        await reached(Point.RESOLVED)
        await self._commit(own, end_lsn)
        return end_lsn

    def _two_phase(self) -> TwoPhase:
        if self._kinds.two_phase is None:
            raise ProtocolError("a prepared transaction came, and two-phase commit was not asked for")
        return self._kinds.two_phase

    def _streamed(self) -> SpooledTransactions:
        if self._kinds.streamed is None:
            raise ProtocolError("a streamed transaction came, and streaming was not asked for")
        return self._kinds.streamed

    # --- quarantine -----------------------------------------------------------------------------

    @property
    def _quarantine(self) -> Quarantine | None:
        """The quarantine, if transactions have to be compared with parked ones."""
        quarantine = self._kinds.quarantine
        return quarantine if quarantine is not None and quarantine.is_active else None

    async def _collect(self, quarantine: Quarantine, payload: bytes) -> Lsn | None:
        """Collect a transaction up to its COMMIT, then park it or apply it."""
        collected = self._collected
        if collected is None:
            begin = self._decoder.decode(payload)
            assert isinstance(begin, Begin)
            transaction = RemoteTransaction(begin.xid, begin.final_lsn, begin.commit_time)
            self._collected = CollectedTransaction(transaction, [payload])
            return None
        collected.messages.append(payload)
        collected.size += len(payload)
        if collected.size > quarantine.largest:
            raise quarantine.too_large(collected.transaction)
        if payload[:1] != b"C":
            return None
        self._collected = None
        transaction = collected.transaction
        commit = self._decoder.decode(payload)
        assert isinstance(commit, Commit)
        is_named = self._kinds.skipper is not None and self._kinds.skipper.is_named(transaction)
        await self._hooks.before_transaction(transaction.finish_lsn)
        if is_named or not await self._park(quarantine, transaction, commit.end_lsn, collected.read):
            for message in collected.messages:
                await self._handle(message)
        return commit.end_lsn

    async def _park(
        self, quarantine: Quarantine, transaction: RemoteTransaction, end_lsn: Lsn, messages: Messages
    ) -> bool:
        """Park a complete transaction if it has failed or depends on a parked one.

        Returns:
            False if it is to be applied.
        """
        parking = await quarantine.examine(transaction, messages, self._dispatcher.relations)
        await reached(Point.TRANSACTION_EXAMINED)
        if parking is None:
            return False
        await quarantine.park(transaction, parking, messages, self._dispatcher.relations)
        self._counters.transactions += 1
        await self._commit(transaction, end_lsn)
        return True

    async def retry_quarantined(self) -> None:
        """Apply parked transactions that a statement wants to be retried. Called between two transactions.

        Raises:
            SubscriberError: a transaction could not be applied. The next worker stores the error.
        """
        quarantine = self._kinds.quarantine
        if quarantine is None or not quarantine.is_stale:
            return
        while (parked := await quarantine.next_retry()) is not None:
            await self._target.sync()
            await reached(Point.RETRY_CHOSEN)
            position = self._target.position
            transaction = quarantine.begin_retry(parked)
            dispatcher = Dispatcher.replaying(transaction, relation_limit=self._relation_limit)
            applier = Applier(self._target, dispatcher, self._hooks, self._counters)
            decoder = Decoder()
            async for messages in quarantine.messages(parked):
                await applier.apply_spooled(messages, decoder)
                self._target.flush()
                await anyio.lowlevel.checkpoint()
            await quarantine.end_retry(transaction, parked)
            await reached(Point.COMMIT_READY, self._target.flush)
            number = self._progress.commit_sent(position)
            await self._target.commit(transaction, position, partial(self._on_committed, number))
            reach(Point.COMMIT_SENT, self._target.flush)
            await self._target.sync()
            await reached(Point.RETRIED)
            quarantine.retried(parked)

    # --- streamed transactions ------------------------------------------------------------------

    async def _replay(self, streamed: SpooledTransactions, transaction: RemoteTransaction, end_lsn: Lsn) -> None:
        """End a streamed transaction. Applies its file unless a parallel worker has applied it."""
        self._open(transaction)
        skipped = transaction.state is TransactionState.SKIP
        quarantine, messages = self._quarantine, partial(_read, streamed, transaction.xid)
        if not skipped and quarantine is not None and await self._park(quarantine, transaction, end_lsn, messages):
            await streamed.discard(transaction.xid)
            return
        if skipped or not await self._end_by_worker(streamed, transaction, end_lsn):
            await streamed.abandon(transaction.xid)
            await self._apply_kept(streamed, transaction)
            await self._close(transaction, end_lsn)
        await streamed.discard(transaction.xid)

    async def _apply_kept(self, streamed: SpooledTransactions, transaction: RemoteTransaction) -> None:
        """Apply the file of a transaction.

        The file of a skipped transaction is read too, because the publisher does not repeat the descriptions of tables
        that it has.
        """
        # An Applier binds hooks to tables when it maps them.
        known = self._dispatcher.relations if self._hooks.table_hooks is None else None
        dispatcher = Dispatcher.replaying(transaction, known, self._target.codec, relation_limit=self._relation_limit)
        applier = Applier(self._target, dispatcher, self._hooks, self._counters)
        decoder = Decoder()
        async for records in streamed.read(transaction.xid):
            await applier.apply_spooled([message for _, _, message in records], decoder)
            self._target.flush()
            await anyio.lowlevel.checkpoint()
        if transaction.gid is None:
            self._dispatcher.relations.take_over(applier.dispatcher.relations)

    async def _end_by_worker(self, streamed: SpooledTransactions, transaction: RemoteTransaction, end_lsn: Lsn) -> bool:
        """Make the parallel worker that has applied the transaction end it. Returns False if no worker has."""
        assignment = streamed.assignment(transaction)
        commit = self._kinds.parallel_commit
        if assignment is None or commit is None or not await commit.finish(assignment, transaction, end_lsn):
            return False
        self._counters.transactions += 1
        self._counters.changes += assignment.applied
        what = "COMMIT" if transaction.gid is None else "PREPARE"
        telemetry.log(telemetry.DEBUG, f"finished processing the STREAM {what} command", xid=transaction.xid)
        if transaction.gid is not None:
            await self._commit(self._two_phase().note(transaction, end_lsn), end_lsn)
            return True
        self._dispatcher.relations.take_over(assignment.relations)
        if assignment.transaction.is_open_on_target:
            self._on_committed(self._progress.commit_sent(end_lsn))
        else:
            self._progress.note(end_lsn)
        return True
