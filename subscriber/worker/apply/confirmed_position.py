"""ConfirmedPositionGuard: holds back the confirmed flush position until the target has durably recorded it.

Purpose. A target may go back in time: it is restored from a backup, or an incomplete standby is promoted. Its progress
record goes back with its tables, but the slot does not. The publisher has discarded the WAL in between, so the changes
are lost. PostgreSQL's own worker requests its old position, receives the stream from the slot's later position, and
reports no error. This module makes the loss visible.

Invariants.

- The reported flush position never exceeds the target's records. A record is on disk, and on synchronous standbys,
  before its position is reported.
- There are two records. The progress record has the position of applied transactions. The confirmed position covers a
  stream that advances without changes of the subscription.
- Only the flush position is held back, because only this position moves the slot.

Failure cases.

- Target gone back: the slot is confirmed beyond both records. The next worker stops with TargetBehind.
- Worker killed before the record is written: the position was not reported, so the slot is not beyond the records.
- Worker killed after the record is written, before the position is reported: the slot is behind the record, which is
  always allowed.
- Target crashed: the record was committed synchronously. The progress record counts only after a flush.
- A statement changes the slot or the connection: it deletes the confirmed position. The next start accepts the position
  of the new slot once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from subscriber.apply.progress import ProgressClaim
from subscriber.catalog.connection import CatalogConnection
from subscriber.catalog.store import progress_records
from subscriber.failpoints import Point, reached
from subscriber.lsn import Lsn
from subscriber.publisher.connection import SlotInfo
from subscriber.publisher.replication_stream import target_behind
from subscriber.settings import DEFAULTS


class ConfirmedPositionGuard:
    """Limits the flush position that one apply worker reports.

    Attributes:
        resumed_at: the position that the target had recorded when the worker started. No earlier worker has reported a
            higher one. So the stream begins at this position or before it, also if the walsender of the earlier worker
            processes a report after the slot was read.
    """

    def __init__(
        self, save: Callable[[Lsn], Awaitable[None]], recorded: Lsn, interval: float = DEFAULTS.confirm_interval
    ) -> None:
        """Create the guard.

        Args:
            save: records a position. The record is durable when it returns.
            recorded: a position that the target has recorded already.
            interval: seconds between two records, at least.
        """
        self.resumed_at = recorded
        self._interval = interval
        self._save = save
        self._limit = self._wanted = recorded
        self._wake = anyio.Event()

    def clamp(self, flush: Lsn, *, recorded: Lsn, between: bool) -> Lsn:
        """Return the part of `flush` that may be reported now. Requests a record for the rest.

        Args:
            flush: the position to report.
            recorded: the position of the progress record on the target's disk.
            between: the stream is between two transactions. Otherwise no record is requested, because the commit of the
                open transaction moves the progress record.
        """
        self._limit = max(self._limit, recorded)
        if flush > self._limit and between:
            self._wanted = flush
            self._wake.set()
        return min(flush, self._limit)

    async def write_records(self, moved: Callable[[], None]) -> None:
        """Write requested records until canceled, and call `moved` after each."""
        while True:
            await self._wake.wait()
            self._wake = anyio.Event()
            if self._wanted > self._limit:
                wanted = self._wanted
                await self._save(wanted)
                await reached(Point.RECORDED)
                self._limit = max(self._limit, wanted)
                moved()
                await anyio.sleep(self._interval)


async def resume_confirming(
    catalog: CatalogConnection, subid: int, slot: SlotInfo | None, claimed: ProgressClaim, interval: float
) -> ConfirmedPositionGuard:
    """Return the guard for a worker that starts, after comparing the slot with the target's records.

    Args:
        catalog: stores the records.
        subid: OID of the subscription.
        slot: the slot on the publisher. None: it does not exist.
        claimed: the progress record that the worker has claimed.
        interval: seconds between two records, at least.

    Raises:
        TargetBehind: the slot is confirmed beyond the records of this target.
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
