"""Parts of tables, copied by an executor: COPY from the publisher into COPY to the target, byte for byte.

**Invariants.**

- One transaction on the target holds the part's row in subscriber.copy_done and the part's rows. A part is therefore
  copied completely and once, no matter which process is killed and how often the part is retried.
- The row of copy_done is inserted first. The insert waits for an earlier attempt that is still running, and finds out
  whether that one was committed.
- Small parts are copied together. Every attempt inserts their rows of copy_done in the same order, before anything
  else, so that attempts wait for each other without a deadlock.
- No value of a row is decoded here, or appears in an error that leaves this module.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

import anyio

from subscriber.catalog import copy_jobs
from subscriber.connection.connect import open_session
from subscriber.connection.pipeline import Pipeline
from subscriber.connection.session import Session, joined_chunks
from subscriber.connection.settings import ALWAYS, NO_TIMEOUTS, known
from subscriber.errors import ConnectionLost, SubscriberError
from subscriber.publisher.answers import parsing
from subscriber.publisher.partitions import TablePartition
from subscriber.quoting import literal
from subscriber.spark.tasks import spare_collector
from subscriber.sqlstate import CLASSES_TO_RETRY, OBJECT_NOT_IN_PREREQUISITE_STATE
from subscriber.targets.postgres.session.capabilities import (
    BECOME_REPLICA,
    SET_REPLICA,
    TargetCapabilities,
    detect_capabilities,
)
from subscriber.targets.postgres.session.schema_check import TableGuard
from subscriber.targets.postgres.sql.row_statements import copy_from

APPLICATION_NAME = "subscriber copy"

SOURCE_SETTINGS = {
    "datestyle": "ISO",
    "intervalstyle": "postgres",
    "extra_float_digits": "3",
    **NO_TIMEOUTS,
}
# The settings of table synchronization. A commit need not wait for the disk, because the commit that records the state
# does.
TARGET_SETTINGS = {
    "row_security": "off",
    "synchronous_commit": "off",
    **NO_TIMEOUTS,
}
_FILENODES = """
SELECT pg_catalog.pg_relation_filenode(heap::pg_catalog.regclass)
  FROM pg_catalog.unnest(ARRAY[{heaps}]) WITH ORDINALITY AS t (heap, number) ORDER BY number
"""


@dataclass(frozen=True, slots=True)
class PartTask:
    """The data that an executor needs. It includes connection strings, so it is never printed."""

    source: str
    must_use_password: bool  # on the publisher
    target: str  # connection string of the role that applies changes
    snapshot: str  # exported by the publisher
    copyid: int
    fence: bytes  # of the copy
    relid: int  # of the target's table
    number: int  # number of the part in its table
    part: TablePartition
    select: str  # the query that reads it
    schema: str  # of the target's table
    name: str
    columns: tuple[str, ...]  # of the target's table, in the order of the query's columns
    role: str  # the role that inserts; "none": the session's own
    guard: TableGuard | None  # None: the table needs none
    runs_foreign_code: bool
    binary: bool
    size: int  # estimated bytes
    is_whole: bool  # the only part of its table

    def __repr__(self) -> str:
        return f"PartTask({self.schema}.{self.name}, part {self.number})"


@dataclass(frozen=True, slots=True)
class Failure:
    """A permanent error that prevents the copy of a part."""

    relid: int
    message: str
    hint: str | None
    sqlstate: str


def copy_parts(tasks: tuple[PartTask, ...]) -> list[Failure]:
    """Copy the missing parts of `tasks` in one transaction on each server. All parts are of the same two servers.

    If one part cannot be copied, the others are started again without it.

    Returns:
        The parts that cannot be copied.

    Raises:
        ConnectionLost: an error that may not occur in another attempt.
    """
    spare_collector()
    return anyio.run(_copy_parts, tasks)


async def _copy_parts(tasks: tuple[PartTask, ...]) -> list[Failure]:
    waiting, failures = deque([tasks]), list[Failure]()
    while waiting:  # the connections are lost with a failure
        error = await _attempt(waiting)
        if error is None:
            break
        if error.sqlstate.startswith(CLASSES_TO_RETRY):
            raise ConnectionLost(error.message)
        failed = waiting.popleft()
        if len(failed) > 1:  # copy them separately to find the part that fails
            waiting.extendleft((task,) for task in reversed(failed))
        else:
            failures.append(Failure(failed[0].relid, error.message, error.hint, error.sqlstate))
    return failures


async def _attempt(waiting: deque[tuple[PartTask, ...]]) -> SubscriberError | None:
    """Copy groups from the front of `waiting`. Returns the error of the first remaining group; None if none remains."""
    first = waiting[0][0]
    try:
        session = await open_session(first.target, application_name=APPLICATION_NAME, settings=TARGET_SETTINGS)
        try:
            target = _Target(session, await detect_capabilities(session))
            source = await open_session(
                first.source,
                application_name=APPLICATION_NAME,
                settings=SOURCE_SETTINGS | {"client_encoding": session.encoding},
                must_use_password=first.must_use_password,
            )
            try:
                while waiting:
                    await _copy(waiting[0], source, target)
                    if any(task.runs_foreign_code for task in waiting.popleft()):
                        await target.clean()
            finally:
                source.abort()
        finally:
            session.abort()
    except SubscriberError as error:
        return error
    return None


def first_error(error: BaseException) -> BaseException:
    """Return the first error of two connections. It is the cause; the other error followed from it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class _Target:
    """The session that receives the rows."""

    def __init__(self, session: Session, means: TargetCapabilities) -> None:
        self.session = session
        self.pipeline = Pipeline(session)
        self.pipeline.unnamed = True  # foreign code may run in the session
        settings = {**ALWAYS, **TARGET_SETTINGS, "client_encoding": session.encoding}
        self._again = [
            f"SET {name} = {literal(value)}" for name, value in known(settings, session.server_version).items()
        ]
        if means.replica_role:
            self._again.append(BECOME_REPLICA if means.by_function else SET_REPLICA)

    async def run(self, *statements: str) -> None:
        for statement in statements:
            self.pipeline.execute_once(statement, note=statement)
        await self.pipeline.sync()

    async def set_role(self, role: str) -> None:
        """Set the role for the rest of the transaction."""
        await self.pipeline.rows("SELECT pg_catalog.set_config('role', $1, true)", role)

    async def set_again(self) -> None:
        """Reset all settings and the role, which foreign code may have changed."""
        await self.run("RESET ROLE", "RESET ALL", *self._again)

    async def clean(self) -> None:
        """Discard the session state that foreign code may have created, after the transaction."""
        await self.run("DISCARD ALL")
        await self.set_again()

    async def copy(self, statement: str, chunks: AsyncIterator[bytes]) -> int:
        """Copy in; returns the number of rows."""
        tag = await self.session.copy_in(statement, chunks)
        self.pipeline.attach()
        return int(tag.split()[-1])


async def _copy(tasks: tuple[PartTask, ...], source: Session, target: _Target) -> None:
    await target.run("BEGIN")
    parts = [(task.relid, task.number) for task in tasks]
    claimed = await copy_jobs.claim(target.pipeline, tasks[0].copyid, tasks[0].fence, parts)
    if ours := [task for task in tasks if (task.relid, task.number) in claimed]:
        await source.query(
            f"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET TRANSACTION SNAPSHOT {literal(ours[0].snapshot)}"
        )
        await _lock(ours, source)
        role, counts = "none", dict[tuple[int, int], tuple[int, int]]()
        for task in ours:
            if task.guard is not None:
                role = "none"
                await task.guard.apply(target.pipeline.rows)
            if task.role != role:
                role = task.role
                await target.set_role(role)
            counts[task.relid, task.number] = await _pipe(task, source, target)
            if task.runs_foreign_code:
                role = "none"
                await target.run("SET CONSTRAINTS ALL IMMEDIATE")
                await target.set_again()
        await source.query("COMMIT")
        await target.run("RESET ROLE")
        await copy_jobs.record(target.pipeline, ours[0].copyid, ours[0].fence, counts)
    await target.run("COMMIT")


async def _lock(tasks: list[PartTask], source: Session) -> None:
    """Lock the tables of the parts until the end of the transaction.

    The locks keep the heaps as they are. Raises SubscriberError if a table was rewritten since the plan.
    """
    heaps = [task.part.heap for task in tasks]
    if lockable := [task.part.heap for task in tasks if task.part.can_be_locked]:
        await source.query(f"LOCK TABLE {', '.join(lockable)} IN ACCESS SHARE MODE")
    rows = await source.rows(_FILENODES.format(heaps=", ".join(map(literal, heaps))))
    with parsing("the files of tables"):
        filenodes = [None if filenode is None else int(filenode) for (filenode,) in rows]
    for task, filenode in zip(tasks, filenodes, strict=True):
        if filenode != task.part.filenode:
            raise SubscriberError(
                f'table "{task.part.schema}.{task.part.name}" of the publisher was rewritten while it was copied',
                hint="It will be copied again from the beginning.",
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )


async def _pipe(task: PartTask, source: Session, target: _Target) -> tuple[int, int]:
    """COPY a part from the publisher to the target. Returns rows and bytes."""
    size = 0

    async def read() -> AsyncIterator[list[bytes]]:
        nonlocal size
        form = " WITH (FORMAT binary)" * task.binary
        async for payloads in source.copy_out(f"COPY ({task.select}) TO STDOUT{form}"):
            size += sum(map(len, payloads))
            yield payloads

    copy_into = copy_from(task.schema, task.name, task.columns, task.binary)
    return await target.copy(copy_into, joined_chunks(read())), size
