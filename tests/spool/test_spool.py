"""Streamed transactions on disk compared with lists: appended, written, rolled back and read in any order."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from anyio.streams.memory import MemoryObjectReceiveStream
from hypothesis import given, settings
from hypothesis import strategies as st

from subscriber.errors import ProtocolError
from subscriber.settings import DEFAULTS
from subscriber.spool import spool as spool_spool
from subscriber.spool.directory import SpoolDirectory
from subscriber.spool.record_format import HEADER_SIZE, Record, end
from subscriber.spool.spool import Spool, SpooledTransaction

BUFFER_SIZE = DEFAULTS.spool_buffer_size
Change = tuple[int, bytes]  # xid, message


@pytest.fixture
async def spool(tmp_path: Path) -> AsyncIterator[Spool]:
    spool = Spool(tmp_path / "spool", limit=None)
    await spool.open()
    yield spool
    await spool.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a directory for the examples of a property, each of which opens it again."""
    return tmp_path_factory.mktemp("spool") / "worker"


def small_pieces(folder: Path) -> Spool:
    """Create a spool with a buffer of a few records and an index of a few entries: most of both is in files."""
    return Spool(folder, limit=None, buffer_size=100, index_entries=2)


async def read(transaction: SpooledTransaction, offset: int = 0) -> list[Change]:
    """Return the changes that a reader gets. Checks that none is missing."""
    messages = []
    async for records in transaction.read(offset):
        for record in records:
            assert record[0] == offset
            offset = end(record)
            messages.append(record[1:])
    assert offset == transaction.written
    return messages


def size(changes: list[Change]) -> int:
    return sum(HEADER_SIZE + len(message) for _, message in changes)


# --- one after another -------------------------------------------------------------------------

TOPS = [700, 800]
subxids = st.integers(1, 9)  # added to the xid of the top-level transaction; 0: itself
messages = st.one_of(st.binary(min_size=1, max_size=30), st.binary(min_size=90, max_size=300))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("change"), st.integers(0, 9), messages),
        st.tuples(st.just("rollback"), subxids, st.none()),
        st.tuples(st.sampled_from(["pause", "read", "remove", "again", "other"]), st.none(), st.none()),
    ),
    max_size=60,
)


@settings(max_examples=150)
@given(steps)
def test_a_spooled_transaction_has_the_changes_of_a_list(
    folder: Path, steps: list[tuple[str, int | None, bytes | None]]
) -> None:
    anyio.run(_beside_lists, folder, steps)


async def _beside_lists(folder: Path, steps: list[tuple[str, int | None, bytes | None]]) -> None:
    spool, lists, xid = small_pieces(folder), dict[int, list[Change]](), TOPS[0]
    await spool.open()
    for step, number, message in steps:
        transaction = spool.start(xid, first=xid not in lists)
        expected = lists.setdefault(xid, [])
        if message is not None and number is not None:
            expected.append((xid + number, message))
            if transaction.append(*expected[-1]):
                await transaction.write()
        elif number is not None:
            of = [at for at, change in enumerate(expected) if change[0] == xid + number]
            offset = await transaction.rollback(xid + number)
            assert offset == (size(expected[: of[0]]) if of else None)
            del expected[of[0] if of else len(expected) :]
        elif step == "remove":
            await transaction.remove()
            del lists[xid]
        elif step == "again":
            spool.start(xid, first=True)
            lists[xid] = []
        elif step == "other":
            await transaction.end_block()
            xid = TOPS[xid == TOPS[0]]
        else:
            await (transaction.end_block() if step == "pause" else transaction.write())
            assert await read(transaction) == expected
        assert {xid: each.changes for xid, each in spool.transactions.items()} == {
            xid: len(lists[xid]) for xid in lists
        }
        assert {xid: each.size for xid, each in spool.transactions.items()} == {xid: size(lists[xid]) for xid in lists}
        assert spool.size >= sum(each.written for each in spool.transactions.values())
        assert all(each.written <= each.size < each.written + 500 for each in spool.transactions.values())
    for xid, expected in lists.items():
        await spool.transactions[xid].end_block()
        assert await read(spool.transactions[xid]) == expected
    await spool.forget_replaced()  # as at the end of each block
    assert sum(file.stat().st_size for file in folder.iterdir()) == spool.size
    await spool.close()
    assert not folder.exists()


# --- subtransactions, as a program makes them -----------------------------------------------------

programs = st.lists(st.sampled_from(["SAVEPOINT", "INSERT", "INSERT", "RELEASE", "ROLLBACK"]), max_size=60)


@settings(max_examples=150)
@given(programs, st.booleans())
def test_a_rollback_to_a_savepoint_removes_exactly_its_changes(folder: Path, program: list[str], late: bool) -> None:
    anyio.run(_savepoints, folder, program, late)


async def _savepoints(folder: Path, program: list[str], late: bool) -> None:
    """Run a program of savepoints.

    `late`: a savepoint gets its xid at its first change, after the savepoints around it.
    """
    spool = small_pieces(folder)
    await spool.open()
    transaction, next_xid = spool.start(700, first=True), 701
    # Each open savepoint: its xid (None: no change yet), and those of the ones released into it.
    around: list[tuple[list[int], list[int]]] = [([700], [])]
    expected: list[Change] = []
    for number, statement in enumerate(program):
        if statement == "SAVEPOINT":
            around.append(([], []))
            if not late:
                around[-1][0].append(next_xid)
                next_xid += 1
        elif statement == "INSERT":
            for xid, _ in around:  # those around it have theirs first
                if not xid:
                    xid.append(next_xid)
                    next_xid += 1
            expected.append((around[-1][0][0], b"I%d" % number))
            if transaction.append(*expected[-1]):
                await transaction.write()
        elif len(around) > 1:
            own, released = around.pop()
            if statement == "RELEASE":
                around[-1][1].extend(released + own)
            else:
                for aborted in (*sorted(released), *own):  # as an abort record has them
                    await transaction.rollback(aborted)
                expected = [change for change in expected if change[0] not in released + own]
    await transaction.end_block()
    assert await read(transaction) == expected
    assert transaction.changes == len(expected)
    await spool.close()


# --- a concurrent reader --------------------------------------------------------------------------

paces = st.lists(st.integers(0, 3), min_size=1, max_size=10)


@settings(max_examples=100)
@given(steps, paces)
def test_a_reader_that_follows_has_all_changes_in_the_end(
    folder: Path, steps: list[tuple[str, int | None, bytes | None]], paces: list[int]
) -> None:
    anyio.run(_followed, folder, steps, paces)


async def _followed(folder: Path, steps: list[tuple[str, int | None, bytes | None]], paces: list[int]) -> None:
    spool, expected, applied = small_pieces(folder), list[Change](), list[Record]()
    await spool.open()
    transaction = spool.start(700, first=True)
    send, receive = anyio.create_memory_object_stream[int | None](1000)
    async with anyio.create_task_group() as tasks, send:
        tasks.start_soon(_follow, transaction, receive, applied, paces)
        for step, number, message in steps:
            if message is not None and number is not None:
                expected.append((700 + number, message))
                if transaction.append(*expected[-1]):
                    await transaction.write()
                    send.send_nowait(None)
            elif number is not None:
                offset = await transaction.rollback(700 + number)
                if offset is not None:
                    send.send_nowait(offset)
                    while size(expected) > offset:
                        expected.pop()
            elif step == "pause":
                await transaction.end_block()
                send.send_nowait(None)
        await transaction.end_block()
        send.send_nowait(None)
    assert [record[1:] for record in applied] == expected
    await spool.close()


async def _follow(
    transaction: SpooledTransaction,
    told: MemoryObjectReceiveStream[int | None],
    applied: list[Record],
    paces: list[int],
) -> None:
    """Apply the available records. At a truncation, roll back the applied records after it."""
    position = turn = 0
    async with told:
        async for cut in told:
            if cut is not None:
                applied[:] = [record for record in applied if record[0] < cut]
                position = min(position, cut)
            # The reader must not pass a truncation that is waiting in the queue: see the head of transactions.py.
            while told.statistics().current_buffer_used == 0:
                count = len(applied)
                async for records in transaction.read(position):
                    if told.statistics().current_buffer_used:
                        break
                    assert records[0][0] == position
                    applied += records
                    position = end(records[-1])
                    for _ in range(paces[(turn := turn + 1) % len(paces)]):
                        await anyio.lowlevel.checkpoint()
                if len(applied) == count:
                    break


class SlowDirectory(SpoolDirectory):
    """Reads on request, in its thread."""

    asked, go = threading.Event(), threading.Event()

    def read(self, name: str, at: int, size: int) -> bytes:
        self.asked.set()
        assert self.go.wait(10)
        return super().read(name, at, size)


@pytest.mark.parametrize("what", ["rollback", "rollback and more", "remove", "first again", "close"])
async def test_a_read_under_way_gives_nothing_that_is_gone(
    spool: Spool, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(spool_spool, "SpoolDirectory", SlowDirectory)
    await spool.open()
    SlowDirectory.asked.clear()
    SlowDirectory.go.clear()
    transaction, changes = spool.start(700, first=True), list[Change]()
    for xid in (700, 701, 702):
        transaction.append(xid, b"before")
    await transaction.end_block()

    async def reader() -> None:
        async for records in transaction.read():
            changes.extend(record[1:] for record in records)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reader)
        await anyio.to_thread.run_sync(SlowDirectory.asked.wait)
        match what:
            case "rollback" | "rollback and more":
                assert await transaction.rollback(701) == HEADER_SIZE + 6
                if what != "rollback":
                    transaction.append(703, b"after, and longer than what was there")
                    await transaction.write()
            case "remove":
                await transaction.remove()
            case "first again":
                spool.start(700, first=True)
            case "close":
                await spool.close()
        SlowDirectory.go.set()
    assert changes == []
    if what.startswith("rollback"):
        after = [(703, b"after, and longer than what was there")] if what != "rollback" else []
        assert await read(transaction) == [(700, b"before"), *after]


# --- the rest -----------------------------------------------------------------------------------


async def test_a_reader_goes_on_to_what_is_written_meanwhile(spool: Spool) -> None:
    transaction, messages = spool.start(700, first=True), list[bytes]()
    transaction.append(700, b"one")
    await transaction.write()
    async for records in transaction.read():
        messages += [message for _, _, message in records]
        if len(messages) == 1:
            transaction.append(700, b"two")
            await transaction.write()
            transaction.append(700, b"buffered")
    assert messages == [b"one", b"two"]


async def test_records_larger_than_a_chunk_come_whole(spool: Spool) -> None:
    transaction = spool.start(700, first=True)
    sizes = [1, 3 * BUFFER_SIZE, 1, BUFFER_SIZE - HEADER_SIZE, BUFFER_SIZE, 10_000_000, 1]
    due = [transaction.append(700, bytes([number]) * size) for number, size in enumerate(sizes)]
    assert due == [False, True, True, True, True, True, True]
    await transaction.write()
    assert [len(message) for _, message in await read(transaction)] == sizes
    assert transaction.size == transaction.written == sum(sizes) + len(sizes) * HEADER_SIZE


async def test_the_index_has_a_file_when_it_is_large_and_that_is_cut_as_well(tmp_path: Path) -> None:
    spool = small_pieces(tmp_path / "spool")
    await spool.open()
    transaction = spool.start(700, first=True)
    for subxid in range(701, 800):
        transaction.append(subxid, b"x")
        await transaction.write()
    for subxid, left in ((790, 89), (791, None), (745, 44), (702, 1)):
        offset = await transaction.rollback(subxid)
        assert offset == (None if left is None else left * (HEADER_SIZE + 1))
        files = {path.suffix: path.stat().st_size for path in (tmp_path / "spool").iterdir()}
        assert files == {".changes": transaction.size, ".subxacts": spool.size - transaction.size}
        assert left == 1 or files[".subxacts"] > 0
    assert await read(transaction) == [(701, b"x")]
    await spool.close()


async def test_a_block_that_continues_nothing_is_refused(spool: Spool) -> None:
    with pytest.raises(ProtocolError, match="continues transaction 700"):
        spool.start(700, first=False)
    assert spool.transactions == {}


async def test_many_transactions_in_turn_hold_no_files_open(spool: Spool) -> None:
    before = len(os.listdir("/dev/fd"))
    for turn in range(3):
        for xid in range(1000, 1100):
            transaction = spool.start(xid, first=turn == 0)
            transaction.append(xid, b"x" * turn)
            await transaction.end_block()
    assert len(os.listdir("/dev/fd")) == before
    assert [len(await read(each)) for each in spool.transactions.values()] == [3] * 100


async def test_the_age_of_a_transaction_is_that_of_its_first_block(spool: Spool) -> None:
    transaction = spool.start(700, first=True)
    started = transaction.started
    await anyio.sleep(0.01)
    assert spool.start(700, first=False).started == started < anyio.current_time()
