"""`subscriber archive --standby`: one of two archivers writes the log, also after the other one has failed."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from hashlib import md5
from pathlib import Path

import anyio
import pytest

from subscriber import telemetry
from subscriber.archive.worker import Archiver
from subscriber.changelog.object_segments import LEASE
from subscriber.changelog.objects import ObjectPath
from subscriber.changelog.piece_reader import read
from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.storage import Location
from subscriber.changelog.writer import LogWriter, log_writer
from subscriber.demo.object_store import ObjectStore
from subscriber.demo.processes import Process
from subscriber.demo.servers import Servers
from subscriber.errors import PublisherError
from subscriber.lsn import Lsn
from subscriber.protocol.messages import Insert, Update
from subscriber.publisher.commands import StreamOptions
from subscriber.publisher.connection import Publisher
from subscriber.publisher.replication_stream import ReplicationStream
from subscriber.settings import DEFAULTS
from tests.archive.test_worker import KEEP_WRITING, PUBLISHED, keep_writing
from tests.plugins.fix_cluster import Database, ServerOf, fresh_database
from tests.plugins.fix_proxy import Proxies
from tests.scenarios.standbys import standby_of

SLOT = "SELECT pg_create_logical_replication_slot('a', 'pgoutput')"
ACTIVE = "archiving from"
STANDBY = "waiting as standby"
LOST = "the lease of the change log"
OTHER = "another process writes the change log"


class Archive(Process):
    """`subscriber archive --standby`, whose walsender ends soon after it is stopped."""

    def __init__(self, name: str, source: Database, log: Location, directory: Path, *environment: str) -> None:
        where = ["--source", source.dsn(options="-c wal_sender_timeout=3s"), "--slot", "a", "-p", "p"]
        options = ["--directory", str(log), "--standby", "--segment-age", "1", "--log-format", "postgres"]
        command = [sys.executable, "-m", "subscriber", "archive", *where, *options]
        super().__init__(name, ["env", *environment, *command], directory)

    def count(self, words: str) -> int:
        return sum(words in line for line in self.lines())

    async def says(self, words: str, times: int = 1, *, seconds: float = 60) -> None:
        """Wait until the log has that many lines with these words."""
        with anyio.move_on_after(seconds):
            while self.count(words) < times:
                await anyio.sleep(0.05)
            return
        raise AssertionError(f"{self.name} does not say {words!r}:\n{self.last_lines()}")

    def signal(self, number: signal.Signals) -> None:
        assert self.pid is not None
        os.kill(self.pid, number)


Start = Callable[..., Archive]


@pytest.fixture
def start(source_db: Database, tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts an archiver: name, log, environment. All are killed at the end of the test."""
    started: list[Archive] = []

    def start(name: str, log: Location, *environment: str) -> Archive:
        started.append(Archive(name, source_db, log, tmp_path, *environment))
        started[-1].start()
        return started[-1]

    yield start
    for server in started:
        if server._process is not None:
            server._process.kill()
            server._process.wait()


@asynccontextmanager
async def writing(source: Database) -> AsyncIterator[anyio.Event]:
    """Write to a published table during the block, or until the event is set."""
    await source.execute(PUBLISHED, SLOT, KEEP_WRITING)
    stop = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep_writing, source, stop)
        yield stop
        stop.set()


@contextmanager
def opened(writer: LogWriter) -> Iterator[LogWriter]:
    writer.open()
    try:
        yield writer
    finally:
        writer.close()


async def stored(log: Location, position: Lsn) -> None:
    """Wait until the log has everything before a position."""
    with anyio.fail_after(120):
        while await anyio.to_thread.run_sync(ChangeLog(log).end) < position:
            await anyio.sleep(0.1)


async def check(source: Database, log: Location, until: Lsn | None = None) -> None:
    """Compare the log with the table, when nothing is written any more. The publisher knows no more than the log.

    `until`: the position at which the archiver has ended. The server writes records of its own after it.
    """
    await stored(log, until or Lsn.parse(await source.value("SELECT pg_current_wal_lsn()::text")))
    confirmed = await source.value("SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = 'a'")
    archived = ChangeLog(log)
    assert Lsn.parse(confirmed) <= archived.end()
    expected = await source.rows("SELECT id, decode(md5(note), 'hex') FROM t ORDER BY id")
    assert expected
    assert await anyio.to_thread.run_sync(inserted, archived) == expected
    assert await anyio.to_thread.run_sync(archived.damage) == []


def inserted(log: ChangeLog) -> list[tuple[int, bytes]]:
    rows = []
    for piece in log.pieces(log.start(), log.end()):
        for change in read(log.directory, piece):
            assert isinstance(change.message, Insert)
            number, note = change.message.new.split()[1]
            rows.append((int(number or 0), md5(note or b"").digest()))
    return rows


# --- a directory --------------------------------------------------------------------------------


@pytest.mark.parametrize("kills", [2, pytest.param(40, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
async def test_a_killed_archiver_is_replaced(source_db: Database, start: Start, tmp_path: Path, kills: int) -> None:
    async with writing(source_db):
        chance, log = random.Random(kills), tmp_path / "log"
        active, standby = start("one", log), start("two", log)  # either can be first
        with anyio.fail_after(60):
            while not active.count(ACTIVE):
                active, standby = standby, active
                await anyio.sleep(0.02)
        for number in range(kills):
            await standby.says(STANDBY)
            await anyio.sleep(chance.uniform(0.0, 0.5))
            await active.kill9()
            await standby.says(ACTIVE)
            active, standby = standby, start(f"after {number}", log)
    await check(source_db, log)


async def test_a_stopped_archiver_is_named(source_db: Database, start: Start, tmp_path: Path) -> None:
    """It could write again at any time. When it is killed, the standby takes over."""
    async with writing(source_db):
        log = tmp_path / "log"
        first = start("one", log)
        await first.says(ACTIVE)
        second = start("two", log)
        await second.says(f"Process {first.pid} has the lock. The log has everything before 0/")
        await anyio.sleep(0.5)
        first.signal(signal.SIGSTOP)
        await anyio.sleep(1.5)
        assert second.count(ACTIVE) == 0
        await first.kill9()
        await second.says(ACTIVE)
        assert second.count("taking over the change log") == 1
    await check(source_db, log)


async def test_an_archiver_that_ends_is_replaced(source_db: Database, start: Start, tmp_path: Path) -> None:
    """So is one that cannot continue. A standby that is stopped while it waits ends, too."""
    await source_db.execute(PUBLISHED, SLOT)
    log = tmp_path / "log"
    first = start("one", log)
    await first.says(ACTIVE)
    second, third = start("two", log), start("three", log)
    await second.says(STANDBY)
    await third.says(STANDBY)
    await third.stop()
    assert await third.wait() == 0, third.last_lines()
    await first.stop()
    assert await first.wait() == 0, first.last_lines()
    await second.says(ACTIVE)
    await source_db.execute("INSERT INTO t VALUES (1, 'x')")
    await check(source_db, log)


async def test_a_standby_ends_when_the_other_one_has_the_position(source_db: Database, tmp_path: Path) -> None:
    await source_db.execute(PUBLISHED)
    first, second = log_writer(tmp_path / "log"), log_writer(tmp_path / "log")
    first.open()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Archiver(source_db.dsn(), "a", ["p"], first).run)
        await source_db.execute("INSERT INTO t VALUES (1, 'x')")
        now = Lsn.parse(await source_db.value("SELECT pg_current_wal_lsn()::text"))
        with anyio.fail_after(30):
            await Archiver(source_db.dsn(), "a", ["p"], second, now, standby=True).run()
        assert first.position >= now
        tasks.cancel_scope.cancel()
    first.close()


async def test_a_slot_that_is_still_read_is_waited_for(
    source_db: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(telemetry.LOG)
    await source_db.execute(PUBLISHED, SLOT)
    publisher = await Publisher.connect(source_db.dsn(), application_name="dead")
    stream = await ReplicationStream.start(publisher, "a", Lsn(0), StreamOptions(("p",)))
    pid = await source_db.value("SELECT active_pid FROM pg_replication_slots WHERE slot_name = 'a'")
    await source_db.execute("INSERT INTO t VALUES (1, 'x')")
    now = Lsn.parse(await source_db.value("SELECT pg_current_wal_lsn()::text"))
    writer = log_writer(tmp_path / "log")
    settings = replace(DEFAULTS, slot_release_timeout=3.0, retry_interval=0.1)
    archiver = Archiver(source_db.dsn(), "a", ["p"], writer, now, settings, standby=True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(archiver.run)
        with anyio.fail_after(20):
            while not any("ERROR" in record.levelname for record in caplog.records):
                await anyio.sleep(0.1)
        tasks.start_soon(stream.stop)
    writer.close()
    messages = [record.getMessage() for record in caplog.records]
    waits, error, *_ = [message for message in messages if f'slot "a" is active for PID {pid}' in message]
    assert "waiting for its release" in waits
    assert f"SELECT pg_terminate_backend({pid});" in error
    await check(source_db, tmp_path / "log", now)


# --- a physical standby as the publisher --------------------------------------------------------


async def test_the_publisher_may_be_a_standby(
    servers: Servers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its slot needs a report of the primary, which an idle primary does not send by itself."""
    caplog.set_level(telemetry.LOG)
    primary = await servers.create("primary")
    await primary.start()
    async with fresh_database(primary) as source:
        await source.execute(PUBLISHED)
        standby = Database(await standby_of(primary, servers, "standby"), source.name)
        writer = log_writer(tmp_path / "log")
        with opened(writer):
            async with source.connection() as connection, anyio.create_task_group() as tasks:
                async with connection.transaction():
                    await connection.execute("INSERT INTO t VALUES (1, 'before the slot')")
                    tasks.start_soon(Archiver(standby.dsn(), "a", ["p"], writer).run)
                    with anyio.fail_after(30):
                        while "SELECT pg_log_standby_snapshot();" not in caplog.text:
                            await anyio.sleep(0.1)
                with anyio.fail_after(60):
                    while writer.identity is None:
                        await source.execute("SELECT pg_log_standby_snapshot()")
                        await anyio.sleep(0.1)
                await source.execute("INSERT INTO t VALUES (2, 'a')", "ALTER TABLE t ADD more int DEFAULT 7")
                await source.execute("UPDATE t SET note = 'b' WHERE id = 2")
                await stored(writer.location, Lsn.parse(await source.value("SELECT pg_current_wal_lsn()::text")))
                tasks.cancel_scope.cancel()
        relid = await source.value("SELECT 't'::regclass::oid")
        await standby.server.stop()
    log = ChangeLog(tmp_path / "log")
    changes = [change.message for piece in log.pieces(log.start(), log.end()) for change in read(log.directory, piece)]
    assert [type(change) for change in changes] == [Insert, Update]
    assert [[column.name for column in version.columns] for version in log.schema().of(relid)] == [
        ["id", "note"],
        ["id", "note", "more"],
    ]


@pytest.mark.soak
async def test_a_standby_that_cannot_decode_is_refused(server_of: ServerOf, servers: Servers, tmp_path: Path) -> None:
    primary, programs = server_of("publisher", 15), await servers.create("programs")
    async with fresh_database(primary) as source:
        await source.execute(PUBLISHED)
        standby = await standby_of(primary, servers, "standby", programs=programs)
        archiver = Archiver(standby.dsn(source.name), "a", ["p"], log_writer(tmp_path / "log"), standby=True)
        with pytest.raises(PublisherError, match="the publisher is a standby") as caught, anyio.fail_after(60):
            await archiver.run()
        assert "PostgreSQL 16" in (caught.value.detail or "")
        await standby.stop()


# --- an object store ----------------------------------------------------------------------------


async def test_an_archiver_of_an_object_store_that_ends_is_replaced(
    source_db: Database, start: Start, objects: ObjectPath
) -> None:
    async with writing(source_db):
        first = start("one", objects)
        await first.says(ACTIVE)
        second = start("two", objects)
        await second.says("Its lease was not renewed for")
        await first.stop()
        await second.says(ACTIVE)
    await check(source_db, objects)


async def test_a_position_that_another_archiver_has_confirmed_is_not_missing(
    source_db: Database, objects: ObjectPath
) -> None:
    """It had the lease before, and its last request was late."""
    await source_db.execute(PUBLISHED, SLOT)
    late, early = log_writer(objects, segment_age=0.1), log_writer(objects, segment_age=0.1)

    async def archive_now() -> Lsn:
        await source_db.execute("INSERT INTO t SELECT count(*) + 1, 'x' FROM t")
        return Lsn.parse(await source_db.value("SELECT pg_current_wal_lsn()::text"))

    with opened(late), anyio.fail_after(60):
        await Archiver(source_db.dsn(), "a", ["p"], late, await archive_now()).run()
    with opened(early):
        (objects / LEASE).put(b'{"owner": null, "renewals": 0}')
        with opened(late), anyio.fail_after(60):
            await Archiver(source_db.dsn(), "a", ["p"], late, await archive_now()).run()
        with anyio.fail_after(60):
            await Archiver(source_db.dsn(), "a", ["p"], early, await archive_now()).run()
    await check(source_db, objects)


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_archivers_of_an_object_store_replace_killed_ones(
    source_db: Database, start: Start, objects: ObjectPath
) -> None:
    async with writing(source_db):
        active = start("one", objects)
        await active.says(ACTIVE)
        standby = start("two", objects)
        for pause in (0.3, 1.4, 0.9, 2.2):
            await standby.says(STANDBY)
            await anyio.sleep(pause)
            await active.kill9()
            await standby.says(ACTIVE)
            active, standby = standby, start(f"after {pause}", objects)
    await check(source_db, objects)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_idle", [False, True], ids=["busy", "idle"])
async def test_a_stopped_archiver_that_continues_writes_nothing(
    source_db: Database, start: Start, objects: ObjectPath, is_idle: bool
) -> None:
    async with writing(source_db) as stop_writing:
        first = start("one", objects)
        await first.says(ACTIVE)
        second = start("two", objects)
        await second.says(STANDBY)
        for active, standby in ((first, second), (second, first)):
            if is_idle:
                stop_writing.set()
            taken, lost = standby.count(ACTIVE), active.count(LOST) + active.count(OTHER)
            waiting = active.count(STANDBY)
            active.signal(signal.SIGSTOP)
            await standby.says(ACTIVE, taken + 1)
            active.signal(signal.SIGCONT)
            await active.says(STANDBY, waiting + 1)
            assert active.count(LOST) + active.count(OTHER) > lost
            await anyio.sleep(2)
            assert standby.count(ACTIVE) == taken + 1, standby.last_lines()
    await check(source_db, objects)


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_an_archiver_without_its_store_leaves_the_slot(
    source_db: Database,
    start: Start,
    objects: ObjectPath,
    object_store: ObjectStore,
    proxies: Proxies,
) -> None:
    """Its requests hang, and the publisher still reaches it."""
    async with writing(source_db):
        proxy = await proxies.to(int(object_store.url.rpartition(":")[2]))
        first = start("one", objects, f"AWS_ENDPOINT_URL=http://127.0.0.1:{proxy.port}")
        await first.says(ACTIVE)
        second = start("two", objects)
        await second.says(STANDBY)
        await anyio.sleep(2)
        proxy.stall()
        await second.says(ACTIVE, seconds=40)
        await anyio.sleep(3)
        await proxy.restore()
        await first.says(LOST, seconds=120)
        await first.says(STANDBY)
    await check(source_db, objects)
