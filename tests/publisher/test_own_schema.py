"""OwnSchemaFilter: what a publisher sends about its own subscriptions is removed, and nothing else."""

from __future__ import annotations

from subscriber.protocol.copy_data import XLOG_DATA, XLOG_DATA_HEADER
from subscriber.protocol.encode import encode
from subscriber.protocol.messages import Message, Relation, StreamStart, StreamStop, Truncate
from subscriber.publisher.own_schema import OwnSchemaFilter
from tests.spool.stream import relation


def frame(message: Message) -> bytes:
    return XLOG_DATA_HEADER.pack(XLOG_DATA, 1, 1, 0) + encode(message)


def filtered(frames: OwnSchemaFilter, *messages: Message) -> list[bytes]:
    return frames.filter([frame(message) for message in messages])


def of_stream(relid: int, schema: str) -> Relation:
    found = relation(relid)
    return Relation(7, relid, schema, found.name, found.replica_identity, found.columns)


def test_a_truncate_in_a_block_whose_start_came_earlier() -> None:
    """Frames arrive in groups, and most groups are not looked at."""
    frames = OwnSchemaFilter({3})
    start, truncate = StreamStart(7, True), Truncate(7, False, False, (1, 2))
    assert filtered(frames, start) == [frame(start)]
    described = of_stream(1, "public")
    assert filtered(frames, described, truncate) == [frame(described), frame(truncate)]


def test_other_tables_of_a_schema_of_that_name_stay() -> None:
    frames = OwnSchemaFilter({3})
    described = of_stream(4, "subscriber")
    assert filtered(frames, described, Truncate(7, False, False, (4,))) == [
        frame(described),
        frame(Truncate(7, False, False, (4,))),
    ]


def test_tables_of_the_program_are_taken_out_of_a_truncate() -> None:
    frames = OwnSchemaFilter({3})
    start, own, stop = StreamStart(7, True), of_stream(3, "subscriber"), StreamStop()
    assert filtered(frames, start) == [frame(start)]
    assert filtered(frames, own, Truncate(7, False, False, (1, 3))) == [frame(Truncate(7, False, False, (1,)))]
    assert filtered(frames, Truncate(7, False, False, (3,)), stop) == [frame(stop)]
    assert filtered(frames, Truncate(None, False, False, (3, 2))) == [frame(Truncate(None, False, False, (2,)))]
