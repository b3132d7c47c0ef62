"""The apply loop between a stream and a target that the test controls step by step."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subscriber.apply.batch.batch import AppendResult, CommitCallbacks
from subscriber.apply.error_context import error_context
from subscriber.apply.progress import Progress
from subscriber.apply.relation_map import LocalRelation, RelationMapping, map_relation
from subscriber.apply.transaction import RemoteTransaction
from subscriber.errors import (
    ApplyError,
    ConnectionLost,
    EndOfStream,
    MappingError,
    ProtocolError,
    PublisherReplaced,
    SubscriberError,
)
from subscriber.lsn import Lsn
from subscriber.protocol.copy_data import Keepalive, XLogData
from subscriber.protocol.copy_data import encode as envelope
from subscriber.protocol.encode import encode
from subscriber.protocol.messages import Begin, Commit, Insert, LogicalMessage, Message, Relation, StreamAbort, Truncate
from subscriber.publisher import feedback
from subscriber.publisher.replication_stream import ReplicationStream
from subscriber.server_version import Wording
from subscriber.settings import Settings
from subscriber.targets.base import Target
from subscriber.worker.apply.loop import ApplyLoop, Durability
from subscriber.worker.apply_hooks import ApplyHooks
from tests.apply.build import local, remote, row

RELATION = remote("a*", relid=1, name="t1")
UNWANTED = remote("a*", relid=2, name="t2")
BROKEN = remote("a*", relid=3, name="t3")
TABLES = [encode(RELATION), encode(UNWANTED), encode(BROKEN)]


class Stream:
    """The publisher's side: the messages that it sends, and the status updates that it received."""

    def __init__(self) -> None:
        self.waiting: list[list[bytes]] = []  # sent, but not received yet
        self.statuses: list[tuple[int, int, int]] = []
        self._ended = False
        self._changed = anyio.Event()

    def send(self, *payloads: bytes) -> None:
        self.waiting.append(list(payloads))
        self._changed.set()

    def end(self) -> None:
        self._ended = True
        self._changed.set()

    async def receive(self) -> list[bytes]:
        while not self.waiting:
            if self._ended:
                raise EndOfStream("data stream from publisher has ended")
            self._changed = anyio.Event()
            await self._changed.wait()
        return self.waiting.pop(0)

    def send_status(self, write: Lsn, flush: Lsn, apply: Lsn, *, reply_requested: bool = False) -> None:
        self.statuses.append((write, flush, apply))

    @property
    def flushed(self) -> int:
        return self.statuses[-1][1] if self.statuses else 0


class FakeTarget(Target):
    """Answers a commit when the test requests it; blocks while `stuck`."""

    takes_payloads = True

    def __init__(self) -> None:
        self.origin = "o"
        self.done: list[object] = []
        self.commits: list[Callable[[], None]] = []  # to be answered
        self.stuck = anyio.Event()
        self.stuck.set()
        self.failed: SubscriberError | None = None
        self.settled = False
        self.keeps = False
        self.few: list[bool] = []  # the arguments of set_small_backlog()

    @property
    def position(self) -> Lsn:
        return Lsn(0)

    async def watch(self) -> None:
        while self.failed is None:
            await anyio.sleep(0.001)
        raise self.failed

    async def sync(self) -> None:
        self.settled = True

    def set_small_backlog(self, few: bool) -> bool:
        self.few.append(few)
        return few and not self.keeps

    def append_raw_transactions(
        self, waiting: deque[bytes], limit: int, _r: object, _w: object, ends: CommitCallbacks
    ) -> AppendResult | None:
        """Append the transactions of one insert, in the test that requests it."""
        if not self.keeps or len(waiting) < 3 or waiting[1] != wire(Insert(None, 1, row("x")), 301):
            return None
        self.done += [("s.t1", "INSERT"), 308]
        self.commits.append(partial(ends.on_committed, ends.number))
        return AppendResult(1, 1, sum([len(waiting.popleft()) for _ in range(3)]), Lsn(308))

    async def flush_if_full(self) -> None:
        await self.stuck.wait()

    async def map_relation(self, relation: Relation) -> RelationMapping:
        if relation is not RELATION and relation.relid == BROKEN.relid:
            raise MappingError('logical replication target relation "s.t3" does not exist')
        mapping = map_relation(relation, local("a", identity=("a",), name=relation.name))
        object.__setattr__(mapping.local, "oid", relation.relid)
        return mapping

    async def change(self, transaction: RemoteTransaction, mapping: RelationMapping, change: Message) -> None:
        transaction.is_open_on_target = True
        await self.stuck.wait()
        self.done.append((mapping.label, change.message_type))

    async def truncate(self, transaction: RemoteTransaction, mappings: list[RelationMapping], _: Truncate) -> None:
        transaction.is_open_on_target = True
        self.done.append([m.label for m in mappings])

    async def commit(self, _: RemoteTransaction, end_lsn: Lsn, on_committed: Callable[[], None]) -> None:
        self.done.append(int(end_lsn))
        self.commits.append(on_committed)

    def add_context(self, error: SubscriberError, note: Any) -> None:
        error.context.append(error_context("o", note.message, Wording.POSTGRESQL_18, None, None, note.transaction))


def wire(message: Message, at: int = 0) -> bytes:
    return envelope(XLogData(Lsn(at), Lsn(at), 7, encode(message)))


def keepalive(at: int, *, reply: bool = False) -> bytes:
    return envelope(Keepalive(Lsn(at), 7, reply))


def transaction(start: int, *relids: int, size: int = 1) -> list[bytes]:
    """Return a transaction from `start` on, committed at start + 5, that ends at start + 8."""
    return [
        wire(Begin(Lsn(start + 5), 0, start), start),
        wire(RELATION),
        wire(UNWANTED),
        wire(BROKEN),
        *(wire(Insert(None, relid, row("x" * size)), start + 1) for relid in relids),
        wire(Commit(Lsn(start + 5), Lsn(start + 8), 0), start + 8),
    ]


class Run(ApplyHooks):
    """A running loop."""

    def __init__(
        self, *, flush: Callable[[], Awaitable[None]] | None = None, unattended: bool = False, **settings: int
    ) -> None:
        self.stream, self.target = Stream(), FakeTarget()
        self.boundaries: list[int] = []
        self.ends_at: int | None = None
        self.error: BaseException | None = None
        self.loop = ApplyLoop(
            cast(ReplicationStream, self.stream),
            self.target,
            Progress(Lsn(10)),
            hooks=self,
            durability=Durability(flush),
            settings=Settings.from_environment({}, **settings),
        )
        self._unattended = unattended

    def should_apply(self, table: LocalRelation, finish_lsn: Lsn) -> bool:
        return table.oid == RELATION.relid

    def needs_boundary(self, position: Lsn) -> bool:
        return not self._unattended

    async def on_boundary(self, position: Lsn) -> bool:
        self.boundaries.append(position)
        return self.ends_at is not None and position >= self.ends_at

    async def run(self) -> None:
        try:
            await self.loop.run()
        except SubscriberError as error:
            self.error = error

    def answer(self, count: int = 1) -> None:
        for _ in range(count):
            self.target.commits.pop(0)()


@asynccontextmanager
async def running(run: Run) -> AsyncIterator[Run]:
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.run)
            await settled()
            yield run
            tasks.cancel_scope.cancel()


async def settled() -> None:
    """Wait until all tasks are blocked."""
    for _ in range(30):
        await anyio.lowlevel.checkpoint()


# --- few at a time ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payloads", "few"),
    [
        (transaction(100, 1), True),
        ([*transaction(100, 1), keepalive(200), keepalive(201)], True),
        ([*transaction(100, 1), *transaction(200, 1)], True),
        (transaction(100, 1)[:-1], False),
        (transaction(100, *[1] * 20), False),
        ([keepalive(200)], False),
        ([*transaction(100, 1), *transaction(200, 1)[:1]], False),
        ([wire(LogicalMessage(None, False, Lsn(90), "x", b"")), *transaction(100, 1)], True),
        ([wire(StreamAbort(7, 7, None, None), 90), *transaction(100, 1)], False),
    ],
    ids=[
        "one",
        "keepalives behind it",
        "two",
        "without its end",
        "many",
        "none",
        "the next one's beginning",
        "a message",
        "what is streamed",
    ],
)
async def test_the_target_is_told_of_whole_transactions_that_are_few(payloads: list[bytes], few: bool) -> None:
    async with running(Run()) as run:
        run.stream.send(*payloads)
        await settled()
        assert run.target.few == [False, few]  # the first call was before any payload


async def test_a_transaction_received_in_parts_is_not_announced_as_whole() -> None:
    async with running(Run()) as run:
        first, *rest = transaction(100, 1)
        run.stream.send(first)
        await settled()
        run.stream.send(*rest)
        await settled()
        assert run.target.few == [False, False, False]
        assert run.target.done == [("s.t1", "INSERT"), 108]


@pytest.mark.parametrize("subxid", [7, 9])
async def test_the_rollback_of_a_transaction_that_was_not_streamed(subxid: int) -> None:
    """Without streaming, PostgreSQL 18 sends STREAM ABORT for a large transaction whose changes it has dropped."""
    async with running(Run()) as run:
        run.stream.send(wire(StreamAbort(7, subxid, None, None), 90), *transaction(100, 1))
        await settled()
        assert run.error is None
        assert run.target.done == [("s.t1", "INSERT"), 108]


@pytest.mark.parametrize("keeps", [True, False])
async def test_a_transaction_before_the_position_of_a_keepalive(keeps: bool) -> None:
    """The publisher has reported that all earlier transactions were sent. A copied table would lack its changes."""
    async with running(Run(unattended=True)) as run:
        run.target.keeps = keeps
        run.stream.send(*transaction(100, 1), keepalive(208), *transaction(210, 2), keepalive(310))
        await settled()
        assert run.error is None
        small = [message for message in transaction(300, 1) if message[-len(encode(RELATION)) :] not in TABLES]
        run.stream.send(*small)
        await settled()
    error: object = run.error
    assert isinstance(error, PublisherReplaced)
    assert "after it had reported that all before 0/136 were sent" in error.message


# --- confirmed positions --------------------------------------------------------------------------


async def test_a_commit_is_confirmed_when_it_was_answered() -> None:
    async with running(Run()) as run:
        run.stream.send(*transaction(100, 1))
        await settled()
        assert run.target.done == [("s.t1", "INSERT"), 108]
        assert run.stream.flushed == 10
        run.answer()
        await settled()
        assert run.stream.statuses[-1] == (108, 108, 108)


@pytest.mark.parametrize("keeps", [True, False])
async def test_transactions_that_nobody_has_to_look_at_are_confirmed_alike(keeps: bool) -> None:
    async with running(Run(unattended=True)) as run:
        run.target.keeps = keeps
        small = [message for message in transaction(300, 1) if message[-len(encode(RELATION)) :] not in TABLES]
        run.stream.send(*transaction(100, 1), *transaction(200, 2), *small, keepalive(400))
        await settled()
        assert run.target.done == [("s.t1", "INSERT"), 108, ("s.t1", "INSERT"), 308]
        assert run.stream.statuses[-1] == (400, 10, 10)
        assert (308 in run.boundaries) is not keeps
        run.answer()
        await settled()
        assert run.stream.flushed == 208
        run.answer()
        await settled()
        assert run.stream.statuses[-1] == (400, 400, 400)
        assert run.loop.counters.transactions == 3


async def test_a_commit_of_another_transaction_is_refused_whoever_looks() -> None:
    async with running(Run(unattended=True)) as run:
        run.stream.send(*transaction(100, 1)[:-1], wire(Commit(Lsn(104), Lsn(108), 0), 108))
        await settled()
    assert run.error is not None
    assert "incorrect commit LSN" in str(run.error)
    assert run.target.done == [("s.t1", "INSERT")]


async def test_a_commit_without_synchronous_commit_is_confirmed_when_it_is_flushed() -> None:
    flushes = 0
    may_flush = anyio.Event()

    async def flush() -> None:
        nonlocal flushes
        flushes += 1
        await may_flush.wait()

    async with running(Run(flush=flush)) as run:
        run.stream.send(*transaction(100, 1), *transaction(200, 1))
        await settled()
        assert flushes == 0
        run.answer()
        await settled()
        assert flushes == 1
        assert run.stream.statuses[-1][1:] == (10, 10)
        await anyio.sleep(2 * feedback.PATIENCE)
        assert run.stream.statuses[-1] == (208, 10, 108)
        told = len(run.stream.statuses)
        run.answer()  # while a flush runs that may not cover it
        await settled()
        assert len(run.stream.statuses) == told
        may_flush.set()
        await settled()
        assert flushes == 2
        assert run.stream.statuses[-1] == (208, 208, 208)


async def test_keepalives_and_transactions_of_others_are_confirmed_at_once_when_nothing_is_pending() -> None:
    async with running(Run()) as run:
        run.stream.send(keepalive(50))
        await settled()
        assert run.stream.statuses[-1] == (50, 50, 50)
        run.stream.send(*transaction(100, 2))
        await settled()
        assert run.stream.statuses[-1] == (108, 108, 108)
        run.stream.send(*transaction(200))
        await settled()
        assert run.stream.statuses[-1] == (208, 208, 208)
        assert run.target.done == []


async def test_keepalives_wait_for_the_confirmation_of_earlier_transactions() -> None:
    async with running(Run()) as run:
        run.stream.send(
            *transaction(100, 1), keepalive(150), *transaction(200, 2), *transaction(300, 1), keepalive(400)
        )
        await settled()
        assert run.stream.statuses[-1] == (400, 10, 10)
        run.answer()
        await settled()
        assert run.stream.flushed in (208, 301)  # all that stood before the second commit
        run.answer()
        await settled()
        assert run.stream.flushed == 400


async def test_the_publisher_hears_from_us_while_the_target_is_stuck() -> None:
    async with running(Run()) as run:
        run.target.stuck = anyio.Event()
        run.stream.send(*transaction(100, 1))
        await settled()
        before = len(run.stream.statuses)
        run.stream.send(keepalive(500, reply=True))
        await settled()
        assert len(run.stream.statuses) == before + 1
        assert run.stream.flushed <= 105  # not the keepalive's position
        run.target.stuck.set()
        await settled()
        run.answer()
        await settled()
        assert run.stream.flushed == 500


async def test_a_full_queue_stops_reading_and_nothing_is_lost() -> None:
    async with running(Run(receive_queue_size=10_000)) as run:
        run.target.stuck = anyio.Event()
        for number in range(50):
            run.stream.send(*transaction(100 * number + 100, 1, size=1000))
        await settled()
        assert len(run.stream.waiting) > 30
        run.target.stuck.set()
        while run.stream.waiting or len(run.target.commits) < 50:
            await settled()
        run.answer(50)
        await settled()
        assert run.stream.flushed == 5008
        assert run.loop.counters.transactions == run.loop.counters.changes == 50


async def test_a_worker_that_applies_a_large_change_receives_no_further_message() -> None:
    async with running(Run(receive_queue_size=10_000)) as run:
        run.target.stuck = anyio.Event()
        run.stream.send(*transaction(100, 1, size=20_000))
        run.stream.send(keepalive(200))
        await settled()
        assert len(run.stream.waiting) == 1
        run.target.stuck.set()
        await settled()
        assert not run.stream.waiting
        assert run.target.done == [("s.t1", "INSERT"), 108]


async def test_a_worker_that_waits_for_room_takes_no_further_transaction() -> None:
    async with running(Run(unattended=True, receive_queue_size=10)) as run:
        run.stream.send(*transaction(100, 1))
        await settled()
        run.target.keeps, run.target.stuck = True, anyio.Event()
        run.stream.send(
            *[message for message in transaction(300, 1) if message[-len(encode(RELATION)) :] not in TABLES]
        )
        run.stream.send(keepalive(400))
        await settled()
        assert run.target.done[-1] == 308
        assert len(run.stream.waiting) == 1
        run.target.stuck.set()
        await settled()
        assert not run.stream.waiting


steps = st.lists(
    st.sampled_from(["changed", "unwanted", "empty", "keepalive", "answer", "flushed", "turn"]), max_size=40
)


@settings(max_examples=60)
@given(steps=steps)
async def test_only_durable_positions_are_confirmed_in_any_order_of_events(steps: list[str]) -> None:
    flushing: list[anyio.Event] = []
    durable = 0  # commits

    async def flush() -> None:
        nonlocal durable
        covered = len(ends) - len(run.target.commits)
        flushing.append(event := anyio.Event())
        await event.wait()
        durable = max(durable, covered)

    async with running(Run(flush=flush)) as run:
        at, ends = 100, list[int]()
        bound = [10]  # [n]: the position that may be confirmed when n commits are durable

        def check() -> None:
            assert run.stream.flushed <= bound[durable]

        for step in [*steps, *["turn", "answer", "turn", "flushed"] * 45, "turn"]:
            match step:
                case "changed":
                    run.stream.send(*transaction(at, 1))
                    bound[-1] = at + 5
                    ends.append(at + 8)
                    bound.append(at + 8)
                case "unwanted" | "empty":
                    run.stream.send(*transaction(at, *([2] if step == "unwanted" else [])))
                    bound[-1] = at + 8
                case "keepalive":
                    run.stream.send(keepalive(at))
                    bound[-1] = at
                case "answer":
                    if run.target.commits:
                        run.answer()
                case "flushed":
                    if flushing:
                        flushing.pop(0).set()
                case "turn":
                    await settled()
            at += 10
            check()
        await settled()
        assert durable == len(ends)
        assert run.stream.flushed == max([10, *bound])
        flushes = [flush for _, flush, _ in run.stream.statuses]
        assert flushes == sorted(flushes)


# --- boundaries and the end -----------------------------------------------------------------------


async def test_boundaries_are_between_transactions_only() -> None:
    async with running(Run()) as run:
        assert run.boundaries == [10, 10]
        begin, *middle, commit = transaction(100, 1, 1)
        run.stream.send(begin, *middle)
        await settled()
        assert run.boundaries == [10, 10]
        run.stream.send(commit)
        await settled()
        assert run.boundaries == [10, 10, 108, 108]
        run.loop.wake()
        await settled()
        assert run.boundaries[-1] == 108
        assert len(run.boundaries) == 5


async def test_the_loop_ends_at_a_boundary_when_requested() -> None:
    run = Run()
    run.ends_at = 108
    run.stream.send(*transaction(100, 1), *transaction(200, 1))
    with anyio.fail_after(5):
        await run.run()
    assert run.error is None
    assert run.loop.progress.position == 108
    assert run.target.done == [("s.t1", "INSERT"), 108]
    assert run.target.settled


async def test_the_loop_can_end_before_its_first_message() -> None:
    run = Run()
    run.ends_at = 10
    with anyio.fail_after(5):
        await run.run()
    assert run.boundaries == [10]


@pytest.mark.parametrize(
    ("payloads", "error"),
    [
        ([b""], ProtocolError),
        ([b"w"], ProtocolError),
        ([wire(Commit(Lsn(1), Lsn(2), 0))], ProtocolError),
        ([envelope(XLogData(Lsn(1), Lsn(1), 0, b"?"))], ProtocolError),
        (transaction(100, 9), MappingError),
        (transaction(100, 3), MappingError),
    ],
    ids=["nothing", "half an envelope", "out of order", "an unknown message", "an unknown table", "a missing table"],
)
async def test_a_message_that_cannot_be_applied_ends_the_loop(
    payloads: list[bytes], error: type[SubscriberError]
) -> None:
    run = Run()
    run.stream.send(*payloads)
    with anyio.fail_after(5):
        await run.run()
    assert isinstance(run.error, error)
    assert run.target.commits == []
    if error is MappingError:
        assert run.error.context == [
            error_context("o", "INSERT", Wording.POSTGRESQL_18, transaction=RemoteTransaction(100, Lsn(105), 0))
        ]


async def test_a_primary_status_between_all_payloads_changes_nothing() -> None:
    """PostgreSQL 19 sends it to a subscriber that requests it, with positions and transaction ids."""
    status = struct.pack(">cqqqq", b"s", 1, 2, 3, 4)
    async with running(Run()) as run:
        payloads = [*transaction(100, 1), keepalive(150), *transaction(200, 1)]
        run.stream.send(status, *[frame for payload in payloads for frame in (payload, status)])
        await settled()
        run.answer(2)
        await settled()
        assert run.error is None
        assert run.target.done == [("s.t1", "INSERT"), 108, ("s.t1", "INSERT"), 208]
        assert run.loop.progress.position == 208


async def test_changes_before_an_error_are_applied() -> None:
    run = Run()
    run.stream.send(*transaction(100, 1), *transaction(200, 3))
    with anyio.fail_after(5):
        await run.run()
    assert isinstance(run.error, MappingError)
    assert run.target.done == [("s.t1", "INSERT"), 108]


async def test_changes_before_the_end_of_the_stream_are_applied_first() -> None:
    """Queued payloads are not applied any more: they are sent again."""
    run = Run()
    run.stream.send(*transaction(100, 1))
    run.stream.end()
    with anyio.fail_after(5):
        await run.run()
    assert isinstance(run.error, EndOfStream)


async def test_an_error_of_the_target_is_told_before_a_lost_stream() -> None:
    run = Run()
    run.target.failed = ApplyError("no")
    run.stream.send(*transaction(100, 1))
    with anyio.fail_after(5):
        await run.run()
    assert run.error is run.target.failed

    run = Run()
    run.target.failed = ConnectionLost("gone")
    with anyio.fail_after(5):
        await run.run()
    assert run.error is run.target.failed


async def test_only_the_tables_that_are_ours_are_truncated() -> None:
    async with running(Run()) as run:
        begin, *relations, commit = transaction(100)
        both = wire(Truncate(None, False, False, (2, 1)))
        run.stream.send(begin, *relations, both, commit)
        begin, *relations, commit = transaction(200)
        run.stream.send(begin, wire(Truncate(None, False, False, (2,))), commit)
        await settled()
        assert run.target.done == [["s.t1"], 108]
        run.answer()
        await settled()
        assert run.stream.flushed == 208


async def test_the_loop_lets_other_tasks_run() -> None:
    async with running(Run(messages_per_turn=10)) as run:
        run.stream.send(*(p for n in range(2000) for p in transaction(100 * n + 100, 2)))
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        assert run.loop.counters.transactions < 2000
        while run.loop.counters.transactions < 2000:
            await anyio.lowlevel.checkpoint()
        await settled()
        assert run.stream.flushed == 200_008
        assert run.loop.counters.last_send_time == 7
