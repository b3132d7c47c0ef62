"""The comparison of a lake's tables with those of the publisher, at one position.

A snapshot of the publisher has a position of the log. The lake is brought to that position. Then the rows of each table
are read on both sides, the publisher's with COPY in that snapshot, and their checksums are compared (row_sums.py). This
process reads all rows, in bounded memory.

**Failure cases.**

- The log does not reach the position: the caller decides how long it waits.
- A table was changed by DDL, and no change of a row followed: it is not compared, and the result says why.
- A value of the publisher does not fit the column of the lake: the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import anyio.to_thread
import pyarrow as pa

from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.schema_history import TableVersion, is_same
from subscriber.comparison.result import Comparison, TableComparison
from subscriber.connection.session import savepoint
from subscriber.errors import SubscriberError
from subscriber.lsn import Lsn
from subscriber.publisher.connection import Publisher
from subscriber.publisher.table_versions import read_snapshot_version
from subscriber.publisher.tables import copy_statement
from subscriber.spark.lake.copy_batches import CopyBatches, copy_rows
from subscriber.spark.lake.lake import Lake
from subscriber.spark.lake.lake_table import LakeTable, lake_schema
from subscriber.spark.lake.row_sums import BucketRows, RowSums, add_differences, buckets_to_read
from subscriber.spark.publisher_snapshot import publisher_snapshot

OnRows = Callable[[str, int], None]


async def verify_lake(
    lake: Lake,
    log: ChangeLog,
    source: str,
    advance: Callable[[Lsn], None],
    *,
    on_rows: OnRows = lambda _label, _rows: None,
) -> Comparison:
    """Compare all tables of a lake with the publisher's, at the publisher's current position.

    Args:
        lake: the lake, which this process has locked.
        log: the change log.
        source: the connection string of the publisher.
        advance: brings the lake to a position. Called once, in a thread, while a snapshot of the publisher is open.
        on_rows: called with a table, and the number of its rows that were read.

    Returns:
        The result. In its lists the lake is the target. A table that is set aside, is not in the lake, or has other
        columns than the publisher's, is not compared, and has a note.

    Raises:
        StatementError: the log is of another publisher.
        SubscriberError: the publisher or the log cannot be read.
        OSError: the lake cannot be read.

    Cancellation: the session of the publisher ends.
    """
    hint = "Compare with a log that `subscriber archive` still writes."
    async with publisher_snapshot(source, log, "lake", hint=hint) as (publisher, position):
        await anyio.to_thread.run_sync(advance, position)
        states, wanted = lake.store.present(), lake.wanted
        published = {
            f"{schema}.{name}": (schema, name) for schema, name in await publisher.tables(log.identity.publications)
        }
        labels = {label for label in published if wanted is None or label in wanted} | states.keys()
        work = _LakeComparison(lake, publisher, position, log.identity.publications, on_rows)
        comparisons = []
        for label in sorted(labels):
            if label not in states:
                comparisons.append(TableComparison(label, note="it is not in the lake"))
            elif label not in published:
                comparisons.append(TableComparison(label, note="it is no longer published"))
            else:
                comparisons.append(await work.table(states[label], *published[label]))
    return Comparison(position, comparisons)


class _Sides(NamedTuple):
    """The queries that read the rows of a table on both sides, in record batches of the same columns."""

    version: TableVersion
    schema: pa.Schema
    statement: str  # a COPY
    key: tuple[int, ...]  # indexes of columns; empty: the whole row


class _LakeComparison:
    """The comparison of tables in a snapshot of the publisher."""

    def __init__(
        self, lake: Lake, publisher: Publisher, position: Lsn, publications: Iterable[str], on_rows: OnRows
    ) -> None:
        self._lake = lake
        self._publisher = publisher
        self._position = position
        self._publications = tuple(publications)
        self._on_rows = on_rows

    async def table(self, state: LakeTable, schema: str, name: str) -> TableComparison:
        """Compare one table."""
        result = TableComparison(state.label, lsn=self._position)
        if state.problem is not None:
            result.leave_out(f"it is set aside: {state.problem.message}")
            return result
        session = self._publisher.session
        try:
            async with savepoint(session):
                if (sides := await self._sides(state, schema, name)) is None:
                    note = "its columns have changed, which the lake follows with the next change of a row"
                    result.leave_out(note, is_changed=True)
                else:
                    await self._compare(result, sides)
        except SubscriberError as error:
            if session.error is not None:
                raise
            result.leave_out(error.message)
        return result

    async def _sides(self, state: LakeTable, schema: str, name: str) -> _Sides | None:
        """Return how to read a table. None: the publisher's has other columns."""
        assert state.version is not None
        publisher, publications = self._publisher, self._publications
        table = await publisher.table(schema, name, publications)
        version = await read_snapshot_version(publisher, table, publications, self._position)
        if not is_same(state.version, version):
            return None
        names = [column.name for column in version.columns]
        key = version.key_names() or tuple(column.name for column in version.columns if column.is_key)
        if len(key) == len(names) and version.key_names() is None:
            key = ()  # REPLICA IDENTITY FULL: rows may be there several times
        statement = copy_statement(table, binary=False)
        return _Sides(version, lake_schema(version, state.as_text()), statement, tuple(map(names.index, key)))

    async def _compare(self, result: TableComparison, sides: _Sides) -> None:
        names = [column.name for column in sides.version.columns]
        result.identify(tuple(names[index] for index in sides.key))
        publisher, lake = RowSums(sides.key), RowSums(sides.key)
        await self._read(sides, publisher.add, lake.add)
        result.count_rows(publisher.rows, lake.rows)
        differing = publisher.differing(lake)
        if not differing:
            return
        chosen = buckets_to_read(differing, max(publisher.rows, lake.rows))
        first, second = BucketRows(sides.key, chosen), BucketRows(sides.key, chosen)
        await self._read(sides, first.add, second.add)
        add_differences(result, names, first, second)
        result.leave_buckets(len(differing) - len(chosen))
        if not result.listed:
            result.leave_unexplained(len(chosen))

    async def _read(
        self, sides: _Sides, of_publisher: Callable[[pa.RecordBatch], None], of_lake: Callable[[pa.RecordBatch], None]
    ) -> None:
        """Read all rows of both sides."""
        label = sides.version.label
        rows = CopyBatches(sides.version, sides.schema, partial(self._on_rows, label))
        await copy_rows(self._publisher.session, sides.statement, rows, partial(_each, of_publisher))
        await anyio.to_thread.run_sync(self._read_lake, label, sides.schema, of_lake)

    def _read_lake(self, label: str, schema: pa.Schema, handle: Callable[[pa.RecordBatch], None]) -> None:
        count = 0
        with self._lake.store.storing():
            for batch in self._lake_rows(label, schema):
                handle(batch)
                self._on_rows(label, count := count + len(batch))

    def _lake_rows(self, label: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        stored = self._lake.store.open(label)
        for batch in stored.folder.rows(stored.files(None)):
            arrays = [batch[field.name].cast(field.type) for field in schema]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _each(handle: Callable[[pa.RecordBatch], None], batches: Iterable[pa.RecordBatch]) -> None:
    for batch in batches:
        handle(batch)
