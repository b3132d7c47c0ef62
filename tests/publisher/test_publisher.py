"""Queries to a real publisher. SUBSCRIBER_TEST_PUBLISHER_BIN selects another version."""

from __future__ import annotations

import pytest

from subscriber.apply.batch.binary_types import SAME_IN_BINARY
from subscriber.errors import ConninfoError, PublisherError, ServerError
from subscriber.lsn import Lsn
from subscriber.publisher.connection import Publisher
from subscriber.publisher.own_schema import COMMENT
from subscriber.publisher.tables import PublishedTable, copy_statement
from tests.plugins.fix_cluster import Database


def needs(walsender: Publisher, major: int) -> None:
    if walsender.server_version < major * 10000:
        pytest.skip(f"PostgreSQL {major} or later")


async def copied(walsender: Publisher, table: PublishedTable) -> list[str]:
    """Return the rows of the table's copy statement, sorted."""
    statement = copy_statement(table, binary=False)
    rows = [row async for rows in walsender.session.copy_out(statement) for row in rows]
    return sorted(b"".join(rows).decode().splitlines())


def names(table: PublishedTable) -> list[str]:
    return [column.name for column in table.columns]


async def test_values_do_not_depend_on_the_publishers_settings(db: Database) -> None:
    await db.execute(f"ALTER DATABASE {db.name} SET datestyle = 'German'", "CREATE SCHEMA s")
    await db.execute(f"ALTER DATABASE {db.name} SET search_path = s")
    publisher = await Publisher.connect(
        db.dsn(options="-c datestyle=SQL -c work_mem=5MB -c wal_sender_timeout=33s"), application_name="sub"
    )
    shown = await publisher.session.rows(
        "SELECT current_setting('datestyle'), current_setting('intervalstyle'), current_setting('extra_float_digits'),"
        " current_setting('search_path'), current_setting('work_mem'), current_setting('application_name'),"
        " current_setting('client_encoding'), current_setting('wal_sender_timeout')"
    )
    assert shown[0][0] is not None
    assert shown[0][0].startswith("ISO")
    assert shown[0][1:] == ("postgres", "3", "", "5MB", "sub", "UTF8", "33s")
    await publisher.close()


async def test_the_cluster_identifies_itself(db: Database, walsender: Publisher) -> None:
    identity = await walsender.identify_system()
    assert identity.systemid == await db.value("SELECT system_identifier FROM pg_control_system()")
    assert (identity.timeline, identity.dbname, identity.in_recovery) == (1, db.name, False)
    assert Lsn(0) < identity.position <= Lsn.parse(await db.value("SELECT pg_current_wal_flush_lsn()::text"))


async def test_the_life_of_a_slot(walsender: Publisher) -> None:
    assert await walsender.slot("life") is None
    created = await walsender.create_slot("life", snapshot="nothing")
    assert (created.name, created.snapshot_name) == ("life", None)
    slot = await walsender.slot("life")
    assert slot is not None
    assert (slot.plugin, slot.active, slot.active_pid, slot.temporary) == ("pgoutput", False, None, False)
    assert slot.confirmed_flush == created.consistent_point
    assert slot.in_this_database
    assert not slot.is_lost
    with pytest.raises(ServerError) as caught:
        await walsender.create_slot("life", snapshot="nothing")
    assert caught.value.sqlstate == "42710"
    assert caught.value.message == (
        'could not create replication slot "life": ERROR:  replication slot "life" already exists'
    )
    assert await walsender.drop_slot("life", wait=True)
    assert not await walsender.drop_slot("life", missing_ok=True)
    with pytest.raises(ServerError) as caught:
        await walsender.drop_slot("life")
    assert caught.value.sqlstate == "42704"
    assert caught.value.message == (
        'could not drop replication slot "life" on publisher: ERROR:  replication slot "life" does not exist'
    )


async def test_a_used_snapshot_shows_exactly_what_is_before_the_slot(db: Database, walsender: Publisher) -> None:
    await db.execute("CREATE TABLE t (a int); INSERT INTO t VALUES (1)", "CREATE PUBLICATION p FOR TABLE t")
    await walsender.begin_snapshot()
    created = await walsender.create_slot("snap", snapshot="use")
    assert created.snapshot_name is None
    await db.execute("INSERT INTO t VALUES (2)")
    assert await copied(walsender, await walsender.table("public", "t", ["p"])) == ["1"]
    await walsender.commit()
    assert await copied(walsender, await walsender.table("public", "t", ["p"])) == ["1", "2"]
    await walsender.drop_slot("snap")


async def test_an_exported_snapshot_has_a_name(walsender: Publisher) -> None:
    created = await walsender.create_slot("exported", snapshot="export", temporary=True)
    assert created.snapshot_name


async def test_two_phase_and_failover_are_slots_options(walsender: Publisher) -> None:
    needs(walsender, 18)
    await walsender.create_slot("options", snapshot="nothing", two_phase=True, failover=True)
    slot = await walsender.slot("options")
    assert slot is not None
    assert (slot.two_phase, slot.failover) == (True, True)
    await walsender.alter_slot("options", failover=False, two_phase=False)
    slot = await walsender.slot("options")
    assert slot is not None
    assert (slot.two_phase, slot.failover) == (False, False)
    await walsender.drop_slot("options")


async def test_publications_that_do_not_exist_are_named(db: Database, walsender: Publisher) -> None:
    await db.execute('CREATE PUBLICATION "it\'s"')
    assert await walsender.missing_publications(["z", "it's", "a\\b"]) == ["z", "a\\b"]
    assert await walsender.tables(["z"]) == []


async def test_every_published_table_is_listed_once(db: Database, walsender: Publisher) -> None:
    await db.execute(
        'CREATE SCHEMA "S"; CREATE TABLE "S"."T" (a int); CREATE TABLE b (a int); CREATE TABLE c (a int)',
        'CREATE PUBLICATION p FOR TABLE b, "S"."T"; CREATE PUBLICATION q FOR TABLE b',
    )
    assert await walsender.tables(["p", "q"]) == [("S", "T"), ("public", "b")]


async def test_a_root_hides_its_partitions(db: Database, walsender: Publisher) -> None:
    await db.execute(
        "CREATE TABLE r (a int PRIMARY KEY, b text) PARTITION BY RANGE (a);"
        "CREATE TABLE r1 PARTITION OF r FOR VALUES FROM (0) TO (10);"
        "CREATE TABLE r2 PARTITION OF r FOR VALUES FROM (10) TO (20);"
        "INSERT INTO r VALUES (1, 'x'), (11, 'y')",
        "CREATE PUBLICATION root FOR TABLE r WITH (publish_via_partition_root = true);"
        "CREATE PUBLICATION leaves FOR TABLE r",
    )
    assert await walsender.tables(["root"]) == [("public", "r")]
    assert await walsender.tables(["leaves"]) == [("public", "r1"), ("public", "r2")]
    root = await walsender.table("public", "r", ["root"])
    assert root.relkind == "p"
    assert root.total_bytes > 0
    assert await copied(walsender, root) == ["1\tx", "11\ty"]
    assert await copied(walsender, await walsender.table("public", "r2", ["leaves"])) == ["11\ty"]


async def test_types_that_are_copied_in_binary_are_what_they_are_called(db: Database) -> None:
    rows = await db.rows("SELECT oid, typname FROM pg_type WHERE oid < 10000")
    names = {int(oid): str(name) for oid, name in rows}
    assert {oid: names.get(oid) for oid in SAME_IN_BINARY} == SAME_IN_BINARY


async def test_a_table_is_described(db: Database, walsender: Publisher) -> None:
    await db.execute(
        "CREATE TABLE t (gone int, a numeric(10, 2), b int PRIMARY KEY, g int GENERATED ALWAYS AS (b + 1) STORED)",
        "ALTER TABLE t DROP COLUMN gone",
        "INSERT INTO t VALUES (1.5, 2)",
        "CREATE PUBLICATION p FOR TABLE t",
    )
    table = await walsender.table("public", "t", ["p"])
    assert table.relid == await db.value("SELECT 't'::regclass::oid")
    assert (table.replica_identity, table.relkind) == ("d", "r")
    assert names(table) == ["a", "b"]
    assert [column.is_key for column in table.columns] == [False, True]
    assert (table.columns[0].type_oid, table.columns[0].type_modifier) == (1700, (10 << 16 | 2) + 4)
    assert table.total_bytes == 8192
    assert await copied(walsender, table) == ["1.50\t2"]


async def test_children_are_not_copied_with_their_parent(db: Database, walsender: Publisher) -> None:
    await db.execute("CREATE TABLE t (a int); CREATE TABLE child () INHERITS (t)")
    await db.execute("INSERT INTO t VALUES (1); INSERT INTO child VALUES (2); CREATE PUBLICATION p FOR TABLE ONLY t")
    assert await copied(walsender, await walsender.table("public", "t", ["p"])) == ["1"]


async def test_published_generated_columns_are_copied(db: Database, walsender: Publisher) -> None:
    needs(walsender, 18)
    await db.execute(
        "CREATE TABLE t (a int, g int GENERATED ALWAYS AS (a + 1) STORED); INSERT INTO t VALUES (1)",
        "CREATE PUBLICATION p FOR TABLE t WITH (publish_generated_columns = stored)",
        "CREATE PUBLICATION q FOR TABLE t",
    )
    table = await walsender.table("public", "t", ["p"])
    assert [column.is_generated for column in table.columns] == [False, True]
    assert await copied(walsender, table) == ["1\t2"]
    assert names(await walsender.table("public", "t", ["q"])) == ["a"]


async def test_column_lists_and_row_filters_apply(db: Database, walsender: Publisher) -> None:
    needs(walsender, 15)
    await db.execute(
        "CREATE TABLE t (a int PRIMARY KEY, b text, c text);"
        "INSERT INTO t SELECT i, 'b' || i, 'c' || i FROM generate_series(1, 5) i",
        "CREATE PUBLICATION p FOR TABLE t (c, a) WHERE (a > 4);"
        "CREATE PUBLICATION q FOR TABLE t (a, c) WHERE (a < 2);"
        "CREATE PUBLICATION every FOR TABLE t (a, c);"
        "CREATE PUBLICATION other FOR TABLE t",
    )
    table = await walsender.table("public", "t", ["p", "q"])
    assert names(table) == ["a", "c"]
    assert sorted(table.row_filters) == ["(a < 2)", "(a > 4)"]
    assert await copied(walsender, table) == ["1\tc1", "5\tc5"]
    assert (await walsender.table("public", "t", ["p", "every"])).row_filters == ()
    assert await walsender.tables(["p", "q"]) == [("public", "t")]

    message = 'cannot use different column lists for table "public.t" in different publications'
    for ask in (walsender.tables(["p", "other"]), walsender.table("public", "t", ["p", "other"])):
        with pytest.raises(PublisherError) as caught:
            await ask
        assert (caught.value.message, caught.value.sqlstate) == (message, "0A000")


async def test_all_tables_and_schemas_can_be_published(db: Database, walsender: Publisher) -> None:
    await db.execute("CREATE TABLE t (a int)", "CREATE PUBLICATION a FOR ALL TABLES")
    assert await walsender.tables(["a"]) == [("public", "t")]
    needs(walsender, 15)
    await db.execute("CREATE PUBLICATION s FOR TABLES IN SCHEMA public")
    assert await walsender.tables(["a", "s"]) == [("public", "t")]
    assert names(await walsender.table("public", "t", ["a", "s"])) == ["a"]


async def test_a_table_that_is_not_there(walsender: Publisher) -> None:
    with pytest.raises(PublisherError) as caught:
        await walsender.table("public", "nosuch", ["p"])
    assert (caught.value.message, caught.value.sqlstate) == ('table "public.nosuch" not found on publisher', "42704")


async def test_tables_from_elsewhere_are_noticed(db: Database, walsender: Publisher) -> None:
    await db.execute(
        "CREATE TABLE t (a int); CREATE TABLE u (a int)",
        "CREATE PUBLICATION p FOR TABLE t; CREATE PUBLICATION q FOR TABLE u",
    )
    assert await walsender.publications_with_other_origins(["p", "q"]) == []
    await db.execute(
        "CREATE SCHEMA subscriber; CREATE TABLE subscriber.pg_subscription_rel (srrelid oid)",
        "INSERT INTO subscriber.pg_subscription_rel VALUES ('t'::regclass)",
    )
    assert await walsender.publications_with_other_origins(["q", "p"]) == [], "the schema has not the program's mark"
    await db.execute(f"COMMENT ON SCHEMA subscriber IS '{COMMENT}0040'")
    assert await walsender.publications_with_other_origins(["q", "p"]) == ["p"]
    assert await walsender.publications_with_other_origins(["p"], [("public", "t")]) == []
    await db.execute("DROP SCHEMA subscriber CASCADE")
    await db.execute(
        f"CREATE SUBSCRIPTION s_{db.name} CONNECTION 'host=nowhere' PUBLICATION x"
        " WITH (connect = false, slot_name = NONE)"
    )
    assert await walsender.publications_with_other_origins(["p", "q"]) == []
    await db.execute(f"DROP SUBSCRIPTION s_{db.name}")


async def test_a_required_password(db: Database) -> None:
    with pytest.raises(PublisherError) as caught:
        await Publisher.connect(db.server.dsn(db.name), application_name="test", must_use_password=True)
    assert caught.value.sqlstate == "2F003"
    assert caught.value.detail == "Non-superusers must provide a password in the connection string."
    with pytest.raises(PublisherError) as caught:
        await Publisher.connect(db.dsn(password="x"), application_name="test", must_use_password=True)
    assert caught.value.detail == "Non-superuser cannot connect if the server does not request a password."


async def test_a_bad_connection_string_gets_nowhere() -> None:
    with pytest.raises(ConninfoError, match='missing "=" after "foobar" in connection info string'):
        await Publisher.connect("foobar", application_name="test")


# --- sequences ----------------------------------------------------------------------------------------


async def test_sequences_of_published_columns(db: Database, walsender: Publisher) -> None:
    """Before 19 they are owned by columns that are published, also by the root of a partition."""
    await db.execute(
        "CREATE TABLE a (id serial, n serial)",
        "CREATE TABLE r (id bigint GENERATED BY DEFAULT AS IDENTITY) PARTITION BY RANGE (id)",
        "CREATE TABLE r1 PARTITION OF r FOR VALUES FROM (0) TO (100)",
        "CREATE TABLE other (id serial)",
        "CREATE SEQUENCE alone",
        "CREATE PUBLICATION sp FOR TABLE a (id), r",
        "SELECT nextval('a_id_seq'), nextval('a_id_seq')",
        "SELECT setval('r_id_seq', 42, false)",
    )
    assert await walsender.sequences(["sp"]) == [("public", "a_id_seq"), ("public", "r_id_seq")]
    names = [("public", "a_id_seq"), ("public", "r_id_seq"), ("public", "missing")]
    by_name = await walsender.sequence_values(names)
    assert set(by_name) == set(names[:2])
    first, second = (by_name[name] for name in names[:2])
    assert first is not None
    assert second is not None
    assert (first.last_value, first.is_called) == (2, True)
    assert (second.last_value, second.is_called) == (42, False)
    assert first.lsn > 0
    assert first.definition.greatest == 2**31 - 1


async def test_no_view_is_read_in_the_place_of_a_relation(db: Database, walsender: Publisher) -> None:
    await db.execute("CREATE VIEW v AS SELECT 1 AS last_value, true AS is_called")
    assert await walsender.session.rows("SELECT * FROM public.v") == [("1", "t")]
    await walsender.restrict_views()
    with pytest.raises(ServerError, match="non-system view"):
        await walsender.session.rows("SELECT * FROM public.v")
