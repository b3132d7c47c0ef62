"""The requests that the HTTP server answers: those that name this server as their host, and are GET or HEAD.

A console with tokens also answers POST requests to the addresses of console/action_routes.py, which checks them again.

A page in the operator's browser can make its own host name resolve to this server (DNS rebinding). To the browser, the
responses then belong to the page's own site, so the page may read them. The requests still carry the page's name as
Host, so a server that checks this header is safe. The port is not checked, because it differs behind a forwarded port.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Collection, Iterable
from ipaddress import ip_address

from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

METHODS = ("GET", "HEAD")
OWN_NAMES = ("localhost", "127.0.0.1", "::1")
REFUSED = "this host name is not answered; allow it with: subscriber run --http-host NAME\n"

# The page loads only files of this server, and inserts no text as HTML. Responses must not be stored, and no other site
# may use them.
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:@/?#,\s]+?)\.?)(?::[0-9]*)?")


def host_name(text: str) -> str | None:
    """Return the name or address in a Host header, without its port; None if it is not one."""
    match = _HOST.fullmatch(text.lower())
    return None if match is None else _normal(match[1] or match[2])


def _normal(host: str) -> str:
    """Return a canonical spelling of an address."""
    try:
        return str(ip_address(host.partition("%")[0]))
    except ValueError:
        return host.lower()


class HostGuard:
    """ASGI middleware that checks the host of every request, and adds HEADERS to every response."""

    def __init__(self, app: ASGIApp, names: Iterable[str], post_paths: Collection[str] = ()) -> None:
        """Create the guard. It accepts `names`, OWN_NAMES, this machine's name and the address connected to.

        Args:
            app: answers the accepted requests.
            names: further host names and addresses of this server.
            post_paths: the addresses that take POST requests.
        """
        self._app = app
        self._post_paths = frozenset(post_paths)
        self._names = {_normal(name) for name in (*OWN_NAMES, socket.gethostname(), *names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        app = self._app
        if not self._is_own(scope):
            app = PlainTextResponse(REFUSED, 421)
        elif scope["method"] not in METHODS and (scope["method"], scope["path"] in self._post_paths) != ("POST", True):
            app = PlainTextResponse("only GET and HEAD are answered\n", 405, {"Allow": ", ".join(METHODS)})
        await app(scope, receive, send_with_headers)

    def _is_own(self, scope: Scope) -> bool:
        """Return True if the request names this server. A request without a Host header, or with several, does not."""
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        host = host_name(hosts[0]) if len(hosts) == 1 else None
        return host is not None and (host in self._names or host == _normal(scope["server"][0]))
