"""`subscriber resync`: have tables synchronized again, and wait for the launcher's workers."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from subscriber import formatting
from subscriber.cli.dsn import Target
from subscriber.cli.messages import print_message
from subscriber.cli.options import DeleteExtra, Name
from subscriber.cli.progress import ProgressLine
from subscriber.display import near_word, printable, sql_identifier, sql_name
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.remedy import Remedy
from subscriber.sqlstate import UNDEFINED_OBJECT

if TYPE_CHECKING:
    from subscriber.catalog.connection import Connection
    from subscriber.catalog.store.subscription_rel import SubscriptionRel
    from subscriber.subscription import Subscription

FAILED = 1


async def resync(
    target: Target,
    name: Name,
    tables: Annotated[
        list[str], typer.Argument(help="Tables of the target.", metavar="[SCHEMA.]TABLE...", show_default=False)
    ],
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Empty the tables and copy them, instead of repairing rows that differ.")
    ] = False,
    delete_extra: DeleteExtra = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the tables are synchronized.")] = True,
) -> int:
    """Synchronize tables again, while the others stream.

    Runs ALTER SUBSCRIPTION … REFRESH TABLE, and waits for the launcher. A kill of this command does not interrupt the
    launcher. Exits 1 if a table could not be synchronized at the first attempt, or has rows that the publisher does not
    have.
    """
    from subscriber.catalog.commands.execute import execute
    from subscriber.catalog.commands.privileges import get_owned_subscription
    from subscriber.catalog.connection import CatalogConnection
    from subscriber.catalog.identity import refuse_standby
    from subscriber.catalog.schema import ensure_schema
    from subscriber.catalog.store import repairs
    from subscriber.catalog.store.subscription_rel import load_relation_states
    from subscriber.repair.table_wait import wait_until_synchronized

    async with CatalogConnection.open(target, "subscriber resync") as catalog, catalog.use() as connection:
        await refuse_standby(connection)
        await ensure_schema(connection)
        subscription = await get_owned_subscription(connection, name)
        known = await load_relation_states(connection, subscription.oid)
        chosen = [_find(table, known, name) for table in tables]
        since = await repairs.now(connection)
        statement = f"ALTER SUBSCRIPTION {sql_identifier(name)} REFRESH TABLE "
        statement += ", ".join(sql_name(table.namespace, table.name) for table in chosen)
        words = [word for word, is_set in (("truncate", truncate), ("delete_extra", delete_extra)) if is_set]
        options = f" WITH ({', '.join(words)})" if words else ""
        await execute(connection, statement + options, notice=print_message)
        if not wait:
            return 0
        with ProgressLine(f"synchronizing {formatting.count(len(chosen), 'table')}"):
            error = await wait_until_synchronized(
                connection, subscription, chosen, lambda *state: print(printable(": ".join(state)), file=sys.stderr)
            )
        if error is not None:
            print_message("ERROR", error.message, error.detail, error.hint)
            return FAILED
        counts = Counter[str]()
        async for row in repairs.load(connection, subscription.oid, since=since):
            counts[row.relation] += 1
        wanted = {table.relid for table in chosen}
        states = await load_relation_states(connection, subscription.oid)
        kept = {table.relid: table.extra for table in states if table.relid in wanted}
        for table in chosen:
            label = f"{table.namespace}.{table.name}"
            done = "copied" if truncate else f"{formatting.count(counts[label], 'row')} repaired"
            if extra := kept.get(table.relid, 0):
                done += f", {formatting.count(extra, 'extra row')} kept"
            print(printable(f"synchronized  {label}: {done}"))
        for remedy in await _remedies(connection, subscription, chosen, kept):
            print(printable(f"HINT:  {remedy}"))
        return FAILED if any(kept.values()) else 0


async def _remedies(
    connection: Connection, subscription: Subscription, tables: list[SubscriptionRel], kept: dict[int, int]
) -> list[Remedy]:
    """Return how the extra rows of tables are deleted, or get an owner. `kept`: their number by OID of the table."""
    from subscriber.catalog.store.table_writers import load_ownership
    from subscriber.repair.result import Repair, TableRepair

    ownership = await load_ownership(connection, subscription)
    result = Repair(Lsn(0), subscription=subscription.name)
    for table in tables:
        doubtful = ownership.of(table.relid, (table.namespace, table.name)).doubtful
        repair = TableRepair(f"{table.namespace}.{table.name}", extra=kept.get(table.relid, 0))
        repair.doubtful = tuple(writer.name for writer in doubtful)
        result.tables.append(repair)
    return list(result.remedies())


def _find(label: str, known: list[SubscriptionRel], subscription: str) -> SubscriptionRel:
    matching = [table for table in known if label in (table.name, f"{table.namespace}.{table.name}")]
    if len(matching) != 1:
        problem = "is not part of" if not matching else "is the name of several tables of"
        raise StatementError(
            f'table "{label}" {problem} subscription "{subscription}"',
            hint=near_word(label.rpartition(".")[2], [table.name for table in known])
            or "Tables are named as on the target, with their schema: public.accounts.",
            sqlstate=UNDEFINED_OBJECT,
        )
    return matching[0]
