"""Parts of tables, copied by an executor: COPY from the publisher into COPY to the target, byte for byte.

One transaction on the target holds the part's row in subscriber.copy_done and the part's rows, so a part is there
whole and once, whoever is killed and however often it is begun: the row is inserted first, which waits for an earlier
attempt that is still alive, and finds out whether that one came through. Small parts are copied together: their rows
of copy_done are inserted in one order by everybody, before anything else, so that attempts wait for each other and
never in a circle.

Nothing of a row's values is decoded here, or can get into an error that leaves here.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

import anyio

from subscriber.catalog import copy_jobs
from subscriber.connection.connect import open_session
from subscriber.connection.pipeline import Pipeline
from subscriber.connection.session import Session, joined
from subscriber.connection.settings import NO_TIMEOUTS
from subscriber.errors import ConnectionLost, SubscriberError
from subscriber.publisher.answers import parsing
from subscriber.publisher.partitions import TablePartition
from subscriber.publisher.quoting import literal
from subscriber.targets.postgres.session.capabilities import (
    BECOME_REPLICA,
    SET_REPLICA,
    TargetCapabilities,
    detect_capabilities,
)
from subscriber.targets.postgres.session.schema_check import TableGuard
from subscriber.targets.postgres.sql.row_statements import copy_from

APPLICATION_NAME = "subscriber copy"
# Classes of SQLSTATE that another attempt may not meet: connections, resources, shutdowns, deadlocks.
TRANSIENT = ("08", "40", "53", "57")

SOURCE_SETTINGS = {
    "datestyle": "ISO",
    "intervalstyle": "postgres",
    "extra_float_digits": "3",
    **NO_TIMEOUTS,
}
# What table synchronization sets; a commit need not wait for the disk, as the state that tells of it will.
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
    """All that an executor has to know. Connection strings are part of it, so it is never printed."""

    source: str
    must_use_password: bool  # on the publisher
    target: str  # of the role that applies changes
    snapshot: str  # exported by the publisher
    copyid: int
    fence: bytes  # of the copy
    relid: int  # of the target's table
    number: int  # of the part in its table
    part: TablePartition
    select: str  # the query that reads it
    schema: str  # of the target's table
    name: str
    columns: tuple[str, ...]  # of the target's table, in the order of the query's
    role: str  # to insert as; "none": the session's own
    guard: TableGuard | None  # None: the table needs none
    runs_foreign_code: bool
    binary: bool
    size: int  # about, in bytes
    is_whole: bool  # the only part of its table

    def __repr__(self) -> str:
        return f"PartTask({self.schema}.{self.name}, part {self.number})"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a part cannot be copied, however often one tries."""

    relid: int
    message: str
    hint: str | None
    sqlstate: str


def copy_parts(tasks: tuple[PartTask, ...]) -> list[Failure]:
    """Copy the parts that have not been, all between the same two servers, together in one transaction of each.

    One that cannot be copied costs the others nothing but being begun again. Raises ConnectionLost for what another
    attempt may not meet.
    """
    _spare_collector()
    return anyio.run(_copy_parts, tasks)


def _spare_collector() -> None:
    """Spark's workers collect garbage after each task: 25 ms with all that was imported, unless it is set apart."""
    if not gc.get_freeze_count():
        gc.freeze()


async def _copy_parts(tasks: tuple[PartTask, ...]) -> list[Failure]:
    waiting, failures = deque([tasks]), list[Failure]()
    while waiting:  # a failure costs the connections
        error = await _attempt(waiting)
        if error is None:
            break
        if error.sqlstate.startswith(TRANSIENT):
            raise ConnectionLost(error.message)
        failed = waiting.popleft()
        if len(failed) > 1:  # one by one, which tells whose error it is
            waiting.extendleft((task,) for task in reversed(failed))
        else:
            failures.append(Failure(failed[0].relid, error.message, error.hint, error.sqlstate))
    return failures


async def _attempt(waiting: deque[tuple[PartTask, ...]]) -> SubscriberError | None:
    """Copy what is together off the front; what went wrong with the first that is left, None when nothing is."""
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
    """Of what two connections have met the first, which tells; the other followed from it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class _Target:
    """The session that the rows go to."""

    def __init__(self, session: Session, means: TargetCapabilities) -> None:
        self.session = session
        self.pipeline = Pipeline(session)
        self.pipeline.unnamed = True  # foreign code may run in the session
        self._again = [f"SET client_encoding = '{session.encoding}'"]  # all else was set when the session began
        if means.replica_role:
            self._again.append(BECOME_REPLICA if means.by_function else SET_REPLICA)

    async def run(self, *statements: str) -> None:
        for statement in statements:
            self.pipeline.execute_once(statement, note=statement)
        await self.pipeline.sync()

    async def set_role(self, role: str) -> None:
        """For the rest of the transaction."""
        await self.pipeline.rows("SELECT pg_catalog.set_config('role', $1, true)", role)

    async def set_again(self) -> None:
        """After foreign code, which may have changed any setting, and the role."""
        await self.run("RESET ROLE", "RESET ALL", *self._again)

    async def clean(self) -> None:
        """After the transaction: what foreign code may have left behind besides."""
        await self.run("DISCARD ALL")
        await self.set_again()

    async def copy(self, statement: str, chunks: AsyncIterator[bytes]) -> int:
        """The number of rows."""
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
    """Until its end the transaction keeps the locks, and with them the heaps as they are."""
    heaps = [task.part.heap for task in tasks]
    await source.query(f"LOCK TABLE {', '.join(heaps)} IN ACCESS SHARE MODE")
    rows = await source.rows(_FILENODES.format(heaps=", ".join(map(literal, heaps))))
    with parsing("the files of tables"):
        filenodes = [int(filenode or 0) for (filenode,) in rows]
    for task, filenode in zip(tasks, filenodes, strict=True):
        if filenode != task.part.filenode:
            raise SubscriberError(
                f'table "{task.part.schema}.{task.part.name}" of the publisher was rewritten while it was copied',
                hint="It will be copied again from the beginning.",
                sqlstate="55000",
            )


async def _pipe(task: PartTask, source: Session, target: _Target) -> tuple[int, int]:
    """COPY out of one into the other; rows and bytes."""
    size = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal size
        form = " WITH (FORMAT binary)" * task.binary
        async for payloads in source.copy_out(f"COPY ({task.select}) TO STDOUT{form}"):
            size += sum(map(len, payloads))
            for chunk in joined(payloads):
                yield chunk
                del chunk  # a large one is not kept while the next one is received

    return await target.copy(copy_from(task.schema, task.name, task.columns, task.binary), chunks()), size
