"""A slot of a real publisher: found or made, and streamed from as often as it takes.

    create      what happens to the slot
    never       it has to be there
    missing     made when it is not there
    replace     made anew; one of that name is dropped
    temporary   made for this connection, and gone with it; nothing can be gone on with afterwards

A slot that was made comes with an exported snapshot: what is read in it and the stream that follows are
together everything, each once. It holds until the stream starts.

Kill point: between making a slot and the end of reading the snapshot. The next start finds the slot and has
no snapshot, so whoever reads tables first has to remember, with what he read, whether he came to the end; if
he did not, `replace` begins again.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from subscriber import telemetry
from subscriber.change_stream.options import ChangeStreamOptions
from subscriber.change_stream.types.catalog import look_up
from subscriber.change_stream.types.registry import TypeRow
from subscriber.connection.conninfo import Conninfo
from subscriber.display import sql_literal
from subscriber.errors import ConnectionLost, PublisherError
from subscriber.lsn import Lsn
from subscriber.publisher.commands import StreamOptions, negotiated_streaming
from subscriber.publisher.connection import Publisher
from subscriber.publisher.feedback import read_sender_timeout
from subscriber.publisher.replication_stream import (
    ReplicationStream,
    check_publications,
    check_publisher,
    check_timeline,
)
from subscriber.sqlstate import FEATURE_NOT_SUPPORTED, UNDEFINED_OBJECT

Create = Literal["never", "missing", "replace", "temporary"]

# What the options need: attribute of StreamOptions, server version.
_SINCE = (("messages", 140000), ("two_phase", 150000))


class SlotSource:
    """See the top of the file. Made by open()."""

    def __init__(self, conninfo: Conninfo, slot: str, options: StreamOptions, start: Lsn, name: str) -> None:
        self.slot = slot
        self.options = options
        self.position = start  # below it nothing is wanted
        self.snapshot: str | None = None  # of a slot that was made, until the stream starts
        self.can_reconnect = True
        self.server_version = 0
        self._conninfo = conninfo
        self._name = name
        self._system_id: int | None = None
        self._timeline: int | None = None
        self._publisher: Publisher | None = None  # connected, and not streaming yet

    @classmethod
    async def open(
        cls,
        source: str,
        options: ChangeStreamOptions,
    ) -> SlotSource:
        """Connect, check what can be checked, and make the slot if that is asked for.

        Raises ConninfoError, ConnectionLost, ServerError; PublisherError for what is not there.
        """
        create: Create = "temporary" if options.slot is None else options.create
        found = cls(
            Conninfo.parse(source),
            options.slot or f"subscriber_stream_{secrets.token_hex(6)}",
            options.for_publisher(),
            options.start,
            options.application_name or options.slot or "subscriber stream",
        )
        found.can_reconnect = create != "temporary"
        publisher = await found._connect()
        try:
            found.server_version = publisher.server_version
            found._check_version()
            await check_publications(publisher, options.publications)
            await found._find_slot(publisher, create, failover=options.failover)
        except BaseException:
            publisher.session.abort()
            raise
        found._publisher = publisher
        return found

    @property
    def spool_folder(self) -> Path:
        """In the system's temporary folder, and the same for the next process that streams from this slot.

        So that it removes what a killed one left. Two at once cannot be: a slot is streamed from by one.
        """
        place = f"{self._conninfo.get('host')}:{self._conninfo.get('port')}/{self._conninfo.get('dbname')}/{self.slot}"
        digest = hashlib.sha256(place.encode()).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"subscriber-stream-{os.geteuid()}-{digest}"

    @property
    def parallel(self) -> bool:
        """Whether STREAM ABORT tells when and where."""
        return negotiated_streaming(self.options, self.server_version) == "parallel"

    async def start(self, position: Lsn) -> tuple[ReplicationStream, float]:
        """Stream from `position`, or from where the caller of open() wanted to if that is further."""
        publisher, self._publisher = self._publisher, None
        if publisher is None or publisher.session.error is not None:
            if not self.can_reconnect:
                raise ConnectionLost("the connection is lost, and the temporary slot with it")
            publisher = await self._connect()
        try:
            identity = await publisher.identify_system()
            check_publisher(identity, self._system_id, position)
            await check_timeline(publisher, identity, self._timeline, position)
            self._system_id, self._timeline = identity.systemid, identity.timeline
            timeout = await read_sender_timeout(publisher)
            start = max(position, self.position)
            stream = await ReplicationStream.start(
                publisher, self.slot, start, self.options, on_notice=_log_notice, without_own=True
            )
        except BaseException:
            publisher.session.abort()
            raise
        self.snapshot = None
        return stream, timeout

    async def types(self, oids: Iterable[int], known: Iterable[int]) -> list[TypeRow]:
        """What the catalog says of types and of what they are made of, as far as that is not `known`."""
        return await look_up(self._conninfo, oids, known)

    def close(self) -> None:
        """Drop the connection of a stream that was never started."""
        if self._publisher is not None:
            self._publisher.session.abort()

    async def _connect(self) -> Publisher:
        return await Publisher.connect(self._conninfo, application_name=self._name, timezone="UTC")

    def _check_version(self) -> None:
        for option, since in _SINCE:
            if getattr(self.options, option) and self.server_version < since:
                raise PublisherError(
                    f"the publisher is too old for {option}",
                    detail=f"It has version {self.server_version // 10000}; {since // 10000} is needed.",
                    sqlstate=FEATURE_NOT_SUPPORTED,
                )

    async def _find_slot(self, publisher: Publisher, create: Create, *, failover: bool) -> None:
        if create in ("never", "missing") and await publisher.slot(self.slot) is not None:
            return
        if create == "never":
            raise PublisherError(
                f'replication slot "{self.slot}" does not exist on the publisher',
                hint='Give create="missing" to have it made, or create it there: '
                f"SELECT pg_create_logical_replication_slot({sql_literal(self.slot)}, 'pgoutput')",
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


def _log_notice(fields: dict[str, str]) -> None:
    if fields.get("V", fields.get("S")) == "WARNING":
        telemetry.log(telemetry.WARNING, fields.get("M", ""), detail=fields.get("D"), event="publisher.warning")
