"""Large transactions in progress: kept on disk until they commit or are prepared, and then handed out whole.

The files mean nothing to another process: the publisher streams every transaction again from its first block
whose end it has not been told about. See spool/transactions.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from subscriber.consumer.changes import Change
from subscriber.consumer.frames import LETTER
from subscriber.consumer.transaction import Kind, Transaction
from subscriber.errors import ProtocolError
from subscriber.lsn import Lsn
from subscriber.protocol import messages as pgoutput
from subscriber.spool.format import Record
from subscriber.spool.transactions import Spool, SpooledTransaction

if TYPE_CHECKING:
    from subscriber.consumer.stream import Stream

_KEPT = b"RYIUDTM"  # with an xid after the letter
_XID, _REST = LETTER + 1, LETTER + 5


class Spooled:
    """All of one stream."""

    def __init__(self, folder: Path, limit: int | None) -> None:
        """`limit` in bytes; None: what the disk takes. The folder is made when it is needed."""
        self._spool = Spool(folder, limit=limit)
        self._open = False
        self._origins: dict[int, str] = {}
        self._reading: Reading | None = None

    async def block(self, stream: Stream, message: pgoutput.StreamStart) -> Transaction | None:
        if not self._open:
            await self._spool.open()
            self._open = True
        spooled = self._spool.start(message.xid, first=message.first_segment)
        while True:
            frame = stream.frames.next(between=False)
            if frame is None:
                if await stream.refill():
                    return None
                continue
            if frame[LETTER] in _KEPT and len(frame) > _REST:
                xid = int.from_bytes(frame[_XID:_REST], "big")
                if spooled.append(xid, frame[LETTER:_XID] + frame[_REST:]):
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

    async def abort(self, stream: Stream, message: pgoutput.StreamAbort) -> Transaction | None:
        spooled = self._spool.transactions.get(message.xid)
        if spooled is not None and message.subxid == message.xid:
            self._origins.pop(message.xid, None)
            await spooled.remove()
        elif spooled is not None:
            await spooled.rollback(message.subxid)
        return None

    async def commit(self, stream: Stream, message: pgoutput.StreamCommit) -> Transaction | None:
        transaction = await self._end(stream, Kind.COMMIT, message.xid, message.commit_lsn, message.end_lsn)
        if transaction is not None:
            transaction.set_time(message.commit_time)
        return transaction

    async def prepare(self, stream: Stream, message: pgoutput.StreamPrepare) -> Transaction | None:
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
        if end_lsn <= stream.acks.passed or (kind is Kind.COMMIT and not spooled.changes):
            await spooled.remove()
            stream.acks.note(end_lsn)
            return None
        self._reading = Reading(stream, spooled)
        transaction = Transaction(stream, kind, xid, finish_lsn, 0, changes=self._reading, end_lsn=end_lsn)
        transaction.origin = origin
        return transaction

    async def begin_again(self) -> None:
        self._origins.clear()
        reading = None if self._reading is None else self._reading.spooled
        for spooled in list(self._spool.transactions.values()):
            if spooled is not reading:
                await spooled.remove()

    def lost(self, stream: Stream) -> Transaction | None:
        return None

    async def close(self) -> None:
        if self._reading is not None:
            await self._reading.let_go()
        await self._spool.close()


class Reading:
    """The changes of one transaction, from its file."""

    def __init__(self, stream: Stream, spooled: SpooledTransaction) -> None:
        self.spooled = spooled
        self._stream = stream
        self._records: AsyncIterator[list[Record]] | None = spooled.read()

    async def pull(self, transaction: Transaction) -> list[Change]:
        tables = self._stream.frames.tables
        batch: list[Change] = []
        while not batch and self._records is not None:
            records = await anext(self._records, None)
            if records is None:
                await self.drop(transaction)
                break
            for _, _, message in records:
                change = tables.read(message)
                if isinstance(change, pgoutput.Relation):
                    await tables.describe(change)
                elif not isinstance(change, pgoutput.Type):
                    batch.append(change)
        return batch

    async def drop(self, transaction: Transaction) -> None:
        await self.let_go()
        await self.spooled.remove()

    async def let_go(self) -> None:
        """Stop reading."""
        records, self._records = self._records, None
        if records is not None:
            await records.aclose()  # type: ignore[attr-defined]
