"""The reported flush position never exceeds the position that the target has recorded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from subscriber.lsn import Lsn
from subscriber.worker.apply.confirmed_position import ConfirmedPositionGuard


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
        found = ConfirmedPositionGuard(records.save, Lsn(recorded), **interval)
        tasks.start_soon(found.write_records, records.on_moved)
        yield found
        tasks.cancel_scope.cancel()


async def test_what_the_progress_row_says_needs_no_record() -> None:
    records = Records()
    async with running(records, 100) as found:
        assert found.clamp(Lsn(100), recorded=Lsn(0), between=True) == 100
        assert found.clamp(Lsn(150), recorded=Lsn(150), between=True) == 150
        await anyio.wait_all_tasks_blocked()
    assert records.saved == []


async def test_a_position_without_a_transaction_waits_for_its_record() -> None:
    records = Records()
    records.open = anyio.Event()  # the target does not answer
    async with running(records, 100) as found:
        assert found.clamp(Lsn(200), recorded=Lsn(100), between=True) == 100
        await anyio.wait_all_tasks_blocked()
        assert found.clamp(Lsn(200), recorded=Lsn(100), between=True) == 100
        records.open.set()
        await anyio.wait_all_tasks_blocked()
        assert (records.saved, records.moved) == ([200], 1)
        assert found.clamp(Lsn(200), recorded=Lsn(100), between=True) == 200
        assert found.clamp(Lsn(180), recorded=Lsn(100), between=True) == 180


async def test_in_a_transaction_its_end_is_waited_for() -> None:
    records = Records()
    async with running(records, 100) as found:
        assert found.clamp(Lsn(200), recorded=Lsn(100), between=False) == 100
        await anyio.wait_all_tasks_blocked()
        assert records.saved == []
        assert found.clamp(Lsn(300), recorded=Lsn(300), between=True) == 300


async def test_records_that_come_closely_share_a_write() -> None:
    records = Records()
    async with running(records, 0, interval=0.05) as found:
        for position in range(1, 20):
            found.clamp(Lsn(position), recorded=Lsn(0), between=True)
            await anyio.sleep(0.002)
        with anyio.fail_after(5):
            while found.clamp(Lsn(19), recorded=Lsn(0), between=True) < 19:
                await anyio.sleep(0.005)
    assert len(records.saved) < 10
    assert records.saved == sorted(records.saved)
