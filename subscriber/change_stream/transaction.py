"""Transaction: its properties, its changes singly or in batches, and its acknowledgement."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime

from subscriber.change_stream.changes import Change
from subscriber.change_stream.engine.core import TransactionCore
from subscriber.change_stream.kind import Kind
from subscriber.errors import SubscriberError
from subscriber.lsn import Lsn
from subscriber.protocol.messages import moment
from subscriber.sqlstate import OBJECT_NOT_IN_PREREQUISITE_STATE


class Transaction:
    """One transaction of the publisher: an asynchronous iterator of its changes.

    It can be iterated once. When the next transaction is requested, the remaining changes are skipped. `ack()` confirms
    the transaction to the publisher.
    """

    __slots__ = ("_state",)

    def __init__(self, state: TransactionCore) -> None:
        self._state = state

    @property
    def kind(self) -> Kind:
        """The kind of the transaction."""
        return self._state.kind

    @property
    def xid(self) -> int:
        """The transaction ID on the publisher. 0 for a MESSAGE."""
        return self._state.xid

    @property
    def end_lsn(self) -> Lsn | None:
        """The position after its last record, which ack() confirms. None until the last change has arrived."""
        return self._state.end_lsn

    @property
    def gid(self) -> str | None:
        """The identifier of a prepared transaction. None for other transactions."""
        return self._state.gid

    @property
    def origin(self) -> str | None:
        """The replication origin on the publisher. None if the transaction was made there."""
        return self._state.origin

    @property
    def subxid(self) -> int | None:
        """The subtransaction of a STREAM_ABORT. Equal to `xid` if the whole transaction is rolled back."""
        return self._state.subxid

    @property
    def first(self) -> bool:
        """True if a STREAM_BLOCK is the first block of its transaction."""
        return self._state.first

    @property
    def finish_lsn(self) -> Lsn:
        """The position of the commit (prepare, …) record. It identifies and orders transactions."""
        return Lsn(self._state.finish)

    @property
    def time(self) -> datetime | None:
        """The time of the commit (prepare, …) by the publisher's clock. None if the publisher sends no time."""
        time = self._state.time
        return moment(time) if time else None

    async def ack(self) -> None:
        """Acknowledge the transaction, so that the publisher does not send it again. Its remaining changes are skipped.

        The stream confirms the position soon, or after a reconnect. A position is confirmed when all transactions
        before it are acknowledged, in any order. A second call does nothing.

        Raises:
            SubscriberError: the stream is closed. The publisher sends the transaction again.

        Cancellation: the transaction is not acknowledged.
        """
        state = self._state
        if state.acked:
            return
        if state.core.closed:
            raise SubscriberError(
                f"transaction {state.xid} cannot be acknowledged: the stream is closed",
                hint="It comes again when its slot is streamed from the next time.",
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )
        if not state.exhausted:
            await state.skip_rest()
        state.acked = True
        state.core.acknowledge(state)

    def __aiter__(self) -> Transaction:
        return self

    async def __anext__(self) -> Change:
        state = self._state
        batch, at = state.batch, state.at
        if at == len(batch):
            if state.exhausted or not await state.next_batch():
                raise StopAsyncIteration
            batch, at = state.batch, 0
        state.at = at + 1
        return batch[at]

    def batches(self) -> AsyncIterator[list[Change]]:
        """Iterate over the changes in lists of limited size. This is the fastest way to read a transaction."""
        return self._state

    async def changes(self) -> list[Change]:
        """Return a list of the remaining changes. It needs memory for all of them, so avoid it for large transactions.

        Cancellation: safe; the next call, or an iteration, continues with the changes that have been read.
        """
        changes: list[Change] = []
        try:
            async for batch in self.batches():
                changes += batch
        except BaseException:
            self._state.put_back(changes)
            raise
        return changes

    def __repr__(self) -> str:
        return f"<Transaction {self.xid} {self.kind} at {self.finish_lsn}>"
