"""The changes of a transaction that is sent whole, read from the frames as they come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from subscriber.change_stream.changes import Change
from subscriber.change_stream.engine.frame_reader import LETTER
from subscriber.errors import ProtocolError
from subscriber.protocol import messages as pgoutput

if TYPE_CHECKING:
    from subscriber.change_stream.stream import Stream
    from subscriber.change_stream.transaction import Transaction


_ENDS = b"CP"  # COMMIT, PREPARE


class InOrderReader:
    """For all such transactions of a stream, one after another."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._repeated = 0  # changes that come again after a new connection and were handed out before

    def at_once(self, transaction: Transaction) -> list[Change] | None:
        if self._repeated:
            return None
        stream = self._stream
        batch: list[Change] = []
        frame = stream.frames.fill(batch)
        if frame is None:
            return batch or None
        if frame[LETTER] in _ENDS:
            stream.ended(transaction, stream.decoder.decode(frame, LETTER))
            transaction.complete = True
            return batch
        stream.frames.back()
        return batch or None

    async def pull(self, transaction: Transaction) -> list[Change]:
        stream = self._stream
        frames = stream.frames
        while True:
            batch: list[Change] = []
            frame = frames.fill(batch)
            if self._repeated:
                self._leave_out(batch)
            if frame is None:
                if batch:
                    return batch
                if await stream.refill():
                    await self._rejoin(transaction)
                continue
            message = stream.decoder.decode(frame, LETTER)
            match message:
                case pgoutput.Commit() | pgoutput.Prepare():
                    stream.ended(transaction, message)
                    transaction.complete = True
                    return batch
                case _ if batch:
                    frames.back()  # what comes next may have to wait for the catalog, or belongs behind
                    return batch
                case pgoutput.Relation():
                    await frames.tables.describe(message)
                case pgoutput.Truncate() | pgoutput.LogicalMessage(_, True):
                    batch.append(frames.tables.change(message))
                    self._leave_out(batch)
                    if batch:
                        return batch
                case _:
                    raise ProtocolError(
                        f"{message.message_type} message sent out of order",
                        detail=f"It came in transaction {transaction.xid}.",
                    )

    async def drop(self, transaction: Transaction) -> None:
        while not transaction.complete:
            await self.pull(transaction)

    def _leave_out(self, batch: list[Change]) -> None:
        count = min(len(batch), self._repeated)
        del batch[:count]
        self._repeated -= count

    async def _rejoin(self, transaction: Transaction) -> None:
        """The connection is a new one: go to where we were in the transaction, which is sent once more."""
        stream = self._stream
        found = None
        while found is None:
            frame = stream.frames.next(between=False)
            if frame is None:
                await stream.refill()
            else:
                found = await stream.boundary(frame)
        if (found.xid, found.finish_lsn) != (transaction.xid, transaction.finish_lsn):
            raise ProtocolError(
                f"the publisher did not send transaction {transaction.xid} again",
                detail=f"It ends at {transaction.finish_lsn}; after a new connection there came one that ends at "
                f"{found.finish_lsn}.",
            )
        self._repeated = transaction.handed_out


class SingleChange:
    """One change, which is there already."""

    def __init__(self, change: Change) -> None:
        self._change = change

    def at_once(self, transaction: Transaction) -> list[Change] | None:
        transaction.complete = True
        return [self._change]

    async def pull(self, transaction: Transaction) -> list[Change]:
        transaction.complete = True
        return [self._change]

    async def drop(self, transaction: Transaction) -> None:
        pass
