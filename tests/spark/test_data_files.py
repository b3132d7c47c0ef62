"""The files of a lake's table: their size and that of their row groups, and the tables that have them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from subscriber.lsn import Lsn
from subscriber.spark.tables.data_files import LIMITS, ColumnStatistics, DataFile, DataFolder, FileLimits
from subscriber.spark.tables.delta import DeltaFormat
from subscriber.spark.tables.table_format import FORMATS, table_format

SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])
KB = 1024


def rows(first: int, number: int, width: int) -> pa.RecordBatch:
    ids = range(first, first + number)
    texts = [f"{number * 7919:0{width}}"[-width:] for number in ids]
    return pa.record_batch([pa.array(ids, pa.int64()), pa.array(texts)], schema=SCHEMA)


@pytest.mark.parametrize(
    ("limits", "groups", "files"),
    [
        (LIMITS, 1, 1),
        (LIMITS._replace(rows=100), 6, 1),
        (LIMITS._replace(memory=64 * KB), 10, 1),
        (FileLimits(rows=100, largest=2 * KB), 6, 6),
    ],
)
def test_files_and_row_groups_have_limits(tmp_path: Path, limits: FileLimits, groups: int, files: int) -> None:
    folder, batches = DataFolder(tmp_path, "", SCHEMA), [rows(0, 0, 1), rows(0, 550, KB), rows(550, 50, KB)]
    written = folder.write(batches, limits)
    assert len(written) == files
    metadata = [pq.read_metadata(tmp_path / file.path) for file in written]
    sizes = [part.row_group(number).num_rows for part in metadata for number in range(part.num_row_groups)]
    assert len(sizes) == groups
    assert max(sizes) <= limits.rows
    assert [part.num_rows for part in metadata] == [file.rows for file in written]
    stored = folder.rows(DataFile(file.path, file.size, None, None) for file in written)
    assert pa.Table.from_batches(stored, SCHEMA) == pa.Table.from_batches(batches, SCHEMA)


def test_a_row_that_is_larger_than_the_limit_is_written(tmp_path: Path) -> None:
    (file,) = DataFolder(tmp_path, "", SCHEMA).write([rows(0, 3, 8 * KB)], LIMITS._replace(memory=KB))
    assert pq.read_metadata(tmp_path / file.path).num_row_groups == file.rows == 3


def test_statistics_are_of_their_column(tmp_path: Path) -> None:
    """A struct takes several columns of a Parquet file."""
    pair = pa.struct([("a", pa.int32()), ("b", pa.list_(pa.string()))])
    schema = pa.schema([("pair", pair), ("pairs", pa.list_(pair)), ("id", pa.int64())])
    values = [{"pair": {"a": 7, "b": ["x"]}, "pairs": None, "id": 1}, {"pair": None, "pairs": [None], "id": 2}]
    (file,) = DataFolder(tmp_path, "", schema).write([pa.RecordBatch.from_pylist(values, schema)])
    assert file.columns == {"id": ColumnStatistics(0, 1, 2)}


@pytest.mark.parametrize("name", FORMATS)
def test_a_table_is_created_from_several_files_and_again_with_other_columns(tmp_path: Path, name: str) -> None:
    tables, path = table_format(name, tmp_path, "lake", None), tmp_path / "tables" / "items"
    path.mkdir(parents=True)
    batches = [rows(number * 70_000, 70_000, 8) for number in range(2)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DataFolder.write, "__defaults__", (LIMITS._replace(largest=KB),))
        tables.create("public.items", path, SCHEMA, Lsn(1), batches)
    stored = tables.open("public.items", path)
    assert len(stored.files("id")) == 3
    assert stored.to_arrow().sort_by("id").cast(SCHEMA) == pa.Table.from_batches(batches)
    again = pa.schema([("at", pa.timestamp("us")), ("id", pa.int32())])
    tables.create("public.items", path, again, Lsn(2), [pa.RecordBatch.from_pylist([{"at": 5, "id": 1}], again)])
    stored = tables.open("public.items", path)
    stored.check_writable()
    assert (stored.position, stored.to_arrow().cast(again).to_pylist()[0]["id"]) == (Lsn(2), 1)
    assert stored.folder.schema.names == again.names
    tables.create("public.items", path, again, Lsn(3), [])
    assert tables.open("public.items", path).to_arrow().num_rows == 0


def test_rows_that_cannot_be_read_leave_a_table_as_it_is(tmp_path: Path) -> None:
    def broken() -> object:
        yield rows(0, 10, 8)
        raise ValueError("broken")

    tables = DeltaFormat()
    tables.create("public.items", tmp_path / "items", SCHEMA, Lsn(1), [rows(0, 1, 8)])
    with pytest.raises(ValueError, match="broken"):
        tables.create("public.items", tmp_path / "items", SCHEMA, Lsn(2), broken())  # type: ignore[arg-type]
    stored = tables.open("public.items", tmp_path / "items")
    assert (stored.position, stored.to_arrow().num_rows) == (Lsn(1), 1)


@pytest.mark.parametrize("name", FORMATS)
def test_a_commit_returns_its_version(tmp_path: Path, name: str) -> None:
    tables, path = table_format(name, tmp_path, "lake", None), tmp_path / "tables" / "items"
    path.mkdir(parents=True)
    tables.create("public.items", path, SCHEMA, Lsn(1), [rows(0, 3, 8)])
    for position in (2, 3):
        stored = tables.open("public.items", path)
        version = stored.commit(
            stored.files("id"), stored.folder.write([rows(position, 3, 8).cast(stored.folder.schema)]), Lsn(position)
        )
        assert version == tables.open("public.items", path).version
