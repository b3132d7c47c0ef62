"""apply_to(): applies a publication to a target that the program implements (targets/base.py).

mirror() uses the same steps for databases of SQLAlchemy (worker/mirror/mirror.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import anyio

from subscriber.apply.hooks.config import Hooks
from subscriber.apply.progress import Progress
from subscriber.change_stream.options import names, stream_folder
from subscriber.connection.dsn import Dsn, resolve_dsn
from subscriber.lsn import Lsn
from subscriber.publisher.commands import StreamOptions
from subscriber.publisher.connection import Publisher
from subscriber.publisher.feedback import limit_status_interval, read_sender_timeout
from subscriber.publisher.notices import NoticeLog
from subscriber.publisher.publications import check_publications
from subscriber.publisher.replication_stream import ReplicationStream
from subscriber.settings import Settings
from subscriber.spool.spool import Spool
from subscriber.targets.base import Target
from subscriber.worker.apply.loop import ApplyLoop
from subscriber.worker.apply.transactions import TransactionKinds
from subscriber.worker.apply_hooks import ApplyHooks
from subscriber.worker.streaming.spooled_transactions import SpooledTransactions


class ApplyUntil(ApplyHooks):
    """Applies all changes, and ends the loop at a position. None: the loop runs until an error or a cancellation."""

    def __init__(self, until: Lsn | None, hooks: Hooks | None = None) -> None:
        self.table_hooks = hooks
        self._until = until

    def needs_boundary(self, position: Lsn) -> bool:
        return self._until is not None

    async def on_boundary(self, position: Lsn) -> bool:
        return self._until is not None and position >= self._until


async def apply_to(
    target: Target,
    dsn: Dsn,
    *,
    slot: str,
    publications: Sequence[str],
    hooks: Hooks | None = None,
    until: Lsn | None = None,
    settings: Settings | None = None,
) -> None:
    """Apply the changes of publications to `target`, each transaction once, in commit order.

    There is no initial copy. A slot that does not exist is created, and the publisher sends only transactions that are
    committed after that. Large transactions are stored on disk until they commit.

    Args:
        target: the target. The stream starts at `target.position`. The target is not closed at the end.
        dsn: the publisher's connection string, see `Dsn`.
        slot: the name of the replication slot, whose plugin is pgoutput.
        publications: the names of publications, which must exist.
        hooks: change rows before they are applied. None: no hooks.
        until: return when everything before this position is applied. None: apply until an error or a cancellation.
        settings: limits, intervals and time-outs. None: Settings.from_environment().

    Raises:
        TypeError: `publications` is a string.
        ValueError: a variable of the environment has a value that is not allowed.
        ConninfoError: the connection string is invalid.
        ConnectionLost: the publisher cannot be reached. Call this function again: it resumes at `target.position`.
        ServerError: the publisher rejects the connection or a command.
        PublisherError: a publication does not exist, or the slot or the stream cannot be used.
        SpoolError: a large transaction cannot be stored.
        HookError: a hook does not fit its table, or has failed.
        SubscriberError: an error of the target, with its CONTEXT.

    Cancellation: the open transaction is not committed. The publisher sends it again.
    """
    settings = Settings.from_environment() if settings is None else settings
    publications = names(publications)
    conninfo = await resolve_dsn(dsn)
    async with await Publisher.connect(conninfo, application_name=slot, client_encoding="UTF8") as publisher:
        if await publisher.slot(slot) is None:
            await publisher.create_slot(slot, snapshot="nothing")
        folder = stream_folder(conninfo, slot, settings.spool_dir)
        await follow_slot(publisher, target, slot, publications, ApplyUntil(until, hooks), folder, settings)


async def follow_slot(
    publisher: Publisher,
    target: Target,
    slot: str,
    publications: Sequence[str],
    rules: ApplyHooks,
    folder: Path,
    settings: Settings,
    on_started: Callable[[], None] = lambda: None,
) -> None:
    """Stream from an existing slot, and apply the changes to `target`.

    Args:
        publisher: a connection that has not begun to stream. The caller closes it.
        target: the target, see apply_to().
        slot: the name of the slot.
        publications: the names of publications.
        rules: end the loop, and have the program's hooks.
        folder: the folder of large transactions.
        settings: limits, intervals and time-outs.
        on_started: called when the stream has started.

    Raises, Cancellation: as apply_to().
    """
    await check_publications(publisher, publications)
    settings = limit_status_interval(settings, await read_sender_timeout(publisher))
    options = StreamOptions(tuple(publications), streaming="on")
    notices = NoticeLog(settings.notices_per_minute, only_warnings=True)
    stream = await ReplicationStream.start(publisher, slot, target.position, options, on_notice=notices)
    on_started()
    try:
        await apply_stream(stream, target, rules, folder, settings)
    finally:
        # The next call can use the slot when the publisher has ended the stream.
        with anyio.CancelScope(shield=True):
            await stream.stop(timeout=settings.stream_stop_timeout)


async def apply_stream(
    stream: ReplicationStream, target: Target, rules: ApplyHooks, folder: Path, settings: Settings
) -> None:
    """Apply a started stream to `target`, and confirm the position at the end. Arguments: as follow_slot()."""
    spool = Spool(folder, limit=settings.spool_limit, buffer_size=settings.spool_buffer_size)
    kinds = TransactionKinds(streamed=SpooledTransactions(spool, 0, settings=settings))
    progress = Progress(target.position)
    await ApplyLoop(stream, target, progress, hooks=rules, kinds=kinds, settings=settings).run()
    progress.note(progress.position)
    stream.send_status(*progress.positions)
