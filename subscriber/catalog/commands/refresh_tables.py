"""ALTER SUBSCRIPTION … REFRESH TABLE: synchronize tables again, while the others stream.

The statement sets the tables to state init. The launcher's table synchronization workers do the rest, as for a table
that REFRESH PUBLICATION has added. worker/tablesync/comparison.py describes the comparison.

Failure cases, W the apply worker.

- W commits changes of a table after the statement, in a transaction that it began before: the target refuses the
  commit, because the statement has changed the generation of the settings. W starts again and skips these changes.
- A synchronization worker of the table runs: the statement ends its session, so it commits no rows of an earlier copy.
- W or a synchronization worker stores the next state of the table: state init is followed by datasync only.
"""

from __future__ import annotations

import asyncpg

from subscriber.apply.table_states import TableState
from subscriber.catalog import table_names
from subscriber.catalog.commands import quarantine, worker_shutdown
from subscriber.catalog.commands.ownership import refuse_deletion
from subscriber.catalog.grammar.parser import TableName
from subscriber.catalog.store.subscription_rel import (
    SubscriptionRel,
    load_relation_states,
    load_stored_relations,
    synchronize_again,
)
from subscriber.catalog.store.table_writers import load_ownership
from subscriber.display import shell_word, sql_identifier, sql_name
from subscriber.errors import StatementError
from subscriber.remedy import Remedy
from subscriber.sqlstate import AMBIGUOUS_ALIAS, OBJECT_NOT_IN_PREREQUISITE_STATE, UNDEFINED_OBJECT
from subscriber.subscription import Subscription, TableCopy, TwoPhaseState


async def refresh_tables(
    connection: asyncpg.Connection,
    subscription: Subscription,
    tables: tuple[TableName, ...],
    *,
    truncate: bool,
    delete_extra: bool = False,
) -> None:
    """Have tables synchronized again, in the connection's transaction.

    Args:
        connection: a connection to the target, whose transaction has the subscription's row locked.
        subscription: the subscription.
        tables: the tables on the target.
        truncate: empty the tables and copy them. False: repair the rows that differ.
        delete_extra: delete rows that the publisher does not have. False: keep and count them.

    Raises:
        StatementError: a table is not part of the subscription, the subscription cannot synchronize tables now, or it
            cannot be known which rows of a table belong to it.
    """
    name = subscription.name
    if not subscription.enabled:
        raise StatementError(
            "ALTER SUBSCRIPTION ... REFRESH TABLE is not allowed for disabled subscriptions",
            hint=Remedy("enable it first", f"ALTER SUBSCRIPTION {sql_identifier(name)} ENABLE;"),
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )
    if subscription.two_phase is TwoPhaseState.ENABLED:
        # A transaction that is prepared during the copy would be lost between two slots, as with REFRESH PUBLICATION.
        raise StatementError(
            "ALTER SUBSCRIPTION ... REFRESH TABLE is not allowed when two_phase is enabled",
            hint=Remedy(
                "repair the rows that differ",
                f"subscriber repair {shell_word(name)}",
                alternative=Remedy("disable the subscription, set two_phase = false, and enable it again."),
            ),
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )
    await quarantine.refuse_while_in_use(connection, subscription, "REFRESH TABLE")
    stored = [(row["nspname"], row["relname"]) for row in await load_stored_relations(connection, subscription.oid)]
    named = [
        name
        for name in stored
        if any(known_table.name == name[1] and known_table.schema in (None, name[0]) for known_table in tables)
    ]
    await table_names.follow(connection, subscription, named)
    known = await load_relation_states(connection, subscription.oid)
    how = TableCopy.DELETE_EXTRA if delete_extra else TableCopy.COMPARE
    if truncate:
        how = TableCopy.TRUNCATE
    writers = await load_ownership(connection, subscription)
    for table in tables:
        relation = _find(table, known, name)
        if how is not TableCopy.COMPARE:
            refuse_deletion(
                name,
                (relation.namespace, relation.name),
                writers.of(relation.relid, (relation.namespace, relation.name)),
            )
        if relation.state is not TableState.READY:
            await worker_shutdown.end_workers(connection, subscription.oid, relation.relid)
        await synchronize_again(connection, subscription.oid, relation.relid, how)


def _find(table: TableName, known: list[SubscriptionRel], subscription: str) -> SubscriptionRel:
    """Return the table of the subscription with a name. Sessions have no search_path, so a schema may be missing."""
    relations = [
        relation for relation in known if relation.name == table.name and table.schema in (None, relation.namespace)
    ]
    if not relations:
        raise StatementError(
            f'table "{table.label}" is not part of subscription "{subscription}"',
            hint=Remedy(
                "add the publications' tables",
                f"ALTER SUBSCRIPTION {sql_identifier(subscription)} REFRESH PUBLICATION;",
            ),
            sqlstate=UNDEFINED_OBJECT,
        )
    if len(relations) > 1:
        names = ", ".join(sql_name(relation.namespace, relation.name) for relation in relations)
        raise StatementError(
            f'subscription "{subscription}" has several tables with the name "{table.label}"',
            hint=f"Name one with its schema: {names}.",
            sqlstate=AMBIGUOUS_ALIAS,
        )
    return relations[0]
