"""The work of `subscriber lake …`: bring a lake to the end of a change log, or keep it there."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import anyio

from subscriber.changelog.directory_use import DirectoryUse, check_use
from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.storage import Location
from subscriber.cli.commands.lake.comparison import compare_lake
from subscriber.cli.commands.lake.lines import CHECK, IDLE, LakeProgressLines, ReportedWait
from subscriber.display import json_text, printable, printable_lines, shell_word
from subscriber.errors import StatementError, SubscriberError
from subscriber.formatting import count
from subscriber.lsn import Lsn
from subscriber.remedy import Remedy
from subscriber.settings import DEFAULTS, Settings
from subscriber.spark.changes.net_job import JAVA_OPTIONS
from subscriber.spark.lake.lake import BATCH, Lake, LakeBatch
from subscriber.spark.lake.lake_table import AHEAD, LakeTable, TableProblem
from subscriber.spark.lake.layout_options import options_of_table, parse_cluster, parse_partition
from subscriber.spark.lake.load import load, tables_to_load
from subscriber.spark.lake.load_ranges import LARGE, RangeLoads, RangeStep
from subscriber.spark.lake.option_names import OptionNames, check_names
from subscriber.spark.lake.recluster import check_recluster, recluster_table
from subscriber.spark.lake.registration import check_log, register_lake
from subscriber.spark.lake.retention import forget_older
from subscriber.spark.lake.table_store import reload_command
from subscriber.spark.session import check_master, spark_session
from subscriber.spark.tables.layout import NO_LAYOUT, Layout
from subscriber.spark.tables.partitions import TIMES
from subscriber.spark.tables.table_format import DELTA
from subscriber.sqlstate import IO_ERROR, OBJECT_NOT_IN_PREREQUISITE_STATE, UNDEFINED_FILE

HEARTBEAT = 60.0  # seconds after which a position without changes is a batch, so that the log need not be kept
CLEAN_UP = 3600.0  # seconds between two removals of old positions


def run_lake(
    directory: str,
    log: str,
    source: str | None,
    *,
    is_new: bool = False,
    follow: bool = False,
    verify: bool = False,
    until: Lsn | None = None,
    tables: Sequence[str] | None = None,
    reload: Sequence[str] = (),
    text: Sequence[str] | None = None,
    partition: Sequence[str] | None = None,
    cluster: Sequence[str] | None = None,
    larger: int,
    batch: int | None,
    history: bool,
    keep_age: float | None = None,
    format: str | None = None,
    catalog: str | None = None,
    master: str,
    json: bool,
    settings: Settings = DEFAULTS,
) -> int:
    """Bring the lake to `until` (None: the end of the log), or follow the log. If it `is_new`, load it first.

    Positions older than `keep_age` seconds are forgotten; None: none. With a `source`, tables that are new, or whose
    changes do not tell their rows, are loaded in between. With `verify`, the tables are compared at the end.

    Returns 1 if a table is set aside, differs, or is ahead of the lake at the end, or if the publisher cannot be read.
    """
    check_master(master)
    changes, lines = ChangeLog(log), LakeProgressLines(json, loads=source is not None, follow=follow)
    lake = Lake(directory, format=format, catalog=catalog, settings=settings)
    as_text = frozenset(text or ())
    layout = Layout(tuple(map(parse_partition, partition or ())), tuple(map(parse_cluster, cluster or ())))
    names = OptionNames(frozenset(tables or ()) or None, frozenset(reload), as_text, layout)
    loads = TableLoads(lake, changes, source, as_text, lines, larger, layout)
    retention = LakeRetention(lake, keep_age, lines)
    next_empty = 0.0
    with _storage_errors(directory), ExitStack() as block:
        unused = _check(lake, changes, source, names, is_new=is_new)
        block.enter_context(lake.lock())
        block.enter_context(lines.line)
        loads.begin(names)
        for option, column in unused:
            lines.unused(option, column)
        if not register_lake(lake.directory, changes, lake.store.loads.needed(lake.position())):
            lines.not_registered(log)
        lines.problems(loads.problems())
        with spark_session(master=master, java_options=JAVA_OPTIONS) as spark:
            advance = partial(_advance, lake, changes, spark, lines, batch or BATCH, as_text=as_text, history=history)
            while True:
                end = changes.end() if until is None else until
                is_due = not follow or time.monotonic() >= next_empty
                for done in advance(end, even_empty=is_due):
                    next_empty = time.monotonic() + HEARTBEAT
                    if done.problems:
                        loads.needed()
                retention.check()
                limit = math.inf if follow else settings.lake_wait_limit
                if loads.check() or loads.step(spark, limit=limit):
                    continue
                if not follow and (until is None or lake.position() >= until):
                    if until is None and loads.wait_for_log(limit=limit):
                        continue
                    is_same = True
                    if verify and source is not None:
                        is_same = compare_lake(lake, changes, source, advance, lines, limit=limit, json=json)
                    return 1 if loads.report_ahead() or loads.failed or lake.problems() or not is_same else 0
                lines.line.show("waiting for changes")
                time.sleep(IDLE)


def _advance(
    lake: Lake,
    log: ChangeLog,
    spark: Any,
    lines: LakeProgressLines,
    changes: int,
    end: Lsn,
    *,
    as_text: frozenset[str],
    history: bool,
    even_empty: bool = True,
) -> Iterator[LakeBatch]:
    """Bring the lake to a position, and yield each batch of about `changes` changes."""
    first = lake.position()
    lines.advancing(first, first, end)
    while (batch := lake.next_batch(log, end, changes, even_empty=even_empty)) is not None:
        began = time.monotonic()
        done = lake.advance(spark, log, *batch, as_text=as_text, history=history)
        lines.batch(done, time.monotonic() - began)
        lines.advancing(first, done.end, end)
        yield done


def recluster_tables(directory: str, tables: Sequence[str], *, master: str, json: bool, settings: Settings) -> int:
    """Write the files of tables again, in the order of their cluster columns. Returns the exit status."""
    check_master(master)
    lake, lines = Lake(directory, settings=settings), LakeProgressLines(json)
    with _storage_errors(directory), _locked(lake), lines.line:
        for table in tables:
            check_recluster(lake, table)
        with spark_session(master=master, java_options=JAVA_OPTIONS) as spark:
            for table in tables:
                lines.clustered(table, recluster_table(spark, lake, table, partial(lines.clustering, table)))
    return 0


def forget_positions(directory: str, age: float, *, json: bool) -> int:
    """Remove positions older than `age` seconds, and what only they need. Returns the exit status: 1 after an error."""
    lake, lines = Lake(directory), LakeProgressLines(json)
    with _storage_errors(directory), _locked(lake), lines.line:
        done = forget_older(lake, age)
    lines.forgotten(done)
    return 1 if done.errors else 0


@contextmanager
def _locked(lake: Lake) -> Iterator[None]:
    """Lock a lake, which must exist."""
    lake.position()
    with lake.lock():
        yield


def _check(
    lake: Lake, log: ChangeLog, source: str | None, names: OptionNames, *, is_new: bool
) -> list[tuple[str, str]]:
    """Check the options, before anything is written. Returns those for tables that may be published later.

    Raises:
        StatementError: an option does not fit the lake, the log, or the publisher.
        SubscriberError: the publisher has to be read, and cannot be.
    """
    check_use(lake.directory, DirectoryUse.LAKE)
    check_log(lake.directory, log)
    if not is_new and not lake.exists:
        where = f"--log {shell_word(str(log.directory))} --source DSN {shell_word(str(lake.directory))}"
        raise StatementError(
            f'there is no lake in "{lake.directory}"',
            hint=Remedy(
                "correct its directory.", alternative=Remedy("load a new lake there", f"subscriber lake load {where}")
            ),
            sqlstate=UNDEFINED_FILE,
        )
    later = check_names(lake, log, source, names)
    if names.layout != NO_LAYOUT:
        _check_layout(lake, log, names, loads=source is not None)
    return later


def _check_layout(lake: Lake, log: ChangeLog, names: OptionNames, *, loads: bool) -> None:
    """Raise StatementError if tables of the lake have another layout than the given one.

    `loads`: the run loads tables that only need a load.
    """
    given = names.layout
    for partition in given.partitions:
        if lake.format.name == DELTA and partition.transform in TIMES:
            raise StatementError(
                f"a Delta table cannot have partitions by {partition}",
                detail="It has partitions by whole values only.",
                hint="Name a column of type date, or load a lake of Iceberg tables.",
            )
    for label, state in lake.store.present().items() if lake.exists else ():
        if label in names.reload or (loads and state.needs_load):
            continue
        has, options = state.layout, options_of_table(label, given)
        for option, what, wanted, present in (
            ("partition", "partitions", options.partitions, has.partitions),
            ("cluster", "cluster columns", options.cluster, has.cluster),
        ):
            if wanted not in (None, present):
                raise StatementError(
                    f"table {label} has other {what} than the given ones",
                    detail=f"Its {what}: {', '.join(map(str, present)) or 'none'}.",
                    hint=f"Leave out --{option} for it, or load it again with the option:"
                    f" {reload_command(lake.directory, log, label)}",
                    sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
                )


@contextmanager
def _storage_errors(directory: str) -> Iterator[None]:
    """Convert the errors of the storage in the block."""
    try:
        yield
    except OSError as error:
        raise StatementError(
            f'the lake in "{directory}" cannot be read or written: {error.strerror or error}',
            hint="Correct what the storage refuses, and run the command again, which continues.",
            sqlstate=IO_ERROR,
        ) from error


class LakeRetention:
    """Forgets old positions, now and every CLEAN_UP seconds. Without an `age` it does nothing."""

    def __init__(self, lake: Lake, age: float | None, lines: LakeProgressLines) -> None:
        self._lake = lake
        self._age = age
        self._lines = lines
        self._next = 0.0

    def check(self) -> None:
        if self._age is None or time.monotonic() < self._next:
            return
        self._lines.line.show("removing old rows")
        self._lines.forgotten(forget_older(self._lake, self._age))
        self._next = time.monotonic() + CLEAN_UP


class TableLoads:
    """Loads of tables during a run. Without a `source` there are none, and tables stay set aside.

    Attributes:
        failed: the last attempt to read the publisher, for tables that need a load, has failed.
    """

    def __init__(
        self,
        lake: Lake,
        log: ChangeLog,
        source: str | None,
        as_text: frozenset[str],
        lines: LakeProgressLines,
        larger: int = LARGE,
        layout: Layout = NO_LAYOUT,
    ) -> None:
        self._lake = lake
        self._layout = layout
        self._larger = larger
        self._ranges = RangeLoads(lake, log, source) if source is not None else None
        self._log = log
        self._source = source
        self._as_text = as_text
        self._lines = lines
        self._next_check = 0.0
        self.failed = False
        self._range_wait, self._log_wait = ReportedWait(), ReportedWait()

    def begin(self, names: OptionNames) -> None:
        """Load a lake that does not exist, or the tables to be loaded again. Errors are those of load()."""
        existed = self._lake.exists
        tables = names.reload if existed else names.tables
        if self._source is None or (existed and not tables):
            return
        given = self._as_text, self._layout, tables
        position = anyio.run(_load, self._lake, self._log, self._source, *given, self._lines, self._larger)
        self._report(position, tables if existed and tables else self._lake.tables())

    def needed(self) -> bool:
        """Load the tables that are set aside and that only a load makes right. Returns True if there were any."""
        return self._load(self._set_aside())

    def underway(self) -> frozenset[str]:
        """Return the tables that are being loaded by ranges."""
        return frozenset(self._lake.store.loads.all())

    def problems(self) -> dict[str, TableProblem]:
        """Return the tables that are set aside, but not those that are being loaded."""
        underway = self.underway() if self._source is not None else frozenset()
        return {label: problem for label, problem in self._lake.problems().items() if label not in underway}

    def step(self, spark: Any, *, limit: float = math.inf) -> bool:
        """Load some ranges.

        Args:
            spark: the session of Spark.
            limit: seconds for which all loads may wait for something else.

        Returns:
            True if a load continues, or has ended. False at the limit, too.
        """
        if self._ranges is None:
            return False
        steps = self._ranges.step(spark)
        for step in steps:
            self._lines.ranges(step)
        if not steps or any(step.waits_for is None for step in steps):
            self._range_wait.end()
            return bool(steps)
        return self._range_wait.moment(limit, partial(self._lines.waiting, steps))

    def wait_for_log(self, *, limit: float) -> bool:
        """Wait a moment for the log if tables are ahead of the lake, which cannot be read until it has their positions.

        Returns:
            True if the lake can advance further now, perhaps. False if no table is ahead, or after `limit` seconds.
        """
        waits = "the change log, which has not reached"
        steps = [RangeStep(label, 0, 0, waits_for=f"{waits} {lsn}") for label, lsn in self._ahead().items()]
        return bool(steps) and self._log_wait.moment(limit, partial(self._lines.waiting, steps))

    def report_ahead(self) -> bool:
        """Report the tables that are ahead of the lake. Returns True if there are any."""
        if ahead := self._ahead():
            self._lines.ahead(ahead)
        return bool(ahead)

    def _ahead(self) -> dict[str, Lsn]:
        """Return the positions of the tables that are ahead of the lake."""
        reached, states = self._lake.position(), self._lake.store.present()
        return {label: state.loaded for label, state in states.items() if state.condition(reached) == AHEAD}

    def _set_aside(self) -> set[str]:
        """Return the tables that only a load makes right, and that are not being loaded."""
        unloaded = {label for label, state in self._lake.store.present().items() if state.needs_load}
        return unloaded - self.underway()

    def check(self) -> bool:
        """Load tables that were published since the last check, CHECK seconds ago, or that could not be loaded then.

        Returns True if there were any.
        """
        if self._source is None or time.monotonic() < self._next_check:
            return False
        self._next_check = time.monotonic() + CHECK
        try:
            changed = anyio.run(tables_to_load, self._lake, self._log, self._source)
        except SubscriberError as error:
            self._not_loaded([], error)
            return False
        self.failed = False
        return self._load({*changed, *self._set_aside()})

    def _report(self, position: Lsn, tables: Iterable[str]) -> None:
        """Report the tables of a load that are loaded as of `position`, and those that are no longer published."""
        states, labels = self._lake.store.present(), sorted(tables)
        if loaded := [label for label in labels if label in states and states[label].is_current]:
            self._lines.loaded(position, loaded)
        self._lines.unpublished([label for label in labels if label not in states])

    def _load(self, tables: AbstractSet[str]) -> bool:
        if self._source is None or not tables:
            return False
        states, names = self._lake.store.present(), sorted(tables)
        as_text = self._as_text.union(*(states[label].as_text() for label in names if label in states))
        try:
            given = as_text, self._layout, frozenset(names)
            position = anyio.run(_load, self._lake, self._log, self._source, *given, self._lines, self._larger)
        except SubscriberError as error:
            self._not_loaded(names, error)
            return False
        self.failed = False
        self._report(position, names)
        self._lines.problems({label: problem for label, problem in self.problems().items() if label in tables})
        return True

    def _not_loaded(self, tables: Sequence[str], error: SubscriberError) -> None:
        self.failed = True
        self._lines.not_loaded(tables, error)


async def _load(
    lake: Lake,
    log: ChangeLog,
    source: str,
    as_text: frozenset[str],
    layout: Layout,
    tables: frozenset[str] | None,
    lines: LakeProgressLines,
    larger: int,
) -> Lsn:
    return await load(
        lake,
        log,
        source,
        as_text=as_text,
        layout=layout,
        tables=tables,
        larger=larger,
        on_rows=lines.rows,
        on_refused=lines.in_one_snapshot,
        on_text=lines.kept_as_text,
    )


def describe(directory: Location | str, *, json: bool) -> int:
    """Print the contents of the lake in `directory`; returns 1 if a table is set aside.

    Raises:
        StatementError: there is no lake.
    """
    lake = Lake(directory)
    boundaries = [str(lsn) for lsn in lake.boundaries()]
    position, states = lake.position(), lake.store.present()
    status = 1 if any(state.problem is not None for state in states.values()) else 0
    if json:
        tables = {label: _table_fields(state, position) for label, state in states.items()}
        fields = {"lsn": str(position), "boundaries": boundaries, "format": lake.format.name, "tables": tables}
        print(json_text(fields))
        return status
    since = f"{count(len(boundaries) - 1, 'boundary', 'boundaries')} since {boundaries[0]}"
    print(f"{lake.store.format.title} tables as of {position}, and {since}")
    for label, state in states.items():
        print(f"  {printable(label)}: {state.condition(position)} as of {state.position(position)}{_by(state.layout)}")
        if state.problem is not None:
            print(f"    {printable(state.problem.message)}\n    {printable_lines(state.problem.hint, '    ')}")
    return status


def _by(layout: Layout) -> str:
    """Return the end of a line with the layout of a table."""
    kinds = (("partitions", layout.partitions), ("clustered", layout.cluster))
    return "".join(
        f", {what} by {', '.join(printable(str(column)) for column in some)}" for what, some in kinds if some
    )


def _table_fields(state: LakeTable, reached: Lsn) -> dict[str, Any]:
    problem = state.problem
    return {
        "state": state.condition(reached),
        "lsn": str(state.position(reached)),
        "message": None if problem is None else problem.message,
        "hint": None if problem is None else problem.hint,
        "partitions": list(map(str, state.layout.partitions)),
        "cluster": list(state.layout.cluster),
    }
