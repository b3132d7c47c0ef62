"""Servers that replicate to each other with origin = none while pgbench writes to all of them.

If each node changes its own rows, no change may return, be applied twice, or conflict. If all nodes change the same
rows, last_update_wins makes them equal on all nodes, and add_delta makes each balance the sum of all changes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from subscriber.demo.servers import Server
from tests.plugins.fix_cluster import Database, database_with_schema
from tests.plugins.fix_subscriber import Subscriber, running_subscriber

ACCOUNTS = 3_000

# Like pgbench's own transaction, on accounts from :low to :high and the branch :node.
DISJOINT = """
\\set account random(:low, :high)
\\set delta random(-5000, 5000)
BEGIN;
UPDATE accounts SET balance = balance + :delta WHERE id = :account;
UPDATE branches SET balance = balance + :delta WHERE id = :node;
INSERT INTO history (node, account, delta) VALUES (:node, :account, :delta);
END;
"""
SHARED = """
\\set account random(1, 50)
\\set delta random(-5000, 5000)
UPDATE accounts SET balance = :delta, writer = :node WHERE id = :account;
INSERT INTO accounts (id, balance, writer) VALUES (100000 + :account, :delta, :node)
    ON CONFLICT (id) DO UPDATE SET balance = excluded.balance, writer = excluded.writer;
"""
# All nodes add to the same balances.
ADDING = """
\\set account random(1, 20)
\\set delta random(-5000, 5000)
BEGIN;
UPDATE accounts SET balance = balance + :delta WHERE id = :account;
INSERT INTO history (node, account, delta) VALUES (:node, :account, :delta);
END;
"""
TABLES = f"""
CREATE TABLE accounts (id int PRIMARY KEY, balance int DEFAULT 0, writer int DEFAULT 0);
CREATE TABLE branches (id int PRIMARY KEY, balance int DEFAULT 0);
CREATE TABLE history (node int, account int, delta int);
INSERT INTO accounts SELECT generate_series(1, {ACCOUNTS});
INSERT INTO branches SELECT generate_series(1, 3);
"""
SUM = """
SELECT (SELECT pg_catalog.md5(string_agg(a::text, ' ' ORDER BY id)) FROM accounts a),
       (SELECT string_agg(b::text, ' ' ORDER BY id) FROM branches b),
       (SELECT pg_catalog.md5(string_agg(h::text, ' ' ORDER BY h::text)) FROM history h)
"""


class Node:
    """A database with a launcher, subscribed to others; `number` counts from 1."""

    def __init__(self, number: int, database: Database, subscriber: Subscriber) -> None:
        self.number = number
        self.database = database
        self.subscriber = subscriber

    async def bench(self, script: Path, seconds: float, rate: int) -> int:
        """Run pgbench's script, so many transactions a second; the number of its transactions."""
        server = self.database.server
        share = ACCOUNTS // 3
        variables = {"node": self.number, "low": share * (self.number - 1) + 1, "high": share * self.number}
        process = await asyncio.create_subprocess_exec(
            str(server.bin / "pgbench"),
            *["--host=127.0.0.1", f"--port={server.port}", "--username=postgres", "--no-vacuum"],
            *["--client=2", f"--rate={rate}", f"--time={seconds:.0f}", f"--file={script}"],
            *[f"--define={name}={value}" for name, value in variables.items()],
            self.database.name,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output = (await process.communicate())[0].decode()
        match = re.search(r"number of transactions actually processed: (\d+)", output)
        assert match is not None, output
        return int(match[1])


@asynccontextmanager
async def nodes(servers: Sequence[Server], **options: object) -> AsyncIterator[list[Node]]:
    """Create a node on each server, each subscribed to all others."""
    async with AsyncExitStack() as stack:
        databases = [await stack.enter_async_context(database_with_schema(server)) for server in servers]
        for database in databases:
            await database.needs(16, "a publisher knows origins")
        opened = []
        for number, database in enumerate(databases, 1):
            await database.execute(TABLES, "CREATE PUBLICATION p FOR TABLE accounts, branches, history")
            opened.append(Node(number, database, await stack.enter_async_context(running_subscriber(database))))
        for node in opened:
            for other in others(opened, node):
                name = f"from_{other.number}_to_{node.number}"
                await node.subscriber.create(other.database, "p", name, origin="none", copy_data=False, **options)
        await caught_up(opened)
        yield opened


def others(found: Sequence[Node], node: Node) -> list[Node]:
    return [other for other in found if other is not node]


async def caught_up(found: Sequence[Node]) -> None:
    for node in found:
        for other in others(found, node):
            await other.database.wait_for_catchup(f"from_{other.number}_to_{node.number}", timeout=300)


async def work(found: Sequence[Node], script: str, directory: Path, seconds: float, rate: int) -> list[int]:
    """Run pgbench on all nodes concurrently. Returns the number of transactions of each."""
    file = directory / "script.sql"
    file.write_text(script)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(node.bench(file, seconds, rate)) for node in found]
    await caught_up(found)
    return [task.result() for task in running]


async def converge(servers: Sequence[Server], directory: Path, seconds: float) -> None:
    """Change each node's own rows. No change may return, and all nodes must end with all changes."""
    async with nodes(servers) as opened_nodes:
        done = await work(opened_nodes, DISJOINT, directory, seconds, 200)
        assert min(done) > 0
        sums = [await node.database.rows(SUM) for node in opened_nodes]
        assert sums == sums[:1] * len(opened_nodes)
        for node in opened_nodes:
            # Twice applied, or round in a circle, would be a row too many; lost, one too few.
            assert await node.database.value("SELECT count(*) FROM history") == sum(done)
            assert await node.database.value(
                "SELECT (SELECT sum(balance) FROM accounts) = (SELECT sum(delta) FROM history)"
                " AND (SELECT sum(balance) FROM branches) = (SELECT sum(delta) FROM history)"
            )
            # On servers that know the writer of a row, conflicts are reported for the rows that each node was filled
            # with.
            assert not node.subscriber.log.has("ERROR|conflict=(?!update_origin_differs)")
            for other in others(opened_nodes, node):
                worker = await node.subscriber.worker(f"from_{other.number}_to_{node.number}")
                assert worker["transactions"] <= done[other.number - 1], "what came from elsewhere was sent on"


async def fight(servers: Sequence[Server], directory: Path, seconds: float) -> None:
    """Change the same rows on all nodes. The last write must win on every node."""
    async with nodes(servers, conflict_policy="'last_update_wins'") as opened_nodes:
        await work(opened_nodes, SHARED, directory, seconds, 100)
        sums = [await node.database.rows(SUM) for node in opened_nodes]
        assert sums == sums[:1] * len(opened_nodes)
        writers = await opened_nodes[0].database.rows("SELECT DISTINCT writer FROM accounts WHERE writer > 0")
        assert len(writers) > 1
        for node in opened_nodes:
            assert re.findall("ERROR: .*", node.subscriber.log.text()) == []
            assert await node.database.value("SELECT count(*) FROM subscriber.conflict_history") > 0


async def add(servers: Sequence[Server], directory: Path, seconds: float) -> None:
    """Add to the same balances on all nodes. No addition may be lost or applied twice on any node."""
    async with nodes(servers, conflict_policy="'public.accounts(balance): add_delta'") as opened_nodes:
        for node in opened_nodes:
            await node.database.execute("ALTER TABLE accounts REPLICA IDENTITY FULL")
        await work(opened_nodes, ADDING, directory, seconds, 100)
        for node in opened_nodes:
            wrong = await node.database.rows(
                "SELECT id, balance, total FROM accounts"
                " JOIN (SELECT account AS id, sum(delta) AS total FROM history GROUP BY account) h USING (id)"
                " WHERE balance <> total"
            )
            assert wrong == []
            assert await node.database.value("SELECT count(DISTINCT node) FROM history") == len(opened_nodes)
            assert re.findall("ERROR: .*", node.subscriber.log.text()) == []
        added = "SELECT count(*) FROM subscriber.conflict_history WHERE policy = 'add_delta' AND resolution = 'added'"
        assert sum([await node.database.value(added) for node in opened_nodes]) > 0


@pytest.fixture(scope="session")
def two(publisher: Server, target: Server) -> list[Server]:
    return [publisher, target]


@pytest.fixture(scope="session")
def three(publisher: Server, target: Server, tracking: Server) -> list[Server]:
    return [publisher, target, tracking]


async def test_three_servers_that_replicate_to_each_other_converge(three: list[Server], tmp_path: Path) -> None:
    await converge(three, tmp_path, 1)


async def test_two_servers_that_change_the_same_rows_converge(
    tracking: Server, tracking_too: Server, tmp_path: Path
) -> None:
    await fight([tracking, tracking_too], tmp_path, 2)


async def test_two_servers_that_add_to_the_same_rows_converge(
    tracking: Server, tracking_too: Server, tmp_path: Path
) -> None:
    await add([tracking, tracking_too], tmp_path, 2)


@pytest.mark.soak  # two of the three servers are these
@pytest.mark.timeout(600)
async def test_two_servers_that_replicate_to_each_other_converge_at_length(two: list[Server], tmp_path: Path) -> None:
    await converge(two, tmp_path, 60)


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_three_servers_that_replicate_to_each_other_converge_at_length(
    three: list[Server], tmp_path: Path
) -> None:
    await converge(three, tmp_path, 60)


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_two_servers_that_change_the_same_rows_for_long(
    tracking: Server, tracking_too: Server, tmp_path: Path
) -> None:
    await fight([tracking, tracking_too], tmp_path, 60)
