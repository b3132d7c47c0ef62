"""What a table sync worker leaves behind when it is killed between syncdone and its own clearing up.

The apply worker looks when it starts: slots on the publisher, origins and progress rows on the target, of
tables that are done or no longer part of the subscription. Those of tables still to be synchronized
belong to their next sync worker.
"""

from __future__ import annotations

from subscriber import telemetry
from subscriber.apply.subrel import State
from subscriber.catalog import origins, store
from subscriber.catalog.session import Catalog
from subscriber.source.publisher import Publisher
from subscriber.worker.tables import Tables

_PROGRESS = "SELECT relid FROM subscriber.progress WHERE subid = $1 AND relid <> 0"


async def tidy(publisher: Publisher, catalog: Catalog, subid: int, system_id: int, tables: Tables) -> None:
    """Drop the left-overs. `system_id` is of the target's cluster: another one's slots are not ours."""
    leftover = await _leftover_slots(publisher, subid, system_id, tables)
    for slot in leftover.values():
        if await publisher.drop_slot(slot, missing_ok=True):
            telemetry.log(telemetry.LOG, f'dropped leftover replication slot "{slot}" on publisher', slot=slot)
    async with catalog.use() as connection, connection.transaction():
        relids = {row["relid"] for row in await connection.fetch(_PROGRESS, subid) if _done(tables, row["relid"])}
        for relid in relids | leftover.keys():
            await origins.drop_origin(connection, origins.table_sync_origin(subid, relid), missing_ok=True)
            await store.remove_progress(connection, subid, relid)


async def _leftover_slots(publisher: Publisher, subid: int, system_id: int, tables: Tables) -> dict[int, str]:
    """By the relid in their name; only slots that nobody is reading from."""
    prefix, suffix = f"pg_{subid}_sync_", f"_{system_id}"
    rows = await publisher.session.rows(
        f"SELECT slot_name FROM pg_catalog.pg_replication_slots WHERE starts_with(slot_name, '{prefix}') AND NOT active"
    )
    slots = [slot for (slot,) in rows if slot and slot.endswith(suffix)]
    relids = {int(slot.removeprefix(prefix).removesuffix(suffix)): slot for slot in slots}
    return {relid: slot for relid, slot in relids.items() if _done(tables, relid)}


def _done(tables: Tables, relid: int) -> bool:
    table = tables.get(relid)
    return table is None or table.state in (State.SYNCDONE, State.READY)
