"""The options of stream() and consume(), checked and in one object, and what apply_to() shares with them."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from subscriber.connection.conninfo import Conninfo
from subscriber.lsn import Lsn
from subscriber.publisher.commands import StreamOptions
from subscriber.settings import DEFAULTS, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeStreamOptions:
    """The options of one change stream; api.stream() documents them.

    Raises:
        ValueError: an option has a value that is not one of its choices.
    """

    publications: tuple[str, ...] = ()
    slot: str | None = None
    create: Literal["never", "missing", "replace"] = "never"
    start: Lsn = Lsn(0)
    until: Lsn | None = None
    binary: bool = False
    messages: bool = False
    two_phase: bool = False
    origin: Literal["any", "none"] = "any"
    streaming: Literal["off", "on", "parallel"] = "on"
    in_progress: Literal["spool", "blocks"] = "spool"
    # (xid, gid) of a prepared transaction -> True to deliver it at its COMMIT PREPARED, and not when it is prepared
    hold: Callable[[int, str], bool] | None = None
    spool_folder: Path | None = None
    spool_limit: int | None = None
    failover: bool = False
    application_name: str | None = None
    settings: Settings = DEFAULTS

    def __post_init__(self) -> None:
        check_choice("streaming", self.streaming, "off", "on", "parallel")
        check_choice("in_progress", self.in_progress, "spool", "blocks")
        check_choice("origin", self.origin, "any", "none")
        check_choice("create", self.create, "never", "missing", "replace")

    def for_publisher(self) -> StreamOptions:
        """Return the options of START_REPLICATION."""
        return StreamOptions(
            self.publications,
            binary=self.binary,
            streaming=self.streaming,
            two_phase=self.two_phase,
            origin="none" if self.origin == "none" else None,
            messages=self.messages,
        )


def combine_settings(settings: Settings | None, memory: int | None, stop_timeout: float | None) -> Settings:
    """Return the settings of a call to stream() or consume().

    Args:
        settings: None: the settings of the environment.
        memory: bytes, replaces `receive_queue_size`. None: no replacement.
        stop_timeout: seconds, replaces `stream_stop_timeout`. None: no replacement.
    """
    settings = Settings.from_environment() if settings is None else settings
    if memory is not None:
        settings = replace(settings, receive_queue_size=memory)
    if stop_timeout is not None:
        settings = replace(settings, stream_stop_timeout=stop_timeout)
    return settings


def names(publications: Sequence[str]) -> tuple[str, ...]:
    """Return the publications of a call as a tuple.

    Raises:
        TypeError: `publications` is a string. As a sequence it would be a name for each letter.
    """
    if isinstance(publications, str | bytes):
        raise TypeError(f"publications is a sequence of names: publications=[{publications!r}]")
    return tuple(publications)


def stream_folder(conninfo: Conninfo, slot: str, parent: Path | None = None) -> Path:
    """Return the default folder of the transactions of a slot that are stored until they commit.

    It is the same for each process that streams from this slot, so the next process removes the files of a killed one.
    Two processes cannot use it at the same time, because a slot serves one connection at a time.

    Args:
        conninfo: the connection string of the publisher.
        slot: the name of the slot.
        parent: the folder around it. None: the system's temporary folder.
    """
    place = f"{conninfo.get('host')}:{conninfo.get('port')}/{conninfo.get('dbname')}/{slot}"
    digest = hashlib.sha256(place.encode()).hexdigest()[:16]
    return (parent or Path(tempfile.gettempdir())) / f"subscriber-stream-{os.geteuid()}-{digest}"


def check_choice(name: str, value: str, *choices: str) -> None:
    """Raise ValueError if `value` is not one of `choices`."""
    if value not in choices:
        allowed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} is {value!r}, and must be one of {allowed}")
