"""A transaction as it is handed out: what it is, its changes one by one or many at once, and its ack."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from subscriber.change_stream.changes import Change
from subscriber.errors import SubscriberError
from subscriber.lsn import Lsn
from subscriber.protocol.messages import moment

if TYPE_CHECKING:
    from subscriber.change_stream.stream import Stream

_NOTHING: list[Change] = []


class Kind(StrEnum):
    """What a transaction is. Only COMMIT comes unless more was asked for."""

    COMMIT = "commit"  # its changes are committed
    PREPARE = "prepare"  # its changes are prepared under `gid`: the end is still open
    COMMIT_PREPARED = "commit prepared"  # the one prepared under `gid` is committed; no changes
    ROLLBACK_PREPARED = "rollback prepared"  # the one prepared under `gid` is gone; no changes
    MESSAGE = "message"  # a logical message that belongs to no transaction: the one change

    # Large transactions in progress, if they are wanted in blocks; neither needs an ack.
    STREAM_BLOCK = "stream block"  # some changes of a transaction that is not committed
    STREAM_ABORT = "stream abort"  # that transaction, or its subtransaction `subxid`, is gone
    STREAM_COMMIT = "stream commit"  # its blocks are committed; no changes here
    STREAM_PREPARE = "stream prepare"  # its blocks are prepared under `gid`; no changes here


class Changes(Protocol):
    """Where a transaction's changes come from."""

    def at_once(self, transaction: Transaction) -> list[Change] | None:
        """The next ones as far as they are there; None when they have to be waited for."""

    async def pull(self, transaction: Transaction) -> list[Change]:
        """The next ones; none at the end."""

    async def drop(self, transaction: Transaction) -> None:
        """The rest is not wanted: pass over it."""


class Transaction:
    """One transaction of the publisher, in the order of commits.

    An asynchronous iterator of its changes, which can be gone through once, and only until the next
    transaction is asked for; what is left then is passed over. Its ack() is what confirms it.

        kind        see Kind
        xid         on the publisher; 0 for a MESSAGE
        end_lsn     behind its last record: what is confirmed; None while changes are still to come
        gid         of a prepared transaction; None otherwise
        origin      where the publisher itself has it from; None when it was made there
        subxid      of a STREAM_ABORT: the subtransaction, the same as `xid` when all of it is gone
        first       of a STREAM_BLOCK: whether it is the first of its transaction
    """

    __slots__ = (
        "__dict__",  # for what follows, which ordinary ones leave as it is
        "_acked",
        "_at",
        "_batch",
        "_finish",
        "_source",
        "_stream",
        "_time",
        "end_lsn",
        "kind",
        "number",
        "over",
        "xid",
    )

    gid: str | None = None
    origin: str | None = None
    subxid: int | None = None
    first = False
    held_number = 0  # of the ack of another one that goes with it
    complete = False  # the source has given all; kept by it
    handed_out = 0  # changes, on a connection before this one too

    def __init__(
        self,
        stream: Stream,
        kind: Kind,
        xid: int,
        finish_lsn: int,
        time: int,
        changes: Changes | None = None,
        end_lsn: Lsn | None = None,
        batch: list[Change] = _NOTHING,
        number: int = 0,
    ) -> None:
        """Without `changes` there are none but those of `batch`, which come first. `number` is that of its ack."""
        self.kind = kind
        self.xid = xid
        self._finish = finish_lsn
        self.end_lsn = end_lsn
        self._time = time
        self._stream = stream
        self._source = changes
        self.over = changes is None  # no more will be handed out
        self._batch = batch
        self._at = 0
        self.number = number  # 0: it needs no ack, or has none yet
        self._acked = False

    @property
    def finish_lsn(self) -> Lsn:
        """Of the commit (prepare, …) record; tells transactions apart and orders them."""
        return Lsn(self._finish)

    @property
    def time(self) -> datetime | None:
        """When it was committed (prepared, …), by the publisher's clock; None for what has no such time."""
        return moment(self._time) if self._time else None

    def set_time(self, microseconds: int) -> None:
        """`microseconds` since 2000-01-01 00:00 UTC."""
        self._time = microseconds

    async def ack(self) -> None:
        """It is dealt with and need never come again. Changes that were not looked at are passed over.

        The publisher is told soon, or when the connection is back; of transactions that are acknowledged out of
        order, when all before them are. Raises SubscriberError after the stream was left: it will come again then.
        """
        if self._acked:
            return
        if self._stream.closed:
            raise SubscriberError(
                f"transaction {self.xid} cannot be acknowledged: the stream is closed",
                hint="It comes again when its slot is streamed from the next time.",
                sqlstate="55000",
            )
        if not self.over:
            await self.pass_over()
        self._acked = True
        self._stream.acknowledge(self)

    def __aiter__(self) -> Transaction:
        return self

    async def __anext__(self) -> Change:
        at = self._at
        if at == len(self._batch):
            if self.over:
                raise StopAsyncIteration
            await self._next_batch()
            at = 0
        self._at = at + 1
        return self._batch[at]

    def batches(self) -> AsyncIterator[list[Change]]:
        """The changes in lists, of as many as have arrived, some thousand at most: the fast way to take them."""
        return _Batches(self)

    async def changes(self) -> list[Change]:
        """All changes that are left, at once: in memory, so not for transactions of any size."""
        found: list[Change] = []
        async for batch in self.batches():
            found += batch
        return found

    async def _next_batch(self) -> None:
        """Fetch the next changes; raises StopAsyncIteration at the end."""
        self._batch, self._at = [], 0
        if self.over or self._source is None:
            raise StopAsyncIteration
        batch = await self._stream.pull(self, self._source)
        # Not when the source was done: whoever waited for the last ones may have been cancelled, and asks again.
        self.over = self.complete or not batch
        if not batch:
            raise StopAsyncIteration
        self.handed_out += len(batch)
        self._batch = batch

    async def pass_over(self) -> None:
        """Leave out the changes that are left."""
        if not self.over and self._source is not None:
            self._batch, self._at = [], 0
            await self._stream.drop(self, self._source)
            self.over = True

    async def leave(self) -> None:
        """pass_over() for the stream itself."""
        if not self.over and self._source is not None:
            self._batch, self._at = [], 0
            await self._source.drop(self)
            self.over = True

    def __repr__(self) -> str:
        return f"<Transaction {self.xid} {self.kind} at {self.finish_lsn}>"


class _Batches:
    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    def __aiter__(self) -> _Batches:
        return self

    async def __anext__(self) -> list[Change]:
        transaction = self._transaction
        batch, at = transaction._batch, transaction._at
        if at == len(batch):
            if transaction.over:
                raise StopAsyncIteration
            await transaction._next_batch()
            batch, at = transaction._batch, 0
        transaction._at = len(batch)
        return batch[at:] if at else batch
