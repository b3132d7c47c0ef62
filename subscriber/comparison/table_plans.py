"""TablePlans: the tables of a subscription that can be compared, and the reasons why others cannot."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple

from subscriber import server_features as features
from subscriber.apply.batch.eligibility import FIRST_NORMAL_OID
from subscriber.apply.relation_map import RelationMapping
from subscriber.catalog.column_types import column_types_query
from subscriber.catalog.connection import CatalogConnection
from subscriber.catalog.store.subscription_rel import load_relation_sources
from subscriber.catalog.store.table_writers import SubscriptionOwnership
from subscriber.comparison.checksums import BYTES_OF_A_ROW, TableSide, buckets_for
from subscriber.comparison.columns import HASHED_VALUES, ComparedColumn, Conversion
from subscriber.comparison.compared_table import ComparedTable
from subscriber.comparison.consistent_snapshot import CommonSnapshot
from subscriber.comparison.queries import as_table_change, import_snapshot
from subscriber.comparison.result import TableComparison
from subscriber.connection.pipeline import Pipeline
from subscriber.connection.session import Session, savepoint
from subscriber.errors import MappingError, ServerError, TableChanged
from subscriber.ownership import OwnershipRule
from subscriber.publisher.answers import parsing
from subscriber.publisher.connection import Publisher
from subscriber.publisher.partitions import partition_table, whole
from subscriber.publisher.table_access import read_access
from subscriber.publisher.tables import PublishedTable, as_relation
from subscriber.subscription import Subscription
from subscriber.targets.postgres.session.roles import load_roles
from subscriber.targets.postgres.session.target_session import TargetSession

MOST_PARTS = 16  # of a heap

_NAMES = """
SELECT n.nspname, c.relname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.oid IN ({oids}) ORDER BY 1, 2
"""


class PrintedType(NamedTuple):
    """The type of a column, and that of its values if it is a domain, as format_type() prints them."""

    name: str
    base: str


def _condition(rule: OwnershipRule | None, types: Mapping[str, PrintedType], published: Collection[str]) -> str | None:
    """Return SQL for the rows of a rule on one side. None: all rows.

    Raises:
        MappingError: the rule does not fit the table.
    """
    if rule is None or rule.has_all_rows:
        return None
    bases = {name: types[name].base for name in published if name in types}
    if (problem := rule.problem(bases)) is not None:
        raise MappingError(f"its rule of ownership does not fit: {problem}")
    return rule.condition(bases)


@asynccontextmanager
async def _of_table(session: Session, side: str) -> AsyncIterator[None]:
    """Keep the transaction of a session if the block fails, for example because a lock of a table lasts too long.

    Raises:
        TableChanged: the table is locked, or has changed.
    """
    try:
        async with savepoint(session):
            yield
    except ServerError as error:
        changed = as_table_change(error)
        if isinstance(changed, TableChanged):
            raise TableChanged(f"on the {side}: {changed.message}", sqlstate=changed.sqlstate) from error
        raise


class TablePlans:
    """Reads the definitions of tables on both servers, in a common snapshot."""

    def __init__(
        self,
        catalog: CatalogConnection,
        subscription: Subscription,
        snapshot: CommonSnapshot,
        ownership: SubscriptionOwnership,
    ) -> None:
        """Create the plans of one comparison.

        Args:
            catalog: a connection to the target. The role of the snapshot's session may not read the catalog.
            subscription: the subscription.
            snapshot: the snapshot of both sides, whose sessions are used for queries only while a method runs.
            ownership: which rows belong to the subscription.
        """
        self._catalog = catalog
        self._subscription = subscription
        self._snapshot = snapshot
        self._ownership = ownership
        self._sessions = (snapshot.source_session, snapshot.target_session)
        self._publisher = Publisher(snapshot.source_session)
        self._pipeline = Pipeline(snapshot.target_session)

    async def read(
        self, part_bytes: int, names: Collection[str] | None, compared_states: Collection[str]
    ) -> tuple[list[TableComparison], list[ComparedTable]]:
        """Return a comparison for each table of `names`, and the plans of the tables that can be compared."""
        subscription = self._subscription
        tables, plans = [], []
        local = TargetSession(self._pipeline, await load_roles(self._pipeline, subscription, replica_role=True))
        states, with_hooks = await self._states()
        await self._publisher.restrict_views()
        listed = await self._publisher.tables(subscription.publications)
        if names is None:
            tables += await self._unpublished(states, listed)
        for schema, name in listed:
            table = TableComparison(f"{schema}.{name}")
            if names is not None and table.name not in names:
                continue
            tables.append(table)
            if (schema, name) in with_hooks:
                table.leave_out("hooks change its rows on their way")
                continue
            try:
                async with _of_table(self._snapshot.source_session, "publisher"):
                    published = await self._publisher.table(schema, name, subscription.publications)
                local.pipeline.attach()  # the session is used for queries as well
                mapping = await local.map_relation(as_relation(published))
                state = states.get(mapping.local.oid)
                if state is None or state[0] not in compared_states:
                    waits = "it is not part of the subscription yet", "it is still being copied"
                    table.leave_out(waits[state is not None])
                    continue
                plan = await self._plan_table(table, published, mapping, state, part_bytes)
                if await self._may_read(plan):
                    plans.append(plan)
            except TableChanged as error:
                table.leave_out(error.message, is_changed=True)
            except MappingError as error:
                table.leave_out(error.message)
        return tables, plans

    async def _states(self) -> tuple[dict[int, tuple[str, str]], set[tuple[str | None, str | None]]]:
        """Return, in the target's snapshot, the states of tables without hooks by OID, and names of the others."""
        async with (
            self._catalog.use() as connection,
            connection.transaction(isolation="repeatable_read", readonly=True),
        ):
            await import_snapshot(connection, self._snapshot.target)
            rows = await load_relation_sources(connection, self._subscription.oid)
        with_hooks: set[tuple[str | None, str | None]] = {
            (schema, name) for _, _, _, schema, name in rows if name is not None
        }
        states = {relid: (state, lsn) for relid, state, lsn, _, name in rows if name is None}
        return states, with_hooks

    async def _unpublished(
        self, states: Collection[int], listed: Collection[tuple[str | None, str | None]]
    ) -> list[TableComparison]:
        """Return a comparison for each table of the subscription that the publications do not have."""
        oids = ", ".join(map(str, states)) or "0"
        rows = await self._snapshot.target_session.rows(_NAMES.format(oids=oids))
        return [
            TableComparison(f"{schema}.{name}", note="it is part of the subscription, but the publications lack it")
            for schema, name in rows
            if (schema, name) not in listed
        ]

    async def _plan_table(
        self,
        found: TableComparison,
        published: PublishedTable,
        mapping: RelationMapping,
        state: tuple[str, str],
        part_bytes: int,
    ) -> ComparedTable:
        relids = (published.relid, mapping.local.oid)
        types = [await self._types(session, relid) for session, relid in zip(self._sessions, relids, strict=True)]
        ownership = self._ownership.of(mapping.local.oid, (mapping.local.schema, mapping.local.name))
        published_names = [column.name for column in published.columns]
        owned = [_condition(ownership.rule, side, published_names) for side in types]
        checks_input = features.INPUT_CHECK.is_in(self._sessions[0].server_version)
        source, target = [], []
        for column, local in zip(published.columns, mapping.attributes, strict=True):
            ours, theirs = types[0].get(column.name), types[1][local.name]
            conversion, source_type = None, "" if ours is None else ours.base
            # A type that belongs to the target, written with its schema, is not the publisher's.
            if ours is not None and ours.base != theirs.base and "." not in theirs.base:
                conversion = Conversion(ours.base, theirs.base, checks_input)
            built_in = ours == theirs and column.type_oid < FIRST_NORMAL_OID
            equal_type = theirs.name if built_in else None
            hashed = HASHED_VALUES.get(column.type_oid) if built_in else None
            source.append(ComparedColumn(column.name, source_type, conversion, equal_type, hashed))
            target.append(ComparedColumn(local.name, theirs.base, None, equal_type, hashed))
        encodings = [session.parameters["server_encoding"] for session in self._sessions]
        converts = encodings[0] != encodings[1]
        hashes_records = not converts and all(
            features.HASHED_RECORDS.is_in(session.server_version) for session in self._sessions
        )
        key = mapping.search or ()
        found.identify(tuple(mapping.attributes[index].name for index in key))
        part_bytes = max(part_bytes, published.total_bytes // MOST_PARTS)  # each part has sums of nearly all buckets
        async with _of_table(self._snapshot.source_session, "publisher"):
            parts_there = await partition_table(self._snapshot.source_session, published.relid, part_bytes)
        async with _of_table(self._snapshot.target_session, "target"):
            parts_here = await partition_table(self._snapshot.target_session, mapping.local.oid, part_bytes)
        return ComparedTable(
            found,
            (
                TableSide(
                    tuple(source),
                    key,
                    published.row_filters,
                    encodings[1],
                    converts,
                    hashes_records,
                    owned=owned[0],
                ),
                TableSide(tuple(target), key, (), encodings[1], converts, hashes_records, owned=owned[1]),
            ),
            (parts_there, parts_here),
            tuple(column.name for column in mapping.attributes),
            published,
            (mapping.local.schema, mapping.local.name),
            mapping.local.oid,
            *state,
            ownership,
            buckets=buckets_for(published.total_bytes // BYTES_OF_A_ROW),
        )

    async def _may_read(self, plan: ComparedTable) -> bool:
        """Choose the roles that read the table. Returns False if one of them may not, which is noted."""
        published, (schema, name) = plan.published, plan.local_table
        there = [*plan.parts[0], whole(published.schema, published.name, plan.parts[0])]
        here = [*plan.parts[1], whole(schema, name, plan.parts[1])]
        acting = self._subscription.owner if self._subscription.run_as_owner else None
        on_target = await read_access(self._sessions[1], "target", here, switches=True, acting=acting)
        plan.readers = on_target.roles
        for access in (await read_access(self._sessions[0], "publisher", there), on_target):
            if access.problem is not None:
                plan.found.leave_out(access.problem, access.remedy)
                return False
        return True

    async def _types(self, session: Session, relid: int) -> dict[str, PrintedType]:
        rows = await session.rows(column_types_query(relid))
        with parsing("types"):
            return {name or "": PrintedType(type_name or "", base or "") for _, name, type_name, base in rows}
