"""The addresses of the console, for GET requests.

    /                 the page; its modules and its style sheet are below /console/
    /console.json     documents.overview() of each target; with ?subscription=NAME documents.detail()
    /tables.json      table_page.tables()
    /key.json         a key, for requests that another site cannot make because it cannot read the key
    /events           the same documents as server-sent events, one for each snapshot

A stream of events needs `Sec-Fetch-Site: same-origin` or ?key=KEY: a page of another site could otherwise take all
streams. Browsers send that header over TLS and to this machine only.

With several targets, ?target=KEY names the one of a subscription. A stream ends when its client is gone, or does not
read for SEND_TIMEOUT. At most STREAMS streams are open at a time, so that the other requests of monitors are answered.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import anyio
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from subscriber.console import documents
from subscriber.console.action_runner import ActionRunner
from subscriber.console.facts import SubscriptionFacts
from subscriber.console.observer import Observer, Seen
from subscriber.console.table_page import TableQuery, tables
from subscriber.display import json_text

STREAMS = 16
SEND_TIMEOUT = 30.0  # seconds
NEEDS_KEY = "a stream of events needs the key of /key.json: /events?key=KEY\n"
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
UNKNOWN = "unknown"  # the key of a document about a subscription that does not exist


@dataclass(frozen=True, slots=True)
class ConsoleTarget:
    """One target of a console.

    Attributes:
        key: names it in addresses.
        name: names it for people.
        observer: takes its snapshots.
        launcher: returns the role of this process, as documents.overview() has it.
        runner: runs actions on it. None: the console is read-only.
    """

    key: str
    name: str
    observer: Observer
    launcher: Callable[[Seen], str]
    runner: ActionRunner | None = None

    def overview(self, seen: Seen) -> documents.Overview:
        """Return the document of all subscriptions of the target."""
        look, points = seen.look, {}
        if look is not None:
            points = {
                subscription.name: self.observer.history.points(subscription.oid) for subscription in look.subscriptions
            }
        return documents.overview(self.key, self.name, seen, self.launcher(seen), points)

    def detail(self, seen: Seen, name: str, since: float) -> Mapping[str, Any]:
        """Return the document of one subscription; of the target if that does not answer."""
        status = next((known_status for known_status in seen.statuses if known_status.name == name), None)
        if seen.look is None:
            return self.overview(seen)
        if status is None:
            return {UNKNOWN: name}
        subid = next(subscription.oid for subscription in seen.look.subscriptions if subscription.name == name)
        return documents.detail(
            self.overview(seen),
            seen.look,
            status,
            seen.facts.get(name, SubscriptionFacts()),
            self.observer.history.points(subid),
            since=since,
            task=None if self.runner is None else self.runner.task,
            may_act=self.runner is not None,
        )


class Console:
    """The console of one or several targets."""

    def __init__(self, targets: Sequence[ConsoleTarget]) -> None:
        """Create the console of `targets`, which have different keys."""
        self._targets = {target.key: target for target in targets}
        self._streams = 0
        self._key = secrets.token_urlsafe(16)

    def routes(self) -> list[Route]:
        """Return the routes of the console."""
        return [
            Route("/", self._page),
            Route("/console/{name}", self._file),
            Route("/console.json", self._document),
            Route("/tables.json", self._tables),
            Route("/key.json", self._key_document),
            Route("/events", _Events(self)),
        ]

    async def _page(self, _request: Request) -> Response:
        return _static("index.html")

    async def _file(self, request: Request) -> Response:
        return _static(request.path_params["name"])

    async def _key_document(self, _request: Request) -> Response:
        return Response(json_text({"key": self._key}), media_type="application/json")

    def _is_of_page(self, request: Request) -> bool:
        """Return True if no page of another site can have made the request."""
        site = request.headers.get("sec-fetch-site")
        if site is not None:
            return site in ("same-origin", "none")
        return secrets.compare_digest(request.query_params.get("key", "").encode(), self._key.encode())

    def _target(self, parameters: Mapping[str, str]) -> ConsoleTarget | None:
        """Return the target that a request names. Without a name it is the first one."""
        return self._targets.get(parameters.get("target", next(iter(self._targets))))

    async def _document(self, request: Request) -> Response:
        name, target = request.query_params.get("subscription"), self._target(request.query_params)
        if target is None:
            return _unknown(request.query_params.get("target"))
        targets = [target] if name is not None else list(self._targets.values())
        with ExitStack() as stack:
            for each in targets:
                stack.enter_context(each.observer.watched(name))
            seen: dict[str, Seen] = {}

            async def see(one: ConsoleTarget) -> None:
                seen[one.key] = await one.observer.see(name)

            async with anyio.create_task_group() as tasks:
                for each in targets:
                    tasks.start_soon(see, each)
        document = self._of(targets, seen, name)
        status = 404 if UNKNOWN in document else 503 if all(view.look is None for view in seen.values()) else 200
        return Response(json_text(document), status, media_type="application/json")

    async def _tables(self, request: Request) -> Response:
        name, target = request.query_params.get("subscription"), self._target(request.query_params)
        if target is None:
            return _unknown(request.query_params.get("target"))
        seen = await target.observer.latest()
        status = next((known_status for known_status in seen.statuses if known_status.name == name), None)
        if seen.look is None or status is None:
            return _unknown(name)
        page = tables(seen.look, status, _table_query(request.query_params))
        return Response(json_text(page), media_type="application/json")

    def _of(
        self, targets: Sequence[ConsoleTarget], seen: Mapping[str, Seen], name: str | None, since: float = 0
    ) -> Mapping[str, Any]:
        """Return the document of a snapshot of each target.

        Args:
            targets: the targets; one if `name` is given.
            seen: the snapshots, by the keys of the targets.
            name: the subscription. None: the overview.
            since: only newer points of the history are in it, in seconds since 1970.
        """
        if name is not None:
            (target,) = targets
            return target.detail(seen[target.key], name, since)
        if len(targets) == 1:
            return targets[0].overview(seen[targets[0].key])
        return {"targets": [target.overview(seen[target.key]) for target in targets]}

    async def _stream(self, targets: Sequence[ConsoleTarget], name: str | None, send: Send) -> None:
        """Send a document for each snapshot, until the client does not read any more."""
        since = 0.0
        with ExitStack() as stack:
            for target in targets:
                stack.enter_context(target.observer.watched(name))
            if len(targets) == 1:
                seen = {targets[0].key: await targets[0].observer.see(name)}
            else:
                # A target that does not answer delays no other one.
                seen = {target.key: target.observer.seen for target in targets}
            while True:
                document = self._of(targets, seen, name, since)
                since = max([since, *document.get("points", {}).get("at", ())])
                event = f"data: {json_text(document)}\n\n".encode()
                with anyio.fail_after(SEND_TIMEOUT):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                await self._wait(targets, seen)
                seen = {target.key: target.observer.seen for target in targets}

    async def _wait(self, targets: Sequence[ConsoleTarget], seen: Mapping[str, Seen]) -> None:
        """Wait for a later snapshot of any target."""
        async with anyio.create_task_group() as tasks:

            async def wait(one: ConsoleTarget) -> None:
                await one.observer.next(seen[one.key].number)
                tasks.cancel_scope.cancel()

            for target in targets:
                tasks.start_soon(wait, target)

    async def serve_events(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for the stream of events."""
        request = Request(scope)
        if not self._is_of_page(request):
            await PlainTextResponse(NEEDS_KEY, 403)(scope, receive, send)
            return
        if self._streams >= STREAMS:
            await PlainTextResponse("too many open streams\n", 503)(scope, receive, send)
            return
        parameters = request.query_params
        name, target = parameters.get("subscription"), self._target(parameters)
        if target is None:
            await _unknown(parameters.get("target"))(scope, receive, send)
            return
        targets = [target] if name is not None else list(self._targets.values())
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
                    await self._stream(targets, name, send)
                except TimeoutError:
                    tasks.cancel_scope.cancel()
        finally:
            self._streams -= 1


def _unknown(name: str | None) -> Response:
    return Response(json_text({UNKNOWN: name}), 404, media_type="application/json")


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
    content = {}
    for file in files("subscriber.console").joinpath("static").iterdir():
        if media_type := TYPES.get(file.name.rpartition(".")[2]):
            content[file.name] = (file.read_bytes(), media_type)
    return content


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
