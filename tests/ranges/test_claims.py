"""An apply worker that starts loads the ranges of copies that run."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from time import monotonic

import anyio
import asyncpg
import pytest

from subscriber.settings import Settings
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriber
from tests.ranges.copies import prepare, same

CLAIM = "SELECT subscriber.claim_progress(subid, relid) FROM subscriber.progress_record WHERE relid = '{}'::regclass"
# The COMMIT of a range waits for the lock.
SLOW_COMMIT = """
CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM pg_advisory_xact_lock_shared(7); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER wait AFTER INSERT ON {0} DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION wait();
ALTER TABLE {0} ENABLE ALWAYS TRIGGER wait;
"""
SESSIONS = "FROM pg_stat_activity a WHERE datname = current_database()"
WAITS = """
SELECT count(*) > 0 FROM pg_stat_activity a JOIN pg_locks l USING (pid) WHERE datname = current_database()
   AND NOT granted
"""
TABLES = "tuvw"


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """A place for each table."""
    return replace(settings, max_sync_workers=len(TABLES))


async def test_no_copy_begins_while_an_apply_worker_loads_the_ranges(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    """The apply worker would not know a range of it, and skip changes that the range does not contain."""
    await prepare(source_db, target_db, *TABLES, rows=1200)
    oids = {await target_db.value(f"SELECT '{name}'::regclass::oid::int"): name for name in TABLES}
    first, *others = (oids[oid] for oid in set(oids))  # the order in which the apply worker claims the copies
    await target_db.execute(SLOW_COMMIT.format(first))
    async with AsyncExitStack() as stack:
        locker, *claimers = [await stack.enter_async_context(target_db.connection()) for _ in TABLES]
        await subscriber.create(source_db, "p", "s", copy_engine="ranges")
        for name in TABLES:
            await target_db.wait_for(
                f"SELECT count(*) > 0 FROM subscriber.copied_range WHERE relid = '{name}'::regclass"
            )
        for name, claimer in zip(others, claimers, strict=True):
            await hold(claimer, name)
        # A new copy of the first table waits before it claims its record. The apply worker starts again.
        await locker.execute("BEGIN")
        await locker.execute(f"LOCK TABLE {first} IN ACCESS EXCLUSIVE MODE")
        former = await target_db.value(f"SELECT pid {SESSIONS} AND application_name = 'subscriber: s {first}'")
        await target_db.execute(f"SELECT pg_terminate_backend({former}, 10000)")
        await target_db.wait_for(f"{WAITS} AND relation = '{first}'::regclass AND pid <> {former}")
        await target_db.execute(f"SELECT pg_terminate_backend({(await subscriber.worker())['pid']}, 10000)")
        await target_db.wait_for(f"{WAITS} AND query ~ 'claim_progress'")
        # The copy and the apply worker's claims have turns. The COMMIT of a range waits.
        await locker.execute("SELECT pg_advisory_lock(7)")
        await locker.execute("COMMIT")
        for claimer in claimers[:-1]:
            await anyio.sleep(0.5)
            await claimer.execute("COMMIT")
        until = monotonic() + 2
        while not await target_db.value(f"{WAITS} AND locktype = 'advisory'") and monotonic() < until:
            await anyio.sleep(0.05)
        await source_db.execute(f"UPDATE {first} SET n = n + 1")
        await claimers[-1].execute("COMMIT")
        await anyio.sleep(1)
        await locker.execute("SELECT pg_advisory_unlock(7)")
    await subscriber.wait_for_ready(source_db)
    await same(source_db, target_db, *TABLES)


async def hold(claimer: asyncpg.Connection, name: str) -> None:
    """Begin a transaction that has claimed the copy of a table. A range that commits at this time comes first."""
    while True:
        await claimer.execute("BEGIN")
        try:
            await claimer.execute(CLAIM.format(name))
        except asyncpg.SerializationError:
            await claimer.execute("ROLLBACK")
        else:
            return
