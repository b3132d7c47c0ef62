"""The merge of a batch into a table, compared with a dictionary; without Spark and without a server."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.transforms import BucketTransform

from subscriber.changelog.schema_history import LoggedColumn, TableVersion
from subscriber.changelog.storage import Location
from subscriber.errors import ApplyError
from subscriber.lsn import Lsn
from subscriber.protocol.messages import Relation, RelationColumn, ReplicaIdentity
from subscriber.spark.changes.net_effect import Net
from subscriber.spark.changes.net_job import NetTable
from subscriber.spark.changes.raw_rows import UNCHANGED, raw_row
from subscriber.spark.lake.lake_table import LakeTable, lake_schema
from subscriber.spark.tables import merge
from subscriber.spark.tables.data_files import LIMITS, DataFile, FileLimits
from subscriber.spark.tables.delta import StoredDeltaTable
from subscriber.spark.tables.iceberg_table import StoredIcebergTable
from subscriber.spark.tables.merge import Columns
from subscriber.spark.tables.stage import Staged, ToArrow
from subscriber.spark.tables.table_format import FORMATS, StoredTable, table_format
from subscriber.spark.tables.table_merge import TableMerge

COLUMNS = ("id", "a.b", "a", "big")
LABEL = "public.t"
OIDS = (23, 25, 1184, 25)
Row = tuple[Any, ...]


formats = pytest.mark.parametrize("name", FORMATS)


class Merged:
    """A table, and the rows that it should have."""

    def __init__(
        self,
        directory: Location,
        name: str,
        key: tuple[int, ...],
        limits: FileLimits = LIMITS,
        catalog: str | None = None,
    ) -> None:
        self.format = table_format(name, directory, "a lake", catalog)
        self.path, self.staged, self.key = directory / "table", directory / "staged", key
        self.limits = limits
        columns = [
            LoggedColumn(name, oid, -1, index in key, index + 1)
            for index, (name, oid) in enumerate(zip(COLUMNS, OIDS, strict=True))
        ]
        self.state = LakeTable("public.t", TableVersion(Lsn(1), Lsn(1), 7, "public", "t", "d", tuple(columns)))
        assert self.state.version is not None
        self.schema = lake_schema(self.state.version)
        relation = Relation(
            None, 7, "public", "t", ReplicaIdentity.DEFAULT,
            tuple(RelationColumn(c.is_key, c.name, c.type_oid, -1) for c in columns),
        )  # fmt: skip
        self.table = NetTable("public", "t", relation)
        self.position = Lsn(100)
        self.rows: dict[Row, Row] = {}
        self.format.create(LABEL, self.path, self.schema, self.position, [])

    def net(self) -> Net:
        return Net(COLUMNS, self.key)

    def stage(self, *nets: Net) -> list[Staged]:
        return [ToArrow(self.staged, frozenset())(self.table, net, part) for part, net in enumerate(nets)]

    def start(self, *nets: Net) -> TableMerge:
        self.position = Lsn(self.position + 1)
        columns = Columns(tuple(self.state.names()))
        return TableMerge(self.open, columns, self.stage(*nets), self.position, self.staged, self.limits)

    def finish(self, one: TableMerge) -> bool:
        files = [_result(merge.run(task)) for task in one.file_tasks()]
        inserted = [_result(merge.run(task)) for task in one.insert_tasks(files)]
        return one.commit(files, inserted)

    def apply(self, *nets: Net) -> None:
        assert self.finish(self.start(*nets))

    def open(self) -> StoredTable:
        return self.format.open(LABEL, self.path)

    def stored(self) -> list[Row]:
        rows = (row for batch in self.open().folder.rows(self.open().files(None)) for row in batch.to_pylist())
        return sorted((row["id"], row["a.b"], f"{row['a']:%Y-%m-%d %H:%M:%S.%f+00}", row["big"]) for row in rows)

    def files(self) -> dict[str, DataFile]:
        return {file.path: file for file in self.open().files("id")}


def _result(found: Any) -> Any:
    if isinstance(found, ApplyError):
        raise found
    return found


def raw(row: Row, *, lacks: bool = False) -> bytes:
    cells = [value if isinstance(value, bytes) else str(value).encode() for value in row]
    return raw_row((*cells[:3], UNCHANGED if lacks else cells[3]))


def a_row(chance: random.Random, number: int) -> Row:
    return (
        number,
        f"t{number}",
        f"2026-01-{number % 27 + 1:02} 00:00:00.{number % 1000 + 100_000}+00",
        f"{chance.random()}",
    )


@formats
@pytest.mark.parametrize("key", [(0,), (1, 0), (2, 0)])
def test_random_batches_leave_the_rows_of_a_dictionary(tmp_path: Path, name: str, key: tuple[int, ...]) -> None:
    chance, merged = random.Random(f"{key}"), Merged(tmp_path, name, key, FileLimits(rows=7, small=3000))
    rows: dict[int, Row] = {}
    for _ in range(25):
        nets = [merged.net(), merged.net()]
        touched = set(chance.sample(range(60), 20))
        for number in sorted(touched):
            net = nets[number % 2]
            if number not in rows:
                rows[number] = a_row(chance, number)
                net.insert(raw(rows[number]))
            elif chance.random() < 0.3:
                net.delete(raw_row(tuple(str(rows[number][index]).encode() for index in key)))
                del rows[number]
            else:
                lacks = chance.random() < 0.5
                new = a_row(chance, number)
                if lacks:
                    new = (*new[:3], rows[number][3])
                rows[number] = new
                net.replace(raw(new, lacks=lacks))
        merged.apply(*nets)
        assert merged.stored() == sorted(rows.values())
    assert len(merged.files()) < 16


@formats
def test_only_files_with_changed_keys_are_written_and_read(tmp_path: Path, name: str) -> None:
    chance, merged = random.Random(1), Merged(tmp_path, name, (0,), FileLimits(small=0))
    for first in range(0, 1000, 100):
        net = merged.net()
        for number in range(first, first + 100):
            net.insert(raw(a_row(chance, number)))
        merged.apply(net)
    before = set(merged.files())
    net = merged.net()
    for number in (5, 950):
        net.replace(raw(a_row(chance, number)))
    one = merged.start(net)
    assert len(one.file_tasks()) == 2
    assert merged.finish(one)
    assert len(before - set(merged.files())) == len(set(merged.files()) - before) == 2
    assert {(file.low, file.high) for file in merged.files().values()} == {
        (first, first + 99) for first in range(0, 1000, 100)
    }


def compact(merged: Merged) -> None:
    """Write the files of a table again as one, as other programs do."""
    table = merged.open()
    if isinstance(table, StoredDeltaTable):
        table.table.optimize.compact()
    else:
        assert isinstance(table, StoredIcebergTable)
        table.table.overwrite(table.table.scan().to_arrow())


@formats
def test_a_commit_that_another_process_overtakes_is_repeated(tmp_path: Path, name: str) -> None:
    chance, merged = random.Random(1), Merged(tmp_path, name, (0,))
    for number in (1, 2):
        net = merged.net()
        net.insert(raw(a_row(chance, number)))
        merged.apply(net)
    net, new = merged.net(), a_row(chance, 1)
    net.replace(raw(new))
    one = merged.start(net)
    files = [_result(merge.run(task)) for task in one.file_tasks()]
    compact(merged)
    assert not one.commit(files, [])
    assert merged.finish(one)
    assert new in merged.stored()
    assert len(merged.stored()) == 2
    version = merged.open().version
    assert merged.finish(one)  # the table has the batch: nothing happens
    assert merged.open().version == version
    assert len(merged.stored()) == 2


@formats
def test_a_changed_row_that_is_not_in_the_lake_is_an_error(tmp_path: Path, name: str) -> None:
    chance, merged = random.Random(1), Merged(tmp_path, name, (0,))
    net = merged.net()
    net.replace(raw(a_row(chance, 1), lacks=True))
    with pytest.raises(ApplyError, match="not in the table"):
        merged.apply(net)


def give_feature(merged: Merged) -> None:
    """Give a table a feature that is not supported."""
    table = merged.open()
    if isinstance(table, StoredDeltaTable):
        table.table.alter.set_table_properties({"delta.enableChangeDataFeed": "true"})
    else:
        assert isinstance(table, StoredIcebergTable)
        with table.table.update_spec() as update:
            update.add_field("id", BucketTransform(4), "bucket")


@formats
def test_a_table_that_another_program_has_given_features_is_not_written(tmp_path: Path, name: str) -> None:
    chance, merged = random.Random(1), Merged(tmp_path, name, (0,))
    give_feature(merged)
    net = merged.net()
    net.insert(raw(a_row(chance, 1)))
    with pytest.raises(ApplyError, match="feature that is not supported"):
        merged.apply(net)
