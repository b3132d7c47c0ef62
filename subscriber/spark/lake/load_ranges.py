"""The load of large tables by ranges of their keys, while the lake advances the other tables.

Each range is read in a snapshot of its own, by an executor that also writes its rows to the lake's table. So no
snapshot is older than a range takes, and a kill loses a few ranges. When all ranges are read, the changes since the
load began are taken from the change log and merged as those of a batch. The table is set aside until then.

    begin    the columns, the key, and a position of the log
    step     some ranges, one for each executor
    …
    cluster  the files are written again in the order of the table's cluster columns, if it has some
    finish   the changes of the log up to a position behind all snapshots, and the table's first version

**Invariants.**

- The change log has all changes that a range may lack. A transaction that committed before `RangeLoad.start`, and
  that a snapshot does not see, holds its lock of the table until snapshots see it. So no range is read before the
  transactions that held such a lock at the start have ended. The log keeps the changes after `start`.
- The state is stored before the rows of its ranges are committed. The commit has a random number, so that a process
  which continues knows the ranges whose rows the table has. The state of another process has other numbers.
- All changes after `start` are applied, whether or not a range has them (changes/loaded_rows.py).
- The publisher compares the keys, of any type and collation. Here they are texts.
- The publisher's WAL is flushed up to a snapshot before its rows count. A crash of the publisher undoes no such row.
- All ranges have the same columns and files. A range locks the table, and compares them with those of the load.

**Failure cases.**

- Killed between two steps, or in the middle of one: the load continues after the last range that was committed. Files
  that no commit has are removed with the others that are not used (retention.py).
- Killed while its files are put in order: the table has them all or none of them, and the step is repeated.
- Killed while it finishes: the table is set aside, so no reader has seen it. The finish is repeated up to a later
  position. After its commit, the table has a later position than the load. If the lake has not passed that position,
  only the state is stored. Otherwise the changes from there on are applied first, which the batches left out.
- Killed when the state was stored, and not yet removed from the loads: it is removed.
- Two processes that both believe to have the lease of an object store: the state that is stored last has numbers that
  the table does not have, so the load begins again.
- Columns changed before the load has ended; TRUNCATE, or a partition detached or dropped between two ranges; another
  server promoted: the load begins again. It ends before changed columns only if the lake has not reached their
  position.
- Partition created or attached between two ranges: no range has its rows. The log has those that it gets later.
- Row whose key changed while a large value stayed: it is read once more, and the finish is repeated.
- Publisher not reachable, table locked: the load waits for the next step, which repeats it. The other loads continue.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import anyio
import anyio.to_thread

from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.schema_history import SchemaHistory, is_same
from subscriber.changelog.storage import remove_directory
from subscriber.errors import ApplyError, LoadNeeded, SubscriberError
from subscriber.lsn import Lsn
from subscriber.protocol.copy_text import split_values
from subscriber.protocol.encodings import ERRORS
from subscriber.publisher import ranges as queries
from subscriber.publisher.connection import Publisher
from subscriber.publisher.table_versions import read_snapshot_version
from subscriber.publisher.tables import PublishedTable, copy_statement
from subscriber.quoting import literals
from subscriber.ranges.keys import KeyRangeError, RangeKey
from subscriber.spark.changes.net_effect import Net
from subscriber.spark.changes.net_job import NetTable, NetTables, RowKeys, net_changes
from subscriber.spark.changes.raw_rows import Key
from subscriber.spark.lake.batch import BatchTables, versions_until
from subscriber.spark.lake.lake import STAGED, Lake
from subscriber.spark.lake.lake_merge import LakeMerge
from subscriber.spark.lake.lake_table import (
    LOADING,
    LakeTable,
    chosen_layout,
    lake_schema,
    stored_layout,
    text_columns,
)
from subscriber.spark.lake.range_load import RangeLoad, ReadKey, ReadRange, Texts
from subscriber.spark.lake.read_range import (
    RangeRows,
    ReadRangeTask,
    check_timeline,
    range_session,
    read_range,
    wait_for_flush,
)
from subscriber.spark.publisher_snapshot import check_publisher, publisher_session
from subscriber.spark.tables.layout import NO_LAYOUT, Layout
from subscriber.spark.tables.recluster import recluster
from subscriber.spark.tables.stage import Staged, ToArrow
from subscriber.spark.tables.table_format import CommitConflict, StoredTable
from subscriber.spark.tasks import parallelism, run_tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LARGE = 1024**3  # bytes of a table on the publisher, from which on it is loaded by ranges
_ROWS_QUERY = "SELECT greatest(reltuples, 0)::pg_catalog.int8 FROM pg_catalog.pg_class WHERE oid = {relid}"
_KEYS = 1_000  # that are read in one snapshot
_NUMBERS = 2**31  # of commits


class RangeLimits(NamedTuple):
    """The sizes by which tables are divided into ranges."""

    rows: int = 50_000  # of the first ranges
    most: int = 5_000_000  # of one
    seconds: float = 5.0  # that a range is to take; the rows of the next ones follow from the time of the last
    sessions: int = 4  # that read at the same time


LIMITS = RangeLimits()


class RangeStep(NamedTuple):
    """The result of step() for one table."""

    label: str
    rows: int  # that are read, of about `of`
    of: int
    position: Lsn | None = None  # the load is finished, and this is the table's position
    waits_for: str | None = None  # what the load waits for
    error: SubscriberError | None = None  # the load has ended with this error


async def begin_range_loads(
    lake: Lake,
    log: ChangeLog,
    source: str,
    tables: Iterable[str] | None,
    *,
    larger: int = LARGE,
    as_text: frozenset[str] = frozenset(),
    layout: Layout = NO_LAYOUT,
    on_refused: Callable[[str, str], None] = lambda *_: None,
) -> frozenset[str]:
    """Begin to load tables by ranges. They are set aside until RangeLoads has finished.

    Args:
        lake: the lake, which this process has locked.
        log: the change log.
        source: the connection string of the publisher.
        tables: the tables, as schema.table; None: all that are published.
        larger: tables of more bytes than this are loaded by ranges.
        as_text: the columns to keep as text, as schema.table.column.
        layout: the layout of tables, by schema.table.column (layout_options.py).
        on_refused: called with a larger table that cannot be loaded by ranges, and the reason.

    Returns:
        The tables.

    Raises:
        StatementError: the log is of another publisher, or begins after the load.
        SubscriberError: the publisher cannot be read.
    """
    begun = set()
    publications = log.identity.publications
    async with publisher_session(source, "lake") as publisher:
        system = await check_publisher(publisher, log)
        for schema, name in await publisher.tables(publications):
            label = f"{schema}.{name}"
            if tables is not None and label not in tables:
                continue
            table = await publisher.table(schema, name, publications)
            if table.total_bytes <= larger:
                continue
            try:
                key = await queries.printed_range_key(publisher, table, publications)
                load = await _first_state(publisher, table, key, tuple(publications), system.timeline, as_text)
            except KeyRangeError as reason:
                on_refused(label, str(reason))
                continue
            log.check(load.start)
            await anyio.to_thread.run_sync(_begin, lake, load, layout)
            begun.add(label)
    return frozenset(begun)


async def _first_state(
    publisher: Publisher,
    table: PublishedTable,
    key: RangeKey,
    publications: Texts,
    timeline: int,
    as_text: frozenset[str],
) -> RangeLoad:
    """Return the state of a load before its first range. Raises KeyRangeError if the changes have another key."""
    snapshot = await queries.begin(publisher, table)
    table = await publisher.table(table.schema, table.name, publications)  # as it is while it is locked
    version = await read_snapshot_version(publisher, table, publications, snapshot.lsn)
    ((estimate,),) = await publisher.session.rows(_ROWS_QUERY.format(relid=table.relid))
    writers, files = await queries.writers(publisher, table), await queries.files(publisher, table)
    await publisher.commit()
    of_changes = version.key_names() or tuple(column.name for column in version.columns if column.is_key)
    if set(of_changes) != {column.name for column in key.columns}:
        raise KeyRangeError("its primary key is deferrable, or has just changed")
    return RangeLoad(
        version=version,
        publications=publications,
        start=snapshot.lsn,
        timeline=timeline,
        columns=tuple((column.name, column.compared_as or "") for column in key.columns),
        files=tuple(files),
        as_text=frozenset(column for column in as_text if column.startswith(f"{version.label}.")),
        estimate=int(estimate or 0),
        writers=frozenset(writers),
    )


def _writing(transactions: Iterable[str]) -> str:
    """Return what a load waits for, with the query for the processes of these virtual transactions."""
    query = f"SELECT DISTINCT pid FROM pg_locks WHERE virtualtransaction IN ({literals(sorted(transactions))})"
    return f"transactions that write to it. Their processes on the publisher: {query}"


def _begin(lake: Lake, load: RangeLoad, layout: Layout) -> None:
    state = lake.store.states().get(load.label, LakeTable(load.label))
    state = replace(state, layout=chosen_layout(state, load.version, load.as_text, layout))
    lake.store.save(state.set_aside(LOADING, max(lake.boundaries(), default=Lsn(0))))
    lake.store.loads.save(load)


class RangeLoads:
    """The loads by ranges of a lake that are not finished. Methods block."""

    def __init__(self, lake: Lake, log: ChangeLog, source: str, limits: RangeLimits = LIMITS) -> None:
        """Describe the loads.

        Args:
            lake: the lake, which this process has locked.
            log: the change log.
            source: the connection string of the publisher, which executors reach, too.
            limits: how tables are divided.
        """
        self._lake = lake
        self._log = log
        self._source = source
        self._limits = limits
        self._rows: dict[str, int] = {}  # of the next ranges, by table

    def step(self, spark: SparkSession) -> list[RangeStep]:
        """Load some ranges of each table, and finish the loads whose ranges are all read.

        Args:
            spark: the session.

        Returns:
            What was done. Empty if there are no loads. A load waits if the publisher or the log cannot be read, or if
            Spark could not finish the work.

        Raises:
            OSError: the storage cannot be read or written.
        """
        return [self._step(spark, load) for _, load in sorted(self._lake.store.loads.all().items())]

    def _step(self, spark: SparkSession, load: RangeLoad) -> RangeStep:
        done = RangeStep(load.label, load.rows, load.estimate)
        state = self._lake.store.states().get(load.label)
        if state is not None and state.is_current:
            self._lake.store.loads.end(load.label)
            return done._replace(position=state.loaded)
        try:
            with self._lake.store.storing():
                stored, load = self._opened(load)
                if stored.position > load.start and stored.position >= self._reached():
                    return self._complete(load, stored.version, stored.position, done)
                if load.is_read and not load.is_clustered and stored.folder.cluster:
                    recluster(spark, stored, self._lake.store.limits, check=self._lake.store.check_lock)
                    self._lake.store.loads.save(replace(load, is_clustered=True))
                    return done
                if load.is_read:
                    return self._finish(spark, load, stored, done)
                load, waiting = anyio.run(self._without_writers, load)
                if waiting:
                    return done._replace(waits_for=_writing(waiting))
                load = self._read(spark, load, stored)
                return done._replace(rows=load.rows)
        except CommitConflict:  # the next step finds that the table lacks the ranges, and reads them again
            return done._replace(waits_for="another program that changes its stored table")
        except ApplyError as error:
            self._lake.fail_load(load.label, error, self._log, load.as_text)
            return done._replace(error=error)
        except SubscriberError as error:  # the loads of other tables continue
            return done._replace(waits_for=f"another attempt: {error.message}")

    def _opened(self, load: RangeLoad) -> tuple[StoredTable, RangeLoad]:
        """Open the stored table, which is created first. Returns the ranges whose rows it has.

        Raises:
            LoadNeeded: the rows of the table are not those of the load.
        """
        store = self._lake.store
        if not load.is_created:
            schema = lake_schema(load.version, load.as_text)
            store.check_lock()
            layout = stored_layout(load.version, store.states()[load.label].layout)
            store.format.create(load.label, store.path(load.label), schema, load.start, (), layout)
            stored = store.open(load.label)
            stored.commit([], [], load.start, 0)
            load = replace(load, is_created=True, ranges=())
            store.loads.save(load)
        stored = store.open(load.label)
        if stored.position > load.start and load.is_read:
            return stored, load
        committed = load.committed(stored.number)
        if stored.position != load.start or committed is None:
            raise LoadNeeded("its rows are not those of its load")
        return stored, committed

    async def _without_writers(self, load: RangeLoad) -> tuple[RangeLoad, frozenset[str]]:
        """Return the load, and the transactions that it waits for."""
        if not load.writers:
            return load, load.writers
        async with publisher_session(self._source, "lake") as publisher:
            version = load.version
            table = await publisher.table(version.schema, version.name, load.publications)
            left = load.writers & await queries.writers(publisher, table)
        load = replace(load, writers=left)
        self._lake.store.loads.save(load)
        return load, left

    # --- reading --------------------------------------------------------------------------------

    def _read(self, spark: SparkSession, load: RangeLoad, stored: StoredTable) -> RangeLoad:
        """Read the next ranges, and commit their rows."""
        number = max(1, min(self._limits.sessions, parallelism(spark)))
        size = self._rows.get(load.label, self._limits.rows)
        limits = anyio.run(self._boundaries, load, number, size)
        source, folder, bare = self._source, stored.folder, replace(load, ranges=(), keys=())
        commit = secrets.randbelow(_NUMBERS) + 1
        tasks = [ReadRangeTask(source, bare, low, high, folder) for low, high in limits]
        answers = run_tasks(spark, read_range, tasks)
        ranges, files = [], []
        for task, answer in zip(tasks, answers, strict=True):
            if isinstance(answer, SubscriberError):
                raise answer
            rows = sum(file.rows for file in answer.files)
            ranges.append(ReadRange(task.low, task.high, answer.lsn, rows, commit))
            files += answer.files
        self._rows[load.label] = self._next_size(size, answers)
        load = replace(load, ranges=(*load.ranges, *ranges))
        self._lake.store.check_lock()
        self._lake.store.loads.save(load)
        stored.commit([], files, load.start, commit)
        return load

    def _next_size(self, size: int, found: Iterable[RangeRows | SubscriberError]) -> int:
        """Return the number of rows of the next ranges."""
        seconds = max(
            (answer.seconds for answer in found if isinstance(answer, RangeRows)), default=self._limits.seconds
        )
        factor = self._limits.seconds / max(seconds, 0.001)
        return int(min(max(size * min(max(factor, 0.5), 2.0), min(1_000, self._limits.rows)), self._limits.most))

    async def _boundaries(self, load: RangeLoad, number: int, size: int) -> list[tuple[Texts | None, Texts | None]]:
        """Return the limits of the next ranges."""
        key, bounds = load.key, list[tuple[Texts | None, Texts | None]]()
        low = load.ranges[-1].high if load.ranges else None
        async with range_session(self._source, load) as (publisher, table, _):
            while len(bounds) < number:
                high = await queries.boundary(publisher, table, key, load.condition(low, None), size)
                bounds.append((low, high))
                if high is None:
                    break
                low = high
        return bounds

    # --- finishing ------------------------------------------------------------------------------

    def _reached(self) -> Lsn:
        """Return the newest position of the lake; 0 during its first load."""
        return max(self._lake.boundaries(), default=Lsn(0))

    def _finish(self, spark: SparkSession, load: RangeLoad, stored: StoredTable, done: RangeStep) -> RangeStep:
        """Apply the changes that the ranges lack, if the log has them.

        If a process was killed after the commit, and the lake has passed its position, the later changes are applied.
        """
        lake, log = self._lake, self._log
        end = log.end()
        if end < load.reached:
            return done._replace(waits_for=f"the change log, which has not reached {load.reached}")
        # After the log has reached the snapshots: a promotion from now on loses none of their transactions.
        anyio.run(self._check_publisher, load)
        history = log.schema()
        end = _end(load, history, end)
        if end < self._reached():  # the next batch would not have the changes in between
            raise LoadNeeded("the table was changed while it was loaded by ranges")
        after = self._loaded(load, end)
        start, stage = stored.position, ToArrow(staged := lake.directory / STAGED, after.as_text())
        lacks = start == load.start
        batch = BatchTables(lake.store, log, start, end)
        remove_directory(staged)
        tables = NetTables(
            frozenset({load.label}),
            described={load.label: batch.description(after, history)},
            loaded={load.label: load.loaded_rows()} if lacks else {},
        )
        netted = net_changes(
            spark,
            log,
            start,
            end,
            RowKeys({load.label: load.key_names}),
            tables,
            LoadedToArrow(stage) if lacks else stage,
        )
        for error in netted.errors.values():
            raise error
        unknown = [key for _, part in netted.parts if isinstance(part, UnknownRows) for key in part.keys]
        if unknown:
            lake.store.loads.save(anyio.run(self._read_keys, load, [load.key_texts(key) for key in unknown]))
            return done._replace(waits_for=f"the changes of {len(unknown)} rows that are read once more")
        parts = [part for _, part in netted.parts if isinstance(part, Staged)]
        if not parts:
            lake.store.check_lock()
            return self._complete(load, stored.commit([], [], end), end, done)
        LakeMerge(spark, lake.store, batch, staged).apply({load.label: after}, {load.label: parts})
        remove_directory(staged)
        lake.store.loads.end(load.label)
        if load.label in batch.problems:
            return done._replace(error=ApplyError(batch.problems[load.label].message))
        return done._replace(position=end)

    def _complete(self, load: RangeLoad, version: int, position: Lsn, done: RangeStep) -> RangeStep:
        """Store that the table has all rows as of `position`, in a version of its format."""
        store = self._lake.store
        store.add_version(load.label, position, version)
        store.save(self._loaded(load, position))
        store.loads.end(load.label)
        return done._replace(position=position)

    def _loaded(self, load: RangeLoad, position: Lsn) -> LakeTable:
        """Return the state of the table after the load."""
        state = self._lake.store.states().get(load.label, LakeTable(load.label))
        return state.reloaded(load.version, text_columns(load.version, load.as_text), position)

    async def _check_publisher(self, load: RangeLoad) -> None:
        """Raise LoadNeeded if another server has become the publisher, or another table has the name."""
        async with publisher_session(self._source, "lake") as publisher:
            await check_timeline(publisher, load)
            table = await publisher.table(load.version.schema, load.version.name, load.publications)
            if table.relid != load.version.relid:
                raise LoadNeeded("the table was dropped and created again")

    async def _read_keys(self, load: RangeLoad, keys: list[Texts]) -> RangeLoad:
        """Read single rows in later snapshots."""
        key, read_keys = load.key, {read_key.key: read_key for read_key in load.keys}
        names = [column.name for column in load.version.columns]
        places = [names.index(column.name) for column in key.columns]
        for first in range(0, len(keys), _KEYS):
            wanted = keys[first : first + _KEYS]
            conditions = [key.comparison("=", wanted_key) for wanted_key in wanted]
            async with range_session(self._source, load) as (publisher, table, snapshot):
                statement = copy_statement(table, binary=False, condition=f"({' OR '.join(conditions)})")
                # The publisher may find a row whose key is equal to the wanted one, and printed otherwise.
                rows = {
                    tuple(row[place] for place in places): row
                    async for row in _texts(publisher.session.copy_out(statement))
                }
                await publisher.commit()
                await wait_for_flush(publisher, snapshot.lsn)
            read_in = str(snapshot.snapshot), snapshot.lsn
            read_keys.update({wanted_key: ReadKey(wanted_key, rows.get(wanted_key), *read_in) for wanted_key in wanted})
        return replace(load, keys=tuple(read_keys.values()))


async def _texts(payloads: AsyncGenerator[list[bytes]]) -> AsyncIterator[tuple[str | None, ...]]:
    """Yield the rows of a COPY in text format."""
    async with aclosing(payloads):
        async for lines in payloads:
            for line in lines:
                yield tuple(None if value is None else value.decode(errors=ERRORS) for value in split_values(line))


def _end(load: RangeLoad, history: SchemaHistory, end: Lsn) -> Lsn:
    """Return the end of the changes to apply: before other columns of the table.

    Raises:
        LoadNeeded: the columns have changed while the ranges were read.
    """
    for version in versions_until(history, LakeTable(load.label, load.version), end):
        if is_same(load.version, version) and version.published == load.version.published:
            continue
        if version.position <= load.reached:
            raise LoadNeeded("the table was changed while it was loaded by ranges")
        return version.position
    return end


@dataclass(frozen=True, slots=True)
class UnknownRows:
    """Rows with values that are neither in the log nor in the ranges: their keys, as the log has them."""

    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class LoadedToArrow:
    """The sink: stages a net unless it has rows with unknown values."""

    stage: ToArrow

    def __call__(self, table: NetTable, net: Net, part: int) -> Staged | UnknownRows:
        unknown = tuple(key for key in net.lacking if net.origins.get(key, key) is None)
        return UnknownRows(unknown) if unknown else self.stage(table, net, part)
