from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest

from subscriber.check.model import (
    CheckedSourceTable,
    CheckedTargetTable,
    ColumnFacts,
    Facts,
    FailoverFacts,
    Finding,
    Level,
    PublicationFacts,
    PublisherFacts,
    SlotFacts,
    StandbyFacts,
    TargetFacts,
)
from subscriber.check.rules import (
    findings,
    publisher_findings,
    slot_findings,
    table_findings,
    target_findings,
    two_phase_findings,
)
from subscriber.cli.commands.check import check
from subscriber.cli.commands.exec import execute_statements
from subscriber.display import table_dump
from subscriber.errors import StatementError
from subscriber.publisher.standby_slots import StandbySlot
from subscriber.remedy import Remedy
from subscriber.subscription import TwoPhaseState
from tests.plugins.fix_cluster import Database

PUBLISHER = PublisherFacts(180006, "18.6", "logical", 0, 10, 0, 10, "repl", True, "UTF8", False, 10)
TARGET = TargetFacts(
    180006, "18.6", "app", True, "UTF8", False, True, True, True, 0, 10, "max_active_replication_origins", "db", 10
)
COLUMNS = (ColumnFacts("id", "integer"), ColumnFacts("note", "text"))
SOURCE = CheckedSourceTable("s", "t", "d", False, COLUMNS, ("id",), True)
THERE = CheckedTargetTable("r", COLUMNS, ("id",), "app", True, False, False)
FACTS = Facts(PUBLISHER, TARGET, [PublicationFacts("p", True)])


def findings_of(printed: str) -> list[Finding]:
    """Return the findings of --json."""
    document = [
        Finding(
            Level(entry["level"]),
            entry["subject"],
            entry["message"],
            Remedy.from_json(entry["fix_remedy"]),
            entry["kind"],
        )
        for entry in json.loads(printed)
    ]
    assert [finding.as_json() for finding in document] == json.loads(printed)
    return document


def levels(found: list[Finding]) -> list[Level]:
    return [finding.level for finding in found]


def test_a_correct_setup_has_no_findings() -> None:
    facts = Facts(PUBLISHER, TARGET, [PublicationFacts("p", True)], tables=[(SOURCE, THERE)])
    problems = findings(facts)
    assert set(levels(problems)) == {Level.OK}
    assert Finding(Level.OK, "table s.t", "has its 2 columns on both sides") in problems


@pytest.mark.parametrize(
    ("facts", "level", "fix"),
    [
        (
            replace(PUBLISHER, wal_level="replica"),
            Level.ERROR,
            "ALTER SYSTEM SET wal_level = 'logical'; -- and restart the server",
        ),
        (replace(PUBLISHER, may_replicate=False), Level.ERROR, 'ALTER ROLE "repl" WITH REPLICATION;'),
        (
            replace(PUBLISHER, slots=10),
            Level.ERROR,
            "ALTER SYSTEM SET max_replication_slots = 18; -- and restart the server",
        ),
        (
            replace(PUBLISHER, senders=8),
            Level.WARNING,
            "ALTER SYSTEM SET max_wal_senders = 16; -- and restart the server",
        ),
        (replace(PUBLISHER, version=90600), Level.ERROR, "Upgrade to 10 or later."),
        (replace(PUBLISHER, version=150000, in_recovery=True), Level.ERROR, "Use the primary."),
    ],
)
def test_a_publisher_that_lacks_a_requirement_has_a_finding_with_its_fix(
    facts: PublisherFacts, level: Level, fix: str
) -> None:
    (problems,) = [finding for finding in publisher_findings(facts, True) if finding.level is not Level.OK]
    assert (problems.level, problems.fix) == (level, fix)


def test_a_target_without_a_superuser_has_findings_with_their_fixes() -> None:
    facts = replace(
        TARGET,
        is_superuser=False,
        has_schema=False,
        may_create_subscription=False,
        may_create_schema=False,
        may_set_replication_role=False,
        origins_by_superuser=False,
    )
    problems = [finding for finding in target_findings(facts) if finding.level is not Level.OK]
    assert [finding.level for finding in problems] == [Level.ERROR, Level.ERROR, Level.WARNING, Level.WARNING]
    assert [finding.fix for finding in problems] == [
        "Run any subscriber exec once on this database as a superuser.",
        'GRANT pg_create_subscription TO "app"; GRANT CREATE ON DATABASE "db" TO "app";',
        '-- as a superuser: GRANT SET ON PARAMETER session_replication_role TO "app";',
        "Have a superuser run the first subscriber exec on this database.",
    ]
    facts = replace(facts, origins_by_superuser=True)  # whose functions do both
    assert [finding.level for finding in target_findings(facts) if finding.level is Level.WARNING] == []


@pytest.mark.parametrize(
    ("source", "target", "level", "fix"),
    [
        (SOURCE, None, Level.ERROR, table_dump("s", "t")),
        (
            SOURCE,
            replace(THERE, columns=COLUMNS[:1]),
            Level.ERROR,
            'On the target: ALTER TABLE "s"."t" ADD COLUMN "note" text;',
        ),
        (
            SOURCE,
            replace(THERE, columns=(COLUMNS[0], ColumnFacts("note", "text", is_generated=True))),
            Level.ERROR,
            'On the target: ALTER TABLE "s"."t" ALTER COLUMN "note" DROP EXPRESSION;',
        ),
        (
            SOURCE,
            replace(THERE, columns=(ColumnFacts("id", "bigint"), COLUMNS[1])),
            Level.WARNING,
            'On the target: ALTER TABLE "s"."t" ALTER COLUMN "id" TYPE integer;',
        ),
        (
            SOURCE,
            replace(THERE, columns=(*COLUMNS, ColumnFacts("extra", "text", is_required=True))),
            Level.ERROR,
            'On the target: ALTER TABLE "s"."t" ALTER COLUMN "extra" DROP NOT NULL; -- or SET DEFAULT …',
        ),
        (SOURCE, replace(THERE, key=()), Level.ERROR, 'On the target: ALTER TABLE "s"."t" ADD PRIMARY KEY ("id");'),
        (
            SOURCE,
            replace(THERE, key=("note",)),
            Level.ERROR,
            'On the target: CREATE UNIQUE INDEX i ON "s"."t" ("id");'
            ' ALTER TABLE "s"."t" REPLICA IDENTITY USING INDEX i;',
        ),
        (
            replace(SOURCE, key=()),
            THERE,
            Level.WARNING,
            'On the publisher: ALTER TABLE "s"."t" ADD PRIMARY KEY (…);'
            ' -- or: ALTER TABLE "s"."t" REPLICA IDENTITY FULL;',
        ),
        (
            replace(SOURCE, replica_identity="f", key=()),
            replace(THERE, key=()),
            Level.WARNING,
            'On the target: ALTER TABLE "s"."t" ADD PRIMARY KEY (…);',
        ),
        (
            replace(SOURCE, row_security=True),
            THERE,
            Level.WARNING,
            'On the publisher: ALTER ROLE "repl" BYPASSRLS;',
        ),
        (
            replace(SOURCE, readable=False),
            THERE,
            Level.ERROR,
            'On the publisher: GRANT USAGE ON SCHEMA "s" TO "repl"; GRANT SELECT ON TABLE "s"."t" TO "repl";',
        ),
        (
            SOURCE,
            replace(THERE, has_rows=True),
            Level.WARNING,
            'On the target: TRUNCATE "s"."t"; -- or: CREATE SUBSCRIPTION … WITH (copy_data = false)',
        ),
        (SOURCE, replace(THERE, relkind="v"), Level.ERROR, 'Make "s"."t" a table there.'),
        (
            SOURCE,
            replace(THERE, row_security=True),
            Level.ERROR,
            'On the target: ALTER TABLE "s"."t" NO FORCE ROW LEVEL SECURITY;',
        ),
    ],
)
def test_a_table_that_does_not_fit_has_a_finding_with_its_fix(
    source: CheckedSourceTable, target: CheckedTargetTable | None, level: Level, fix: str
) -> None:
    (problems,) = table_findings(source, target, FACTS)
    assert (problems.level, problems.fix) == (level, fix)


def test_an_insert_only_publication_needs_no_key() -> None:
    facts = Facts(PUBLISHER, TARGET, [PublicationFacts("p", True, updates=False, deletes=False)])
    assert levels(list(table_findings(replace(SOURCE, key=()), replace(THERE, key=()), facts))) == [Level.OK]


@pytest.mark.parametrize(
    "slot",
    [
        None,
        SlotFacts("s", exists=False),
        SlotFacts("s", True, "pgoutput", is_lost=True),
        SlotFacts("s", True, "pgoutput", in_this_database=False),
        SlotFacts("s", True, "test_decoding"),
    ],
)
def test_a_slot_that_cannot_be_used_is_an_error_with_its_command(slot: SlotFacts | None) -> None:
    (problems,) = slot_findings(slot, "s")
    assert problems.level is Level.ERROR
    assert (problems.command == "subscriber reseed s") == (slot is not None and (slot.is_lost or not slot.exists))


def test_a_failover_that_is_not_prepared() -> None:
    facts = FailoverFacts(
        slot="s",
        subscription="S",
        is_failover_slot=False,
        standby_slots=(StandbySlot("a", exists=True, active=True), StandbySlot("b", exists=False)),
        physical_slots=("a",),
        standbys=(
            StandbyFacts("a:1", sync_replication_slots=True, hot_standby_feedback=False, reason="wal_removed"),
            StandbyFacts("b:1", error="no route"),
        ),
    )
    problems = findings(Facts(failover=facts))
    assert [(finding.level, finding.subject, finding.message.split(";")[0], finding.fix) for finding in problems] == [
        (
            Level.WARNING,
            "publisher",
            'replication slot "s" is not a failover slot, although the subscription has failover = true',
            'ALTER SUBSCRIPTION "S" DISABLE; ALTER SUBSCRIPTION "S" SET (failover = true);'
            ' ALTER SUBSCRIPTION "S" ENABLE;',
        ),
        (Level.OK, "publisher", 'the walsender waits for standby slot "a"', None),
        (
            Level.WARNING,
            "publisher",
            'the walsender waits for standby slot "b", which does not exist: no changes are sent',
            "Start the standby of slot 'b', or remove it from synchronized_standby_slots.",
        ),
        (
            Level.WARNING,
            "standby a:1",
            'replication slot "s" is not synchronized: wal_removed',
            "SELECT pg_log_standby_snapshot(); -- on the primary, after the findings about the standby's settings",
        ),
        (
            Level.WARNING,
            "standby a:1",
            "hot_standby_feedback is off",
            "ALTER SYSTEM SET hot_standby_feedback = on; SELECT pg_reload_conf();",
        ),
        (
            Level.WARNING,
            "standby a:1",
            "primary_slot_name is empty",
            "ALTER SYSTEM SET primary_slot_name = '…'; SELECT pg_reload_conf(); -- a physical slot of the primary",
        ),
        (Level.WARNING, "standby b:1", "cannot be checked: no route", None),
    ]


ROOM = "ALTER SYSTEM SET max_prepared_transactions = 10; -- and restart the server"


@pytest.mark.parametrize(
    ("facts", "level", "fix"),
    [
        (Facts(PUBLISHER, replace(TARGET, max_prepared=0)), Level.ERROR, ROOM),
        (Facts(replace(PUBLISHER, max_prepared=0), replace(TARGET, max_prepared=0)), Level.ERROR, ROOM),
        (Facts(None, replace(TARGET, max_prepared=9)), Level.WARNING, ROOM),
        (Facts(PUBLISHER, replace(TARGET, max_prepared=9)), Level.WARNING, ROOM),
        (
            Facts(replace(PUBLISHER, version=140012)),
            Level.WARNING,
            "Leave two_phase = false, or upgrade it to 15 or later.",
        ),
        (
            Facts(PUBLISHER, slot=SlotFacts("s", True, "pgoutput")),
            Level.WARNING,
            "ALTER SUBSCRIPTION … DISABLE; ALTER SUBSCRIPTION … SET (two_phase = true); then ENABLE it.",
        ),
    ],
)
def test_two_phase_without_its_requirements_has_a_finding_with_its_fix(facts: Facts, level: Level, fix: str) -> None:
    facts.two_phase = TwoPhaseState.ENABLED
    (problems,) = two_phase_findings(facts)
    assert (problems.level, problems.fix) == (level, fix)
    facts.two_phase = TwoPhaseState.DISABLED  # then it does not matter
    assert problems not in findings(facts)


def test_two_phase_with_enough_max_prepared_transactions_is_ok() -> None:
    facts = Facts(PUBLISHER, TARGET, slot=SlotFacts("s", True, "pgoutput", two_phase=True))
    for facts.two_phase in (TwoPhaseState.ENABLED, TwoPhaseState.PENDING):
        assert levels(list(two_phase_findings(facts))) == [Level.OK]


# --- with servers ---------------------------------------------------------------------------------


@pytest.fixture
async def both(source_db: Database, target_db: Database) -> tuple[Database, Database]:
    await source_db.execute(
        "CREATE TABLE good (id int PRIMARY KEY, note text)",
        "CREATE TABLE only_source (id int PRIMARY KEY)",
        "CREATE TABLE shifted (id int PRIMARY KEY, extra numeric(5, 2), more text)",
        "CREATE PUBLICATION p FOR ALL TABLES",
    )
    await target_db.execute(
        "CREATE TABLE good (note text, id int PRIMARY KEY)",
        "CREATE TABLE shifted (id int PRIMARY KEY, extra numeric, must text NOT NULL)",
        "INSERT INTO shifted VALUES (1, 1, 'x')",
    )
    return source_db, target_db


async def test_a_subscription_that_does_not_exist_yet(
    both: tuple[Database, Database], capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = both
    assert await check(target.dsn(), None, source.dsn(), ["p", "q"], json=True) == 1
    shown = findings_of(capsys.readouterr().out)
    wrong = [(f.level, f.subject, f.fix) for f in shown if f.level != Level.OK]
    assert wrong == [
        ("error", "publication q",
         'The publisher has: "p". Or on the publisher: CREATE PUBLICATION "q" FOR ALL TABLES;'),
        ("error", "table public.only_source", table_dump("public", "only_source")),
        ("warning", "table public.shifted", 'On the target: ALTER TABLE "public"."shifted"'
         ' ALTER COLUMN "extra" TYPE numeric(5,2);'),
        ("error", "table public.shifted", 'On the target: ALTER TABLE "public"."shifted" ADD COLUMN "more" text;'),
        ("error", "table public.shifted", 'On the target: ALTER TABLE "public"."shifted"'
         ' ALTER COLUMN "must" DROP NOT NULL;'
         " -- or SET DEFAULT …"),
        ("warning", "table public.shifted", 'On the target: TRUNCATE "public"."shifted"; -- or: CREATE SUBSCRIPTION …'
         " WITH (copy_data = false)"),
    ]  # fmt: skip


async def test_the_fixes_are_printed(both: tuple[Database, Database], capsys: pytest.CaptureFixture[str]) -> None:
    source, target = both
    await source.execute("DROP TABLE only_source, shifted")
    assert await check(target.dsn(), None, source.dsn(), ["p"], json=False) == 0
    out = capsys.readouterr().out
    assert "ok       table public.good: has its 2 columns on both sides\n" in out
    assert out.endswith("0 errors, 0 warnings\n")


async def test_two_phase_is_checked_only_where_it_is_requested(
    both: tuple[Database, Database], capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = both
    await source.execute("DROP TABLE only_source, shifted")
    said = "ok       target: max_prepared_transactions is 10\n"
    await check(target.dsn(), None, source.dsn(), ["p"], json=False)
    assert said not in capsys.readouterr().out
    await check(target.dsn(), None, source.dsn(), ["p"], two_phase=True, json=False)
    assert said in capsys.readouterr().out
    options = "two_phase, copy_data = false, enabled = false"
    create = f"CREATE SUBSCRIPTION s CONNECTION '{source.dsn()}' PUBLICATION p WITH ({options})"
    await execute_statements(target.dsn(), create, io.StringIO())
    await check(target.dsn(), "s")
    assert said in capsys.readouterr().out


async def test_a_server_that_does_not_answer_is_a_finding(
    both: tuple[Database, Database], capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = both
    nowhere = "host=127.0.0.1 port=1 password=secret"
    assert await check(nowhere, None, source.dsn(), ["p"], json=False) == 1
    assert await check(target.dsn(), None, nowhere, ["p"], json=False) == 1
    out = capsys.readouterr().out
    assert "error    target: connection to server" in out
    assert "error    publisher: connection to server" in out
    assert "secret" not in out


async def test_a_subscription_that_does_not_exist_is_an_error(both: tuple[Database, Database]) -> None:
    with pytest.raises(StatementError, match='subscription "none" does not exist'):
        await check(both[1].dsn(), "none")


async def test_an_ordinary_role_is_told_what_it_lacks(
    both: tuple[Database, Database], capsys: pytest.CaptureFixture[str]
) -> None:
    for database in both:
        await database.execute("CREATE ROLE ordinary LOGIN")
    await both[0].execute("ALTER TABLE good ENABLE ROW LEVEL SECURITY")
    try:
        dsns = [database.server.dsn(database.name, user="ordinary") for database in both]
        assert await check(dsns[1], None, dsns[0], ["p"], json=True) == 1
    finally:
        for database in both:
            await database.execute("DROP ROLE ordinary")
    shown = findings_of(capsys.readouterr().out)
    fixes = [finding.fix or "" for finding in shown]
    assert 'ALTER ROLE "ordinary" WITH REPLICATION;' in fixes
    assert "Run any subscriber exec once on this database as a superuser." in fixes
    assert any("GRANT SET ON PARAMETER session_replication_role" in fix for fix in fixes)
    assert any("superuser run the first subscriber exec" in fix for fix in fixes)
    assert any('GRANT SELECT ON TABLE "public"."good"' in fix for fix in fixes)
    assert 'On the publisher: ALTER ROLE "ordinary" BYPASSRLS;' in fixes
    assert any("its owner is a superuser" in fix.lower() for fix in fixes)
    assert not any('"postgres" TO' in fix for fix in fixes)
