"""Tables of extensions with rows of their own and of users, such as spatial_ref_sys of PostGIS."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from subscriber import StartOptions, move_database
from subscriber.demo.servers import embedded_bin
from subscriber.migration.preflight.preflight import run_preflight
from tests.migration.scene import QUICK
from tests.plugins.fix_cluster import Database

SCRIPT = """
CREATE TABLE place (id int PRIMARY KEY, name text, own boolean NOT NULL DEFAULT true);
INSERT INTO place SELECT n, 'built in', false FROM generate_series(1, {number}) n;
SELECT pg_catalog.pg_extension_config_dump('place', 'WHERE own');
CREATE TABLE cache (id int PRIMARY KEY);
INSERT INTO cache VALUES (1);
"""
CONTROL = "default_version = '1'\nrelocatable = false\nschema = public\n"


@asynccontextmanager
async def extension(database: Database, number: int) -> AsyncIterator[None]:
    """Make extension "places" available on the server during the block."""
    folder = database.server.data / "extensions" / "extension"
    folder.mkdir(parents=True)
    folder.joinpath("places.control").write_text(CONTROL)
    folder.joinpath("places--1.sql").write_text(SCRIPT.format(number=number))
    for path in (folder.parent, folder, *folder.iterdir()):
        path.chmod(0o755)
    await database.execute(f"ALTER SYSTEM SET extension_control_path = '$system:{folder.parent}'")
    await database.execute("SELECT pg_reload_conf()")
    database.close_sessions()
    try:
        yield
    finally:
        await database.execute(
            "ALTER SYSTEM RESET extension_control_path",
        )
        await database.execute("SELECT pg_reload_conf()")
        shutil.rmtree(folder.parent)


@pytest.mark.timeout(180)
async def test_rows_of_an_extension_table_are_those_of_the_source(source_db: Database, target_db: Database) -> None:
    await source_db.needs(18, "a path of extensions")
    # The newer version of the target has one more row.
    async with extension(source_db, 3), extension(target_db, 4):
        await check_move(source_db, target_db)


async def check_move(source_db: Database, target_db: Database) -> None:
    await source_db.execute(
        "CREATE EXTENSION places",
        "INSERT INTO place VALUES (100, 'of a user')",
        "UPDATE place SET name = 'corrected' WHERE id = 2",
        "CREATE TABLE item (id int PRIMARY KEY)",
        "INSERT INTO item VALUES (1)",
    )
    options = StartOptions(programs=embedded_bin())
    preflight = await run_preflight(source_db.dsn(), target_db.dsn(), programs=embedded_bin())
    assert preflight.errors == ()
    assert {finding.name for finding in preflight.findings if finding.kind == "extension_rows"} == {
        "extension_rows:public.place",
        "extension_rows:public.cache",
    }
    async with move_database(source_db.dsn(), target_db.dsn(), "s", options=QUICK) as move:
        await move.start(options)
        await source_db.execute("INSERT INTO place VALUES (101, 'of a user')", "DELETE FROM place WHERE id = 3")
        await move.cutover()
    there, here = [await database.rows("SELECT * FROM place ORDER BY id") for database in (source_db, target_db)]
    assert [row for row in here if row[0] != 4] == there
    assert (4, "built in", False) in here
    assert await target_db.rows("SELECT id FROM cache") == [(1,)]
    assert (
        await target_db.value("SELECT extconfig::regclass[]::text FROM pg_extension WHERE extname = 'places'")
        == "{place}"
    )
