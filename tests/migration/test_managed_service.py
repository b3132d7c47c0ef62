"""A whole move with roles of a managed service on both sides, which are no superusers."""

from __future__ import annotations

import pytest

from subscriber import StartOptions, move_database
from subscriber.demo.servers import Servers, embedded_bin
from subscriber.migration.preflight.preflight import run_preflight
from tests.matrix.programs import NotAvailable, programs
from tests.migration.scene import QUICK, wait_for_writes
from tests.migration.watcher import watched
from tests.migration.writers import SCHEMA, applications, check_nothing_is_lost, rows_of
from tests.plugins.fix_cluster import SETTINGS, Database

MOVER = "CREATE ROLE mover LOGIN CREATEDB CREATEROLE REPLICATION PASSWORD 'moving'"
# What a role that owns the database cannot do on its own. Each is a finding, and its fix mends it.
LACKING = {"create_subscription", "sessions", "table_owner", "sequence", "table"}
# What stays different without a superuser.
ACCEPTED = {"replica_role", "origins", "disk", "setting", "collation_version", "version"}


async def sides_of(servers: Servers, old: int, new: int) -> dict[str, Database]:
    """Return a database on each server, which belongs to role "mover". Applications need no password, but it does."""
    sides: dict[str, Database] = {}
    for side, major in (("source", old), ("target", new)):
        try:
            server = await servers.create(side, SETTINGS, bin=programs(major))
        except NotAvailable as reason:
            pytest.skip(f"no PostgreSQL {major}: {reason}")
        hba = server.data / "pg_hba.conf"
        hba.write_text(f"host all mover 127.0.0.1/32 scram-sha-256\n{hba.read_text()}")
        await server.start(password_encryption="scram-sha-256")
        await Database(server, "postgres").execute(MOVER, "CREATE DATABASE shop OWNER mover")
        sides[side] = Database(server, "shop")
    return sides


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("old", "new"), [(18, 18), (16, 18), (17, 16), (13, 18), (14, 18), (15, 18)])
async def test_roles_that_are_no_superusers_move_a_database(servers: Servers, old: int, new: int) -> None:
    """The preflight names what is missing before the move. With its fixes, every command works."""
    sides = await sides_of(servers, old, new)
    source, target = sides.values()
    await source.execute("CREATE ROLE shop_owner NOLOGIN", "GRANT ALL ON SCHEMA public TO shop_owner")
    await source.execute("SET ROLE shop_owner; " + "; ".join(SCHEMA[:-1]))
    await source.execute(SCHEMA[-1], "CREATE INDEX token ON item (token)")
    old_dsn, new_dsn = (database.dsn(user="mover", password="moving") for database in (source, target))

    first = await run_preflight(old_dsn, new_dsn, programs=embedded_bin())
    assert {failure.kind for failure in first.errors} == LACKING
    for error in first.errors:
        await sides[error.fixed_on].execute(str(error.fix))
    second = await run_preflight(old_dsn, new_dsn, programs=embedded_bin())
    assert {finding.kind for finding in second.findings} <= ACCEPTED

    async with move_database(old_dsn, new_dsn, "s", options=QUICK) as move:
        await move.start(StartOptions(programs=embedded_bin()))
    async with (
        applications([source, target], pause=0.0) as apps,
        watched(sides, apps[0].role, fenced=True, pause=0.004) as watcher,
    ):
        await wait_for_writes(apps, source)
        for to in (target, source, target):
            async with move_database(old_dsn, new_dsn, "s", options=QUICK) as move:
                moved = await (move.back() if to is source else move.cutover())
                assert moved.warnings == ()
                await wait_for_writes(apps, to)
    await check_nothing_is_lost(apps, target)
    watcher.check(["source", "target", "source", "target"])
    async with move_database(old_dsn, new_dsn, "s", options=QUICK) as move:
        await move.verify()
        await move.finish()
    assert await rows_of(source) == await rows_of(target)
