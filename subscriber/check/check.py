"""Find the problems that would keep a subscription from working.

The command takes the publisher and the publications for a new subscription, and the name of an existing one. A question
that a server does not answer becomes a finding, and the other questions are still asked.
"""

from __future__ import annotations

from collections.abc import Sequence

from subscriber.catalog import hooked_tables
from subscriber.catalog.commands.privileges import does_not_exist
from subscriber.catalog.connection import CatalogConnection, Connection, encoding_of
from subscriber.catalog.store.memberships import load_memberships
from subscriber.catalog.store.subscriptions import load_subscriptions
from subscriber.check import collect as check_collect
from subscriber.check import recipe_collect
from subscriber.check.failover import collect_failover
from subscriber.check.model import CheckedSourceTable, Facts, Finding, Level
from subscriber.check.sequences import collect_sequences, synchronized_names
from subscriber.connection.connect import connect, open_session
from subscriber.connection.conninfo import Conninfo
from subscriber.connection.defaults import complete
from subscriber.errors import SubscriberError
from subscriber.publisher.connection import SETTINGS, Publisher
from subscriber.publisher.memberships import read_published_tables
from subscriber.status import unpublished
from subscriber.subscription import Subscription, TwoPhaseState

NAME = "subscriber check"
TIMEOUT = 10.0  # seconds for connecting


async def collect(
    target_dsn: str,
    source_dsn: str | None,
    publications: Sequence[str],
    name: str | None,
    *,
    apply_target: str | None = None,
    two_phase: bool = False,
) -> Facts:
    """Collect the facts from both servers. Raises StatementError if there is no subscription called `name`."""
    facts = Facts(subscription=name, two_phase=TwoPhaseState.PENDING if two_phase else TwoPhaseState.DISABLED)
    try:
        connection = await connect(target_dsn, application_name=NAME, timeout=TIMEOUT)
    except SubscriberError as error:
        facts.failures.append(_unreachable("target", error))
        if source_dsn is not None:
            await _ask_publisher(source_dsn, publications, None, facts)
        return facts
    try:
        async with CatalogConnection(connection).use():
            await _ask_both(connection, source_dsn, publications, name, apply_target, facts)
    finally:
        connection.terminate()
    return facts


async def _ask_both(
    target: Connection,
    source_dsn: str | None,
    publications: Sequence[str],
    name: str | None,
    apply_target: str | None,
    facts: Facts,
) -> None:
    facts.target = await check_collect.read_target(target)
    facts.encoding = encoding_of(target)
    subscription: Subscription | None = None
    if name is not None:
        subscription = await check_collect.read_subscription(target, name)
        if subscription is None:
            raise await does_not_exist(target, name)
        facts.subscription_owner = await check_collect.read_owner(target, subscription)
        source_dsn, publications = subscription.conninfo, subscription.publications
        if subscription.two_phase is not TwoPhaseState.DISABLED:
            facts.two_phase = subscription.two_phase
    tables = []
    if source_dsn is not None:
        tables = await _ask_publisher(source_dsn, publications, subscription, facts, target)
    # Hooks may send rows to tables with other names and columns. The program that has the hooks checks them when it
    # starts.
    with_hooks = set() if subscription is None else {*(await hooked_tables.sources(target, subscription.oid)).values()}
    ownership = None if subscription is None else await check_collect.read_ownership(target, subscription)
    is_new = subscription is None and facts.target.has_schema
    facts.tables = [
        (
            table,
            await check_collect.read_target_table(
                target, table, rows=subscription is None, ownership=ownership, has_schema=is_new
            ),
        )
        for table in tables
        if (table.schema, table.name) not in with_hooks
    ]
    await _ask_apply(target, tables, subscription, apply_target, facts)
    facts.target_roles = await recipe_collect.read_target_roles(
        target,
        facts.target,
        await load_subscriptions(target) if facts.target.has_schema else [],
        _names(tables, facts),
        None if apply_target is None else complete(Conninfo.parse(apply_target))["user"],
        is_new=source_dsn is not None and subscription is None,
    )


def _names(tables: Sequence[CheckedSourceTable], facts: Facts) -> list[tuple[str, str]]:
    """Return the names of the publisher's tables, and of its sequences that the subscription sets."""
    sequences = [] if facts.sequences is None else synchronized_names(facts.sequences)
    return [*((table.schema, table.name) for table in tables), *sequences]


async def _ask_apply(
    target: Connection,
    tables: list[CheckedSourceTable],
    subscription: Subscription | None,
    apply_target: str | None,
    facts: Facts,
) -> None:
    """Collect the facts of a session of the role that applies changes."""
    assert facts.target is not None
    by_superuser = facts.target.origins_by_superuser
    if apply_target is None:
        facts.apply = await check_collect.read_apply(target, tables, subscription, origins_by_superuser=by_superuser)
        return
    try:
        connection = await connect(apply_target, application_name=NAME, timeout=TIMEOUT)
    except SubscriberError as error:
        facts.failures.append(_unreachable("target", error, "the role that applies changes: "))
        return
    try:
        async with CatalogConnection(connection).use():
            facts.apply = await check_collect.read_apply(
                connection, tables, subscription, origins_by_superuser=by_superuser
            )
    finally:
        connection.terminate()


async def _ask_publisher(
    dsn: str,
    publications: Sequence[str],
    subscription: Subscription | None,
    facts: Facts,
    target: Connection | None = None,
) -> list[CheckedSourceTable]:
    """Collect the facts of the publisher. `target` is None if the target cannot be reached."""
    must_use_password = subscription is not None and subscription.must_use_password
    try:
        session = await open_session(
            dsn, application_name=NAME, settings=SETTINGS, must_use_password=must_use_password, timeout=TIMEOUT
        )
    except SubscriberError as error:
        facts.failures.append(_unreachable("publisher", error))
        return []
    try:
        facts.publisher = await check_collect.read_publisher(session)
        facts.publications = await check_collect.read_publications(session, publications)
        if facts.publisher.may_replicate and facts.publisher.can_decode:
            await _try_to_replicate(dsn, facts, must_use_password=must_use_password)
        publisher = Publisher(session)
        if subscription is not None:
            facts.slot = await check_collect.read_slot(publisher, subscription)
            facts.failover = await collect_failover(publisher, subscription, timeout=TIMEOUT)
        existing = [publication.name for publication in facts.publications if publication.exists]
        tables = await check_collect.read_source_tables(publisher, existing, facts) if existing else []
        if target is not None and subscription is not None:
            memberships = await load_memberships(target, subscription.oid)
            subscribed = [membership.source for membership in memberships]
            published = await read_published_tables(session, publications, subscribed)
            absent = unpublished.find(published, memberships, ())
            facts.unpublished = list(unpublished.find_problems(absent, subscription))
        if target is not None:
            all_tables = next((p.name for p in facts.publications if p.all_tables), None)
            facts.sequences = await collect_sequences(
                target, publisher, existing, subscription, role=facts.publisher.role, all_tables=all_tables
            )
        facts.publisher_roles = await recipe_collect.read_publisher_roles(
            session, facts.publisher, _names(tables, facts)
        )
        return tables
    except SubscriberError as error:
        facts.failures.append(Finding(Level.ERROR, "publisher", error.message, error.remedy))
        return []
    finally:
        session.abort()


async def _try_to_replicate(dsn: str, facts: Facts, *, must_use_password: bool) -> None:
    try:
        publisher = await Publisher.connect(
            dsn,
            application_name=NAME,
            client_encoding=facts.encoding,
            must_use_password=must_use_password,
            timeout=TIMEOUT,
        )
    except SubscriberError as error:
        facts.failures.append(_unreachable("publisher", error, "no replication connection: "))
    else:
        await publisher.close()


def _unreachable(who: str, error: SubscriberError, prefix: str = "") -> Finding:
    return Finding(Level.ERROR, who, prefix + error.message, error.remedy)
