"""Obstacles of a move: each has a name and a fix, and the fix works."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from subscriber.connection.connect import open_session
from subscriber.connection.session import Session
from subscriber.demo.servers import Servers, embedded_bin
from subscriber.errors import StatementError
from subscriber.migration.preflight.model import FixedOn, PreflightFinding, PreflightResult, Severity, waive
from subscriber.migration.preflight.preflight import run_preflight
from tests.matrix.programs import NotAvailable, programs
from tests.migration.shop import drop_roles, shop
from tests.plugins.fix_cluster import SETTINGS, Database, numbers
from tests.scenarios.standbys import standby_of


@pytest.fixture
async def suffix(source_db: Database, target_db: Database) -> AsyncIterator[str]:
    """A shop in the source, whose roles have this suffix."""
    suffix = f"_{next(numbers)}"
    async with shop(source_db, suffix, target_db.server):
        yield suffix


async def preflight(source: Database, target: Database, **options: object) -> dict[str, PreflightFinding]:
    result = await run_preflight(source.dsn(), target.dsn(), programs=embedded_bin(), **options)  # type: ignore[arg-type]
    return {finding.name: finding for finding in result.findings}


async def fix(finding: PreflightFinding, source: Database, target: Database) -> None:
    """Execute the fix of a finding as a user does."""
    database = source if finding.fixed_on is FixedOn.SOURCE else target
    assert finding.fix is not None
    await database.server.program("psql", "-qX", "-v", "ON_ERROR_STOP=1", dbname=database.name, stdin=finding.fix)


async def test_a_shop_leaves_nothing_behind_without_a_word(
    source_db: Database, target_db: Database, suffix: str
) -> None:
    open_transaction = await source_db.connect()
    await open_transaction.execute("CREATE TEMPORARY TABLE draft (id int)")
    await source_db.execute(
        f'CREATE ROLE "super{suffix}" SUPERUSER LOGIN',
        f'ALTER ROLE "app{suffix}" SET default_transaction_read_only = off',
        "CREATE EXTENSION postgres_fdw; CREATE SERVER far FOREIGN DATA WRAPPER postgres_fdw;"
        " CREATE FOREIGN TABLE shop.far (id int) SERVER far",
        "ALTER TABLE shop.customer FORCE ROW LEVEL SECURITY",
        f"SELECT pg_create_logical_replication_slot('other{suffix}', 'pgoutput')",
        f"CREATE SUBSCRIPTION other{suffix} CONNECTION 'dbname=x' PUBLICATION p WITH (connect = false)",
        "CREATE SCHEMA cron; CREATE TABLE cron.job (jobid bigint PRIMARY KEY, schedule text, command text,"
        " database text, active boolean);"
        " INSERT INTO cron.job VALUES (7, '5 0 * * *', 'VACUUM', current_database(), true);"
        " CREATE FUNCTION cron.unschedule(bigint) RETURNS void LANGUAGE sql"
        " AS 'UPDATE cron.job SET active = false WHERE jobid = $1'",
    )
    await source_db.execute(f"BEGIN; SELECT txid_current(); PREPARE TRANSACTION 'pending{suffix}'")
    await target_db.execute(
        "CREATE FUNCTION f() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN NULL; END'",
        "CREATE EVENT TRIGGER watch ON ddl_command_end EXECUTE FUNCTION f()",
        "CREATE SCHEMA shop; CREATE TABLE shop.log (line text)",
        f"ALTER DATABASE {target_db.name} SET timezone = 'Asia/Tokyo'",
    )
    try:
        preflighted = await preflight(source_db, target_db)
        errors = {name for name, finding in preflighted.items() if finding.severity is Severity.ERROR}
        warnings = {name for name, finding in preflighted.items() if finding.severity is Severity.WARNING}
        assert errors == {
            "identity:shop.keyless",
            "unlogged:shop.cache",
            "large_objects:source",
            f"prepared_transaction:pending{suffix}",
            f"subscription:other{suffix}",
            "forced_row_security:shop.customer",
            "exists:shop.log",
        }
        assert warnings >= {
            "foreign_table:shop.far",
            f"slot:other{suffix}",
            "job:pg_cron.7",
            f"read_only:app{suffix}",
            "replica_trigger:shop.customer.customer_always",
            f"superuser:super{suffix}",
            "event_trigger:watch",
            "setting:TimeZone",
        }
        assert {"materialized_view:shop.later", "disk:database"} <= preflighted.keys()
        assert any(
            finding.kind == "temporary" and finding.object.endswith(".draft") for finding in preflighted.values()
        )
        unfixable = {"foreign_table", "temporary", "disk", "large_objects", "code"}
        for finding in preflighted.values():
            assert finding.why
            assert not finding.why.endswith(".")
            if finding.kind not in unfixable and finding.fix is not None:
                await fix(finding, source_db, target_db)
        left = await preflight(source_db, target_db, large_objects=True)
        kinds = {finding.kind for finding in left.values()}
        assert kinds == unfixable
        assert left["large_objects:source"].severity is Severity.INFORMATION
    finally:
        await target_db.execute("DROP EVENT TRIGGER watch")
        await source_db.execute(f'DROP OWNED BY "super{suffix}"', f'DROP ROLE "super{suffix}"')


async def test_roles_without_a_superuser(source_db: Database, target_db: Database, suffix: str) -> None:
    """A role of a managed service: each privilege that it lacks is a finding, whose fix grants it."""
    reader, mover = f"reader{suffix}", f"mover{suffix}"
    await source_db.execute(f'CREATE ROLE "{reader}" LOGIN')
    await target_db.execute(f'CREATE ROLE "{mover}" LOGIN', f'GRANT CREATE ON DATABASE {target_db.name} TO "{mover}"')
    source, target = source_db.dsn(user=reader), target_db.dsn(user=mover)
    try:
        options = {"programs": embedded_bin(), "large_objects": True}
        first = await run_preflight(source, target, **options)  # type: ignore[arg-type]
        by_name = {finding.name: finding for finding in first.findings}
        assert {
            "replication:source",
            "replication:target",
            "sequence:shop.invoice_number",
            "table:shop.customer",
            f"role:app{suffix}",
        } <= by_name.keys()
        assert not by_name["replication:source"].is_waivable
        for finding in first.findings:
            if finding.kind in ("replication", "sequence", "table", "row_security", "role"):
                await fix(finding, source_db, target_db)
        second = await run_preflight(source, target, **options)  # type: ignore[arg-type]
        kinds = {finding.kind for finding in second.findings}
        assert not kinds & {"replication", "sequence", "table", "role"}
        assert (
            "row_security:shop.customer" in {finding.name for finding in second.findings} or "row_security" not in kinds
        )
        for finding in second.findings:
            if finding.kind == "row_security":
                await fix(finding, source_db, target_db)
        third = await run_preflight(source, target, **options)  # type: ignore[arg-type]
        assert "row_security" not in {finding.kind for finding in third.findings}
    finally:
        await source_db.execute(f'DROP OWNED BY "{reader}"', f'DROP ROLE "{reader}"')
        await drop_roles(suffix, target_db.server)
        await target_db.execute(f'DROP OWNED BY "{mover}"', f'DROP ROLE "{mover}"')
        await target_db.execute(f'DROP ROLE IF EXISTS "{reader}"')


def finding(kind: str, severity: Severity, *, is_waivable: bool = True) -> PreflightFinding:
    return PreflightFinding(kind, "a.b", severity, "it is so", "It matters", "DO IT;", is_waivable=is_waivable)


def test_findings_are_waived_by_name() -> None:
    findings = [
        finding("w", Severity.WARNING),
        finding("e", Severity.ERROR),
        finding("x", Severity.ERROR, is_waivable=False),
    ]
    result = waive(findings, ["e:a.b"])
    assert result == PreflightResult((findings[2], findings[0]), (findings[1],))
    with pytest.raises(StatementError, match=r"the preflight has found obstacles of the move: x:a\.b") as error:
        result.require()
    assert error.value.hint == "Fix it on the source: DO IT;"
    waive(findings[:2], ["e:a.b"]).require()
    with pytest.raises(StatementError, match=r'there is no finding "e:a\.c" to waive') as unknown:
        waive(findings, ["e:a.c"])
    assert unknown.value.hint == "Perhaps you mean e:a.b."
    with pytest.raises(StatementError, match=r'finding "x:a\.b" cannot be waived'):
        waive(findings, ["x:a.b"])


@pytest.mark.soak
async def test_servers_that_cannot_publish(servers: Servers) -> None:
    """A standby before 16 publishes nothing, and a primary needs a walsender for each table that is copied."""
    try:
        source = await servers.create("source", {**SETTINGS, "max_wal_senders": "2"}, bin=programs(15))
    except NotAvailable as reason:
        pytest.skip(f"no PostgreSQL 15: {reason}")
    target = await servers.create("target", SETTINGS)
    for server in (source, target):
        await server.start()
    standby = await standby_of(source, servers, "standby", programs=target, max_wal_senders="2")
    taken: list[Session] = []
    try:
        for severity in (Severity.WARNING, Severity.ERROR):
            taken.append(await open_session(source.dsn(), replication=True))
            by_name = {
                obstacle.name: obstacle for obstacle in (await run_preflight(source.dsn(), target.dsn())).findings
            }
            senders = by_name["max_wal_senders:source"]
            assert senders.severity is severity
            assert f"{2 - len(taken)} of 2 walsenders are free; 5 are wanted while tables" in senders.message
    finally:
        for session in taken:
            session.abort()
    result = await run_preflight(standby.dsn(), target.dsn())
    (error,) = [failure for failure in result.errors if failure.kind == "standby"]
    assert (error.name, error.fix) == ("standby:source", "Use the primary.")
