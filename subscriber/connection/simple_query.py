"""Who gets a session's messages until ReadyForQuery: the contract, and the simple query as one of two.

The other one is the pipeline (pipeline.py).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from subscriber.errors import ServerError, SubscriberError
from subscriber.protocol import frontend
from subscriber.protocol.encodings import decode


class Conversation(Protocol):
    """Who gets the server's messages until ReadyForQuery."""

    @property
    def idle(self) -> bool:
        """True if no answer is outstanding, so that another query may be sent."""

    def received(self, kind: str, body: bytes) -> None: ...
    def lost(self, error: SubscriberError) -> None: ...


@dataclass(slots=True)
class Result:
    """The result of one statement of a simple query. NULL is None; values are in text format."""

    tag: str = ""  # the command tag, as "INSERT 0 1"
    columns: tuple[str, ...] = ()
    rows: list[tuple[str | None, ...]] = field(default_factory=list)


class Query:
    """The conversation of a simple query, until ReadyForQuery."""

    def __init__(self, loop: asyncio.AbstractEventLoop, codec: str) -> None:
        """`codec` is that of the session."""
        self.results: list[Result] = []
        self.error: ServerError | None = None
        self.copy_ended = False
        self.ready: asyncio.Future[None] = loop.create_future()
        self.copying: asyncio.Future[None] = loop.create_future()
        self._codec = codec
        self._current = Result()

    @property
    def idle(self) -> bool:
        return self.ready.done()

    def received(self, kind: str, body: bytes) -> None:
        match kind:
            case "T":
                self._current.columns = frontend.read_columns(body, self._codec)
            case "D":
                self._current.rows.append(frontend.read_row(body, self._codec))
            case "C":
                self._current.tag = decode(body[:-1])
                # A publisher that shuts down ends the stream with this alone, without CopyDone.
                self.copy_ended = True
                self._complete()
            case "I":
                self._complete()
            case "G" | "H" | "W":
                if not self.copying.done():
                    self.copying.set_result(None)
            case "c":
                self.copy_ended = True
            case "E":
                self.error = ServerError(frontend.read_fields(body, self._codec))
            case "Z":
                self._finish(self.error)

    def _complete(self) -> None:
        self.results.append(self._current)
        self._current = Result()

    def lost(self, error: SubscriberError) -> None:
        self._finish(error)

    def _finish(self, error: SubscriberError | None) -> None:
        for future in (self.copying, self.ready):
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
                future.exception()  # mark it as retrieved: possibly no task awaits this future
