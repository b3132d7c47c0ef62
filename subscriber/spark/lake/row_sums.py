"""The rows of a table as checksums in buckets, and the rows of two tables whose checksums differ.

Rows are divided into buckets by their keys. A bucket has the sum of the checksums of its rows, so their order does not
matter, and any number of rows takes the same memory. Rows of buckets that differ are read once more.

The checksum of a row is Python's hash of random bytes and all values of the row. So the owner of a table cannot choose
rows with the same checksum, also if PYTHONHASHSEED is set, as it is for Spark's executors.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from subscriber.comparison.result import KEYS, Key, TableComparison
from subscriber.protocol.encodings import ERRORS

BUCKETS = 4096
_SECRET = os.urandom(16)
NAMED_ROWS = 100_000  # of buckets that differ, which are read once more
_Row = tuple[bytes | None, ...]


class RowSums:
    """The number of rows of a table, and the checksums of its buckets."""

    def __init__(self, key: Sequence[int]) -> None:
        """Begin without rows. `key` has the indexes of the key's columns; empty: the whole row is the key."""
        self._key = key
        self.rows = 0
        self.sums = [0] * BUCKETS

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows."""
        columns, sums = texts(batch), self.sums
        for place, checksum in zip(buckets(columns, self._key), _checksums(columns), strict=True):
            sums[place] += checksum
        self.rows += len(batch)

    def differing(self, other: RowSums) -> list[int]:
        """Return the buckets whose checksums differ."""
        return [place for place in range(BUCKETS) if self.sums[place] != other.sums[place]]


class BucketRows:
    """The rows of some buckets, by their keys."""

    def __init__(self, key: Sequence[int], wanted: Iterable[int]) -> None:
        self._key = key
        self._wanted = frozenset(wanted)
        self.found: dict[_Row, Counter[_Row]] = {}

    def add(self, batch: pa.RecordBatch) -> None:
        """Add the rows that are in the buckets."""
        columns = texts(batch)
        chosen = pa.array([place in self._wanted for place in buckets(columns, self._key)], pa.bool_())
        for row in zip(*(column.filter(chosen).to_pylist() for column in columns), strict=True):
            key = tuple(row[index] for index in self._key) if self._key else row
            self.found.setdefault(key, Counter())[row] += 1


def buckets_to_read(differing: Sequence[int], rows: int) -> Sequence[int]:
    """Return the first of the buckets that differ: so many that they have about NAMED_ROWS rows, and at least one."""
    return differing[: max(1, NAMED_ROWS * BUCKETS // max(rows, 1))]


def add_differences(into: TableComparison, names: Sequence[str], publisher: BucketRows, lake: BucketRows) -> None:
    """Add the rows that differ to the result for a table. `names` are those of all columns."""
    nothing = Counter[_Row]()
    for key in sorted({*publisher.found, *lake.found}, key=_order):
        ours, theirs = lake.found.get(key, nothing), publisher.found.get(key, nothing)
        if ours == theirs:
            continue
        text = _text(key)
        missing, extra = max(theirs.total() - ours.total(), 0), max(ours.total() - theirs.total(), 0)
        into.add_unpaired(text, missing, extra, KEYS, lists_extra=True)
        if ours and theirs and not missing and not extra:
            ((ours_row, *_), (other, *_)) = (ours - theirs), (theirs - ours)
            into.add_changed(text, partial(_different, names, ours_row, other), KEYS)


def _different(names: Sequence[str], row: _Row, other: _Row) -> tuple[str, ...]:
    """Return the names of the columns that differ."""
    return tuple(name for name, value, wanted in zip(names, row, other, strict=True) if value != wanted)


def texts(batch: pa.RecordBatch) -> list[pa.Array]:
    """Return the columns of rows as bytes: equal values are the same bytes, and others are not."""
    return [_texts(column) for column in batch.columns]


def _texts(column: pa.Array) -> pa.Array:
    if pa.types.is_timestamp(column.type) and column.type.tz is not None:
        column = column.cast(pa.timestamp(column.type.unit))  # so that no database of time zones is needed
    if not pa.types.is_binary(column.type):
        column = column.cast(pa.string()).cast(pa.binary())
    return column


def buckets(columns: Sequence[pa.Array], key: Sequence[int]) -> list[int]:
    """Return the bucket of each row."""
    return [checksum % BUCKETS for checksum in _checksums([columns[index] for index in key] if key else columns)]


def _checksums(columns: Sequence[pa.Array]) -> list[int]:
    """Return a checksum for each row. Each value has its length before it, so that no two rows are the same bytes."""
    parts: list[pa.Array | pa.Scalar] = [pa.scalar(_SECRET, pa.binary())]
    for column in columns:
        length = pc.fill_null(pc.binary_length(column).cast(pa.string()), "-").cast(pa.binary())
        parts += [length, pa.scalar(b":", pa.binary()), pc.fill_null(column, b"")]
    joined = pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.binary()))
    return list(map(hash, joined.to_pylist()))


def _order(key: _Row) -> list[tuple[bool, bytes]]:
    return [(value is None, value or b"") for value in key]


def _text(key: _Row) -> Key:
    return tuple(None if value is None else value.decode(errors=ERRORS) for value in key)
