"""Keys whose order only the publisher knows: ranges of texts with collations of ICU."""

from __future__ import annotations

from subscriber.publisher import ranges as queries
from subscriber.publisher.connection import Publisher
from subscriber.ranges.keys import Key
from tests.plugins.fix_cluster import Database

TABLE = """
CREATE COLLATION loose (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
CREATE TABLE t (a text COLLATE "de-x-icu", b varchar COLLATE loose, PRIMARY KEY (a, b));
INSERT INTO t SELECT (ARRAY['a', 'Ä', 'z', 'Z', 'é', ''])[i % 6 + 1], chr(97 - 32 * (i % 2) + i % 26) || i
  FROM generate_series(1, 300) i;
CREATE PUBLICATION p FOR TABLE t;
"""


async def test_each_row_is_in_one_range(source_db: Database) -> None:
    await source_db.execute(TABLE)
    publisher = await Publisher.connect(source_db.dsn(), application_name="test")
    try:
        table = await publisher.table("public", "t", ["p"])
        key = await queries.printed_range_key(publisher, table, ["p"])
        low: Key | None = None
        keys = list[tuple[str | None, ...]]()
        ranges = 0
        while not ranges or low is not None:
            await publisher.begin_snapshot()
            high = await queries.boundary(publisher, table, key, key.condition(low, None), 7)
            await publisher.commit()
            keys += await publisher.session.rows(f"SELECT a, b FROM public.t WHERE {key.condition(low, high)}")
            low, ranges = high, ranges + 1
    finally:
        publisher.session.abort()
    assert ranges == 300 // 7 + 1
    assert len(keys) == 300
    assert set(keys) == set(await source_db.rows("SELECT a, b FROM t"))
