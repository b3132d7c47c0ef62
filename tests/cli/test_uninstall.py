"""`subscriber uninstall` leaves a database as it was before the first command."""

from __future__ import annotations

import pytest

import subscriber
from subscriber.cli.commands.uninstall import uninstall_
from subscriber.errors import StatementError
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import QUICK

# Everything in a database that a user can have created, and what belongs to it outside of the database.
OBJECTS = """
SELECT pg_describe_object('pg_class'::regclass, oid, 0) FROM pg_class WHERE oid >= 16384
 UNION ALL SELECT pg_describe_object('pg_proc'::regclass, oid, 0) FROM pg_proc WHERE oid >= 16384
 UNION ALL SELECT pg_describe_object('pg_trigger'::regclass, oid, 0) FROM pg_trigger WHERE oid >= 16384
 UNION ALL SELECT nspname FROM pg_namespace WHERE oid >= 16384 AND nspname !~ '^pg_(toast_)?temp_'
 UNION ALL SELECT 'large object ' || oid FROM pg_largeobject_metadata
 UNION ALL SELECT 'origin ' || o.roname FROM pg_replication_origin o
 ORDER BY 1
"""


async def uninstall(target: Database, *, drop: bool = False, dry_run: bool = False) -> None:
    assert await uninstall_(target.dsn(), drop_subscriptions=drop, dry_run=dry_run) == 0


async def test_uninstall_leaves_nothing_behind(
    source_db: Database, target_db: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    for database in (source_db, target_db):
        await database.execute("CREATE TABLE city (id int PRIMARY KEY)")
    await source_db.execute("CREATE PUBLICATION atlas FOR ALL TABLES", "INSERT INTO city VALUES (1)")
    # A large object of another program in the range of ours.
    await target_db.execute("SELECT lo_from_bytea(3500000007, 'mine')")
    before = await target_db.rows(OBJECTS)
    await uninstall(target_db)
    assert capsys.readouterr().out == 'schema "subscriber" does not exist\n'

    async with subscriber.connect(target_db.dsn(), settings=QUICK) as db:
        await db.create_subscription("s", source=source_db.dsn(), publications=["atlas"])
        async with db.running():
            await db.wait_for_sync("s", timeout=60)
            with pytest.raises(StatementError, match="because subscriptions exist") as raised:
                await uninstall(target_db)
            assert "uninstall --drop-subscriptions" in (raised.value.hint or "")
            with pytest.raises(StatementError, match="a launcher is running"):
                await uninstall(target_db, drop=True)
    await target_db.execute("CREATE VIEW mine AS SELECT subname FROM subscriber.pg_subscription")
    with pytest.raises(StatementError, match="other objects depend on it") as raised:
        await uninstall(target_db, drop=True)
    assert raised.value.detail == "They are: view public.mine."
    await target_db.execute("DROP VIEW mine")

    stands = await target_db.rows(OBJECTS)
    await uninstall(target_db, drop=True, dry_run=True)
    assert await target_db.rows(OBJECTS) == stands
    planned = capsys.readouterr().out
    assert planned.startswith('would remove subscription "s"')

    await uninstall(target_db, drop=True)
    removed = capsys.readouterr().out
    assert removed.startswith('removed subscription "s"')
    assert 'removed schema "subscriber"' in removed
    assert await target_db.rows(OBJECTS) == before
    assert await source_db.value("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == 0
    assert await target_db.value("SELECT count(*) FROM city") == 1

    # A program that is still connected is told so.
    async with subscriber.connect(target_db.dsn(), settings=QUICK) as db:
        await uninstall(target_db)
        for call in (
            db.subscriptions(),
            db.conflicts(),
            db.create_subscription("s", source=source_db.dsn(), publications=["atlas"]),
            db.wait_for_sync("s", timeout=5),
        ):
            with pytest.raises(StatementError, match="subscriber is not installed in this database") as absent:
                await call
            assert absent.value.command == "subscriber run"

    await target_db.execute("CREATE ROLE nobody_of_uninstall LOGIN")
    try:
        async with subscriber.connect(target_db.dsn()):
            pass
        with pytest.raises(StatementError, match='must be owner of schema "subscriber"'):
            await uninstall_(target_db.dsn(user="nobody_of_uninstall"))
    finally:
        await target_db.execute("DROP ROLE nobody_of_uninstall")
