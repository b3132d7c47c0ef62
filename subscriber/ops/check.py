"""`subscriber check`: what would keep a subscription from working.

For a subscription that does not exist yet the publisher and the publications are given; for one that does,
its name is. Every question that a server does not answer becomes a finding itself, and the others are
asked all the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict

from subscriber.catalog import hooked
from subscriber.catalog.session import Catalog, Connection
from subscriber.connection.connect import connect, open_session
from subscriber.display import json_text, printable
from subscriber.errors import ServerError, StatementError, SubscriberError
from subscriber.ops import check_facts, units
from subscriber.ops.check_answers import Facts, Finding, Level, SourceTable
from subscriber.ops.check_rules import findings
from subscriber.source.publisher import SETTINGS, Publisher
from subscriber.subscription import Subscription, TwoPhaseState

OBSTACLE = 1  # the exit status when there is an error among the findings
NAME = "subscriber check"
TIMEOUT = 10.0  # seconds for connecting

_HBA = "Add a line for this role, database and address to the server's pg_hba.conf, and reload it."


async def run_checks(
    target_dsn: str,
    source_dsn: str | None,
    publications: Sequence[str],
    *,
    name: str | None = None,
    two_phase: bool = False,
    json: bool,
) -> int:
    """Print each finding with its fix; OBSTACLE if one of them is an error.

    `name` is that of a subscription that exists, and then the source and publications are its own. `two_phase`: it is
    to have that, if it does not already.
    Raises StatementError if there is no such subscription.
    """
    found = findings(await collect(target_dsn, source_dsn, publications, name, two_phase=two_phase))
    if json:
        print(json_text([asdict(finding) for finding in found]))
    else:
        _print(found)
    return OBSTACLE if any(finding.level is Level.ERROR for finding in found) else 0


async def collect(
    target_dsn: str, source_dsn: str | None, publications: Sequence[str], name: str | None, *, two_phase: bool = False
) -> Facts:
    """Ask both servers. Raises StatementError if there is no subscription called `name`."""
    facts = Facts(is_new=name is None, two_phase=TwoPhaseState.PENDING if two_phase else TwoPhaseState.DISABLED)
    try:
        connection = await connect(target_dsn, application_name=NAME, timeout=TIMEOUT)
    except SubscriberError as error:
        facts.failures.append(_unreachable("target", error))
        if source_dsn is not None:
            await _ask_publisher(source_dsn, publications, None, facts)
        return facts
    try:
        async with Catalog(connection).use():
            await _ask_both(connection, source_dsn, publications, name, facts)
    finally:
        connection.terminate()
    return facts


async def _ask_both(
    target: Connection, source_dsn: str | None, publications: Sequence[str], name: str | None, facts: Facts
) -> None:
    facts.target = await check_facts.read_target(target)
    subscription: Subscription | None = None
    if name is not None:
        subscription = await check_facts.find_subscription(target, name)
        if subscription is None:
            raise StatementError(f'subscription "{name}" does not exist', sqlstate="42704")
        source_dsn, publications = subscription.conninfo, subscription.publications
        if subscription.two_phase is not TwoPhaseState.DISABLED:
            facts.two_phase = subscription.two_phase
    tables = await _ask_publisher(source_dsn or "", publications, subscription, facts)
    # A program's hooks may send their rows to tables of other names and columns: it checks them when it starts.
    with_hooks = set() if subscription is None else {*(await hooked.sources(target, subscription.oid)).values()}
    facts.tables = [
        (table, await check_facts.read_target_table(target, table, rows=subscription is None))
        for table in tables
        if (table.schema, table.name) not in with_hooks
    ]


async def _ask_publisher(
    dsn: str, publications: Sequence[str], subscription: Subscription | None, facts: Facts
) -> list[SourceTable]:
    must_use_password = subscription is not None and subscription.must_use_password
    try:
        session = await open_session(
            dsn, application_name=NAME, settings=SETTINGS, must_use_password=must_use_password, timeout=TIMEOUT
        )
    except SubscriberError as error:
        facts.failures.append(_unreachable("publisher", error))
        return []
    try:
        facts.publisher = await check_facts.read_publisher(session)
        facts.publications = await check_facts.read_publications(session, publications)
        if facts.publisher.may_replicate and facts.publisher.wal_level == "logical":
            await _try_to_replicate(dsn, facts, must_use_password=must_use_password)
        publisher = Publisher(session)
        if subscription is not None:
            facts.slot = await check_facts.read_slot(publisher, subscription)
        existing = [publication.name for publication in facts.publications if publication.exists]
        return await check_facts.read_source_tables(publisher, existing, facts) if existing else []
    except SubscriberError as error:
        facts.failures.append(Finding(Level.ERROR, "publisher", error.message, error.hint))
        return []
    finally:
        session.abort()


async def _try_to_replicate(dsn: str, facts: Facts, *, must_use_password: bool) -> None:
    try:
        publisher = await Publisher.connect(
            dsn, application_name=NAME, must_use_password=must_use_password, timeout=TIMEOUT
        )
    except SubscriberError as error:
        facts.failures.append(_unreachable("publisher", error, "no replication connection: "))
    else:
        await publisher.close()


def _unreachable(who: str, error: SubscriberError, prefix: str = "") -> Finding:
    refused = isinstance(error, ServerError) and error.sqlstate.startswith("28")
    return Finding(Level.ERROR, who, prefix + error.message, _HBA if refused else error.hint)


def _print(found: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.text import Text

    styles = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "bold red"}
    console = Console(highlight=False, soft_wrap=True, file=sys.stdout)
    for finding in found:
        subject = printable(finding.subject)
        line = Text.assemble((f"{finding.level:<9}", styles[finding.level]), (f"{subject}: ", "bold"))
        console.print(line.append(printable(finding.message)))
        if finding.fix:
            console.print(Text.assemble((f"{'':9}fix: ", "dim"), printable(finding.fix)))
    counts = [sum(finding.level is level for finding in found) for level in (Level.ERROR, Level.WARNING)]
    console.print(f"{units.count(counts[0], 'error')}, {units.count(counts[1], 'warning')}")
