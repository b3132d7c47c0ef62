"""Tables with rows of several subscriptions: proof that each row of the target belongs to exactly one of them.

verify() compares the rows of each subscription, within its rule of ownership. compare_union() adds what no single
subscription can prove:

- The rules of any two subscriptions are disjoint, so no row belongs to both.
- Each row of the table belongs to a rule, so no row is compared with no publisher.

The rows are counted in one snapshot of the target, after the comparisons. A row of the stream belongs to the rule of
its subscription, so the count does not depend on the time.
"""

from __future__ import annotations

from dataclasses import dataclass

from subscriber.catalog.column_types import column_types_query
from subscriber.catalog.connection import CatalogConnection, Connection
from subscriber.catalog.schema import ensure_schema
from subscriber.catalog.store.subscription_rel import load_relation_states
from subscriber.catalog.store.subscriptions import load_subscriptions
from subscriber.catalog.store.table_writers import load_ownership
from subscriber.connection.errors import ASYNCPG_ERRORS
from subscriber.ownership import OwnershipRule, Table, TableOwnership
from subscriber.quoting import literal, qualified

APPLICATION_NAME = "subscriber verify"
_COUNT = "SELECT count(*) FROM {table} WHERE {conditions}"
_IN_TABLE = "tableoid IN (SELECT relid FROM pg_catalog.pg_partition_tree({table}::pg_catalog.regclass))"


@dataclass(frozen=True, slots=True)
class SharedTable:
    """A table of the target with rows of several subscriptions.

    Attributes:
        name: the table, with its schema.
        subscriptions: the subscriptions that write to it.
        unproven: subscriptions that may own a row of another one, because a rule is missing or two are not disjoint.
        unowned: rows that belong to none of the rules. None: they were not counted.
        note: the reason why they were not counted.
    """

    name: str
    subscriptions: tuple[str, ...]
    unproven: tuple[str, ...] = ()
    unowned: int | None = None
    note: str | None = None

    @property
    def is_proven(self) -> bool:
        """Return True if each row belongs to exactly one subscription."""
        return not self.unproven and self.unowned == 0


async def compare_union(target: str) -> list[SharedTable]:
    """Examine the tables that several subscriptions write to.

    Args:
        target: the connection string of the database. Its role sees the subscriptions, and reads the tables.

    Returns:
        The tables, by name. A table that cannot be read has a note.

    Raises:
        SubscriberError: the target cannot be reached or refuses a query on the catalog.
    """
    async with CatalogConnection.open(target, APPLICATION_NAME) as catalog, catalog.use() as connection:
        await ensure_schema(connection)
        shared: dict[int, tuple[Table, TableOwnership, str]] = {}
        unproven: dict[int, set[str]] = {}
        for subscription in await load_subscriptions(connection):
            ownership = await load_ownership(connection, subscription)
            for table in await load_relation_states(connection, subscription.oid):
                name = (table.namespace, table.name)
                found = ownership.of(table.relid, name)
                if not found.others:
                    continue
                shared[table.relid] = name, found, subscription.name
                doubtful = {one.name for one in found.doubtful}
                unproven.setdefault(table.relid, set()).update(doubtful, {subscription.name} if doubtful else ())
        return sorted(
            [
                await _examine(connection, relid, *table, tuple(sorted(unproven[relid])))
                for relid, table in shared.items()
            ],
            key=lambda found: found.name,
        )


async def _examine(
    connection: Connection,
    relid: int,
    table: Table,
    ownership: TableOwnership,
    subscription: str,
    unproven: tuple[str, ...],
) -> SharedTable:
    """Count the rows of a table that belong to no rule."""
    names = tuple(sorted({subscription, *(one.name for one in ownership.others)}))
    label = ".".join(table)
    if ownership.rule is None or any(one.rule is None for one in ownership.others):
        return SharedTable(label, names, unproven)
    types = {row[1]: row[3] for row in await connection.fetch(column_types_query(relid))}
    rules: list[tuple[OwnershipRule, Table]] = [(ownership.rule, table)]
    rules += [(one.rule, one.table or table) for one in ownership.others if one.rule is not None]
    for rule, _ in rules:
        if (problem := rule.problem(types)) is not None:
            return SharedTable(label, names, unproven, note=problem)
    conditions = []
    for rule, place in rules:
        within = "" if place == table else f" AND {_IN_TABLE.format(table=literal(qualified(*place)))}"
        conditions.append(f"({rule.condition(types)}{within}) IS NOT TRUE")
    query = _COUNT.format(table=qualified(*table), conditions=" AND ".join(conditions))
    try:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            unowned = await connection.fetchval(query)
    except ASYNCPG_ERRORS as error:
        return SharedTable(label, names, unproven, note=str(error))
    return SharedTable(label, names, unproven, unowned=int(unowned))
