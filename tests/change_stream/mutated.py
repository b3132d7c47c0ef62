"""Read streams with damaged messages, and print the results: python -m tests.change_stream.mutated SEED COUNT.

SEED determines the damaged messages and the damage, so that two processes can be compared.
"""

from __future__ import annotations

import asyncio
import sys
from random import Random
from typing import Any

import anyio

from subscriber.change_stream.changes import Delete, Insert, Truncate, Update
from subscriber.errors import SubscriberError
from subscriber.lsn import Lsn
from subscriber.testing import Described, FakePublisher

COLUMNS: dict[str, Any] = {
    "id": "integer key",
    "name": "text",
    "exact": "numeric",
    "at": "timestamp with time zone",
    "numbers": "integer[]",
    "flag": "boolean",
    "tree": "jsonb",
}
ROW: dict[str, Any] = {
    "name": "Ulm",
    "exact": "12.50",
    "at": "2024-01-02 03:04:05+00",
    "numbers": "{1,NULL}",
    "flag": "t",
    "tree": "{}",
}
PATIENCE = 0.5  # seconds for one stream: without its COMMIT a transaction has no end


class DamagedPublisher(FakePublisher):
    """A publisher whose messages arrive with damage, in their envelopes."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random

    def frames(self, number: int, start: Lsn, described: Described) -> tuple[list[bytes], int]:
        frames, number = super().frames(number, start, described)
        if frames:
            damage(frames, self._random)
        return frames, number


def written(random: Random) -> FakePublisher:
    """Return a publisher with a few transactions of every kind of change."""
    publisher = DamagedPublisher(random)
    tables = [
        publisher.table("public.t", **COLUMNS),
        publisher.table("public.f", identity="full", **COLUMNS),
    ]
    for xid in range(2):
        with publisher.transaction() as transaction:
            for number in range(random.randint(1, 4)):
                table = random.choice(tables)
                row = {**ROW, "id": xid * 10 + number}
                match random.randrange(5):
                    case 0:
                        transaction.insert(table, **row)
                    case 1:
                        transaction.update(table, **row)
                    case 2:
                        transaction.update(table, old={**row, "id": 77}, **row)
                    case 3:
                        transaction.delete(table, **row)
                    case _:
                        transaction.truncate(table)
    return publisher


def damage(frames: list[bytes], random: Random) -> None:
    """Change a few bytes of a frame, or its length; or take a frame away, or send it twice."""
    for _ in range(random.choice((1, 1, 1, 2))):
        at = random.randrange(len(frames))
        data = bytearray(frames[at])
        match random.randrange(8):
            case 0:
                data = data[: random.randrange(len(data) + 1)]
            case 1:
                data += random.randbytes(random.randint(1, 4))
            case 2:
                frames.insert(at, frames[at])
                continue
            case 3:
                other = random.randrange(len(frames))
                frames[at], frames[other] = frames[other], frames[at]
                continue
            case _:
                first = random.choice((0, 25)) if len(data) > 25 else 0
                for _ in range(random.randint(1, 3)):
                    if data:
                        place = random.randrange(min(first, len(data) - 1), len(data))
                        data[place] = random.choice((0, 1, 0x7F, 0xFF, random.randrange(256)))
        frames[at] = bytes(data)


async def read(publisher: FakePublisher) -> str:
    """Return all changes, and the error at the end."""
    texts: list[str] = []
    try:
        with anyio.move_on_after(PATIENCE) as waiting:
            async with publisher.stream() as stream:
                async for transaction in stream:
                    async for change in transaction:
                        texts.append(repr(change))
                        match change:
                            case Truncate():
                                texts.append(repr([str(relation) for relation in change.relations]))
                            case Insert() | Update() | Delete():
                                for row in (change.old, change.new):
                                    if row is not None:
                                        texts.append(value_of(lambda row=row: repr(row.dict())))
                                        texts.append(value_of(lambda row=row: repr(row.texts())))
                    await transaction.ack()
        if waiting.cancelled_caught:
            texts.append("TIMEOUT")
    except SubscriberError as error:
        texts.append(f"{type(error).__name__}: {error.message}")
    except Exception as error:
        texts.append(f"UNDOCUMENTED {type(error).__name__}: {error}")
    return " | ".join(texts).encode("unicode_escape").decode()


def value_of(function: object) -> str:
    """Return the value as text, or the error."""
    assert callable(function)
    try:
        return str(function())
    except SubscriberError as error:
        return f"{type(error).__name__}: {error.message}"
    except Exception as error:
        return f"UNDOCUMENTED {type(error).__name__}: {error}"


async def main(seed: int, count: int) -> None:
    for number in range(count):
        random = Random(seed * 1_000_000 + number)
        print(await read(written(random)))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
