"""The order of keys in Python is that of the server, in both formats."""

from __future__ import annotations

import random

import pytest

from subscriber.protocol.tuple_data import TupleData
from subscriber.ranges.key_types import KEY_TYPES
from subscriber.ranges.keys import KeyColumn, RangeKey
from tests.plugins.fix_cluster import Database

TEXTS = ["", "a", "A", "ab", "a b", "z", "ä", "Z", "~", "\u4e2d", "\U0001f600", "\uffff", "a'\\x"]
VALUES = {
    "bool": ["t", "f"],
    "bytea": ["\\x", "\\x00", "\\x5c27", "\\xff", "\\x00ff", "\\x61"],
    "bpchar": [*TEXTS, "q   "],
    "int2": ["0", "-32768", "32767"],
    "int4": ["0", "-2147483648", "2147483647"],
    "int8": ["0", "-9223372036854775808", "9223372036854775807", "7", "-7"],
    "oid": ["0", "1", "4294967295", "2147483648"],
    "numeric": [
        "0",
        "NaN",
        "-1",
        "1.0",
        "10000",
        "9999.9999",
        "1e-20",
        "-0.00012",
        "123456789012345678901.5",
        "1e300",
        "-1e300",
        "0.5",
        "1e-300",
    ],
    "time": ["00:00:00", "24:00:00", "23:59:59.999999", "12:30:00.5"],
    "uuid": [f"{digits}-0000-0000-0000-00000000000{digits[0]}" for digits in ("00000000", "ffffffff", "7fffffff")],
    "date": [
        *("2000-01-01", "-infinity", "infinity", "0044-03-15 BC", "0001-12-31 BC", "0001-01-01", "5874897-12-31"),
        *("4713-01-01 BC", "2024-02-29", "1900-02-28", "9999-12-31", "10000-01-01"),
    ],
    "timestamp": [
        *("2000-01-01", "-infinity", "infinity", "1999-12-31 23:59:59.999999", "0044-03-15 12:00:00.25 BC"),
        *("294276-12-31 23:59:59.999999", "4713-01-01 00:00:00 BC", "0001-01-01 00:00:00"),
    ],
    "timestamptz": [
        *("2000-01-01 00:00:00+00", "-infinity", "infinity", "1850-06-01 00:00:00.5+00", "0044-03-15 12:00:00 BC"),
        *("2024-10-27 00:30:00.123456+00", "2024-10-27 01:30:00.1+00", "294276-01-01 00:00:00"),
    ],
}


@pytest.mark.parametrize("oid", KEY_TYPES, ids=[kind.name for kind in KEY_TYPES.values()])
async def test_the_order_of_a_type(target_db: Database, oid: int) -> None:
    kind = KEY_TYPES[oid]
    name = kind.name.removeprefix("pg_catalog.")
    send = {"bool": "bool", "bpchar": "bpchar", "timestamp": "timestamp_", "timestamptz": "timestamptz_"}.get(
        name, name
    )
    send += "_" * (name in ("date", "time", "numeric", "uuid")) + "send"
    values = VALUES.get(name, TEXTS)
    key = RangeKey((KeyColumn("k", oid),))
    collate = ' COLLATE "C"' * kind.is_text
    async with target_db.connection() as connection:
        for zone in ("UTC", "Europe/Amsterdam", "Asia/Kathmandu"):
            await connection.execute(f"SET timezone = '{zone}'; SET datestyle = ISO; SET bytea_output = 'escape'")
            rows = await connection.fetch(
                f"SELECT format('%s', v) AS t, {send}(v) AS b FROM unnest($1::text[]::{name}[]) v ORDER BY v{collate}",
                random.Random(1).sample(values, len(values)),
            )
            texts = [key.of_row(["k"], TupleData.join(b"t", [row["t"].encode()])) for row in rows]
            binary = [key.of_row(["k"], TupleData.join(b"b", [row["b"]])) for row in rows]
            assert texts == binary
            assert sorted(texts) == texts
            assert len(set(texts)) == len(rows)
            # A condition names the same value.
            for row, text in zip(rows, texts, strict=True):
                equal = key.comparison("=", text, on_target=True).replace('("k"', '("v"').replace('"k" ', '"v" ')
                query = f"SELECT count(*) FROM (SELECT $1::text::{name} AS v) s WHERE {equal}"
                assert await connection.fetchval(query, row["t"]) == 1
                assert key.from_texts(key.texts(text)) == text
