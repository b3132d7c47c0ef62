"""What `subscriber status` says about the publisher's slot, on real publishers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from subscriber.demo.servers import Servers
from subscriber.status import slot_statistics
from subscriber.status.collect import ask_publisher
from subscriber.status.slot_statistics import SlotStatistics
from subscriber.status.snapshot import PublisherAnswer
from subscriber.subscription import Subscription
from tests.plugins.fix_cluster import SETTINGS, Database, ServerOf, fresh_database
from tests.scenarios.standbys import standby_of

SUBSCRIPTION = Subscription(3500000001, "s", "postgres", "", ("p",), slot_name="s")
SLOT = "SELECT pg_create_logical_replication_slot('s', 'pgoutput'{options})"
DECODE = """
SELECT count(*) FROM pg_logical_slot_get_binary_changes('s', NULL, NULL, 'proto_version', '1', 'publication_names', 'p')
"""


async def ask(source: Database) -> PublisherAnswer:
    answer = await ask_publisher(replace(SUBSCRIPTION, stored_conninfo=source.dsn()))
    assert answer.error is None
    return answer


@pytest.mark.parametrize("major", [13, 18, 19])
async def test_a_transaction_that_exceeds_the_memory(server_of: ServerOf, major: int) -> None:
    async with fresh_database(server_of("publisher", major)) as source:
        role = f"reader_{source.name}"
        await source.execute(
            "CREATE TABLE t (id int PRIMARY KEY, v text)",
            "CREATE PUBLICATION p FOR TABLE t",
            SLOT.format(options=""),
            f"CREATE ROLE {role} LOGIN",
            f"ALTER DATABASE {source.name} SET logical_decoding_work_mem = '64kB'",
        )
        assert slot_statistics.describe((await ask(source)).statistics, None) == []
        await source.execute("INSERT INTO t SELECT g, repeat('x', 100) FROM generate_series(1, 5000) g")
        assert await source.value(DECODE) > 5000
        conninfo = source.dsn().replace("postgres@", f"{role}@")
        statistics = (await ask_publisher(replace(SUBSCRIPTION, stored_conninfo=conninfo))).statistics
        lines = slot_statistics.describe(statistics, None)
        await source.execute(f"DROP ROLE {role}")
    if major == 13:
        assert (statistics, lines) == (SlotStatistics(), [])
        return
    assert statistics.spilled_transactions == 1
    assert statistics.spilled_bytes is not None
    assert statistics.spilled_bytes > 5000 * 100
    assert (statistics.memory_exceeded is not None and statistics.memory_exceeded > 1) == (major >= 19)
    assert (statistics.sync_skip_reason, statistics.sync_skips, statistics.last_sync_skip) == (None, None, None)
    ((label, text),) = lines
    assert label == "decoding"
    assert text.startswith("1 transaction spilled to disk (")
    assert ("logical_decoding_work_mem exceeded" in text) == (major >= 19)


async def test_a_slot_that_a_standby_cannot_synchronize(servers: Servers, server_of: ServerOf) -> None:
    """The primary has transactions since the slot's position that the standby no longer protects."""
    primary = await servers.create("primary", SETTINGS, bin=server_of("publisher", 19).bin)
    await primary.start()
    source = Database(primary, "postgres")
    await source.execute("CREATE PUBLICATION p", SLOT.format(options=", failover => true"))
    await source.execute(*(f"CREATE TABLE t{number} ()" for number in range(3)), "CHECKPOINT")
    standby = await standby_of(
        primary, servers, "standby", sync_replication_slots="on", hot_standby_feedback="on", primary_slot_name="standby"
    )
    there = Database(standby, "postgres")
    await there.wait_for("SELECT slotsync_skip_reason IS NOT NULL FROM pg_replication_slots WHERE slot_name = 's'")
    answer = await ask(there)
    statistics = answer.statistics
    assert statistics.sync_skip_reason == "wal_or_rows_removed"
    assert statistics.sync_skips is not None
    assert statistics.sync_skips > 0
    assert statistics.last_sync_skip is not None
    ((label, text),) = slot_statistics.describe(statistics, answer.now)
    assert label == "slot sync"
    assert text.startswith("not synchronized: wal_or_rows_removed, skipped ")
    assert (await ask(source)).statistics.sync_skip_reason is None
    await standby.stop()
