"""Explorer: runs a scenario in all orders of its tasks, on real servers.

Purpose. A decision that is taken from memory is wrong if its owner has changed the memory before the effect. Kills at
random find such an order once in hundreds of hours. The explorer chooses the order.

Workers stop at the points of `subscriber.failpoints` that the scenario names. Actors stop before each step. When all
tasks have stopped or wait for a server, the scheduler resumes one task. If several have stopped, it records a choice. A
schedule is the list of the choices:

    apply@SETTLED         the worker resumes
    apply@SETTLED!        the worker gets an error there, as from a lost connection
    kill                  the launcher is killed, and another one starts

Behind the choices of a schedule, the scheduler resumes the same task as before. The search takes the schedules with the
fewest deviations from that first (context bound), and each schedule once, up to a number of choices. If a run meets a
state of an earlier run, the rest of it is not varied again.

A schedule is replayed by its choices. Servers have their own timing, so a replay can meet other choices. Then the run
continues as behind the end of its schedule, and counts as diverged. Each difference that a run finds is real.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, TypeAlias

import anyio
import asyncpg

from subscriber import failpoints, telemetry
from subscriber.errors import ConnectionLost
from subscriber.failpoints import Point

KILL = "kill"
FAILURE = "!"

_PAUSE = 0.002  # seconds between two questions to the servers
_STABLE = 2  # answers without a change: all tasks have stopped or wait
_UNBLOCKED = 2.0  # seconds that a task may wait for a timer, while no task has stopped

# What the sessions of a database do. A session that waits for a lock or for its client does nothing.
_ACTIVITY = """
SELECT pg_catalog.count(*) FILTER (WHERE a.state = 'active' AND a.backend_type = 'client backend'
                                     AND coalesce(a.wait_event_type, '') NOT IN ('Lock', 'Client')),
       pg_catalog.max(a.state_change)::text, pg_catalog.max(a.query_start)::text, pg_catalog.count(*),
       (SELECT pg_catalog.count(*) FROM pg_catalog.pg_stat_replication r
         WHERE r.sent_lsn < pg_catalog.pg_current_wal_flush_lsn() AND r.state = 'streaming')
  FROM pg_catalog.pg_stat_activity a
 WHERE a.datname = pg_catalog.current_database() AND a.application_name <> 'explorer'
"""

Side: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

_actor: ContextVar[str | None] = ContextVar("actor", default=None)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several options that the scheduler has taken."""

    options: tuple[str, ...]
    taken: str
    state: str = ""  # of both sides and of the workers' memory


@dataclass(slots=True)
class _Held:
    task: str
    released: anyio.Event = field(default_factory=anyio.Event)
    fails: bool = False


class Scheduler:
    """Resumes one task at a time, as a schedule says."""

    def __init__(
        self,
        schedule: Sequence[str],
        points: Collection[Point],
        sides: Sequence[Side],
        kill: Callable[[], Awaitable[None]] | None,
        read_state: Callable[[], Awaitable[str]],
        *,
        may_fail: bool,
    ) -> None:
        """Create a scheduler.

        Args:
            schedule: the choices to take.
            points: the points at which workers stop.
            sides: a session on each database, whose other sessions are watched.
            kill: kills the launcher and starts another one. None: it is not killed.
            read_state: returns the state of both sides and of the workers' memory.
            may_fail: one worker may get an error, or be killed.
        """
        self.choices: list[Choice] = []
        self.diverged = False
        self._schedule = list(schedule)
        self._points = points
        self._sides = sides
        self._kill = kill
        self._read_state = read_state
        self._may_fail = may_fail
        self._held: list[_Held] = []
        self._arrivals = 0
        self._last = ""
        self._actors = 0

    # --- tasks ----------------------------------------------------------------------------------

    async def reached(self, point: Point) -> None:
        """Hold the worker at a point. The value of `failpoints.explorer`."""
        if point in self._points:
            actor = _actor.get()
            if actor is None:
                keys = telemetry.bound_keys()
                worker, relation = keys.get("worker", "launcher"), keys.get("relation", "").removeprefix("public.")
                actor = f"{worker}-{relation}" if relation else worker
            await self._stop(f"{actor}@{point.name}")

    async def step(self, name: str) -> None:
        """Hold an actor before its next step."""
        await self._stop(f"{_actor.get()}:{name}")

    async def _stop(self, task: str) -> None:
        held = _Held(task)
        self._held.append(held)
        self._arrivals += 1
        try:
            await held.released.wait()
        finally:
            if held in self._held:
                self._held.remove(held)
        if held.fails:
            raise ConnectionLost("the explorer has ended the connection")

    async def act(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run an actor of the scenario."""
        self._actors += 1
        _actor.set(name)
        try:
            await work()
        except ConnectionLost:
            pass
        finally:
            self._actors -= 1
            self._arrivals += 1

    # --- the schedule ---------------------------------------------------------------------------

    async def run(self, is_done: Callable[[], Awaitable[bool]]) -> None:
        """Resume tasks until the actors have ended and `is_done` returns True."""
        since = monotonic()
        while True:
            await self._wait_until_quiet()
            if self._held:
                since = monotonic()
                await self._resume()
                continue
            if not self._actors and (await is_done() or monotonic() - since > _UNBLOCKED):
                return
            if monotonic() - since > 10 * _UNBLOCKED:
                raise TimeoutError("no task continues")

    async def _resume(self) -> None:
        names = self._names()
        options = list(names)
        if self._may_fail:
            options += [name + FAILURE for name in names if "@" in name]
            if self._kill is not None:
                options.append(KILL)
        taken = self._default(list(names))
        if len(options) > 1:
            state = f"{await self._read_state()} {options} {self._may_fail} {self._last}"
            if len(self.choices) < len(self._schedule):
                wanted = self._schedule[len(self.choices)]
                if wanted in options:
                    taken = wanted
                else:
                    self.diverged = True
            self.choices.append(Choice(tuple(options), taken, state))
        self._last = taken.rstrip(FAILURE).partition("@")[0].partition(":")[0]
        if taken == KILL:
            self._may_fail = False
            assert self._kill is not None
            await self._kill()
            return
        held = names[taken.removesuffix(FAILURE)]
        if held not in self._held:  # it has ended
            return
        if taken.endswith(FAILURE):
            self._may_fail = False
            held.fails = True
        self._held.remove(held)
        held.released.set()

    def _names(self) -> dict[str, _Held]:
        """Return the held tasks by name. Several of one name get numbers."""
        names: dict[str, _Held] = {}
        for held in sorted(self._held, key=lambda one: one.task):
            name = next(
                name for number in itertools.count(1) if (name := held.task + f"#{number}" * (number > 1)) not in names
            )
            names[name] = held
        return names

    def _default(self, names: list[str]) -> str:
        """Return the task that was resumed last, or the first."""
        return next((name for name in names if name.partition("@")[0].partition(":")[0] == self._last), names[0])

    async def _wait_until_quiet(self) -> None:
        before: object = None
        stable = 0
        while stable < _STABLE:
            await anyio.sleep(_PAUSE)
            now = (self._arrivals, [tuple(await side.fetchrow(_ACTIVITY) or ()) for side in self._sides])
            stable = stable + 1 if now == before and not _is_active(now) else 0
            before = now

    def release_all(self) -> None:
        """Resume all tasks, without further stops."""
        self._points = ()
        for held in self._held:
            held.released.set()


def _is_active(look: tuple[int, Any]) -> bool:
    return any(row[0] or row[4] for row in look[1])


@asynccontextmanager
async def exploring(scheduler: Scheduler) -> AsyncIterator[None]:
    """Have workers stop at points for the length of the block."""
    failpoints.explorer = scheduler.reached
    try:
        yield
    finally:
        failpoints.explorer = None
        scheduler.release_all()


@dataclass(slots=True)
class Search:
    """The schedules of a scenario that are still to be run, those with the fewest deviations first.

    Attributes:
        depth: the number of choices that are varied.
        runs: the number of schedules that have been taken.
        known: the number of runs that have met a state of an earlier run.
    """

    depth: int
    runs: int = 0
    known: int = 0
    _seen: set[str] = field(default_factory=set)
    _waiting: list[tuple[int, int, tuple[str, ...]]] = field(default_factory=lambda: [(0, 0, ())])
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def left(self) -> int:
        """The number of schedules that are known and have not been taken."""
        return len(self._waiting)

    def take(self) -> tuple[int, tuple[str, ...]] | None:
        """Return the next schedule and its number of deviations. None: all have been taken."""
        if not self._waiting:
            return None
        self.runs += 1
        deviations, _, schedule = heapq.heappop(self._waiting)
        return deviations, schedule

    def add(self, deviations: int, schedule: tuple[str, ...], choices: Sequence[Choice]) -> None:
        """Add the schedules that deviate once more, behind a schedule that has been run.

        Args:
            deviations: the deviations of the schedule.
            schedule: the schedule.
            choices: the choices that its run has met.
        """
        taken = [choice.taken for choice in choices]
        for place in range(len(schedule), min(len(choices), self.depth)):
            if choices[place].state in self._seen:
                self.known += 1
                break
            self._seen.add(choices[place].state)
            for option in choices[place].options:
                if option != taken[place]:
                    added = (*taken[:place], option)
                    heapq.heappush(self._waiting, (deviations + 1, next(self._numbers), added))
