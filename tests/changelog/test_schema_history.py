"""The schema history that the archiver stores: which column is which after DDL, and when that is not certain."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import anyio
import pytest

from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.schema_history import (
    SCHEMA,
    ColumnStep,
    LoggedColumn,
    SchemaHistory,
    TableVersion,
    change_of,
    column_steps,
    is_same,
)
from subscriber.errors import ApplyError, ChangeLogDamaged
from subscriber.lsn import Lsn
from tests.archive.test_worker import archive_until_now, archiving
from tests.plugins.fix_cluster import Database, ServerOf, fresh_database

TABLE = """
CREATE TABLE t (id int PRIMARY KEY, a int, b text, n numeric(10,2));
CREATE TABLE parts (id int, a int, PRIMARY KEY (id)) PARTITION BY RANGE (id);
CREATE TABLE part1 PARTITION OF parts FOR VALUES FROM (0) TO (100);
CREATE TABLE part2 PARTITION OF parts FOR VALUES FROM (100) TO (200);
CREATE PUBLICATION p FOR TABLE t, parts WITH (publish_via_partition_root = true);
INSERT INTO t VALUES (1, 1, 'b', 1.5);
INSERT INTO parts VALUES (1, 1), (101, 1);
"""

Followed = list[tuple[str | None, str, str | None]]

# DDL, and how the columns follow from those before it: the old name or None, the new name, the value of earlier rows.
CERTAIN: list[tuple[str, Followed]] = [
    ("ADD c int", [("id", "id", None), ("a", "a", None), ("b", "b", None), ("n", "n", None), (None, "c", None)]),
    ("ADD d text NOT NULL DEFAULT 'it''s, {so}'", [(None, "d", "it's, {so}")]),
    ("ADD e int[] NOT NULL DEFAULT '{1,2}'", [(None, "e", "{1,2}")]),
    ("ADD f timestamptz NOT NULL DEFAULT '2020-01-01 00:00:00+02'", [(None, "f", "2019-12-31 22:00:00+00")]),
    ("RENAME a TO z", [("a", "z", None)]),
    ("DROP b", [("id", "id", None), ("z", "z", None), ("n", "n", None), ("c", "c", None)]),
    ("ALTER n TYPE numeric(12,2)", [("n", "n", None)]),
]
REFUSED: list[tuple[list[str], str]] = [
    # It cannot be distinguished from ALTER TYPE: it clears the values that ADD COLUMN has stored.
    (["VACUUM FULL t"], "rewritten"),
    (["ALTER TABLE t DROP a", "ALTER TABLE t ADD a int"], "columns dropped and others added"),
    (["ALTER TABLE t ADD x int", "ALTER TABLE t DROP x", "ALTER TABLE t ADD x int"], "added and dropped"),
    (["ALTER TABLE t ALTER b TYPE text USING upper(b)"], "rewritten"),
    (["ALTER TABLE t ALTER a TYPE bigint"], "rewritten"),
    (["ALTER TABLE t ADD r double precision DEFAULT random()"], "values in earlier rows"),
    (["ALTER PUBLICATION p DROP TABLE t", "ALTER PUBLICATION p ADD TABLE t"], "another way"),
]
CHANGE = "UPDATE t SET id = id + 1"


async def test_columns_are_told_apart(source_db: Database, tmp_path: Path) -> None:
    await source_db.execute(TABLE)
    relid = await source_db.value("SELECT 't'::regclass::oid::int")

    async def after(*statements: str) -> list[ColumnStep]:
        """Let the archiver see the statements and a change of the table; how its columns follow from those before."""
        count = len(SchemaHistory.read(tmp_path).of(relid))
        await source_db.execute(*statements, CHANGE)
        with anyio.fail_after(60):
            while len(versions := ChangeLog(tmp_path).schema().of(relid)) <= count:
                await anyio.sleep(0.01)
        return column_steps(*versions[-2:])

    async with archiving(source_db, tmp_path) as writer:
        await source_db.execute(CHANGE)
        with anyio.fail_after(60):
            while not writer.schema.of(relid):
                await anyio.sleep(0.01)
        for change, expected in CERTAIN:
            steps = await after(f"ALTER TABLE t {change}")
            steps_told = [(step.before and step.before.name, step.after.name, step.fill) for step in steps]
            assert [step for step in steps_told if step in expected] == expected, change
            assert not change.startswith("DROP") or ("b", "b", None) not in steps_told
        assert len(ChangeLog(tmp_path).schema().of(relid)) == len(CERTAIN) + 1
        await source_db.execute("TRUNCATE t", "INSERT INTO t (id) VALUES (1)")
        before = Lsn.parse(await source_db.value("SELECT pg_current_wal_lsn()::text"))
        await source_db.execute(CHANGE)
        with anyio.fail_after(60):
            while ChangeLog(tmp_path).end() <= before:  # otherwise the archiver may read the catalog after ADD only
                await anyio.sleep(0.01)
        await source_db.execute("ALTER TABLE t ADD b text")
        for statements, reason in [(["ALTER TABLE t RENAME z TO a"], ""), *REFUSED]:
            if reason:
                with pytest.raises(ApplyError, match=reason):
                    await after(*statements)
            else:
                await after(*statements)
        versions = ChangeLog(tmp_path).schema().of(relid)
        changed = [not is_same(before, after) for before, after in pairwise(versions)]
        assert changed.count(True) == len(CERTAIN) + len(REFUSED) + 1


async def test_partitions_agree_on_the_value_of_a_new_column(source_db: Database, tmp_path: Path) -> None:
    await source_db.execute(TABLE)
    relid = await source_db.value("SELECT 'parts'::regclass::oid::int")
    await archive_until_now(source_db, tmp_path)
    for statement in ("SELECT 1", "ALTER TABLE parts ADD c int NOT NULL DEFAULT 7"):
        await source_db.execute(statement, "UPDATE parts SET a = a + 1")
        await archive_until_now(source_db, tmp_path)
    before, after = ChangeLog(tmp_path).schema().of(relid)
    assert column_steps(before, after)[2][::2] == (None, "7")
    # A partition that is younger than the column has no such value.
    await source_db.execute(
        "ALTER TABLE parts ADD d int NOT NULL DEFAULT 8",
        "CREATE TABLE part3 PARTITION OF parts FOR VALUES FROM (200) TO (300)",
        "UPDATE parts SET a = a + 1",
    )
    await archive_until_now(source_db, tmp_path)
    with pytest.raises(ApplyError, match="not known"):
        column_steps(after, ChangeLog(tmp_path).schema().of(relid)[-1])


async def test_a_catalog_that_has_moved_on_is_not_believed(source_db: Database, tmp_path: Path) -> None:
    """The archiver was stopped, and reads changes of several versions when it starts again."""
    await source_db.execute(TABLE)
    relid = await source_db.value("SELECT 't'::regclass::oid::int")
    await archive_until_now(source_db, tmp_path)

    async def reasons(*statements: str) -> list[str]:
        first = len(ChangeLog(tmp_path).schema().of(relid))
        await source_db.execute(*statements)
        await archive_until_now(source_db, tmp_path)
        versions = ChangeLog(tmp_path).schema().of(relid)
        reasons_told = []
        for before, after in zip(versions[max(first - 1, 0) :], versions[max(first, 1) :], strict=False):
            try:
                column_steps(before, after)
            except ApplyError as error:
                reasons_told.append(str(error))
            else:
                reasons_told.append("")
        return reasons_told

    assert await reasons(CHANGE) == []  # the first version
    # The columns are described as before, and the catalog only has one more.
    assert await reasons(CHANGE, "ALTER TABLE t ADD c int DEFAULT 3", CHANGE) == [""]
    assert await reasons(CHANGE, "ALTER TABLE t DROP c", CHANGE) == [""]
    # A dropped column may have been another one than the one that was described.
    findings = await reasons(CHANGE, "ALTER TABLE t DROP a", "ALTER TABLE t ADD a int", CHANGE)
    assert ["several times" in reason for reason in findings] == [True, True]
    findings = await reasons("ALTER TABLE t ADD e int", CHANGE, "ALTER TABLE t RENAME e TO f", CHANGE)
    assert ["several times" in reason for reason in findings] == [True, True]
    (reason,) = await reasons("ALTER TABLE t RENAME TO t2", "UPDATE t2 SET id = id + 1")
    assert "was renamed" in reason


async def test_an_unfinished_line_is_cut_off_and_a_damaged_one_is_an_error(source_db: Database, tmp_path: Path) -> None:
    await source_db.execute(TABLE)
    await archive_until_now(source_db, tmp_path)
    await source_db.execute(CHANGE)
    await archive_until_now(source_db, tmp_path)
    file = tmp_path / SCHEMA
    whole = file.read_bytes()
    assert whole.count(b"\n") == 1
    file.write_bytes(whole + whole[:40])
    assert len(ChangeLog(tmp_path).schema().relids()) == 1
    await archive_until_now(source_db, tmp_path)
    assert file.read_bytes() == whole
    file.write_bytes(whole.replace(b'"int4"', b'"int8"').replace(b'"id"', b'"ix"'))
    with pytest.raises(ChangeLogDamaged, match=r"schema.jsonl.* is damaged in line 1"):
        ChangeLog(tmp_path).schema()
    assert len(ChangeLog(tmp_path).damage()) == 1
    with pytest.raises(ChangeLogDamaged):
        await archive_until_now(source_db, tmp_path)
    file.write_bytes(whole)


@pytest.mark.soak
@pytest.mark.parametrize("major", [13, 14, 15, 16, 17, 19])
async def test_columns_are_told_apart_with_other_versions_of_the_publisher(
    server_of: ServerOf, major: int, tmp_path: Path
) -> None:
    async with fresh_database(server_of("publisher", major)) as source:
        await test_columns_are_told_apart(source, tmp_path)


def test_the_difference_of_two_versions_in_words() -> None:
    columns = tuple(LoggedColumn(name, 23, -1, name == "id", number) for number, name in enumerate(("id", "a", "b"), 1))
    before = TableVersion(Lsn(1), Lsn(1), 7, "public", "t", "d", columns, attributes=3, storage="1", published="x")
    assert change_of(before, before) is None
    after = replace(
        before,
        name="u",
        columns=(columns[0], replace(columns[1], name="z", type_oid=20), replace(columns[2], number=4, name="c")),
        storage="2",
        published="y",
    )
    assert change_of(before, after) == (
        'Its name was "public"."t", column "a" was renamed to "z", column "z" has another type, column "c" was added,'
        ' column "b" was dropped, it is published in another way, it was rewritten.'
    )
    assert change_of(before, replace(before, replica_identity="f")) == (
        "Its replica identity or primary key is another one."
    )
    assert change_of(before, replace(after, attributes=None)) is None
