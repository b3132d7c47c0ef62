"""`subscriber resync`: have tables synchronized again, and wait for the launcher's workers."""

from __future__ import annotations

import sys
from collections import Counter
from datetime import datetime

import anyio

from subscriber import formatting
from subscriber.catalog import worker_sessions
from subscriber.catalog.commands.execute import execute
from subscriber.catalog.commands.privileges import get_owned_subscription
from subscriber.catalog.connection import CatalogConnection, Connection
from subscriber.catalog.identity import refuse_standby
from subscriber.catalog.schema import ensure_schema
from subscriber.catalog.store import repairs
from subscriber.catalog.store.subscription_rel import SubscriptionRel, load_relation_states
from subscriber.catalog.store.workers import APPLY_WORKER, WorkerStatus, load_workers
from subscriber.cli.commands.exec import print_message
from subscriber.display import near_word, printable, shell_word, sql_identifier, sql_name
from subscriber.errors import StatementError
from subscriber.sqlstate import OBJECT_NOT_IN_PREREQUISITE_STATE, UNDEFINED_OBJECT

POLL = 0.2  # seconds
LAUNCHER_PATIENCE = 30.0  # seconds without an apply worker
SYNCHRONIZED = ("s", "r")
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
        status = await _wait(connection, subscription.oid, name, found)
        counts = Counter[str]()
        async for row in repairs.load(connection, subscription.oid, since=since):
            counts[row.relation] += 1
        for table in found:
            label = f"{table.namespace}.{table.name}"
            done = "copied" if truncate else f"{formatting.count(counts[label], 'row')} repaired"
            if status == 0:
                print(printable(f"synchronized  {label}: {done}"))
        return status


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


async def _workers(connection: Connection, subid: int) -> list[WorkerStatus]:
    return [worker for worker in await load_workers(connection) if worker.subid == subid]


async def _wait(connection: Connection, subid: int, name: str, tables: list[SubscriptionRel]) -> int:
    """Wait until the tables are synchronized. Returns FAILED if the worker of one fails.

    The statement ends a worker that runs already, and its error may be reported afterwards. So two errors of a
    table that was not ready do not count.
    """
    relids = {table.relid for table in tables}
    errors: dict[int, set[datetime | None]] = {relid: set() for relid in relids}
    forgiven = {table.relid: table.state not in SYNCHRONIZED for table in tables}
    said: dict[int, str] = {}
    seen = anyio.current_time()
    while True:
        states = {table.relid: table for table in await load_relation_states(connection, subid)}
        waiting = [states[relid] for relid in relids if relid in states and states[relid].state not in SYNCHRONIZED]
        if not waiting:
            return 0
        workers = {worker.relid: worker for worker in await _workers(connection, subid)}
        for table in waiting:
            worker = workers.get(table.relid)
            state = worker.state if worker is not None else "waiting for a worker"
            label = f"{table.namespace}.{table.name}"
            if worker is not None and worker.error is not None:
                errors[table.relid].add(worker.error_time)
            if worker is not None and len(errors[table.relid]) > (2 if forgiven[table.relid] else 0):
                print_message(
                    "ERROR",
                    f'table "{label}" is not synchronized yet: {worker.error}',
                    "The launcher retries it.",
                    worker.error_hint or f"Watch it with: subscriber status {shell_word(name)}",
                    sys.stderr,
                )
                return FAILED
            if said.get(table.relid) != state:
                said[table.relid] = state
                print(printable(f"{label}: {state}"), file=sys.stderr)
        if await worker_sessions.holder(connection, subid, APPLY_WORKER) is not None:
            seen = anyio.current_time()
        if anyio.current_time() > seen + LAUNCHER_PATIENCE:
            raise StatementError(
                f'subscription "{name}" has no apply worker',
                detail="The tables are synchronized when it runs.",
                hint="Start subscriber run, or find the reason with: subscriber status",
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )
        await anyio.sleep(POLL)


def _notice(severity: str, message: str, detail: str | None, hint: str | None) -> None:
    print_message(severity, message, detail, hint, sys.stderr)
