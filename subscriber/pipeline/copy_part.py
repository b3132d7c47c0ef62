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
from dataclasses import dataclass
from typing import Literal

import anyio
import asyncpg

from subscriber.catalog import bulk_copy
from subscriber.catalog.session import Connection, translate
from subscriber.connection.connect import connect
from subscriber.connection.settings import NO_TIMEOUTS
from subscriber.errors import ConnectionLost, ProtocolError, SubscriberError
from subscriber.source.answers import parsing
from subscriber.source.parts import Part
from subscriber.source.quoting import literal
from subscriber.target.means import become_replica
from subscriber.target.shapes import Guard

APPLICATION_NAME = "subscriber copy"
CHUNKS = 8  # pieces in memory between the two connections; asyncpg's are up to half a megabyte
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
  FROM unnest($1::pg_catalog.text[]) WITH ORDINALITY AS t (heap, number) ORDER BY number
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
    part: Part
    select: str  # the query that reads it
    schema: str  # of the target's table
    name: str
    columns: tuple[str, ...]  # of the target's table, in the order of the query's
    role: str  # to insert as; "none": the session's own
    guard: Guard | None  # None: the table needs none
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
    try:
        first_one = waiting[0][0]
        target = await connect(first_one.target, application_name=APPLICATION_NAME, settings=TARGET_SETTINGS)
        try:
            await become_replica(target)
            source = await connect(
                first_one.source,
                application_name=APPLICATION_NAME,
                settings=SOURCE_SETTINGS,
                must_use_password=first_one.must_use_password,
            )
            try:
                while waiting:
                    await _copy(waiting[0], source, target)
                    if any(task.runs_foreign_code for task in waiting.popleft()):
                        await _clean(target)
            finally:
                source.terminate()
        finally:
            target.terminate()
    except Exception as error:
        first = first_error(error)
        if isinstance(first, SubscriberError):
            return first
        if isinstance(first, asyncpg.PostgresError | asyncpg.InterfaceError | asyncpg.InternalClientError | OSError):
            return translate(first)
        if isinstance(first, UnicodeError):  # names of the publisher's that cannot be said again
            return ProtocolError("invalid query response", detail="A name is not in the encoding of the connection.")
        raise
    return None


def first_error(error: BaseException) -> BaseException:
    """Of what two connections have met the first, which tells; the other followed from it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _copy(tasks: tuple[PartTask, ...], source: Connection, target: Connection) -> None:
    async with target.transaction():
        parts = [(task.relid, task.number) for task in tasks]
        claimed = await bulk_copy.claim(target, tasks[0].copyid, tasks[0].fence, parts)
        ours = [task for task in tasks if (task.relid, task.number) in claimed]
        if not ours:
            return
        async with source.transaction(isolation="repeatable_read", readonly=True):
            await source.execute(f"SET TRANSACTION SNAPSHOT {literal(ours[0].snapshot)}")
            await _lock(ours, source)
            role, counts = "none", dict[tuple[int, int], tuple[int, int]]()
            for task in ours:
                if task.guard is not None:
                    role = "none"
                    await task.guard.apply(target)
                if task.role != role:
                    role = task.role
                    await target.execute("SELECT pg_catalog.set_config('role', $1, true)", role)
                counts[task.relid, task.number] = await _pipe(task, source, target)
                if task.runs_foreign_code:
                    role = "none"
                    await target.execute("SET CONSTRAINTS ALL IMMEDIATE")
                    await _set_again(target)
        await target.execute("RESET ROLE")
        await bulk_copy.record(target, ours[0].copyid, ours[0].fence, counts)


async def _set_again(target: Connection) -> None:
    """After foreign code, which may have changed any setting, and the role. Startup settings come back by RESET ALL."""
    await target.execute("RESET ROLE; RESET ALL")
    await become_replica(target)


async def _clean(target: Connection) -> None:
    """After the transaction: what foreign code may have left behind besides."""
    await target.execute("DISCARD ALL")
    await _set_again(target)


async def _lock(tasks: list[PartTask], source: Connection) -> None:
    """Until its end the transaction keeps the locks, and with them the heaps as they are."""
    heaps = [task.part.heap for task in tasks]
    await source.execute(f"LOCK TABLE {', '.join(heaps)} IN ACCESS SHARE MODE")
    with parsing("the files of tables"):
        filenodes = [row[0] for row in await source.fetch(_FILENODES, heaps)]
    for task, filenode in zip(tasks, filenodes, strict=True):
        if filenode != task.part.filenode:
            raise SubscriberError(
                f'table "{task.part.schema}.{task.part.name}" of the publisher was rewritten while it was copied',
                hint="It will be copied again from the beginning.",
                sqlstate="55000",
            )


async def _pipe(task: PartTask, source: Connection, target: Connection) -> tuple[int, int]:
    """COPY out of one into the other; rows and bytes."""
    send, receive = anyio.create_memory_object_stream[bytes](CHUNKS)
    size = 0
    style: Literal["binary", "text"] = "binary" if task.binary else "text"

    async def feed() -> None:
        async with send:
            await source.copy_from_query(task.select, output=take, format=style)

    async def take(chunk: bytes) -> None:
        nonlocal size
        size += len(chunk)
        await send.send(chunk)

    with send, receive:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(feed)
            tag = await target.copy_to_table(
                task.name, schema_name=task.schema, columns=task.columns, source=receive, format=style
            )
    return int(tag.split()[-1]), size
