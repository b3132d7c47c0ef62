"""Which requests `subscriber run --http` answers: GET and HEAD that name this server as their host.

A page in the operator's browser can make its own host name resolve to this server (DNS rebinding). To the browser the
answers then come from the page's own site, so the page may read them. The requests still carry the page's name as Host,
so only a server that checks it is safe. The port does not matter: it is another one behind a forwarded port.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from ipaddress import ip_address

from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

METHODS = ("GET", "HEAD")
OWN_NAMES = ("localhost", "127.0.0.1", "::1")
REFUSED = "this host name is not answered; allow it with: subscriber run --http-host NAME\n"

# The page loads nothing, no answer is worth keeping, and no other site has a use for one.
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
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
    """One spelling for each address."""
    try:
        return str(ip_address(host.partition("%")[0]))
    except ValueError:
        return host.lower()


class HostGuard:
    """An ASGI application in front of another one. It adds HEADERS to every answer."""

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        """`names` are hosts that are answered, besides OWN_NAMES, this machine's and the address connected to."""
        self._app = app
        self._names = {_normal(name) for name in (*OWN_NAMES, socket.gethostname(), *names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        app = self._app
        if not self._is_own(scope):
            app = PlainTextResponse(REFUSED, 421)
        elif scope["method"] not in METHODS:
            app = PlainTextResponse("only GET and HEAD are answered\n", 405, {"Allow": ", ".join(METHODS)})
        await app(scope, receive, send_with_headers)

    def _is_own(self, scope: Scope) -> bool:
        """Return True if the request names this server. One without a Host, or with several, does not."""
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        host = host_name(hosts[0]) if len(hosts) == 1 else None
        return host is not None and (host in self._names or host == _normal(scope["server"][0]))
