"""Rows of the change log by column, in the layout of Apache Arrow's arrays. No I/O.

    found = FoundRows.none()
    position, transaction = find_rows(body, 0, None, kinds, after, upto, found)
    rows = GatheredRows(*gather_columns(body, found.starts, found.kinds, kind, width, sources, fills))

**Purpose.** A reader of many rows needs no Python object for a row or a value. find_rows() finds the rows of a body of
messages, up to a message of another kind. gather_columns() gathers the values of rows that have the same columns.

**Invariants.**

- A value is the bytes that the publisher sent. Conversion to other types is left to the caller.
- Both functions have a twin in C with the same result, see _speedups. Damaged messages raise the errors of Decoder.
- Offsets of values are 32-bit numbers. A body of the log is smaller than that, and a fill that would exceed them raises
  OverflowError.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

from subscriber._speedups import compiled
from subscriber.errors import ProtocolError
from subscriber.protocol.copy_text import split_line
from subscriber.protocol.decode import Decoder
from subscriber.protocol.messages import Begin, Delete, Insert, OldPart, Update
from subscriber.protocol.tuple_data import UNCHANGED
from subscriber.timestamps import to_unix

SEQUENCE_WIDTH = 26  # characters of a sequence number
_MAX_NUMBER = 1 << 40
_ROWS = {0x49: b"c", 0x55: b"u", 0x44: b"d"}
_BEGIN = 0x42
_COMMIT = 0x43
_decode = Decoder().decode


Values: TypeAlias = Sequence[bytes | None]
# The open transaction: position of its commit record, time of the commit in microseconds since 1970, ID, and the number
# of its next change.
Transaction: TypeAlias = tuple[int, int, int, int]


class FoundRows(NamedTuple):
    """Rows in the order of the log. Each attribute has a number of this width for each row."""

    starts: bytearray  # 64 bits: the offset of its message in the body
    kinds: bytearray  # 32 bits: the kind of its relation
    ops: bytearray  # 8 bits: a letter; find_rows() adds c, u and d
    lsns: bytearray  # 64 bits
    times: bytearray  # 64 bits: microseconds since 1970
    xids: bytearray  # 64 bits
    numbers: bytearray  # 64 bits: the number in the transaction

    @classmethod
    def none(cls) -> FoundRows:
        """Return no rows."""
        return cls(*[bytearray() for _ in cls._fields])

    def add(self, start: int, kind: int, op: bytes, transaction: Transaction) -> None:
        """Add a row."""
        self.starts.extend(array("q", [start]).tobytes())
        self.kinds.extend(array("i", [kind]).tobytes())
        self.ops.extend(op)
        for column, value in zip(self[3:], transaction, strict=True):
            column.extend(array("q", [value]).tobytes())


def sequence_number(lsn: int, number: int) -> str:
    """Return a text that sorts in the order of changes: commit position, and number in the transaction."""
    return f"{lsn:016X}{number:010X}"


@compiled
def sequence_numbers(lsns: bytes | bytearray, numbers: bytes | bytearray) -> bytes:
    """Return the sequence numbers of rows, SEQUENCE_WIDTH characters each. Args are those of FoundRows.

    Raises:
        OverflowError: a number is negative, or does not fit.
    """
    texts = []
    for lsn, number in zip(memoryview(lsns).cast("q"), memoryview(numbers).cast("q"), strict=True):
        if lsn < 0 or not 0 <= number < _MAX_NUMBER:
            raise OverflowError("a number of a change is out of range")
        texts.append(sequence_number(lsn, number))
    return "".join(texts).encode()


@compiled
def find_rows(
    body: bytes,
    position: int,
    transaction: Transaction | None,
    kinds: Mapping[int, int],
    after: int,
    upto: int,
    found: FoundRows,
) -> tuple[int, Transaction | None]:
    """Find the rows from `position` on, up to the first message that is neither a row nor a transaction's begin or end.

    Args:
        body: messages, each after its length in four bytes.
        position: the offset of a length.
        transaction: the open transaction. None: there is none, or its rows are not wanted.
        kinds: a number for each described relation, by its OID; negative: its rows are not wanted.
        after: rows are wanted of transactions whose commit record starts at or after this position,
        upto: and before this one. The search stops at the first transaction that does not.
        found: rows are added here.

    Returns:
        The offset of the length of the message that stopped the search, or the end of the body, and the open
        transaction there.

    Raises:
        ProtocolError: a BEGIN message is damaged.
        OverflowError: a number of a BEGIN message is too large.
    """
    while position < len(body):
        length = int.from_bytes(body[position : position + 4], "big")
        start, end = position + 4, position + 4 + length
        if end > len(body) or not length:
            break
        letter = body[start]
        if letter in _ROWS:
            if transaction is not None:
                kind = kinds.get(int.from_bytes(body[start + 1 : start + 5], "big")) if length >= 5 else None
                if kind is None:
                    break
                if kind >= 0:
                    found.add(start, kind, _ROWS[letter], transaction)
                transaction = (*transaction[:3], transaction[3] + 1)
        elif letter == _BEGIN:
            begin = _decode(body[start:end])
            assert isinstance(begin, Begin)
            if begin.final_lsn >= upto:
                break
            transaction = None
            if begin.final_lsn >= after:
                transaction = int(begin.final_lsn), to_unix(begin.commit_time), begin.xid, 0
        elif letter == _COMMIT:
            transaction = None
        else:
            break
        position = end
    return position, transaction


# --- values --------------------------------------------------------------------------------------


# The number of rows without the value, and one bit for each row, least significant first: whether it has the value.
Bits: TypeAlias = tuple[int, bytes]
# The values of a column: whether there is one, 32 bits for where each one starts in the data, and for the end of the
# last one, and the data.
Cells: TypeAlias = tuple[Bits, bytes, bytes]


class GatheredRows(NamedTuple):
    """The values of rows."""

    number: int
    before: Bits
    before_columns: list[Cells]
    after: Bits
    after_columns: list[Cells]
    unsent: Cells | None  # 32 bits for each index of a column that `after` lacks; None: it lacks none


@compiled
def gather_columns(
    body: bytes,
    starts: bytes | bytearray,
    kinds: bytes | bytearray,
    kind: int,
    width: int,
    sources: Sequence[int],
    fills: Values,
) -> tuple[int, Bits, list[Cells], Bits, list[Cells], Cells | None]:
    """Gather the values of the rows of one kind, as GatheredRows has them.

    Args:
        body: the body that the rows were found in.
        starts: FoundRows.starts. A row that starts before 0 has no values.
        kinds: FoundRows.kinds.
        kind: the kind.
        width: number of columns in the rows.
        sources: for each wanted column, its index in the rows. Negative: the value is that of `fills`.
        fills: for each wanted column, the value of rows that do not have it. A key does not have it either.

    Returns:
        The rows. A value that was not sent because it did not change is that of the whole old row, if there is one.
        Otherwise it is null, and its column is in `unsent`.

    Raises:
        ProtocolError: a row is damaged, or has another number of columns.
    """
    before: list[Values | None] = []
    after: list[Values | None] = []
    unsent: list[list[int]] = []
    for start, of in zip(memoryview(starts).cast("q"), memoryview(kinds).cast("i"), strict=True):
        if of == kind:
            old, new, lacking = (None, None, []) if start < 0 else _row(body, start, width, sources, fills)
            before.append(old)
            after.append(new)
            unsent.append(lacking)
    indexes = array("i", [index for lacking in unsent for index in lacking]).tobytes()
    return (
        len(after),
        _bits([row is not None for row in before]),
        _columns(before, len(sources)),
        _bits([row is not None for row in after]),
        _columns(after, len(sources)),
        (_bits([bool(lacking) for lacking in unsent]), _offsets(map(len, unsent)), indexes) if indexes else None,
    )


def _row(
    body: bytes, start: int, width: int, sources: Sequence[int], fills: Values
) -> tuple[Values | None, Values | None, list[int]]:
    length = int.from_bytes(body[start - 4 : start], "big")
    message = _decode(body[start : start + length])
    before: Values | None = None
    after: Values | None = None
    unsent: list[int] = []
    if not isinstance(message, Insert | Update | Delete):
        raise ProtocolError("a row of the change log is another message")
    if not isinstance(message, Insert) and message.old is not None:
        _check_width(message.old.ncols, width)
        is_key = message.old_part is OldPart.KEY
        before = _placed(message.old.split()[1], sources, fills, is_key=is_key)
    if not isinstance(message, Delete):
        _check_width(message.new.ncols, width)
        status, values = message.new.split()
        after = _placed(values, sources, fills)
        for index, source in enumerate(sources):
            if source >= 0 and status[source] == UNCHANGED:
                if before is not None and message.old_part is OldPart.ROW:  # type: ignore[union-attr]
                    after[index] = before[index]
                else:
                    unsent.append(index)
    return before, after, unsent


def _check_width(ncols: int, width: int) -> None:
    if ncols != width:
        raise ProtocolError(f"a row has {ncols} columns, but its relation has {width}")


def _placed(values: Values, sources: Sequence[int], fills: Values, *, is_key: bool = False) -> list[bytes | None]:
    return [
        values[source] if source >= 0 else None if is_key else fill for source, fill in zip(sources, fills, strict=True)
    ]


def _columns(rows: Sequence[Values | None], width: int) -> list[Cells]:
    return [_cells([None if row is None else row[index] for row in rows]) for index in range(width)]


def _cells(values: Values) -> Cells:
    data = b"".join([value for value in values if value is not None])
    return _bits([value is not None for value in values]), _offsets(len(value or b"") for value in values), data


def _bits(present: Sequence[bool]) -> Bits:
    digits = "".join("01"[is_there] for is_there in reversed(present))
    return present.count(False), int(digits or "0", 2).to_bytes((len(present) + 7) // 8, "little")


def _offsets(lengths: Iterable[int]) -> bytes:
    return array("i", accumulate(lengths, initial=0)).tobytes()


@compiled
def split_lines(data: bytes, width: int) -> list[Cells]:
    """Return the values of rows in COPY's text format by column.

    Args:
        data: the lines, each with its newline.
        width: number of columns.

    Raises:
        ProtocolError: a line has another number of columns.
    """
    return _columns([split_line(line, width)[1] for line in data.split(b"\n")[:-1]], width)


@compiled
def unhex_values(offsets: bytes, data: bytes) -> tuple[bytes, bytes]:
    """Convert the values of a column of bytea to bytes.

    Args:
        offsets: the offsets of Cells.
        data: its data; each value is a backslash, x, and hexadecimal digits.

    Returns:
        The offsets and the data of the bytes.

    Raises:
        ValueError: a value is something else.
    """
    places = memoryview(offsets).cast("i")
    texts = memoryview(data)
    values = [bytes.fromhex(str(texts[start + 2 : end], "ascii")) for start, end in pairwise(places)]
    return _offsets(map(len, values)), b"".join(values)
