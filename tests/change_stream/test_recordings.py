"""Recordings of all versions, read by the stream: all modes deliver the same changes, with any number of reconnects."""

from __future__ import annotations

from collections.abc import AsyncIterator
from math import inf
from typing import TypeVar

import anyio
import anyio.lowlevel
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from subscriber import Delete, Insert, Kind, Missing, Truncate, Update
from subscriber.change_stream.changes import Change
from subscriber.change_stream.rows import Row
from subscriber.change_stream.stream import Stream
from subscriber.change_stream.transaction import Transaction
from subscriber.settings import Settings
from subscriber.testing import FakePublisher
from tests.captures import Capture, captures

TEXT = [capture for capture in captures() if not capture.name.endswith(("binary", "parallel", "origin-none"))]
every_capture = pytest.mark.parametrize("capture", captures(), ids=lambda capture: capture.name)

Thing = TypeVar("Thing")
Told = tuple[object, ...]
Story = dict[int, list[Told]]  # by xid: the changes of subtransactions that were committed


def playing(capture: Capture) -> FakePublisher:
    publisher = FakePublisher(settings=Settings(first_retry_delay=0, retry_interval=0))
    publisher.play(capture.messages, parallel=capture.parallel)
    return publisher


def texts(row: Row | None) -> dict[str, object] | None:
    return None if row is None else {name: row.raw(name) for name in row}


def told(change: Change) -> Told:
    match change:
        case Truncate():
            return (change.kind, tuple(str(relation) for relation in change.relations))
        case Insert() | Update() | Delete():
            return (change.kind, str(change.relation), texts(change.old), texts(change.new))
    return (change.kind, change.prefix, change.content)


async def story(stream: Stream) -> Story:
    """Read and acknowledge the whole stream."""
    story_told: Story = {}
    prepared: Story = {}
    async for transaction in stream:
        changes = [told(change) async for change in transaction if change.kind != "message"]
        match transaction.kind:
            case Kind.COMMIT if changes:
                story_told[transaction.xid] = changes
            case Kind.PREPARE:
                prepared[transaction.xid] = changes
            case Kind.COMMIT_PREPARED:
                if changes := prepared.pop(transaction.xid):
                    story_told[transaction.xid] = changes
        await transaction.ack()
    return story_told


def plain(capture: Capture) -> Capture:
    (plain_capture,) = [other for other in captures() if other.name == f"pg{capture.major}-plain"]
    return plain_capture


async def read(publisher: FakePublisher, capture: Capture) -> Story:
    async with publisher.stream(parallel=capture.parallel) as stream:
        changes_of = await story(stream)
        assert stream.unacknowledged == 0
    assert publisher.confirmed == publisher.position
    return changes_of


@every_capture
async def test_a_recording_is_read_to_its_end_and_confirmed(capture: Capture) -> None:
    assert await read(playing(capture), capture)


@pytest.mark.parametrize("capture", TEXT, ids=lambda capture: capture.name)
async def test_streamed_and_prepared_transactions_have_the_changes_of_plain_transactions(capture: Capture) -> None:
    expected = await read(playing(plain(capture)), plain(capture))
    assert await read(playing(capture), capture) == expected


@every_capture
async def test_blocks_and_their_aborts_have_the_changes_of_spooled_transactions(capture: Capture) -> None:
    """A reader of blocks drops the changes of an aborted subtransaction, from its first change on."""
    publisher = playing(capture)
    in_blocks: Story = {}
    open_blocks: dict[int, list[tuple[int | None, Told]]] = {}
    prepared: dict[int, list[Told]] = {}
    async with publisher.stream(in_progress="blocks", parallel=capture.parallel) as stream:
        async for transaction in stream:
            xid = transaction.xid
            match transaction.kind:
                case Kind.STREAM_BLOCK:
                    assert transaction.first == (xid not in open_blocks)
                    block = open_blocks.setdefault(xid, [])
                    block += [(change.subxid, told(change)) async for change in transaction if change.kind != "message"]
                case Kind.STREAM_ABORT if transaction.subxid == xid:
                    del open_blocks[xid]
                case Kind.STREAM_ABORT:
                    subxids = [subxid for subxid, _ in open_blocks[xid]]
                    if transaction.subxid in subxids:
                        del open_blocks[xid][subxids.index(transaction.subxid) :]
                case Kind.STREAM_COMMIT:
                    if changes := [change for _, change in open_blocks.pop(xid)]:
                        in_blocks[xid] = changes
                case Kind.STREAM_PREPARE:
                    prepared[xid] = [change for _, change in open_blocks.pop(xid)]
                case Kind.PREPARE:
                    prepared[xid] = [told(change) async for change in transaction if change.kind != "message"]
                case Kind.COMMIT_PREPARED:
                    if changes := prepared.pop(xid):
                        in_blocks[xid] = changes
                case Kind.COMMIT:
                    if changes := [told(change) async for change in transaction if change.kind != "message"]:
                        in_blocks[xid] = changes
            await transaction.ack()
    assert in_blocks == await read(playing(capture), capture)
    assert publisher.confirmed == publisher.position


@settings(max_examples=min(60, settings().max_examples), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    capture=st.sampled_from(captures()),
    cuts=st.lists(st.integers(1, 60), max_size=6),
    memory=st.sampled_from([1, 500, 8_000_000]),
    patience=st.sampled_from([None, 0.0, 0.0005]),
)
async def test_a_stream_that_is_cut_anywhere_delivers_the_same_changes(
    capture: Capture, cuts: list[int], memory: int, patience: float | None
) -> None:
    """The connection is lost after so many changes, again and again, and every wait is cancelled and begun again."""
    expected = await everything(playing(capture), capture, [], 8_000_000, None)
    assert await everything(playing(capture), capture, cuts, memory, patience) == expected
    assert await everything(playing(capture), capture, cuts, memory, patience, whole=True) == expected


async def upcoming(thing: AsyncIterator[Thing], patience: float | None) -> Thing | None:
    """Return the next item, with retries if it takes longer than `patience` seconds; None at the end."""
    while True:
        with anyio.move_on_after(inf if patience is None else patience):
            return await anext(thing, None)
        await anyio.lowlevel.checkpoint()


async def all_changes(transaction: Transaction, patience: float | None) -> list[Change]:
    """Return the changes, with calls that are cancelled after `patience` seconds; the last one continues."""
    while True:
        with anyio.move_on_after(inf if patience is None else patience):
            return await transaction.changes()
        await anyio.lowlevel.checkpoint()


async def listed(changes: list[Change]) -> AsyncIterator[Change]:
    for change in changes:
        yield change


async def everything(
    publisher: FakePublisher,
    capture: Capture,
    cuts: list[int],
    memory: int,
    patience: float | None,
    *,
    whole: bool = False,
) -> list[Told]:
    events: list[Told] = []
    left = list(cuts)
    with anyio.fail_after(10):
        async with publisher.stream(parallel=capture.parallel, memory=memory) as stream:
            while (transaction := await upcoming(stream, patience)) is not None:
                events.append((transaction.kind, transaction.xid, transaction.gid, transaction.origin))
                changes = listed(await all_changes(transaction, patience)) if whole else transaction
                while (change := await upcoming(changes, patience)) is not None:
                    events.append(told(change))
                    if left and left[0] == 1:
                        publisher.disconnect()
                    left = [left[0] - 1, *left[1:]] if left and left[0] > 1 else left[1:]
                await transaction.ack()
            assert stream.confirmed == publisher.position
    return events


async def test_values_that_were_not_sent_are_not_null() -> None:
    """In every recording, `long` is unchanged in an update and NULL in an insert."""
    for capture in captures():
        seen: set[object] = set()
        async with playing(capture).stream(parallel=capture.parallel) as stream:
            async for transaction in stream:
                async for change in transaction:
                    if isinstance(change, Insert | Update | Delete) and change.relation.name == "plain":
                        row = change.new or change.old
                        assert row is not None
                        values = [row.raw(name) for name in row]
                        seen |= {value if isinstance(value, Missing) else value is None for value in values}
        assert seen == {Missing.UNCHANGED, Missing.NOT_SENT, True, False}
