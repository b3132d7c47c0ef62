"""Checks of the rules of ownership, when a subscription or its list of tables is changed.

The rules of two subscriptions for one table must be disjoint. Two statements that run at the same time do not see one
another, so a repair compares the rules again before it deletes a row (TableOwnership.is_proven).
"""

from __future__ import annotations

from collections.abc import Sequence

import asyncpg

from subscriber.catalog.column_types import column_types_query
from subscriber.catalog.commands.publisher_connection import Notice
from subscriber.catalog.store.subscription_rel import load_relation_states
from subscriber.catalog.store.subscriptions import load_subscription
from subscriber.catalog.store.table_writers import load_ownership
from subscriber.display import sql_identifier, sql_literal, sql_name
from subscriber.errors import StatementError
from subscriber.ownership import Table, TableOwnership
from subscriber.remedy import Remedy
from subscriber.sqlstate import (
    INVALID_OBJECT_DEFINITION,
    INVALID_PARAMETER_VALUE,
    OBJECT_NOT_IN_PREREQUISITE_STATE,
)
from subscriber.subscription import TableCopy


async def check_rules(
    connection: asyncpg.Connection, subid: int, notice: Notice, *, copy_data: TableCopy | None = None
) -> None:
    """Check the rules of a subscription for its tables, in the transaction of the statement.

    Args:
        connection: a connection to the target.
        subid: OID of the subscription.
        notice: receives a warning for each table whose rows may belong to several subscriptions.
        copy_data: how new tables are synchronized.

    Raises:
        StatementError: a rule does not fit its table, or a row may belong to two subscriptions.
    """
    subscription = await load_subscription(connection, subid)
    if subscription is None:
        return
    ownership = await load_ownership(connection, subscription)
    unused = set(ownership.rules.tables)
    tables = await load_relation_states(connection, subid)
    types = await _types(connection, [table.relid for table in tables]) if ownership.rules else {}
    for table in tables:
        name, label = (table.namespace, table.name), f"{table.namespace}.{table.name}"
        unused.discard(name)
        table_ownership = ownership.of(table.relid, name)
        if table_ownership.rule is not None:
            if (problem := table_ownership.rule.problem(types.get(table.relid, {}))) is not None:
                raise StatementError(
                    f'rule of ownership of subscription "{subscription.name}" does not fit table "{label}": {problem}',
                    hint="Correct source_tag, or give the table a rule of its own.",
                    sqlstate=INVALID_PARAMETER_VALUE,
                )
            _refuse_overlap(subscription.name, name, table_ownership)
        is_compared = copy_data in (TableCopy.COMPARE, TableCopy.DELETE_EXTRA)
        if table_ownership.doubtful and (table_ownership.rule is not None or is_compared):
            notice(
                "WARNING",
                f'table "{label}" may have rows of other subscriptions: {table_ownership.names}',
                "Rows that the publisher does not have are kept until all these subscriptions have a rule of ownership"
                " for the table.",
                str(
                    rule_remedy(
                        table_ownership.doubtful[0].name if table_ownership.rule is not None else subscription.name,
                        *name,
                    )
                ),
            )
    for missing in sorted(unused):
        notice(
            "WARNING", f'source_tag names table "{".".join(missing)}", which the subscription does not have', None, None
        )


async def _types(connection: asyncpg.Connection, relids: Sequence[int]) -> dict[int, dict[str, str]]:
    """Return the base type of each column by OID of its table."""
    types: dict[int, dict[str, str]] = {}
    for relid, column, _, base in await connection.fetch(column_types_query(*relids)) if relids else ():
        types.setdefault(int(relid), {})[column] = base
    return types


def _refuse_overlap(subscription: str, table: Table, found: TableOwnership) -> None:
    for other in found.doubtful:
        if other.rule is not None:
            raise StatementError(
                f'a row of table "{".".join(table)}" may belong to subscriptions "{subscription}" and "{other.name}"',
                detail="Two rules of ownership are disjoint if they name the same column, with values that differ or"
                " ranges that do not overlap.",
                hint=rule_remedy(subscription, *table, advice="Choose another rule"),
                sqlstate=INVALID_OBJECT_DEFINITION,
            )


def rule_remedy(subscription: str, schema: str, name: str, advice: str = "Say which rows belong to it") -> Remedy:
    """Return how a subscription gets a rule for a table."""
    rule = sql_literal(f"{sql_name(schema, name)}: …")
    statement = f"ALTER SUBSCRIPTION {sql_identifier(subscription)} SET (source_tag = {rule})"
    return Remedy(f"{advice}: {statement}, such as tenant_id = 7.")


def refuse_deletion(subscription: str, table: Table, found: TableOwnership) -> None:
    """Refuse to delete rows of a table, if they may belong to another subscription.

    Raises:
        StatementError: another subscription has rows in the table, and no rule tells which ones.
    """
    if found.may_delete(delete_extra=True):
        return
    raise StatementError(
        f'rows of table "{".".join(table)}" may belong to other subscriptions: {found.names}',
        detail="Rows are deleted from such a table only if all its subscriptions have rules of ownership that are"
        " disjoint.",
        hint=rule_remedy(subscription, *table),
        sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
    )
