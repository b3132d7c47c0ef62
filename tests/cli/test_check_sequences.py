"""`subscriber check` about sequences, and about wal_level, on real servers."""

from __future__ import annotations

import pytest

from subscriber.check.check import collect
from subscriber.check.model import Finding, Level
from subscriber.check.rules import findings
from subscriber.demo.servers import Servers
from tests.plugins.fix_cluster import SETTINGS, Database, ServerOf, fresh_database


async def found(source: Database, target: Database, dsn: str | None = None) -> dict[str, Finding]:
    """Return the findings about sequences, by name."""
    facts = await collect(target.dsn(), dsn or source.dsn(), ["p"], None)
    return {
        finding.subject.removeprefix("sequence "): finding
        for finding in findings(facts)
        if finding.subject.startswith("sequence ")
    }


@pytest.mark.parametrize("major", [18, 19])
async def test_each_sequence_has_a_finding(server_of: ServerOf, target_db: Database, major: int) -> None:
    async with fresh_database(server_of("publisher", major)) as source:
        await check_each(source, target_db, major)


async def check_each(source: Database, target: Database, major: int) -> None:
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
        assert result["public.t_id_seq"].command == 'ALTER PUBLICATION "p" SET ALL TABLES, ALL SEQUENCES;'
        await source.execute(result["public.t_id_seq"].command or "")
        result = await found(source, target)
        assert result["public.u_id_seq"].level is Level.ERROR
        await target.execute(result["public.u_id_seq"].command or "")
        assert {finding.level for finding in (await found(source, target)).values()} == {Level.OK}
    else:
        assert (
            result["public.t_id_seq"].message
            == "owned by published column public.t.id, and defined alike on both sides"
        )
        assert result["public.u_id_seq"].level is Level.WARNING
    await target.execute("DROP SEQUENCE alone")
    role = f"reader_{source.name}"
    await source.execute(
        f"CREATE ROLE {role} LOGIN REPLICATION", f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}"
    )
    reader = source.dsn().replace("postgres@", f"{role}@")
    result = await found(source, target, reader)
    assert result["public.t_id_seq"].message == f'role "{role}" may not read it on the publisher'
    await source.execute(result["public.t_id_seq"].command or "")
    result = await found(source, target, reader)
    assert result["public.t_id_seq"].level is Level.OK


async def test_wal_level_replica_suffices_since_19(servers: Servers, server_of: ServerOf, target_db: Database) -> None:
    made = await servers.create("publisher", SETTINGS | {"wal_level": "replica"}, bin=server_of("publisher", 19).bin)
    await made.start()
    source = Database(made, "postgres")
    await source.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION p FOR TABLE t")
    await target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    facts = await collect(target_db.dsn(), source.dsn(), ["p"], None)
    assert [finding for finding in findings(facts) if finding.level is Level.ERROR] == []
    (level,) = [finding for finding in findings(facts) if "wal_level" in finding.message]
    assert level.message == (
        "wal_level is replica, which a logical slot raises to logical; effective_wal_level is replica"
    )
