"""CopyBatches: the rows of a COPY in text format as record batches of a lake's table."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import anyio.from_thread
import pyarrow as pa
from anyio.lowlevel import EventLoopToken, current_token

from subscriber.changelog.schema_history import TableVersion
from subscriber.protocol.copy_text import split_values
from subscriber.spark.sources.arrow_types import arrow_array

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
