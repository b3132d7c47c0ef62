"""Stream: the change stream of a publisher as an iterator of transactions. engine/ has its state and its readers.

A lost connection in the middle of a transaction is invisible to the user. The publisher sends the transaction again
with the same changes in the same order, and the stream skips those that it has delivered. As long as the stream stays
open, it delivers no transaction twice, whether it is acknowledged or not: it can be acknowledged later.

Failure cases.

- The process ends anywhere between reading, delivering, processing a change, acknowledging and confirming to the
  publisher: the next stream starts at the lowest position that was not confirmed. A transaction is delivered again if
  its acknowledgement was not confirmed. So a consumer's effects have to be idempotent, or be stored together with the
  transaction's `end_lsn`, which is then the `start` of the next stream.
"""

from __future__ import annotations

from types import TracebackType

from subscriber.change_stream.engine.connection import Source
from subscriber.change_stream.engine.core import StreamCore
from subscriber.change_stream.engine.transactions import TransactionReader
from subscriber.change_stream.options import ChangeStreamOptions
from subscriber.change_stream.transaction import Transaction
from subscriber.lsn import Lsn
from subscriber.timeline_history import TimelineHistory


class Stream:
    """An asynchronous iterator of transactions, for one task. stream() creates it."""

    def __init__(self, source: Source, options: ChangeStreamOptions) -> None:
        """Create a stream. `options.spool_folder` must not be None."""
        core = StreamCore(source, options)
        self._reader = TransactionReader(core, options)

    @property
    def slot(self) -> str:
        """The name of the replication slot."""
        return self._reader.core.source.slot

    @property
    def closed(self) -> bool:
        """True after the end of the stream's block. Transactions can no longer be acknowledged then."""
        return self._reader.core.closed

    @property
    def snapshot(self) -> str | None:
        """The exported snapshot of a slot that this stream created, for SET TRANSACTION SNAPSHOT.

        It is valid until the first transaction is requested. None if the slot existed.
        """
        return self._reader.core.source.snapshot

    @property
    def history(self) -> TimelineHistory | None:
        """The publisher's timelines as of the last connection. None: not known, because the publisher is a standby."""
        return self._reader.core.source.history

    @property
    def position(self) -> Lsn:
        """The position up to which all transactions have been delivered."""
        return self._reader.core.acks.passed

    @property
    def confirmed(self) -> Lsn:
        """The position up to which all transactions have been acknowledged. The publisher may discard older WAL."""
        return self._reader.core.acks.flush

    @property
    def unacknowledged(self) -> int:
        """The number of transactions that have been delivered and not acknowledged."""
        return self._reader.core.acks.open

    def finish(self) -> None:
        """End the iteration after the current transaction. Any task may call this method."""
        self._reader.finish()

    async def __aenter__(self) -> Stream:
        await self._reader.core.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._reader.core.close()
        finally:
            await self._reader.close()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Transaction:
        state = self._reader.ready()
        if state is None:
            state = await self._reader.next()
            if state is None:
                raise StopAsyncIteration
        return Transaction(state)
