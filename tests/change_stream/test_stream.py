"""The stream without a server: delivered changes, their order, and confirmed positions."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import anyio
import pytest

from subscriber import (
    NOT_SENT,
    UNCHANGED,
    Delete,
    Insert,
    Kind,
    Message,
    ProtocolError,
    Row,
    SubscriberError,
    Truncate,
    Update,
)
from subscriber.change_stream.changes import Change
from subscriber.change_stream.engine.spooled import SpooledReader
from subscriber.change_stream.stream import Stream
from subscriber.change_stream.transaction import Transaction
from subscriber.change_stream.types.registry import TypeRow
from subscriber.errors import ConnectionLost
from subscriber.lsn import Lsn
from subscriber.protocol import messages
from subscriber.protocol.encode import encode
from subscriber.protocol.messages import Commit, OldPart
from subscriber.protocol.tuple_data import TupleData
from subscriber.settings import Settings
from subscriber.testing import Described, FakePublisher, FakeTable


@pytest.fixture
def publisher() -> FakePublisher:
    return FakePublisher(settings=Settings(first_retry_delay=0.001, retry_interval=0.001))


@pytest.fixture
def city(publisher: FakePublisher) -> FakeTable:
    return publisher.table("public.city", id="integer key", name="text", size="bigint")


def write(publisher: FakePublisher, city: FakeTable, first: int, last: int, rows: int = 1) -> None:
    """Write transactions of `rows` rows each; `id` is the transaction's number."""
    for number in range(first, last + 1):
        with publisher.transaction() as transaction:
            for row in range(rows):
                transaction.insert(city, id=number, size=row)


def new(change: Change) -> Row:
    assert isinstance(change, Insert | Update)
    return change.new


async def ids(stream: Stream) -> list[int]:
    """Return the `id` of each transaction's first row. All transactions are acknowledged."""
    numbers = []
    async for transaction in stream:
        numbers.append(new((await transaction.changes())[0])["id"])
        await transaction.ack()
    return numbers


async def everything(stream: Stream) -> list[tuple[Transaction, list[Change]]]:
    return [(transaction, await transaction.changes()) async for transaction in stream]


async def test_each_kind_of_change_is_delivered(publisher: FakePublisher, city: FakeTable) -> None:
    with publisher.transaction(origin="elsewhere") as transaction:
        transaction.insert(city, id=1, name="Ulm")
        transaction.update(city, id=1, name=UNCHANGED, size=3)
        transaction.update(city, {"id": 1}, id=2, name="Pau")
        transaction.delete(city, id=2)
        transaction.truncate(city, cascade=True)
        transaction.message("prefix", b"content")
    async with publisher.stream() as stream:
        ((delivered, changes),) = await everything(stream)
    assert (delivered.kind, delivered.origin) == (Kind.COMMIT, "elsewhere")
    insert, update, key_update, delete, truncate, message = changes
    match insert:
        case Insert(relation, row):
            assert str(relation) == "public.city"
            assert [(c.name, c.type_name, c.is_key) for c in relation.columns] == [
                ("id", "integer", True),
                ("name", "text", False),
                ("size", "bigint", False),
            ]
            assert dict(row) == {"id": 1, "name": "Ulm", "size": None}
    assert isinstance(update, Update)
    assert update.old is None
    assert update.new["name"] is UNCHANGED
    assert update.new.sent() == {"id": 1, "size": 3}
    assert isinstance(key_update, Update)
    assert key_update.key == {"id": 1}
    assert key_update.old is not None
    assert dict(key_update.old) == {"id": 1, "name": NOT_SENT, "size": NOT_SENT}
    assert isinstance(delete, Delete)
    assert (delete.key, delete.new) == ({"id": 2}, None)
    assert isinstance(truncate, Truncate)
    assert truncate.cascade
    assert isinstance(message, Message)
    assert (message.prefix, message.text, message.transactional) == ("prefix", "content", True)


async def test_an_unchanged_value_is_taken_from_the_old_row_under_replica_identity_full(
    publisher: FakePublisher,
) -> None:
    whole = publisher.table("s.whole", identity="full", id="int", long="text")
    with publisher.transaction() as transaction:
        transaction.update(whole, {"id": 1, "long": "x" * 10_000}, id=2, long=UNCHANGED)
    async with publisher.stream() as stream:
        ((_, (update,)),) = await everything(stream)
    assert isinstance(update, Update)
    assert update.new.dict() == {"id": 2, "long": "x" * 10_000}
    assert update.key == {"id": 1, "long": "x" * 10_000}


@pytest.mark.parametrize("binary", [False, True])
async def test_an_unchanged_value_has_the_format_of_the_old_row(publisher: FakePublisher, binary: bool) -> None:
    whole = publisher.table("s.whole", identity="full", id="int")
    sent = TupleData.join(b"b", [b"\0\0\0\7"]) if binary else TupleData.join(b"t", [b"7"])
    with publisher.transaction() as transaction:
        unchanged = TupleData.join(b"u", [None])
        transaction.changes.append(messages.Update(None, whole.relation.relid, OldPart.ROW, sent, unchanged))
    async with publisher.stream() as stream:
        ((_, (update,)),) = await everything(stream)
    row = new(update)
    assert row["id"] == row.dict()["id"] == 7
    assert row.is_binary("id") is binary
    if binary:
        with pytest.raises(SubscriberError, match="sent in binary"):
            row.text("id")
    else:
        assert row.text("id") == "7"


async def test_types_are_asked_for_until_the_publisher_answers(
    publisher: FakePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = publisher.table("s.t", id="int key", mood="mood")
    with publisher.transaction() as transaction:
        transaction.insert(table, id=1, mood="ok")
    answer, asked = publisher.types, 0

    async def types(oids: Iterable[int], known: Iterable[int]) -> list[TypeRow]:
        nonlocal asked
        asked += 1
        if asked < 3:
            publisher.disconnect()
            raise ConnectionLost("nobody answers")
        return await answer(oids, known)

    monkeypatch.setattr(publisher, "types", types)
    async with publisher.stream() as stream:
        ((_, (insert,)),) = await everything(stream)
    assert new(insert).dict() == {"id": 1, "mood": "ok"}
    assert insert.relation.columns[1].type_name == "mood"  # type: ignore[union-attr]


async def test_only_an_ack_confirms(publisher: FakePublisher, city: FakeTable) -> None:
    write(publisher, city, 1, 3)
    async with publisher.stream() as stream:
        transactions = [transaction async for transaction in stream]
    assert publisher.confirmed < transactions[0].finish_lsn
    async with publisher.stream() as stream:
        async for transaction in stream:
            if transaction.xid == transactions[0].xid:
                await transaction.ack()
    assert publisher.confirmed == transactions[0].end_lsn


async def test_acks_out_of_order_are_held_to_the_lowest(publisher: FakePublisher, city: FakeTable) -> None:
    write(publisher, city, 1, 3)
    async with publisher.stream() as stream:
        first, second, third = [transaction async for transaction in stream]
        await third.ack()
        await second.ack()
        assert stream.confirmed < first.finish_lsn
        assert stream.unacknowledged == 1
        await first.ack()
        assert stream.confirmed == third.end_lsn
    assert publisher.confirmed == third.end_lsn


async def test_an_unacknowledged_transaction_comes_again_in_the_next_stream(
    publisher: FakePublisher, city: FakeTable
) -> None:
    write(publisher, city, 1, 4)
    async with publisher.stream() as stream:
        async for transaction in stream:
            if transaction.xid == 702:
                break
            await transaction.ack()
    async with publisher.stream() as stream:
        assert await ids(stream) == [2, 3, 4]


async def test_an_ack_after_the_end_is_refused(publisher: FakePublisher, city: FakeTable) -> None:
    write(publisher, city, 1, 1)
    async with publisher.stream() as stream:
        transaction = await anext(stream)
    with pytest.raises(SubscriberError, match="closed"):
        await transaction.ack()


async def test_a_closed_stream_raises_an_error_when_it_is_read(publisher: FakePublisher, city: FakeTable) -> None:
    write(publisher, city, 1, 2, rows=1000)
    async with publisher.stream() as stream:
        transaction = await anext(stream)
    for left in (stream, transaction):
        with pytest.raises(SubscriberError, match="the stream is closed"):
            [thing async for thing in left]
    async with publisher.stream() as stream:
        pass
    with pytest.raises(SubscriberError, match="the stream is closed"):
        await anext(stream)


async def test_changes_that_are_left_are_passed_over(publisher: FakePublisher, city: FakeTable) -> None:
    write(publisher, city, 1, 3, rows=1000)
    async with publisher.stream() as stream:
        rows = []
        async for transaction in stream:
            async for change in transaction:
                rows.append((new(change)["id"], new(change)["size"]))
                break
            await transaction.ack()
    assert rows == [(1, 0), (2, 0), (3, 0)]
    assert publisher.confirmed == publisher.position


async def test_a_lost_connection_is_not_noticed_in_the_middle_of_a_transaction(
    publisher: FakePublisher, city: FakeTable
) -> None:
    write(publisher, city, 1, 3, rows=1000)
    rows: list[tuple[int, int]] = []
    async with publisher.stream(memory=10_000) as stream:
        async for transaction in stream:
            async for change in transaction:
                rows.append((new(change)["id"], new(change)["size"]))
                if len(rows) % 700 == 0:
                    publisher.disconnect()
            await transaction.ack()
    assert rows == [(number, row) for number in (1, 2, 3) for row in range(1000)]
    assert publisher.connections > 2


async def test_delivered_transactions_are_not_repeated_after_a_lost_connection(
    publisher: FakePublisher, city: FakeTable
) -> None:
    write(publisher, city, 1, 3)
    async with publisher.stream(follow=True) as stream:
        first, second, third = [await anext(stream) for _ in range(3)]
        publisher.disconnect()
        write(publisher, city, 4, 4)
        fourth = await anext(stream)
        assert new((await fourth.changes())[0])["id"] == 4
        for transaction in (first, second, third):
            await transaction.ack()
        assert stream.confirmed == third.end_lsn


async def test_batches_and_changes_are_the_same(publisher: FakePublisher, city: FakeTable) -> None:
    write(publisher, city, 1, 2, rows=777)
    async with publisher.stream() as stream:
        async for transaction in stream:
            assert new(await anext(transaction))["size"] == 0
            sizes = [new(change)["size"] async for batch in transaction.batches() for change in batch]
            assert sizes == list(range(1, 777))


async def test_reading_stops_while_the_consumer_is_slow(publisher: FakePublisher, city: FakeTable) -> None:
    write(publisher, city, 1, 1000, rows=10)
    async with publisher.stream(memory=50_000) as stream:
        await anext(stream)
        await anyio.sleep(0.05)
        queued = stream._reader.core.connection._queued
        assert 50_000 < queued < 70_000
        assert len(await ids(stream)) == 999


async def test_the_publisher_is_answered_while_the_consumer_is_stuck(publisher: FakePublisher, city: FakeTable) -> None:
    write(publisher, city, 1, 2)
    async with publisher.stream(follow=True) as stream:
        transaction = await anext(stream)
        before = publisher.statuses
        for _ in range(3):
            publisher.ask()
            await anyio.sleep(0.01)
        assert publisher.statuses >= before + 3
        assert publisher.confirmed < transaction.finish_lsn


async def test_an_idle_consumer_does_not_hold_the_publisher_back(publisher: FakePublisher, city: FakeTable) -> None:
    write(publisher, city, 1, 1)
    async with publisher.stream(follow=True) as stream:
        transaction = await anext(stream)
        await transaction.ack()
        publisher.advance()
        publisher.ask()
        await anyio.sleep(0.02)
        assert publisher.confirmed == publisher.position == stream.confirmed


async def test_a_keepalive_is_not_noted_while_frames_are_on_their_way(
    publisher: FakePublisher, city: FakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removing files after a reconnect takes a moment. Frames received meanwhile have not been delivered yet."""
    with publisher.transaction(streamed=True) as large:
        large.insert(city, id=1)
    discard = SpooledReader.discard_unfinished

    async def slowly(spooled: SpooledReader) -> None:
        publisher.ask()
        await anyio.sleep(0.02)
        await discard(spooled)

    monkeypatch.setattr(SpooledReader, "discard_unfinished", slowly)
    async with publisher.stream(follow=True) as stream:
        with anyio.fail_after(2):
            assert (await anext(stream)).xid == large.xid
        assert publisher.confirmed < publisher.position


async def test_finish_ends_the_iteration_after_the_current_transaction(
    publisher: FakePublisher, city: FakeTable
) -> None:
    write(publisher, city, 1, 5, rows=500)
    async with publisher.stream(follow=True) as stream:
        count = 0
        async for transaction in stream:
            count += 1
            if count == 2:
                stream.finish()
            assert len(await transaction.changes()) == 500
            await transaction.ack()
    assert count == 2


async def test_finish_wakes_a_stream_that_waits(publisher: FakePublisher) -> None:
    async with publisher.stream(follow=True) as stream, anyio.create_task_group() as tasks:

        async def soon() -> None:
            await anyio.sleep(0.01)
            stream.finish()

        tasks.start_soon(soon)
        with anyio.fail_after(2):
            assert [transaction async for transaction in stream] == []


async def test_a_start_position_leaves_out_what_is_before_it(publisher: FakePublisher, city: FakeTable) -> None:
    write(publisher, city, 1, 2)
    start = publisher.position
    write(publisher, city, 3, 4)
    async with publisher.stream(start=start) as stream:
        assert await ids(stream) == [3, 4]


async def test_a_streamed_transaction_is_handed_out_when_it_commits(publisher: FakePublisher, city: FakeTable) -> None:
    with publisher.transaction(streamed=True, origin="elsewhere") as large:
        for number in range(5000):
            large.insert(city, id=number, name="x" * 100)
    write(publisher, city, 9, 9)
    async with publisher.stream() as stream:
        transaction = await anext(stream)
        assert (transaction.kind, transaction.xid, transaction.origin) == (Kind.COMMIT, large.xid, "elsewhere")
        assert [new(change)["id"] async for change in transaction] == list(range(5000))
        await transaction.ack()
        assert await ids(stream) == [9]
    assert publisher.confirmed == publisher.position


async def test_a_streamed_transaction_is_delivered_in_blocks(publisher: FakePublisher, city: FakeTable) -> None:
    with publisher.transaction(streamed=True) as large:
        large.insert(city, id=1)
        large.truncate(city)
    async with publisher.stream(in_progress="blocks") as stream:
        block, commit = await everything(stream)
        assert (block[0].kind, block[0].first, [c.kind for c in block[1]]) == (
            Kind.STREAM_BLOCK,
            True,
            ["insert", "truncate"],
        )
        assert [c.subxid for c in block[1]] == [large.xid] * 2
        assert (commit[0].kind, commit[1]) == (Kind.STREAM_COMMIT, [])
        await commit[0].ack()
        assert stream.confirmed == publisher.position


async def test_prepared_transactions_are_delivered_with_their_ends(publisher: FakePublisher, city: FakeTable) -> None:
    for gid in ("one", "two"):
        with publisher.transaction(prepare=gid) as transaction:
            transaction.insert(city, id=1)
    publisher.rollback_prepared("two")
    publisher.commit_prepared("one")
    async with publisher.stream() as stream:
        ends = [(t.kind, t.gid, len(await t.changes())) async for t in stream]
    assert ends == [
        (Kind.PREPARE, "one", 1),
        (Kind.PREPARE, "two", 1),
        (Kind.ROLLBACK_PREPARED, "two", 0),
        (Kind.COMMIT_PREPARED, "one", 0),
    ]


async def test_a_message_outside_of_a_transaction_is_delivered(publisher: FakePublisher, city: FakeTable) -> None:
    publisher.message("greeting", "hello")
    async with publisher.stream() as stream:
        transaction = await anext(stream)
        (message,) = await transaction.changes()
        assert isinstance(message, Message)
        assert (transaction.kind, message.text, message.transactional) == (Kind.MESSAGE, "hello", False)
        await transaction.ack()
    assert publisher.confirmed == publisher.position


async def test_a_transaction_without_changes_is_passed_over(publisher: FakePublisher, city: FakeTable) -> None:
    with publisher.transaction():
        pass
    async with publisher.stream() as stream:
        assert await ids(stream) == []
        assert stream.confirmed == publisher.position


async def test_a_message_out_of_order_ends_the_stream(publisher: FakePublisher) -> None:
    end = Lsn(publisher.position + 2)
    publisher.play([(end, encode(Commit(Lsn(end - 1), end, 3)))])
    async with publisher.stream(follow=True) as stream:
        with pytest.raises(ProtocolError, match="COMMIT message sent out of order"):
            await anext(stream)


async def test_a_small_transaction_is_complete_when_it_is_delivered(
    publisher: FakePublisher, city: FakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small transaction has arrived completely when it is delivered, a larger one has not.

    Its ack confirms it, whether its changes were read or not.
    """
    write(publisher, city, 1, 3)
    write(publisher, city, 4, 4, rows=1000)
    write(publisher, city, 5, 5)
    async with publisher.stream() as stream:
        described, *small = [await anext(stream) for _ in range(3)]
        assert described.end_lsn is not None  # known, now that the transaction was skipped
        assert stream.unacknowledged == 3
        assert stream.confirmed < described.end_lsn < stream.position
        large = await anext(stream)
        assert [transaction.end_lsn is None for transaction in (*small, large)] == [False, False, True]
        assert len(await large.changes()) == 1000
        for transaction in (large, small[1], small[0]):
            await transaction.ack()
            assert stream.confirmed < described.end_lsn
        await described.ack()
        assert stream.confirmed == large.end_lsn
        assert await ids(stream) == [5]
    assert publisher.confirmed == publisher.position


@pytest.mark.parametrize("good", [0, 2])
async def test_a_damaged_change_raises_its_error_after_the_changes_before_it(
    publisher: FakePublisher, city: FakeTable, good: int
) -> None:
    write(publisher, city, 1, 1)
    finish, end = Lsn(publisher.position + 8), Lsn(publisher.position + 16)
    row = TupleData.join(b"tnn", [b"2", None, None])
    inserts = [messages.Insert(None, city.relation.relid, row)] * good
    sent: list[messages.Message] = [messages.Begin(finish, 3, 7), *inserts, Commit(Lsn(finish - 1), end, 3)]
    publisher.play([(end, encode(message)) for message in sent])
    seen: list[Change] = []

    async def look(stream: Stream) -> None:
        async for transaction in stream:
            async for batch in transaction.batches():
                seen.extend(batch)

    async with publisher.stream(follow=True) as stream:
        await (await anext(stream)).ack()
        with pytest.raises(ProtocolError, match="incorrect commit LSN"):
            await look(stream)
    assert publisher.confirmed < finish
    assert len(seen) == good


async def test_an_error_in_the_program_closes_the_stream_completely(publisher: FakePublisher, city: FakeTable) -> None:
    write(publisher, city, 1, 3, rows=500)

    async def fail() -> None:
        async with publisher.stream() as stream:
            async for _ in stream:
                raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        await fail()
    assert publisher.confirmed < publisher.position


async def test_changes_that_a_cancelled_call_has_read_are_not_lost(publisher: FakePublisher, city: FakeTable) -> None:
    """The next call returns them, and so does an iteration."""
    write(publisher, city, 1, 2, rows=3000)
    async with publisher.stream(memory=500) as stream:
        for whole in (True, False):
            transaction = await anext(stream)
            for _ in range(5):
                with anyio.move_on_after(0.0005):
                    await transaction.changes()
                    pytest.fail("it was not cancelled")
            changes = await transaction.changes() if whole else [change async for change in transaction]
            assert [new(change)["size"] for change in changes] == list(range(3000))


class StatusPublisher(FakePublisher):
    """A publisher that sends its primary status, as PostgreSQL 19 does on request, before and after each frame."""

    def frames(self, number: int, start: Lsn, described: Described) -> tuple[list[bytes], int]:
        status = struct.pack(">cqqqq", b"s", 1, 2, 3, 4)
        frames, number = super().frames(number, start, described)
        return [status, *[sent for frame in frames for sent in (frame, status)]] if frames else frames, number


async def test_a_primary_status_between_all_frames_changes_nothing() -> None:
    seen = []
    for publisher in (FakePublisher(), StatusPublisher()):
        write(publisher, publisher.table("public.city", id="integer key", size="bigint"), 1, 5, rows=3)
        async with publisher.stream() as stream:
            seen.append([[str(change) for change in changes] for _, changes in await everything(stream)])
    assert seen[0] == seen[1]
