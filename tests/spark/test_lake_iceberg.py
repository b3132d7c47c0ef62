"""Iceberg tables of a lake, without Spark and without a server: columns, versions, catalogs and removals."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.manifest import ManifestContent

from subscriber.changelog.objects import ObjectPath
from subscriber.changelog.storage import Location
from subscriber.errors import ApplyError, StatementError
from subscriber.lsn import Lsn
from subscriber.spark.lake.lake import Lake
from subscriber.spark.tables.iceberg import IcebergFormat
from subscriber.spark.tables.iceberg_table import StoredIcebergTable
from subscriber.spark.tables.layout import NO_LAYOUT, Layout
from subscriber.spark.tables.table_format import ICEBERG, CommitConflict, NewColumn, VersionGone

LABEL = "public.item"
SCHEMA = pa.schema(
    [("id", pa.int32()), ("a.b", pa.string()), ("n", pa.decimal128(8, 2)), ("day", pa.date32()), ("small", pa.int16())]
)


class Stored:
    """A table with two rows as of 0/1."""

    def __init__(self, directory: Location, catalog: str | None = None, lake: str = "one") -> None:
        self.format = IcebergFormat(directory, lake, catalog)
        self.path = directory / "tables" / "item"

    def create(self, position: int = 1, layout: Layout = NO_LAYOUT) -> None:
        rows = [{"id": number, "a.b": f"b{number}", "n": None, "small": number} for number in (1, 2)]
        batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
        self.format.create(LABEL, self.path, SCHEMA, Lsn(position), [batch], layout)

    def open(self) -> StoredIcebergTable:
        return self.format.open(LABEL, self.path)

    def add(self, number: int, *, replaces: bool = False) -> int:
        """Commit a file with one row, as of the position of the number. Returns the version."""
        table = self.open()
        rows = [dict.fromkeys(table.folder.schema.names) | {"id": number}]
        new = table.folder.write([pa.RecordBatch.from_pylist(rows, schema=table.folder.schema)])
        table.commit(table.files("id") if replaces else [], new, Lsn(number))
        return self.open().version

    def rows(self, version: int | None = None) -> list[dict[str, Any]]:
        table = self.open()
        if version is not None:
            table.load_version(version)
        return sorted(table.to_arrow().to_pylist(), key=str)

    def names(self, folder: str) -> set[str]:
        return {path.name for path in (Path(str(self.path)) / folder).iterdir()}


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    stored = Stored(tmp_path)
    stored.create()
    return stored


def test_columns_change_without_a_new_file(stored: Stored) -> None:
    before, files = stored.open().version, stored.names("data")
    columns = [
        NewColumn("small", pa.int32(), "id", None),  # two have exchanged their names
        NewColumn("id", pa.int16(), "small", None),
        NewColumn("n", pa.decimal128(12, 2), "n", None),
        NewColumn("a.b", pa.date32(), None, None),  # the name of a column that is dropped
    ]
    stored.open().change_columns(columns, Lsn(2))
    assert stored.open().folder.schema.names == ["small", "id", "n", "a.b"]
    assert stored.rows() == [{"small": number, "id": number, "n": None, "a.b": None} for number in (1, 2)]
    assert stored.names("data") == files
    assert (stored.open().position, stored.open().columns_position) == (1, 2)
    assert stored.rows(before)[0] == {"id": 1, "a.b": "b1", "n": None, "day": None, "small": 1}
    log = stored.open().table.metadata_location
    stored.open().change_columns(columns[:1], Lsn(2))  # the table has them already
    assert stored.open().table.metadata_location == log


def test_rows_are_converted_if_they_have_other_values(stored: Stored) -> None:
    before = stored.open().version
    columns = [
        NewColumn("id", pa.string(), "id", None),
        NewColumn("new", pa.int64(), None, "7"),
        NewColumn("small", pa.int64(), "small", None),
    ]
    stored.open().change_columns(columns, Lsn(2))
    assert stored.rows() == [{"id": str(number), "new": 7, "small": number} for number in (1, 2)]
    assert (stored.open().position, stored.open().version) == (1, before)
    assert len(stored.rows(before)[0]) == 5
    stored.create(3)
    assert (stored.open().position, stored.open().folder.schema.names) == (3, SCHEMA.names)
    assert stored.rows(before) == stored.rows()
    with pytest.raises(ApplyError, match=r'column "a\.b" cannot be stored as int32'):
        stored.open().change_columns([NewColumn("a.b", pa.int32(), "a.b", None)], Lsn(4))


def test_the_second_of_two_commits_changes_nothing(stored: Stored) -> None:
    first, second = stored.open(), stored.open()
    for table in (first, second):
        assert len(table.files("id")) == 1
    first.commit(first.files("id"), [], Lsn(2))
    with pytest.raises(CommitConflict):
        second.commit([], [], Lsn(2))
    assert stored.rows() == []
    assert stored.open().position == 2


def test_manifests_and_metadata_files_stay_few(stored: Stored) -> None:
    versions = [stored.add(number, replaces=number == 20) for number in range(2, 60)]
    snapshot = stored.open().table.current_snapshot()
    assert snapshot is not None
    assert len(snapshot.manifests(stored.open().table.io)) <= 20
    assert len([name for name in stored.names("metadata") if name.endswith(".json")]) <= 21
    assert [row["id"] for row in stored.rows()] == list(range(20, 60))
    assert len(stored.rows(versions[10])) == 13
    assert snapshot.summary is not None
    assert snapshot.summary.additional_properties["total-records"] == "40"


def test_files_that_only_older_versions_need_are_removed(stored: Stored) -> None:
    first = stored.open().version
    kept = stored.add(2, replaces=True)
    gone = stored.add(3, replaces=True)
    stored.add(4, replaces=True)
    assert len(stored.names("data")) == 4
    (Path(str(stored.path)) / "data" / "of a killed task.parquet").touch()
    for folder in ("data", "metadata"):
        for name in stored.names(folder):
            os.utime(Path(str(stored.path)) / folder / name, (0, 0))
    assert stored.open().clean_up(1, frozenset({kept})) == 1  # younger than an hour are all versions
    before = stored.names("metadata")
    assert stored.open().clean_up(0, frozenset({kept})) > 4
    assert len(stored.names("data")) == 2
    assert len(stored.names("metadata")) < len(before)
    assert [row["id"] for row in stored.rows(kept)] == [2]
    assert [row["id"] for row in stored.rows()] == [4]
    for version in (first, gone):
        with pytest.raises(VersionGone):
            stored.rows(version)
    assert stored.add(5) == stored.open().version


def test_a_table_of_another_lake_is_left_alone(stored: Stored, tmp_path: Path) -> None:
    other = Stored(tmp_path, lake="two")
    with pytest.raises(ApplyError, match=r"another Iceberg table public\.item") as caught:
        other.create(9)
    assert caught.value.hint is not None
    assert "subscriber.lake" in caught.value.hint
    other.format.remove(LABEL, tmp_path / "nothing")
    assert stored.open().position == 1


def test_a_lake_that_was_moved_is_an_error(stored: Stored, tmp_path: Path) -> None:
    (tmp_path / "moved").mkdir()
    for name in ("catalog.db", "tables"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    (tmp_path / "tables").symlink_to(tmp_path / "moved" / "tables")
    with pytest.raises(ApplyError, match="and not in"):
        Stored(tmp_path / "moved").open()


def test_a_removed_table_is_created_again(stored: Stored) -> None:
    stored.format.remove(LABEL, stored.path)
    assert not Path(str(stored.path)).exists()
    with pytest.raises(FileNotFoundError):
        stored.open()
    stored.create(5)
    assert stored.open().position == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "hudi"}, 'no table format "hudi"'),
        ({"catalog": "shop"}, "only a lake of Iceberg tables has a catalog"),
        ({"format": ICEBERG, "catalog": "no such catalog"}, 'cannot load catalog "no such catalog"'),
    ],
)
def test_formats_and_catalogs_that_cannot_be(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(StatementError, match=message):
        _ = Lake(tmp_path, **options).store.open(LABEL)


def test_a_catalog_that_cannot_be_used_sets_no_table_aside(tmp_path: Path) -> None:
    with pytest.raises(StatementError, match="cannot load catalog"), Lake(tmp_path, format=ICEBERG, catalog="x").lock():
        pytest.fail("the lock was taken")


def test_a_lake_in_an_object_store_needs_a_catalog(objects: ObjectPath) -> None:
    with pytest.raises(StatementError, match="needs a catalog") as caught:
        _ = Lake(objects, format=ICEBERG).store
    assert caught.value.hint is not None
    assert "--catalog" in caught.value.hint


def test_a_catalog_of_ones_own_and_an_object_store(objects: ObjectPath, catalog: str) -> None:
    stored = Stored(objects, catalog)
    stored.create()
    for number in range(2, 5):
        stored.add(number, replaces=number == 3)
    assert [row["id"] for row in stored.rows()] == [3, 4]
    assert load_catalog(catalog).list_tables("public") == [("public", "item")]
    table = stored.open()
    assert table.table.location() == f"{objects}/tables/item"
    assert table.clean_up(-1, frozenset()) > 3
    assert [row["id"] for row in stored.rows()] == [3, 4]


def test_a_catalog_that_chooses_the_locations(objects: ObjectPath, rest_catalog: str) -> None:
    stored = Stored(objects, rest_catalog)
    for columns in ((), ("id", "a.b"), ("a.b",)):
        stored.create(layout=Layout(cluster=columns))
        order = stored.open().table.sort_order()
        assert stored.open().folder.cluster == columns
        assert {file.sort_order_id for file in stored.open()._files(ManifestContent.DATA)} == {order.order_id or None}
    kept = [NewColumn("id", pa.int32(), "id", None), NewColumn("a b", pa.string(), "a.b", None)]
    stored.open().change_columns(kept, Lsn(1))
    assert stored.open().folder.cluster == ("a b",)
    stored.open().change_columns(kept[:1], Lsn(2))
    assert stored.open().folder.cluster == ()
    for number in range(2, 5):
        stored.add(number, replaces=number == 3)
    assert [row["id"] for row in stored.rows()] == [3, 4]
    table = stored.open()
    assert not table.table.location().startswith(str(objects))
    first, second = stored.open(), stored.open()
    first.commit(first.files("id"), [], Lsn(5))
    with pytest.raises(CommitConflict):
        second.commit(second.files("id"), [], Lsn(5))
    assert stored.open().clean_up(-1, frozenset()) > 3
    assert stored.rows() == []
    stored.format.remove(LABEL, stored.path)
    assert load_catalog(rest_catalog).list_tables("public") == []
    with pytest.raises(FileNotFoundError):
        stored.open()
