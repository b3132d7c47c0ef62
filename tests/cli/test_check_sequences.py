"""`subscriber check` about sequences, and about wal_level, on real servers."""

from __future__ import annotations

import pytest

from subscriber.cli.check.check import collect
from subscriber.cli.check.model import Finding, Level
from subscriber.cli.check.rules import findings
from subscriber.demo.servers import Servers
from tests.plugins.fix_cluster import SETTINGS, Database
from tests.scenarios.test_sequences import server


async def found(source: Database, target: Database, dsn: str | None = None) -> dict[str, Finding]:
    """Return the findings about sequences, by name."""
    facts = await collect(target.dsn(), dsn or source.dsn(), ["p"], None)
    return {
        one.subject.removeprefix("sequence "): one for one in findings(facts) if one.subject.startswith("sequence ")
    }


@pytest.mark.parametrize("major", [18, 19])
async def test_each_sequence_has_a_finding(servers: Servers, major: int) -> None:
    source = Database(await server(servers, "publisher", major), "postgres")
    target = Database(await server(servers, "target", 18), "postgres")
    for database in (source, target):
        await database.execute("CREATE TABLE t (id serial PRIMARY KEY)", "CREATE TABLE u (id serial PRIMARY KEY)")
        await database.execute("CREATE SEQUENCE alone")
    await source.execute("CREATE PUBLICATION p FOR TABLE t", "ALTER SEQUENCE u_id_seq CYCLE")
    if major >= 19:
        await source.execute("DROP PUBLICATION p", "CREATE PUBLICATION p FOR ALL TABLES")
    result = await found(source, target)
    assert result["public.alone"].level is Level.WARNING
    if major >= 19:
        assert result["public.t_id_seq"].message == (
            "it is not published, although it is owned by column public.t.id, and will not be synchronized"
        )
        assert result["public.t_id_seq"].fix == 'ALTER PUBLICATION "p" SET ALL TABLES, ALL SEQUENCES;'
        await source.execute(result["public.t_id_seq"].fix or "")
        result = await found(source, target)
        assert result["public.u_id_seq"].level is Level.ERROR
        await target.execute(result["public.u_id_seq"].fix or "")
        assert {one.level for one in (await found(source, target)).values()} == {Level.OK}
    else:
        assert (
            result["public.t_id_seq"].message
            == "owned by published column public.t.id, and defined alike on both sides"
        )
        assert result["public.u_id_seq"].level is Level.WARNING
    await target.execute("DROP SEQUENCE alone")
    await source.execute(
        "CREATE ROLE reader LOGIN REPLICATION", "GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader"
    )
    reader = source.dsn().replace("postgres@", "reader@")
    result = await found(source, target, reader)
    assert result["public.t_id_seq"].message == 'role "reader" may not read it on the publisher'
    await source.execute(result["public.t_id_seq"].fix or "")
    result = await found(source, target, reader)
    assert result["public.t_id_seq"].level is Level.OK


async def test_wal_level_replica_suffices_since_19(servers: Servers) -> None:
    made = await server(servers, "publisher", 19)
    await made.restart("fast", wal_level="replica")
    source = Database(made, "postgres")
    target = await servers.create("target", SETTINGS)
    await target.start()
    await source.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION p FOR TABLE t")
    database = Database(target, "postgres")
    await database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    facts = await collect(database.dsn(), source.dsn(), ["p"], None)
    assert [one for one in findings(facts) if one.level is Level.ERROR] == []
    (level,) = [one for one in findings(facts) if "wal_level" in one.message]
    assert level.message == (
        "wal_level is replica, which a logical slot raises to logical; effective_wal_level is replica"
    )
