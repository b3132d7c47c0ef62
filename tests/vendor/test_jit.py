"""None of our plans is JIT-compiled, even if the server considers it cheap."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

from subscriber.check.check import collect
from subscriber.cli.commands.exec import execute_statements
from subscriber.demo.servers import Server, Servers
from tests.plugins.fix_cluster import SETTINGS, fresh_database
from tests.plugins.fix_subscriber import running_subscriber
from tests.scenarios.test_outages import status_of

# Every plan is compiled, and a session that compiles its first one logs it.
EAGER = {
    "jit_above_cost": "0",
    "jit_inline_above_cost": "-1",
    "jit_optimize_above_cost": "-1",
    "log_min_messages": "debug1",
    "log_line_prefix": "%b|%a|",
}
LOADED = "successfully loaded JIT provider in current session"


def compiling(server: Server) -> set[tuple[str, str]]:
    """Kinds and names of the sessions that have compiled something."""
    lines = [line.split("|") for line in server.log.read_text().splitlines() if LOADED in line]
    return {(kind, name) for kind, name, *_ in lines}


async def test_no_session_of_ours_compiles_a_plan(servers: Servers, vendor_bin: Path) -> None:
    publisher = await servers.create("publisher", SETTINGS | EAGER, bin=vendor_bin)
    target = await servers.create("target", SETTINGS | EAGER, bin=vendor_bin)
    await publisher.start()
    await target.start()
    tables = (
        "CREATE TABLE t (id int PRIMARY KEY, v int UNIQUE)",
        "CREATE TABLE bare (a int)",
        "ALTER TABLE bare REPLICA IDENTITY FULL",
    )
    async with fresh_database(publisher) as source, fresh_database(target) as copy:
        await source.execute(*tables, "INSERT INTO t VALUES (1, 1)", "INSERT INTO bare VALUES (1)")
        await source.execute("CREATE PUBLICATION p FOR ALL TABLES")
        await copy.execute(*tables)
        await collect(copy.dsn(), source.dsn(), ["p"], None)
        create = f"CREATE SUBSCRIPTION s CONNECTION '{source.dsn()}' PUBLICATION p"
        await execute_statements(copy.dsn(), create, StringIO())
        async with running_subscriber(copy) as subscriber:
            await subscriber.wait_for_ready(source)
            await source.execute("INSERT INTO t SELECT i, i FROM generate_series(2, 100) i", "UPDATE bare SET a = 2")
            await source.execute("UPDATE t SET v = -v", "DELETE FROM bare")
            await source.wait_for_catchup("s")
            await copy.execute("INSERT INTO t VALUES (1000, 1000)")
            await source.execute("INSERT INTO t VALUES (1000, 1000)")
            await subscriber.log.wait_for("conflict detected")
            await status_of(copy)
            await execute_statements(copy.dsn(), "ALTER SUBSCRIPTION s DISABLE", StringIO())
            await execute_statements(copy.dsn(), "DROP SUBSCRIPTION s", StringIO())
    assert ("client backend", "[unknown]") in compiling(target)  # sessions of this test
    for server in (publisher, target):
        ours = {name for kind, name in compiling(server) if kind == "client backend" and name != "[unknown]"}
        assert ours == set()
