"""move_database(): move a database between two servers, step by step, from an async program."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import anyio
import asyncpg

from subscriber import telemetry
from subscriber.catalog import worker_sessions
from subscriber.catalog.commands.execute import execute
from subscriber.catalog.store import migrations
from subscriber.catalog.store.subscriptions import load_subscriptions
from subscriber.errors import ConnectionLost, StatementError, SubscriberError
from subscriber.failpoints import Point, reach
from subscriber.migration import fence, plan
from subscriber.migration.plan import STEP, STEPS, ContradictoryRows, Phase, Side, Standing, Step, StepStage
from subscriber.migration.server import MoveServer
from subscriber.migration.start import StartOptions, StartSteps
from subscriber.migration.steps import Detail, MoveOptions, Steps
from subscriber.quoting import identifier
from subscriber.settings import Settings
from subscriber.sqlstate import DATA_CORRUPTED, OBJECT_NOT_IN_PREREQUISITE_STATE, QUERY_CANCELED
from subscriber.worker.exception_groups import root_cause
from subscriber.worker.supervision.launcher import Launcher

RECONNECT_PATIENCE = 30.0  # seconds to reach a server again that has to be opened, or asked whether it is open
RECONNECT_PAUSE = 0.2  # seconds
OPEN_LIMIT = 30.0  # seconds for the statement that opens a server
STEP_LIMIT = 600.0  # seconds for a step without a limit of its own, outside of the pause


@dataclass(frozen=True, slots=True)
class StepEvent:
    """A step of a move has begun or ended.

    Attributes:
        step: its name (plan.STEPS), or "undo".
        state: "begin", "progress", "done" or "failed".
        seconds: since its beginning.
        detail: `statements`, `lsn` and figures of the step.
        error: the reason why it failed.
    """

    step: str
    state: str
    seconds: float = 0.0
    detail: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


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
    """What a pause would take.

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
    subscriptions: Mapping[str, bool]  # by name: whether it is enabled
    stopped_at: str | None  # the position at which its subscription was disabled


@dataclass(frozen=True, slots=True)
class MigrationStatus:
    """Where a move stands, and the commands that are possible, the usual one first."""

    standing: Standing
    servers: tuple[ServerStatus, ...]
    commands: tuple[str, ...]


@asynccontextmanager
async def move_database(
    source: str,
    target: str,
    name: str,
    *,
    back_name: str | None = None,
    options: MoveOptions | None = None,
    on_event: Callable[[StepEvent], None] = lambda _: None,
    run: bool = True,
    partial: bool = False,
) -> AsyncIterator[Migration]:
    """Connect to both servers of a move. Other commands that move the database wait until the end of the block.

    Args:
        source: the connection string of the database that moves. Its role owns the database and schema "subscriber",
            or is a superuser.
        target: the same of the new server.
        name: the subscription on the target, which replicates the source.
        back_name: the subscription on the source, which is created for the way back. None: the name with "_back".
        options: limits of the pause and of the conditions before it. None: MoveOptions().
        on_event: called at the beginning and the end of each step.
        run: run the subscriptions of both servers in this process while no other launcher does.
        partial: continue if one server cannot be reached. status() and abort() may do without it.

    Raises:
        ConnectionLost: a server cannot be reached, or with `partial` both.
        StatementError: a role may not move the database, or another command does.
    """
    servers = {Side.SOURCE: MoveServer(Side.SOURCE, source, name), Side.TARGET: MoveServer(Side.TARGET, target, name)}
    moving = Migration(name, back_name or f"{name}_back", servers, options or MoveOptions(), on_event)
    async with AsyncExitStack() as stack:
        for server in servers.values():
            stack.push_async_callback(server.close)
            try:
                await server.connect()
            except ConnectionLost as error:
                if not partial:
                    raise
                server.unreachable = error
        if all(server.unreachable for server in servers.values()):
            raise next(server.unreachable for server in servers.values() if server.unreachable)
        if not run:
            yield moving
            return
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            for server in servers.values():
                if server.is_connected:
                    tasks.start_soon(_run_launcher, server, moving.leading)
            try:
                yield moving
            except Exception as error:
                failure = error  # raised below, and not as a member of a group
            finally:
                tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure


async def _run_launcher(server: MoveServer, leading: set[Side]) -> None:
    """Run a launcher, which is a standby while another one leads. A move without a launcher fails by its limits."""
    settings = Settings(empty_database_poll_interval=0.5)
    try:
        await Launcher(server.dsn, settings=settings).run(lambda: leading.add(server.side))
    except SubscriberError as error:
        telemetry.log_error(error, telemetry.WARNING, worker="launcher", event="launcher.lost")


class Migration:
    """The move of a database between two servers, which move_database() creates, for one task at a time."""

    def __init__(
        self,
        name: str,
        back_name: str,
        servers: Mapping[Side, MoveServer],
        options: MoveOptions,
        on_event: Callable[[StepEvent], None],
    ) -> None:
        self.name = name
        self.back_name = back_name
        self._servers = servers
        self._options = options
        self._on_event = on_event
        self.leading: set[Side] = set()  # servers on which a launcher of this process leads, or has led
        self._unstored: list[tuple[StepEvent, MoveServer, float]] = []  # ended steps of the pause, with their ends
        self._closed: float | None = None  # when this command has closed the fence of the serving server

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
        found = {side: None if row is None else row.standing for side, row in rows.items()}
        try:
            return plan.standing(found[Side.SOURCE], found[Side.TARGET])
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
                found = await load_subscriptions(connection)
            servers.append(
                ServerStatus(
                    side,
                    {None: "none", False: "open", True: "closed"}[closed],
                    len(tables),
                    leader is not None,
                    {one.name: one.enabled for one in found if one.name in (self.name, self.back_name)},
                    None if row is None else row.facts.get("stopped_at"),
                )
            )
        return MigrationStatus(standing, tuple(servers), tuple(plan.way(self.name, standing)))

    async def start(self, options: StartOptions | None = None) -> None:
        """Bring an empty target to the point where it follows the source. A repeated call continues.

        Args:
            options: None: StartOptions().

        Raises:
            StatementError: the preflight has found obstacles, or the target has some of the tables.
            SubscriberError: a step failed. Steps before it are done.

        Cancellation: safe. Call it again.
        """
        source, target = (self._servers[side] for side in Side)

        def on_left(tables: int) -> None:
            self._on_event(StepEvent("copy", "progress", detail={"tables_left": tables}))

        steps = StartSteps(self.name, source, target, options or StartOptions(), on_left)
        for step in plan.START:
            await self._run_step("start", step.name, target, getattr(steps, step.name))

    async def rehearse(self, *, freeze: bool = False) -> Rehearsal:
        """Do all steps up to the pause, and measure what the pause would take.

        Args:
            freeze: also fence the serving server, end its sessions, and open it again. The pause is real then.
                False: applications notice nothing.

        Raises:
            SubscriberError: a condition for the move is not met, or with `freeze` the pause was too long.
        """
        standing = await self._resolved("rehearse")
        _refuse_finished(standing)
        steps = self._steps(standing, "rehearse")
        for step in STEPS:
            if step.stage is StepStage.BEFORE:
                await self._step("rehearse", step, steps)
        names = ("hold", "freeze", "quiet", "drain", "sequences") if freeze else ("drain",)
        seconds: dict[str, float] = {}
        began = monotonic()
        try:
            with anyio.fail_after(self._options.max_pause):
                for name in names:
                    at = monotonic()
                    await self._step("rehearse", STEP[name], steps)
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
                    await self._run_step("rehearse", "undo", steps.serving, lambda: self._give_back(steps))
            await self._store_pause("rehearse")
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
        standing = await self._resolved("abort")
        _refuse_finished(standing)
        if standing == Standing(Side.TARGET, Phase.FOLLOWING):
            raise StatementError(
                "applications already write to the target",
                hint="To return: subscriber migrate back",
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )
        steps = self._steps(standing, "abort")
        await self._run_step("abort", "undo", steps.serving, lambda: self._give_back(steps))
        if steps.following.is_connected:
            await steps.release_way_back()
        await steps.serving.drop_fence()
        return steps.before

    async def finish(self, *, release: bool = False) -> Standing:
        """End the move: drop both subscriptions, and remove the fence of the serving server.

        Args:
            release: also open the other server. Its rows are no longer those of the serving one.

        Raises:
            StatementError: a move is interrupted; `cutover`, `back` or `abort` ends it.
        """
        standing = await self._resolved("finish")
        if standing.phase.is_paused:
            raise StatementError(
                "the move is interrupted, and applications cannot write",
                hint=f"Continue or undo it: {' or '.join(plan.way(self.name, standing))}.",
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )
        done = Standing(standing.serving, Phase.FINISHED)
        steps = self._steps(standing, "finish")
        for server, other, name in (
            (steps.serving, steps.following, self._name_on(standing.serving)),
            (steps.following, steps.serving, self._name_on(standing.following)),
        ):
            await self._run_step("finish", f"drop {name}", server, lambda s=server, o=other, n=name: _drop(s, o, n))  # type: ignore[misc]
        await steps.serving.drop_fence()
        if release:
            await steps.following.open_fence(done)
            await steps.following.drop_fence()
        await steps.following.save(done)
        await steps.serving.save(done)
        return done

    def _name_on(self, side: Side) -> str:
        return self.name if side is Side.TARGET else self.back_name

    def _steps(self, standing: Standing, command: str) -> Steps:
        names = {side: self._name_on(side) for side in Side}
        return Steps(names, self._servers, standing.serving, self._options, command)

    async def _move(self, command: str, to: Side) -> MoveResult:
        standing = await self._resolved(command)
        _refuse_finished(standing)
        if standing.serving is to:
            return MoveResult(to, None, None, await self._repeat_hooks(command, standing))
        steps = self._steps(standing, command)
        for step in STEPS:
            if step.stage is StepStage.BEFORE:
                await self._step(command, step, steps)
        await self._pause(command, steps)
        pause = None if self._closed is None else monotonic() - self._closed
        await self._store_pause(command)
        warnings = []
        for step in STEPS:
            if step.stage is StepStage.AFTER:
                try:
                    await self._step(command, step, steps)
                except SubscriberError as error:
                    warnings.append(f"{step.name}: {error.message}")
        return MoveResult(to, pause, str(steps.position), tuple(warnings))

    async def _repeat_hooks(self, command: str, standing: Standing) -> tuple[str, ...]:
        """Call the hooks of a move that has happened, if they were not called, or failed. Returns warnings."""
        row = await self._servers[standing.serving].load()
        if row is None or "redirect" not in row.facts:
            return ()
        if not self._options.hooks:
            return ("hooks are due that were given to a former command",)
        former = Standing(standing.following, Phase.FOLLOWING)
        try:
            await self._step(command, STEP["redirect"], self._steps(former, command))
        except SubscriberError as error:
            return (f"redirect: {error.message}",)
        return ()

    async def _resolved(self, command: str) -> Standing:
        """Return where the move stands, after the last steps of a move that was interrupted behind its switch."""
        standing = await self.standing()
        following = self._servers[standing.following]
        former = await following.load() if following.is_connected else None
        if former is not None and former.standing.serving is standing.following:
            await self._step(command, STEP["settle"], self._steps(former.standing, command))
        return standing

    # --- the pause ----------------------------------------------------------------------------------------

    async def _pause(self, command: str, steps: Steps) -> None:
        """Run the steps during which applications cannot write. Before the switch, any error is undone."""
        limit = self._options.max_pause
        step = STEP["freeze"]
        self._closed = None
        try:
            with anyio.move_on_after(limit) as scope:
                for step in STEPS:
                    if step.stage is StepStage.PAUSE and step.name != "open":
                        await self._step(command, step, steps)
            if scope.cancelled_caught:
                raise SubscriberError(
                    f"the pause has reached its limit of {limit:g} s in step {step.name}",
                    detail=_unfinished(step, steps),
                    hint="Try again, or with a longer --max-pause.",
                    sqlstate=QUERY_CANCELED,
                )
        except BaseException as group:
            error = root_cause(group) if isinstance(group, Exception) else group
            with anyio.CancelScope(shield=True):
                await self._undo(command, steps, error)
            if error is not group:
                raise error from group
            raise
        with anyio.CancelScope(shield=True):
            await self._open(command, steps)

    async def _undo(self, command: str, steps: Steps, error: BaseException) -> None:
        """Open the serving server after `error`. A failure is added to the error."""
        try:
            with anyio.fail_after(RECONNECT_PATIENCE):
                await self._run_step(command, "undo", steps.serving, lambda: self._give_back(steps))
        except (SubscriberError, TimeoutError) as failure:
            if isinstance(error, SubscriberError):
                reason = failure.message if isinstance(failure, SubscriberError) else "it did not answer in time"
                error.detail = "\n".join(
                    filter(None, (error.detail, f"The {steps.serving.side} may still be fenced: {reason}."))
                )
                error.hint = "As soon as both servers can be reached: subscriber migrate abort"
        else:
            await self._store_pause(command)
            if isinstance(error, SubscriberError):
                said = f"Applications can write to the {steps.serving.side} again."
                error.detail = "\n".join(filter(None, (error.detail, said)))

    async def _give_back(self, steps: Steps) -> Detail:
        """Open the serving server, and have the following one continue, if that can be reached."""
        statements = await self._persist(steps.serving, lambda: self._reopen(steps))
        detail: Detail = {"statements": statements}
        try:
            await steps.release_applications()
        except SubscriberError as error:
            detail["unfinished"] = f"the hooks to resume: {error.message}"
        try:
            await self._persist(steps.following, steps.resume_following, patience=1.0)
        except SubscriberError as error:
            detail["unfinished"] = f"the subscription of the {steps.following.side}: {error.message}"
        return detail

    async def _reopen(self, steps: Steps) -> list[str]:
        """Open the serving server, unless another command has moved the applications since the sessions were lost.

        Raises:
            StatementError: the other server is open.
        """
        row = await steps.serving.load()
        present = steps.before if row is None else row.standing
        if present == Standing(steps.serving.side, Phase.SWITCHING):
            other = await self._persist(steps.following, steps.following.load)
            present = present if other is None else other.standing
        if present.serving is not steps.serving.side:
            raise StatementError(
                f"applications already write to the {present.serving}",
                hint=f"See: subscriber migrate status {self.name}",
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )
        return await steps.serving.open_fence(steps.before)

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

    async def _open(self, command: str, steps: Steps) -> None:
        """Open the following server. If the answer is lost, its row says whether it is open."""
        following = steps.following
        try:
            with anyio.fail_after(OPEN_LIMIT):
                await self._step(command, STEP["open"], steps)
            return
        except TimeoutError:
            await following.close()
            error: SubscriberError = ConnectionLost(f"the {following.side} has not answered for {OPEN_LIMIT:.0f} s")
        except SubscriberError as failure:
            error = failure
        try:
            row = await self._persist(following, following.load)
        except SubscriberError:
            error.detail = f"It is not known whether the {following.side} is open. Both servers may be fenced."
            error.hint = f"As soon as the {following.side} can be reached: subscriber migrate {command}"
            raise error from None
        if row is not None and row.standing == steps.after:
            return
        await self._undo(command, steps, error)
        raise error

    # --- one step -----------------------------------------------------------------------------------------

    async def _step(self, command: str, step: Step, steps: Steps) -> None:
        """Run a step, with its limit outside of the pause."""
        following_first = step.name in ("guard", "open", "redirect")
        server = steps.following if following_first else steps.serving
        limit = None if step.stage is StepStage.PAUSE else step.limit or STEP_LIMIT
        if step.name == "freeze":
            self._closed = monotonic() if not await steps.serving.is_closed() else None
        scope = anyio.move_on_after(limit) if limit is not None else None
        work = getattr(steps, step.name)
        if scope is None:
            await self._run_step(command, step.name, server, work)
            return
        with scope:
            await self._run_step(command, step.name, server, work)
        if scope.cancelled_caught:
            raise SubscriberError(
                f"step {step.name} has not ended within {limit:.0f} s",
                detail=_unfinished(step, steps),
                hint="Applications have noticed nothing. Remove the reason, then try again.",
                sqlstate=QUERY_CANCELED,
            )

    async def _run_step(self, command: str, name: str, server: MoveServer, work: Callable[[], Any]) -> None:
        began = monotonic()
        self._on_event(StepEvent(name, "begin"))
        # During the pause nothing waits for records: the rows of the move say where it stands.
        is_paused = name in STEP and STEP[name].stage is StepStage.PAUSE
        stepid = None if is_paused else await self._store_begin(command, name, server)
        try:
            detail = await work()
        except BaseException as error:
            reason = error.message if isinstance(error, SubscriberError) else type(error).__name__
            failed = StepEvent(name, "failed", monotonic() - began, error=reason)
            self._on_event(failed)
            if is_paused:
                self._unstored.append((failed, server, monotonic()))
            with anyio.move_on_after(1, shield=True):
                await self._store_end(server, stepid, reason, {})
            raise
        if name in STEP:
            reach(Point[f"MIGRATE_{name.upper()}"])
        seconds = monotonic() - began
        detail = {**(detail or {}), "seconds": round(seconds, 4)}
        await self._store_end(server, stepid, None, detail)
        done = StepEvent(name, "done", seconds, detail)
        if is_paused:
            self._unstored.append((done, server, monotonic()))
        self._on_event(done)

    async def _store_pause(self, command: str) -> None:
        """Store the steps of the pause, when applications can write again."""
        steps, self._unstored = self._unstored, []
        for event, server, ended in steps:
            ago = monotonic() - ended
            with suppress(SubscriberError):
                async with server.use() as connection:
                    await migrations.add_step(
                        connection,
                        self.name,
                        command,
                        event.step,
                        (ago + event.seconds, ago),
                        event.error,
                        event.detail,
                    )

    async def _store_begin(self, command: str, name: str, server: MoveServer) -> int | None:
        """Store the beginning of a step. The record is for people, so a lost server is not an error here."""
        try:
            async with server.use() as connection:
                return await migrations.begin_step(connection, self.name, command, name)
        except SubscriberError:
            return None

    async def _store_end(self, server: MoveServer, stepid: int | None, error: str | None, detail: Detail) -> None:
        if stepid is None:
            return
        try:
            async with server.use() as connection:
                await migrations.end_step(connection, stepid, error, detail)
        except (SubscriberError, asyncpg.PostgresError):
            return


def _unfinished(step: Step, steps: Steps) -> str:
    """Return a sentence about the condition that a step has waited for in vain."""
    sessions = [*steps.serving.unquiet, *steps.following.unquiet]
    if sessions:
        return f"Sessions do not end, or return: process {', '.join(map(str, sessions[:5]))}."
    if step.name == "gates" and steps.waits_for:
        return f"It waits for {steps.waits_for}."
    return f"It waits until: {step.waits or step.does}."


def _refuse_finished(standing: Standing) -> None:
    if standing.phase is Phase.FINISHED:
        raise StatementError(
            f"the move is finished, and the {standing.serving} has the database",
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )


async def _drop(server: MoveServer, publisher: MoveServer, name: str) -> Detail:
    """Drop a subscription and the publication that the move has created for it."""
    drop = f"DROP SUBSCRIPTION IF EXISTS {identifier(name)}"
    async with server.use() as connection:
        await execute(connection, drop, notice=lambda *_: None)
    return {"statements": [drop]}
