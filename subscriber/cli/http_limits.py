"""Limits of the HTTP server, so that its clients cannot stop replication, nor a monitor's request for /health.

Purpose. Launcher and HTTP server share one process and its file descriptors. A client can open connections and send
nothing, send half of a request, or not read the response.

Invariants.

- The number of connections has a limit, which is far below the number of file descriptors. The limit is applied when
  the requests that new connections have sent are read: TURNS turns of the event loop later, in each of which at most
  BACKLOG connections are accepted. Connections beyond that are dropped immediately.
- A new connection beyond the limit takes the place of the one that has been without a request for the longest time. So
  a client that sends its request immediately is served while others send nothing. If all connections have a request,
- Each state of a connection has a time-out: without a complete request, with a request, while the client does not read.
- Requests have a lower limit than connections, which those for MONITORED do not count for.

Source: H11Protocol in uvicorn/protocols/http/h11_impl.py, whose limit_concurrency refuses requests and no connections.
"""

from __future__ import annotations

import asyncio
import resource
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import anyio
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from subscriber import telemetry
from subscriber.settings import Settings

BACKLOG = 8
TURNS = 4
MONITORED = ("/health", "/metrics")
FOR_MONITORED = 8  # connections and requests beyond the limit of the others
STREAMS = ("/events",)  # which have a time-out of their own
LARGEST_SHARE = 4  # the connections may use this part of all file descriptors
SWEEP_INTERVAL = 1.0  # seconds
LOG_INTERVAL = 60.0  # seconds


@dataclass(frozen=True, slots=True)
class _State:
    """The state of a connection, and the time since which it has it.

    Attributes:
        request: the last request. None: there was none.
        has_request: the request has not been answered.
        is_closing: the connection ends when the client has read the answer.
        unread: bytes that the client has not read.
        since: the time of the last change.
    """

    request: object = None
    has_request: bool = False
    is_closing: bool = False
    unread: int = 0
    since: float = field(default_factory=monotonic)


class Connections:
    """The connections of a server. connection_made() of _LimitedProtocol adds them."""

    def __init__(self, settings: Settings) -> None:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = settings.http_max_connections + FOR_MONITORED
        self._most = most if descriptors == resource.RLIM_INFINITY else max(1, min(most, descriptors // LARGEST_SHARE))
        self._idle_timeout = settings.http_idle_timeout
        self._request_timeout = settings.http_request_timeout
        self._states: dict[H11Protocol, _State] = {}
        self._is_shrinking = False
        self._logged = -LOG_INTERVAL

    def protocol(self, **arguments: Any) -> H11Protocol:
        """Create the protocol of a connection, with uvicorn's arguments."""
        return _LimitedProtocol(self, **arguments)

    def add(self, connection: H11Protocol) -> None:
        """Add a new connection. Drops another one, or this one, if there are too many."""
        self._states[connection] = _State()
        if len(self._states) > self._most + TURNS * BACKLOG:
            self._drop(connection)
        elif len(self._states) > self._most and not self._is_shrinking:
            self._is_shrinking = True
            self._shrink(TURNS)

    def remove(self, connection: H11Protocol) -> None:
        """Forget a connection that has ended."""
        self._states.pop(connection, None)

    async def run(self) -> None:
        """Drop connections whose time is over, until cancelled."""
        while True:
            await anyio.sleep(SWEEP_INTERVAL)
            self._renew()
            now = monotonic()
            for connection, state in list(self._states.items()):
                if now - state.since > self._timeout(connection, state):
                    self._drop(connection)

    def _shrink(self, turns: int) -> None:
        """Drop connections beyond the limit after this number of turns of the event loop."""
        if turns:
            asyncio.get_running_loop().call_soon(self._shrink, turns - 1)
            return
        self._is_shrinking = False
        self._log()
        self._renew()
        oldest = sorted(self._states, key=lambda found: (self._states[found].has_request, self._states[found].since))
        for connection in oldest[: max(0, len(oldest) - self._most)]:
            self._drop(connection)

    def _timeout(self, connection: H11Protocol, state: _State) -> float:
        if not state.has_request or state.is_closing:
            return self._idle_timeout
        is_stream = connection.scope["path"] in STREAMS
        return float("inf") if is_stream and not state.unread else self._request_timeout

    def _renew(self) -> None:
        for connection, state in list(self._states.items()):
            request: Any = connection.cycle
            has_request = request is not None and not request.response_complete
            is_closing = connection.transport.is_closing()
            unread = connection.transport.get_write_buffer_size()
            same = (request, has_request, is_closing) == (state.request, state.has_request, state.is_closing)
            has_changed = not same or (has_request and connection.scope["path"] in STREAMS and unread != state.unread)
            since = monotonic() if has_changed else state.since
            self._states[connection] = _State(request, has_request, is_closing, unread, since)

    def _drop(self, connection: H11Protocol) -> None:
        del self._states[connection]
        connection.transport.abort()

    def _log(self) -> None:
        if monotonic() - self._logged >= LOG_INTERVAL:
            self._logged = monotonic()
            telemetry.log(
                telemetry.WARNING,
                f"more than {self._most} connections to the HTTP server: connections without a request are dropped",
                hint="The setting http_max_connections limits them.",
                event="http.full",
            )


class _LimitedProtocol(H11Protocol):
    """uvicorn's protocol, with a limit of connections."""

    def __init__(self, connections: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._all = connections

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._all.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.remove(self)
        super().connection_lost(exc)


class RequestLimit:
    """ASGI middleware that answers at most `most` requests at a time, and those for MONITORED in addition."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = {False: most, True: FOR_MONITORED}
        self._open = {False: 0, True: 0}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_monitored = scope["path"] in MONITORED
        if self._open[is_monitored] >= self._most[is_monitored]:
            await PlainTextResponse("too many requests at the same time\n", 503)(scope, receive, send)
            return
        self._open[is_monitored] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open[is_monitored] -= 1
