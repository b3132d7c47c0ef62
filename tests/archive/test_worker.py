"""The archiver with a real publisher: confirmed transactions are in the log, whatever ends in between."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from hashlib import md5
from pathlib import Path

import anyio
import asyncpg
import pytest

from subscriber.archive.worker import Archiver
from subscriber.changelog.directory_segments import DirectorySegments
from subscriber.changelog.files import Identity
from subscriber.changelog.piece_reader import LoggedChange, read
from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.segment import HEADER_SIZE, Block
from subscriber.changelog.storage import locked
from subscriber.changelog.writer import LogWriter, log_writer
from subscriber.demo.processes import Process
from subscriber.demo.servers import Server, Servers
from subscriber.errors import ChangeLogDamaged, ChangeLogError, PublisherError, SlotLost
from subscriber.lsn import Lsn
from subscriber.protocol.messages import Delete, Insert, LogicalMessage, OldPart, Truncate, Update
from subscriber.settings import Settings
from tests.plugins.fix_cluster import Database, fresh_database

SECONDS = 300  # for a backlog, when a busy machine has left the archiver no time before; never needed otherwise
PUBLISHED = "CREATE TABLE t (id int PRIMARY KEY, note text); CREATE PUBLICATION p FOR TABLE t"


def changes(directory: Path, start: Lsn | None = None) -> list[LoggedChange]:
    return list(iterate(directory, start))


def iterate(directory: Path, start: Lsn | None = None) -> Iterator[LoggedChange]:
    log = ChangeLog(directory)
    for piece in log.pieces(log.start() if start is None else start, log.end()):
        yield from read(directory, piece)


def values(change: LoggedChange) -> list[bytes | None]:
    assert isinstance(change.message, Insert | Update)
    return change.message.new.split()[1]


@asynccontextmanager
async def archiving(source: Database, directory: Path) -> AsyncIterator[LogWriter]:
    """Run an archiver in this process during the block. Yields its writer."""
    writer = log_writer(directory)
    writer.open()
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Archiver(source.dsn(), "a", ["p"], writer).run)
            with anyio.fail_after(10):
                while writer.identity is None:
                    await anyio.sleep(0.01)
            yield writer
            tasks.cancel_scope.cancel()
    finally:
        writer.close()


async def archive_until_now(source: Database, directory: Path, **parameters: str) -> Lsn:
    """Run an archiver until everything committed by now is stored; the position. `parameters` are of its connection."""
    now = Lsn.parse(await source.value("SELECT pg_current_wal_lsn()::text"))
    writer = log_writer(directory)
    writer.open()
    try:
        with anyio.fail_after(SECONDS):
            await Archiver(source.dsn(**parameters), "a", ["p"], writer, now).run()
    finally:
        writer.close()
    return now


async def confirmed(source: Database, slot: str = "a") -> Lsn:
    return Lsn.parse(
        await source.value(f"SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = '{slot}'")
    )


async def test_every_kind_of_change_is_stored_as_it_came(source_db: Database, tmp_path: Path) -> None:
    await source_db.execute(PUBLISHED)
    async with archiving(source_db, tmp_path):
        pass
    await source_db.execute(
        "INSERT INTO t VALUES (1, repeat('x', 20000)), (2, NULL)",
        "UPDATE t SET id = 3 WHERE id = 1; DELETE FROM t WHERE id = 2",
        "BEGIN; INSERT INTO t VALUES (7, 'rolled back'); ROLLBACK",
        "SELECT pg_logical_emit_message(true, 'prefix', 'content'), pg_logical_emit_message(false, 'not', 'stored')",
        "BEGIN; INSERT INTO t VALUES (8, 'prepared'); PREPARE TRANSACTION 'archiver test'",
        "COMMIT PREPARED 'archiver test'",
        "TRUNCATE t",
    )
    now = await archive_until_now(source_db, tmp_path)
    messages = [change.message for change in changes(tmp_path)]
    assert [type(message) for message in messages] == [Insert, Insert, Update, Delete, LogicalMessage, Insert, Truncate]
    insert, _, update, delete, message, *_ = messages
    assert isinstance(insert, Insert)
    assert insert.new.split() == (b"tt", [b"1", b"x" * 20000])
    assert isinstance(update, Update)
    assert update.old_part is OldPart.KEY
    assert update.new.split()[1][0] == b"3"
    assert isinstance(delete, Delete)
    assert isinstance(message, LogicalMessage)
    assert (message.prefix, message.content) == ("prefix", b"content")
    assert await confirmed(source_db) >= now


STREAM_ALL = {"options": "-c debug_logical_replication_streaming=immediate"}
STREAMED = """
BEGIN; INSERT INTO t VALUES (1, 'a'); SAVEPOINT one; INSERT INTO t VALUES (2, 'gone'); ROLLBACK TO one;
    INSERT INTO t VALUES (3, repeat('long', 50000)); ALTER TABLE t ADD more int; SAVEPOINT two;
    INSERT INTO t VALUES (4, 'b', 4); COMMIT;
"""


async def test_streamed_transactions_are_stored_as_others_are(source_db: Database, tmp_path: Path) -> None:
    """The publisher sends all transactions in blocks immediately, including those that abort."""
    await source_db.execute(PUBLISHED)
    await archive_until_now(source_db, tmp_path, **STREAM_ALL)
    first, second = await source_db.connect(), await source_db.connect()
    await first.execute("BEGIN; INSERT INTO t SELECT i, 'first' FROM generate_series(10, 400) i")
    await second.execute("BEGIN; INSERT INTO t SELECT i, 'second' FROM generate_series(1010, 1400) i")
    await first.execute("DELETE FROM t WHERE id = 10; ROLLBACK")
    await second.execute("UPDATE t SET id = 9999 WHERE id = 1010; COMMIT")
    await source_db.execute(STREAMED, "INSERT INTO t VALUES (5, 'c', 5)")
    await archive_until_now(source_db, tmp_path, **STREAM_ALL)
    archived = changes(tmp_path)
    assert [values(change)[0] for change in archived[:391]] == [b"%d" % i for i in range(1010, 1401)]
    assert isinstance(archived[391].message, Update)
    rest = [[(value or b"")[:4] for value in values(change)] for change in archived[392:]]
    assert rest == [[b"1", b"a"], [b"3", b"long"], [b"4", b"b", b"4"], [b"5", b"c", b"5"]]
    assert [change.begin.xid for change in archived] == sorted(change.begin.xid for change in archived)
    assert not list((tmp_path / "spool").glob("*")) or not (tmp_path / "spool").exists()


async def test_confirmed_positions_are_in_the_log(source_db: Database, tmp_path: Path) -> None:
    """Also if nothing is published: the log's end is the slot's position."""
    await source_db.execute(PUBLISHED, "CREATE TABLE other (i int)")
    async with archiving(source_db, tmp_path) as writer:
        for number in range(30):
            await source_db.execute(f"INSERT INTO {'t' if number % 3 else 'other'} VALUES ({number})")
            # In this order: a thread of the archiver writes at the same time.
            assert await confirmed(source_db) <= writer.position <= ChangeLog(tmp_path).end()
    await archive_until_now(source_db, tmp_path)
    assert await confirmed(source_db) <= ChangeLog(tmp_path).end()


async def test_a_publisher_that_shuts_down_need_not_wait(own_publisher: Database, tmp_path: Path) -> None:
    source = own_publisher
    await source.execute(PUBLISHED)
    async with archiving(source, tmp_path):
        await source.execute("INSERT INTO t VALUES (1)")
        assert await source.server.stop()
        await source.server.start()
        await source.execute("INSERT INTO t VALUES (2)")
        with anyio.fail_after(20):
            while len(changes(tmp_path)) < 2:
                await anyio.sleep(0.05)
    assert [values(change)[0] for change in changes(tmp_path)] == [b"1", b"2"]


@pytest.fixture
async def own_publisher(servers: Servers) -> AsyncIterator[Database]:
    """Create a database on a separate publisher for one test."""
    server = await servers.create("publisher", {"wal_sender_timeout": "0"})  # a wait of its shutdown has no end
    await server.start()
    async with fresh_database(server) as database:
        yield database


# --- slot and log must go together --------------------------------------------------------------


async def test_a_slot_that_somebody_else_has_read_is_refused(source_db: Database, tmp_path: Path) -> None:
    await source_db.execute(PUBLISHED)
    await archive_until_now(source_db, tmp_path)
    await source_db.execute("INSERT INTO t VALUES (1)", "SELECT pg_replication_slot_advance('a', pg_current_wal_lsn())")
    with pytest.raises(SlotLost, match="changes are missing"):
        await archive_until_now(source_db, tmp_path)


async def test_a_slot_that_is_gone_is_not_made_again(source_db: Database, tmp_path: Path) -> None:
    await source_db.execute(PUBLISHED)
    await archive_until_now(source_db, tmp_path)
    await source_db.execute("SELECT pg_drop_replication_slot('a')", "INSERT INTO t VALUES (1)")
    with pytest.raises(SlotLost, match="does not exist any more"):
        await archive_until_now(source_db, tmp_path)


async def test_a_log_is_of_one_slot_and_its_publications(source_db: Database, tmp_path: Path) -> None:
    await source_db.execute(PUBLISHED, "CREATE PUBLICATION q")
    await archive_until_now(source_db, tmp_path)
    writer = log_writer(tmp_path)
    writer.open()
    with pytest.raises(PublisherError, match="other publications"):
        await Archiver(source_db.dsn(), "a", ["p", "q"], writer).run()
    writer.close()


async def test_a_log_is_of_one_publisher(source_db: Database, tmp_path: Path) -> None:
    await source_db.execute(PUBLISHED)
    writer = log_writer(tmp_path)
    writer.open()
    writer.create(Identity(7, "a", ("p",), Lsn(0x1000)))
    with pytest.raises(PublisherError, match="is of another publisher") as raised:
        await Archiver(source_db.dsn(), "a", ["p"], writer).run()
    writer.close()
    assert "The log is of system 7; the connection leads to" in (raised.value.detail or "")
    assert raised.value.hint == "Correct the connection string, or choose another directory for the log."


async def test_a_publisher_that_is_behind_its_log_is_refused(source_db: Database, tmp_path: Path) -> None:
    await source_db.execute(PUBLISHED)
    system = int(await source_db.value("SELECT system_identifier::text FROM pg_control_system()"))
    writer = log_writer(tmp_path)
    writer.open()
    writer.create(Identity(system, "a", ("p",), Lsn(1 << 60)))
    with pytest.raises(PublisherError, match="is behind the change log in") as raised:
        await Archiver(source_db.dsn(), "a", ["p"], writer).run()
    writer.close()
    assert "subscription" not in str(raised.value)
    assert "Begin a new log in another directory" in (raised.value.hint or "")


@pytest.mark.parametrize(
    ("create", "problem"),
    [
        ("pg_create_logical_replication_slot('a', 'pgoutput', false, true)", "has two_phase on"),
        ("pg_create_logical_replication_slot('a', 'test_decoding')", "is for test_decoding, not pgoutput"),
        ("pg_create_physical_replication_slot('a')", "is a physical slot"),
    ],
)
async def test_a_slot_of_another_kind_is_refused(
    source_db: Database, tmp_path: Path, create: str, problem: str
) -> None:
    """Before there is a log, which has the name of its slot."""
    await source_db.execute(PUBLISHED, f"SELECT {create}")
    with pytest.raises(PublisherError, match=f'slot "a" {problem}'):
        await archive_until_now(source_db, tmp_path)
    assert not (tmp_path / "log.json").exists()
    await source_db.execute("SELECT pg_drop_replication_slot('a')")  # a physical one is not dropped with the database


async def test_a_slot_of_another_database_is_refused(source_db: Database, publisher: Server, tmp_path: Path) -> None:
    await source_db.execute(PUBLISHED)
    async with fresh_database(publisher) as other:
        await other.execute("SELECT pg_create_logical_replication_slot('a', 'pgoutput')")
        with pytest.raises(PublisherError, match=f'slot "a" is of database "{other.name}"'):
            await archive_until_now(source_db, tmp_path)
        await other.execute("SELECT pg_drop_replication_slot('a')")


class _FullDisk(LogWriter):
    """A log that can be opened, and has no room for whole transactions."""

    appends = 0

    def append(self, blocks: list[Block]) -> None:
        if any(block.boundary for block in blocks):
            self.appends += 1
            raise ChangeLogError("could not write the change log: No space left on device")
        super().append(blocks)


async def test_an_error_lasts_until_something_is_stored(source_db: Database, tmp_path: Path) -> None:
    """A connection, or a part of a transaction, is no success. A log that another process writes is one."""
    await source_db.execute(PUBLISHED)
    writer = _FullDisk(DirectorySegments(tmp_path))
    settings = Settings(retry_interval=0.05, standby_poll_interval=0.05, archive_queue_size=2_000_000)
    archiver = Archiver(source_db.dsn(), "a", ["p"], writer, settings=settings, standby=True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(archiver.run)
        try:
            with anyio.fail_after(30):
                await source_db.wait_for("SELECT active FROM pg_replication_slots WHERE slot_name = 'a'")
                await source_db.execute("INSERT INTO t SELECT i, repeat('x', 1000) FROM generate_series(1, 5000) i")
                while archiver.error is None:
                    await anyio.sleep(0.01)
                since, first = archiver.failing_since, writer.appends
                while writer.appends < first + 3:
                    assert archiver.error is not None
                    assert archiver.failing_since == since
                    await anyio.sleep(0.005)
                with ExitStack() as stack:  # as another process
                    while archiver.failing_since is not None:
                        with suppress(BlockingIOError):
                            stack.enter_context(locked(tmp_path / "lock"))
                        await anyio.sleep(0.01)
        finally:
            tasks.cancel_scope.cancel()
    writer.close()
    assert archiver.error is None


# --- the command, and its ends ------------------------------------------------------------------


class Command(Process):
    """`subscriber archive` with tiny segments."""

    def __init__(self, source: Database, directory: Path, **parameters: str) -> None:
        where = ["--source", source.dsn(**parameters), "--slot", "a", "-p", "p", "--directory", str(directory / "log")]
        options = ["--segment-size", "1", "--segment-age", "1", "--log-format", "postgres"]
        super().__init__("archive", [sys.executable, "-m", "subscriber", "archive", *where, *options], directory)


@pytest.fixture(params=[{}, STREAM_ALL], ids=["whole", "streamed"])
def command(request: pytest.FixtureRequest, source_db: Database, tmp_path: Path) -> Iterator[Command]:
    command = Command(source_db, tmp_path, **request.param)
    yield command
    if command._process is not None:
        command._process.kill()


async def wait_for_log(directory: Path) -> None:
    with anyio.fail_after(20):
        while not (directory / "log.json").exists():
            await anyio.sleep(0.02)


KEEP_WRITING = """
CREATE PROCEDURE keep_writing(first int, last int) LANGUAGE plpgsql AS $$
BEGIN
    FOR i IN first..last LOOP
        INSERT INTO t SELECT i * 1000 + j, repeat(md5(i::text), 1 + i % 50) FROM generate_series(1, 1 + i % 20) j;
        IF i % 10 = 0 THEN ROLLBACK; ELSE COMMIT; END IF;
    END LOOP;
END $$
"""


async def keep_writing(source: Database, stop: anyio.Event) -> None:
    """Small transactions until `stop`, at most 1,000 a second; a publisher that is down is waited for."""
    first = 1
    while not stop.is_set():
        with suppress(asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError):
            await source.execute(f"CALL keep_writing({first}, {first + 199})")
        await anyio.sleep(0.2)
        first += 200


@pytest.mark.parametrize("kills", [3, pytest.param(60, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
async def test_the_log_has_everything_once_after_random_kills(
    source_db: Database, tmp_path: Path, command: Command, kills: int
) -> None:
    """The archiver every time, and the publisher occasionally."""
    await source_db.execute(PUBLISHED, KEEP_WRITING)
    command.start()
    await wait_for_log(tmp_path / "log")
    chance, stop = random.Random(kills), anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep_writing, source_db, stop)
        for number in range(kills):
            before = ChangeLog(tmp_path / "log").end()
            with anyio.move_on_after(10 if kills > 10 else 0.3):  # killed at work, not while it starts
                while ChangeLog(tmp_path / "log").end() == before:
                    await anyio.sleep(0.02)
            await anyio.sleep(chance.uniform(0.0, 0.5))
            if number % 10 == 2:
                await source_db.server.kill9()
                await source_db.server.start()
            await command.kill9()
            command.start()
        stop.set()
    expected = await source_db.rows("SELECT id, decode(md5(note), 'hex') FROM t ORDER BY id")  # not gigabytes of texts
    await command.kill9()
    await archive_until_now(source_db, tmp_path / "log")
    rows = map(values, iterate(tmp_path / "log"))
    assert [(int(row[0] or 0), md5(row[1] or b"").digest()) for row in rows] == expected
    print(f"{kills} kills, {len(expected):,} rows")


async def test_the_archiver_ends_on_sigterm_and_logs_its_position(
    source_db: Database, tmp_path: Path, command: Command
) -> None:
    await source_db.execute(PUBLISHED)
    command.start()
    await wait_for_log(tmp_path / "log")
    await source_db.execute("INSERT INTO t VALUES (1)")
    await source_db.wait_for("SELECT active FROM pg_replication_slots")
    assert command._process is not None
    command._process.send_signal(signal.SIGTERM)
    assert await command.wait() == 0, command.last_lines()
    info = [sys.executable, "-m", "subscriber", "archive", "--info", "--json", "--directory", str(tmp_path / "log")]
    document = json.loads(subprocess.run(info, check=True, capture_output=True).stdout)
    assert Lsn.parse(document["end"]) >= Lsn.parse(document["start"])
    assert document["slot"] == "a"


# --- damage -------------------------------------------------------------------------------------


async def damaged_log(source: Database, directory: Path) -> Path:
    """Write a log with a flipped bit after its header, in a confirmed part. Returns the file."""
    await source.execute(PUBLISHED)
    await archive_until_now(source, directory)
    await source.execute("INSERT INTO t VALUES (1)", "INSERT INTO t VALUES (2)")
    await archive_until_now(source, directory)
    path = ChangeLog(directory).files()[-1].local_path
    damaged = bytearray(path.read_bytes())
    damaged[HEADER_SIZE] ^= 1
    path.write_bytes(damaged)
    return path


async def test_damage_stops_the_archiver_and_changes_nothing(source_db: Database, tmp_path: Path) -> None:
    path = await damaged_log(source_db, tmp_path)
    damaged = path.read_bytes()
    with pytest.raises(ChangeLogDamaged, match=f"{path.name}.* offset {HEADER_SIZE}\n") as caught:
        await archive_until_now(source_db, tmp_path)
    assert "copy" in (caught.value.hint or "")
    assert path.read_bytes() == damaged
    restored = bytearray(damaged)
    restored[HEADER_SIZE] ^= 1
    path.write_bytes(restored)  # from a copy, as the hint recommends
    await archive_until_now(source_db, tmp_path)
    assert [values(change)[0] for change in changes(tmp_path)] == [b"1", b"2"]


async def test_a_new_log_without_a_copy_begins_at_the_confirmed_position(source_db: Database, tmp_path: Path) -> None:
    await damaged_log(source_db, tmp_path / "old")
    start = await confirmed(source_db)
    await source_db.execute("INSERT INTO t VALUES (3)")
    await archive_until_now(source_db, tmp_path / "new")
    assert ChangeLog(tmp_path / "new").start() == start
    assert [values(change)[0] for change in changes(tmp_path / "new")] == [b"3"]


async def test_the_slot_distinguishes_damage_from_a_torn_tail(source_db: Database, tmp_path: Path) -> None:
    """Where the file "durable" is lost: the slot knows that the damaged bytes had been stored."""
    path = await damaged_log(source_db, tmp_path)
    damaged = path.read_bytes()
    (tmp_path / "durable").unlink()
    with pytest.raises(ChangeLogDamaged, match=f"{path.name}.* offset {HEADER_SIZE}") as caught:
        await archive_until_now(source_db, tmp_path)
    assert str(await confirmed(source_db)) in (caught.value.detail or "")
    assert path.read_bytes() == damaged


async def test_a_torn_tail_is_cut_off_and_fetched_again(source_db: Database, tmp_path: Path) -> None:
    await source_db.execute(PUBLISHED)
    await archive_until_now(source_db, tmp_path)
    path = ChangeLog(tmp_path).files()[-1].local_path
    with path.open("ab") as file:
        file.write(b"part of a block")
    await source_db.execute("INSERT INTO t VALUES (1)")
    await archive_until_now(source_db, tmp_path)
    assert [values(change)[0] for change in changes(tmp_path)] == [b"1"]
    assert ChangeLog(tmp_path).damage() == []


async def test_damage_found_while_it_runs_ends_the_archiver(source_db: Database, tmp_path: Path) -> None:
    """It would meet the same damage again every few seconds."""
    await source_db.execute(PUBLISHED)
    writer = log_writer(tmp_path)
    writer.open()
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(damage_and_disconnect, source_db, tmp_path)
            with pytest.raises(ChangeLogDamaged):
                await Archiver(source_db.dsn(), "a", ["p"], writer).run()
    writer.close()


async def damage_and_disconnect(source: Database, directory: Path) -> None:
    await source.wait_for("SELECT active FROM pg_replication_slots WHERE slot_name = 'a'")
    await source.execute("INSERT INTO t VALUES (1)")
    while not changes(directory):
        await anyio.sleep(0.02)
    path = ChangeLog(directory).files()[-1].local_path
    path.write_bytes(path.read_bytes()[:HEADER_SIZE])
    await source.execute("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = 'a'")
