"""Queries for rows of the target whose results are awaited."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from subscriber.apply.conflicts.types import LocalRow, RowWriter
from subscriber.apply.relation_map import RelationMapping
from subscriber.connection.pipeline import Pipeline, Rows
from subscriber.protocol import frontend
from subscriber.protocol.encodings import encode
from subscriber.protocol.messages import Delete, Insert, Update
from subscriber.protocol.tuple_data import BINARY, NULL, TEXT, UNCHANGED, TupleData
from subscriber.targets.postgres.session.statement_context import StatementContext
from subscriber.targets.postgres.sql import lookup_queries
from subscriber.targets.postgres.sql.parameters import NO_ROW, Row, bind
from subscriber.targets.postgres.sql.row_statements import Plan

RowChange = TypeVar("RowChange", Insert, Update, Delete, Insert | Update, Update | Delete)


@dataclass(frozen=True, slots=True)
class FoundRow:
    """A row as a probe returns it."""

    writer: RowWriter
    label: str  # its table, schema.name
    place: str  # OID of its table and ctid
    values: tuple[str | None, ...]  # of the columns of the table that was asked

    def local_row(
        self, mapping: RelationMapping, columns: Sequence[str], index: str | None = None, key: Sequence[str] = ()
    ) -> LocalRow:
        """Name the values. `columns` are those of the queried table; `index` and `key` state the violated index."""
        values = dict(zip(columns, self.values, strict=False))  # one added just now is found out by the next check
        in_order = {name: values.get(name) for name in columns_of(mapping, self.label)}
        return LocalRow(index, tuple(key), self.writer, in_order)


def columns_of(mapping: RelationMapping, label: str) -> tuple[str, ...]:
    """The columns of the mapped table, or of its partition `label`, in their order."""
    leaf = next((leaf for leaf in mapping.local.partitions if leaf.label == label), None)
    return leaf.columns if leaf else tuple(column.name for column in mapping.local.columns)


class RowLookup:
    """On one session. Every question waits for its answer, and so for those to all statements before."""

    def __init__(self, pipeline: Pipeline, *, timed: bool) -> None:
        """`timed`: the target tracks commit timestamps."""
        self.timed = timed
        self._pipeline = pipeline

    async def fetch_rows(
        self, plans: Sequence[Plan], new: Row, old: Row, note: StatementContext | None = None
    ) -> list[list[FoundRow]]:
        """Run some plans of sql/lookup_queries.py together and return the rows of each. An error has `note`."""
        answers = [self._send(plan.sql, *bind(plan, new, old), note) for plan in plans]
        await self._pipeline.sync()
        return [[_found(row) for row in rows] for rows in answers]

    async def unique_indexes(
        self,
        mapping: RelationMapping,
        new: Row,
        table: tuple[str, str] | None = None,
        note: StatementContext | None = None,
    ) -> list[tuple[str, list[str], list[int]]]:
        """The unique indexes that can refuse a row: name, columns, and where the row has these.

        `table`: a partition's own indexes. NULLs are never in each other's way, and what did not change is not either.
        """
        table = table or (mapping.local.schema, mapping.local.name)
        key = ("unique indexes", table)
        if key not in mapping.plans:
            parameters = frontend.text_parameters(table, mapping.codec)
            mapping.plans[key] = await self._rows(lookup_queries.UNIQUE_INDEXES, frontend.ALL_TEXT, parameters, note)
        indexes = mapping.plans[key]
        assert isinstance(indexes, list)
        names = {column.name: index for index, column in enumerate(mapping.attributes)}
        usable = []
        for (row,) in indexes:
            index, columns = json.loads(row)
            places = [names[name] for name in columns if name in names]
            if len(places) == len(columns) and not any(new[0][place] in (NULL, UNCHANGED) for place in places):
                usable.append((index, columns, places))
        return usable

    async def render_as_text(
        self, mapping: RelationMapping, change: RowChange, note: StatementContext | None = None
    ) -> RowChange:
        """The change with its binary values as the target would print them."""
        asked = to_print(mapping, change)
        if asked is None:
            return change
        plan, new, old = asked
        return printed(mapping, change, new[0], old[0], await self._ask(plan, new, old, note))

    async def fetch_value(self, plan: Plan, old: Row, note: StatementContext) -> str | None:
        """The first column of a plan's first row."""
        rows = await self._ask(plan, old, old, note)
        return rows[0][0] if rows else None

    async def _ask(self, plan: Plan, new: Row, old: Row, note: StatementContext | None) -> Rows:
        formats, parameters = bind(plan, new, old)
        return await self._rows(plan.sql, formats, parameters, note, plan.types)

    async def _rows(
        self,
        sql: str,
        formats: bytes,
        parameters: frontend.Parameters,
        note: StatementContext | None,
        types: tuple[int, ...] = (),
    ) -> Rows:
        rows = self._send(sql, formats, parameters, note, types)
        await self._pipeline.sync()
        return rows

    def _send(
        self,
        sql: str,
        formats: bytes,
        parameters: frontend.Parameters,
        note: StatementContext | None,
        types: tuple[int, ...] = (),
    ) -> Rows:
        """A list that the rows will be in once the pipeline is settled."""
        result: Rows = []
        self._pipeline.execute(
            sql, formats, parameters, note=note, types=types, on_result=lambda _note, _tag, rows: result.extend(rows)
        )
        return result


def to_print(mapping: RelationMapping, change: Insert | Update | Delete) -> tuple[Plan, Row, Row] | None:
    """Build the query that prints the change, with its new and old row. Returns None if all values are text."""
    new = NO_ROW if isinstance(change, Delete) else change.new.split()
    old = NO_ROW if isinstance(change, Insert) or change.old is None else change.old.split()
    return (lookup_queries.as_text(mapping, new[0], old[0]), new, old) if BINARY in new[0] + old[0] else None


def printed(mapping: RelationMapping, change: RowChange, new: bytes, old: bytes, rows: Rows) -> RowChange:
    """The change with what the target has answered to to_print(); `new` and `old` are what its rows' columns were."""
    answers = iter(rows)
    if new and not isinstance(change, Delete):
        change = replace(change, new=_text_row(new, next(answers), mapping.codec))
    if old and not isinstance(change, Insert):
        change = replace(change, old=_text_row(old, next(answers), mapping.codec))
    return change


def _text_row(status: bytes, row: tuple[str | None, ...], codec: str) -> TupleData:
    texts = [None if text is None else encode(text, codec) for text in row]
    return TupleData.join(status.replace(bytes([BINARY]), bytes([TEXT])), texts)


def _found(row: tuple[str | None, ...]) -> FoundRow:
    time, committed, origin_id, origin, label, place, xid, *values = row
    foreign = origin_id not in (None, "0")
    writer = RowWriter(xid or "", time, foreign, origin, int(committed) if committed else None)
    return FoundRow(writer, label or "", place or "", tuple(values))
