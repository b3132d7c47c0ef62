"""What a table sync worker leaves behind when it is killed between syncdone and its own clearing up.

The apply worker looks when it starts: slots on the publisher, origins and progress rows on the target, of
tables that are done or no longer part of the subscription. Those of tables still to be synchronized
belong to their next sync worker. A slot may still be held by the walsender of the dead worker, until that
notices; or by a sync worker that is just clearing up. The supervisor then looks again later.
"""

from __future__ import annotations

from subscriber import telemetry
from subscriber.apply.batch.eligibility import FIRST_NORMAL_OID
from subscriber.apply.table_states import TableState
from subscriber.catalog import copy_jobs, names, origins
from subscriber.catalog.connection import CatalogConnection
from subscriber.catalog.copy_jobs import COPY_JOB_RELID
from subscriber.catalog.store import progress_records
from subscriber.publisher.answers import MAX_OID, parsing
from subscriber.publisher.connection import Publisher
from subscriber.quoting import literal
from subscriber.worker.table_states import TableStates


async def drop_leftover_slots(
    publisher: Publisher, catalog: CatalogConnection, subid: int, sync_id: str, tables: TableStates
) -> bool:
    """Drop the left-overs; false if somebody still reads from one of the slots.

    `sync_id` is the target's (catalog/identity.py): another one's slots are not ours.
    """
    leftover, all_free = await _leftover_slots(publisher, subid, sync_id, tables)
    for slot in leftover.values():
        if await publisher.drop_slot(slot, missing_ok=True):
            telemetry.log(telemetry.LOG, f'dropped leftover replication slot "{slot}" on publisher', slot=slot)
    async with catalog.use() as connection, connection.transaction():
        relids = {relid for relid in await progress_records.load_tables(connection, subid) if _done(tables, relid)}
        for relid in relids | leftover.keys():
            await origins.drop_origin(connection, names.table_sync_origin(subid, relid), missing_ok=True)
            await progress_records.remove(connection, subid, relid)
        if tables.bulk is not None and _done(tables, COPY_JOB_RELID):
            await copy_jobs.remove(connection, tables.bulk.copyid)
    return all_free


async def _leftover_slots(
    publisher: Publisher, subid: int, sync_id: str, tables: TableStates
) -> tuple[dict[int, str], bool]:
    """Those that nobody is reading from, by the relid in their name; and whether these are all.

    The numbers below every table's OID are those of other origins and progress rows, and no slot has them.
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
    if relid == COPY_JOB_RELID:
        # One that is only announced may have its slot already.
        return tables.bulk is None or (bool(tables.bulk.parts) and all(_done(tables, one) for one in tables.group()))
    table = tables.get(relid)
    return table is None or table.state in (TableState.SYNCDONE, TableState.READY)
