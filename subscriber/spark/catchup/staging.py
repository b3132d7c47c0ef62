"""Staging tables on a target: a table's net effect, copied in by executors, merged by the driver.

    kind   i  a new row       u  an existing row with new values       d  a deleted row
           -  one fewer of this row, in a table without a key
    part   the attempt that copied it; only attempts that reported success to the driver count
    mask   '1' at the place of each column that the publisher did not send, else '0'; empty: it sent all
    o1, …  the key that the row of a `u` or `d` has on the target
    c1, …  the columns of the target's table, in its order, without generated columns

There are two ways to merge. If no row can conflict with another row, rows are updated in place. Otherwise (rows that
take each other's keys or unique values) they are deleted and inserted. First the staged rows are completed with the
target's unchanged values, then all changed rows are deleted, then all of them are inserted.

**Invariants.** Each statement has an expected number of rows. If it affects another number, the target differs from the
publisher's past state, and everything is rolled back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from uuid import uuid4

import anyio

from subscriber.apply.relation_map import LocalColumn, LocalRelation
from subscriber.catalog.connection import Connection, translate
from subscriber.connection.connect import connect
from subscriber.connection.errors import ASYNCPG_ERRORS
from subscriber.connection.settings import NO_TIMEOUTS
from subscriber.errors import ApplyError, ConnectionLost, MappingError, SubscriberError
from subscriber.protocol.copy_text import join_fields
from subscriber.quoting import identifier, qualified
from subscriber.spark.changes.net_effect import Net
from subscriber.spark.changes.net_job import NetTable
from subscriber.spark.changes.raw_rows import UNCHANGED, Values, values
from subscriber.sqlstate import CLASSES_TO_RETRY, INTERNAL_ERROR

SCHEMA = "subscriber"
MAX_COLUMNS = 1600  # of a table of PostgreSQL
CHUNK = 256 * 1024  # bytes passed to COPY in one piece
SETTINGS = {"session_replication_role": "replica", "row_security": "off", **NO_TIMEOUTS}

_CHANGED = "s.kind = 'u'"
_NEW = "s.kind = 'i'"
_FEWER = "s.kind = '-'"


@dataclass(frozen=True, slots=True)
class Stage:
    """The staging table, in schema "subscriber", of a target table."""

    table: str
    target: LocalRelation

    @property
    def name(self) -> str:
        """Return the quoted name."""
        return qualified(SCHEMA, self.table)

    @property
    def columns(self) -> tuple[LocalColumn, ...]:
        return tuple(column for column in self.target.columns if not column.generated)

    @property
    def label(self) -> str:
        """Return schema.table of the target."""
        return f"{self.target.schema}.{self.target.name}"

    @property
    def is_possible(self) -> bool:
        """Return True if a table of PostgreSQL can have all columns of the staging table."""
        return 3 + len(self.target.identity) + len(self.columns) <= MAX_COLUMNS

    def create(self) -> str:
        """Return the statement that creates the staging table."""
        types = {column.name: column.base_type or column.type_name for column in self.columns}
        old = [f"o{number} {types[name]}" for number, name in enumerate(self.target.identity, 1)]
        new = [f"c{number} {types[column.name]}" for number, column in enumerate(self.columns, 1)]
        what = ", ".join(['part text, kind "char", mask text', *old, *new])
        return f"CREATE UNLOGGED TABLE {self.name} ({what}) WITH (autovacuum_enabled = off)"


@dataclass(frozen=True, slots=True)
class StagedPiece:
    """The result of a task: the number of rows of each kind. `masked` are the numbers of columns that a mask marks."""

    part: str
    truncated: bool
    moved: bool
    masked: frozenset[int]
    new: int
    changed: int
    gone: int
    fewer: int


@dataclass(frozen=True, slots=True)
class ToStage:
    """The sink: copies rows into the staging tables. Its connection string is never printed."""

    target: str
    stages: dict[str, Stage]

    def __repr__(self) -> str:
        return f"ToStage({', '.join(self.stages)})"

    def __call__(self, table: NetTable, net: Net, part: int) -> StagedPiece:
        try:
            return anyio.run(self._copy, self.stages[table.label], net)
        except ASYNCPG_ERRORS as error:
            found = translate(error)
        except SubscriberError as error:
            found = error
        if found.sqlstate.startswith(CLASSES_TO_RETRY):
            raise ConnectionLost(found.message)
        raise ApplyError(found.message, hint=found.remedy, sqlstate=found.sqlstate)  # a ServerError cannot be pickled

    async def _copy(self, stage: Stage, net: Net) -> StagedPiece:
        lines = StagingLines(stage, net)
        connection = await connect(self.target, application_name="subscriber catchup", settings=SETTINGS)
        try:
            source = _chunks(lines.lines())
            await connection.copy_to_table(
                stage.table, schema_name=SCHEMA, columns=lines.columns, source=source, format="text"
            )
        finally:
            connection.terminate()
        return lines.copied(net)


async def _chunks(lines: Iterator[bytes]) -> AsyncIterator[bytes]:
    chunk: list[bytes] = []
    size = 0
    for line in lines:
        chunk.append(line)
        size += len(line)
        if size >= CHUNK:
            yield b"".join(chunk)
            chunk, size = [], 0
    if chunk:
        yield b"".join(chunk)


class StagingLines:
    """Converts a net effect to lines of COPY's text format."""

    def __init__(self, stage: Stage, net: Net) -> None:
        places = {column.name: number for number, column in enumerate(stage.columns, 1)}
        if missing := [name for name in net.columns if name not in places]:
            raise MappingError(
                f'logical replication target relation "{stage.label}" is missing replicated columns: '
                + ", ".join(f'"{name}"' for name in missing),
                hint="Add the missing columns to the target table.",
            )
        self._places = [places[name] for name in net.columns]
        # A column that the publisher does not have is treated like a value that was not sent: it keeps its value, or
        # gets its default.
        self._empty_mask = bytes(0x30 if number in self._places else 0x31 for number in range(1, len(places) + 1))
        self._empty = self._empty_mask if 0x31 in self._empty_mask else b""
        self._keys = len(stage.target.identity) if net.key is not None else 0
        self._part = uuid4().hex
        self._prefix = self._part.encode()
        self._masked = {number for number, mark in enumerate(self._empty_mask, 1) if mark == 0x31}
        self.columns = ["part", "kind", "mask", *(f"o{n + 1}" for n in range(self._keys))]
        self.columns += [f"c{place}" for place in self._places]
        self._nothing: Values = (None,) * len(self._places)
        self._no_key: Values = (None,) * self._keys
        self._net = net

    def lines(self) -> Iterator[bytes]:
        net, ncols, width = self._net, len(self._net.columns), self._keys
        for key in net.gone:
            yield self._line(b"d", values(key, width), self._nothing)
        for key, raw in net.rows.items():
            origin, row = net.origins.get(key, key), values(raw, ncols)
            kind = b"i" if origin is None else b"u"
            before = self._no_key if origin is None else values(origin, width)
            yield self._line(kind, before, row, lacking=key in net.lacking)
        for kind, bag in ((b"-", net.fewer), (b"i", net.more)):
            for raw, count in bag.items():
                row = values(raw, ncols)
                yield from [self._line(kind, (), row, lacking=UNCHANGED in row)] * count

    def _line(self, kind: bytes, origin: Values, row: Values, *, lacking: bool = False) -> bytes:
        mask = self._mask(row) if lacking else self._empty
        return b"%b\t%b\t%b\t%b\n" % (self._prefix, kind, mask, join_fields((*origin, *row)))

    def _mask(self, row: Values) -> bytes:
        marks = bytearray(self._empty_mask)
        for place, value in zip(self._places, row, strict=True):
            if value is UNCHANGED:
                marks[place - 1] = 0x31
                self._masked.add(place)
        return bytes(marks)

    def copied(self, net: Net) -> StagedPiece:
        new = sum(origin is None for origin in net.origins.values())
        changed = len(net.rows) - new
        new += net.more.total()
        fewer = net.fewer.total()
        return StagedPiece(
            self._part, net.truncated, net.moved, frozenset(self._masked), new, changed, len(net.gone), fewer
        )


# --- merging --------------------------------------------------------------------------------------


class Merge:
    """Merges one table's staged rows, inside the driver's transaction."""

    def __init__(self, stage: Stage, parts: list[StagedPiece]) -> None:
        self._stage = stage
        self._parts = parts
        self._ids = [part.part for part in parts]
        self._name = qualified(stage.target.schema, stage.target.name)
        self._only = stage.target.only
        self._columns = stage.columns
        self._masked = frozenset().union(*(part.masked for part in parts))

    @property
    def rows(self) -> int:
        """Return the number of new, changed and deleted rows."""
        return sum(part.new + part.changed + part.gone + part.fewer for part in self._parts)

    @property
    def truncated(self) -> bool:
        return any(part.truncated for part in self._parts)

    async def run(self, connection: Connection) -> None:
        """Merge the rows. Raises ApplyError if the target's rows are not the rows that the changes assume."""
        gone, changed, new, fewer = (
            sum(getattr(part, name) for part in self._parts) for name in ("gone", "changed", "new", "fewer")
        )
        if fewer:
            await self._expect(connection, self._delete_equal(), fewer)
        if self._in_place():
            if gone:
                await self._expect(connection, self._delete("s.kind = 'd'"), gone)
            if changed:
                await self._expect(connection, self._update(), changed)
        elif gone or changed:
            if changed:
                await self._expect(connection, self._complete(), changed)
            await self._expect(connection, self._delete("s.kind IN ('d', 'u')"), gone + changed)
            if changed:
                await self._expect(connection, self._insert(_CHANGED), changed)
        if new:
            await self._insert_new(connection, new)

    def _in_place(self) -> bool:
        target = self._stage.target
        always = any(column.identity_always and column.name not in target.identity for column in self._columns)
        return not (target.other_unique or target.partitioned or always or any(part.moved for part in self._parts))

    async def _expect(self, connection: Connection, statement: str, rows: int) -> None:
        tag = await connection.execute(statement, self._ids)
        if int(tag.split()[-1]) != rows:
            raise ApplyError(
                f'the rows of target relation "{self._stage.label}" are not the rows that the changes expect',
                detail=f"{rows} rows were expected, and {tag.split()[-1]} were found.",
                hint="Enable the subscription. Its apply worker applies the changes row by row, and reports the rows.",
            )

    def _matches(self) -> str:
        equal = {column.name: column.equality for column in self._columns}
        return " AND ".join(
            f"t.{identifier(name)} {equal[name] or '='} s.o{number}"
            for number, name in enumerate(self._stage.target.identity, 1)
        )

    def _staged(self, where: str) -> str:
        return f"s.part = ANY($1) AND {where}"

    def _value(self, number: int) -> str:
        """Return SQL for a column's value after the change."""
        if number not in self._masked:
            return f"s.c{number}"
        old = f"t.{identifier(self._columns[number - 1].name)}"
        return f"CASE WHEN substr(s.mask, {number}, 1) = '1' THEN {old} ELSE s.c{number} END"

    def _delete(self, where: str) -> str:
        return (
            f"DELETE FROM {self._only} t USING {self._stage.name} s WHERE {self._staged(where)} AND {self._matches()}"
        )

    def _update(self) -> str:
        sets = [
            f"{identifier(column.name)} = {self._value(number)}"
            for number, column in enumerate(self._columns, 1)
            if column.name not in self._stage.target.identity
        ]
        if not sets:  # only key columns, which do not change
            name = identifier(self._stage.target.identity[0])
            sets = [f"{name} = t.{name}"]
        where = f"{self._staged(_CHANGED)} AND {self._matches()}"
        return f"UPDATE {self._only} t SET {', '.join(sets)} FROM {self._stage.name} s WHERE {where}"

    def _complete(self) -> str:
        sets = ", ".join(f"c{number} = {self._value(number)}" for number in range(1, len(self._columns) + 1))
        where = f"{self._staged(_CHANGED)} AND {self._matches()}"
        return f"UPDATE {self._stage.name} s SET {sets} FROM {self._only} t WHERE {where}"

    def _insert(self, where: str, left_out: str = "") -> str:
        """Return the INSERT of staged rows, without the columns that the mask `left_out` marks."""
        wanted = [n for n in range(1, len(self._columns) + 1) if left_out[n - 1 : n] != "1"]
        names = ", ".join(identifier(self._columns[number - 1].name) for number in wanted)
        values = ", ".join(f"s.c{number}" for number in wanted)
        select = f"SELECT {values} FROM {self._stage.name} s WHERE {self._staged(where)}"
        return f"INSERT INTO {self._name} ({names}) OVERRIDING SYSTEM VALUE {select}"

    async def _insert_new(self, connection: Connection, rows: int) -> None:
        """Insert new rows. Columns that were not sent get their defaults."""
        masks = [""]
        if self._masked:
            query = f"SELECT DISTINCT mask FROM {self._stage.name} s WHERE {self._staged(_NEW)}"
            masks = [mask for (mask,) in await connection.fetch(query, self._ids)]
        count = 0
        for mask in masks:
            tag = await connection.execute(self._insert(f"{_NEW} AND s.mask = $2", mask), self._ids, mask)
            count += int(tag.split()[-1])
        if count != rows:
            raise ApplyError(f"{rows} staged rows were expected, and {count} were inserted", sqlstate=INTERNAL_ERROR)

    def _delete_equal(self) -> str:
        """Return the DELETE for tables without a key. Of equal rows, it deletes as many as the change log does."""
        numbers = [n for n in range(1, len(self._columns) + 1) if n not in self._masked]
        names = ", ".join(f"t.{identifier(self._columns[number - 1].name)}" for number in numbers)
        values = ", ".join(f"s.c{number}" for number in numbers)
        return f"""
            WITH s AS (SELECT ROW({values})::text AS row, count(*) AS number FROM {self._stage.name} s
                        WHERE {self._staged(_FEWER)} GROUP BY 1),
                 t AS (SELECT t.tableoid, t.ctid, ROW({names})::text AS row,
                              row_number() OVER (PARTITION BY ROW({names})::text) AS number FROM {self._only} t)
            DELETE FROM {self._only} d USING s, t
             WHERE t.row = s.row AND t.number <= s.number AND d.tableoid = t.tableoid AND d.ctid = t.ctid
        """
