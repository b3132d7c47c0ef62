"""The addresses of the console, for GET requests.

    /                 the page; its modules and its style sheet are below /console/
    /console.json     documents.overview(); with ?subscription=NAME documents.detail()
    /tables.json      documents.tables()
    /events           the same documents as server-sent events, one for each snapshot

A stream ends when its client is gone, or does not read for SEND_TIMEOUT. At most STREAMS streams are open at a time, so
that the other requests of monitors are answered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

import anyio
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from subscriber.console import documents
from subscriber.console.documents import TableQuery
from subscriber.console.facts import SubscriptionFacts
from subscriber.console.observer import Observer, Seen
from subscriber.display import json_text

STREAMS = 16
SEND_TIMEOUT = 30.0  # seconds
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
UNKNOWN = "unknown"  # the key of a document about a subscription that does not exist


class Console:
    """The console of one target."""

    def __init__(self, target: str, observer: Observer, launcher: Callable[[Seen], str]) -> None:
        """Create the console.

        Args:
            target: the name of the target for people.
            observer: takes the snapshots.
            launcher: returns the role of this process, as documents.overview() has it.
        """
        self._target = target
        self._observer = observer
        self._launcher = launcher
        self._streams = 0

    def routes(self) -> list[Route]:
        """Return the routes of the console."""
        return [
            Route("/", self._page),
            Route("/console/{name}", self._file),
            Route("/console.json", self._document),
            Route("/tables.json", self._tables),
            Route("/events", _Events(self)),
        ]

    async def _page(self, _request: Request) -> Response:
        return _static("index.html")

    async def _file(self, request: Request) -> Response:
        return _static(request.path_params["name"])

    async def _document(self, request: Request) -> Response:
        name = request.query_params.get("subscription")
        with self._observer.watched(name):
            seen = await self._observer.see(name)
        document = self.document(seen, name)
        status = 404 if UNKNOWN in document else 503 if seen.look is None else 200
        return Response(json_text(document), status, media_type="application/json")

    async def _tables(self, request: Request) -> Response:
        seen = await self._observer.latest()
        name = request.query_params.get("subscription")
        status = next((one for one in seen.statuses if one.name == name), None)
        if seen.look is None or status is None:
            return Response(json_text({UNKNOWN: name}), 404, media_type="application/json")
        page = documents.tables(seen.look, status, _table_query(request.query_params))
        return Response(json_text(page), media_type="application/json")

    def document(self, seen: Seen, name: str | None, since: float = 0) -> Mapping[str, Any]:
        """Return the document of a snapshot.

        Args:
            seen: the snapshot.
            name: the subscription. None: the overview.
            since: only newer points of the history are in it, in seconds since 1970.
        """
        launcher = self._launcher(seen)
        look, points = seen.look, {}
        if look is not None:
            points = {one.name: self._observer.history.points(one.oid) for one in look.subscriptions}
        status = next((one for one in seen.statuses if one.name == name), None)
        if name is None or look is None:
            return documents.overview(self._target, seen, launcher, points)
        if status is None:
            return {UNKNOWN: name}
        facts = seen.facts.get(name, SubscriptionFacts())
        return documents.detail(self._target, look, status, facts, launcher, points[name], since=since)

    async def stream(self, name: str | None, send: Send) -> None:
        """Send a document for each snapshot, until the client does not read any more."""
        since = 0.0
        with self._observer.watched(name):
            seen = await self._observer.see(name)
            while True:
                document = self.document(seen, name, since)
                since = max([since, *document.get("points", {}).get("at", ())])
                event = f"data: {json_text(document)}\n\n".encode()
                with anyio.fail_after(SEND_TIMEOUT):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                seen = await self._observer.next(seen.number)

    async def serve_events(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for the stream of events."""
        if self._streams >= STREAMS:
            await PlainTextResponse("too many open streams\n", 503)(scope, receive, send)
            return
        name = Request(scope).query_params.get("subscription")
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        self._streams += 1
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            if scope["method"] == "HEAD":
                await send({"type": "http.response.body", "body": b""})
                return
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_wait_for_end, receive, tasks.cancel_scope)
                try:
                    await self.stream(name, send)
                except TimeoutError:
                    tasks.cancel_scope.cancel()
        finally:
            self._streams -= 1


class _Events:
    """An ASGI application, because Starlette's streaming response has no time limit for a client that does not read."""

    def __init__(self, console: Console) -> None:
        self._console = console

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._console.serve_events(scope, receive, send)


async def _wait_for_end(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def _read_files() -> dict[str, tuple[bytes, str]]:
    found = {}
    for file in files("subscriber.console").joinpath("static").iterdir():
        if media_type := TYPES.get(file.name.rpartition(".")[2]):
            found[file.name] = (file.read_bytes(), media_type)
    return found


_FILES = _read_files()


def _static(name: str) -> Response:
    if name not in _FILES:
        return PlainTextResponse("not found\n", 404)
    content, media_type = _FILES[name]
    return Response(content, media_type=media_type)


def _table_query(parameters: Mapping[str, str]) -> TableQuery:
    offset = parameters.get("offset", "0")
    return TableQuery(
        search=parameters.get("search", ""),
        state=parameters.get("state", ""),
        sort=parameters.get("sort", "state"),
        descending=parameters.get("descending") == "1",
        offset=int(offset) if offset.isascii() and offset.isdigit() and len(offset) < 9 else 0,
    )
