"""SlotSource: a replication slot of a publisher, which it finds or creates, and the connections that stream from it.

Purpose. `create` says what SlotSource does with the slot:

    never       the slot must exist
    missing     create the slot if it does not exist
    replace     drop an existing slot of this name, and create a new one
    temporary   create a slot that ends with its connection; the stream cannot be resumed

A created slot exports a snapshot, which is valid until the stream starts. The tables as of the snapshot and the stream
are together all data, with each change once.

Failure cases.

- Process ends after the slot was created, before the program has read the snapshot: the next start finds the slot and
  has no snapshot. So a program that copies tables first stores a mark with the copy when it is complete. If the mark is
  missing, the program starts again with `replace`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from subscriber import server_features as features
from subscriber.change_stream.options import ChangeStreamOptions, stream_folder
from subscriber.change_stream.types.catalog import look_up
from subscriber.change_stream.types.registry import TypeRow
from subscriber.connection.conninfo import Conninfo
from subscriber.connection.dsn import Dsn, resolve_dsn
from subscriber.display import sql_literal
from subscriber.errors import ConnectionLost, PublisherError
from subscriber.lsn import Lsn
from subscriber.publisher.commands import StreamOptions, negotiated_streaming
from subscriber.publisher.connection import Publisher
from subscriber.publisher.feedback import read_sender_timeout
from subscriber.publisher.notices import NoticeLog
from subscriber.publisher.publications import check_publications
from subscriber.publisher.replication_stream import (
    ReplicationStream,
    check_publisher,
)
from subscriber.publisher.timelines import check_history, read_history
from subscriber.remedy import Remedy
from subscriber.settings import DEFAULTS, Settings
from subscriber.sqlstate import FEATURE_NOT_SUPPORTED, UNDEFINED_OBJECT
from subscriber.timeline_history import TimelineHistory

Create = Literal["never", "missing", "replace", "temporary"]

_READ_AGAIN = "The program has received changes that the publisher has lost. Start again with create='replace'."

# (attribute of StreamOptions, first server version that supports it); other options are ignored by older versions
_SINCE = (("messages", features.DECODED_MESSAGES), ("two_phase", features.TWO_PHASE_DECODING))


class SlotSource:
    """A source of connections for ReconnectingStream. open() creates it, see the top of the file.

    Attributes:
        slot: the name of the slot.
        options: the options of START_REPLICATION.
        position: transactions that were committed before it are skipped. 0: the slot decides.
        snapshot: the exported snapshot of a created slot, until the stream starts. Otherwise None.
        can_reconnect: False for a temporary slot.
        history: the publisher's timelines as of the last connection. None: not known, because a standby can change them
            while it streams.
        server_version: the publisher's server_version_num.
    """

    def __init__(
        self,
        conninfo: Conninfo,
        slot: str,
        options: StreamOptions,
        start: Lsn,
        name: str,
        settings: Settings = DEFAULTS,
    ) -> None:
        self.slot = slot
        self.options = options
        self.position = start
        self.snapshot: str | None = None
        self.can_reconnect = True
        self.server_version = 0
        self._conninfo = conninfo
        self._name = name
        self._notices = NoticeLog(settings.notices_per_minute, only_warnings=True)
        self._system_id: int | None = None
        self.history: TimelineHistory | None = None
        self._publisher: Publisher | None = None  # connected, and not streaming yet

    @classmethod
    async def open(
        cls,
        source: Dsn,
        options: ChangeStreamOptions,
    ) -> SlotSource:
        """Connect, check the server version, publications and slot, and create the slot if `options.create` says so.

        Args:
            source: the connection string of the publisher.
            options: the options of stream(). Without `slot` a temporary slot is created.

        Raises:
            ConninfoError: the connection string is invalid.
            ConnectionLost: the publisher cannot be reached.
            ServerError: the publisher rejects the connection or a command.
            PublisherError: the slot or a publication does not exist, or the publisher is too old for an option.

        Cancellation: the connection is dropped. A slot that was created remains, except for a temporary one.
        """
        create: Create = "temporary" if options.slot is None else options.create
        opened = cls(
            await resolve_dsn(source),
            options.slot or f"subscriber_stream_{secrets.token_hex(6)}",
            options.for_publisher(),
            options.start,
            options.application_name or options.slot or "subscriber stream",
            options.settings,
        )
        opened.can_reconnect = create != "temporary"
        publisher = await opened._connect()
        try:
            opened.server_version = publisher.server_version
            opened._check_version()
            await check_publications(publisher, options.publications)
            await opened._find_slot(publisher, create, failover=options.failover)
        except BaseException:
            publisher.session.abort()
            raise
        opened._publisher = publisher
        return opened

    @property
    def spool_folder(self) -> Path:
        """The default folder of stored transactions, in the system's temporary folder."""
        return stream_folder(self._conninfo, self.slot)

    @property
    def parallel(self) -> bool:
        """True if STREAM ABORT messages have the position and the time of the abort."""
        return negotiated_streaming(self.options, self.server_version) == "parallel"

    async def start(self, position: Lsn) -> tuple[ReplicationStream, float]:
        """Start streaming from `position`, or from the requested start position if that is greater.

        The first call uses the connection of open(). Later calls connect, and check that the publisher is the same.

        Returns:
            The stream, and the publisher's wal_sender_timeout in seconds; 0: it has none.

        Raises:
            ConnectionLost: the publisher cannot be reached, or a temporary slot was lost with its connection.
            ServerError: the publisher rejects the connection or a command.
            PublisherError: another cluster answers, or one without the requested position; or the slot is unusable.

        Cancellation: the connection is dropped.
        """
        publisher, self._publisher = self._publisher, None
        if publisher is None or publisher.session.error is not None:
            if not self.can_reconnect:
                raise ConnectionLost("the connection is lost, and the temporary slot with it")
            publisher = await self._connect()
        try:
            identity = await publisher.identify_system()
            check_publisher(identity, self._system_id, position)
            history = await read_history(publisher, identity)
            check_history(history, self.history, position, in_recovery=identity.in_recovery, hint=_READ_AGAIN)
            self._system_id = identity.systemid
            # A standby may change its timeline while it streams.
            self.history = None if identity.in_recovery else history
            timeout = await read_sender_timeout(publisher)
            start = max(position, self.position)
            stream = await ReplicationStream.start(
                publisher, self.slot, start, self.options, on_notice=self._notices, without_own_messages=True
            )
        except BaseException:
            publisher.session.abort()
            raise
        self.snapshot = None
        return stream, timeout

    async def types(self, oids: Iterable[int], known: Iterable[int]) -> list[TypeRow]:
        """Read types, and the types that they contain, from the publisher's catalog, except for `known` ones."""
        return await look_up(self._conninfo, oids, known)

    def request_text(self) -> None:
        """Request values as text from the next start() on, because a type has no binary format."""
        self.options = replace(self.options, binary=False)

    def close(self) -> None:
        """Drop the connection of a stream that was never started."""
        if self._publisher is not None:
            self._publisher.session.abort()

    async def _connect(self) -> Publisher:
        return await Publisher.connect(self._conninfo, application_name=self._name, timezone="UTC")

    def _check_version(self) -> None:
        for option, feature in _SINCE:
            if getattr(self.options, option) and not feature.is_in(self.server_version):
                raise PublisherError(
                    f"the publisher is too old for {option}",
                    detail=f"It has version {self.server_version // 10000}; {feature.since} is needed.",
                    sqlstate=FEATURE_NOT_SUPPORTED,
                )

    async def _find_slot(self, publisher: Publisher, create: Create, *, failover: bool) -> None:
        if create in ("never", "missing") and await publisher.slot(self.slot) is not None:
            return
        if create == "never":
            raise PublisherError(
                f'replication slot "{self.slot}" does not exist on the publisher',
                hint=Remedy(
                    'give create="missing" to have it made, or create it there',
                    f"SELECT pg_create_logical_replication_slot({sql_literal(self.slot)}, 'pgoutput');",
                ),
                sqlstate=UNDEFINED_OBJECT,
            )
        if create == "replace":
            await publisher.drop_slot(self.slot, missing_ok=True)
        created = await publisher.create_slot(
            self.slot,
            snapshot="export",
            two_phase=self.options.two_phase,
            failover=failover,
            temporary=create == "temporary",
        )
        self.snapshot = created.snapshot_name
        self.position = max(self.position, created.consistent_point)
