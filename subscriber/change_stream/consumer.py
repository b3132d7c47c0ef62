"""The change stream pushed: a Consumer has a method for each callback of PostgreSQL's output plugins.

    class Printer(subscriber.Consumer):
        async def change(self, transaction, change):
            print(change.kind, change.relation, change.key)

    await subscriber.consume(Printer(), dsn, slot="s", publications=["p"])

What is asked of the publisher follows from the methods that a class has of its own, as with output plugins:

    prepare                  prepared transactions come when they are prepared
    message, stream_message  logical messages come
    stream_change            blocks of large transactions come while they are in progress; without it these
                             transactions are kept on disk until they commit

A transaction is acknowledged when its last callback (commit, prepare, commit_prepared, rollback_prepared,
stream_commit, stream_prepare, message outside a transaction) has returned. One that raises ends consume(), and its
transaction comes again the next time.

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
from subscriber.lsn import Lsn
from subscriber.settings import DEFAULTS, Settings


class Consumer:
    """Override what is wanted; every method does nothing by itself, and the filters let everything pass."""

    async def startup(self, stream: Stream) -> None:
        """Before anything else. `stream.snapshot` is there to be read when the slot was made just now."""

    async def shutdown(self) -> None:
        """At the end, however it comes about."""

    # --- transactions -----------------------------------------------------------------------------

    async def begin(self, transaction: Transaction) -> None:
        """A committed transaction begins."""

    async def change(self, transaction: Transaction, change: Insert | Update | Delete) -> None:
        """A row changed, in a transaction that began with begin() or begin_prepare()."""

    async def truncate(self, transaction: Transaction, change: Truncate) -> None:
        """Tables were emptied."""

    async def message(self, transaction: Transaction, message: Message) -> None:
        """A logical message; `transaction.kind` is MESSAGE for one that belongs to no transaction."""

    async def commit(self, transaction: Transaction) -> None:
        """The transaction that began with begin() is complete."""

    def filter_by_origin(self, origin: str | None) -> bool:
        """True leaves out what the publisher has from `origin`; None is what was made there itself."""
        return False

    # --- prepared transactions --------------------------------------------------------------------

    def filter_prepare(self, xid: int, gid: str) -> bool:
        """True leaves the preparation of this transaction out: it comes with begin() … commit() when it is committed.

        Until then it is kept on disk, and nothing from its preparation on is confirmed to the publisher.
        """
        return False

    async def begin_prepare(self, transaction: Transaction) -> None:
        """A prepared transaction begins."""

    async def prepare(self, transaction: Transaction) -> None:
        """The transaction that began with begin_prepare() is complete: its end is still open."""

    async def commit_prepared(self, transaction: Transaction) -> None:
        """The transaction prepared under `transaction.gid` is committed."""

    async def rollback_prepared(self, transaction: Transaction) -> None:
        """The transaction prepared under `transaction.gid` is rolled back."""

    # --- large transactions in progress -----------------------------------------------------------

    async def stream_start(self, transaction: Transaction) -> None:
        """A block of changes of a transaction in progress begins; `transaction.first` if it is the first."""

    async def stream_stop(self, transaction: Transaction) -> None:
        """The block ends."""

    async def stream_abort(self, transaction: Transaction) -> None:
        """Undo what subtransaction `transaction.subxid` did; all of it if that is the same as `transaction.xid`.

        Comes for every transaction in progress, too, when the connection was lost: they begin again.
        """

    async def stream_prepare(self, transaction: Transaction) -> None:
        """The transaction whose blocks have come is prepared under `transaction.gid`."""

    async def stream_commit(self, transaction: Transaction) -> None:
        """The transaction whose blocks have come is committed."""

    async def stream_change(self, transaction: Transaction, change: Insert | Update | Delete) -> None:
        """A row changed inside a block; `change.subxid` is the (sub)transaction that did it."""

    async def stream_message(self, transaction: Transaction, message: Message) -> None:
        """A logical message inside a block."""

    async def stream_truncate(self, transaction: Transaction, change: Truncate) -> None:
        """Tables were emptied inside a block."""


async def consume(
    consumer: Consumer,
    source: str,
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
    """Have `consumer` called with what happens on a publisher: until cancelled, `until`, or an error.

    The options are those of stream(), which raises the same.
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
    """Whether it wants large transactions while they are in progress."""
    return _has(consumer, "stream_change")


def _has(consumer: Consumer, method: str) -> bool:
    return getattr(type(consumer), method) is not getattr(Consumer, method)


async def drive(
    consumer: Consumer, stream: Stream, shutdown_timeout: float = DEFAULTS.consumer_shutdown_timeout
) -> None:
    """Call the callbacks for everything that comes, from startup() to shutdown()."""
    try:
        await consumer.startup(stream)
        filtered: set[int] = set()  # transactions in progress from an origin that is not wanted
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
