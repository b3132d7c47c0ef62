"""Queries for checksums, each for a part of a table in the snapshot of one server.

    ChecksumTask     a query for a part of a table
    QueryPool        runs queries in a few connections, with progress and a limit of the rate

**Invariant.** A query reads the rows that its snapshot sees, or fails. A rewrite of the heap moves or removes rows in
spite of the snapshot, so each query locks the heap and compares its file with that of the snapshot first.

**Failure cases.** A table that was dropped, rewritten or altered, or whose lock is not granted in time, is an outcome
of its queries. The other tables are read. A lost connection is opened again and the query is repeated, as long as the
session that has exported the snapshot exists. Without that session the server does not know the snapshot, and the
comparison fails with an error that says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import anyio
import asyncpg

from subscriber.catalog.connection import Connection, translate
from subscriber.comparison.checksums import Answer
from subscriber.comparison.consistent_snapshot import APPLICATION_NAME, is_snapshot_lost, lost_snapshot
from subscriber.connection.connect import connect
from subscriber.connection.errors import ASYNCPG_ERRORS
from subscriber.connection.settings import EXACT_TEXT
from subscriber.errors import ConnectionLost, SubscriberError, TableChanged
from subscriber.publisher.answers import parsing
from subscriber.publisher.partitions import TablePartition
from subscriber.quoting import identifier, literal
from subscriber.sqlstate import (
    CLASS_DATA_EXCEPTION,
    CLASS_SYNTAX_ERROR_OR_ACCESS_RULE_VIOLATION,
    CLASSES_TO_RETRY,
    INSUFFICIENT_PRIVILEGE,
    INVALID_SCHEMA_NAME,
    LOCK_NOT_AVAILABLE,
    SNAPSHOT_TOO_OLD,
)

JOBS = 4  # connections to each server
ATTEMPTS = 3  # of a query whose connection is lost
CLOSE_TIMEOUT = 5.0  # seconds

_USE_INDEX = "SET LOCAL enable_seqscan = off; SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off"
_FILENODE = "SELECT pg_catalog.pg_relation_filenode($1::pg_catalog.text::pg_catalog.regclass)"


@dataclass(frozen=True, slots=True)
class ServerSnapshot:
    """A snapshot, and how to connect to its server. It includes the connection string, so it is never printed."""

    conninfo: str
    must_use_password: bool
    snapshot: str  # name for SET TRANSACTION SNAPSHOT

    def __repr__(self) -> str:
        return f"ServerSnapshot({self.snapshot})"


@dataclass(frozen=True, slots=True)
class ChecksumTask:
    """A query for a part of a table."""

    server: ServerSnapshot
    part: TablePartition
    sql: str
    by_key: bool = False  # it has to use an index, also if statistics are out of date
    role: str | None = None  # the role that reads the rows. None: the one that has logged in

    def __repr__(self) -> str:
        return f"ChecksumTask({self.part.heap})"


OnTaskDone = Callable[[ChecksumTask], None]
Outcome = Answer | SubscriberError  # the rows, or an error of the table


def is_error_of_table(error: SubscriberError) -> bool:
    """Return True if the table causes the error, by a value, a change or a privilege: other queries may succeed."""
    return (
        isinstance(error, TableChanged)
        or error.sqlstate.startswith(CLASS_DATA_EXCEPTION)
        or error.sqlstate == INSUFFICIENT_PRIVILEGE
    )


def as_table_change(error: SubscriberError) -> SubscriberError:
    """Return TableChanged for the error of a query that a change of its table explains, otherwise the error."""
    is_changed = error.sqlstate.startswith(CLASS_SYNTAX_ERROR_OR_ACCESS_RULE_VIOLATION) or error.sqlstate in (
        INVALID_SCHEMA_NAME,
        LOCK_NOT_AVAILABLE,
        SNAPSHOT_TOO_OLD,
    )
    if is_changed and error.sqlstate != INSUFFICIENT_PRIVILEGE:
        return TableChanged(error.message, sqlstate=error.sqlstate)
    return error


def rewritten(schema: str, name: str) -> TableChanged:
    """Return the error for a table whose file is not the one of the snapshot."""
    return TableChanged(
        f'table "{schema}.{name}" was rewritten while it was compared',
        hint="Compare again after TRUNCATE, VACUUM FULL or the other operation has ended.",
    )


@contextmanager
def _translated() -> Iterator[None]:
    """Convert errors of the driver.

    Raises:
        ConnectionLost: an error that may not occur in another attempt.
        SubscriberError: a permanent error.
    """
    try:
        yield
        return
    except ASYNCPG_ERRORS as error:
        translated = translate(error)
    except SubscriberError as error:
        translated = error
    if translated.sqlstate.startswith(CLASSES_TO_RETRY):
        raise ConnectionLost(translated.message)
    raise SubscriberError(translated.message, hint=translated.remedy, sqlstate=translated.sqlstate)


class QueryPool:
    """Runs queries in a few connections to each server. Each connection keeps one transaction with the snapshot."""

    def __init__(self, jobs: int = JOBS, *, max_rate: int | None = None) -> None:
        """Describe the pool. Connections are opened when there are queries.

        Args:
            jobs: the number of connections to each server.
            max_rate: the number of bytes of tables to read from each server in a second; None: no limit.
        """
        self._jobs = jobs
        self._max_rate = max_rate
        self._read: dict[ServerSnapshot, int] = {}
        self._started = anyio.current_time()

    async def run(self, tasks: Sequence[ChecksumTask], on_done: OnTaskDone = lambda _: None) -> list[Outcome]:
        """Run all queries.

        Args:
            tasks: the queries, for one server or several.
            on_done: called after each query.

        Returns:
            The rows of each query or the error of its table, in the order of `tasks`.

        Raises:
            ConnectionLost: a connection was lost again in the last attempt.
            SubscriberError: a server refuses a query for another reason. The other queries are interrupted.

        Cancellation: the queries are interrupted.
        """
        answers: list[Outcome] = [[] for _ in tasks]
        failed: list[SubscriberError] = []
        async with anyio.create_task_group() as group:

            async def work(server: ServerSnapshot, waiting: deque[int]) -> None:
                try:
                    await self._work(server, waiting, tasks, answers, on_done)
                except SubscriberError as error:
                    failed.append(error)
                    group.cancel_scope.cancel()

            for server in dict.fromkeys(task.server for task in tasks):
                waiting = deque(number for number, task in enumerate(tasks) if task.server == server)
                for _ in range(min(self._jobs, len(waiting))):
                    group.start_soon(work, server, waiting)
        if failed:
            raise failed[0]
        return answers

    async def _work(
        self,
        server: ServerSnapshot,
        waiting: deque[int],
        tasks: Sequence[ChecksumTask],
        answers: list[Outcome],
        on_done: OnTaskDone,
    ) -> None:
        """Run queries in one connection until none is left."""
        attempts: dict[int, int] = {}
        while waiting:
            try:
                with _translated():
                    connection = await _connect(server)
                    try:
                        async with connection.transaction(isolation="repeatable_read", readonly=True):
                            await import_snapshot(connection, server.snapshot)
                            while waiting:
                                number = waiting.popleft()
                                await self._spare(server, tasks[number].part.size)
                                try:
                                    answers[number] = await _run(connection, tasks[number])
                                except BaseException:
                                    waiting.appendleft(number)
                                    raise
                                on_done(tasks[number])
                    finally:
                        await _close(connection)
            except ConnectionLost:
                number = waiting[0] if waiting else -1
                attempts[number] = attempts.get(number, 0) + 1
                if attempts[number] == ATTEMPTS:
                    raise

    async def _spare(self, server: ServerSnapshot, size: int) -> None:
        """Wait until `size` further bytes of the server do not exceed the rate."""
        read = self._read.get(server, 0)
        self._read[server] = read + size
        if self._max_rate is not None:
            await anyio.sleep(max(0.0, self._started + read / self._max_rate - anyio.current_time()))


async def _connect(server: ServerSnapshot) -> Connection:
    return await connect(
        server.conninfo,
        application_name=APPLICATION_NAME,
        settings=EXACT_TEXT,
        must_use_password=server.must_use_password,
    )


async def import_snapshot(connection: Connection, name: str) -> None:
    """Give the transaction the snapshot of the comparison. Raises SubscriberError if it is lost."""
    try:
        await connection.execute(f"SET TRANSACTION SNAPSHOT {literal(name)}")
    except asyncpg.PostgresError as error:
        translated = translate(error)
        raise lost_snapshot(translated) if is_snapshot_lost(translated) else translated from error


async def _close(connection: Connection) -> None:
    """Close a connection. A query that still runs is canceled first: the server would not notice the end."""
    with anyio.move_on_after(CLOSE_TIMEOUT, shield=True):
        await connection.close()
    connection.terminate()


async def _run(connection: Connection, task: ChecksumTask) -> Outcome:
    """Run a query in the connection's transaction. The lock of its heap ends with the query."""
    await connection.execute("SAVEPOINT part")
    outcome: Outcome
    try:
        outcome = await _fetch(connection, task)
    except (asyncpg.PostgresError, SubscriberError) as error:
        failure = error if isinstance(error, SubscriberError) else as_table_change(translate(error))
        if not is_error_of_table(failure):
            raise
        kind = TableChanged if isinstance(failure, TableChanged) else SubscriberError
        outcome = kind(failure.message, sqlstate=failure.sqlstate)
    await connection.execute("ROLLBACK TO SAVEPOINT part")
    return outcome


async def _fetch(connection: Connection, task: ChecksumTask) -> Answer:
    part = task.part
    if task.by_key:
        await connection.execute(_USE_INDEX)
    if task.role is not None:
        await connection.execute(f"SET LOCAL ROLE {identifier(task.role)}")
    if part.can_be_locked:
        await connection.execute(f"LOCK TABLE {part.heap} IN ACCESS SHARE MODE")
    with parsing("the file of a table"):
        filenode = await connection.fetchval(_FILENODE, part.heap)
    if filenode != part.filenode:
        raise rewritten(part.schema, part.name)
    with parsing("rows"):
        return [tuple(row) for row in await connection.fetch(task.sql)]
