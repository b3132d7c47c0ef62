"""Tables that are dropped, rewritten, altered or locked during a comparison: the others are compared."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import anyio
import pytest

from subscriber.catalog.connection import CatalogConnection
from subscriber.cli.commands.verify import describe_table
from subscriber.comparison import verify
from subscriber.comparison.comparison import ATTEMPTS, compare_changed_again, compare_tables, load_compared
from subscriber.comparison.consistent_snapshot import CommonSnapshot, common_snapshot, paused_worker
from subscriber.comparison.queries import QueryPool
from subscriber.connection.session import Session
from subscriber.lsn import Lsn
from subscriber.repair.audit import RepairAudit
from subscriber.repair.batch import RepairSessions, own_applier
from subscriber.repair.tables import RepairRun, own_progress
from subscriber.subscription import Subscription
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Subscriber
from tests.repair.test_repair import damage

# The change of each table after the first snapshots: on which side, and the result.
CHANGES = {
    "emptied": ("source", "TRUNCATE emptied", "same       public.emptied: 0 rows"),
    "widened": ("source", "ALTER TABLE widened ALTER id TYPE bigint", "same       public.widened: 100 rows"),
    "longer": ("target", "ALTER TABLE longer ALTER id TYPE bigint", "same       public.longer: 100 rows"),
    "vacuumed": ("source", "VACUUM FULL vacuumed", "same       public.vacuumed: 100 rows"),
    "added": (
        "source",
        "ALTER TABLE added ADD more float8 DEFAULT random()",
        r".*added: not compared, .*missing.*more",
    ),
    "dropped": ("target", "DROP TABLE dropped", ".*dropped: not compared, .*does not exist"),
    "renamed": ("source", "ALTER TABLE renamed RENAME TO other", ".*renamed: not compared, it is published no longer"),
    "narrow": ("target", "ALTER TABLE narrow DROP v", ".*narrow: not compared, .*missing.*v"),
    "quiet": ("target", "SELECT 1", "same       public.quiet: 100 rows"),
    "always": ("source", "VACUUM FULL always", ".*always: not compared, .*rewritten .*in the last of 5 attempts"),
}


async def prepare(source: Database, target: Database, subscriber: Subscriber, *tables: str) -> None:
    for table in tables:
        for database in (source, target):
            await database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, v text)")
        await source.execute(f"INSERT INTO {table} SELECT i, 'v' FROM generate_series(1, 100) i")
    await source.execute(f"CREATE PUBLICATION p FOR TABLE {', '.join(tables)}")
    await subscriber.create(source, "p", "s", copy_engine="snapshot")
    await subscriber.wait_for_ready(source)


async def test_the_other_tables_are_compared(source_db: Database, target_db: Database, subscriber: Subscriber) -> None:
    """A rewrite removes rows from snapshots that are older, so its table must not count as different either."""
    await prepare(source_db, target_db, subscriber, *CHANGES)
    sides = {"source": source_db, "target": target_db}
    left = [(side, statement) for side, statement, _ in CHANGES.values()]

    @asynccontextmanager
    async def take(catalog: CatalogConnection, target: str, one: Subscription) -> AsyncIterator[CommonSnapshot]:
        async with common_snapshot(catalog, target, one) as snapshot:
            for side, statement in left:
                await sides[side].execute(statement)
            del left[:-1]
            yield snapshot

    async with CatalogConnection.open(target_db.dsn(), "test") as catalog:
        once = partial(
            compare_tables,
            catalog,
            target_db.dsn(),
            await load_compared(catalog, "s"),
            QueryPool(4).run,
            1 << 20,
            take_snapshot=take,
        )
        _, tables, _ = await once()
        assert {table.name for table in tables if table.is_changed} == {f"public.{name}" for name in CHANGES} - {
            "public.quiet"
        }
        by_name = {table.name: table for table in await compare_changed_again(tables, once)}
    for name, (_, _, line) in CHANGES.items():
        assert re.search(line, describe_table(by_name[f"public.{name}"])), describe_table(by_name[f"public.{name}"])
    again = [parts.message for parts in subscriber.log.parts() if 'always" is compared' in parts.message]
    assert len(again) == ATTEMPTS - 1
    assert 'table "public.always" is compared again: on the publisher: table "public.always" was rewritten' in again[0]


async def test_rows_of_a_rewritten_table_are_not_deleted(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    """The publisher's table is rewritten between the snapshot of its batch and the read, and another one is dropped."""
    await prepare(source_db, target_db, subscriber, "first", "other", "last")
    differ = "UPDATE {} SET v = 'other' WHERE id < 10"
    await damage(target_db, *(differ.format(table) for table in ("first", "other", "last")))
    left = [
        ("first", source_db, "ALTER TABLE first ALTER id TYPE bigint"),
        ("other", target_db, "DROP TABLE other"),
    ]

    @asynccontextmanager
    async def pause(catalog: CatalogConnection, one: Subscription, session: Session) -> AsyncIterator[tuple[Lsn, str]]:
        async with paused_worker(catalog, one, session) as paused:
            for _, database, statement in left:
                await database.execute(statement)
            left.clear()
            yield paused

    async with CatalogConnection.open(target_db.dsn(), "test") as catalog:
        subscription = await load_compared(catalog, "s")
        open_applier = own_applier(catalog, target_db.dsn(), subscription)
        audit = RepairAudit("repair", "test", False)
        sessions = RepairSessions(
            catalog, target_db.dsn(), target_db.dsn(), subscription, audit, open_applier, pause=pause
        )
        async with own_progress(catalog, subscription):
            result = await RepairRun(sessions, QueryPool(4)).run()
    by_name = {table.name: table for table in result.tables}
    assert (by_name["public.first"].updated, by_name["public.first"].deleted, by_name["public.first"].note) == (
        9,
        0,
        None,
    )
    assert (by_name["public.last"].updated, by_name["public.last"].note) == (9, None)
    assert "does not exist" in (by_name["public.other"].note or "")
    assert not result.is_complete
    assert subscriber.log.has('table "public.first" is compared again')


@pytest.mark.soak
async def test_a_lock_is_waited_for_with_a_limit(
    source_db: Database, target_db: Database, subscriber: Subscriber
) -> None:
    await prepare(source_db, target_db, subscriber, "t", "other")

    async def lock(seconds: float, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        async with target_db.connection() as connection, connection.transaction():
            await connection.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
            task_status.started()
            await anyio.sleep(seconds)

    async with anyio.create_task_group() as tasks:
        await tasks.start(lock, 25)
        comparison = await verify(target_db.dsn(), "s")
    assert comparison.is_same
    assert subscriber.log.has("is compared again: on the target: canceling statement due to lock timeout")
