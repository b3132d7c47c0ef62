"""One SQL statement for the rows of a step (apply/batch/table_batch.py), and its parameters.

    insert      COPY into the table: the input functions and defaults that an INSERT has
    update      UPDATE … FROM (SELECT unnest(…), …): an array for each column, with the publisher's bytes as elements
    delete      DELETE … USING (SELECT unnest(…), …)

In binary, and for an enum, no statement names a type: its owner could give the name to another one.

Arrays, because a table to stage rows in costs more than it saves: it takes twice as long from a few hundred
rows down, is in the catalog, and wants privileges. In binary an array is one of the column's type; in text it is one
of texts, each cast to the type without its modifier, which the assignment checks as it does for an INSERT. They are
unnested in a SELECT, which hands on row after row; with functions in FROM the server gathers all rows first.

A statement that hits another number of rows than it was given fails: by casting a text that says so to a
number, since roles that changes are applied as may lack the right to call a function of ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct

from subscriber.apply.batch.table_batch import BatchStep, ChangeKind, TableBatch
from subscriber.apply.relation_map import LocalColumn, RelationMapping
from subscriber.protocol.row_encoding import columns, copy_rows
from subscriber.quoting import identifier, qualified
from subscriber.targets.postgres.sql.row_statements import is_null

_TEXT_OID = 25
_ARRAY = Struct(">iiiIii")  # its length, dimensions, "may have NULLs", element type, size, lower bound
_HEAD = _ARRAY.size - 4
_COUNT = Struct(">H").pack

COPY_SIGNATURE = b"PGCOPY\n\xff\r\n\0" + bytes(8)
COPY_TRAILER = b"\xff\xff"


def copy(table: TableBatch) -> str:
    """COPY … FROM STDIN for the rows of copy_data()."""
    mapping = table.mapping
    columns = ", ".join(identifier(column.name) for column in mapping.attributes)
    form = "binary" if table.binary else "text"
    return f"COPY {_name(mapping)} ({columns}) FROM STDIN (FORMAT {form})"


def copy_data(table: TableBatch, step: BatchStep, chunk_rows: int) -> Iterator[bytes]:
    """The rows of an insert step as COPY reads them, at most `chunk_rows` in a piece."""
    rows = list(step.rows.values())
    if table.binary:
        yield COPY_SIGNATURE
    for start in range(0, len(rows), chunk_rows):
        yield copy_rows(rows[start : start + chunk_rows], table.form)
    if table.binary:
        yield COPY_TRAILER


def change(table: TableBatch, step: BatchStep) -> str:
    """The statement of any other step; its parameters are arrays()."""
    mapping = table.mapping
    key = ("set", step.kind, step.sent, table.binary)
    if (sql := mapping.plans.get(key)) is None:
        sql = mapping.plans[key] = _change(table, step)
    assert isinstance(sql, str)
    return sql


def _change(table: TableBatch, step: BatchStep) -> str:
    mapping = table.mapping
    indexes = _columns(table, step)
    sent = [mapping.attributes[i] for i in indexes]
    values = [f"given.c{place}" for place in range(len(sent))]
    arrays = ", ".join(f"{_unnested(place + 1, column, table.binary)} AS c{place}" for place, column in enumerate(sent))
    source = f"(SELECT {arrays}) AS given"
    if step.kind is ChangeKind.DELETE:
        where = _where(sent, values)
        return _counted(f"DELETE FROM {_only(mapping)} AS target USING {source} WHERE {where}", len(sent))
    assert mapping.search is not None
    keys = len(mapping.search) if step.kind is ChangeKind.KEY_UPDATE else 0
    sets = ", ".join(
        f"{identifier(column.name)} = {value}"
        for column, value in zip(sent[keys:], values[keys:], strict=True)
        if not column.identity_always
    )
    if keys:
        where = _where(sent[:keys], values[:keys])
    else:
        sought = [indexes.index(i) for i in mapping.search]
        where = _where([sent[place] for place in sought], [values[place] for place in sought])
    for i, column, value in zip(indexes[keys:], sent[keys:], values[keys:], strict=True):
        if i in table.fixed:
            both_null = f"{is_null(_stored(column))} AND {is_null(value)}"
            where += f" AND ({_where([column], [value])} OR ({both_null}))"
    sql = f"UPDATE {_only(mapping)} AS target SET {sets} FROM {source} WHERE {where}"
    return _counted(sql, len(sent))


def _counted(sql: str, before: int) -> str:
    """`sql`, failing unless it hits as many rows as the parameter after `before` others says."""
    wanted = f"${before + 1}::pg_catalog.text"
    return (
        f"WITH done AS ({sql} RETURNING 1), counted AS (SELECT pg_catalog.count(*) AS rows FROM done) "
        f"SELECT CASE WHEN rows = {wanted}::pg_catalog.int8 THEN 0 "
        f"ELSE pg_catalog.concat(rows, ' rows instead of ', {wanted})::pg_catalog.int4 END FROM counted"
    )


def types(table: TableBatch, step: BatchStep) -> tuple[int, ...]:
    """The OIDs of the parameters' types, 0 where the statement says it."""
    oids = []
    for index in _columns(table, step):
        sets = table.mapping.attributes[index].batch_info
        assert sets is not None
        oids.append(sets.array_oid if table.binary or sets.enum else 0)
    return tuple(oids) if any(oids) else ()


def arrays(table: TableBatch, step: BatchStep) -> tuple[bytes, bytes]:
    """The formats and parameters of change(), and as the last one the number of rows."""
    rows, indexes, ncols = list(step.rows.values()), _columns(table, step), table.ncols
    keys = len(table.mapping.search or ()) if step.kind is ChangeKind.KEY_UPDATE else 0
    places = [i - 2 * ncols for i in indexes[:keys]] + [i - ncols for i in indexes[keys:]]
    parts = [_COUNT(len(indexes) + 1)]
    for i, body in zip(indexes, columns(rows, places, table.form), strict=True):
        sets = table.mapping.attributes[i].batch_info
        assert sets is not None
        oid = sets.element_oid if table.binary or sets.enum else _TEXT_OID
        parts += (_ARRAY.pack(_HEAD + len(body), 1, 1, oid, len(rows), 1), body)
    count = b"%d" % len(rows)
    parts += (len(count).to_bytes(4, "big"), count)
    formats = _COUNT(len(indexes) + 1) + b"\0\1" * len(indexes) + b"\0\0"
    return formats, b"".join(parts)


def _columns(table: TableBatch, step: BatchStep) -> list[int]:
    """The publisher's columns whose values the step has, in the order of its parameters."""
    search = list(table.mapping.search or ())
    if step.kind is ChangeKind.DELETE:
        return search
    sent = [i for i, is_sent in enumerate(step.sent) if is_sent]
    return search + sent if step.kind is ChangeKind.KEY_UPDATE else sent


def _unnested(parameter: int, column: LocalColumn, binary: bool) -> str:
    assert column.batch_info is not None
    if binary or column.batch_info.enum:
        return f"pg_catalog.unnest(${parameter})"
    return f"pg_catalog.unnest(${parameter}::pg_catalog.text[])::{column.batch_info.element}"


def _where(columns: Sequence[LocalColumn], values: Sequence[str]) -> str:
    conditions = []
    for column, value in zip(columns, values, strict=True):
        sought = f"{value}::{column.search_cast}" if column.search_cast is not None else value
        conditions.append(f"{_stored(column)} {column.equality} {sought}")
    return " AND ".join(conditions)


def _stored(column: LocalColumn) -> str:
    stored = f"target.{identifier(column.name)}"
    return stored if column.base_type is None else f"{stored}::{column.base_type}"


def _name(mapping: RelationMapping) -> str:
    return qualified(mapping.local.schema, mapping.local.name)


def _only(mapping: RelationMapping) -> str:
    return f"ONLY {_name(mapping)}"
