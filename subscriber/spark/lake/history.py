"""The changes of a batch as Parquet files, written by executors.

    history/upto=<position>/schema=…/table=…/part-<number of the piece>.parquet

**Failure cases.**

- Task repeated, or running twice: both attempts write the same files.
- Killed in the middle: the directory belongs to one batch, and is removed when the batch is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from subscriber.changelog.pieces import Piece
from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.storage import Location, remove_directory, stored_file
from subscriber.lsn import Lsn
from subscriber.protocol.messages import Relation
from subscriber.spark.sources.arrow_rows import ARROW, batches
from subscriber.spark.tasks import run_tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PARTITIONS = ("schema", "table")
_NULL = "__HIVE_DEFAULT_PARTITION__"


def write_history(
    spark: SparkSession, log: ChangeLog, start: Lsn, end: Lsn, tables: frozenset[str] | None, directory: Location
) -> None:
    """Write the changes of (start, end] below `directory`.

    Args:
        spark: the session.
        log: the change log.
        start: the start of the range.
        end: the end of the range.
        tables: the tables, as schema.table; None: all, and logical messages.
        directory: the directory of the history.

    Raises:
        SubscriberError: the log cannot be read, or a task failed in every attempt.
    """
    place = directory / f"upto={end:016X}"
    remove_directory(place)
    run_tasks(spark, _HistoryFiles(log.directory, tables, place), list(enumerate(log.pieces(start, end))))


@dataclass(frozen=True, slots=True)
class _HistoryFiles:
    """Writes the changes of one piece of the log, on an executor."""

    log: Location
    tables: frozenset[str] | None
    directory: Location

    def __call__(self, numbered: tuple[int, Piece]) -> None:
        number, piece = numbered
        with ExitStack() as stack:
            writers: dict[tuple[str, ...], pq.ParquetWriter] = {}
            for partition, rows in self._rows(piece):
                if partition not in writers:
                    path = self.directory
                    for name, text in zip(_PARTITIONS, partition, strict=True):
                        path /= f"{name}={text}"
                    local = stack.enter_context(stored_file(path / f"part-{number:05}.parquet"))
                    writers[partition] = stack.enter_context(pq.ParquetWriter(local, rows.schema))
                writers[partition].write_table(rows)

    def _rows(self, piece: Piece) -> Iterator[tuple[tuple[str, ...], pa.Table]]:
        """Yield rows of one table, and the values of its partition."""
        for batch in batches(self.log, piece, self._wants):
            rows = pa.table(batch)
            if self.tables is not None:
                rows = rows.filter(pc.is_valid(rows["table"]))  # without messages
            for partition_row in rows.select(_PARTITIONS).group_by(_PARTITIONS).aggregate([]).to_pylist():
                names = [partition_row[name] for name in _PARTITIONS]
                chosen = rows
                for name, text in zip(_PARTITIONS, names, strict=True):
                    column = chosen[name]
                    chosen = chosen.filter(pc.is_null(column) if text is None else pc.equal(column, text))
                partition = tuple(_NULL if text is None else quote(text, safe=" ") for text in names)
                yield partition, chosen.select([name for name in ARROW.names if name not in _PARTITIONS])

    def _wants(self, relation: Relation) -> bool:
        return self.tables is None or f"{relation.schema}.{relation.name}" in self.tables
