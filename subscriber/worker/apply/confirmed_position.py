"""Nothing is confirmed to the publisher that the target could not tell us of when we start again.

A target may go back in time: it is restored from a backup, or a standby is promoted that did not have everything. Its
progress row goes back with its tables, but the slot does not: what lies between has been forgotten by the publisher
and is not on the target. PostgreSQL's own worker asks for its old position, is given the later one of the slot, and
nobody is told.

So that it can be seen, the flushed position that is reported never exceeds what the target has on disk, and on its
synchronous standbys, as a record: the position of the progress record, for transactions; and where the stream moves on
with nothing in it for us, the confirmed position beside it, written first. A slot that has been confirmed beyond both
was confirmed by a target that is no more, and the worker stops. Only the flushed position is held back, since only
that moves the slot.

Kill points considered:
- before the record is written: the publisher has not been told; the slot is where the records are.
- after the record is written, before it is told: the slot is behind the record, as it may always be.
- the target crashes: the record was committed synchronously, and so was the flush that the progress record waits for.
- a statement that changes slot or connection deletes the confirmed position: what the new slot has been confirmed to
  is taken as it is, once, by the next start.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from subscriber.apply.progress import ProgressClaim
from subscriber.catalog.connection import CatalogConnection
from subscriber.catalog.store import progress_records
from subscriber.display import sql_literal
from subscriber.errors import TargetBehind
from subscriber.failpoints import Point, reach
from subscriber.lsn import Lsn
from subscriber.publisher.connection import SlotInfo
from subscriber.settings import DEFAULTS


class ConfirmedPositionGuard:
    """How far the flushed position may be reported, for one apply worker."""

    def __init__(
        self, save: Callable[[Lsn], Awaitable[None]], recorded: Lsn, interval: float = DEFAULTS.confirm_interval
    ) -> None:
        """`save` makes a record that is durable when it returns; there is one of `recorded` already.

        `interval` is the shortest time between two records, in seconds.
        """
        self._interval = interval
        self._save = save
        self._limit = self._wanted = recorded
        self._wake = anyio.Event()

    def clamp(self, flush: Lsn, *, recorded: Lsn, between: bool) -> Lsn:
        """As much of `flush` as may be reported now; for the rest a record is asked for.

        `recorded` is what the progress row says, durably. Without being `between` transactions nothing is asked for:
        the end of the one that is going on will be a record.
        """
        self._limit = max(self._limit, recorded)
        if flush > self._limit and between:
            self._wanted = flush
            self._wake.set()
        return min(flush, self._limit)

    async def write_records(self, moved: Callable[[], None]) -> None:
        """The task that writes records; `moved` is called after each."""
        while True:
            await self._wake.wait()
            self._wake = anyio.Event()
            if self._wanted > self._limit:
                wanted = self._wanted
                await self._save(wanted)
                reach(Point.RECORDED)
                self._limit = max(self._limit, wanted)
                moved()
                await anyio.sleep(self._interval)


async def resume_confirming(
    catalog: CatalogConnection, subid: int, slot: SlotInfo | None, claimed: ProgressClaim, interval: float
) -> ConfirmedPositionGuard:
    """Return the guard with which a starting worker continues.

    `slot` is None if there is none; `claimed` is its progress record. `interval`: see ConfirmedPositionGuard.

    Raises TargetBehind if the slot was confirmed further than this target has a record of.
    """

    async def save(position: Lsn) -> None:
        async with catalog.use() as connection:
            await progress_records.save_confirmed(connection, subid, position)

    confirmed = (slot.confirmed_flush if slot is not None else None) or Lsn(0)
    if claimed.confirmed is None:
        recorded = max(claimed.position, confirmed)
        await save(recorded)
        return ConfirmedPositionGuard(save, recorded, interval)
    recorded = max(claimed.position, claimed.confirmed)
    if slot is not None and confirmed > recorded:
        raise target_behind(slot.name, confirmed, recorded)
    return ConfirmedPositionGuard(save, recorded, interval)


def target_behind(slot: str, confirmed: Lsn, recorded: Lsn) -> TargetBehind:
    return TargetBehind(
        f'the target is behind replication slot "{slot}"',
        detail=f"The slot was confirmed up to {confirmed}, but the target knows of nothing after {recorded}.",
        hint="It was restored from a backup, or is a standby that was promoted before it had everything, and what was "
        "committed on the publisher in between is missing. Drop the subscription and create it again with a fresh copy "
        f"of its tables; or go on without it: ALTER SUBSCRIPTION … SET (slot_name = {sql_literal(slot)}).",
    )
