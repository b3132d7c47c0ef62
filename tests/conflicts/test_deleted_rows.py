"""retain_dead_tuples: the target remembers deleted rows, and conflict update_deleted is reported and decided."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from itertools import combinations, product
from typing import NamedTuple

import pytest
from anyio.from_thread import BlockingPortal

from subscriber.demo.servers import Server, Servers
from tests.matrix.debian import debian
from tests.matrix.programs import NEWEST, NotAvailable, programs
from tests.plugins.fix_cluster import SETTINGS, Database, fresh_database
from tests.plugins.fix_subscriber import running_subscriber
from tests.scenarios.conftest import Pair

STATS = "FROM subscriber.subscription_stats"


@pytest.fixture
async def pair(source_db: Database, tracking: Server) -> AsyncIterator[Pair]:
    """Create a source, and a launcher on a target that tracks commit timestamps."""
    async with fresh_database(tracking) as target, running_subscriber(target) as running:
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
    found: list[Order] = []
    for exists, sequences in ((True, ON_ROW), (False, ON_NOTHING)):
        for here, there in product(sequences, repeat=2):
            length = len(here) + len(there)
            for places in combinations(range(length), len(here)):
                left, right = iter(here), iter(there)
                steps = tuple((0, next(left)) if place in places else (1, next(right)) for place in range(length))
                found.append(Order(len(found) + 1, exists, steps))
    return found


@pytest.fixture(params=[18, 14, 19])
def two_servers(request: pytest.FixtureRequest, portal: BlockingPortal, session_servers: Servers) -> list[Server]:
    """Return two servers of one version that track commit timestamps."""
    if request.param == NEWEST:
        return [request.getfixturevalue(name) for name in ("tracking", "tracking_too")]
    try:
        bin = debian(request.param) if request.param > NEWEST else programs(request.param)
    except NotAvailable as reason:
        pytest.skip(f"no PostgreSQL {request.param}: {reason}")

    async def start() -> list[Server]:
        servers = []
        for name in ("tracking", "tracking too"):
            settings = {**SETTINGS, "track_commit_timestamp": "on"}
            server = await session_servers.create(f"{name} {request.param}", settings, bin=bin)
            await server.start()
            servers.append(server)
        return servers

    return portal.call(start)


async def test_servers_agree_after_every_order_of_operations(two_servers: list[Server]) -> None:
    """The last operation decides on both sides, also where one deletes the row.

    A publisher of PostgreSQL 14 sends back what it has received, which changes nothing.
    """
    everything = orders()
    async with AsyncExitStack() as stack:
        databases = [await stack.enter_async_context(fresh_database(server)) for server in two_servers]
        subscribers = [await stack.enter_async_context(running_subscriber(database)) for database in databases]
        for database in databases:
            await database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE PUBLICATION p FOR TABLE t")
        filtered = {"origin": "none"} if await databases[0].major() >= 16 else {}
        for subscriber, other in zip(subscribers, reversed(databases), strict=True):
            await subscriber.create(
                other,
                "p",
                "s",
                copy_data=False,
                retain_dead_tuples=True,
                conflict_policy="last_update_wins",
                **filtered,
            )
        values = ", ".join(f"({order.id}, 'first')" for order in everything if order.exists)
        await databases[0].execute(f"INSERT INTO t VALUES {values}")
        await databases[0].wait_for_catchup("s")
        await databases[1].wait_for_catchup("s")
        for subscriber in subscribers:
            await subscriber.execute("ALTER SUBSCRIPTION s DISABLE")
        for database in databases:
            await database.wait_for("SELECT count(*) FROM pg_stat_replication", 0)
        async with databases[0].connection() as left, databases[1].connection() as right:
            for order in everything:
                for server, statement in order.statements():
                    await (left, right)[server].execute(statement)
        for subscriber in subscribers:
            await subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
        for _ in range(3):  # what is sent back
            for database in databases:
                await database.wait_for_catchup("s", timeout=60)
        expected = [(order.id, order.result) for order in everything if order.result is not None]
        for database in databases:
            found = dict(await database.rows("SELECT id, v FROM t"))
            wrong = [order for order in everything if found.get(order.id) != order.result]
            assert wrong == []
        assert len(expected) > len(everything) / 3
