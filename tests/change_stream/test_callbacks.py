"""The order of callbacks, and the changes that filters exclude."""

from __future__ import annotations

import inspect

import pytest

from subscriber import Consumer, Delete, Insert, Message, Stream, Transaction, Truncate, Update
from subscriber.testing import FakePublisher, FakeTable

# PostgreSQL's list, in the order of OutputPluginCallbacks.
POSTGRESQL = """
startup begin change truncate commit message filter_by_origin shutdown filter_prepare begin_prepare prepare
commit_prepared rollback_prepared stream_start stream_stop stream_abort stream_prepare stream_commit stream_change
stream_message stream_truncate
"""


class Recorder(Consumer):
    """Records the calls, with the transaction's number in order of arrival."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.xids: list[int] = []

    def _call(self, name: str, transaction: Transaction) -> None:
        if transaction.xid not in self.xids:
            self.xids.append(transaction.xid)
        self.calls.append(f"{name} {self.xids.index(transaction.xid)}")

    async def startup(self, stream: Stream) -> None:
        self.calls.append("startup")

    async def shutdown(self) -> None:
        self.calls.append("shutdown")

    async def begin(self, transaction: Transaction) -> None:
        self._call("begin", transaction)

    async def change(self, transaction: Transaction, change: Insert | Update | Delete) -> None:
        self._call(change.kind, transaction)

    async def truncate(self, transaction: Transaction, change: Truncate) -> None:
        self._call("truncate", transaction)

    async def message(self, transaction: Transaction, message: Message) -> None:
        self.calls.append(f"message {message.text}")

    async def commit(self, transaction: Transaction) -> None:
        self._call("commit", transaction)

    async def begin_prepare(self, transaction: Transaction) -> None:
        self._call("begin_prepare", transaction)

    async def prepare(self, transaction: Transaction) -> None:
        self._call("prepare", transaction)

    async def commit_prepared(self, transaction: Transaction) -> None:
        self._call("commit_prepared", transaction)

    async def rollback_prepared(self, transaction: Transaction) -> None:
        self._call("rollback_prepared", transaction)


class InBlocks(Recorder):
    async def stream_start(self, transaction: Transaction) -> None:
        self._call("stream_start", transaction)

    async def stream_stop(self, transaction: Transaction) -> None:
        self._call("stream_stop", transaction)

    async def stream_abort(self, transaction: Transaction) -> None:
        self._call("stream_abort", transaction)

    async def stream_prepare(self, transaction: Transaction) -> None:
        self._call("stream_prepare", transaction)

    async def stream_commit(self, transaction: Transaction) -> None:
        self._call("stream_commit", transaction)

    async def stream_change(self, transaction: Transaction, change: Insert | Update | Delete) -> None:
        self._call(f"stream_change {change.kind}", transaction)

    async def stream_message(self, transaction: Transaction, message: Message) -> None:
        self._call(f"stream_message {message.text}", transaction)

    async def stream_truncate(self, transaction: Transaction, change: Truncate) -> None:
        self._call("stream_truncate", transaction)


@pytest.fixture
def publisher() -> FakePublisher:
    return FakePublisher()


@pytest.fixture
def city(publisher: FakePublisher) -> FakeTable:
    return publisher.table("public.city", id="integer key", name="text")


def write(publisher: FakePublisher, city: FakeTable, **options: object) -> None:
    with publisher.transaction(**options) as transaction:  # type: ignore[arg-type]
        transaction.insert(city, id=1)
        transaction.truncate(city)
        transaction.message("p", "inside")


async def test_a_consumer_has_exactly_postgresqls_callbacks() -> None:
    own = {name for name, _ in inspect.getmembers(Consumer, inspect.isfunction) if not name.startswith("_")}
    assert own == set(POSTGRESQL.split())
    for name in own:
        assert getattr(Consumer, name).__doc__


async def test_committed_and_prepared_transactions(publisher: FakePublisher, city: FakeTable) -> None:
    write(publisher, city)
    write(publisher, city, prepare="one")
    publisher.message("p", "alone")
    publisher.commit_prepared("one")
    write(publisher, city, prepare="two", streamed=True)
    publisher.rollback_prepared("two")
    await publisher.consume(recorder := Recorder())
    assert " · ".join(recorder.calls) == (
        "startup · begin 0 · insert 0 · truncate 0 · message inside · commit 0"
        " · begin_prepare 1 · insert 1 · truncate 1 · message inside · prepare 1 · message alone · commit_prepared 1"
        " · begin_prepare 2 · insert 2 · truncate 2 · message inside · prepare 2 · rollback_prepared 2 · shutdown"
    )
    assert publisher.confirmed == publisher.position


async def test_large_transactions_in_blocks(publisher: FakePublisher, city: FakeTable) -> None:
    write(publisher, city, streamed=True)
    write(publisher, city, streamed=True, prepare="one")
    publisher.commit_prepared("one")
    await publisher.consume(recorder := InBlocks())
    in_block = ["stream_start", "stream_change insert", "stream_truncate", "stream_message inside", "stream_stop"]
    first = [f"{name} 0" for name in [*in_block, "stream_commit"]]
    second = [f"{name} 1" for name in [*in_block, "stream_prepare", "commit_prepared"]]
    assert recorder.calls == ["startup", *first, *second, "shutdown"]
    assert publisher.confirmed == publisher.position


class NotFrom(Recorder):
    def filter_by_origin(self, origin: str | None) -> bool:
        return origin == "loop"


class NotFromInBlocks(InBlocks):
    def filter_by_origin(self, origin: str | None) -> bool:
        return origin == "loop"


@pytest.mark.parametrize("kind", [NotFrom, NotFromInBlocks])
async def test_an_origin_is_filtered_out(kind: type[Recorder], publisher: FakePublisher, city: FakeTable) -> None:
    for streamed in (False, True):
        write(publisher, city, origin="loop", streamed=streamed)
        write(publisher, city, origin="loop", streamed=streamed, prepare="gid")
        publisher.commit_prepared("gid")
    await publisher.consume(recorder := kind())
    assert recorder.calls == ["startup", "shutdown"]
    assert publisher.confirmed == publisher.position
    write(publisher, city, origin="other")
    await publisher.consume(recorder)
    assert "begin 0" in recorder.calls


class LaterOnly(Recorder):
    def filter_prepare(self, xid: int, gid: str) -> bool:
        return gid == "later"


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_filtered_prepare_comes_when_it_is_committed(
    streamed: bool, publisher: FakePublisher, city: FakeTable
) -> None:
    write(publisher, city, prepare="later", streamed=streamed)
    held = publisher.position
    write(publisher, city)
    await publisher.consume(first := LaterOnly())
    assert first.calls == ["startup", "begin 0", "insert 0", "truncate 0", "message inside", "commit 0", "shutdown"]
    assert publisher.confirmed < held  # or the changes would be lost with this process

    publisher.commit_prepared("later")
    await publisher.consume(second := LaterOnly())
    assert " · ".join(second.calls) == (
        "startup · begin 0 · insert 0 · truncate 0 · message inside · commit 0"
        " · begin 1 · insert 1 · truncate 1 · message inside · commit 1 · shutdown"
    )
    assert publisher.confirmed == publisher.position


async def test_a_filtered_prepare_that_is_rolled_back_never_comes(publisher: FakePublisher, city: FakeTable) -> None:
    write(publisher, city, prepare="later")
    publisher.rollback_prepared("later")
    await publisher.consume(recorder := LaterOnly())
    assert recorder.calls == ["startup", "shutdown"]
    assert publisher.confirmed == publisher.position


class Failing(Recorder):
    async def commit(self, transaction: Transaction) -> None:
        if len(self.xids) == 2:
            raise RuntimeError("mine")


async def test_a_callback_that_raises_ends_consume_and_its_transaction_is_repeated(
    publisher: FakePublisher, city: FakeTable
) -> None:
    for _ in range(3):
        write(publisher, city)
    failing = Failing()
    with pytest.raises(RuntimeError, match="mine"):
        await publisher.consume(failing)
    assert failing.calls[-1] == "shutdown"
    await publisher.consume(recorder := Recorder())
    assert recorder.xids == [702, 703]
