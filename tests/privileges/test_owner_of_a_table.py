"""A table's owner makes each change run code, to gain the rights of the role that applies changes."""

from __future__ import annotations

import anyio
import pytest

from tests.privileges.conftest import APPLY, NEWEST_MAJOR, OTHER, OWNER, Attacked

# Table -> its definition on the target. Each runs app.attack() when a row is inserted.
PURE = """
CREATE FUNCTION app.{name} LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN PERFORM app.attack(); RETURN {value}; END $$
"""
TRIGGER = "CREATE TRIGGER x {when} ON app.{table} {each} EXECUTE FUNCTION app.fire()"
COLUMNS = "(id int PRIMARY KEY, v int)"
WAYS = {
    "before_row": (
        f"CREATE TABLE app.before_row {COLUMNS}",
        TRIGGER.format(when="BEFORE INSERT OR UPDATE OR DELETE", table="before_row", each="FOR EACH ROW"),
        "ALTER TABLE app.before_row ENABLE ALWAYS TRIGGER x",
    ),
    "after_statement": (
        f"CREATE TABLE app.after_statement {COLUMNS}",
        TRIGGER.format(when="AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE", table="after_statement", each=""),
        "ALTER TABLE app.after_statement ENABLE REPLICA TRIGGER x",
    ),
    "deferred": (
        f"CREATE TABLE app.deferred {COLUMNS}",
        "CREATE CONSTRAINT TRIGGER x AFTER INSERT OR UPDATE OR DELETE ON app.deferred DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION app.fire()",
        "ALTER TABLE app.deferred ENABLE ALWAYS TRIGGER x",
    ),
    "condition": (
        f"CREATE TABLE app.condition {COLUMNS}",
        "CREATE TRIGGER x BEFORE INSERT OR UPDATE ON app.condition FOR EACH ROW WHEN (app.pure(NEW.v) < 0)"
        " EXECUTE FUNCTION suppress_redundant_updates_trigger()",
        "ALTER TABLE app.condition ENABLE ALWAYS TRIGGER x",
    ),
    "filled": (f"CREATE TABLE app.filled {COLUMNS}", "ALTER TABLE app.filled ADD d int DEFAULT app.attack()"),
    "checked": (f"CREATE TABLE app.checked {COLUMNS}", "ALTER TABLE app.checked ADD CHECK (app.pure(v) > 0)"),
    "generated": (
        f"CREATE TABLE app.generated {COLUMNS}",
        "ALTER TABLE app.generated ADD g int GENERATED ALWAYS AS (app.pure(v)) STORED",
    ),
    "domain": (
        "CREATE DOMAIN app.d AS int CHECK (app.pure(VALUE) > 0)",
        "CREATE TABLE app.domain (id int PRIMARY KEY, v app.d)",
    ),
    "indexed": (f"CREATE TABLE app.indexed {COLUMNS}", "CREATE INDEX ON app.indexed (app.pure(v))"),
    "partly_indexed": (
        f"CREATE TABLE app.partly_indexed {COLUMNS}",
        "CREATE INDEX ON app.partly_indexed (v) WHERE app.pure(v) > 0",
    ),
    "described": (
        f"CREATE TABLE app.described {COLUMNS}",
        "CREATE STATISTICS app.described_s ON (v + app.pure(1)), id FROM app.described",
    ),
    "routed": (
        "CREATE TABLE app.routed (id int NOT NULL, v int) PARTITION BY RANGE (app.pure(v))",
        "CREATE TABLE app.routed_1 PARTITION OF app.routed (PRIMARY KEY (id)) DEFAULT",
    ),
    "leaf": (
        "CREATE TABLE app.leaf (id int PRIMARY KEY, v int) PARTITION BY RANGE (id)",
        "CREATE TABLE app.leaf_1 PARTITION OF app.leaf DEFAULT",
        TRIGGER.format(when="BEFORE INSERT OR UPDATE OR DELETE", table="leaf_1", each="FOR EACH ROW"),
        "ALTER TABLE app.leaf_1 ENABLE ALWAYS TRIGGER x",
    ),
    "operated": (
        "CREATE OPERATOR app.<<< (LEFTARG = int, RIGHTARG = int, FUNCTION = app.less)",
        f"CREATE TABLE app.operated {COLUMNS}",
        "ALTER TABLE app.operated ADD CHECK (v OPERATOR(app.<<<) 4)",
    ),
}  # fmt: skip
FUNCTIONS = (
    PURE.format(name="pure(x int) RETURNS int", value="coalesce(x, 1)"),
    PURE.format(name="less(x int, y int) RETURNS boolean", value="true"),
    """
    CREATE FUNCTION app.fire() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN PERFORM app.attack(); RETURN coalesce(NEW, OLD); END $$
    """,
)
REFUSED = f'run code of role "{OWNER}", which could do there whatever the session\'s role may do'


async def tables(attacked: Attacked) -> None:
    """Create all tables of WAYS on the target, and tables of the same names on the source, with a row each."""
    await attacked.as_owner(*FUNCTIONS, *(statement for way in WAYS.values() for statement in way))
    await attacked.source.execute("CREATE SCHEMA app")
    for table in WAYS:
        await attacked.source.execute(f"CREATE TABLE app.{table} {COLUMNS}", f"INSERT INTO app.{table} VALUES (1, 1)")
    await attacked.source.execute("CREATE PUBLICATION p FOR TABLES IN SCHEMA app")


async def rows_of(attacked: Attacked, table: str) -> list[tuple[int, int]]:
    """Return rows that the owner of the table reads: a query of a superuser would run code itself."""
    async with attacked.target.connection() as connection:
        await connection.execute(f"SET SESSION AUTHORIZATION {OWNER}")
        return [tuple(row) for row in await connection.fetch(f"SELECT id, v FROM app.{table} ORDER BY id")]


@pytest.mark.parametrize("target", NEWEST_MAJOR, indirect=True)
async def test_a_dedicated_role_applies_changes_that_a_superusers_session_refuses(attacked: Attacked) -> None:
    await tables(attacked)
    await attacked.target.execute("TRUNCATE app.loot")  # indexes were built
    await attacked.subscriber.create(attacked.source, "p")
    for table in WAYS:
        await attacked.subscriber.log.wait_for(f'changes of table "app.{table}" {REFUSED}')
        assert await rows_of(attacked, table) == []
    assert await attacked.loot() <= {(OWNER, "off")}
    await attacked.apply_as(APPLY)
    await attacked.caught_up()
    # The server runs the code of domains, and of statistics, before it checks privileges, and without the session's
    # rights.
    for table in WAYS.keys() - {"domain", "described"}:
        await attacked.change(
            f"INSERT INTO app.{table} VALUES (2, 2), (3, 3)",
            f"UPDATE app.{table} SET v = 7 WHERE id = 2",
            f"DELETE FROM app.{table} WHERE id = 3",
        )
        assert await rows_of(attacked, table) == await attacked.source.rows(
            f"SELECT id, v FROM app.{table} ORDER BY id"
        )
    assert {(APPLY, "off")} <= await attacked.loot() <= {(APPLY, "off"), (OWNER, "off")}


async def test_changes_are_refused_as_the_copy_is(attacked: Attacked) -> None:
    """The launcher resumes when the code is removed or trusted, or another role applies changes."""
    await tables(attacked)
    await attacked.source.execute("CREATE TABLE app.plain (id int PRIMARY KEY)")
    await attacked.as_owner("CREATE TABLE app.plain (id int PRIMARY KEY)")
    await attacked.subscriber.create(attacked.source, "p", copy_data=False)
    await attacked.target.execute("TRUNCATE app.loot")
    await attacked.change("INSERT INTO app.plain VALUES (1)")  # its owner's tables are applied by a superuser
    await attacked.source.execute("INSERT INTO app.before_row VALUES (2, 2)")
    await attacked.fails(f'changes of table "app.before_row" {REFUSED}')
    assert await attacked.loot() == set()
    await attacked.as_owner("DROP TRIGGER x ON app.before_row")
    await attacked.source.wait_for_catchup("s")
    await attacked.source.execute("INSERT INTO app.checked VALUES (2, 2)")
    await attacked.fails(f'changes of table "app.checked" {REFUSED}')
    assert await attacked.loot() == set()
    await attacked.subscriber.execute(f"ALTER SUBSCRIPTION s SET (trusted_owners = '{OWNER}')")
    await attacked.source.wait_for_catchup("s")
    assert await attacked.rows("SELECT id FROM app.checked") == [(2,)]
    assert await attacked.loot() == {("postgres", "on")}  # the meaning of trust


async def test_code_that_comes_while_changes_are_applied(attacked: Attacked) -> None:
    """The owner adds a trigger to a table whose changes a superuser applies, over and over."""
    await attacked.as_owner(*FUNCTIONS, f"CREATE TABLE app.plain {COLUMNS}", "CREATE TYPE app.mood AS ENUM ('a', 'b')")
    await attacked.as_owner("ALTER TABLE app.plain ADD m app.mood")
    await attacked.source.execute("CREATE SCHEMA app", "CREATE TYPE app.mood AS ENUM ('a', 'b')")
    await attacked.source.execute("CREATE TABLE app.plain (id int PRIMARY KEY, v int, m app.mood)")
    await attacked.source.execute("CREATE PUBLICATION p FOR TABLE app.plain")
    await attacked.subscriber.create(attacked.source, "p", copy_data=False)
    trigger = TRIGGER.format(when="BEFORE INSERT OR UPDATE", table="plain", each="FOR EACH ROW")
    add = f"{trigger}; ALTER TABLE app.plain ENABLE ALWAYS TRIGGER x"
    renamed = (
        "ALTER TYPE app.mood RENAME TO mood_old",
        "CREATE DOMAIN app.mood AS text CHECK (app.pure(1) > 0)",
        "SELECT pg_sleep(0.005)",
        "DROP DOMAIN app.mood",
        "ALTER TYPE app.mood_old RENAME TO mood",
    )
    changed = anyio.Event()
    async with anyio.create_task_group() as tasks:

        async def change() -> None:
            for start in range(1, 2000, 40):
                await attacked.source.execute(
                    f"INSERT INTO app.plain SELECT g, g, 'a' FROM generate_series({start}, {start + 39}) g",
                    f"UPDATE app.plain SET v = v + 1, m = 'b' WHERE id >= {start}",
                    f"DELETE FROM app.plain WHERE id = {start}",
                )
            changed.set()

        tasks.start_soon(change)
        while not changed.is_set():  # a statement that was cancelled would still be executed, at any time
            await attacked.as_owner(add, "SELECT pg_sleep(0.005)", "DROP TRIGGER x ON app.plain", *renamed)
    await attacked.source.wait_for_catchup("s", timeout=60)
    await attacked.assert_same("SELECT * FROM app.plain ORDER BY id")
    assert await attacked.loot() == set()


async def test_two_owners_do_not_get_at_each_other(attacked: Attacked) -> None:
    """A role that may act as both must not run the code of either, unless that one is trusted."""
    await tables(attacked)
    await attacked.target.execute(f"GRANT {OTHER} TO {APPLY}", "TRUNCATE app.loot")
    await attacked.apply_as(APPLY)
    await attacked.subscriber.create(attacked.source, "p", copy_data=False)
    await attacked.source.execute("INSERT INTO app.before_row VALUES (2, 2)")
    await attacked.fails(f'changes of table "app.before_row" {REFUSED}')
    assert await attacked.loot() == set()
    await attacked.target.execute(f"REVOKE {OTHER} FROM {APPLY}")
    await attacked.source.wait_for_catchup("s")
    await attacked.target.execute(f"GRANT {OTHER} TO {APPLY}")  # from now on, not when a worker starts again
    before = await attacked.rows("SELECT count(*) FROM app.loot")
    await attacked.source.execute("INSERT INTO app.before_row VALUES (3, 3)")
    await attacked.subscriber.log.wait_for(f"(?s){REFUSED}.*{REFUSED}")
    assert await attacked.rows("SELECT count(*) FROM app.loot") == before
