"""Dry runs: the steps of a command on servers that note statements in place of executing them.

The steps are those of the move, so a dry run has its statements and their order. Sessions are read-only, so a change
that does not pass through the methods of MoveServer is an error of the server, and not a change.

A later step may depend on the effect of an earlier one. The effects that matter are kept in memory: the row of the move
and the state of the fence. Values of sequences, sessions and grants are those of now.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from subscriber.catalog import schema
from subscriber.catalog.connection import Connection
from subscriber.catalog.store import migrations
from subscriber.display import shell_word
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.migration import fence
from subscriber.migration.hooks import HookEvent
from subscriber.migration.plan import STEP, Standing
from subscriber.migration.preflight.comparison import accepted_roles
from subscriber.migration.preflight.rules import COPY_RATE, PUBLICATION_EXISTS
from subscriber.migration.record import Change, MoveFacts, ServerRecord
from subscriber.migration.results import StepEvent
from subscriber.migration.runner import StepRunner
from subscriber.migration.schema.restore import definitions_script, rest_script
from subscriber.migration.schema.roles import plan_roles
from subscriber.migration.schema.upkeep import populated_views
from subscriber.migration.server import FLUSHED, MARK, MoveServer
from subscriber.migration.server_session import unknown_subscription
from subscriber.migration.sessions import find_sessions, terminate_statement
from subscriber.migration.start import IS_SUPERUSER, PERMANENT, StartSteps
from subscriber.migration.steps import Detail, Steps
from subscriber.sqlstate import OBJECT_NOT_IN_PREREQUISITE_STATE
from subscriber.subscription import Subscription

# Steps whose refusal is part of a plan. Any other error ends a dry run.
REFUSING = ("preflight", "gates", "sequences")
MAY_MOVE = """
SELECT pg_catalog.pg_has_role(d.datdba, 'USAGE') FROM pg_catalog.pg_database d
 WHERE d.datname = pg_catalog.current_database()
"""
DATABASE_SIZE = "SELECT pg_catalog.pg_database_size(pg_catalog.current_database())"
LAG = """
SELECT extract(epoch FROM coalesce(r.flush_lag, interval '0'))::float8 FROM pg_catalog.pg_replication_slots s
  JOIN pg_catalog.pg_stat_replication r ON r.pid = s.active_pid WHERE s.slot_name = $1
"""


class PlannedServer(MoveServer):
    """A server that nothing changes. Notes have the statements."""

    has_schema = True
    _row: ServerRecord | None = None  # as the noted statements would leave it; None: as it is
    _fence: bool | None = None  # likewise: True if it would be closed

    async def prepare(self) -> None:
        """Begin a read-only session, and note the schema if it is missing."""
        async with self.use() as connection:
            await connection.execute("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY")
            await schema.refuse_foreign_schema(connection)
            revision = await schema.current_revision(connection)
            is_current = await schema.is_current(connection)
        self.has_schema = revision is not None
        if self.has_schema and not is_current:
            raise StatementError(
                f'schema "subscriber" of the {self.side} has an older version',
                hint=f"This command upgrades it, and changes nothing else: subscriber migrate status"
                f" {shell_word(self.migration)}",
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )
        if not self.has_schema:
            self.note("CREATE SCHEMA subscriber")

    async def _lock(self, connection: Connection) -> None:
        """Take no lock, because nothing changes."""

    async def _may_move(self, connection: Connection) -> bool:
        if self.has_schema:
            return await super()._may_move(connection)
        self.has_origins = bool(await connection.fetchval(IS_SUPERUSER))
        return bool(await connection.fetchval(MAY_MOVE))

    async def subscription(self, name: str) -> Subscription:
        """Return a subscription of this database, see MoveServer."""
        if not self.has_schema:
            raise unknown_subscription(name, self.side, ())
        return await super().subscription(name)

    async def _load(self, connection: Connection) -> ServerRecord | None:
        if self._row is not None or not self.has_schema:
            return self._row
        return await super()._load(connection)

    async def _other_moves(self, connection: Connection) -> list[str]:
        return await super()._other_moves(connection) if self.has_schema else []

    async def _is_closed(self, connection: Connection) -> bool | None:
        return await super()._is_closed(connection) if self._fence is None else self._fence

    async def perform(self, statements: str | Sequence[str], work: Callable[[], Awaitable[object]]) -> None:
        """Note the statements."""
        self.note(*([statements] if isinstance(statements, str) else statements))

    async def _change(
        self, connection: Connection, statements: Sequence[str], standing: Standing, change: Change
    ) -> None:
        self.note(*statements)
        known = await self._load(connection)
        self._row = ServerRecord(standing, change(MoveFacts(self.side) if known is None else known.facts))
        if fence.CLOSE in statements or fence.OPEN in statements:
            self._fence = fence.CLOSE in statements

    async def _execute_each(self, connection: Connection, statements: Iterable[str]) -> None:
        executed = list(statements)
        self.note(*executed)
        if fence.OPEN in executed:
            self._fence = False

    async def wait_until_quiet(self, closed: datetime) -> int:
        """Note the end of the sessions that are there now. Returns their number."""
        known = await self.load()
        async with self.use() as connection:
            sessions = await find_sessions(connection, closed, known.facts.admitted if known else ())
        if sessions.ended:
            self.note(terminate_statement(session.pid for session in sessions.ended))
        return len(sessions.ended)

    async def mark(self) -> Lsn:
        """Note the marker, and return the present position."""
        self.note(MARK[-1])
        async with self.use() as connection:
            return Lsn.parse(await connection.fetchval(FLUSHED))

    async def wait_until_confirmed(self, slot: str, position: Lsn) -> None:
        """Wait for nothing."""

    async def lag(self, slot: str) -> float | None:
        """Return the seconds after which the subscriber of a slot confirms changes, or None if it is not connected."""
        async with self.use() as connection:
            lag: float | None = await connection.fetchval(LAG, slot)
        return lag

    async def seconds(self, step: str) -> float | None:
        """Return the seconds that a step has taken last on this server, for example in a rehearsal."""
        if not self.has_schema:
            return None
        async with self.use() as connection:
            steps = await migrations.load_steps(connection, self.migration)
        durations = [record.detail.get("seconds") for record in steps if record.step == step and record.error is None]
        return durations[-1] if durations else None


class PlannedSteps(Steps):
    """Steps that wait for nothing, and call no hook."""

    async def _hand_tables_over(self) -> None:
        pass

    async def _differences(self) -> list[str]:
        return []

    async def _wait_for_lag(self, slot: str, waived: list[str]) -> Detail:
        self.serving.note(MARK[-1])
        return {"estimate": self.options.lag_window}

    async def drain(self) -> Detail:
        """Note the marker. The estimate is the lag of now."""
        detail = await super().drain()
        assert isinstance(self.serving, PlannedServer)
        return {**detail, "estimate": await self.serving.lag(await self.slot())}

    async def _quiet(self) -> int:
        assert self._closed_at is not None
        return await self.serving.wait_until_quiet(self._closed_at)

    async def _prove_way_back(self) -> Lsn:
        return await self.following.mark()

    async def _verify(self) -> Detail:
        return {"verify": "compare all tables"}

    async def objects(self) -> Detail:
        return {"copy": "large objects that differ"} if self.options.large_objects else {}

    async def _call_hooks(self, event: HookEvent, server: MoveServer) -> int:
        return len([hook for hook in self.options.hooks if hook.event in (None, event)])


class PlannedStartSteps(StartSteps):
    """The steps of `start` on an empty target."""

    async def roles(self) -> Detail:
        if self._options.schema:
            async with self._sessions() as (source, target):
                own = {*await self._own_roles(), *accepted_roles(self._options.waive)}
                self._target.note(*(planned.shown for planned in (await plan_roles(source, target, own)).statements))
        return {}

    async def _own_roles(self) -> set[str]:
        assert isinstance(self._target, PlannedServer)
        return await super()._own_roles() if self._target.has_schema else set()

    async def definitions(self) -> Detail:
        if self._options.schema and not await self._is_subscribed():
            async with self._sessions() as (source, target), self._archive() as archive:
                defer = await self._workers_build()
                script = await definitions_script(archive, source, target, defer_keys=defer)
                self._target.note(script.strip())
        return {}

    async def _is_subscribed(self) -> bool:
        assert isinstance(self._target, PlannedServer)
        return self._target.has_schema and await super()._is_subscribed()

    async def _relids(self) -> list[int]:
        """Return the tables of the subscription. While it does not exist, note the triggers of published tables."""
        if await self._is_subscribed():
            return await super()._relids()
        publication = self._options.publication or self._name
        async with self._source.use() as connection:
            exists = await connection.fetchval(PUBLICATION_EXISTS, publication)
            rows = await (connection.fetch(fence.PUBLISHED, [publication]) if exists else connection.fetch(PERMANENT))
            tables = await connection.fetch(fence.TABLES, [row["relid"] for row in rows])
        self._target.note(*(fence.create_trigger(row["schema"], row["name"]) for row in tables))
        return []

    async def copy(self) -> Detail:
        async with self._source.use() as connection:
            size = await connection.fetchval(DATABASE_SIZE)
        return {"bytes": size, "estimate": round(size / COPY_RATE, 1)}

    async def rest(self) -> Detail:
        if self._options.schema:
            async with self._sessions() as (source, _), self._archive() as archive:
                own = await self._source.created_publications()
                self._target.note(*await rest_script(archive, source, self._target.dsn, without=own))
        return {}

    async def large_objects(self) -> Detail:
        return {"copy": "all large objects"} if self._options.large_objects else {}

    async def views(self) -> Detail:
        async with self._source.use() as connection:
            self._target.note(*(f"REFRESH MATERIALIZED VIEW {view}" for view in await populated_views(connection)))
        return {}

    async def analyze(self) -> Detail:
        return {"analyze": "each table that was never analyzed"}


class PlanRunner(StepRunner):
    """Runs steps on planned servers, and reports each as an event with state "planned"."""

    async def run(self, name: str, server: MoveServer, work: Callable[[], Awaitable[Mapping[str, Any] | None]]) -> None:
        """Report what a step would execute, see StepEvent."""
        error: StatementError | None = None
        detail: dict[str, Any] = {}
        try:
            detail |= await work() or {}
        except StatementError as found:
            if name not in REFUSING:
                raise
            error = found
        estimate = detail.pop("estimate", None)
        if estimate is None and isinstance(server, PlannedServer):
            estimate = await server.seconds(name)
        if step := STEP.get(name):
            detail |= {"does": step.does, "waits": step.waits, "limit": step.limit, "undo": step.undo}
            detail["stage"] = step.stage
        reason = None if error is None else "\n".join(filter(None, (error.message, error.detail)))
        self._on_event(
            StepEvent(name, "planned", 0.0, {**detail, "estimate": estimate, "statements": self.noted()}, reason)
        )
