"""RangeChanges: the changes that an apply worker receives of tables that are being copied by ranges.

Purpose. The copy (worker/tablesync/range_copy.py) and the apply worker share the ranges of each table
(`TableStates.ranges`). subscriber/ranges/__init__.py has the rules.

Invariants.

- A decision and its record in memory are one step, without an await between them.
- If only the publisher can compare keys, it is asked for the range of each key that is not known. The answer is used
  only if the ranges are the same as when it was asked.
- No statement of the apply worker concerns a table before the table has an index on its key. So no transaction of the
  apply worker holds a lock for which the build of the index waits.
- A position is confirmed after a key to read again is stored (`_insert()`).
- load() claims the progress record of each table before the stream starts. So a copy that was claimed before has
  committed its range before, or cannot commit it. No copy is claimed until the ranges are loaded.

Failure cases.

- The target's table has no index on the key yet (copy_indexes = after): the apply worker builds it for the first change
  of a copied range. It does not depend on the copy, which may wait for the apply worker or have no place. A kill loses
  the build. If the index cannot be built, the error has the statement, and the worker is retried.
- A change waits for a range whose copy waits for the apply worker, for example in a trigger: after `range_wait_limit`
  the change is skipped, and the range is read again.
- Connection lost at the COMMIT of a range: its changes wait. The next copy, or the next apply worker, claims the
  record, and reads from the catalog whether the range is copied.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import anyio

from subscriber import telemetry
from subscriber.apply.relation_map import RelationMapping
from subscriber.apply.table_states import TableState
from subscriber.apply.transaction import RemoteTransaction
from subscriber.catalog.connection import CatalogConnection, Connection
from subscriber.catalog.store import copied_ranges
from subscriber.catalog.store.copied_ranges import CopiedRange
from subscriber.errors import ApplyError, ServerError, StaleMapping, SubscriberError
from subscriber.lsn import Lsn
from subscriber.protocol.messages import Delete, Insert, Update
from subscriber.protocol.tuple_data import UNCHANGED
from subscriber.publisher.connection import Publisher
from subscriber.publisher.ranges import LOCK_TIMEOUT_MS, place
from subscriber.ranges.changes import applied_part, keys_of
from subscriber.ranges.keys import Key, KeyColumn, RangeKey
from subscriber.ranges.snapshot import TransactionSnapshot
from subscriber.ranges.table_ranges import (
    Decision,
    KeyRange,
    RangeSnapshot,
    RangeState,
    TableRanges,
    effect,
)
from subscriber.settings import Settings
from subscriber.sqlstate import SERIALIZATION_FAILURE, TARGET_TABLE_CHANGED
from subscriber.subscription import CopyEngine, CopyIndexes, Subscription
from subscriber.targets.postgres.target import PostgresTarget
from subscriber.worker.session.apply_session import claim
from subscriber.worker.table_indexes import TableIndexes
from subscriber.worker.table_states import TableStates, building_indexes

_CLAIM_ATTEMPTS = 5


class RangeChanges:
    """Decides the changes of tables that are being copied by ranges, for one apply worker."""

    def __init__(
        self,
        subscription: Subscription,
        catalog: CatalogConnection,
        tables: TableStates,
        target: PostgresTarget,
        settings: Settings,
        connect: Callable[[], Awaitable[Publisher]],
        indexes: TableIndexes,
    ) -> None:
        """Create the decisions of one apply worker.

        Args:
            subscription: the subscription.
            catalog: the launcher's session on the target.
            tables: the states of its tables.
            target: the worker's target.
            settings: limits and intervals.
            connect: opens a session on the publisher, which compares keys and has the definitions of indexes.
            indexes: builds the index of a key.
        """
        self._subscription = subscription
        self._catalog = catalog
        self._tables = tables
        self._target = target
        self._wait_limit = settings.range_wait_limit
        self._connect = connect
        self._indexes = indexes
        self._publisher: Publisher | None = None

    async def load(self, timeline: int, copied_otherwise: set[int]) -> None:
        """Load the ranges of all tables from the catalog. Only copies that begin afterwards can commit a range.

        Args:
            timeline: the publisher's timeline.
            copied_otherwise: tables that have another synchronization worker in this process.
        """
        async with self._tables.claiming:
            await self._load(timeline, copied_otherwise)

    async def _load(self, timeline: int, copied_otherwise: set[int]) -> None:
        subid = self._subscription.oid
        async with self._catalog.use() as connection:
            stored = {row.relid for row in await copied_ranges.load(connection, subid)}
        # A table that was removed and added again has ranges of its former copy.
        copying = {relid for relid, table in self._tables.unready.items() if table.state is TableState.DATASYNC}
        by_ranges = stored & copying | self._tables.ranges.keys()
        if self._subscription.copy_engine is CopyEngine.RANGES:
            by_ranges.update(copying - copied_otherwise)
        for relid in by_ranges:
            await self._claim(relid)
        async with self._catalog.use() as connection:
            rows = await copied_ranges.load(connection, subid)
        for relid in by_ranges:
            ranges = restore([row for row in rows if row.relid == relid], timeline)
            if ranges is None:
                self._tables.ranges.pop(relid, None)
            else:
                self._tables.ranges[relid] = ranges
        if by_ranges:
            self._tables.notify()

    async def _claim(self, relid: int) -> None:
        """Claim the progress record of a copy, which may commit ranges at the same time."""
        for attempt in range(1, _CLAIM_ATTEMPTS + 1):
            try:
                await claim(self._catalog, self._subscription, relid)
                return
            except ServerError as error:
                if error.sqlstate != SERIALIZATION_FAILURE or attempt == _CLAIM_ATTEMPTS:
                    raise

    async def settle(self, position: Lsn) -> None:
        """Apply all transactions before `position`, if a copy waits for that. Called between two transactions."""
        for ranges in list(self._tables.ranges.values()):
            if ranges.unsettled or ranges.awaited:
                await self._target.sync()
                ranges.settle(position)
                self._tables.notify()

    async def change(
        self, transaction: RemoteTransaction, mapping: RelationMapping, change: Insert | Update | Delete
    ) -> Insert | Update | Delete | None:
        """Return the part of a change that is to be applied. None: nothing.

        Raises:
            ApplyError: the change has no key of the ranges.
            StaleMapping: the table has got an index on its key meanwhile. Nothing has been applied.
        """
        relid = mapping.local.oid
        ranges = self._tables.ranges.get(relid)
        if ranges is None:
            return None
        try:
            old, new = keys_of(ranges.key, [column.name for column in mapping.remote.columns], change)
        except ValueError as error:
            raise ApplyError(
                f'a change of table "{mapping.label}", which is being copied by ranges, cannot be assigned to a range',
                detail=str(error),
                hint="The publisher's replica identity has changed. Drop the table from the publication, run ALTER"
                " SUBSCRIPTION ... REFRESH PUBLICATION, empty the table on the target, and add it again.",
            ) from error
        if not isinstance(change, Update) or old is None or new is None or old == new:
            key = old if new is None else new
            assert key is not None
            if await self._decide(relid, key, transaction) is not Decision.APPLY:
                return None
            await self._require_index(mapping)
            return change
        decisions = await self._decide(relid, old, transaction), await self._decide(relid, new, transaction)
        if Decision.APPLY in decisions:
            await self._require_index(mapping)
        part = applied_part(change, effect(*decisions))
        return await self._insert(relid, new, transaction, part) if isinstance(part, Insert) else part

    async def _insert(self, relid: int, key: Key, transaction: RemoteTransaction, change: Insert) -> Insert | None:
        """Return the new row of an UPDATE whose old row is not on the target.

        If a large value was not sent, the key is stored as one that has to be read again.
        """
        if UNCHANGED not in change.new.split()[0]:
            return change
        ranges = self._tables.ranges[relid]
        single = stored_range(0, relid, ranges, KeyRange(key, single=True))
        async with self._catalog.use() as connection:
            row = await copied_ranges.add_single(connection, self._subscription.oid, single)
        # The copy of the table may have started again meanwhile.
        current = self._tables.ranges.get(relid)
        if current is not None:
            current.add_single(key, transaction.xid).row = row
        return None

    async def truncate(self, transaction: RemoteTransaction, mapping: RelationMapping) -> bool:
        """Apply a TRUNCATE to the ranges that do not contain it. Returns True if the whole table is to be truncated.

        Raises:
            ApplyError: the TRUNCATE cannot be applied to a part of the table.
            StaleMapping: the table has got an index on its key meanwhile. Nothing has been applied.
        """
        relid = mapping.local.oid
        if relid in self._tables.ranges:
            await self._require_index(mapping)
        while (ranges := self._tables.ranges.get(relid)) is not None:
            try:
                truncation = ranges.truncation(transaction.xid, transaction.finish_lsn)
            except ValueError as error:
                raise ApplyError(
                    f'a TRUNCATE of table "{mapping.label}", which is being copied by ranges, cannot be applied',
                    detail=str(error),
                    hint="Drop the table from the publication, run ALTER SUBSCRIPTION ... REFRESH PUBLICATION, empty"
                    " the table on the target, and add it again.",
                ) from error
            if truncation.waits_for is not None:
                await self._wait(truncation.waits_for, relid)
                continue
            for condition in truncation.conditions:
                await self._target.delete_rows(transaction, mapping, condition)
            return truncation.whole
        return False

    async def _decide(self, relid: int, key: Key, transaction: RemoteTransaction) -> Decision:
        while (ranges := self._tables.ranges.get(relid)) is not None:
            if lows := ranges.lows_to_compare(key, transaction.finish_lsn):
                ranges.found(key, lows, await self._place(ranges.key, key, lows))
                continue
            part = ranges.find(key)
            decision = part.decide(transaction.xid, transaction.finish_lsn)
            if decision is not Decision.WAIT:
                return decision
            await self._wait(part, relid)
        # The table has been removed from the subscription meanwhile.
        return Decision.SKIP

    async def _require_index(self, mapping: RelationMapping) -> None:
        """Build the index of the key if the target's table lacks it.

        Raises:
            StaleMapping: the table has an index since it was mapped.
            SubscriberError: the index could not be built.
        """
        local, remote = mapping.local, mapping.remote
        if local.identity or self._subscription.copy_indexes is not CopyIndexes.AFTER:
            return
        await self._target.sync()
        async with building_indexes(self._tables, local.oid):
            # Ranges that are being copied have a lock for which the build would wait.
            with anyio.move_on_after(self._wait_limit):
                await self._tables.wait_until(lambda: not self._is_read(local.oid))
            names = (local.schema, local.name), (remote.schema, remote.name)
            await self._indexes.build(await self._session(), local.oid, *names, key_only=True)
        self._target.rows.known_tables.forget()
        if (await self._target.map_relation(remote)).local.identity:
            raise StaleMapping("the target table has an index on its key now", sqlstate=TARGET_TABLE_CHANGED)

    def _is_read(self, relid: int) -> bool:
        ranges = self._tables.ranges.get(relid)
        return ranges is not None and any(one.state in (RangeState.READING, RangeState.COMMITTING) for one in ranges)

    async def _session(self) -> Publisher:
        """Return the session on the publisher, which is opened for the first question."""
        if self._publisher is None:
            self._publisher = await self._connect()
            # The whole stream waits for the answers.
            await self._publisher.session.query(f"SET lock_timeout = {LOCK_TIMEOUT_MS}")
        return self._publisher

    async def _place(self, key: RangeKey, value: Key, lows: Sequence[Key]) -> int:
        """Ask the publisher for the place of a key."""
        return await place(await self._session(), key, value, lows)

    def close(self) -> None:
        """Close the session on the publisher, if there is one."""
        if self._publisher is not None:
            self._publisher.session.abort()

    async def _wait(self, part: KeyRange, relid: int) -> None:
        """Wait until a range is copied or its copy has failed.

        Raises:
            ApplyError: the target does not answer to the COMMIT of the range.
        """
        await self._target.sync()
        ended = RangeState.UNREAD, RangeState.COPIED
        ranges = self._tables.ranges.get(relid)
        with anyio.move_on_after(self._wait_limit):
            await self._tables.wait_until(
                lambda: part.state in ended or part.spoiled or self._tables.ranges.get(relid) is not ranges
            )
            return
        schema, name = self._tables.names.get(relid, ("", str(relid)))
        if not part.spoil():
            raise ApplyError(
                f'the copy of a range of table "{schema}.{name}" has not been committed for {self._wait_limit:g} s',
                hint="Find the session that blocks it in pg_stat_activity of the target.",
            )
        telemetry.log(
            telemetry.LOG,
            f'a range of table "{schema}.{name}" will be read again, because a change has waited for it for'
            f" {self._wait_limit:g} s",
            event="ranges.spoiled",
            relation=f"{schema}.{name}",
        )


def restore(rows: list[CopiedRange], timeline: int) -> TableRanges | None:
    """Return the ranges of a table as the catalog has them. None: it has none.

    Ranges of another timeline are not copied: the transactions of their snapshots may be lost.
    """
    if not rows:
        return None
    columns = zip(rows[0].key_columns, rows[0].key_types, rows[0].key_comparisons, strict=True)
    key = RangeKey(tuple(KeyColumn(*column) for column in columns))
    ranges = TableRanges(key, timeline)
    restored = [_restored(key, row) for row in rows if row.timeline == timeline]
    # From the lowest on. Several rows may begin with the same key if one is a range of this key alone, or an empty one,
    # which earlier versions have stored.
    following = {one.low: one for one in restored if not one.single and (one.low is None or one.low != one.high)}
    chain, low = [], None
    while (one := following.pop(low, None)) is not None:
        chain.append(one)
        low = one.high
        if low is None:
            break
    for one in [*chain, *following.values(), *(one for one in restored if one.single)]:
        try:
            ranges.restore(one)
        except ValueError as error:
            raise SubscriberError(f"row {one.row} of subscriber.copied_range is damaged", detail=str(error)) from error
    return ranges


def _restored(key: RangeKey, row: CopiedRange) -> KeyRange:
    try:
        low, high = (None if limit is None else key.from_texts(limit) for limit in (row.low, row.high))
        restored = KeyRange(low, high, single=row.single, row=row.rangeid)
        if row.snapshot is not None and row.lsn is not None:
            restored.read_in = RangeSnapshot(TransactionSnapshot.parse(row.snapshot), row.lsn)
            restored.state = RangeState.COPIED
    except ValueError as error:
        raise SubscriberError(f"row {row.rangeid} of subscriber.copied_range is damaged", detail=str(error)) from error
    return restored


def stored_range(rangeid: int, relid: int, ranges: TableRanges, part: KeyRange) -> CopiedRange:
    """Return the row of the catalog for a range. `rangeid` is the row that it replaces; 0: there is none."""
    low, high = (None if limit is None else ranges.key.texts(limit) for limit in (part.low, part.high))
    return CopiedRange(
        rangeid=rangeid,
        relid=relid,
        key_columns=[column.name for column in ranges.key.columns],
        key_types=[column.type_oid for column in ranges.key.columns],
        key_comparisons=[column.compared_as for column in ranges.key.columns],
        low=low,
        high=high,
        single=part.single,
        snapshot=None if part.read_in is None else str(part.read_in.snapshot),
        lsn=None if part.read_in is None else part.read_in.lsn,
        timeline=ranges.timeline,
    )


async def load_ranges(connection: Connection, subid: int, relid: int, timeline: int) -> TableRanges | None:
    """Return the ranges of one table as the catalog has them. None: it has none."""
    return restore(await copied_ranges.load(connection, subid, relid), timeline)
