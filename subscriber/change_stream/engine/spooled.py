"""Transactions that are kept on disk until they may be handed out: large ones in progress, and held ones.

A large transaction is streamed in blocks until it commits or is prepared, and then handed out whole. A prepared
one may be held, when whoever takes them does not want to hear of it before its COMMIT PREPARED; then it is handed
out as if it had been committed there and then.

Descriptions of tables lie among the changes, where they belong, and the last one of each table is kept beside
them: the publisher does not repeat it once the transaction has ended, whether anybody reads its changes or not.
After an abort, of a subtransaction too, it does (cleanup_rel_sync_cache() in pgoutput.c).

The files mean nothing to another process: the publisher streams every transaction again whose end was not
confirmed, and of a held one nothing is confirmed from its PREPARE on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from subscriber.change_stream.changes import Change
from subscriber.change_stream.engine.frame_reader import LETTER
from subscriber.change_stream.transaction import Kind, Transaction
from subscriber.errors import ProtocolError
from subscriber.lsn import Lsn
from subscriber.protocol import messages as pgoutput
from subscriber.spool.record_format import Record
from subscriber.spool.spool import Spool, SpooledTransaction

if TYPE_CHECKING:
    from subscriber.change_stream.stream import Stream

_KEPT = b"RYIUDTM"  # with an xid after the letter
_RELATION = 0x52  # R
_XID, _REST = LETTER + 1, LETTER + 5


class SpooledReader:
    """All of one stream."""

    def __init__(self, folder: Path, limit: int | None) -> None:
        """`limit` in bytes; None: what the disk takes. The folder is made when it is needed."""
        self._spool = Spool(folder, limit=limit)
        self._open = False
        self._origins: dict[int, str] = {}
        self._described: dict[int, dict[bytes, bytes]] = {}  # by xid and table: the message
        self._held: dict[int, int] = {}  # by xid: the number whose ack they wait for
        self._reading: SpooledChanges | None = None

    async def block(self, stream: Stream, message: pgoutput.StreamStart) -> Transaction | None:
        spooled = await self._start(message.xid, first=message.first_segment)
        while True:
            frame = stream.frames.next(between=False)
            if frame is None:
                if await stream.refill():
                    return None
                continue
            if frame[LETTER] in _KEPT and len(frame) > _REST:
                xid, kept = int.from_bytes(frame[_XID:_REST], "big"), frame[LETTER:_XID] + frame[_REST:]
                if kept[0] == _RELATION:
                    self._described[message.xid][kept[1:5]] = kept
                if spooled.append(xid, kept):
                    await spooled.write()
                continue
            match stream.decoder.decode(frame, LETTER):
                case pgoutput.Origin(_, name):
                    self._origins[message.xid] = name
                case pgoutput.StreamStop():
                    await spooled.write()
                    return None
                case found:
                    raise ProtocolError(f"{found.message_type} message sent inside a stream block")

    async def _start(self, xid: int, *, first: bool) -> SpooledTransaction:
        if not self._open:
            await self._spool.open()
            self._open = True
        if first:
            self._described[xid] = {}
        return self._spool.start(xid, first=first)

    async def abort(self, stream: Stream, message: pgoutput.StreamAbort) -> Transaction | None:
        spooled = self._spool.transactions.get(message.xid)
        if spooled is not None and message.subxid == message.xid:
            self._origins.pop(message.xid, None)
            self._described.pop(message.xid, None)
            await spooled.remove()
        elif spooled is not None:
            self._described[message.xid].clear()
            await spooled.rollback(message.subxid)
        return None

    async def commit(self, stream: Stream, message: pgoutput.StreamCommit) -> Transaction | None:
        transaction = await self._end(stream, Kind.COMMIT, message.xid, message.commit_lsn, message.end_lsn)
        if transaction is not None:
            transaction.set_time(message.commit_time)
        return transaction

    async def prepare(self, stream: Stream, message: pgoutput.StreamPrepare) -> Transaction | None:
        if stream.hold(message.xid, message.gid):
            await self._hold(stream, self._spool.transactions[message.xid], message.end_lsn)
            return None
        transaction = await self._end(stream, Kind.PREPARE, message.xid, message.prepare_lsn, message.end_lsn)
        if transaction is not None:
            transaction.gid = message.gid
            transaction.set_time(message.prepare_time)
        return transaction

    async def _end(self, stream: Stream, kind: Kind, xid: int, finish_lsn: Lsn, end_lsn: Lsn) -> Transaction | None:
        """A transaction whose changes are all here; None for one that was handed out before, or has none."""
        spooled = self._spool.transactions.get(xid)
        if spooled is None:
            raise ProtocolError(f"streamed transaction {xid} has ended and was never begun")
        origin = self._origins.pop(xid, None)
        described = list(self._described.pop(xid).values())
        if end_lsn <= stream.acks.passed or (kind is Kind.COMMIT and not spooled.changes):
            await stream.frames.tables.describe_all(described)
            await spooled.remove()
            stream.acks.note(end_lsn)
            return None
        self._reading = SpooledChanges(stream, spooled, described)
        transaction = Transaction(stream, kind, xid, finish_lsn, 0, changes=self._reading, end_lsn=end_lsn)
        transaction.origin = origin
        return transaction

    # --- held until COMMIT PREPARED -----------------------------------------------------------------

    async def hold(self, stream: Stream, message: pgoutput.BeginPrepare) -> None:
        """Keep what follows, up to PREPARE."""
        spooled = await self._start(message.xid, first=True)
        while True:
            frame = stream.frames.next(between=False)
            if frame is None:
                if await stream.refill():
                    return
                continue
            if frame[LETTER] in _KEPT:
                kept = frame[LETTER:]
                if kept[0] == _RELATION:
                    self._described[message.xid][kept[1:5]] = kept
                if spooled.append(message.xid, kept):
                    await spooled.write()
                continue
            match stream.decoder.decode(frame, LETTER):
                case pgoutput.Origin(_, name):
                    self._origins[message.xid] = name
                case pgoutput.Prepare() as prepare:
                    await self._hold(stream, spooled, prepare.end_lsn)
                    stream.frames.ended()
                    return
                case found:
                    raise ProtocolError(
                        f"{found.message_type} message sent out of order",
                        detail=f"It came in transaction {message.xid}.",
                    )

    def holds(self, xid: int) -> bool:
        """Whether `xid` is prepared and held."""
        return xid in self._held

    async def _hold(self, stream: Stream, spooled: SpooledTransaction, end_lsn: Lsn) -> None:
        # Before anything is waited for: a new connection in the meantime must start behind it.
        self._held[spooled.xid] = stream.acks.handed_out()
        stream.acks.note(end_lsn)
        await spooled.write()
        await stream.frames.tables.describe_all(self._described[spooled.xid].values())

    async def commit_prepared(self, stream: Stream, message: pgoutput.CommitPrepared) -> Transaction | None:
        """The transaction that was held; None if it has no changes."""
        number = self._held.pop(message.xid)
        finish_lsn, end_lsn = message.commit_lsn, message.end_lsn
        transaction = await self._end(stream, Kind.COMMIT, message.xid, finish_lsn, end_lsn)
        if transaction is None:
            stream.confirm(number)
        else:
            # Not before its own ack: if we end until then, PREPARE has to come again, with the changes.
            transaction.held_number = number
            transaction.set_time(message.commit_time)
        return transaction

    async def rollback_prepared(self, stream: Stream, message: pgoutput.RollbackPrepared) -> None:
        """Drop the transaction that was held."""
        self._origins.pop(message.xid, None)
        self._described.pop(message.xid, None)
        await self._spool.transactions[message.xid].remove()
        stream.acks.note(message.rollback_end_lsn)
        stream.confirm(self._held.pop(message.xid))

    async def begin_again(self) -> None:
        reading = None if self._reading is None else self._reading.spooled
        for spooled in list(self._spool.transactions.values()):
            if spooled is not reading and spooled.xid not in self._held:
                self._origins.pop(spooled.xid, None)
                self._described.pop(spooled.xid, None)
                await spooled.remove()

    async def close(self) -> None:
        if self._reading is not None:
            await self._reading.let_go()
        await self._spool.close()


class SpooledChanges:
    """The changes of one transaction, from its file."""

    def __init__(self, stream: Stream, spooled: SpooledTransaction, described: list[bytes]) -> None:
        self.spooled = spooled
        self._described = described
        self._stream = stream
        self._records: AsyncIterator[list[Record]] | None = spooled.read()

    def at_once(self, transaction: Transaction) -> list[Change] | None:
        return None

    async def pull(self, transaction: Transaction) -> list[Change]:
        tables = self._stream.frames.tables
        batch: list[Change] = []
        while not batch and self._records is not None:
            records = await anext(self._records, None)
            if records is None:
                await self.let_go()
                await self.spooled.remove()
                break
            await tables.read([message for _, _, message in records], batch)
        return batch

    async def drop(self, transaction: Transaction) -> None:
        await self._stream.frames.tables.describe_all(self._described)
        await self.let_go()
        await self.spooled.remove()

    async def let_go(self) -> None:
        """Stop reading."""
        records, self._records = self._records, None
        if records is not None:
            await records.aclose()  # type: ignore[attr-defined]
