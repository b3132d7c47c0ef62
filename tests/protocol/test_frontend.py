"""The messages of a session as bytes, each compared with the chapter "Message Formats"."""

from __future__ import annotations

import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subscriber.errors import ProtocolError
from subscriber.protocol import frontend


@pytest.mark.parametrize(
    ("built", "expected"),
    [
        (frontend.query("SELECT 1"), "51 0000000d 53454c4543542031 00"),
        (frontend.parse(b"s1", "SELECT $1"), "50 00000013 733100 53454c454354202431 00 0000"),
        (
            frontend.bind_execute(b"s1", frontend.ALL_TEXT, frontend.text_parameters(["a", None])),
            "42 00000017 00 733100 0000 0002 00000001 61 ffffffff 0000  45 00000009 00 00000000",
        ),
        (
            frontend.bind_execute(b"", b"\0\1\0\1", b"\0\1\0\0\0\1\7"),
            "42 00000013 00 00 00010001 0001 00000001 07 0000  45 00000009 00 00000000",
        ),
        (frontend.text_parameters([]), "0000"),
        (frontend.copy_data(b"row\n"), "64 00000008 726f770a"),
        (frontend.copy_fail("no"), "66 00000007 6e6f 00"),
        (frontend.close_statement(b"s1"), "43 00000008 53 733100"),
        (frontend.SYNC, "53 00000004"),
        (frontend.FLUSH, "48 00000004"),
        (frontend.TERMINATE, "58 00000004"),
        (frontend.COPY_DONE, "63 00000004"),
    ],
)
def test_messages_to_the_server_have_the_documented_bytes(built: bytes, expected: str) -> None:
    assert built == bytes.fromhex(expected)


def test_messages_of_the_server_are_read_from_the_documented_bytes() -> None:
    assert frontend.read_fields(b"SERROR\0VERROR\0C42601\0Msyntax error\0\0") == {
        "S": "ERROR",
        "V": "ERROR",
        "C": "42601",
        "M": "syntax error",
    }
    column = b"\0" * 18
    assert frontend.read_columns(b"\0\2a\0" + column + "é\0".encode() + column) == ("a", "é")
    assert frontend.read_row(b"\0\3\0\0\0\1x\xff\xff\xff\xff\0\0\0\0") == ("x", None, "")
    assert frontend.read_parameter_status(b"TimeZone\0UTC\0") == ("TimeZone", "UTC")


def test_bytes_that_are_not_utf8_come_back_unchanged() -> None:
    """A server with encoding SQL_ASCII sends unchecked bytes."""
    (value,) = frontend.read_row(b"\0\1\0\0\0\2\xe9\xff")
    assert value is not None
    assert frontend.text_parameters([value]) == b"\0\1\0\0\0\2\xe9\xff"


values = st.lists(st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=5)


@given(values=values)
def test_a_row_is_read_as_parameters_are_written(values: list[str | None]) -> None:
    assert frontend.read_row(frontend.text_parameters(values)) == tuple(values)


READERS = [frontend.read_fields, frontend.read_columns, frontend.read_row, frontend.read_parameter_status]


@pytest.mark.parametrize("read", READERS, ids=lambda r: r.__name__)
@given(body=st.binary(max_size=40))
def test_damage_is_a_protocol_error(read: object, body: bytes) -> None:
    assert callable(read)
    with suppress(ProtocolError):
        read(body)


@pytest.mark.parametrize("cut", range(12))
def test_a_row_cut_anywhere_is_a_protocol_error(cut: int) -> None:
    body = b"\0\2\0\0\0\1x\0\0\0\1y"
    with pytest.raises(ProtocolError):
        frontend.read_row(body[:cut])


def test_a_message_counts_its_own_length() -> None:
    data = frontend.message(b"Q", b"abc")
    assert struct.unpack(">cI", data[:5]) == (b"Q", len(data) - 1)
