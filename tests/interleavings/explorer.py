"""Explorer: runs a scenario in all orders of its tasks, on real servers.

Purpose. A decision that is taken from memory is wrong if its owner has changed the memory before the effect. Kills at
random find such an order once in hundreds of hours. The explorer chooses the order.

Workers stop at the points of `subscriber.failpoints` that the scenario names. Actors stop before each step. When all
tasks have stopped, or wait for a server or for each other (activity.py), the scheduler resumes one task. If several
have stopped, it records a choice. A schedule is the list of the choices:

    apply@SETTLED         the worker resumes
    apply@SETTLED!        the worker gets an error there, as from a lost connection
    kill                  the launcher is killed, and another one starts

Behind the choices of a schedule, the scheduler resumes the same worker as before, then the other workers. It resumes an
actor only if all workers wait. So an actor that acts at a certain point of a worker is one deviation from that order. A
failure is one, too. The search takes the schedules with the fewest deviations first (context bound), and each
schedule once, up to a number of choices.

A choice has a state: the rows and locks of both sides, the memory of the workers, where each task has stopped, and how
often. All options of a state are tried once. If a run meets a state of an earlier run, its rest is not varied again. So
a scenario with three actors and a failure has some hundred schedules instead of millions, and all are run. States that
differ in something else are taken for the same.

A schedule is replayed by its choices. Servers have their own timing, so a replay can meet other choices. Then the run
continues as behind the end of its schedule, and counts as diverged. Each difference that a run finds is real.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import anyio

from subscriber import failpoints, telemetry
from subscriber.errors import ConnectionLost
from subscriber.failpoints import Point
from tests.interleavings.activity import Activity

KILL = "kill"
FAILURE = "!"

_PAUSE = 0.001  # seconds between two checks of the activity
_STABLE = 2  # checks without activity: all tasks have stopped or wait
_AHEAD = 0.06  # seconds; timers that are due so soon fire before the next choice
_UNBLOCKED = 2.0  # seconds that a worker may wait for a timer, behind the last step of all actors
_STUCK = 20.0  # seconds without a stop, of a clock that does not skip: servers have timers of their own

_actor: ContextVar[str | None] = ContextVar("actor", default=None)


@contextmanager
def acting_as(name: str) -> Iterator[None]:
    """Name the points at which the current task stops by an actor, instead of a worker."""
    token = _actor.set(name)
    try:
        yield
    finally:
        _actor.reset(token)


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
        activity: Activity,
        kill: Callable[[], Awaitable[None]] | None,
        read_state: Callable[[], Awaitable[str]],
        is_sleeping: Callable[[], Awaitable[bool]],
        *,
        may_fail: bool,
    ) -> None:
        """Create a scheduler.

        Args:
            schedule: the choices to take.
            points: the points at which workers stop.
            activity: the activity of this process and of the servers.
            kill: kills the launcher and starts another one. None: it is not killed.
            read_state: returns the state of both sides and of the workers' memory.
            is_sleeping: returns True while a statement sleeps on a server.
            may_fail: one worker may get an error, or be killed.
        """
        self.choices: list[Choice] = []
        self.diverged = False
        self._schedule = list(schedule)
        self._points = points
        self._activity = activity
        self._kill = kill
        self._read_state = read_state
        self._is_sleeping = is_sleeping
        self._may_fail = may_fail
        self._held: list[_Held] = []
        self._stops: Counter[str] = Counter()  # how often each task has stopped
        self._last = ""  # the last worker that was resumed
        self._actors = 0

    # --- tasks ----------------------------------------------------------------------------------

    async def reached(self, point: Point) -> None:
        """Hold the worker at a point. The value of `failpoints.explorer`."""
        if point in self._points:
            actor = _actor.get()
            if actor is None:
                keys = telemetry.bound_keys()
                relation, subscription = keys.get("relation", "").removeprefix("public."), keys.get("subscription", "s")
                parts = (keys.get("worker", "launcher"), relation, subscription if subscription != "s" else "")
                actor = "-".join(filter(None, parts))
            await self._stop(f"{actor}@{point.name}")

    async def step(self, name: str) -> None:
        """Hold an actor before its next step."""
        await self._stop(f"{_actor.get()}:{name}")

    async def _stop(self, task: str) -> None:
        held = _Held(task)
        self._held.append(held)
        self._stops[_task(task)] += 1
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
        try:
            with acting_as(name):
                await work()
        except ConnectionLost:
            pass
        finally:
            self._actors -= 1

    # --- the schedule ---------------------------------------------------------------------------

    async def run(self, is_done: Callable[[], Awaitable[bool]]) -> None:
        """Resume tasks until the actors have ended and `is_done` returns True."""
        since, real = anyio.current_time(), monotonic()
        while True:
            await self._wait_until_quiet()
            waited = anyio.current_time() - since
            if self._held:
                await self._resume()
                since, real = anyio.current_time(), monotonic()
            elif not self._actors and (waited > _UNBLOCKED or await is_done()):
                return
            elif monotonic() - real > _STUCK:
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
            state = f"{await self._read_state()} {options} {self._may_fail} {sorted(self._stops.items())}"
            if len(self.choices) < len(self._schedule):
                wanted = self._schedule[len(self.choices)]
                if wanted in options:
                    taken = wanted
                else:
                    self.diverged = True
            self.choices.append(Choice(tuple(options), taken, state))
        if "@" in taken:
            self._last = _task(taken)
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
        """Return the worker that was resumed last, or another worker, or an actor if all workers wait."""
        workers = [name for name in names if "@" in name]
        return next((name for name in workers if _task(name) == self._last), (workers or names)[0])

    async def _wait_until_quiet(self) -> None:
        """Wait until nothing happens in this process and on the servers, and no timer or sleep ends soon."""
        ahead, stable = _AHEAD, 0
        while stable < _STABLE:
            await anyio.sleep(_PAUSE)
            stable = stable + 1 if self._activity.is_idle() else 0
            if stable == _STABLE and (skipped := self._activity.skip(ahead)) is not None:
                ahead -= skipped
                stable = 0
            elif stable == _STABLE and await self._is_sleeping():
                stable = 0

    def release_all(self) -> None:
        """Resume all tasks, without further stops."""
        self._points = ()
        for held in self._held:
            held.released.set()


def _task(name: str) -> str:
    """Return the task of a choice."""
    return name.partition("@")[0].partition(":")[0]


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
    _added: int = 0  # schedules with equally many deviations are taken in this order

    def to_json(self) -> dict[str, Any]:
        """Return what from_json() continues."""
        return {
            "depth": self.depth,
            "runs": self.runs,
            "known": self.known,
            "added": self._added,
            "seen": sorted(self._seen),
            "waiting": self._waiting,
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Search:
        """Continue a search that has been stored by to_json()."""
        waiting = [(deviations, number, tuple(schedule)) for deviations, number, schedule in stored["waiting"]]
        return cls(stored["depth"], stored["runs"], stored["known"], set(stored["seen"]), waiting, stored["added"])

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
            state = hashlib.sha256(choices[place].state.encode()).hexdigest()[:16]
            if state in self._seen:
                self.known += 1
                break
            self._seen.add(state)
            for option in choices[place].options:
                if option != taken[place]:
                    self._added += 1
                    heapq.heappush(self._waiting, (deviations + 1, self._added, (*taken[:place], option)))
