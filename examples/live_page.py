"""A web page that shows changes as they are committed: Starlette and server-sent events.

    SOURCE_DSN=… PUBLICATION=… uvicorn examples.live_page:app

    curl -N http://127.0.0.1:8000/changes?table=public.city

One stream feeds all browsers. Each browser has a bounded queue. A browser that does not keep up is disconnected, which
affects neither the other browsers nor the database. The same code works under FastAPI.

Shows: a stream in the lifespan of an application; fan-out.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.streams.memory import MemoryObjectSendStream
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

import subscriber
from subscriber import Delete, Insert, Row, Update

QUEUE = 1000  # events queued for a browser before it is disconnected


class Feed:
    """Sends committed changes to all connected browsers."""

    def __init__(self) -> None:
        self._listeners: dict[MemoryObjectSendStream[str], str | None] = {}

    async def run(self, source: str, publication: str) -> None:
        async with subscriber.stream(source, publications=[publication]) as stream:
            async for transaction in stream:
                async for change in transaction:
                    if isinstance(change, Insert | Update | Delete):
                        self._send(str(change.relation), change.kind, change.new or change.old)
                await transaction.ack()

    def _send(self, table: str, kind: str, row: Row | None) -> None:
        values = {} if row is None else {name: str(value) for name, value in row.sent().items()}
        event = f"event: {kind}\ndata: {json.dumps({'table': table, 'row': values})}\n\n"
        for listener, wanted in list(self._listeners.items()):
            if wanted in (None, table):
                try:
                    listener.send_nowait(event)
                except anyio.WouldBlock:
                    del self._listeners[listener]
                    listener.close()

    async def listen(self, table: str | None) -> AsyncIterator[str]:
        send, receive = anyio.create_memory_object_stream[str](QUEUE)
        self._listeners[send] = table
        with send, receive:
            try:
                yield ": connected\n\n"
                async for event in receive:
                    yield event
            finally:
                self._listeners.pop(send, None)


feed = Feed()


async def changes(request: Request) -> StreamingResponse:
    events = feed.listen(request.query_params.get("table"))
    return StreamingResponse(events, media_type="text/event-stream")


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(feed.run, os.environ["SOURCE_DSN"], os.environ["PUBLICATION"])
        yield
        tasks.cancel_scope.cancel()


app = Starlette(routes=[Route("/changes", changes)], lifespan=lifespan)
