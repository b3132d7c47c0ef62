"""Every function of the store, on a migrated database."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest

from subscriber import names
from subscriber.apply.table_states import TableState
from subscriber.catalog import origins, table_names, worker_sessions
from subscriber.catalog.store import progress_records, stats
from subscriber.catalog.store.subscription_rel import (
    SubscriptionRel,
    add_relation,
    load_relation_state,
    load_relation_states,
    remove_relation,
    set_relation_state,
)
from subscriber.catalog.store.subscriptions import (
    accept_loss,
    clear_skip_lsn,
    disable_subscription,
    find_subscription,
    forget_publisher,
    load_reached,
    load_subscription,
    load_subscriptions,
    set_publisher,
    set_two_phase_state,
)
from subscriber.catalog.store.workers import WorkerStatus, load_workers, remove_worker, report_worker
from subscriber.catalog.worker_sessions import Backend
from subscriber.lsn import Lsn
from subscriber.sqlstate import SUBSCRIPTION_ALTERED
from subscriber.subscription import STORED_OPTIONS, Streaming, TwoPhaseState
from subscriber.worker.supervision.supervisor import SETTINGS
from tests.plugins.fix_cluster import Database

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


async def relid_of(database: asyncpg.Connection, table: str) -> int:
    relid: int = await database.fetchval("SELECT $1::text::regclass::oid", table)
    return relid


async def test_a_subscription_is_loaded_as_it_was_stored(database: asyncpg.Connection, subid: int) -> None:
    assert subid >= 3_500_000_000
    loaded = await load_subscription(database, subid)
    assert loaded is not None
    assert loaded.name == "s"
    assert loaded.owner == "postgres"
    assert loaded.owner_is_superuser
    assert loaded.publications == ("p", "Q")
    assert loaded.streaming is Streaming.PARALLEL
    assert loaded.two_phase is TwoPhaseState.DISABLED
    assert loaded.skip_lsn == 0
    assert await find_subscription(database, "s") == loaded
    assert await load_subscriptions(database) == [loaded]
    assert await find_subscription(database, "other") is None
    assert await load_subscription(database, 1) is None


async def test_workers_change_skip_two_phase_and_enabled_of_a_subscription(
    database: asyncpg.Connection, subid: int
) -> None:
    await database.execute("UPDATE subscriber.subscription SET subskiplsn = '0/20'")
    await clear_skip_lsn(database, subid, Lsn(0x10))
    await set_two_phase_state(database, subid, TwoPhaseState.ENABLED)
    await disable_subscription(database, subid)
    loaded = await load_subscription(database, subid)
    assert loaded is not None
    assert (loaded.skip_lsn, loaded.two_phase, loaded.enabled) == (Lsn(0x20), TwoPhaseState.ENABLED, False)
    await clear_skip_lsn(database, subid, Lsn(0x20))
    loaded = await load_subscription(database, subid)
    assert loaded is not None
    assert loaded.skip_lsn == 0


# Columns by field, but for those of options.
FIELDS = {
    "name": "subname",
    "stored_conninfo": "subconninfo",
    "server": "subserver",
    "publications": "subpublications",
    "owner": "subowner",
    "owner_is_superuser": "subowner",
}
OTHERS = {
    "subdisabledat": "clock_timestamp()",
    "subname": "'other'",
    "subowner": "(SELECT oid FROM pg_roles WHERE rolname = 'pg_monitor')",
    "subenabled": "NOT subenabled",
    "subslotname": "'other'",
    "subpublications": "ARRAY['other']",
    "subbinary": "subbinary IS NOT TRUE",
    "substream": "'f'",
    "subapplysessions": "7",
    "subtrustedowners": "ARRAY['other']",
    "subconflicthistory": "'all'",
    "subcopyengine": "'ranges'",
    "subcopyindexes": "'after'",
    "subskiplsn": "'1/1'",
    "subtwophasestate": "'e'",
    "subtimeline": "3",
    "subserver": "7",
    "subsequences": "'none'",
    "submaxretention": "1000",
    "subonerror": "'quarantine'",
    "subquarantinelimit": "7",
    "subsequencenames": "ARRAY['public', 'other']",
}


async def test_a_worker_commits_nothing_with_settings_that_were_changed(
    database: asyncpg.Connection, subid: int
) -> None:
    """A change of a column ends the worker's right to commit exactly if it restarts the worker."""
    ending = {FIELDS.get(field) or STORED_OPTIONS[field].name for field in SETTINGS}
    ending |= {"subenabled", "subacceptloss"}
    asked = "SELECT column_name, data_type FROM information_schema.columns WHERE table_name = $1 AND table_schema = $2"
    for column, data_type in await database.fetch(asked, "subscription", "subscriber"):
        if column in ("subid", "subgeneration", "kept", "subownername"):
            continue
        before = await load_subscription(database, subid)
        assert before is not None
        value = OTHERS.get(column) or ("'other'" if data_type == "text" else f"NOT {column}")
        async with database.transaction():
            await database.execute(f"UPDATE subscriber.subscription SET {column} = {value}")
            generation = await database.fetchval("SELECT subgeneration FROM subscriber.subscription")
            assert (generation > before.generation) is (column in ending), column
            check = "SELECT subscriber.check_generation($1, $2)"
            await database.execute(check, subid, generation)
            if column in ending:
                with pytest.raises(asyncpg.PostgresError, match="the subscription has been altered") as raised:
                    async with database.transaction():
                        await database.execute(check, subid, before.generation)
                assert raised.value.sqlstate == SUBSCRIPTION_ALTERED
            await database.execute(f"UPDATE subscriber.subscription SET {column} = {column}")
            assert await database.fetchval("SELECT subgeneration FROM subscriber.subscription") == generation


async def test_table_states_are_stored_and_changed(database: asyncpg.Connection, subid: int) -> None:
    await database.execute("CREATE TABLE a (); CREATE TABLE b ()")
    a, b = await relid_of(database, "a"), await relid_of(database, "b")
    assert await add_relation(database, subid, a, TableState.INIT)
    assert not await add_relation(database, subid, a, TableState.READY)
    assert await add_relation(database, subid, b, TableState.READY, Lsn(1))
    # It has been refreshed.
    assert not await set_relation_state(database, subid, a, TableState.SYNCDONE, Lsn.parse("A/B"))
    assert await set_relation_state(database, subid, a, TableState.DATASYNC, None)
    assert await set_relation_state(database, subid, a, TableState.SYNCDONE, Lsn.parse("A/B"))
    assert not await set_relation_state(database, subid, 1, TableState.SYNCDONE, None)
    assert await load_relation_states(database, subid, not_ready=True) == [
        SubscriptionRel(a, "public", "a", TableState.SYNCDONE, Lsn.parse("A/B"))
    ]
    assert await load_relation_state(database, subid, b) == SubscriptionRel(b, "public", "b", TableState.READY, Lsn(1))
    await database.execute("DROP TABLE b")
    assert [state.name for state in await load_relation_states(database, subid)] == ["a"]
    assert await database.fetchval("SELECT count(*) FROM subscriber.pg_subscription_rel") == 1
    (lost,) = await table_names.load_lost(database, subid)
    assert (lost.relid, lost.label, lost.what) == (b, "public.b", "dropped")
    assert await remove_relation(database, subid, a)
    assert not await remove_relation(database, subid, a)
    assert await load_relation_state(database, subid, a) is None


async def test_progress_is_stored_and_claimed(database: asyncpg.Connection, subid: int) -> None:
    assert await progress_records.load(database, subid) is None
    assert await progress_records.claim(database, subid, generation=0) is None
    await progress_records.save(database, subid, 0, Lsn(7))
    assert await progress_records.load(database, subid) == Lsn(7)
    await progress_records.save(database, subid, 0, Lsn.parse("AB/9"))
    first = await progress_records.claim(database, subid, generation=0)
    assert first is not None
    assert (first.position, first.confirmed) == (Lsn.parse("AB/9"), None)
    await progress_records.save_confirmed(database, subid, Lsn.parse("AB/20"))
    await progress_records.save_confirmed(database, subid, Lsn.parse("AB/10"))  # never moves back
    second = await progress_records.claim(database, subid, generation=0)
    assert second is not None
    assert (second.record, second.confirmed) == (first.record, Lsn.parse("AB/20"))
    assert second.fence != first.fence
    await progress_records.save_confirmed(database, subid, None)
    assert await database.fetchval("SELECT confirmed_lsn IS NULL FROM subscriber.progress")
    await progress_records.save(database, subid, 5, Lsn(1))
    await progress_records.remove(database, subid, 5)
    assert await progress_records.load(database, subid, 5) is None
    await accept_loss(database, subid)
    loaded = await load_subscription(database, subid)
    assert loaded is not None
    assert (loaded.timeline, loaded.timeline_history, loaded.accepts_loss) == (None, None, True)
    await set_publisher(database, subid, "77", 3, "1:0/AB 2:0/CD")
    loaded = await load_subscription(database, subid)
    assert loaded is not None
    assert (loaded.system_id, loaded.timeline, loaded.timeline_system) == ("77", 3, "77")
    assert (loaded.timeline_history, loaded.accepts_loss) == ("1:0/AB 2:0/CD", False)
    await forget_publisher(database, subid)
    loaded = await load_subscription(database, subid)
    assert loaded is not None
    assert (loaded.system_id, loaded.timeline, loaded.timeline_system) == (None, 3, "77")


async def test_positions_beyond_a_fork_are_moved_back_to_it(database: asyncpg.Connection, subid: int) -> None:
    """A table whose synchronization worker is beyond the fork has all changes before it."""
    fork = Lsn(0x100)
    before = {"a": ("i", 0, 0), "b": ("d", 0, 0), "c": ("f", 0x80, 0x90), "d": ("f", 0x80, 0x110), "e": ("f", 0x180, 0)}
    before |= {"f": ("s", 0x100, 0), "g": ("s", 0x101, 0), "h": ("r", 0x80, 0), "i": ("r", 0x200, 0)}
    for name, (state, lsn, progress) in before.items():
        await database.execute(f"CREATE TABLE {name} ()")
        relid = await relid_of(database, name)
        await add_relation(database, subid, relid, TableState(state), Lsn(lsn) if lsn else None)
        if progress:
            await progress_records.save(database, subid, relid, Lsn(progress))
    await progress_records.save(database, subid, 0, Lsn(0x200))
    async with database.transaction():
        await progress_records.move_back(database, subid, fork)
    states = {row.name: (row.state, row.lsn) for row in await load_relation_states(database, subid)}
    assert states == {
        "a": ("i", None),
        "b": ("d", None),
        "c": ("f", 0x80),
        "d": ("s", fork),
        "e": ("s", fork),
        "f": ("s", fork),
        "g": ("s", fork),
        "h": ("r", 0x80),
        "i": ("r", fork),
    }
    assert await progress_records.load(database, subid) == fork
    assert await progress_records.load(database, subid, await relid_of(database, "c")) == 0x90
    assert await load_reached(database, subid) == fork


async def test_a_worker_is_shown_while_its_backend_lives(database: asyncpg.Connection, subid: int) -> None:
    view = "SELECT worker_type, pid, relid, received_lsn FROM subscriber.pg_stat_subscription"
    assert [tuple(row) for row in await database.fetch(view)] == [(None, None, None, None)]
    status = WorkerStatus(subid, 0, "apply", "streaming", pid=database.get_server_pid(), received_lsn=Lsn(5))
    await report_worker(database, status)
    status = replace(status, error="broken", error_time=NOW, transactions=3, received_lsn=Lsn(6))
    await report_worker(database, status)
    (row,) = await database.fetch(view)
    assert (row["worker_type"], row["pid"], row["relid"]) == ("apply", database.get_server_pid(), None)
    (loaded,) = await load_workers(database)
    assert loaded.started is not None
    assert loaded.updated_at is not None
    assert replace(loaded, started=None, updated_at=None) == status
    await report_worker(database, replace(status, pid=1))
    assert [row["pid"] for row in await database.fetch(view)] == [None]
    await remove_worker(database, subid, 0)
    assert await load_workers(database) == []
    await report_worker(database, WorkerStatus(1, 0, "apply", "starting"))
    assert await load_workers(database) == []


async def test_statistics_add_up_and_are_reset(database: asyncpg.Connection, subid: int) -> None:
    await stats.add_stats(database, subid, {"apply_error_count": 1, "confl_insert_exists": 2})
    await stats.add_stats(database, subid, {"apply_error_count": 1})
    await stats.add_stats(database, 1, {"apply_error_count": 1})
    row = await database.fetchrow("SELECT * FROM subscriber.pg_stat_subscription_stats")
    assert row is not None
    assert (row["apply_error_count"], row["confl_insert_exists"], row["stats_reset"]) == (2, 2, None)
    await database.execute("SELECT subscriber.pg_stat_reset_subscription_stats($1)", subid)
    row = await database.fetchrow("SELECT * FROM subscriber.pg_stat_subscription_stats")
    assert row is not None
    assert (row["apply_error_count"], row["confl_insert_exists"]) == (0, 0)
    assert row["stats_reset"] is not None
    with pytest.raises(KeyError, match="no such counter: confl_nothing"):
        await stats.add_stats(database, subid, {"confl_nothing": 1})


async def test_origins_have_postgresqls_names(database: asyncpg.Connection, subid: int) -> None:
    name = names.apply_origin(subid)
    created = await origins.create_origin(database, name)
    assert await origins.create_origin(database, name) == created
    assert await database.fetchval("SELECT pg_replication_origin_oid($1)", name) == created
    await database.execute("SELECT pg_replication_origin_session_setup($1)", name)
    await database.execute("SELECT pg_replication_origin_session_reset()")
    assert await origins.drop_origin(database, name)
    assert not await origins.drop_origin(database, name, missing_ok=True)
    with pytest.raises(asyncpg.UndefinedObjectError):
        await origins.drop_origin(database, name)
    with pytest.raises(asyncpg.PostgresError, match="is not the name of a subscription's replication origin"):
        await origins.create_origin(database, "pg_1")


async def test_a_place_is_taken_once_and_lasts_as_long_as_the_backend(
    database: asyncpg.Connection, target_db: Database, subid: int
) -> None:
    worker = await target_db.connect()
    pid = worker.get_server_pid()
    backend = await Backend.of(worker)
    await worker.execute(worker_sessions.REGISTER_OWN_SESSION, subid)
    assert await worker_sessions.register(database, subid, 0, backend) is None
    assert await worker_sessions.register(database, subid, 4_000_000_000, backend) is None
    assert await worker_sessions.register(database, subid, 0, backend) is None  # once more is fine
    assert await worker_sessions.living(database, subid) == {0: pid, 4_000_000_000: pid}
    assert await worker_sessions.holder(database, subid, 0) == pid
    own = await Backend.of(database)
    assert await worker_sessions.register(database, subid, 0, own) == pid
    await worker_sessions.release(database, subid, 0, own.pid)  # not its own
    assert await worker_sessions.holder(database, subid, 0) == pid
    await worker_sessions.release(database, subid, 0, pid)
    assert await worker_sessions.holder(database, subid, 0) is None
    assert await worker_sessions.terminate(database, subid, None) == 1
    while await worker_sessions.living(database, subid):
        await asyncio.sleep(0.01)
    assert await worker_sessions.register(database, subid, 4_000_000_000, own) is None
    with pytest.raises(asyncpg.UndefinedObjectError, match="does not exist"):
        await worker_sessions.register(database, subid + 1, 0, own)


async def test_a_backend_with_a_dead_ones_number_is_another(database: asyncpg.Connection, subid: int) -> None:
    own = await Backend.of(database)
    earlier = replace(own, started=own.started - timedelta(seconds=1))
    assert await worker_sessions.register(database, subid, 0, earlier) is None
    assert await worker_sessions.living(database, subid) == {}


async def has_ended(database: asyncpg.Connection, backend: Backend) -> None:
    """Wait for the end of the backend."""
    while await database.fetchval("SELECT count(*) FROM pg_stat_activity WHERE pid = $1", backend.pid):
        await asyncio.sleep(0.01)


async def test_one_launcher_leads(database: asyncpg.Connection, target_db: Database) -> None:
    first, second = await target_db.connect(), await target_db.connect()
    one, two = await Backend.of(first), await Backend.of(second)
    assert await worker_sessions.leader(database) is None
    assert await worker_sessions.lead(first, "one", one, 30)
    assert not await worker_sessions.lead(second, "two", two, 30)
    leader = await worker_sessions.leader(database)
    assert leader is not None
    assert leader.pid == one.pid
    assert leader.age < 10
    assert await worker_sessions.renew_lead(second, "one", one.pid)
    assert await worker_sessions.lead(second, "two", two, 0)  # the other one is too late, and ended
    assert not await worker_sessions.renew_lead(second, "one", one.pid)
    await has_ended(database, one)
    await worker_sessions.resign(second, "one", one.pid)
    assert await worker_sessions.leader(database) is not None
    await worker_sessions.resign(second, "two", two.pid)
    assert await worker_sessions.leader(database) is None


async def test_a_former_session_of_the_same_launcher_is_ended(
    database: asyncpg.Connection, target_db: Database
) -> None:
    """A proxy may keep it alive."""
    first = await target_db.connect()
    former = await Backend.of(first)
    assert await worker_sessions.lead(first, "same", former, 30)
    assert await worker_sessions.lead(database, "same", await Backend.of(database), 30)
    await has_ended(database, former)
