"""Several databases are replicated into the tables of one: no command deletes the rows of another subscription."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import asyncpg
import pytest

from subscriber.check.check import collect
from subscriber.check.model import Finding
from subscriber.check.rules import findings
from subscriber.cli.commands.repair import describe, repair_, reseed_
from subscriber.cli.commands.resync import resync
from subscriber.cli.commands.verify import verify_
from subscriber.comparison import verify
from subscriber.demo.servers import Server
from subscriber.errors import StatementError
from subscriber.repair import repair, reseed
from tests.plugins.fix_cluster import Database, fresh_database
from tests.plugins.fix_subscriber import Subscriber
from tests.repair.test_repair import damage

TABLES = (
    "CREATE TABLE orders (tenant_id int, id int, note text, PRIMARY KEY (tenant_id, id))",
    "CREATE TABLE lines (id bigint PRIMARY KEY, tenant_id int, amount numeric)",
    "CREATE TABLE log (tenant_id int, line text)",
    "ALTER TABLE log REPLICA IDENTITY FULL",
)
QUERIES = (
    "SELECT * FROM orders WHERE tenant_id = {0} ORDER BY 1, 2",
    "SELECT * FROM lines WHERE tenant_id = {0} ORDER BY 1",
    "SELECT * FROM log WHERE tenant_id = {0} ORDER BY 1, 2",
)
ROWS = 40
RULE = "source_tag = (tenant_id = {})"


@dataclass
class Consolidation:
    """Publishers with a tenant each, numbered from 1, and the database that has the rows of all."""

    sources: list[Database]
    target: Database
    subscriber: Subscriber

    async def subscribe(self, options: Callable[[int], str] = lambda _: "copy_engine = snapshot") -> None:
        """Create subscriptions s1, s2, … with the options of each tenant, and wait until all tables are copied."""
        for tenant, source in enumerate(self.sources, 1):
            await self.subscriber.execute(
                f"CREATE SUBSCRIPTION s{tenant} CONNECTION '{source.dsn()}' PUBLICATION p WITH ({options(tenant)})"
            )
        await self.caught_up()

    async def caught_up(self) -> None:
        for tenant, source in enumerate(self.sources, 1):
            await self.subscriber.wait_for_ready(source, f"s{tenant}", timeout=60)

    async def assert_complete(self, *tenants: int) -> None:
        """Check that the target has exactly the rows of these tenants' publishers; of all by default."""
        for tenant in tenants or range(1, len(self.sources) + 1):
            for query in QUERIES:
                wanted = await self.sources[tenant - 1].rows(query.format(tenant))
                assert await self.target.rows(query.format(tenant)) == wanted, (tenant, query)


@asynccontextmanager
async def consolidation(
    number: int, publisher: Server, target: Database, subscriber: Subscriber
) -> AsyncIterator[Consolidation]:
    async with AsyncExitStack() as stack:
        sources = [await stack.enter_async_context(fresh_database(publisher)) for _ in range(number)]
        await target.execute(*TABLES)
        for tenant, source in enumerate(sources, 1):
            await source.execute(
                *TABLES,
                f"INSERT INTO orders SELECT {tenant}, i, 'n' || i FROM generate_series(1, {ROWS}) i",
                f"INSERT INTO lines SELECT {tenant * 1_000_000} + i, {tenant}, i FROM generate_series(1, {ROWS}) i",
                f"INSERT INTO log SELECT {tenant}, 'line ' || i % 10 FROM generate_series(1, {ROWS}) i",
                "CREATE PUBLICATION p FOR ALL TABLES",
            )
        yield Consolidation(sources, target, subscriber)
        for tenant in range(1, number + 1):
            await subscriber.execute(f"DROP SUBSCRIPTION IF EXISTS s{tenant}")


@pytest.fixture
async def two(publisher: Server, target_db: Database, subscriber: Subscriber) -> AsyncIterator[Consolidation]:
    async with consolidation(2, publisher, target_db, subscriber) as shared:
        yield shared


@pytest.fixture
async def eight(publisher: Server, target_db: Database, subscriber: Subscriber) -> AsyncIterator[Consolidation]:
    async with consolidation(8, publisher, target_db, subscriber) as shared:
        yield shared


DAMAGE = (
    "DELETE FROM orders WHERE tenant_id = 1 AND id % 4 = 0",
    "UPDATE orders SET note = 'local' WHERE tenant_id = 1 AND id % 4 = 1",
    "DELETE FROM lines WHERE id = 1000007",
    "DELETE FROM log WHERE tenant_id = 1 AND line = 'line 3'",
)


async def _run_repair(
    target: Database, name: str, *, delete_extra: bool = False, tables: list[str] | None = None
) -> int:
    return await repair_(target.dsn(), name, tables, delete_extra=delete_extra, jobs=2)


@pytest.mark.parametrize("delete_extra", [False, True])
async def test_repair_without_rules_keeps_all_rows_of_the_other_subscription(
    two: Consolidation, capsys: pytest.CaptureFixture[str], delete_extra: bool
) -> None:
    await two.subscribe()
    await two.assert_complete()
    await damage(two.target, *DAMAGE)
    assert await _run_repair(two.target, "s1", delete_extra=delete_extra) == 1
    shown = capsys.readouterr().out.splitlines()
    assert f"EXTRA KEPT    public.lines: 1 inserted, {ROWS} extra: not the publisher's, or of s2" in shown
    assert any(line.startswith("HINT:  Give each subscription of the table a rule of ownership") for line in shown)
    assert f"25 rows repaired, {3 * ROWS} extra rows kept" in shown[-2]
    await two.assert_complete()
    # The same result again: nothing more to do.
    assert await _run_repair(two.target, "s1", delete_extra=delete_extra) == 1
    await two.assert_complete()


async def test_a_dry_run_and_the_keys_of_verify_keep_rows_of_other_subscriptions(two: Consolidation) -> None:
    await two.subscribe()
    planned = await repair(two.target.dsn(), "s1", dry_run=True)
    assert not any("DELETE" in statement for statement in planned.statements)
    assert [table.extra for table in planned.tables] == [ROWS] * 3
    comparison = await verify(two.target.dsn(), "s1")
    assert not comparison.is_same
    keys = {table.name: [*table.extra] for table in comparison.tables if table.key}
    result = await repair(two.target.dsn(), "s1", keys=keys)
    assert (result.is_complete, sum(table.deleted for table in result.tables)) == (False, 0)
    await two.assert_complete()


async def test_reseed_and_resync_keep_rows_of_other_subscriptions(
    two: Consolidation, capsys: pytest.CaptureFixture[str]
) -> None:
    await two.subscribe()
    await damage(two.target, *DAMAGE)
    assert await resync(two.target.dsn(), "s1", ["orders", "log"]) == 1
    assert f"synchronized  public.orders: 20 rows repaired, {ROWS} extra rows kept" in capsys.readouterr().out
    assert await reseed_(two.target.dsn(), "s2", json=True) == 1
    (*_, tables) = (json.loads(capsys.readouterr().out)["tables"],)
    assert {(table["table"], table["extra"], table["deleted"]) for table in tables} == {
        ("public.orders", ROWS, 0),
        ("public.lines", ROWS - 1, 0),
        ("public.log", ROWS, 0),
    }
    await two.caught_up()
    await damage(two.target, "INSERT INTO lines VALUES (1000007, 1, 7)")
    await two.assert_complete()
    await two.subscriber.log.wait_for('WARNING:  table "public.orders" has 40 rows that the publisher does not have')
    for statement in ("WITH (truncate)", "WITH (delete_extra)"):
        with pytest.raises(StatementError, match='may belong to other subscriptions: "s2"'):
            await two.subscriber.execute(f"ALTER SUBSCRIPTION s1 REFRESH TABLE lines {statement}")
    with pytest.raises(StatementError, match="may belong to other subscriptions"):
        await resync(two.target.dsn(), "s1", ["orders"], truncate=True, wait=True)
    result = await reseed(two.target.dsn(), "s1", delete_extra=True)
    assert sum(table.deleted for table in result.tables) == 0
    await two.caught_up()
    await two.assert_complete()


async def test_copy_data_compare_keeps_rows_of_other_subscriptions(two: Consolidation) -> None:
    """The table has the rows of another subscription already, and some of its own."""
    first, second = two.sources
    await two.subscriber.create(second, "p", "s2", copy_engine="snapshot")
    await two.subscriber.wait_for_ready(second, "s2")
    await damage(two.target, "INSERT INTO orders SELECT 1, i, 'n' || i FROM generate_series(1, 20) i")
    create = f"CREATE SUBSCRIPTION s1 CONNECTION '{first.dsn()}' PUBLICATION p WITH (copy_data = 'compare', {{}})"
    with pytest.raises(StatementError, match="requires copy_data = 'compare'"):
        await two.subscriber.execute(create.format("delete_extra").replace("'compare'", "true"))
    notices = await two.subscriber.execute(create.format("delete_extra"))
    assert ("WARNING", 'table "public.orders" may have rows of other subscriptions: "s2"') in notices
    await two.caught_up()
    await two.assert_complete()


async def test_rows_of_the_application_are_kept_and_can_be_deleted(
    two: Consolidation, capsys: pytest.CaptureFixture[str]
) -> None:
    """One subscription has the table alone. A local row may be the application's, so a person decides."""
    source, _ = two.sources
    await two.subscriber.create(source, "p", "s1", copy_engine="snapshot")
    await two.subscriber.wait_for_ready(source, "s1")
    local = "INSERT INTO orders VALUES (9, 1, 'of the application')"
    await damage(two.target, local, "DELETE FROM orders WHERE id = 3")
    assert await _run_repair(two.target, "s1") == 1
    shown = capsys.readouterr().out.splitlines()
    assert "EXTRA KEPT    public.orders: 1 inserted, 1 extra: not the publisher's" in shown
    command = "subscriber repair s1 public.orders --delete-extra"
    assert f"HINT:  If no application needs these rows: {command}" in shown
    assert await two.target.value("SELECT count(*) FROM orders WHERE tenant_id = 9") == 1
    assert await resync(two.target.dsn(), "s1", ["orders"]) == 1
    assert f"HINT:  If no application needs these rows: {command}" in capsys.readouterr().out
    assert await two.target.value("SELECT count(*) FROM orders WHERE tenant_id = 9") == 1
    assert "kept by the last comparison, not the publisher's: 1 row of public.orders" in await _status(two.target)
    assert await _run_repair(two.target, "s1", delete_extra=True, tables=["public.orders"]) == 0
    assert "kept by the last comparison" not in await _status(two.target)
    assert await two.target.value("SELECT count(*) FROM orders WHERE tenant_id = 9") == 0
    await damage(two.target, local)
    assert await resync(two.target.dsn(), "s1", ["orders"], delete_extra=True) == 0
    await two.assert_complete(1)
    assert (await verify(two.target.dsn(), "s1")).is_same


async def test_all_rows_of_a_table_may_belong_to_a_subscription(two: Consolidation) -> None:
    source, other = two.sources
    await two.subscriber.create(source, "p", "s1", copy_engine="snapshot", source_tag="'all'")
    await two.subscriber.wait_for_ready(source, "s1")
    await damage(two.target, "INSERT INTO orders VALUES (9, 1, 'local')")
    assert (await repair(two.target.dsn(), "s1")).is_complete
    assert await two.target.value("SELECT count(*) FROM orders WHERE tenant_id = 9") == 0
    with pytest.raises(StatementError, match='may belong to subscriptions "s2" and "s1"'):
        await two.subscriber.create(other, "p", "s2", source_tag="'tenant_id = 2'")


async def test_rules_are_checked(two: Consolidation) -> None:
    first, second = two.sources
    create = f"CREATE SUBSCRIPTION s1 CONNECTION '{first.dsn()}' PUBLICATION p WITH (source_tag = '{{}}')"
    for rule, problem in (
        ("missing = 7", 'column "missing" does not exist'),
        ("tenant_id = ''7''", "another kind of constant"),
        ("tenant_id = 1; DROP TABLE orders", "invalid value for parameter"),
    ):
        with pytest.raises(StatementError, match=problem):
            await two.subscriber.execute(create.format(rule))
    notices = await two.subscriber.execute(create.format("tenant_id = 1, public.none: all"))
    assert ("WARNING", 'source_tag names table "public.none", which the subscription does not have') in notices
    for rule in ("tenant_id IN (1, 2)", "tenant_id < 2", "public.lines: id > 5, tenant_id = 2"):
        with pytest.raises(StatementError, match='may belong to subscriptions "s2" and "s1"'):
            await two.subscriber.create(second, "p", "s2", source_tag=f"'{rule}'")
    assert await second.value("SELECT count(*) FROM pg_replication_slots WHERE slot_name = 's2'") == 0
    notices = await two.subscriber.execute(f"CREATE SUBSCRIPTION s2 CONNECTION '{second.dsn()}' PUBLICATION p")
    assert [severity for severity, _ in notices] == ["NOTICE"]
    await two.caught_up()
    # The rule of s1 has no effect until s2 has one.
    await damage(two.target, "INSERT INTO orders VALUES (1, -1, 'extra')")
    assert [table.deleted for table in (await repair(two.target.dsn(), "s1")).tables] == [0, 0, 0]
    with pytest.raises(StatementError, match="may belong to subscriptions"):
        await two.subscriber.execute("ALTER SUBSCRIPTION s2 SET (source_tag = (tenant_id = 1))")
    assert await two.subscriber.execute("ALTER SUBSCRIPTION s2 SET (source_tag = (tenant_id = 2))") == []
    await two.caught_up()
    assert (await repair(two.target.dsn(), "s1")).is_complete
    await two.assert_complete()


async def _status(target: Database) -> str:
    command = [sys.executable, "-m", "subscriber", "status", "s1", "--target", target.dsn()]
    return (await anyio.run_process(command, check=False)).stdout.decode()


async def test_a_comparison_since_the_last_one_stays_within_the_rule(two: Consolidation) -> None:
    options = "copy_engine = snapshot, track_ranges = true, source_tag = 'tenant_id = {}'"
    await two.subscribe(options.format)
    assert (await verify(two.target.dsn(), "s1")).is_same
    await two.sources[0].execute(
        "UPDATE lines SET amount = 0 WHERE id < 1000010",
        "INSERT INTO lines VALUES (1000500, 2, 0)",
        "UPDATE orders SET note = 'new' WHERE id = 3",
    )
    await two.caught_up()
    comparison = await verify(two.target.dsn(), "s1", since_last=True)
    assert {table.name: (table.extra_count, table.foreign_count) for table in comparison.tables} == {
        "public.orders": (0, 0),
        "public.lines": (0, 1),
        "public.log": (0, 0),
    }
    # Another rule is another comparison.
    await two.subscriber.execute("ALTER SUBSCRIPTION s1 SET (source_tag = 'tenant_id IN (0, 1)')")
    await two.caught_up()
    with pytest.raises(StatementError, match="has no valid last comparison"):
        await verify(two.target.dsn(), "s1", since_last=True)


@asynccontextmanager
async def written(sources: list[Database], tenants: range) -> AsyncIterator[None]:
    """Write to the tables of some tenants for the length of the block."""
    stop = anyio.Event()

    async def write(tenant: int) -> None:
        chance = random.Random(tenant)
        async with sources[tenant - 1].connection() as connection:
            number = ROWS
            while not stop.is_set():
                number += 1
                async with connection.transaction():
                    await connection.execute("INSERT INTO orders VALUES ($1, $2, 'new')", tenant, number)
                    await connection.execute(
                        "UPDATE orders SET note = note || 'x' WHERE id = $1", chance.randrange(ROWS)
                    )
                    await connection.execute("DELETE FROM orders WHERE id = $1", chance.randrange(ROWS))
                    row = tenant * 1_000_000 + number, tenant
                    await connection.execute("INSERT INTO lines VALUES ($1, $2, 1)", *row)
                    await connection.execute("INSERT INTO log VALUES ($1, 'new')", tenant)
                await anyio.sleep(0.05)

    async with anyio.create_task_group() as tasks:
        for tenant in tenants:
            tasks.start_soon(write, tenant)
        yield
        stop.set()


async def test_commands_on_one_of_eight_consolidated_subscriptions_keep_the_others_rows(
    eight: Consolidation, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command on one subscription acts within its rule, while the other seven are written to."""
    await eight.subscribe(lambda tenant: f"copy_engine = snapshot, {RULE.format(tenant)}")
    await eight.assert_complete()
    async with written(eight.sources, range(2, 9)):
        await damage(
            eight.target,
            *DAMAGE,
            "INSERT INTO orders VALUES (1, -1, 'extra')",
            "INSERT INTO log VALUES (1, 'extra')",
            "INSERT INTO orders VALUES (77, 1, 'of no subscription')",
        )
        result = await repair(eight.target.dsn(), "s1")
        assert result.is_complete, list(describe(result, dry_run=False))
        assert [table.deleted for table in sorted(result.tables, key=lambda table: table.name)] == [0, 1, 1]
        await eight.assert_complete(1)
        await damage(eight.target, *DAMAGE, "INSERT INTO orders VALUES (1, -1, 'extra')")
        assert await resync(eight.target.dsn(), "s1", ["orders"]) == 0
        assert await resync(eight.target.dsn(), "s1", ["log", "lines"], truncate=True, wait=True) == 0
        await eight.assert_complete(1)
        await damage(eight.target, *DAMAGE, "INSERT INTO orders VALUES (1, -1, 'extra')")
        assert (await reseed(eight.target.dsn(), "s1")).is_complete
        await eight.subscriber.wait_for_ready(eight.sources[0], "s1")
        await eight.assert_complete(1)
        # TRUNCATE deletes the rows of its publisher's subscription.
        await eight.sources[0].execute("TRUNCATE orders, lines, log", "INSERT INTO orders VALUES (1, 500, 'later')")
        await eight.sources[0].wait_for_catchup("s1")
        assert await eight.target.rows("SELECT id FROM orders WHERE tenant_id = 1") == [(500,)]
        assert await eight.target.value("SELECT count(*) FROM log WHERE tenant_id = 1") == 0
    await eight.caught_up()
    await eight.assert_complete()
    capsys.readouterr()
    assert await _verify_all(eight.target) == 1
    shown = capsys.readouterr().out.splitlines()
    assert "DIFFERENT  public.orders: 1 row belongs to no subscription" in shown
    await damage(eight.target, "DELETE FROM orders WHERE tenant_id = 77")
    assert await _verify_all(eight.target) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "union      public.orders: each row belongs to one of 8 subscriptions" in shown
    assert shown[-1].startswith("8 subscriptions compared")


async def _verify_all(target: Database, **options: Any) -> int:
    return await verify_(target.dsn(), every=True, jobs=2, **options)


async def test_a_row_outside_the_rule_is_named(two: Consolidation, capsys: pytest.CaptureFixture[str]) -> None:
    await two.subscribe(lambda tenant: f"copy_engine = snapshot, {RULE.format(tenant)}")
    await two.sources[0].execute("INSERT INTO orders VALUES (2, 900, 'of another tenant')")
    await two.caught_up()
    comparison = await verify(two.target.dsn(), "s1")
    assert [table.foreign_count for table in comparison.tables if table.name == "public.orders"] == [1]
    assert not comparison.is_same
    assert await _run_repair(two.target, "s1") == 1
    assert "1 row of the publisher outside the rule of ownership" in capsys.readouterr().out
    assert await two.target.value("SELECT count(*) FROM orders WHERE id = 900") == 1
    # For the other subscription, the row is within its rule, and its publisher does not have it.
    assert (await repair(two.target.dsn(), "s2")).is_complete
    assert await two.target.value("SELECT count(*) FROM orders WHERE id = 900") == 0


async def test_a_truncate_without_rules_is_postgresqls(two: Consolidation) -> None:
    await two.subscribe()
    await two.sources[0].execute("TRUNCATE orders")
    await two.sources[0].wait_for_catchup("s1")
    assert await two.target.value("SELECT count(*) FROM orders") == 0
    connection: asyncpg.Connection[asyncpg.Record]
    async with two.target.connection() as connection:
        assert await connection.fetchval("SELECT count(*) FROM lines") == 2 * ROWS


async def test_another_owner_writes_nonsense_into_the_catalog(two: Consolidation) -> None:
    """It is no rule: the rows may belong to that subscription, and the commands of others work."""
    await two.subscribe(lambda tenant: f"copy_engine = snapshot, {RULE.format(tenant)}")
    await two.target.execute(
        "UPDATE subscriber.subscription SET subenabled = false, subsourcetag = 'nonsense; DROP' WHERE subname = 's2'"
    )
    await damage(two.target, "INSERT INTO orders VALUES (1, -1, 'extra')")
    result = await repair(two.target.dsn(), "s1")
    assert sorted((table.extra, table.doubtful) for table in result.tables) == [(0, ("s2",))] * 2 + [(1, ("s2",))]
    await two.target.execute("UPDATE subscriber.subscription SET subsourcetag = '' WHERE subname = 's2'")


async def _check(target: Database, name: str | None, source: Database | None = None) -> list[Finding]:
    facts = await collect(target.dsn(), None if source is None else source.dsn(), ["p"], name)
    return findings(facts)


async def test_a_subscription_of_postgresql_counts(two: Consolidation) -> None:
    """It has no rules, so that no row of the table is proven to belong to ours."""
    first, second = two.sources
    await two.subscriber.create(first, "p", "s1", copy_engine="snapshot", source_tag="'tenant_id = 1'")
    await two.subscriber.wait_for_ready(first, "s1")
    await two.target.execute(f"CREATE SUBSCRIPTION native CONNECTION '{second.dsn()}' PUBLICATION p")
    try:
        await two.target.wait_for(f"SELECT count(*) = {2 * ROWS} FROM lines")
        await damage(two.target, "INSERT INTO orders VALUES (1, -1, 'extra')")
        result = await repair(two.target.dsn(), "s1", delete_extra=True)
        orders = next(table for table in result.tables if table.name == "public.orders")
        assert (orders.deleted, orders.extra, orders.doubtful) == (0, 1, ("native",))
        with pytest.raises(StatementError, match='may belong to other subscriptions: "native"'):
            await two.subscriber.execute("ALTER SUBSCRIPTION s1 REFRESH TABLE orders WITH (truncate)")
        problems = await _check(two.target, "s1")
        assert [finding.message for finding in problems if "other subscriptions: native" in finding.message]
    finally:
        await two.target.execute("DROP SUBSCRIPTION native")
    assert (await repair(two.target.dsn(), "s1")).is_complete


async def test_a_partition_and_its_table_have_rows_in_common(
    two: Consolidation, publisher: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    parted = (
        "CREATE TABLE parted (tenant_id int, id int, PRIMARY KEY (tenant_id, id)) PARTITION BY LIST (tenant_id)",
        "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES IN (1)",
        "CREATE TABLE parted_2 PARTITION OF parted FOR VALUES IN (2)",
    )
    first, second = two.sources
    await two.target.execute(*parted)
    for source, root in ((first, "true"), (second, "false")):
        await source.execute(*parted, "DROP PUBLICATION p")
        await source.execute(f"CREATE PUBLICATION p FOR TABLE parted WITH (publish_via_partition_root = {root})")
    await first.execute("INSERT INTO parted VALUES (1, 1)")
    await second.execute("INSERT INTO parted VALUES (2, 1), (2, 2)")
    await two.subscriber.create(first, "p", "s1", copy_engine="snapshot")
    await two.subscriber.create(second, "p", "s2", copy_engine="snapshot")
    await two.caught_up()
    for name in ("s1", "s2"):
        assert not (await repair(two.target.dsn(), name, delete_extra=True)).compare_again
    assert await two.target.value("SELECT count(*) FROM parted") == 3
    assert await _verify_all(two.target) == 1
    assert "UNPROVEN   public.parted: a row may belong to several of s1, s2" in capsys.readouterr().out
    await two.subscriber.execute("ALTER SUBSCRIPTION s1 SET (source_tag = 'tenant_id = 1')")
    await two.subscriber.execute("ALTER SUBSCRIPTION s2 SET (source_tag = 'tenant_id >= 2')")
    await two.caught_up()
    await first.execute("TRUNCATE parted")
    await first.wait_for_catchup("s1")
    assert await two.target.rows("SELECT * FROM parted ORDER BY 1, 2") == [(2, 1), (2, 2)]
    assert await _verify_all(two.target) == 0
    assert "union      public.parted: each row belongs to one of 2 subscriptions" in capsys.readouterr().out


async def test_check_names_tables_of_several_subscriptions(two: Consolidation) -> None:
    first, second = two.sources
    await two.subscriber.create(first, "p", "s1", copy_engine="snapshot")
    await two.subscriber.wait_for_ready(first, "s1")
    wanted = "may have rows of other subscriptions: {}; without rules of ownership"
    problems = await _check(two.target, None, second)
    new = [finding for finding in problems if wanted.format("s1") in finding.message]
    assert len(new) == 3
    assert not any("TRUNCATE TABLE" in str(finding.fix) for finding in problems)
    await two.subscriber.create(second, "p", "s2", copy_engine="snapshot")
    await two.caught_up()
    assert len([finding for finding in await _check(two.target, "s1") if wanted.format("s2") in finding.message]) == 3
    await two.subscriber.execute("ALTER SUBSCRIPTION s1 SET (source_tag = (tenant_id = 1))")
    await two.subscriber.execute("ALTER SUBSCRIPTION s2 SET (source_tag = (tenant_id = 2))")
    assert not [finding for finding in await _check(two.target, "s1") if "other subscriptions" in finding.message]


async def test_other_writers_are_told_to_the_owner_only(two: Consolidation) -> None:
    first, _ = two.sources
    await two.subscriber.create(first, "p", "s1", copy_engine="snapshot")
    role = f"reader_{two.target.name}"
    await two.target.execute(f"CREATE ROLE {role}")
    try:
        await two.target.execute(f"SELECT subscriber.admit('{role}', 'owner')")
        async with two.target.connection() as connection:
            oid = await connection.fetchval("SELECT subid FROM subscriber.subscription")
            await connection.execute(f"SET SESSION AUTHORIZATION {role}")
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await connection.fetch("SELECT * FROM subscriber.other_writers($1)", oid)
    finally:
        await two.target.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")
