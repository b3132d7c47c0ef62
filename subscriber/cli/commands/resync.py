"""`subscriber resync`: have tables synchronized again, and wait for the launcher's workers."""

from __future__ import annotations

import sys
from collections import Counter

from subscriber import formatting
from subscriber.catalog.commands.execute import execute
from subscriber.catalog.commands.privileges import get_owned_subscription
from subscriber.catalog.connection import CatalogConnection, Connection
from subscriber.catalog.identity import refuse_standby
from subscriber.catalog.schema import ensure_schema
from subscriber.catalog.store import repairs
from subscriber.catalog.store.subscription_rel import SubscriptionRel, load_relation_states
from subscriber.catalog.store.table_writers import load_ownership
from subscriber.cli.commands.exec import print_message
from subscriber.cli.progress import ProgressLine
from subscriber.display import near_word, printable, sql_identifier, sql_name
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.remedy import Remedy
from subscriber.repair.result import Repair, TableRepair
from subscriber.repair.table_wait import wait_until_synchronized
from subscriber.sqlstate import UNDEFINED_OBJECT
from subscriber.subscription import Subscription

FAILED = 1


async def run_resync(
    target: str, name: str, tables: list[str], *, truncate: bool, wait: bool, delete_extra: bool = False
) -> int:
    """Run REFRESH TABLE for the tables, and print what the workers do. Returns the exit status.

    Args:
        target: the connection string of the subscription's database.
        name: the subscription.
        tables: the tables of the target, with or without their schemas.
        truncate: empty the tables and copy them. False: repair the rows that differ.
        wait: wait until the tables are synchronized.
        delete_extra: delete rows that the publisher does not have. False: keep and count them.

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
        words = [word for word, is_set in (("truncate", truncate), ("delete_extra", delete_extra)) if is_set]
        options = f" WITH ({', '.join(words)})" if words else ""
        await execute(connection, statement + options, notice=_notice)
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
        wanted = {table.relid for table in found}
        states = await load_relation_states(connection, subscription.oid)
        kept = {table.relid: table.extra for table in states if table.relid in wanted}
        for table in found:
            label = f"{table.namespace}.{table.name}"
            done = "copied" if truncate else f"{formatting.count(counts[label], 'row')} repaired"
            if extra := kept.get(table.relid, 0):
                done += f", {formatting.count(extra, 'extra row')} kept"
            print(printable(f"synchronized  {label}: {done}"))
        for remedy in await _remedies(connection, subscription, found, kept):
            print(printable(f"HINT:  {remedy}"))
        return FAILED if any(kept.values()) else 0


async def _remedies(
    connection: Connection, subscription: Subscription, tables: list[SubscriptionRel], kept: dict[int, int]
) -> list[Remedy]:
    """Return how the extra rows of tables are deleted, or get an owner. `kept`: their number by OID of the table."""
    ownership = await load_ownership(connection, subscription)
    result = Repair(Lsn(0), subscription=subscription.name)
    for table in tables:
        doubtful = ownership.of(table.relid, (table.namespace, table.name)).doubtful
        repair = TableRepair(f"{table.namespace}.{table.name}", extra=kept.get(table.relid, 0))
        repair.doubtful = tuple(one.name for one in doubtful)
        result.tables.append(repair)
    return list(result.remedies())


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
