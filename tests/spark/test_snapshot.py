"""`pgsnapshot`: exact or refused types, partitions that form the table, all as of one moment."""

from __future__ import annotations

import datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from subscriber.errors import SubscriberError
from subscriber.spark.sources.pgsnapshot import (
    COUNTED,
    SnapshotTable,
    exported_snapshot,
    register,
    rows_without_columns,
    to_arrow,
)
from tests.plugins.fix_cluster import Database

TYPES = """
CREATE TYPE mood AS ENUM ('x', 'y');
CREATE DOMAIN share AS numeric(5,2);
CREATE TABLE t (id int PRIMARY KEY, b bool, small int2, big int8, single float4, double float8, n numeric(12,3), s text,
    v varchar(10), c char(4), u uuid, j jsonb, bytes bytea, d date, ts timestamp, tz timestamptz, m mood, p share);
INSERT INTO t VALUES (1, true, -5, 9e15, 1.5, 'Infinity', 123456789.125, E'a\\n,"q" ü', ' ', 'ab',
    '05f1f420-b5df-40ee-aef1-5de8c52bc1f9', '{"a": 1}', '\\x00ff', '2020-02-29', '2020-01-01 01:02:03.456789',
    '1999-12-31 23:59:59.999999+02', 'y', 12.5);
INSERT INTO t (id) VALUES (2);
INSERT INTO t (id, s, v, c, bytes) VALUES (3, '', '', '', '');
"""
ROW = {
    "id": 1, "b": True, "small": -5, "big": 9 * 10**15, "single": 1.5, "double": float("inf"),
    "n": Decimal("123456789.125"), "s": 'a\n,"q" ü', "v": " ", "c": "ab  ",
    "u": "05f1f420-b5df-40ee-aef1-5de8c52bc1f9", "j": '{"a": 1}', "bytes": bytearray(b"\x00\xff"),
    "d": datetime.date(2020, 2, 29), "ts": datetime.datetime(2020, 1, 1, 1, 2, 3, 456789), "m": "y",
    "p": Decimal("12.50"),
}  # fmt: skip
SCHEMA = (
    "struct<id:int,b:boolean,small:smallint,big:bigint,single:float,double:double,n:decimal(12,3),s:string,v:string,"
    "c:string,u:string,j:string,bytes:binary,d:date,ts:timestamp_ntz,tz:timestamp,m:string,p:decimal(5,2)>"
)


def load(spark: SparkSession, **options: str) -> DataFrame:
    register(spark)
    return spark.read.format("pgsnapshot").options(**options).load()


async def test_types_are_exact(spark: SparkSession, source_db: Database) -> None:
    await source_db.execute(TYPES)
    frame = load(spark, conninfo=source_db.dsn(), table="public.t")
    assert frame.schema.simpleString() == SCHEMA
    first, second, third = frame.orderBy("id").collect()
    cells = first.asDict()
    moment = cells.pop("tz")  # as the session's time zone has it
    assert moment.astimezone(datetime.UTC).isoformat() == "1999-12-31T21:59:59.999999+00:00"
    assert cells == ROW
    assert set(second.asDict().values()) == {2, None}
    assert (third.s, third.v, third.c, third.bytes, third.u) == ("", "", "    ", bytearray(), None)


async def test_all_partitions_are_as_of_the_same_moment(spark: SparkSession, source_db: Database) -> None:
    await source_db.execute("CREATE TABLE t AS SELECT i AS id, 'x' AS s FROM generate_series(1, 5000) i")
    with exported_snapshot(source_db.dsn()) as snapshot:
        await source_db.execute("DELETE FROM t WHERE id > 10", "UPDATE t SET s = 'y'")
        frame = load(spark, **snapshot, table="public.t", partitions="4")
        by_id = load(spark, **snapshot, table="public.t", partitions="3", by="id")
        assert frame.selectExpr("count(*)", "count(DISTINCT id)", "max(s)").collect()[0] == (5000, 5000, "x")
        assert by_id.selectExpr("count(*)", "sum(id)").collect()[0] == (5000, 5000 * 5001 // 2)


async def test_the_server_chooses_columns_and_rows(source_db: Database) -> None:
    await source_db.execute("CREATE TABLE t AS SELECT i AS id, 'x' AS s, now() AS at FROM generate_series(1, 5000) i")
    with exported_snapshot(source_db.dsn()) as snapshot:
        for more in ({}, {"partitions": "3"}, {"partitions": "3", "by": "id"}):
            options = {**snapshot, "table": "public.t", "columns": "s", "where": "id = 7 OR id = 4000", **more}
            table = SnapshotTable(options)
            assert table.read_schema() == pa.schema([("s", pa.string())])
            rows = [batch.to_pydict() for part in table.partitions() for batch in table.read(part) if batch.num_rows]
            assert [value for row in rows for value in row["s"]] == ["x", "x"]
    with pytest.raises(SubscriberError, match=r'public\.t has no column "ids"') as caught:
        SnapshotTable({"conninfo": source_db.dsn(), "table": "public.t", "columns": "ids"}).read_schema()
    assert '"id"' in str(caught.value.hint)


async def test_the_server_counts_rows_without_columns(spark: SparkSession, source_db: Database) -> None:
    await source_db.execute("CREATE TABLE t AS SELECT i AS id, NULL::interval AS i FROM generate_series(1, 5000) i")
    with exported_snapshot(source_db.dsn()) as snapshot:
        for more, number in (({}, 5000), ({"partitions": "3"}, 5000), ({"where": "id > 4990", "by": "id"}, 10)):
            rows = load(spark, **snapshot, table="public.t", columns="", **more)
            assert (rows.columns, rows.count()) == ([], number)


def test_rows_without_columns_are_in_batches_of_limited_size() -> None:
    batches = list(rows_without_columns(2 * COUNTED + 1))
    assert [(batch.num_columns, batch.num_rows) for batch in batches] == [(0, COUNTED), (0, COUNTED), (0, 1)]
    assert not list(rows_without_columns(0))


async def test_partitions_are_planned_without_spark(source_db: Database) -> None:
    await source_db.execute("CREATE TABLE t AS SELECT i AS id FROM generate_series(1, 5000) i")
    with exported_snapshot(source_db.dsn()) as snapshot:
        assert len(SnapshotTable({**snapshot, "table": "t_missing", "partitions": "4"})._text) == 0
        assert len(SnapshotTable({**snapshot, "table": "public.t", "partitions": "4"}).partitions()) == 4
        assert len(SnapshotTable({**snapshot, "table": "public.t"}).partitions()) == 1
    # Several statements without a common snapshot would see several moments.
    assert len(SnapshotTable({"conninfo": source_db.dsn(), "table": "public.t", "partitions": "4"}).partitions()) == 1


async def test_a_table_or_a_snapshot_that_is_not_there(source_db: Database) -> None:
    await source_db.execute("CREATE TABLE orders (id int)")
    with exported_snapshot(source_db.dsn()) as snapshot:
        with pytest.raises(SubscriberError, match=r'relation "public\.order" does not exist') as missing:
            SnapshotTable({**snapshot, "table": "public.order"}).read_schema()
        table = SnapshotTable({**snapshot, "table": "public.orders"})
        assert table.read_schema().names == ["id"]
    assert missing.value.hint == 'Perhaps you meant "public.orders".'
    # The snapshot ends with the backend that has exported it.
    await source_db.wait_for(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state ~ 'in transaction'", 0
    )
    for name in (snapshot["snapshot"], "unknown"):
        with pytest.raises(SubscriberError, match="the server has no snapshot") as ended:
            SnapshotTable({**snapshot, "snapshot": name, "table": "public.orders"}).partitions()
        assert "exported_snapshot()" in str(ended.value.detail)


async def test_a_column_without_a_spark_type_is_refused_or_read_as_text(source_db: Database) -> None:
    await source_db.execute("CREATE TABLE t (id int, i interval, n numeric, r int4range, a int[])")
    options = {"conninfo": source_db.dsn(), "table": "public.t"}
    with pytest.raises(SubscriberError, match=r"Spark has no type for columns i, n, r, a of public\.t") as caught:
        SnapshotTable(options).read_schema()
    assert '.option("text", "i,n,r,a")' in str(caught.value.hint)
    assert SnapshotTable({**options, "text": "i, n,r,a"}).read_schema().field("r").type == pa.string()
    assert SnapshotTable({**options, "text": "*"}).read_schema().field("id").type == pa.int32()


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.date32(), "infinity"),
        (pa.date32(), "0044-03-15 BC"),
        (pa.timestamp("us"), "infinity"),
        (pa.decimal128(5, 2), "NaN"),
    ],
)
def test_a_value_that_its_type_cannot_hold_is_refused_by_column(kind: pa.DataType, value: str) -> None:
    schema = pa.schema([("id", pa.int32()), ("bad", kind)])
    with pytest.raises(SubscriberError, match='a value of column "bad" does not fit') as caught:
        to_arrow(f"1\t{value}\n".encode(), schema)
    assert value not in str(caught.value)


def test_null_is_not_the_empty_string() -> None:
    batch = to_arrow(b"\\N\n\nx\n", pa.schema([("a", pa.string())]))
    assert batch.to_pydict() == {"a": [None, "", "x"]}


async def test_a_refusal_reaches_whoever_asked_spark(spark: SparkSession, source_db: Database) -> None:
    await source_db.execute("CREATE TABLE t (id int, i interval)")
    with pytest.raises(PySparkException) as caught:
        load(spark, conninfo=source_db.dsn(), table="public.t")
    assert "Spark has no type for column i of public.t" in str(caught.value)


async def test_an_error_in_an_executor_names_the_column(spark: SparkSession, source_db: Database) -> None:
    await source_db.execute("CREATE TABLE t (id int, d date)", "INSERT INTO t VALUES (1, 'infinity')")
    with pytest.raises(PySparkException) as caught:
        load(spark, conninfo=source_db.dsn(), table="public.t").collect()
    assert 'a value of column "d"' in str(caught.value)
