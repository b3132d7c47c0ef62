"""Large tables of a snapshot: read by ranges of their keys, and brought to the position of the snapshot.

**Purpose.** Tables that take long in one snapshot of the publisher keep it from removing dead rows. Executors read a
large table by ranges, each in a short snapshot, as those of a lake (lake/load_ranges.py). So a lake in the directory of
the snapshot, whose columns are all text, loads the tables and follows the log to the position of the snapshot. Its
rows are written to the files of the snapshot, and the lake is removed.

    load     the lake loads the tables
             the other tables are read in one snapshot, which has the position (snapshot/writer.py)
    write    the lake follows the log up to the position; its rows are written as COPY would print them
    remove   the lake and its registration as a reader of the log

**Invariants.** All columns are text, so a value in the snapshot is the text that the publisher sent. A table has the
same columns from its load up to the position.

**Failure cases.**

- Killed while the tables are loaded, or after that: the next call continues the lake, if it has the same tables.
- A table cannot be loaded, or its columns change before the position: the lake is removed. The next call begins again.
- The archiver does not run: the log does not reach the snapshots of the ranges. That is an error after LIMIT seconds,
  and the next call continues.
- Executor killed while it writes files: another one writes the same files again.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import anyio
import pyarrow as pa
import pyarrow.compute as pc

from subscriber import telemetry
from subscriber.changelog.consumers import forget
from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.schema_history import TableVersion, is_same
from subscriber.changelog.storage import Location, directory_names, file_names, remove_directory, write_file
from subscriber.errors import ApplyError, StatementError, SubscriberError
from subscriber.formatting import in_seconds
from subscriber.lsn import Lsn
from subscriber.protocol.copy_text import ESCAPED, NULL_FIELD, escape
from subscriber.publisher.ranges import printed_range_key
from subscriber.ranges.keys import KeyRangeError
from subscriber.spark.lake.lake import BOUNDARIES, LOCK, Lake
from subscriber.spark.lake.load import load
from subscriber.spark.lake.load_ranges import LIMITS, RangeLoads, RangeStep
from subscriber.spark.lake.registration import consumer_name
from subscriber.spark.publisher_snapshot import check_publisher, publisher_session
from subscriber.spark.sources.table_snapshot import FILE_BYTES, SnapshotFile
from subscriber.spark.tables.data_files import DataFile, DataFolder
from subscriber.spark.tables.table_format import DELTA
from subscriber.spark.tasks import run_tasks
from subscriber.sqlstate import OBJECT_IN_USE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FOLDER = "ranges"
LIMIT = 600.0  # seconds for which all loads may wait, or the log may not reach the position
_REPORT = 30.0  # seconds between two log lines
_POLL = 0.2  # seconds


async def large_tables(source: str, log: ChangeLog, tables: frozenset[str] | None, above: int) -> frozenset[str]:
    """Return the published tables of more than `above` bytes that can be read by ranges.

    Args:
        source: the connection string of the publisher.
        log: the change log.
        tables: the tables, as schema.table; None: all published tables.
        above: bytes, with indexes.

    Raises:
        StatementError: the log is of another publisher.
        SubscriberError: the publisher cannot be read.
    """
    publications, labels = log.identity.publications, set[str]()
    async with publisher_session(source, "snapshot") as publisher:
        await check_publisher(publisher, log)
        for schema, name in await publisher.tables(publications):
            label = f"{schema}.{name}"
            if tables is not None and label not in tables:
                continue
            table = await publisher.table(schema, name, publications)
            if table.total_bytes > above:
                try:
                    await printed_range_key(publisher, table, publications)
                except KeyRangeError as reason:
                    _report_refused(label, str(reason))
                else:
                    labels.add(label)
    return frozenset(labels)


def _report_refused(label: str, reason: str) -> None:
    telemetry.log(telemetry.LOG, f'table "{label}" is read in one snapshot', detail=f"{reason.capitalize()}.")


class RangeTables:
    """The tables of one snapshot that are read by ranges. Methods block, and must not be called in an event loop."""

    def __init__(self, spark: SparkSession | None, source: str, log: ChangeLog, directory: Location) -> None:
        """Describe the tables.

        Args:
            spark: the session. None: no tables are read by ranges, and remove() removes those of an earlier call.
            source: the connection string of the publisher, which executors reach, too.
            log: the change log, which an archiver writes.
            directory: the directory of the lake.
        """
        self._spark = spark
        self._source = source
        self._log = log
        self._directory = directory

    @cached_property
    def _lake(self) -> Lake:
        return Lake(self._directory, format=DELTA)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from writing the lake during the block. Raises StatementError if one does."""
        with ExitStack() as stack:
            try:
                stack.enter_context(self._lake.lock())
            except StatementError as error:
                if error.sqlstate == OBJECT_IN_USE:
                    error.amend("another process writes the snapshot", hint="Wait until it has ended.")
                raise
            yield

    def discard(self) -> None:
        """Remove the lake of an earlier call. Raises StatementError if that call has not ended."""
        if self._lake.begun:
            with self.lock():
                self.remove()

    def remove(self) -> None:
        """Remove the lake, if there is one."""
        self._empty()
        remove_directory(self._directory)

    def _empty(self) -> None:
        """Remove the lake, but not its lock."""
        # First: without its boundaries, a lake is never continued.
        remove_directory(self._directory / BOUNDARIES)
        if self._lake.begun:
            forget(self._log.directory, consumer_name(self._directory), missing_ok=True)
        for name in directory_names(self._directory):
            remove_directory(self._directory / name)
        for name in file_names(self._directory):
            if name != LOCK:
                (self._directory / name).unlink()

    def load(self, tables: frozenset[str]) -> None:
        """Load the tables, as schema.table.

        Raises:
            SubscriberError: the publisher or the log cannot be read, a table cannot be loaded, or Spark could not
                finish the work.
        """
        lake = self._lake
        if lake.begun and (not lake.exists or lake.wanted != tables or self._refused()):
            self._empty()
        if not lake.exists:
            anyio.run(partial(self._begin, tables))
        loads = RangeLoads(lake, self._log, self._source, LIMITS)
        assert self._spark is not None
        waits, reports = _Wait("the tables that are read by ranges"), _Reports()
        while steps := loads.step(self._spark):
            for step in steps:
                if step.error is not None:
                    self._empty()
                    raise _while_read(step.label, step.error)
            if all(step.waits_for is not None for step in steps):
                waits.check("; ".join(f"{step.label} waits for {step.waits_for}" for step in steps))
            else:
                waits.ended()
            if reports.is_due():
                telemetry.log(telemetry.LOG, "reading tables by ranges", detail=_progress(steps))

    async def _begin(self, tables: frozenset[str]) -> None:
        text, publications = set[str](), self._log.identity.publications
        async with publisher_session(self._source, "snapshot") as publisher:
            for schema, name in await publisher.tables(publications):
                if (label := f"{schema}.{name}") in tables:
                    table = await publisher.table(schema, name, publications)
                    text.update(f"{label}.{column.name}" for column in table.columns)
        await load(
            self._lake,
            self._log,
            self._source,
            as_text=frozenset(text),
            tables=tables,
            larger=0,
            on_refused=_report_refused,
        )

    def _refused(self) -> dict[str, str]:
        """Return the tables that are set aside and not being loaded, with the reasons."""
        underway = self._lake.store.loads.all()
        return {label: problem.message for label, problem in self._lake.problems().items() if label not in underway}

    def _advance(self, until: Lsn) -> None:
        """Bring the lake to a position. No table needs the changes before the first load is complete."""
        assert self._spark is not None
        lake = self._lake
        complete = min(state.loaded for state in lake.store.present().values())
        if lake.position() < complete <= until:
            lake.finish_load(complete)
        while (batch := lake.next_batch(self._log, until)) is not None:
            lake.advance(self._spark, self._log, *batch, history=False)

    # --- the files of the snapshot ------------------------------------------------------------------

    def write(self, versions: Mapping[str, TableVersion], position: Lsn, folder: Location) -> list[SnapshotFile]:
        """Write the rows of the tables as of `position`.

        Args:
            versions: the columns of each table as of `position`.
            position: the position of the snapshot.
            folder: the directory of the snapshot.

        Returns:
            The files; their rows have no numbers yet.

        Raises:
            ApplyError: a table was changed so that its rows have to be read again.
            SubscriberError: the log does not reach the position, or Spark could not finish the work.
        """
        wait = _Wait(f"the change log, which has not reached {position}")
        while self._log.end() < position:
            wait.check("Is `subscriber archive` running?")
        self._advance(position)
        for label, version in versions.items():
            if (problem := self._reason_to_load(label, version)) is not None:
                self._empty()
                raise _while_read(label, ApplyError(problem))
        tasks = []
        for number, (label, version) in enumerate(sorted(versions.items())):
            stored, names = self._lake.store.open(label), tuple(self._lake.store.states()[label].names())
            assert len(names) == len(version.columns)
            for place, file in enumerate(stored.files(None)):
                tasks.append(WriteRowsTask(label, stored.folder, file, names, folder, f"ranges-{number}-{place:06}"))
        assert self._spark is not None
        return [file for files in run_tasks(self._spark, write_rows, tasks) for file in files]

    def _reason_to_load(self, label: str, version: TableVersion) -> str | None:
        """Return why the rows of a table are not those of the snapshot. None: they are."""
        if (problem := self._lake.problems().get(label)) is not None:
            return problem.message
        state = self._lake.store.states()[label]
        if state.version is None or not is_same(state.version, version) or len(state.text) != len(version.columns):
            return "its columns changed"
        return None


def _while_read(label: str, error: SubscriberError) -> ApplyError:
    return ApplyError(
        f'table "{label}" could not be read by ranges: {error.message}',
        hint="Call write_snapshot() again, which begins again with the tables that are read by ranges.",
    )


def _progress(steps: Iterable[RangeStep]) -> str:
    return "; ".join(f"{step.label}: {step.rows:,} of about {max(step.of, step.rows):,} rows" for step in steps) + "."


class _Reports:
    """Decides when the next log line is due."""

    def __init__(self) -> None:
        self._next = 0.0

    def is_due(self) -> bool:
        """Return True if the next line is due, which the caller writes."""
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + _REPORT
        return True


class _Wait:
    """A wait with a limit and log lines."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._began: float | None = None
        self._reports = _Reports()

    def ended(self) -> None:
        """Record that there is nothing to wait for any more."""
        self._began = None

    def check(self, detail: str) -> None:
        """Wait a moment. Raises SubscriberError after LIMIT seconds."""
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        if now - self._began > LIMIT:
            raise SubscriberError(
                f"write_snapshot() has waited for {in_seconds(LIMIT)} for {self._what}",
                detail=detail,
                hint="Call write_snapshot() again: it continues.",
            )
        if self._reports.is_due():
            telemetry.log(telemetry.LOG, f"waiting for {self._what}", detail=detail)
        time.sleep(_POLL)


# --- on executors -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WriteRowsTask:
    """Writes the rows of a file of the lake to files of the snapshot, whose names begin with `name`."""

    label: str
    stored: DataFolder
    file: DataFile
    columns: tuple[str, ...]
    folder: Location
    name: str

    def write(self) -> list[SnapshotFile]:
        """Write the files."""
        files, waiting = list[SnapshotFile](), list[bytes]()
        for batch in self.stored.rows([self.file]):
            waiting.append(copy_lines([batch[name] for name in self.columns]))
            if sum(map(len, waiting)) >= FILE_BYTES:
                files.append(self._store(waiting, len(files)))
                waiting = []
        return [*files, self._store(waiting, len(files))] if waiting else files

    def _store(self, lines: list[bytes], number: int) -> SnapshotFile:
        data, name = b"".join(lines), f"{self.name}-{number:04}.copy"
        write_file(self.folder / name, data)
        return SnapshotFile(name, self.label, 0, data.count(b"\n"), len(data), zlib.crc32(data))


def write_rows(task: WriteRowsTask) -> list[SnapshotFile]:
    """Run a task on an executor."""
    return task.write()


def copy_lines(columns: list[pa.Array]) -> bytes:
    """Return rows in COPY's text format. `columns` are texts, at least one column."""
    escaped = [_escaped(column.cast(pa.large_binary())) for column in columns]
    rows = pc.binary_join_element_wise(*escaped, pa.scalar(b"\t", pa.large_binary()))
    lines = pc.binary_join_element_wise(rows, pa.scalar(b"", pa.large_binary()), pa.scalar(b"\n", pa.large_binary()))
    _, offsets, text = lines.buffers()
    if not len(lines) or offsets is None or text is None:
        return b""
    return bytes(text.slice(0, memoryview(offsets).cast("q")[len(lines)]))


def _escaped(column: pa.Array) -> pa.Array:
    text = column.buffers()[2]
    content = text.to_pybytes() if text is not None else b""
    for special in ESCAPED:
        if special in content:
            column = pc.replace_substring(column, special, escape(special))
    return pc.fill_null(column, NULL_FIELD)
