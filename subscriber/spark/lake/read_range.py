"""ReadRangeTask: reads one range of a table on an executor, and writes its rows to files of the lake's table."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple

import anyio
import anyio.to_thread
import pyarrow as pa

from subscriber.changelog.schema_history import is_same
from subscriber.errors import ApplyError, LoadNeeded, SubscriberError
from subscriber.lsn import Lsn
from subscriber.publisher import ranges as queries
from subscriber.publisher.connection import Publisher
from subscriber.publisher.table_versions import read_table_version
from subscriber.publisher.tables import PublishedTable, as_relation, copy_statement
from subscriber.ranges.table_ranges import RangeSnapshot
from subscriber.spark.lake.copy_batches import CopyBatches
from subscriber.spark.lake.lake_table import lake_schema
from subscriber.spark.lake.range_load import RangeLoad, Texts
from subscriber.spark.publisher_snapshot import publisher_session
from subscriber.spark.tables.data_files import DataFolder, NewFile

FLUSH_LIMIT = 60.0  # seconds for the publisher to flush its WAL
_POLL = 0.02  # seconds


class RangeRows(NamedTuple):
    """The result of a task: a position behind the snapshot of a range, and the files with its rows."""

    lsn: Lsn
    files: list[NewFile]
    seconds: float


@dataclass(frozen=True, slots=True)
class ReadRangeTask:
    """Reads the rows with low <= key < high. None: there is no limit.

    `source` is the connection string of the publisher, and `folder` the place of the files.
    """

    source: str
    load: RangeLoad
    low: Texts | None
    high: Texts | None
    folder: DataFolder

    def _write(self, batches: Iterator[pa.RecordBatch]) -> list[NewFile]:
        schema = self.folder.schema  # a table that existed before may have its columns in another order
        return self.folder.write(batch.select(schema.names).cast(schema) for batch in batches)

    def __repr__(self) -> str:
        return "ReadRangeTask()"  # without the connection string

    async def read(self) -> RangeRows:
        """Read the range.

        Raises:
            LoadNeeded: the table has been changed since the load began.
            SubscriberError: the publisher cannot be read, or a value cannot be stored.
        """
        began, load = time.monotonic(), self.load
        async with range_session(self.source, load) as (publisher, table, snapshot):
            rows = CopyBatches(load.version, lake_schema(load.version, load.as_text), lambda _: None)
            statement = copy_statement(table, binary=False, condition=load.condition(self.low, self.high))
            async with aclosing(publisher.session.copy_out(statement)) as payloads:
                batches = rows.batches(payloads)
                files = await anyio.to_thread.run_sync(self._write, batches)
            await publisher.commit()
            await wait_for_flush(publisher, snapshot.lsn)
        return RangeRows(snapshot.lsn, files, time.monotonic() - began)


def read_range(task: ReadRangeTask) -> RangeRows | SubscriberError:
    """Run a task on an executor. Returns an error that another attempt would not correct."""
    try:
        return anyio.run(task.read)
    except SubscriberError as error:
        return error
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        return ApplyError(f"its rows cannot be stored: {type(error).__name__}")


async def check_timeline(publisher: Publisher, load: RangeLoad) -> None:
    """Raise LoadNeeded if another server has become the publisher since the load began."""
    if (await publisher.identify_system()).timeline != load.timeline:
        raise LoadNeeded("another server became the publisher while the table was loaded by ranges")


@asynccontextmanager
async def range_session(source: str, load: RangeLoad) -> AsyncIterator[tuple[Publisher, PublishedTable, RangeSnapshot]]:
    """Open a session in a snapshot of the table, which is locked against changes of its columns.

    Raises:
        LoadNeeded: the table has been changed since the load began, or the publisher is another one.
        SubscriberError: the publisher cannot be read.
    """
    version = load.version
    async with publisher_session(source, "lake") as publisher:
        await check_timeline(publisher, load)
        table = await publisher.table(version.schema, version.name, load.publications)
        snapshot = await queries.begin(publisher, table)
        table = await publisher.table(version.schema, version.name, load.publications)
        present = await read_table_version(publisher, as_relation(table), load.publications, version.position)
        if (
            present.relid != version.relid
            or not is_same(version, present)
            or present.published != version.published
            or not set(load.files) <= set(await queries.files(publisher, table))
        ):
            raise LoadNeeded("the table was changed while it was loaded by ranges")
        yield publisher, table, snapshot


async def wait_for_flush(publisher: Publisher, position: Lsn) -> None:
    """Wait until a crash of the publisher cannot undo transactions that a snapshot sees.

    Raises:
        SubscriberError: the WAL is not flushed up to `position` within FLUSH_LIMIT seconds.
    """
    if await queries.is_flushed(publisher, position):
        return
    await queries.request_flush(publisher)
    with anyio.move_on_after(FLUSH_LIMIT):
        while not await queries.is_flushed(publisher, position):
            await anyio.sleep(_POLL)
        return
    raise SubscriberError(f"the publisher has not flushed its WAL up to {position} for {FLUSH_LIMIT:g} s")
