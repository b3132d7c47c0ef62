"""The change log in an object store, on a real server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier

import pytest

from subscriber.changelog.consumers import LogRetention, forget, read_consumers, register
from subscriber.changelog.encoder import BlockBuilder
from subscriber.changelog.files import DURABLE, Identity
from subscriber.changelog.object_segments import LEASE, ObjectSegments
from subscriber.changelog.objects import ObjectPath, Version
from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.storage import for_each, location, write_file
from subscriber.changelog.writer import LogWriter, log_writer
from subscriber.errors import ChangeLogDamaged, ChangeLogError, StatementError, TransactionTooLarge
from subscriber.lsn import Lsn
from subscriber.retry import Reaction, reaction
from tests.changelog.stream import START, Writer
from tests.changelog.test_writer import rows
from tests.processes import popened


@pytest.fixture
def writer(objects: ObjectPath) -> Iterator[LogWriter]:
    writer = opened(objects)
    yield writer
    writer.close()


def opened(path: ObjectPath, *, segment_age: float = 0) -> LogWriter:
    writer = log_writer(path, segment_age=segment_age)
    writer.open()
    if writer.identity is None:
        writer.create(Identity(7, "s", ("p",), START))
    return writer


def store(writer: LogWriter, source: Writer, *sizes: int) -> None:
    """Store one segment with a transaction of rows of these sizes."""
    builder = BlockBuilder(writer.position)
    for message in source.transaction([(1, size) for size in sizes], describe=True):
        builder.add(message)
    writer.append(builder.take())
    writer.seal()


def winners(attempt: Callable[[int], Version]) -> int:
    """Return how many of eight attempts at once succeed."""

    def try_it(number: int) -> int:
        try:
            attempt(number)
        except FileExistsError:
            return 0
        return 1

    with ThreadPoolExecutor(8) as pool:
        return sum(pool.map(try_it, range(8)))


def _create(path: ObjectPath, writer: int) -> Version:
    return path.create(b"%d" % writer)


def _replace(path: ObjectPath, version: Version, writer: int) -> Version:
    return path.replace(b"new %d" % writer, version)


def test_one_of_several_writers_at_once_succeeds(objects: ObjectPath) -> None:
    for number in range(10):
        path = objects / f"one-{number}"
        assert winners(partial(_create, path)) == 1
        assert winners(partial(_replace, path, path.read()[1])) == 1


def test_a_request_whose_answer_was_lost_is_repeated(objects: ObjectPath) -> None:
    path = objects / "repeated"
    version = path.create(b"first")
    assert path.create(b"first") == version
    second = path.replace(b"second", version)
    assert path.replace(b"second", version) == second


def test_segments_are_read_and_continued(writer: LogWriter, objects: ObjectPath) -> None:
    source = Writer()
    store(writer, source, 3, 4)
    store(writer, source, 5)
    log = ChangeLog(str(objects))
    assert log.end() == writer.position == source.position
    assert [row[3] for row in rows(log)] == [3, 4, 5]
    writer.close()
    again = opened(objects)
    store(again, source, 6)
    again.close()
    assert [row[3] for row in rows(ChangeLog(objects))] == [3, 4, 5, 6]
    assert [file.path.name for file in log.files()] == [f"{file.start:016X}.segment" for file in log.files()]
    assert not log.damage()


def test_the_directory_of_the_open_segment_is_created(objects: ObjectPath, tmp_path: Path) -> None:
    writer = log_writer(objects, temporary=tmp_path / "spool" / "of this machine")
    writer.open()
    writer.create(Identity(7, "s", ("p",), START))
    store(writer, Writer(), 3)
    writer.close()
    assert [row[3] for row in rows(ChangeLog(objects))] == [3]


def test_a_change_counts_when_its_segment_is_stored(objects: ObjectPath) -> None:
    writer, source = opened(objects, segment_age=3600), Writer()
    builder = BlockBuilder(START)
    for message in source.transaction([(1, 3)]):
        builder.add(message)
    writer.append(builder.take())
    writer.sync()
    assert (writer.position, ChangeLog(objects).end()) == (START, START)
    writer.close()  # as a kill: the segment is not stored
    writer = opened(objects)
    assert (writer.position, rows(ChangeLog(objects))) == (START, [])
    writer.close()


def test_a_position_without_changes_needs_no_segment(writer: LogWriter, objects: ObjectPath) -> None:
    source, builder = Writer(), BlockBuilder(START)
    builder.note(Lsn(START + 500))
    writer.append(builder.take())
    writer.sync()
    log = ChangeLog(objects)
    assert (log.end(), writer.position, log.files()) == (START + 500, START + 500, [])
    source.position = Lsn(START + 1000)
    store(writer, source, 7)
    assert [row[3] for row in rows(log)] == [row[3] for row in rows(log, Lsn(START + 500))] == [7]
    assert not log.damage()


def test_a_killed_writer_has_stored_a_segment_but_not_its_position(writer: LogWriter, objects: ObjectPath) -> None:
    source, before = Writer(), (objects / DURABLE).read_bytes()
    store(writer, source, 3)
    writer.close()
    (objects / DURABLE).put(before)
    assert ChangeLog(objects).end() == source.position
    again = opened(objects)
    assert again.position == source.position
    store(again, source, 4)
    again.close()
    assert [row[3] for row in rows(ChangeLog(objects))] == [3, 4]


def test_less_than_was_confirmed_is_damage(writer: LogWriter, objects: ObjectPath) -> None:
    source = Writer()
    for size in (3, 4, 5):
        store(writer, source, size)
    writer.close()
    first, second, third = [file.path for file in ChangeLog(objects).files()]
    whole = third.read_bytes()
    third.unlink()
    for use in (ChangeLog(objects).end, log_writer(objects).open):
        with pytest.raises(ChangeLogDamaged, match="but had everything before"):
            use()
    write_file(third, whole)
    middle = second.read_bytes()
    second.unlink()
    with pytest.raises(ChangeLogDamaged) as raised:
        rows(ChangeLog(objects))
    assert first.name in str(raised.value)
    write_file(second, middle[:50] + bytes([middle[50] ^ 1]) + middle[51:])
    (log,) = ChangeLog(objects).damage()
    assert second.name in log.message


def test_a_second_writer_is_refused(writer: LogWriter, objects: ObjectPath) -> None:
    with pytest.raises(ChangeLogError, match="another process writes the change log"):
        log_writer(objects).open()


def test_a_writer_whose_lease_was_taken_stores_nothing(writer: LogWriter, objects: ObjectPath) -> None:
    source = Writer()
    store(writer, source, 3)
    (objects / LEASE).put(json.dumps({"owner": None, "renewals": 0}).encode())
    other = opened(objects)
    late = replace_position(source)
    store(other, source, 4)
    with pytest.raises(ChangeLogError, match="another process writes the change log"):
        store(writer, late, 4, 4)
    store(other, source, 5)
    other.close()
    assert [row[3] for row in rows(ChangeLog(objects))] == [3, 4, 5]


@pytest.mark.parametrize("contents", [b"a note", b"[]", b"{}", b'{"owner": 7}', b"\xff"])
def test_an_object_that_is_not_a_lease_is_an_error(objects: ObjectPath, contents: bytes) -> None:
    (objects / LEASE).put(contents)
    with pytest.raises(StatementError, match="is not a lease") as failed:
        log_writer(objects).open()
    assert failed.value.hint is not None
    assert f"aws s3 rm {objects / LEASE}" in failed.value.hint
    assert (objects / LEASE).read_bytes() == contents


def test_a_transaction_that_no_request_can_store(objects: ObjectPath) -> None:
    source, writer = Writer(), LogWriter(ObjectSegments(objects, largest=10_000))
    writer.open()
    writer.create(Identity(7, "s", ("p",), START))
    store(writer, source, 5000)
    before = writer.position
    with pytest.raises(TransactionTooLarge, match=f"a transaction after {before} is too large") as failed:
        store(writer, source, 5000, 6000)
    assert reaction(failed.value) is Reaction.STOP
    assert before == ChangeLog(objects).end()


def replace_position(source: Writer) -> Writer:
    """Return a source at the same position."""
    other = Writer()
    other.__dict__.update(source.__dict__)
    return other


def test_retention_removes_the_oldest_segments(objects: ObjectPath) -> None:
    writer, source = log_writer(objects, segment_age=0, retention=LogRetention(keep_size=10_000)), Writer()
    writer.open()
    writer.create(Identity(7, "s", ("p",), START))
    for _ in range(4):
        store(writer, source, 4000)
    writer.close()
    log = ChangeLog(objects)
    assert len(log.files()) == 2
    assert len(rows(log, log.start())) == 2
    with pytest.raises(ChangeLogError, match="the change log has nothing before"):
        log.check(START)


def test_retention_keeps_what_a_consumer_has_not_read(objects: ObjectPath) -> None:
    register(objects, "slow", "a test", START)
    writer, source = log_writer(objects, segment_age=0, retention=LogRetention(keep_age=0)), Writer()
    writer.open()
    writer.create(Identity(7, "s", ("p",), START))
    for _ in range(3):
        store(writer, source, 1000)
    log = ChangeLog(objects)
    assert log.start() == START
    forget(objects, "slow")
    register(objects, "fast", "a test", log.files()[1].start)
    store(writer, source, 1000)
    assert log.start() == read_consumers(objects)[0].position
    writer.close()


def test_requests_for_several_segments_run_at_the_same_time() -> None:
    barrier = Barrier(4, timeout=10)

    def number(item: int) -> int:
        barrier.wait()
        return item

    assert for_each(ObjectPath("s3://bucket", "log"), number, range(4)) == [0, 1, 2, 3]


def test_a_location_without_a_log_is_an_error(objects: ObjectPath) -> None:
    with pytest.raises(ChangeLogError, match="there is no change log in"):
        ChangeLog(objects)


def test_urls_of_object_stores_are_normalized_and_have_no_password() -> None:
    assert str(location("s3:/bucket/a/b/")) == "s3://bucket/a/b"  # a URL that has been a Path
    assert str(location("file:///srv/log")) == "/srv/log"
    with pytest.raises(StatementError, match="no password") as raised:
        location("s3://key:secret@bucket/a")
    assert "secret@" not in f"{raised.value} {raised.value.hint}"


def test_a_large_segment_is_read_in_few_requests(
    writer: LogWriter, objects: ObjectPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, requests, read_range = Writer(), list[int](), ObjectPath.range
    store(writer, source, *[50_000] * 400)

    def counted(path: ObjectPath, start: int, length: int) -> bytes:
        requests.append(length)
        return read_range(path, start, length)

    monkeypatch.setattr(ObjectPath, "range", counted)
    assert len(rows(ChangeLog(objects))) == 400
    assert len(requests) < 30
    assert sum(requests) < 1.5 * 400 * 50_000


WRITER = """
import sys
from subscriber.retry import Reaction, reaction
from tests.changelog.stream import Writer
from tests.changelog.test_object_segments import opened, store
from subscriber.changelog.objects import ObjectPath
writer, source = opened(ObjectPath.from_url(sys.argv[1])), Writer()
source.position = max(source.position, writer.position)
while True:
    store(writer, source, *[1000] * 500)
    print(int(writer.position), flush=True)
"""


@pytest.mark.soak
@pytest.mark.timeout(300)  # each writer waits for the end of the lease of the killed one
def test_a_writer_is_killed_in_the_middle(objects: ObjectPath) -> None:
    confirmed = 0
    for _ in range(8):
        command = [sys.executable, "-c", WRITER, str(objects)]
        with popened(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(20)]
            process.kill()  # 0.5 MB are on the way to the store at most times
            lines += process.stdout.read().splitlines()
        confirmed = max([confirmed, *(int(line) for line in lines if re.fullmatch(r"\d+\n?", line))])
        log = ChangeLog(objects)
        assert log.end() >= confirmed
        assert not log.damage()
        assert {row[3] for row in rows(log)} == {1000}
    assert len(rows(ChangeLog(objects))) >= 8 * 20 * 500
