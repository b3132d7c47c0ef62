"""StreamReassembler: turns each streamed transaction that commits into one ordinary transaction, BEGIN … COMMIT.

    S … E          store the changes of the block in the spool, each with the xid of its (sub)transaction
    A              discard the transaction, or the changes from the first one of a subtransaction on
    c              return BEGIN, the stored changes as they are without streaming, and COMMIT
    anything else  return it unchanged

The files of the spool need not survive a restart. The publisher sends a transaction that was not confirmed again, from
its first block.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from subscriber.errors import ProtocolError
from subscriber.protocol.decode import Decoder
from subscriber.protocol.encode import encode
from subscriber.protocol.messages import Begin, Commit, StreamAbort, StreamCommit, StreamStart, StreamStop
from subscriber.protocol.stream_state import StreamState, next_state
from subscriber.spool.spool import Spool, SpooledTransaction

_CHANGES = b"IUDRYTM"
_OF_STREAMS = b"SEAc"


class StreamReassembler:
    """Reassembles the streamed transactions of one connection.

    Call open() before the first message, and close() after the last one.
    """

    def __init__(self, folder: Path) -> None:
        self._spool = Spool(folder, limit=None)
        self._decoder = Decoder()
        self._block: SpooledTransaction | None = None  # the transaction of the open block; None: no block is open
        self._state = StreamState.IDLE

    async def open(self) -> None:
        """Create the folder of the spool, and remove files of an earlier process. Raises SpoolError."""
        await self._spool.open()

    async def close(self) -> None:
        """Remove the files and the folder."""
        await self._spool.close()

    def passes(self, payload: bytes) -> bool:
        """Return True if a message needs no receive(). Empty messages do not, because BlockBuilder rejects them."""
        return not payload or (self._block is None and payload[0] not in _OF_STREAMS)

    async def receive(self, payload: bytes, state: StreamState = StreamState.IDLE) -> AsyncIterator[bytes]:
        """Process a message for which passes() is False.

        Args:
            payload: the message.
            state: the state after the messages for which passes() was True.

        Returns:
            The messages of a transaction that commits with this one. Empty for any other message.

        Raises:
            ProtocolError: the message is damaged or out of order.
            SpoolError: a file of the spool cannot be written or read.
        """
        letter = payload[0]
        if self._block is not None and letter in _CHANGES:
            if self._block.append(int.from_bytes(payload[1:5], "big"), payload[:1] + payload[5:]):
                await self._block.write()
            self._state = StreamState.BLOCK
            return
        message = self._decoder.decode(payload)
        self._state = next_state(state if self._block is None else self._state, message)
        match message:
            case StreamStart():
                self._block = self._spool.start(message.xid, first=message.first_segment)
            case StreamStop() if self._block is not None:
                await self._block.end_block()
                self._block = None
            case StreamAbort():
                await self._abort(message)
            case StreamCommit():
                async for plain in self._commit(message):
                    yield plain
            # The Origin message of a block is not returned: its position is not known before the commit.

    async def _abort(self, message: StreamAbort) -> None:
        transaction = self._spool.transactions.get(message.xid)
        if transaction is None:
            return  # its changes are not published, so it was not streamed
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
