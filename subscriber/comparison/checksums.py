"""Rows of a table as checksums, computed by the server that has them.

**Invariants.**

- A row belongs to a bucket by the hash of its key, or by the range of its key, see key_selection.py. Both servers agree
  on the bucket of a row, independent of its place, its neighbors and the collation of its key.
- Sums over a bucket do not depend on an order. Each server can therefore process the parts of its own heap
  concurrently, and the sums are added.
- A value is compared as text, in the format of the target's type: `published.note` of varchar and `local.note` of text
  are equal, and so are an integer and a bigint.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isqrt

from subscriber.comparison.columns import ComparedColumn
from subscriber.comparison.key_selection import WANTED, KeySelection, NumberedKey
from subscriber.publisher.answers import parsing
from subscriber.publisher.partitions import TablePartition
from subscriber.quoting import identifier, literal

BYTES_OF_A_ROW = 100  # estimate
ROWS_IN_A_BUCKET = 1000  # estimate; these rows are read again if one of them differs
ROWS_IN_A_SMALL_RANGE = 16  # of a complete list, in which many ranges may have a difference
MOST_BUCKETS = 1 << 16
MOST_REFINED = 64  # parts of a bucket that differs, whose rows would otherwise all be read
MODULUS = 1 << 62  # of sums of hashes


@dataclass(frozen=True, slots=True)
class TableSide:
    """The columns that one server reads, in a common order, and the key.

    `encoding` is the target's, in which rows are sent. `converts`: this server has another encoding.
    `hashes_records`: both servers can hash a record without its text, as PostgreSQL 14 and later do. `selection`: the
    rows to read; None: all. `range_width`: buckets are ranges of the key, see key_selection.py; None: they are hashes
    of it. `owned`: SQL that is true for the rows that belong to the subscription; None: all rows are compared.
    """

    columns: tuple[ComparedColumn, ...]
    key: tuple[int, ...]  # indexes; empty: there is no key
    filters: tuple[str, ...] = ()
    encoding: str = "UTF8"
    converts: bool = False
    hashes_records: bool = False
    selection: KeySelection | None = None
    range_width: int | None = None
    owned: str | None = None

    def _rows(self, part: TablePartition, texts: Iterable[int] = ()) -> str:
        """Return the query for a part's rows.

        Its columns are the text of each column of `texts` as cN, what _bucket() needs as `place`, and the hash of the
        row as `hash`. A table can have 1,600 columns and a query 1,664, so the list has no column of the table twice.
        """
        place = self._hash(self.key or range(len(self.columns)))
        if self.range_width is not None:
            place = f"({self._key_number} >> {self.range_width})"
        columns_as_text = [f"{self.columns[number].text} AS c{number}" for number in texts]
        columns = ", ".join((*columns_as_text, f"{place} AS place", f"{self._hash(range(len(self.columns)))} AS hash"))
        if self.selection is not None:
            key = [self.columns[index] for index in self.key]
            return self.selection.select(part, columns, self.filters, key, self.owned)
        return part.select(columns, self.filters, self.owned)

    def _hash(self, numbers: Iterable[int]) -> str:
        """Return SQL for the hash of the given columns of the table."""
        columns = [self.columns[number] for number in numbers]
        if self.hashes_records and not self.converts:
            return f"pg_catalog.hash_record_extended(ROW({', '.join(column.value for column in columns)}), 0)"
        return self._hash_text(f"ROW({', '.join(column.text for column in columns)})::pg_catalog.text")

    def _hash_text(self, text: str) -> str:
        if self.converts:
            text = self._in_hex(text)
        return f"pg_catalog.hashtextextended({text}, 0)"

    def _in_hex(self, text: str) -> str:
        return f"pg_catalog.encode(pg_catalog.convert_to({text}, {literal(self.encoding)}), 'hex')"

    @property
    def range_key(self) -> NumberedKey | None:
        """Return the kind of the key, if ranges of it can be buckets."""
        return NumberedKey.of(self.columns[self.key[0]].type) if len(self.key) == 1 else None

    @property
    def _key_number(self) -> str:
        assert self.range_key is not None
        return self.range_key.number(identifier(self.columns[self.key[0]].name))

    def bounds(self, part: TablePartition) -> str:
        """Return the query for the numbers of the first and the last key. Row filters do not apply.

        There is no max() of uuids before PostgreSQL 18.
        """
        name = identifier(self.columns[self.key[0]].name)
        ends = (f"({part.select(name)} ORDER BY {name} {order} LIMIT 1)" for order in ("ASC", "DESC"))
        return f"SELECT {self._key_number} FROM ({' UNION ALL '.join(ends)}) r"

    def _bucket(self, buckets: int) -> str:
        return "place" if self.range_width is not None else f"place & {buckets - 1}"

    def sums(self, part: TablePartition, buckets: int, within: Sequence[int] | None = None, coarse: int = 1) -> str:
        """Return the query for buckets, their numbers of rows and the sums of their hashes, see add_up().

        `within`: only buckets that are parts of these buckets out of `coarse`. None: all.

        The hash of a record is a sum of multiples of its columns' hashes. The sum over several rows would therefore not
        change if two rows exchange the values of a column, so the hash of each row is hashed again. OFFSET keeps the
        server from computing the first hash twice.
        """
        where = "" if within is None else f" WHERE {self._is_in(coarse, within)}"
        rows = f"SELECT {self._bucket(buckets)} AS bucket, hash FROM ({self._rows(part)}) r{where} OFFSET 0"
        row = "pg_catalog.hashint8extended(hash, 0) # pg_catalog.hashint8extended(hash >> 32, 1)"
        sums = (
            f"SELECT bucket, count(*) AS rows, (sum({row}) % {MODULUS})::pg_catalog.int8 AS sum"
            f" FROM ({rows}) r GROUP BY 1"
        )
        arrays = ", ".join(
            f"pg_catalog.string_agg(pg_catalog.int8send({name}), '')" for name in ("bucket", "rows", "sum")
        )
        return f"SELECT {arrays} FROM ({sums}) r"

    def rows(self, part: TablePartition, buckets: int, wanted: Sequence[int], *, columns: bool = True) -> str:
        """Return the query for the rows of the buckets `wanted`: bucket, the key's texts, and each column's hash.

        `columns` is False: one hash of the row, instead of each column's.

        Without a key, all columns are the key. Texts are bytes in hexadecimal, because the session cannot
        represent all texts in Unicode.
        """
        numbers = range(len(self.columns))
        keys = self.key or numbers
        key = ", ".join(self._in_hex(f"c{n}") for n in keys)
        hashes = ", ".join(self._hash_text(f"c{n}") for n in numbers) if columns else "hash"
        return (
            f"SELECT {self._bucket(buckets)}, ARRAY[{key}]::pg_catalog.text[], ARRAY[{hashes}]::pg_catalog.int8[]"
            f" FROM ({self._rows(part, numbers if columns else keys)}) r WHERE {self._is_in(buckets, wanted)}"
        )

    def foreign_rows(self, part: TablePartition) -> str:
        """Return the query for the number of a part's rows that do not belong to the subscription."""
        foreign = f"({self.owned}) IS NOT TRUE"
        rows = part.select("1", self.filters, foreign)
        if self.selection is not None:
            key = [self.columns[index] for index in self.key]
            rows = self.selection.select(part, "1", self.filters, key, foreign)
        return f"SELECT count(*) FROM ({rows}) r"

    def _is_in(self, buckets: int, wanted: Sequence[int]) -> str:
        """Return SQL that is true for rows of the buckets `wanted`. A bit string is short, whatever their number."""
        bits = bytearray(max(1, buckets // 8))
        for bucket in wanted:
            bits[bucket // 8] |= 1 << bucket % 8
        number = f"({self._bucket(buckets)})::pg_catalog.int4"
        return f"pg_catalog.get_bit('\\x{bits.hex()}'::pg_catalog.bytea, {number}) = 1"

    def rows_of_keys(self, table: TablePartition, keys: Sequence[tuple[str | None, ...]]) -> str:
        """Return the query for the rows that have one of `keys`: the key's place in `keys`, and each column's text.

        Keys are texts in the order of `key`; without a key they have all columns. The query uses an index if there is
        one, and the types of the key are PostgreSQL's own and the same on both servers. It then also finds a row whose
        key is equal and has another text, such as 1.0 and 1.00, once for each of the keys. It is a join, because the
        server removes duplicates from the keys of a semi-join by another collation than that of the column.
        """
        numbers = self.key or tuple(range(len(self.columns)))
        values = ", ".join(
            f"({place}, {', '.join('NULL' if value is None else literal(value) for value in key)})"
            for place, key in enumerate(keys)
        )
        names = ", ".join(("place", *(f"k{place}" for place in range(len(numbers)))))
        conditions = []
        for place, number in enumerate(numbers):
            column = self.columns[number]
            if self.key and column.equal_type is not None:
                name = identifier(column.name)
                conditions.append(f"{name} OPERATOR(pg_catalog.=) {WANTED}.k{place}::{column.equal_type}")
            else:
                conditions.append(f"({column.text}) IS NOT DISTINCT FROM {WANTED}.k{place}")
        texts = ", ".join(f"{column.text} AS c{number}" for number, column in enumerate(self.columns))
        if self.owned is not None:
            conditions.append(f"({self.owned})")
        selected = table.select(texts, self.filters, " AND ".join(conditions))
        return f"SELECT {WANTED}.place, r.* FROM (VALUES {values}) {WANTED} ({names}) CROSS JOIN LATERAL ({selected}) r"


def buckets_for(rows: int) -> int:
    """Return the number of buckets, a power of two."""
    return min(MOST_BUCKETS, 1 << max(0, (rows // ROWS_IN_A_BUCKET)).bit_length())


def refined_parts(rows: int, buckets: int) -> int:
    """Return the number of parts of a bucket that differs, a power of two.

    Each part costs a sum, and each row of a part that differs costs about twice as much. With one row that differs in a
    bucket of n rows, the sum of both is least for about sqrt(2n) parts.
    """
    return min(MOST_REFINED, 1 << max(1, isqrt(2 * max(1, rows // buckets)).bit_length() - 1))


# --- results --------------------------------------------------------------------------------------

Answer = list[tuple[object, ...]]  # rows of a query
Sums = dict[int, tuple[int, int]]  # bucket -> rows, sum of hashes


def add_up(answers: Iterable[Answer]) -> Sums:
    """Add up the buckets of all parts of one side.

    An answer is one row of three values, each with eight bytes for each bucket: the numbers of the buckets, of their
    rows, and the sums of the hashes. The values of a part without rows are NULL.

    Raises:
        ProtocolError: a value is not of that form. The server decides the types of its result.
    """
    sums: Sums = {}
    with parsing("sums of rows"):
        for answer in answers:
            for buckets, counts, totals in answer:
                for bucket, rows, total in zip(*map(_integers, (buckets, counts, totals)), strict=True):
                    known_rows, known_total = sums.get(bucket, (0, 0))
                    sums[bucket] = known_rows + rows, (known_total + total) % MODULUS
    return sums


def _integers(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, bytes) or len(value) % 8:
        raise TypeError
    return struct.unpack(f">{len(value) // 8}q", value)


def differing(source: Sums, target: Sums) -> list[int]:
    """Return the buckets that differ, in order."""
    return sorted(bucket for bucket in source.keys() | target.keys() if source.get(bucket) != target.get(bucket))
