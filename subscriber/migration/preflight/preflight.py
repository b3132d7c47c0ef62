"""Run all rules of the preflight on both servers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from subscriber import server_features as features
from subscriber.catalog import native_subscription
from subscriber.catalog.connection import Connection
from subscriber.catalog.schema import current_revision
from subscriber.catalog.store.subscriptions import load_subscriptions
from subscriber.catalog.two_databases import open_both
from subscriber.check.collect import read_publisher, read_target
from subscriber.check.model import Finding, Level, TargetFacts
from subscriber.check.rules import SYNC_WORKERS, publisher_findings, target_findings
from subscriber.connection.connect import open_session
from subscriber.display import sql_identifier, sql_name
from subscriber.errors import SubscriberError
from subscriber.migration.preflight.comparison import (
    accepted_roles,
    compare_code,
    compare_definitions,
    compare_extensions,
    compare_large_objects,
    compare_locales,
    compare_owners,
    compare_relations,
    compare_roles,
    compare_settings,
    compare_tablespaces,
)
from subscriber.migration.preflight.firing_triggers import find_firing
from subscriber.migration.preflight.model import FixedOn, PreflightFinding, PreflightResult, Severity, waive
from subscriber.migration.preflight.rules import (
    IS_OF_AN_EXTENSION,
    PUBLICATION_EXISTS,
    SOURCE_RULES,
    TARGET_RULES,
    UNPUBLISHED,
    ServerRule,
)
from subscriber.migration.schema.programs import find_programs
from subscriber.publisher.connection import SETTINGS

NAME = "subscriber migrate"
TIMEOUT = 10.0  # seconds for connecting
JOBS = 4  # tables that a move copies, and indexes that it builds, at the same time
LIMIT = 600.0  # seconds for a query, for example one about many relations

_REPLICATION = "The subscription of the move needs it"
_RECEIVES = "The source receives changes of another server, which the target does not receive after the move"
_WAY_BACK = "The way back needs it: the source replicates the target after the switch"


async def run_preflight(
    source: str,
    target: str,
    *,
    schema: bool = True,
    large_objects: bool = False,
    programs: Path | None = None,
    slots: Sequence[str] = (),
    names: Collection[str] = (),
    own_roles: Collection[str] = (),
    jobs: int = JOBS,
    publication: str | None = None,
) -> PreflightResult:
    """Find the obstacles of a move. Changes nothing on either server.

    Args:
        source: the connection string of the server that the database leaves.
        target: the connection string of the server that it moves to.
        schema: True if the move copies the definitions. False: the target has them.
        large_objects: True if the move copies large objects.
        programs: the directory of pg_dump and pg_restore. None: find_programs() finds them.
        slots: slots of the move itself, which are no findings.
        names: names of findings to waive.
        own_roles: roles of the target that the move has made.
        jobs: tables that are copied at the same time. Each has a slot and a walsender of the source.
        publication: the publication of the move. If it exists, it must have all tables.

    Raises:
        SubscriberError: a server cannot be reached, or refuses a query.
        StatementError: a name to waive is unknown, or its finding cannot be waived.
    """
    async with open_both(source, target, NAME) as (there, here):
        for connection in (there, here):
            await connection.execute(f"SET statement_timeout = '{LIMIT:.0f}s'")
        of_target, of_source = await read_target(here), await read_target(there)
        findings = [
            *await _requirements(source, "source", _REPLICATION, jobs),
            *await _requirements(target, "target", _WAY_BACK, SYNC_WORKERS),
            *_origins(of_target, "target", _REPLICATION),
            *_origins(of_source, "source", _WAY_BACK),
            *await _own_subscriptions(there, slots),
            *await _native_subscriptions(there),
            *await run_rules(there, SOURCE_RULES, slots),
            *await run_rules(here, TARGET_RULES, slots),
            *await _unpublished(there, publication),
            *_versions(there, here),
            *await compare_settings(there, here),
            *await compare_locales(there, here),
            *await compare_code(there, here, lacks_replica_role=_lacks_replica_role(of_target, of_source)),
            *await _triggers(there, of_target),
            *await compare_large_objects(there, here, are_copied=large_objects),
        ]
        if schema:
            findings += await compare_definitions(there, here)
            findings += await compare_extensions(there, here)
            findings += await compare_roles(there, here, own_roles, accepted_roles(names))
            findings += await compare_owners(there, here)
            findings += await compare_tablespaces(there, here)
            findings += await compare_relations(there, here)
            findings += await _programs(there, here, programs)
    return waive(findings, names)


async def run_rules(
    connection: Connection, rules: Iterable[ServerRule], slots: Sequence[str]
) -> list[PreflightFinding]:
    major = connection.get_server_version().major
    findings = []
    for rule in rules:
        if major < rule.since:
            continue
        if rule.needs and not await connection.fetchval(IS_OF_AN_EXTENSION, rule.needs):
            continue
        arguments = [list(slots)] if "$1" in rule.query else []
        findings += [rule.finding(row) for row in await connection.fetch(rule.query, *arguments)]
    return findings


async def _requirements(dsn: str, side: str, why: str, jobs: int) -> list[PreflightFinding]:
    """Return what `subscriber check` finds about a server as publisher, of which `jobs` tables are copied at a time."""
    async with await open_session(dsn, application_name=NAME, settings=SETTINGS, timeout=TIMEOUT) as session:
        facts = await read_publisher(session)
    return from_check(publisher_findings(facts, True, jobs), side, why)


def _origins(facts: TargetFacts, side: str, why: str) -> list[PreflightFinding]:
    """Return what `subscriber check` finds about a server as target. The rules about versions are asked once."""
    findings = from_check(target_findings(facts), side, why)
    return [finding for finding in findings if finding.kind not in ("version", "standby")]


def from_check(found: Iterable[Finding], side: str, why: str) -> list[PreflightFinding]:
    fixed_on = FixedOn.SOURCE if side == "source" else FixedOn.TARGET
    return [
        PreflightFinding(
            finding.kind or "check",
            side,
            Severity.ERROR if finding.level is Level.ERROR else Severity.WARNING,
            finding.message,
            why,
            finding.fix,
            fixed_on,
            is_waivable=finding.level is not Level.ERROR,
        )
        for finding in found
        if finding.level is not Level.OK
    ]


def _lacks_replica_role(*servers: TargetFacts) -> bool:
    """Return True if the worker of one of the servers cannot set session_replication_role."""
    return not all(
        facts.is_superuser or facts.origins_by_superuser or facts.may_set_replication_role for facts in servers
    )


async def _triggers(source: Connection, facts: TargetFacts) -> list[PreflightFinding]:
    """Return the tables of the source whose triggers fire again on a target without session_replication_role."""
    if not _lacks_replica_role(facts):
        return []
    fix = f"GRANT SET ON PARAMETER session_replication_role TO {sql_identifier(facts.role)};"
    return [
        PreflightFinding(
            "trigger",
            trigger.table,
            Severity.WARNING,
            "triggers or rules of the table fire again on the target for replicated changes:"
            f" {', '.join(trigger.names)}",
            "The rows may differ. cutover asks for a recent comparison, or a waiver of the table",
            fix if features.GRANT_SET.is_in(facts.version) else None,
            FixedOn.TARGET,
        )
        for trigger in await find_firing(source)
    ]


async def _native_subscriptions(source: Connection) -> list[PreflightFinding]:
    """Return the subscriptions of PostgreSQL on the source."""
    return [
        PreflightFinding(
            "subscription",
            name,
            Severity.ERROR,
            "the source has a subscription",
            _RECEIVES,
            f"ALTER SUBSCRIPTION {sql_identifier(name)} DISABLE;"
            f" ALTER SUBSCRIPTION {sql_identifier(name)} SET (slot_name = NONE);"
            f" DROP SUBSCRIPTION {sql_identifier(name)}; -- then drop its slot on the publisher",
        )
        for name in await native_subscription.load_marks(source)
    ]


async def _own_subscriptions(source: Connection, slots: Sequence[str]) -> list[PreflightFinding]:
    """Return the subscriptions of schema "subscriber" on the source. The way back is part of the move."""
    if await current_revision(source) is None:
        return []
    return [
        PreflightFinding(
            "subscription",
            subscription.name,
            Severity.ERROR,
            "the source has a subscription of subscriber",
            _RECEIVES,
            f"subscriber exec --target SOURCE 'DROP SUBSCRIPTION {sql_identifier(subscription.name)}'",
            FixedOn.SHELL,
        )
        for subscription in await load_subscriptions(source)
        if subscription.slot_name not in slots
    ]


async def _unpublished(source: Connection, publication: str | None) -> list[PreflightFinding]:
    """Return the tables that an existing publication does not have. `start` creates a missing one for all tables."""
    if publication is None or not await source.fetchval(PUBLICATION_EXISTS, publication):
        return []
    return [
        PreflightFinding(
            "unpublished",
            f"{row['schema']}.{row['name']}",
            Severity.ERROR,
            f'publication "{publication}" does not have the table',
            "Its rows stay behind",
            f"ALTER PUBLICATION {sql_identifier(publication)} ADD TABLE {sql_name(row['schema'], row['name'])};",
        )
        for row in await source.fetch(UNPUBLISHED, [publication])
    ]


def _versions(source: Connection, target: Connection) -> list[PreflightFinding]:
    old, new = source.get_server_version().major, target.get_server_version().major
    findings = []
    if new < old:
        message = f"the target has PostgreSQL {new}, which is older than {old} of the source"
        why = "pg_dump writes syntax that the target may not have"
        findings.append(PreflightFinding("version", "older", Severity.WARNING, message, why))
    if new < 14:
        message, why = f"the target has PostgreSQL {new}", "Targets are supported since PostgreSQL 14"
        findings.append(
            PreflightFinding("version", "target", Severity.ERROR, message, why, "Upgrade it.", is_waivable=False)
        )
    return findings


async def _programs(source: Connection, target: Connection, given: Path | None) -> list[PreflightFinding]:
    try:
        await find_programs(source.get_server_version().major, target.get_server_version().major, given)
    except SubscriberError as error:
        why = "pg_dump reads the definitions of the source"
        return [
            PreflightFinding(
                "programs", "pg_dump", Severity.ERROR, error.message, why, error.hint, FixedOn.SHELL, is_waivable=False
            )
        ]
    return []
