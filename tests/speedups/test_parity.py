r"""Each compiled function compared with its reference: the same results and errors for any bytes.

A checked build detects reads past the end; reinstall afterwards:

    CFLAGS='-g -fsanitize=address,undefined' .venv/bin/pip install --no-build-isolation --no-deps -e .
    LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" PYTHONMALLOC=malloc \\
        ASAN_OPTIONS=detect_leaks=0 .venv/bin/pytest tests/speedups/test_parity.py
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from datetime import datetime, timedelta
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subscriber import _speedups
from subscriber.change_stream import changes
from subscriber.change_stream.changes import Change, Delete, Insert, Update
from subscriber.change_stream.rows import Relation, Row
from subscriber.change_stream.types import binary, text
from subscriber.change_stream.types.registry import Types
from subscriber.changelog import row_columns
from subscriber.lsn import Lsn
from subscriber.protocol import copy_data, encode, frontend, messages, row_extraction, tuple_data
from subscriber.protocol.tuple_data import TupleData
from tests.protocol.strategies import frames, rows

pytestmark = pytest.mark.skipif(_speedups.module is None, reason=f"nothing to compare: {_speedups.why_not}")

Outcome = tuple[object, ...]


def outcome(function: Callable[..., Any], *arguments: object) -> Outcome:
    """Return the result or error of a call. It uses repr(), in which NaN equals itself and 1.0 differs from 1."""
    try:
        return ("result", repr(function(*arguments)))
    except Exception as error:
        return (type(error), str(error), getattr(error, "detail", None))


def both(name: str, *arguments: object) -> None:
    assert outcome(getattr(_speedups.module, name), *arguments) == outcome(_speedups.references[name], *arguments)


def damaged(data: bytes, draw: st.DataObject) -> bytes:
    """Return `data`, truncated or with a few bytes changed, or unchanged."""
    bytes_damaged = bytearray(data)
    if bytes_damaged:
        for position in draw.draw(st.lists(st.integers(0, len(bytes_damaged) - 1), max_size=3)):
            bytes_damaged[position] = draw.draw(st.integers(0, 255))
    return bytes(bytes_damaged[: draw.draw(st.integers(0, len(bytes_damaged)) | st.just(len(bytes_damaged)))])


def test_every_twin_has_a_reference() -> None:
    twins = {name for name in dir(_speedups.module) if not name.startswith("__")} - {"SOURCE", "refer"}
    assert twins == _speedups.references.keys()


# --- values ---------------------------------------------------------------------------------------

TEXTS = {
    "text": [b"", b"x", "☃".encode(), b"\xff\xfe", b"\xed\xa0\x80"],
    "boolean": [b"t", b"f", b"", b"tt"],
    "integer": [
        b"0",
        b"-0",
        b"-9223372036854775808",
        b"999999999999999999",
        b"1" * 30,
        b"",
        b"-",
        b" 1",
        b"+1",
        b"1_0",
    ],
    "float8": [
        b"0.1",
        b"-0",
        b"1e308",
        b"1e309",
        b"Infinity",
        b"-Infinity",
        b"NaN",
        b"nan",
        b"",
        b" 1",
        b"1 ",
        b"0x1p3",
    ],
    "numeric": [
        b"0",
        b"1.50",
        b"-0.000123",
        b"NaN",
        b"-Infinity",
        b"",
        b"-",
        b"1.2.3",
        b"1e30",
        b"12345678901234567890.1",
    ],
    "parse_date": [
        b"2024-02-29",
        b"2023-02-29",
        b"0001-01-01",
        b"infinity",
        b"-infinity",
        b"10000-01-01",
        b"2024-1-001",
    ],
    "timestamp": [
        *(b"2024-01-02 03:04:05.678", b"2024-01-02 03:04:05", b"1999-12-31 23:59:59.999999", b"infinity", b"-infinity"),
        *(b"2024-01-02 24:00:00", b"2024-01-02 03:04:60", b"2024-01-02 03:04:05.", b"2024-01-02 03:04:05.1234567"),
        *(b"0044-03-15 00:00:00 BC", b"10000-01-01 00:00:00", b"2024-01-02 03:04:05+00", b"2024-01-02", b""),
    ],
    "timestamptz": [
        *(b"2024-01-02 03:04:05+00", b"2024-01-02 03:04:05.5-11:30", b"1899-01-01 00:00:00+00:53:28", b"infinity"),
        *(b"2024-01-02 03:04:05-00", b"2024-01-02 03:04:05+24", b"2024-01-02 03:04:05+15:60", b"2024-01-02 03:04:05"),
        *(b"2024-01-02 03:04:05+0", b"2024-01-02 03:04:05.123456+05:45", b"2024-01-02 03:04:05+00 BC", b"-infinity"),
    ],
}
BINARIES = {
    "boolean": [b"\0", b"\1", b"", b"\1\1", b"\2"],
    "integer": [b"\xff\xff", b"\x7f\0\0\1", b"\x80" + bytes(7), b"", b"\1", bytes(16)],
    "float8": [bytes(8), b"\x7f\xf0" + bytes(6), b"\x7f\xf8" + bytes(6), b"", bytes(7), bytes(9)],
    "numeric": [
        *(bytes(8), b"\0\0\0\0\xc0\0\0\0", b"\0\0\0\0\xd0\0\0\0", b"\0\0\0\0\xf0\0\0\0", b"", bytes(7)),
        *(b"\0\1\0\0\0\0\0\0\x04\xd2", b"\0\1\xff\xff\x40\0\0\2\x04\xd2", b"\0\2\0\1\0\0\0\3\0\1\x27\x0f\0\0"),
        *(b"\0\1\0\7\0\0\0\x40\0\1", b"\0\1\0\0\0\0\0\0\xff\xff", b"\xff\xff\0\0\0\0\0\0", b"\0\1\x7f\xff\0\0\0\0\0\1"),
    ],
    "parse_date": [
        bytes(4),
        b"\x7f\xff\xff\xff",
        b"\x80\0\0\0",
        b"\0\x2c\x95\xd3",
        b"\0\x2c\x95\xd4",
        b"\xff\xf4\xdb\xf9",
        b"",
    ],
    "timestamp": [bytes(8), b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\x80" + bytes(7), b"\x7f" + bytes(7), b"", bytes(9)],
    "timestamptz": [
        bytes(8),
        b"\xff" * 8,
        b"\x7f" + b"\xff" * 7,
        b"\x80" + bytes(7),
        b"\x7f" + bytes(7),
        b"",
        bytes(9),
    ],
}
EXAMPLES = [
    *((f"text_{name}", value) for name, values in TEXTS.items() for value in values),
    *((f"binary_{name}", value) for name, values in BINARIES.items() for value in values),
]


@pytest.mark.parametrize(("name", "value"), EXAMPLES, ids=repr)
def test_values_of_every_kind_are_read_as_by_the_reference(name: str, value: bytes) -> None:
    both(name, value)


@given(st.sampled_from(EXAMPLES), st.data())
def test_damaged_values_are_read_as_by_the_reference(example: tuple[str, bytes], data: st.DataObject) -> None:
    both(example[0], damaged(example[1], data))


@given(st.sampled_from(sorted({name for name, _ in EXAMPLES})), st.binary(max_size=24))
def test_any_bytes_are_read_as_a_value_as_by_the_reference(name: str, value: bytes) -> None:
    both(name, value)


@given(st.datetimes(), st.integers(-1439, 1439), st.booleans())
def test_times_are_read_as_by_the_reference(when: datetime, minutes: int, fraction: bool) -> None:
    written = f"{when:%H:%M:%S}" + (f".{when.microsecond:06}".rstrip("0").rstrip(".") if fraction else "")
    at = f"{when.year:04}-{when.month:02}-{when.day:02} {written}"
    zone = f"{'-' if minutes < 0 else '+'}{abs(minutes) // 60:02}" + (
        f":{abs(minutes) % 60:02}" if minutes % 60 else ""
    )
    both("text_timestamp", at.encode())
    both("text_timestamptz", (at + zone).encode())
    assert text.timestamp(at.encode()) == (when if fraction else when.replace(microsecond=0))
    micros = (when - datetime(2000, 1, 1)) // timedelta(microseconds=1)
    both("binary_timestamptz", micros.to_bytes(8, "big", signed=True))
    assert binary.timestamp(micros.to_bytes(8, "big", signed=True)) == when
    both("binary_parse_date", (micros // 86_400_000_000).to_bytes(4, "big", signed=True))


@given(
    st.lists(st.integers(0, 9999), max_size=20), st.integers(-4, 20), st.sampled_from([0, 0x4000]), st.integers(0, 70)
)
def test_binary_numbers_are_read_as_by_the_reference(groups: list[int], weight: int, sign: int, scale: int) -> None:
    head = [len(groups), weight % 0x10000, sign, scale]
    both("binary_numeric", b"".join(number.to_bytes(2, "big") for number in head + groups))


# --- rows and changes -----------------------------------------------------------------------------

FITTING = {
    20: b"7",
    23: b"-8",
    1700: b"1.5",
    1184: b"2024-01-02 03:04:05+00",
    16: b"t",
    25: b"x",
    1007: b"{1}",
    4711: b"",
}
TYPES = list(FITTING)


def table(relid: int, ncols: int) -> Relation:
    columns = tuple(messages.RelationColumn(i == 0, f"c{i}", TYPES[i % len(TYPES)], -1) for i in range(ncols))
    return Relation(messages.Relation(None, relid, "s", "t", messages.ReplicaIdentity.DEFAULT, columns), Types())


KNOWN = {relid: table(relid, relid - 100) for relid in range(100, 112)}


@st.composite
def good_rows(draw: st.DrawFn, ncols: int) -> TupleData:
    """Draw a row of table(…, ncols): text that fits the types, NULLs, and unsent values."""
    status = draw(st.lists(st.sampled_from(b"tttnu"), min_size=ncols, max_size=ncols))
    values = [FITTING[TYPES[i % len(TYPES)]] if kind == tuple_data.TEXT else None for i, kind in enumerate(status)]
    return TupleData.join(bytes(status), values)


@st.composite
def row_changes(draw: st.DrawFn) -> messages.Message:
    ncols = draw(st.integers(0, 11))
    old, new = draw(good_rows(ncols)), draw(good_rows(ncols) | rows)
    relid = draw(st.just(100 + ncols) | st.integers(99, 112))
    match draw(st.sampled_from(["I", "D", "U", "K", "O"])):
        case "I":
            return messages.Insert(None, relid, new)
        case "D":
            return messages.Delete(None, relid, draw(st.sampled_from(messages.OldPart)), new)
        case "U":
            return messages.Update(None, relid, None, None, new)
        case part:
            return messages.Update(None, relid, messages.OldPart(ord(part)), old, new)


def told(batch: list[Change]) -> list[Outcome]:
    """Return all values that a consumer can read from changes."""
    outcomes: list[Outcome] = []
    for change in batch:
        assert isinstance(change, Insert | Update | Delete)
        outcomes.append((type(change), str(change.relation), change.subxid))
        for row in (change.old, change.new):
            if row is not None:
                outcomes.append((row._start, row._end, row._key_only, outcome(row.dict), row._older is change.old))
                outcomes += [outcome(row.raw, name) for name in row]
            outcomes.append((row is None,))
    return outcomes


@given(st.lists(row_changes(), max_size=4), st.sampled_from([0, 25]), st.booleans(), st.data())
def test_changes_are_decoded_as_by_the_reference(
    given: list[messages.Message], letter: int, in_block: bool, data: st.DataObject
) -> None:
    sent = []
    for message in given:
        body = encode.encode(message)
        if in_block:
            body = body[:1] + data.draw(st.binary(min_size=4, max_size=4)) + body[1:]
        frame = (b"w" + bytes(24) if letter else b"") + body
        sent.append(data.draw(st.just(frame) | st.builds(damaged, st.just(frame), st.just(data))))
    results = []
    for take in (changes.take_changes, _speedups.references["changes_take_changes"]):
        batch: list[Change] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(changes, "take_changes", take)
            ended = outcome(lambda batch=batch: changes.row_changes(sent, 0, KNOWN, batch, letter, in_block=in_block))
        results.append((ended, told(batch)))
    assert results[0] == results[1]


@given(st.integers(0, 11), st.booleans(), st.data())
def test_rows_are_read_as_by_the_reference(ncols: int, key_only: bool, data: st.DataObject) -> None:
    row = data.draw(good_rows(ncols) | rows)
    raw = data.draw(st.just(row.raw) | st.builds(damaged, st.just(row.raw), st.just(data)))
    start = data.draw(st.just(0) | st.integers(0, len(raw)))
    relation = KNOWN[100 + ncols]
    whole = Row(relation, bytes(start) + b"n" * ncols, start, start + ncols)
    decoded = Row(relation, raw, start, len(raw), key_only=key_only, older=data.draw(st.sampled_from([None, whole])))
    assert outcome(decoded.dict) == outcome(_speedups.references["rows_RowData"].dict, decoded)


def test_a_row_outside_of_its_bytes_is_refused() -> None:
    for start, end in ((-1, 0), (0, 4), (3, 2)):
        with pytest.raises(ValueError, match="lies within"):
            Row(KNOWN[100], b"abc", start, end)


def test_any_error_of_a_type_is_told_as_the_reference_tells_it() -> None:
    relation = table(1, 1)
    for error in (ValueError, OverflowError, TypeError, MemoryError):

        def broken(value: bytes, error: type[Exception] = error) -> object:
            raise error("of the type")

        relation.plan = {"c0": None}, (("c0", broken, broken),)
        row = Row(relation, b"t\0\0\0\1x", 0, 6)
        assert outcome(row.dict) == outcome(_speedups.references["rows_RowData"].dict, row)

    def stopped(value: bytes) -> object:
        raise KeyboardInterrupt

    relation.plan = {"c0": None}, (("c0", stopped, stopped),)
    with pytest.raises(KeyboardInterrupt):
        Row(relation, b"t\0\0\0\1x", 0, 6).dict()


# --- extracting rows --------------------------------------------------------------------------------------


@given(rows, st.binary(max_size=5), st.integers(-1, 14), st.data())
def test_columns_are_cut_as_by_the_reference(row: TupleData, before: bytes, ncols: int, data: st.DataObject) -> None:
    raw = before + data.draw(st.just(row.raw) | st.builds(damaged, st.just(row.raw), st.just(data)))
    pos = data.draw(st.just(len(before)) | st.integers(-2, len(raw) + 2))
    ncols = data.draw(st.just(row.ncols) | st.just(ncols))
    both("tuple_data_skip_columns", raw, pos, ncols)
    both("tuple_data_split_columns", raw, pos, ncols)


def add(row: row_extraction.Cells) -> None:
    """Add the row, in the format of these tests."""


ncols, row_number = st.just(3) | st.integers(0, 4), st.sampled_from([1, 1, 2])
forms, keys = st.sampled_from([0x62, 0x74]), st.sampled_from([(), (), (0,), (2, 1)])
shapes = st.builds(row_extraction.RowLayout, st.just(add), ncols, row_number, forms, st.booleans(), keys)
a_run = st.builds(row_extraction.RunLayout, ncols, row_number, forms, keys)


@given(st.lists(good_rows(3) | rows, min_size=1, max_size=2), st.binary(max_size=5), shapes, st.data())
def test_rows_are_extracted_as_by_the_reference(
    given: list[TupleData], before: bytes, shape: row_extraction.RowLayout, data: st.DataObject
) -> None:
    raw = before + damaged(b"N\0\3".join([row.raw for row in given]), data)
    both("row_extraction_extract_row", raw, data.draw(st.just(len(before)) | st.integers(-2, len(raw) + 2)), shape)


server_messages = st.tuples(st.sampled_from([b"d", b"d", b"d", b"N"]), st.binary(max_size=30))


@given(st.lists(server_messages, max_size=6), st.integers(0, 9), st.data())
def test_copy_data_is_cut_as_by_the_reference(sent: list[tuple[bytes, bytes]], start: int, data: st.DataObject) -> None:
    stream = bytes(start) + b"".join(frontend.message(kind, body) for kind, body in sent)
    buffer = bytearray(stream[:start] + damaged(stream[start:], data))
    end = data.draw(st.just(len(buffer)) | st.integers(0, len(buffer)))
    results = []
    for function in (frontend.cut_copy_data, _speedups.references["frontend_cut_copy_data"]):
        gathered: list[bytes] = []
        results.append((outcome(function, buffer, start, end, gathered), gathered))
    assert results[0] == results[1]


@given(st.lists(frames.map(copy_data.encode) | st.binary(max_size=20), max_size=6))
def test_copy_data_is_weighed_as_by_the_reference(sent: list[bytes]) -> None:
    both("copy_data_weigh", sent)


@st.composite
def of_two(draw: st.DrawFn) -> bytes:
    """Draw a change with one or two rows, most often complete."""
    drawn = draw(st.lists(good_rows(3) | rows, min_size=1, max_size=2))
    return b"w" + bytes(24) + b"U\0\0\0\1N\0\3" + b"N\0\3".join([row.raw for row in drawn])


@given(st.lists(of_two(), max_size=6), a_run, st.integers(1, 200), st.data())
def test_runs_of_changes_are_taken_as_by_the_reference(
    given: list[bytes], run: row_extraction.RunLayout, most: int, data: st.DataObject
) -> None:
    waiting = deque([damaged(change, data) for change in given])
    both("row_extraction_extract_keys", waiting, most % 8, most, most + 20, b"U\0\0\0\1N\0\3", run)


values = st.binary(max_size=3) | st.sampled_from([b"\\", b"\t", b"a\nb", b"\r", b"\\N"])
cells = st.lists(
    st.builds(lambda value: len(value).to_bytes(4, "big") + value, values) | st.just(row_extraction.NULL_CELL)
)


@given(st.lists(of_two() | cells | st.lists(st.none() | st.binary(max_size=5)), max_size=4), forms, st.data())
def test_rows_are_joined_as_by_the_reference(given: list[Any], form: int, data: st.DataObject) -> None:
    """Of any value, whole or not."""
    given = [damaged(row, data) if isinstance(row, bytes) else row for row in given]
    both("row_encoding_copy_rows", given, form)
    both("row_encoding_columns", given, data.draw(st.lists(st.integers(-4, 1), max_size=3)), form)


@given(st.lists(st.lists(good_rows(3), max_size=3), max_size=4), st.booleans(), st.integers(1, 400), st.data())
def test_whole_transactions_are_taken_as_by_the_reference(
    given: list[list[TupleData]], inside: bool, most: int, data: st.DataObject
) -> None:
    payloads = []
    for xid, transaction_rows in enumerate(given):
        lsn = data.draw(st.just(Lsn(2**63 + xid)) | st.just(Lsn(7)))
        begin, commit = messages.Begin(Lsn(2**63 + xid), -1, xid), messages.Commit(lsn, Lsn(lsn + 1), 0)
        kinds = [data.draw(st.sampled_from([messages.Insert, messages.Update])) for _ in transaction_rows]
        made = [
            messages.Insert(None, 1, row) if kind is messages.Insert else messages.Update(None, 2, None, None, row)
            for kind, row in zip(kinds, transaction_rows, strict=True)
        ]
        payloads += [b"w" + bytes(24) + encode.encode(message) for message in (begin, *made, commit)]
    wrong = data.draw(st.none() | st.integers(0, len(payloads)))
    waiting = deque(damaged(payload, data) if i == wrong else payload for i, payload in enumerate(payloads))
    if inside and waiting:
        waiting.popleft()
    shape = {b"I": data.draw(shapes), b"U": data.draw(shapes | st.none())}
    outcomes = []
    for function in (row_extraction.extract_changes, _speedups.references["row_extraction_extract_changes"]):
        asked: list[bytes] = []

        def find(head: bytes, asked: list[bytes] = asked) -> row_extraction.RowLayout | None:
            asked.append(head)
            return shape.get(head[:1])

        outcomes.append((outcome(function, waiting, most % 12, most, most + 20, find, inside), asked))
    assert outcomes[0] == outcomes[1]


def test_a_whole_transaction_is_found() -> None:
    """And one that is not whole is left alone."""
    row = TupleData(b"t\0\0\0\1x" * 3, 3)
    sent: list[messages.Message] = [
        messages.Begin(Lsn(5), 7, 1),
        messages.Insert(None, 1, row),
        messages.Commit(Lsn(5), Lsn(8), 0),
    ]
    payloads = [b"w" + bytes(24) + encode.encode(message) for message in sent]
    shape = row_extraction.RowLayout(add, 3, 1, 0x74, False, (0,))
    for function in (row_extraction.extract_changes, _speedups.references["row_extraction_extract_changes"]):
        ended, changes, cut = function([*payloads, *payloads[:2]], 10, 10**6, 10**6, lambda _: shape, False)
        assert ended == [(5, 7, 1, 8, 1)]
        assert changes == payloads[1:2]
        assert cut == [(add, [b"\0\0\0\1x"] * 3)]


# --- rows of the change log by column -----------------------------------------------------------------


@st.composite
def logged(draw: st.DrawFn) -> messages.Message:
    """Draw a message of the change log. Relation n has n columns, most often."""
    lsns = st.integers(1, 40).map(Lsn) | st.sampled_from([Lsn(2**63), Lsn(2**64 - 1)])
    match draw(st.sampled_from("BBC.IIUDKO")):
        case "B":
            return messages.Begin(
                draw(lsns), draw(st.sampled_from([0, -5, 2**63 - 1])), draw(st.integers(0, 2**32 - 1))
            )
        case "C":
            return messages.Commit(draw(lsns), Lsn(41), 0)
        case ".":
            return messages.Origin(Lsn(1), "")
        case letter:
            ncols = draw(st.just(3) | st.integers(0, 4))
            old, new = draw(good_rows(ncols)), draw(good_rows(ncols) | rows)
            if letter == "I":
                return messages.Insert(None, ncols, new)
            if letter == "D":
                return messages.Delete(None, ncols, draw(st.sampled_from(messages.OldPart)), new)
            part = None if letter == "U" else messages.OldPart(ord(letter))
            return messages.Update(None, ncols, part, None if part is None else old, new)


transactions = st.none() | st.tuples(*[st.integers(0, 50)] * 4) | st.just((2**63, 0, 0, 0)) | st.just((1, 2, 3, 2**40))
sources = st.lists(st.integers(-1, 3), max_size=5)
fills = st.lists(st.sampled_from([None, b"", b"fill"]), min_size=5, max_size=5)


@given(st.lists(logged(), max_size=8), transactions, sources, fills, st.data())
def test_rows_are_transposed_as_by_the_reference(
    given: list[messages.Message], open_: Any, sources: list[int], fills: list[bytes | None], data: st.DataObject
) -> None:
    parts = [encode.encode(message) for message in given]
    parts = [data.draw(st.just(part) | st.builds(damaged, st.just(part), st.just(data))) for part in parts]
    body = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    body = data.draw(st.just(body) | st.builds(damaged, st.just(body), st.just(data)))
    kinds = {0: 0, 2: -1, 3: 1}
    position = data.draw(st.just(0) | st.integers(0, len(body)))
    results = []
    for function in (row_columns.find_rows, _speedups.references["row_columns_find_rows"]):
        columns_found = row_columns.FoundRows.none()
        results.append((outcome(function, body, position, open_, kinds, 5, 2**64 - 1, columns_found), columns_found))
    assert results[0] == results[1]
    both("row_columns_sequence_numbers", columns_found.lsns, columns_found.numbers)
    starts, of = bytes(columns_found.starts), bytes(columns_found.kinds)
    if data.draw(st.booleans()):
        starts, of = damaged(starts, data), damaged(of, data)
    for kind, width in ((0, 0), (1, 3)):
        both("row_columns_gather_columns", body, starts, of, kind, width, sources, fills[: len(sources)])


fields = st.sampled_from(
    [b"\\N", b"", b"plain", b"\\\\N", b"a\\tb\\nc\\\\", b"\\b\\f\\r\\v", b"\\x41", b"\\", b"\\q", b"N"]
)


@given(st.lists(st.lists(fields, min_size=2, max_size=2), max_size=5), st.integers(0, 3), st.data())
def test_lines_of_copy_are_transposed_as_by_the_reference(
    rows: list[list[bytes]], width: int, data: st.DataObject
) -> None:
    lines = b"".join(b"\t".join(row) + b"\n" for row in rows)
    both("row_columns_split_lines", lines, 2)
    both("row_columns_split_lines", damaged(lines, data), width)


@given(st.lists(st.binary(max_size=4)), st.sampled_from([b"\\x", b"", b"\\"]), st.data())
def test_bytes_of_a_column(values: list[bytes], prefix: bytes, data: st.DataObject) -> None:
    texts = [prefix + value.hex().encode() for value in values]
    offsets = array("i", accumulate(map(len, texts), initial=0)).tobytes()
    text = damaged(b"".join(texts), data)
    both("row_columns_unhex_values", offsets, text)
    both("row_columns_unhex_values", damaged(offsets, data), text)
    if prefix == b"\\x":
        plain = array("i", accumulate(map(len, values), initial=0)).tobytes()
        assert row_columns.unhex_values(offsets, b"".join(texts)) == (plain, b"".join(values))


def test_values_of_rows_by_column() -> None:
    """A value that was not sent is that of a whole old row; otherwise its column is named."""
    old, new = TupleData.join(b"tnt", [b"1", None, b"b"]), TupleData.join(b"tun", [b"2", None, None])
    sent: list[messages.Message] = [
        messages.Begin(Lsn(5), 7, 1),
        messages.Update(None, 3, messages.OldPart.ROW, old, new),
        messages.Update(None, 3, None, None, new),
        messages.Delete(None, 3, messages.OldPart.KEY, old),
        messages.Commit(Lsn(5), Lsn(8), 0),
    ]
    body = b"".join(len(part).to_bytes(4, "big") + part for part in map(encode.encode, sent))
    columns_found = row_columns.FoundRows.none()
    assert row_columns.find_rows(body, 0, None, {3: 0}, 0, 9, columns_found) == (len(body), None)
    assert columns_found.ops == bytearray(b"uud")
    assert list(memoryview(columns_found.numbers).cast("q")) == [0, 1, 2]
    rows = row_columns.GatheredRows(
        *row_columns.gather_columns(
            body, columns_found.starts, columns_found.kinds, 0, 3, [0, 1, -1], [None, None, b"f"]
        )
    )
    assert (rows.number, rows.before, rows.after) == (3, (1, b"\5"), (1, b"\3"))
    assert [data for _, _, data in rows.before_columns] == [b"11", b"", b"f"]
    assert [data for _, _, data in rows.after_columns] == [b"22", b"", b"ff"]
    assert rows.unsent == ((2, b"\2"), array("i", [0, 0, 1, 1]).tobytes(), array("i", [1]).tobytes())


WRONG: list[Any] = [None, -1, 2**70, "x", b"", [], {}, 1.5]


@given(st.sampled_from(sorted(_speedups.references)), st.lists(st.sampled_from(WRONG), max_size=8))
def test_wrong_arguments_are_errors_and_no_crash(name: str, arguments: list[object]) -> None:
    function = getattr(_speedups.module, name)
    if callable(function) and not isinstance(function, type):
        both(name, *arguments)
    else:
        outcome(function, *arguments)


@pytest.mark.parametrize("number", [2**70, -(2**70), 2**63 - 1, 2**63])
def test_numbers_that_do_not_fit_are_left_to_the_reference(number: int) -> None:
    kinds = (Insert, Update, Delete, Row)
    both("changes_take_changes", [b"I" * 40], 0, {}, [], number, False, kinds)
    both("changes_take_changes", [b"I" * 40], number, {}, [], 0, False, kinds)
    both("row_encoding_columns", [[b"t\0\0\0\1x"]], [number], 0x74)
    both("row_encoding_columns", [[b"t\0\0\0\1x"]], [-1, number, -1], 0x74)
    both("tuple_data_split_columns", b"t\0\0\0\1x", 0, number)
    both("tuple_data_split_columns", b"t\0\0\0\1x", number, 1)


def test_the_compiled_twin_is_the_function_in_use() -> None:
    for name, twin in (("tuple_data_split_columns", tuple_data.split_columns), ("text_integer", text.integer)):
        assert twin is getattr(_speedups.module, name)
    assert issubclass(Row, getattr(_speedups.module, "rows_RowData"))  # noqa: B009 - mypy knows no twins
