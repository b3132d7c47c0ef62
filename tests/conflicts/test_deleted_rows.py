"""retain_dead_tuples: the target remembers deleted rows, and conflict update_deleted is reported and decided."""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import combinations, product
from typing import NamedTuple

import anyio
import asyncpg
import pytest
from anyio.from_thread import BlockingPortal

from subscriber.catalog.commands.execute import execute
from subscriber.catalog.schema import ensure_schema
from subscriber.connection.connect import open_session
from subscriber.connection.pipeline import Pipeline
from subscriber.demo.servers import Server, Servers
from subscriber.errors import StatementError
from subscriber.settings import Settings
from subscriber.targets.postgres.session.introspection import Terms, introspect
from tests.matrix.debian import debian
from tests.matrix.programs import NEWEST, NotAvailable, programs
from tests.plugins.fix_cluster import SETTINGS, Database, ServerOf, database_with_schema, fresh_database
from tests.plugins.fix_subscriber import Subscriber, running_subscriber
from tests.scenarios.conftest import Pair

STATS = "FROM subscriber.subscription_stats"


@pytest.fixture
async def pair(source_db: Database, tracking: Server) -> AsyncIterator[Pair]:
    """Create a source, and a launcher on a target that tracks commit timestamps."""
    async with database_with_schema(tracking) as target, running_subscriber(target) as running:
        yield Pair(source_db, target, running)


async def test_an_update_of_a_deleted_row_is_reported(pair: Pair) -> None:
    """In PostgreSQL 18's arrangement on a target of 18. The sentences are PostgreSQL 19's."""
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, v text)")
    await pair.source.execute("INSERT INTO t VALUES (1, 'a'), (2, 'b'), (3, 'c')")
    await pair.subscribe("FOR TABLE t", retain_dead_tuples=True)
    await pair.target.execute("DELETE FROM t WHERE id <= 2")
    await pair.change("UPDATE t SET v = 'new' WHERE id = 1")
    await pair.fails(
        r'LOG:  conflict detected on relation "public.t": conflict=update_deleted\n.*'
        r"DETAIL:  Could not find the row to be updated\.\n\s*Remote row \(1, new\); replica identity \(id\)=\(1\)\.\n"
        r"\s*The row to be updated was deleted locally in transaction \d+ at "
    )
    # A row that the subscription itself deleted, and one that never existed, are missing.
    await pair.change("DELETE FROM t WHERE id = 3")
    await pair.target.wait_for(f"SELECT (confl_update_deleted, confl_update_missing) = (1, 0) {STATS}")


# --- every order of two concurrent sequences of operations -----------------------------------------------------------

# The operations of one server on a row that exists at first. Each is a transaction of its own.
ON_ROW = ("U", "D", "UD", "DI", "UDI", "DIU", "DID")
ON_NOTHING = ("I", "IU", "ID", "IUD", "IDI", "IUU", "IDIU")
SQL = {
    "I": "INSERT INTO t VALUES ({id}, '{value}')",
    "U": "UPDATE t SET v = '{value}' WHERE id = {id}",
    "D": "DELETE FROM t WHERE id = {id}",
}


class Order(NamedTuple):
    """One row, and the operations of both servers in the order of time."""

    id: int
    exists: bool
    steps: tuple[tuple[int, str], ...]  # the server and the operation

    def statements(self) -> Iterator[tuple[int, str]]:
        """Yield the server and its statement."""
        for number, (server, operation) in enumerate(self.steps):
            yield server, SQL[operation].format(id=self.id, value=self.value(number))

    @property
    def result(self) -> str | None:
        """The value of the row at the end: that of the last operation. None: it is deleted."""
        last = len(self.steps) - 1
        return None if self.steps[last][1] == "D" else self.value(last)

    def value(self, number: int) -> str:
        """Return the value that step `number` writes."""
        return " ".join([*(f"{server}{operation}" for server, operation in self.steps), str(number)])


def orders() -> list[Order]:
    """Return all ways to interleave each sequence of one server with each of the other."""
    orders_found: list[Order] = []
    for exists, sequences in ((True, ON_ROW), (False, ON_NOTHING)):
        for here, there in product(sequences, repeat=2):
            length = len(here) + len(there)
            for places in combinations(range(length), len(here)):
                left, right = iter(here), iter(there)
                steps = tuple((0, next(left)) if place in places else (1, next(right)) for place in range(length))
                orders_found.append(Order(len(orders_found) + 1, exists, steps))
    return orders_found


@pytest.fixture(scope="session")
def tracking_of(portal: BlockingPortal, session_servers: Servers) -> ServerOf:
    """Start servers of other versions that track commit timestamps. Skips the test if there is none."""
    servers: dict[tuple[str, int], Server] = {}

    def get(name: str, major: int) -> Server:
        if (name, major) in servers:
            return servers[name, major]
        try:
            bin = debian(major) if major > NEWEST else programs(major)
        except NotAvailable as reason:
            pytest.skip(f"no PostgreSQL {major}: {reason}")

        async def start() -> Server:
            settings = {**SETTINGS, "track_commit_timestamp": "on"}
            server = await session_servers.create(f"{name} {major}", settings, bin=bin)
            await server.start()
            return server

        return servers.setdefault((name, major), portal.call(start))

    return get


@pytest.fixture(params=[14, *(pytest.param(major, marks=pytest.mark.soak) for major in (18, 19))])
def two_servers(request: pytest.FixtureRequest, tracking_of: ServerOf) -> list[Server]:
    """Return two servers of one version that track commit timestamps."""
    if request.param == NEWEST:
        return [request.getfixturevalue(name) for name in ("tracking", "tracking_too")]
    return [tracking_of(name, request.param) for name in ("tracking", "tracking too")]


@dataclass
class Apart:
    """Two databases that replicate to each other, but for the time until meet()."""

    databases: list[Database]
    subscribers: list[Subscriber]

    async def meet(self) -> None:
        """Apply all changes of both databases."""
        for subscriber in self.subscribers:
            await subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
        for _ in range(3):  # what is sent back
            for database in self.databases:
                await database.wait_for_catchup("s", timeout=400)


@asynccontextmanager
async def apart(servers: list[Server], *statements: str, origin: str = "none") -> AsyncIterator[Apart]:
    """Create both databases with the statements and a publication of table t."""
    async with AsyncExitStack() as stack:
        databases = [await stack.enter_async_context(database_with_schema(server)) for server in servers]
        subscribers = [await stack.enter_async_context(running_subscriber(database)) for database in databases]
        for database in databases:
            await database.execute(*statements, "CREATE PUBLICATION p FOR TABLE t")
        filtered = {"origin": origin} if await databases[0].major() >= 16 else {}
        options = {"copy_data": False, "retain_dead_tuples": True, "conflict_policy": "last_update_wins", **filtered}
        for subscriber, other in zip(subscribers, reversed(databases), strict=True):
            await subscriber.create(other, "p", "s", **options)
            await subscriber.execute("ALTER SUBSCRIPTION s DISABLE")
        for database in databases:
            await database.wait_for("SELECT count(*) FROM pg_stat_replication", 0)
        yield Apart(databases, subscribers)


async def test_servers_agree_after_every_order_of_operations(two_servers: list[Server]) -> None:
    """The last operation decides on both sides, also where one deletes the row.

    A publisher of PostgreSQL 14 sends back what it has received, which changes nothing.
    """
    await assert_last_operation_decides(two_servers, orders()[::24])  # the soak test has all


@pytest.mark.soak
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("identity", ["", "FULL", "DEFAULT"])
async def test_servers_agree_after_all_orders_of_operations(two_servers: list[Server], identity: str) -> None:
    """With an identity, the UPDATEs leave a large value unchanged."""
    await assert_last_operation_decides(two_servers, orders(), identity)


async def assert_last_operation_decides(servers: list[Server], everything: list[Order], identity: str = "") -> None:
    """Execute the operations apart, and compare both sides with the results. `identity`: with a large value."""
    rows = ", ".join(f"({order.id}, 'first')" for order in everything if order.exists)
    table = ["CREATE TABLE t (id int PRIMARY KEY, v text)", f"INSERT INTO t VALUES {rows}"]
    if identity:
        table = [
            "CREATE TABLE t (id int PRIMARY KEY, v text, big text)",
            "ALTER TABLE t ALTER big SET STORAGE EXTERNAL",
            f"ALTER TABLE t REPLICA IDENTITY {identity}",
            f"INSERT INTO t SELECT *, repeat('first', 1000) FROM (VALUES {rows}) r",
        ]
    async with apart(servers, *table) as pair:
        here, there = pair.databases
        async with here.connection() as left, there.connection() as right:
            for order in everything:
                for server, statement in order.statements():
                    if identity and statement.startswith("INSERT"):
                        statement = statement.replace(")", f", repeat('inserted {server}', 1000))")
                    await (left, right)[server].execute(statement)
        await pair.meet()
        rows_read = await here.rows("SELECT * FROM t ORDER BY id")
        assert await there.rows("SELECT * FROM t ORDER BY id") == rows_read
    values = {row[0]: row[1] for row in rows_read}
    assert [order for order in everything if values.get(order.id) != order.result] == []
    assert len(values) > len(everything) / 3
    if identity:
        assert all(row[2] for row in rows_read)


async def test_servers_agree_about_operations_at_the_same_time(two_servers: list[Server]) -> None:
    """The first operations of both servers commit in the same microsecond, as do the second and the third ones.

    A session of another origin chooses its commit times.
    """
    pairs = [(row, *pair) for row in (ON_ROW, ON_NOTHING) for pair in product(row, repeat=2)]
    rows = ", ".join(f"({id}, 'first')" for id, (kind, *_) in enumerate(pairs) if kind is ON_ROW)
    table = ["CREATE TABLE t (id int PRIMARY KEY, v text)", f"INSERT INTO t VALUES {rows}"]
    start = datetime.now(UTC) + timedelta(minutes=1)
    async with apart(two_servers, *table, origin="any") as pair:
        for server, database in enumerate(pair.databases):
            origin = f"clock_{database.name}"
            async with database.connection() as connection:
                await connection.execute(f"SELECT pg_replication_origin_create('{origin}')")
                await connection.execute(f"SELECT pg_replication_origin_session_setup('{origin}')")
                for id, (_, *operations) in enumerate(pairs):
                    for number, operation in enumerate(operations[server]):
                        value = secrets.token_hex(4)
                        async with connection.transaction():
                            await connection.execute(SQL[operation].format(id=id, value=value))
                            at = start + timedelta(microseconds=number)
                            await connection.execute("SELECT pg_replication_origin_xact_setup('0/1', $1)", at)
                await connection.execute("SELECT pg_replication_origin_session_reset()")
                await connection.execute(f"SELECT pg_replication_origin_drop('{origin}')")
        await pair.meet()
        rows_read = [dict(await database.rows("SELECT id, v FROM t")) for database in pair.databases]
    assert [pairs[id] for id in range(len(pairs)) if rows_read[0].get(id) != rows_read[1].get(id)] == []
    assert len(pairs) / 4 < len(rows_read[0]) < len(pairs)


# --- which deletions are remembered, and how long --------------------------------------------------------------------

REMEMBERED = "SELECT count(*) FROM subscriber.deleted_row"
TRIGGERS = """
SELECT tgrelid::regclass::text, tgenabled::text FROM pg_trigger
 WHERE tgname = 'subscriber_deleted_rows' AND tgparentid = 0 ORDER BY 1
"""
QUICKLY = Settings(retry_interval=0.2, retention_interval=0.2, status_interval=0.2)


@pytest.fixture
async def quick_pair(source_db: Database, tracking: Server) -> AsyncIterator[Pair]:
    """Create a pair whose worker often forgets deleted rows."""
    async with database_with_schema(tracking) as target, running_subscriber(target, settings=QUICKLY) as running:
        yield Pair(source_db, target, running)


async def test_triggers_follow_the_subscriptions(pair: Pair) -> None:
    """A table of a second subscription has a trigger that fires for replicated deletions, too."""
    await pair.both(
        "CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)", "CREATE TABLE v (a int)"
    )
    await pair.subscribe("FOR TABLE t, v", retain_dead_tuples=True)
    assert await pair.rows(TRIGGERS) == [("t", "O")]
    await pair.source.execute("ALTER PUBLICATION p ADD TABLE u", "CREATE PUBLICATION q FOR TABLE t")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
    assert await pair.rows(TRIGGERS) == [("t", "O"), ("u", "O")]
    await pair.subscriber.create(pair.source, "q", "second", copy_data=False)
    assert await pair.rows(TRIGGERS) == [("t", "A"), ("u", "O")]
    session = await open_session(pair.target.dsn(), application_name="test")
    try:
        table = await introspect(Pipeline(session), "public", "t", Terms())
    finally:
        session.abort()
    assert table.batch_exclusion is None, "the trigger is no reason to apply changes row by row"
    await pair.subscriber.execute("ALTER SUBSCRIPTION s DISABLE")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s SET (retain_dead_tuples = false)")
    assert await pair.rows(TRIGGERS) == []
    await pair.subscriber.execute("ALTER SUBSCRIPTION s SET (retain_dead_tuples = true)")
    assert await pair.rows(TRIGGERS) == [("t", "A"), ("u", "O")]
    await pair.subscriber.execute("DROP SUBSCRIPTION s")
    assert await pair.rows(TRIGGERS) == []


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "text"])
async def test_a_key_of_each_type_is_found(pair: Pair, binary: bool) -> None:
    """The hash of the trigger, made with any settings of a session, is the worker's."""
    keys = {
        "a bigint": "-5",
        "a numeric(10,2)": "1.50",
        "a numeric": "1.500",
        "a text": "'ä''\"\\\\'",
        "a char(5)": "'ab'",
        "a uuid": "'00000000-0000-0000-0000-000000000001'",
        "a timestamptz": "'2024-02-03 04:05:06.7+01'",
        "a date": "'2024-02-03'",
        "a interval": "'1 day 02:03:04.5'",
        "a float8": "1e-7",
        "a bytea": "'\\\\x00ff'",
        "a bool": "true",
        "a mood": "'sad'",
        "a positive": "7",
        "b text, a int": "'x', 3",
    }
    await pair.both("CREATE TYPE mood AS ENUM ('sad')", "CREATE DOMAIN positive AS int CHECK (value > 0)")
    for number, columns in enumerate(keys):
        names = ", ".join(column.split()[0] for column in columns.split(", "))
        await pair.both(f"CREATE TABLE t{number} ({columns}, v int, PRIMARY KEY ({names}))".replace("10, 2", "10,2"))
    await pair.subscribe("FOR ALL TABLES", retain_dead_tuples=True, binary=binary)
    for number, value in enumerate(keys.values()):
        await pair.source.execute(f"INSERT INTO t{number} VALUES ({value}, 0)".replace("\\\\", "\\"))
    await pair.source.wait_for_catchup("s")
    async with pair.target.connection() as connection:
        await connection.execute(
            "SET datestyle = 'SQL, DMY'; SET timezone = 'Asia/Tokyo'; SET intervalstyle = iso_8601;"
            "SET bytea_output = escape; SET extra_float_digits = -5; SET client_encoding = latin1; SET search_path = ''"
        )
        for number in range(len(keys)):
            await connection.execute(f"DELETE FROM public.t{number}")
    for number in range(len(keys)):
        await pair.source.execute(f"UPDATE t{number} SET v = 1")
    await pair.source.wait_for_catchup("s")
    await pair.target.wait_for(f"SELECT confl_update_deleted {STATS}", len(keys))


async def test_any_role_deletes_rows_and_none_writes_deletions(pair: Pair) -> None:
    """The trigger needs no privilege of the role that deletes. The owner of a table cannot use its function."""
    role = f"role_{secrets.token_hex(4)}"
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    await pair.source.execute("CREATE PUBLICATION p FOR TABLE t")
    await pair.subscriber.create(pair.source, "p", "s", copy_data=False, retain_dead_tuples=True)
    await pair.target.execute(
        f"CREATE ROLE {role} LOGIN", f"GRANT SELECT, DELETE ON t TO {role}", f"GRANT CREATE ON SCHEMA public TO {role}"
    )
    function = await pair.target.value(
        "SELECT tgfoid::regproc::text FROM pg_trigger WHERE tgname = 'subscriber_deleted_rows'"
    )
    user = await asyncpg.connect(pair.target.dsn(user=role))
    await user.execute("DELETE FROM t")
    assert await pair.target.value(REMEMBERED) == 1
    await user.execute("CREATE TABLE mine (id int)")
    for sql in (
        f"CREATE TRIGGER mine AFTER DELETE ON mine FOR EACH ROW EXECUTE FUNCTION {function}()",
        "SELECT * FROM subscriber.deleted_row",
        "SELECT * FROM subscriber.deleted_by(1, '', 1, '')",
        "SELECT subscriber.remember_delete(1, '', 1, '')",
        "SELECT subscriber.forget_deletes(1)",
        "SELECT subscriber.set_delete_triggers('1s', NULL)",
    ):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await user.execute(sql)
    await user.close()
    await pair.target.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


async def test_a_trigger_that_may_not_be_created(tracking: Server) -> None:
    """The owner of the schema is an ordinary role. The error has the statement that helps."""
    role, owner = (f"role_{secrets.token_hex(4)}" for _ in range(2))
    async with fresh_database(tracking) as target:
        await target.needs(16, "pg_create_subscription")
        await target.execute(
            f"CREATE ROLE {role} LOGIN",
            f"CREATE ROLE {owner}",
            f"GRANT CREATE ON DATABASE {target.name} TO {role}",
            f"GRANT pg_create_subscription TO {role}",
            "CREATE TABLE t (id int PRIMARY KEY)",
            f"ALTER TABLE t OWNER TO {owner}",
        )
        user = await asyncpg.connect(target.dsn(user=role))
        await ensure_schema(user)
        await execute(
            user,
            "CREATE SUBSCRIPTION s CONNECTION 'dbname=x password=x' PUBLICATION p"
            " WITH (connect = false, slot_name = none, enabled = false, create_slot = false)",
            notice=lambda *_: None,
        )
        await user.execute(
            "INSERT INTO subscriber.subscription_rel (srsubid, srrelid, srsubstate, srnspname, srrelname)"
            " SELECT subid, 'public.t'::regclass, 'r', 'public', 't' FROM subscriber.subscription"
        )
        statement = "ALTER SUBSCRIPTION s SET (retain_dead_tuples = true)"
        with pytest.raises(
            StatementError, match=r"must be owner of table public\.t to remember its deleted rows"
        ) as raised:
            await execute(user, statement, notice=lambda *_: None)
        assert raised.value.hint == f"As a superuser: GRANT {owner} TO {role};"
        await target.execute(raised.value.hint.partition(": ")[2])
        await execute(user, statement, notice=lambda *_: None)
        assert await target.rows(TRIGGERS) == [("t", "O")]
        await execute(user, "DROP SUBSCRIPTION s", notice=lambda *_: None)
        await user.close()
        await target.execute(f"DROP OWNED BY {role}, {owner}", f"DROP ROLE {role}, {owner}")


async def test_deleted_rows_of_partitions_are_remembered(pair: Pair) -> None:
    """A statement may name the root or a partition, and a partition may be attached later."""
    await pair.both(
        "CREATE TABLE t (id int PRIMARY KEY, v int) PARTITION BY LIST (id)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES IN (1)",
        "CREATE TABLE t2 (v int, id int PRIMARY KEY)",
        "CREATE TABLE t3 PARTITION OF t FOR VALUES IN (3)",
        "INSERT INTO t VALUES (1, 0), (3, 0)",
    )
    await pair.source.execute("CREATE PUBLICATION p FOR TABLE t WITH (publish_via_partition_root)")
    await pair.subscriber.create(pair.source, "p", "s", copy_data=False, retain_dead_tuples=True)
    await pair.both("ALTER TABLE t ATTACH PARTITION t2 FOR VALUES IN (2)")
    await pair.change("INSERT INTO t VALUES (2, 0)")
    await pair.target.execute("DELETE FROM t WHERE id = 1", "DELETE FROM t2", "DELETE FROM t3")
    await pair.change("UPDATE t SET v = 1")
    await pair.target.wait_for(f"SELECT (confl_update_deleted, confl_update_missing) = (3, 0) {STATS}")


async def test_deletions_are_forgotten_when_they_cannot_matter(quick_pair: Pair) -> None:
    """A subscriber of the target that has not confirmed a deletion keeps it."""
    pair = quick_pair
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.source.execute("INSERT INTO t SELECT generate_series(1, 12000)")
    await pair.subscribe("FOR TABLE t", retain_dead_tuples=True)
    await pair.target.execute("SELECT pg_create_logical_replication_slot('other', 'pgoutput')")
    await pair.target.execute("DELETE FROM t")
    assert await pair.target.value(REMEMBERED) == 12000
    await anyio.sleep(1)  # several rounds
    assert await pair.target.value(REMEMBERED) == 12000
    await pair.target.execute("SELECT pg_drop_replication_slot('other')")
    await pair.target.wait_for(REMEMBERED, 0)
    assert await pair.target.value("SELECT count(*) FROM pg_largeobject_metadata WHERE oid >= 4200000000") == 0


async def test_deletions_that_are_too_old_are_forgotten(quick_pair: Pair) -> None:
    """The subscription reports that it does not retain all deletions, until it needs none of these."""
    pair = quick_pair
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.source.execute("INSERT INTO t VALUES (1)")
    await pair.target.execute("SELECT pg_create_logical_replication_slot('other', 'pgoutput')")
    await pair.subscribe("FOR TABLE t", retain_dead_tuples=True, max_retention_duration=1)
    await pair.target.execute("DELETE FROM t")
    name = 'logical replication worker for subscription "s"'
    await pair.fails(f"LOG:  {name} has stopped retaining the information for detecting conflicts")
    assert await pair.target.value(REMEMBERED) == 0
    await pair.target.execute("SELECT pg_drop_replication_slot('other')")
    await pair.fails(f"LOG:  {name} will resume retaining the information for detecting conflicts")


async def test_deletions_survive_a_crash(source_db: Database, servers: Servers) -> None:
    """Also one of a transaction that is prepared before the crash, and committed after it."""
    server = await servers.create("crashing", {**SETTINGS, "track_commit_timestamp": "on"})
    await server.start()
    async with fresh_database(server) as target:
        await target.execute("CREATE TABLE t (id int PRIMARY KEY, v int)", "INSERT INTO t VALUES (1), (2), (3)")
        await source_db.execute("CREATE TABLE t (id int PRIMARY KEY, v int)", "INSERT INTO t VALUES (1), (2), (3)")
        await source_db.execute("CREATE PUBLICATION p FOR TABLE t")
        async with running_subscriber(target) as running:
            await running.create(source_db, "p", "s", copy_data=False, retain_dead_tuples=True)
            await target.execute("DELETE FROM t WHERE id = 1")
            async with target.connection() as connection:
                await connection.execute("BEGIN; DELETE FROM t WHERE id = 2; PREPARE TRANSACTION 'kept'")
                await connection.execute("BEGIN; DELETE FROM t WHERE id = 3; PREPARE TRANSACTION 'undone'")
        await server.kill9()
        await server.start()
        await target.execute("COMMIT PREPARED 'kept'", "ROLLBACK PREPARED 'undone'")
        async with running_subscriber(target) as running:
            await target.wait_for(REMEMBERED, 2)
            await source_db.execute("UPDATE t SET v = 1")
            await source_db.wait_for_catchup("s")
            await target.wait_for(f"SELECT (confl_update_deleted, confl_update_missing) = (2, 0) {STATS}")
            await running.execute("DROP SUBSCRIPTION s")


# --- beside PostgreSQL 19 --------------------------------------------------------------------------------------------

REPORT = re.compile(r"LOG:  (conflict detected on relation .*: conflict=update_\w+)\n.*DETAIL:  (.*\n(?:\t.*\n)*)")
VARIABLE = re.compile(r"transaction \d+ at .*")
COUNTED = "SELECT confl_update_deleted, confl_update_missing FROM {}.pg_stat_subscription_stats WHERE subname = '{}'"


async def test_the_same_reports_as_postgresql_19(tracking_of: ServerOf) -> None:
    """Both subscribe to one publication, and the same rows are deleted in both databases."""
    publisher, server = tracking_of("tracking", 19), tracking_of("tracking too", 19)
    began = server.log.stat().st_size
    async with AsyncExitStack() as stack:
        source, native, ours = [
            await stack.enter_async_context(fresh_database(server_of_database))
            for server_of_database in (publisher, server, server)
        ]
        subscriber = await stack.enter_async_context(running_subscriber(ours))
        for database in (source, native, ours):
            await database.execute(
                "CREATE TABLE t (id int PRIMARY KEY, v text)",
                "INSERT INTO t SELECT i, 'first' FROM generate_series(1, 4) i",
            )
        await source.execute("CREATE PUBLICATION p FOR TABLE t")
        # A running worker lets the server forget a deletion at once if the publisher is idle.
        options = "WITH (copy_data = false, retain_dead_tuples = true, enabled = false)"
        await native.execute(f"CREATE SUBSCRIPTION native CONNECTION '{source.dsn()}' PUBLICATION p {options}")
        stack.push_async_callback(native.execute, "DROP SUBSCRIPTION native")
        await subscriber.create(source, "p", "ours", copy_data=False, retain_dead_tuples=True)
        await native.wait_for(
            "SELECT xmin IS NOT NULL FROM pg_replication_slots WHERE slot_name = 'pg_conflict_detection'", True
        )
        for database in (native, ours):
            await database.execute("DELETE FROM t WHERE id IN (1, 2)")
        # In one transaction, because PostgreSQL may forget the deletions after it.
        await source.execute(
            "BEGIN; UPDATE t SET v = 'second' WHERE id = 1; UPDATE t SET id = 12, v = NULL WHERE id = 2;"
            " DELETE FROM t WHERE id = 3; COMMIT"
        )
        await native.execute("ALTER SUBSCRIPTION native ENABLE")
        for name in ("native", "ours"):
            await source.wait_for_catchup(name)
        await native.wait_for(COUNTED.format("pg_catalog", "native").replace(", confl_update_missing", ""), 2)
        await ours.wait_for(COUNTED.format("subscriber", "ours").replace(", confl_update_missing", ""), 2)
        reports = []
        with server.log.open() as log:
            log.seek(began)
            for text in (log.read(), subscriber.log.text()):
                matches = [(what, VARIABLE.sub("transaction …", detail)) for what, detail in REPORT.findall(text)]
                reports.append([(what, [line.strip() for line in detail.splitlines()]) for what, detail in matches])
        assert reports[0] == reports[1]
        assert len(reports[0]) == 2


# --- large values that are not sent ----------------------------------------------------------------------------------


@pytest.mark.parametrize("identity", ["FULL", "DEFAULT"])
async def test_an_update_wins_with_large_values_that_were_not_sent(
    tracking: Server, tracking_too: Server, identity: str
) -> None:
    """They are in the old row, or are read from the publisher. The UPDATE wins over a DELETE and over an UPDATE."""
    async with AsyncExitStack() as stack:
        here, there = [
            await stack.enter_async_context(database_with_schema(server)) for server in (tracking, tracking_too)
        ]
        subscribers = [await stack.enter_async_context(running_subscriber(database)) for database in (here, there)]
        for database in (here, there):
            await database.execute(
                'CREATE TABLE t ("The id" text, n int, big text, v text, PRIMARY KEY ("The id", n))',
                "ALTER TABLE t ALTER big SET STORAGE EXTERNAL",
                f"ALTER TABLE t REPLICA IDENTITY {identity}",
                "INSERT INTO t SELECT i || '''', i, repeat(md5(i::text), 500) FROM generate_series(1, 3) i",
                "CREATE PUBLICATION p FOR TABLE t",
            )
        options = {"copy_data": False, "origin": "none", "conflict_policy": "last_update_wins"}
        for subscriber, other in zip(subscribers, (there, here), strict=True):
            await subscriber.create(other, "p", "s", retain_dead_tuples=True, **options)
            await subscriber.execute("ALTER SUBSCRIPTION s DISABLE")
        await there.execute("DELETE FROM t WHERE n = 1", "UPDATE t SET big = repeat('x', 5000) WHERE n = 2")
        await here.execute("UPDATE t SET v = 'wins'")
        await there.execute("DELETE FROM t WHERE n = 3")
        for subscriber in subscribers:
            await subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
        for database in (here, there):
            await database.wait_for_catchup("s")
        query = 'SELECT "The id", n, md5(big), v FROM t ORDER BY n'
        rows = await here.rows(query)
        assert [row[3] for row in rows] == ["wins", "wins"]
        assert await there.rows(query) == rows
