"""CopyBatches: the rows of a COPY in text format as record batches of a lake's table."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing

import anyio.from_thread
import anyio.to_thread
import pyarrow as pa
from anyio.lowlevel import EventLoopToken, current_token

from subscriber.changelog.row_columns import split_lines
from subscriber.changelog.schema_history import TableVersion
from subscriber.connection.session import Session
from subscriber.errors import SubscriberError
from subscriber.spark.sources.arrow_types import arrow_array, cells_array

CHUNK = 20_000  # rows in a record batch
CHUNK_BYTES = 8 * 1024 * 1024  # of the rows as the publisher sends them, likewise


class CopyBatches:
    """Converts the rows of one COPY in text format to Arrow batches."""

    def __init__(self, version: TableVersion, schema: pa.Schema, on_rows: Callable[[int], None]) -> None:
        self._columns = [f"{version.label}.{column.name}" for column in version.columns]
        self.schema = schema
        self._on_rows = on_rows

    def batches(self, payloads: AsyncIterator[list[bytes]]) -> Iterator[pa.RecordBatch]:
        """Return the batches, for use in a thread. Must be called in the event loop."""
        return self._batches(payloads, current_token())

    def _batches(self, payloads: AsyncIterator[list[bytes]], loop: EventLoopToken) -> Iterator[pa.RecordBatch]:
        waiting: list[bytes] = []
        count = size = 0
        while lines := anyio.from_thread.run(_next, payloads, token=loop):
            waiting += lines
            size += sum(map(len, lines))
            if len(waiting) >= CHUNK or size >= CHUNK_BYTES:
                batch = self._batch(b"".join(waiting))
                count += len(batch)
                yield batch
                self._on_rows(count)
                waiting, size = [], 0
        if waiting:
            batch = self._batch(b"".join(waiting))
            count += len(batch)
            yield batch
        self._on_rows(count)

    def _batch(self, text: bytes) -> pa.RecordBatch:
        """Convert whole lines."""
        number = text.count(b"\n")  # in a value it is escaped
        columns = zip(split_lines(text, len(self.schema)), self.schema, self._columns, strict=True)
        arrays = [arrow_array(cells_array(number, cells), field.type, label) for cells, field, label in columns]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


async def copy_rows(
    session: Session, statement: str, rows: CopyBatches, handle: Callable[[Iterator[pa.RecordBatch]], None]
) -> None:
    """Run a COPY, and have a thread handle its rows. The session can be used afterwards, also if `handle` raises.

    Args:
        session: a session whose texts are those of the log's values.
        statement: the COPY, in text format.
        rows: converts the rows.
        handle: called in a thread.
    """
    async with aclosing(session.copy_out(statement)) as payloads:
        try:
            await anyio.to_thread.run_sync(handle, rows.batches(payloads))
        except SubscriberError:
            async for _ in payloads:  # the rest
                pass
            raise


async def _next(payloads: AsyncIterator[list[bytes]]) -> list[bytes]:
    """Return the next lines; empty at the end."""
    return await anext(payloads, [])
