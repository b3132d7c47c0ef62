"""pgchanges: batches and streams over a log that is being written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from subscriber.changelog.encoder import BlockBuilder
from subscriber.changelog.files import Identity
from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.segment import HEADER_SIZE, TRAILER_SIZE
from subscriber.changelog.writer import log_writer
from subscriber.errors import ChangeLogError, StatementError
from subscriber.lsn import Lsn
from subscriber.protocol.encode import encode
from subscriber.protocol.messages import (
    Begin,
    Commit,
    Delete,
    LogicalMessage,
    Message,
    OldPart,
    Relation,
    RelationColumn,
    ReplicaIdentity,
    Truncate,
    Update,
)
from subscriber.protocol.tuple_data import TupleData
from subscriber.spark.lake.lake import Lake
from subscriber.spark.sources.pgchanges import ChangesReader, ChangesStreamReader
from tests.changelog.stream import START, Writer


class Log:
    """A log written by this test, of a source that exists only as messages."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.source, self.builder = Writer(), BlockBuilder(START)
        self.writer = log_writer(directory, segment_size=1 << 20)
        self.writer.open()
        self.writer.create(Identity(7, "s", ("p",), START))

    def store(self, messages: list[bytes]) -> Lsn:
        for message in messages:
            self.builder.add(message)
        self.writer.append(self.builder.take())
        self.writer.sync()
        return self.writer.position

    def rows(self, count: int, relid: int = 1, size: int = 5) -> Lsn:
        """Write one transaction of inserts."""
        return self.store(self.source.transaction([(relid, size)] * count))


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    log = Log(tmp_path / "log")
    yield log
    log.writer.close()


def read(spark: SparkSession, log: Log, **options: str) -> DataFrame:
    return spark.read.format("pgchanges").options(**options).load(str(log.directory))


def test_a_batch_has_the_range_that_was_asked_for(spark: SparkSession, log: Log) -> None:
    ends = [START, *(log.rows(10, relid) for relid in (1, 2, 3))]
    assert read(spark, log).count() == 30
    assert read(spark, log, start=str(ends[1]), end=str(ends[2])).select("table").distinct().collect() == [("t2",)]
    assert read(spark, log, tables="public.t1,public.t3").count() == 20
    assert read(spark, log, start=str(ends[3])).count() == 0
    with pytest.raises(Exception, match="the change log ends at"):
        read(spark, log, end="FF/0").count()
    with pytest.raises(Exception, match="has nothing before"):
        read(spark, log, start="0/1").count()


RELATION = Relation(
    None,
    9,
    "public",
    "typed",
    ReplicaIdentity.DEFAULT,
    (
        RelationColumn(True, "id", 23, -1),
        RelationColumn(False, "price", 1700, ((10 << 16) | 2) + 4),
        RelationColumn(False, "at", 1184, -1),
        RelationColumn(False, "big", 25, -1),
    ),
)


def test_every_kind_of_change_and_typed(spark: SparkSession, log: Log) -> None:
    row = TupleData.join
    changes: list[Message] = [
        Update(
            None,
            9,
            OldPart.KEY,
            row(b"tnnn", [b"1", None, None, None]),
            row(b"tttu", [b"2", b"1.50", b"2030-01-02 03:04:05.678901+00", None]),
        ),
        Delete(None, 9, OldPart.KEY, row(b"tnnn", [b"2", None, None, None])),
        Truncate(None, False, False, (9,)),
        LogicalMessage(None, True, Lsn(0x2000), "prefix", b"content"),
        Update(None, 9, OldPart.ROW, row(b"tnnt", [b"3", None, None, b"x"]), row(b"tnnu", [b"4", None, None, None])),
    ]
    begin, commit = Begin(Lsn(0x2000), 0, 5), Commit(Lsn(0x2000), Lsn(0x2100), 0)
    log.store([encode(begin), encode(RELATION), *(encode(change) for change in changes), encode(commit)])
    rows = [row.asDict() for row in read(spark, log).orderBy("number").collect()]
    assert [row["op"] for row in rows] == ["update", "delete", "truncate", "message", "update"]
    assert rows[0]["before"] == {"id": "1"}
    assert rows[0]["after"] == {"id": "2", "price": "1.50", "at": "2030-01-02 03:04:05.678901+00"}
    assert (rows[0]["unchanged"], rows[0]["key"], rows[0]["xid"]) == (["big"], ["id"], 5)
    assert (rows[3]["prefix"], rows[3]["content"]) == ("prefix", b"content")
    assert (rows[4]["after"], rows[4]["unchanged"]) == ({"id": "4", "price": None, "at": None, "big": "x"}, [])


def test_a_stream_takes_whole_transactions_and_goes_on_where_it_was(
    spark: SparkSession, log: Log, tmp_path: Path
) -> None:
    for _ in range(5):
        log.rows(20)
    batches: list[tuple[int, int, int]] = []

    def take(rows: DataFrame, number: int) -> None:
        rows.persist()
        batches.append((number, rows.count(), rows.select("xid").distinct().count()))
        rows.unpersist()

    def run() -> None:
        stream = spark.readStream.format("pgchanges").option("maxChangesPerTrigger", 30).load(str(log.directory))
        writer = stream.writeStream.foreachBatch(take).option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination()

    run()
    assert [rows for _, rows, _ in batches] == [40, 40, 20]
    assert [transactions for _, _, transactions in batches] == [2, 2, 1]
    batches.clear()
    run()
    assert sum(rows for _, rows, _ in batches) == 0
    log.rows(7)
    batches.clear()
    run()
    assert [rows for _, rows, _ in batches] == [7]


def test_options_that_it_does_not_have_are_refused(spark: SparkSession, log: Log) -> None:
    log.rows(1)
    for option, message in (
        ("maxchangepertrigger", "has no option .maxchangepertrigger"),
        ("maxChangesPerTrigger", 'option "maxChangesPerTrigger" of pgchanges is for streams'),
        ("start", 'option "start" of pgchanges must be an LSN such as 16/B374D848, "earliest" or "latest", not "1"'),
    ):
        with pytest.raises(Exception, match=message):
            read(spark, log, **{option: "1"}).count()
    stream = spark.readStream.format("pgchanges").option("end", "0/1").load(str(log.directory))
    with pytest.raises(Exception, match='option "end" of pgchanges is for batches'):
        stream.writeStream.format("noop").start().processAllAvailable()


def test_a_url_is_not_a_directory() -> None:
    for path in ("http://bucket/log", "hdfs:/bucket/log"):
        for opened in (ChangeLog, Lake):
            with pytest.raises(StatementError, match="is not a directory"):
                opened(Path(path))


# --- damage, and segments that move -------------------------------------------------------------


def test_damage_fails_the_query(spark: SparkSession, log: Log) -> None:
    """In a trailer, which the driver reads, and in rows, which an executor reads."""
    log.rows(50)
    log.builder.restart()
    log.writer.seal()
    (path,) = log.directory.glob("*.changes")
    whole = path.read_bytes()
    for offset, damage in ((len(whole) - 9, len(whole) - TRAILER_SIZE), (len(whole) // 2, HEADER_SIZE)):
        damaged = bytearray(whole)
        damaged[offset] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(Exception, match=f"{path.name}.* is damaged at offset {damage}"):
            read(spark, log).count()
    path.write_bytes(whole)
    assert read(spark, log).count() == 50


def test_a_planned_piece_is_read_after_its_segment_is_sealed_but_not_removed(log: Log) -> None:
    log.rows(10)
    reader = ChangesReader({"path": str(log.directory)})
    partitions = reader.partitions()

    def count() -> int:
        return sum(batch.num_rows for partition in partitions for batch in reader.read(partition))

    log.builder.restart()
    log.writer.seal()
    assert count() == 10
    (path,) = log.directory.glob("*.changes")
    path.unlink()
    with pytest.raises(ChangeLogError, match=r"not in the change log .* any more"):
        count()


def test_a_micro_batch_that_is_planned_again_is_never_shorter(log: Log) -> None:
    """Spark plans it again after a crash of the machine, which can leave an older file "durable"."""
    first = log.rows(1)
    older = (log.directory / "durable").read_bytes()
    last = log.rows(1)
    stream = ChangesStreamReader({"path": str(log.directory)})
    offsets = [{"lsn": str(position)} for position in (START, last)]
    assert len(stream.partitions(offsets[0], offsets[1])) == 1
    (log.directory / "durable").write_bytes(older)
    with pytest.raises(ChangeLogError, match=f"the change log ends at {first}"):
        stream.partitions(offsets[0], offsets[1])


@pytest.mark.soak
def test_an_idle_stream_waits_and_wakes(spark: SparkSession, log: Log, tmp_path: Path) -> None:
    log.rows(1)
    seen: list[int] = []
    stream = spark.readStream.format("pgchanges").load(str(log.directory))
    query = (
        stream.writeStream.foreachBatch(lambda rows, _: seen.append(rows.count()))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    try:
        wait_for(seen, 1)
        asked = len(query.recentProgress)
        log.builder.note(Lsn(log.writer.position + 1000))  # a position without changes is no batch
        log.store([])
        time.sleep(1.5)
        assert len(query.recentProgress) - asked < 10
        assert seen == [1]
        log.source.position = log.writer.position
        log.rows(2)
        wait_for(seen, 2)
        assert seen == [1, 2]
        end = json.dumps({"lsn": str(log.writer.position)})
        until = time.monotonic() + 10
        while True:
            progress: Any = query.lastProgress
            source = progress["sources"][0]
            if (source["endOffset"], source["latestOffset"]) == (end, end):
                break
            assert time.monotonic() < until, source
            time.sleep(0.1)
    finally:
        query.stop()


def wait_for(seen: list[int], number: int) -> None:
    until = time.monotonic() + 60
    while len(seen) < number:
        assert time.monotonic() < until
        time.sleep(0.02)


PLAIN = """
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
print(spark.read.format("pgchanges").load("{directory}").count())
"""


@pytest.mark.soak
def test_plain_pyspark_finds_it_by_itself(log: Log, tmp_path: Path) -> None:
    """Nothing of ours is imported; a session of another program, so a process of its own."""
    log.rows(5)
    script = tmp_path / "plain.py"
    script.write_text(PLAIN.format(directory=log.directory))
    activated = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["python3", str(script)], capture_output=True, text=True, env=activated, check=False)
    assert done.stdout.strip() == "5", done.stderr[-2000:]
