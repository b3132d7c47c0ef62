"""Rows of Iceberg tables that are deleted by their positions, without Spark and without a server."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.exceptions import ValidationException
from pyiceberg.manifest import ManifestContent

from subscriber.changelog.objects import ObjectPath
from subscriber.changelog.storage import Location
from subscriber.errors import ApplyError
from subscriber.lsn import Lsn
from subscriber.spark.changes.raw_rows import raw_row
from subscriber.spark.tables import iceberg_table, iceberg_types, merge
from subscriber.spark.tables.data_files import FileLimits
from subscriber.spark.tables.iceberg_table import COPY_ON_WRITE, MERGE_MODE, StoredIcebergTable
from subscriber.spark.tables.merge import Files
from subscriber.spark.tables.position_deletes import write_positions
from subscriber.spark.tables.table_format import ICEBERG, NewColumn
from subscriber.spark.tables.table_merge import TableMerge
from tests.spark.test_merge import LABEL, Merged, Row, _result, a_row, compact, raw

LIMITS = FileLimits(rows=50, small=0, rewritten=0, deleted=0.3)


class Table(Merged):
    """An Iceberg table in which files of any size get positions of deleted rows."""

    def __init__(
        self, directory: Location, limits: FileLimits = LIMITS, rows: int = 100, catalog: str | None = None
    ) -> None:
        super().__init__(directory, ICEBERG, (0,), limits, catalog)
        self.chance = random.Random(1)
        self.wanted: dict[int, Row] = {}
        if rows:
            self.change({number: self.row(number) for number in range(rows)})

    def row(self, number: int) -> Row:
        return a_row(self.chance, number)

    def changes(self, rows: dict[int, Row | None], *, lacks: bool = False) -> TableMerge:
        """Start a batch that puts rows, and deletes those that are None. `lacks`: column `big` does not change."""
        net = self.net()
        for number, row in rows.items():
            if row is None:
                net.delete(raw_row((str(number).encode(),)))
                self.wanted.pop(number)
                continue
            if lacks:
                row = (*row[:3], self.wanted[number][3])
            net.replace(raw(row, lacks=lacks))
            self.wanted[number] = row
        return self.start(net)

    def change(self, rows: dict[int, Row], *, lacks: bool = False) -> None:
        assert self.finish(self.changes(dict(rows), lacks=lacks))

    def delete(self, *numbers: int) -> None:
        assert self.finish(self.changes(dict.fromkeys(numbers)))

    def iceberg(self) -> StoredIcebergTable:
        table = self.open()
        assert isinstance(table, StoredIcebergTable)
        return table

    def read(self, version: int | None = None) -> list[Row]:
        """Return the rows as PyIceberg reads them."""
        table = self.iceberg()
        if version is not None:
            table.load_version(version)
        return rows_of(table.to_arrow())

    def check(self) -> None:
        assert self.stored() == self.read() == sorted(self.wanted.values())

    def deletes(self) -> list[str]:
        """Return the delete files that the newest version has."""
        snapshot = self.iceberg().table.current_snapshot()
        assert snapshot is not None
        io = self.iceberg().table.io
        manifests = [manifest for manifest in snapshot.manifests(io) if manifest.content == ManifestContent.DELETES]
        return [entry.data_file.file_path for manifest in manifests for entry in manifest.fetch_manifest_entry(io)]

    def on_disk(self) -> dict[str, int]:
        """Return the sizes of all files in the directory, by name."""
        return {path.name: path.stat().st_size for path in (Path(str(self.path)) / "data").iterdir()}


def rows_of(table: pa.Table) -> list[Row]:
    rows_read = table.to_pylist()
    return sorted((row["id"], row["a.b"], f"{row['a']:%Y-%m-%d %H:%M:%S.%f+00}", row["big"]) for row in rows_read)


def run_tasks(one: TableMerge) -> tuple[list[Files], list[Any]]:
    files: list[Any] = [_result(merge.run(task)) for task in one.file_tasks()]
    return files, [_result(merge.run(task)) for task in one.insert_tasks(files)]


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path)


@pytest.mark.parametrize("batches", [20, pytest.param(40, marks=pytest.mark.soak)])
def test_random_batches_at_every_version(batches: int, tmp_path: Path) -> None:
    limits = FileLimits(rows=7, small=3500, many=12, rewritten=0, deleted=0.3)
    table, versions = Table(tmp_path, limits, rows=200), dict[int, list[Row]]()
    chance, deletes, rewritten = table.chance, 0, 0
    for _ in range(batches):
        before = table.files()
        touched = chance.sample(range(240), chance.choice((1, 5, 20)))
        lacks = chance.random() < 0.4
        known = [number for number in touched if number in table.wanted]
        rows: dict[int, Row | None] = {number: table.row(number) for number in (known if lacks else touched)}
        if not lacks:
            rows |= dict.fromkeys(known[::3])
        if not rows:
            continue
        assert table.finish(table.changes(rows, lacks=lacks))
        table.check()
        versions[table.open().version] = sorted(table.wanted.values())
        files = table.files()
        assert sorted(path for file in files.values() for path in file.deletes) == sorted(
            path.partition("table/")[2] for path in table.deletes()
        )
        assert all(len(file.deletes) <= 1 for file in files.values())
        for file in files.values():
            rows_in_file = sum(map(len, table.open().folder.rows([file])))
            assert len(table.open().folder.deleted(file)) <= 0.3 * (rows_in_file / 0.7 + 1)
        deletes += len({path for file in files.values() for path in file.deletes})
        rewritten += len(before.keys() - files.keys())
    assert deletes > batches
    assert rewritten > batches // 2
    for version, wanted in versions.items():
        assert table.read(version) == wanted


def test_the_written_bytes_do_not_depend_on_the_size_of_the_file(tmp_path: Path) -> None:
    table = Table(tmp_path, rows=3000)
    before, size = table.files(), sum(table.on_disk().values())
    table.change({number: table.row(number) for number in (5, 95)}, lacks=True)
    table.delete(7)
    table.check()
    files = table.files()
    assert before.keys() < files.keys()
    assert len(files) == 2
    assert len(table.deletes()) == 1
    (old,) = before
    positions = table.open().folder.deleted(files[old])
    assert positions.to_pylist() == [5, 7, 95]
    assert sum(table.on_disk().values()) - size < 0.1 * size


def test_only_the_keys_of_an_object_are_read(
    objects: ObjectPath, catalog: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, read = Table(objects, LIMITS._replace(rows=5000), 20_000, catalog), list[int]()
    (file,) = table.files().values()
    fetch = ObjectPath.range

    def counted(path: ObjectPath, start: int, length: int) -> bytes:
        if path.name in file.path:
            read.append(length)
        return fetch(path, start, length)

    monkeypatch.setattr(ObjectPath, "range", counted)
    table.delete(7, 4000)
    assert len(read) == 1 + 4  # the end of the file, and the keys of each row group
    assert sum(read) < file.size
    table.change({number: table.row(number) for number in (5, 95)}, lacks=True)
    table.check()
    assert len(table.deletes()) == 1


def test_a_deleted_row_is_never_found_again(table: Table) -> None:
    table.delete(5, 6)
    table.change({5: table.row(5)})
    table.change({5: table.row(5)})
    table.delete(5)
    table.check()
    with pytest.raises(ApplyError, match="not in the table"):
        table.finish(table.start(lacking(table, 6)))


def lacking(table: Table, number: int) -> Any:
    net = table.net()
    net.replace(raw(table.row(number), lacks=True))
    return net


def test_a_file_with_many_deleted_rows_is_written_again(table: Table) -> None:
    (first,) = table.files()
    for number in range(0, 50, 5):
        table.change({each: table.row(each) for each in range(number, number + 5)})
        table.check()
    assert first not in table.files()
    assert all(first not in name for name in table.deletes())


@pytest.mark.parametrize("limits", [FileLimits(), FileLimits(rewritten=0, deleted=0.0), LIMITS])
def test_small_files_and_copy_on_write(tmp_path: Path, limits: FileLimits) -> None:
    table = Table(tmp_path, limits)
    if limits == LIMITS:
        with table.iceberg().table.transaction() as change:
            change.set_properties({MERGE_MODE: COPY_ON_WRITE})
    table.delete(7)
    table.check()
    assert table.deletes() == []
    assert len(table.files()) == 1


def test_many_small_files_are_written_again_without_deleted_rows(tmp_path: Path) -> None:
    table = Table(tmp_path, FileLimits(rewritten=0, deleted=0.3, many=4))
    table.delete(1)
    assert len(table.deletes()) == 1
    for number in range(200, 204):
        table.change({number: table.row(number), number - 190: table.row(number - 190)})
        table.check()
    assert len(table.files()) < 4
    table.delete(*range(20, 24))
    table.check()


def test_a_batch_that_is_killed_before_its_commit(table: Table) -> None:
    rows = {5: table.row(5), 6: table.row(6)}
    run_tasks(table.changes(dict(rows), lacks=True))  # the driver is killed here
    assert len(table.on_disk()) == 3  # the file of the table, one of positions, and one of new rows
    assert len(table.read()) == len(table.stored()) == 100
    one = table.changes(dict(rows), lacks=True)
    run_tasks(one)  # an executor is killed, and its tasks run again
    assert one.commit(*run_tasks(one))
    table.check()
    assert len(table.deletes()) == 1
    assert len(table.on_disk()) == 7
    for name in table.on_disk():
        os.utime(Path(str(table.path)) / "data" / name, (0, 0))
    table.iceberg().clean_up(1, frozenset())
    assert len(table.on_disk()) == 3
    table.check()


@pytest.mark.parametrize("is_compacted", [False, True])
def test_another_commit_between_the_tasks_and_the_commit(table: Table, *, is_compacted: bool) -> None:
    table.delete(50)
    one = table.changes({5: table.row(5), 6: None}, lacks=False)
    files, inserted = run_tasks(one)
    assert any(task_files.deletes for task_files in files)
    if is_compacted:
        compact(table)
    else:
        other = table.open()
        (file,) = table.files().values()
        new = other.folder.delete(file, pa.concat_arrays([other.folder.deleted(file), pa.array([9, 10])]))
        other.commit([], [], Lsn(table.position - 1), deletes=[new])
        del table.wanted[9], table.wanted[10]
    assert not one.commit(files, inserted)
    assert table.finish(one)
    table.check()
    assert all(len(file.deletes) <= 1 for file in table.files().values())


@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_compaction_that_is_overtaken_by_a_batch_fails(table: Table, *, is_deleted: bool) -> None:
    """PyIceberg would bring the former rows back if it did not notice the new delete file."""
    other = table.iceberg().table
    before = other.scan().to_arrow()
    if is_deleted:
        table.delete(5)
    else:
        table.change({5: table.row(5)})
    with pytest.raises(ValidationException):
        other.overwrite(before)
    table.check()


def test_delete_files_that_another_program_has_left(table: Table) -> None:
    table.delete(5)
    compact(table)
    assert len(table.deletes()) == 1  # PyIceberg keeps the file, which has no effect
    table.check()
    table.change({7: table.row(7)})
    table.check()
    assert len(table.deletes()) == 1
    assert len(table.files()) == 2
    (first, *_) = sorted(table.files().values(), key=lambda file: -file.size)
    assert len(first.deletes) == 1


def test_columns_change_and_rows_are_converted(table: Table) -> None:
    table.delete(5)
    before = table.open().version
    names = table.schema.names
    kinds = dict(zip(names, table.schema.types, strict=True))
    renamed = [NewColumn(f"{name}_" if name == "big" else name, kinds[name], name, None) for name in names]
    table.open().change_columns(renamed, Lsn(2))
    assert len(table.deletes()) == 1
    assert table.open().to_arrow().schema.names == ["id", "a.b", "a", "big_"]
    assert table.open().to_arrow()["id"].to_pylist() == sorted(table.wanted)
    as_text = [NewColumn(name, pa.string(), name, None) for name in table.open().folder.schema.names if name != "a"]
    table.open().change_columns(as_text, Lsn(3))
    assert table.deletes() == []
    assert sorted(table.open().to_arrow()["id"].to_pylist(), key=int) == [
        str(number) for number in sorted(table.wanted)
    ]
    assert len(table.read(before)) == 99


def test_truncated_and_loaded_again(table: Table) -> None:
    table.delete(5)
    net = table.net()
    net.truncate()
    table.wanted = {1: table.row(1)}
    net.insert(raw(table.wanted[1]))
    assert table.finish(table.start(net))
    table.check()
    assert table.deletes() == []
    table.change({number: table.row(number) for number in range(2, 50)})
    table.delete(3)
    assert len(table.deletes()) == 1
    table.format.create(LABEL, table.path, table.schema, Lsn(1000), [])
    assert (table.deletes(), table.read()) == ([], [])


def test_delete_files_of_other_kinds_are_refused(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    made = iceberg_types.iceberg_delete_file

    def of_several_files(*args: Any) -> Any:
        file = made(*args)
        file._data[file._data.index(file.upper_bounds)] = {}
        return file

    other, (file,) = table.open(), table.files().values()
    new = write_positions(table.path, "data/", file.path, f"file://{table.path}/{file.path}", pa.array([3, 4]))
    with monkeypatch.context() as patched:
        patched.setattr(iceberg_table, "iceberg_delete_file", of_several_files)
        other.commit([], [], Lsn(table.position - 1), deletes=[new])
    del table.wanted[3], table.wanted[4]
    assert table.read() == sorted(table.wanted.values())
    table.open().commit([], [], Lsn(table.position))
    assert table.read() == sorted(table.wanted.values())
    with pytest.raises(ApplyError, match="delete files of other kinds"):
        table.delete(7)
    columns = [NewColumn("id", pa.string(), "id", None)]
    with pytest.raises(ApplyError, match="delete files of other kinds"):
        table.open().change_columns(columns, Lsn(2))
