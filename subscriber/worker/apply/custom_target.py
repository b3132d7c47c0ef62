"""apply_to(): applies a publication to a target that the program implements (targets/base.py)."""

from __future__ import annotations

from collections.abc import Sequence

from subscriber.change_stream.options import names
from subscriber.connection.dsn import Dsn, resolve_dsn
from subscriber.lsn import Lsn
from subscriber.publisher.commands import StreamOptions
from subscriber.publisher.connection import Publisher
from subscriber.publisher.feedback import limit_status_interval, read_sender_timeout
from subscriber.publisher.notices import NoticeLog
from subscriber.publisher.replication_stream import ReplicationStream
from subscriber.settings import Settings
from subscriber.targets.base import Target
from subscriber.worker.apply.loop import ApplyLoop
from subscriber.worker.apply_hooks import ApplyHooks


class ApplyUntil(ApplyHooks):
    """Ends the loop at a position. None: the loop runs until an error or a cancellation."""

    def __init__(self, until: Lsn | None) -> None:
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
    until: Lsn | None = None,
    settings: Settings | None = None,
) -> None:
    """Apply the changes of publications to `target`, each transaction once, in commit order.

    There is no initial copy. A slot that does not exist is created, and the publisher sends only transactions that are
    committed after that.

    Args:
        target: the target. The stream starts at `target.position`. The target is not closed at the end.
        dsn: the publisher's connection string, see `Dsn`.
        slot: the name of the replication slot, whose plugin is pgoutput.
        publications: the names of publications, which must exist.
        until: return when everything before this position is applied. None: apply until an error or a cancellation.
        settings: limits, intervals and time-outs. None: Settings.from_environment().

    Raises:
        TypeError: `publications` is a string.
        ValueError: a variable of the environment has a value that is not allowed.
        ConninfoError: the connection string is invalid.
        ConnectionLost: the publisher cannot be reached. Call this function again: it resumes at `target.position`.
        ServerError: the publisher rejects the connection or a command.
        PublisherError: the slot or the stream cannot be used.
        SubscriberError: an error of the target, with its CONTEXT.

    Cancellation: the open transaction is not committed. The publisher sends it again.
    """
    settings = Settings.from_environment() if settings is None else settings
    publisher = await Publisher.connect(await resolve_dsn(dsn), application_name=slot, client_encoding="UTF8")
    try:
        if await publisher.slot(slot) is None:
            await publisher.create_slot(slot, snapshot="nothing")
        settings = limit_status_interval(settings, await read_sender_timeout(publisher))
        options = StreamOptions(publications=names(publications))
        on_notice = NoticeLog(settings.notices_per_minute)
        hooks = ApplyUntil(until)
        hooks.own_tables = await publisher.own_tables()
        stream = await ReplicationStream.start(publisher, slot, target.position, options, on_notice=on_notice)
        await ApplyLoop(stream, target, target.position, hooks=hooks, settings=settings).run()
        stream.send_status(target.position, target.position, target.position)
        await stream.stop()
    finally:
        publisher.session.abort()
