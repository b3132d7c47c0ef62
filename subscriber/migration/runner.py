"""StepRunner: run one step of a move, within its limit, with its events and its record on a server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import Any

import anyio
import asyncpg

from subscriber import telemetry
from subscriber.catalog.store import migrations
from subscriber.errors import SubscriberError
from subscriber.failpoints import Point, reached
from subscriber.migration.plan import STEP, Step, StepStage
from subscriber.migration.results import StepEvent
from subscriber.migration.server import MoveServer
from subscriber.migration.server_session import Note
from subscriber.migration.steps import Steps
from subscriber.sqlstate import QUERY_CANCELED

STEP_LIMIT = 600.0  # seconds for a step without a limit of its own, outside of the pause


class StepRunner:
    """Runs the steps of one command."""

    def __init__(self, migration: str, command: str, notes: list[Note], on_event: Callable[[StepEvent], None]) -> None:
        """Create a runner.

        Args:
            migration: the name of the move.
            command: of `subscriber migrate`.
            notes: where both servers note statements.
            on_event: called at the beginning and the end of each step.
        """
        self._migration = migration
        self._command = command
        self._notes = notes
        self._on_event = on_event
        self._unstored: list[tuple[StepEvent, MoveServer, float]] = []  # ended steps of the pause, with their ends

    async def run_planned(self, step: Step, steps: Steps) -> None:
        """Run a step of plan.STEPS. Outside of the pause, it has a limit of its own.

        Raises:
            SubscriberError: it failed, or has not ended within its limit.
        """
        server = steps.following if step.name in ("guard", "open", "redirect") else steps.serving
        work = getattr(steps, step.name)
        if step.stage is StepStage.PAUSE:
            await self.run(step.name, server, work)
            return
        limit = step.limit or STEP_LIMIT
        with anyio.move_on_after(limit) as scope:
            await self.run(step.name, server, work)
        if scope.cancelled_caught:
            raise SubscriberError(
                f"step {step.name} has not ended within {limit:.0f} s",
                detail=unfinished(step, steps),
                hint="Applications have noticed nothing. Remove the reason, then try again.",
                sqlstate=QUERY_CANCELED,
            )

    async def run(self, name: str, server: MoveServer, work: Callable[[], Awaitable[Mapping[str, Any] | None]]) -> None:
        """Run `work` as a step that is stored on a server."""
        began = monotonic()
        self._notes.clear()
        self._on_event(StepEvent(name, "begin"))
        # During the pause nothing waits for records: the rows of the move say where it stands.
        is_paused = name in STEP and STEP[name].stage is StepStage.PAUSE
        stepid = None if is_paused else await self._store_begin(name, server)
        try:
            detail = await work()
        except BaseException as error:
            reason = error.message if isinstance(error, SubscriberError) else type(error).__name__
            detail = {"statements": self.noted()}
            failed = StepEvent(name, "failed", monotonic() - began, detail, reason)
            self._on_event(failed)
            if is_paused:
                self._unstored.append((failed, server, monotonic()))
            with anyio.move_on_after(1, shield=True):
                await self._store_end(name, server, stepid, reason, detail)
            raise
        if point := Point.__members__.get(f"MIGRATE_{name.partition(' ')[0].upper()}"):
            await reached(point)
        seconds = monotonic() - began
        result = {**(detail or {}), "statements": self.noted(), "seconds": round(seconds, 4)}
        await self._store_end(name, server, stepid, None, result)
        done = StepEvent(name, "done", seconds, result)
        if is_paused:
            self._unstored.append((done, server, monotonic()))
        self._on_event(done)

    def noted(self) -> list[dict[str, str]]:
        """Return the statements of the step, and forget them."""
        statements = [{"on": note.side.value, "statement": note.statement} for note in self._notes]
        self._notes.clear()
        return statements

    async def store_pause(self) -> None:
        """Store the steps of the pause, when applications can write again."""
        steps, self._unstored = self._unstored, []
        for event, server, ended in steps:
            ago = monotonic() - ended
            with _recording(event.step, server):
                async with server.use() as connection:
                    await migrations.add_step(
                        connection,
                        self._migration,
                        self._command,
                        event.step,
                        (ago + event.seconds, ago),
                        event.error,
                        event.detail,
                    )

    async def _store_begin(self, name: str, server: MoveServer) -> int | None:
        """Store the beginning of a step. Returns None if that fails."""
        stepid = None
        with _recording(name, server):
            async with server.use() as connection:
                stepid = await migrations.begin_step(connection, self._migration, self._command, name)
        return stepid

    async def _store_end(
        self, name: str, server: MoveServer, stepid: int | None, error: str | None, detail: Mapping[str, Any]
    ) -> None:
        if stepid is None:
            return
        with _recording(name, server):
            async with server.use() as connection:
                await migrations.end_step(connection, stepid, error, detail)


@contextmanager
def _recording(step: str, server: MoveServer) -> Iterator[None]:
    """Log an error of the block as a warning. A lost server must not end a step that has done its work."""
    try:
        yield
    except (SubscriberError, asyncpg.PostgresError) as error:
        telemetry.log(
            telemetry.WARNING,
            f'step "{step}" of the move is not recorded on the {server.side.value}',
            detail=error.message if isinstance(error, SubscriberError) else str(error),
            hint="Its report lacks the step. If a later command says that start has not ended, run start again.",
            event="migrate.unrecorded",
        )


def unfinished(step: Step, steps: Steps) -> str:
    """Return a sentence about the condition that a step has waited for in vain."""
    sessions = [*steps.serving.unquiet, *steps.following.unquiet]
    if sessions:
        return f"Sessions do not end, or return: process {', '.join(map(str, sessions[:5]))}."
    if step.name == "gates" and steps.waits_for:
        return f"It waits for {steps.waits_for}."
    return f"It waits until: {step.waits or step.does}."
