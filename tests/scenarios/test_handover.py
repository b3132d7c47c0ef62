"""The moment at which the apply worker takes a table over, when the two have been apart."""

from __future__ import annotations

import pytest

from subscriber.catalog import sessions
from subscriber.worker import apply_session, failpoints
from subscriber.worker.failpoints import Point
from tests.scenarios.conftest import Pair


async def test_what_was_confirmed_while_a_table_was_not_ready_is_not_lost(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The apply worker passes over changes of a table in finishedcopy, confirms them, and starts again."""
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)")
    await pair.source.execute("INSERT INTO t VALUES (1)", "CREATE PUBLICATION p FOR TABLE t")
    failpoints.armed[Point.COPY_COMMITTED] = pair.subscriber.cancel
    try:
        await pair.subscriber.create(pair.source, "p")
        await pair.target.wait_for("SELECT srsubstate = 'f' FROM subscriber.subscription_rel")
    finally:
        failpoints.armed.clear()
    await pair.subscriber.stop()

    relid = await pair.target.value("SELECT 't'::regclass::oid")
    subid = await pair.target.value("SELECT subid FROM subscriber.subscription")
    holder = await pair.target.connect()
    monkeypatch.setattr(apply_session, "PLACE_PATIENCE", 60)  # a sync worker does not end the holder
    try:
        assert await sessions.register_own(holder, subid, relid)  # no sync worker can start
        pair.subscriber.start()
        await pair.source.execute("INSERT INTO t SELECT generate_series(2, 100)")
        await pair.source.wait_for_catchup("s")
        await pair.subscriber.stop()
    finally:
        await holder.close()
    assert await pair.target.value("SELECT remote_lsn = '0/0' FROM subscriber.progress WHERE relid = 0")
    assert await pair.target.rows("SELECT * FROM t") == [(1,)]

    def restart_apply_worker() -> None:
        assert pair.subscriber.launcher is not None
        del failpoints.armed[Point.SYNCWAIT]
        pair.subscriber.launcher.supervisor("s").restart()

    failpoints.armed[Point.SYNCWAIT] = restart_apply_worker  # its first look finds the table waiting
    pair.subscriber.start()
    await pair.caught_up()
    assert not failpoints.armed
    await pair.assert_same("SELECT id FROM t ORDER BY id")
