"""Invalid arguments raise an error before a connection is opened or an object is created on the publisher."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

import subscriber
from subscriber import Consumer
from subscriber.errors import ProtocolError
from subscriber.testing import FakePublisher

NOWHERE = "host=127.0.0.1 port=1 dbname=nowhere user=nobody"


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"publications": "p"}, TypeError, r"publications is a sequence of names: publications=\['p'\]"),
        ({"create": "mising"}, ValueError, "create is 'mising', and must be one of 'never', 'missing', 'replace'"),
        ({"origin": "all"}, ValueError, "origin is 'all'"),
        ({"streaming": "yes"}, ValueError, "streaming is 'yes'"),
        ({"in_progress": "memory"}, ValueError, "in_progress is 'memory'"),
    ],
)
async def test_stream_and_consume_refuse_invalid_arguments(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    given = {"publications": ["p"], "slot": "s", **arguments}
    with pytest.raises(error, match=words):
        async with subscriber.stream(NOWHERE, **given):
            pass
    if not {"streaming", "in_progress"} & given.keys():
        with pytest.raises(error, match=words):
            await subscriber.consume(Consumer(), NOWHERE, **given)


async def test_mirror_refuses_one_string_for_all_publications() -> None:
    with pytest.raises(TypeError, match="publications is a sequence of names"):
        await subscriber.mirror(NOWHERE, slot="m", publications="p", target="sqlite+aiosqlite://")


async def test_changes_and_rows_can_be_copied_and_pickled() -> None:
    publisher = FakePublisher()
    table = publisher.table("public.t", identity="full", id="integer key", names="text[]", at="date")
    row = {"id": 1, "names": "{a,NULL}", "at": "2024-02-03"}
    with publisher.transaction() as transaction:
        transaction.insert(table, **row)
        transaction.update(table, old=row, **{**row, "id": 2})
        transaction.delete(table, **row)
    async with publisher.stream() as stream:
        changes: list[Any] = [change async for transaction in stream async for change in transaction]
    for change in changes:
        for again in (copy.copy(change), copy.deepcopy(change), pickle.loads(pickle.dumps(change))):
            assert type(again) is type(change)
            assert (again.old, again.new, again.subxid) == (change.old, change.new, change.subxid)
            assert str(again.relation) == "public.t"
            assert again.key == change.key
    kept = pickle.loads(pickle.dumps(changes[0].new))
    assert kept == {"id": 1, "names": ["a", None], "at": changes[0].new["at"]}


async def test_a_publisher_that_describes_two_columns_of_one_name() -> None:
    publisher = FakePublisher()
    table = publisher.table("public.t", a="integer key", b="integer")
    twice = table.relation.columns[0], table.relation.columns[0]
    object.__setattr__(table.relation, "columns", twice)
    with publisher.transaction() as transaction:
        transaction.insert(table, a=1)

    async def read() -> None:
        async with publisher.stream() as stream:
            async for transaction in stream:
                [change async for change in transaction]

    with pytest.raises(ProtocolError, match=r"public\.t is described with several columns of one name"):
        await read()
