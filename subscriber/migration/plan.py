"""The plan of a move: its steps and phases as data. Pure; steps.py has the effects.

A move exchanges the roles of two servers. Its steps run in the order of STEPS. Each step looks at the servers first, so
it can be repeated after a crash.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Side(StrEnum):
    """One of the two servers."""

    SOURCE = "source"
    TARGET = "target"

    @property
    def other(self) -> Side:
        """The server at the other side."""
        return Side.TARGET if self is Side.SOURCE else Side.SOURCE


class Phase(StrEnum):
    """The phase of the present move, from the row of the serving server."""

    FOLLOWING = "following"  # applications write to the serving server
    FROZEN = "frozen"  # both servers are fenced
    SWITCHING = "switching"  # the following server may be open
    FINISHING = "finishing"  # `finish` has begun, and the way back may be gone
    FINISHED = "finished"  # the subscriptions are dropped

    @property
    def is_paused(self) -> bool:
        """True if applications can write nowhere, or it is not known where."""
        return self in (Phase.FROZEN, Phase.SWITCHING)


class StepStage(StrEnum):
    """The effect of a step on applications."""

    BEFORE = "before"  # nothing
    PAUSE = "pause"  # it can write nowhere
    AFTER = "after"  # it writes to the other server


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a move.

    Attributes:
        name: of the step, in rows, events and failpoints.
        stage: before, during or after the pause.
        does: a sentence for people.
        waits: the condition that it waits for. None: it does not wait.
        limit: seconds. None: the limit of the pause.
        undo: the way in which an error before the switch is undone. None: nothing has to be undone.
    """

    name: str
    stage: StepStage
    does: str
    waits: str | None = None
    limit: float | None = None
    undo: str | None = None


REOPEN = "open the serving server"
STEPS = (
    Step(
        "guard",
        StepStage.BEFORE,
        "fence the following server, and end its sessions",
        waits="no session is left",
        limit=120,
    ),
    Step(
        "arm",
        StepStage.BEFORE,
        "let the serving server replicate the following one, if that filters changes by origin",
        waits="a marker of the following server is confirmed",
        limit=300,
        undo="stop the way back",
    ),
    Step(
        "prepare",
        StepStage.BEFORE,
        "create the triggers of the fence, which are open",
        waits="a lock on each table, for at most a tenth of a second at a time",
        limit=300,
        undo="drop the triggers",
    ),
    Step(
        "gates",
        StepStage.BEFORE,
        "check tables, lag, transactions, sequences and privileges",
        waits="the lag stays below its limit",
        limit=600,
    ),
    Step("hold", StepStage.PAUSE, "call the hooks for the pause", undo="call the hooks to resume"),
    Step("freeze", StepStage.PAUSE, "close the fence of the serving server", undo=REOPEN),
    Step(
        "quiet",
        StepStage.PAUSE,
        "end the sessions of applications",
        waits="no session is left",
        undo=REOPEN,
    ),
    Step(
        "drain",
        StepStage.PAUSE,
        "commit a marker on the serving server",
        waits="the marker is applied and durable on the following server",
        undo=REOPEN,
    ),
    Step("sequences", StepStage.PAUSE, "advance sequences to the serving server's values", undo=REOPEN),
    Step(
        "objects",
        StepStage.PAUSE,
        "make large objects equal to the serving server's, if that is requested",
        undo=REOPEN,
    ),
    Step(
        "stop",
        StepStage.PAUSE,
        "disable the subscription of the following server, and keep its position",
        waits="its workers have ended",
        undo="open the serving server, then enable the subscription",
    ),
    Step(
        "turn",
        StepStage.PAUSE,
        "let the serving server replicate the following one, if it does not yet",
        undo="open the serving server, then stop the way back",
    ),
    Step("switch", StepStage.PAUSE, "store that the following server may be open", undo=REOPEN),
    Step("open", StepStage.PAUSE, "open the fence of the following server; no undo after this"),
    Step(
        "redirect",
        StepStage.AFTER,
        "call the hooks that lead applications to the new server, and let them resume",
        limit=60,
    ),
    Step(
        "settle",
        StepStage.AFTER,
        "store the new roles, and drop the slot of the stopped subscription",
        limit=60,
    ),
    Step(
        "probe",
        StepStage.AFTER,
        "commit a marker on the new serving server",
        waits="the marker is applied and durable on the other one",
        limit=60,
    ),
)
# `start`, before the first move. Applications write to the source all the time.
START = (
    Step("preflight", StepStage.BEFORE, "find obstacles that are neither fixed nor waived"),
    Step("roles", StepStage.BEFORE, "create the roles that the target lacks"),
    Step("definitions", StepStage.BEFORE, "create schemas, types, tables and their keys"),
    Step("subscribe", StepStage.BEFORE, "fence the target, create publication and subscription"),
    Step("copy", StepStage.BEFORE, "copy the tables", waits="all tables are ready"),
    Step("rest", StepStage.BEFORE, "create indexes, constraints and triggers"),
    Step("large_objects", StepStage.BEFORE, "copy large objects, if the options say so"),
    Step("views", StepStage.BEFORE, "refresh materialized views in the order of dependencies"),
    Step("analyze", StepStage.BEFORE, "collect statistics of the planner"),
)
STEP = {step.name: step for step in (*START, *STEPS)}


@dataclass(frozen=True, slots=True)
class Standing:
    """The state of a move."""

    serving: Side  # the server that applications write to
    phase: Phase

    @property
    def following(self) -> Side:
        """The server that replicates the serving one."""
        return self.serving.other


class ContradictoryRows(ValueError):
    """Both servers claim to be the serving one, outside of a switch. No command leaves such rows."""


def standing(source: Standing | None, target: Standing | None) -> Standing:
    """Return where a move stands, from the rows of both servers. None: the server has no row.

    A server's own row decides whether it is open. A serving server stores SWITCHING before the other one opens, and
    gives the role up after that. So two servers that claim the role are in the middle of a switch.

    Raises:
        ContradictoryRows: both servers claim to be serving, and none is switching.
    """
    if source is None:
        # The first command has stored no row of the source yet, or the source was restored.
        return Standing(Side.SOURCE, Phase.FOLLOWING) if target is None else target
    if target is None or source.serving is target.serving:
        return source if source.serving is Side.SOURCE or target is None else target
    if source.serving is Side.SOURCE:
        claims = {Side.SOURCE: source, Side.TARGET: target}
        settled = [side for side, row in claims.items() if row.phase is not Phase.SWITCHING]
        if len(settled) != 1:
            raise ContradictoryRows(f"source: {source.phase}, target: {target.phase}")
        return claims[settled[0]]
    # Each gives the role to the other: only possible if a server was restored from a backup.
    raise ContradictoryRows(f"source: {source.phase}, target: {target.phase}; none claims to be serving")


def way(standing: Standing) -> list[str]:
    """Return the commands that are possible, the usual one first."""
    forward = "cutover" if standing.serving is Side.SOURCE else "back"
    match standing.phase:
        case Phase.FOLLOWING if standing.serving is Side.SOURCE:
            return ["cutover", "abort"]
        case Phase.FOLLOWING:
            return ["finish", "back"]
        case Phase.FROZEN:
            return [forward, "abort"]
        case Phase.SWITCHING:
            return [forward]
        case Phase.FINISHING:
            return ["finish"]
        case Phase.FINISHED:
            return []
