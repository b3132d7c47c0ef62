"""PostgreSQL's frontend/backend protocol, version 3: the messages of a session, as bytes.

Only what a session needs after authentication. A message is a type byte, a length that counts
itself but not the type byte, and a body. Building is one function a message; `body` arguments of
the readers are without type byte and length. `codec` is that of the session's client_encoding (encodings.py).

Source: src/include/libpq/protocol.h and the chapter "Message Formats" of the documentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct

from subscriber._speedups import compiled
from subscriber.errors import ProtocolError
from subscriber.protocol.encodings import UTF8, decode, encode
from subscriber.protocol.reader import Reader
from subscriber.sqlstate import CHARACTER_NOT_IN_REPERTOIRE

LARGE = 256 * 1024  # bytes; a larger payload is sent on its own, since joining it with others would copy it

HEADER = Struct(">cI")
_INT16 = Struct(">H")
_INT32 = Struct(">i")
_OID = Struct(">I")
_BIND_HEAD = Struct(">cI")
_COPY_DATA = 0x64  # d

# No portal name, no row limit: every Execute runs its statement to the end.
_EXECUTE = b"E\0\0\0\x09\0\0\0\0\0"
SYNC = b"S\0\0\0\x04"
FLUSH = b"H\0\0\0\x04"
TERMINATE = b"X\0\0\0\x04"
COPY_DONE = b"c\0\0\0\x04"
NULL = b"\xff\xff\xff\xff"  # a parameter's length when it is NULL


def c_string(text: str, codec: str = UTF8) -> bytes:
    """Raises ProtocolError for text with a NUL, at which a server would stop reading."""
    data = encode(text, codec)
    if b"\0" in data:
        raise ProtocolError('invalid byte sequence for encoding "UTF8": 0x00', sqlstate=CHARACTER_NOT_IN_REPERTOIRE)
    return data + b"\0"


def message(kind: bytes, body: bytes) -> bytes:
    return HEADER.pack(kind, len(body) + 4) + body


def query(sql: str, codec: str = UTF8) -> bytes:
    return message(b"Q", c_string(sql, codec))


def parse(name: bytes, sql: str, types: Sequence[int] = (), codec: str = UTF8) -> bytes:
    """Prepare `sql` under `name`; the server infers the type of a parameter that has no OID in `types`, or 0."""
    oids = _INT16.pack(len(types)) + b"".join(map(_OID.pack, types))
    return message(b"P", name + b"\0" + c_string(sql, codec) + oids)


Parameters = bytes | list[bytes]  # of bind_execute(); a list has them in parts, where one is large


def bind_execute(name: bytes, formats: bytes, parameters: bytes) -> bytes:
    """Run the prepared statement `name` once.

    Results are in text format.

    Args:
        name: name of the prepared statement.
        formats: the number of parameters (Int16), then one Int16 for each, 0 text and 1 binary. A zero count: all text.
        parameters: the number of parameters (Int16), then each value after its length (Int32), or NULL.
    """
    length = 4 + 1 + len(name) + 1 + len(formats) + len(parameters) + 2
    return b"".join((_BIND_HEAD.pack(b"B", length), b"\0", name, b"\0", formats, parameters, b"\0\0", _EXECUTE))


def bind_execute_parts(name: bytes, formats: bytes, parameters: list[bytes]) -> list[bytes]:
    """The same in parts, as the parameters are."""
    before = b"".join((b"\0", name, b"\0", formats))
    length = 4 + len(before) + sum(map(len, parameters)) + 2
    return [_BIND_HEAD.pack(b"B", length) + before, *parameters, b"\0\0" + _EXECUTE]


ALL_TEXT = _INT16.pack(0)


def text_parameters(values: Sequence[str | None], codec: str = UTF8) -> bytes:
    """The `parameters` of bind_execute() for values that are all text or NULL."""
    parts = [_INT16.pack(len(values))]
    for value in values:
        if value is None:
            parts.append(NULL)
        else:
            data = encode(value, codec)
            parts += (_INT32.pack(len(data)), data)
    return b"".join(parts)


def copy_data(payload: bytes) -> bytes:
    return copy_data_head(payload) + payload


def copy_data_head(payload: bytes) -> bytes:
    """Return the header of a CopyData message with this payload."""
    return HEADER.pack(b"d", len(payload) + 4)


@compiled
def cut_copy_data(buffer: bytearray, start: int, end: int, found: list[bytes]) -> tuple[int, int]:
    """Add the payloads of CopyData messages to `found`, from `start` up to the first other or incomplete message.

    Where that begins, and the sum of the lengths that the messages say they have.
    """
    size = 0
    view = memoryview(buffer)
    while end - start >= 5 and buffer[start] == _COPY_DATA:
        length = HEADER.unpack_from(buffer, start)[1]
        stop = start + 1 + length
        if length < 4 or stop > end:
            break
        found.append(bytes(view[start + 5 : stop]))
        start = stop
        size += length
    return start, size


def copy_fail(reason: str) -> bytes:
    return message(b"f", c_string(reason))


def read_fields(body: bytes, codec: str = UTF8) -> dict[str, str]:
    """The fields of an ErrorResponse or NoticeResponse: one-letter code to text. Long texts are shortened."""
    read = Reader(body, "ErrorResponse")
    fields: dict[str, str] = {}
    while (code := read.take(1)) != b"\0":
        fields[decode(code)] = read.text(codec)
    return fields


def read_columns(body: bytes, codec: str = UTF8) -> tuple[str, ...]:
    """The column names of a RowDescription."""
    read = Reader(body, "RowDescription")
    names = []
    for _ in range(read.uint(2)):
        names.append(read.identifier(codec))
        read.take(18)  # table, attribute, type, its length and modifier, format
    return tuple(names)


def read_row(body: bytes, codec: str = UTF8) -> tuple[str | None, ...]:
    """The values of a DataRow in text format; None is NULL."""
    read = Reader(body, "DataRow")
    row: list[str | None] = []
    for _ in range(read.uint(2)):
        length = read.uint(4)
        row.append(None if length == 0xFFFFFFFF else decode(read.take(length), codec))
    return tuple(row)


def read_parameter_status(body: bytes) -> tuple[str, str]:
    """Read the name and the value of a ParameterStatus. A long value is shortened."""
    read = Reader(body, "ParameterStatus")
    return read.identifier(), read.text()


def close_statement(name: bytes) -> bytes:
    return message(b"C", b"S" + name + b"\0")
