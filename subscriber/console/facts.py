"""What the page of one subscription shows beyond its status: conflicts, quarantine, repairs, actions and steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from subscriber.catalog.connection import Connection
from subscriber.catalog.store import audit, migrations, quarantine, repairs, verifications
from subscriber.catalog.store.audit import AuditRecord
from subscriber.catalog.store.conflict_history import ConflictRecord, load_conflicts
from subscriber.catalog.store.migrations import StepRecord
from subscriber.catalog.store.quarantine import QuarantinedTransaction
from subscriber.catalog.store.repairs import RepairedTable
from subscriber.catalog.store.verifications import LastVerification
from subscriber.subscription import Subscription

MOST_CONFLICTS = 50
MOST_QUARANTINED = 50
MOST_STEPS = 50
MOST_REPAIRED = 20
MOST_ACTIONS = 20


@dataclass(frozen=True, slots=True)
class SubscriptionFacts:
    """Rows of the catalog about one subscription, the newest first, but steps in their order."""

    conflicts: Sequence[ConflictRecord] = ()
    quarantined: Sequence[QuarantinedTransaction] = ()
    steps: Sequence[StepRecord] = ()
    repaired: Sequence[RepairedTable] = ()
    verification: LastVerification | None = None
    actions: Sequence[AuditRecord] = ()


async def read_facts(connection: Connection, subscription: Subscription) -> SubscriptionFacts:
    """Read the rows about one subscription, at most the limits above of each kind."""
    return SubscriptionFacts(
        conflicts=await load_conflicts(connection, subscription.name, None, MOST_CONFLICTS),
        quarantined=(await quarantine.load(connection, subscription.oid))[:MOST_QUARANTINED],
        steps=(await migrations.load_steps(connection, subscription.name))[-MOST_STEPS:],
        repaired=await repairs.load_last(connection, subscription.oid, MOST_REPAIRED),
        verification=await verifications.load_last(connection, subscription.oid),
        actions=await audit.load(connection, subscription.oid, MOST_ACTIONS),
    )
