"""The first rows of a lake: every published table as of one position, read from the publisher.

A temporary slot supplies the position and its snapshot, in one transaction of one walsender session. The tables are
read there with COPY, and the slot is dropped with the session. The change log has to start before that position, so the
archiver is started first.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from functools import partial

import anyio.from_thread
import anyio.to_thread
import pyarrow as pa
from anyio.lowlevel import EventLoopToken, current_token

from subscriber.changelog.reader import ChangeLog
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.protocol.copy_text import split_values
from subscriber.protocol.messages import Relation
from subscriber.publisher.connection import Publisher
from subscriber.publisher.tables import as_relation, copy_statement
from subscriber.spark.lake.lake import Lake
from subscriber.spark.lake.stage import ToArrow
from subscriber.spark.sources.arrow_types import arrow_array

CHUNK = 20_000  # rows in a record batch


async def load(
    lake: Lake,
    log: ChangeLog,
    source: str,
    *,
    as_text: frozenset[str] = frozenset(),
    tables: frozenset[str] | None = None,
    on_rows: Callable[[str, int], None] = lambda *_: None,
) -> Lsn:
    """Load `lake` with the publisher's current rows.

    Args:
        source: the connection string of the publisher.
        as_text: the columns to keep as text, as schema.table.column.
        tables: the tables, as schema.table; None: all published tables.
        on_rows: called with a table's name and the number of rows loaded so far.

    Returns:
        The position of the rows.

    Raises:
        StatementError: the log starts after that position.
    """
    lake.begin(log)
    publisher = await Publisher.connect(source, application_name="subscriber lake")
    try:
        session = publisher.session
        await session.rows("SELECT pg_catalog.set_config('timezone', 'UTC', false)")
        await session.rows("SELECT pg_catalog.set_config('bytea_output', 'hex', false)")
        await publisher.restrict_views()
        await publisher.begin_snapshot()
        slot = await publisher.create_slot(f"subscriber_lake_{secrets.token_hex(4)}", snapshot="use", temporary=True)
        position = slot.consistent_point
        if position < log.start():
            raise StatementError(
                "the change log begins after the rows that were read",
                detail=f"It begins at {log.start()}; the rows are as of {position}.",
                hint="Start `subscriber archive` before the lake is loaded.",
            )
        publications = log.identity.publications
        for schema, name in await publisher.tables(publications):
            label = f"{schema}.{name}"
            if tables is None or label in tables:
                table = await publisher.table(schema, name, publications)
                statement = copy_statement(table, binary=False)
                rows = _Rows(as_relation(table), ToArrow(lake.directory, as_text), partial(on_rows, label))
                async with aclosing(session.copy_out(statement)) as payloads:
                    await anyio.to_thread.run_sync(lake.put, label, rows.schema, position, rows.batches(payloads))
    finally:
        publisher.session.abort()
    await anyio.to_thread.run_sync(lake.finish_load, position)
    return position


class _Rows:
    """Converts the rows of one COPY in text format to Arrow batches."""

    def __init__(self, relation: Relation, types: ToArrow, on_rows: Callable[[int], None]) -> None:
        self._label = f"{relation.schema}.{relation.name}"
        self._names = [column.name for column in relation.columns]
        self.schema = pa.schema([(column.name, types.kind(self._label, column)) for column in relation.columns])
        self._on_rows = on_rows

    def batches(self, payloads: AsyncIterator[list[bytes]]) -> Iterator[pa.RecordBatch]:
        """Return the batches, for use in a thread. Must be called in the event loop."""
        return self._batches(payloads, current_token())

    def _batches(self, payloads: AsyncIterator[list[bytes]], loop: EventLoopToken) -> Iterator[pa.RecordBatch]:
        rows: list[list[bytes | None]] = []
        count = 0
        while lines := anyio.from_thread.run(_next, payloads, token=loop):
            rows += [split_values(line) for line in lines]
            if len(rows) >= CHUNK:
                count += len(rows)
                yield self._batch(rows)
                self._on_rows(count)
                rows = []
        if rows:
            yield self._batch(rows)
        self._on_rows(count + len(rows))

    def _batch(self, rows: list[list[bytes | None]]) -> pa.RecordBatch:
        columns = zip(*rows, strict=True) if self._names else ()
        arrays = [
            arrow_array(values, field.type, f"{self._label}.{field.name}")
            for values, field in zip(columns, self.schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


async def _next(payloads: AsyncIterator[list[bytes]]) -> list[bytes]:
    """Return the next lines; empty at the end."""
    return await anext(payloads, [])
