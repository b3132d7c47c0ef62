"""The history in a table of the target: written by the minute, bounded, and read by the next process."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from subscriber.catalog.connection import CatalogConnection
from subscriber.catalog.schema import ensure_schema
from subscriber.catalog.store.history import HistoryPoint
from subscriber.console.stored_history import StoredHistory
from subscriber.settings import Settings
from subscriber.status.history import StatusHistory
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriptions

KEEP = Settings(history_retention=3600.0, history_rows=50)
COUNT = "SELECT count(*) FROM subscriber.history"


async def test_history_is_stored_in_the_target_read_again_and_bounded(
    target_db: Database, subscriptions: Subscriptions
) -> None:
    await subscriptions.create("host=127.0.0.1 port=1", "p", connect=False, slot_name="s")
    async with CatalogConnection.open(target_db.dsn(), "test") as catalog:
        async with catalog.use() as connection:
            await ensure_schema(connection)
            subid = await connection.fetchval("SELECT subid FROM subscriber.subscription")
            now = await connection.fetchval("SELECT clock_timestamp()")
        history = StatusHistory()
        stored = StoredHistory(history, KEEP)
        start = now - timedelta(minutes=90)
        for minute in range(90):
            at = start + timedelta(minutes=minute)
            point = HistoryPoint(at, 10.0, None, 5.0, minute, 1.5, 1000 + minute)
            history.restore(subid, [])
            history._records[subid].points.append(point)
            later = replace(point, at=at + timedelta(seconds=5), transactions=30.0, lag_bytes=minute + 7)
            history._records[subid].points.append(later)
            await stored.write(catalog, [subid, 4711], at + timedelta(seconds=6))
            await stored.write(catalog, [subid], at + timedelta(seconds=7))  # the next minute is not over
        assert await target_db.value(COUNT) <= 50 + 10  # rows that are added between two deletions
        again = StatusHistory()
        await StoredHistory(again, KEEP).read_once(catalog)
        points = again.points(subid)
        assert (points[-1].transactions, points[-1].changes, points[-1].lag_bytes) == (20.0, None, 96)
        assert now - timedelta(hours=1) < points[0].at < points[-1].at
        # Nothing is written unless it is asked for.
        await target_db.execute("DELETE FROM subscriber.history")
        await StoredHistory(history).write(catalog, [subid], now)
        assert await target_db.value(COUNT) == 0
