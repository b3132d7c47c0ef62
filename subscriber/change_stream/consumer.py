"""Callbacks for a change stream: a Consumer has a method for each callback of PostgreSQL's output plugins.

    class Printer(subscriber.Consumer):
        async def change(self, transaction, change):
            print(change.kind, change.relation, change.key)

    await subscriber.consume(Printer(), dsn, slot="s", publications=["p"])

The methods that a class overrides determine the options of the stream, as with output plugins:

    prepare                  deliver prepared transactions when they are prepared
    message, stream_message  deliver logical messages
    stream_change            deliver blocks of large transactions while these are in progress; without it they are
                             stored on disk until they commit

A transaction is acknowledged when its last callback (commit, prepare, commit_prepared, rollback_prepared,
stream_commit, stream_prepare, message outside a transaction) has returned. A transaction that filter_by_origin() skips
is acknowledged as well.

Failure cases.

- A callback raises: consume() ends with that error. The next consume() delivers the transaction again.

Source: src/include/replication/output_plugin.h and the chapter "Logical Decoding Output Plugins".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import anyio

from subscriber.change_stream.api import open_stream
from subscriber.change_stream.changes import Delete, Insert, Message, Truncate, Update
from subscriber.change_stream.kind import Kind
from subscriber.change_stream.options import ChangeStreamOptions, combine_settings, names
from subscriber.change_stream.stream import Stream
from subscriber.change_stream.transaction import Transaction
from subscriber.connection.dsn import Dsn
from subscriber.lsn import Lsn
from subscriber.settings import DEFAULTS, Settings


class Consumer:
    """Base class of consumers. Its callbacks do nothing, and its filters skip nothing: override those you need.

    One task awaits the callbacks, one after another.
    """

    async def startup(self, stream: Stream) -> None:
        """Prepare to consume. Called first.

        Args:
            stream: its `snapshot` is the exported snapshot of a slot that has just been created. It is valid until
                this method returns.
        """

    async def shutdown(self) -> None:
        """Release resources. Called last, also after an error or a cancellation.

        Cancellation: shielded for `Settings.consumer_shutdown_timeout`, then canceled.
        """

    # --- transactions -----------------------------------------------------------------------------

    async def begin(self, transaction: Transaction) -> None:
        """Begin a committed transaction. Its changes follow, then commit()."""

    async def change(self, transaction: Transaction, change: Insert | Update | Delete) -> None:
        """Process the change of a row. The transaction began with begin() or begin_prepare()."""

    async def truncate(self, transaction: Transaction, change: Truncate) -> None:
        """Process a TRUNCATE of one or several tables."""

    async def message(self, transaction: Transaction, message: Message) -> None:
        """Process a logical message.

        Args:
            transaction: its `kind` is MESSAGE if the message is not transactional. begin() and commit() are not called
                then.
            message: the prefix and the content.
        """

    async def commit(self, transaction: Transaction) -> None:
        """End the transaction that began with begin(). It is acknowledged when this method returns."""

    def filter_by_origin(self, origin: str | None) -> bool:
        """Return True to skip the transactions of a replication origin.

        Args:
            origin: its name on the publisher. None: the transaction was made on the publisher.
        """
        return False

    # --- prepared transactions --------------------------------------------------------------------

    def filter_prepare(self, xid: int, gid: str) -> bool:
        """Return True to deliver a prepared transaction at its COMMIT PREPARED, with begin() and commit().

        Until then the transaction is stored on disk, and no position from its PREPARE on is confirmed to the publisher.

        Args:
            xid: the transaction ID on the publisher.
            gid: the identifier of the prepared transaction.
        """
        return False

    async def begin_prepare(self, transaction: Transaction) -> None:
        """Begin a prepared transaction. Its changes follow, then prepare()."""

    async def prepare(self, transaction: Transaction) -> None:
        """Prepare the transaction that began with begin_prepare(). Its outcome is not known yet."""

    async def commit_prepared(self, transaction: Transaction) -> None:
        """Commit the transaction that was prepared as `transaction.gid`."""

    async def rollback_prepared(self, transaction: Transaction) -> None:
        """Roll back the transaction that was prepared as `transaction.gid`."""

    # --- large transactions in progress -----------------------------------------------------------

    async def stream_start(self, transaction: Transaction) -> None:
        """Begin a block of an in-progress transaction. `transaction.first` is True for its first block."""

    async def stream_stop(self, transaction: Transaction) -> None:
        """End the block."""

    async def stream_abort(self, transaction: Transaction) -> None:
        """Undo the changes of subtransaction `transaction.subxid`, or of the transaction if that equals its `xid`.

        Called after a lost connection too, for each in-progress transaction. The publisher sends these again.
        """

    async def stream_prepare(self, transaction: Transaction) -> None:
        """Prepare the transaction of the received blocks as `transaction.gid`."""

    async def stream_commit(self, transaction: Transaction) -> None:
        """Commit the transaction of the received blocks."""

    async def stream_change(self, transaction: Transaction, change: Insert | Update | Delete) -> None:
        """Process the change of a row inside a block. `change.subxid` is the (sub)transaction that made it."""

    async def stream_message(self, transaction: Transaction, message: Message) -> None:
        """Process a logical message inside a block."""

    async def stream_truncate(self, transaction: Transaction, change: Truncate) -> None:
        """Process a TRUNCATE inside a block."""


async def consume(
    consumer: Consumer,
    source: Dsn,
    *,
    publications: Sequence[str],
    slot: str | None = None,
    create: Literal["never", "missing", "replace"] = "never",
    start: Lsn = Lsn(0),
    until: Lsn | None = None,
    binary: bool = False,
    origin: Literal["any", "none"] = "any",
    memory: int | None = None,
    spool_folder: Path | None = None,
    spool_limit: int | None = None,
    failover: bool = False,
    application_name: str | None = None,
    stop_timeout: float | None = None,
    settings: Settings | None = None,
) -> None:
    """Call the callbacks of `consumer` for the transactions of a publisher, up to `until`, an error or a cancellation.

    Args:
        consumer: the methods that it overrides determine the options `messages`, `two_phase` and `in_progress`.
        source: as in stream(), like the other arguments.

    Raises:
        SubscriberError: as stream(), and the errors of its iteration.
        Exception: an error of a callback.

    Cancellation: `consumer.shutdown()` is called. Transactions that are not acknowledged are delivered again by the
        next consume().
    """
    options = ChangeStreamOptions(
        publications=names(publications),
        slot=slot,
        create=create,
        start=start,
        until=until,
        binary=binary,
        messages=_has(consumer, "message") or _has(consumer, "stream_message"),
        two_phase=_has(consumer, "prepare"),
        origin=origin,
        streaming="parallel",
        in_progress="blocks" if takes_blocks(consumer) else "spool",
        hold=consumer.filter_prepare,
        spool_folder=spool_folder,
        spool_limit=spool_limit,
        failover=failover,
        application_name=application_name,
        settings=combine_settings(settings, memory, stop_timeout),
    )
    async with open_stream(source, options) as stream:
        await drive(consumer, stream, options.settings.consumer_shutdown_timeout)


def takes_blocks(consumer: Consumer) -> bool:
    """Return True if the consumer processes blocks of in-progress transactions."""
    return _has(consumer, "stream_change")


def _has(consumer: Consumer, method: str) -> bool:
    return getattr(type(consumer), method) is not getattr(Consumer, method)


async def drive(
    consumer: Consumer, stream: Stream, shutdown_timeout: float = DEFAULTS.consumer_shutdown_timeout
) -> None:
    """Call the callbacks for each transaction of the stream, from startup() to shutdown()."""
    try:
        await consumer.startup(stream)
        filtered: set[int] = set()  # xids of in-progress and prepared transactions whose origin is skipped
        async for transaction in stream:
            if _wanted(consumer, transaction, filtered):
                await _deliver(consumer, transaction)
            await transaction.ack()
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(shutdown_timeout):
            await consumer.shutdown()


def _wanted(consumer: Consumer, transaction: Transaction, filtered: set[int]) -> bool:
    match transaction.kind:
        case Kind.COMMIT | Kind.PREPARE:
            if transaction.kind is Kind.PREPARE and consumer.filter_by_origin(transaction.origin):
                filtered.add(transaction.xid)
            return not consumer.filter_by_origin(transaction.origin)
        case Kind.STREAM_BLOCK:
            if transaction.first and consumer.filter_by_origin(transaction.origin):
                filtered.add(transaction.xid)
            return transaction.xid not in filtered
        case Kind.MESSAGE:
            return True
    wanted = transaction.xid not in filtered
    if transaction.kind is not Kind.STREAM_PREPARE and transaction.subxid in (None, transaction.xid):
        filtered.discard(transaction.xid)
    return wanted


async def _deliver(consumer: Consumer, transaction: Transaction) -> None:
    match transaction.kind:
        case Kind.COMMIT:
            await consumer.begin(transaction)
            await _changes(consumer, transaction)
            await consumer.commit(transaction)
        case Kind.PREPARE:
            await consumer.begin_prepare(transaction)
            await _changes(consumer, transaction)
            await consumer.prepare(transaction)
        case Kind.COMMIT_PREPARED:
            await consumer.commit_prepared(transaction)
        case Kind.ROLLBACK_PREPARED:
            await consumer.rollback_prepared(transaction)
        case Kind.MESSAGE:
            await _changes(consumer, transaction)
        case Kind.STREAM_BLOCK:
            await consumer.stream_start(transaction)
            await _changes_of_block(consumer, transaction)
            await consumer.stream_stop(transaction)
        case Kind.STREAM_ABORT:
            await consumer.stream_abort(transaction)
        case Kind.STREAM_COMMIT:
            await consumer.stream_commit(transaction)
        case Kind.STREAM_PREPARE:
            await consumer.stream_prepare(transaction)


async def _changes(consumer: Consumer, transaction: Transaction) -> None:
    async for batch in transaction.batches():
        for change in batch:
            match change:
                case Truncate():
                    await consumer.truncate(transaction, change)
                case Message():
                    await consumer.message(transaction, change)
                case _:
                    await consumer.change(transaction, change)


async def _changes_of_block(consumer: Consumer, transaction: Transaction) -> None:
    async for batch in transaction.batches():
        for change in batch:
            match change:
                case Truncate():
                    await consumer.stream_truncate(transaction, change)
                case Message():
                    await consumer.stream_message(transaction, change)
                case _:
                    await consumer.stream_change(transaction, change)
