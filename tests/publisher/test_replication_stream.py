"""The stream of a real publisher, its end, and the meaning of its errors."""

from __future__ import annotations

from dataclasses import replace

import anyio
import pytest

from subscriber.demo.servers import Servers
from subscriber.errors import (
    ConnectionLost,
    EndOfStream,
    PublisherError,
    PublisherReplaced,
    ServerError,
    SlotLost,
)
from subscriber.lsn import Lsn
from subscriber.protocol import copy_data
from subscriber.publisher.commands import StreamOptions
from subscriber.publisher.connection import Publisher, SlotInfo, SystemIdentity
from subscriber.publisher.replication_stream import ReplicationStream, check_publisher, start_error, stream_error
from tests.plugins.fix_cluster import Database

OPTIONS = StreamOptions(("p",))


async def letters(stream: ReplicationStream, until: str) -> str:
    """Return the types of the received messages, up to the first `until`."""
    text = ""
    with anyio.fail_after(20):
        while until not in text:
            for frame in await stream.receive():
                message = copy_data.decode_from_publisher(frame)
                if isinstance(message, copy_data.XLogData):
                    text += chr(message.payload[0])
    return text


async def started(db: Database, slot: str, start: Lsn = Lsn(0), options: StreamOptions = OPTIONS) -> ReplicationStream:
    publisher = await Publisher.connect(db.dsn(), application_name=slot)
    try:
        return await ReplicationStream.start(publisher, slot, start, options)
    except BaseException:
        await publisher.close()
        raise


@pytest.fixture
async def slot(db: Database, walsender: Publisher) -> str:
    """Create an unused slot, with a publication `p` of the table `t`."""
    await db.execute("CREATE TABLE t (a int PRIMARY KEY)", "CREATE PUBLICATION p FOR TABLE t")
    return (await walsender.create_slot(f"s_{db.name}", snapshot="nothing")).name


async def test_changes_arrive_and_are_confirmed(db: Database, slot: str) -> None:
    stream = await started(db, slot)
    await db.execute("INSERT INTO t VALUES (1)", "UPDATE t SET a = 2")
    kinds = await letters(stream, "U")
    assert kinds.startswith("BRICBU")
    await db.execute("SELECT 1")
    position = Lsn.parse(await db.value("SELECT pg_current_wal_flush_lsn()::text"))
    stream.send_status(position, position, position)
    await db.wait_for(
        f"SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = '{slot}'", str(position)
    )
    assert await stream.stop()
    await db.wait_for(f"SELECT active FROM pg_replication_slots WHERE slot_name = '{slot}'", False)


async def test_a_start_position_skips_what_is_before_it(db: Database, slot: str) -> None:
    await db.execute("INSERT INTO t VALUES (1)")
    position = Lsn.parse(await db.value("SELECT pg_current_wal_flush_lsn()::text"))
    await db.execute("DELETE FROM t")
    stream = await started(db, slot, position)
    assert (await letters(stream, "C")) == "BRDC"
    await stream.stop()


async def test_stopping_does_not_wait_for_a_publisher_that_sends_on_and_on(db: Database, slot: str) -> None:
    stream = await started(db, slot)
    await db.execute("INSERT INTO t SELECT generate_series(1, 200000)")
    await letters(stream, "I")
    with anyio.fail_after(10):
        await stream.stop(timeout=0.01)
    await db.wait_for(f"SELECT active FROM pg_replication_slots WHERE slot_name = '{slot}'", False)


async def test_a_notice_comes_beside_the_changes(db: Database, slot: str) -> None:
    publisher = await Publisher.connect(db.dsn(), application_name=slot)
    if publisher.server_version < 180000:
        await publisher.close()
        pytest.skip("before PostgreSQL 18 a missing publication is an error")
    notices: list[dict[str, str]] = []
    stream = await ReplicationStream.start(
        publisher, slot, Lsn(0), StreamOptions(("p", "nosuch")), on_notice=notices.append
    )
    await db.execute("INSERT INTO t VALUES (1)")
    assert await letters(stream, "C") == "BRIC"
    assert [notice["M"] for notice in notices] == ['skipped loading publication "nosuch"']
    await stream.stop()


async def test_a_missing_publication_is_an_error_before_18(db: Database, slot: str) -> None:
    publisher = await Publisher.connect(db.dsn(), application_name=slot)
    if publisher.server_version >= 180000:
        await publisher.close()
        pytest.skip("since PostgreSQL 18 a missing publication is a warning")
    stream = await ReplicationStream.start(publisher, slot, Lsn(0), StreamOptions(("nosuch",)))
    await db.execute("INSERT INTO t VALUES (1)")
    with pytest.raises(ServerError) as caught:
        await letters(stream, "C")
    await stream.stop()
    assert caught.value.message == (
        'could not receive data from WAL stream: ERROR:  publication "nosuch" does not exist'
    )


async def test_a_missing_slot_is_lost_for_good(db: Database) -> None:
    with pytest.raises(SlotLost) as caught:
        await started(db, "nosuch")
    assert caught.value.message == ('could not start WAL streaming: ERROR:  replication slot "nosuch" does not exist')
    assert caught.value.sqlstate == "42704"
    assert caught.value.hint is not None


async def test_a_slot_in_use_may_be_tried_again(db: Database, slot: str) -> None:
    stream = await started(db, slot)
    with pytest.raises(ServerError) as caught:
        await started(db, slot)
    assert caught.value.sqlstate == "55006"
    assert "is active for PID" in caught.value.message
    await stream.stop()


async def test_another_databases_slot_is_refused(db: Database, slot: str) -> None:
    other = Database(db.server, "postgres")
    with pytest.raises(PublisherError) as caught:
        await started(other, slot)
    assert not isinstance(caught.value, SlotLost)
    assert caught.value.detail == f'The slot belongs to database "{db.name}".'


async def test_a_terminated_walsender_may_be_started_again(db: Database, slot: str) -> None:
    stream = await started(db, slot)
    await db.execute("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active")
    with pytest.raises(ServerError) as caught:
        await letters(stream, "nothing of the kind")
    assert caught.value.sqlstate == "57P01"
    with pytest.raises((ServerError, ConnectionLost)):
        stream.send_status(Lsn(1), Lsn(1), Lsn(1))
    assert not await stream.stop()


async def test_an_invalidated_slot_is_lost_for_good(servers: Servers, db: Database) -> None:
    """The whole sequence: WAL beyond max_slot_wal_keep_size, a checkpoint, and a subscriber that reconnects."""
    server = await servers.create("invalidating", {"max_slot_wal_keep_size": "1MB"}, bin=db.server.bin)
    await server.start()
    database = Database(server, "postgres")
    publisher = await Publisher.connect(database.dsn(), application_name="s")
    await publisher.create_slot("s", snapshot="nothing")
    await database.execute("CREATE TABLE t (a int)", "CREATE PUBLICATION p FOR TABLE t")
    for _ in range(3):
        await database.execute("INSERT INTO t VALUES (1)", "SELECT pg_switch_wal()", "CHECKPOINT")
    replication_slot = await publisher.slot("s")
    assert replication_slot is not None
    assert replication_slot.is_lost
    await publisher.close()
    with pytest.raises(SlotLost) as caught:
        await started(database, "s")
    assert caught.value.message.startswith("could not start WAL streaming: ERROR:  ")
    assert caught.value.sqlstate in ("55000", "58P01")


async def test_a_publisher_that_shuts_down_ends_the_stream_in_good_order(servers: Servers, db: Database) -> None:
    server = await servers.create("stopping", bin=db.server.bin)
    await server.start()
    database = Database(server, "postgres")
    await database.execute("CREATE PUBLICATION p FOR ALL TABLES")
    publisher = await Publisher.connect(database.dsn(), application_name="s")
    await publisher.create_slot("s", snapshot="nothing")
    await publisher.close()
    stream = await started(database, "s")

    # It streams once it answers; one that has not quite begun is ended like any other backend.
    stream.send_status(Lsn(0), Lsn(0), Lsn(0), reply_requested=True)
    await stream.receive()

    async def confirm_everything() -> None:
        while True:
            for frame in await stream.receive():
                message = copy_data.decode_from_publisher(frame)
                if isinstance(message, copy_data.Keepalive):
                    stream.send_status(message.end, message.end, message.end)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.stop)
            with pytest.raises(EndOfStream):
                await confirm_everything()
    assert server.pid is None
    await stream.stop()


# --- the meaning of errors -----------------------------------------------------------------------

INFO = SlotInfo(
    "s", "pgoutput", "db", True, False, False, None, None, None, "reserved", None, False, False, None, False, False
)


def answer(sqlstate: str, message: str) -> ServerError:
    return ServerError({"S": "FEHLER", "V": "ERROR", "C": sqlstate, "M": message, "D": "detail"})


@pytest.mark.parametrize(
    ("error", "info", "kind"),
    [
        (answer("42704", "Slot »s« existiert nicht"), None, SlotLost),
        (answer("55000", "whatever the language"), replace(INFO, wal_status="lost"), SlotLost),
        (answer("55000", "whatever"), replace(INFO, invalidation_reason="idle_timeout"), SlotLost),
        (answer("55000", "whatever"), replace(INFO, conflicting=True), SlotLost),
        (answer("55000", "whatever"), replace(INFO, in_this_database=False), PublisherError),
        (answer("55000", "whatever"), replace(INFO, synced=True), ServerError),
        (answer("55000", "whatever"), INFO, ServerError),
        (answer("55006", "in use"), None, ServerError),
    ],
)
def test_errors_of_starting_are_told_apart(error: ServerError, info: SlotInfo | None, kind: type) -> None:
    failure = start_error(error, "s", info)
    assert type(failure) is kind
    assert failure.message == f"could not start WAL streaming: FEHLER:  {error.message}"
    assert failure.sqlstate == error.sqlstate


def test_a_copy_of_the_slot_on_a_standby_is_waited_for_even_if_it_is_invalidated() -> None:
    for info in (replace(INFO, synced=True), replace(INFO, synced=True, invalidation_reason="rows_removed")):
        error = start_error(answer("55000", "whatever"), "s", info, in_recovery=True)
        assert type(error) is ConnectionLost
        assert "target_session_attrs=read-write" in (error.hint or "")


def test_the_hint_of_a_lost_failover_slot_has_the_statements_that_make_another() -> None:
    missing = start_error(answer("42704", "no slot"), "a'b", None, failover=True)
    lost = start_error(answer("55000", "x"), "a'b", replace(INFO, wal_status="lost"), failover=True)
    create = "SELECT pg_create_logical_replication_slot('a''b', 'pgoutput', failover => true)"
    assert f"on the publisher: {create}; Then ALTER SUBSCRIPTION … SET (slot_name = 'a''b')" in (missing.hint or "")
    assert f"on the publisher: SELECT pg_drop_replication_slot('a''b'); {create};" in (lost.hint or "")


def test_removed_wal_is_a_lost_slot() -> None:
    error = stream_error(answer("58P01", "requested WAL segment 000000010000000000000001 has already been removed"))
    assert type(error) is SlotLost
    assert type(stream_error(answer("57P01", "terminating connection"))) is ServerError


HERE = SystemIdentity(7, 1, Lsn(100), "db", False)


def test_the_publisher_must_be_the_one_we_know() -> None:
    check_publisher(HERE, None, Lsn(0))
    check_publisher(HERE, 7, Lsn(100))
    with pytest.raises(PublisherReplaced, match="another database cluster") as caught:
        check_publisher(HERE, 8, Lsn(0))
    assert caught.value.detail is not None
    assert "identifier 8; the connection leads to 7" in caught.value.detail
    with pytest.raises(PublisherReplaced, match="behind the subscription"):
        check_publisher(HERE, 7, Lsn(101))
    with pytest.raises(ConnectionLost, match="a standby, is behind"):
        check_publisher(replace(HERE, in_recovery=True), 7, Lsn(101))
