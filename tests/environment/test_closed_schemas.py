"""The owner of a table has no USAGE on the table's schema, or on that of a type.

PostgreSQL's own worker still finds both by OID.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from subscriber.demo.servers import Server
from tests.environment.beside import Stage, beside, contents

TYPES = (
    "CREATE SCHEMA app",
    "CREATE SCHEMA ext",
    "CREATE TYPE ext.mood AS ENUM ('sad', 'ok', 'happy')",
    "CREATE DOMAIN ext.amount AS numeric(8,2)",
    "CREATE TYPE ext.pair AS (a int, b text)",
)
COLUMNS = "id ext.amount PRIMARY KEY, feels ext.mood, held ext.pair, more ext.mood[], plain text"
TABLES = (
    f"CREATE TABLE app.keyed ({COLUMNS})",
    f"CREATE TABLE app.bare ({COLUMNS.replace(' PRIMARY KEY', '')})",
    f"CREATE TABLE app.parted ({COLUMNS}) PARTITION BY RANGE (id)",
    "CREATE TABLE app.low PARTITION OF app.parted FOR VALUES FROM (MINVALUE) TO (50)",
    "CREATE TABLE app.high PARTITION OF app.parted FOR VALUES FROM (50) TO (MAXVALUE)",
)
NAMES = ("keyed", "bare", "parted", "low", "high")
FOLLOWED = ("keyed", "bare", "parted")
CONTENTS = contents([f"app.{name}" for name in FOLLOWED])
WITNESS = (
    "CREATE FUNCTION app.witness() RETURNS trigger LANGUAGE plpgsql AS"
    " $$ BEGIN NEW.plain := current_user; RETURN NEW; END $$",
    "ALTER FUNCTION app.witness() OWNER TO closed_owner",
    "CREATE TRIGGER witness BEFORE INSERT OR UPDATE ON app.keyed FOR EACH ROW EXECUTE FUNCTION app.witness()",
    "ALTER TABLE app.keyed ENABLE ALWAYS TRIGGER witness",
)
ROW = "i, 'sad', ROW(i, 'x')::ext.pair, ARRAY['ok', NULL]::ext.mood[], 'text'"
CHANGES = (
    *(f"INSERT INTO app.{name} SELECT {ROW} FROM generate_series(21, 60) i" for name in FOLLOWED),
    *(f"INSERT INTO app.{name} SELECT {ROW} FROM generate_series(61, 62) i" for name in FOLLOWED),
    *(f"UPDATE app.{name} SET feels = 'happy', held = ROW(0, NULL)::ext.pair WHERE id < 45" for name in FOLLOWED),
    *(f"UPDATE app.{name} SET id = id + 100 WHERE id IN (7, 8)" for name in FOLLOWED),
    *(f"DELETE FROM app.{name} WHERE id IN (9, 30, 51)" for name in FOLLOWED),
    # in one transaction, after the first change of each table
    f"BEGIN; {'; '.join(f'DELETE FROM app.{name} WHERE id IN (10, 11)' for name in FOLLOWED)}; COMMIT",
)


@pytest.fixture
async def stage(publisher: Server, target: Server) -> AsyncIterator[Stage]:
    async with beside(publisher, target) as stage:
        await stage.source.execute(*TYPES, *TABLES, "ALTER TABLE app.bare REPLICA IDENTITY FULL")
        await stage.source.execute(
            *(f"INSERT INTO app.{name} SELECT {ROW} FROM generate_series(1, 20) i" for name in FOLLOWED)
        )
        await stage.source.execute("CREATE PUBLICATION p FOR ALL TABLES WITH (publish_via_partition_root)")
        await stage.ours.execute("CREATE ROLE closed_owner")
        try:
            await stage.on_targets(*TYPES, *TABLES)
            await stage.on_targets(*(f"ALTER TABLE app.{name} OWNER TO closed_owner" for name in NAMES))
            await stage.on_targets("GRANT USAGE ON SCHEMA app, ext TO closed_owner")
            yield stage
        finally:
            await stage.drop()
            await stage.on_targets("DROP OWNED BY closed_owner CASCADE")
            await stage.ours.execute("DROP ROLE closed_owner")


async def subscribed(stage: Stage, closed: str, ours: str = "") -> None:
    """Copy with both subscriptions, which requires USAGE for the owner. Then revoke it, and restart both."""
    await stage.subscribe(ours=ours)
    await stage.copied()
    await stage.alter("DISABLE")
    await stage.on_targets(f"REVOKE USAGE ON SCHEMA {closed} FROM closed_owner")
    await stage.alter("ENABLE")


@pytest.mark.parametrize("closed", ["app", "ext", pytest.param("app, ext", marks=pytest.mark.soak)])
async def test_changes_arrive_as_with_postgresqls_own_worker(stage: Stage, closed: str) -> None:
    await subscribed(stage, closed)
    await stage.source.execute(*CHANGES)
    await stage.compare(*CONTENTS)
    await stage.on_targets("ANALYZE")  # after this the server parses the stored statements again by itself
    await stage.source.execute("UPDATE app.keyed SET feels = 'ok'", "TRUNCATE app.bare, app.parted")
    await stage.source.execute(f"INSERT INTO app.bare SELECT {ROW} FROM generate_series(1, 3) i")
    await stage.compare(*CONTENTS)
    assert not stage.subscriber.log.has("ERROR|WARNING")


async def test_code_of_the_owner_runs_as_the_owner(stage: Stage) -> None:
    """In a superuser's session, which trusts it. Other sessions have only the owner's rights, without the schemas."""
    await stage.on_targets(*WITNESS)
    await subscribed(stage, "app, ext", "trusted_owners = 'closed_owner'")
    await stage.source.execute(*CHANGES)
    await stage.compare(*CONTENTS)
    assert await stage.ours.value("SELECT count(*) FROM app.keyed WHERE plain = 'closed_owner'") > 40
    assert not stage.subscriber.log.has("ERROR|WARNING")


async def test_a_privilege_is_asked_for_although_another_role_truncates(stage: Stage) -> None:
    await subscribed(stage, "app")
    await stage.on_targets("REVOKE TRUNCATE ON app.bare FROM closed_owner")
    await stage.source.execute("TRUNCATE app.bare")
    await stage.subscriber.log.wait_for('ERROR:  permission denied for table "app.bare"')
    await stage.on_targets("GRANT TRUNCATE ON app.bare TO closed_owner")
    await stage.compare(*CONTENTS)
