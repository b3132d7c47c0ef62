"""Tables with rows of several subscriptions: proof that each row of the target belongs to exactly one of them.

verify() compares the rows of each subscription, within its rule of ownership. compare_union() adds what no single
subscription can prove:

- The rules of any two subscriptions are disjoint, so no row belongs to both.
- Each row of the table belongs to a rule, so no row is compared with no publisher.

The rows are counted in one snapshot of the target, after the comparisons. A row of the stream belongs to the rule of
its subscription, so the count does not depend on the time.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass

from subscriber.catalog.column_types import column_types_query
from subscriber.catalog.commands.privileges import may_manage
from subscriber.catalog.connection import CatalogConnection
from subscriber.catalog.schema import ensure_schema
from subscriber.catalog.store.subscription_rel import load_relation_states
from subscriber.catalog.store.subscriptions import load_subscriptions
from subscriber.catalog.store.table_writers import load_ownership
from subscriber.comparison.consistent_snapshot import open_side
from subscriber.connection.session import Session, savepoint
from subscriber.connection.settings import READ_NO_VIEW
from subscriber.errors import ServerError
from subscriber.ownership import OwnershipRule, Table, TableOwnership
from subscriber.publisher.answers import count, parsing
from subscriber.publisher.partitions import whole
from subscriber.publisher.table_access import read_access
from subscriber.quoting import identifier, literal, qualified
from subscriber.subscription import Subscription

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


async def compare_union(target: str, apply_target: str | None = None) -> list[SharedTable]:
    """Examine the tables that several subscriptions write to.

    Args:
        target: the connection string of the database. Its role sees the subscriptions.
        apply_target: the connection string of the role that applies changes, which reads the tables. None: `target`.

    Returns:
        The tables of the subscriptions that the role of `target` may manage, by name. A table that cannot be read has
        a note.

    Raises:
        SubscriberError: the target cannot be reached or refuses a query on the catalog.
    """
    async with CatalogConnection.open(target, APPLICATION_NAME) as catalog, catalog.use() as connection:
        await ensure_schema(connection)
        shared: dict[int, tuple[Table, TableOwnership, Subscription]] = {}
        unproven: dict[int, set[str]] = {}
        for subscription in await load_subscriptions(connection):
            if not await may_manage(connection, subscription):
                continue
            ownership = await load_ownership(connection, subscription)
            for table in await load_relation_states(connection, subscription.oid):
                name = (table.namespace, table.name)
                table_ownership = ownership.of(table.relid, name)
                if not table_ownership.others:
                    continue
                shared[table.relid] = name, table_ownership, subscription
                doubtful = {writer.name for writer in table_ownership.doubtful}
                unproven.setdefault(table.relid, set()).update(doubtful, {subscription.name} if doubtful else ())
    async with AsyncExitStack() as stack:
        session = await open_side(stack, apply_target or target)
        examined = [
            await _examine(session, relid, *table, tuple(sorted(unproven[relid]))) for relid, table in shared.items()
        ]
    return sorted(examined, key=lambda found: found.name)


async def _examine(
    session: Session,
    relid: int,
    table: Table,
    ownership: TableOwnership,
    subscription: Subscription,
    unproven: tuple[str, ...],
) -> SharedTable:
    """Count the rows of a table that belong to no rule."""
    names = tuple(sorted({subscription.name, *(writer.name for writer in ownership.others)}))
    label = ".".join(table)
    if ownership.rule is None or any(writer.rule is None for writer in ownership.others):
        return SharedTable(label, names, unproven)
    types = {name or "": base or "" for _, name, _, base in await session.rows(column_types_query(relid))}
    rules: list[tuple[OwnershipRule, Table]] = [(ownership.rule, table)]
    rules += [(writer.rule, writer.table or table) for writer in ownership.others if writer.rule is not None]
    for rule, _ in rules:
        if (problem := rule.problem(types)) is not None:
            return SharedTable(label, names, unproven, note=problem)
    acting = subscription.owner if subscription.run_as_owner else None
    access = await read_access(session, "target", [whole(*table, [])], switches=True, acting=acting)
    if access.problem is not None:
        return SharedTable(label, names, unproven, note=f"{access.problem}. {access.remedy}")
    conditions = []
    for rule, place in rules:
        within = "" if place == table else f" AND {_IN_TABLE.format(table=literal(qualified(*place)))}"
        conditions.append(f"({rule.condition(types)}{within}) IS NOT TRUE")
    query = _COUNT.format(table=qualified(*table), conditions=" AND ".join(conditions))
    await session.query(f"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; {READ_NO_VIEW}")
    try:
        async with savepoint(session):
            if (role := access.roles.get(qualified(*table))) is not None:
                await session.query(f"SET LOCAL ROLE {identifier(role)}")
            ((unowned,),) = await session.rows(query)
    except ServerError as error:
        return SharedTable(label, names, unproven, note=error.message)
    finally:
        if session.error is None:
            await session.query("ROLLBACK")
    with parsing("the number of rows"):
        return SharedTable(label, names, unproven, unowned=count(unowned))
