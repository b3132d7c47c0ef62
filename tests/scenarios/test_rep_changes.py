"""Inserts, updates, deletes and truncations arrive, for each kind of replica identity."""

from __future__ import annotations

import re

from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriber


async def both(source: Database, target: Database, *statements: str) -> None:
    await source.execute(*statements)
    await target.execute(*statements)


async def test_a_table_is_copied_and_then_followed(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    await both(source_db, target_db, "CREATE TABLE t (id int PRIMARY KEY, v text)")
    await source_db.execute("INSERT INTO t SELECT g, 'copied' FROM generate_series(1, 100) g", "CREATE PUBLICATION p FOR TABLE t")
    await subscriber.create(source_db, "p")
    await subscriber.wait_for_sync(source_db)
    assert await target_db.rows("SELECT count(*), min(v) FROM t") == [(100, "copied")]
    await source_db.execute(
        "INSERT INTO t VALUES (101, 'new')",
        "UPDATE t SET v = 'changed' WHERE id = 1",
        "UPDATE t SET id = 200 WHERE id = 2",
        "DELETE FROM t WHERE id BETWEEN 3 AND 100",
    )
    await source_db.wait_for_catchup("s")
    assert await target_db.rows("SELECT id, v FROM t ORDER BY id") == [(1, "changed"), (101, "new"), (200, "copied")]
