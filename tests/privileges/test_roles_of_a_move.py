"""A role with CREATEROLE on the old server uses names of the new one, which has had roles before."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from subscriber.connection.connect import connect
from subscriber.demo.servers import embedded_bin
from subscriber.failpoints import Point
from subscriber.migration.preflight.comparison import compare_roles
from subscriber.migration.schema.roles import create_roles, find_collisions
from tests.migration.scene import Command
from tests.plugins.fix_cluster import Database

ATTACKER, ADMINISTRATOR, SAME = "move_mallory", "move_dba", "move_app"
MEMBERS = f"""
SELECT r.rolname::text FROM pg_auth_members m JOIN pg_roles r ON r.oid = m.roleid
 WHERE m.member = (SELECT oid FROM pg_roles WHERE rolname = '{ATTACKER}') ORDER BY 1
"""
CONFIGURED = f"SELECT rolconfig FROM pg_roles WHERE rolname = '{ADMINISTRATOR}'"


@pytest.fixture
async def servers_with_roles(source_db: Database, target_db: Database) -> AsyncIterator[tuple[Database, Database]]:
    """The attacker has made the administrator's name on the source. Another role is the same person on both servers."""
    await target_db.execute(
        f"CREATE ROLE {ADMINISTRATOR} CREATEROLE CREATEDB IN ROLE pg_execute_server_program",
        f"CREATE ROLE {SAME} LOGIN",
    )
    await source_db.execute(
        f"CREATE ROLE {ATTACKER} LOGIN CREATEROLE",
        f"GRANT CREATE ON SCHEMA public TO {ATTACKER}",
        f"CREATE ROLE {SAME} LOGIN",
        f"CREATE TABLE of_{SAME} (id int PRIMARY KEY)",
        f"ALTER TABLE of_{SAME} OWNER TO {SAME}",
        f"SET SESSION AUTHORIZATION {ATTACKER}; CREATE ROLE {ADMINISTRATOR}; GRANT {ADMINISTRATOR} TO {ATTACKER};"
        f" ALTER ROLE {ADMINISTRATOR} SET search_path = evil",
    )
    try:
        yield source_db, target_db
    finally:
        for database in (source_db, target_db):
            for role in (ATTACKER, ADMINISTRATOR, SAME):
                if await database.value("SELECT count(*) FROM pg_roles WHERE rolname = $1", role):
                    await database.execute(f"DROP OWNED BY {role} CASCADE", f"DROP ROLE {role}")


async def test_no_role_becomes_a_member_of_one_that_the_target_has_had(
    servers_with_roles: tuple[Database, Database],
) -> None:
    source_db, target_db = servers_with_roles
    major = await target_db.major()
    source, target = await connect(source_db.dsn()), await connect(target_db.dsn())
    try:
        plan = await create_roles(source, target)
        left_out = {(left.kind, left.object): left.statement for left in plan.left_out}
        assert await target_db.rows(MEMBERS) == []
        assert await target_db.value(CONFIGURED) is None
        grant = left_out["membership", f"{ATTACKER}.{ADMINISTRATOR}"]
        assert grant.startswith(f'GRANT "{ADMINISTRATOR}" TO "{ATTACKER}"')
        assert ("setting", f"{ADMINISTRATOR}.search_path") in left_out
        may_create = await target_db.value(f"SELECT rolcreaterole FROM pg_roles WHERE rolname = '{ATTACKER}'")
        assert may_create is (major >= 16)
        assert (("role_attribute", f"{ATTACKER}.CREATEROLE") in left_out) is (major < 16)
        await create_roles(source, target, [ADMINISTRATOR])
        assert await target_db.rows(MEMBERS) == []  # the attacker's role is not the move's any more
        await create_roles(source, target, [ADMINISTRATOR, ATTACKER])
        assert await target_db.rows(MEMBERS) == [(ADMINISTRATOR,)]
    finally:
        source.terminate()
        target.terminate()


async def test_objects_do_not_change_hands(servers_with_roles: tuple[Database, Database]) -> None:
    """Neither to the attacker's victim, whose function would run with its rights, nor to another person by accident."""
    source_db, target_db = servers_with_roles
    source, target = await connect(source_db.dsn()), await connect(target_db.dsn())
    try:
        assert await find_collisions(source, target) == [SAME]
        await source_db.execute(
            "CREATE FUNCTION of_dba() RETURNS int SECURITY DEFINER LANGUAGE sql AS 'SELECT 1'",
            f"ALTER FUNCTION of_dba() OWNER TO {ADMINISTRATOR}",
        )
        assert await find_collisions(source, target) == [SAME, ADMINISTRATOR]
        assert await find_collisions(source, target, [SAME]) == [ADMINISTRATOR]
        names = {finding.name for finding in await compare_roles(source, target, [], [])}
        assert names >= {
            f"role_exists:{SAME}",
            f"role_exists:{ADMINISTRATOR}",
            f"membership:{ATTACKER}.{ADMINISTRATOR}",
        }
    finally:
        source.terminate()
        target.terminate()


@pytest.mark.parametrize("target", [18], indirect=True)
async def test_a_move_that_is_killed_knows_its_roles(servers_with_roles: tuple[Database, Database]) -> None:
    source_db, target_db = servers_with_roles
    move = Command(source_db, target_db)
    status, output = await move.run("start", "--programs", str(embedded_bin()))
    assert status != 0
    assert f"role_exists:{SAME}" in output
    assert await target_db.value(f"SELECT count(*) FROM pg_roles WHERE rolname = '{ATTACKER}'") == 0
    waived = ("--waive", f"role_exists:{SAME}", "--programs", str(embedded_bin()))
    await source_db.execute(f"ALTER TABLE of_{SAME} OWNER TO {SAME}", "CREATE TABLE of_mallory (id int PRIMARY KEY)")
    await source_db.execute(f"ALTER TABLE of_mallory OWNER TO {ATTACKER}")
    status, _ = await move.run("start", *waived, point=Point.MIGRATE_ROLES)
    assert status != 0
    assert await target_db.value(f"SELECT count(*) FROM pg_roles WHERE rolname = '{ATTACKER}'") == 1
    _, output = await move.run("start", *waived, point=Point.MIGRATE_DEFINITIONS)
    assert f"role_exists:{ATTACKER}" not in output
    owners = (
        "SELECT relname::text, relowner::regrole::text FROM pg_class"
        " WHERE relnamespace = 'public'::regnamespace AND relkind = 'r' ORDER BY 1"
    )
    assert await target_db.rows(owners) == await source_db.rows(owners)
    assert await target_db.rows(MEMBERS) == []
