"""RangePreparation: finds out if a table can be copied by ranges, before its first range or after a restart."""

from __future__ import annotations

from dataclasses import dataclass

from subscriber import telemetry
from subscriber.apply.relation_map import LocalRelation, RelationMapping, map_relation
from subscriber.apply.table_states import TableState
from subscriber.catalog.commands.ownership import refuse_deletion
from subscriber.catalog.store import copied_ranges
from subscriber.catalog.store.copied_ranges import CopiedRange
from subscriber.catalog.store.subscription_rel import load_relation_state
from subscriber.catalog.store.table_writers import load_ownership
from subscriber.catalog.store.workers import WorkerState
from subscriber.errors import ConnectionLost, ServerError, StaleCatalog, SubscriberError
from subscriber.publisher import ranges as queries
from subscriber.publisher.connection import Publisher
from subscriber.publisher.tables import PublishedTable, as_relation
from subscriber.ranges.key_types import ENUM
from subscriber.ranges.keys import KeyRangeError, RangeKey
from subscriber.sqlstate import INSUFFICIENT_PRIVILEGE
from subscriber.subscription import TwoPhaseState
from subscriber.targets.postgres import copy_transaction
from subscriber.targets.postgres.copy_transaction import TableChecks
from subscriber.targets.postgres.session.target_session import TargetSession
from subscriber.targets.postgres.sql.owned_rows import owned_rows
from subscriber.worker.apply.range_changes import restore
from subscriber.worker.published_definitions import read_definition
from subscriber.worker.table_indexes import TableIndexes
from subscriber.worker.table_states import building_indexes
from subscriber.worker.tablesync.range_session import CopiedTable


@dataclass(frozen=True, slots=True)
class RangePlan:
    """A table that can be copied by ranges.

    Attributes:
        published: the table of the publisher.
        key: the key by which it is divided.
        timeline: the publisher's timeline.
    """

    published: PublishedTable
    key: RangeKey
    timeline: int


class RangePreparation:
    """Prepares the copy of one table."""

    def __init__(self, table: CopiedTable, publisher: Publisher, session: TargetSession, indexes: TableIndexes) -> None:
        """Create the preparation.

        Args:
            table: the table.
            publisher: a session on the publisher, without an open transaction.
            session: a session on the target, which has the table's place.
            indexes: builds the indexes of the table.
        """
        self._table = table
        self._publisher = publisher
        self._session = session
        self._indexes = indexes

    async def prepare(self) -> RangePlan | None:
        """Read the table's definition on both sides. Returns None if it cannot be copied by ranges.

        Raises:
            StaleCatalog: the table was synchronized meanwhile.
            ConnectionLost: the publisher has another timeline than the apply worker's stream.
            SubscriberError: a copy that has begun cannot continue.
        """
        table, subscription = self._table, self._table.subscription
        stored = await self._load()
        timeline = await self._read_timeline()
        published = await read_definition(
            self._publisher,
            table.label,
            lambda: self._publisher.table(*table.published_name, subscription.publications),
        )
        is_stale = any(stored_range.timeline != timeline for stored_range in stored)
        copied = restore(stored, timeline)
        try:
            self._check_options()
            key = await read_definition(
                self._publisher,
                table.label,
                lambda: queries.range_key(self._publisher, published, subscription.publications),
            )
            # The apply worker may be about to add the same constraint.
            async with building_indexes(table.tables, table.relid):
                builds_key = await self._indexes.prepare_key(*self._index_arguments)
            plan = RangePlan(published, key, timeline)
            # The last indexes are built when all ranges are copied.
            is_copied = copied is not None and copied.end is not None and not is_stale
            await self._check_target(plan, is_first=not stored, allow_unique=is_copied, builds_key=builds_key)
        except KeyRangeError as error:
            if is_stale:
                await self.empty(published)
            elif stored:
                raise SubscriberError(
                    f'the copy of table "{table.label}" by ranges cannot continue: {error}',
                    hint="Delete the subscription's rows of the table on the target. Drop it from the publication, run"
                    f" ALTER SUBSCRIPTION {subscription.name} REFRESH PUBLICATION, add it to the publication, and"
                    " refresh again.",
                ) from error
            await self._leave()
            telemetry.log(
                telemetry.LOG,
                f'table "{table.label}" is copied in one snapshot, because {error}',
                event="ranges.unsuitable",
                relation=table.label,
            )
            return None
        return plan

    async def _load(self) -> list[CopiedRange]:
        """Return the ranges that earlier runs have copied, after a check that the table is still to be copied."""
        table, subid = self._table, self._table.subscription.oid
        async with table.context.catalog.use() as connection:
            row = await load_relation_state(connection, subid, table.relid)
            if row is not None:
                table.tables.correct(row)
            # The table was removed from the subscription and added again.
            if row is not None and row.state is TableState.INIT:
                await copied_ranges.remove(connection, subid, table.relid)
            stored = await copied_ranges.load(connection, subid, table.relid)
        state = table.tables.get(table.relid)
        if state is None or state.state not in (TableState.INIT, TableState.DATASYNC):
            raise StaleCatalog("the table has been synchronized meanwhile")
        return stored

    async def _read_timeline(self) -> int:
        """Return the publisher's timeline, after a check that it is that of the apply worker's stream."""
        tables = self._table.tables
        await self._publisher.restrict_views()
        timeline = (await self._publisher.identify_system()).timeline
        # The apply worker may have sent changes of ranges whose transactions the failover has lost.
        if tables.timeline.see(timeline):
            tables.notify()
            raise ConnectionLost(
                f"the publisher has timeline {timeline}, and the apply worker's stream began on timeline"
                f" {tables.timeline.started}",
                detail="The copy continues when the apply worker has started again.",
            )
        return timeline

    def _check_options(self) -> None:
        """Raise KeyRangeError if an option of the subscription, or the program, excludes copies by ranges."""
        table, subscription = self._table, self._table.subscription
        if table.relid in table.tables.sources or table.context.hooks.get(subscription.name) is not None:
            raise KeyRangeError("the program has hooks")
        if subscription.two_phase is TwoPhaseState.ENABLED:
            raise KeyRangeError("two-phase commit is enabled")
        if subscription.origin != "any":
            # The rows of a range have all origins, and its later changes only some.
            raise KeyRangeError(f"the subscription has origin = {subscription.origin}")

    async def build_indexes(self) -> None:
        """Build the indexes that the target lacks, when all ranges are copied."""
        async with building_indexes(self._table.tables, self._table.relid):
            await self._indexes.build(*self._index_arguments)

    @property
    def _index_arguments(self) -> tuple[Publisher, int, tuple[str, str], tuple[str, str]]:
        table = self._table
        return self._publisher, table.relid, (table.schema, table.name), table.published_name

    async def _check_target(self, plan: RangePlan, *, is_first: bool, allow_unique: bool, builds_key: bool) -> None:
        """Check the conditions of check_target().

        Args:
            plan: the published table and its key.
            is_first: no range is copied, so the table has to be empty. A copy in one snapshot adds all rows, or none
                if one of them is a duplicate. After a failover, ranges have to be emptied without the table's own rows.
            allow_unique: see check_target().
            builds_key: see check_target().

        Raises:
            KeyRangeError: the table cannot be copied by ranges.
        """
        session = self._session
        local = await copy_transaction.begin(session, self._table.schema, self._table.name)
        self._table.tables.find(local)  # raises an error if another table has the name
        mapping, checks = _mapping(plan.published, local, session), await copy_transaction.read_checks(session, local)
        reason = ""
        if is_first:
            try:
                if await copy_transaction.has_rows(session, mapping):
                    reason = "the table of the target has rows"
            except ServerError as error:
                if error.sqlstate != INSUFFICIENT_PRIVILEGE:
                    raise
                reason = "the role may not read the table of the target"
            session.pipeline.attach()
        await copy_transaction.roll_back(session)
        if reason:
            raise KeyRangeError(reason)
        check_target(mapping, plan.key, checks, allow_unique=allow_unique, builds_key=builds_key)

    async def _leave(self) -> None:
        """Leave the table to a copy in one snapshot, when the apply worker has executed its statements for the table.

        Otherwise a TRUNCATE that the snapshot contains would empty the table after the copy.
        """
        table = self._table.tables.get(self._table.relid)
        if table is not None and table.ranges is not None and table.ranges.unsettled:
            self._table.report.enter(WorkerState.WAITING_FOR_APPLY_WORKER)
            await self._table.tables.wait_until(lambda: table.ranges is None or not table.ranges.unsettled)
        if table is not None:
            table.ranges = None

    async def empty(self, published: PublishedTable) -> None:
        """Delete the rows of ranges whose transactions a failover of the publisher may have lost.

        Raises:
            StatementError: rows of the table may belong to another subscription.
        """
        table = self._table
        async with table.context.catalog.use() as connection:
            ownership = await load_ownership(connection, table.subscription)
        table_ownership = ownership.of(table.relid, (table.schema, table.name))
        refuse_deletion(table.subscription.name, (table.schema, table.name), table_ownership)
        telemetry.log(
            telemetry.LOG,
            f'table "{table.label}" is emptied and copied again, because the publisher has another timeline',
            event="ranges.restarted",
            relation=table.label,
        )
        session = self._session
        local = await copy_transaction.begin(session, table.schema, table.name)
        await copy_transaction.copy_as(session, _mapping(published, local, session))
        owned = owned_rows(ownership.rules, local) or "true"
        await session.pipeline.session.query(f"DELETE FROM {local.only} WHERE {owned}")
        session.pipeline.attach()
        await copy_transaction.commit(session)
        async with table.context.catalog.use() as connection:
            await copied_ranges.remove(connection, table.subscription.oid, table.relid)


def _mapping(published: PublishedTable, local: LocalRelation, session: TargetSession) -> RelationMapping:
    return map_relation(as_relation(published), local, session.pipeline.codec)


def check_target(
    mapping: RelationMapping,
    key: RangeKey,
    checks: TableChecks,
    *,
    allow_unique: bool = False,
    builds_key: bool = False,
) -> None:
    """Check that rows of different snapshots can be in the target's table together.

    Args:
        mapping: the table.
        key: the columns of the ranges.
        checks: the table's checks of several rows.
        allow_unique: all ranges are copied, so other unique indexes are allowed.
        builds_key: an index on the key is built later, or when a change needs it.

    Raises:
        KeyRangeError: they cannot. The message is the reason.
    """
    local = mapping.local
    if local.partitioned:
        raise KeyRangeError("the table of the target is partitioned")
    if checks.foreign_keys:
        raise KeyRangeError("foreign keys of the target's table are checked for replicated changes")
    if (local.other_unique or checks.deferrable_unique) and not allow_unique:
        raise KeyRangeError("the table of the target has another unique index or an exclusion constraint")
    if mapping.unsearchable is not None if local.identity else not builds_key:
        raise KeyRangeError("the table of the target has no index on the key")
    by_name = {column.name: column.batch_info for column in mapping.attributes}
    for column in key.columns:
        info = by_name[column.name]
        if info is None or (column.type is not ENUM and info.type_oid != column.type_oid):
            raise KeyRangeError(f'key column "{column.name}" has another type on the target')
