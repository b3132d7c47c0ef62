"""What the commands of a move report: events of steps, results, and where a move stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from subscriber.migration.plan import STEP, Side, Standing, Step


@dataclass(frozen=True, slots=True)
class StepEvent:
    """A step of a move has begun or ended.

    Attributes:
        step: its name (plan.STEPS), or "undo".
        state: "begin", "progress", "done" or "failed"; "planned" in a dry run.
        seconds: since its beginning.
        detail: `statements`, each with its server `on`; `lsn` and figures of the step. A dry run adds what the step
            does and `waits` for, its `limit` and `estimate` in seconds, and the `undo`.
        error: the reason why it failed.
    """

    step: str
    state: str
    seconds: float = 0.0
    detail: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def definition(self) -> Step | None:
        """The step of the plan: its stage, limit, condition and undo. None: of "undo", and outside of the plan."""
        return STEP.get(self.step)


@dataclass(frozen=True, slots=True)
class MoveResult:
    """The result of a move.

    Attributes:
        serving: the server that applications write to now.
        pause: seconds between the close of one fence and the opening of the other one. None: the servers were fenced
            by a former command.
        lsn: the position of the former server up to which everything has moved. None: not known to this command.
        warnings: problems after the switch.
    """

    serving: Side
    pause: float | None
    lsn: str | None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The expected length of a pause, step by step.

    Attributes:
        estimate: seconds of the steps that were measured.
        pause: seconds for which applications could not write. None: they could all the time.
        steps: seconds of each measured step.
    """

    estimate: float
    pause: float | None
    steps: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """One server of a move, as it is."""

    side: Side
    fence: str  # open, closed, or none
    tables: int  # tables with the trigger of the fence
    launcher: bool  # a launcher leads
    standby: bool  # another launcher waits to take over
    subscriptions: Mapping[str, bool]  # by name: whether it is enabled
    stopped_at: str | None  # the position at which its subscription was disabled


@dataclass(frozen=True, slots=True)
class MigrationStatus:
    """The state of a move.

    Attributes:
        standing: the serving server and the phase.
        servers: those that can be reached.
        commands: those that are possible, the usual one first.
        start_step: the step with which `start` has to continue. None: it has ended, or was never called.
    """

    standing: Standing
    servers: tuple[ServerStatus, ...]
    commands: tuple[str, ...]
    start_step: str | None = None
