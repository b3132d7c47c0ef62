"""Differences: finds the rows of tables that differ, with hashes that the servers compute.

1. divide() lets ranges of the key be the buckets of a table, if it is an integer or a uuid. Otherwise they are hashes.
2. sums() compares the sums of the hashes of buckets.
3. ranges() finds the keys that differ in ranges, and refine() divides other buckets that differ, if they are many.
4. rows() reads keys and hashes of the rows in these buckets. The result names keys and columns, never values.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, cast

from subscriber.comparison.checksums import (
    BYTES_OF_A_ROW,
    ROWS_IN_A_BUCKET,
    ROWS_IN_A_SMALL_RANGE,
    Answer,
    Sums,
    add_up,
    differing,
)
from subscriber.comparison.compared_table import ComparedTable
from subscriber.comparison.progress import ComparisonProgress, OnProgress
from subscriber.comparison.queries import ChecksumTask, OnTaskDone, Outcome, ServerSnapshot
from subscriber.comparison.result import KEYS, Key
from subscriber.display import sql_identifier
from subscriber.errors import SubscriberError, TableChanged
from subscriber.lsn import Lsn
from subscriber.protocol.encodings import CODECS, decode
from subscriber.publisher.answers import parsing
from subscriber.publisher.partitions import TablePartition, heaps
from subscriber.sqlstate import INSUFFICIENT_PRIVILEGE


@dataclass(frozen=True, slots=True)
class ComparisonLimits:
    """The limits of what is read again, and kept in memory.

    Attributes:
        buckets: buckets of a table whose rows are read. If more differ, only their number is reported. For a complete
            list they are divided first.
        rows: rows of a table whose keys and hashes are in memory, for each side; also those of one range of keys.
        keys: keys of a table in a complete list.
    """

    buckets: int = 256
    rows: int = 100_000
    keys: int = 500_000


LIMITS = ComparisonLimits()


class RunQueries(Protocol):
    """Runs queries on the servers, and returns the outcome of each in order. Raises an error that is not a table's."""

    def __call__(self, tasks: Sequence[ChecksumTask], on_done: OnTaskDone, /) -> Awaitable[list[Outcome]]: ...


class Differences:
    """The search for differences between both sides of tables, in one snapshot of each server."""

    def __init__(
        self,
        run: RunQueries,
        servers: tuple[ServerSnapshot, ServerSnapshot],
        lsn: Lsn,
        on_progress: OnProgress,
        limits: ComparisonLimits,
        *,
        complete: bool,
    ) -> None:
        """Create the search.

        Args:
            run: runs the queries.
            servers: the publisher's and the target's snapshot.
            lsn: the position of both.
            on_progress: called at the beginning of each phase, and after each query.
            limits: the limits of the lists.
            complete: list up to limits.keys keys of each table, instead of KEYS of each kind of difference.
        """
        self._run = run
        self._servers = servers
        self._lsn = lsn
        self._on_progress = on_progress
        self._limits = limits
        self._complete = complete

    async def _run_all(
        self,
        plans: Sequence[ComparedTable],
        phase: str,
        sql: Callable[[ComparedTable, int, TablePartition], str],
        *,
        whole_heaps: bool = False,
        sides: Collection[int] = (0, 1),
    ) -> list[tuple[list[Answer], list[Answer]]]:
        """Run the same query for all parts of both sides, or for whole heaps.

        Returns both sides' results for each plan, and notes each table whose query has failed.
        """
        places, tasks = [], []
        for number, plan in enumerate(plans):
            for side in sides:
                server = self._servers[side]
                for part in heaps(plan.parts[side]) if whole_heaps else plan.parts[side]:
                    places.append((number, side))
                    by_key = plan.sides[side].selection is not None
                    role = plan.readers.get(part.heap) if side == 1 else None
                    tasks.append(ChecksumTask(server, part, sql(plan, side, part), by_key, role))
        reading = _ReadParts(phase, sum(task.part.size for task in tasks), self._on_progress)
        reading.show()
        answers: list[tuple[list[Answer], list[Answer]]] = [([], []) for _ in plans]
        for (number, side), outcome in zip(places, await self._run(tasks, reading.on_done), strict=True):
            if isinstance(outcome, SubscriberError):
                note = _cannot_be_read(plans[number], side, outcome)
                plans[number].found.leave_out(note, is_changed=isinstance(outcome, TableChanged))
            else:
                answers[number][side].append(outcome)
        return answers

    async def foreign_rows(self, plans: Sequence[ComparedTable]) -> None:
        """Count the publisher's rows that do not belong to the subscription. They are not compared."""
        answers = await self._run_all(
            plans,
            "counting rows outside the rules of ownership",
            lambda plan, side, part: plan.sides[side].foreign_rows(part),
            sides=(0,),
        )
        for plan, (source, _) in _readable(plans, answers):
            with parsing("the number of rows"):
                plan.found.foreign_count = sum(int(str(value)) for answer in source for (value,) in answer)

    async def divide(self, plans: Sequence[ComparedTable]) -> None:
        """Divide tables into ranges of their keys, unless that has no use for the keys they have."""
        rows_in_range = ROWS_IN_A_SMALL_RANGE if self._complete else ROWS_IN_A_BUCKET
        answers = await self._run_all(
            [plan.select(None) for plan in plans],
            "reading keys",
            lambda plan, side, part: plan.sides[side].bounds(part),
        )
        for plan, (source, target) in _readable(plans, answers):
            with parsing("keys"):
                bounds = [value for answer in (*source, *target) for row in answer for value in row]
                keys = [value for value in bounds if isinstance(value, int)]
            if keys and plan.range_key is not None:
                rows = plan.published.total_bytes // BYTES_OF_A_ROW
                plan.divide(plan.range_key.width(min(keys), max(keys), rows, rows_in_range))

    async def sums(self, plans: Sequence[ComparedTable]) -> None:
        """Find the buckets that differ. A table with a range that differs and is too large is read again, by hashes."""
        phase = f"comparing at {self._lsn}"
        answers = await self._run_all(plans, phase, lambda plan, side, part: plan.sides[side].sums(part, plan.buckets))
        for plan, (source, target) in _readable(plans, answers):
            _note_buckets(plan, add_up(source), add_up(target), None if self._complete else self._limits.buckets)
        crowded = [plan for plan in plans if max(plan.rows_in_ranges.values(), default=0) > self._limits.rows]
        for plan in crowded:
            plan.divide(None)
        if crowded:
            await self.sums(crowded)

    async def ranges(self, plans: Sequence[ComparedTable]) -> None:
        """Find the keys and then the rows that differ in the ranges that differ. The servers use an index."""
        for plan in plans:
            ranges = deque(plan.take_wanted())
            while ranges and plan.found.note is None:
                if self._complete and plan.found.listed >= self._limits.keys:
                    plan.found.leave_buckets(len(ranges))
                    break
                at_once: dict[int, int] = {}
                while ranges and (not at_once or sum(at_once.values()) < self._limits.rows):
                    number = ranges.popleft()
                    at_once[number] = plan.rows_in_ranges[number]
                parts = plan.select_ranges(at_once, plan.range_width or 0, buckets=0)
                answers = await self._run_all(
                    parts,
                    f"comparing ranges of {plan.found.name}",
                    lambda part, side, heap: part.sides[side].sums(heap, part.buckets),
                )
                keys = [
                    key
                    for _, (source, target) in _readable(parts, answers)
                    for key in differing(add_up(source), add_up(target))
                ]
                plan.found.leave_unexplained(not keys)
                single = plan.select_ranges(dict.fromkeys(keys, 1), 0)
                await self.rows([replace(part, buckets=1, wanted=[0]) for part in single])

    async def refine(self, plans: Sequence[ComparedTable]) -> None:
        """Divide the buckets that differ, and find the parts that differ."""
        if not plans:
            return
        coarse = [(plan.buckets, plan.wanted) for plan in plans]
        for plan in plans:
            plan.refine()
        within = {id(plan): before for plan, before in zip(plans, coarse, strict=True)}
        answers = await self._run_all(
            plans,
            f"comparing parts of {len(plans)} tables",
            lambda plan, side, part: plan.sides[side].sums(
                part, plan.buckets, within[id(plan)][1], within[id(plan)][0]
            ),
            whole_heaps=True,  # a bucket has few rows, which are in many parts
        )
        for plan, (source, target) in _readable(plans, answers):
            plan.want(differing(add_up(source), add_up(target)))

    async def rows(self, plans: Sequence[ComparedTable]) -> None:
        """Find the rows of these buckets that differ, and their columns. Memory: ComparisonLimits.rows."""
        limit = self._limits.keys if self._complete else KEYS
        left = {id(plan): list(plan.wanted) for plan in plans}
        while plans:
            for plan in plans:
                rows = max(plan.found.rows, plan.found.target_rows, 1)
                at_once = max(1, self._limits.rows * plan.buckets // rows)
                plan.want(left[id(plan)][:at_once])
                left[id(plan)] = left[id(plan)][at_once:]
            answers = await self._run_all(
                plans,
                f"reading rows of {len({plan.found.name for plan in plans})} tables",
                lambda plan, side, part: plan.sides[side].rows(
                    part, plan.buckets, plan.wanted, columns=not self._complete
                ),
            )
            for plan, (source, target) in _readable(plans, answers):
                _note_rows(plan, source, target, limit, columns=not self._complete)
                if self._complete and plan.found.listed >= limit:
                    plan.found.leave_buckets(len(left[id(plan)]))
                    left[id(plan)] = []
            plans = [plan for plan in plans if left[id(plan)] and plan.found.note is None]


@dataclass(slots=True)
class _ReadParts:
    """The parts of tables that one phase reads, and how many of their bytes are done."""

    phase: str
    total: int
    on_progress: OnProgress
    done: int = 0

    def show(self) -> None:
        self.on_progress(ComparisonProgress(self.phase, self.done, self.total))

    def on_done(self, task: ChecksumTask) -> None:
        self.done += task.part.size
        self.show()


def _readable(
    plans: Sequence[ComparedTable], answers: Sequence[tuple[list[Answer], list[Answer]]]
) -> Iterator[tuple[ComparedTable, tuple[list[Answer], list[Answer]]]]:
    """Yield each plan with the results of both sides, apart from tables whose query has failed."""
    for plan, answered in zip(plans, answers, strict=True):
        if plan.found.note is None:
            yield plan, answered
        else:
            plan.take_wanted()


def _cannot_be_read(plan: ComparedTable, side: int, error: SubscriberError) -> str:
    """Return the reason why a table is not compared. It has no value, but the names of columns."""
    converted = [column.name for column in plan.sides[side].columns if column.conversion is not None]
    server = ("publisher", "target")[side]
    if isinstance(error, TableChanged):  # the message has names only
        return f"on the {server}: {error.message}"
    if error.sqlstate == INSUFFICIENT_PRIVILEGE:  # as above
        return f"the {server} refuses to read its rows: {error.message}"
    if not converted:
        return f"the {server} cannot read its rows (SQLSTATE {error.sqlstate})"
    names = ", ".join(map(sql_identifier, converted))
    return (
        f"a value on the {server} cannot be converted to the target's type (SQLSTATE {error.sqlstate}), in one of the"
        f" columns: {names}"
    )


def _note_buckets(plan: ComparedTable, source: Sums, target: Sums, most: int | None) -> None:
    result = plan.found
    result.count_rows(sum(rows for rows, _ in source.values()), sum(rows for rows, _ in target.values()))
    wanted = differing(source, target)
    if most is not None and len(wanted) > most:
        # A table that is empty on one side is reported immediately, and large differences are not listed row by row.
        result.leave_buckets(len(wanted))
        result.estimate()
    else:
        plan.want(wanted)
    if plan.range_width is not None:
        plan.count_ranges(source, target)


def _note_rows(
    plan: ComparedTable, source: Sequence[Answer], target: Sequence[Answer], limit: int, *, columns: bool
) -> None:
    """Record the rows that differ, at most `limit` of each kind.

    Rows with a key are matched by the key, rows without as a multiset.
    """
    result = plan.found
    codec = CODECS[plan.sides[0].encoding]
    here, there = _collect(source, codec), _collect(target, codec)
    explained = set()
    for place in here.keys() | there.keys():
        left, right = here.get(place, Counter()), there.get(place, Counter())
        if left == right:
            continue
        bucket, key = place
        explained.add(bucket)
        only_left, only_right = left - right, right - left
        if plan.found.key and only_left and only_right:
            hashes = next(iter(only_left)), next(iter(only_right))
            result.add_changed(key, partial(_columns, plan.local_names, *hashes) if columns else tuple, limit)
        else:
            result.add_unpaired(key, only_left.total(), only_right.total(), limit, lists_extra=plan.lists_extra)
    result.leave_unexplained(len(set(plan.wanted) - explained))


def _collect(answers: Sequence[Answer], codec: str) -> dict[tuple[object, Key], Counter[tuple[object, ...]]]:
    """Return the hashes of rows by bucket and key."""
    rows: dict[tuple[object, Key], Counter[tuple[object, ...]]] = {}
    with parsing("rows"):
        for answer in answers:
            for row in answer:
                bucket, key, hashes = cast("tuple[object, list[object], list[object]]", row)
                place = bucket, tuple(_text(value, codec) for value in key)
                rows.setdefault(place, Counter())[tuple(hashes)] += 1
    return rows


def _text(value: object, codec: str) -> str | None:
    """Decode a column of a key. Raises TypeError or ValueError if it is not text in hexadecimal."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError
    return decode(bytes.fromhex(value), codec)


def _columns(names: Sequence[str], left: tuple[object, ...], right: tuple[object, ...]) -> tuple[str, ...]:
    return tuple(name for name, a, b in zip(names, left, right, strict=True) if a != b)
