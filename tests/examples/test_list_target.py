"""examples/list_target.py: a custom target under the apply loop, with a real publisher."""

from __future__ import annotations

import anyio

import subscriber
from examples.list_target import ListTarget, Storage
from subscriber import Lsn
from tests.plugins.fix_cluster import Database


async def test_a_publication_is_applied_to_lists_and_resumed(source_db: Database) -> None:
    storage = Storage()

    async def catch_up() -> list[tuple[str | None, ...]]:
        until = Lsn.parse(await source_db.value("SELECT pg_current_wal_insert_lsn()::text"))
        with anyio.fail_after(30):
            await subscriber.apply_to(
                ListTarget(storage), source_db.dsn(), slot="lists", publications=["p"], until=until
            )
        rows = storage.tables.get("public.city", [])
        return sorted(tuple(value.decode() if value is not None else None for value in row) for row in rows)

    await source_db.execute(
        "CREATE TABLE city (id int PRIMARY KEY, name text)",
        "ALTER TABLE city ALTER name SET STORAGE external",
        "CREATE PUBLICATION p FOR TABLE city",
    )
    assert await catch_up() == []
    await source_db.execute(
        "INSERT INTO city VALUES (1, repeat('x', 3000)), (2, 'Brno'), (3, NULL)",
        "UPDATE city SET id = 4 WHERE id = 1",
        "DELETE FROM city WHERE id = 2",
    )
    assert await catch_up() == [("3", None), ("4", "x" * 3000)]
    await source_db.execute("INSERT INTO city VALUES (5, 'Pau')")
    assert await catch_up() == [("3", None), ("4", "x" * 3000), ("5", "Pau")]
    confirmed = await source_db.value("SELECT confirmed_flush_lsn::text FROM pg_replication_slots")
    assert Lsn.parse(confirmed) >= storage.position
    await source_db.execute("SELECT pg_drop_replication_slot('lists')")
