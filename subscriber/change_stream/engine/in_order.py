"""Readers of transactions that the publisher sends as a whole: their changes are read from the frames on arrival."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from subscriber.change_stream.changes import LETTER, Change
from subscriber.change_stream.engine.core import StreamCore, TransactionCore
from subscriber.errors import ProtocolError
from subscriber.protocol import messages as pgoutput
from subscriber.protocol.stream_state import StreamState, out_of_order

_ENDS = b"CP"  # COMMIT, PREPARE


class InOrderReader:
    """Reads the changes of such transactions, one transaction after another."""

    def __init__(self, core: StreamCore, boundary: Callable[[bytes], Awaitable[TransactionCore | None]]) -> None:
        """Create the reader. `boundary` processes a frame between transactions, see TransactionReader."""
        self._core = core
        self._boundary = boundary
        self._repeated = 0  # number of changes to skip that were delivered before a reconnect

    def ready(self, state: TransactionCore) -> list[Change] | None:
        if self._repeated:
            return None
        core = self._core
        batch: list[Change] = []
        frame = core.frames.fill(batch)
        if frame is None:
            return batch or None
        if frame[LETTER] in _ENDS:
            core.end(state, core.decoder.decode(frame, LETTER))
            state.complete = True
            return batch
        core.frames.back()
        return batch or None

    async def read(self, state: TransactionCore) -> list[Change]:
        core = self._core
        frames = core.frames
        while True:
            batch: list[Change] = []
            frame = frames.fill(batch)
            if self._repeated:
                self._discard_repeated(batch)
            if frame is None:
                if batch:
                    return batch
                if await core.refill():
                    await self._rejoin(state)
                continue
            message = core.decoder.decode(frame, LETTER)
            match message:
                case pgoutput.Commit() | pgoutput.Prepare():
                    core.end(state, message)
                    state.complete = True
                    return batch
                case _ if batch:
                    frames.back()  # to be processed after the batch; a Relation may have to wait for the catalog
                    return batch
                case pgoutput.Relation():
                    await frames.tables.describe(message)
                case pgoutput.Truncate() | pgoutput.LogicalMessage():
                    batch.append(frames.tables.change(message))
                    self._discard_repeated(batch)
                    if batch:
                        return batch
                case _:
                    raise out_of_order(message, StreamState.TRANSACTION, state.xid)

    async def skip(self, state: TransactionCore) -> None:
        while not state.complete:
            await self.read(state)

    def _discard_repeated(self, batch: list[Change]) -> None:
        count = min(len(batch), self._repeated)
        del batch[:count]
        self._repeated -= count

    async def _rejoin(self, state: TransactionCore) -> None:
        """Find the transaction on a new connection, which sends it again from its first change."""
        core = self._core
        transaction = None
        while transaction is None:
            frame = core.frames.next(between=False)
            if frame is None:
                await core.refill()
            else:
                transaction = await self._boundary(frame)
        if (transaction.xid, transaction.finish) != (state.xid, state.finish):
            raise ProtocolError(
                f"the publisher did not send transaction {state.xid} again",
                detail=f"It ends at {state.finish_lsn}; after a new connection there came one that ends at "
                f"{transaction.finish_lsn}.",
            )
        self._repeated = state.delivered


class SingleChangeReader:
    """Returns one change, which has arrived already."""

    def __init__(self, change: Change) -> None:
        self._change = change

    def ready(self, state: TransactionCore) -> list[Change] | None:
        state.complete = True
        return [self._change]

    async def read(self, state: TransactionCore) -> list[Change]:
        state.complete = True
        return [self._change]

    async def skip(self, state: TransactionCore) -> None:
        pass
