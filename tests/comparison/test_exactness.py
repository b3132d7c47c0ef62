"""Values of all types: a comparison finds each planted difference, and no other.

The rows of both sides are written by the test, because replication does not produce most differences.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import asyncpg
import pytest

from subscriber.cli.commands.verify import describe, describe_table
from subscriber.comparison.comparison import verify
from subscriber.comparison.result import Comparison, TableComparison
from tests.differential import kinds, tables
from tests.plugins.fix_cluster import Database, ServerOf, fresh_database
from tests.plugins.fix_subscriber import running_subscriber
from tests.scenarios.conftest import Pair

pytestmark = pytest.mark.usefixtures("with_schema")

EXCHANGED = [f"exchanged_{n}" for n in range(12)]  # tables with two rows, which exchange a value
ON_TARGET = "SET session_replication_role = replica"


@dataclass(frozen=True)
class Values:
    """A column of both sides, and a value of each. `same`: the target's value is the one that replication writes."""

    what: str
    types: tuple[str, str]  # the publisher's, the target's
    values: tuple[str, str]  # SQL expressions
    same: bool = False
    since: int = 0  # major version of the publisher that can compare the row. An earlier one reports the table


def alike(what: str, type_name: str, one: str, other: str) -> Values:
    return Values(what, (type_name, type_name), (one, other))


def mapped(what: str, source: str, target: str, one: str, other: str, *, same: bool = True, since: int = 0) -> Values:
    return Values(what, (source, target), (one, other), same, since)


PLANTED = (
    alike("NULL and an empty text", "text", "NULL", "''"),
    alike("NULL and the text NULL", "text", "NULL", "'NULL'"),
    alike("trailing blanks of a text", "text", "'a'", "'a '"),
    alike("trailing blanks of a varchar", "varchar(5)", "'a '", "'a'"),
    alike("char(n)", "char(5)", "'ab'", "'ac'"),
    alike("case", "text", "'a'", "'A'"),
    alike("composed characters", "text", r"U&'\00e9'", r"U&'e\0301'"),
    alike("a zero with a sign", "float8", "'-0'", "'0'"),
    alike("a zero with a sign, float4", "float4", "'-0'", "'0'"),
    alike("NaN", "float8", "'NaN'", "'Infinity'"),
    alike("NaN of a numeric", "numeric", "'NaN'", "NULL"),
    alike("the last bit of a float8", "float8", "0.3", "0.1::float8 + 0.2"),
    alike("the scale of a numeric", "numeric", "1.0", "1.00"),
    alike("the halves of a bigint", "bigint", "1", "4294967296"),
    alike("the halves of a timestamp", "timestamptz", "'2000-01-01 00:00:00.000001Z'", "'2000-01-01 01:11:34.967296Z'"),
    alike("the halves of a time", "time", "'00:00:00.000001'", "'01:11:34.967296'"),
    alike("digits of a numeric", "numeric", "1e-30", "0"),
    alike("the scale within jsonb", "jsonb", "'{\"a\": 1.0}'", "'{\"a\": 1.00}'"),
    alike("null of jsonb", "jsonb", "'null'", "NULL"),
    alike("blanks of json", "json", "'{\"a\":1}'", "'{\"a\": 1}'"),
    alike("a composite value of NULLs", "pair", "ROW(NULL, NULL)", "NULL"),
    alike("a composite value with an empty text", "pair", "ROW(1, NULL)", "ROW(1, '')"),
    alike("an array of NULL", "int[]", "ARRAY[NULL]::int[]", "'{}'"),
    alike("the bounds of an array", "int[]", "'{1,2}'", "'[0:1]={1,2}'"),
    alike("the dimensions of an array", "int[]", "'{1,2}'", "'{{1,2}}'"),
    alike("a microsecond", "timestamptz", "'2024-01-01 00:00:00.000001Z'", "'2024-01-01Z'"),
    alike("equal intervals", "interval", "'1 mon'", "'30 days'"),
    alike("equal times with time zone", "timetz", "'12:00+00'", "'12:00+01'"),
    alike("an empty range", "int4range", "'empty'", "'[1,2)'"),
    alike("bit strings", "varbit", "B'0'", "B'00'"),
    alike("bytes", "bytea", r"'\x00'", r"'\x0000'"),
    alike("an enum", "mood", "'sad'", "'ok'"),
    alike("a large value out of line", "text", f"repeat('x', {10**6})", f"repeat('x', {10**6 - 1}) || 'y'"),
    alike("inet with its mask", "inet", "'10.0.0.1/32'", "'10.0.0.1/31'"),
    # Columns with another type on the target. Some targets cannot hold the publisher's value.
    mapped("a longer integer", "int", "bigint", "-1", "-1"),
    mapped("an integer out of range", "bigint", "int", "3000000000", "-1294967296", same=False),
    mapped("an integer as a numeric", "int", "numeric(10,2)", "5", "5"),
    mapped("a numeric with fewer digits", "numeric", "numeric(10,2)", "1.005", "1.01"),
    mapped("a numeric out of range", "numeric", "numeric(4,2)", "100.5", "0.5", same=False),
    mapped("NaN as numeric(n,m)", "numeric", "numeric(10,2)", "'NaN'", "'NaN'"),
    mapped("varchar as text", "varchar(9)", "text", "'ab '", "'ab '"),
    mapped("a text that is too long", "text", "varchar(3)", "'abcd'", "'abc'", same=False),
    mapped("blanks that are too long", "text", "varchar(3)", "'abc  '", "'abc'"),
    mapped("a text that is too long for char(n)", "text", "char(3)", "'abcd'", "'abc'", same=False),
    mapped("a text as char(n)", "text", "char(3)", "'a'", "'a'"),
    mapped("char(n) as text", "char(4)", "text", "'ab'", "'ab  '"),
    mapped("char(n) as text without its blanks", "char(4)", "text", "'ab'", "'ab'", same=False),
    mapped("char(n) as a longer one", "char(2)", "char(4)", "'ab'", "'ab'"),
    mapped("texts of an array that are too long", "text[]", "varchar(3)[]", "'{abcd}'", "'{abc}'", same=False),
    mapped("a bit string that is too long", "varbit", "varbit(2)", "B'101'", "B'10'", same=False),
    mapped("float4 as float8", "float4", "float8", "0.1", "0.1"),
    mapped("float4 as float8, computed", "float4", "float8", "0.1", "0.1::float4::float8", same=False),
    mapped("json as jsonb", "json", "jsonb", '\'{"b" :1, "a":2}\'', '\'{"a": 2, "b": 1}\''),
    mapped("a timestamp as a date", "timestamp", "date", "'2024-01-01 12:00'", "'2024-01-01'"),
    mapped("an enum as text", "mood", "text", "'it''s'", "'it''s'"),
    mapped("a text as an enum", "text", "mood", "'sad'", "'sad'"),
    mapped("a domain", "small", "int", "7", "7"),
    mapped("a text that is no integer", "text", "int", "'1x'", "1", same=False, since=16),
    mapped("a text that is no jsonb", "text", "jsonb", "'{'", "'{}'", same=False, since=16),
)


async def compared(pair: Pair, *, same: bool = False) -> dict[str, TableComparison]:
    comparison = await verify(pair.target.dsn(), "s")
    return {table.name.removeprefix("public."): table for table in _checked(comparison, same=same).tables}


def _checked(found: Comparison, *, same: bool) -> Comparison:
    assert found.is_same is same, "\n".join(describe(found))
    return found


async def on_target(pair: Pair, *statements: str) -> None:
    async with pair.target.connection() as connection:
        for statement in (ON_TARGET, *statements):
            await connection.execute(statement)


async def subscribe(pair: Pair, publication: str = "FOR ALL TABLES") -> None:
    await pair.subscribe(publication, copy_data="false")
    await pair.subscriber.wait_for_ready(pair.source)


@pytest.fixture
async def pair(source_db: Database, target_db: Database) -> AsyncIterator[Pair]:
    async with running_subscriber(target_db) as subscriber:
        yield Pair(source_db, target_db, subscriber)


@pytest.fixture(params=[(p, t) for p in (13, 15, 18, 19) for t in (14, 18, 19)], ids="{0[0]}-to-{0[1]}".format)
async def versions(request: pytest.FixtureRequest, server_of: ServerOf) -> AsyncIterator[Pair]:
    publisher, target = request.param
    async with (
        fresh_database(server_of("publisher", publisher)) as source,
        fresh_database(server_of("target", target)) as database,
        running_subscriber(database) as subscriber,
    ):
        yield Pair(source, database, subscriber)


async def all_types(pair: Pair) -> list[tuple[str, list[str]]]:
    """Create the types of tests/differential. Returns the types that both servers have, and values of each."""
    majors = await pair.source.major(), await pair.target.major()
    types = [*tables.TYPES, *kinds.TYPES]
    if min(majors) < 14:
        types = [statement.replace(", multirange_type_name = many_spans", "") for statement in types]
    await pair.both(*types)
    known = []
    for kind in kinds.KINDS:
        values = [f"{value}::{kind.type}" for value in [*kind.values, *kind.alike]]
        if kind.type == '"char"' and min(majors) < 16:  # an earlier version reads another byte
            values.pop()
        try:
            for side in (pair.source, pair.target):
                for value in values:
                    await side.rows(f"SELECT ({value})::text")
        except asyncpg.PostgresError:  # a later version's type or value, or XML, which some servers do not have
            continue
        known.append((kind.type, values))
    return known


async def check_all_types(pair: Pair) -> None:
    """A table with a column of each type. Each row differs in one column."""
    known = await all_types(pair)
    columns = ", ".join(f"c{n} {type_name}" for n, (type_name, _) in enumerate(known))
    await pair.both(f"CREATE TABLE every (id int PRIMARY KEY, {columns})")
    width = max(len(values) for _, values in known)

    def row(number: int) -> list[str]:
        return ["NULL" if number % (width + 1) == width else v[number % (width + 1) % len(v)] for _, v in known]

    rows = [f"({number}, {', '.join(row(number))})" for number in range(len(known))]
    insert = [f"INSERT INTO every VALUES {values}" for values in rows]
    await pair.source.execute(*insert)
    await on_target(pair, *insert)
    await subscribe(pair)
    await compared(pair, same=True)
    for place, (type_name, values) in enumerate(known):
        present = row(place)[place]
        others = [value for value in values if value != present] or ["NULL"]
        planted = others[place % len(others)] if present != "NULL" else values[0]
        await on_target(pair, f"UPDATE every SET c{place} = {planted} WHERE id = {place}  -- {type_name}")
    by_table = (await compared(pair))["every"]
    assert by_table.changed == {(str(place),): (f"c{place}",) for place in range(len(known))}
    assert (by_table.missing, by_table.extra) == ([], [])
    assert len(known) > 80 or min(await pair.source.major(), await pair.target.major()) < 18


async def check_planted(pair: Pair) -> None:
    """A table for each planted difference, because a value that cannot be converted stops the comparison of a table."""
    await pair.both(*tables.TYPES)
    for number, planted in enumerate(PLANTED):
        for side, type_name, value in zip((pair.source, pair.target), planted.types, planted.values, strict=True):
            create = f"CREATE TABLE p{number} (id int PRIMARY KEY, v {type_name})"
            rows = f"INSERT INTO p{number} VALUES (1, NULL), (2, {value})"
            await side.execute(create, rows)
    await subscribe(pair)
    by_table = await compared(pair)
    version = await pair.source.major()
    for number, planted in enumerate(PLANTED):
        table = by_table[f"p{number}"]
        assert table.is_same is planted.same, (planted.what, table)
        if version < planted.since:
            assert "cannot be converted" in (table.note or ""), (planted.what, table)
        elif not planted.same:
            assert (table.changed, table.missing, table.extra) == ({("2",): ("v",)}, [], []), planted.what


async def check_rows(pair: Pair) -> None:
    """Differences that are not those of one value."""
    await pair.both(
        "CREATE TABLE keyed (id int PRIMARY KEY, a int, b text)",
        "INSERT INTO keyed SELECT i, i, 'b' || i FROM generate_series(1, 500) i",
        *(f"CREATE TABLE {name} (id int PRIMARY KEY, a int, b text)" for name in EXCHANGED),
        *(f"INSERT INTO {name} VALUES (1, {n}, 'x'), (2, {n + 1}, 'y')" for n, name in enumerate(EXCHANGED)),
        "CREATE TABLE counted (a int, b text)",
        "INSERT INTO counted SELECT 1, 'b' FROM generate_series(1, 3)",
        "CREATE TABLE computed (id int PRIMARY KEY, a int, b int GENERATED ALWAYS AS (a * 2) STORED)",
        "INSERT INTO computed SELECT i, i FROM generate_series(1, 100) i",
        "CREATE TABLE composite_key (a int, b text, v int, PRIMARY KEY (a, b))",
        "INSERT INTO composite_key SELECT i, i::text, i FROM generate_series(1, 100) i",
        "CREATE TABLE filtered (id int PRIMARY KEY, a int, hidden text)",
        "CREATE TABLE truncated (id int PRIMARY KEY)",
        "INSERT INTO truncated SELECT generate_series(1, 100)",
        'CREATE TABLE "Odd "" name" ("a b" int PRIMARY KEY, """" text)',
        'INSERT INTO "Odd "" name" VALUES (1, $$it\'s$$)',
        "CREATE TABLE empty (id int PRIMARY KEY)",
        "CREATE TABLE negative (id bigint PRIMARY KEY, a int)",
        "INSERT INTO negative SELECT i, i FROM generate_series(-3000, 3000) i",
        "CREATE TABLE sparse (id bigint PRIMARY KEY, a int)",
        "INSERT INTO sparse VALUES (-9223372036854775808, 1), (0, 1), (4294967296, 2), (9223372036854775807, 1)",
    )
    await pair.source.execute(
        "CREATE TABLE parts (id int, region int, PRIMARY KEY (id, region)) PARTITION BY LIST (region)",
        *(f"CREATE TABLE parts_{n} PARTITION OF parts FOR VALUES IN ({n})" for n in (1, 2)),
        "INSERT INTO parts SELECT i, 1 + i % 2 FROM generate_series(1, 100) i",
        "INSERT INTO filtered SELECT i, i, 'source' FROM generate_series(1, 100) i",
        "CREATE TABLE only_source (id int PRIMARY KEY)",
        "CREATE TABLE key_twice (id int PRIMARY KEY, a int)",
        "INSERT INTO key_twice VALUES (1, 1), (2, 2)",
        "CREATE TABLE wider_key (id int PRIMARY KEY, a int)",
        "INSERT INTO wider_key SELECT i, i FROM generate_series(1, 100) i",
    )
    await pair.target.execute(
        "CREATE TABLE parts (id int, region int, PRIMARY KEY (id, region)) PARTITION BY RANGE (id)",
        "CREATE TABLE parts_low PARTITION OF parts FOR VALUES FROM (0) TO (50)",
        "CREATE TABLE parts_high PARTITION OF parts FOR VALUES FROM (50) TO (200)",
        "INSERT INTO parts SELECT i, 1 + i % 2 FROM generate_series(1, 100) i",
        "INSERT INTO filtered SELECT i, i, 'target' FROM generate_series(1, 50) i",
        "CREATE TABLE only_source (id int PRIMARY KEY)",
        "CREATE TABLE key_twice (id int, a int)",
        "INSERT INTO key_twice VALUES (1, 1), (2, 2)",
        "CREATE TABLE wider_key (id bigint PRIMARY KEY, a int)",
        "INSERT INTO wider_key SELECT i, i FROM generate_series(1, 100) i",
    )
    named = "keyed, counted, computed, composite_key, truncated, empty, parts, key_twice, only_source, negative, sparse"
    named += ", wider_key"
    publication = f'FOR TABLE {named}, {", ".join(EXCHANGED)}, "Odd "" name"'
    if await pair.source.major() >= 15:
        publication += ", filtered (id, a) WHERE (id <= 50)"
    await subscribe(pair, f"{publication} WITH (publish_via_partition_root)")
    await compared(pair, same=True)
    await pair.target.execute("DROP TABLE only_source")
    await on_target(
        pair,
        "DELETE FROM keyed WHERE id = 5",
        "INSERT INTO keyed VALUES (501, 1)",
        "UPDATE keyed SET id = 502 WHERE id = 6",
        # The checksum of a group of rows is a sum of the rows' hashes, which must not be sums themselves.
        *(f"UPDATE {name} SET a = {2 * n + 1} - a" for n, name in enumerate(EXCHANGED)),
        "DELETE FROM counted WHERE ctid = (SELECT min(ctid) FROM counted)",
        "UPDATE computed SET a = 0 WHERE id = 7",
        "UPDATE composite_key SET v = 0 WHERE a = 8",
        "DELETE FROM composite_key WHERE a = 9",
        "TRUNCATE truncated",
        'UPDATE "Odd "" name" SET """" = NULL',
        "UPDATE parts SET id = 160 WHERE id = 40 AND region = 1",
        "DELETE FROM parts WHERE id = 10",
        "INSERT INTO key_twice VALUES (2, 2)",
        "INSERT INTO filtered VALUES (51, 51)",
        "UPDATE filtered SET hidden = 'x', a = 0 WHERE id = 3",
        "INSERT INTO empty VALUES (1)",
        "UPDATE negative SET a = 0 WHERE id IN (-3000, -1, 2047)",
        "DELETE FROM negative WHERE id IN (-2048, 3000)",
        "INSERT INTO negative VALUES (-3001), (3001)",
        "UPDATE sparse SET a = 0 WHERE id = -9223372036854775808",
        "UPDATE sparse SET id = id - 1 WHERE id = 9223372036854775807",
        "UPDATE wider_key SET a = 0 WHERE id = 50",
        "INSERT INTO wider_key VALUES (101)",
    )
    by_table = await compared(pair)
    assert sorted(by_table["keyed"].missing) == [("5",), ("6",)]
    assert by_table["keyed"].changed == {}
    assert sorted(by_table["keyed"].extra) == [("501",), ("502",)]
    for name in EXCHANGED:
        assert by_table[name].changed == {("1",): ("a",), ("2",): ("a",)}
    assert (by_table["counted"].missing_count, by_table["counted"].extra_count) == (1, 0)
    assert by_table["computed"].changed == {("7",): ("a",)}  # a generated column is not published
    assert by_table["composite_key"].changed == {("8", "8"): ("v",)}
    assert by_table["composite_key"].missing == [("9", "9")]
    assert (by_table["truncated"].missing_count, by_table["truncated"].target_rows) == (100, 0)
    assert by_table['Odd " name'].changed == {("1",): ('"',)}
    assert (by_table["parts"].missing_count, by_table["parts"].extra) == (2, [("160", "1")])
    assert (by_table["key_twice"].extra, by_table["key_twice"].changed) == ([("2", "2")], {})  # no unique index
    assert "does not exist" in (by_table["only_source"].note or "")
    assert by_table["empty"].extra == [("1",)]
    assert by_table["negative"].changed == dict.fromkeys([("-3000",), ("-1",), ("2047",)], ("a",))
    assert sorted(by_table["negative"].missing) == [("-2048",), ("3000",)]
    assert sorted(by_table["negative"].extra) == [("-3001",), ("3001",)]
    assert by_table["sparse"].changed == {("-9223372036854775808",): ("a",)}
    assert by_table["sparse"].missing == [("9223372036854775807",)]
    assert by_table["sparse"].extra == [("9223372036854775806",)]
    assert (by_table["wider_key"].changed, by_table["wider_key"].extra) == ({("50",): ("a",)}, [("101",)])
    if "filtered" in by_table:
        assert (by_table["filtered"].extra, by_table["filtered"].changed) == ([("51",)], {("3",): ("a",)})


async def test_a_comparison_finds_differences_in_values_of_every_type(pair: Pair) -> None:
    await check_all_types(pair)


async def test_a_comparison_finds_exactly_the_planted_values(pair: Pair) -> None:
    await check_planted(pair)


async def test_a_comparison_finds_the_different_rows_of_generated_tables(pair: Pair) -> None:
    await check_rows(pair)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("check", [check_all_types, check_planted, check_rows], ids=lambda check: check.__name__)
async def test_a_comparison_of_servers_of_different_versions_is_exact(
    versions: Pair, check: Callable[[Pair], Awaitable[None]]
) -> None:
    await check(versions)


async def test_a_table_that_is_no_longer_published(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)")
    await subscribe(pair, "FOR TABLE t, u")
    await compared(pair, same=True)
    await pair.source.execute("ALTER PUBLICATION p DROP TABLE u")
    by_table = await compared(pair)
    assert {name: table.is_same for name, table in by_table.items()} == {"t": True, "u": False}


def test_checksums_that_differ_without_a_different_row() -> None:
    table = TableComparison("public.t", 5, 5, unexplained_buckets=1)
    assert not table.is_same
    assert "1 group with different checksums" in describe_table(table)
