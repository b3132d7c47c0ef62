"""An outbox consumer: sends messages written in an application's transactions, in order, each at least once.

    python examples/outbox.py SOURCE_DSN SLOT

The application calls `SELECT pg_logical_emit_message(true, 'outbox.TOPIC', 'payload')` in the transaction that does the
work. There is no outbox table, no polling and no cleanup: the message is in the WAL if and only if the transaction is
committed. It is acknowledged after it was sent.

Shows: callbacks; logical messages; a slot that is created at the first start.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable

import subscriber
from subscriber import Message, Transaction

Send = Callable[[str, str], Awaitable[None]]  # topic, payload; raises if the message was not accepted

PREFIX = "outbox."


class Outbox(subscriber.Consumer):
    """Sends a transaction's messages after its commit.

    If one cannot be sent, all messages of the transaction are redelivered.
    """

    def __init__(self, send: Send) -> None:
        self._send = send

    async def message(self, transaction: Transaction, message: Message) -> None:
        if message.prefix.startswith(PREFIX):
            await self._send(message.prefix.removeprefix(PREFIX), message.text)


async def run(source: str, slot: str, send: Send, *, until: subscriber.Lsn | None = None) -> None:
    """Send messages until cancelled, or until all messages before `until` are sent.

    Needs a publication `outbox` without tables.
    """
    await subscriber.consume(Outbox(send), source, slot=slot, create="missing", publications=["outbox"], until=until)


async def to_stdout(topic: str, payload: str) -> None:
    print(topic, payload, flush=True)


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], sys.argv[2], to_stdout))
