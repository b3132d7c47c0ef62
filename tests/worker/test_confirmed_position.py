"""The reported flush position never exceeds the position that the target has recorded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from subscriber.apply.progress import ProgressClaim
from subscriber.catalog.connection import CatalogConnection
from subscriber.lsn import Lsn
from subscriber.publisher.connection import Publisher
from subscriber.worker.apply.confirmed_position import ConfirmedPositionGuard, resume_confirming
from tests.plugins.fix_cluster import Database


class Records:
    """The target's durable records."""

    def __init__(self) -> None:
        self.saved: list[Lsn] = []
        self.moved = 0
        self.open = anyio.Event()
        self.open.set()

    async def save(self, position: Lsn) -> None:
        await self.open.wait()
        self.saved.append(position)

    def on_moved(self) -> None:
        self.moved += 1


@asynccontextmanager
async def running(records: Records, recorded: int, **interval: float) -> AsyncIterator[ConfirmedPositionGuard]:
    async with anyio.create_task_group() as tasks:
        guard = ConfirmedPositionGuard(records.save, Lsn(recorded), **interval)
        tasks.start_soon(guard.write_records, records.on_moved)
        yield guard
        tasks.cancel_scope.cancel()


async def test_a_position_of_the_progress_row_needs_no_record() -> None:
    records = Records()
    async with running(records, 100) as guard:
        assert guard.clamp(Lsn(100), recorded=Lsn(0), between=True) == 100
        assert guard.clamp(Lsn(150), recorded=Lsn(150), between=True) == 150
        await anyio.wait_all_tasks_blocked()
    assert records.saved == []


async def test_a_position_without_a_transaction_waits_for_its_record() -> None:
    records = Records()
    records.open = anyio.Event()  # the target does not answer
    async with running(records, 100) as guard:
        assert guard.clamp(Lsn(200), recorded=Lsn(100), between=True) == 100
        await anyio.wait_all_tasks_blocked()
        assert guard.clamp(Lsn(200), recorded=Lsn(100), between=True) == 100
        records.open.set()
        await anyio.wait_all_tasks_blocked()
        assert (records.saved, records.moved) == ([200], 1)
        assert guard.clamp(Lsn(200), recorded=Lsn(100), between=True) == 200
        assert guard.clamp(Lsn(180), recorded=Lsn(100), between=True) == 180


async def test_no_position_is_recorded_inside_a_transaction() -> None:
    records = Records()
    async with running(records, 100) as guard:
        assert guard.clamp(Lsn(200), recorded=Lsn(100), between=False) == 100
        await anyio.wait_all_tasks_blocked()
        assert records.saved == []
        assert guard.clamp(Lsn(300), recorded=Lsn(300), between=True) == 300


async def test_records_that_come_closely_share_a_write() -> None:
    records = Records()
    async with running(records, 0, interval=0.05) as guard:
        for position in range(1, 20):
            guard.clamp(Lsn(position), recorded=Lsn(0), between=True)
            await anyio.sleep(0.002)
        with anyio.fail_after(5):
            while guard.clamp(Lsn(19), recorded=Lsn(0), between=True) < 19:
                await anyio.sleep(0.005)
    assert len(records.saved) < 10
    assert records.saved == sorted(records.saved)


async def test_a_worker_resumes_at_the_highest_position_that_an_earlier_one_may_have_reported(
    source_db: Database, target_db: Database
) -> None:
    """The walsender of the earlier worker may process its last report after the slot was read."""
    publisher = await Publisher.connect(source_db.dsn(), application_name="test")
    try:
        await publisher.create_slot("s", snapshot="nothing")
        slot = await publisher.slot("s")
        assert slot is not None
        assert slot.confirmed_flush is not None
        reported, applied = Lsn(slot.confirmed_flush + 100), Lsn(slot.confirmed_flush - 100)
        claimed = ProgressClaim(1, 0, 0, b"", applied, reported)
        async with CatalogConnection.open(target_db.dsn(), "test") as catalog:
            assert (await resume_confirming(catalog, 1, slot, claimed, 1.0)).resumed_at == reported
    finally:
        await publisher.drop_slot("s", missing_ok=True)
        await publisher.close()
