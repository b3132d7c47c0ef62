"""The stream of changes from one slot.

    stream = await ReplicationStream.start(publisher, "s", Lsn(0), StreamOptions(("p",)))
    while True:
        for frame in await stream.receive():   # whole CopyData payloads, see protocol/copy_data.py
            …
        stream.send_status(write, flush, apply)

A walsender serves one stream: afterwards the session is closed, and a retry has to reconnect. The error decides whether
a retry makes sense:

    SlotLost            the slot is missing or invalidated: permanent
    PublisherReplaced   another cluster, or one that lacks WAL we have received: permanent until repaired
    PublisherError      the slot belongs to another database
    BinaryRefused       a type without a binary format, in a stream in binary
    ServerError         any other error of the server, with its SQLSTATE; 55006 (slot in use) is one
    ConnectionLost      the connection broke, or the server is a standby with a synchronized copy of the slot;
                        EndOfStream if the server ended the stream itself
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import anyio

from subscriber.connection.session import Session
from subscriber.display import sql_literal
from subscriber.errors import (
    BinaryRefused,
    ConnectionLost,
    EndOfStream,
    PublisherError,
    PublisherReplaced,
    ServerError,
    SlotLost,
    SubscriberError,
    TargetBehind,
)
from subscriber.lsn import Lsn
from subscriber.protocol import copy_data
from subscriber.publisher import commands
from subscriber.publisher.commands import StreamOptions
from subscriber.publisher.connection import Publisher, SlotInfo, SystemIdentity, prefixed
from subscriber.publisher.own_schema import OwnMessageFilter
from subscriber.remedy import Remedy
from subscriber.settings import DEFAULTS
from subscriber.sqlstate import OBJECT_NOT_IN_PREREQUISITE_STATE, UNDEFINED_FILE, UNDEFINED_FUNCTION, UNDEFINED_OBJECT
from subscriber.timestamps import from_unix

_COPY_AGAIN = Remedy(
    "drop the subscription and create it again with a fresh copy of its tables; "
    "what was committed on the publisher since the last confirmed position may be missing on the target."
)
_STANDBY = (
    "Replication resumes when this standby is promoted. A connection string with all servers and "
    "target_session_attrs=read-write finds the primary."
)
NO_PUBLICATION = Remedy(
    "the publisher looks for the publication as of each change. If it is created again, it is found for later changes "
    "only, and this one remains an error."
)


class ReplicationStream:
    """A started stream; see the top of the file. One task may receive while another sends."""

    def __init__(
        self, session: Session, slot: str, own: OwnMessageFilter | None = None, *, binary: bool = False
    ) -> None:
        self.session = session
        self._binary = binary
        self.slot = slot
        self._own = own

    @classmethod
    async def start(
        cls,
        publisher: Publisher,
        slot: str,
        start: Lsn,
        options: StreamOptions,
        *,
        on_notice: Callable[[dict[str, str]], None] | None = None,
        without_own_messages: bool = False,
        failover: bool = False,
    ) -> ReplicationStream:
        """Start streaming from `slot` at `start`. The stream owns the publisher's session from then on.

        After an error the caller still owns the session, and may query the publisher or close it.

        Args:
            publisher: session for the slot's database.
            slot: name of the slot.
            start: transactions whose commit record lies below this position are not sent. 0: the slot decides.
            options: protocol options of the stream.
            on_notice: called with the fields of each NOTICE or WARNING that arrives between changes.
            without_own_messages: remove messages of the program itself (own_schema.py). Apply workers request none.
            failover: the slot is a failover slot. Hints mention its synchronization.

        Raises:
            SubscriberError: one of the errors at the top of this file.
        """
        session = publisher.session
        session.on_notice = on_notice
        own = OwnMessageFilter() if without_own_messages else None
        command = commands.start_replication(slot, start, options, publisher.server_version)
        try:
            await session.start_copy_both(command)
        except ServerError as error:
            if error.sqlstate != OBJECT_NOT_IN_PREREQUISITE_STATE or session.error is not None:
                raise start_error(error, slot, None, failover=failover) from error
            info = await publisher.slot(slot)  # identifies the cause without parsing a translated message
            raise start_error(error, slot, info, in_recovery=publisher.in_recovery, failover=failover) from error
        return cls(session, slot, own, binary=options.binary)

    async def receive(self) -> list[bytes]:
        """The CopyData payloads that have arrived, in order, at least one. Safe to cancel."""
        try:
            frames = await self.session.receive()
            while self._own is not None and not (frames := self._own.filter(frames)):
                frames = await self.session.receive()
            return frames
        except EndOfStream:
            raise
        except ServerError as error:
            raise stream_error(error, binary=self._binary) from error
        except ConnectionLost as error:
            raise ConnectionLost(f"could not receive data from WAL stream: {error.message}") from error

    def send_status(
        self, write: Lsn, flush: Lsn, apply: Lsn, *, reply_requested: bool = False, now: int | None = None
    ) -> None:
        """Report our positions to the publisher; each means "everything before this position".

        Never blocks: the transport keeps the bytes that the network does not accept.

        Args:
            write: received.
            flush: durable in the target; the publisher may discard the WAL before it.
            apply: visible in the target.
            reply_requested: request a keepalive.
            now: microseconds since 2000-01-01. None: the current time.
        """
        at = from_unix(time.time_ns() // 1000) if now is None else now
        status = copy_data.StandbyStatus(write, flush, apply, at, reply_requested)
        try:
            self.session.send_copy_data(copy_data.encode(status))
        except EndOfStream:
            raise
        except ConnectionLost as error:
            raise ConnectionLost(f"could not send data to WAL stream: {error.message}") from error

    async def stop(self, *, timeout: float = DEFAULTS.stream_stop_timeout) -> bool:
        """End the stream and the session; whether the publisher agreed within `timeout` seconds.

        In the middle of a transaction it sends that to its end first; when that takes too long the
        connection is simply dropped, which loses nothing: progress is on the target and in the slot.
        """
        agreed = False
        try:
            # A ConnectionLost or ServerError here only says that there is nothing left to end.
            with anyio.move_on_after(timeout), suppress(SubscriberError):
                await self.session.finish_copy_both()
                agreed = self.session.error is None
        finally:
            if not agreed:
                self.session.abort()
            with anyio.CancelScope(shield=True):
                await self.session.close()
        return agreed


def start_error(
    error: ServerError, slot: str, info: SlotInfo | None, *, in_recovery: bool = False, failover: bool = False
) -> SubscriberError:
    """Convert an error of START_REPLICATION.

    Args:
        error: the error.
        slot: the name of the slot.
        info: the slot's row. None: it was not queried.
        in_recovery: the publisher is a standby.
        failover: the slot is a failover slot.
    """
    text = prefixed(error, "could not start WAL streaming")
    if error.sqlstate == UNDEFINED_OBJECT:
        return _lost(text, _not_synchronized(slot) if failover else _COPY_AGAIN)
    if error.sqlstate == OBJECT_NOT_IN_PREREQUISITE_STATE and info is not None:
        if info.synced and in_recovery:
            return ConnectionLost(text.message, detail=error.detail, hint=_STANDBY, sqlstate=error.sqlstate)
        if info.is_lost:
            return _lost(text, _not_synchronized(slot, lost=True) if failover else _COPY_AGAIN)
        if not info.in_this_database:
            return PublisherError(
                text.message,
                detail=f'The slot belongs to database "{info.database}".'
                if info.database
                else "It is a physical slot.",
                hint="Correct the subscription's connection or its slot_name.",
                sqlstate=error.sqlstate,
            )
    return text


def stream_error(error: ServerError, *, binary: bool = False) -> SubscriberError:
    """Return the explained error of a stream. `binary`: the stream has values in binary format."""
    text = prefixed(error, "could not receive data from WAL stream")
    if error.sqlstate == UNDEFINED_FILE:  # the WAL that the slot needs is not there any more
        return _lost(text, _COPY_AGAIN)
    if binary and error.sqlstate == UNDEFINED_FUNCTION:
        return BinaryRefused(text.fields, error.message)
    if error.sqlstate == UNDEFINED_OBJECT:  # a publication, before 18
        text.amend(hint=NO_PUBLICATION)
    return text


def _lost(error: ServerError, hint: Remedy) -> SlotLost:
    return SlotLost(error.message, detail=error.detail, hint=hint, sqlstate=error.sqlstate)


def _not_synchronized(slot: str, *, lost: bool = False) -> Remedy:
    """Return the hint for a failover slot that does not exist, or has been invalidated (`lost`)."""
    name = sql_literal(slot)
    drop = f"SELECT pg_drop_replication_slot({name}); " if lost else ""
    return Remedy(
        "drop the subscription and create it again with a fresh copy of its tables: a standby that is promoted before "
        "the slot has been synchronized to it has no usable slot.",
        alternative=Remedy(
            "continue without the changes since the last confirmed position: on the publisher",
            f"{drop}SELECT pg_create_logical_replication_slot({name}, 'pgoutput', failover => true);",
            then=Remedy(
                f"ALTER SUBSCRIPTION … SET (slot_name = {name}), and subscriber verify lists the rows that differ."
            ),
        ),
    )


def check_primary(identity: SystemIdentity, *, failover: bool) -> None:
    """Refuse a standby, on which a failover slot cannot be read. Raises ConnectionLost, because it may be promoted."""
    if failover and identity.in_recovery:
        raise ConnectionLost(
            "the publisher is a standby that is not promoted",
            detail="A failover slot can be read from on the primary only.",
            hint=_STANDBY,
        )


def check_publisher(identity: SystemIdentity, known_system_id: int | None, position: Lsn) -> None:
    """Refuse a server that cannot be the one our progress is about. timelines.py finds what positions do not show.

    Args:
        identity: the server.
        known_system_id: the publisher's as remembered with the progress, None before there is any.
        position: that progress, 0 when there is none.

    Raises:
        PublisherReplaced: another cluster answers, or one without the position.
        ConnectionLost: the server is a standby that has not replayed far enough yet.
    """
    check_system(identity, known_system_id)
    check_position(identity, position)


def check_system(identity: SystemIdentity, known_system_id: int | None) -> None:
    """Raise PublisherReplaced if the server belongs to another cluster. None: the cluster is not known yet."""
    if known_system_id is not None and identity.systemid != known_system_id:
        raise PublisherReplaced(
            "the publisher is another database cluster than before",
            detail=f"The subscription's progress is about the system with identifier {known_system_id}; "
            f"the connection leads to {identity.systemid}.",
            hint=Remedy(
                "correct the subscription's connection.",
                alternative=Remedy("drop the subscription and create it again with a fresh copy of its tables."),
            ),
        )


def check_position(identity: SystemIdentity, position: Lsn) -> None:
    """Refuse a server whose WAL ends before `position`. Raises as check_publisher()."""
    if position <= identity.position:
        return
    detail = (
        f"Changes up to {position} were applied; the publisher's write-ahead log ends at {identity.position} "
        f"(timeline {identity.timeline})."
    )
    if identity.in_recovery:
        raise ConnectionLost("the publisher, a standby, is behind the subscription", detail=detail)
    raise PublisherReplaced(
        "the publisher is behind the subscription",
        detail=detail,
        hint=Remedy(
            "drop the subscription and create it again with a fresh copy of its tables: the publisher was restored "
            "from a backup, or is a standby that was promoted before it had everything."
        ),
    )


def target_behind(slot: str, confirmed: Lsn, recorded: Lsn) -> TargetBehind:
    """Return the error for a slot that is confirmed beyond the target's records."""
    return TargetBehind(
        f'the target is behind replication slot "{slot}"',
        detail=f"The slot was confirmed up to {confirmed}, but the target knows of nothing after {recorded}.",
        hint=Remedy(
            "drop the subscription and create it again with a fresh copy of its tables: the target was restored from "
            "a backup, or is a standby that was promoted before it had everything.",
            alternative=Remedy(
                f"continue without the changes in between: ALTER SUBSCRIPTION … SET (slot_name = {sql_literal(slot)})."
            ),
        ),
    )
