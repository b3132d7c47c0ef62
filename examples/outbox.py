"""An outbox consumer: messages written in an application's transactions are sent, in order, each at least once.

    python examples/outbox.py SOURCE_DSN SLOT

The application calls `SELECT pg_logical_emit_message(true, 'outbox.TOPIC', 'payload')` in the transaction that
does the work. There is no outbox table, nothing to poll and nothing to clean up: the message is in the WAL exactly
when the transaction is committed. It is acknowledged after it was sent.

Shows: callbacks; logical messages; a slot that is made at the first start.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable

import subscriber
from subscriber import Message, Transaction

Send = Callable[[str, str], Awaitable[None]]  # topic, payload; raises if it was not taken

PREFIX = "outbox."


class Outbox(subscriber.Consumer):
    """Sends the messages of a transaction when that has committed; if one cannot be sent, all come again."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def message(self, transaction: Transaction, message: Message) -> None:
        if message.prefix.startswith(PREFIX):
            await self._send(message.prefix.removeprefix(PREFIX), message.text)


async def run(source: str, slot: str, send: Send, *, until: subscriber.Lsn | None = None) -> None:
    """Send until cancelled, or everything before `until` was sent. Needs a publication `outbox`, of no table at all."""
    await subscriber.consume(Outbox(send), source, slot=slot, create="missing", publications=["outbox"], until=until)


async def to_stdout(topic: str, payload: str) -> None:
    print(topic, payload, flush=True)


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], sys.argv[2], to_stdout))
