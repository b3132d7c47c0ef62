"""SpooledTransactions: stores the streamed transactions of one apply loop in files, and provides them when they end.

Purpose. With streaming = parallel, a free parallel apply worker applies a transaction while it is streamed
(parallel_worker.py). The file is written in this case too, so that the parallel worker may give up.

Invariants.

- No position at or after the end of a transaction is confirmed before the transaction is applied (apply/progress.py).
- ParallelAdmission decides whether a transaction may go to a parallel worker (parallel_rules.py).

Failure cases.

- Process killed: its files are useless, and the next worker removes them. The publisher sends every transaction again
  that was not confirmed.

Source: section "STREAMED TRANSACTIONS" in the header of worker.c.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import islice

import anyio
from anyio.abc import TaskGroup

from subscriber import telemetry
from subscriber.apply.dispatcher import BeginStreamBlock
from subscriber.apply.progress import Progress
from subscriber.apply.transaction import RemoteTransaction
from subscriber.catalog.store.workers import StreamedStatus
from subscriber.errors import ProtocolError
from subscriber.failpoints import Point, reached
from subscriber.protocol.copy_data import XLOG_DATA, XLOG_DATA_HEADER
from subscriber.protocol.messages import StreamAbort
from subscriber.settings import DEFAULTS, Settings
from subscriber.spool.record_format import Record
from subscriber.spool.spool import Spool, SpooledTransaction
from subscriber.worker.apply_hooks import ApplyRules
from subscriber.worker.streaming.parallel_worker import Assignment, AssignmentOutcome, ParallelWorker, Pool

_BODY = XLOG_DATA_HEADER.size  # offset of the pgoutput message in a payload
_CHANGES = (b"I", b"U", b"D")
_PREFIX = 5  # bytes of a message's letter and of the xid that it has in a stream block


class SpooledTransactions:
    """The streamed transactions of one apply loop."""

    def __init__(
        self,
        spool: Spool,
        subid: int,
        pool: Pool | None = None,
        may_go_ahead: Callable[[int], Awaitable[bool]] | None = None,
        rules: ApplyRules | None = None,
        settings: Settings = DEFAULTS,
    ) -> None:
        """Create the store.

        Args:
            spool: the files.
            subid: OID of the subscription.
            pool: the parallel workers. None: there are none, because streaming is not parallel.
            may_go_ahead: returns True if a parallel worker may apply the transaction with an xid. None: all may be.
            rules: the rules of the parallel workers. None: all changes are applied.
            settings: limits of the spool.
        """
        self.spool = spool
        self.pool = pool
        self._subid = subid
        self._settings = settings
        self._may_go_ahead = may_go_ahead
        self._rules = rules or ApplyRules()
        self._progress: Progress
        self._open: SpooledTransaction | None = None
        self._assigned: dict[int, tuple[Assignment, ParallelWorker]] = {}
        self._since: dict[int, float] = {}

    def status(self) -> tuple[StreamedStatus, ...]:
        """Return the status of each transaction that has not ended."""
        statuses = []
        for xid, spooled in self.spool.transactions.items():
            working = self._assigned.get(xid)
            number = working[1].number if working and working[1].assignment is working[0] else None
            statuses.append(StreamedStatus(xid, spooled.changes, spooled.size, self._since.get(xid, 0.0), number))
        return tuple(statuses)

    async def open(self, tasks: TaskGroup, progress: Progress) -> None:
        """Create the folder of the spool and allow parallel workers to start. Must be awaited before other methods.

        Args:
            tasks: the task group that parallel workers run in.
            progress: has the numbers of the leader's commits that are sent and acknowledged.

        Raises:
            SpoolError: the folder cannot be used.
        """
        self._progress = progress
        await self.spool.open()
        if self.pool is not None:
            self.pool.start(tasks)

    # --- blocks ---------------------------------------------------------------------------------

    async def open_block(self, action: BeginStreamBlock) -> None:
        """Open a stream block of a transaction. At the first block, offer the transaction to a parallel worker."""
        self._open = self.spool.start(action.xid, first=action.first)
        if action.first:
            if action.xid in self._assigned:
                self._assigned.pop(action.xid)[0].abort()
            self._since[action.xid] = time.time()
            if self.pool is not None and (self._may_go_ahead is None or await self._may_go_ahead(action.xid)):
                assignment = Assignment(self._open, self._subid, self._rules, self._settings)
                worker = self.pool.assign(assignment)
                if worker is not None:
                    self._assigned[action.xid] = (assignment, worker)

    def append(self, payload: bytes) -> bool:
        """Append a change of the open block. Returns True if flush() is due.

        Args:
            payload: the pgoutput message with its xid.

        Raises:
            ProtocolError: the message has no xid.
        """
        if len(payload) < _PREFIX or self._open is None:
            raise ProtocolError("insufficient data left in message", detail="It stands in a block, and has no xid.")
        xid = int.from_bytes(payload[1:_PREFIX], "big")
        return self._open.append(xid, payload[:1], memoryview(payload)[_PREFIX:])

    def append_raw(self, waiting: deque[bytes], limit: int) -> int:
        """Append changes of rows from the front of `waiting`, without decoding them.

        flush_if_full() must be awaited after this call.

        Args:
            waiting: payloads of the stream. Those that were taken are removed.
            limit: the maximum number of payloads.

        Returns:
            The bytes that were taken. 0: the next message is not a change of a row.
        """
        assert self._open is not None
        append = self._open.append
        taken = size = 0
        for payload in islice(waiting, limit):
            if payload[0] != XLOG_DATA or payload[_BODY : _BODY + 1] not in _CHANGES or len(payload) < _BODY + _PREFIX:
                break
            taken += 1
            size += len(payload)
            xid = int.from_bytes(payload[_BODY + 1 : _BODY + _PREFIX], "big")
            if append(xid, payload[_BODY : _BODY + 1], memoryview(payload)[_BODY + _PREFIX :]):
                break
        for _ in range(taken):
            waiting.popleft()
        return size

    async def flush_if_full(self) -> None:
        """Write the buffer of the open block to the file if it has reached its size limit."""
        if self._open is not None and self._open.is_full:
            await self.flush()

    async def flush(self) -> None:
        """Write the buffer of the open block to the file, and let its parallel worker read that part.

        Raises:
            SpoolFull: the spool is over its limit, or the disk is full.
            SpoolError: the file cannot be written.
        """
        assert self._open is not None
        await self._open.write()
        self._notify(self._open.xid)

    async def close_block(self) -> None:
        """End the open block. A small rest stays in the buffer if no parallel worker follows the file."""
        spooled, self._open = self._open, None
        assert spooled is not None
        await spooled.end_block(keep=0 if spooled.xid in self._assigned else self._settings.spool_block_remainder)
        await self.spool.forget_replaced()
        self._notify(spooled.xid)

    def _notify(self, xid: int) -> None:
        if xid in self._assigned:
            assignment = self._assigned[xid][0]
            assignment.extend(self._progress.sent)
            assignment.committed(self._progress.committed)

    def committed(self) -> None:
        """Let parallel workers apply changes that follow the commits which the target has acknowledged."""
        for assignment, _ in self._assigned.values():
            assignment.committed(self._progress.committed)

    # --- the end --------------------------------------------------------------------------------

    async def abort(self, message: StreamAbort) -> None:
        """Discard a transaction that the publisher has rolled back, or the changes from a subtransaction on.

        Waits until the parallel worker of the transaction has rolled them back, too.
        """
        spooled = self.spool.transactions.get(message.xid)
        if spooled is None:
            return
        assigned = self._assigned.get(message.xid)
        if message.subxid != message.xid:
            offset = await spooled.rollback(message.subxid)
            await reached(Point.SPOOL_CUT)
            if assigned is not None and offset is not None:
                await assigned[0].truncate(offset)
            return
        if assigned is not None:
            assigned[0].abort()
            await assigned[0].wait_released()
        await self.discard(message.xid)
        telemetry.log(telemetry.DEBUG, "finished processing the STREAM ABORT command", xid=message.xid)

    async def read(self, xid: int) -> AsyncIterator[list[Record]]:
        """Yield the changes of a transaction that has ended, in chunks.

        Raises:
            ProtocolError: the transaction has not been streamed.
            SpoolError: the file cannot be read.
        """
        spooled = self._get(xid)
        await spooled.write()
        async for records in spooled.read():
            yield records

    def _get(self, xid: int) -> SpooledTransaction:
        spooled = self.spool.transactions.get(xid)
        if spooled is None:
            raise _unknown(xid)
        return spooled

    def assignment(self, transaction: RemoteTransaction) -> Assignment | None:
        """Return the assignment of a transaction that has ended, with the end that `transaction` describes.

        Returns:
            None if no parallel worker applies the transaction.
        """
        assigned = self._assigned.get(transaction.xid)
        if assigned is None or assigned[0].outcome is AssignmentOutcome.GIVEN_UP:
            return None
        following = assigned[0].transaction
        following.finish_lsn, following.commit_time = transaction.finish_lsn, transaction.commit_time
        following.gid = transaction.gid
        return assigned[0]

    async def abandon(self, xid: int) -> None:
        """Make the parallel worker of the transaction roll it back, if there is one, and wait for that."""
        assigned = self._assigned.pop(xid, None)
        if assigned is not None:
            assigned[0].abort()
            await assigned[0].wait_released()

    async def discard(self, xid: int) -> None:
        """Remove the file of a transaction that has ended.

        Raises:
            ProtocolError: the transaction has not been streamed.
            SpoolError: the file cannot be removed.
        """
        self._assigned.pop(xid, None)
        self._since.pop(xid, None)
        await self._get(xid).remove()

    async def close(self) -> None:
        """Remove all files. Shielded from cancellation."""
        with anyio.CancelScope(shield=True):
            await self.spool.close()


def _unknown(xid: int) -> ProtocolError:
    return ProtocolError(f"streamed transaction {xid} ended, but had not begun")
