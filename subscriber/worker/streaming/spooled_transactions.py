"""The streamed transactions of one apply loop: kept in files, and applied when they have ended.

With streaming = parallel each is given to a parallel apply worker as well, if one is free (parallel_worker.py); the
file is written all the same, so that such a worker may give up.

Not given to one: while a transaction is to be skipped, while tables are not ready, and what was prepared before
a restart and comes again, whose rows are locked by what is prepared.

Kill points considered: nothing here outlives the process on purpose. What an earlier worker left in the folder is
thrown away, since the publisher sends every transaction again that was not confirmed. That is so as long as no
position at or behind a transaction's end is confirmed before it has been applied; see apply/progress.py.

Source: section "STREAMED TRANSACTIONS" at the head of worker.c.
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
from subscriber.protocol.copy_data import XLOG_DATA, XLOG_DATA_HEADER
from subscriber.protocol.messages import StreamAbort
from subscriber.settings import DEFAULTS, Settings
from subscriber.spool.record_format import Record
from subscriber.spool.spool import Spool, SpooledTransaction
from subscriber.worker.apply_hooks import ApplyRules
from subscriber.worker.streaming.parallel_worker import Assignment, AssignmentOutcome, ParallelWorker, Pool

_BODY = XLOG_DATA_HEADER.size  # where a message begins in what the walsender sends
_CHANGES = (b"I", b"U", b"D")
_PREFIX = 5  # bytes: the message's letter, and the xid that it has in a block


class SpooledTransactions:
    """What of the streamed transactions goes where. `may_go_ahead(xid)`: whether a worker may have one."""

    def __init__(
        self,
        spool: Spool,
        subid: int,
        pool: Pool | None = None,
        may_go_ahead: Callable[[int], Awaitable[bool]] | None = None,
        rules: ApplyRules | None = None,
        settings: Settings = DEFAULTS,
    ) -> None:
        """`pool`: None for streaming = on. `rules`: of the parallel workers; None: there are none."""
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
        """Those that have not ended yet."""
        found = []
        for xid, spooled in self.spool.transactions.items():
            working = self._assigned.get(xid)
            number = working[1].number if working and working[1].assignment is working[0] else None
            found.append(StreamedStatus(xid, spooled.changes, spooled.size, self._since.get(xid, 0.0), number))
        return tuple(found)

    async def open(self, tasks: TaskGroup, progress: Progress) -> None:
        """Before anything else; parallel workers run in `tasks`, and wait for commits by their number in `progress`."""
        self._progress = progress
        await self.spool.open()
        if self.pool is not None:
            self.pool.start(tasks)

    # --- blocks ---------------------------------------------------------------------------------

    async def open_block(self, action: BeginStreamBlock) -> None:
        """Changes of a transaction follow."""
        self._open = self.spool.start(action.xid, first=action.first)
        if action.first:
            if action.xid in self._assigned:
                self._assigned.pop(action.xid)[0].abort()
            self._since[action.xid] = time.time()
            if self.pool is not None and (self._may_go_ahead is None or await self._may_go_ahead(action.xid)):
                assignment = Assignment(self._open, self._subid, self._rules, self._settings.parallel_messages_per_turn)
                worker = self.pool.assign(assignment)
                if worker is not None:
                    self._assigned[action.xid] = (assignment, worker)

    def append(self, payload: bytes) -> bool:
        """One change of the open block, as it came; true when write() is due."""
        if len(payload) < _PREFIX or self._open is None:
            raise ProtocolError("insufficient data left in message", detail="It stands in a block, and has no xid.")
        xid = int.from_bytes(payload[1:_PREFIX], "big")
        return self._open.append(xid, payload[:1], memoryview(payload)[_PREFIX:])

    def append_raw(self, waiting: deque[bytes], limit: int) -> int:
        """Changes of the open block off the front of `waiting`, as the walsender sent them; their bytes.

        At most `limit`, and none where keep() has to see the next one. Afterwards flush_if_full() has to be awaited.
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
        """Do what is due."""
        if self._open is not None and self._open.is_full:
            await self.flush()

    async def flush(self) -> None:
        """Bring what was kept to the file, and to the worker that follows it."""
        assert self._open is not None
        await self._open.write()
        self._tell(self._open.xid)

    async def close_block(self) -> None:
        """The block ends for now."""
        spooled, self._open = self._open, None
        assert spooled is not None
        await spooled.end_block(keep=0 if spooled.xid in self._assigned else self._settings.spool_block_remainder)
        await self.spool.forget_replaced()
        self._tell(spooled.xid)

    def _tell(self, xid: int) -> None:
        if xid in self._assigned:
            assignment = self._assigned[xid][0]
            assignment.extend(self._progress.sent)
            assignment.committed(self._progress.committed)

    def committed(self) -> None:
        """The target has answered a commit: workers may apply what came after it."""
        for assignment, _ in self._assigned.values():
            assignment.committed(self._progress.committed)

    # --- the end --------------------------------------------------------------------------------

    async def abort(self, message: StreamAbort) -> None:
        """The transaction was rolled back, or one of its subtransactions."""
        spooled = self.spool.transactions.get(message.xid)
        if spooled is None:
            return
        assigned = self._assigned.get(message.xid)
        if message.subxid != message.xid:
            offset = await spooled.rollback(message.subxid)
            if assigned is not None and offset is not None:
                await assigned[0].truncate(offset)
            return
        if assigned is not None:
            assigned[0].abort()
            await assigned[0].wait_released()
        await self.discard(message.xid)
        telemetry.log(telemetry.DEBUG, "finished processing the STREAM ABORT command", xid=message.xid)

    async def read(self, xid: int) -> AsyncIterator[list[Record]]:
        """What was kept of a transaction that has ended. Raises ProtocolError if nothing ever came of it."""
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
        """What a worker has of the transaction, which has ended as `transaction` says; None: no worker has it."""
        assigned = self._assigned.get(transaction.xid)
        if assigned is None or assigned[0].outcome is AssignmentOutcome.GIVEN_UP:
            return None
        following = assigned[0].transaction
        following.finish_lsn, following.commit_time = transaction.finish_lsn, transaction.commit_time
        following.gid = transaction.gid
        return assigned[0]

    async def abandon(self, xid: int) -> None:
        """The worker that follows the transaction, if any, is to undo it."""
        assigned = self._assigned.pop(xid, None)
        if assigned is not None:
            assigned[0].abort()
            await assigned[0].wait_released()

    async def discard(self, xid: int) -> None:
        """It has ended, and what was kept of it has served."""
        self._assigned.pop(xid, None)
        self._since.pop(xid, None)
        await self._get(xid).remove()

    async def close(self) -> None:
        """Remove everything, whatever has become of the loop."""
        with anyio.CancelScope(shield=True):
            await self.spool.close()


def _unknown(xid: int) -> ProtocolError:
    return ProtocolError(f"streamed transaction {xid} ended, but had not begun")
