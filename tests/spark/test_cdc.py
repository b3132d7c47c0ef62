"""pgcdc: the snapshot of tables and the changes after it, typed, from a real log."""

from __future__ import annotations

import decimal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, date, datetime
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from subscriber.changelog.consumers import read_consumers
from subscriber.changelog.storage import locked
from subscriber.errors import ApplyError, ChangeLogError, ServerError, StatementError, ValueUnsupported
from subscriber.lsn import Lsn
from subscriber.spark import write_snapshot
from subscriber.spark.lake.lake import Lake
from subscriber.spark.lake.load import load
from subscriber.spark.pgcdc import BATCH_OPTIONS, STREAM_OPTIONS, CdcQuery, CdcReader
from subscriber.spark.sources.table_snapshot import TableSnapshot
from tests.plugins.fix_cluster import Database
from tests.spark.scene import NAMES, Scene, archived
from tests.spark.test_lake import lake_rows

TYPED = """
CREATE TABLE typed (id int PRIMARY KEY, price numeric(10,2), tags text[], counts int[], doc jsonb, span interval,
                    raw bytea, day date, at timestamptz, big text);
ALTER TABLE typed ALTER big SET STORAGE EXTERNAL;
INSERT INTO typed VALUES (1, 1.5, '{a,"b \\"c\\"",NULL}', '{}', '{"a": 1}', '1 mon 02:00', '\\x00ff', '2030-01-02',
                          '2030-01-02 03:04:05.678901+00', repeat('big', 5000));
INSERT INTO typed (id) VALUES (2);
ALTER PUBLICATION p ADD TABLE typed;
"""


@pytest.fixture
async def scene(source_db: Database, tmp_path: Path) -> AsyncIterator[Scene]:
    async with archived(source_db, tmp_path) as scene:
        yield scene


def cdc(spark: SparkSession, scene: Scene, **options: str) -> DataFrame:
    return spark.read.format("pgcdc").options(**options).load(str(scene.directory / "log"))


def run(spark: SparkSession, scene: Scene, checkpoint: str = "checkpoint", **options: str) -> list[list[Row]]:
    """Read a stream to the end of the log. Returns the rows of each micro-batch."""
    batches: list[list[Row]] = []
    stream = spark.readStream.format("pgcdc").options(**options).load(str(scene.directory / "log"))
    writer = stream.writeStream.foreachBatch(lambda rows, _: batches.append(rows.orderBy("_seq").collect()))
    query: StreamingQuery = (
        writer.option("checkpointLocation", str(scene.directory / checkpoint)).trigger(availableNow=True).start()
    )
    query.awaitTermination()
    return [batch for batch in batches if batch]


async def snapshot(scene: Scene, *tables: str) -> Lsn:
    def write() -> Lsn:
        directory = scene.directory / "snapshot"
        return write_snapshot(scene.source.dsn(), log=scene.log.directory, directory=directory, tables=tables or None)

    return await anyio.to_thread.run_sync(write)


async def test_a_snapshot_and_its_changes_typed(scene: Scene, spark: SparkSession) -> None:
    await scene.source.execute(TYPED)
    position = await snapshot(scene, "public.typed", "public.pair")
    assert await snapshot(scene, "public.typed") == position  # it exists
    await scene.source.execute(
        "BEGIN; UPDATE typed SET price = 2, counts = '{1,NULL}' WHERE id = 1; UPDATE typed SET id = 3 WHERE id = 1;"
        "DELETE FROM typed WHERE id = 2; INSERT INTO typed (id, price) VALUES (2, 9.99); COMMIT;"
    )
    await scene.source.execute(
        "UPDATE pair SET value = -1 WHERE a = 1; TRUNCATE log, pair, typed",
        "INSERT INTO bag VALUES (77, 'x'); UPDATE bag SET b = 'y' WHERE a = 77",
    )
    await scene.archive()
    options = {"tables": "public.typed", "snapshot": str(scene.directory / "snapshot")}
    rows = [row for batch in run(spark, scene, **options) for row in batch]
    assert [row.op for row in rows] == ["r", "r", "u", "u", "d", "c", "t"]
    first: Any = rows[0].after
    assert (first.price, first.tags, first.counts) == (decimal.Decimal("1.50"), ["a", 'b "c"', None], [])
    assert (first.doc, first.span, bytes(first.raw)) == ('{"a": 1}', "1 mon 02:00:00", b"\x00\xff")
    assert (first.day, first.big) == (date(2030, 1, 2), "big" * 5000)
    assert first.at.astimezone(UTC) == datetime(2030, 1, 2, 3, 4, 5, 678901, UTC)
    changed, moved, deleted = rows[2], rows[3], rows[4]
    assert (changed.before, changed.after.counts, changed._unchanged) == (None, [1, None], ["big"])
    assert (moved.before.id, moved.after.id, moved.after.big, moved._unchanged) == (1, 3, None, ["big"])
    assert (deleted.before.id, deleted.after) == (2, None)
    assert [row._seq for row in rows] == sorted({row._seq for row in rows})
    assert rows[1]._lsn == position <= rows[2]._lsn == rows[5]._lsn < rows[6]._lsn
    assert (rows[0]._xid, rows[6]._table, rows[6].after) == (None, "public.typed", None)
    # A batch has the same rows, several tables have one field each, and modes have other columns.
    assert cdc(spark, scene, **options).orderBy("_seq").collect() == rows
    both: list[Any] = cdc(spark, scene, **{**options, "tables": "public.typed,public.pair"}).collect()
    (update,) = (row for row in both if (row._table, row.op) == ("public.pair", "u"))
    assert update.after["public.pair"].value == -1
    assert len(both) == len({row._seq for row in both}) == len(rows) + 50 + 2
    envelope = cdc(spark, scene, mode="debezium", **options).where("op = 'd'").select("before.id", "source.*").first()
    assert envelope is not None
    assert (envelope.id, envelope.table, envelope.txId) == (2, "typed", deleted._xid)
    with pytest.raises(Exception, match="REPLICA IDENTITY FULL"):
        cdc(spark, scene, mode="delta", **options)
    feed = cdc(spark, scene, mode="delta", tables="public.bag").select("a", "b", "_change_type").collect()
    assert {tuple(row) for row in feed} == {
        (77, "x", "insert"),
        (77, "x", "update_preimage"),
        (77, "y", "update_postimage"),
    }


async def test_limits_hold_and_kills_repeat_the_same_rows(scene: Scene, spark: SparkSession) -> None:
    await snapshot(scene, "public.pair")
    for number in range(3):
        await scene.source.execute(f"UPDATE pair SET value = 1000 * ({number} + 1) + a WHERE a <= 4")
    await scene.source.execute("UPDATE pair SET value = -value WHERE a <= 20")
    await scene.archive()
    options = {"tables": "public.pair", "snapshot": str(scene.directory / "snapshot"), "consumer": "pairs"}
    batches = run(spark, scene, maxChangesPerTrigger="30", **options)
    assert [len(batch) for batch in batches] == [30, 20, 12, 20]
    (consumer,) = read_consumers(scene.log.directory)
    assert (consumer.name, consumer.program) == ("pairs", "stream of pgcdc")
    assert batches[-2][-1]._lsn < consumer.position <= batches[-1][0]._lsn  # the last micro-batch may be repeated
    # Without the last commit, the checkpoint names the same rows again.
    commits = sorted((scene.directory / "checkpoint" / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    commits[-1].unlink()
    (commits[-1].parent / f".{commits[-1].name}.crc").unlink(missing_ok=True)
    assert run(spark, scene, maxChangesPerTrigger="1", **options) == [batches[-1]]
    await scene.source.execute("UPDATE pair SET value = 7 WHERE a = 1")
    await scene.archive()
    assert len(run(spark, scene, **options)) == 1
    assert read_consumers(scene.log.directory)[0].position > batches[-1][0]._lsn
    with pytest.raises(Exception, match="is not the name of a consumer"):
        run(spark, scene, "another", **{**options, "consumer": "a/b"})


@pytest.mark.soak
async def test_several_tasks_read_a_large_transaction(scene: Scene, spark: SparkSession) -> None:
    lake = Lake(scene.directory / "lake")
    await load(lake, scene.log, scene.source.dsn())
    await scene.source.execute(
        "BEGIN; INSERT INTO item (id, note, big) SELECT i, 'n', repeat('x', 1000) FROM generate_series(1000, 30999) i;"
        "UPDATE item SET note = 'm' WHERE id >= 1000; TRUNCATE bag, log, pair; INSERT INTO pair VALUES (1, 'b', 1);"
        "DELETE FROM item WHERE id % 3 = 0; COMMIT"
    )
    end = await scene.archive()
    query = CdcQuery({"path": str(scene.directory / "log"), "tables": "public.item,public.pair"}, BATCH_OPTIONS)
    pieces = [part.piece for part in CdcReader(query).partitions()]  # type: ignore[attr-defined]
    assert sum(piece.begin is not None for piece in pieces) > 2
    rows = cdc(spark, scene, tables="public.item,public.pair").orderBy("_seq").select("op", "_seq").collect()
    assert len({row._seq for row in rows}) == len(rows)
    operations = "".join(row.op for row in rows)
    deleted = await scene.source.value("SELECT count(*) FROM generate_series(1000, 30999) i WHERE i % 3 = 0")
    assert operations.startswith("c" * 30_000 + "u" * 30_000 + "tc" + "d" * deleted)
    batch = lake.next_batch(scene.log, end)
    assert batch is not None
    await anyio.to_thread.run_sync(lake.advance, spark, scene.log, *batch)
    assert lake_rows(lake) == {table: Counter(await scene.source.rows(f"SELECT * FROM {table}")) for table in NAMES}


@pytest.mark.soak
async def test_a_query_keeps_its_columns(scene: Scene, spark: SparkSession) -> None:
    """A column that is added later ends the query, or is in _rescued; afterwards, old rows have its default."""
    await snapshot(scene, "public.pair")
    options = {"tables": "public.pair", "snapshot": str(scene.directory / "snapshot")}
    await scene.source.execute("UPDATE pair SET value = 70 WHERE a = 1")
    await scene.archive()
    old = spark.readStream.format("pgcdc").options(rescue="true", **options).load(str(scene.directory / "log"))
    plain = spark.readStream.format("pgcdc").options(**options).load(str(scene.directory / "log"))
    await scene.source.execute("ALTER TABLE pair RENAME value TO worth; ALTER TABLE pair ADD more int DEFAULT 5")
    await scene.source.execute("UPDATE pair SET worth = 80 WHERE a = 1")
    await scene.archive()

    def rows(stream: DataFrame, checkpoint: str) -> list[Row]:
        collected: list[Row] = []
        writer = stream.writeStream.foreachBatch(lambda rows, _: collected.extend(rows.where("op = 'u'").collect()))
        writer = writer.option("checkpointLocation", str(scene.directory / checkpoint)).trigger(availableNow=True)
        query = writer.start()
        with suppress(Exception):
            query.awaitTermination()
        assert query.exception() is None or 'column "more" was added' in str(query.exception())
        return sorted(collected, key=lambda row: row._seq)

    assert [(row.after.value, row._rescued) for row in rows(old, "one")] == [(70, None), (80, {"more": "5"})]
    assert [row.after.value for row in rows(plain, "two")] == [70]
    again = spark.readStream.format("pgcdc").options(**options).load(str(scene.directory / "log"))
    assert [(row.after.worth, row.after.more) for row in rows(again, "two")] == [(80, 5)]
    whole = cdc(spark, scene, **options).where("op <> 'r' OR after.a = 1").orderBy("_seq").collect()
    assert [(row.after.worth, row.after.more) for row in whole] == [(1, 5), (70, 5), (80, 5)]
    await scene.source.execute("ALTER TABLE pair ALTER worth TYPE int USING worth + 1; UPDATE pair SET b = 'z'")
    await scene.archive()
    with pytest.raises(Exception, match="was rewritten"):
        cdc(spark, scene, **options).collect()


async def test_a_query_of_a_position_does_not_get_new_columns(scene: Scene) -> None:
    await scene.source.execute("UPDATE pair SET value = 70 WHERE a = 1")
    position = str(await scene.archive())
    await scene.source.execute("ALTER TABLE pair ADD more int", "UPDATE pair SET value = 80 WHERE a = 1")
    await scene.archive()
    options = {"path": str(scene.log.directory), "tables": "public.pair", "schemaPosition": position}
    reader = CdcReader(CdcQuery(options, BATCH_OPTIONS))
    with pytest.raises(ApplyError, match='column "more" was added') as raised:
        [row for part in reader.partitions() for row in reader.read(part)]
    hint = str(raised.value.hint)
    assert "leave out the option schemaPosition" in hint
    start = hint.rpartition('"')[0].rpartition('"')[2]
    reader = CdcReader(CdcQuery({"path": options["path"], "tables": "public.pair", "start": start}, BATCH_OPTIONS))
    rows = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
    assert [row["after"]["value"] for row in rows] == [80]


async def test_a_table_that_the_role_may_not_read(scene: Scene) -> None:
    await scene.source.execute("CREATE ROLE reads_nothing LOGIN REPLICATION")
    try:
        source = scene.source.server.dsn(scene.source.name, user="reads_nothing")
        write = partial(
            write_snapshot,
            source,
            log=scene.log.directory,
            directory=scene.directory / "snapshot",
            tables=["public.pair"],
        )
        with pytest.raises(ServerError, match="permission denied for table pair") as raised:
            await anyio.to_thread.run_sync(write)
        assert raised.value.command == 'GRANT SELECT ON "public"."pair" TO "reads_nothing";'
        await scene.source.execute(raised.value.command)
        await anyio.to_thread.run_sync(write)
    finally:
        await scene.source.execute("DROP OWNED BY reads_nothing", "DROP ROLE reads_nothing")


async def test_mistakes_are_named(scene: Scene) -> None:
    await scene.source.execute("INSERT INTO item VALUES (1000, 'NaN')")
    await scene.archive()
    for options, message in (
        ({"table": "public.item"}, 'Perhaps you meant "tables"'),
        ({}, 'needs the option "tables"'),
        ({"tables": "public.itme"}, 'no change of table "public.itme"\nHINT:  Perhaps you meant "public.item".'),
        ({"tables": "public.item", "text": "nubmer"}, 'option "text"\nHINT:  Perhaps you meant "number".'),
        ({"tables": "public.item", "start": "yesterday"}, 'an LSN such as .*, "earliest" or "latest", not "yesterday"'),
        ({"tables": "public.item", "schemaPosition": "now"}, 'option "schemaPosition" of pgcdc must be an LSN'),
        (
            {"tables": "public.item", "maxChangesPerTrigger": "1"},
            'option "maxChangesPerTrigger" of pgcdc is for streams',
        ),
        ({"tables": "public.item", "mode": "dleta"}, 'Perhaps you meant "delta"'),
        ({"tables": "public.item", "snapshot": str(scene.directory)}, "no complete snapshot"),
    ):
        with pytest.raises(StatementError, match=message):
            CdcQuery({"path": str(scene.log.directory), **options}, BATCH_OPTIONS).schema()
    with pytest.raises(StatementError, match='option "end" of pgcdc is for batches'):
        CdcQuery({"path": str(scene.log.directory), "tables": "public.item", "end": "0/1"}, STREAM_OPTIONS)
    assert CdcQuery({"path": str(scene.log.directory), "tables": "public.item", "text": "note"}, BATCH_OPTIONS).schema()
    await snapshot(scene, "public.item")

    def rows(**options: str) -> list[dict[str, Any]]:
        source = {"path": str(scene.log.directory), "tables": "public.item", **options}
        reader = CdcReader(CdcQuery(source, {*source}))
        return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]

    with pytest.raises(ValueUnsupported, match="item") as raised:
        rows()
    assert '.option("text", "public.item.number")' in str(raised.value.hint)
    assert rows(text="number")[-1]["after"]["number"] == "NaN"
    assert (rows(rescue="true")[-1]["after"]["number"], rows(rescue="true")[-1]["_rescued"]) == (
        None,
        [("number", "NaN")],
    )
    file = next((scene.directory / "snapshot").glob("*.copy"))
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(StatementError, match="is damaged"):
        rows(snapshot=str(scene.directory / "snapshot"))
    with pytest.raises(StatementError, match=r'"public\.bags" is not published'):
        write_snapshot(
            scene.source.dsn(), log=scene.log.directory, directory=scene.directory / "other", tables="public.bags"
        )
    with pytest.raises(StatementError, match="no complete snapshot"):
        TableSnapshot.read(scene.directory / "other")
    for directory, kind, message in (
        (scene.log.directory, StatementError, "has a change log\nHINT:  Choose another directory for the snapshot"),
        (file / "below", ChangeLogError, "could not write the snapshot in .*: Not a directory"),
    ):
        with pytest.raises(kind, match=message):
            write_snapshot(scene.source.dsn(), log=scene.log.directory, directory=directory)
    with locked(scene.directory / "other" / "lock"), pytest.raises(StatementError, match="another process writes"):
        write_snapshot(scene.source.dsn(), log=scene.log.directory, directory=scene.directory / "other")
