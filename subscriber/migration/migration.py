"""move_database(): move a database between two servers, step by step, from an async program."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

import anyio

from subscriber.catalog import identity, worker_sessions
from subscriber.catalog.commands.execute import execute
from subscriber.catalog.grammar.options import check_slot_name
from subscriber.catalog.store.subscriptions import load_subscriptions
from subscriber.display import shell_word
from subscriber.errors import ConnectionLost, StatementError, SubscriberError
from subscriber.exception_groups import root_cause
from subscriber.failpoints import Point, reach
from subscriber.migration import fence, plan
from subscriber.migration.gates import check_waivers
from subscriber.migration.pause import Pause
from subscriber.migration.plan import STEP, STEPS, ContradictoryRows, Phase, Side, Standing, StepStage
from subscriber.migration.planned import PlannedServer, PlannedStartSteps, PlannedSteps, PlanRunner
from subscriber.migration.results import MigrationStatus, MoveResult, Rehearsal, ServerStatus, StepEvent
from subscriber.migration.runner import StepRunner
from subscriber.migration.running_command import Result, RunningCommand, run_command
from subscriber.migration.server import MoveServer
from subscriber.migration.server_session import Note
from subscriber.migration.start import StartOptions, StartSteps, unfinished_step
from subscriber.migration.steps import Detail, MoveOptions, Steps
from subscriber.quoting import identifier
from subscriber.remedy import Remedy
from subscriber.settings import Settings
from subscriber.sqlstate import DATA_CORRUPTED, OBJECT_NOT_IN_PREREQUISITE_STATE, QUERY_CANCELED

if TYPE_CHECKING:
    from subscriber.migration.launchers import MoveLaunchers


@asynccontextmanager
async def move_database(
    source: str,
    target: str,
    name: str,
    *,
    back_name: str | None = None,
    options: MoveOptions | None = None,
    run: bool = True,
    partial: bool = False,
    dry_run: bool = False,
    settings: Settings | None = None,
) -> AsyncIterator[Migration]:
    """Connect to both servers of a move. Other commands that move the database wait until the end of the block.

    Args:
        source: the connection string of the database that moves. Its role owns the database and schema "subscriber",
            or is a superuser.
        target: the same of the new server.
        name: the subscription on the target, which replicates the source.
        back_name: the subscription on the source, which is created for the way back. None: the name with "_back".
        options: limits of the pause and of the conditions before it. None: MoveOptions().
        run: run the subscriptions of both servers in this process while no other launcher does.
        dry_run: change nothing. The commands report each step with its statements, as an event in state "planned".
        partial: continue if one server cannot be reached. status() and abort() may do without it.
        settings: of the launchers that run the subscriptions in this process. None: Settings.from_environment().
            StartOptions.jobs replaces `max_sync_workers` and `index_sessions`.

    Raises:
        ConnectionLost: a server cannot be reached, or with `partial` both.
        StatementError: a role may not move the database, or another command does.
    """
    notes: list[Note] = []
    kind = PlannedServer if dry_run else MoveServer
    servers = {side: kind(side, dsn, name, notes) for side, dsn in ((Side.SOURCE, source), (Side.TARGET, target))}
    chosen = options or MoveOptions()
    check_waivers(chosen.waive)
    if dry_run:
        chosen = replace(chosen, max_pause=inf)
    own = settings or Settings.from_environment() if run and not dry_run else None  # of the launchers
    moving = Migration(name, back_name or f"{name}_back", servers, chosen, notes, dry_run=dry_run)
    async with AsyncExitStack() as stack:
        for server in servers.values():
            stack.push_async_callback(server.close)
            try:
                await server.open()
            except ConnectionLost as error:
                if not partial:
                    raise
                server.unreachable = error
        if all(server.unreachable for server in servers.values()):
            raise next(server.unreachable for server in servers.values() if server.unreachable)
        reached = [server for server in servers.values() if server.is_connected]
        if len(reached) == len(servers):
            async with servers[Side.SOURCE].use() as there, servers[Side.TARGET].use() as here:
                await identity.refuse_same_database(there, here)
        try:
            async with anyio.create_task_group() as tasks:
                for server in reached:
                    tasks.start_soon(server.prepare)
        except ExceptionGroup as errors:
            raise root_cause(errors) from None
        for server in reached:
            await server.lock()
        if own is None:
            yield moving
            return
        # A launcher needs a hundred modules, and most commands of a move run none.
        from subscriber.migration.launchers import MoveLaunchers

        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            moving.launchers = MoveLaunchers(tasks, own)
            for server in reached:
                moving.launchers.start(server.side, server.dsn)
            try:
                yield moving
            except Exception as error:
                failure = error  # raised below, and not as a member of a group
            finally:
                tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure


class Migration:
    """The move of a database between two servers, which move_database() creates, for one task at a time."""

    def __init__(
        self,
        name: str,
        back_name: str,
        servers: Mapping[Side, MoveServer],
        options: MoveOptions,
        notes: list[Note],
        *,
        dry_run: bool,
    ) -> None:
        self.name = name
        self.back_name = back_name
        self._servers = servers
        self._options = options
        self._on_event: Callable[[StepEvent], None] = lambda _: None  # takes the events of the running command
        self._notes = notes
        self._dry_run = dry_run
        self.launchers: MoveLaunchers | None = None  # None: this process runs none

    @asynccontextmanager
    async def running(self, command: Awaitable[Result]) -> AsyncIterator[RunningCommand[Result]]:
        """Run a command of this move during the block, and iterate over its events.

        Args:
            command: a call that has not been awaited, such as `move.cutover()`.

        Returns:
            An async iterator of StepEvent, with the `result` of the command after the last event.

        Raises:
            SubscriberError: the error of the command: by the iteration after the last event, or else by the block.

        Cancellation: cancels the command, as an early end of the block and RunningCommand.cancel() do. The block ends
            when the command has undone what it undoes when it is canceled.
        """

        def listen(on_event: Callable[[StepEvent], None]) -> None:
            self._on_event = on_event

        try:
            async with run_command(command, listen) as running:
                yield running
        finally:
            self._on_event = lambda _: None

    async def standing(self) -> Standing:
        """Return where the move stands, from the rows of both servers.

        Raises:
            SubscriberError: the rows contradict each other, as after a restore of one server from a backup.
        """
        reached = {side: server for side, server in self._servers.items() if server.is_connected}
        rows = {side: await server.load() for side, server in reached.items()}
        for side, server in self._servers.items():
            if side not in rows:
                own = rows[side.other]
                if own is None or own.standing.serving is side or own.standing.phase is Phase.SWITCHING:
                    assert server.unreachable is not None
                    raise server.unreachable
                rows[side] = None
        standings = {side: None if row is None else row.standing for side, row in rows.items()}
        try:
            return plan.standing(standings[Side.SOURCE], standings[Side.TARGET])
        except ContradictoryRows as error:
            raise SubscriberError(
                f"the servers disagree about the move {self.name}",
                detail=f"{error}.",
                hint="Find out which server applications write to. The row of the other one was restored from a backup:"
                " correct it in table migration of schema subscriber.",
                sqlstate=DATA_CORRUPTED,
            ) from error

    async def status(self) -> MigrationStatus:
        """Return where the move stands, and what is true of both servers."""
        standing = await self.standing()
        servers = []
        for side, server in self._servers.items():
            if not server.is_connected:
                continue
            row = await server.load()
            closed = await server.is_closed()
            async with server.use() as connection:
                tables = await connection.fetch(fence.FENCED)
                leader = await worker_sessions.leader(connection)
                launchers = await worker_sessions.count_launchers(connection)
                subscriptions = await load_subscriptions(connection)
            servers.append(
                ServerStatus(
                    side,
                    {None: "none", False: "open", True: "closed"}[closed],
                    len(tables),
                    leader is not None,
                    launchers > 1,
                    {
                        subscription.name: subscription.enabled
                        for subscription in subscriptions
                        if subscription.name in (self.name, self.back_name)
                    },
                    None if row is None or row.facts.stopped is None else str(row.facts.stopped.at),
                )
            )
        step, commands = await self._interrupted(standing), plan.way(standing)
        if standing.phase is Phase.FOLLOWING:
            if step is not None:
                commands = ["start", "abort"]
            elif not await self._is_followed(standing):
                commands = ["start"] if standing.serving is Side.SOURCE else ["finish"]
        return MigrationStatus(standing, tuple(servers), tuple(commands), step)

    async def _interrupted(self, standing: Standing) -> str | None:
        """Return the step with which `start` has to continue, or None."""
        target = self._servers[Side.TARGET]
        if standing != Standing(Side.SOURCE, Phase.FOLLOWING) or not target.is_connected:
            return None
        return await unfinished_step(target)

    async def _is_followed(self, standing: Standing) -> bool:
        """Return True if the following server has its subscription, or cannot be reached."""
        following = self._servers[standing.following]
        if not following.is_connected:
            return True
        try:
            await following.subscription(self._name_on(following.side))
        except StatementError:
            return False
        return True

    async def is_started(self) -> bool:
        """Return True if the target has the subscription that replicates the source."""
        return await self._is_followed(Standing(Side.SOURCE, Phase.FOLLOWING))

    async def start(self, options: StartOptions | None = None) -> None:
        """Bring an empty target to the point where it follows the source. A repeated call continues.

        Args:
            options: None: StartOptions().

        Raises:
            StatementError: the preflight has found obstacles, the target has some of the tables, applications have
                moved, or a slot cannot have the name of the move.
            SubscriberError: a step failed. Steps before it are done.

        Cancellation: safe. Call it again.
        """
        for name in (self.name, self.back_name):
            check_slot_name(name)
        standing = await self.standing()
        if standing != Standing(Side.SOURCE, Phase.FINISHED):  # the move was given up, and can begin again
            _refuse_ended(standing, self.name)
            _refuse_interrupted(standing, self.name)
            _refuse_moved(standing, self.name)
        source, target = (self._servers[side] for side in Side)

        def on_left(tables: int) -> None:
            self._on_event(StepEvent("copy", "progress", detail={"tables_left": tables}))

        chosen = options or StartOptions()
        if self.launchers is not None:
            await self.launchers.set_jobs(Side.TARGET, chosen.jobs)
        kind = PlannedStartSteps if self._dry_run else StartSteps
        steps = kind(self.name, source, target, chosen, on_left)
        runner = self._runner("start")
        for step in plan.START:
            await runner.run(step.name, target, getattr(steps, step.name))

    async def verify(self) -> None:
        """Compare all rows of both servers while applications write, and store the result for `verified_within`.

        Raises:
            SubscriberError: tables differ.
        """
        standing = await self._resolved("verify")
        _refuse_ended(standing, self.name)
        steps = self._steps(standing, "verify")
        await self._runner("verify").run("verify", steps.following, steps.compare)

    async def rehearse(self, *, freeze: bool = False) -> Rehearsal:
        """Do all steps up to the pause, and measure what the pause would take.

        Args:
            freeze: also fence the serving server, end its sessions, and open it again. The pause is real then.
                False: applications notice nothing.

        Raises:
            SubscriberError: a condition for the move is not met, or with `freeze` the pause was too long.
        """
        standing = await self._resolved("rehearse")
        _refuse_ended(standing, self.name)
        runner, steps = self._runner("rehearse"), self._steps(standing, "rehearse")
        for step in STEPS:
            if step.stage is StepStage.BEFORE:
                await runner.run_planned(step, steps)
        names = ("hold", "freeze", "quiet", "drain", "sequences") if freeze else ("drain",)
        seconds: dict[str, float] = {}
        began = monotonic()
        try:
            with anyio.fail_after(self._options.max_pause):
                for name in names:
                    at = monotonic()
                    await runner.run_planned(STEP[name], steps)
                    seconds[name] = monotonic() - at
        except TimeoutError:
            raise SubscriberError(
                f"the pause would last longer than {self._options.max_pause:g} s",
                detail=f"The first steps took: {seconds}.",
                sqlstate=QUERY_CANCELED,
            ) from None
        finally:
            if freeze:
                with anyio.CancelScope(shield=True):
                    await Pause(runner, steps).undo()
            await runner.store_pause()
        return Rehearsal(sum(seconds.values()), monotonic() - began if freeze else None, seconds)

    async def cutover(self) -> MoveResult:
        """Move the applications to the target. Continues a move that was interrupted.

        Raises:
            StatementError: a condition for the move is not met. Applications have noticed nothing.
            SubscriberError: the move failed, and the source is open again. The detail says so if it is not.
            ConnectionLost: a server is lost, see above.

        Cancellation: before the switch, the source is opened again.
        """
        return await self._move("cutover", Side.TARGET)

    async def back(self) -> MoveResult:
        """Move the applications back to the source, see cutover()."""
        return await self._move("back", Side.SOURCE)

    async def abort(self) -> Standing:
        """Open the serving server, and remove its fence and the way back.

        The other server stays fenced, and replicates the serving one as before.

        Raises:
            StatementError: applications already write to the other server, or the move is finished.
        """
        await self._refuse_unknown()
        standing = await self._resolved("abort")
        _refuse_ended(standing, self.name)
        _refuse_moved(standing, self.name)
        runner, steps = self._runner("abort"), self._steps(standing, "abort")
        await Pause(runner, steps).undo()
        await runner.run("abort", steps.serving, lambda: self._remove(steps))
        return steps.before

    async def _remove(self, steps: Steps) -> Detail:
        """Remove the way back, and the fence of the serving server."""
        if steps.following.is_connected:
            await steps.release_way_back()
        await steps.serving.drop_fence()
        return {}

    async def finish(self, *, release: bool = False) -> Standing:
        """End the move: drop both subscriptions and their publications, and remove the fence of the serving server.

        A publication that existed before the move stays. A killed call has to be repeated: no other command continues.

        Args:
            release: also open the other server. Its rows are no longer those of the serving one.

        Raises:
            StatementError: a move is interrupted; `cutover`, `back` or `abort` ends it.
        """
        await self._refuse_unknown()
        standing = await self._resolved("finish")
        _refuse_interrupted(standing, self.name)
        ending, done = (Standing(standing.serving, phase) for phase in (Phase.FINISHING, Phase.FINISHED))
        runner, steps = self._runner("finish"), self._steps(standing, "finish")
        if standing.phase is Phase.FOLLOWING:
            await steps.serving.save(ending)
        for server, other, name in (
            (steps.serving, steps.following, self._name_on(standing.serving)),
            (steps.following, steps.serving, self._name_on(standing.following)),
        ):
            await runner.run(f"drop {name}", server, partial(_drop, server, other, name, ending))

        async def end() -> Detail:
            await steps.serving.drop_fence()
            if release:
                await steps.following.open_fence(done)
                await steps.following.drop_fence()
                reach(Point.MIGRATE_RELEASE)
            await steps.following.save(done)
            await steps.serving.save(done)
            return {}

        await runner.run("end", steps.serving, end)
        return done

    async def _refuse_unknown(self) -> None:
        """Refuse a name that no server knows, for example one that is mistyped."""
        if not await self.is_started() and not any(
            [await server.load() for server in self._servers.values() if server.is_connected]
        ):
            await self._servers[Side.TARGET].subscription(self.name)

    def _name_on(self, side: Side) -> str:
        return self.name if side is Side.TARGET else self.back_name

    def _steps(self, standing: Standing, command: str) -> Steps:
        names = {side: self._name_on(side) for side in Side}
        kind = PlannedSteps if self._dry_run else Steps
        return kind(names, self._servers, standing.serving, self._options, command)

    def _runner(self, command: str) -> StepRunner:
        kind = PlanRunner if self._dry_run else StepRunner
        return kind(self.name, command, self._notes, self._on_event)

    async def _move(self, command: str, to: Side) -> MoveResult:
        standing = await self._resolved(command)
        _refuse_ended(standing, self.name)
        if standing.serving is to:
            return MoveResult(to, None, None, await self._repeat_hooks(command, standing))
        await self._refuse_unstarted(standing)
        runner, steps = self._runner(command), self._steps(standing, command)
        for step in STEPS:
            if step.stage is StepStage.BEFORE:
                await runner.run_planned(step, steps)
        pause = Pause(runner, steps)
        await pause.run()
        seconds = None if pause.closed is None else monotonic() - pause.closed
        await runner.store_pause()
        warnings = []
        for step in STEPS:
            if step.stage is StepStage.AFTER:
                try:
                    await runner.run_planned(step, steps)
                except SubscriberError as error:
                    warnings.append(f"{step.name}: {error.message}")
        return MoveResult(to, seconds, str(steps.position), tuple(warnings))

    async def _refuse_unstarted(self, standing: Standing) -> None:
        """Refuse to move applications to a server that still lacks indexes, for example, because `start` was killed."""
        step = await self._interrupted(standing) if await self.is_started() else None
        if step is not None:
            raise StatementError(
                f"start has not ended: its step {step} is left",
                hint=f"Continue it: subscriber migrate start {shell_word(self.name)}",
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )

    async def _repeat_hooks(self, command: str, standing: Standing) -> tuple[str, ...]:
        """Call the hooks of a move that has happened, if they were not called, or failed. Returns warnings."""
        row = await self._servers[standing.serving].load()
        if row is None or not row.facts.redirect:
            return ()
        if not self._options.hooks:
            return ("hooks are due that were given to a former command",)
        former = Standing(standing.following, Phase.FOLLOWING)
        try:
            await self._runner(command).run_planned(STEP["redirect"], self._steps(former, command))
        except SubscriberError as error:
            return (f"redirect: {error.message}",)
        return ()

    async def _resolved(self, command: str) -> Standing:
        """Return where the move stands, after the last steps of a move that was interrupted behind its switch."""
        standing = await self.standing()
        following = self._servers[standing.following]
        former = await following.load() if following.is_connected else None
        if former is not None and former.standing.serving is standing.following:
            await self._runner(command).run_planned(STEP["settle"], self._steps(former.standing, command))
        return standing


def _refuse_ended(standing: Standing, name: str) -> None:
    if standing.phase is Phase.FINISHING:
        raise StatementError(
            "the move ends, and its way back may be gone",
            hint=Remedy("Continue", f"subscriber migrate finish {shell_word(name)}"),
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )
    if standing.phase is Phase.FINISHED:
        raise StatementError(
            f"the move is finished, and the {standing.serving} has the database",
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )


def _refuse_interrupted(standing: Standing, name: str) -> None:
    if standing.phase.is_paused:
        commands = [f"subscriber migrate {command} {shell_word(name)}" for command in plan.way(standing)]
        undo = Remedy("Undo it", commands[1]) if len(commands) > 1 else None
        raise StatementError(
            "the move is interrupted, and applications cannot write",
            hint=Remedy("Continue it", commands[0], alternative=undo),
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )


def _refuse_moved(standing: Standing, name: str) -> None:
    """Refuse what would fence the target while applications write there."""
    if standing == Standing(Side.TARGET, Phase.FOLLOWING):
        raise StatementError(
            "applications already write to the target",
            hint=Remedy("To return", f"subscriber migrate back {shell_word(name)}"),
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )


async def _drop(server: MoveServer, publisher: MoveServer, name: str, standing: Standing) -> Detail:
    """Drop a subscription, and the publication that the move has created for it."""
    drop = f"DROP SUBSCRIPTION IF EXISTS {identifier(name)}"

    async def work() -> None:
        async with server.use() as connection:
            await execute(connection, drop, notice=lambda *_: None)

    await server.perform(drop, work)
    await publisher.drop_publications(standing)
    return {}
