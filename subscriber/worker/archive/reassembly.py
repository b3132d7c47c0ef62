"""Streamed transactions made plain: what comes in blocks leaves as BEGIN … COMMIT, when it has committed.

    S … E          kept in a file of the spool, each change with the (sub)transaction that made it
    A              forgotten: all of it, or what a subtransaction and those after it have added
    c              handed out: BEGIN, the changes as they would have come unstreamed, COMMIT
    anything else  handed out as it is

Nothing in the spool need survive: what has not been confirmed comes again from its first block.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from subscriber.errors import ProtocolError
from subscriber.protocol.decode import Decoder
from subscriber.protocol.encode import encode
from subscriber.protocol.messages import Begin, Commit, StreamAbort, StreamCommit, StreamStart, StreamStop
from subscriber.spool.spool import Spool, SpooledTransaction

_CHANGES = b"IUDRYTM"
_OF_STREAMS = b"SEAc"
_ORIGIN = 0x4F  # O, in a block: its position is not known yet


class StreamReassembler:
    """Holds the state of one connection; open() before the first message, close() after the last."""

    def __init__(self, folder: Path) -> None:
        self._spool = Spool(folder, limit=None)
        self._decoder = Decoder()
        self._block: SpooledTransaction | None = None  # whose block is open

    async def open(self) -> None:
        await self._spool.open()

    async def close(self) -> None:
        await self._spool.close()

    def passes(self, payload: bytes) -> bool:
        """Whether a message is to be handed out as it is, without receive(). Empty ones are, to be refused."""
        return not payload or (self._block is None and payload[0] not in _OF_STREAMS)

    async def receive(self, payload: bytes) -> AsyncIterator[bytes]:
        """Take a message that does not pass; the messages that it makes ready.

        Raises ProtocolError for one that may not come now, SpoolError when the spool cannot take it.
        """
        letter = payload[0]
        if self._block is not None and letter in _CHANGES:
            if self._block.append(int.from_bytes(payload[1:5], "big"), payload[:1] + payload[5:]):
                await self._block.write()
            return
        if self._block is not None and letter == _ORIGIN:
            return
        message = self._decoder.decode(payload)
        match message:
            case StreamStart() if self._block is None:
                self._block = self._spool.start(message.xid, first=message.first_segment)
            case StreamStop() if self._block is not None:
                await self._block.end_block()
                self._block = None
            case StreamAbort() if self._block is None:
                await self._abort(message)
            case StreamCommit() if self._block is None:
                async for plain in self._commit(message):
                    yield plain
            case _:
                raise ProtocolError(f"{message.message_type} message sent out of order")

    async def _abort(self, message: StreamAbort) -> None:
        transaction = self._spool.transactions.get(message.xid)
        if transaction is None:
            return  # nothing of it was published
        if message.subxid == message.xid:
            await transaction.remove()
        else:
            await transaction.rollback(message.subxid)

    async def _commit(self, message: StreamCommit) -> AsyncIterator[bytes]:
        transaction = self._spool.transactions.get(message.xid)
        if transaction is None:
            raise ProtocolError(f"transaction {message.xid} commits, but has not been streamed")
        yield encode(Begin(message.commit_lsn, message.commit_time, message.xid))
        async for records in transaction.read():
            for _, _, change in records:
                yield change
        yield encode(Commit(message.commit_lsn, message.end_lsn, message.commit_time))
        await transaction.remove()
