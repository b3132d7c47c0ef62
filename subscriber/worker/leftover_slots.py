"""Drop slots, origins and progress records of table synchronization workers that were killed after syncdone.

The apply worker does this at its start, for tables that are done or not part of the subscription any more. Slots of
tables that are not synchronized yet belong to their next worker.

A slot may still be active. The walsender of a dead worker may not have noticed the end of its connection, or a worker
is about to drop the slot. Then the supervisor repeats the cleanup later.
"""

from __future__ import annotations

from subscriber import names, telemetry
from subscriber.apply.batch.eligibility import FIRST_NORMAL_OID
from subscriber.apply.table_states import TableState
from subscriber.catalog import origins
from subscriber.catalog.connection import CatalogConnection
from subscriber.catalog.store import progress_records
from subscriber.catalog.worker_sessions import FIRST_RANGE_SESSION, REPAIR
from subscriber.publisher.answers import MAX_OID, parsing
from subscriber.publisher.connection import Publisher
from subscriber.quoting import literal
from subscriber.worker.table_states import TableStates


async def drop_leftover_slots(
    publisher: Publisher, catalog: CatalogConnection, subid: int, sync_id: str, tables: TableStates
) -> bool:
    """Drop the leftover slots, origins and progress records of a subscription.

    Args:
        publisher: a connection to the publisher.
        catalog: drops origins and progress records.
        subid: OID of the subscription.
        sync_id: the identifier of the target (catalog/identity.py), because other targets may have slots there.
        tables: the states of the subscription's tables.

    Returns:
        False if a leftover slot is still active.
    """
    leftover, all_free = await _leftover_slots(publisher, subid, sync_id, tables)
    for slot in leftover.values():
        if await publisher.drop_slot(slot, missing_ok=True):
            telemetry.log(telemetry.LOG, f'dropped leftover replication slot "{slot}" on publisher', slot=slot)
    async with catalog.use() as connection, connection.transaction():
        recorded = await progress_records.load_tables(connection, subid) - {REPAIR}
        relids = {relid for relid in recorded if _done(tables, relid)}
        for relid in relids | leftover.keys():
            await origins.drop_origin(connection, names.table_sync_origin(subid, relid), missing_ok=True)
            await progress_records.remove(connection, subid, relid)
        if not tables.unready:  # otherwise a copy may use them
            sessions = {names.table_sync_origin(subid, number) for number in range(FIRST_RANGE_SESSION, REPAIR)}
            for origin in sessions.intersection(await origins.find_origins(connection, subid)):
                await origins.drop_origin(connection, origin, missing_ok=True)
    return all_free


async def _leftover_slots(
    publisher: Publisher, subid: int, sync_id: str, tables: TableStates
) -> tuple[dict[int, str], bool]:
    """Return the inactive leftover slots by the relid in their name, and True if no leftover slot is active.

    Numbers below the OIDs of tables belong to parallel sessions, which have origins and progress records but no slots.
    """
    prefix = literal(names.table_sync_slot_prefix(subid))
    rows = await publisher.session.rows(
        f"SELECT slot_name, active FROM pg_catalog.pg_replication_slots WHERE starts_with(slot_name, {prefix})"
    )
    free, all_free = {}, True
    with parsing("leftover replication slots"):
        for slot, active in rows:
            relid = names.table_of_sync_slot(slot or "", subid, sync_id)
            if relid is None or not FIRST_NORMAL_OID <= relid <= MAX_OID:
                continue
            if _done(tables, relid):
                all_free = all_free and active == "f"
                if active == "f":
                    free[relid] = names.table_sync_slot(subid, relid, sync_id)
    return free, all_free


def _done(tables: TableStates, relid: int) -> bool:
    table = tables.get(relid)
    return table is None or table.state in (TableState.SYNCDONE, TableState.READY)
