"""One SQL statement for the rows of a step (apply/steps.py), and its parameters.

    insert      COPY into the table: the input functions and defaults that an INSERT has
    update      UPDATE … FROM unnest(…): an array for each column, cell after cell as it came
    delete      DELETE … USING unnest(…)

Arrays, because a table to stage rows in costs more than it saves: it takes twice as long from a few hundred
rows down, is in the catalog, and wants privileges. In binary an array is one of the column's type; in text it is one
of texts, each cast to the type without its modifier, which the assignment checks as it does for an INSERT.

A statement that hits another number of rows than it was given fails: by casting a text that says so to a
number, since roles that changes are applied as may lack the right to call a function of ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct

from subscriber.apply.cutting import NULL_TEXT
from subscriber.apply.relation_map import LocalColumn, RelationMapping
from subscriber.apply.steps import Kind, Step, TableBatch
from subscriber.target.statements import is_null, qualified, quote

CHUNK = 256 * 1024  # bytes of one CopyData message, more or less
ROWS_IN_CHUNK = 1000

WRONG_COUNT = "22P02"  # SQLSTATE of the cast that fails when a step hits another number of rows

_TEXT_OID = 25
_ARRAY = Struct(">iiiIii")  # its length, dimensions, "may have NULLs", element type, size, lower bound
_HEAD = _ARRAY.size - 4
_COUNT = Struct(">H").pack

COPY_SIGNATURE = b"PGCOPY\n\xff\r\n\0" + bytes(8)
COPY_TRAILER = b"\xff\xff"


def copy(table: TableBatch) -> str:
    """COPY … FROM STDIN for the rows of copy_data()."""
    mapping = table.mapping
    columns = ", ".join(quote(column.name) for column in mapping.attributes)
    form = "binary" if table.binary else "text"
    return f"COPY {_name(mapping)} ({columns}) FROM STDIN (FORMAT {form})"


def copy_data(table: TableBatch, step: Step) -> Iterator[bytes]:
    """The rows of an insert step as COPY reads them."""
    rows = list(step.rows.values())
    if table.binary:
        count = _COUNT(table.ncols)
        yield COPY_SIGNATURE
        for start in range(0, len(rows), ROWS_IN_CHUNK):
            yield b"".join([count + b"".join(row) for row in rows[start : start + ROWS_IN_CHUNK]])  # type: ignore[arg-type]
        yield COPY_TRAILER
        return
    tabs, newlines = table.ncols - 1, len(rows)
    data = b"\n".join([b"\t".join(row) for row in rows]) + b"\n"  # type: ignore[arg-type]
    # A thing to escape in any value makes one of the numbers too large.
    if (
        data.count(b"\\") != step.nulls
        or data.count(b"\t") != tabs * newlines
        or data.count(b"\n") != newlines
        or b"\r" in data
    ):
        data = b"".join([b"\t".join([_escaped(value) for value in row]) + b"\n" for row in rows])
    for start in range(0, len(data), CHUNK):
        yield data[start : start + CHUNK]


def _escaped(value: bytes | None) -> bytes:
    if value is None or value is NULL_TEXT:
        return NULL_TEXT
    return value.replace(b"\\", b"\\\\").replace(b"\t", b"\\t").replace(b"\n", b"\\n").replace(b"\r", b"\\r")


def change(table: TableBatch, step: Step) -> str:
    """The statement of any other step; its parameters are arrays()."""
    mapping = table.mapping
    key = ("set", step.kind, step.sent, table.binary)
    if (sql := mapping.plans.get(key)) is None:
        sql = mapping.plans[key] = _change(table, step)
    assert isinstance(sql, str)
    return sql


def _change(table: TableBatch, step: Step) -> str:
    mapping = table.mapping
    columns = [mapping.attributes[i] for i in _columns(table, step)]
    names = [f"c{place}" for place in range(len(columns))]
    arrays = ", ".join(
        f"pg_catalog.unnest(${place + 1}::{_array(column, table.binary)})" for place, column in enumerate(columns)
    )
    source = f"ROWS FROM ({arrays}) AS given({', '.join(names)})"
    values = [_value(name, column, table.binary) for name, column in zip(names, columns, strict=True)]
    if step.kind is Kind.DELETE:
        where = _where(columns, values)
        return _counted(f"DELETE FROM {_only(mapping)} AS target USING {source} WHERE {where}", len(columns))
    assert mapping.search is not None
    keys = len(mapping.search) if step.kind is Kind.KEY_UPDATE else 0
    sets = ", ".join(
        f"{quote(column.name)} = {value}"
        for column, value in zip(columns[keys:], values[keys:], strict=True)
        if not column.identity_always
    )
    if keys:
        where = _where(columns[:keys], values[:keys])
    else:
        places = {i: place for place, i in enumerate(_columns(table, step))}
        sought = [places[i] for i in mapping.search]
        where = _where([columns[place] for place in sought], [values[place] for place in sought])
    for i, column, value in zip(_columns(table, step)[keys:], columns[keys:], values[keys:], strict=True):
        if i in table.fixed:
            both_null = f"{is_null(_stored(column))} AND {is_null(value)}"
            where += f" AND ({_where([column], [value])} OR ({both_null}))"
    sql = f"UPDATE {_only(mapping)} AS target SET {sets} FROM {source} WHERE {where}"
    return _counted(sql, len(columns))


def _counted(sql: str, before: int) -> str:
    """`sql`, failing unless it hits as many rows as the parameter after `before` others says."""
    wanted = f"${before + 1}::pg_catalog.text"
    return (
        f"WITH done AS ({sql} RETURNING 1), counted AS (SELECT pg_catalog.count(*) AS rows FROM done) "
        f"SELECT CASE WHEN rows = {wanted}::pg_catalog.int8 THEN 0 "
        f"ELSE pg_catalog.concat(rows, ' rows instead of ', {wanted})::pg_catalog.int4 END FROM counted"
    )


def arrays(table: TableBatch, step: Step) -> tuple[bytes, bytes]:
    """The formats and parameters of change(), and as the last one the number of rows."""
    rows = list(step.rows.values())
    columns = _columns(table, step)
    if step.kind is Kind.DELETE:
        places: Sequence[int] = range(len(columns))
    elif step.kind is Kind.KEY_UPDATE:
        keys = len(columns) - sum(step.sent)
        places = [*range(keys), *(keys + i for i, sent in enumerate(step.sent) if sent)]
    else:
        places = columns
    parts = [_COUNT(len(columns) + 1)]
    transposed = list(zip(*rows, strict=True))
    for i, place in zip(columns, places, strict=True):
        sets = table.mapping.attributes[i].sets
        assert sets is not None
        body = b"".join(transposed[place])
        oid = sets.element_oid if table.binary else _TEXT_OID
        parts += (_ARRAY.pack(_HEAD + len(body), 1, 1, oid, len(rows), 1), body)
    count = b"%d" % len(rows)
    parts += (len(count).to_bytes(4, "big"), count)
    formats = _COUNT(len(columns) + 1) + b"\0\1" * len(columns) + b"\0\0"
    return formats, b"".join(parts)


def _columns(table: TableBatch, step: Step) -> list[int]:
    """The publisher's columns whose values the step has, in the order of its parameters."""
    search = list(table.mapping.search or ())
    if step.kind is Kind.DELETE:
        return search
    sent = [i for i, is_sent in enumerate(step.sent) if is_sent]
    return search + sent if step.kind is Kind.KEY_UPDATE else sent


def _array(column: LocalColumn, binary: bool) -> str:
    assert column.sets is not None
    return f"{column.sets.element}[]" if binary else "pg_catalog.text[]"


def _value(name: str, column: LocalColumn, binary: bool) -> str:
    assert column.sets is not None
    return f"given.{name}" if binary else f"given.{name}::{column.sets.element}"


def _where(columns: Sequence[LocalColumn], values: Sequence[str]) -> str:
    conditions = []
    for column, value in zip(columns, values, strict=True):
        sought = f"{value}::{column.search_cast}" if column.search_cast is not None else value
        conditions.append(f"{_stored(column)} {column.equality} {sought}")
    return " AND ".join(conditions)


def _stored(column: LocalColumn) -> str:
    stored = f"target.{quote(column.name)}"
    return stored if column.base_type is None else f"{stored}::{column.base_type}"


def _name(mapping: RelationMapping) -> str:
    return qualified(mapping.local.schema, mapping.local.name)


def _only(mapping: RelationMapping) -> str:
    return f"ONLY {_name(mapping)}"
