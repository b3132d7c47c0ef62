"""Changes of the log as Arrow batches, in the columns that `pgchanges` has."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

import pyarrow as pa
import pyarrow.compute as pc

from subscriber.changelog.piece_reader import LoggedRows, scan_rows
from subscriber.changelog.pieces import Piece
from subscriber.changelog.row_columns import Bits, Cells
from subscriber.changelog.storage import Location
from subscriber.lsn import Lsn
from subscriber.protocol.decode import Decoder
from subscriber.protocol.messages import LogicalMessage, OldPart, Relation
from subscriber.spark.sources.arrow_types import arrow_array, cells_array, multiples
from subscriber.spark.sources.cdc_batch import scattered

# Spark's schema and Arrow's must be the same to the letter.
SCHEMA = """
commit_lsn bigint, commit_time timestamp, xid bigint, number bigint, op string, schema string, `table` string,
key array<string>, before map<string, string>, after map<string, string>, unchanged array<string>,
prefix string, content binary
"""
_VALUES = pa.map_(pa.string(), pa.string())
_NAMES = pa.list_(pa.string())
ARROW = pa.schema(
    [
        ("commit_lsn", pa.int64()),
        ("commit_time", pa.timestamp("us", tz="UTC")),
        ("xid", pa.int64()),
        ("number", pa.int64()),
        ("op", pa.string()),
        ("schema", pa.string()),
        ("table", pa.string()),
        ("key", _NAMES),
        ("before", _VALUES),
        ("after", _VALUES),
        ("unchanged", _NAMES),
        ("prefix", pa.string()),
        ("content", pa.binary()),
    ]
)
_MESSAGE = 0  # the kind of logical messages
_OPS = {"c": "insert", "u": "update", "d": "delete", "t": "truncate", "m": "message"}
_OLD_KEY = OldPart.KEY.value


def batches(directory: Location, piece: Piece, wanted: Callable[[Relation], bool]) -> Iterator[pa.RecordBatch]:
    """Yield batches with a row for each change; a truncate has one for each of its tables.

    Args:
        directory: the directory of the log.
        piece: from ChangeLog.pieces().
        wanted: returns False to skip the changes of a relation.

    Raises:
        The errors of changelog/piece_reader.py:read().
    """
    relations: list[Relation | None] = [None]  # by their kinds

    def kind_of(relation: Relation, _commit: Lsn) -> int:
        if not wanted(relation):
            return -1
        if relation not in relations:
            relations.append(relation)
        return relations.index(relation)

    for rows in scan_rows(directory, piece, kind_of, message_kind=_MESSAGE):
        if rows.found.ops:
            yield _batch(rows, relations)


def _batch(rows: LoggedRows, relations: Sequence[Relation | None]) -> pa.RecordBatch:
    located = rows.found
    number = len(located.ops)
    of = _numbers(pa.int32(), located.kinds)
    ops = pa.array(list(_OPS.values()), pa.string())
    letters = pa.array([ord(letter) for letter in _OPS], pa.uint8())
    described: list[pa.Array] = [
        pa.array([relation and relation.schema for relation in relations], pa.string()),
        pa.array([relation and relation.name for relation in relations], pa.string()),
        pa.array([relation and key_of(relation) for relation in relations], _NAMES),
    ]
    sides: tuple[list[tuple[pa.Array, pa.Array]], ...] = [], [], []  # before, after, unchanged
    for kind in pc.unique(of).to_pylist():
        if (relation := relations[kind]) is None:
            continue
        places = pc.indices_nonzero(pc.equal(of, kind)).cast(pa.int64())
        for parts, values in zip(sides, _values(rows, kind, relation, places), strict=True):
            parts.append((places, values))
    columns = [
        _numbers(pa.int64(), located.lsns),
        _numbers(ARROW.field("commit_time").type, located.times),
        _numbers(pa.int64(), located.xids),
        _numbers(pa.int64(), located.numbers),
        ops.take(pc.index_in(_numbers(pa.uint8(), located.ops), letters)),
        *(column.take(of) for column in described),
        *(scattered(parts, number, kind) for parts, kind in zip(sides, (_VALUES, _VALUES, _NAMES), strict=True)),
        *_messages(rows, number),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=ARROW)


def _numbers(kind: pa.DataType, data: bytes | bytearray) -> pa.Array:
    return pa.Array.from_buffers(kind, len(data) * 8 // kind.bit_width, [None, pa.py_buffer(data)])


def key_of(relation: Relation) -> list[str]:
    """Names of the columns of the replica identity; all of them under FULL."""
    return [column.name for column in relation.columns if column.is_key]


def _messages(rows: LoggedRows, number: int) -> tuple[pa.Array, pa.Array]:
    """Return the columns `prefix` and `content`."""
    prefixes: list[str | None] = [None] * number
    contents: list[bytes | None] = [None] * number
    starts = memoryview(rows.found.starts).cast("q")
    decode = Decoder().decode
    place = rows.found.ops.find(b"m")
    while place >= 0:
        message = decode(rows.payload(starts[place]))
        assert isinstance(message, LogicalMessage)
        prefixes[place], contents[place] = message.prefix, message.content
        place = rows.found.ops.find(b"m", place + 1)
    return pa.array(prefixes, pa.string()), pa.array(contents, pa.binary())


# --- values -------------------------------------------------------------------------------------


def _values(rows: LoggedRows, kind: int, relation: Relation, places: pa.Array) -> tuple[pa.Array, pa.Array, pa.Array]:
    """Return `before`, `after` and `unchanged` of the rows of a relation."""
    width = len(relation.columns)
    gathered = rows.gather(kind, width, range(width), [None] * width)
    is_after, is_before = bytearray(b"\1") * (gathered.number * width), bytearray(b"\1") * (gathered.number * width)
    if gathered.before[0] < gathered.number:
        key = bytes(column.is_key for column in relation.columns)
        starts = memoryview(rows.found.starts).cast("q")
        for row, place in enumerate(places.to_pylist()):
            if starts[place] >= 0 and rows.body[starts[place] + 5] == _OLD_KEY:
                is_before[row * width : (row + 1) * width] = key
    lists = array("i", bytes(4 * (gathered.number + 1))).tobytes()
    indexes = b""
    if gathered.unsent is not None:
        _, lists, indexes = gathered.unsent
        for row, (start, end) in enumerate(pairwise(memoryview(lists).cast("i"))):
            for index in memoryview(indexes).cast("i")[start:end]:
                is_after[row * width + index] = 0
    names = pa.array([column.name for column in relation.columns], pa.string())
    chosen = names.take(_numbers(pa.int32(), indexes))
    nulls, bits = gathered.after
    unchanged = pa.Array.from_buffers(
        _NAMES, gathered.number, [pa.py_buffer(bits), pa.py_buffer(lists)], nulls, children=[chosen]
    )
    before = _map(names, gathered.number, gathered.before, gathered.before_columns, is_before)
    after = _map(names, gathered.number, gathered.after, gathered.after_columns, is_after)
    return before, after, unchanged


def _map(names: pa.Array, number: int, present: Bits, columns: Sequence[Cells], is_sent: bytearray) -> pa.Array:
    """Return maps of the values of rows. `is_sent` has a byte for each column of each row: 0 leaves the value out."""
    nulls, bits = present
    if nulls == number:
        return pa.nulls(number, _VALUES)
    width = len(columns)
    keys = array("i", range(width)) * number
    texts = [
        arrow_array(cells_array(number, cells), pa.string(), name.as_py())
        for cells, name in zip(columns, names, strict=True)
    ]
    values = pa.concat_arrays(texts).take(_by_row(number, width)) if texts else pa.array([], pa.string())
    entry_keys = names.take(pa.Array.from_buffers(pa.int32(), len(keys), [None, pa.py_buffer(keys)]))
    ends = array("i", range(0, number * width + 1, width or 1)) if width else array("i", bytes(4 * (number + 1)))
    if 0 in is_sent:
        mask = _numbers(pa.uint8(), is_sent).cast(pa.bool_())
        values, entry_keys = values.filter(mask), entry_keys.filter(mask)
        counts = (is_sent.count(1, start, start + width) for start in range(0, number * width, width))
        ends = array("i", accumulate(counts, initial=0))
    entries = pa.StructArray.from_arrays([entry_keys, values], fields=[_VALUES.key_field, _VALUES.item_field])
    return pa.Array.from_buffers(
        _VALUES, number, [pa.py_buffer(bits), pa.py_buffer(ends.tobytes())], nulls, children=[entries]
    )


def _by_row(number: int, width: int) -> pa.Int64Array:
    """Return the places of the values of each row, one row after the other, in the columns one after the other."""
    places = multiples(1, number * width).cast(pa.int64())
    row = pc.divide(places, width)
    column = pc.subtract(places, pc.multiply(row, width))
    return pc.add(pc.multiply(column, number), row)
