"""Claim the progress record of an apply worker, after comparing the record with the publisher.

Purpose. The record counts the changes of one cluster and of one history of timelines (publisher/timelines.py). The
worker may only resume on a server whose WAL has these changes.

Failure cases.

- Another cluster, a server behind the record, or one that failed over without changes that were applied answers:
  PublisherReplaced. The subscription stops.
- The user accepts the loss with ALTER SUBSCRIPTION ... SET (slot_name = ...): the worker moves all positions back to
  the end of the shared history, so that it receives all changes of the new primary. The rows of lost transactions stay
  on the target.
- Worker killed while it moves the positions back: positions, history and consent are in one transaction.
- Standby promoted while it streams, or its upstream: the walsender continues on the new timeline without a word. So the
  history of a standby is not stored, and its slot decides: a slot that is confirmed beyond the end of the former
  timeline has streamed the new one.
- Failover without a loss: a confirmed position after the end of the old timeline is moved back to that end, because the
  new primary has other WAL there.
"""

from __future__ import annotations

from dataclasses import replace

import asyncpg

from subscriber import telemetry
from subscriber.apply.progress import ProgressClaim
from subscriber.catalog.connection import CatalogConnection
from subscriber.catalog.store import progress_records
from subscriber.catalog.store.prepared_transactions import load_prepared_after
from subscriber.catalog.store.subscriptions import load_reached, load_subscription, set_publisher
from subscriber.display import shell_word, sql_identifier, sql_literal
from subscriber.errors import PublisherReplaced, StaleCatalog, SubscriberError
from subscriber.lsn import Lsn
from subscriber.publisher.connection import Publisher, SystemIdentity
from subscriber.publisher.replication_stream import check_position, check_system
from subscriber.publisher.timelines import check_history, read_history
from subscriber.remedy import Remedy
from subscriber.subscription import Subscription
from subscriber.targets.postgres.worker_session import claim
from subscriber.timeline_history import TimelineHistory

_COPY_AGAIN = Remedy("drop the subscription and create it again with a fresh copy of its tables.")


async def claim_progress(
    catalog: CatalogConnection, subscription: Subscription, publisher: Publisher, identity: SystemIdentity
) -> ProgressClaim:
    """Claim the progress record of the apply worker, and store the publisher's identity and history.

    Args:
        catalog: has the record.
        subscription: the subscription that the worker has loaded.
        publisher: the connected publisher.
        identity: its answer to IDENTIFY_SYSTEM.

    Raises:
        PublisherReplaced: another cluster answers, or one without changes that were applied.
        ConnectionLost: the publisher is a standby that is behind.
        StaleCatalog: the positions were moved back. The next worker resumes from them.
        SubscriberError: the record is missing.

    Cancellation: the catalog is unchanged, or completely changed.
    """
    subid = subscription.oid
    claimed = await claim(catalog, subscription, 0)
    if claimed is None:
        raise SubscriberError(f'progress of subscription "{subscription.name}" is missing in the catalog')
    async with catalog.use() as connection:
        stored = await load_subscription(connection, subid)
        reached = await load_reached(connection, subid)
    if stored is None:
        raise StaleCatalog("the subscription was dropped meanwhile")
    check_system(identity, int(stored.system_id) if stored.system_id else None)
    history = await read_history(publisher, identity)
    known = _known_history(stored, identity, history)
    if known is not None and await _has_streamed_beyond(publisher, stored, history.fork(known)):
        known = history
    try:
        end = check_history(history, known, reached, in_recovery=identity.in_recovery, hint=_remedy(stored))
    except PublisherReplaced as error:
        if not stored.accepts_loss or known is None:
            raise
        await _accept_loss(catalog, stored, identity, history, known, reached, error)
        raise StaleCatalog("the subscription continues with the changes of another timeline") from error
    check_position(identity, claimed.position)
    async with catalog.use() as connection, connection.transaction():
        if end is not None and claimed.confirmed is not None and claimed.confirmed > end:
            await progress_records.save_confirmed(connection, subid, None)
            await progress_records.save_confirmed(connection, subid, end)
            claimed = replace(claimed, confirmed=end)
        await _store(connection, subid, identity, history)
    if end is not None and known is not None:
        telemetry.log(
            telemetry.LOG,
            f"the publisher continues on timeline {identity.timeline}; timeline {known.timeline} ended at {end}",
            event="publisher.timeline",
        )
    return claimed


def _known_history(stored: Subscription, identity: SystemIdentity, history: TimelineHistory) -> TimelineHistory | None:
    """Return the history that the positions belong to. None: the publisher is not known yet.

    If only the number of the timeline is stored, the publisher is trusted about its ancestors.
    """
    if stored.timeline is None or stored.timeline_system != str(identity.systemid):
        return None
    if stored.timeline_history is not None:
        return TimelineHistory.parse(stored.timeline, stored.timeline_history)
    return history.until(stored.timeline) or TimelineHistory(stored.timeline)


async def _has_streamed_beyond(publisher: Publisher, stored: Subscription, fork: Lsn | None) -> bool:
    """Return True if the publisher changed its timeline at `fork` while the subscription streamed from it."""
    if fork is None or stored.timeline_history is not None or stored.system_id is None or stored.slot_name is None:
        return False
    slot = await publisher.slot(stored.slot_name)
    return slot is not None and slot.confirmed_flush is not None and slot.confirmed_flush > fork


async def _accept_loss(
    catalog: CatalogConnection,
    stored: Subscription,
    identity: SystemIdentity,
    history: TimelineHistory,
    known: TimelineHistory,
    reached: Lsn,
    error: PublisherReplaced,
) -> None:
    """Move all positions back to the end of the shared history, if the user can continue from there.

    Raises:
        PublisherReplaced: there is no shared history, or lost transactions are prepared.
    """
    subid, fork = stored.oid, history.fork(known)
    if not fork or identity.in_recovery:
        raise error
    async with catalog.use() as connection, connection.transaction():
        if prepared := await load_prepared_after(connection, subid, fork):
            statements = " ".join(f"ROLLBACK PREPARED {sql_literal(gid)};" for gid in prepared)
            remedy = Remedy(
                "end the transactions that are prepared on the target and that the publisher has lost, on the target",
                statements,
                then=Remedy(command=_continue(stored)),
            )
            error.amend(hint=remedy)
            raise error
        await progress_records.move_back(connection, subid, fork)
        await progress_records.save_confirmed(connection, subid, None)
        await _store(connection, subid, identity, history)
    telemetry.log(
        telemetry.WARNING,
        f"the publisher continues on timeline {identity.timeline}; timeline {known.timeline} ended at {fork}",
        detail=f"The target has changes of timeline {known.timeline} between {fork} and {reached} that the publisher"
        " has lost.",
        hint=Remedy("list the rows that differ", f"subscriber verify {shell_word(stored.name)}"),
        event="publisher.timeline",
    )


async def _store(
    connection: asyncpg.Connection, subid: int, identity: SystemIdentity, history: TimelineHistory
) -> None:
    known = None if identity.in_recovery else str(history)
    await set_publisher(connection, subid, str(identity.systemid), identity.timeline, known)


def _continue(subscription: Subscription) -> str:
    name, slot = sql_identifier(subscription.name), sql_literal(subscription.slot_name or subscription.name)
    return f"ALTER SUBSCRIPTION {name} SET (slot_name = {slot});"


def _remedy(subscription: Subscription) -> Remedy:
    keep = Remedy(
        "keep the rows of lost transactions on the target, and continue with the publisher's changes",
        _continue(subscription),
        then=Remedy("list the rows that differ", f"subscriber verify {shell_word(subscription.name)}"),
    )
    return _COPY_AGAIN.with_alternative(keep)
