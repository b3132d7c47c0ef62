"""Values in text and binary format, compared with asyncpg's result for the same rows."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from random import Random
from typing import Any

import asyncpg
import pytest

from subscriber import Insert, Lsn, SubscriberError, stream
from subscriber.change_stream.changes import Change
from subscriber.change_stream.rows import Row
from subscriber.quoting import identifier, literal
from tests.plugins.fix_cluster import Database

# type: values, as SQL literals
SCALARS: dict[str, list[str]] = {
    "bool": ["true", "false"],
    "int2": ["-32768", "32767"],
    "int4": ["-2147483648", "7"],
    "int8": ["-9223372036854775808", "9223372036854775807"],
    "oid": ["4294967295"],
    "float4": ["1.5", "'-Infinity'", "0.1"],
    "float8": ["-0.1", "'Infinity'", "1e308"],
    "numeric": ["0", "1.50", "-0.000123", "12345678901234567890.123456789", "1e30", "0.00001", "'Infinity'", "10000.0"],
    "numeric(12,3)": ["1234.5", "-0.001"],
    "text": ["''", "'tab\t quote '' ☃'", "'NULL'"],
    "varchar(9)": ["'vc'"],
    "char(4)": ["'ab'"],
    '"char"': ["'x'", "''", "'\\377'", "'\\'"],
    "name": ["'pg_class'"],
    "bytea": ["''", "'\\x00ff5c'"],
    "date": ["'2024-02-29'", "'0001-01-01'", "'infinity'", "'-infinity'"],
    "time": ["'01:02:03.4'", "'00:00'"],
    "timetz": ["'01:02:03.004+02'", "'23:59:59.999999-11:30'"],
    "timestamp": ["'2024-01-02 03:04:05.678'", "'1999-12-31 23:59:59.999999'", "'infinity'"],
    "timestamptz": ["'2024-01-02 03:04:05+02'", "'1899-01-01 00:00:00.5+00'"],
    "interval": [
        "'1 mon 2 days 03:00'",
        "'-1 year -2 mons 3 days -04:05:06.789'",
        "'0'",
        "'100:00:00.000001'",
        "'-00:00:00.5'",
    ],
    "uuid": ["'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'"],
    "json": ["'{\"a\": 1}'"],
    "jsonb": ["'{\"b\": [null]}'"],
    "inet": ["'10.0.0.1/8'", "'10.0.0.1'", "'::1'", "'fe80::1/64'"],
    "cidr": ["'10.0.0.0/8'", "'::/0'"],
    "bit(3)": ["'101'"],
    "varbit": ["'1011001110'", "''"],
    "point": ["'(1,2.5)'"],
    "line": ["'{1,-1,0.5}'"],
    "lseg": ["'((1,2),(3,-4e10))'"],
    "box": ["'((1,2),(3,4))'"],
    "path": ["'[(1,2),(3,4)]'", "'((1,2),(3,4))'"],
    "polygon": ["'((1,2),(3,4),(5,6))'"],
    "circle": ["'<(1,2),3.5>'"],
    "tid": ["'(1,2)'"],
    "xid": ["'7'"],
    "pg_lsn": ["'16/B374D848'"],
    "int4range": ["'[1,5)'", "'empty'", "'(,5)'", "'[1,)'", "'(,)'"],
    "numrange": ["'(1.5,2.50]'"],
    "tstzrange": ["'[2024-01-01 00:00+00,2024-02-01 00:00+00)'"],
    "daterange": ["'[2024-01-01,2024-02-01)'"],
    "int4multirange": ["'{[1,5),[7,9)}'", "'{}'"],
    "int4[]": ["'{1,NULL,3}'", "'{}'", "'{{1,2},{3,4}}'", "'[0:1]={5,6}'"],
    "text[]": ["ARRAY['x,y', NULL, 'NULL', '', 'a\"b\\c{}', 'ü']"],
    "bool[]": ["'{t,f}'"],
    "bytea[]": ["ARRAY['\\x00ff'::bytea, '\\x5c']"],
    "box[]": ["'{((1,2),(3,4));((5,6),(7,8))}'"],
    "timestamp[]": ["'{\"2024-01-02 03:04:05\"}'"],
    "int4range[]": ["'{\"[1,5)\",empty}'"],
    "mood": ["'sad'", "'o,k \"x\"'"],
    "mood[]": ["ARRAY['sad', NULL, 'o,k \"x\"']"],
    "positive": ["7"],
    "positive[]": ["'{7,8}'"],
    "pair": ["ROW(1, 'x y')", "ROW(NULL, '')", "ROW(-1, 'a\"b\\c,()')"],
    "pair[]": ["ARRAY[ROW(1, 'x \"y\"')::pair, NULL]"],
    "nest": ["ROW(ROW(1, 'a,\"b\"')::pair, ARRAY[1,2], 'sad', '[1,2)')"],
    "moodrange": ["moodrange('sad', 'o,k \"x\"', '[]')"],
    "odd": ["'{1,2}'"],
    "money": ["1.5"],
    "macaddr": ["'08:00:2b:01:02:03'"],
    "macaddr8": ["'08:00:2b:01:02:03:04:05'"],
    "macaddr[]": ["'{08:00:2b:01:02:03}'"],
    "tsvector": ["'a fat cat'", "$$a:1A,2B fat:3 cat:4C,5D 'it''s \\\\ :'$$", "''"],
    "tsquery": ["'fat & !cat'"],
    "oidvector": ["'1 2 4294967295'", "''"],
    "int2vector": ["'1 -2'"],
    "jsonpath": ["'$.a[*] ? (@ > 1)'"],
    "refcursor": ["'a cursor'"],
    "txid_snapshot": ["'10:20:10,14,15'", "'10:10:'"],
    "pg_snapshot": ["'10:20:10,14,15'"],
    "regclass": ["'pg_class'"],
    "regtype[]": ["'{int4,text}'"],
    "deep": ["ROW(ARRAY[ROW('[a]', '{x}')::brackets], '{\"[1,2)\"}', ROW('(', ']'))"],
}
SUBCLASSES = {"uuid", "pg_lsn"}  # one library's class is a subclass of the other's
CAST_DIFFERS = {"bool", "char(4)", "inet"}  # differs from the text of the output function
# Their binary values stay bytes, because only the server can interpret them. Object names are numbers.
NO_BINARY = {"money", "tsquery"}
NUMBERS = {"regclass": 1259, "regtype[]": [23, 25]}

TYPES = """
CREATE TYPE mood AS ENUM ('sad', 'o,k "x"');
CREATE DOMAIN positive AS int CHECK (VALUE > 0);
CREATE TYPE pair AS (a int, b text);
CREATE TYPE moodrange AS RANGE (subtype = mood);
CREATE TYPE nest AS (p pair, list int[], m mood, r int4range);
CREATE DOMAIN odd AS int[];
CREATE TYPE brackets AS (a text, b text);
CREATE TYPE deep AS (list brackets[], ranges int4range[], one brackets);
"""


def plain(value: Any) -> Any:
    """Convert asyncpg's value to our format: composites are dictionaries, and infinite times are in UTC."""
    if isinstance(value, asyncpg.Record):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [plain(part) for part in value]
    return value


async def inserted(db: Database, *, binary: bool) -> list[Row]:
    rows = []
    end = Lsn.parse(await db.value("SELECT pg_current_wal_lsn()::text"))
    async with stream(db.dsn(), slot="values", publications=["p"], until=end, binary=binary) as changes:
        async for transaction in changes:
            async for change in transaction:
                assert isinstance(change, Insert)
                rows.append(change.new)
    return rows


async def test_values_are_those_of_asyncpg(source_db: Database) -> None:
    columns = ", ".join(f"{identifier(name)} {name}" for name in SCALARS)
    await source_db.execute(
        TYPES, f"CREATE TABLE t (number int PRIMARY KEY, {columns})", "CREATE PUBLICATION p FOR TABLE t"
    )
    await source_db.execute("SELECT pg_create_logical_replication_slot('values', 'pgoutput')")
    count = max(len(values) for values in SCALARS.values())
    for number in range(count + 1):  # the last is NULL all over
        literals = [f"({v[number]})::{name}" if number < len(v) else "NULL" for name, v in SCALARS.items()]
        await source_db.execute(f"INSERT INTO t VALUES ({number}, {', '.join(literals)})")
    connection = await source_db.connect()
    records = await connection.fetch("SELECT * FROM t ORDER BY number")
    expected: list[dict[str, Any]] = [plain(record) for record in records]
    casts = ", ".join(f"{identifier(name)}::text" for name in SCALARS)
    texts: list[dict[str, str | None]] = [
        dict(zip(SCALARS, row, strict=True)) for row in await source_db.rows(f"SELECT {casts} FROM t ORDER BY number")
    ]
    for binary in (False, True):
        rows = await inserted(source_db, binary=binary)
        assert len(rows) == len(expected)
        for row, record, text in zip(rows, expected, texts, strict=True):
            for name in SCALARS:
                if binary and name in NO_BINARY and record[name] is not None:
                    assert isinstance(row[name], bytes)
                    continue
                if binary and name in NUMBERS and record[name] is not None:
                    assert row[name] == NUMBERS[name]
                    continue
                assert (name, row[name]) == (name, record[name])
                assert type(row[name]) is type(record[name]) or name in SUBCLASSES
                if name == "numeric" and row[name] is not None:  # with its scale
                    assert format(row[name], "f") == text[name]
                if not binary and name not in CAST_DIFFERS:
                    assert (name, row.text(name)) == (name, text[name])
            if not binary or all(row[name] is None for name in (*NO_BINARY, *NUMBERS)):
                assert row.dict() == {"number": row["number"], **{name: record[name] for name in SCALARS}}


async def test_values_of_extension_types_are_read(source_db: Database) -> None:
    await source_db.execute(
        "CREATE SCHEMA ext",
        "CREATE EXTENSION hstore SCHEMA ext",
        "CREATE EXTENSION citext SCHEMA ext",
        "CREATE TABLE t (id int PRIMARY KEY, c ext.citext, cs ext.citext[], h ext.hstore)",
        "CREATE PUBLICATION p FOR TABLE t",
        "SELECT pg_create_logical_replication_slot('values', 'pgoutput')",
        r"""INSERT INTO t VALUES (1, 'Ulm', '{a,NULL}', '"a\"\\"=>"1 2",b=>NULL'), (2, '', '{}', '')""",
    )
    written = [text for (text,) in await source_db.rows("SELECT h::text FROM t ORDER BY id")]
    for binary in (False, True):
        rows = await inserted(source_db, binary=binary)
        assert [(row["c"], row["cs"]) for row in rows] == [("Ulm", ["a", None]), ("", [])]
        assert [row["h"] for row in rows] == written


async def test_a_value_that_python_cannot_represent_stays_text(source_db: Database) -> None:
    await source_db.execute(
        "CREATE TABLE t (id int PRIMARY KEY, at date, clock time, tz timestamptz)",
        "CREATE PUBLICATION p FOR TABLE t",
        "SELECT pg_create_logical_replication_slot('values', 'pgoutput')",
        "INSERT INTO t VALUES (1, '20000-01-01', '24:00', 'infinity')",
    )
    for binary in (False, True):
        (row,) = await inserted(source_db, binary=binary)
        for name in ("at", "clock"):
            with pytest.raises(
                SubscriberError, match=f'column "{name}" of public.t cannot be a Python object'
            ) as caught:
                row[name]
            assert "20000" not in str(caught.value)
            with pytest.raises(SubscriberError, match="cannot be a Python object"):
                row.dict()
        assert row["tz"] == datetime.max.replace(tzinfo=UTC)
        if not binary:
            assert (row.text("at"), row.text("clock")) == ("20000-01-01", "24:00:00")
        else:
            assert row.is_binary("at")
            with pytest.raises(SubscriberError, match="sent in binary"):
                row.text("at")
            assert row.raw("at") == (6_574_365).to_bytes(4, "big")  # days since 2000: 45 cycles of 400 years


async def test_times_with_a_zone_do_not_depend_on_the_publishers(source_db: Database) -> None:
    await source_db.execute(
        "CREATE TABLE t (id int PRIMARY KEY, tz timestamptz)",
        "CREATE PUBLICATION p FOR TABLE t",
        "SELECT pg_create_logical_replication_slot('values', 'pgoutput')",
        f"ALTER DATABASE {source_db.name} SET timezone = 'Asia/Tokyo'",
        "INSERT INTO t VALUES (1, '9999-12-31 23:59:59+00'), (2, '0001-01-01 00:00+00')",
    )
    first, last = datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
    for binary in (False, True):
        rows = await inserted(source_db, binary=binary)
        assert [row["tz"] for row in rows] == [last, first]
        if not binary:
            assert rows[0].text("tz") == "9999-12-31 23:59:59+00"


PARTS = ["int4", "text", "numeric", "pieces", "int4range", "textrange", "int4[]", "text[]", "pieces[]", "textrange[]"]
SPECIAL = ["{", "}", ",", "(", ")", "[", "]", '"', "'", "\\", " ", "NULL", "null", "\t", "\n", "ü", "a"]


def nested_literal(random: Random, name: str, depth: int = 0) -> str:
    """Return a value of a type as an SQL expression."""
    if depth and random.random() < 0.1:
        return f"NULL::{name}"
    if name.endswith("[]"):
        size = random.choice((0, 1, 2, 3))
        elements = ", ".join(nested_literal(random, name[:-2], depth + 1) for _ in range(size))
        return f"ARRAY[{elements}]::{name}"
    match name:
        case "int4":
            return str(random.randint(-9, 99999))
        case "numeric":
            return f"{random.randint(-99, 99)}.{random.randint(0, 99)}"
        case "text":
            text = "".join(random.choice(SPECIAL) for _ in range(random.randint(0, 5)))
            return literal(text) + "::text"
        case "pieces":
            return f"ROW({', '.join(nested_literal(random, part, depth + 1) for part in PIECES)})::pieces"
        case "int4range":
            return random.choice(("'empty'::int4range", "int4range(2, 5, '[]')", "int4range(NULL, 3)"))
        case "textrange":
            low, high = sorted(nested_literal(random, "text") for _ in range(2))
            return f"textrange(least({low}, {high}), greatest({low}, {high}), '[]')"
    raise AssertionError(name)


PIECES = ["int4", "text", "text[]", "int4range", "textrange", "numeric"]


async def test_nested_values_are_the_same_in_text_and_in_binary(source_db: Database) -> None:
    """Both equal the values that asyncpg returns."""
    random = Random(int(os.environ.get("SUBSCRIBER_VALUES_SEED", "1")))
    columns = ", ".join(f"c{number} {name}" for number, name in enumerate(PARTS))
    await source_db.execute(
        "CREATE TYPE textrange AS RANGE (subtype = text)",
        f"CREATE TYPE pieces AS ({', '.join(f'p{number} {name}' for number, name in enumerate(PIECES))})",
        f"CREATE TABLE t (id int PRIMARY KEY, {columns})",
        "CREATE PUBLICATION p FOR TABLE t",
        "SELECT pg_create_logical_replication_slot('values', 'pgoutput')",
    )
    rows = (f"({n}, {', '.join(nested_literal(random, name) for name in PARTS)})" for n in range(300))
    await source_db.execute(f"INSERT INTO t VALUES {', '.join(rows)}")
    connection = await source_db.connect()
    records = [plain(record) for record in await connection.fetch("SELECT * FROM t ORDER BY id")]
    for binary in (False, True):
        for row, record in zip(await inserted(source_db, binary=binary), records, strict=True):
            for name in record:
                assert row[name] == record[name], (binary, name)


async def test_a_composite_with_another_shape_than_the_catalog_had(source_db: Database) -> None:
    """The publisher does not report that a type has changed. A new stream reads the catalog again."""
    await source_db.execute(
        "CREATE TYPE pair AS (a int)",
        "CREATE TABLE t (id int PRIMARY KEY, p pair)",
        "CREATE PUBLICATION p FOR TABLE t",
        "SELECT pg_create_logical_replication_slot('values', 'pgoutput')",
    )
    async with stream(source_db.dsn(), slot="values", publications=["p"]) as changes:
        await source_db.execute("INSERT INTO t VALUES (1, ROW(1))")
        assert new((await (await anext(changes)).changes())[0])["p"] == {"a": 1}
        await source_db.execute("ALTER TYPE pair ADD ATTRIBUTE b text CASCADE", "INSERT INTO t VALUES (2, ROW(2, 'x'))")
        row = new((await (await anext(changes)).changes())[0])
        with pytest.raises(SubscriberError, match="cannot be a Python object"):
            row["p"]
        assert row.text("p") == "(2,x)"
    *_, last = await inserted(source_db, binary=False)
    assert last["p"] == {"a": 2, "b": "x"}


def new(change: Change) -> Row:
    assert isinstance(change, Insert)
    return change.new
