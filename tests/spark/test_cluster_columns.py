"""Tables with cluster columns, without Spark and without a server: rows, files, and columns that change."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.table.sorting import NullOrder, SortDirection
from pyiceberg.transforms import BucketTransform, IdentityTransform

from subscriber.errors import ApplyError
from subscriber.lsn import Lsn
from subscriber.spark.tables.cluster import Cluster, clustered
from subscriber.spark.tables.data_files import LIMITS, DataFolder, FileLimits
from subscriber.spark.tables.delta import CLUSTER
from subscriber.spark.tables.iceberg_table import StoredIcebergTable
from subscriber.spark.tables.layout import Layout
from subscriber.spark.tables.merge import MergedTable, file_tasks
from subscriber.spark.tables.table_format import DELTA, ICEBERG, NewColumn
from tests.spark.test_partitions import SCHEMA, Table, cluster_key, fields, formats, row

KEYS = pa.schema(
    [
        (".n", pa.int64()),
        ("text", pa.string()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("day", pa.date32()),
        ("number", pa.int64()),
    ]
)
values = {
    ".n": st.none() | st.integers(-3, 3) | st.integers(-(2**63), 2**63 - 1),
    "text": st.none() | st.text(max_size=3),
    "at": st.none() | st.integers(-(2**62), 2**62),  # microseconds: most are not times of Python
    "day": st.none() | st.integers(-(2**31), 2**31 - 1),
}


def rows_of(found: Sequence[dict[str, Any]], first: int) -> pa.RecordBatch:
    columns = [
        pa.array([values[name] for values in found], pa.int64() if name == "at" else pa.int32()).cast(
            KEYS.field(name).type
        )
        if name in ("at", "day")
        else pa.array([values[name] for values in found], KEYS.field(name).type)
        for name in KEYS.names[:-1]
    ]
    numbers = pa.array(range(first, first + len(found)), pa.int64())
    return pa.RecordBatch.from_arrays([*columns, numbers], schema=KEYS)


@given(
    st.lists(st.lists(st.fixed_dictionaries(values), max_size=8), max_size=12),
    st.permutations(list(values)).flatmap(lambda names: st.integers(1, 3).map(lambda n: tuple(names[:n]))),
    st.sampled_from([1, 200, 1_000, 10**6]),
    st.sampled_from([2, 3, 64]),
)
def test_rows_are_put_in_order(found: list[list[dict[str, Any]]], cluster: Cluster, memory: int, most: int) -> None:
    """Each row is there once. Equal rows keep their order, so that the order is always the same."""
    rows, batches = [key_row for some in found for key_row in some], list[pa.RecordBatch]()
    for some in found:
        batches.append(rows_of(some, sum(map(len, batches))))
    wanted = sorted(range(len(rows)), key=lambda number: cluster_key(rows[number], cluster))
    assert [n for batch in clustered(batches, cluster, memory, most) for n in batch["number"].to_pylist()] == wanted


@pytest.mark.parametrize("different", [1, 7, 10**9])
def test_any_number_of_rows_takes_bounded_memory(different: int) -> None:
    """Also if all values are the same. What Arrow has allocated is counted; mapped files are not part of it."""
    chance, memory, rows = random.Random(different), 200_000, 40_000
    before, most, size = pa.total_allocated_bytes(), 0, 0

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal most, size
        for number in range(0, rows, 100):
            numbers = pa.array([chance.randrange(different) for _ in range(100)])
            batch = pa.record_batch({"n": numbers, "text": pa.array([f"{number:>50}"] * 100)})
            size += batch.nbytes
            most = max(most, pa.total_allocated_bytes() - before)
            yield batch

    last, taken = 0, 0
    for piece in clustered(batches(), ("n",), memory, 16):
        most = max(most, pa.total_allocated_bytes() - before)
        assert piece.nbytes < 0.6 * memory
        first, last = piece["n"][0].as_py(), piece["n"][-1].as_py()
        assert last >= first
        taken += len(piece)
    assert taken == rows
    assert most < 1.5 * memory < size / 8


def test_files_have_ranges_of_their_own(tmp_path: Path) -> None:
    """Of a table, and of each partition: the ranges of two files of a task have one value in common at most."""
    chance = random.Random(1)
    limits = LIMITS._replace(rows=50, memory=5_000, largest=4_000)
    batches = [
        pa.RecordBatch.from_pylist([row(chance, n) for n in range(f, f + 100)], schema=SCHEMA)
        for f in range(0, 3_000, 100)
    ]
    for partitions in ((), fields("good")):
        folder = DataFolder(tmp_path, "", SCHEMA, None, Layout(partitions, ("note",)))
        files = folder.write(batches, limits)
        assert sum(file.rows for file in files) == 3_000
        groups = [pq.read_metadata(tmp_path / file.path).num_row_groups for file in files]
        assert sum(groups) > 2 * 3_000 // limits.rows  # more, and smaller ones, than without cluster columns
        for partition in {file.partition for file in files}:
            ranges = [
                (file.columns["note"].low, file.columns["note"].high) for file in files if file.partition == partition
            ]
            assert len(ranges) > 2
            assert all(first[1] <= second[0] for first, second in pairwise(ranges))


@pytest.mark.parametrize(
    ("name", "cluster", "rewritten"),
    [
        (DELTA, ("at", "id"), 0),
        pytest.param(DELTA, ("region name",), 0, marks=pytest.mark.soak),
        (ICEBERG, ("region name", "day"), 10**6),
        (ICEBERG, ("local",), 0),
    ],
)
@pytest.mark.parametrize("partitions", [(), fields("good")], ids=str)
def test_random_batches_leave_the_rows_of_a_dictionary(
    tmp_path: Path, name: str, cluster: Cluster, rewritten: int, partitions: Any
) -> None:
    chance = random.Random(f"{cluster}")
    limits = FileLimits(rows=7, small=3000, memory=64, rewritten=rewritten, deleted=0.9)
    table = Table(tmp_path, name, partitions, limits, cluster=cluster)
    assert table.open().folder.layout == Layout(partitions, cluster)
    for _ in range(5):
        numbers = chance.sample(range(60), 20)
        table.apply({n: None if n in table.rows and chance.random() < 0.3 else row(chance, n) for n in numbers})
        table.check()
    stored = table.open()
    if isinstance(stored, StoredIcebergTable):
        assert {entry.data_file.sort_order_id for _, some in stored._entries for entry in some} <= {1, None}
    assert table.open().clean_up(0, frozenset()) > 0
    table.check()


@formats
def test_small_files_of_near_values_are_put_together(tmp_path: Path, name: str) -> None:
    """The keys of all files are mixed. So files of two months, put together by their keys, would have both months."""
    chance = random.Random(1)
    table = Table(tmp_path, name, limits=FileLimits(small=0), cluster=("at",))
    months = [datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 7, 1, tzinfo=UTC)]
    for number in range(8):
        start = months[number % 2]
        keys = range(number, 80, 8)
        table.apply({n: {**row(chance, n), "at": start + timedelta(hours=n)} for n in keys})
    stored = table.open()
    files = stored.files("id")
    assert len(files) == 8
    limits = LIMITS._replace(target=4 * max(file.size for file in files))
    merged = MergedTable(stored.folder, tuple(SCHEMA.names), (0,), (), table.staging, limits)
    groups = [task.files for task in file_tasks(merged, files, [])]
    assert [len(group) for group in groups] == [4, 4]
    assert [{file.cluster.month for file in group} for group in groups] == [{1}, {7}]


@formats
def test_cluster_columns_change(tmp_path: Path, name: str) -> None:
    chance = random.Random(2)
    table = Table(tmp_path, name, cluster=("at", "id", "region name"))
    table.apply({n: row(chance, n) for n in range(20)})

    def change(*columns: tuple[str, pa.DataType | None, str], rows: bool = True) -> Cluster:
        """Change columns: new name, new type, former name. Returns the cluster columns."""
        table.position = Lsn(table.position + 1)
        schema = table.open().folder.schema
        new = [NewColumn(to, kind or schema.field(was).type, was, None) for to, kind, was in columns]
        table.open().change_columns(new, table.position)
        table.rows = {n: {to: stored_row[was] for to, _, was in columns} for n, stored_row in table.rows.items()}
        if rows:
            table.check()
            table.apply({n: {**table.rows[n], "note": "new"} for n in list(table.rows)[:5]})
            table.check()
        return table.open().folder.cluster

    same = [(column, None, column) for column in ("id", "at", "note", "good")]
    assert change(*same, ("area", None, "region name")) == ("at", "id", "area")
    assert change(*same, ("note 2", None, "area")) == ("at", "id", "note 2")
    assert change(*same) == ("at", "id")
    assert change(("at", None, "id"), ("id", None, "at"), *same[2:], rows=False) == ("id", "at")
    assert change(("id", None, "at"), ("at", None, "id"), *same[2:]) == ("at", "id")
    assert change(("id", pa.int64(), "id"), *same[1:]) == ("at", "id")
    assert change(("id", pa.decimal128(20, 0), "id"), *same[1:], rows=False) == ("at",)  # it has no ranges
    assert change(("id", pa.int32(), "id"), *same[1:]) == ("at",)
    assert change(same[0], *same[2:]) == ()
    table.rows = {n: row(chance, n) for n in range(20)}
    for cluster in (("day",), ()):
        table.create((), cluster)
        table.check()
        table.apply({3: row(chance, 3)})
        table.check()
        assert table.open().folder.cluster == cluster


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (("good",), "cannot be clustered by good: the column is bool"),
        (("nothing",), 'no column "nothing" for its clustering'),
        (("at", "id", "at"), 'column "at" twice'),
    ],
)
@formats
def test_unusable_cluster_columns_are_refused(tmp_path: Path, name: str, cluster: Cluster, message: str) -> None:
    with pytest.raises(ApplyError, match=message) as caught:
        Table(tmp_path, name, cluster=cluster)
    assert "--cluster" in (caught.value.hint or "")


class SortedTable(Table):
    """An Iceberg table with a sort order."""

    def stored(self) -> StoredIcebergTable:
        table = self.open()
        assert isinstance(table, StoredIcebergTable)
        return table

    def numbers(self) -> set[int | None]:
        """Return the numbers of the sort orders of all files."""
        return {entry.data_file.sort_order_id for _, entries in self.stored()._entries for entry in entries}


def test_the_sort_order_of_an_iceberg_table(tmp_path: Path) -> None:
    """The order is that of the lake or of another program. Files have its number if their rows are in that order."""
    chance = random.Random(3)
    table = SortedTable(tmp_path, ICEBERG, limits=FileLimits(small=0, rewritten=10**6), cluster=("at",))

    def write() -> set[int | None]:
        table.apply({n: row(chance, n) for n in range(20)})
        table.check()
        return table.numbers()

    assert write() == {1}
    (field,) = table.stored().table.sort_order().fields
    assert (field.direction, field.null_order) == (SortDirection.ASC, NullOrder.NULLS_LAST)
    table.stored().table.update_sort_order().asc("id", BucketTransform(4)).desc("local", IdentityTransform()).commit()
    assert table.stored().table.sort_order().order_id == 2
    assert table.open().folder.cluster == ("id", "local")  # which the ranges of files profit from
    assert write() == {None}
    table.stored().table.update_sort_order().asc("good", IdentityTransform()).commit()
    assert table.open().folder.cluster == ()
    assert write() == {None}
    table.stored().table.update_sort_order().asc("day", IdentityTransform(), NullOrder.NULLS_LAST).commit()
    number = table.stored().table.sort_order().order_id
    assert table.open().folder.cluster == ("day",)
    assert write() == {number}

    # A column of the order is dropped, and then nothing is left of it.
    schema = table.open().folder.schema
    kept = [NewColumn(field.name, field.type, field.name, None) for field in schema if field.name != "day"]
    table.position = Lsn(table.position + 1)
    table.open().change_columns(kept, table.position)
    assert table.stored().table.sort_order().order_id == 0
    table.rows.clear()
    table.create((), ("at",))
    assert table.stored().table.sort_order().order_id > number
    assert write() == {table.stored().table.sort_order().order_id}


def test_cluster_columns_survive_changes_of_a_delta_table_by_other_programs(tmp_path: Path) -> None:
    """They keep the cluster columns, which are in the metadata of columns, and can name them there."""
    chance = random.Random(4)
    table = Table(tmp_path, DELTA)
    table.apply({n: row(chance, n) for n in range(20)})
    DeltaTable(str(table.path)).alter.set_column_metadata("at", {CLUSTER: "1"})
    DeltaTable(str(table.path)).alter.set_column_metadata("good", {CLUSTER: "2"})  # which has no order
    DeltaTable(str(table.path)).alter.set_column_metadata("id", {CLUSTER: "10"})
    assert table.open().folder.cluster == ("at", "id")
    table.apply({n: row(chance, n) for n in range(20)})
    table.check()
    write_deltalake(str(table.path), table.open().to_arrow(), mode="overwrite")
    DeltaTable(str(table.path)).optimize.compact()
    assert table.open().folder.cluster == ("at", "id")


def test_liquid_clustering_of_another_program(tmp_path: Path) -> None:
    """Delta's library cannot commit to such a table."""
    table = Table(tmp_path, DELTA)
    features = ["clustering", "domainMetadata", "appendOnly", "invariants", "timestampNtz"]
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": ["timestampNtz"]}
    domain = {"domain": "delta.clustering", "configuration": json.dumps({"clusteringColumns": [["id"]]})}
    actions = [
        {"protocol": {**protocol, "writerFeatures": features}},
        {"domainMetadata": {**domain, "removed": False}},
        {"commitInfo": {"timestamp": 1}},
    ]
    log = Path(str(table.path)) / "_delta_log" / f"{table.open().version + 1:020}.json"
    log.write_text("\n".join(map(json.dumps, actions)))
    with pytest.raises(ApplyError, match=r"feature that is not supported here: clustering, domainMetadata"):
        table.apply({1: row(random.Random(1), 1)})
