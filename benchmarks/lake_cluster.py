"""What cluster columns of a lake's tables save their readers, and what they cost loads and batches.

    python -m benchmarks.lake_cluster [--rows N] [--width BYTES] [--changes N] [--rounds N] [--formats delta iceberg]

A table of N rows, whose times are in random order, is stored twice: as it comes, and clustered by the time. Readers
take the rows of one percent of the time. Polars is one of them if it is installed. Then batches change rows in both
tables, in turns, as executors do it, but in this process: with the newest keys, and with random ones. A third table
gets the rows in ranges of the key, as from a load by ranges, and then its files are put in order. No server and no
Spark is needed.

    load s           seconds until the table has all rows
    files, MB        what the table has then
    … ms             milliseconds in which a reader opens the table and takes the rows, the median of all rounds
    merge s          seconds of a batch
    files read       files in which the keys of a batch may be
    written MB       new files of a batch
    recluster s      seconds until the files are in order, with one process
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import random
import tempfile
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, QueryBuilder

from benchmarks.lake import MB, Figures, report
from subscriber.lsn import Lsn
from subscriber.spark.tables.data_files import LIMITS
from subscriber.spark.tables.layout import NO_LAYOUT, Layout
from subscriber.spark.tables.merge import Columns
from subscriber.spark.tables.recluster import Reclustering
from subscriber.spark.tables.stage import OP, value, write_staged
from subscriber.spark.tables.table_format import DELTA, FORMATS, TableFormat, table_format
from subscriber.spark.tables.table_merge import TableMerge

LABEL = "public.event"
SCHEMA = pa.schema([("id", pa.int64()), ("at", pa.timestamp("us", tz="UTC")), ("note", pa.string())])
WAYS = {"as it comes": NO_LAYOUT, "clustered": Layout(cluster=("at",))}
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
STEP = 10_000_000  # microseconds between two times
RANGE = 100_000  # rows of a range of keys


def rows(count: int, width: int) -> list[pa.RecordBatch]:
    """Return rows with ascending keys, and with times in random order."""
    places = pc.sort_indices(pc.random(count, initializer=1)).cast(pa.int64())
    first = int(BEGIN.timestamp() * 1_000_000)
    times = pc.add(pc.multiply(places, STEP), first).cast(SCHEMA.field("at").type)
    offsets = pa.array(range(0, width * (count + 1), width), pa.int32())
    text = pa.py_buffer(os.urandom(width * count // 2 + 1).hex().encode())
    notes = pa.StringArray.from_buffers(count, offsets.buffers()[1], text)
    table = pa.table([pa.array(range(count), pa.int64()), times, notes], schema=SCHEMA)
    return list(table.to_batches(65_536))


class Stored:
    """One of the tables. Methods block."""

    def __init__(self, directory: Path, name: str, way: str) -> None:
        self.path = directory / "table"
        self._staging = directory / "staged"
        self._format: TableFormat = table_format(name, directory, "benchmark", None)
        self._way = way
        self._position = Lsn(1)
        directory.mkdir()

    def load(self, batches: list[pa.RecordBatch]) -> None:
        self._format.create(LABEL, self.path, SCHEMA, self._position, batches, WAYS[self._way])

    def open(self) -> Any:
        return self._format.open(LABEL, self.path)

    def merge(self, changed: pa.RecordBatch) -> tuple[int, int]:
        """Apply a batch of rows that the table has. Returns the numbers of files that are read, and of new bytes."""
        self._position = Lsn(self._position + 1)
        columns = {OP: pa.array(["u"] * len(changed))}
        columns |= {value(index): changed[name] for index, name in enumerate(SCHEMA.names)}
        staged = write_staged(pa.table(columns), self._staging, (0,), truncated=False)
        one = TableMerge(self.open, Columns(tuple(SCHEMA.names)), [staged], self._position, self._staging)
        tasks = one.file_tasks()
        files = [task() for task in tasks]
        inserted = [task() for task in one.insert_tasks(files)]
        assert one.commit(files, inserted)
        added = [new for some in (*(one.added for one in files), *inserted) for new in some]
        deletes = [new for one in files for new in one.deletes]
        read = sum(len(task.files) for task in tasks)
        return read, sum(new.size for new in added) + sum(new.size for new in deletes)

    def load_ranges(self, batches: list[pa.RecordBatch]) -> None:
        """Load each batch with a commit of its own."""
        self.load([])
        for batch in batches:
            stored = self.open()
            stored.commit([], stored.folder.write([batch]), self._position)

    def recluster(self) -> None:
        """Write the files again that overlap."""
        work = Reclustering(self.open(), LIMITS)
        tasks = work.slice_tasks([task() for task in work.keys_tasks()], 2)
        work.commit([file for task in tasks for file in task()])


def readers(stored: Stored, name: str, low: datetime, high: datetime) -> Mapping[str, Callable[[], int]]:
    """Return what reads the rows of a range of times, by name. Each returns the number of rows."""
    where, found = str(stored.path), dict[str, Callable[[], int]]()
    if name == DELTA:
        query = f"SELECT id, at, note FROM event WHERE at >= '{low.isoformat()}' AND at < '{high.isoformat()}'"
        found["DataFusion"] = lambda: len(
            pa.table(QueryBuilder().register("event", DeltaTable(where)).execute(query).read_all())
        )
    else:
        condition = f"at >= '{low.isoformat()}' and at < '{high.isoformat()}'"
        found["PyIceberg"] = lambda: len(stored.open().table.scan(row_filter=condition).to_arrow())
    if importlib.util.find_spec("polars") is not None:
        polars: Any = importlib.import_module("polars")

        def scan() -> Any:
            return polars.scan_delta(where) if name == DELTA else polars.scan_iceberg(stored.open().table)

        at = polars.col("at")
        found["Polars"] = lambda: len(scan().filter(at >= low, at < high).collect())
    return found


def measure_readers(
    figures: Figures, tables: Mapping[str, Stored], name: str, low: datetime, high: datetime, rounds: int
) -> None:
    """Measure the readers of tables in turns."""
    for way, stored in tables.items():
        files = stored.open().files("id")
        figures.add(f"{name}, {way}, files", len(files))
        figures.add(f"{name}, {way}, MB", sum(file.size for file in files) / MB)
    wanted = (high - low) // timedelta(microseconds=STEP)
    for number in range(rounds + 1):
        for way, stored in tables.items():
            for reader, read in readers(stored, name, low, high).items():
                began = monotonic()
                assert read() == wanted
                if number:  # the first one also imports modules
                    figures.add(f"{name}, {way}, {reader} ms", 1_000 * (monotonic() - began))


def measure(count: int, width: int, changes: int, rounds: int, formats: list[str]) -> Figures:
    figures, batches, chance = Figures(), rows(count, width), random.Random(1)
    everything = pa.Table.from_batches(batches)
    low = BEGIN + timedelta(microseconds=STEP * (count // 3))
    high = low + timedelta(microseconds=STEP * (count // 100))
    with tempfile.TemporaryDirectory() as directory:
        for name in formats:
            tables = {way: Stored(Path(directory) / f"{name}-{len(way)}", name, way) for way in WAYS}
            for _ in range(rounds):
                for way, stored in tables.items():
                    began = monotonic()
                    stored.load(batches)
                    figures.add(f"{name}, {way}, load s", monotonic() - began)
            measure_readers(figures, tables, name, low, high, rounds)
            ranges = Stored(Path(directory) / f"{name}-ranges", name, "clustered")
            ranges.load_ranges(everything.combine_chunks().to_batches(RANGE))
            measure_readers(figures, {"in ranges": ranges}, name, low, high, rounds)
            began = monotonic()
            ranges.recluster()
            figures.add(f"{name}, in ranges, recluster s", monotonic() - began)
            measure_readers(figures, {"reclustered": ranges}, name, low, high, rounds)
            for _ in range(rounds):
                keys = {"newest": range(count - changes, count), "random": sorted(chance.sample(range(count), changes))}
                for kind, numbers in keys.items():
                    changed = everything.take(pa.array(numbers)).combine_chunks().to_batches()[0]
                    for way, stored in tables.items():
                        began = monotonic()
                        read_files, written = stored.merge(changed)
                        figures.add(f"{name}, {way}, {kind}, merge s", monotonic() - began)
                        figures.add(f"{name}, {way}, {kind}, files read", read_files)
                        figures.add(f"{name}, {way}, {kind}, written MB", written / MB)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--width", type=int, default=100, help="bytes of the text of a row")
    parser.add_argument("--changes", type=int, default=1_000, help="of a batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = measure(options.rows, options.width, options.changes, options.rounds, options.formats)
    report(figures, as_json=options.json)


if __name__ == "__main__":
    main()
