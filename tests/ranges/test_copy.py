"""The initial copy by ranges, with a writer: every row arrives once, and no change is lost."""

from __future__ import annotations

import pytest

from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriber
from tests.ranges.copies import (
    CONTENT,
    NOTE_SINGLES,
    TABLE,
    between_ranges,
    prepare,
    same,
    writing,
)


async def test_rows_that_change_during_the_copy(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    await prepare(source_db, target_db, "t", "u")
    async with writing(source_db, "t", "u"):
        await subscriber.create(source_db, "p", "s", copy_engine="ranges")
        await subscriber.wait_for_ready(source_db, timeout=60)
    await source_db.wait_for_catchup("s")
    await same(source_db, target_db, "t", "u")
    assert not subscriber.log.has("copied in one snapshot")
    assert not subscriber.log.has("ERROR")
    assert await target_db.value("SELECT count(*) FROM subscriber.copied_range") == 0
    slots = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"
    assert await source_db.value(slots) == 1


async def test_a_key_that_moves_to_a_copied_range_with_a_large_value(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    await prepare(source_db, target_db, "t")
    await subscriber.create(source_db, "p", "s", copy_engine="ranges")
    await target_db.execute(*NOTE_SINGLES)
    async with between_ranges(source_db, target_db) as transaction:
        await transaction.execute("DELETE FROM t WHERE id IN (1, 890)")
        await transaction.execute("UPDATE t SET id = 1 WHERE id = 900")  # from an unread range to a copied one
        await transaction.execute("UPDATE t SET id = 890 WHERE id = 3")  # from a copied range to an unread one
        await transaction.execute("UPDATE t SET n = 7 WHERE id IN (1, 2, 890, 891)")
    await subscriber.wait_for_ready(source_db)
    await source_db.wait_for_catchup("s")
    await same(source_db, target_db, "t")
    assert await target_db.rows("SELECT DISTINCT key FROM singles") == [("1",)]
    assert await target_db.rows("SELECT id, n FROM t WHERE n = 7 ORDER BY id") == [(1, 7), (2, 7), (890, 7), (891, 7)]
    assert not subscriber.log.has("ERROR")


async def test_a_range_of_one_key_is_of_the_table_alone(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    """A table that inherits from it has rows of its own, which may have the same keys."""
    await prepare(source_db, target_db, "t")
    await target_db.execute("CREATE TABLE heir () INHERITS (t)")
    await subscriber.create(source_db, "p", "s", copy_engine="ranges")
    await target_db.execute(*NOTE_SINGLES)
    async with between_ranges(source_db, target_db) as transaction:
        await target_db.execute("INSERT INTO heir SELECT generate_series(1, 900)")
        await transaction.execute("DELETE FROM t WHERE id = 1")
        await transaction.execute("UPDATE t SET id = 1 WHERE id = 900")
    await subscriber.wait_for_ready(source_db)
    await source_db.wait_for_catchup("s")
    assert await target_db.rows("SELECT DISTINCT key FROM singles") == [("1",)]
    assert await target_db.value("SELECT count(*) FROM heir") == 900
    assert await target_db.rows(CONTENT.format("ONLY t")) == await source_db.rows(CONTENT.format("t"))


async def test_tables_that_cannot_be_divided(source_db: Database, target_db: Database, subscriber: Subscriber) -> None:
    tables = (
        "CREATE TABLE spans (k interval PRIMARY KEY)",
        "CREATE TABLE wholes (a int)",
        "CREATE TABLE others (id int PRIMARY KEY, u int UNIQUE)",
        "CREATE TABLE keys (a int, b uuid, PRIMARY KEY (b, a))",
        "CREATE TABLE later (id int PRIMARY KEY, u int UNIQUE DEFERRABLE)",
        "CREATE TABLE checked (id int PRIMARY KEY, parent int REFERENCES checked)",
        "CREATE TABLE filled (id int PRIMARY KEY)",
    )
    await source_db.execute(
        *tables,
        "ALTER TABLE wholes REPLICA IDENTITY FULL",
        "INSERT INTO spans SELECT make_interval(hours => i) FROM generate_series(1, 300) i",
        "INSERT INTO wholes SELECT i FROM generate_series(1, 300) i",
        "INSERT INTO others SELECT i, i FROM generate_series(1, 300) i",
        "INSERT INTO keys SELECT i, md5((i / 3)::text)::uuid FROM generate_series(1, 300) i",
        "INSERT INTO later SELECT i, i FROM generate_series(1, 300) i",
        "INSERT INTO checked SELECT i, 301 - i FROM generate_series(1, 300) i",
        "CREATE PUBLICATION p FOR ALL TABLES",
    )
    await target_db.execute(*tables, "INSERT INTO filled VALUES (0)")
    for (trigger,) in await target_db.rows("SELECT tgname FROM pg_trigger WHERE tgrelid = 'checked'::regclass"):
        await target_db.execute(f'ALTER TABLE checked ENABLE ALWAYS TRIGGER "{trigger}"')
    await subscriber.create(source_db, "p", "s", copy_engine="ranges")
    await subscriber.wait_for_ready(source_db)
    assert await target_db.rows("SELECT id FROM filled") == [(0,)]
    for table in ("spans", "wholes", "others", "keys", "later", "checked"):
        rows = f"SELECT * FROM {table} t ORDER BY t"
        assert await target_db.rows(rows) == await source_db.rows(rows)
    reasons = {
        "spans": 'the order of the type of key column "k" is not known',
        "wholes": "the table has no replica identity that is an index, and no primary key",
        "others": "the table of the target has another unique index or an exclusion constraint",
        "later": "the table of the target has another unique index or an exclusion constraint",
        "checked": "foreign keys of the target's table are checked for replicated changes",
        "filled": "the table of the target has rows",
    }
    for table, reason in reasons.items():
        assert subscriber.log.has(f'table "public.{table}" is copied in one snapshot, because {reason}')
    assert not subscriber.log.has('"public.keys" is copied in one snapshot')


async def test_a_role_with_privileges_on_columns(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    """A range locks its table, which such a role may not do."""
    await prepare(source_db, target_db, "t", rows=10)
    role = f"reader_of_{source_db.name}"
    await source_db.execute(
        "DROP PUBLICATION p",
        "CREATE PUBLICATION p FOR TABLE t (id, n)",
        f"CREATE ROLE {role} LOGIN REPLICATION",
        f"GRANT SELECT (id, n) ON t TO {role}",
    )
    try:
        await subscriber.create(source_db.server.dsn(source_db.name, user=role), "p", "s", copy_engine="ranges")
        await subscriber.wait_for_ready(source_db)
        assert await target_db.value("SELECT count(*) FROM t") == 10
        assert subscriber.log.has("in one snapshot, because the role has no SELECT on the whole table")
        await subscriber.execute("DROP SUBSCRIPTION s")
    finally:
        await source_db.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


@pytest.mark.parametrize(
    ("publish", "options", "reason"),
    [
        ("insert, delete, truncate", {}, "a publication does not publish all of INSERT, UPDATE and DELETE"),
        ("insert, update, delete", {"origin": "none"}, "the subscription has origin = none"),
    ],
)
async def test_updates_that_are_not_sent(
    source_db: Database,
    target_db: Database,
    subscriber: Subscriber,
    publish: str,
    options: dict[str, str],
    reason: str,
) -> None:
    """The row of a key that such an update moves to a copied range would be missing."""
    await prepare(source_db, target_db, "t", rows=60)
    await source_db.execute(f"ALTER PUBLICATION p SET (publish = '{publish}')")
    await subscriber.create(source_db, "p", "s", copy_engine="ranges", **options)
    await subscriber.wait_for_ready(source_db)
    await same(source_db, target_db, "t")
    assert subscriber.log.has(f'table "public.t" is copied in one snapshot, because {reason}')


async def test_a_table_that_is_swapped_while_it_is_copied(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    """The ranges that are copied are in the former table. So the new one gets no range."""
    await prepare(source_db, target_db, "t", rows=1500)
    await subscriber.create(source_db, "p", "s", copy_engine="ranges")
    async with between_ranges(source_db, target_db):
        await target_db.execute(TABLE.format("t_new"), "ALTER TABLE t RENAME TO t_old; ALTER TABLE t_new RENAME TO t")
    await subscriber.log.wait_for('table "public.t" of subscription "s" was replaced')
    assert await target_db.value("SELECT count(*) FROM t") == 0
    await target_db.execute("ALTER TABLE t RENAME TO t_new; ALTER TABLE t_old RENAME TO t")
    await subscriber.wait_for_ready(source_db)
    await same(source_db, target_db, "t")
