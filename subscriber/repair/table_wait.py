"""Wait until the launcher's workers have synchronized some tables."""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import datetime

import anyio

from subscriber.catalog import worker_sessions
from subscriber.catalog.connection import Connection
from subscriber.catalog.store.subscription_rel import SubscriptionRel, load_relation_states
from subscriber.catalog.store.workers import APPLY_WORKER, load_workers
from subscriber.display import shell_word
from subscriber.errors import StatementError, SubscriberError
from subscriber.remedy import Remedy
from subscriber.sqlstate import OBJECT_NOT_IN_PREREQUISITE_STATE
from subscriber.subscription import Subscription

POLL = 0.2  # seconds
LAUNCHER_PATIENCE = 30.0  # seconds without an apply worker
SYNCHRONIZED = ("s", "r")

OnState = Callable[[str, str], None]


async def wait_until_synchronized(
    connection: Connection, subscription: Subscription, tables: Collection[SubscriptionRel], on_state: OnState
) -> SubscriberError | None:
    """Wait until the tables are synchronized.

    Args:
        connection: a connection to the target.
        subscription: the subscription.
        tables: the tables, with the states that they had before they were to be synchronized again.
        on_state: called with the name of a table and its state, when that has changed.

    Returns:
        The error of a table's worker, which the launcher retries. None: all tables are synchronized.

    Raises:
        StatementError: the subscription has no apply worker for some time.
    """
    relids = {table.relid for table in tables}
    errors: dict[int, set[datetime | None]] = {relid: set() for relid in relids}
    # A worker of a table that was not ready is ended, and its error may be reported afterwards. Two do not count.
    forgiven = {table.relid: 0 if table.state in SYNCHRONIZED else 2 for table in tables}
    said: dict[int, str] = {}
    seen = anyio.current_time()
    while True:
        states = {table.relid: table for table in await load_relation_states(connection, subscription.oid)}
        waiting = [states[relid] for relid in relids if relid in states and states[relid].state not in SYNCHRONIZED]
        if not waiting:
            return None
        workers = {row.relid: row for row in await load_workers(connection) if row.subid == subscription.oid}
        for table in waiting:
            worker = workers.get(table.relid)
            state = worker.state if worker is not None else "waiting for a worker"
            label = f"{table.namespace}.{table.name}"
            if worker is not None and worker.error is not None:
                errors[table.relid].add(worker.error_time)
            if worker is not None and len(errors[table.relid]) > forgiven[table.relid]:
                return SubscriberError(
                    f'table "{label}" is not synchronized yet: {worker.error}',
                    detail="The launcher retries it.",
                    hint=worker.error_remedy
                    or Remedy("watch it", f"subscriber status {shell_word(subscription.name)}"),
                    sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
                )
            if said.get(table.relid) != state:
                said[table.relid] = state
                on_state(label, state)
        if await worker_sessions.holder(connection, subscription.oid, APPLY_WORKER) is not None:
            seen = anyio.current_time()
        if anyio.current_time() > seen + LAUNCHER_PATIENCE:
            raise StatementError(
                f'subscription "{subscription.name}" has no apply worker',
                detail="The tables are synchronized when it runs.",
                hint=Remedy("start subscriber run, or find the reason", "subscriber status"),
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )
        await anyio.sleep(POLL)
