"""Columns of composite types: their texts become structs exactly, also after ALTER TYPE."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import anyio.to_thread
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import Row, SparkSession

from subscriber.change_stream.types.containers import composite_fields
from subscriber.changelog.piece_reader import LoggedChange, read
from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.schema_history import SCHEMA, LoggedAttribute, LoggedType, TableVersion, store_versions
from subscriber.errors import ApplyError, ValueUnsupported
from subscriber.protocol.messages import Insert, RelationColumn
from subscriber.publisher.connection import Publisher
from subscriber.publisher.table_versions import read_types
from subscriber.spark import apply_changes, write_snapshot
from subscriber.spark.sources.cdc_tables import CdcTable, Misfit, table_candidates
from subscriber.spark.sources.column_types import column_array, column_type, extends
from subscriber.spark.tables.iceberg import configured_catalog
from tests.archive.test_worker import archive_until_now, archiving
from tests.plugins.fix_cluster import Database

TYPES = """
CREATE TYPE small AS (a int, b text);
CREATE TYPE large AS (t text, n numeric(12,2), s small, l int[], many small[], raw bytea, ok bool, words text[]);
"""
INT, TEXT, NUMERIC, INTS, BYTEA, BOOL, TEXTS = 23, 25, 1700, 1007, 17, 16, 1009


def attributes(*found: tuple[str, int]) -> tuple[LoggedAttribute, ...]:
    modifiers = {NUMERIC: ((12 << 16) | 2) + 4}
    return tuple(LoggedAttribute(name, kind, modifiers.get(kind, -1)) for name, kind in found)


SMALL = LoggedType(20001, attributes(("a", INT), ("b", TEXT)))
MANY = LoggedType(20002, element=20001)
LARGE = LoggedType(
    20003,
    attributes(
        *(("t", TEXT), ("n", NUMERIC), ("s", 20001), ("l", INTS), ("many", 20002)),
        *(("raw", BYTEA), ("ok", BOOL), ("words", TEXTS)),
    ),
)
LARGES = LoggedType(20004, element=20003)

texts = st.one_of(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8),
    st.text("\",\\(){}[] \t\n'NULL", max_size=8),
)
integers = st.integers(-(2**31), 2**31 - 1)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


def record(kind: LoggedType, *fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(*map(maybe, fields)).map(
        lambda values: dict(zip([attribute.name for attribute in kind.attributes], values, strict=True))
    )


smalls = record(SMALL, integers, texts)
larges = record(
    LARGE,
    texts,
    st.decimals(-(10**9), 10**9, places=2),
    smalls,
    st.lists(maybe(integers), max_size=3),
    st.lists(maybe(smalls), max_size=3),
    st.binary(max_size=5),
    st.booleans(),
    st.lists(maybe(texts), max_size=3),
)


def as_tuple(value: Any) -> Any:
    """Return a value as asyncpg takes it."""
    if isinstance(value, dict):
        return tuple(as_tuple(field) for field in value.values())
    return [as_tuple(member) for member in value] if isinstance(value, list) else value


@pytest.fixture
async def database(source_db: Database) -> Database:
    await source_db.execute(TYPES)
    return source_db


async def test_texts_of_composites_are_converted_exactly(database: Database) -> None:
    """The server prints random values, and compares the struct of the text with the value."""
    connection = await database.connect()
    kind = column_type(RelationColumn(False, "v", LARGES.oid, -1), [SMALL, MANY, LARGE, LARGES])
    assert pa.types.is_struct(kind.value_type)
    examples: list[list[Any]] = []

    @settings(max_examples=150, database=None)
    @given(st.lists(maybe(larges), max_size=4))
    def collect(value: list[Any]) -> None:
        examples.append(value)

    collect()
    for value in examples:
        text = await connection.fetchval("SELECT $1::large[]::text", as_tuple(value))
        (rows_read,) = column_array(pa.array([text.encode()], pa.binary()), kind, "t.v").to_pylist()
        assert rows_read == value, text
        assert await connection.fetchval(
            "SELECT $1::large[] IS NOT DISTINCT FROM $2", as_tuple(rows_read), as_tuple(value)
        )
        for composite, written in zip(
            value, await connection.fetchval("SELECT $1::large[]::text[]", as_tuple(value)), strict=True
        ):
            if composite is not None:
                single = column_array(pa.array([written.encode(), None], pa.binary()), kind.value_type, "t.v")
                assert single.to_pylist() == [composite, None]


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (b"()", [None]),
        (b"(,)", [None, None]),
        (b'("",)', [b"", None]),
        (b'("a ""b"" \\\\ c",d)', [b'a "b" \\ c', b"d"]),
        (b'("(1,""x"")","{1,2}")', [b'(1,"x")', b"{1,2}"]),
    ],
)
def test_the_fields_of_a_composite_text_are_split(text: bytes, fields: list[bytes | None]) -> None:
    assert composite_fields(text) == fields


@pytest.mark.parametrize("text", [b"(1,x,more)", b"1", b'("', b"(", b""])
def test_a_text_that_does_not_fit(text: bytes) -> None:
    kind = column_type(RelationColumn(False, "v", SMALL.oid, -1), [SMALL])
    with pytest.raises(ValueUnsupported, match=r"t\.v"):
        column_array(pa.array([text], pa.binary()), kind, "t.v")


def test_only_a_type_with_added_fields_extends_another() -> None:
    small, large = (
        column_type(RelationColumn(False, "v", kind.oid, -1), [SMALL, MANY, LARGE]) for kind in (SMALL, LARGE)
    )
    longer = pa.struct([*small, ("c", pa.int32())])
    renamed = pa.struct([("z", pa.int32()), ("b", pa.string())])
    assert extends(small, longer)
    assert extends(pa.list_(small), pa.list_(longer))
    assert extends(small, renamed)
    assert not extends(longer, small)
    assert not extends(small, pa.string())
    assert not extends(small, large)


# --- the schema history -------------------------------------------------------------------------

TABLE = """
CREATE TABLE t (id serial PRIMARY KEY, v small, many small[], told text);
CREATE PUBLICATION p FOR TABLE t;
"""
# `told` has the attributes as they are when the row is inserted.
INSERT = """
INSERT INTO t (v, many, told) SELECT v, ARRAY[v, NULL], row_to_json(v)
FROM (SELECT json_populate_record(NULL::small, '{}') AS v) x
"""


def insert(names: Sequence[str], number: int) -> str:
    fields = json.dumps({name: number * 10 + place for place, name in enumerate(names)})
    return INSERT.format(fields)


def logged(log: ChangeLog) -> list[LoggedChange]:
    return [
        change
        for piece in log.pieces(log.start(), log.end())
        for change in read(log.directory, piece)
        if isinstance(change.message, Insert)
    ]


def candidates(directory: Path) -> list[CdcTable]:
    return list(table_candidates(ChangeLog(directory), "public.t", None, as_text=frozenset(), rescue=False))


def check(table: CdcTable, changes: list[LoggedChange]) -> tuple[int, int]:
    """Check all rows that a query with the columns of `table` reads. Returns the number of read and of refused rows."""
    column = next(column for column in table.columns if column.name == "v")
    read_rows = refused = 0
    for change in changes:
        fit = table.fit(change.begin.final_lsn)
        assert isinstance(change.message, Insert)
        _, v, many, told, *_ = change.message.new.split()[1]
        assert told is not None
        if isinstance(fit, Misfit):
            refused += 1
            continue
        try:
            (rows_read,) = column_array(pa.array([v], pa.binary()), column.kind, "t.v").to_pylist()
        except ValueUnsupported:
            refused += 1
            continue
        read_rows += 1
        if not isinstance(rows_read, dict):
            continue
        assert present(rows_read) == present(json.loads(told)), (table, change)
        (several,) = column_array(pa.array([many], pa.binary()), pa.list_(column.kind), "t.many").to_pylist()
        assert several == [rows_read, None]
    return read_rows, refused


def present(fields: dict[str, Any]) -> dict[str, str]:
    """Return the attributes that are not null. `z` was the name of `b` later."""
    return {"b" if name == "z" else name: str(value) for name, value in fields.items() if value is not None}


def kinds(directory: Path) -> list[str]:
    return [str(table.columns[1].kind) for table in reversed(candidates(directory))]


async def test_altered_types_are_versions_of_the_table(database: Database, tmp_path: Path) -> None:
    """The publisher sends no description when a type is altered."""
    await database.execute(TABLE)

    async def stored(number: int) -> None:
        with anyio.fail_after(60):
            while len(logged(ChangeLog(tmp_path))) < number:
                await anyio.sleep(0.02)

    async with archiving(database, tmp_path):
        await database.execute(insert(["a", "b"], 1))
        await stored(1)
        await database.execute("ALTER TYPE small ADD ATTRIBUTE c int", insert(["a", "b", "c"], 2))
        await stored(2)
        await database.execute("ALTER TYPE small RENAME ATTRIBUTE b TO z", insert(["a", "z", "c"], 3))
        await stored(3)
    first, second = "struct<a: int32, b: string>", "struct<a: int32, b: string, c: int32>"
    assert kinds(tmp_path) == [first, second, second.replace("b:", "z:")]
    newest, before, oldest = candidates(tmp_path)
    changes = logged(ChangeLog(tmp_path))
    assert check(newest, changes) == check(before, changes) == (3, 0)
    assert check(oldest, changes) == (1, 2)
    misfit = oldest.fit(changes[1].begin.final_lsn)
    assert isinstance(misfit, Misfit)
    assert misfit.reason == 'an attribute was added to the composite type of column "v"'
    # The same number of attributes, but others.
    async with archiving(database, tmp_path):
        await database.execute(insert(["a", "z", "c"], 4))
        await stored(4)
        await database.execute("ALTER TYPE small DROP ATTRIBUTE a, ADD ATTRIBUTE d int", insert(["z", "c", "d"], 5))
        await stored(5)
    assert kinds(tmp_path)[-1] == "string"
    changes = logged(ChangeLog(tmp_path))
    newest, before, *_ = candidates(tmp_path)
    assert check(newest, changes) == (5, 0)
    assert check(before, changes) == (4, 1)
    misfit = before.fit(changes[4].begin.final_lsn)
    assert isinstance(misfit, Misfit)
    assert misfit.reason == 'the composite type of column "v" has a dropped attribute'


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 12))])
async def test_no_row_is_read_wrong(database: Database, tmp_path: Path, seed: int) -> None:
    """Types are altered at random, while the archiver runs, is behind, or starts again."""
    await database.execute(TABLE)
    await archive_until_now(database, tmp_path)
    await database.execute(insert(["a", "b"], 0))
    await archive_until_now(database, tmp_path)
    chance, names, number = random.Random(seed), ["a", "b"], 0
    last = chance.randint(2, 20)  # of the changes before an attribute is dropped

    async def write() -> None:
        nonlocal number
        for _ in range(chance.randint(1, 6)):
            number += 1
            what, statements = chance.random(), list[str]()
            if what < 0.2 and number != last:
                names.append(f"x{number}")
                statements = [f"ALTER TYPE small ADD ATTRIBUTE x{number} int"]
            elif number == last:
                gone = names.pop(chance.randrange(len(names)))
                names.append(f"x{number}")
                statements = [f"ALTER TYPE small DROP ATTRIBUTE {gone}, ADD ATTRIBUTE x{number} int"]
            elif what < 0.3:
                statements = [f"ALTER TABLE t ADD extra{number} int"]
            statements = [insert(names, number), *statements, insert(names, number)]
            if chance.random() < 0.5:
                statements = ["BEGIN;" + ";".join(statements) + "; COMMIT"]
            await database.execute(*statements)

    for _ in range(6):
        if chance.random() < 0.5:
            await write()
            await archive_until_now(database, tmp_path)
        else:
            async with archiving(database, tmp_path):
                for _ in range(3):
                    await write()
                    await anyio.sleep(chance.choice([0, 0.2]))
    await archive_until_now(database, tmp_path)
    changes = logged(ChangeLog(tmp_path))
    tables = candidates(tmp_path)
    results = [check(table, changes) for table in tables]
    structs = [table for table in tables if pa.types.is_struct(table.columns[1].kind)]
    assert structs
    print(seed, len(changes), [read for read, _ in results], [refused for _, refused in results])


# --- Spark --------------------------------------------------------------------------------------

ROWS = """
CREATE TABLE t (id int PRIMARY KEY, v small, many small[], l large, last int);
ALTER TABLE t REPLICA IDENTITY FULL;
INSERT INTO t VALUES (1, (7, ''), ARRAY[(1, 'x, y'), NULL]::small[],
    ('t', 1.5, (2, 'in "quotes"'), '{1,NULL}', NULL, '\\x00ff', true, '{}'), 100);
INSERT INTO t VALUES (2, NULL, '{}', NULL, 200), (3, (NULL, NULL), NULL, NULL, 300);
CREATE PUBLICATION p FOR TABLE t;
"""
QUERY = "SELECT id, row_to_json(t)::text FROM t ORDER BY id"


def plain(value: Any) -> Any:
    """Return a value of Spark as row_to_json() has it."""
    if isinstance(value, Row):
        return {name: plain(field) for name, field in value.asDict().items()}
    if isinstance(value, dict):
        return {name: plain(field) for name, field in value.items()}
    if isinstance(value, list):
        return [plain(member) for member in value]
    if isinstance(value, bytes | bytearray):
        return "\\x" + bytes(value).hex()
    return float(value) if isinstance(value, Decimal) else value


async def test_structs_of_pgcdc(database: Database, tmp_path: Path, spark: SparkSession) -> None:
    """From a snapshot and changes."""
    await database.execute(ROWS)
    log, folder = str(tmp_path / "log"), str(tmp_path / "snapshot")
    await archive_until_now(database, tmp_path / "log")
    await anyio.to_thread.run_sync(lambda: write_snapshot(database.dsn(), log=log, directory=folder))

    def read() -> list[Row]:
        return spark.read.format("pgcdc").options(tables="public.t", snapshot=folder).load(log).collect()

    await database.execute(
        "UPDATE t SET v.b = NULL, many = many || ROW(9, NULL)::small WHERE id = 1", "DELETE FROM t WHERE id = 2"
    )
    await archive_until_now(database, tmp_path / "log")
    rows = await anyio.to_thread.run_sync(read)
    assert [row.op for row in rows] == ["r", "r", "r", "u", "d"]
    assert plain(rows[0].after.v) == {"a": 7, "b": ""}
    assert plain(rows[0].after.many) == [{"a": 1, "b": "x, y"}, None]
    assert rows[1].after.v is None
    assert plain(rows[2].after.v) == {"a": None, "b": None}
    by_id = {row.after.id: plain(row.after) for row in rows if row.after is not None}
    assert {number: json.loads(text) for number, text in await database.rows(QUERY)} == {1: by_id[1], 3: by_id[3]}


@pytest.mark.soak
@pytest.mark.timeout(300)
async def test_structs_in_tables(database: Database, tmp_path: Path, spark: SparkSession, catalog: str) -> None:
    """Of apply_changes()."""
    await database.execute(ROWS)
    log, folder = str(tmp_path / "log"), str(tmp_path / "snapshot")
    await archive_until_now(database, tmp_path / "log")
    await anyio.to_thread.run_sync(lambda: write_snapshot(database.dsn(), log=log, directory=folder))
    table = str(tmp_path / "table")
    whole = spark.read.format("pgcdc").options(tables="public.t", snapshot=folder, mode="delta").load(log)
    assert [row._change_type for row in await anyio.to_thread.run_sync(whole.collect)] == ["insert"] * 3
    texts = spark.read.format("pgcdc").options(tables="public.t", snapshot=folder, text="v,public.t.l").load(log)
    assert (await anyio.to_thread.run_sync(texts.collect))[0].after.v == '(7,"")'

    async def check_applied() -> None:
        await archive_until_now(database, tmp_path / "log")
        for into, more in ((table, None), ("shop.t", catalog)):
            stream = spark.readStream.format("pgcdc").options(tables="public.t", snapshot=folder).load(log)
            checkpoint = tmp_path / into.rpartition("/")[2]
            query = apply_changes(stream, into, keys=["id"], checkpoint=checkpoint, available_now=True, catalog=more)
            await anyio.to_thread.run_sync(query.awaitTermination)
        expected = {number: json.loads(text) for number, text in await database.rows(QUERY)}
        for stored in (DeltaTable(table).to_pyarrow_table(), iceberg_rows(catalog)):
            rows = stored.select(["id", "v", "many", "l", "last"]).to_pylist()
            assert {row["id"]: plain(row) for row in rows} == expected

    await check_applied()
    await database.execute("UPDATE t SET v.a = 8, l.n = 3 WHERE id = 1")
    await check_applied()
    # The statistics of a column after a struct are its own.
    files = pa.table(DeltaTable(table).get_add_actions(flatten=True)).to_pylist()
    found_ranges = {name: (files[0][f"min.{name}"], files[0][f"max.{name}"]) for name in ("id", "last")}
    assert found_ranges == {"id": (1, 3), "last": (100, 300)}


def iceberg_rows(catalog: str) -> pa.Table:
    """Return the rows of the data files. PyIceberg's own scan returns empty lists in place of null."""
    tasks = configured_catalog(catalog).load_table("shop.t").scan().plan_files()
    return pa.concat_tables([pq.read_table(task.file.file_path.removeprefix("file://")) for task in tasks])


async def test_a_snapshot_during_which_a_type_is_altered(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await database.execute(ROWS)
    await archive_until_now(database, tmp_path / "log")

    async def altered(publisher: Publisher, versions: list[TableVersion]) -> dict[int, LoggedType]:
        await publisher.session.rows("ALTER TYPE public.small ADD ATTRIBUTE c int")
        return await read_types(publisher, versions)

    monkeypatch.setattr("subscriber.spark.snapshot.writer.read_types", altered)

    def write() -> None:
        write_snapshot(database.dsn(), log=tmp_path / "log", directory=tmp_path / "snapshot")

    with pytest.raises(ApplyError, match="was altered while rows were read"):
        await anyio.to_thread.run_sync(write)


async def test_a_history_without_types_has_texts(database: Database, tmp_path: Path) -> None:
    """The archiver stores no attributes of a type that has a dropped one. A later version of the table has structs."""
    await database.execute(TABLE)
    await archive_until_now(database, tmp_path)
    await database.execute(insert(["a", "b"], 1))
    await archive_until_now(database, tmp_path)
    assert kinds(tmp_path) == ["struct<a: int32, b: string>"]
    (line,) = (tmp_path / SCHEMA).read_bytes().splitlines()
    fields = {name: value for name, value in json.loads(line).items() if name not in ("types", "checksum")}
    version = TableVersion.from_json(fields)
    assert version.types == ()
    (tmp_path / SCHEMA).unlink()
    store_versions(tmp_path, [version])
    assert kinds(tmp_path) == ["string"]
    await database.execute(insert(["a", "b"], 2))
    await archive_until_now(database, tmp_path)
    assert kinds(tmp_path) == ["string", "struct<a: int32, b: string>"]
    newest, oldest = candidates(tmp_path)
    assert check(newest, logged(ChangeLog(tmp_path))) == check(oldest, logged(ChangeLog(tmp_path))) == (2, 0)
