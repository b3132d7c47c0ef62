"""What `subscriber check` finds about a failover slot. The queries are in collect_failover(), the rules do no I/O.

A failover loses no change if each of these is true: the slot is a failover slot, the standby synchronizes it, and the
primary's walsender waits for that standby (synchronized_standby_slots).
"""

from __future__ import annotations

from collections.abc import Iterator

from subscriber import server_features as features
from subscriber.check.model import FailoverFacts, Finding, Level, StandbyFacts
from subscriber.connection import defaults, hosts
from subscriber.connection.connect import open_session
from subscriber.connection.conninfo import Conninfo
from subscriber.connection.session import Session
from subscriber.display import sql_identifier, sql_literal
from subscriber.errors import SubscriberError
from subscriber.publisher.answers import parsing
from subscriber.publisher.connection import Publisher
from subscriber.publisher.standby_slots import read_standby_slots
from subscriber.quoting import literal
from subscriber.remedy import Remedy, run
from subscriber.subscription import Subscription

_RELOAD = "SELECT pg_reload_conf();"
_PHYSICAL = "SELECT slot_name FROM pg_catalog.pg_replication_slots WHERE slot_type = 'physical' ORDER BY 1"
_STANDBY = """
SELECT pg_catalog.pg_is_in_recovery(), current_setting('sync_replication_slots'),
       current_setting('hot_standby_feedback'), current_setting('primary_slot_name') <> '',
       coalesce(s.synced AND NOT s.temporary AND s.invalidation_reason IS NULL, false),
       coalesce(s.invalidation_reason, {skipped})
  FROM (SELECT) one LEFT JOIN pg_catalog.pg_replication_slots s ON s.slot_name = {slot}
"""


async def collect_failover(publisher: Publisher, subscription: Subscription, *, timeout: float) -> FailoverFacts | None:
    """Query the publisher, and each standby among the hosts of the connection string.

    Args:
        publisher: a session on the publisher.
        subscription: the subscription.
        timeout: seconds for a connection to a standby.

    Returns:
        None if the subscription does not have failover = true, or the publisher is too old or is itself a standby.

    Raises:
        SubscriberError: a query of the publisher failed.
    """
    name, session = subscription.slot_name, publisher.session
    has_slots = features.FAILOVER_SLOTS.is_in(session.server_version) and not publisher.in_recovery
    if not subscription.failover or name is None or not has_slots:
        return None
    slot = await publisher.slot(name)
    return FailoverFacts(
        slot=name,
        subscription=subscription.name,
        is_failover_slot=slot is None or slot.failover,
        standby_slots=await read_standby_slots(session),
        physical_slots=tuple(slot or "" for (slot,) in await session.rows(_PHYSICAL)),
        standbys=await _read_standbys(subscription, name, timeout),
    )


async def _read_standbys(subscription: Subscription, slot: str, timeout: float) -> tuple[StandbyFacts, ...]:
    """Query the hosts one after the other. A host that is the primary is left out."""
    conninfo = Conninfo.parse(subscription.conninfo)
    standbys = []
    candidates = hosts.targets(defaults.complete(conninfo))
    for host in candidates if len(candidates) > 1 else ():
        shown = f"{host.host or host.address}:{host.port}"
        single = conninfo.with_(host=host.host, hostaddr=host.address, port=str(host.port), target_session_attrs="any")
        try:
            async with await open_session(
                single,
                application_name="subscriber check",
                must_use_password=subscription.must_use_password,
                timeout=timeout,
            ) as session:
                standby = await _read_standby(session, shown, slot)
        except SubscriberError as error:
            standby = StandbyFacts(shown, error=error.message)
        if standby is not None:
            standbys.append(standby)
    return tuple(standbys)


async def _read_standby(session: Session, host: str, slot: str) -> StandbyFacts | None:
    """Return the facts of one server; None if it is a primary."""
    if not features.FAILOVER_SLOTS.is_in(session.server_version):
        return StandbyFacts(host, error="it is older than PostgreSQL 17, which synchronizes no slots")
    skipped = "s.slotsync_skip_reason" if features.SLOT_SYNC_STATISTICS.is_in(session.server_version) else "NULL"
    rows = await session.rows(_STANDBY.format(skipped=skipped, slot=literal(slot)))
    with parsing("the settings of a standby"):
        ((in_recovery, sync, feedback, primary_slot, synced, reason),) = rows
    if in_recovery != "t":
        return None
    return StandbyFacts(
        host,
        sync_replication_slots=sync == "on",
        hot_standby_feedback=feedback == "on",
        primary_slot=primary_slot == "t",
        slot_is_synced=synced == "t",
        reason=reason,
    )


def failover_findings(facts: FailoverFacts) -> Iterator[Finding]:
    """Yield what keeps the subscription from following a failover without a loss, with the statement for each."""
    who = "publisher"
    if not facts.is_failover_slot:
        name = sql_identifier(facts.subscription)
        fix = run(
            f"ALTER SUBSCRIPTION {name} DISABLE; ALTER SUBSCRIPTION {name} SET (failover = true);"
            f" ALTER SUBSCRIPTION {name} ENABLE;"
        )
        message = (
            f'replication slot "{facts.slot}" is not a failover slot, although the subscription has failover = true'
        )
        yield Finding(Level.WARNING, who, message, fix)
    if not facts.standby_slots:
        listed = ", ".join(facts.physical_slots)
        fix = run(f"ALTER SYSTEM SET synchronized_standby_slots = {sql_literal(listed)}; {_RELOAD}")
        if not facts.physical_slots:
            fix = Remedy("Create a standby with a physical slot, and list that slot in synchronized_standby_slots.")
        message = (
            "synchronized_standby_slots is empty: after a failover the target may have changes that the new primary"
            " lacks, which stops the subscription"
        )
        yield Finding(Level.WARNING, who, message, fix)
    for standby in facts.standby_slots:
        if standby.active:
            yield Finding(Level.OK, who, f"the walsender waits for standby slot {standby.condition}")
        else:
            name = sql_literal(standby.name)
            fix = Remedy(f"Start the standby of slot {name}, or remove it from synchronized_standby_slots.")
            message = f"the walsender waits for standby slot {standby.condition}: no changes are sent"
            yield Finding(Level.WARNING, who, message, fix)
    for other in facts.standbys:
        yield from _standby_findings(other, facts.slot)


def _standby_findings(facts: StandbyFacts, slot: str) -> Iterator[Finding]:
    who = f"standby {facts.host}"
    if facts.error is not None:
        yield Finding(Level.WARNING, who, f"cannot be checked: {facts.error}")
        return
    if facts.slot_is_synced:
        yield Finding(Level.OK, who, f'replication slot "{slot}" is synchronized')
    else:
        reason = "" if facts.reason is None else f": {facts.reason}"
        fix = run(
            "SELECT pg_log_standby_snapshot(); -- on the primary, after the findings about the standby's settings"
        )
        message = (
            f'replication slot "{slot}" is not synchronized{reason}; after a promotion the subscription would stop'
        )
        yield Finding(Level.WARNING, who, message, fix)
    for name, is_set in (
        ("sync_replication_slots", facts.sync_replication_slots),
        ("hot_standby_feedback", facts.hot_standby_feedback),
    ):
        if not is_set:
            yield Finding(Level.WARNING, who, f"{name} is off", run(f"ALTER SYSTEM SET {name} = on; {_RELOAD}"))
    if not facts.primary_slot:
        fix = Remedy(f"ALTER SYSTEM SET primary_slot_name = '…'; {_RELOAD} -- a physical slot of the primary")
        yield Finding(Level.WARNING, who, "primary_slot_name is empty", fix)
