"""Row-by-row comparison of two databases: the rows of each table as text, as multisets.

Each side sorts a table's rows by their text and sends them with COPY. Both streams are read in parallel, so memory is
constant for tables of any size. Columns are matched by name. A row that occurs twice on one side and once on the other
is a difference.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from subscriber.connection.connect import open_session
from subscriber.connection.session import Session
from subscriber.quoting import identifier, literal, qualified

# The text format must not depend on the settings of a role or database.
SETTINGS = {
    "datestyle": "ISO",
    "intervalstyle": "postgres",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "timezone": "UTC",
}
_SIGNATURE = b"PGCOPY\n\xff\r\n\0"
_HEADER = 19  # bytes: the signature, flags, length of an extension
_TRAILER = b"\xff\xff"
_FRONT = 6  # bytes before a row's text: number of columns, its length
_TABLES = """
SELECT n.nspname, c.relname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind = 'r' AND c.relpersistence = 'p' AND n.nspname NOT IN ('information_schema', 'subscriber')
   AND n.nspname NOT LIKE 'pg\\_%' ORDER BY 1, 2
"""


@dataclass(slots=True)
class TableResult:
    """The result of one table: the number of equal rows, and of rows on only one side."""

    schema: str
    name: str
    same: int = 0
    only_source: int = 0
    only_target: int = 0
    note: str | None = None  # reason why it could not be compared row by row

    def add(self, same: int = 0, only_source: int = 0, only_target: int = 0) -> None:
        """Count rows."""
        self.same += same
        self.only_source += only_source
        self.only_target += only_target

    def leave_out(self, note: str) -> None:
        """Record the reason why the table could not be compared row by row."""
        self.note = note

    @property
    def differs(self) -> bool:
        return bool(self.only_source or self.only_target or self.note)


@asynccontextmanager
async def _snapshot(dsn: str) -> AsyncIterator[Session]:
    """Open a session in a read-only transaction that sees one state of the database."""
    async with await open_session(dsn, application_name="subscriber compare", settings=SETTINGS) as session:
        await session.query("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        yield session


async def compare(source_dsn: str, target_dsn: str) -> AsyncIterator[TableResult]:
    """Yield the result of each table that one of the databases has. Partitions are compared, their parents are not.

    Each side is read in one snapshot, taken now. No session should write meanwhile.
    """
    async with _snapshot(source_dsn) as source, _snapshot(target_dsn) as target:
        here, there = await _tables(source), await _tables(target)
        for schema, name in sorted(here | there):
            result = TableResult(schema, name)
            if (schema, name) not in there:
                result.leave_out("does not exist on the target")
            elif (schema, name) not in here:
                result.leave_out("does not exist on the source")
            else:
                await _compare_table(source, target, result)
            yield result


async def _tables(session: Session) -> set[tuple[str, str]]:
    return {(schema or "", name or "") for schema, name in await session.rows(_TABLES)}


async def _columns(session: Session, result: TableResult) -> list[str]:
    rows = await session.rows(
        "SELECT attname FROM pg_catalog.pg_attribute WHERE attnum > 0 AND NOT attisdropped AND attrelid ="
        f" {literal(qualified(result.schema, result.name))}::pg_catalog.regclass ORDER BY attnum"
    )
    return [name or "" for (name,) in rows]


async def _compare_table(source: Session, target: Session, result: TableResult) -> None:
    columns = await _columns(source, result)
    if set(columns) != set(await _columns(target, result)):
        result.leave_out("has other columns on the target")
        return
    # Rows are sent in this encoding, and not converted.
    encoding = literal(target.parameters.get("server_encoding", "UTF8"))
    row = f"ROW({', '.join(identifier(column) for column in columns)})::pg_catalog.text"
    query = f"SELECT pg_catalog.convert_to({row}, {encoding}) AS r FROM ONLY {qualified(result.schema, result.name)}"
    # Binary, because the escapes of the text format do not keep the order of the bytes.
    statement = f"COPY (SELECT r FROM ({query}) s ORDER BY r) TO STDOUT (FORMAT binary)"
    async with aclosing(_rows(source, statement)) as left, aclosing(_rows(target, statement)) as right:
        await _merge(left, right, result)


async def _rows(session: Session, statement: str) -> AsyncGenerator[list[bytes], None]:
    """Yield the rows of a binary COPY as they arrive, in non-empty lists. A row is _FRONT bytes and one text."""
    async with aclosing(session.copy_out(statement)) as chunks:
        async for rows in chunks:
            if rows[0].startswith(_SIGNATURE):
                rows[0] = rows[0][_HEADER:]
            if batch := [row for row in rows if row and row != _TRAILER]:
                yield batch


async def _merge(left: AsyncIterator[list[bytes]], right: AsyncIterator[list[bytes]], result: TableResult) -> None:
    """Count the rows that two sorted streams have in common."""
    here: list[bytes] = []
    there: list[bytes] = []
    while True:
        here = here or await anext(left, [])
        there = there or await anext(right, [])
        if not here or not there:
            break
        many = min(len(here), len(there))
        if here[:many] == there[:many]:
            result.add(same=many)
            here, there = here[many:], there[many:]
        else:
            here, there = _step(here, there, result)
    result.add(only_source=len(here), only_target=len(there))
    async for rows in left:
        result.add(only_source=len(rows))
    async for rows in right:
        result.add(only_target=len(rows))


def _step(here: list[bytes], there: list[bytes], result: TableResult) -> tuple[list[bytes], list[bytes]]:
    """Merge two blocks until one is used up. Returns the remaining rows of both."""
    i = j = same = only_source = only_target = 0
    while i < len(here) and j < len(there):
        if here[i] == there[j]:
            same += 1
            i, j = i + 1, j + 1
        elif here[i][_FRONT:] < there[j][_FRONT:]:
            only_source += 1
            i += 1
        else:
            only_target += 1
            j += 1
    result.add(same, only_source, only_target)
    return here[i:], there[j:]
