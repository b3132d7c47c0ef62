"""OwnMessageFilter: messages of the program itself are removed, and nothing else. OWN_RELATIONS is what there is."""

from __future__ import annotations

import pytest

from subscriber.catalog.schema import ensure_schema
from subscriber.lsn import Lsn
from subscriber.protocol.copy_data import XLOG_DATA, XLOG_DATA_HEADER
from subscriber.protocol.encode import encode
from subscriber.protocol.messages import LogicalMessage, Message, StreamStart, StreamStop
from subscriber.publisher.own_schema import OWN_RELATIONS, OwnMessageFilter
from tests.plugins.fix_cluster import Database


def frame(message: Message) -> bytes:
    return XLOG_DATA_HEADER.pack(XLOG_DATA, 1, 1, 0) + encode(message)


def filtered(frames: OwnMessageFilter, *messages: Message) -> list[bytes]:
    return frames.filter([frame(message) for message in messages])


def message(prefix: str, xid: int | None = None) -> LogicalMessage:
    return LogicalMessage(xid, True, Lsn(7), prefix, b"content")


def test_messages_of_the_program_are_removed() -> None:
    ours, theirs = message("subscriber"), message("subscribers")
    assert filtered(OwnMessageFilter(), ours, theirs, ours) == [frame(theirs)]


def test_messages_in_a_block_whose_start_came_earlier() -> None:
    """In a block, the transaction stands in front of each message. Frames arrive in groups."""
    frames = OwnMessageFilter()
    start, stop, theirs = StreamStart(7, True), StreamStop(), message("theirs", 7)
    assert filtered(frames, start) == [frame(start)]
    assert filtered(frames, message("subscriber", 7), theirs) == [frame(theirs)]
    assert filtered(frames, stop) == [frame(stop)]
    assert filtered(frames, message("subscriber")) == []


@pytest.mark.parametrize("xid", [None, 7], ids=["outside of blocks", "in a block"])
def test_a_prefix_that_has_ours_where_the_other_kind_has_it(xid: int | None) -> None:
    frames = OwnMessageFilter()
    if xid is not None:
        filtered(frames, StreamStart(xid, True))
    theirs = message("abcdsubscriber", xid)
    assert filtered(frames, theirs) == [frame(theirs)]


async def test_the_names_of_relations_are_those_of_the_schema(target_db: Database) -> None:
    async with target_db.connection() as connection:
        await ensure_schema(connection)
        names = await connection.fetch(
            "SELECT relname::text FROM pg_class WHERE relnamespace = 'subscriber'::regnamespace"
            " AND relkind IN ('r', 'v', 'm', 'S')"
        )
    assert {name for (name,) in names} == OWN_RELATIONS
