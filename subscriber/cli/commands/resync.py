"""`subscriber resync`: have tables synchronized again, and wait for the launcher's workers."""

from __future__ import annotations

import sys
from collections import Counter

from subscriber import formatting
from subscriber.catalog.commands.execute import execute
from subscriber.catalog.commands.privileges import get_owned_subscription
from subscriber.catalog.connection import CatalogConnection
from subscriber.catalog.identity import refuse_standby
from subscriber.catalog.schema import ensure_schema
from subscriber.catalog.store import repairs
from subscriber.catalog.store.subscription_rel import SubscriptionRel, load_relation_states
from subscriber.cli.commands.exec import print_message
from subscriber.cli.progress import ProgressLine
from subscriber.display import near_word, printable, sql_identifier, sql_name
from subscriber.errors import StatementError
from subscriber.repair.table_wait import wait_until_synchronized
from subscriber.sqlstate import UNDEFINED_OBJECT

FAILED = 1


async def run_resync(target: str, name: str, tables: list[str], *, truncate: bool, wait: bool) -> int:
    """Run REFRESH TABLE for the tables, and print what the workers do. Returns the exit status.

    Args:
        target: the connection string of the subscription's database.
        name: the subscription.
        tables: the tables of the target, with or without their schemas.
        truncate: empty the tables and copy them. False: repair the rows that differ.
        wait: wait until the tables are synchronized.

    Raises:
        StatementError: a table is not part of the subscription, or the subscription cannot synchronize tables now.
    """
    async with CatalogConnection.open(target, "subscriber resync") as catalog, catalog.use() as connection:
        await refuse_standby(connection)
        await ensure_schema(connection)
        subscription = await get_owned_subscription(connection, name)
        known = await load_relation_states(connection, subscription.oid)
        found = [_find(table, known, name) for table in tables]
        since = await repairs.now(connection)
        statement = f"ALTER SUBSCRIPTION {sql_identifier(name)} REFRESH TABLE "
        statement += ", ".join(sql_name(table.namespace, table.name) for table in found)
        await execute(connection, statement + " WITH (truncate)" * truncate, notice=_notice)
        if not wait:
            return 0
        with ProgressLine(f"synchronizing {formatting.count(len(found), 'table')}"):
            error = await wait_until_synchronized(
                connection, subscription, found, lambda *state: print(printable(": ".join(state)), file=sys.stderr)
            )
        if error is not None:
            print_message("ERROR", error.message, error.detail, error.hint, sys.stderr)
            return FAILED
        counts = Counter[str]()
        async for row in repairs.load(connection, subscription.oid, since=since):
            counts[row.relation] += 1
        for table in found:
            label = f"{table.namespace}.{table.name}"
            done = "copied" if truncate else f"{formatting.count(counts[label], 'row')} repaired"
            print(printable(f"synchronized  {label}: {done}"))
        return 0


def _find(label: str, known: list[SubscriptionRel], subscription: str) -> SubscriptionRel:
    found = [table for table in known if label in (table.name, f"{table.namespace}.{table.name}")]
    if len(found) != 1:
        problem = "is not part of" if not found else "is the name of several tables of"
        raise StatementError(
            f'table "{label}" {problem} subscription "{subscription}"',
            hint=near_word(label.rpartition(".")[2], [table.name for table in known])
            or "Tables are named as on the target, with their schema: public.accounts.",
            sqlstate=UNDEFINED_OBJECT,
        )
    return found[0]


def _notice(severity: str, message: str, detail: str | None, hint: str | None) -> None:
    print_message(severity, message, detail, hint, sys.stderr)
