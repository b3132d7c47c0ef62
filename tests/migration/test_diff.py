"""Differences between the definitions of two databases, and the statements that repair them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from subscriber.connection.connect import connect
from subscriber.demo.servers import embedded_bin
from subscriber.migration.diff.difference import SchemaDifference
from subscriber.migration.diff.schema_diff import schema_diff
from subscriber.migration.schema.archive import dump_schema
from subscriber.migration.schema.programs import find_programs
from subscriber.migration.schema.restore import restore_definitions, restore_rest
from subscriber.migration.schema.roles import create_roles
from tests.matrix.debian import debian
from tests.migration.shop import shop
from tests.plugins.fix_cluster import Database, ServerOf, fresh_database, numbers


@pytest.fixture
async def suffix(source_db: Database, target_db: Database) -> AsyncIterator[str]:
    """A shop in the source, whose roles have this suffix."""
    suffix = f"_{next(numbers)}"
    async with shop(source_db, suffix, target_db.server):
        yield suffix


async def move_definitions(source_db: Database, target_db: Database) -> None:
    versions = [await database.major() for database in (source_db, target_db)]
    programs = await find_programs(versions[0], versions[1], embedded_bin() if max(versions) <= 18 else debian(19))
    source, target = await connect(source_db.dsn()), await connect(target_db.dsn())
    try:
        await create_roles(source, target)
        async with dump_schema(source_db.dsn(), programs) as archive:
            await restore_definitions(archive, source, target)
            await restore_rest(archive, source, target_db.dsn())
    finally:
        source.terminate()
        target.terminate()


async def differences(source_db: Database, target_db: Database) -> list[SchemaDifference]:
    source, target = await connect(source_db.dsn()), await connect(target_db.dsn())
    try:
        return await schema_diff(source, target)
    finally:
        source.terminate()
        target.terminate()


# What a user changes on the target, and the object that the comparison names.
CHANGES = {
    "ALTER TABLE shop.log ALTER COLUMN line TYPE varchar(90)": "column shop.log.line",
    "ALTER TABLE shop.customer ALTER COLUMN changed SET DEFAULT '2000-01-01'": "column shop.customer.changed",
    "ALTER TABLE shop.log ALTER COLUMN line SET NOT NULL": "column shop.log.line",
    "ALTER TABLE shop.log ADD COLUMN more int": "column shop.log.more",
    "ALTER TABLE shop.item DROP COLUMN booked": "column shop.item.booked",
    "ALTER TABLE shop.customer ALTER COLUMN mail SET STATISTICS 7": "column shop.customer.mail",
    "ALTER TABLE shop.keyless SET UNLOGGED": "relation shop.keyless",
    "ALTER TABLE shop.product REPLICA IDENTITY FULL": "relation shop.product",
    "ALTER TABLE shop.customer DISABLE ROW LEVEL SECURITY": "relation shop.customer",
    "ALTER TABLE shop.sale_2024 OWNER TO postgres; ALTER TABLE shop.sale OWNER TO postgres": "relation shop.sale",
    "COMMENT ON TABLE shop.log IS 'other'": "relation shop.log",
    "COMMENT ON COLUMN shop.log.at IS 'other'": "column shop.log.at",
    "REVOKE INSERT ON shop.log FROM \"app{suffix}\"; GRANT DELETE ON shop.log TO PUBLIC": "relation shop.log",
    "ALTER TABLE shop.item DROP CONSTRAINT item_line": "constraint shop.item.item_line",
    "ALTER TABLE shop.sale DROP CONSTRAINT sale_customer_fkey": "constraint shop.sale.sale_customer_fkey",
    "DROP INDEX shop.customer_name": "index shop.customer_name",
    "DROP INDEX shop.customer_year; CREATE INDEX customer_year ON shop.customer (changed)": "index shop.customer_year",
    "ALTER SEQUENCE shop.invoice_number INCREMENT 7": "sequence shop.invoice_number",
    "CREATE OR REPLACE VIEW shop.open_sale AS SELECT * FROM shop.sale": "relation shop.open_sale",
    "CREATE OR REPLACE FUNCTION shop.touch() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'":
        "function shop.touch()",
    "ALTER FUNCTION shop.slug(text) COST 7": "function shop.slug(name text)",
    "ALTER TYPE shop.state RENAME TO old; CREATE TYPE shop.other AS ENUM ('a')": "enum shop.state",
    "DROP TRIGGER customer_touch ON shop.customer": "trigger shop.customer.customer_touch",
    "ALTER TABLE shop.customer DISABLE TRIGGER customer_always": "trigger shop.customer.customer_always",
    "ALTER POLICY own ON shop.customer USING (true)": "policy shop.customer.own",
    "DROP STATISTICS shop.customer_link": "statistics shop.customer_link",
    "ALTER PUBLICATION some_tables DROP TABLE shop.sale": "publication some_tables",
    "DROP EVENT TRIGGER shop_noticed{suffix}": "event trigger shop_noticed{suffix}",
    "DROP RULE keyless_no_delete ON shop.keyless": "rule shop.keyless.keyless_no_delete",
    "DROP COLLATION shop.plain CASCADE": "collation shop.plain",
    "GRANT CREATE ON SCHEMA public TO \"app{suffix}\"": "schema public",
    "REVOKE USAGE ON SCHEMA shop FROM \"app{suffix}\"": "schema shop",
}  # fmt: skip
# No statement repairs these exactly, or the repair would drop something of the target.
BY_HAND = {"enum shop.state", "publication some_tables", "collation shop.plain", "column shop.log.more"}


@pytest.mark.parametrize("together", [True, pytest.param(False, marks=pytest.mark.soak)])
async def test_every_change_is_found_and_repaired(
    source_db: Database, target_db: Database, suffix: str, together: bool
) -> None:
    await move_definitions(source_db, target_db)
    changes = [(change.format(suffix=suffix), name.format(suffix=suffix)) for change, name in CHANGES.items()]
    repaired = [(change, name) for change, name in changes if name not in BY_HAND]
    for group in [repaired] if together else [[change] for change in repaired]:
        await target_db.execute(*(change for change, _ in group))
        changed = await differences(source_db, target_db)
        names = {f"{difference.kind} {difference.name}" for difference in changed}
        assert {name for _, name in group} <= names
        statements = [statement for difference in changed for statement in difference.statements]
        assert not any(statement.startswith("--") for statement in statements), changed
        await target_db.execute(*statements)
        assert await differences(source_db, target_db) == [], group
    await target_db.execute(*(change for change, name in changes if name in BY_HAND))
    changed = await differences(source_db, target_db)
    assert {f"{difference.kind} {difference.name}" for difference in changed} >= BY_HAND


async def test_labels_of_an_enum_are_added(source_db: Database, target_db: Database) -> None:
    await source_db.execute("CREATE TYPE e AS ENUM ('a', 'b', 'c', 'd')")
    await target_db.execute("CREATE TYPE e AS ENUM ('b', 'd')")
    (changed,) = await differences(source_db, target_db)
    assert changed.statements == (
        "ALTER TYPE public.e ADD VALUE 'a' BEFORE 'b';",
        "ALTER TYPE public.e ADD VALUE 'c' AFTER 'b';",
    )
    for statement in changed.statements:
        await target_db.execute(statement)
    assert await differences(source_db, target_db) == []


async def test_expressions_of_a_hostile_source_are_parsed_and_not_executed(
    source_db: Database, server_of: ServerOf
) -> None:
    async with fresh_database(server_of("publisher", 13)) as old:
        await old.execute("CREATE VIEW v AS SELECT 1 AS one, 2 AS two")
        await source_db.execute(
            'CREATE VIEW v AS SELECT 1 AS one, 2 AS "two"; CREATE TABLE t (id int DEFAULT 1)',
        )
        await old.execute("CREATE TABLE t (id int DEFAULT 2)")
        changed = await differences(old, source_db)
        names = {difference.name for difference in changed}
        assert "public.t.id" in names
        assert "public.v" not in names


SOAK = [pytest.param(*pair, marks=pytest.mark.soak) for pair in ((15, 19), (14, 17), (16, 18), (18, 19))]


@pytest.mark.parametrize(("old", "new"), [(13, 18), *SOAK])
async def test_versions_have_no_differences(old: int, new: int, server_of: ServerOf) -> None:
    """Definitions of an older server are the same on a newer one, although it prints some of them differently."""
    suffix = f"_{next(numbers)}"
    source, target = server_of("publisher", old), server_of("target", new)
    async with (
        fresh_database(source) as source_db,
        fresh_database(target) as target_db,
        shop(source_db, suffix, target),
    ):
        await source_db.execute(
            "CREATE VIEW shop.parts AS SELECT extract(year FROM at) AS y, substring(line FROM 2 FOR 3) AS s,"
            " overlay(line PLACING 'x' FROM 1) AS o, position('a' IN line) AS p, at AT TIME ZONE 'UTC' AS z"
            " FROM shop.log",
            "ALTER TABLE shop.log ADD CONSTRAINT since CHECK (extract(year FROM at) > 2000 AND trim(line) <> '')",
            "CREATE INDEX log_trim ON shop.log (trim(both ' ' FROM line)) WHERE substring(line FROM 1 FOR 1) = 'a'",
        )
        await move_definitions(source_db, target_db)
        assert "\n".join(difference.describe() for difference in await differences(source_db, target_db)) == ""
        await target_db.execute("DROP INDEX shop.customer_name")
        (changed,) = await differences(source_db, target_db)
        assert changed.name == "shop.customer_name"
