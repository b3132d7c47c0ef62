"""TrackedComparison: a comparison of a subscription whose apply worker records the ranges that it touches.

    begin()    while the worker is paused: the ranges that were touched up to the position
    divide()   the tables to read as a whole, and the touched ranges of the others
    end()      the tables without a difference, for the next comparison

**Failure cases.**

- Killed between begin() and end(): the ranges remain, and the next comparison reads them.
- Another comparison begins before end(): end() stores nothing. The other one has these ranges too.
- A transaction was prepared before begin() and is committed later: its ranges belong to the next comparison.
- The target returns to an earlier state with a backup: the ranges return with the rows.
- The publisher returns to an earlier state, or a standby is promoted: its timeline is another one, and there is no last
  comparison. A skipped or quarantined transaction, another connection string, slot or list of publications, and
  `track_ranges = false` have the same effect (migrations/schema.sql, section 10).
- A table is copied again: its state has another position, and the whole table is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from subscriber.apply.table_states import TableState
from subscriber.apply.touched_ranges import TouchedTable
from subscriber.catalog.connection import CatalogConnection
from subscriber.catalog.store import verifications
from subscriber.catalog.store.verifications import Verification, VerifiedTable
from subscriber.comparison.checksums import BYTES_OF_A_ROW
from subscriber.comparison.compared_table import ComparedTable
from subscriber.comparison.consistent_snapshot import APPLICATION_NAME
from subscriber.comparison.key_selection import selections
from subscriber.comparison.result import ComparedRows, TableComparison
from subscriber.display import shell_word, sql_identifier
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.protocol.encodings import CODECS
from subscriber.publisher.connection import Publisher
from subscriber.remedy import Remedy
from subscriber.sqlstate import OBJECT_NOT_IN_PREREQUISITE_STATE
from subscriber.subscription import Subscription

WORTH_IT = 4  # a table is read as a whole unless it has this many times the rows of the ranges


class TrackedComparison:
    """One comparison of a subscription with `track_ranges`."""

    def __init__(self, target: str, subscription: Subscription, *, since_last: bool) -> None:
        """Prepare a comparison. `since_last`: read only the ranges that were touched since the last one."""
        self._target = target
        self._subscription = subscription
        self._since_last = since_last
        self._number = 0
        self._publisher = ""
        self._touched: list[TouchedTable] = []
        self._last = Verification(None, {})
        self._parts: list[tuple[ComparedTable, list[ComparedTable]]] = []

    async def begin(self) -> None:
        """Take the touched ranges. The apply worker is paused at the position of the comparison.

        Raises:
            StatementError: there is no last comparison, and `since_last` needs one.
            SubscriberError: a server cannot be reached or refuses a query.
        """
        subscription = self._subscription
        async with CatalogConnection.open(self._target, APPLICATION_NAME) as catalog:
            async with await Publisher.connect(
                subscription.conninfo,
                application_name=APPLICATION_NAME,
                client_encoding=catalog.encoding,
                must_use_password=subscription.must_use_password,
            ) as publisher:
                identity = await publisher.identify_system()
            self._publisher = f"{identity.systemid}:{identity.timeline}"
            async with catalog.use() as connection:
                self._number, self._touched, last = await verifications.begin(connection, subscription.oid)
        if last is not None and last.publisher == self._publisher:
            self._last = last
        elif self._since_last:
            raise _no_last_comparison(subscription)

    def divide(self, plans: Sequence[ComparedTable]) -> list[ComparedTable]:
        """Return what has to be read: whole tables, and a part for each query for the touched ranges of a table."""
        if not self._since_last:
            return list(plans)
        read = []
        for plan in plans:
            verified = self._last.tables.get(plan.relid)
            parts = None
            if verified is not None and (verified.ready, verified.key) == (plan.ready, plan.found.key):
                parts = _parts(plan, [table for table in self._touched if table.relid == plan.relid])
            if verified is None or parts is None:
                read.append(plan)
                continue
            plan.found.restrict(ComparedRows.TOUCHED if parts else ComparedRows.NONE, verified.lsn)
            self._parts.append((plan, parts))
            read += parts
        return read

    async def end(self, lsn: Lsn, plans: Sequence[ComparedTable]) -> None:
        """Add up the parts, and store which tables have no difference. `lsn`: the position of the comparison."""
        for plan, parts in self._parts:
            for part in parts:
                plan.found.add(part.found)
        verified = [
            VerifiedTable(plan.relid, plan.ready, plan.found.key, plan.found.since or lsn)
            for plan in plans
            if plan.found.is_same and plan.state == TableState.READY
        ]
        async with CatalogConnection.open(self._target, APPLICATION_NAME) as catalog, catalog.use() as connection:
            await verifications.end(connection, self._subscription.oid, self._number, self._publisher, verified)


def _parts(plan: ComparedTable, touched: Sequence[TouchedTable]) -> list[ComparedTable] | None:
    """Return a part of the table for each query. None: the whole table has to be read."""
    if not touched:
        return []
    keys = [[side.columns[index] for index in side.key] for side in plan.sides]
    touched_parts = selections(touched, plan.found.key, keys, CODECS[plan.sides[0].encoding])
    if (
        touched_parts is None
        or sum(part.rows for part in touched_parts) * WORTH_IT > plan.published.total_bytes // BYTES_OF_A_ROW
    ):
        return None
    return [
        replace(plan.select(selection), found=TableComparison(plan.found.name, key=plan.found.key))
        for selection in touched_parts
    ]


def not_tracked(subscription: Subscription) -> StatementError:
    """Return the error for a comparison since the last one, of a subscription that records no ranges."""
    name = sql_identifier(subscription.name)
    return StatementError(
        f'subscription "{subscription.name}" does not record the ranges that the stream changes',
        hint=Remedy(
            command=f"ALTER SUBSCRIPTION {name} SET (track_ranges = true);",
            then=Remedy("compare all rows", f"subscriber verify {shell_word(subscription.name)}"),
        ),
        sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
    )


def _no_last_comparison(subscription: Subscription) -> StatementError:
    return StatementError(
        f'subscription "{subscription.name}" has no valid last comparison',
        detail="None has ended, or the target was changed later without a record: by a skipped or quarantined"
        " transaction, another publisher, or a change of the subscription.",
        hint=Remedy("compare all rows", f"subscriber verify {shell_word(subscription.name)}"),
        sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
    )
