"""A whole life on servers of managed services: copy, check, repair and move, by roles that are no superusers."""

from __future__ import annotations

import subprocess
from asyncio import to_thread
from dataclasses import replace

import asyncpg
import pytest

from subscriber import StartOptions, StatementError, move_database
from subscriber.cli.commands.check import check
from subscriber.demo.servers import Servers, embedded_bin
from subscriber.migration.plan import Side
from subscriber.migration.preflight.model import PreflightFinding
from subscriber.migration.preflight.preflight import run_preflight
from subscriber.repair.tables import repair
from tests.managed import SERVICES, ManagedServer, start_service
from tests.matrix.programs import NotAvailable, programs
from tests.migration.scene import QUICK
from tests.plugins.fix_cluster import Database

OWNED = """
CREATE TABLE item (id int PRIMARY KEY, v text);
CREATE TABLE line (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, item int REFERENCES item);
CREATE FUNCTION append() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.v := NEW.v || 't'; RETURN NEW; END $$;
CREATE TRIGGER append BEFORE INSERT ON item FOR EACH ROW EXECUTE FUNCTION append();
INSERT INTO item SELECT g, 'w' FROM generate_series(1, 1000) g;
INSERT INTO line (item) SELECT id FROM item;
"""
# The owner of the tables, and the role of the applications.
ROLES = (
    "CREATE ROLE shop_owner NOLOGIN",
    "CREATE ROLE shop_app LOGIN",
    "GRANT shop_owner, shop_app TO CURRENT_USER",
    "GRANT ALL ON SCHEMA public TO shop_owner",
)
ROWS = (
    "SELECT array_agg((id, v) ORDER BY id)::text FROM item",
    "SELECT array_agg((id, item) ORDER BY id)::text FROM line",
)
# What only the service gives, outside of SQL: the administrator of Aiven and the owner at CloudNativePG are no members.
BY_THE_SERVICE = {
    "aiven": {"create_subscription"},
    "cloudnativepg": {"create_subscription", "replication", "role", "sessions"},
}


async def execute(dsn: str, *statements: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


async def fix(found: PreflightFinding, server: ManagedServer) -> bool:
    """Execute the fix of a finding as the customer. If the service refuses it, execute it as the service."""
    try:
        await execute(server.dsn("shop"), str(found.fix))
    except asyncpg.InsufficientPrivilegeError:
        await server.as_superuser("shop").execute(str(found.fix))
        return False
    return True


async def prepared(there: ManagedServer, here: ManagedServer) -> StartOptions:
    """Fix all errors of the preflight. Returns the options that it asks for."""
    sides = {"source": there, "target": here}
    dsns = there.dsn("shop"), here.dsn("shop")
    waived: list[str] = []
    first = await run_preflight(*dsns, programs=embedded_bin())
    for error in first.errors:
        if error.kind == "role_exists":
            # The same role of the service, or the customer's role has the name of the superuser there.
            assert there.service == here.service or there.service.administrator == here.service.superuser
            waived.append(error.name)
        elif not await fix(error, sides[str(error.fixed_on)]):
            assert error.kind in BY_THE_SERVICE[str(sides[str(error.fixed_on)].service)], error
            if str(error.fix).startswith("CREATE ROLE"):
                waived.append(f"role_exists:{error.object}")
    second = await run_preflight(*dsns, programs=embedded_bin(), names=waived)
    assert not second.errors
    # Triggers of another role run where a worker cannot set session_replication_role.
    trusted = [str(finding.fix) for finding in second.findings if finding.kind == "code"]
    is_replica = there.service.sets_replica_role and here.service.sets_replica_role
    assert bool(trusted) is not is_replica
    with_options = trusted[0].split('"')[1] if trusted else ""
    return StartOptions(programs=embedded_bin(), waive=waived, with_options=with_options)


async def check_hidden(source: Database, target: Database, dsn: str) -> None:
    """Check that a subscription of PostgreSQL is found, whose catalog the administrator may not read."""
    await target.execute(
        f"CREATE SUBSCRIPTION native CONNECTION '{source.dsn()}' PUBLICATION s"
        " WITH (enabled = false, create_slot = false, slot_name = NONE, copy_data = false)"
    )
    connection = await asyncpg.connect(dsn)
    try:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.fetch("SELECT subname FROM pg_subscription")
        assert await connection.fetchval(
            "SELECT bool_and(writer = 'native' AND native)"
            " FROM subscriber.subscription s, subscriber.other_writers(s.subid)"
        )
    finally:
        await connection.close()


SOAK = pytest.mark.soak


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("old", "new", "majors"),
    [
        ("cloud-sql", "azure", (18, 18)),
        pytest.param("azure", "rds", (18, 18), marks=SOAK),
        pytest.param("cloud-sql", "neon", (16, 18), marks=SOAK),
        pytest.param("neon", "cloudnativepg", (17, 18), marks=SOAK),
        pytest.param("cloudnativepg", "rds", (18, 16), marks=SOAK),
        pytest.param("aiven", "neon", (18, 18), marks=SOAK),
        pytest.param("rds", "aiven", (18, 18), marks=SOAK),
        pytest.param("azure", "azure", (16, 17), marks=SOAK),
        pytest.param("cloud-sql", "cloud-sql", (18, 18), marks=SOAK),
        pytest.param("neon", "neon", (18, 18), marks=SOAK),
    ],
)
async def test_a_database_moves_between_services(servers: Servers, old: str, new: str, majors: tuple[int, int]) -> None:
    try:
        bins = [programs(major) for major in majors]
    except NotAvailable as reason:
        pytest.skip(f"no PostgreSQL {majors}: {reason}")
    there = await start_service(servers, SERVICES[old], "source", bins[0])
    here = await start_service(servers, SERVICES[new], "target", bins[1])
    source, target = await there.create_database("shop"), await here.create_database("shop")
    dsns = there.dsn("shop"), here.dsn("shop")
    if there.service.creates_roles:
        await execute(dsns[0], *ROLES, f"SET ROLE shop_owner; {OWNED} GRANT ALL ON item, line TO shop_app;")
    else:
        await execute(dsns[0], OWNED)

    start = await prepared(there, here)
    async with move_database(*dsns, "s", options=QUICK) as move:
        await move.start(start)
        await move.verify()
        assert await check(dsns[1], "s", json=True) == 0
        await execute(dsns[0], "INSERT INTO line (item) VALUES (1)", "UPDATE item SET v = 'u' WHERE id = 1")
        await target.execute("SET session_replication_role = replica; DELETE FROM line WHERE id % 100 = 0")
        assert (await repair(dsns[1], "s")).is_complete
        await move.verify()
        if here.service.hides_subscriptions:
            await check_hidden(source, target, dsns[1])
            with pytest.raises(StatementError, match="applications cannot move yet") as hidden:
                await move.cutover()
            assert 'own subscription "native" writes on the target' in str(hidden.value.detail)
            await target.execute("DROP SUBSCRIPTION native")
    # The administrator is a member of its role, and has no other right to end its session.
    application = await asyncpg.connect(source.dsn(user="shop_app") if there.service.creates_roles else dsns[0])
    for to in (here, there, here):
        options = QUICK
        if not to.service.sets_replica_role:
            async with move_database(*dsns, "s", options=QUICK) as move:
                with pytest.raises(StatementError) as refused:
                    await (move.cutover() if to is here else move.back())
                assert "Triggers or rules of table public.item fire again" in str(refused.value.detail)
                options = replace(QUICK, waive=("trigger:public.item",))
        async with move_database(*dsns, "s", options=options) as move:
            moved = await (move.cutover() if to is here else move.back())
            assert moved.serving is (Side.TARGET if to is here else Side.SOURCE)
            assert moved.warnings == ()
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError)):
        await application.fetchval("SELECT 1")
    async with move_database(*dsns, "s", options=QUICK) as move:
        await move.verify()
        await move.finish()
    for query in ROWS:
        assert await source.value(query) == await target.value(query)


@SOAK
@pytest.mark.timeout(300)
async def test_schemas_of_the_service_stay_behind(servers: Servers) -> None:
    """The administrator of Supabase cannot act as the owners of its schemas. The waivers name what is left."""
    there, here = [await start_service(servers, SERVICES["supabase"], side, None) for side in ("source", "target")]
    source, target = await there.create_database("shop"), await here.create_database("shop")
    dsns = there.dsn("shop"), here.dsn("shop")
    await source.execute("INSERT INTO auth.users VALUES (gen_random_uuid(), 'old')")
    await execute(dsns[0], OWNED, "CREATE PUBLICATION shop FOR TABLE item, line")
    command = [str(embedded_bin() / "pg_dump"), "--schema-only", "--schema=public", "--no-publications", dsns[0]]
    dumped = await to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
    psql = [str(embedded_bin() / "psql"), "--no-psqlrc", "--quiet", dsns[1]]
    await to_thread(subprocess.run, psql, input=dumped.stdout, capture_output=True, text=True, check=True)

    waived = ("table_owner:supabase_auth_admin", "unpublished:auth.users")
    preflight = await run_preflight(*dsns, schema=False, publication="shop")
    assert tuple(error.name for error in preflight.errors) == waived
    options = replace(QUICK, waive=waived[1:])
    async with move_database(*dsns, "s", options=options) as move:
        await move.start(StartOptions(schema=False, publication="shop", waive=waived))
        assert (await move.cutover()).warnings == ()
    for to in (there, here):
        async with move_database(*dsns, "s", options=options) as move:
            assert (await (move.back() if to is there else move.cutover())).warnings == ()
    for query in ROWS:
        assert await source.value(query) == await target.value(query)
    assert await target.value("SELECT count(*) FROM auth.users") == 0
