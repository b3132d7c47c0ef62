"""Values of all types, in text and binary format: found, stored, refused."""

from __future__ import annotations

import pytest

from subscriber.errors import ServerError
from subscriber.protocol.messages import ReplicaIdentity
from tests.plugins.fix_cluster import Database
from tests.targets.conftest import Applier, Table

FULL = ReplicaIdentity.FULL


KEYS = [
    ("numeric(5,2)", "1.005", "1.01", "1.004"),
    ("timestamp(0)", "2024-01-01 00:00:00.6", "2024-01-01 00:00:01", "2024-01-01 00:00:00.4"),
    ("timestamptz(0)", "2024-01-01 00:00:00.6+00", "2024-01-01 00:00:01+00", "2024-01-01 00:00:00.4+00"),
    ("time(1)", "10:00:00.06", "10:00:00.1", "10:00:00.04"),
    ("interval(0)", "00:00:00.6", "00:00:01", "00:00:00.4"),
    ("char(5)", "ab", "ab   ", "ac"),
    ("varchar(5)", "ab", "ab", "ac"),
    ("text", "ab", "ab", "ac"),
    ("name", "ab", "ab", "ac"),
    ('"char"', "a", "a", "b"),
    ("bool", "t", "true", "f"),
    ("oid", "16384", "16384", "1"),
    ("regclass", "pg_catalog.pg_class", "pg_catalog.pg_class", "pg_catalog.pg_type"),
    ("regtype", "integer", "int4", "text"),
    ("float8", "0.1", "0.1", "NaN"),
    ("bytea", "\\x0001", "\\x0001", "\\x00"),
    (
        "uuid",
        "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
        "A0EEBC999C0B4EF8BB6D6BB9BD380A11",
        "b0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
    ),
    ("date", "2024-02-29", "2024-02-29", "2024-03-01"),
    ("timetz", "10:00:00+02", "10:00:00+02", "10:00:00+01"),
    ("inet", "10.0.0.1", "10.0.0.1", "10.0.0.2"),
    ("cidr", "10.0.0.0/8", "10.0.0.0/8", "11.0.0.0/8"),
    ("macaddr", "08:00:2b:01:02:03", "08-00-2b-01-02-03", "08:00:2b:01:02:04"),
    ("bit(3)", "101", "101", "111"),
    ("varbit(5)", "101", "101", "1011"),
    ("jsonb", '{"a": 1}', '{"a":1}', "{}"),
    ("money", "$1.50", "$1.50", "$2.00"),
    ("pg_lsn", "0/10", "0/10", "0/11"),
    ("int4range", "[1,3)", "[1,2]", "[1,4)"),
    ("int4multirange", "{[1,3)}", "{[1,2]}", "{[1,4)}"),
    ("int[]", "{1,NULL}", "{1,NULL}", "{1}"),
    ("varchar(3)[]", "{abc}", "{abc}", "{abd}"),
    ("numeric(5,2)[]", "{1.5}", "{1.50}", "{1.6}"),
    ("tsvector", "'a' 'b'", "'b' 'a'", "'a'"),
    ("mood", "happy", "happy", "sad"),
    ("mood[]", "{happy}", "{happy}", "{sad}"),
    ("pair", "(1,x)", "(1,x)", "(1,y)"),
    ("short", "ab", "ab", "ac"),
    ("price", "1.005", "1.01", "1.004"),
    ("moods", "{happy}", "{happy}", "{sad}"),
    ("nonempty", "happy", "happy", "sad"),
    ("xid8", "5", "5", "6"),
    ("xid", "5", "5", "6"),
    ("tid", "(0,1)", "(0,1)", "(0,2)"),
]
TYPES = (
    "CREATE TYPE mood AS ENUM ('sad', 'happy'); CREATE TYPE pair AS (a int, b text);"
    " CREATE DOMAIN short AS varchar(3); CREATE DOMAIN price AS numeric(5,2) CHECK (VALUE > 0);"
    " CREATE DOMAIN moods AS mood[]; CREATE DOMAIN nonempty AS mood NOT NULL"
)


async def test_values_of_all_kinds_are_found(db: Database, applier: Applier) -> None:
    """Written as the publisher writes it, a value is found as the target stores it, and no other is."""
    await db.execute(TYPES)
    for number, (type_name, sent, stored, other) in enumerate(KEYS):
        await db.execute(
            f"CREATE TABLE t{number} (a {type_name}, b text)",
            f"INSERT INTO t{number} VALUES ('{other.replace(chr(39), chr(39) * 2)}', 'other'),"
            f" ('{stored.replace(chr(39), chr(39) * 2)}', 'x')",
        )
        t = Table(f"t{number}", "a", "b", identity=FULL)
        await applier.apply(t.insert(sent, "y"), t.update(sent, "z", old=(sent, "x")), t.delete(sent, "y"))
        assert applier.missing == [], type_name
        rows_read = await db.rows(f"SELECT (SELECT count(*) FROM t{number} WHERE b = 'z'), count(*) FROM t{number}")
        assert rows_read == [(1, 2)], type_name


async def test_binary_values_are_found_and_stored(db: Database, applier: Applier) -> None:
    await db.execute(TYPES)
    for number, (type_name, _, stored, other) in enumerate(KEYS):
        if type_name in ("pair", "mood[]", "moods"):
            continue  # carries the OIDs of user-defined types, which are others on the publisher
        literal = stored.replace("'", "''")
        await db.execute(
            f"CREATE TABLE t{number} (a {type_name}, b text)",
            f"INSERT INTO t{number} VALUES ('{other.replace(chr(39), chr(39) * 2)}', 'other')",
        )
        connection = await db.connect()
        out = bytearray()

        async def write(data: bytes, out: bytearray = out) -> None:
            out.extend(data)

        await connection.copy_from_query(f"SELECT '{literal}'::{type_name}", output=write, format="binary")
        value = bytes(out[19 + 2 + 4 : -2])
        t = Table(f"t{number}", "a", "b", identity=FULL)
        await applier.apply(t.insert(value, b"x"), t.insert(value, b"y"))
        await applier.apply(t.update(value, "z", old=(value, "x")), t.delete(value, b"y"))
        assert applier.missing == [], type_name
        rows = f"SELECT count(*) FROM t{number} WHERE a::text = '{literal}'::{type_name}::text AND b = 'z'"
        assert await db.value(rows) == 1, type_name


async def test_binary_arrays_and_composites(db: Database, applier: Applier) -> None:
    await db.execute("CREATE TYPE pair AS (a int, b text)", "CREATE TABLE t (k int PRIMARY KEY, a int[], p pair)")
    array = bytes.fromhex("00000001 00000000 00000017 00000002 00000001 00000004 00000007 00000004 00000009")
    pair = bytes.fromhex("00000002 00000017 00000004 00000005 00000019 00000001") + b"x"
    t = Table("t", "k*", "a", "p")
    await applier.apply(t.insert(b"\0\0\0\1", array, pair), t.insert("2", "{1}", "(6,y)"))
    await applier.apply(t.update(b"\0\0\0\2", array, pair, old=(b"\0\0\0\2", None, None)))
    assert await db.rows("SELECT k, a, (p).a, (p).b FROM t ORDER BY k") == [(1, [7, 9], 5, "x"), (2, [7, 9], 5, "x")]


async def test_binary_data_of_another_type_is_refused(db: Database, applier: Applier) -> None:
    await db.execute("CREATE TABLE t (a int PRIMARY KEY)")
    with pytest.raises(ServerError) as caught:
        await applier.apply(Table("t", "a*").insert(b"\0" * 8))
    assert caught.value.sqlstate == "22P03"


@pytest.mark.parametrize(
    ("type_name", "value", "message"),
    [
        ("varchar(3)", "abcd", "value too long for type character varying(3)"),
        ("char(3)", "abcd", "value too long for type character(3)"),
        ("bit(3)", "1010", "bit string length 4 does not match type bit(3)"),
        ("numeric(3,1)", "123.4", "numeric field overflow"),
        ("int", "x", 'invalid input syntax for type integer: "x"'),
        ("mood", "unknown", 'invalid input value for enum mood: "unknown"'),
        ("short", "abcd", "value too long for type character varying(3)"),
        ("price", "-1", 'value for domain price violates check constraint "price_check"'),
    ],
)
@pytest.mark.parametrize("operation", ["insert", "update"])
async def test_a_value_that_does_not_fit_is_an_error(
    db: Database, applier: Applier, type_name: str, value: str, message: str, operation: str
) -> None:
    await db.execute(TYPES, f"CREATE TABLE t (k int PRIMARY KEY, a {type_name})", "INSERT INTO t VALUES (1, NULL)")
    t = Table("t", "k*", "a")
    change = t.insert("2", value) if operation == "insert" else t.update("1", value)
    with pytest.raises(ServerError) as caught:
        await applier.apply(change)
    assert caught.value.message.replace("public.", "") == message
    assert await db.rows("SELECT k, a::text FROM t") == [(1, None)]
