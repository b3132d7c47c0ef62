"""Tables that differ between both sides, and tables that change."""

from __future__ import annotations

from collections.abc import AsyncIterator

import asyncpg
import pytest

from subscriber.demo.servers import Server
from tests.plugins.fix_cluster import Database, fresh_database
from tests.plugins.fix_subscriber import running_subscriber
from tests.scenarios.conftest import Pair


async def test_tables_with_columns_in_another_order_of_other_types_are_replicated(pair: Pair) -> None:
    await pair.source.execute(
        "CREATE TABLE t (a int PRIMARY KEY, b varchar, c date)", "INSERT INTO t VALUES (1, '7', NULL)"
    )
    await pair.target.execute(
        "CREATE TABLE t (d text DEFAULT 'local', c timestamp, b int, gone int, a bigint PRIMARY KEY, e serial)",
        "ALTER TABLE t DROP COLUMN gone",
    )
    await pair.subscribe("FOR TABLE t")
    await pair.change("INSERT INTO t VALUES (2, '8', '2024-01-01')", "UPDATE t SET b = '9' WHERE a = 1")
    assert await pair.rows("SELECT a, b, c::text, d, e FROM t ORDER BY a") == [
        (1, 9, None, "local", 1),
        (2, 8, "2024-01-01 00:00:00", "local", 2),
    ]
    await pair.target.execute("UPDATE t SET d = 'mine'")
    await pair.change("UPDATE t SET b = '10'")
    assert await pair.rows("SELECT DISTINCT b, d FROM t") == [(10, "mine")]


async def test_a_column_that_is_missing_on_the_target(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (a int PRIMARY KEY)")
    await pair.subscribe("FOR TABLE t")
    await pair.source.execute("ALTER TABLE t ADD b int, ADD c int", "INSERT INTO t VALUES (1, 2, 3)")
    await pair.fails('ERROR:  logical replication target relation "public.t" is missing replicated columns: "b", "c"')
    await pair.fails(r'CONTEXT:  processing remote data for replication origin "pg_\d+" during message type "INSERT"')
    await pair.target.execute("ALTER TABLE t ADD c int")
    await pair.fails('relation "public.t" is missing replicated column: "b"')
    await pair.target.execute("ALTER TABLE t ADD b int")
    await pair.caught_up()
    await pair.assert_same("SELECT a, b, c FROM t")


async def test_identities_that_do_not_fit(pair: Pair) -> None:
    await pair.source.execute(
        "CREATE TABLE none (a int, b int)",
        "CREATE TABLE other (a int PRIMARY KEY, b int NOT NULL)",
        "INSERT INTO none VALUES (1, 1)",
        "INSERT INTO other VALUES (1, 1)",
        "ALTER TABLE none ADD PRIMARY KEY (a)",
    )
    await pair.target.execute("CREATE TABLE none (a int, b int)", "CREATE TABLE other (a int, b int PRIMARY KEY)")
    await pair.subscribe("FOR ALL TABLES")
    await pair.source.execute("UPDATE none SET b = 2")
    await pair.fails(
        'ERROR:  logical replication target relation "public.none" has neither REPLICA IDENTITY index nor PRIMARY KEY '
        "and published relation does not have REPLICA IDENTITY FULL"
    )
    await pair.target.execute("ALTER TABLE none ADD PRIMARY KEY (a)")
    await pair.caught_up()
    await pair.source.execute("DELETE FROM other")
    await pair.fails(
        "ERROR:  publisher did not send replica identity column expected by the logical replication target relation "
        '"public.other"'
    )
    await pair.target.execute("ALTER TABLE other DROP CONSTRAINT other_pkey, ADD PRIMARY KEY (a)")
    await pair.caught_up()
    await pair.assert_same("SELECT * FROM none")
    assert await pair.rows("SELECT * FROM other") == []


async def test_a_primary_key_that_is_deferrable(pair: Pair) -> None:
    await pair.source.execute("CREATE TABLE t (a int PRIMARY KEY, b int)", "INSERT INTO t VALUES (1, 1), (2, 2)")
    await pair.target.execute("CREATE TABLE t (a int PRIMARY KEY DEFERRABLE, b int)")
    await pair.subscribe("FOR TABLE t")
    await pair.source.execute("UPDATE t SET b = 3 WHERE a = 1")
    said = await pair.fails('the primary key of [^\n]*"public.t" is DEFERRABLE(.*\n)*?.*HINT:  On the target: .*;')
    await pair.target.execute(*said.rpartition("On the target: ")[2].rstrip(";").split(";"))
    await pair.caught_up()
    await pair.change("UPDATE t SET a = 5 WHERE a = 1", "DELETE FROM t WHERE a = 2")
    await pair.assert_same("SELECT * FROM t")


async def test_a_view_cannot_be_a_target(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (a int PRIMARY KEY)")
    await pair.subscribe("FOR TABLE t")
    await pair.target.execute("ALTER TABLE t RENAME TO hidden", "CREATE VIEW t AS SELECT * FROM hidden")
    await pair.source.execute("INSERT INTO t VALUES (1)")
    await pair.fails('ERROR:  cannot use relation "public.t" as logical replication target')
    await pair.fails("DETAIL:  This operation is not supported for views.")
    await pair.target.execute("DROP VIEW t", "ALTER TABLE hidden RENAME TO t")
    await pair.caught_up()
    await pair.assert_same("SELECT a FROM t")


async def test_tables_change_while_changes_flow(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, v text)")
    await pair.subscribe("FOR TABLE t")
    await pair.change("INSERT INTO t VALUES (1, 'a')")
    await pair.target.execute("ALTER TABLE t ADD extra text DEFAULT 'x'")
    await pair.change("INSERT INTO t VALUES (2, 'b')", "UPDATE t SET v = 'c' WHERE id = 1")
    await pair.target.execute("ALTER TABLE t DROP extra")
    await pair.change("INSERT INTO t VALUES (3, 'd')")
    await pair.both("ALTER TABLE t ALTER v TYPE varchar(10), ADD n bigint DEFAULT 7")  # a rewrite
    await pair.change("INSERT INTO t VALUES (4, 'e', 8)", "UPDATE t SET n = 9 WHERE id < 3")
    await pair.both("ALTER TABLE t ADD u int GENERATED ALWAYS AS IDENTITY")
    await pair.change("INSERT INTO t VALUES (5, 'f', 10)")
    await pair.source.execute("ALTER TABLE t DROP n", "INSERT INTO t VALUES (6, 'g')")
    await pair.caught_up()
    await pair.target.execute("ALTER TABLE t DROP n")
    await pair.change("UPDATE t SET v = v || '!'", "DELETE FROM t WHERE id = 6")
    await pair.assert_same("SELECT * FROM t ORDER BY id")
    assert not pair.subscriber.log.has("ERROR")


async def test_ddl_and_changes_in_one_transaction(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.subscribe("FOR TABLE t")
    await pair.target.execute("ALTER TABLE t ADD v int")
    await pair.change(
        "BEGIN; INSERT INTO t VALUES (1); ALTER TABLE t ADD v int; INSERT INTO t VALUES (2, 2); SAVEPOINT s;"
        " ALTER TABLE t ADD w int; INSERT INTO t VALUES (3, 3, 3); ROLLBACK TO s; UPDATE t SET v = 4; COMMIT"
    )
    await pair.assert_same("SELECT id, v FROM t ORDER BY id")


async def test_a_table_is_renamed_and_dropped_and_made_again(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)")
    await pair.subscribe("FOR TABLE t, u")
    await pair.change("INSERT INTO t VALUES (1)")
    await pair.both("ALTER TABLE t RENAME TO tt")
    await pair.change("INSERT INTO tt VALUES (2)")
    await pair.assert_same("SELECT * FROM tt ORDER BY id")
    await pair.both("DROP TABLE tt", "CREATE TABLE tt (id int PRIMARY KEY, v text)")
    await pair.source.execute("INSERT INTO tt VALUES (1, 'a')", "ALTER PUBLICATION p ADD TABLE tt")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
    await pair.caught_up()
    await pair.change("INSERT INTO tt VALUES (2, 'b')", "INSERT INTO u VALUES (1)")
    await pair.assert_same("SELECT * FROM tt ORDER BY id")


async def test_names_that_need_quotes_are_replicated(pair: Pair) -> None:
    table = '"od""d schema"."t ""able\'"'
    await pair.both(
        'CREATE SCHEMA "od""d schema"', f'CREATE TABLE {table} ("ke""y" int PRIMARY KEY, "select" text, "Ä $1" int)'
    )
    await pair.source.execute(
        f"INSERT INTO {table} VALUES (1, 'copied', 1)", f'CREATE PUBLICATION "p ub" FOR TABLE {table}'
    )
    await pair.subscriber.create(pair.source, '"p ub"', '"s ub"', slot_name="s_slot")
    await pair.subscriber.wait_for_sync(pair.source, "s ub")
    await pair.source.execute(
        f"INSERT INTO {table} VALUES (2, 'x', 2)", f'UPDATE {table} SET "ke""y" = 7, "select" = NULL WHERE "ke""y" = 1'
    )
    await pair.source.wait_for_catchup("s ub")
    await pair.assert_same(f"SELECT * FROM {table} ORDER BY 1")


async def test_identity_columns_are_replicated_or_filled_by_the_target(pair: Pair) -> None:
    await pair.both(
        "CREATE TABLE always (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v text)",
        "CREATE TABLE side (id int PRIMARY KEY, n int GENERATED ALWAYS AS IDENTITY)",
        "CREATE TABLE by_default (id int GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, v text)",
    )
    await pair.subscribe("FOR ALL TABLES")
    await pair.change(
        "INSERT INTO always (v) VALUES ('a'), ('b'), ('c')",
        "UPDATE always SET v = 'x' WHERE id = 1",
        "UPDATE always SET id = DEFAULT WHERE id = 2",
        "INSERT INTO side (id) VALUES (1), (2)",
        "UPDATE side SET id = id + 10",
        "UPDATE side SET n = DEFAULT WHERE id = 11",
        "INSERT INTO by_default (v) VALUES ('a'), ('b')",
        "UPDATE by_default SET id = 100 WHERE id = 1",
    )
    for table in ("always", "side", "by_default"):
        await pair.assert_same(f"SELECT * FROM {table} ORDER BY id")


async def test_generated_columns_of_the_target_are_computed(pair: Pair) -> None:
    await pair.source.execute(
        "CREATE TABLE t (a int PRIMARY KEY, b int GENERATED ALWAYS AS (a * 2) STORED)",
        "CREATE TABLE to_plain (a int PRIMARY KEY, b int GENERATED ALWAYS AS (a * 2) STORED)",
        "INSERT INTO t VALUES (1)",
        "INSERT INTO to_plain VALUES (1)",
    )
    await pair.target.execute(
        "CREATE TABLE t (a int PRIMARY KEY, b int GENERATED ALWAYS AS (a * 22) STORED)",
        "CREATE TABLE to_plain (a int PRIMARY KEY, b int)",
    )
    await pair.subscribe("FOR TABLE t, to_plain")
    await pair.change("INSERT INTO t VALUES (2)", "UPDATE t SET a = 3 WHERE a = 1", "INSERT INTO to_plain VALUES (2)")
    assert await pair.rows("SELECT * FROM t ORDER BY a") == [(2, 44), (3, 66)]
    assert await pair.rows("SELECT * FROM to_plain ORDER BY a") == [(1, None), (2, None)]


async def test_published_generated_columns(pair: Pair) -> None:
    await pair.source.needs(18, "generated columns can be published")
    columns = "(a int PRIMARY KEY, b int GENERATED ALWAYS AS (a * 2) STORED)"
    await pair.source.execute(f"CREATE TABLE t {columns}", f"CREATE TABLE clash {columns}", "INSERT INTO t VALUES (1)")
    await pair.target.execute("CREATE TABLE t (a int PRIMARY KEY, b int)", f"CREATE TABLE clash {columns}")
    await pair.subscribe("FOR TABLE t WITH (publish_generated_columns = stored)")
    await pair.change("INSERT INTO t VALUES (2)", "UPDATE t SET a = 3 WHERE a = 1")
    assert await pair.rows("SELECT * FROM t ORDER BY a") == [(2, 4), (3, 6)]
    await pair.source.execute("ALTER PUBLICATION p ADD TABLE clash")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION WITH (copy_data = false)")
    await pair.source.execute("INSERT INTO clash VALUES (1)")
    await pair.fails(
        'ERROR:  logical replication target relation "public.clash" has incompatible generated column: "b"'
    )


@pytest.fixture
async def latin1_db(target: Server) -> AsyncIterator[Database]:
    """Create a database in LATIN1 on the target server."""
    async with fresh_database(target) as database:
        root: asyncpg.Connection[asyncpg.Record] = await asyncpg.connect(target.dsn())
        await root.execute(f"DROP DATABASE {database.name}")
        await root.execute(f"CREATE DATABASE {database.name} TEMPLATE template0 ENCODING latin1 LOCALE 'C'")
        await root.close()
        yield database


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
async def test_encodings_are_converted(source_db: Database, latin1_db: Database, binary: bool) -> None:
    async with running_subscriber(latin1_db) as subscriber:
        pair = Pair(source_db, latin1_db, subscriber)
        await pair.both('CREATE TABLE "täble" (id int PRIMARY KEY, "ö" text)')
        await pair.source.execute("""INSERT INTO "täble" VALUES (1, 'ÄÖÜ copied')""")
        await pair.subscribe('FOR TABLE "täble"', binary=binary)
        await pair.change("""INSERT INTO "täble" VALUES (2, 'Motörhead')""")
        await pair.assert_same('SELECT * FROM "täble" ORDER BY id')
        stored = await pair.rows("""SELECT encode(convert_to("ö", 'LATIN1'), 'hex') FROM "täble" WHERE id = 2""")
        assert stored == [("Motörhead".encode("latin-1").hex(),)]
        await pair.source.execute("""INSERT INTO "täble" VALUES (3, '漢字')""")
        await pair.fails('character with byte sequence .* has no equivalent in encoding "LATIN1"')
