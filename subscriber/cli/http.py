"""`subscriber run --http`: serve the status over HTTP, without delaying the launcher.

    /metrics      metrics for Prometheus; if the target is down, subscriber_target_up 0 and no other metric
    /health       200 if `subscriber status` would exit 0, else 503, with the reasons as JSON
    /status.json  `subscriber status --json`; 503 with the error if the target does not answer
    /             a page for people

Only GET and HEAD requests that name this server as their host are answered, see http_guard.py.

A response shows what `subscriber status` would show. One read of the catalog on a separate connection serves all
requests within `http_max_age`; concurrent requests wait for the same read. The connection is closed before the
publishers are queried, so that neither the workers' sessions nor DROP DATABASE wait for it.

No error leaves serve(). An error that prevents listening is logged once and retried, because replication must not end
when a port is taken. The launcher handles signals. On cancellation, connections are closed rather than drained.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import anyio

from subscriber import telemetry
from subscriber.catalog.connection import CatalogConnection
from subscriber.cli.status import html
from subscriber.cli.status.show import to_json
from subscriber.display import json_text
from subscriber.errors import SubscriberError
from subscriber.redaction import redact
from subscriber.settings import DEFAULTS, Settings
from subscriber.sqlstate import UNDEFINED_FILE
from subscriber.status import collect
from subscriber.status.history import StatusHistory
from subscriber.status.model import StatusSnapshot, SubscriptionStatus
from subscriber.worker.supervision.launcher import Launcher

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, PlainTextResponse, Response
    from starlette.routing import Route

    from subscriber.cli.http_guard import HostGuard, host_name
    from subscriber.cli.status import prometheus
except ModuleNotFoundError as error:
    raise SubscriberError(
        f"{error.name} is not installed",
        hint="Install it with: pip install 'pgsubscriber[status]'",
        sqlstate=UNDEFINED_FILE,
    ) from None

LOCAL = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Address:
    """An address to listen on."""

    host: str
    port: int  # 0: any free port
    names: tuple[str, ...] = ()  # additional hosts that requests may name

    @classmethod
    def parse(cls, text: str, names: Sequence[str] = ()) -> Address:
        """Parse `8000`, `0.0.0.0:8000` or `[::1]:8000`, and the `names` that requests may use for the server as well.

        Raises:
            ValueError: the text is not [HOST:]PORT, or a name is not a host name or an address.
        """
        parts = urlsplit(f"//{text if ':' in text else ':' + text}")
        try:
            port = parts.port
        except ValueError:
            port = None
        if (
            port is None
            or parts.netloc != parts.netloc.rpartition("@")[2]
            or parts.path
            or parts.query
            or parts.fragment
        ):
            raise ValueError(f"{text!r} is not [HOST:]PORT")
        return cls(parts.hostname or LOCAL, port, tuple(map(_answered_name, names)))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _answered_name(text: str) -> str:
    if name := host_name(text) or host_name(f"[{text}]"):
        return name
    raise ValueError(f"{text!r} is not a host name or an address")


async def serve(address: Address, target: str, launcher: Launcher, settings: Settings = DEFAULTS) -> None:
    """Serve the status of the subscriptions of `target` at `address` until cancelled.

    Args:
        launcher: the launcher of this process.
    """
    app = HostGuard(_app(Observer(target, settings), launcher), (address.host, *address.names))
    said = None
    while True:
        try:
            await _serve(address, app, settings.http_max_connections)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error.strerror
            message = f"could not listen on {address}: {reason}"
            if message != said:
                hint = f"The launcher retries every {settings.retry_interval:.0f} s. Replication continues meanwhile."
                telemetry.log(telemetry.ERROR, message, hint=hint, event="http.failed")
            said = message
        except Exception as error:
            telemetry.log_error(error, event="http.failed")
        await anyio.sleep(settings.retry_interval)


# --- collecting the status ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seen:
    """One snapshot of all subscriptions. `look` is None if the target did not answer; `error` has the reason then."""

    look: StatusSnapshot | None = None
    statuses: Sequence[SubscriptionStatus] = ()
    error: str | None = None

    def is_standby(self, launcher: Launcher) -> bool:
        """Return True if a launcher other than `launcher` is active."""
        return self.look is not None and self.look.launcher_pid not in (None, launcher.pid)


class Observer:
    """Takes a snapshot on request, at most once in `http_max_age`."""

    def __init__(self, target: str, settings: Settings = DEFAULTS) -> None:
        self._target = target
        self._max_age = settings.http_max_age
        self._timeout = settings.http_target_timeout
        self._publisher_timeout = settings.status_publisher_timeout
        self._lock = anyio.Lock()
        self._seen = Seen()
        self._history = StatusHistory()
        self._at = -self._max_age  # on the monotonic clock

    async def see(self) -> Seen:
        async with self._lock:
            if monotonic() - self._at >= self._max_age:
                self._seen = await self._collect()
                self._at = monotonic()
            return self._seen

    async def _collect(self) -> Seen:
        try:
            with anyio.fail_after(self._timeout):
                async with CatalogConnection.open(self._target, "subscriber status") as catalog:
                    look = await collect.read_catalog(catalog)
        except TimeoutError:
            return Seen(error=f"no answer within {self._timeout:.0f} s")
        except (SubscriberError, OSError) as error:
            return Seen(error=error.message if isinstance(error, SubscriberError) else redact(str(error)))
        return Seen(look, self._history.add(look, await collect.assess_all(look, timeout=self._publisher_timeout)))


# --- responses ------------------------------------------------------------------------------------


def _app(observer: Observer, launcher: Launcher) -> Starlette:
    async def metrics(request: Request) -> Response:
        seen = await observer.see()
        standby, accept = seen.is_standby(launcher), request.headers.get("accept", "")
        text, media_type = prometheus.exposition(seen.look, seen.statuses, standby=standby, accept=accept)
        return Response(text, headers={"Content-Type": media_type})

    async def health(_request: Request) -> Response:
        seen = await observer.see()
        document = _health(seen, standby=seen.is_standby(launcher))
        return _json(document, 200 if document["ok"] else 503)

    async def status_json(_request: Request) -> Response:
        seen = await observer.see()
        if seen.look is None:
            return _json({"error": seen.error}, 503)
        return Response(to_json(seen.look, seen.statuses), 200, media_type="application/json")

    async def page(_request: Request) -> Response:
        seen = await observer.see()
        if seen.look is None:
            return HTMLResponse(html.page_without_target(seen.error or ""), 503)
        standby = seen.is_standby(launcher)
        return HTMLResponse(html.page(seen.look, seen.statuses, standby=standby), 200)

    endpoints = {"/metrics": metrics, "/health": health, "/status.json": status_json, "/": page}
    routes = [Route(path, endpoint) for path, endpoint in endpoints.items()]
    return Starlette(routes=routes, exception_handlers={Exception: _failed})


def _json(document: dict[str, Any], status_code: int) -> Response:
    return Response(json_text(document), status_code, media_type="application/json")


def _health(seen: Seen, *, standby: bool) -> dict[str, Any]:
    return {
        "ok": seen.look is not None and not any(status.is_wrong for status in seen.statuses),
        "target": "up" if seen.look is not None else "down",
        "error": seen.error,
        "standby": standby,
        "subscriptions": {
            status.name: {
                "ok": not status.is_wrong,
                "state": status.state,
                "problems": [problem.message for problem in status.problems],
            }
            for status in seen.statuses
        },
    }


async def _failed(_request: Request, error: Exception) -> Response:
    """Log an unexpected exception as a bug. uvicorn's own message about it is suppressed."""
    telemetry.log_error(error, event="http.failed")
    return PlainTextResponse("internal error, see the log\n", 500)


# --- the server -----------------------------------------------------------------------------------


class _Server(uvicorn.Server):
    """uvicorn's server for a program that has its own event loop, signal handlers and log."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def end(self) -> None:
        """Close everything that a cancelled serve() leaves behind: listeners, connections, and open requests."""
        for listener in getattr(self, "servers", ()):
            listener.close()
        requests = list(self.server_state.tasks)
        for request in requests:
            request.cancel()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        if requests:
            await asyncio.wait(requests, timeout=1)


async def _serve(address: Address, app: HostGuard, max_connections: int) -> None:
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        interface="asgi3",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=max_connections,
    )
    server = _Server(config)
    with ExitStack() as stack:
        sockets = await _listen(address, stack)
        where = Address(address.host, sockets[0].getsockname()[1])
        telemetry.log(telemetry.LOG, f"status is served at http://{where}/", event="http.started")
        try:
            await server.serve(sockets=sockets)
        finally:
            with anyio.CancelScope(shield=True):
                await server.end()


async def _listen(address: Address, stack: ExitStack) -> list[socket.socket]:
    """Return a socket for each address of the host name that this machine has.

    Raises:
        OSError: the machine has none of them.
    """
    sockets: list[socket.socket] = []
    refused: list[OSError] = []
    for family, _, _, _, place in await anyio.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM):
        try:
            sockets.append(stack.enter_context(socket.create_server(place[:2], family=family)))
        except OSError as error:
            refused.append(error)
    if not sockets:
        raise refused[0]
    return sockets
