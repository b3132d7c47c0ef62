"""A whole shop is moved: each of its objects is on the other server, or was named before."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from subscriber import StartOptions
from subscriber.demo.servers import embedded_bin
from subscriber.migration.diff.schema_diff import own_publications, schema_diff
from subscriber.migration.preflight.preflight import run_preflight
from subscriber.migration.report.collect import collect_report
from tests.migration.scene import moving
from tests.migration.shop import shop
from tests.plugins.fix_cluster import Database, numbers
from tests.plugins.fix_subscriber import running_subscriber

PREPARED = "BEGIN; INSERT INTO shop.log VALUES (now(), 'prepared'); PREPARE TRANSACTION '{}'"
RELATIONS = """
SELECT format('%I.%I', n.nspname, c.relname), c.relkind::text
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname NOT IN ('pg_catalog', 'information_schema', 'subscriber', 'pg_toast') AND relkind IN ('r', 'm', 'S')
   AND (c.relkind <> 'm' OR c.relispopulated) ORDER BY 1
"""
LARGE_OBJECTS = """
SELECT oid, md5(lo_get(oid)), lomowner::regrole::text FROM pg_largeobject_metadata WHERE oid IN (990001, 990002)
 ORDER BY 1
"""


@pytest.fixture
async def suffix(source_db: Database, target_db: Database) -> AsyncIterator[str]:
    """A shop in the source, whose roles have this suffix."""
    suffix = f"_{next(numbers)}"
    async with shop(source_db, suffix, target_db.server):
        yield suffix


async def differing(source: Database, target: Database) -> set[str]:
    """Return the relations whose rows differ, and the sequences that are behind on the target."""
    names = set()
    for name, kind in await source.rows(RELATIONS):
        query = f"SELECT md5(string_agg(r::text, ',' ORDER BY r::text)) FROM {name} r"
        if kind == "S":
            query = f"SELECT last_value, is_called FROM {name}"
        if await source.rows(query) != await target.rows(query):
            names.add(name)
    return names


@pytest.mark.soak
@pytest.mark.timeout(300)
async def test_each_object_of_a_shop_arrives_or_is_named(source_db: Database, target_db: Database, suffix: str) -> None:
    gid = f"forgotten{suffix}"
    await source_db.execute(PREPARED.format(gid))
    servers = source_db.dsn(), target_db.dsn()
    preflight = await run_preflight(*servers, programs=embedded_bin())
    errors = {finding.name: finding for finding in preflight.errors}
    assert set(errors) == {
        "identity:shop.keyless",
        "large_objects:source",
        f"prepared_transaction:{gid}",
        "unlogged:shop.cache",
    }
    await source_db.execute(f"COMMIT PREPARED '{gid}'", str(errors["identity:shop.keyless"].fix))
    waived = ("unlogged:shop.cache",)
    trusted = f"trusted_owners = 'owner{suffix}'"  # a generated column calls a function of that role
    options = StartOptions(programs=embedded_bin(), large_objects=True, waive=waived, with_options=trusted)
    async with (
        running_subscriber(target_db),
        running_subscriber(source_db),
        moving(source_db, target_db, large_objects=True) as move,
    ):
        await move.start(options)
        await source_db.execute(
            "INSERT INTO shop.customer (mail, name) VALUES ('last@example.com', 'Last')",
            "SELECT nextval('shop.invoice_number'), lo_put(990001, 0, 'LAST')",
        )
        await move.cutover()
        assert await differing(source_db, target_db) == {"shop.cache"}
        assert await source_db.rows(LARGE_OBJECTS) == await target_db.rows(LARGE_OBJECTS)
        async with source_db.connection() as source, target_db.connection() as target:
            assert await schema_diff(source, target, without=await own_publications(source, target)) == []
        report = await collect_report(*servers, "s")
        assert [entry["name"] for entry in report if entry["kind"] == "waived"] == list(waived)
