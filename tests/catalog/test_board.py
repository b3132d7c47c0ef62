"""The workers' reports reach the catalog, and disappear with the workers."""

from __future__ import annotations

from collections.abc import Callable

import asyncpg
import pytest

from subscriber.catalog.connection import CatalogConnection
from subscriber.catalog.store.workers import WorkerState, WorkerStatus, report_worker
from subscriber.worker import status as status_module
from subscriber.worker.status import Board

ROWS = "SELECT relid::int, state FROM subscriber.worker ORDER BY 1"
Meanwhile = list[Callable[[], object]]


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Meanwhile:
    """Call a function once while a row is being written."""
    happens: Meanwhile = []

    async def write(connection: asyncpg.Connection, status: WorkerStatus) -> None:
        await report_worker(connection, status)
        if happens:
            happens.pop()()

    monkeypatch.setattr(status_module, "report_worker", write)
    return happens


async def test_the_row_of_a_worker_that_ends_while_it_is_written(
    dsn: str, database: asyncpg.Connection, subid: int, meanwhile: Meanwhile
) -> None:
    async with CatalogConnection.open(dsn, "test") as catalog:
        board = Board(catalog)
        report = board.add(subid, 7, "table synchronization")
        meanwhile.append(lambda: board.remove(report))
        await board.write()
        await board.write()
    assert await database.fetch(ROWS) == []


async def test_the_next_worker_in_the_same_place(
    dsn: str, database: asyncpg.Connection, subid: int, meanwhile: Meanwhile
) -> None:
    """It starts while rows are being written; nothing that the earlier one has counted is lost."""
    async with CatalogConnection.open(dsn, "test") as catalog:
        board = Board(catalog)
        leader = board.add(subid, 0, "apply")
        earlier = board.add(subid, 7, "table synchronization")
        await board.write()
        earlier.counts["sync_error_count"] += 1
        leader.enter(WorkerState.STREAMING)

        def restart() -> None:
            board.remove(earlier)
            board.add(subid, 7, "table synchronization").enter(WorkerState.COPYING)

        meanwhile.append(restart)
        await board.write()
        await board.write()
    assert list(map(tuple, await database.fetch(ROWS))) == [(0, "streaming"), (7, "copying")]
    assert await database.fetchval("SELECT sync_error_count FROM subscriber.pg_stat_subscription_stats") == 1


async def test_an_error_is_shown_while_the_next_worker_starts(
    dsn: str, database: asyncpg.Connection, subid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row is never away."""
    removed = []

    async def remove_worker(_connection: asyncpg.Connection, _subid: int, relid: int) -> None:
        removed.append(relid)

    monkeypatch.setattr(status_module, "remove_worker", remove_worker)
    async with CatalogConnection.open(dsn, "test") as catalog:
        board = Board(catalog)
        board.remove(board.add(subid, 7, "table synchronization"))
        board.add(subid, 7, "table synchronization").enter(WorkerState.COPYING)
        await board.write()
    assert removed == []
    assert list(map(tuple, await database.fetch(ROWS))) == [(7, "copying")]
