"""`subscriber copy`: run the initial copy with Spark, and show its progress."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer

from subscriber import formatting
from subscriber.cli.dsn import ApplyTarget, Target
from subscriber.cli.options import MIB, Name
from subscriber.display import printable

if TYPE_CHECKING:
    from rich.progress import TaskID

    from subscriber.spark.copy.job import TableProgress

PLAIN_INTERVAL = 5.0  # seconds between two lines if stderr is not a terminal


async def copy_(
    target: Target,
    name: Name,
    apply_target: ApplyTarget = None,
    master: Annotated[
        str, typer.Option(help="Spark's master: local[4], spark://host:7077, yarn, …", metavar="URL")
    ] = "local[*,4]",
    part_size: Annotated[int, typer.Option(help="MiB of a table that one task copies.", min=1)] = 128,
    indexes: Annotated[
        bool, typer.Option("--indexes", help="Build the publisher's indexes that the target lacks, after the copy.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> int:
    """Make the initial copy of a subscription's tables with Spark.

    All tables that wait for their initial copy are split into partitions, which executors copy in parallel. `subscriber
    run` then brings the tables up to date. It starts such a copy itself for subscriptions WITH (copy_engine = spark).
    """
    from subscriber.spark.copy.job import copy_tables

    started = monotonic()
    with ExitStack() as stack:
        show = (lambda _phase, _tables: None) if quiet else Bars(stack) if sys.stderr.isatty() else Plain()
        copied = await copy_tables(
            target,
            name,
            apply_target=apply_target,
            master=master,
            part_bytes=part_size * MIB,
            indexes=indexes,
            on_progress=show,
        )
    if not quiet:
        seconds = formatting.in_seconds(monotonic() - started)
        print(f"copied {summary(copied)} in {seconds}" if copied else "no table waits to be copied")
    return 0


class Plain:
    """Shows progress as a line at regular intervals."""

    def __init__(self) -> None:
        self._shown = 0.0
        self._phase = ""

    def __call__(self, phase: str, tables: Sequence[TableProgress]) -> None:
        if phase == self._phase and monotonic() - self._shown < PLAIN_INTERVAL:
            return
        self._shown, self._phase = monotonic(), phase
        print(f"{phase}: {summary(tables)}" if tables else phase, file=sys.stderr, flush=True)


class Bars:
    """Shows progress as a bar for each table that is being copied, and one bar for all tables."""

    LARGEST = 12  # tables with a bar of their own

    def __init__(self, stack: ExitStack) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._progress = stack.enter_context(
            Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.fields[said]}", markup=False),
                console=Console(stderr=True),
                redirect_stdout=sys.stdout.isatty(),
            )
        )
        self._all = self._progress.add_task("", total=None, said="")
        self._bars: dict[str, TaskID] = {}

    def __call__(self, phase: str, tables: Sequence[TableProgress]) -> None:
        said = summary(tables) if tables else ""
        parts, done = sum(table.parts for table in tables), sum(table.parts_done for table in tables)
        self._progress.update(self._all, description=phase, total=parts or None, completed=done, said=said)
        for table in sorted(tables, key=lambda table: -table.total_bytes)[: self.LARGEST]:
            if table.name not in self._bars:
                self._bars[table.name] = self._progress.add_task(printable(table.name), total=table.parts, said="")
            self._progress.update(self._bars[table.name], completed=table.parts_done, said=describe(table))


def describe(table: TableProgress) -> str:
    """Format a table's progress: `120,000 rows, 14.2 MiB of about 30.0 MiB, 12 s left`."""
    words = f"{table.rows:,} rows, {formatting.in_bytes(table.bytes)} of about {formatting.in_bytes(table.total_bytes)}"
    return f"{words}, {formatting.in_seconds(table.seconds_left)} left" if table.seconds_left else words


def summary(tables: Sequence[TableProgress]) -> str:
    """Format the progress of all tables as one line."""
    complete = sum(table.parts_done == table.parts for table in tables)
    rows, size = sum(table.rows for table in tables), sum(table.bytes for table in tables)
    left = max((table.seconds_left or 0 for table in tables if table.parts_done < table.parts), default=0)
    words = f"{complete} of {formatting.count(len(tables), 'table')}, {rows:,} rows, {formatting.in_bytes(size)}"
    return f"{words}, about {formatting.in_seconds(left)} left" if left else words
