"""The lag of a subscription by stage: where the WAL is that is not durable on the target yet. No I/O here.

    end of WAL ─ decoding ─ sent ─ network ─ received ─ applying ─ applied ─ flushing ─ flushed ─ confirming ─ confirmed

The publisher knows all these positions: its walsender reports the last status update of the worker. The worker's own
report of the received position may be newer. The stages add up to the lag in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from subscriber.lsn import Lsn

STAGES = ("decoding", "network", "applying", "flushing", "confirming")


@dataclass(frozen=True, slots=True)
class WalsenderPositions:
    """Positions of the publisher's walsender. A position is None if it is not known."""

    sent: Lsn | None = None
    received: Lsn | None = None  # write_lsn
    flushed: Lsn | None = None
    applied: Lsn | None = None  # replay_lsn


def lag_by_stage(
    position: Lsn | None, confirmed: Lsn | None, walsender: WalsenderPositions, received: Lsn | None
) -> Mapping[str, int]:
    """Return the bytes of WAL in each stage, in the order of STAGES. Empty: no walsender serves the subscription.

    Args:
        position: the end of the publisher's WAL.
        confirmed: the slot's confirmed_flush_lsn.
        walsender: the positions that the publisher reports.
        received: the position that the worker reports.
    """
    if position is None or confirmed is None or walsender.sent is None:
        return {}
    # The positions were read one after the other. A later stage cannot be ahead of an earlier one.
    behind = confirmed
    limits = [behind]
    for reached in (walsender.flushed, walsender.applied, _latest(walsender.received, received), walsender.sent):
        behind = max(behind, min(reached or behind, position))
        limits.append(behind)
    limits.append(max(behind, position))
    sizes = [ahead - reached for reached, ahead in pairwise(limits)]
    return dict(zip(STAGES, reversed(sizes), strict=True))


def _latest(*positions: Lsn | None) -> Lsn | None:
    return max((position for position in positions if position is not None), default=None)
