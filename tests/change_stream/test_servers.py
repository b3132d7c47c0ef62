"""The stream of real publishers: slots, snapshots, streamed and prepared transactions, lost connections."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Literal

import anyio
import pytest

from subscriber import (
    ConnectionLost,
    Delete,
    Insert,
    Kind,
    Lsn,
    Message,
    PublisherError,
    ServerError,
    Stream,
    Transaction,
    Update,
    consume,
    stream,
)
from subscriber.change_stream.consumer import Consumer
from subscriber.settings import Settings
from tests.code_type import CODE
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_proxy import Proxies

WALSENDERS = (
    "SELECT count(*) FROM pg_stat_replication s JOIN pg_stat_activity USING (pid) WHERE datname = current_database()"
)
AT_ONCE = "-c debug_logical_replication_streaming=immediate"  # stream every change


async def here(db: Database) -> Lsn:
    return Lsn.parse(await db.value("SELECT pg_current_wal_lsn()::text"))


async def rows(transaction: Transaction) -> list[tuple[str, object]]:
    return [(change.kind, change.new["id"]) async for change in transaction if isinstance(change, Insert)]


async def test_a_slot_is_streamed_from_and_confirmed(db: Database, slot: str) -> None:
    await db.execute("INSERT INTO t VALUES (1)", "INSERT INTO t VALUES (2), (3)")
    async with stream(db.dsn(), slot=slot, publications=["p"], until=await here(db)) as changes:
        keys = []
        async for transaction in changes:
            keys.append([change.new["id"] async for change in transaction if isinstance(change, Insert)])
            await transaction.ack()
        assert transaction.time is not None
    assert keys == [[1], [2, 3]]
    confirmed = Lsn.parse(
        await db.value("SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = 's'")
    )
    assert confirmed == changes.confirmed >= (transaction.end_lsn or Lsn(0))
    assert await db.value(WALSENDERS) == 0


async def test_nothing_is_left_when_a_stream_is_left_anywhere(db: Database, slot: str) -> None:
    await db.execute("INSERT INTO large SELECT i, repeat('x', 100) FROM generate_series(1, 20000) i")
    before, threads = asyncio.all_tasks(), {thread.name for thread in threading.enumerate()}
    for cut in range(4):
        async with stream(db.dsn(), slot=slot, publications=["p"], stop_timeout=0 if cut % 2 else 5) as changes:
            if cut > 1:
                async for transaction in changes:
                    async for _ in transaction:
                        break
                    break
    with anyio.move_on_after(0.1):
        async with stream(db.dsn(), slot=slot, publications=["p"]) as changes:
            async for _ in changes:
                await anyio.sleep_forever()
    assert asyncio.all_tasks() == before
    assert {thread.name for thread in threading.enumerate()} - threads <= {"AnyIO worker thread"}
    await db.wait_for(WALSENDERS, 0)


async def test_a_snapshot_and_the_stream_deliver_every_row_once(db: Database) -> None:
    await db.execute("INSERT INTO t SELECT i FROM generate_series(1, 10) i")
    async with stream(db.dsn(), slot="new", create="missing", publications=["p"]) as changes:
        await db.execute("INSERT INTO t VALUES (11)")
        reader = await db.connect()
        snapshot = changes.snapshot
        assert snapshot is not None
        async with reader.transaction(isolation="repeatable_read"):
            await reader.execute(f"SET TRANSACTION SNAPSHOT '{snapshot}'")
            assert await reader.fetchval("SELECT count(*) FROM t") == 10
        transaction = await anext(changes)
        assert await rows(transaction) == [("insert", 11)]
        assert changes.snapshot is None
    async with stream(db.dsn(), slot="new", create="missing", publications=["p"]) as changes:
        assert changes.snapshot is None
        assert await rows(await anext(changes)) == [("insert", 11)]
    async with stream(db.dsn(), slot="new", create="replace", publications=["p"]) as changes:
        assert changes.snapshot is not None


async def test_a_stream_without_a_slot_begins_now(db: Database) -> None:
    await db.execute("INSERT INTO t VALUES (1)")
    async with stream(db.dsn(), publications=["p"]) as changes:
        await db.execute("INSERT INTO t VALUES (2)")
        assert await rows(await anext(changes)) == [("insert", 2)]
        await db.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_replication JOIN pg_stat_activity USING (pid)"
            " WHERE datname = current_database()"
        )
        with pytest.raises((ConnectionLost, ServerError)):
            await anext(changes)
    # The server reports the end of the session before it removes the slot.
    await db.wait_for("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()", 0)


async def test_a_missing_slot_or_publication_is_an_error_at_once(db: Database, slot: str) -> None:
    with pytest.raises(PublisherError, match='replication slot "none" does not exist'):
        async with stream(db.dsn(), slot="none", publications=["p"]):
            pass
    with pytest.raises(PublisherError, match='publication "none" does not exist'):
        async with stream(db.dsn(), slot=slot, publications=["none"]):
            pass
    with pytest.raises(ConnectionLost, match="Connection refused"):
        async with stream("host=127.0.0.1 port=1 dbname=x", slot=slot, publications=["p"]):
            pass


@pytest.mark.parametrize("streaming", ["on", "parallel"])
async def test_streamed_transactions_come_when_they_commit(
    db: Database, slot: str, streaming: Literal["on", "parallel"], tmp_path: Path
) -> None:
    first, second = await db.connect(), await db.connect()
    outer, other = first.transaction(), second.transaction()
    await outer.start()
    await other.start()
    for number in range(3):
        await first.execute("INSERT INTO t SELECT i FROM generate_series($1::int, $1 + 9) i", number * 10)
        await second.execute("INSERT INTO large VALUES ($1, 'x')", number)
        inner = first.transaction()
        await inner.start()
        await first.execute("INSERT INTO t VALUES ($1)", 1000 + number)
        await inner.rollback()
    await outer.commit()
    await other.rollback()
    spool = tmp_path / "spool"
    async with stream(
        db.dsn(options=AT_ONCE),
        slot=slot,
        publications=["p"],
        until=await here(db),
        streaming=streaming,
        spool_folder=spool,
    ) as changes:
        transaction = await anext(changes)
        assert await rows(transaction) == [("insert", number) for number in range(30)]
        await transaction.ack()
        with pytest.raises(StopAsyncIteration):
            await anext(changes)
        assert changes.confirmed >= (transaction.end_lsn or Lsn(0))
        assert os.listdir(spool) == []
    assert not spool.exists()


async def test_a_prepared_transaction_is_delivered_at_prepare_and_at_its_end(db: Database) -> None:
    async with stream(db.dsn(), slot="two", create="missing", publications=["p"], two_phase=True) as changes:
        await db.execute("BEGIN; INSERT INTO t VALUES (1); PREPARE TRANSACTION 'one'")
        prepare = await anext(changes)
        assert (prepare.kind, prepare.gid, await rows(prepare)) == (Kind.PREPARE, "one", [("insert", 1)])
        await prepare.ack()
        await db.execute("COMMIT PREPARED 'one'")
        end = await anext(changes)
        assert (end.kind, end.gid, end.xid) == (Kind.COMMIT_PREPARED, "one", prepare.xid)
        await end.ack()
        await db.execute("BEGIN; INSERT INTO t VALUES (2); PREPARE TRANSACTION 'two'", "ROLLBACK PREPARED 'two'")
        kinds = [(await anext(changes)).kind for _ in range(2)]
        assert kinds == [Kind.PREPARE, Kind.ROLLBACK_PREPARED]


async def test_logical_messages_are_delivered_inside_and_outside_of_transactions(db: Database, slot: str) -> None:
    await db.execute(
        "SELECT pg_logical_emit_message(false, 'p', 'alone')",
        "BEGIN; SELECT pg_logical_emit_message(true, 'p', 'inside'); INSERT INTO t VALUES (1); COMMIT",
    )
    async with stream(db.dsn(), slot=slot, publications=["p"], messages=True) as changes:
        alone = await anext(changes)
        (message,) = await alone.changes()
        assert isinstance(message, Message)
        assert (alone.kind, message.text) == (Kind.MESSAGE, "alone")
        await alone.ack()
        inside = await anext(changes)
        assert [change.kind for change in await inside.changes()] == ["message", "insert"]
    async with stream(db.dsn(), slot=slot, publications=["p"], messages=True) as changes:
        assert (await anext(changes)).kind is Kind.COMMIT  # acknowledged transactions are not sent again


async def test_a_lost_connection_is_not_noticed(db: Database, slot: str, proxies: Proxies) -> None:
    proxy = await proxies.to(db.server.port)
    settings = Settings(first_retry_delay=0.02, receive_queue_size=100_000)
    for number in range(20):
        await db.execute(f"INSERT INTO t SELECT i FROM generate_series({number * 1000}, {number * 1000 + 999}) i")
    end = await here(db)
    keys: list[int] = []
    async with stream(proxy.dsn(db.dsn()), slot=slot, publications=["p"], until=end, settings=settings) as changes:
        async for transaction in changes:
            async for change in transaction:
                assert isinstance(change, Insert)
                keys.append(change.new["id"])
                if len(keys) % 2700 == 0:
                    proxy.reset()
            await transaction.ack()
    assert keys == list(range(20_000))


async def test_a_publisher_that_restarts_is_waited_for(db: Database, slot: str) -> None:
    """A fast shutdown waits until everything is confirmed: an idle consumer must not hold it up."""
    async with stream(db.dsn(), slot=slot, publications=["p"]) as changes:
        await db.execute("INSERT INTO t VALUES (1)")
        transaction = await anext(changes)
        await transaction.ack()
        with anyio.fail_after(10):
            await db.server.restart("fast")
        await db.execute("INSERT INTO t VALUES (2)")
        assert await rows(await anext(changes)) == [("insert", 2)]


async def test_a_stuck_consumer_keeps_its_connection(db: Database, slot: str) -> None:
    dsn = db.dsn(options="-c wal_sender_timeout=2s")
    async with stream(dsn, slot=slot, publications=["p"], memory=1000) as changes:
        await db.execute("INSERT INTO t SELECT i FROM generate_series(1, 20000) i")
        transaction = await anext(changes)
        pid = await db.value("SELECT pid FROM pg_stat_replication WHERE application_name = 's'")
        await anyio.sleep(4.5)
        assert len(await transaction.changes()) == 20_000
        assert await db.value("SELECT pid FROM pg_stat_replication WHERE application_name = 's'") == pid


async def test_a_second_stream_of_a_slot_waits_and_takes_over(db: Database, slot: str) -> None:
    settings = Settings(retry_interval=0.1)
    await db.execute("INSERT INTO t VALUES (1)")

    async with stream(db.dsn(), slot=slot, publications=["p"], settings=settings) as second:
        async with stream(db.dsn(), slot=slot, publications=["p"]) as first:
            await anext(first)
            with anyio.move_on_after(0.3):
                await anext(second)
                pytest.fail("both stream")
        with anyio.fail_after(10):
            assert await rows(await anext(second)) == [("insert", 1)]


class Recorder(Consumer):
    """Writes down which callbacks were called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def startup(self, stream: Stream) -> None:
        self.calls.append("startup")

    async def begin(self, transaction: Transaction) -> None:
        self.calls.append("begin")

    async def change(self, transaction: Transaction, change: Insert | Update | Delete) -> None:
        self.calls.append(f"{change.kind}")

    async def commit(self, transaction: Transaction) -> None:
        self.calls.append("commit")

    async def shutdown(self) -> None:
        self.calls.append("shutdown")


async def test_consume_calls_the_callbacks_in_order_and_does_not_repeat_transactions(db: Database, slot: str) -> None:
    await db.execute("INSERT INTO t VALUES (1, 1)", "UPDATE t SET n = 2")
    recorder = Recorder()
    await consume(recorder, db.dsn(), slot=slot, publications=["p"], until=await here(db))
    expected = ["startup", "begin", "insert", "commit", "begin", "update", "commit", "shutdown"]
    assert recorder.calls == expected
    await consume(again := Recorder(), db.dsn(), slot=slot, publications=["p"], until=await here(db))
    assert again.calls == ["startup", "shutdown"]


async def test_values_are_text_after_the_publisher_has_refused_binary(db: Database, slot: str) -> None:
    """Each transaction arrives once, also the one whose second change cannot be sent in binary."""
    await db.execute(CODE, "ALTER TABLE t ADD codes code[]", "INSERT INTO t VALUES (1)")
    await db.execute("BEGIN; INSERT INTO t VALUES (2); INSERT INTO t (id, codes) VALUES (3, '{7,8}'); COMMIT")
    await db.execute("INSERT INTO t VALUES (4)")
    received = []
    async with stream(db.dsn(), slot=slot, publications=["p"], binary=True, until=await here(db)) as changes:
        async for transaction in changes:
            received += [
                (change.new["id"], change.new["codes"]) async for change in transaction if isinstance(change, Insert)
            ]
            await transaction.ack()
    assert received == [(1, None), (2, None), (3, ["7", "8"]), (4, None)]
