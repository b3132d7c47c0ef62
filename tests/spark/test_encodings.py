"""Spark's executors between databases of different encodings."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from subscriber.comparison.comparison import verify
from subscriber.demo.compare import compare
from subscriber.demo.servers import Server
from subscriber.spark.copy.job import copy_tables
from tests.environment.test_encodings import TEXT
from tests.plugins.fix_cluster import fresh_database
from tests.plugins.fix_subscriber import running_subscriber

TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"
CONTENTS = "SELECT id, encode(convert_to(v, getdatabaseencoding()), 'hex') FROM t ORDER BY id"
E_ACUTE = "636166e9"  # café in LATIN1
CHINESE = "c4e3c5c6"  # two characters in EUC_TW


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("here", "there", "text", "stored"),
    [
        ("SQL_ASCII", "SQL_ASCII", E_ACUTE, E_ACUTE),
        ("LATIN1", "SQL_ASCII", E_ACUTE, E_ACUTE),
        ("LATIN1", "UTF8", E_ACUTE, "636166c3a9"),
        ("EUC_TW", "EUC_TW", CHINESE, CHINESE),
        ("MULE_INTERNAL", "LATIN1", "63616681e9", E_ACUTE),
    ],
)
async def test_rows_are_copied_and_compared(
    publisher: Server, target: Server, spark: SparkSession, here: str, there: str, text: str, stored: str
) -> None:
    async with fresh_database(publisher, here) as source, fresh_database(target, there) as ours:
        await source.execute(TABLE, TEXT.format(encoding=here), "CREATE PUBLICATION p FOR TABLE t")
        await source.execute(f"INSERT INTO t SELECT n, text_of('{text}') FROM generate_series(1, 3000) n")
        await ours.execute(TABLE)
        async with running_subscriber(ours) as launcher:
            await launcher.create(source, "p", enabled=False)
            await copy_tables(ours.dsn(), "s", spark=spark, part_bytes=64 * 1024)
            await launcher.execute("ALTER SUBSCRIPTION s ENABLE")
            await launcher.wait_for_ready(source, timeout=60)
            assert await ours.rows(CONTENTS) == [(number, stored) for number in range(1, 3001)]
            same = await verify(ours.dsn(), "s")
            assert same.is_same
            async for result in compare(source.dsn(), ours.dsn()):
                assert not result.differs, result
            await source.execute("INSERT INTO t VALUES (0, 'new')")
            await source.wait_for_catchup("s")
            await ours.execute("UPDATE t SET v = 'other' WHERE id = 7")
            found = await verify(ours.dsn(), "s")
            assert [list(table.changed) for table in found.tables] == [[("7",)]]
