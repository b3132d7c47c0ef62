"""The rows that a lake begins with: published tables as of one position, read from the publisher.

A temporary slot supplies the position and its snapshot, in one transaction of one walsender session. The tables are
read there with COPY, and the slot is dropped with the session. The change log has to start before that position, so the
archiver is started first. A reload reads single tables in the same way; the lake then brings the others to their
position.

**Failure cases.**

- Table that cannot be read or stored: it is set aside, and the others are loaded.
- Value that the type of its column cannot hold, such as infinity or a year before Christ: a table that the lake has
  never had keeps the column as text, and is read again in the same snapshot. Other tables have readers, who know the
  type. Such a table is set aside.
- Connection lost, or the process killed: a first load starts again. In a reload, the tables that are complete stay, and
  the others are set aside.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import anyio.to_thread

from subscriber.changelog.reader import ChangeLog
from subscriber.connection.session import savepoint
from subscriber.display import near_word
from subscriber.errors import ApplyError, StatementError, SubscriberError, ValueUnsupported
from subscriber.lsn import Lsn
from subscriber.publisher.connection import Publisher
from subscriber.publisher.table_versions import read_snapshot_version
from subscriber.publisher.tables import copy_statement
from subscriber.remedy import Remedy
from subscriber.spark.lake.copy_batches import CopyBatches, copy_rows
from subscriber.spark.lake.lake import Lake
from subscriber.spark.lake.lake_table import lake_schema
from subscriber.spark.lake.load_ranges import begin_range_loads
from subscriber.spark.lake.registration import register_lake
from subscriber.spark.publisher_snapshot import missing_grant, publisher_snapshot
from subscriber.spark.tables.layout import NO_LAYOUT, Layout
from subscriber.sqlstate import INSUFFICIENT_PRIVILEGE, UNDEFINED_TABLE


async def load(
    lake: Lake,
    log: ChangeLog,
    source: str,
    *,
    as_text: frozenset[str] = frozenset(),
    layout: Layout = NO_LAYOUT,
    tables: frozenset[str] | None = None,
    larger: int | None = None,
    on_rows: Callable[[str, int], None] = lambda *_: None,
    on_refused: Callable[[str, str], None] = lambda *_: None,
    on_text: Callable[[str, str], None] = lambda *_: None,
) -> Lsn:
    """Load an empty lake, or tables of an existing one, with the publisher's current rows.

    Args:
        lake: the lake, which this process has locked.
        log: the change log.
        source: the connection string of the publisher.
        as_text: the columns to keep as text, as schema.table.column.
        layout: the layout of tables, by schema.table.column (layout_options.py). What is not given stays as it is.
        tables: the tables, as schema.table; None: all published tables. A table of the lake that is no longer published
            is not shown any more.
        larger: tables of more bytes are loaded by ranges, which RangeLoads does afterwards. None: no tables are.
        on_rows: called with a table's name and the number of rows loaded so far.
        on_refused: called with a larger table that cannot be loaded by ranges, and the reason.
        on_text: called with a column that a new table keeps as text, and the reason.

    Returns:
        The position of the rows; that of the lake if all tables are loaded by ranges. Tables that could not be loaded
        are set aside.

    Raises:
        StatementError: the log is of another publisher, it starts after that position, or there is no such table.
        SubscriberError: the publisher cannot be read.
    """
    is_new = not lake.exists
    if is_new or tables is not None:
        await anyio.to_thread.run_sync(lake.begin, log, tables)
    by_ranges = frozenset[str]()
    if larger is not None:
        by_ranges = await begin_range_loads(
            lake, log, source, tables, larger=larger, as_text=as_text, layout=layout, on_refused=on_refused
        )
    if not is_new and tables is not None and tables <= by_ranges:
        return await anyio.to_thread.run_sync(lake.position)
    hint = "Start `subscriber archive` before the lake is loaded."
    async with publisher_snapshot(source, log, "lake", hint=hint) as (publisher, position):
        published = {
            f"{schema}.{name}": (schema, name) for schema, name in await publisher.tables(log.identity.publications)
        }
        if is_new:
            for label in sorted((tables or frozenset()) - published.keys()):
                raise StatementError(
                    f'table "{label}" is not published', hint=near_word(label, published), sqlstate=UNDEFINED_TABLE
                )
            await anyio.to_thread.run_sync(register_lake, lake.directory, log, lake.store.loads.needed(position))
        for label in sorted((published.keys() if tables is None else tables) - by_ranges):
            if label in published:
                name, report = published[label], partial(on_rows, label)
                await _load_table(lake, log, publisher, *name, position, as_text, layout, report, on_text)
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
        tables = await publisher.tables(log.identity.publications)
    finally:
        await publisher.close()
    published = frozenset(f"{schema}.{name}" for schema, name in tables)
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
    layout: Layout,
    on_rows: Callable[[int], None],
    on_text: Callable[[str, str], None],
) -> None:
    session, publications, label = publisher.session, log.identity.publications, f"{schema}.{name}"
    state = (await anyio.to_thread.run_sync(lake.store.states)).get(label)
    is_new = state is None or state.version is None
    while True:
        try:
            async with savepoint(session):
                table = await publisher.table(schema, name, publications)
                version = await read_snapshot_version(publisher, table, publications, position)
                rows = CopyBatches(version, lake_schema(version, as_text), on_rows)
                put = partial(lake.put, log, version, position, as_text=as_text, layout=layout)
                await copy_rows(session, copy_statement(table, binary=False), rows, put)
        except SubscriberError as error:
            if session.error is not None:
                raise
            if is_new and isinstance(error, ValueUnsupported) and error.column not in as_text:
                as_text |= {error.column}
                on_text(error.column, error.message)
                continue
            if error.sqlstate == INSUFFICIENT_PRIVILEGE and (grant := await missing_grant(publisher, schema, name)):
                error = ApplyError(error.message, hint=Remedy("on the publisher", grant), sqlstate=error.sqlstate)
            await anyio.to_thread.run_sync(lake.fail_load, label, error, log, as_text, layout)
        return
