"""Catch-up: apply a backlog from the change log to a PostgreSQL target in large batches.

    log (row, end] ─▶ net effect by key, on executors ─▶ staging tables ─▶ one transaction: merge, progress row

**Purpose.** The end state is that of the apply worker at the same position: the same rows, and the same position. No
intermediate state and no part of a batch is ever visible.

**Invariants.**

- The progress record decides, as everywhere. A batch starts from its position, and moves it in the transaction that
  merges. The subscription, once enabled, therefore continues at exactly that position.
- The subscription is disabled meanwhile, and this session holds the advisory lock of its apply worker.
- Cases that a net effect cannot represent are refused: tables with triggers or rules that fire, conflict policies,
  prepared transactions, tables that are still being copied.
- If the target's rows are not the rows that the changes assume, the batch is rolled back. The apply worker then reports
  the rows.

**Failure cases.** D is the driver, E an executor.

- E dies while it copies: Spark retries the task. The rows of the first attempt are not merged, because the driver never
  learns that attempt's name.
- D dies before the commit: nothing of the batch is visible. The next run drops the staging tables.
- D dies after the commit: the progress row has moved. The next run starts from there.
- Target dies: D's transaction rolls back. Staging tables are unlogged, and empty after recovery.
- Slot confirmed past the progress row (the archiver has read the subscription's own slot): the apply worker refuses to
  start until the row has reached that position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import anyio.to_thread

from subscriber.apply.progress import ProgressClaim
from subscriber.apply.relation_map import LocalRelation
from subscriber.apply.table_states import TableState
from subscriber.catalog import hooked_tables, identity, table_names, worker_sessions
from subscriber.catalog.commands.privileges import does_not_exist
from subscriber.catalog.commands.quarantine import refuse_while_in_use
from subscriber.catalog.connection import Connection, encoding_of, translate
from subscriber.catalog.schema import ensure_schema
from subscriber.catalog.store import progress_records, verifications
from subscriber.catalog.store.subscription_rel import load_handed_over, load_relation_states
from subscriber.catalog.store.subscriptions import find_subscription
from subscriber.catalog.store.workers import APPLY_WORKER
from subscriber.changelog.consumers import forget, name_of, register_reader
from subscriber.changelog.reader import ChangeLog
from subscriber.connection.connect import connect, open_session
from subscriber.connection.errors import ASYNCPG_ERRORS
from subscriber.connection.pipeline import Pipeline
from subscriber.errors import ServerError, StatementError
from subscriber.lsn import Lsn
from subscriber.ownership import OwnershipRules
from subscriber.quoting import identifier, qualified
from subscriber.remedy import Remedy
from subscriber.spark.catchup.staging import SCHEMA, SETTINGS, Merge, Stage, StagedPiece, ToStage
from subscriber.spark.changes.net_job import NetTables, RowKeys, net_changes
from subscriber.sqlstate import (
    FEATURE_NOT_SUPPORTED,
    INSUFFICIENT_PRIVILEGE,
    OBJECT_IN_USE,
    OBJECT_NOT_IN_PREREQUISITE_STATE,
)
from subscriber.subscription import Subscription, TwoPhaseState
from subscriber.targets.postgres.session.introspection import Terms, introspect
from subscriber.targets.postgres.session.schema_check import guard
from subscriber.targets.postgres.sql.owned_rows import owned_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BATCH = 1_000_000  # changes

_ADVANCE = "SELECT subscriber.advance($1::oid, $2, $3::text::pg_lsn, $4::text::pg_lsn, $5::timestamptz, true)"
_BIND_ORIGIN = "SELECT subscriber.bind_origin($1::oid, $2, 0)"
_ONE_BY_ONE = {
    "partitioned": "partitions",
    "trigger": "a trigger that fires for replicated changes",
    "rule": "a rule",
    "function": "a function in a constraint, a default or an index",
    "schema": "an owner without USAGE on its schema, or on that of a type",
}
_LEFT = """
SELECT c.relname::text FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = 'subscriber' AND c.relname LIKE $1
"""


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """An applied batch: `changes` changes of the log became `rows` rows of the target."""

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
    """Apply the changes of `log` to subscription `name`, which must be disabled.

    Args:
        target: the connection string of the subscription's database.
        log: the change log of the subscription's publisher and publications.
        until: the position at which to end; None: the end of the log.
        batch: the number of changes after which a batch ends.
        on_batch: called after each batch.

    Returns:
        The position of the subscription.

    Raises:
        StatementError: the subscription or one of its tables cannot be caught up in batches.
        ApplyError: the target's rows are not the rows that the changes assume.

    Cancellation: the current batch is rolled back. Applied batches stay.
    """
    try:
        connection = await connect(target, application_name="subscriber catchup", settings=SETTINGS)
    except ServerError as error:
        if error.sqlstate == INSUFFICIENT_PRIVILEGE:  # of session_replication_role
            words = "catch up as a superuser of the target, or let the apply worker catch up, with subscriber exec"
            error.hint = Remedy(words, f"ALTER SUBSCRIPTION {identifier(name)} ENABLE;")
        raise
    try:
        await ensure_schema(connection)
        await identity.check(connection)
        backlog = Backlog(target, connection, log, spark)
        try:
            await backlog.open(name)
            while (done := await backlog.apply(min(until or log.end(), log.end()), batch)) is not None:
                on_batch(done)
        finally:
            await backlog.clear()
        return backlog.position
    except ASYNCPG_ERRORS as error:
        raise translate(error) from error
    finally:
        connection.terminate()


class Backlog:
    """A subscription that is being caught up. `position` is the target's position."""

    def __init__(self, target: str, connection: Connection, log: ChangeLog, spark: SparkSession) -> None:
        self.position = Lsn(0)
        self._row = Lsn(0)  # position of the progress record
        self._target = target
        self._connection = connection
        self._log = log
        self._spark = spark
        self._subid = 0
        self._claimed: ProgressClaim
        self._registered = False
        self._stages: dict[str, Stage] = {}
        self._owner = ""  # the subscription's owner
        self._ownership = OwnershipRules()
        self._consumer: tuple[str, str] | None = None  # name and program of this job among those of the log

    async def open(self, name: str) -> None:
        """Check that the subscription can be caught up, and create the staging tables."""
        subscription = await find_subscription(self._connection, name)
        if subscription is None:
            raise await does_not_exist(self._connection, name)
        _check_subscription(subscription, self._log)
        self._subid = subscription.oid
        if not await worker_sessions.register_own(self._connection, self._subid, APPLY_WORKER):
            raise StatementError(f'the apply worker of subscription "{name}" is still running', sqlstate=OBJECT_IN_USE)
        self._registered = True
        await table_names.require_all(self._connection, subscription)
        states = await load_relation_states(self._connection, self._subid)
        if unready := [state for state in states if state.state is not TableState.READY]:
            raise StatementError(
                f"{len(unready)} tables of the subscription have not been copied and handed over yet",
                hint="Let `subscriber run` finish the copy first.",
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )
        await refuse_while_in_use(self._connection, subscription, "catching up in batches")
        if encoding_of(self._connection) == "SQL_ASCII":
            raise StatementError(
                "the change log is in UTF8, and the target's database in SQL_ASCII",
                detail="The apply worker stores texts in the publisher's encoding.",
                hint="Enable the subscription, and let its apply worker catch up.",
                sqlstate=FEATURE_NOT_SUPPORTED,
            )
        if with_hooks := await hooked_tables.sources(self._connection, self._subid):
            raise StatementError(
                f'{len(with_hooks)} tables of subscription "{name}" have hooks, which only their program has',
                hint="Enable the subscription, and let that program catch up.",
                sqlstate=FEATURE_NOT_SUPPORTED,
            )
        claimed = await self._claim(subscription)
        sync_id = await identity.sync_id(self._connection)
        self._consumer = name_of("catchup", f"{sync_id}/{self._subid}"), f'catch-up of subscription "{name}"'
        self._move_consumer()
        self._log.check(self.position)
        self._owner = subscription.owner
        self._ownership = subscription.ownership
        terms = Terms(subscription.owner, subscription.run_as_owner, subscription.trusted_owners)
        await self._make_stages([(state.namespace, state.name) for state in states], terms)
        await self._connection.execute(_BIND_ORIGIN, claimed.record, claimed.fence)

    async def _claim(self, subscription: Subscription) -> ProgressClaim:
        system_id = str(self._log.identity.system_id)
        if subscription.system_id not in (None, system_id):
            raise StatementError(
                "the change log is from another publisher than the subscription's",
                detail=f"The log is from system {system_id}, the subscription of {subscription.system_id}.",
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )
        claimed = await progress_records.claim(self._connection, self._subid, generation=subscription.generation)
        if claimed is None:
            name = subscription.name
            raise StatementError(
                f'subscription "{name}" has not begun to apply changes', sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE
            )
        # The job does not record the ranges that it touches.
        await verifications.forget(self._connection, self._subid)
        self._claimed, self._row = claimed, claimed.position
        reached = await load_handed_over(self._connection, self._subid)
        # Between transactions the worker records its position without a commit on the target.
        self.position = max(self._row, claimed.confirmed or Lsn(0), reached)
        return claimed

    async def _make_stages(self, tables: Sequence[tuple[str, str]], terms: Terms) -> None:
        await self._drop_stages()
        session = await open_session(self._target, application_name="subscriber catchup", settings=SETTINGS)
        try:
            pipeline = Pipeline(session)
            for number, (schema, name) in enumerate(tables, 1):
                table = await introspect(pipeline, schema, name, terms)
                stage = Stage(f"catchup_{self._subid}_{number}", table)
                if (reason := _why_one_by_one(stage)) is not None:
                    raise StatementError(
                        f'changes of table "{schema}.{name}" must be applied row by row',
                        detail=f"It has {reason}.",
                        hint="Enable the subscription, and let its apply worker catch up.",
                        sqlstate=FEATURE_NOT_SUPPORTED,
                    )
                await self._connection.execute(stage.create())
                await self._connection.execute(f"GRANT SELECT, UPDATE ON {stage.name} TO {identifier(table.owner)}")
                self._stages[f"{schema}.{name}"] = stage
        finally:
            session.abort()

    async def _drop_stages(self) -> None:
        for (table,) in await self._connection.fetch(_LEFT, f"catchup\\_{self._subid}\\_%"):
            await self._connection.execute(f"DROP TABLE {qualified(SCHEMA, table)}")

    def _move_consumer(self) -> None:
        """Have the log keep the changes after the position."""
        assert self._consumer is not None
        register_reader(self._log.directory, *self._consumer, self.position)

    async def clear(self) -> None:
        """Drop the staging tables, if this session created them and its connection still works.

        The job is a consumer of the log no more. One that is killed remains a consumer until it is run again.
        """
        if self._consumer is not None:
            with suppress(StatementError, OSError):
                forget(self._log.directory, self._consumer[0])
        if self._registered and not self._connection.is_closed():
            with anyio.CancelScope(shield=True):
                await self._drop_stages()

    # --- one batch ------------------------------------------------------------------------------

    async def apply(self, until: Lsn, changes: int) -> CaughtUp | None:
        """Apply the next batch, not beyond `until`. Returns None if there is none."""
        start = self.position
        reach = self._log.reach(start, changes=changes)
        end = min(reach.position, until)
        if end <= start:
            return None
        keys = RowKeys({label: stage.target.identity for label, stage in self._stages.items()})
        sink = ToStage(self._target, self._stages)
        tables = NetTables(frozenset(self._stages))
        netted = await anyio.to_thread.run_sync(net_changes, self._spark, self._log, start, end, keys, tables, sink)
        for error in netted.errors.values():
            raise error
        copied: dict[str, list[StagedPiece]] = {}
        for label, part in netted.parts:
            copied.setdefault(label, []).append(part)
        merges = {label: Merge(self._stages[label], parts) for label, parts in copied.items()}
        async with self._connection.transaction():
            await self._merge(merges)
            record, fence = self._claimed.record, self._claimed.fence
            await self._connection.execute(_ADVANCE, record, fence, str(self._row), str(end), datetime.now(UTC))
        self.position = self._row = end
        self._move_consumer()
        for label in merges:
            await self._connection.execute(f"TRUNCATE {self._stages[label].name}")
        return CaughtUp(start, end, reach.changes, sum(merge.rows for merge in merges.values()))

    async def _merge(self, merges: dict[str, Merge]) -> None:
        for label in merges:
            table = self._stages[label].target
            if (guarding := guard(table, table.owner, self._owner)) is not None:
                await guarding.apply(self._connection.fetch)
        emptied = [self._stages[label].target for label, merge in merges.items() if merge.truncated]
        for table in emptied:
            if (owned := owned_rows(self._ownership, table)) is not None:
                await self._become(table)
                await self._connection.execute(f"DELETE FROM {table.only} WHERE {owned}")
                await self._connection.execute("RESET ROLE")
        emptied = [table for table in emptied if owned_rows(self._ownership, table) is None]
        if emptied:  # in one statement, because of foreign keys between them
            await self._connection.execute(f"TRUNCATE {', '.join(table.only for table in emptied)}")
        for label, merge in merges.items():
            await self._connection.execute(f"ANALYZE {self._stages[label].name}")
            await self._become(self._stages[label].target)
            await merge.run(self._connection)
            await self._connection.execute("RESET ROLE")

    async def _become(self, table: LocalRelation) -> None:
        """Switch to the table's owner: code of the table must not run with our privileges."""
        await self._connection.execute(f"SET LOCAL ROLE {identifier(table.owner)}")


def _why_one_by_one(stage: Stage) -> str | None:
    """Return why a table's changes cannot be applied in batches; None if they can.

    Batches must be correct, and safe: statements name the columns' types, and the owner of a type could change it.
    """
    table = stage.target
    if not stage.is_possible:
        return "too many columns for a staging table, which also has those of its replica identity"
    if table.foreign:
        return f'code of role "{table.foreign[0].owner}", which this session\'s role must not trust'
    if table.guarded and any(column.batch_info is not None and column.batch_info.enum for column in table.columns):
        return "an enum of a role which this session's role must not trust"
    return table.batch_exclusion and _ONE_BY_ONE.get(table.batch_exclusion, table.batch_exclusion)


def _check_subscription(subscription: Subscription, log: ChangeLog) -> None:
    """Raise StatementError if batches would not give the same result for the subscription."""
    name = subscription.name
    if subscription.enabled:
        raise StatementError(
            f'subscription "{name}" is enabled',
            hint=Remedy("disable it first", f"ALTER SUBSCRIPTION {identifier(name)} DISABLE;"),
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )
    if set(subscription.publications) != set(log.identity.publications):
        raise StatementError(
            "the change log has other publications than the subscription",
            detail=f"The log has {', '.join(log.identity.publications)}; "
            f"the subscription has {', '.join(subscription.publications)}.",
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )
    for what, is_so in (
        ("two_phase", subscription.two_phase is not TwoPhaseState.DISABLED),
        ("origin = none", subscription.origin == "none"),
        ("a conflict_policy", subscription.decides_conflicts),
        ("a position to skip", bool(subscription.skip_lsn)),
    ):
        if is_so:
            raise StatementError(
                f'subscription "{name}" has {what}, which requires row-by-row apply',
                hint="Enable the subscription, and let its apply worker catch up.",
                sqlstate=FEATURE_NOT_SUPPORTED,
            )
