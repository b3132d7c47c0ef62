"""Catching up: a backlog in the change log applied to a PostgreSQL target in large batches.

    log (row, end] ─▶ net effect by key, on executors ─▶ staging tables ─▶ one transaction: merge, progress row

The end state is that of the apply worker at the same position: the rows, and the position. What was in between is
never visible, and neither is a part of a batch. The progress row decides here as everywhere: a batch starts from
what it says and moves it in the transaction that merges. So the subscription, enabled afterwards, goes on at
exactly that position. The subscription is disabled meanwhile, and its apply worker's lock is held.

Refused is what a net effect cannot stand for: tables with triggers or rules that fire, policies for conflicts,
prepared transactions, tables still being copied. Where the target's rows are not those that the changes
suppose, the batch is rolled back, and the apply worker has to tell.

Kill points considered, D the driver, E an executor:
- E dies while it copies: the task is tried again; what the first attempt has left is not merged, since its
  name was never told.
- D dies before the commit: nothing of the batch is visible; the staging tables are dropped by the next run.
- D dies after the commit: the progress row is moved; the next run starts from there.
- the target dies: D's transaction with it; staging tables are unlogged and come back empty.
- the slot has been confirmed further than the row (the archiver has read the subscription's own slot): the
  apply worker refuses to start until the row is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import anyio.to_thread
import asyncpg

from subscriber.apply.relation_map import LocalRelation
from subscriber.catalog import hooked, locks, origins, store
from subscriber.catalog.schema import ensure_schema
from subscriber.catalog.session import Connection, translate
from subscriber.connection.connect import connect, open_session
from subscriber.connection.pipeline import Pipeline
from subscriber.errors import ApplyError, StatementError
from subscriber.lsn import Lsn
from subscriber.pipeline.netting import Keys, net_changes
from subscriber.pipeline.stage import SCHEMA, SETTINGS, Copied, Merge, Stage, ToStage
from subscriber.source.quoting import identifier, qualified
from subscriber.spool.changelog import ChangeLog
from subscriber.subscription import Subscription, TwoPhaseState
from subscriber.target.relations import introspect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BATCH = 1_000_000  # changes

_ADVANCE = """
UPDATE subscriber.progress SET remote_lsn = $3::text::pg_lsn WHERE subid = $1 AND relid = 0
   AND remote_lsn = $2::text::pg_lsn
RETURNING pg_catalog.pg_replication_origin_xact_setup($3::text::pg_lsn, $4::timestamptz) IS NULL
"""
# Between transactions the worker records how far it has come without a commit, and a table's own position is one
# that the others had reached when it was handed over: everything before these is on the target, too.
_REACHED = """
SELECT greatest((SELECT confirmed_lsn FROM subscriber.confirmed WHERE subid = $1),
                (SELECT max(srsublsn) FROM subscriber.subscription_rel WHERE srsubid = $1))::text
"""
_ONE_BY_ONE = {
    "partitioned": "partitions",
    "trigger": "a trigger that fires for replicated changes",
    "rule": "a rule",
    "function": "a function in a constraint, a default or an index",
}
_LEFT = """
SELECT c.relname::text FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = 'subscriber' AND c.relname LIKE $1
"""


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """A batch that was applied: `changes` of the log became `rows` of the target."""

    start: Lsn
    end: Lsn
    changes: int
    rows: int


async def catch_up(
    target: str,
    name: str,
    log: ChangeLog,
    spark: SparkSession,
    *,
    until: Lsn | None = None,
    batch: int = BATCH,
    on_batch: Callable[[CaughtUp], None] = lambda _: None,
) -> Lsn:
    """Apply what `log` has to subscription `name`, which is disabled, up to `until` (None: its end); the position.

    Raises StatementError for what is refused, ApplyError where changes and target do not go together.
    """
    connection = await connect(target, application_name="subscriber catchup", settings={**SETTINGS, "jit": "off"})
    try:
        await ensure_schema(connection)
        backlog = Backlog(target, connection, log, spark)
        try:
            await backlog.open(name)
            while (done := await backlog.apply(min(until or log.end(), log.end()), batch)) is not None:
                on_batch(done)
        finally:
            await backlog.clear()
        return backlog.position
    except (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError) as error:
        raise translate(error) from error
    finally:
        connection.terminate()


class Backlog:
    """One subscription that is being caught up. `position` is where the target stands."""

    def __init__(self, target: str, connection: Connection, log: ChangeLog, spark: SparkSession) -> None:
        self.position = Lsn(0)
        self._row = Lsn(0)  # what the progress row says
        self._target = target
        self._connection = connection
        self._log = log
        self._spark = spark
        self._subid = 0
        self._locked = False
        self._stages: dict[str, Stage] = {}

    async def open(self, name: str) -> None:
        """Look at everything that may be in the way, and make the staging tables."""
        subscription = await store.find_subscription(self._connection, name)
        if subscription is None:
            raise StatementError(f'subscription "{name}" does not exist', sqlstate="42704")
        _check_subscription(subscription, self._log)
        self._subid = subscription.oid
        if not await self._connection.fetchval(locks.TRY_LOCK, *locks.apply_worker_key(self._subid)):
            raise StatementError(f'the apply worker of subscription "{name}" is still running', sqlstate="55006")
        self._locked = True
        states = await store.load_relation_states(self._connection, self._subid)
        if unready := [state for state in states if state.state != "r"]:
            raise StatementError(
                f"{len(unready)} tables of the subscription have not been copied and handed over yet",
                hint="Let `subscriber run` finish that first.",
                sqlstate="55000",
            )
        if with_hooks := await hooked.sources(self._connection, self._subid):
            raise StatementError(
                f'{len(with_hooks)} tables of subscription "{name}" have hooks, which only the program has',
                hint="Enable the subscription, and let that program catch up.",
                sqlstate="0A000",
            )
        await self._read_progress(name)
        self._log.check(self.position)
        await self._make_stages([(state.namespace, state.name) for state in states], subscription.owner)
        await self._bind_origin(subscription.origin_name)

    async def _read_progress(self, name: str) -> None:
        found = await store.load_progress(self._connection, self._subid)
        if found is None:
            raise StatementError(f'subscription "{name}" has not begun to apply changes', sqlstate="55000")
        system_id = str(self._log.identity.system_id)
        if found.system_id not in (None, system_id):
            raise StatementError(
                "the change log is of another publisher than the subscription",
                detail=f"The log is of system {system_id}, the subscription of {found.system_id}.",
                sqlstate="55000",
            )
        self._row = found.remote_lsn
        reached = await self._connection.fetchval(_REACHED, self._subid)
        self.position = max(self._row, Lsn.parse(reached or "0/0"))

    async def _bind_origin(self, name: str) -> None:
        await origins.create_origin(self._connection, name)
        at = await self._connection.fetchval("SELECT pg_catalog.pg_replication_origin_progress($1, false)::text", name)
        if at != str(self._row):
            await self._connection.execute(
                "SELECT pg_catalog.pg_replication_origin_advance($1, $2::text::pg_lsn)", name, str(self._row)
            )
        await self._connection.execute("SELECT pg_catalog.pg_replication_origin_session_setup($1)", name)

    async def _make_stages(self, tables: Sequence[tuple[str, str]], owner: str) -> None:
        await self._drop_stages()
        session = await open_session(self._target, application_name="subscriber catchup", settings=SETTINGS)
        try:
            pipeline = Pipeline(session)
            for number, (schema, name) in enumerate(tables, 1):
                table = await introspect(pipeline, schema, name, owner)
                if table.one_by_one is not None:
                    raise StatementError(
                        f'changes of table "{schema}.{name}" must be applied one by one',
                        detail=f"It has {_ONE_BY_ONE.get(table.one_by_one, table.one_by_one)}.",
                        hint="Enable the subscription, and let its apply worker catch up.",
                        sqlstate="0A000",
                    )
                stage = Stage(f"catchup_{self._subid}_{number}", table)
                await self._connection.execute(stage.create())
                await self._connection.execute(f"GRANT SELECT, UPDATE ON {stage.name} TO {identifier(table.owner)}")
                self._stages[f"{schema}.{name}"] = stage
        finally:
            session.abort()

    async def _drop_stages(self) -> None:
        for (table,) in await self._connection.fetch(_LEFT, f"catchup\\_{self._subid}\\_%"):
            await self._connection.execute(f"DROP TABLE {qualified(SCHEMA, table)}")

    async def clear(self) -> None:
        """Drop the staging tables, if they are ours and the connection still lives."""
        if self._locked and not self._connection.is_closed():
            with anyio.CancelScope(shield=True):
                await self._drop_stages()

    # --- one batch ------------------------------------------------------------------------------

    async def apply(self, until: Lsn, changes: int) -> CaughtUp | None:
        """Apply the next batch, not beyond `until`; None when there is none."""
        start = self.position
        reach = self._log.reach(start, changes=changes)
        end = min(reach.position, until)
        if end <= start:
            return None
        keys = Keys({label: stage.target.identity for label, stage in self._stages.items()})
        sink = ToStage(self._target, self._stages)
        wanted = frozenset(self._stages)
        results = await anyio.to_thread.run_sync(net_changes, self._spark, self._log, start, end, keys, wanted, sink)
        copied: dict[str, list[Copied]] = {}
        for label, _, part in results:
            copied.setdefault(label, []).append(part)
        merges = {label: Merge(self._stages[label], parts) for label, parts in copied.items()}
        async with self._connection.transaction():
            await self._merge(merges)
            moved = await self._connection.fetch(_ADVANCE, self._subid, str(self._row), str(end), datetime.now(UTC))
            if len(moved) != 1:
                raise ApplyError("another session has moved the progress of this subscription", sqlstate="SB002")
        self.position = self._row = end
        for label in merges:
            await self._connection.execute(f"TRUNCATE {self._stages[label].name}")
        return CaughtUp(start, end, reach.changes, sum(merge.rows for merge in merges.values()))

    async def _merge(self, merges: dict[str, Merge]) -> None:
        emptied = [self._stages[label].target for label, merge in merges.items() if merge.truncated]
        if emptied:  # together, because of foreign keys between them
            await self._connection.execute(f"TRUNCATE {', '.join(qualified(t.schema, t.name) for t in emptied)}")
        for label, merge in merges.items():
            await self._connection.execute(f"ANALYZE {self._stages[label].name}")
            await self._become(self._stages[label].target)
            await merge.run(self._connection)
            await self._connection.execute("RESET ROLE")

    async def _become(self, table: LocalRelation) -> None:
        """Act as the table's owner: what a table brings along must not run with our rights."""
        await self._connection.execute(f"SET LOCAL ROLE {identifier(table.owner)}")


def _check_subscription(subscription: Subscription, log: ChangeLog) -> None:
    """Raises StatementError for a subscription that batches would not be the same for."""
    name = subscription.name
    if subscription.enabled:
        raise StatementError(
            f'subscription "{name}" is enabled',
            hint=f"Disable it first: ALTER SUBSCRIPTION {identifier(name)} DISABLE",
            sqlstate="55000",
        )
    if set(subscription.publications) != set(log.identity.publications):
        raise StatementError(
            "the change log is of other publications than the subscription",
            detail=f"The log has {', '.join(log.identity.publications)}; "
            f"the subscription has {', '.join(subscription.publications)}.",
            sqlstate="55000",
        )
    for what, is_so in (
        ("two_phase", subscription.two_phase is not TwoPhaseState.DISABLED),
        ("origin = none", subscription.origin == "none"),
        ("a conflict_policy", subscription.decides_conflicts),
        ("a position to skip", bool(subscription.skip_lsn)),
    ):
        if is_so:
            raise StatementError(
                f'subscription "{name}" has {what}, which needs changes to be applied one by one',
                hint="Enable the subscription, and let its apply worker catch up.",
                sqlstate="0A000",
            )
