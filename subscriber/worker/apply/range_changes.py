"""RangeChanges: the changes that an apply worker receives of tables that are being copied by ranges.

Purpose. The copy (worker/tablesync/range_copy.py) and the apply worker share the ranges of each table
(`TableStates.ranges()`). subscriber/ranges/__init__.py has the rules.

Invariants.

- A decision and its record in memory are one step, without an await. change() and truncate() are no coroutines: they
  return what they have to wait for, and are called again afterwards (apply_hooks.py:Undecided). So a copy that ends or
  starts again meanwhile is noticed.
- A decision stays true until its transaction ends, because a range that is copied stays copied. Three events revoke
  that: REFRESH TABLE and the removal of a table change the generation of the settings, so the transaction cannot
  commit; after a failover a copy waits for an apply worker of the same timeline (range_copy.py).
- If only the publisher can compare keys, it is asked for the range of each key that is not known. The answer is used
  only if the ranges are the same as when it was asked.
- No statement of the apply worker concerns a table before the table has an index on its key. So no transaction of the
  apply worker holds a lock for which the build of the index waits.
- A position is confirmed after a key to read again is stored (`_read_again()`).
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
from functools import partial

import anyio

from subscriber import telemetry
from subscriber.apply.relation_map import RelationMapping
from subscriber.apply.table_states import TableState
from subscriber.apply.transaction import RemoteTransaction
from subscriber.catalog.connection import CatalogConnection, Connection
from subscriber.catalog.store import copied_ranges
from subscriber.catalog.store.copied_ranges import CopiedRange
from subscriber.errors import ApplyError, ServerError, SubscriberError
from subscriber.failpoints import Point, reached
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
    Truncation,
    effect,
)
from subscriber.settings import Settings
from subscriber.sqlstate import SERIALIZATION_FAILURE
from subscriber.subscription import CopyEngine, CopyIndexes, Subscription
from subscriber.targets.postgres.target import PostgresTarget
from subscriber.targets.postgres.worker_session import claim
from subscriber.worker.apply_hooks import Undecided
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
        self._without_index: set[int] = set()  # tables whose published key has no index, by OID

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
        by_ranges = stored & copying | self._tables.divided.keys()
        if self._subscription.copy_engine is CopyEngine.RANGES:
            by_ranges.update(copying - copied_otherwise)
        for relid in by_ranges:
            await self._claim(relid)
        async with self._catalog.use() as connection:
            rows = await copied_ranges.load(connection, subid)
        self._tables.timeline.start(timeline)
        for relid in by_ranges:
            if (table := self._tables.get(relid)) is not None:
                table.ranges = restore([row for row in rows if row.relid == relid], timeline)
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
        waiting = [ranges for ranges in self._tables.divided.values() if ranges.unsettled or ranges.awaited]
        if waiting:
            await self._target.sync()
            await reached(Point.SETTLED)
            for ranges in waiting:
                ranges.settle(position)
            self._tables.notify()

    def change(
        self, transaction: RemoteTransaction, mapping: RelationMapping, change: Insert | Update | Delete
    ) -> Insert | Update | Delete | Undecided | None:
        """Return the part of a change that is to be applied. None: nothing.

        Raises:
            ApplyError: the change has no key of the ranges.
        """
        relid, xid, finish_lsn = mapping.local.oid, transaction.xid, transaction.finish_lsn
        ranges = self._tables.ranges(relid)
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
        keys = list(dict.fromkeys(key for key in (old, new) if key is not None))
        assert keys
        for key in keys:
            if lows := ranges.lows_to_compare(key, finish_lsn):
                return Undecided(partial(self._find_range, ranges, key, lows))
        if (waited := ranges.waited_for(xid, finish_lsn, keys)) is not None:
            return Undecided(partial(self._wait, waited, relid))
        decisions = [ranges.find(key).decide(xid, finish_lsn) for key in keys]
        if Decision.APPLY not in decisions:
            return None
        if self._lacks_index(mapping):
            return self._index_build(mapping)
        if len(keys) == 1 or not isinstance(change, Update):
            return change
        part = applied_part(change, effect(*decisions))
        if isinstance(part, Insert) and UNCHANGED in part.new.split()[0]:
            # The new row of an UPDATE whose old row is not on the target, with a large value that was not sent.
            return Undecided(partial(self._read_again, relid, ranges, keys[1], xid))
        return part

    async def _find_range(self, ranges: TableRanges, key: Key, lows: tuple[Key, ...]) -> None:
        """Ask the publisher for the range of a key."""
        ranges.found(key, lows, await place(await self._session(), ranges.key, key, lows))

    async def _read_again(self, relid: int, ranges: TableRanges, key: Key, xid: int) -> None:
        """Store a key as one that has to be read again, and make it a range. Its changes are skipped until then."""
        single = stored_range(0, relid, ranges, KeyRange(key, single=True))
        async with self._catalog.use() as connection:
            row = await copied_ranges.add_single(connection, self._subscription.oid, single)
        # The copy of the table may have started again meanwhile. Then the key is stored once more.
        if self._tables.ranges(relid) is ranges:
            ranges.add_single(key, xid).row = row

    def truncate(
        self, transaction: RemoteTransaction, mappings: Sequence[RelationMapping]
    ) -> Sequence[Truncation] | Undecided:
        """Return the effect of a TRUNCATE on each of several tables.

        Raises:
            ApplyError: the TRUNCATE cannot be applied to a part of a table.
        """
        xid, finish_lsn = transaction.xid, transaction.finish_lsn
        tables_ranges = [self._tables.ranges(mapping.local.oid) for mapping in mappings]
        for mapping, ranges in zip(mappings, tables_ranges, strict=True):
            if ranges is None:
                continue
            if (waited := ranges.waited_for(xid, finish_lsn)) is not None:
                return Undecided(partial(self._wait, waited, mapping.local.oid))
            if self._lacks_index(mapping):
                return self._index_build(mapping)
        return [
            Truncation(whole=False) if ranges is None else self._truncation(transaction, mapping, ranges)
            for mapping, ranges in zip(mappings, tables_ranges, strict=True)
        ]

    def _truncation(self, transaction: RemoteTransaction, mapping: RelationMapping, ranges: TableRanges) -> Truncation:
        try:
            return ranges.truncation(transaction.xid, transaction.finish_lsn)
        except ValueError as error:
            raise ApplyError(
                f'a TRUNCATE of table "{mapping.label}", which is being copied by ranges, cannot be applied',
                detail=str(error),
                hint="Drop the table from the publication, run ALTER SUBSCRIPTION ... REFRESH PUBLICATION, empty"
                " the table on the target, and add it again.",
            ) from error

    async def delete(self, transaction: RemoteTransaction, mapping: RelationMapping, conditions: Sequence[str]) -> None:
        """Delete the rows of ranges that a TRUNCATE concerns."""
        for condition in conditions:
            await self._target.delete_rows(transaction, mapping, condition)

    def _lacks_index(self, mapping: RelationMapping) -> bool:
        """Return True if the index of the key has to be built before a change of the table is applied."""
        is_built_later = self._subscription.copy_indexes is CopyIndexes.AFTER
        return is_built_later and not mapping.local.identity and mapping.local.oid not in self._without_index

    def _index_build(self, mapping: RelationMapping) -> Undecided:
        return Undecided(partial(self._build_index, mapping), maps_again=True)

    async def _build_index(self, mapping: RelationMapping) -> None:
        """Build the index of the key if the target's table lacks it.

        Raises:
            SubscriberError: the index could not be built.
        """
        local, remote = mapping.local, mapping.remote
        await self._target.sync()
        async with building_indexes(self._tables, local.oid):
            # Ranges that are being copied have a lock for which the build would wait.
            with anyio.move_on_after(self._wait_limit):
                await self._tables.wait_until(lambda: not self._is_read(local.oid))
            names = (local.schema, local.name), (remote.schema, remote.name)
            await self._indexes.build(await self._session(), local.oid, *names, key_only=True)
        self._target.session.known_tables.forget()
        if not (await self._target.map_relation(remote)).local.identity:
            self._without_index.add(local.oid)  # the publisher has none either

    def _is_read(self, relid: int) -> bool:
        ranges = self._tables.ranges(relid)
        return ranges is not None and any(
            table_range.state in (RangeState.READING, RangeState.COMMITTING) for table_range in ranges
        )

    async def _session(self) -> Publisher:
        """Return the session on the publisher, which is opened for the first question."""
        if self._publisher is None:
            self._publisher = await self._connect()
            # The whole stream waits for the answers.
            await self._publisher.session.query(f"SET lock_timeout = {LOCK_TIMEOUT_MS}")
        return self._publisher

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
        ranges = self._tables.ranges(relid)
        with anyio.move_on_after(self._wait_limit):
            await self._tables.wait_until(
                lambda: part.state in ended or part.spoiled or self._tables.ranges(relid) is not ranges
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
    # From the lowest on. Two rows may begin with the same key if one is a range of this key alone.
    following = {table_range.low: table_range for table_range in restored if not table_range.single}
    chain, low = [], None
    while (following_range := following.pop(low, None)) is not None:
        chain.append(following_range)
        low = following_range.high
        if low is None:
            break
    for following_range in [
        *chain,
        *following.values(),
        *(table_range for table_range in restored if table_range.single),
    ]:
        try:
            ranges.restore(following_range)
        except ValueError as error:
            raise SubscriberError(
                f"row {following_range.row} of subscriber.copied_range is damaged", detail=str(error)
            ) from error
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
