"""Tables with partitions, without Spark and without a server: rows, files, columns that change, and their limits."""

from __future__ import annotations

import random
from collections import defaultdict
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from subscriber.changelog.objects import ObjectPath
from subscriber.changelog.storage import Location
from subscriber.errors import ApplyError
from subscriber.lsn import Lsn
from subscriber.spark.tables.cluster import Cluster
from subscriber.spark.tables.data_files import LIMITS, DataFolder, FileLimits
from subscriber.spark.tables.delta import StoredDeltaTable
from subscriber.spark.tables.iceberg_table import StoredIcebergTable
from subscriber.spark.tables.layout import Layout
from subscriber.spark.tables.merge import Columns, run
from subscriber.spark.tables.partitions import PartitionColumn, PartitionLimits, Partitions, by_partition
from subscriber.spark.tables.stage import OP, Staged, value, write_staged
from subscriber.spark.tables.table_format import DELTA, FORMATS, ICEBERG, NewColumn, StoredTable, table_format
from subscriber.spark.tables.table_merge import TableMerge

LABEL = "public.item"
SCHEMA = pa.schema(
    [
        ("id", pa.int32()),
        ("region name", pa.string()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("local", pa.timestamp("us")),
        ("good", pa.bool_()),
        ("note", pa.string()),
    ]
)
REGIONS = ("eu", None, "a b/c", "ü%41é", "x=y", " ", "null", "..", "1")
Row = dict[str, Any]
formats = pytest.mark.parametrize("name", FORMATS)


def row(chance: random.Random, number: int) -> Row:
    moment = datetime(1969, 12, 31, 23, 59, 59, 999999) if chance.random() < 0.3 else datetime(2026, 1, 2, number % 24)
    cells = {
        "region name": chance.choice(REGIONS),
        "day": chance.choice((None, date(1900, 1, 1), date(2026, 1, 2))),
        "at": chance.choice((None, moment.replace(tzinfo=UTC))),
        "local": moment,
        "good": chance.choice((True, False, None)),
    }
    return {"id": number, **cells, "note": f"{chance.random()}"}


class Table:
    """A table with a layout, and the rows that it should have."""

    def __init__(
        self,
        directory: Location,
        name: str,
        partitions: Partitions = (),
        limits: FileLimits = LIMITS,
        *,
        cluster: Cluster = (),
    ) -> None:
        self.format = table_format(name, directory, "a lake", None)
        self.path, self.staging, self.limits = directory / "table", directory / "staged", limits
        self.position, self.rows = Lsn(1), dict[int, Row]()
        self.create(partitions, cluster)

    def create(self, partitions: Partitions, cluster: Cluster = ()) -> None:
        self.position = Lsn(self.position + 1)
        batch = pa.RecordBatch.from_pylist(list(self.rows.values()), schema=SCHEMA)
        self.format.create(LABEL, self.path, SCHEMA, self.position, [batch], Layout(partitions, cluster))

    def open(self) -> StoredTable:
        return self.format.open(LABEL, self.path)

    def merge(self, changes: dict[int, Row | None]) -> TableMerge:
        """Return the merge of rows that are put or, if None, deleted."""
        self.position = Lsn(self.position + 1)
        for number, changed in changes.items():
            self.rows.pop(number, None)
            if changed is not None:
                self.rows[number] = changed
        schema = self.open().folder.schema
        rows = [{"id": number, **(changed or {})} for number, changed in changes.items()]
        columns = {OP: pa.array(["d" if changed is None else "u" for changed in changes.values()])}
        for index, field in enumerate(schema):
            columns[value(index)] = pa.array([changed_row.get(field.name) for changed_row in rows], field.type)
        staged: Staged = write_staged(pa.table(columns), self.staging, (0,), truncated=False)
        names = Columns(tuple(schema.names))
        return TableMerge(self.open, names, [staged], self.position, self.staging, self.limits)

    def apply(self, changes: dict[int, Row | None]) -> None:
        one = self.merge(changes)
        files: list[Any] = [run(task) for task in one.file_tasks()]
        assert one.commit(files, [run(task) for task in one.insert_tasks(files)])  # type: ignore[misc]

    def check(self) -> None:
        """Compare the rows that the lake and the library of the format read.

        Each file has one partition, and its rows are in the order of the cluster columns.
        """
        table, wanted = self.open(), list(self.rows.values())
        folder = table.folder
        for file in table.files("id"):
            for partition in folder.partitions:
                for batch in folder.rows([file]):
                    assert len(pc.unique(partition.values(batch))) <= 1
            if folder.cluster:
                keys = [cluster_key(row, folder.cluster) for batch in folder.rows([file]) for row in batch.to_pylist()]
                assert keys == sorted(keys)
        rows_read = [row for batch in folder.rows(table.files(None)) for row in batch.to_pylist()]
        assert sorted(rows_read, key=_key) == sorted(wanted, key=_key)
        assert sorted(table.to_arrow().to_pylist(), key=_key) == sorted(wanted, key=_key)


def cluster_key(row: Row, cluster: Cluster) -> list[tuple[bool, Any]]:
    """Return what the place of a row depends on. NULLs are last."""
    return [(row[name] is None, row[name]) for name in cluster]


def _key(row: Row) -> int:
    number: int = row["id"]
    return number


def fields(*names: str) -> Partitions:
    parts = (name.rstrip(")").rpartition("(") for name in names)
    return tuple(PartitionColumn(column, transform or "identity") for transform, _, column in parts)


@pytest.mark.parametrize(
    ("name", "partitions", "rewritten"),
    [
        (DELTA, fields("region name", "good"), 0),
        (DELTA, fields("day", "at", "local"), 0),
        pytest.param(DELTA, fields("id"), 0, marks=pytest.mark.soak),
        pytest.param(ICEBERG, fields("region name", "good"), 0, marks=pytest.mark.soak),
        (ICEBERG, fields("region name", "good"), 10**6),
        (ICEBERG, fields("day", "at", "hour(local)"), 0),
        pytest.param(ICEBERG, fields("day", "at", "hour(local)"), 10**6, marks=pytest.mark.soak),
        (ICEBERG, fields("month(day)", "day(at)", "year(local)"), 0),
        pytest.param(ICEBERG, fields("month(day)", "day(at)", "year(local)"), 10**6, marks=pytest.mark.soak),
    ],
)
def test_random_batches_leave_the_rows_of_a_dictionary(
    tmp_path: Path, name: str, partitions: Partitions, rewritten: int
) -> None:
    """`rewritten`: bytes of files below which they are written again, which those of Delta are always."""
    chance = random.Random(f"{partitions}")
    table = Table(
        tmp_path, name, partitions, FileLimits(rows=7, small=3000, memory=64, rewritten=rewritten, deleted=0.9)
    )
    with_deletes = 0
    for _ in range(5):
        numbers = chance.sample(range(60), 20)
        table.apply({n: None if n in table.rows and chance.random() < 0.3 else row(chance, n) for n in numbers})
        table.check()
        with_deletes += any(file.deletes for file in table.open().files(None))
    if isinstance(stored := table.open(), StoredIcebergTable):
        assert (with_deletes > 0) == (rewritten == 0)
        chosen = stored.table.scan(row_filter="day == '1900-01-01'").to_arrow()
        assert len(chosen) == sum(stored_row["day"] == date(1900, 1, 1) for stored_row in table.rows.values())
    else:
        assert isinstance(stored, StoredDeltaTable)
        chosen = stored.table.to_pyarrow_table(filters=[("day", "=", date(1900, 1, 1))])
        assert len(chosen) == sum(stored_row["day"] == date(1900, 1, 1) for stored_row in table.rows.values())
        assert stored.table.vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
    table.check()


def test_folders_of_partitions_in_an_object_store(objects: ObjectPath) -> None:
    chance = random.Random(3)
    table = Table(objects, DELTA, fields("region name", "at"))
    for first in (0, 10):
        table.apply({number: row(chance, number) for number in range(first, first + 20)})
        table.check()
    assert table.open().clean_up(0, frozenset()) > 0
    table.check()


@formats
def test_a_batch_writes_the_partitions_that_it_changes(tmp_path: Path, name: str) -> None:
    """A row moves to another partition; small files are written together within a partition."""
    chance = random.Random(1)
    table = Table(tmp_path, name, fields("region name"), FileLimits(small=0, rewritten=10**6))
    table.apply({n: {**row(chance, n), "region name": ("eu", "us", "asia")[n % 3]} for n in range(30)})
    before = {file.path: file.partition for file in table.open().files(None)}
    assert sorted(before.values()) == [("asia",), ("eu",), ("us",)]
    table.apply({3: {**table.rows[3], "region name": "us"}, 6: {**table.rows[6], "region name": "africa"}})
    after = {file.path: file.partition for file in table.open().files(None)}
    assert sorted(after.values()) == [("africa",), ("asia",), ("eu",), ("us",), ("us",)]
    assert len(before.keys() & after.keys()) == 2
    table.check()
    for number in range(100, 108):
        table.apply({number: {**row(chance, number), "region name": ("eu", "us")[number % 2]}})
    table.limits = LIMITS._replace(many=6)
    table.apply({200: {**row(chance, 200), "region name": "asia"}})
    assert sorted(file.partition for file in table.open().files(None)) == [
        *[("africa",), ("asia",), ("asia",)],
        *[("eu",)] * 5,
        ("us",),
    ]
    table.check()


@formats
def test_columns_of_partitions_change(tmp_path: Path, name: str) -> None:
    chance = random.Random(2)
    table = Table(tmp_path, name, fields("region name", "good"))
    table.apply({n: row(chance, n) for n in range(20)})
    first, rows = table.open().version, dict(table.rows)

    def change(renamed: dict[str, str]) -> list[str]:
        """Change the names of columns, without the columns that are not named. Returns those of partitions."""
        table.position = Lsn(table.position + 1)
        schema = table.open().folder.schema
        columns = [
            NewColumn(renamed[field.name], field.type, field.name, None) for field in schema if field.name in renamed
        ]
        table.open().change_columns(columns, table.position)
        table.rows = {
            number: {renamed[name]: cell for name, cell in stored_row.items() if name in renamed}
            for number, stored_row in table.rows.items()
        }
        table.check()
        table.apply({number: {**table.rows[number], "note": "new"} for number in list(table.rows)[:5]})
        table.check()
        return [partition.column for partition in table.open().folder.partitions]

    same = {column: column for column in SCHEMA.names}
    assert change({**same, "region name": "area"}) == ["area", "good"]
    same = {column: column for column in table.open().folder.schema.names}
    assert change({**same, "area": "good", "good": "area"}) == ["good", "area"]  # both are columns of partitions
    same = {column: column for column in table.open().folder.schema.names}
    assert change({**same, "note": "area", "area": "was", "good": "note"}) == ["note", "was"]
    same = {column: column for column in table.open().folder.schema.names}
    table.rows = {number: {**stored_row, "area": "new"} for number, stored_row in table.rows.items()}
    table.apply(dict(table.rows))
    del same["was"]
    assert change({**same, "area": "note", "note": "region"}) == ["region"]
    same = {column: column for column in table.open().folder.schema.names}
    del same["region"]
    assert change(same) == []
    old = table.open()
    old.load_version(first)
    assert sorted(old.to_arrow().to_pylist(), key=_key) == sorted(rows.values(), key=_key)
    table.rows = rows
    table.create(fields("day"))
    table.check()
    table.create(())
    table.check()
    assert table.open().clean_up(0, frozenset()) > 0
    table.check()


@pytest.mark.parametrize(
    ("name", "partitions", "message"),
    [
        (DELTA, fields("day(at)"), r"cannot have partitions by day\(at\), only by whole values"),
        (DELTA, fields(*SCHEMA.names), "needs a column that is not one of its partitions"),
        (ICEBERG, fields("hour(day)"), r"cannot have partitions by hour\(day\): the column is date32"),
        (ICEBERG, fields("bucket(id)"), r"cannot have partitions by bucket\(id\)"),
        (ICEBERG, fields("nothing"), 'no column "nothing"'),
        (ICEBERG, fields("at", "day(at)"), 'column "at" twice'),
    ],
)
def test_unusable_partitions_are_refused(tmp_path: Path, name: str, partitions: Partitions, message: str) -> None:
    with pytest.raises(ApplyError, match=message):
        Table(tmp_path, name, partitions)


@pytest.mark.parametrize("text", ["", "__HIVE_DEFAULT_PARTITION__", "x" * 300])
def test_texts_that_a_folder_cannot_have(tmp_path: Path, text: str) -> None:
    chance = random.Random(1)
    for name in FORMATS:
        (tmp_path / name).mkdir()
        table = Table(tmp_path / name, name, fields("region name"))
        one = table.merge({1: {**row(chance, 1), "region name": text}})
        files = [run(task) for task in one.file_tasks()]
        (failure,) = [run(task) for task in one.insert_tasks(files)]  # type: ignore[arg-type]
        assert isinstance(failure, ApplyError) == (name == DELTA)


def test_many_partitions_take_bounded_memory(tmp_path: Path) -> None:
    schema = pa.schema([("p", pa.int64()), ("text", pa.string())])
    batches = (
        pa.RecordBatch.from_pylist([{"p": n, "text": f"{number}" * 50} for n in range(50)], schema=schema)
        for number in range(100)
    )
    seen = defaultdict[Any, list[str]](list)
    for values, rows in by_partition(batches, fields("p"), PartitionLimits(20_000, 10_000, 50)):
        seen[values] += [text for batch in rows for text in batch["text"].to_pylist()]
    assert seen == {(n,): [f"{number}" * 50 for number in range(100)] for n in range(50)}
    folder = DataFolder(tmp_path, "", schema, None, Layout(fields("p")))
    many = [pa.RecordBatch.from_pylist([{"p": number} for number in range(60)], schema=schema)]
    with pytest.raises(ApplyError, match=r"more than 50 partitions by p") as caught:
        folder.write(many, LIMITS._replace(partitions=50))
    assert caught.value.hint is not None
