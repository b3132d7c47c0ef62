"""Values of many types are replicated exactly, in text and binary format, copied and followed."""

from __future__ import annotations

import pytest

from tests.scenarios.conftest import Pair

TYPES = (
    "CREATE TYPE mood AS ENUM ('sad', 'it''s ok', 'happy')",
    "CREATE TYPE pair AS (a int, b text, c numeric)",
    "CREATE DOMAIN positive AS int CHECK (VALUE > 0)",
    "CREATE DOMAIN short AS varchar(5)",
    "CREATE TYPE spans AS RANGE (subtype = text)",
    "CREATE COLLATION other (provider = libc, locale = 'C')",
)
# type -> SQL expressions; NULL is tried for each
VALUES = {
    "smallint": ["-32768", "0"],
    "integer": ["2147483647"],
    "bigint": ["-9223372036854775808"],
    "numeric": ["'NaN'", "'Infinity'", "1.10", "-0.000000000000000000001", "1e100"],
    "numeric(10,2)": ["12345678.90"],
    "real": ["'NaN'", "'-Infinity'", "1.1", "1e-40"],
    "double precision": ["0.1::float8 + 0.2", "1e-310", "'-0'"],
    "money": ["12.34"],
    "boolean": ["true", "false"],
    "text": ["''", "'NULL'", "E'tab\\tline\\nend\\\\.'", "'ünïcødé 漢字 🐘'", "repeat('x', 100000)"],
    "varchar(5)": ["'ab   '"],
    "char(5)": ["'ab'"],
    '"char"': ["'x'", "''"],
    "name": ["'a name'"],
    "bytea": [r"'\x00ff5c27'", "''", r"decode(repeat('00ff', 50000), 'hex')"],
    "date": ["'infinity'", "'4713-01-01 BC'", "'2024-02-29'"],
    "time": ["'24:00:00'", "'12:34:56.789012'"],
    "timetz": ["'12:34:56.789+05:30'"],
    "timestamp": ["'infinity'", "'0044-03-15 12:00:00.123456 BC'"],
    "timestamptz": ["'-infinity'", "'2024-06-01 12:00:00.5 America/New_York'"],
    "interval": ["'1 year 2 months -3 days 04:05:06.789'", "'-infinity'"],
    "uuid": ["'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'"],
    "json": ['\'{"a" : [1, null,  "x"] }\''],
    "jsonb": ['\'{"a" : [1, null,  "x\\u00e9"] }\'', "'null'"],
    "jsonpath": ["'$.a[*] ? (@ > 1)'"],
    "inet": ["'10.0.0.1/8'", "'::1'"],
    "cidr": ["'10.0.0.0/8'"],
    "macaddr": ["'08:00:2b:01:02:03'"],
    "bit(4)": ["B'0101'"],
    "varbit": ["B''", "B'1'"],
    "point": ["'(1.5,-2)'"],
    "polygon": ["'((0,0),(1,1),(1,0))'"],
    "circle": ["'<(0,0),2>'"],
    "tsvector": ["'''fat'':1A ''cat'':2'"],
    "tsquery": ["'fat & !cat'"],
    "pg_lsn": ["'16/B374D848'"],
    "txid_snapshot": ["'10:20:10,14'"],
    "int4range": ["'empty'", "'[1,5)'", "'(,)'"],
    "tstzmultirange": ["'{[2024-01-01,2024-02-01),[2024-03-01,)}'"],
    "spans": ["'[a,\"b,c\")'"],
    "int[]": ["'{}'", "'{1,NULL,3}'", "'[0:1][2:3]={{1,2},{3,4}}'"],
    "text[]": ["ARRAY['a,b', '\"', 'NULL', NULL, '']"],
    "mood": ["'it''s ok'"],
    "mood[]": ["'{sad,happy}'"],
    "positive": ["7"],
    "positive[]": ["'{1,2}'"],
    "short": ["'abcde'"],
    "pair": ["ROW(1, 'a,\"b\"', 2.50)", "ROW(NULL, NULL, NULL)"],
    "pair[]": ["ARRAY[ROW(1, 'x', NULL)::pair]"],
    'text COLLATE "other"': ["'ä'"],
    "oid": ["4294967295"],
}
# Types that COPY and the stream cannot have as binary, or only between equal OIDs (arrays and composites
# of types that were created, whose binary form names the element type's OID).
TEXT_ONLY = {"mood[]", "positive[]", "pair[]", "pair"}


async def values_of(pair: Pair) -> dict[str, list[str]]:
    """VALUES that both servers know."""
    if min(await pair.source.major(), await pair.target.major()) >= 17:
        return VALUES
    return VALUES | {"interval": [value for value in VALUES["interval"] if "infinity" not in value]}


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
async def test_values_of_every_type_are_replicated(pair: Pair, binary: bool) -> None:
    values = {t: v for t, v in (await values_of(pair)).items() if not (binary and t in TEXT_ONLY)}
    columns = ", ".join(f"c{number} {name}" for number, name in enumerate(values))
    await pair.both(*TYPES)
    await pair.both(f"CREATE TABLE t (id int PRIMARY KEY, {columns})")
    most = max(len(expressions) for expressions in values.values())

    def row(number: int) -> str:
        chosen = [v[number] if number < len(v) else "NULL" for v in values.values()]
        return f"({number}, {', '.join(chosen)})"

    rows = ", ".join(row(number) for number in range(most + 1))
    await pair.source.execute(f"INSERT INTO t VALUES {rows}")
    await pair.subscribe("FOR TABLE t", binary=binary)
    await pair.assert_same("SELECT t::text FROM t ORDER BY id")
    await pair.change(
        "CREATE TEMP TABLE again AS SELECT * FROM t; UPDATE again SET id = id + 100; INSERT INTO t SELECT * FROM again"
    )
    await pair.change("UPDATE t SET id = id + 1000 WHERE id < 100", "DELETE FROM t WHERE id = 1000")
    await pair.assert_same("SELECT t::text FROM t ORDER BY id")


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
async def test_rows_are_found_by_values_of_many_types(pair: Pair, binary: bool) -> None:
    """REPLICA IDENTITY FULL: each type that has an equality is searched by."""
    without_equality = {"json", "point", "polygon", "circle", "jsonpath", "txid_snapshot"}
    left_out = without_equality | TEXT_ONLY if binary else without_equality
    values = {t: v for t, v in (await values_of(pair)).items() if t not in left_out}
    await pair.both(*TYPES)
    tables = {name: f"t{number}" for number, name in enumerate(values)}
    for name, table in tables.items():
        await pair.both(f"CREATE TABLE {table} (v {name}, n int); ALTER TABLE {table} REPLICA IDENTITY FULL")
    await pair.subscribe("FOR ALL TABLES", binary=binary, copy_data=False)
    for name, table in tables.items():
        rows = ", ".join(f"({v}, {n})" for n, v in enumerate([*values[name], "NULL"]))
        await pair.source.execute(f"INSERT INTO {table} VALUES {rows}", f"UPDATE {table} SET n = n + 10")
        await pair.source.execute(f"DELETE FROM {table} WHERE n = 10")
    await pair.caught_up()
    for table in tables.values():
        await pair.assert_same(f"SELECT t::text FROM {table} t ORDER BY n")


async def test_the_publishers_settings_do_not_matter(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY, d timestamptz, i interval, f float8, b bytea)")
    name = pair.source.name
    await pair.source.execute(
        f"ALTER DATABASE {name} SET datestyle = 'SQL, DMY'",
        f"ALTER DATABASE {name} SET intervalstyle = 'sql_standard'",
        f"ALTER DATABASE {name} SET extra_float_digits = -3",
        f"ALTER DATABASE {name} SET bytea_output = 'escape'",
        f"ALTER DATABASE {name} SET timezone = 'Asia/Kolkata'",
    )
    await pair.target.execute(f"ALTER DATABASE {pair.target.name} SET datestyle = 'SQL, MDY'")
    values = r"'2024-03-04 05:06:07.891234+00', '1 year -2 days -03:04:05', 0.1::float8 + 0.2, '\x00ff'"
    await pair.source.execute(f"INSERT INTO t VALUES (1, {values})")
    await pair.subscribe("FOR TABLE t")
    await pair.change(f"INSERT INTO t VALUES (2, {values})")
    query = (
        "SELECT id, extract(epoch FROM d), extract(epoch FROM i), f = 0.1::float8 + 0.2,"
        " encode(b, 'hex') FROM t ORDER BY id"
    )
    await pair.assert_same(query)
    assert {row[3] for row in await pair.rows(query)} == {True}
