"""`subscriber run --http`: serve the status and the console over HTTP, without delaying the launcher.

    /metrics      metrics for Prometheus; if the target is down, subscriber_target_up 0 and no other metric
    /health       200 if `subscriber status` would exit 0, else 503, with the reasons as JSON
    /status.json  `subscriber status --json`; 503 with the error if the target does not answer
    /             the console: a page for people, see console/routes.py

Only GET and HEAD requests that name this server as their host are answered, see http_guard.py. With tokens, the console
takes actions too, see console/action_routes.py. All responses show snapshots of one observer, see console/observer.py.

No error leaves serve(). An error that prevents listening is logged once and retried, because replication must not end
when a port is taken. The launcher handles signals. On cancellation, connections are closed rather than drained.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import anyio

from subscriber import telemetry
from subscriber.apply.hooks.config import Hooks
from subscriber.cli.status_lines import to_json
from subscriber.connection.conninfo import Conninfo
from subscriber.console.access import Tokens
from subscriber.console.action_runner import ActionRunner
from subscriber.console.observer import Observer, Seen
from subscriber.display import json_text
from subscriber.errors import SubscriberError
from subscriber.settings import DEFAULTS, Settings
from subscriber.sqlstate import UNDEFINED_FILE
from subscriber.worker.supervision.launcher import Launcher

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response
    from starlette.routing import Route

    from subscriber.cli import prometheus
    from subscriber.cli.http_guard import OWN_NAMES, HostGuard, host_name
    from subscriber.cli.http_limits import BACKLOG, Connections, RequestLimit
    from subscriber.console.action_routes import PATHS, ActionRoutes
    from subscriber.console.routes import Console, ConsoleTarget
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
        problem = ValueError(f"{text!r} is not [HOST:]PORT, such as 8080 or 0.0.0.0:8080")
        try:
            parts = urlsplit(f"//{text if ':' in text else ':' + text}")
            port = parts.port
        except ValueError:  # it has a part of the text only, which may be a part of a password
            raise problem from None
        if (
            port is None
            or parts.netloc != parts.netloc.rpartition("@")[2]
            or parts.path
            or parts.query
            or parts.fragment
        ):
            raise problem
        return cls(parts.hostname or LOCAL, port, tuple(map(_answered_name, names)))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _answered_name(text: str) -> str:
    if name := host_name(text) or host_name(f"[{text}]"):
        return name
    raise ValueError(f"{text!r} is not a host name or an address")


async def serve(
    address: Address,
    target: str,
    launcher: Launcher,
    settings: Settings = DEFAULTS,
    *,
    tokens: Tokens | None = None,
    apply_target: str | None = None,
    hooks: Mapping[str, Hooks] = MappingProxyType({}),
) -> None:
    """Serve the status of the subscriptions of `target` at `address` until cancelled.

    Args:
        address: where to listen.
        target: the connection string of the target.
        launcher: the launcher of this process.
        settings: limits and time-outs.
        tokens: of the persons who may act. None: the console is read-only.
        apply_target: the connection string of the role that applies changes. None: `target`.
        hooks: by subscription, the hooks of the launcher's program.
    """
    observer = Observer(target, settings, lambda seen: _role(seen, launcher) == "active")
    runner = None if tokens is None else ActionRunner(target, settings, hooks, apply_target)
    console = ConsoleTarget("1", _target_name(target), observer, lambda seen: _role(seen, launcher), runner)
    await _serve_targets(address, [console], _monitoring(observer, launcher), tokens, settings)


async def serve_targets(
    address: Address, targets: Sequence[str], tokens: Tokens | None = None, settings: Settings = DEFAULTS
) -> None:
    """Serve the console of several targets at `address` until cancelled. Their launchers run elsewhere.

    Args:
        address: where to listen.
        targets: the connection strings of the targets.
        tokens: of the persons who may act. None: the console is read-only.
        settings: limits and time-outs.
    """
    consoles = [
        ConsoleTarget(
            str(number),
            _target_name(target),
            Observer(target, settings),
            lambda seen: "none" if seen.look is None or seen.look.launcher_pid is None else "active",
            None if tokens is None else ActionRunner(target, settings),
        )
        for number, target in enumerate(targets, 1)
    ]
    await _serve_targets(address, consoles, [], tokens, settings)


async def _serve_targets(
    address: Address,
    targets: Sequence[ConsoleTarget],
    monitoring: Sequence[Route],
    tokens: Tokens | None,
    settings: Settings,
) -> None:
    routes = [*monitoring, *Console(targets).routes()]
    if tokens is not None:
        routes += ActionRoutes(tokens, targets).routes()
        _warn_of_clear_text(address)
    app = Starlette(routes=routes, exception_handlers={Exception: _failed})
    limited = RequestLimit(app, settings.http_max_connections)
    guard = HostGuard(limited, (address.host, *address.names), () if tokens is None else PATHS)
    async with anyio.create_task_group() as tasks:
        for target in targets:
            tasks.start_soon(_observe, target.observer, settings.retry_interval)
            if target.runner is not None:
                tasks.start_soon(target.runner.serve)
        connections = Connections(settings)
        tasks.start_soon(connections.run)
        await _listen_forever(address, guard, connections, settings.retry_interval)


def _warn_of_clear_text(address: Address) -> None:
    if host_name(address.host if ":" not in address.host else f"[{address.host}]") not in OWN_NAMES:
        telemetry.log(
            telemetry.WARNING,
            f"tokens of the console are sent to {address.host} in clear text",
            hint="Listen on 127.0.0.1, behind a proxy that ends TLS.",
            event="http.clear_text",
        )


async def _observe(observer: Observer, retry_interval: float) -> None:
    while True:
        try:
            await observer.run()
        except Exception as error:
            telemetry.log_error(error, event="http.failed")
        await anyio.sleep(retry_interval)


async def _listen_forever(address: Address, app: HostGuard, connections: Connections, retry_interval: float) -> None:
    said = None
    while True:
        try:
            await _serve(address, app, connections)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error.strerror
            message = f"could not listen on {address}: {reason}"
            if message != said:
                hint = f"The launcher retries every {retry_interval:.0f} s. Replication continues meanwhile."
                telemetry.log(telemetry.ERROR, message, hint=hint, event="http.failed")
            said = message
        except Exception as error:
            telemetry.log_error(error, event="http.failed")
        await anyio.sleep(retry_interval)


# --- responses ------------------------------------------------------------------------------------


def _monitoring(observer: Observer, launcher: Launcher) -> list[Route]:
    async def metrics(request: Request) -> Response:
        seen = await observer.see()
        standby, accept = seen.is_standby(launcher.pid), request.headers.get("accept", "")
        text, media_type = prometheus.exposition(seen.look, seen.statuses, standby=standby, accept=accept)
        return Response(text, headers={"Content-Type": media_type})

    async def health(_request: Request) -> Response:
        seen = await observer.see()
        document = _health(seen, standby=seen.is_standby(launcher.pid))
        return _json(document, 200 if document["ok"] else 503)

    async def status_json(_request: Request) -> Response:
        seen = await observer.see()
        if seen.look is None:
            return _json({"error": seen.error}, 503)
        return Response(to_json(seen.look, seen.statuses), 200, media_type="application/json")

    endpoints = {"/metrics": metrics, "/health": health, "/status.json": status_json}
    return [Route(path, endpoint) for path, endpoint in endpoints.items()]


def _target_name(target: str) -> str:
    """Return the name of the target for people: database and host."""
    conninfo = Conninfo.parse(target)
    host = conninfo.get("host")
    return f"{conninfo.get('dbname')} at {host}" if host else conninfo.get("dbname")


def _role(seen: Seen, launcher: Launcher) -> str:
    if seen.look is None or seen.look.launcher_pid is None:
        return "none"
    return "standby" if seen.is_standby(launcher.pid) else "active"


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


async def _serve(address: Address, app: HostGuard, connections: Connections) -> None:
    config = uvicorn.Config(
        app,
        http=connections.protocol,  # type: ignore[arg-type]  # it is only called
        backlog=BACKLOG,
        ws="none",
        interface="asgi3",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
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
