"""The change log's files: stored transactions can be read, whatever happens to the end of the file."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subscriber.changelog.consumers import LogRetention, forget, read_consumers, register
from subscriber.changelog.encoder import CONTINUE_EVERY, FULL, LIMIT, BlockBuilder
from subscriber.changelog.files import Identity, SegmentReader
from subscriber.changelog.open_segment import OpenSegment
from subscriber.changelog.piece_reader import read, scan_rows
from subscriber.changelog.pieces import Piece
from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.segment import (
    HEADER_SIZE,
    Durable,
    TornBlock,
    decode_header,
)
from subscriber.changelog.writer import LogWriter, log_writer
from subscriber.errors import ChangeLogDamaged, ChangeLogError, ProtocolError, StatementError
from subscriber.lsn import Lsn
from subscriber.protocol.encode import encode
from subscriber.protocol.messages import Begin, Commit, Insert, LogicalMessage, Truncate
from subscriber.protocol.tuple_data import TupleData
from tests.changelog.stream import START, Writer, relation

Row = tuple[int, int, int, int]  # commit position, number in the transaction, relid, size


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[LogWriter]:
    writer = opened(tmp_path)
    yield writer
    writer.close()


def opened(directory: Path, *, segment_size: int = 1 << 30) -> LogWriter:
    """Return a writer in `directory`. It creates the log if there is none."""
    writer = log_writer(directory, segment_size=segment_size)
    writer.open()
    if writer.identity is None:
        writer.create(Identity(7, "s", ("p",), START))
    return writer


def store(writer: LogWriter, builder: BlockBuilder, messages: list[bytes]) -> None:
    for message in messages:
        builder.add(message)
    writer.append(builder.take())
    writer.sync()


def rows(log: ChangeLog, start: Lsn = START, end: Lsn | None = None, *, size: int = 1 << 20) -> list[Row]:
    rows_stored: list[Row] = []
    for piece in log.pieces(start, log.end() if end is None else end, size=size):
        for change in read(log.directory, piece):
            assert isinstance(change.message, Insert)
            (_, text) = change.message.new.split()[1]
            assert text is not None
            rows_stored.append((change.begin.final_lsn, change.number, change.relations[0].relid, len(text)))
    return rows_stored


def written(transactions: list[tuple[Lsn, list[tuple[int, int]]]]) -> list[Row]:
    return [(final, n, relid, size) for final, made in transactions for n, (relid, size) in enumerate(made)]


def test_stored_transactions_are_read_in_commit_order(writer: LogWriter, tmp_path: Path) -> None:
    source, builder = Writer(), BlockBuilder(START)
    store(writer, builder, source.transaction([(1, 3), (2, 4), (1, 0)]))
    store(writer, builder, source.transaction([(2, 9)]))
    log = ChangeLog(tmp_path)
    assert log.end() == writer.position == source.position
    assert [row[2:] for row in rows(log)] == [(1, 3), (2, 4), (1, 0), (2, 9)]


def test_a_range_has_the_transactions_that_end_in_it(writer: LogWriter, tmp_path: Path) -> None:
    source, builder, ends = Writer(), BlockBuilder(START), [START]
    for size in range(5):
        store(writer, builder, source.transaction([(1, size)]))
        ends.append(source.position)
    log = ChangeLog(tmp_path)
    for first in range(6):
        for last in range(first, 6):
            assert [row[3] for row in rows(log, ends[first], ends[last])] == list(range(first, last))


def test_a_keepalive_moves_the_end_without_a_transaction(writer: LogWriter, tmp_path: Path) -> None:
    builder = BlockBuilder(START)
    builder.note(Lsn(START + 5000))
    writer.append(builder.take())
    writer.sync()
    assert ChangeLog(tmp_path).end() == START + 5000
    assert builder.take() == []


def test_a_keepalive_inside_a_transaction_moves_nothing() -> None:
    source, builder = Writer(), BlockBuilder(START)
    for message in source.transaction([(1, 1)])[:-1]:
        builder.add(message)
    builder.note(Lsn(START + 5000))
    assert builder.take() == []
    assert builder.position == START


def test_a_large_transaction_is_written_before_it_ends_and_read_as_a_whole(writer: LogWriter, tmp_path: Path) -> None:
    source, builder = Writer(), BlockBuilder(START)
    messages = source.transaction([(1, LIMIT // 2)] * 5)
    for number, message in enumerate(messages):
        builder.add(message)
        blocks = builder.take()
        assert all(block.boundary for block in blocks) == (not blocks or number == len(messages) - 1)
        writer.append(blocks)
        writer.sync()
        assert builder.size <= LIMIT
        assert (ChangeLog(tmp_path).end() == START) == (number < len(messages) - 1)
    assert len(rows(ChangeLog(tmp_path))) == 5


def test_no_segment_is_sealed_inside_a_transaction(tmp_path: Path) -> None:
    """The archiver asks for a RESTART block when a segment is full, perhaps after it has written all that it got."""
    writer, source, builder = opened(tmp_path, segment_size=1), Writer(), BlockBuilder(START)
    expected = []
    for _ in range(3):
        made = [(1, LIMIT)] * 3
        for message in source.transaction(made):
            builder.add(message)
            writer.append(builder.take())
            if writer.wants_seal():
                builder.restart()
        writer.sync()
        expected.append((Lsn(source.position - 50), made))
    log = ChangeLog(tmp_path)
    assert len(log.files()) == 3
    assert rows(log) == written(expected)
    assert log.damage() == []
    writer.close()


def test_a_piece_that_ends_inside_a_transaction_is_an_error(writer: LogWriter, tmp_path: Path) -> None:
    source, builder = Writer(), BlockBuilder(START)
    for message in source.transaction([(1, LIMIT)] * 3):
        builder.add(message)
        writer.append(builder.take())
    writer.sync()
    (piece,) = ChangeLog(tmp_path).pieces(START, source.position)
    path = ChangeLog(tmp_path).files()[-1].local_path
    with SegmentReader(path) as reader:
        second = list(reader.heads(piece.offset, START, piece.stop))[1]
    with pytest.raises(ChangeLogDamaged, match=path.name):
        list(read(tmp_path, replace(piece, stop=second.offset)))


def numbers(log: ChangeLog, pieces: list[Piece]) -> list[tuple[int, int, int]]:
    """Return position, number and relation of each row, as readers that gather values by column find them."""
    triples: list[tuple[int, int, int]] = []
    for piece in pieces:
        for part in scan_rows(log.directory, piece, lambda relation, _: relation.relid):
            columns = [memoryview(column).cast("q") for column in (part.found.lsns, part.found.numbers)]
            triples += zip(*columns, memoryview(part.found.kinds).cast("i"), strict=True)
    return triples


def test_several_readers_share_a_large_transaction(writer: LogWriter, tmp_path: Path) -> None:
    source, builder = Writer(), BlockBuilder(START)
    chance = random.Random(4)
    expected = []
    for number, count in enumerate((3, 80, 1, 2, 70)):
        made = [(chance.randrange(1, 4), chance.randrange(LIMIT // 2)) for _ in range(count)]
        for message in source.transaction(made, describe=number == 4):
            builder.add(message)
            writer.append(builder.take())
        writer.sync()
        expected.append((Lsn(source.position - 50), made))
    log = ChangeLog(tmp_path)
    pieces = log.pieces(START, log.end(), size=CONTINUE_EVERY)
    assert sum(piece.begin is not None for piece in pieces) > 6
    assert max(piece.size for piece in pieces) < 3 * CONTINUE_EVERY
    assert rows(log, size=CONTINUE_EVERY) == written(expected)
    made_by = [(final, number, relid) for final, made in expected for number, (relid, _) in enumerate(made)]
    assert numbers(log, pieces) == made_by
    for first in range(len(expected)):  # ranges that begin and end around a large transaction
        start, end = Lsn(expected[first][0] - 100), Lsn(expected[first][0] + 50)
        assert rows(log, start, end, size=CONTINUE_EVERY) == written(expected[first : first + 1])
    (only,) = log.pieces(START, log.end(), size=1 << 40)
    assert numbers(log, [only]) == made_by


def test_each_table_of_a_truncate_has_a_number(writer: LogWriter, tmp_path: Path) -> None:
    source, builder = Writer(), BlockBuilder(START)
    *messages, commit = source.transaction([(1, 1), (2, 1), (3, 1), (2, 1)])
    truncate = encode(Truncate(None, False, False, (1, 2, 3)))
    store(writer, builder, [*messages[:-1], truncate, messages[-1], commit])
    log = ChangeLog(tmp_path)
    pieces = log.pieces(START, log.end())
    expected = [(0, 1), (1, 2), (2, 3), (3, 1), (4, 2), (5, 3), (6, 2)]
    assert [row[1:] for row in numbers(log, pieces)] == expected
    assert [change.number for piece in pieces for change in read(tmp_path, piece)] == [0, 1, 2, 3, 6]
    assert log.reach(START).changes == 7


@pytest.mark.parametrize("segment_size", [1 << 20, 1 << 30], ids=["many segments", "one segment"])
def test_any_piece_can_be_read_by_itself(tmp_path: Path, segment_size: int) -> None:
    """Relations are described again where reading may begin, in the version that holds there."""
    writer, source, builder = opened(tmp_path, segment_size=segment_size), Writer(), BlockBuilder(START)
    expected = []
    chance = random.Random(1)
    for _ in range(60):
        made = [(chance.randrange(20), chance.randrange(FULL // 4)) for _ in range(chance.randrange(1, 8))]
        store(writer, builder, source.transaction(made, describe=chance.random() < 0.1))
        expected.append((Lsn(source.position - 50), made))
    log = ChangeLog(tmp_path)
    assert len(log.files()) > 3 or segment_size > 1 << 20
    assert rows(log) == written(expected)
    for size in (1, 3 << 20, 1 << 40):
        pieces = log.pieces(START, log.end(), size=size)
        assert rows(log, size=size) == written(expected)
        assert len(pieces) > 5 or size > 1
    writer.close()


def test_the_first_end_of_a_transaction_after_so_many_changes(writer: LogWriter, tmp_path: Path) -> None:
    source, builder, ends = Writer(), BlockBuilder(START), [START]
    for _ in range(6):
        store(writer, builder, source.transaction([(1, 1), (1, 1)]))
        ends.append(source.position)
    # Six more transactions in one block.
    for _ in range(6):
        for message in source.transaction([(1, 1), (1, 1)]):
            builder.add(message)
        ends.append(source.position)
    blocks = builder.take()
    assert len(blocks) == 1
    writer.append(blocks)
    writer.sync()
    log = ChangeLog(tmp_path)
    assert log.reach(START, changes=1)[:2] == (ends[1], 2)
    for first in range(12):
        for number in range(1, 12 - first):
            assert log.reach(ends[first], changes=2 * number)[:2] == (ends[first + number], 2 * number)
    assert log.reach(START, changes=3)[:2] == (ends[2], 4)
    assert log.reach(ends[2], changes=4)[:2] == (ends[4], 4)
    assert log.reach(ends[5], changes=100)[:2] == (ends[12], 14)
    assert log.reach(ends[10], changes=100)[:2] == (ends[12], 4)
    assert log.reach(START, size=1).position == ends[1]
    assert log.reach(ends[8], size=1).position == ends[9]
    assert log.reach(ends[12])[1:] == (0, 0)


# --- the end of the file -----------------------------------------------------------------------


def unsealed(directory: Path) -> tuple[Path, list[Row]]:
    """Write a log of three transactions, and close it. Returns its file, and all rows."""
    writer, source, builder = opened(directory), Writer(), BlockBuilder(START)
    for made in ([(1, 3)], [(1, 4), (2, 5)], [(2, 6)]):
        store(writer, builder, source.transaction(made))
    writer.close()
    log = ChangeLog(directory)
    return log.files()[-1].local_path, rows(log)


@given(data=st.data())
@settings(max_examples=150)
def test_flipped_bits_are_never_read_as_data(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.mktemp("log")
    path, stored_rows = unsealed(directory)
    whole = path.read_bytes()
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    if damaged == whole:
        return  # two flips undid each other
    path.write_bytes(damaged)
    with pytest.raises(ChangeLogDamaged):
        rows(ChangeLog(directory))
    with pytest.raises(ChangeLogDamaged):
        opened(directory)
    assert path.read_bytes() == damaged
    path.write_bytes(whole)
    assert rows(ChangeLog(directory)) == stored_rows


def test_a_block_in_another_place_is_damage(writer: LogWriter, tmp_path: Path) -> None:
    source, builder = Writer(), BlockBuilder(START)
    store(writer, builder, source.transaction([(1, 3)]))
    path = ChangeLog(tmp_path).files()[-1].local_path
    with SegmentReader(path) as reader:
        with path.open("ab") as file:
            file.write(path.read_bytes()[HEADER_SIZE:])
        blocks = reader.blocks(HEADER_SIZE, reader.size)
        offset, block = next(blocks)
        with pytest.raises(ChangeLogDamaged) as caught:
            next(blocks)
    assert caught.value.message.endswith(f"offset {offset + block.size}")


@given(st.binary(max_size=64))
def test_anything_else_is_no_header_and_no_state(data: bytes) -> None:
    for decode in (decode_header, Durable.decode):
        with pytest.raises(TornBlock):
            decode(data)


def test_the_age_of_a_segment_begins_with_its_first_change() -> None:
    """A position without changes does not count."""
    segment, builder = OpenSegment.at(START), BlockBuilder(START)
    began = segment.first_change
    builder.note(Lsn(START + 8))
    for block in builder.take():
        segment.add(block)
    assert (segment.position, segment.first_change) == (START + 8, began)
    for message in Writer(segment.position).transaction([(1, 3)]):
        builder.add(message)
    for block in builder.take():
        segment.add(block)
    assert segment.first_change > began


def test_a_segment_continues_after_a_kill_between_index_and_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, source, builder = opened(tmp_path), Writer(), BlockBuilder(START)
    store(writer, builder, source.transaction([(1, 3)]))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            writer.seal()
    writer.close()
    writer = opened(tmp_path)
    store(writer, BlockBuilder(writer.position), Writer(writer.position).transaction([(2, 4)]))
    assert [row[2:] for row in rows(ChangeLog(tmp_path))] == [(1, 3), (2, 4)]
    assert len(ChangeLog(tmp_path).files()) == 1
    writer.close()


def test_the_next_segment_begins_after_a_kill_behind_the_rename(tmp_path: Path) -> None:
    writer, source, builder = opened(tmp_path), Writer(), BlockBuilder(START)
    store(writer, builder, source.transaction([(1, 3)]))
    writer.seal()
    writer.close()
    sealed, begun = ChangeLog(tmp_path).files()
    begun.local_path.unlink()
    assert ChangeLog(tmp_path).end() == sealed.end
    writer = opened(tmp_path)
    assert writer.position == sealed.end
    writer.close()


def test_a_disk_that_fails_takes_nothing(writer: LogWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`position` stays. Opened again, the log has the transaction that could not be synced, and syncs it."""
    source, builder = Writer(), BlockBuilder(START)
    store(writer, builder, source.transaction([(1, 3)]))
    durable = writer.position

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ChangeLogError, match="No space left on device") as caught:
            store(writer, builder, source.transaction([(1, 4)]))
        assert caught.value.sqlstate == "53100"
        writer.close()
        with pytest.raises(ChangeLogError, match="No space left on device"):
            writer.open()
    with pytest.raises(ChangeLogError, match="not open for writing"):
        writer.sync()
    assert writer.position == ChangeLog(tmp_path).end() == durable
    writer.close()
    writer.open()
    assert writer.position == ChangeLog(tmp_path).end() == source.position
    assert [row[3] for row in rows(ChangeLog(tmp_path))] == [3, 4]


@pytest.mark.parametrize("damage", [b"", b"\0" * 36, None], ids=["empty", "zeros", "gone"])
def test_readers_do_without_the_file_durable(writer: LogWriter, tmp_path: Path, damage: bytes | None) -> None:
    source, builder = Writer(), BlockBuilder(START)
    store(writer, builder, source.transaction([(1, 3)]))
    if damage is None:
        (tmp_path / "durable").unlink()
    else:
        (tmp_path / "durable").write_bytes(damage)
    assert ChangeLog(tmp_path).end() == source.position
    assert len(rows(ChangeLog(tmp_path))) == 1


# --- one writer, retention ----------------------------------------------------------------------


def test_only_one_process_writes(writer: LogWriter, tmp_path: Path) -> None:
    with pytest.raises(ChangeLogError, match="another process"):
        log_writer(tmp_path).open()


def test_retention_removes_the_oldest_segments_and_their_readers_have_an_error(tmp_path: Path) -> None:
    writer = log_writer(tmp_path, segment_size=1, retention=LogRetention(keep_size=2500))
    writer.open()
    writer.create(Identity(7, "s", ("p",), START))
    source, builder = Writer(), BlockBuilder(START)
    for _ in range(10):
        store(writer, builder, source.transaction([(1, 900)]))
        builder.restart()
    log = ChangeLog(tmp_path)
    assert 1 < len(log.files()) < 6
    assert log.start() > START
    with pytest.raises(ChangeLogError, match="has nothing before"):
        log.pieces(START, log.end())
    assert rows(log, log.start())
    writer.close()


def test_a_segment_stays_that_a_consumer_has_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = log_writer(tmp_path, segment_size=1, retention=LogRetention(keep_age=0, max_size=6000))
    writer.open()
    writer.create(Identity(7, "s", ("p",), START))
    source, builder, log = Writer(), BlockBuilder(START), ChangeLog(tmp_path)

    def write(segments: int) -> None:
        for _ in range(segments):
            store(writer, builder, source.transaction([(1, 900)]))
            builder.restart()

    register(tmp_path, "slow", "a test", log.end())
    register(tmp_path, "fast", "a test", Lsn(log.end() + 10**9))
    write(4)
    assert log.start() == START
    register(tmp_path, "slow", "a test", log.files()[2].start)
    write(1)
    assert log.start() == read_consumers(tmp_path)[1].position
    write(10)  # beyond max_size
    assert len(log.files()) < 9
    assert "although slow has not read it" in caplog.text
    (tmp_path / "consumers" / "slow").write_text("{")
    start = log.start()
    write(2)
    assert log.start() == start  # its position is not known
    assert "of a consumer is damaged" in caplog.text
    forget(tmp_path, "slow")
    write(1)
    assert len(log.files()) < 4
    with pytest.raises(StatementError, match='has no consumer "slow"'):
        forget(tmp_path, "slow")
    writer.close()


@pytest.mark.parametrize("name", ["", ".x", "a/b", "x" * 64, "x.tmp", "name with blanks"])
def test_names_of_consumers(name: str, tmp_path: Path) -> None:
    with pytest.raises(StatementError, match="is not the name of a consumer"):
        register(tmp_path, name, "a test", START)


def test_a_segment_that_is_missing_in_the_middle_is_noticed(tmp_path: Path) -> None:
    writer = opened(tmp_path, segment_size=1)
    source, builder = Writer(), BlockBuilder(START)
    for _ in range(4):
        store(writer, builder, source.transaction([(1, 9)]))
        builder.restart()
    writer.close()
    ChangeLog(tmp_path).files()[1].local_path.unlink()
    with pytest.raises(ChangeLogError, match="gap"):
        ChangeLog(tmp_path).start()


def test_a_log_is_read_while_it_is_written_and_renamed(tmp_path: Path) -> None:
    """Every read returns all transactions that were durable before it, completely, during sealing as well."""
    writer = opened(tmp_path, segment_size=1)
    done = threading.Event()
    stored = [START]

    def write() -> None:
        source, builder = Writer(), BlockBuilder(START)
        for _ in range(150):
            store(writer, builder, source.transaction([(1, 5)]))
            stored.append(source.position)
            builder.restart()
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    log, looks = ChangeLog(tmp_path), 0
    while not done.is_set():
        before = len(stored) - 1
        end = log.end()
        assert end >= stored[before]
        assert len(rows(log, end=end)) == (end - START) // 150
        assert log.reach(stored[before // 2]).changes >= before - before // 2
        looks += 1
    thread.join()
    assert looks > 1
    assert len(rows(log)) == 150
    writer.close()


def test_a_log_is_read_while_its_oldest_segments_are_removed(tmp_path: Path) -> None:
    """A reader gets all that it asked for, or the error that it is too late; never a part."""
    writer = log_writer(tmp_path, segment_size=1, retention=LogRetention(keep_size=1000))
    writer.open()
    writer.create(Identity(7, "s", ("p",), START))
    done = threading.Event()

    def write() -> None:
        source, builder = Writer(), BlockBuilder(START)
        for _ in range(200):
            store(writer, builder, source.transaction([(1, 5)]))
            builder.restart()
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    log, read_whole = ChangeLog(tmp_path), 0
    while not done.is_set():
        start, end = log.start(), log.end()
        try:
            assert len(rows(log, start, end)) == (end - start) // 150
            read_whole += 1
        except ChangeLogError as error:
            if error.sqlstate != "58P01":
                raise
        assert log.damage() == []
    thread.join()
    writer.close()
    assert read_whole
    assert log.start() > START


def test_a_range_beyond_the_end_is_an_error(writer: LogWriter, tmp_path: Path) -> None:
    """As the file "durable" is never synced, a crash of the machine can leave an old one."""
    source, builder = Writer(), BlockBuilder(START)
    store(writer, builder, source.transaction([(1, 3)]))
    older, end = (tmp_path / "durable").read_bytes(), source.position
    store(writer, builder, source.transaction([(1, 4)]))
    log = ChangeLog(tmp_path)
    asked = log.end()
    (tmp_path / "durable").write_bytes(older)
    assert log.end() == end
    with pytest.raises(ChangeLogError, match=f"ends at {end}") as caught:
        log.pieces(START, asked)
    assert caught.value.hint
    writer.close()
    writer.open()
    assert len(rows(log, START, asked)) == 2


def test_an_older_record_hides_no_sealed_segment(tmp_path: Path) -> None:
    writer, source, builder = opened(tmp_path, segment_size=1), Writer(), BlockBuilder(START)
    store(writer, builder, source.transaction([(1, 3)]))
    older = (tmp_path / "durable").read_bytes()
    builder.restart()
    store(writer, builder, source.transaction([(1, 4)]))
    builder.restart()
    store(writer, builder, source.transaction([(1, 5)]))
    writer.close()
    (tmp_path / "durable").write_bytes(older)
    log = ChangeLog(tmp_path)
    assert log.end() == log.files()[-1].start
    assert [row[3] for row in rows(log)] == [3, 4]


# --- messages that may follow ---------------------------------------------------------------------


def test_messages_out_of_order_are_refused() -> None:
    insert = encode(Insert(None, 1, TupleData.join(b"t", [b"1"])))
    begin, commit = encode(Begin(Lsn(0x2000), 0, 1)), encode(Commit(Lsn(0x2000), Lsn(0x2100), 0))
    for messages in ([insert], [commit], [begin, begin], [begin, insert], [encode(relation(1))]):
        builder = BlockBuilder(START)
        with pytest.raises(ProtocolError):  # noqa: PT012 - which of them is refused is not the point
            for message in messages:
                builder.add(message)
    with pytest.raises(ProtocolError, match="came again"):
        BlockBuilder(Lsn(0x2001)).add(begin)


def test_messages_outside_of_transactions_are_left_out() -> None:
    builder = BlockBuilder(START)
    builder.add(encode(LogicalMessage(None, False, Lsn(0x2000), "p", b"x")))
    assert builder.take() == []
