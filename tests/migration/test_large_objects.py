"""Large objects, which are no part of the change stream, move in the pause."""

from __future__ import annotations

from subscriber.migration.plan import Side
from subscriber.migration.results import StepEvent
from tests.migration.scene import following, listen, moving
from tests.plugins.fix_cluster import Database

OBJECTS = "SELECT oid::int, md5(lo_get(oid)) FROM pg_largeobject_metadata WHERE oid < 1000000000 ORDER BY oid"


async def test_large_objects_move_in_the_pause_and_return(source_db: Database, target_db: Database) -> None:
    events: list[StepEvent] = []
    async with following(source_db, target_db):
        await source_db.execute("SELECT lo_from_bytea(71, 'one'), lo_from_bytea(72, 'two')")
        async with moving(source_db, target_db, large_objects=True) as move:
            assert (await move.cutover()).serving is Side.TARGET
            assert await source_db.rows(OBJECTS) == await target_db.rows(OBJECTS)
        await target_db.execute("SELECT lo_put(71, 0, 'ONE'), lo_unlink(72)")
        async with moving(source_db, target_db, large_objects=True) as move:
            assert (await move.back()).serving is Side.SOURCE
            assert await source_db.rows(OBJECTS) == await target_db.rows(OBJECTS)
            assert len(await source_db.rows(OBJECTS)) == 1
        await source_db.execute("SELECT lo_from_bytea(73, 'three')")
        async with moving(source_db, target_db) as move:
            await listen(move, move.cutover(), events.append)
        (left,) = [event.detail for event in events if event.step == "objects" and event.state == "done"]
        assert left["large objects left behind"] == 2
