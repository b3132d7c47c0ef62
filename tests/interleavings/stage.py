"""The stage of a scenario: two databases, a launcher, and one run of a schedule on them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, TypeAlias

import anyio
import asyncpg

from subscriber.exception_groups import root_cause
from subscriber.failpoints import Point
from subscriber.ranges.table_ranges import TableRanges
from subscriber.settings import Settings
from subscriber.worker.table_states import TableStates
from tests.interleavings.activity import Activity
from tests.interleavings.explorer import Choice, Scheduler, Search, exploring
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import UNFINISHED, Subscriber

Side: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

SETTINGS = Settings(
    retry_interval=0.001,
    first_retry_delay=0.001,
    empty_database_poll_interval=0.05,
    max_sync_workers=2,
    confirm_interval=0.01,
)


@dataclass
class Stage:
    """The servers of a scenario. Actors call step() before each of their steps.

    Attributes:
        source: the publisher's database.
        target: the subscriber's database.
        subscriber: its launcher.
        sides: a session on each.
        activity: the activity of this process and of both servers.
        scheduler: that of the current run.
        closing: closes at the end of the run what the scenario has opened.
        kept: objects that the parts of the scenario share.
    """

    source: Database
    target: Database
    subscriber: Subscriber
    sides: tuple[Side, Side]
    activity: Activity
    scheduler: Scheduler | None = None
    closing: AsyncExitStack = field(default_factory=AsyncExitStack)
    kept: dict[str, Any] = field(default_factory=dict)

    @classmethod
    @asynccontextmanager
    async def open(cls, source: Database, target: Database, subscriber: Subscriber) -> AsyncIterator[Stage]:
        """Open the sessions that watch both databases."""
        async with (
            source.connection() as one,
            target.connection() as other,
            Activity.watch(source.server, target.server) as activity,
        ):
            for side in (one, other):
                await side.execute("SET application_name = 'explorer'; SET lock_timeout = '1ms'")
            yield cls(source, target, subscriber, (one, other), activity)

    async def step(self, name: str) -> None:
        """Stop before the next step of an actor, until the scheduler resumes it."""
        assert self.scheduler is not None
        await self.scheduler.step(name)

    async def both(self, *statements: str) -> None:
        """Run statements on both sides."""
        await self.source.execute(*statements)
        await self.target.execute(*statements)

    async def read_state(self, compared: Sequence[str], memory: Callable[[Stage], object]) -> str:
        """Return rows, states, locks, and the memory of the workers, as a hash."""
        parts: list[object] = [memory(self)]
        for side in self.sides:
            for name in compared:
                with suppress(asyncpg.LockNotAvailableError, asyncpg.UndefinedTableError):
                    parts += await side.fetch(f"SELECT t::text FROM {name} t ORDER BY 1")
        with suppress(asyncpg.LockNotAvailableError):  # a statement changes the definition of a table
            parts += await self.sides[1].fetch(_STATE)
        launcher = self.subscriber.launcher
        with suppress(KeyError):  # it is starting
            tables = launcher.supervisor("s").tables if launcher is not None else TableStates()
            for relid, table in tables.unready.items():
                parts += [tables.names.get(relid), table.state.name, _memory(table.ranges)]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    async def is_sleeping(self) -> bool:
        """Return True while a statement sleeps on a server, before it tries something again."""
        return any([await side.fetchval(_SLEEPS) for side in self.sides])

    async def is_ready(self) -> bool:
        """Return True if all tables of the subscription are ready."""
        return bool(await self.target.value(UNFINISHED.format(name="s", states="'s', 'r'")) == 0)

    async def differences(self, tables: Sequence[str]) -> list[str]:
        """Return the tables whose rows differ between both sides, with the rows of each side."""
        sentences = []
        for table in tables:
            query = f"SELECT t::text FROM {table} t ORDER BY 1"
            wanted, there = await self.source.rows(query), await self.target.rows(query)
            if wanted != there:
                sentences.append(f"{table}: {len(wanted)} rows on the source, {len(there)} on the target")
        return sentences


_SLEEPS = """
SELECT EXISTS (SELECT FROM pg_catalog.pg_stat_activity
                WHERE datname = pg_catalog.current_database() AND wait_event = 'PgSleep')
"""
_STATE = """
SELECT r.srrelname::text, r.srsubstate::text, r.srcopy, c.low::text, c.high::text, c.single, c.snapshot IS NULL
  FROM subscriber.subscription_rel r LEFT JOIN subscriber.copied_range c ON (c.subid, c.relid) = (r.srsubid, r.srrelid)
UNION ALL
SELECT c.relname::text, l.mode, l.granted::text, NULL, NULL, NULL, NULL
  FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_class c ON c.oid = l.relation
 WHERE c.relnamespace = to_regnamespace('public') AND l.pid <> pg_backend_pid()
UNION ALL
SELECT 'quarantine', q.retry::text, q.edited::text, (q.error IS NULL)::text, cardinality(q.depends_on)::text, NULL, NULL
  FROM subscriber.quarantine q
UNION ALL
SELECT 'hold', (stop_at > '0/0')::text, (held_at IS NULL)::text, NULL, NULL, NULL, NULL FROM subscriber.hold
UNION ALL
SELECT indexdef, NULL, NULL, NULL, NULL, NULL, NULL FROM pg_catalog.pg_indexes WHERE schemaname = 'public'
 ORDER BY 1, 2, 3, 4, 5, 6, 7
"""


def _memory(ranges: TableRanges | None) -> object:
    if ranges is None:
        return None
    parts = [
        (
            table_range.low,
            table_range.high,
            table_range.state.name,
            table_range.taken,
            table_range.spoiled,
            len(table_range.skipped),
        )
        for table_range in ranges
    ]
    return parts, ranges.unsettled, ranges.awaited, ranges.end is not None and ranges.settled >= ranges.end


Actor = Callable[[Stage], Awaitable[None]]


async def ready(stage: Stage) -> None:
    """Wait until the target has everything that is committed on the source."""
    with anyio.fail_after(20):
        await stage.subscriber.wait_for_ready(stage.source)


async def restart(stage: Stage) -> None:
    """Kill the launcher, and start another one."""
    await stage.subscriber.restart()


@dataclass(frozen=True)
class Scenario:
    """A scenario of the explorer.

    Attributes:
        name: its name.
        tables: the tables whose rows are part of a state.
        points: the points at which workers stop.
        prepare: creates tables and subscription, before workers stop at points.
        actors: the programs that act at the same time as the workers, by name.
        may_fail: one worker may get an error, or the launcher may be killed.
        finish: waits behind the last step until both sides are at rest.
        check: returns further rows that must not be there at the end.
        kill: the effect of a kill. None: nothing is killed.
        is_replicated: both sides have the same rows of the tables at the end.
        memory: returns a further part of a state.
        settings: the settings of the launcher.
    """

    name: str
    tables: tuple[str, ...]
    points: frozenset[Point]
    prepare: Callable[[Stage], Awaitable[None]]
    actors: dict[str, Actor]
    may_fail: bool = True
    finish: Callable[[Stage], Awaitable[None]] = ready
    check: Callable[[Stage], Awaitable[Sequence[object]]] | None = None
    kill: Callable[[Stage], Awaitable[None]] | None = restart
    is_replicated: bool = True
    memory: Callable[[Stage], object] = lambda _: None
    settings: Settings = SETTINGS


@dataclass
class Outcome:
    """The result of one run."""

    schedule: tuple[str, ...]
    choices: list[Choice]
    differences: list[str]
    seconds: float
    diverged: bool

    def __str__(self) -> str:
        taken = " ".join(choice.taken for choice in self.choices)
        return f"{'; '.join(self.differences)}\nschedule: {taken}"


@dataclass
class Exploration:
    """The results of all runs of a scenario."""

    scenario: str
    runs: int = 0
    diverged: int = 0
    left: int = 0
    known: int = 0
    failures: list[Outcome] = field(default_factory=list)
    deviations: int = 0  # of the last schedule
    seconds: float = 0.0

    def __str__(self) -> str:
        done = "all schedules" if not self.left else f"up to {self.deviations} deviations, {self.left} schedules left"
        return (
            f"{self.scenario}: {self.runs} schedules in {self.seconds:.0f} s ({done}), {self.diverged} diverged,"
            f" {self.known} met a known state,"
            f" {len(self.failures)} with differences"
        )


async def run(scenario: Scenario, stage: Stage, schedule: tuple[str, ...]) -> Outcome:
    """Run one schedule on databases without tables, and compare both sides."""
    started = monotonic()
    stage.subscriber.settings = replace(scenario.settings)
    stage.subscriber.log.clear()
    try:
        await scenario.prepare(stage)
        kill = scenario.kill
        scheduler = stage.scheduler = Scheduler(
            schedule,
            scenario.points,
            stage.activity,
            None if kill is None else lambda: kill(stage),
            lambda: stage.read_state(scenario.tables, scenario.memory),
            stage.is_sleeping,
            may_fail=scenario.may_fail,
        )
        async with exploring(scheduler), anyio.create_task_group() as tasks:
            for name, actor in scenario.actors.items():
                tasks.start_soon(scheduler.act, name, lambda actor=actor: actor(stage))
            await scheduler.run(stage.is_ready)
            scheduler.release_all()
        await scenario.finish(stage)
        different = await stage.differences(scenario.tables) if scenario.is_replicated else []
        if scenario.check is not None and (rows := await scenario.check(stage)):
            different.append(f"wrong rows: {rows}")
    except Exception as failure:
        if stage.scheduler is None:
            raise
        scheduler = stage.scheduler
        error = root_cause(failure)
        different = [f"{type(error).__name__}: {error}"[:2000]]
    finally:
        await clean(stage)
    return Outcome(schedule, scheduler.choices, different, monotonic() - started, scheduler.diverged)


async def clean(stage: Stage) -> None:
    """Drop the subscription, and all tables of both sides."""
    stage.scheduler = None
    await stage.closing.aclose()
    stage.closing = AsyncExitStack()
    stage.kept.clear()
    await stage.subscriber.stop()
    await stage.subscriber.execute(
        *(["DROP SUBSCRIPTION s"] if await stage.target.value("SELECT count(*) FROM subscriber.subscription") else [])
    )
    for database in (stage.source, stage.target):
        await database.execute("DROP SCHEMA public CASCADE", "CREATE SCHEMA public")
    await stage.source.execute("DROP PUBLICATION IF EXISTS p")


async def explore(
    scenario: Scenario,
    stage: Stage,
    *,
    seconds: float = inf,
    schedules: float = inf,
    depth: int = 8,
    most_failures: int = 3,
    tell: Callable[[str], None] = lambda _: None,
    stored: Path | None = None,
) -> Exploration:
    """Run the schedules of a scenario until all are done, or a limit is reached.

    Args:
        scenario: the scenario.
        stage: its servers.
        seconds: the limit of the time, without that of earlier runs.
        schedules: the limit of their number.
        depth: the number of choices that are varied.
        most_failures: the number of differences after which the exploration ends.
        tell: called with each difference, and from time to time with the results until then.
        stored: a file with the exploration of earlier runs, which is continued and stored after each schedule. None:
            nothing is stored.
    """
    started, search, result = monotonic(), Search(depth), Exploration(scenario.name)
    if stored is not None and stored.exists():
        search, result = _continued(scenario, json.loads(stored.read_text()))
    before = result.seconds
    while result.seconds - before < seconds and result.runs < schedules and len(result.failures) < most_failures:
        taken = search.take()
        if taken is None:
            break
        deviations, schedule = taken
        outcome = await run(scenario, stage, schedule)
        search.add(deviations, schedule, outcome.choices)
        result.runs, result.left, result.known, result.deviations = search.runs, search.left, search.known, deviations
        result.diverged += outcome.diverged
        result.seconds = before + monotonic() - started
        if stored is not None:
            _store(stored, search, result)
        if outcome.differences:
            result.failures.append(outcome)
            tell(f"{scenario.name}, schedule {result.runs} after {result.seconds:.0f} s: {outcome}")
        elif result.runs % 50 == 0:
            tell(str(result))
    return result


def _continued(scenario: Scenario, stored: dict[str, Any]) -> tuple[Search, Exploration]:
    """Return the search and the results that _store() has stored."""
    search = Search.from_json(stored["search"])
    counted = {name: stored[name] for name in ("diverged", "deviations", "seconds")}
    return search, Exploration(scenario.name, search.runs, left=search.left, known=search.known, **counted)


def _store(file: Path, search: Search, result: Exploration) -> None:
    """Replace the file, so that a kill leaves the results before or after the schedule."""
    stored = {
        "search": search.to_json(),
        "diverged": result.diverged,
        "deviations": result.deviations,
        "seconds": result.seconds,
    }
    new = file.with_suffix(".new")
    new.write_text(json.dumps(stored))
    new.replace(file)
