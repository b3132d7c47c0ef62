"""Two archivers with one change log: one writes it, the other one takes over."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.to_thread

from subscriber.archive.worker import Archiver
from subscriber.changelog.files import IDENTITY
from subscriber.changelog.piece_reader import read
from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.writer import log_writer
from subscriber.failpoints import Point
from subscriber.lsn import Lsn
from subscriber.protocol.messages import Insert
from tests.interleavings.explorer import acting_as
from tests.interleavings.stage import SETTINGS, Actor, Scenario, Stage

ARCHIVING = frozenset({Point.LOG_LOCKED, Point.LOG_OPENED, Point.LOG_STORED})
DROP_SLOT = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = 'a'"
QUICK = replace(SETTINGS, standby_poll_interval=0.01, status_interval=0.2)


class Archivers:
    """Two archivers of one log. The explorer kills the one that writes."""

    def __init__(self, stage: Stage, directory: Path) -> None:
        self.directory = directory
        self._stage = stage
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, name: str) -> None:
        """Start an archiver, as the actor `name`."""
        writer = log_writer(str(self.directory))
        archiver = Archiver(self._stage.source.dsn(), "a", ["p"], writer, settings=QUICK, standby=True)

        async def run() -> None:
            try:
                with acting_as(name):
                    await archiver.run()
            finally:
                writer.close()

        self.tasks[name] = asyncio.create_task(run())

    async def stop(self, name: str) -> None:
        """End an archiver, and wait for its end."""
        task = self.tasks.pop(name)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def stop_all(self) -> None:
        """End both."""
        for name in list(self.tasks):
            await self.stop(name)


async def published(stage: Stage) -> None:
    """A table, and a slot that the archivers share."""
    directory = stage.closing.enter_context(tempfile.TemporaryDirectory())
    await stage.source.execute(
        "CREATE TABLE t (n int)",
        "CREATE PUBLICATION p FOR TABLE t",
        "SELECT pg_create_logical_replication_slot('a', 'pgoutput')",
    )
    stage.closing.push_async_callback(stage.source.execute, DROP_SLOT)
    stage.kept["archivers"] = archivers = Archivers(stage, Path(directory))
    stage.closing.push_async_callback(archivers.stop_all)


async def replacing(stage: Stage) -> None:
    """Start both archivers. Kill the first one, and start it again."""
    archivers: Archivers = stage.kept["archivers"]
    await stage.step("start")
    archivers.start("first")
    archivers.start("second")
    await stage.step("kill")
    await archivers.stop("first")
    await stage.step("start_again")
    archivers.start("first")
    await stage.step("kill_second")
    await archivers.stop("second")


async def inserting(stage: Stage) -> None:
    """Commit transactions of two rows."""
    for number in (1, 3, 5):
        await stage.step(f"insert_{number}")
        await stage.source.execute(
            f"BEGIN; INSERT INTO t VALUES ({number}); INSERT INTO t VALUES ({number + 1}); COMMIT"
        )


async def stored(stage: Stage) -> None:
    """Wait until the log has everything."""
    position = Lsn.parse(await stage.source.value("SELECT pg_current_wal_lsn()::text"))
    with anyio.fail_after(20):
        while await anyio.to_thread.run_sync(_log(stage).end) < position:
            await anyio.sleep(0.01)


def logged(directory: Path) -> list[int]:
    """Return the rows of the log, in its order."""
    log, numbers = ChangeLog(directory), []
    for piece in log.pieces(log.start(), log.end()):
        for change in read(log.directory, piece):
            assert isinstance(change.message, Insert)
            numbers.append(int(change.message.new.split()[1][0] or 0))
    return numbers


async def wrong(stage: Stage) -> Sequence[object]:
    """Return the rows of the log if they are not those of the table, in order."""
    archived = logged(stage.kept["archivers"].directory)
    wanted = [n for (n,) in await stage.source.rows("SELECT n FROM t ORDER BY n")]
    return [] if archived == wanted else archived


def present(stage: Stage) -> object:
    """Return the archivers that run, and the rows of the log."""
    archivers: Archivers = stage.kept["archivers"]
    return sorted(archivers.tasks), logged(archivers.directory) if (archivers.directory / IDENTITY).exists() else None


def _log(stage: Stage) -> ChangeLog:
    return ChangeLog(stage.kept["archivers"].directory)


def archive() -> Iterator[Scenario]:
    """An archiver, its standby, a kill of each, and a writer."""
    actors: dict[str, Actor] = {"operator": replacing, "writer": inserting}
    yield Scenario(
        "archive",
        ("t",),
        ARCHIVING,
        published,
        actors,
        finish=stored,
        check=wrong,
        kill=None,
        is_replicated=False,
        memory=present,
    )
