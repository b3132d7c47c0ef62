"""stream(): open the change stream of a publisher in a program.

async with subscriber.stream(dsn, slot="s", publications=["p"]) as stream:
    async for transaction in stream:
        async for change in transaction:
            …
        await transaction.ack()
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

from subscriber.change_stream.engine.slot_source import SlotSource
from subscriber.change_stream.options import ChangeStreamOptions, combine_settings, names
from subscriber.change_stream.stream import Stream
from subscriber.connection.dsn import Dsn
from subscriber.lsn import Lsn
from subscriber.settings import Settings


@asynccontextmanager
async def stream(
    source: Dsn,
    *,
    publications: Sequence[str],
    slot: str | None = None,
    create: Literal["never", "missing", "replace"] = "never",
    start: Lsn = Lsn(0),
    until: Lsn | None = None,
    binary: bool = False,
    messages: bool = False,
    two_phase: bool = False,
    origin: Literal["any", "none"] = "any",
    streaming: Literal["off", "on", "parallel"] = "on",
    in_progress: Literal["spool", "blocks"] = "spool",
    memory: int | None = None,
    spool_folder: Path | None = None,
    spool_limit: int | None = None,
    failover: bool = False,
    application_name: str | None = None,
    stop_timeout: float | None = None,
    settings: Settings | None = None,
) -> AsyncIterator[Stream]:
    """Stream the changes of `publications` from a publisher, without a target database.

    The stream reconnects after a lost connection, unless its slot is temporary. A permanent error is raised by the next
    `await` on the stream or on a transaction. The end of the block sends the acknowledged position to the publisher.

    Args:
        source: the publisher's connection string, see `Dsn`. Its role needs REPLICATION.
        publications: the names of publications, which must exist.
        slot: the replication slot. None: a temporary slot, which starts at the current position and is dropped at
            the end.
        create: "never": the slot must exist. "missing": create it if it does not exist. "replace": drop an existing
            slot and create a new one. A created slot exports `Stream.snapshot`.
        start: skip transactions that were committed before this position, for consumers that store their own. 0: the
            position of the slot.
        until: end the iteration after the transactions that were committed before this position. None: no end.
        binary: receive values in binary format if their types have one. This is less work for the publisher, but
            `Row.text()` raises an error for most of these values. All values are text after the publisher has refused
            a type that contains one without a binary format, such as an array of it.
        messages: deliver logical messages, see `Message`.
        two_phase: deliver a prepared transaction when it is prepared.
        origin: "none": skip transactions that the publisher itself received by replication. Ignored before version 16.
        streaming: "on" or "parallel": the publisher sends large transactions while they are in progress.
            "parallel" adds the position and the time of an abort (16 and later). "off", or a publisher before version
            14: the publisher stores them until they commit.
        in_progress: "spool": store in-progress transactions on disk until they commit. "blocks": deliver each of
            their blocks on arrival.
        memory: bytes that may be queued for the consumer before reading stops. None: settings.receive_queue_size.
        spool_folder: the folder of stored transactions. None: a folder in the system's temporary folder.
        spool_limit: bytes of all stored transactions. None: the free space of the disk.
        failover: a slot that is created is synchronized to the publisher's standbys (17 and later).
        application_name: the name of the connection on the publisher. None: the name of the slot. A name in `source`
            takes precedence.
        stop_timeout: seconds to wait, at the end of the block, until the publisher has ended the stream. 0 drops the
            connection immediately. None: settings.stream_stop_timeout.
        settings: other limits and intervals. None: Settings.from_environment().

    Raises:
        TypeError: `publications` is a string.
        ValueError: an argument or a variable of the environment has a value that is not allowed.
        ConninfoError: the connection string is invalid.
        ConnectionLost: the publisher cannot be reached.
        ServerError: the publisher rejects the connection or a command.
        PublisherError: the slot or a publication does not exist, or the publisher is too old for an option.

    Cancellation: safe. A slot that `create` made remains, except for a temporary one.
    """
    options = ChangeStreamOptions(
        publications=names(publications),
        slot=slot,
        create=create,
        start=start,
        until=until,
        binary=binary,
        messages=messages,
        two_phase=two_phase,
        origin=origin,
        streaming=streaming,
        in_progress=in_progress,
        spool_folder=spool_folder,
        spool_limit=spool_limit,
        failover=failover,
        application_name=application_name,
        settings=combine_settings(settings, memory, stop_timeout),
    )
    async with open_stream(source, options) as opened:
        yield opened


@asynccontextmanager
async def open_stream(source: Dsn, options: ChangeStreamOptions) -> AsyncIterator[Stream]:
    """Open a slot and its stream, for stream() and consume()."""
    slot = await SlotSource.open(source, options)
    opened = replace(
        options,
        start=slot.position,
        streaming="parallel" if slot.parallel else "on",
        spool_folder=options.spool_folder or slot.spool_folder,
    )
    async with Stream(slot, opened) as stream:
        yield stream
