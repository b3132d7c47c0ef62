"""The addresses that act: POST requests of the page itself, from a person with a token.

    /session   {"token": …}                                  opens a session: {"session": key, "label": …}
    /session   {}, with the header Authorization             closes it
    /actions   {"action": …, "subscription": …}, with it     runs an action, see action.py

A request is refused unless it has one Origin, which names the same host as its Host header, Sec-Fetch-Site is absent or
`same-origin`, and its content is JSON. No answer has a CORS header, so no other site can send such a request or read an
answer. HostGuard has checked the Host header itself before (cli/http_guard.py). Tokens and keys are never in an
address, and are not logged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import anyio
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from subscriber import telemetry
from subscriber.console.access import AttemptLimit, Sessions, Tokens
from subscriber.console.action import TASKS, ConsoleAction
from subscriber.console.action_runner import Person
from subscriber.console.documents import hint_parts
from subscriber.console.routes import ConsoleTarget
from subscriber.display import json_text
from subscriber.errors import SubscriberError
from subscriber.redaction import redact
from subscriber.sqlstate import OBJECT_IN_USE, UNDEFINED_OBJECT

PATHS = ("/session", "/actions")
MOST_BYTES = 65_536  # of a request
READ_TIMEOUT = 10.0  # seconds


class RequestRefused(Exception):
    """A request that is not answered. `status` is the HTTP status."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


class ActionRoutes:
    """The routes of POST requests."""

    def __init__(self, tokens: Tokens, targets: Sequence[ConsoleTarget]) -> None:
        """Create the routes.

        Args:
            tokens: the tokens of the persons who may act.
            targets: the targets of the console. Each has a runner.
        """
        self._tokens = tokens
        self._targets = {target.key: target for target in targets}
        self._sessions = Sessions()
        self._attempts = AttemptLimit()

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/session", self._session, methods=["POST"]),
            Route("/actions", self._action, methods=["POST"]),
        ]

    async def _session(self, request: Request) -> Response:
        try:
            document = await _read(request)
            if key := _key(request):
                self._sessions.close(key)
                return _answer({}, 200)
            label = self._check(document.get("token"), _address(request))
            return _answer({"session": self._sessions.open(label), "label": label}, 200)
        except RequestRefused as error:
            return _refused(error)

    def _check(self, token: Any, address: str) -> str:
        """Return the label of a token. Nothing is awaited here, so requests at the same time share the limit."""
        label = self._tokens.find(token) if isinstance(token, str) else None
        if label is None and (wait := self._attempts.wait(address)):
            seconds = max(1, round(wait))
            raise RequestRefused(429, f"too many wrong tokens: wait {seconds} s", headers={"Retry-After": str(seconds)})
        if label is None:
            self._attempts.fail(address)
            telemetry.log(telemetry.WARNING, f"console: wrong token from {address}", event="console.refused")
            raise RequestRefused(401, "this is not a token of this console")
        telemetry.log(telemetry.LOG, f'console: "{label}" has signed in from {address}', event="console.signed_in")
        return label

    async def _action(self, request: Request) -> Response:
        try:
            document = await _read(request)
            label = self._sessions.use(_key(request))
            if label is None:
                raise RequestRefused(401, "the session has ended: sign in again")
            key = document.pop("target", next(iter(self._targets)))
            target = self._targets.get(key) if isinstance(key, str) else None
            if target is None or target.runner is None:
                raise RequestRefused(404, "there is no such target")
            action = ConsoleAction.parse(document)
        except RequestRefused as error:
            return _refused(error)
        except ValueError as error:
            return _answer({"error": str(error)}, 400)
        try:
            messages = await target.runner.run(action, Person(label, _address(request)))
            target.observer.refresh()
        except SubscriberError as error:
            status = {OBJECT_IN_USE: 409, UNDEFINED_OBJECT: 404}.get(error.sqlstate, 422)
            texts = {"error": error.message, "detail": error.detail}
            answer: dict[str, Any] = {name: None if text is None else redact(text) for name, text in texts.items()}
            return _answer({**answer, "hint": hint_parts(error.remedy)}, status)
        return _answer({"messages": [redact(text) for text in messages]}, 202 if action.name in TASKS else 200)


async def _read(request: Request) -> dict[str, Any]:
    """Return the JSON object of a request of the page itself. Raises RequestRefused for others."""
    _check_origin(request.headers)
    content = bytearray()
    try:
        with anyio.fail_after(READ_TIMEOUT):
            async for chunk in request.stream():
                content += chunk
                if len(content) > MOST_BYTES:
                    raise RequestRefused(413, f"a request has at most {MOST_BYTES} bytes")
        document = json.loads(content)
    except TimeoutError:
        raise RequestRefused(408, f"the request was not complete within {READ_TIMEOUT:.0f} s") from None
    except (ValueError, RecursionError):
        raise RequestRefused(400, "the content is not JSON") from None
    if not isinstance(document, dict):
        raise RequestRefused(400, "the content is not a JSON object")
    return document


def _check_origin(headers: Headers) -> None:
    """Refuse requests of other sites, and those that a form can send."""
    if headers.get("sec-fetch-site", "same-origin") != "same-origin":
        raise RequestRefused(403, "requests of other sites are refused")
    origins = headers.getlist("origin")
    # The scheme differs behind a proxy that ends TLS.
    if len(origins) != 1 or _site(origins[0]) != headers.get("host", "").lower():
        raise RequestRefused(403, "the Origin of the request is not this site")
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestRefused(415, "the content type is not application/json")


def _site(origin: str) -> str | None:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return None
    return parts.netloc.lower() if parts.scheme in ("http", "https") and not parts.path else None


def _key(request: Request) -> str:
    """Return the key of the session; empty if the request has none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" else ""


def _address(request: Request) -> str:
    return request.client.host if request.client is not None else "unknown"


def _refused(error: RequestRefused) -> Response:
    return _answer({"error": str(error)}, error.status, error.headers)


def _answer(document: Mapping[str, Any], status: int, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json_text(document), status, headers, "application/json")
