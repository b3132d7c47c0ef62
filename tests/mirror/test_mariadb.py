"""Mirrors in MariaDB: the server in SUBSCRIBER_MARIADB_URL, one of the installed programs, or one in a container.

The URL is SQLAlchemy's, of an account that may create databases. Each test creates a database, and drops it.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import warnings
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import create_async_engine

from subscriber import ApplyError, ConnectionLost, Lsn
from subscriber.demo.processes import Process
from subscriber.errors import MappingError, SubscriberError
from tests.mirror import private_server
from tests.mirror.conftest import AS_TEXT, Mirror, changes_arrive, rows_of_types
from tests.mirror.test_kills import keep_writing
from tests.publisher.test_containers import without_docker
from tests.targets.test_contract import SqlContract

GIVEN = "SUBSCRIBER_MARIADB_URL"

# As PostgreSQL writes it -> as MariaDB does, in the text it makes of the column.
TYPES: list[tuple[str, str, str]] = [
    ("bool", "t", "1"),
    ("int2", "-32768", "-32768"),
    ("int8", "-9223372036854775808", "-9223372036854775808"),
    ("oid", "4294967295", "4294967295"),
    ("float4", "0.1", "0.1"),
    ("float8", "1e-300", "1e-300"),
    ("float8", "0.30000000000000004", "0.30000000000000004"),
    ("numeric(30,10)", "-12345678901234567890.0123456789", "-12345678901234567890.0123456789"),
    ("numeric(65,30)", "1e-30", "0.000000000000000000000000000001"),
    ("numeric(66,0)", "9" * 66, "9" * 66),
    ("numeric(2,-3)", "98765", "99000"),
    ("text", "a\tb\\c\n'\"é€😀%s :x", "a\tb\\c\n'\"é€😀%s :x"),
    ("bytea", "\\x00ff5c27c3a9", "00FF5C27C3A9"),
    *AS_TEXT,
]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Yield the URL of a server."""
    if given := os.environ.get(GIVEN):
        yield given
        return
    if private_server.is_installed():
        with private_server.private_server() as url:
            yield url
        return
    if reason := without_docker():
        pytest.skip(
            f"MariaDB is not installed (Debian: apt-get install mariadb-server-core mariadb-client-core), and {reason}"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about decorators of its own
        from testcontainers.mysql import MySqlContainer

        with MySqlContainer("mariadb:11", username="root", root_password="test", password="test") as started:
            yield started.get_connection_url().replace("mysql://", "mysql+aiomysql://")


class MariaDB:
    """A database of its own."""

    def __init__(self, server: str) -> None:
        self.name = f"mirror_{random.getrandbits(32):x}"
        self._server = server
        self.url = make_url(server).set(database=self.name).render_as_string(hide_password=False)

    async def rows(self, query: str) -> list[tuple[Any, ...]]:
        return await self._run(self.url, query)

    async def execute(self, *statements: str) -> None:
        for statement in statements:
            await self._run(self.url, statement)

    async def administer(self, statement: str) -> list[tuple[Any, ...]]:
        return await self._run(self._server, statement)

    async def end_sessions(self, command: str = "Sleep") -> None:
        """End all idle sessions, or the one that executes a statement."""
        numbers: list[tuple[Any, ...]] = []
        while not numbers:
            await anyio.sleep(0.05)
            numbers = await self.rows(
                f"SELECT id FROM information_schema.processlist WHERE db = '{self.name}' AND command = '{command}'"
                " AND id <> CONNECTION_ID() AND (command = 'Sleep' OR state = 'User sleep')"
            )
        for (number,) in numbers:
            await self.execute(f"KILL {number}")

    async def _run(self, url: str, statement: str) -> list[tuple[Any, ...]]:
        engine = create_async_engine(url)
        async with engine.begin() as connection:
            execute = await connection.execute(text(statement.replace(":", "\\:")))
            rows = [tuple(row) for row in execute] if execute.returns_rows else []
        await engine.dispose()
        return rows


@pytest.fixture
async def there(server: str) -> AsyncIterator[MariaDB]:
    database = MariaDB(server)
    await database.administer(f"CREATE DATABASE {database.name} CHARACTER SET latin1")
    yield database
    await database.administer(f"DROP DATABASE {database.name}")


async def test_changes_arrive_in_mariadb(mirror: Mirror, there: MariaDB) -> None:
    await changes_arrive(mirror, there.url)


async def test_types_are_the_same_by_copy_and_by_stream(mirror: Mirror, there: MariaDB) -> None:
    await rows_of_types(mirror, TYPES, there.url)
    read = ", ".join(f"HEX(c{i})" if name == "bytea" else f"CAST(c{i} AS CHAR)" for i, (name, _, _) in enumerate(TYPES))
    copied, nulls, streamed = await there.rows(f"SELECT {read} FROM t ORDER BY id")
    assert copied == tuple(value for _, _, value in TYPES)
    assert nulls == (None,) * len(TYPES)
    assert streamed == copied


# Reserved words of either side, and names that may break quoting, formats and parameters of drivers.
NAMES = ["order", "key", "rank", "Group", "a b", "a{0}b", 'a"b', "a:b", "a(b)", "a?b", "ключ", "new_id"]


async def test_quoted_names_are_mirrored(mirror: Mirror, there: MariaDB) -> None:
    columns = ", ".join(f"{quoted(name)} text" for name in NAMES)
    values = ", ".join("repeat(i::text, 3000)" if name == "a b" else "i::text" for name in NAMES)
    await mirror.source.execute(
        'CREATE SCHEMA "Sales"',
        f'CREATE TABLE "Sales"."select" (id int, {columns}, PRIMARY KEY (id, "order", "key"))',
        'ALTER TABLE "Sales"."select" ALTER "a b" SET STORAGE external',
        f'INSERT INTO "Sales"."select" SELECT i, {values} FROM generate_series(1, 3) i',
    )
    await mirror.run(target=there.url)
    await mirror.source.execute(
        """UPDATE "Sales"."select" SET "ключ" = 'é', "new_id" = 'n', "a:b" = 'p' WHERE id > 1""",
        """UPDATE "Sales"."select" SET id = 7 WHERE id = 3""",
        """DELETE FROM "Sales"."select" WHERE id = 1""",
    )
    await mirror.run(target=there.url)
    rows_read = await there.rows("SELECT * FROM Sales_select ORDER BY id")
    assert rows_read == await mirror.source.rows('SELECT * FROM "Sales"."select" ORDER BY id')
    assert len(rows_read) == 2


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


async def test_keys_that_are_nearly_the_same(mirror: Mirror, there: MariaDB) -> None:
    await mirror.source.execute("CREATE TABLE t (a text PRIMARY KEY, b bytea)")
    keys = ["a", "A", "a ", "á", "ａ", "ss", "ß", "", " ", "😀", "😁"]
    connection = await mirror.source.connect()
    await connection.executemany("INSERT INTO t VALUES ($1)", [(key,) for key in keys[:5]])
    await mirror.run(target=there.url)
    await connection.executemany("INSERT INTO t VALUES ($1)", [(key,) for key in keys[5:]])
    await connection.execute("DELETE FROM t WHERE a IN ('a ', ' ')")
    await mirror.run(target=there.url)
    assert sorted(await there.rows("SELECT a FROM t")) == sorted((key,) for key in keys if key not in ("a ", " "))


async def test_rows_go_by_keys_of_any_type(mirror: Mirror, there: MariaDB) -> None:
    """Several rows in one statement."""
    await mirror.source.execute(
        "CREATE TABLE one (k bytea PRIMARY KEY)",
        "CREATE TABLE more (a timestamptz, b numeric(9, 2), c uuid, d bool, n int, PRIMARY KEY (a, b, c, d))",
        "INSERT INTO one SELECT decode(lpad(to_hex(i), 4, '0'), 'hex') FROM generate_series(0, 2499) i",
        "INSERT INTO more SELECT 'epoch'::timestamptz + i * '0.1 s'::interval, i / 4.0, md5(i::text)::uuid, i % 2 = 0,"
        " i FROM generate_series(0, 2499) i",
    )
    await mirror.run(target=there.url)
    assert await there.rows("SELECT (SELECT COUNT(*) FROM one), (SELECT COUNT(*) FROM more)") == [(2500, 2500)]
    await mirror.source.execute(
        "DELETE FROM one WHERE get_byte(k, 1) <> 7; DELETE FROM more WHERE n % 1000 <> 7",
        "INSERT INTO one VALUES ('\\x00')",
    )
    await mirror.run(target=there.url)
    left = [(f"{i:04X}",) for i in range(7, 2500, 256)]
    assert await there.rows("SELECT HEX(k) FROM one ORDER BY k") == [("00",), *left]
    assert await there.rows("SELECT n FROM more ORDER BY n") == [(7,), (1007,), (2007,)]


@pytest.mark.parametrize("mode", ["", "ANSI_QUOTES,NO_BACKSLASH_ESCAPES"])
async def test_a_server_that_cuts_values_or_quotes_in_its_own_way(mirror: Mirror, there: MariaDB, mode: str) -> None:
    """The mirror sets its session's settings instead of relying on the server's."""
    ((before, zone),) = await there.administer("SELECT @@GLOBAL.sql_mode, @@GLOBAL.time_zone")
    await there.execute(f"SET GLOBAL sql_mode = '{mode}'", "SET GLOBAL time_zone = '+05:00'")
    try:
        await there.execute("CREATE TABLE t (a INTEGER AUTO_INCREMENT PRIMARY KEY, b VARCHAR(5), at TIMESTAMP NULL)")
        await mirror.source.execute("CREATE TABLE t (a int PRIMARY KEY, b text, at timestamptz)")
        await mirror.source.execute("INSERT INTO t VALUES (0, E'a\\\\''b', 'epoch'::timestamptz + '1 day')")
        await mirror.run(target=there.url)
        assert await there.rows("SELECT a, b, UNIX_TIMESTAMP(at) FROM t") == [(0, "a\\'b", 86400)]
        await mirror.source.execute("INSERT INTO t VALUES (1, 'too long')")
        with pytest.raises(ApplyError, match="refused a statement: DataError"):
            await mirror.run(target=there.url)
        assert await there.rows("SELECT a FROM t") == [(0,)]
    finally:
        await there.execute(f"SET GLOBAL sql_mode = '{before}'", f"SET GLOBAL time_zone = '{zone}'")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ("t (a INTEGER PRIMARY KEY, b VARCHAR(9), `%` INTEGER)", "cannot write to column"),
        ("t (a INTEGER PRIMARY KEY, b VARCHAR(9)) ENGINE = Aria", "has no transactions"),
        ("t (a INTEGER PRIMARY KEY, b VARCHAR(9) UNIQUE)", "has a unique index besides its primary key: b"),
        ("t (b VARCHAR(9) COLLATE utf8mb4_general_ci PRIMARY KEY)", "takes different texts for the same"),
    ],
)
async def test_tables_that_could_lose_rows_are_refused(mirror: Mirror, there: MariaDB, made: str, message: str) -> None:
    await there.execute(f"CREATE TABLE {made} CHARACTER SET utf8mb4")
    key = "a int PRIMARY KEY, b text" if "a INTEGER" in made else "b text PRIMARY KEY"
    key += ', "%" int' * ("%" in made)
    await mirror.source.execute(f"CREATE TABLE t ({key})")
    with pytest.raises(MappingError, match=message):
        await mirror.run(target=there.url)


async def test_an_existing_table_of_mariadb_keeps_its_column_types(mirror: Mirror, there: MariaDB) -> None:
    await there.execute(
        "CREATE TABLE t (id INTEGER PRIMARY KEY, a BOOLEAN, b DOUBLE, c DECIMAL(12, 4), d JSON, e UUID,"
        " f ENUM('x', 'y'), g VARBINARY(4), own INTEGER DEFAULT 7)"
    )
    await mirror.source.execute(
        "CREATE TABLE t (id int PRIMARY KEY, a bool, b float8, c numeric, d jsonb, e uuid, f text, g bytea)",
        "INSERT INTO t SELECT 1, true, 1e-300, 1.5, '{\"a\": 1}', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', 'y', '\\x00'",
    )
    await mirror.run(target=there.url, create_tables=False)
    assert await there.rows("SELECT a, b, CAST(c AS CHAR), d, CAST(e AS CHAR), f, g, own FROM t") == [
        (1, 1e-300, "1.5000", '{"a": 1}', "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "y", b"\0", 7)
    ]


async def test_a_session_that_the_server_ends(mirror: Mirror, there: MariaDB) -> None:
    """An idle mirror does not notice it. In a transaction the mirror ends, and resumes after a restart."""
    await mirror.source.execute("CREATE TABLE t (a int PRIMARY KEY)")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(mirror.run, target=there.url, until=Lsn.parse("F/0")))
        await mirror.source.wait_for("SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'", 1)
        await there.end_sessions()
        await mirror.source.execute("INSERT INTO t VALUES (1)")
        with anyio.fail_after(10):
            while await there.rows("SELECT a FROM t") != [(1,)]:
                await anyio.sleep(0.05)
        tasks.cancel_scope.cancel()
    await there.execute("CREATE TRIGGER i BEFORE INSERT ON t FOR EACH ROW SET new.a = new.a + SLEEP(20)")
    await mirror.source.execute("INSERT INTO t VALUES (2)")
    ending = asyncio.create_task(there.end_sessions("Query"))
    with pytest.raises(ConnectionLost):
        await mirror.run(target=there.url)
    await ending
    await there.execute("DROP TRIGGER i")
    await mirror.run(target=there.url)
    assert await there.rows("SELECT a FROM t") == [(1,), (2,)]


async def test_a_server_that_refuses_a_new_session(mirror: Mirror, there: MariaDB) -> None:
    """The connection is lost between two transactions, and cannot be opened again."""
    await mirror.source.execute("CREATE TABLE t (a int PRIMARY KEY)")
    run = partial(mirror.run, target=there.url, until=Lsn.parse("F/0"))
    await mirror.run(target=there.url)
    following = asyncio.create_task(run())
    await mirror.source.wait_for("SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'", 1)
    await there.end_sessions()
    await there.administer(f"DROP DATABASE {there.name}")
    await mirror.source.execute("INSERT INTO t VALUES (1)")
    with pytest.raises(ConnectionLost, match="could not connect to the target: OperationalError"):
        await following
    await there.administer(f"CREATE DATABASE {there.name}")


async def test_a_killed_mirror_applies_each_change_once(mirror: Mirror, there: MariaDB, tmp_path: Path) -> None:
    """As in test_kills.py, with records of the writes."""
    seed = random.randrange(10_000)
    print(f"seed {seed}")
    chance = random.Random(seed)
    await mirror.source.execute("CREATE TABLE log (id int PRIMARY KEY, note text)", "CREATE SEQUENCE ids")
    await there.execute(
        "CREATE TABLE log (id INTEGER PRIMARY KEY, note TEXT) CHARACTER SET utf8mb4",
        "CREATE TABLE written (id INTEGER, note TEXT)",
        "CREATE TRIGGER i AFTER INSERT ON log FOR EACH ROW INSERT INTO written VALUES (new.id, new.note)",
        "CREATE TRIGGER u AFTER UPDATE ON log FOR EACH ROW INSERT INTO written VALUES (new.id, new.note)",
    )
    dsn = mirror.source.dsn(options="-c logical_decoding_work_mem=64kB")
    process = Process("mirror", [sys.executable, "-m", "tests.mirror.victim_process", dsn, there.url], tmp_path)
    stop = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep_writing, mirror.source, stop, chance)
        for _ in range(3):
            process.start()
            await anyio.sleep(chance.uniform(1.0, 2.0))
            assert process.pid is not None, process.last_lines()
            await process.kill9()
        stop.set()
    await mirror.run(target=there.url)
    rows = "SELECT id, note FROM log ORDER BY id"
    assert await there.rows(rows) == await mirror.source.rows(rows)
    assert await there.rows("SELECT id, note FROM written GROUP BY id, note HAVING COUNT(*) > 1") == []


async def test_a_value_that_is_too_large(mirror: Mirror, there: MariaDB) -> None:
    ((largest,),) = await there.rows("SELECT @@max_allowed_packet")
    await mirror.source.execute("CREATE TABLE t (a int PRIMARY KEY, b text)")
    await mirror.run(target=there.url)
    await mirror.source.execute(f"INSERT INTO t VALUES (1, repeat('x', {largest // 2})), (2, repeat('x', {largest}))")
    with pytest.raises(SubscriberError, match="max_allowed_packet") as caught:
        await mirror.run(target=there.url)
    assert isinstance(caught.value, ApplyError | ConnectionLost)  # some versions close the connection
    assert "xxx" not in f"{caught.value}"
    assert await there.rows("SELECT a FROM t") == []


@pytest.mark.parametrize("part", [{"port": 1}, {"password": "wrong"}, {"database": "nosuch"}])
async def test_a_server_that_cannot_be_reached(mirror: Mirror, there: MariaDB, part: dict[str, Any]) -> None:
    url = make_url(there.url).set(**part).render_as_string(hide_password=False)
    with pytest.raises(ConnectionLost, match="could not connect to the target: OperationalError") as caught:
        await mirror.run(target=url)
    assert "wrong" not in str(caught.value)


class TestContract(SqlContract):
    @pytest.fixture(autouse=True)
    def _database(self, there: MariaDB) -> None:
        self.url = there.url
