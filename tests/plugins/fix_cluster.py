"""Two real PostgreSQL 18 servers for a whole run, and separate databases for each test.

    publisher, target           the servers (subscriber.demo.servers.Server); started on first use
    processes                   a directory for processes that must end with this one
    source_db, target_db        a new database on each, as a Database
    with_schema                 target_db has schema "subscriber"
    servers, new_servers        to create more servers, of other versions or to be killed
    server_of                   servers of other major versions that the tests of a run share

Servers live as long as the session, while pytest-asyncio creates an event loop for each test. They are started and
stopped in separate event loops, which Server supports.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio
import asyncpg
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from subscriber.catalog import schema
from subscriber.catalog.schema import ensure_schema
from subscriber.demo.servers import Account, Server, Servers, embedded_bin, temporary_servers
from subscriber.display import sql_literal
from tests.matrix.debian import debian
from tests.matrix.programs import NEWEST, NotAvailable, programs
from tests.passwords import MARK
from tests.plugins.fix_passwords import search, watch_file

# Waiting times that a production server counts in minutes would only make tests slow.
SETTINGS = {
    "wal_sender_timeout": "10s",
    "wal_receiver_status_interval": "1s",
    "wal_retrieve_retry_interval": "100ms",
    "max_connections": "200",
    "shared_buffers": "32MB",
    "max_wal_size": "128MB",
    "autovacuum": "off",
}
# Making and dropping databases costs a file system on disk a fifth of all that tests do.
MEMORY = Path("/dev/shm")
ENOUGH_MEMORY = 6 * 1024**3  # bytes
# Another version for the whole run: a directory with its programs.
PUBLISHER_BIN = "SUBSCRIBER_TEST_PUBLISHER_BIN"
TARGET_BIN = "SUBSCRIBER_TEST_TARGET_BIN"

# The activity of each session of a database.
SESSIONS = """
SELECT pg_catalog.concat_ws(' | ', pid, application_name, state, wait_event, 'since ' || state_change,
       'waits for ' || nullif(pg_catalog.pg_blocking_pids(pid)::text, '{}'), 'xid ' || backend_xid, query)
  FROM pg_catalog.pg_stat_activity
 WHERE datname = pg_catalog.current_database() AND pid <> pg_catalog.pg_backend_pid()
"""

# Fixtures that create schema "subscriber" in target_db, which takes half a second of a processor.
CREATE_SCHEMA = frozenset({"subscriber", "subscriptions", "program", "database", "faults", "with_schema"})

# Statements with an effect on sessions that DISCARD ALL does not end: settings of new sessions, an origin.
KEPT_BY_SESSIONS = ("ALTER DATABASE", "pg_replication_origin_session_setup")

WITH_SCHEMA = "with_schema"  # the database that is copied by database_with_schema()
# What subscriber.rebind() does for a copy without subscriptions, in a tenth of the time. After a crash of the server,
# the tables of the schema that are not logged are empty.
RESTORE = "SELECT subscriber.restore() WHERE NOT EXISTS (SELECT FROM subscriber.complete)"
REBIND = """
UPDATE subscriber.identity
   SET database_oid = p.database_oid, database_name = p.database_name, sync_id = floor(random() * 1e18)::bigint::text
  FROM subscriber.present_identity() p
"""

# End the sessions of a database, and return their statements: bytes, in the encoding of the database.
END_SESSIONS = """
SELECT textsend(application_name || ': ' || query), pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1
"""
# Return True if something of a database is left that only a session of the database can end.
HAS_MORE = """
SELECT EXISTS (SELECT FROM pg_prepared_xacts WHERE database = $1) OR EXISTS (SELECT FROM pg_replication_origin)
"""

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 0.05  # seconds between two queries of a test that waits

# The servers of tests have no TLS. To ask for it takes a third of the time of Python for a session.
NO_TLS: Final = "disable"

numbers = itertools.count(1)
Result = TypeVar("Result")


class SessionPool:
    """Sessions of a test that it does not use now. A new session takes 5 ms of the server, and an old one 0.2."""

    def __init__(self) -> None:
        self._sessions: list[asyncpg.Connection[asyncpg.Record]] = []

    async def take(self) -> asyncpg.Connection[asyncpg.Record] | None:
        """Return one that the server has not ended; None: there is none."""
        while self._sessions:
            session = self._sessions.pop()
            with suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
                await session.execute("SELECT")
                return session
            session.terminate()
        return None

    async def give_back(self, session: asyncpg.Connection[asyncpg.Record]) -> None:
        """Keep a session without anything that its user has set, or close it if it is in a transaction or ended."""
        if not session.is_closed() and not session.is_in_transaction():
            with suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
                await session.execute("DISCARD ALL")
                await session.reload_schema_state()
                self.keep(session)
                return
        await session.close()

    def keep(self, session: asyncpg.Connection[asyncpg.Record]) -> None:
        """Keep a session as it is."""
        self._sessions.append(session)

    def close(self) -> None:
        while self._sessions:
            self._sessions.pop().terminate()


class RootSessions:
    """Sessions of the superuser on the servers of a run, in database postgres.

    Each test creates and drops databases in them. Its own event loop ends with the test, and the one of the portal with
    the run.
    """

    def __init__(self, portal: BlockingPortal, directory: Path) -> None:
        """`directory` has the servers that the tests of the run share."""
        self._portal = portal
        self._directory = directory
        self._idle: defaultdict[Path, SessionPool] = defaultdict(SessionPool)

    def has(self, server: Server) -> bool:
        """Return True if the tests of the run share the server."""
        return server.directory.is_relative_to(self._directory)

    async def run(
        self, server: Server, work: Callable[[asyncpg.Connection[asyncpg.Record]], Awaitable[Result]]
    ) -> Result:
        """Run `work` in the portal, with a session of the server."""
        return await asyncio.wrap_future(self._portal.start_task_soon(self._run, server, work))

    async def _run(
        self, server: Server, work: Callable[[asyncpg.Connection[asyncpg.Record]], Awaitable[Result]]
    ) -> Result:
        idle = self._idle[server.directory]
        session = await idle.take() or await asyncpg.connect(server.dsn(), ssl=NO_TLS)
        try:
            result = await work(session)
        except BaseException:
            session.terminate()
            raise
        idle.keep(session)
        return result

    async def close(self) -> None:
        for idle in self._idle.values():
            idle.close()


_roots: RootSessions | None = None  # None: outside of a run of pytest, or before it has servers


async def as_root(server: Server, work: Callable[[asyncpg.Connection[asyncpg.Record]], Awaitable[Result]]) -> Result:
    """Return the result of `work`, which gets a session of the superuser. It changes no setting of the session."""
    if _roots is not None and _roots.has(server):
        return await _roots.run(server, work)
    session: asyncpg.Connection[asyncpg.Record] = await asyncpg.connect(server.dsn(), ssl=NO_TLS)
    try:
        return await work(session)
    finally:
        await session.close()


@dataclass
class Database:
    """A database of one test, with the statements that tests need. Values are returned as by asyncpg."""

    server: Server
    name: str
    settings: dict[str, str] = field(default_factory=dict)  # of the test's sessions
    _connections: list[asyncpg.Connection[asyncpg.Record]] = field(default_factory=list)
    _idle: SessionPool | None = None  # the sessions of one test; None: each block has a new one

    def dsn(self, **parameters: str) -> str:
        """Return a connection string for this database; `parameters` are further libpq keywords.

        It has a password that the server does not ask for. So each test fails that shows its connection string.
        """
        return self.server.dsn(self.name, **{"password": MARK, **parameters})

    async def connect(self, **settings: str) -> asyncpg.Connection[asyncpg.Record]:
        """Open a connection that is closed when the test ends."""
        connection: asyncpg.Connection[asyncpg.Record] = await asyncpg.connect(
            self.dsn(), server_settings={**self.settings, **settings}, ssl=NO_TLS
        )
        self._connections.append(connection)
        return connection

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
        """Open a connection for the block."""
        connection: asyncpg.Connection[asyncpg.Record] = await asyncpg.connect(
            self.dsn(), server_settings=self.settings, ssl=NO_TLS
        )
        try:
            yield connection
        finally:
            await connection.close()

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
        """Lend a session of the test to a method of this class."""
        if self._idle is None:
            async with self.connection() as connection:
                yield connection
            return
        session = await self._idle.take()
        if session is None:
            session = await asyncpg.connect(
                self.dsn(), server_settings=self.settings, statement_cache_size=0, ssl=NO_TLS
            )
        try:
            yield session
        except BaseException:
            await session.close()
            raise
        await self._idle.give_back(session)

    def close_sessions(self) -> None:
        """End the sessions that no method uses now, so that the database can be a template."""
        if self._idle:
            self._idle.close()

    async def execute(self, *statements: str) -> None:
        """Run statements, each argument (one or several statements) in a transaction of its own."""
        async with self._session() as connection:
            for statement in statements:
                await connection.execute(statement)
        if any(word in statement for statement in statements for word in KEPT_BY_SESSIONS):
            self.close_sessions()

    async def rows(self, query: str, *arguments: object) -> list[tuple[Any, ...]]:
        """Return all rows of a query as tuples."""
        async with self._session() as connection:
            return [tuple(row) for row in await connection.fetch(query, *arguments)]

    async def value(self, query: str, *arguments: object) -> Any:
        """Return the first column of the first row; None without a row."""
        async with self._session() as connection:
            return await connection.fetchval(query, *arguments)

    async def major(self) -> int:
        """Return the server's major version."""
        async with self._session() as connection:
            return connection.get_server_version().major

    async def needs(self, major: int, what: str) -> None:
        """Skip the test if the server is older than major version `major`, the first one with the feature `what`."""
        if await self.major() < major:
            pytest.skip(f"{what} since PostgreSQL {major}")

    async def stream_everything(self) -> None:
        """Make new sessions of a publisher stream each change immediately, even of small transactions."""
        await self.needs(16, "a publisher can be told to stream small transactions")
        newer = await self.major() >= 17
        name = "debug_logical_replication_streaming" if newer else "logical_replication_mode"
        await self.execute(f"ALTER DATABASE {self.name} SET {name} = immediate")

    async def flush_wal(self) -> None:
        """Flush a publisher's WAL, so that walsenders see an open transaction. Otherwise that takes up to 15 s."""
        await self.execute("CHECKPOINT")

    async def wait_for(self, query: str, expected: object = True, *, timeout: float = 20.0) -> None:
        """Repeat the query until it returns `expected`.

        After `timeout` seconds, fails with the last value and the sessions.
        """
        last = None
        with anyio.move_on_after(timeout):
            async with self._session() as connection:
                statement = None  # parsed once: most waits take several queries
                for pause in lengthening_pauses():
                    statement = statement or await connection.prepare(query)
                    try:
                        if (last := await statement.fetchval()) == expected:
                            return
                    except asyncpg.InvalidCachedStatementError:  # a column has another type now
                        statement = None
                    await anyio.sleep(pause)
        sessions = "".join(f"\n  {session}" for (session,) in await self.rows(SESSIONS))
        pytest.fail(f"after {timeout} s {query!r} gives {last!r}, not {expected!r}; the sessions:{sessions}")

    async def wait_for_catchup(self, application_name: str, *, timeout: float = 20.0) -> None:
        """Wait on a publisher until that subscriber has confirmed everything written up to now."""
        position = await self.value("SELECT pg_current_wal_lsn()::text")
        await self.wait_for(
            f"SELECT count(*) FROM pg_stat_replication WHERE application_name = '{application_name}'"
            f" AND state = 'streaming' AND replay_lsn >= '{position}'",
            1,
            timeout=timeout,
        )


def lengthening_pauses() -> Iterator[float]:
    """Yield the pauses of a test that waits. Each query takes processor time from what it waits for."""
    pause = FIRST_PAUSE
    while True:
        yield pause
        pause = min(1.3 * pause, LONGEST_PAUSE)


@asynccontextmanager
async def fresh_database(
    server: Server, encoding: str | None = None, *, template: str = "template0"
) -> AsyncIterator[Database]:
    """Create a copy of an empty database.

    It is dropped at the end with its sessions, slots, origins and prepared transactions.

    With an `encoding`, the sessions of tests see its texts as bytes. Bytes that are not ASCII are an error.
    """
    database = Database(server, f"test_{next(numbers)}", _idle=SessionPool())

    async def create(root: asyncpg.Connection[asyncpg.Record]) -> None:
        if template == WITH_SCHEMA:
            await _make_template(server, root)
        quicker = " STRATEGY file_copy" if root.get_server_version().major >= 15 else ""
        if encoding is not None:
            quicker += f" ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C'"
        await root.execute(f"CREATE DATABASE {database.name} TEMPLATE {template}{quicker}")

    if encoding is not None:
        database.settings["client_encoding"] = "SQL_ASCII"
    await as_root(server, create)
    try:
        yield database
    finally:
        for connection in database._connections:
            connection.terminate()
        if server.pid is None:  # the test ended between stop and start
            await server.start()
        await _drop(server, database)


@asynccontextmanager
async def database_with_schema(server: Server) -> AsyncIterator[Database]:
    """Create a copy of a database with schema "subscriber". A copy takes a tenth of the time of creating the schema."""
    async with fresh_database(server, template=WITH_SCHEMA) as database:
        await database.execute(RESTORE, REBIND)
        yield database


async def _make_template(server: Server, root: asyncpg.Connection[asyncpg.Record]) -> None:
    if not await root.fetchval("SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)", WITH_SCHEMA):
        await root.execute(f"CREATE DATABASE {WITH_SCHEMA} TEMPLATE template0")
        made = await asyncpg.connect(Database(server, WITH_SCHEMA).dsn())
        await ensure_schema(made)
        await made.close()


async def _drop(server: Server, database: Database) -> None:
    """Drop a database, and its objects outside of the database."""
    database.close_sessions()

    async def end_sessions(root: asyncpg.Connection[asyncpg.Record]) -> list[str]:
        statements = [
            statement.decode(errors="replace") for statement, _ in await root.fetch(END_SESSIONS, database.name)
        ]
        with anyio.move_on_after(5):
            while await root.fetchval("SELECT count(*) FROM pg_stat_activity WHERE datname = $1", database.name):
                await anyio.sleep(0.01)
        return statements

    for statement in await as_root(server, end_sessions):
        search(statement, "statement of a session")
    if await as_root(server, lambda root: root.fetchval(HAS_MORE, database.name)):
        await _end_transactions_and_origins(database)

    async def drop(root: asyncpg.Connection[asyncpg.Record]) -> None:
        await _drop_slots(root, database.name)
        await root.execute(f"DROP DATABASE {database.name} WITH (FORCE)")

    await as_root(server, drop)


async def _end_transactions_and_origins(database: Database) -> None:
    """Roll prepared transactions back, and drop the origins of the subscriptions. Both needs a session of its own."""
    async with database.connection() as own:
        await own.execute("SET synchronous_commit = off")
        for (gid,) in await own.fetch("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"):
            await own.execute(f"ROLLBACK PREPARED {sql_literal(gid)}")
        # Origins belong to the whole server: only those whose subscription is ours.
        if await own.fetchval(schema.REVISION):
            await own.execute(
                "SELECT pg_replication_origin_drop(roname) FROM pg_replication_origin, subscriber.subscription"
                " WHERE roname = 'pg_' || subid::text OR roname LIKE 'pg_' || subid::text || '\\_%'"
            )


async def _drop_slots(root: asyncpg.Connection[asyncpg.Record], name: str) -> None:
    """Drop a database's slots. A subscriber whose session was ended may have reconnected to a slot once more."""
    for attempt in range(100):
        try:
            await root.fetch(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = $1", name
            )
        except asyncpg.ObjectInUseError:
            if attempt == 99:
                raise
            await root.fetch(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE database = $1", name
            )
            await anyio.sleep(0.05)
        else:
            return


def memory() -> Path | None:
    """Return a directory in memory; None if memory is scarce, as in a container, or programs cannot run there."""
    if not MEMORY.is_dir():
        return None
    space = os.statvfs(MEMORY)
    enough = space.f_bavail * space.f_frsize >= ENOUGH_MEMORY
    return MEMORY if enough and not space.f_flag & os.ST_NOEXEC else None


@pytest.fixture(scope="session")
def portal() -> Iterator[BlockingPortal]:
    """Run an event loop in a thread, for objects with the lifetime of the session."""
    with start_blocking_portal() as portal:
        yield portal


@pytest.fixture(scope="session")
def session_servers(portal: BlockingPortal) -> Iterator[Servers]:
    with (
        portal.wrap_async_context_manager(temporary_servers(inside=memory())) as servers,
        pytest.MonkeyPatch.context() as patch,
    ):
        # A program that a test kills leaves its spool folder.
        patch.setenv("SUBSCRIBER_SPOOL_DIR", str(servers.directory / "spool"))
        roots = RootSessions(portal, servers.directory)
        patch.setattr("tests.plugins.fix_cluster._roots", roots)
        yield servers
        portal.call(roots.close)


ServerOf = Callable[[str, int], Server]


@pytest.fixture(scope="session")
def server_of(portal: BlockingPortal, session_servers: Servers) -> ServerOf:
    """Start servers of other major versions, one for each name and version. Skips the test if there is none."""
    started: dict[tuple[str, int], Server] = {}

    def get(name: str, major: int) -> Server:
        if (name, major) not in started:
            try:
                bin = debian(major) if major > NEWEST else programs(major)
            except NotAvailable as reason:
                pytest.skip(f"no PostgreSQL {major}: {reason}")

            async def start() -> Server:
                server = await session_servers.create(f"{name} {major}", SETTINGS, bin=bin)
                await server.start()
                return server

            started[name, major] = portal.call(start)
        return started[name, major]

    return get


def _start(portal: BlockingPortal, servers: Servers, name: str, variable: str) -> Server:
    async def start() -> Server:
        programs = Path(os.environ[variable]) if variable in os.environ else embedded_bin()
        server = await servers.create(name, SETTINGS, bin=programs)
        await server.start()
        watch_file(server.log)
        return server

    return portal.call(start)


@pytest.fixture(scope="session")
def publisher(portal: BlockingPortal, session_servers: Servers) -> Server:
    return _start(portal, session_servers, "publisher", PUBLISHER_BIN)


@pytest.fixture(scope="session")
def target(portal: BlockingPortal, session_servers: Servers) -> Server:
    return _start(portal, session_servers, "target", TARGET_BIN)


@pytest.fixture
def processes(session_servers: Servers) -> Path:
    """Create a directory for process ids.

    A process whose id is in a file *.pid there is ended with the servers, even if this process is killed.
    """
    directory = session_servers.directory / f"processes-{next(numbers)}"
    directory.mkdir()
    return directory


@pytest.fixture
async def source_db(publisher: Server) -> AsyncIterator[Database]:
    async with fresh_database(publisher) as database:
        yield database


@pytest.fixture
def with_schema() -> None:
    """Have schema "subscriber" in target_db, if a command or a program of the test would create it."""


@pytest.fixture
async def target_db(target: Server, request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    """Has schema "subscriber" for tests with a fixture that would create it before anything else."""
    make = fresh_database if CREATE_SCHEMA.isdisjoint(request.fixturenames) else database_with_schema
    async with make(target) as database:
        yield database


@pytest.fixture(scope="session")
def data_directories(session_servers: Servers) -> Path:
    """Create a directory for the data directories that CopiedServers copies."""
    directory = session_servers.directory / "originals"
    directory.mkdir()
    return directory


class CopiedServers(Servers):
    """Servers whose data directory is a copy. initdb takes a second of a processor, and a copy a twentieth.

    Servers of one version have one system identifier therefore. A test whose servers must differ uses `new_servers`.
    """

    def __init__(
        self, originals: Path, directory: Path, account: Account, default_bin: Path | None, *, differ: bool = False
    ) -> None:
        """Create a group. `originals` has the data directories that are copied, one for each version.

        With `differ`, each server of the group is a copy of another one, and has another system identifier.
        """
        super().__init__(directory, account, default_bin)
        self._originals = originals
        self._numbers = itertools.count(1) if differ else itertools.repeat(0)

    async def initialize(self, server: Server, *options: str) -> None:
        version = await server.program("postgres", "--version")
        key = (version, options, next(self._numbers))
        original = self._originals / hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        if not original.exists():
            await super().initialize(server, *options)
            await self._copy(server.data, original)
        else:
            await self._copy(original, server.data)

    @staticmethod
    async def _copy(data: Path, copy: Path) -> None:
        await anyio.run_process(["cp", "-a", str(data), str(copy)])


@pytest.fixture
async def servers(data_directories: Path) -> AsyncIterator[Servers]:
    """Create servers for a single test, to be killed or configured differently."""
    async with temporary_servers(inside=memory(), group=partial(CopiedServers, data_directories)) as servers:
        yield servers


@pytest.fixture
async def new_servers(data_directories: Path) -> AsyncIterator[Servers]:
    """Create servers as `servers` does. Each server of a test has a system identifier of its own."""
    group = partial(CopiedServers, data_directories, differ=True)
    async with temporary_servers(inside=memory(), group=group) as servers:
        yield servers
