"""Opening the change stream of a publisher, for a program.

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
from subscriber.lsn import Lsn
from subscriber.settings import Settings


@asynccontextmanager
async def stream(
    source: str,
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
    """Stream the changes of `publications` from a publisher, without any target.

    `source` is a URI or libpq `key=value` string of a role that may replicate. A `slot` has to be there unless
    `create` says what to do: "missing" makes it, "replace" makes it anew. Without a name a temporary slot is made
    that begins now and is gone at the end. A slot that was made has an exported `snapshot` of the moment at
    which it begins, good until the first transaction is asked for.

    `start` skips transactions that were committed before that position, for consumers that store theirs; 0 starts
    where the slot stands. `until` ends the iteration when everything committed before that position was handed out.

    `binary` has values sent in binary where types have that: less work for the publisher, and no row.text().
    `messages` brings logical messages, `two_phase` prepared transactions when they are prepared, `origin="none"`
    leaves out what the publisher itself replicated from elsewhere.

    Transactions too large for the publisher's memory come while they are in progress: `in_progress="spool"` keeps
    them on disk in `spool_folder` (None: in the system's temporary folder), at most `spool_limit` bytes (None: as
    much as there is), until they commit; "blocks" hands the blocks over as they come; `streaming="off"` leaves
    it to the publisher to keep them. `memory` is how many bytes may wait for the consumer before reading stops
    (None: settings.receive_queue_size).

    `failover` has a slot that is made kept on the publisher's standbys, too (17 and later). `application_name` is what
    the publisher shows of the connection; None: the slot's name.

    Leaving the block tells the publisher what was acknowledged and waits `stop_timeout` seconds for it to agree; 0
    drops the connection at once, None is settings.stream_stop_timeout. `settings` has other limits and intervals; None:
    those of the environment, Settings.from_environment().

    Raises TypeError and ValueError for arguments that mean nothing; ConninfoError, ConnectionLost, ServerError, and
    PublisherError for what is not there or too old. Later losses of the connection are got over; what cannot be is
    raised where the next transaction or change is awaited.
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
async def open_stream(source: str, options: ChangeStreamOptions) -> AsyncIterator[Stream]:
    """Open the slot and its stream, for stream() and consume()."""
    found = await SlotSource.open(source, options)
    opened = replace(
        options,
        start=found.position,
        streaming="parallel" if found.parallel else "on",
        spool_folder=options.spool_folder or found.spool_folder,
    )
    async with Stream(found, opened) as stream:
        yield stream
