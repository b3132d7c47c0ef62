"""Timelines of a publisher: whether its history has all changes that were applied.

Purpose. A promoted standby continues on a new timeline. It may lack the end of the former timeline, whose changes the
subscription may have applied. Positions do not show the loss: the new primary writes other WAL at the same positions.
PostgreSQL's own worker requests its old position, and receives nothing of the new WAL before that position.

Source: findNewestTimeLine() in timeline.c.
"""

from __future__ import annotations

from subscriber.errors import ConnectionLost, PublisherReplaced
from subscriber.lsn import Lsn
from subscriber.publisher.connection import Publisher, SystemIdentity
from subscriber.remedy import Remedy
from subscriber.timeline_history import TimelineHistory


async def read_history(publisher: Publisher, identity: SystemIdentity) -> TimelineHistory:
    """Read the history of the publisher's timeline."""
    if identity.timeline == 1:
        return TimelineHistory(1)
    ends = await publisher.timeline_ends(identity.timeline)
    return TimelineHistory(identity.timeline, tuple(sorted(ends.items())))


def check_history(
    history: TimelineHistory, known: TimelineHistory | None, position: Lsn, *, in_recovery: bool, hint: str | Remedy
) -> Lsn | None:
    """Refuse a publisher whose history does not have all changes that were applied.

    Args:
        history: the publisher's history.
        known: the history that `position` belongs to. None accepts any.
        position: the highest position of changes that were applied or copied.
        in_recovery: the publisher is a standby.
        hint: advice for a publisher that lacks changes.

    Returns:
        The end of the known timeline. None: the publisher is still on it.

    Raises:
        PublisherReplaced: changes up to `position` are not part of the publisher's history.
        ConnectionLost: the publisher is a standby, which has not reached the known timeline yet.
    """
    fork = None if known is None else history.fork(known)
    if known is None or fork is None:
        return None
    if history.timeline < known.timeline:
        detail = f"It was on timeline {known.timeline}, and is on timeline {history.timeline}."
        if in_recovery:
            raise ConnectionLost("the publisher, a standby, is behind the subscription", detail=detail)
        raise PublisherReplaced(
            "the publisher is on an earlier timeline than before",
            detail=detail,
            hint="Another server has become the primary since. Correct the subscription's connection.",
        )
    if position <= fork:
        return fork
    raise PublisherReplaced(
        "the publisher has failed over to a server without all changes that were applied",
        detail=f"Changes up to {position} of timeline {known.timeline} were applied. The publisher, on timeline"
        f" {history.timeline}, has none of them after {fork}.",
        hint=hint,
    )
