"""The rows that a lake begins with: published tables as of one position, read from the publisher.

A temporary slot supplies the position and its snapshot, in one transaction of one walsender session. The tables are
read there with COPY, and the slot is dropped with the session. The change log has to start before that position, so the
archiver is started first. A reload reads single tables in the same way; the lake then brings the others to their
position.

**Failure cases.**

- Table that cannot be read or stored: it is set aside, and the others are loaded.
- Connection lost, or the process killed: a first load starts again. In a reload, the tables that are complete stay, and
  the others are set aside.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from functools import partial

import anyio.from_thread
import anyio.to_thread
import pyarrow as pa
from anyio.lowlevel import EventLoopToken, current_token

from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.schema_history import TableVersion
from subscriber.errors import SubscriberError
from subscriber.lsn import Lsn
from subscriber.protocol.copy_text import split_values
from subscriber.publisher.connection import Publisher
from subscriber.publisher.table_versions import read_table_version
from subscriber.publisher.tables import as_relation, copy_statement
from subscriber.spark.lake.lake import Lake
from subscriber.spark.lake.lake_table import lake_schema
from subscriber.spark.lake.registration import register_lake
from subscriber.spark.publisher_snapshot import publisher_snapshot
from subscriber.spark.sources.arrow_types import arrow_array

CHUNK = 20_000  # rows in a record batch
CHUNK_BYTES = 8 * 1024 * 1024  # of the rows as the publisher sends them, likewise


async def load(
    lake: Lake,
    log: ChangeLog,
    source: str,
    *,
    as_text: frozenset[str] = frozenset(),
    tables: frozenset[str] | None = None,
    on_rows: Callable[[str, int], None] = lambda *_: None,
) -> Lsn:
    """Load an empty lake, or tables of an existing one, with the publisher's current rows.

    Args:
        lake: the lake, which this process has locked.
        log: the change log.
        source: the connection string of the publisher.
        as_text: the columns to keep as text, as schema.table.column.
        tables: the tables, as schema.table; None: all published tables. A table of the lake that is no longer published
            is not shown any more.
        on_rows: called with a table's name and the number of rows loaded so far.

    Returns:
        The position of the rows. Tables that could not be loaded are set aside.

    Raises:
        StatementError: the log is of another publisher, it starts after that position, or there is no such table.
        SubscriberError: the publisher cannot be read.
    """
    is_new = not lake.exists
    if is_new or tables is not None:
        await anyio.to_thread.run_sync(lake.begin, log, tables)
    hint = "Start `subscriber archive` before the lake is loaded."
    async with publisher_snapshot(source, log, "lake", hint=hint) as (publisher, position):
        if is_new:
            await anyio.to_thread.run_sync(register_lake, lake.directory, log, position)
        published = {
            f"{schema}.{name}": (schema, name) for schema, name in await publisher.tables(log.identity.publications)
        }
        for label in sorted(published if tables is None else tables):
            if label in published:
                await _load_table(lake, log, publisher, *published[label], position, as_text, partial(on_rows, label))
            else:
                await anyio.to_thread.run_sync(lake.end_table, label)
    if is_new:
        await anyio.to_thread.run_sync(lake.finish_load, position)
    return position


async def tables_to_load(lake: Lake, log: ChangeLog, source: str) -> frozenset[str]:
    """Return the tables that load() would add to a lake or end, because the publication has changed.

    Args:
        lake: the lake.
        log: the change log.
        source: the connection string of the publisher.

    Returns:
        The published tables that the lake has not, and the tables of the lake that are not published, as schema.table.

    Raises:
        SubscriberError: the publisher cannot be read.
    """
    publisher = await Publisher.connect(source, application_name="subscriber lake")
    try:
        found = await publisher.tables(log.identity.publications)
    finally:
        await publisher.close()
    published = frozenset(f"{schema}.{name}" for schema, name in found)
    return await anyio.to_thread.run_sync(_differing_tables, lake, published)


def _differing_tables(lake: Lake, published: frozenset[str]) -> frozenset[str]:
    wanted = lake.wanted
    return (published if wanted is None else published & wanted) ^ lake.store.present().keys()


async def _load_table(
    lake: Lake,
    log: ChangeLog,
    publisher: Publisher,
    schema: str,
    name: str,
    position: Lsn,
    as_text: frozenset[str],
    on_rows: Callable[[int], None],
) -> None:
    session, publications = publisher.session, log.identity.publications
    await session.rows("SAVEPOINT one_table")
    try:
        table = await publisher.table(schema, name, publications)
        relation = as_relation(table)
        version = await read_table_version(publisher, relation, publications, position)
        version = replace(version, asked=position)  # the catalog is that of the snapshot
        rows = _Rows(version, lake_schema(version, as_text), on_rows)
        async with aclosing(session.copy_out(copy_statement(table, binary=False))) as payloads:
            try:
                await anyio.to_thread.run_sync(lake.put, log, version, position, rows.batches(payloads), as_text)
            except SubscriberError:
                async for _ in payloads:  # so that the session can be used for the next table
                    pass
                raise
    except SubscriberError as error:
        if session.error is not None:
            raise
        await session.rows("ROLLBACK TO SAVEPOINT one_table")
        await anyio.to_thread.run_sync(lake.fail_load, f"{schema}.{name}", error, log, as_text)


class _Rows:
    """Converts the rows of one COPY in text format to Arrow batches."""

    def __init__(self, version: TableVersion, schema: pa.Schema, on_rows: Callable[[int], None]) -> None:
        self._columns = [f"{version.label}.{column.name}" for column in version.columns]
        self.schema = schema
        self._on_rows = on_rows

    def batches(self, payloads: AsyncIterator[list[bytes]]) -> Iterator[pa.RecordBatch]:
        """Return the batches, for use in a thread. Must be called in the event loop."""
        return self._batches(payloads, current_token())

    def _batches(self, payloads: AsyncIterator[list[bytes]], loop: EventLoopToken) -> Iterator[pa.RecordBatch]:
        rows: list[list[bytes | None]] = []
        count = size = 0
        while lines := anyio.from_thread.run(_next, payloads, token=loop):
            rows += [split_values(line) for line in lines]
            size += sum(map(len, lines))
            if len(rows) >= CHUNK or size >= CHUNK_BYTES:
                count += len(rows)
                yield self._batch(rows)
                self._on_rows(count)
                rows, size = [], 0
        if rows:
            yield self._batch(rows)
        self._on_rows(count + len(rows))

    def _batch(self, rows: list[list[bytes | None]]) -> pa.RecordBatch:
        columns = zip(*rows, strict=True) if len(self.schema) else ()
        arrays = [
            arrow_array(values, field.type, column)
            for values, field, column in zip(columns, self.schema, self._columns, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


async def _next(payloads: AsyncIterator[list[bytes]]) -> list[bytes]:
    """Return the next lines; empty at the end."""
    return await anext(payloads, [])
