"""The sessions of a copy by ranges: their number, their rate and their hours."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

import asyncpg

from subscriber.catalog import worker_sessions
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Program, Subscriber, Subscriptions
from tests.ranges.copies import (
    closing_program,
    prepare,
    prepare_table,
    same,
    writing,
)


async def test_several_ranges_of_a_table_at_a_time(
    source_db: Database, target_db: Database, processes: Path, subscriptions: Subscriptions
) -> None:
    """Places for synchronization workers that no table needs copy other ranges. Another table gets one back."""
    settings = ("range_rows=20", "range_duration=0.02s", "retry_interval=0.2s", "max_sync_workers=3")
    options = [option for setting in settings for option in ("--setting", setting)]
    program = Program(target_db.dsn(), processes / "run.log", options=options)
    await prepare(source_db, target_db, "t", rows=1500)
    await subscriptions.create(source_db, "p", "s", copy_engine="ranges")
    sessions = "SELECT count(DISTINCT relid) FROM subscriber.living_sessions({}) WHERE relid > 12288"
    sessions = sessions.format(await target_db.value("SELECT subid FROM subscriber.subscription"))
    origins = "SELECT count(*) FROM pg_replication_origin WHERE roname LIKE 'pg\\_%\\_%'"
    earlier = await target_db.value(origins)
    with closing_program(program):
        async with writing(source_db, "t"):
            await program.start("launcher started")
            await target_db.wait_for(sessions, 3)
            program.kill()
            copied = await target_db.value("SELECT count(*) FROM subscriber.copied_range")
            await prepare_table(source_db, target_db, "u")
            await subscriptions.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
            await program.start("launcher started")
            await target_db.wait_for(
                "SELECT srsubstate = 'r' FROM subscriber.subscription_rel WHERE srrelid = 'u'::regclass"
            )
            assert await target_db.value("SELECT count(*) FROM subscriber.copied_range") >= copied
            await subscriptions.wait_for_ready(source_db)
        await source_db.wait_for_catchup("s")
        await same(source_db, target_db, "t", "u")
        assert await target_db.value(origins) == earlier
    assert "ERROR" not in program.text


async def test_a_claim_overtakes_a_range(source_db: Database, target_db: Database, subscriber: Subscriber) -> None:
    """An apply worker that starts claims the record of the copy, and the next range may be waiting to write to it."""
    await prepare(source_db, target_db, "t", rows=2000)
    record = "FROM subscriber.progress_record WHERE relid = 't'::regclass"
    waits = "SELECT count(*) > 0 FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE NOT l.granted"
    async with target_db.connection() as other:
        await subscriber.create(source_db, "p", "s", copy_engine="ranges")
        await target_db.wait_for(f"SELECT count(*) {record}", 1)
        is_claimed = False
        while not is_claimed:  # a range that commits at this time comes first
            await other.execute("BEGIN")
            try:
                await other.execute(f"SELECT subscriber.claim_progress(subid, relid) {record}")
                is_claimed = True
            except asyncpg.SerializationError:
                await other.execute("ROLLBACK")
        await target_db.wait_for(f"{waits} AND query ~ 'record_range'")
        await other.execute("COMMIT")
    await subscriber.wait_for_ready(source_db)
    await same(source_db, target_db, "t")
    assert not subscriber.log.has("ERROR")


async def test_a_session_that_cannot_be_opened(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    """Another session uses its origin. The copy continues with its own session."""
    await prepare(source_db, target_db, "t", rows=300)
    await subscriber.create(source_db, "p", "s", copy_engine="ranges", enabled=False)
    subid = await target_db.value("SELECT subid FROM subscriber.subscription")
    origin = f"pg_{subid}_{worker_sessions.FIRST_RANGE_SESSION}"
    async with target_db.connection() as holder:
        await holder.execute("SELECT subscriber.make_origin($1)", origin)
        await holder.execute("SELECT pg_replication_origin_session_setup($1)", origin)
        await subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
        await subscriber.log.wait_for("is copied in fewer sessions than max_sync_workers allows")
        await subscriber.wait_for_ready(source_db)
    await same(source_db, target_db, "t")
    assert not subscriber.log.has("ERROR")


async def test_a_copy_pauses_and_has_a_rate(
    source_db: Database, target_db: Database, processes: Path, subscriptions: Subscriptions
) -> None:
    await prepare(source_db, target_db, "t", rows=400)
    hour = int(await target_db.value("SELECT extract(hour FROM localtime)::int"))
    closed, opened = (f"range_window={(hour + shift) % 24}:00-{(hour + shift + 2) % 24}:00" for shift in (12, 23))
    settings = {"range_rows": "20", "copy_rate": "1MB", "retry_interval": "0.2s"}
    options = [part for name, value in settings.items() for part in ("--setting", f"{name}={value}")]
    program = Program(target_db.dsn(), processes / "run.log", options=[*options, "--setting", closed])
    await subscriptions.create(source_db, "p", "s", copy_engine="ranges")
    with closing_program(program):
        await program.start("pauses outside of range_window")
        await target_db.wait_for("SELECT count(*) > 0 FROM subscriber.worker WHERE state LIKE 'paused outside%'")
        await source_db.execute("UPDATE t SET n = 1 WHERE id < 100")
        assert await target_db.value("SELECT count(*) FROM t") == 0
        program.kill()
    program = Program(target_db.dsn(), processes / "again.log", options=[*options, "--setting", opened])
    with closing_program(program):
        await program.start("launcher started")
        await target_db.wait_for("SELECT count(*) > 1 FROM subscriber.copied_range")
        started = monotonic()
        await subscriptions.wait_for_ready(source_db)
        # 400 rows of 3.2 kB, without those of the first ranges.
        assert monotonic() - started > 0.6
        await source_db.wait_for_catchup("s")
        await same(source_db, target_db, "t")
