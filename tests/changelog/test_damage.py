"""Damage to the files of a change log is never read as data, hidden, or increased by the writer."""

from __future__ import annotations

import json
import os
import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from subscriber.changelog.encoder import BlockBuilder
from subscriber.changelog.files import DURABLE, IDENTITY, OPEN, SEALED, SegmentReader
from subscriber.changelog.piece_reader import read
from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.segment import (
    BLOCK_SIZE,
    HEADER_SIZE,
    TRAILER_SIZE,
    Durable,
    encode_end,
    encode_header,
    encode_trailer,
)
from subscriber.changelog.writer import log_writer
from subscriber.errors import ChangeLogDamaged, ChangeLogError
from subscriber.lsn import Lsn
from tests.changelog.stream import START, Writer
from tests.changelog.test_writer import Row, opened, rows, store

Files = dict[str, bytes]


class Sample:
    """A small log of sealed segments and an open one, written by the real writer and closed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.recorded: list[bytes] = []  # contents of the file "durable", one for each sync() of the open segment
        writer, source, builder = opened(directory, segment_size=1), Writer(), BlockBuilder(START)
        for number in range(6):
            if number in (2, 3):
                builder.restart()  # which seals the segment
            elif number:
                builder.note(Lsn(source.position + 10))  # a keepalive
                writer.append(builder.take())
            store(writer, builder, source.transaction([(1, 1)], describe=number == 4))
            if number >= 3:
                self.recorded.append((directory / DURABLE).read_bytes())
        self.position = writer.position
        writer.close()
        *self.sealed, self.open = [file.local_path for file in ChangeLog(directory).files()]
        assert [file.local_path.suffix for file in ChangeLog(directory).files()] == [".changes", ".changes", ".open"]
        self.rows = rows(ChangeLog(directory))
        self.identity = ChangeLog(directory).identity
        self.files = contents(directory)

    def path(self, name: str) -> Path:
        return {"sealed": self.sealed[0], "open": self.open}.get(name, self.directory / name)

    @contextmanager
    def changed(self, path: Path, data: bytes) -> Iterator[None]:
        """Replace the bytes of one file of the log during the block."""
        overwrite(path, data)
        try:
            yield
        finally:
            overwrite(path, self.files[path.name])

    def restore(self) -> None:
        """Put back all files as they were."""
        for path in self.directory.iterdir():
            if path.name not in self.files:
                path.unlink()
        for name, data in self.files.items():
            path = self.directory / name
            overwrite(path, data) if path.exists() else path.write_bytes(data)

    def read_all(self) -> list[Row]:
        log = ChangeLog(self.directory)
        assert log.identity == self.identity
        assert log.end() == self.position
        assert log.start() == START
        return rows(log)


def overwrite(path: Path, data: bytes) -> None:
    """Write other bytes into a file, in place, as that takes no time of the disk."""
    with path.open("r+b") as file:
        file.write(data)
        file.truncate()


def contents(directory: Path) -> Files:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def bits(sample: Sample, path: Path) -> list[int]:
    """Return the numbers of all bits in a file. In the body of a block, one random bit of each byte."""
    size, chance = len(sample.files[path.name]), random.Random(path.name)
    places = {8 * offset + chance.randrange(8) for offset in range(size)}
    plain = set(range(size))
    if path.suffix in (SEALED, OPEN):
        with SegmentReader(path) as reader:
            stop = size if path.suffix == OPEN else reader.index().stop
            for place in reader.heads(HEADER_SIZE, reader.start, stop):
                begin = place.offset + BLOCK_SIZE
                plain -= set(range(begin, begin + place.head.length))
    return sorted(places | {8 * offset + bit for offset in plain for bit in range(8)})


def says(error: ChangeLogError, path: Path) -> bool:
    """Return True if the error names the damaged file and a remedy."""
    return path.name in error.message and bool(error.hint)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return Sample(tmp_path_factory.mktemp("sample") / "log")


@pytest.fixture
def sample(shared: Sample) -> Iterator[Sample]:
    files = shared.files
    yield shared
    shared.files = files
    shared.restore()


# --- readers ------------------------------------------------------------------------------------

FILES = ["sealed", "open", DURABLE, IDENTITY]


@pytest.mark.parametrize("name", FILES)
def test_a_reader_has_everything_or_an_error_with_any_bit_flipped(sample: Sample, name: str) -> None:
    path = sample.path(name)
    whole, refused, tried = sample.files[path.name], 0, bits(sample, path)
    for bit in tried:
        with sample.changed(path, flipped(whole, bit)):
            try:
                assert sample.read_all() == sample.rows
            except ChangeLogError as error:
                refused += says(error, path)
    assert refused == (0 if name == DURABLE else len(tried))


@pytest.mark.parametrize("name", FILES)
def test_a_reader_has_everything_or_an_error_with_a_file_cut_at_any_byte(sample: Sample, name: str) -> None:
    path = sample.path(name)
    whole, refused = sample.files[path.name], 0
    for length in range(len(whole)):
        with sample.changed(path, whole[:length]):
            try:
                assert sample.read_all() == sample.rows
            except ChangeLogError as error:
                refused += says(error, path)
    assert refused == (0 if name == DURABLE else len(whole))


@pytest.mark.parametrize("name", ["sealed", "open"])
def test_bytes_behind_the_end_are_not_read(sample: Sample, name: str) -> None:
    """Those of an open segment may be a transaction that is being written; a sealed one ends with its trailer."""
    path = sample.path(name)
    whole = sample.files[path.name]
    for more in (b"\0", whole, whole[-TRAILER_SIZE:]):
        with sample.changed(path, whole + more):
            if name == "open":
                assert sample.read_all() == sample.rows
                continue
            with pytest.raises(ChangeLogDamaged, match=path.name):
                sample.read_all()


def test_damage_is_not_taken_for_the_end_without_the_file_durable(sample: Sample) -> None:
    whole = sample.files[sample.open.name]
    (sample.directory / DURABLE).unlink()
    assert sample.read_all() == sample.rows
    for offset in range(len(whole)):
        damaged = flipped(whole, 8 * offset + offset % 8)
        with sample.changed(sample.open, damaged), pytest.raises(ChangeLogDamaged, match=sample.open.name):
            ChangeLog(sample.directory).end()


@pytest.mark.parametrize("offset", [0, HEADER_SIZE, 1 << 31, 1 << 63, (1 << 64) - 1])
def test_a_trailer_that_names_another_offset_is_damage(sample: Sample, offset: int) -> None:
    path = sample.sealed[0]
    whole = sample.files[path.name]
    with (
        sample.changed(path, whole[:-TRAILER_SIZE] + encode_trailer(offset)),
        pytest.raises(ChangeLogDamaged, match=path.name) as caught,
    ):
        sample.read_all()
    assert str(START) in (caught.value.detail or "")


def with_index(sample: Sample, places: list[tuple[int, Lsn]]) -> bytes:
    """Return the first sealed segment with another index, as a faulty writer could have written it."""
    path = sample.sealed[0]
    with SegmentReader(path) as reader:
        stop = reader.index().stop
        assert reader.file.end is not None
        return sample.files[path.name][:stop] + encode_end(places, reader.file.end, reader.start, stop)


def test_an_index_that_lacks_places_hides_nothing(sample: Sample) -> None:
    with sample.changed(sample.sealed[0], with_index(sample, [])):
        assert sample.read_all() == sample.rows


def test_an_index_that_names_other_places_is_damage(sample: Sample) -> None:
    name = sample.sealed[0].name
    with sample.changed(sample.sealed[0], with_index(sample, [(HEADER_SIZE, START), (HEADER_SIZE + 1, START)])):
        log = ChangeLog(sample.directory)
        assert [name in error.message for error in log.damage()] == [True]
        with pytest.raises(ChangeLogDamaged, match=name):
            rows(log, size=1)


@pytest.mark.parametrize("by", [(0, 150), (0, -150), (-1, 0), (1, 0), (-200, 0)], ids=str)
def test_a_record_that_does_not_fit_the_open_segment(sample: Sample, by: tuple[int, int]) -> None:
    """As that of another log, or of another time: intact, but no transaction ends at this offset and position."""
    durable = Durable.decode(sample.recorded[-1])
    other = Durable(durable.segment, durable.offset + by[0], Lsn(durable.position + by[1]), 0)
    (sample.directory / DURABLE).write_bytes(other.encode())
    log = ChangeLog(sample.directory)
    with pytest.raises(ChangeLogDamaged, match=sample.open.name) as caught:
        log.pieces(START, log.end())
    assert caught.value.hint


@pytest.mark.parametrize("cut", [1, BLOCK_SIZE, -1])
def test_a_piece_that_does_not_end_with_a_transaction(sample: Sample, cut: int) -> None:
    piece = ChangeLog(sample.directory).pieces(START, sample.position)[-1]
    with pytest.raises(ChangeLogDamaged, match=sample.open.name):
        list(read(sample.directory, replace(piece, stop=piece.stop - cut)))


def test_a_piece_that_does_not_begin_where_relations_are_described(sample: Sample) -> None:
    """Rows of a relation that the reader does not know are not left out."""
    piece = ChangeLog(sample.directory).pieces(START, sample.position)[-1]
    with SegmentReader(sample.open) as reader:
        *_, last = reader.heads(piece.offset, piece.after, piece.stop)
    with pytest.raises(ChangeLogDamaged, match="no relation with OID 1"):
        list(read(sample.directory, replace(piece, offset=last.offset)))


def test_an_error_names_file_offset_position_and_the_next_step(sample: Sample) -> None:
    """The position is where the last whole transaction in front of the damage ends."""
    with SegmentReader(sample.open) as reader:
        begins = [(offset, before) for offset, before, _ in reader.heads(HEADER_SIZE, reader.start, reader.size)]
    for offset, before in begins:
        damaged = flipped(sample.files[sample.open.name], 8 * offset + 3)
        with sample.changed(sample.open, damaged), pytest.raises(ChangeLogDamaged) as caught:
            sample.read_all()
        assert caught.value.message == f'change log file "{sample.open}" is damaged at offset {offset}'
        assert f"after {before} " in (caught.value.detail or "")
        assert "copy" in (caught.value.hint or "")
        assert "another directory" in (caught.value.hint or "")


# --- the writer ---------------------------------------------------------------------------------


def damages(whole: bytes) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes): one bit flipped in each byte, chosen at random, and the file cut at each byte."""
    chance = random.Random(len(whole))
    for offset in range(len(whole)):
        yield offset, flipped(whole, 8 * offset + chance.randrange(8))
        yield offset, whole[:offset]


@pytest.mark.parametrize("synced", [0, 1, 2])
def test_open_keeps_what_was_recorded_as_durable(sample: Sample, synced: int) -> None:
    """Damage in front of that is an error and changes no file; behind it the log is as long as it is whole."""
    path, whole = sample.open, sample.files[sample.open.name]
    sample.files = {**sample.files, DURABLE: sample.recorded[synced]}
    durable = Durable.decode(sample.recorded[synced])
    assert (durable.offset == len(whole)) == (synced == 2)
    for offset, damaged in damages(whole):
        if offset > durable.offset + BLOCK_SIZE and offset % 8:
            continue  # a log that continues is synced several times
        sample.restore()
        overwrite(path, damaged)
        before = contents(sample.directory)
        writer = log_writer(sample.directory)
        if offset < durable.offset:
            with pytest.raises(ChangeLogDamaged, match=path.name) as caught:
                writer.open()
            assert "offset" in caught.value.message
            assert "another directory" in (caught.value.hint or "")
            assert contents(sample.directory) == before
        else:
            writer.open()
            assert writer.position >= durable.position
            assert contents(sample.directory)[path.name] == before[path.name]
            log = ChangeLog(sample.directory)
            kept = rows(log)
            assert kept == [row for row in sample.rows if row[0] < writer.position]
            source = Writer(writer.position)
            store(writer, BlockBuilder(writer.position), source.transaction([(9, 1)]))
            assert rows(log) == [*kept, (source.position - 50, 0, 9, 1)]
        writer.close()


@pytest.mark.parametrize("name", ["sealed", DURABLE])
def test_open_with_any_other_file_damaged_loses_nothing(sample: Sample, name: str) -> None:
    path, whole = sample.path(name), sample.files[sample.path(name).name]
    for _, damaged in damages(whole) if name == DURABLE else [(0, b""), (0, flipped(whole, 300))]:
        path.write_bytes(damaged)
        writer = opened(sample.directory)
        assert writer.position == sample.position
        writer.close()
    assert contents(sample.directory)[sample.open.name] == sample.files[sample.open.name]


def test_a_log_without_a_record_is_not_cut_before_a_write(sample: Sample) -> None:
    """The archiver compares the position with its slot in between."""
    damaged = flipped(sample.files[sample.open.name], 8 * (HEADER_SIZE + 40))
    sample.open.write_bytes(damaged)
    (sample.directory / DURABLE).unlink()
    writer = opened(sample.directory)
    assert writer.position < sample.position
    assert sample.open.read_bytes() == damaged
    writer.close()
    (sample.directory / DURABLE).unlink()
    writer.open()
    writer.close()
    assert sample.open.read_bytes() == damaged


def test_a_sync_that_fails_while_the_log_is_opened_takes_nothing(
    sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        writer = log_writer(sample.directory)
        with pytest.raises(ChangeLogError, match="Input/output error"):
            writer.open()
        writer.close()
    assert sample.open.read_bytes() == sample.files[sample.open.name]
    assert sample.read_all() == sample.rows


# --- files that do not belong together ----------------------------------------------------------


def refused(sample: Sample, *, match: str) -> None:
    """Reader and writer refuse the directory, with a hint, and no file is changed."""
    before = contents(sample.directory)
    with pytest.raises(ChangeLogDamaged, match=match) as caught:
        rows(ChangeLog(sample.directory))
    assert caught.value.hint
    writer = log_writer(sample.directory)
    with pytest.raises(ChangeLogDamaged, match=match) as caught:
        writer.open()
    writer.close()
    assert caught.value.hint
    assert contents(sample.directory) == before


def test_a_segment_that_is_missing_in_the_middle(sample: Sample) -> None:
    sample.sealed[1].unlink()
    refused(sample, match="gap")


def test_the_open_segment_is_missing(sample: Sample) -> None:
    sample.open.unlink()
    refused(sample, match=str(sample.position))


def test_all_segments_are_missing(sample: Sample) -> None:
    for path in (*sample.sealed, sample.open):
        path.unlink()
    refused(sample, match=str(sample.position))


def test_segments_that_overlap(sample: Sample) -> None:
    first, second = sample.sealed
    wide = f"{first.stem.split('-')[0]}-{second.stem.split('-')[1]}.changes"
    (sample.directory / wide).write_bytes(sample.files[first.name])
    refused(sample, match="overlap")


def test_an_open_segment_beside_its_sealed_one(sample: Sample) -> None:
    first = sample.sealed[0]
    (sample.directory / f"{first.stem.split('-')[0]}.open").write_bytes(sample.files[first.name])
    refused(sample, match="overlap")


def test_an_open_segment_of_no_bytes(sample: Sample) -> None:
    sample.open.write_bytes(b"")
    refused(sample, match=f"{sample.open.name}.* offset 0")


def test_a_header_of_another_publisher(sample: Sample) -> None:
    whole = sample.files[sample.open.name]
    with SegmentReader(sample.open) as reader:
        start = reader.start
    sample.open.write_bytes(encode_header(8, start) + whole[HEADER_SIZE:])
    refused(sample, match="another publisher")


def test_a_format_that_is_not_known(sample: Sample) -> None:
    """It is no damage: another program reads it."""
    head = bytearray(sample.files[sample.open.name][: HEADER_SIZE - 4])
    head[11] = 9
    newer = bytes(head) + zlib.crc32(head).to_bytes(4, "big")
    sample.open.write_bytes(newer)
    for use in (sample.read_all, log_writer(sample.directory).open):
        with pytest.raises(ChangeLogError, match="has format 9") as caught:
            use()
        assert caught.value.sqlstate == "0A000"
        assert sample.open.name in str(caught.value)
    assert sample.open.read_bytes() == newer


@pytest.mark.parametrize("name", ["sealed", "open"])
def test_a_segment_under_another_name(sample: Sample, name: str) -> None:
    """Its neighbors are missing, so that only its header can reveal it."""
    for path in (*sample.sealed, sample.open, sample.directory / DURABLE):
        path.unlink()
    path, start = sample.path(name), Lsn(START + 1)
    renamed = path.with_name(f"{start:016X}{path.name[16:]}")
    renamed.write_bytes(sample.files[path.name])
    with pytest.raises(ChangeLogDamaged, match=f"{renamed.name}.* another segment"):
        rows(ChangeLog(sample.directory), start)


def test_a_sealed_segment_whose_name_says_another_end(sample: Sample) -> None:
    for path in (sample.sealed[1], sample.open, sample.directory / DURABLE):
        path.unlink()
    sample.sealed[0].rename(sample.sealed[0].with_name(f"{START:016X}-{START + 9999:016X}.changes"))
    with pytest.raises(ChangeLogDamaged):
        rows(ChangeLog(sample.directory))


def test_segments_without_their_identity(sample: Sample) -> None:
    (sample.directory / IDENTITY).unlink()
    writer = log_writer(sample.directory)
    with pytest.raises(ChangeLogDamaged, match=IDENTITY) as caught:
        writer.open()
    writer.close()
    assert caught.value.hint
    assert contents(sample.directory) == {k: v for k, v in sample.files.items() if k != IDENTITY}


@pytest.mark.parametrize("field", ["system_id", "slot", "publications", "start"])
def test_an_identity_that_was_edited(sample: Sample, field: str) -> None:
    fields = json.loads(sample.files[IDENTITY])
    fields[field] = ["q"] if field == "publications" else "0/9"
    (sample.directory / IDENTITY).write_text(json.dumps(fields))
    refused(sample, match=IDENTITY)


def test_an_identity_without_a_checksum(sample: Sample) -> None:
    fields = {"system_id": "7", "slot": "s", "publications": ["p"], "start": str(START)}
    (sample.directory / IDENTITY).write_text(json.dumps(fields))
    refused(sample, match=IDENTITY)


def test_an_identity_in_another_encoding(sample: Sample) -> None:
    (sample.directory / IDENTITY).write_bytes(b'{"slot": "\xff"}')
    refused(sample, match=IDENTITY)


def test_an_error_of_the_system_is_a_changelog_error(sample: Sample) -> None:
    """A directory in a segment's place can be opened, not read."""
    path = sample.sealed[0]
    path.unlink()
    path.mkdir()
    try:
        with pytest.raises(ChangeLogError, match=f"could not read file .*{path.name}") as caught:
            sample.read_all()
        assert caught.value.hint
    finally:
        path.rmdir()
