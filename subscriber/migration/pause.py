"""Pause: the steps during which applications cannot write, and their undo."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

import anyio

from subscriber.display import shell_word
from subscriber.errors import ConnectionLost, StatementError, SubscriberError
from subscriber.exception_groups import root_cause
from subscriber.migration.plan import STEP, STEPS, Phase, Standing, Step, StepStage
from subscriber.migration.runner import StepRunner, unfinished
from subscriber.migration.server import MoveServer
from subscriber.migration.steps import Detail, Steps
from subscriber.sqlstate import OBJECT_NOT_IN_PREREQUISITE_STATE, QUERY_CANCELED

RECONNECT_PATIENCE = 30.0  # seconds to reach a server again that has to be opened, or asked whether it is open
RECONNECT_PAUSE = 0.2  # seconds
OPEN_LIMIT = 30.0  # seconds for the statement that opens a server


class Pause:
    """The pause of one command."""

    def __init__(self, runner: StepRunner, steps: Steps) -> None:
        """Create the pause of a command from its steps."""
        self._runner = runner
        self._steps = steps
        self.closed: float | None = None  # when this command has closed the fence of the serving server

    async def run(self) -> None:
        """Run the steps during which applications cannot write. Before the switch, any error is undone."""
        limit = self._steps.options.max_pause
        step = STEP["freeze"]
        try:
            with anyio.move_on_after(limit) as scope:
                for step in STEPS:
                    if step.stage is StepStage.PAUSE and step.name != "open":
                        await self._run_step(step)
            if scope.cancelled_caught:
                raise SubscriberError(
                    f"the pause has reached its limit of {limit:g} s in step {step.name}",
                    detail=unfinished(step, self._steps),
                    hint="Try again, or with a longer --max-pause.",
                    sqlstate=QUERY_CANCELED,
                )
        except BaseException as group:
            error = root_cause(group) if isinstance(group, Exception) else group
            with anyio.CancelScope(shield=True):
                await self._undo(error)
            if error is not group:
                raise error from group
            raise
        with anyio.CancelScope(shield=True):
            await self._open()

    async def _undo(self, error: BaseException) -> None:
        """Open the serving server after `error`. A failure is added to the error."""
        try:
            with anyio.fail_after(RECONNECT_PATIENCE):
                await self.undo()
        except (SubscriberError, TimeoutError) as failure:
            if isinstance(error, SubscriberError):
                reason = failure.message if isinstance(failure, SubscriberError) else "it did not answer in time"
                error.amend(
                    detail="\n".join(
                        filter(None, (error.detail, f"The {self._steps.serving.side} may still be fenced: {reason}."))
                    ),
                    hint="As soon as both servers can be reached: subscriber migrate abort",
                )
        else:
            await self._runner.store_pause()
            if isinstance(error, SubscriberError):
                said = f"Applications can write to the {self._steps.serving.side} again."
                error.amend(detail="\n".join(filter(None, (error.detail, said))))

    async def undo(self) -> None:
        """Open the serving server, as a step.

        Raises:
            StatementError: applications already write to the other server.
            ConnectionLost: the serving server cannot be reached.
        """
        await self._runner.run("undo", self._steps.serving, self._give_back)

    async def _give_back(self) -> Detail:
        """Open the serving server, and have the following one continue, if that can be reached."""
        steps = self._steps
        await self._persist(steps.serving, self._reopen)
        detail: Detail = {}
        try:
            await steps.release_applications()
        except SubscriberError as error:
            detail["unfinished"] = f"the hooks to resume: {error.message}"
        try:
            await self._persist(steps.following, steps.resume_following, patience=1.0)
        except SubscriberError as error:
            detail["unfinished"] = f"the subscription of the {steps.following.side}: {error.message}"
        return detail

    async def _reopen(self) -> None:
        """Open the serving server, unless another command has moved the applications since the sessions were lost.

        Raises:
            StatementError: the other server is open.
        """
        steps = self._steps
        row = await steps.serving.load()
        present = steps.before if row is None else row.standing
        if present == Standing(steps.serving.side, Phase.SWITCHING):
            other = await self._persist(steps.following, steps.following.load)
            present = present if other is None else other.standing
        if present.serving is not steps.serving.side:
            raise StatementError(
                f"applications already write to the {present.serving}",
                hint=f"See: subscriber migrate status {shell_word(steps.serving.migration)}",
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )
        await steps.serving.open_fence(steps.before)

    async def _persist(self, server: MoveServer, work: Callable[[], Any], patience: float = RECONNECT_PATIENCE) -> Any:
        """Run `work`, and reconnect to the server while the connection is lost."""
        deadline = monotonic() + patience
        while True:
            try:
                if not server.is_connected:
                    await server.connect()
                return await work()
            except ConnectionLost:
                await server.close()
                if monotonic() >= deadline:
                    raise
                await anyio.sleep(RECONNECT_PAUSE)

    async def _open(self) -> None:
        """Open the following server. If the answer is lost, its row says whether it is open."""
        following = self._steps.following
        try:
            with anyio.fail_after(OPEN_LIMIT):
                await self._run_step(STEP["open"])
            return
        except TimeoutError:
            await following.close()
            error: SubscriberError = ConnectionLost(f"the {following.side} has not answered for {OPEN_LIMIT:.0f} s")
        except SubscriberError as failure:
            error = failure
        try:
            row = await self._persist(following, following.load)
        except SubscriberError:
            error.amend(
                detail=f"It is not known whether the {following.side} is open. Both servers may be fenced.",
                hint=f"As soon as the {following.side} can be reached: subscriber migrate {self._steps.command}",
            )
            raise error from None
        if row is not None and row.standing == self._steps.after:
            return
        await self._undo(error)
        raise error

    async def _run_step(self, step: Step) -> None:
        if step.name == "freeze":
            self.closed = None if await self._steps.serving.is_closed() else monotonic()
        await self._runner.run_planned(step, self._steps)
