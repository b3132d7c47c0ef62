"""Transactions that are stored on disk until they can be delivered: large in-progress ones, and held ones.

Purpose. The publisher streams a large transaction in blocks. It is delivered as a whole after its commit or PREPARE. A
prepared transaction is held if the consumer's filter_prepare() returns True. It is delivered at its COMMIT PREPARED, as
a committed transaction.

Invariants.

- The descriptions of tables are stored among the changes, in the order of arrival. The last description of each table
  is also kept in memory. The publisher does not repeat it after the end of the transaction, even if the consumer skips
  the changes. It repeats it after an abort, also of a subtransaction (cleanup_rel_sync_cache() in pgoutput.c).
- No position from the PREPARE of a held transaction on is confirmed before its COMMIT PREPARED is acknowledged.

Failure cases.

- The process ends: the files are of no use to the next process. The publisher sends all transactions again whose end
  was not confirmed.
- The connection is lost: the files of in-progress transactions are removed, because the publisher sends these again.
  The files of held transactions, and of the transaction that is being read, remain.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from subscriber.change_stream.changes import LETTER, Change
from subscriber.change_stream.engine.core import StreamCore, TransactionCore
from subscriber.change_stream.kind import Kind
from subscriber.errors import ProtocolError
from subscriber.lsn import Lsn
from subscriber.protocol import messages as pgoutput
from subscriber.protocol.stream_state import StreamState, next_state
from subscriber.spool.record_format import Record
from subscriber.spool.spool import Spool, SpooledTransaction

_KEPT = b"RYIUDTM"  # in a block, these messages have an xid after the letter
_RELATION = 0x52  # R
_XID, _REST = LETTER + 1, LETTER + 5


class SpooledReader:
    """Stores and reads such transactions of one stream."""

    def __init__(self, core: StreamCore, folder: Path, limit: int | None) -> None:
        """Create the reader. `limit` is in bytes. None: the disk's free space. The folder is created on first use."""
        self._core = core
        self._spool = Spool(folder, limit=limit)
        self._open = False
        self._origins: dict[int, str] = {}
        self._described: dict[int, dict[bytes, bytes]] = {}  # xid -> OID of a table -> its last Relation message
        self._held: dict[int, int] = {}  # xid -> number that acknowledges the PREPARE
        self._reading: SpooledChanges | None = None
        core.reconnected.append(self.discard_unfinished)

    async def block(self, message: pgoutput.StreamStart) -> TransactionCore | None:
        """Store a block, up to its end or to a reconnect. Returns None: a block is not delivered."""
        spooled = await self._start(message.xid, first=message.first_segment)
        order = StreamState.FIRST_BLOCK if message.first_segment else StreamState.BLOCK
        while True:
            frame = self._core.frames.next(between=False)
            if frame is None:
                if await self._core.refill():
                    return None
                continue
            if frame[LETTER] in _KEPT and len(frame) > _REST:
                xid, kept = int.from_bytes(frame[_XID:_REST], "big"), frame[LETTER:_XID] + frame[_REST:]
                if kept[0] == _RELATION:
                    self._described[message.xid][kept[1:5]] = kept
                if spooled.append(xid, kept):
                    await spooled.write()
                order = StreamState.BLOCK
                continue
            message_in_block = self._core.decoder.decode(frame, LETTER)
            order = next_state(order, message_in_block, message.xid)
            if isinstance(message_in_block, pgoutput.Origin):
                self._origins[message.xid] = message_in_block.name
            elif isinstance(message_in_block, pgoutput.StreamStop):
                await spooled.write()
                return None

    async def _start(self, xid: int, *, first: bool) -> SpooledTransaction:
        if not self._open:
            await self._spool.open()
            self._open = True
        if first:
            self._described[xid] = {}
        return self._spool.start(xid, first=first)

    async def abort(self, message: pgoutput.StreamAbort) -> TransactionCore | None:
        """Remove the stored changes of a transaction or subtransaction. Returns None: an abort is not delivered."""
        spooled = self._spool.transactions.get(message.xid)
        if spooled is not None and message.subxid == message.xid:
            self._origins.pop(message.xid, None)
            self._described.pop(message.xid, None)
            await spooled.remove()
        elif spooled is not None:
            self._described[message.xid].clear()
            await spooled.rollback(message.subxid)
        return None

    async def commit(self, message: pgoutput.StreamCommit) -> TransactionCore | None:
        """Return the stored transaction. None: it was delivered before a reconnect, or has no changes."""
        return await self._end(Kind.COMMIT, message.xid, message.commit_lsn, message.end_lsn, message.commit_time)

    async def prepare(self, message: pgoutput.StreamPrepare) -> TransactionCore | None:
        """Return the stored transaction as a prepared one. None: it is held, or was delivered before a reconnect."""
        if self._core.is_held(message.xid, message.gid):
            await self._hold(self._spool.transactions[message.xid], message.end_lsn)
            return None
        finish_lsn, end_lsn, time = message.prepare_lsn, message.end_lsn, message.prepare_time
        return await self._end(Kind.PREPARE, message.xid, finish_lsn, end_lsn, time, message.gid)

    async def _end(
        self, kind: Kind, xid: int, finish_lsn: Lsn, end_lsn: Lsn, time: int, gid: str | None = None
    ) -> TransactionCore | None:
        """Return a transaction that is spooled to its end. None if it was delivered before, or has no changes."""
        spooled = self._spool.transactions.get(xid)
        if spooled is None:
            raise ProtocolError(f"streamed transaction {xid} has ended and was never begun")
        origin = self._origins.pop(xid, None)
        described = list(self._described.pop(xid).values())
        if end_lsn <= self._core.acks.passed or (kind is Kind.COMMIT and not spooled.changes):
            await self._core.frames.tables.describe_all(described)
            await spooled.remove()
            self._core.acks.note(end_lsn)
            return None
        self._reading = SpooledChanges(self._core, spooled, described)
        return TransactionCore(self._core, kind, xid, finish_lsn, time, self._reading, end_lsn, gid=gid, origin=origin)

    # --- held until COMMIT PREPARED -----------------------------------------------------------------

    async def hold(self, message: pgoutput.BeginPrepare) -> None:
        """Store a prepared transaction from its BEGIN PREPARE to its PREPARE, and hold it."""
        spooled, order = await self._start(message.xid, first=True), StreamState.BEGUN_PREPARE
        while True:
            frame = self._core.frames.next(between=False)
            if frame is None:
                if await self._core.refill():
                    return
                continue
            if frame[LETTER] in _KEPT:
                kept = frame[LETTER:]
                if kept[0] == _RELATION:
                    self._described[message.xid][kept[1:5]] = kept
                if spooled.append(message.xid, kept):
                    await spooled.write()
                order = StreamState.PREPARING
                continue
            message_held = self._core.decoder.decode(frame, LETTER)
            order = next_state(order, message_held, message.xid)
            if isinstance(message_held, pgoutput.Origin):
                self._origins[message.xid] = message_held.name
            elif isinstance(message_held, pgoutput.Prepare):
                await self._hold(spooled, message_held.end_lsn)
                self._core.frames.ended()
                return

    def holds(self, xid: int) -> bool:
        """Return True if `xid` is prepared and held."""
        return xid in self._held

    async def _hold(self, spooled: SpooledTransaction, end_lsn: Lsn) -> None:
        # Before the first await: a reconnect during an await must start after this transaction.
        self._held[spooled.xid] = self._core.acks.handed_out()
        self._core.acks.note(end_lsn)
        await spooled.write()
        await self._core.frames.tables.describe_all(self._described[spooled.xid].values())

    async def commit_prepared(self, message: pgoutput.CommitPrepared) -> TransactionCore | None:
        """Return the held transaction as a committed one. None if it has no changes."""
        number = self._held.pop(message.xid)
        state = await self._end(Kind.COMMIT, message.xid, message.commit_lsn, message.end_lsn, message.commit_time)
        if state is None:
            self._core.confirm(number)
        else:
            # Confirmed with its own ack: if the process ends before, the publisher sends PREPARE and changes again.
            state.held_ack_number = number
        return state

    async def rollback_prepared(self, message: pgoutput.RollbackPrepared) -> None:
        """Remove the held transaction."""
        self._origins.pop(message.xid, None)
        self._described.pop(message.xid, None)
        await self._spool.transactions[message.xid].remove()
        self._core.acks.note(message.rollback_end_lsn)
        self._core.confirm(self._held.pop(message.xid))

    async def discard_unfinished(self) -> None:
        """Remove the stored blocks of in-progress transactions, after a reconnect."""
        reading = None if self._reading is None else self._reading.spooled
        for spooled in list(self._spool.transactions.values()):
            if spooled is not reading and spooled.xid not in self._held:
                self._origins.pop(spooled.xid, None)
                self._described.pop(spooled.xid, None)
                await spooled.remove()

    async def close(self) -> None:
        """Remove the stored transactions."""
        if self._reading is not None:
            await self._reading.close()
        await self._spool.close()


class SpooledChanges:
    """Reads the changes of one transaction from its file."""

    def __init__(self, core: StreamCore, spooled: SpooledTransaction, described: list[bytes]) -> None:
        self.spooled = spooled
        self._described = described
        self._core = core
        self._records: AsyncIterator[list[Record]] | None = spooled.read()

    def ready(self, state: TransactionCore) -> list[Change] | None:
        return None

    async def read(self, state: TransactionCore) -> list[Change]:
        tables = self._core.frames.tables
        batch: list[Change] = []
        while not batch and self._records is not None:
            records = await anext(self._records, None)
            if records is None:
                await self.close()
                await self.spooled.remove()
                break
            await tables.read([message for _, _, message in records], batch)
        return batch

    async def skip(self, state: TransactionCore) -> None:
        await self._core.frames.tables.describe_all(self._described)
        await self.close()
        await self.spooled.remove()

    async def close(self) -> None:
        """Stop reading."""
        records, self._records = self._records, None
        if records is not None:
            await records.aclose()  # type: ignore[attr-defined]
