"""Names from a publisher, or from another user of the target, that would match another subscription's objects."""

from __future__ import annotations

import json
import re

import pytest

from subscriber.apply.progress import ProgressClaim
from subscriber.catalog.commands.refresh import local_relids
from subscriber.connection.connect import open_session
from subscriber.connection.pipeline import Pipeline
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.repair import reseed
from subscriber.targets.postgres.session.capabilities import TargetCapabilities
from subscriber.targets.postgres.session.roles import RoleSwitcher
from subscriber.targets.postgres.session.target_session import TargetSession
from subscriber.targets.postgres.target import PostgresTarget
from subscriber.targets.postgres.two_phase import TwoPhase
from subscriber.targets.postgres.worker_session import resume_applier
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_proxy import Proxies
from tests.plugins.fix_subscriber import Subscriptions
from tests.scenarios.conftest import Pair


@pytest.mark.parametrize(
    "table",
    [("pg_catalog", "pg_authid"), ("information_schema", "sql_features"), ("subscriber", "subscription")],
)
async def test_tables_of_the_system_are_no_targets(
    target_db: Database, subscriptions: Subscriptions, table: tuple[str, str]
) -> None:
    await subscriptions.execute()
    with pytest.raises(StatementError) as caught:
        await local_relids(await target_db.connect(), [table])
    assert caught.value.message == f'cannot use relation "{".".join(table)}" as logical replication target'
    assert caught.value.detail == "This operation is not supported for system tables."
    assert caught.value.sqlstate == "42809"


async def test_slots_with_other_numbers_are_not_ours(pair: Pair) -> None:
    """A left-over slot is known by a table's OID; others are names of the apply worker's progress, and of origins."""
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.subscribe("FOR TABLE t")
    ((subid, sync_id),) = await pair.rows(
        "SELECT subid::bigint, (SELECT sync_id FROM subscriber.identity) FROM subscriber.subscription"
    )
    numbers = ("0", "1", "16383", "4294967296", "0_0", "99999999999999999999")
    slots = [f"pg_{subid}_sync_{number}_{sync_id}" for number in numbers]
    await pair.source.execute(*(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')" for slot in slots))
    before = await pair.rows("SELECT relid::bigint, remote_lsn::text FROM subscriber.progress")
    await pair.subscriber.restart()
    await pair.change("INSERT INTO t VALUES (1)")
    assert len(await pair.rows("SELECT FROM subscriber.progress WHERE relid = 0")) == 1
    assert len(before) == 1
    await pair.source.execute(*(f"SELECT pg_drop_replication_slot('{slot}')" for slot in slots))


async def test_prepared_transactions_with_foreign_names_are_left_alone(pair: Pair) -> None:
    await pair.target.execute("CREATE TABLE t (id int)")
    names = ["pg_gid_7_'; CREATE TABLE canary (); --_5", "pg_gid_7_x_5", "pg_gid_7_5", "pg_gid_7_", "pg_gid_77_5"]
    async with pair.target.connection() as connection:
        for number, name in enumerate(names):
            quoted = name.replace("'", "''")
            await connection.execute(f"BEGIN; INSERT INTO t VALUES ({number}); PREPARE TRANSACTION '{quoted}'")
    session = await open_session(pair.target.dsn())
    pipeline = Pipeline(session)
    claim = ProgressClaim(7, 0, 1, b"", Lsn(0))
    target = TargetSession(pipeline, RoleSwitcher(pipeline), capabilities=TargetCapabilities(origins=False))
    applier = await resume_applier(target, claim, lambda *_: None)
    two_phase = TwoPhase(PostgresTarget(applier, batching=False), 7)
    await two_phase.load()
    assert two_phase.names == ["pg_gid_7_5"]
    await session.close()


_KEEPALIVE = re.compile(rb"(?s)d\x00\x00\x00\x16k(.{8})")  # CopyData of 22 bytes


async def test_a_keepalive_whose_position_is_a_lie(pair: Pair, proxies: Proxies) -> None:
    """A table that is copied is handed over at the position. Its changes before it would be skipped silently."""

    def lie(piece: bytes) -> bytes:
        return _KEEPALIVE.sub(
            lambda found: found[0][:-8] + (int.from_bytes(found[1], "big") + (1 << 20)).to_bytes(8, "big"), piece
        )

    await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.source.execute("CREATE PUBLICATION p FOR TABLE t")
    proxy = await proxies.to(pair.source.server.port)
    proxy.transform = lie
    await pair.subscriber.create(proxy.dsn(pair.source.dsn()), "p")
    await pair.target.wait_for("SELECT srsubstate IN ('s', 'r') FROM subscriber.subscription_rel")
    end = await pair.source.value("SELECT pg_current_wal_lsn()::text")
    await pair.target.wait_for(f"SELECT latest_end_lsn > '{end}'::pg_lsn + 500000 FROM subscriber.worker")
    proxy.transform = bytes
    await pair.source.execute("INSERT INTO t VALUES (1)")
    report = await pair.subscriber.wait_for_state("stopped")
    assert re.search("finishes at .*, after it had reported that all before .* were sent", report["error"])
    assert json.loads(report["error_remedy"])["command"] == "subscriber reseed s"
    await reseed(pair.target.dsn(), "s")
    await pair.target.wait_for("SELECT count(*) FROM t", 1)
