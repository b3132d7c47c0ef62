"""Things that keep WAL on the publisher for longer than `forgotten_after`, with their owners. No I/O here.

    a disabled subscription     its slot keeps all WAL since it was disabled
    an open transaction         a slot keeps WAL from the start of the oldest transaction with changes, in any database
    a prepared transaction      the same; it outlives its session and the server

A role without pg_read_all_stats does not see the transactions of others (publisher/wal_holders.py). If the slot keeps
much WAL before its confirmed position nevertheless, there is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from subscriber import formatting
from subscriber.display import sql_identifier
from subscriber.remedy import Remedy
from subscriber.status.snapshot import PublisherAnswer
from subscriber.subscription import Subscription

MOST_SHOWN = 3  # transactions, the oldest first
UNSEEN_BYTES = 1 << 30  # of WAL before the confirmed position, which show that there is a transaction


def find_problems(
    subscription: Subscription, publisher: PublisherAnswer, now: datetime, after: float
) -> Iterator[tuple[str, Remedy]]:
    """Yield the message and the remedy of each problem of a subscription.

    Args:
        subscription: the subscription.
        publisher: the publisher's answer.
        now: the target's clock.
        after: seconds until something counts as forgotten.
    """
    kept = f"{formatting.in_bytes(publisher.retained_bytes or 0)} of WAL on the publisher"
    if subscription.disabled_at is not None and publisher.slot_exists and publisher.retained_bytes is not None:
        age = (now - subscription.disabled_at).total_seconds()
        name = sql_identifier(subscription.name)
        if age > after:
            yield (
                f'disabled for {formatting.in_seconds(round(age))}: its slot keeps {kept}; role "{subscription.owner}"'
                " owns the subscription",
                Remedy(
                    "enable it",
                    f"ALTER SUBSCRIPTION {name} ENABLE;",
                    alternative=Remedy("remove it with its slot", f"DROP SUBSCRIPTION {name};"),
                ),
            )
    if publisher.slot_exists is not True or publisher.now is None:
        return
    holders = publisher.wal_holders
    old = [holder for holder in holders.transactions if (publisher.now - holder.since).total_seconds() > after]
    for transaction in old[:MOST_SHOWN]:
        since = formatting.in_seconds(round((publisher.now - transaction.since).total_seconds()))
        yield f"{transaction.label} has not ended for {since}: the slot keeps {kept}", transaction.remedy
    held = publisher.held_bytes
    if not holders.transactions and not holders.sees_all and held is not None and held > UNSEEN_BYTES:
        yield (
            f"the slot keeps {formatting.in_bytes(held)} of WAL for a transaction that this role does not see",
            Remedy(
                "let the role of the subscription's connection read pg_stat_activity: on the publisher,"
                " GRANT pg_read_all_stats."
            ),
        )
