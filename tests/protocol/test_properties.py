"""Properties of every message: nothing is lost, and damage only raises ProtocolError."""

from __future__ import annotations

import re
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from subscriber.errors import ProtocolError
from subscriber.protocol import copy_data
from subscriber.protocol.copy_data import Keepalive, StandbyStatus, XLogData
from subscriber.protocol.decode import Decoder
from subscriber.protocol.encode import encode
from subscriber.protocol.messages import Message
from subscriber.protocol.tuple_data import TupleData
from tests.captures import captures
from tests.protocol.strategies import MESSAGES, decoder_for, frames, messages, split_rows, statuses

RECORDED = sorted({(data, capture.parallel) for capture in captures() for _, data in capture.messages})


def test_every_message_has_a_strategy() -> None:
    assert {kind.message_type for kind in Message.__args__} == MESSAGES.keys()


@given(messages)
def test_decode_is_the_inverse_of_encode(message: Message) -> None:
    data = encode(message)
    assert data.startswith(message.letter)
    assert decoder_for(message).decode(data) == message


@given(messages, st.binary(max_size=30))
def test_a_message_can_be_read_in_the_middle_of_other_bytes(message: Message, before: bytes) -> None:
    data = before + encode(message)
    assert decoder_for(message).decode(data, len(before)) == message
    assert decoder_for(message).decode(memoryview(data), len(before)) == message


@given(messages, st.data())
def test_a_message_cut_anywhere_is_a_protocol_error(message: Message, data: st.DataObject) -> None:
    encoded = encode(message)
    cut = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(ProtocolError) as caught:
        decoder_for(message).decode(encoded[:cut])
    with pytest.raises(ProtocolError, match=f"^{re.escape(str(caught.value))}$"):
        decoder_for(message).decode(memoryview(encoded)[:cut])


@given(messages, st.binary(min_size=1, max_size=40))
def test_bytes_left_over_are_a_protocol_error(message: Message, more: bytes) -> None:
    with pytest.raises(ProtocolError):
        decoder_for(message).decode(encode(message) + more)


@given(st.binary(max_size=64), st.booleans(), st.booleans())
@example(bytes.fromhex("49 00000001 4e ffff"), False, False)  # 65535 columns
@example(bytes.fromhex("54 ffffffff 00"), False, False)  # four billion tables
@example(bytes.fromhex("49 00000001 4e 0001 74 ffffffff"), False, False)  # a value of four gigabytes, or of -1
def test_damage_raises_nothing_but_protocol_error(data: bytes, parallel: bool, in_block: bool) -> None:
    decoder = Decoder(parallel=parallel, in_block=in_block)
    with suppress(ProtocolError):
        assert encode(decoder.decode(data)) == data


@given(st.sampled_from(RECORDED), st.booleans(), st.data())
def test_a_damaged_recording_raises_nothing_but_protocol_error(
    recorded: tuple[bytes, bool], in_block: bool, data: st.DataObject
) -> None:
    damaged = bytearray(recorded[0])
    for position in data.draw(st.lists(st.integers(0, len(damaged) - 1), max_size=4)):
        damaged[position] = data.draw(st.integers(0, 255))
    decoder = Decoder(parallel=recorded[1], in_block=in_block)
    with suppress(ProtocolError):
        assert encode(decoder.decode(damaged)) == damaged


@given(messages, st.data())
def test_a_damaged_message_leaves_the_decoder_as_it_was(message: Message, data: st.DataObject) -> None:
    decoder = decoder_for(message)
    in_block = decoder.in_block
    encoded = encode(message)
    with pytest.raises(ProtocolError):
        decoder.decode(encoded[: data.draw(st.integers(0, len(encoded) - 1))])
    assert decoder.in_block == in_block


@given(split_rows)
def test_split_is_the_inverse_of_join(row: tuple[bytes, list[bytes | None]]) -> None:
    assert TupleData.join(*row).split() == row


@given(frames)
def test_the_envelope_from_the_publisher_round_trips(frame: XLogData | Keepalive) -> None:
    assert copy_data.decode_from_publisher(copy_data.encode(frame)) == frame


@given(statuses)
def test_the_envelope_from_the_subscriber_round_trips(status: StandbyStatus) -> None:
    assert copy_data.decode_from_subscriber(copy_data.encode(status)) == status


@given(frames | statuses, st.data())
def test_an_envelope_cut_in_its_header_is_a_protocol_error(
    frame: XLogData | Keepalive | StandbyStatus, data: st.DataObject
) -> None:
    encoded = copy_data.encode(frame)
    header = copy_data.XLOG_DATA_HEADER.size if isinstance(frame, XLogData) else len(encoded) - 1
    cut = encoded[: data.draw(st.integers(0, header))]
    from_subscriber = isinstance(frame, StandbyStatus)
    decode = copy_data.decode_from_subscriber if from_subscriber else copy_data.decode_from_publisher
    with pytest.raises(ProtocolError):
        decode(cut)


@given(st.binary(max_size=40))
def test_a_damaged_envelope_raises_nothing_but_protocol_error(data: bytes) -> None:
    for decode in (copy_data.decode_from_publisher, copy_data.decode_from_subscriber):
        with suppress(ProtocolError):
            frame = decode(data)
            assert frame is None or copy_data.encode(frame) == data


@given(messages.filter(lambda message: getattr(message, "xid", None) is not None))
def test_a_number_too_large_for_its_field_is_a_value_error(message: Message) -> None:
    fields = {name: getattr(message, name) for name in message.__slots__}
    with pytest.raises(ValueError, match=message.message_type):
        encode(type(message)(**fields | {"xid": 2**32}))
