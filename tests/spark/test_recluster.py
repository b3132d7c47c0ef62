"""Files that overlap in the cluster columns are written again, without Spark and without a server."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st

from subscriber.errors import ApplyError
from subscriber.spark.tables.cluster import Cluster, from_key_on, key_of
from subscriber.spark.tables.data_files import DataFile, FileLimits, NewFile
from subscriber.spark.tables.iceberg_table import StoredIcebergTable
from subscriber.spark.tables.recluster import FileKeys, Reclustered, Reclustering, overlapping, slices
from subscriber.spark.tables.table_format import DELTA, ICEBERG, CommitConflict
from tests.spark.test_cluster_columns import rows_of, values
from tests.spark.test_partitions import Table, fields, formats, row

LIMITS = FileLimits(rows=8, small=0, target=12_000, memory=2_000, rewritten=0, deleted=0.9)


def write_again(table: Table, most: int = 3) -> tuple[Reclustering, list[NewFile]]:
    """Return the work on a table, and the files that it has written."""
    work = Reclustering(table.open(), table.limits)
    tasks = work.slice_tasks([task() for task in work.keys_tasks()], most)
    return work, [file for task in tasks for file in task()]


def recluster(table: Table, most: int = 3) -> Reclustered:
    work, added = write_again(table, most)
    return work.commit(added)


@given(
    st.lists(st.fixed_dictionaries(values), min_size=1, max_size=12),
    st.permutations(list(values)).flatmap(lambda names: st.integers(1, 3).map(lambda n: tuple(names[:n]))),
)
def test_rows_from_a_key_on(found: list[dict[str, Any]], cluster: Cluster) -> None:
    batch = rows_of(found, 0)
    columns = [pa.chunked_array([batch[name]]) for name in cluster]
    keys = [key_of(batch, place, cluster) for place in range(len(batch))]
    for key in keys:
        assert from_key_on(columns, key).to_pylist() == [other >= key for other in keys]


ranges = st.tuples(st.integers(0, 2), st.lists(st.integers(0, 30), min_size=1, max_size=5))


@given(st.lists(ranges, max_size=12), st.integers(1, 5), st.integers(1, 1_000))
def test_each_row_is_in_one_slice(found: list[tuple[int, list[int]]], most: int, target: int) -> None:
    files = [
        FileKeys(
            DataFile(f"{number}", 100, None, None, partition=(partition,)),
            len(keys),
            tuple(((False, key),) for key in sorted(keys)),
        )
        for number, (partition, keys) in enumerate(found)
    ]
    groups = overlapping(files)
    together = {member.file.path: place for place, group in enumerate(groups) for member in group}
    for member in files:
        for other in files:
            is_apart = member.keys[-1] <= other.keys[0] or other.keys[-1] <= member.keys[0]
            if member is not other and member.file.partition == other.file.partition and not is_apart:
                assert together[member.file.path] == together[other.file.path]
    for group in groups:
        assert len({member.file.partition for member in group}) == 1
        divided = slices(group, FileLimits(target=target), most)
        assert len(divided) <= most
        for member in group:
            for key in member.keys:
                wanted = [
                    some for some, low, high in divided if (low is None or key >= low) and (high is None or key < high)
                ]
                assert [member.file in some for some in wanted] == [True]


@pytest.mark.parametrize(
    ("name", "cluster", "partitions"),
    [
        (DELTA, ("region name",), ()),
        (DELTA, ("at", "id"), fields("good")),
        (ICEBERG, ("local",), ()),
        (ICEBERG, ("region name", "day", "at"), fields("good")),
    ],
)
def test_files_do_not_overlap_any_more(tmp_path: Path, name: str, cluster: Cluster, partitions: Any) -> None:
    """The table keeps its rows, its position and its earlier versions. A second attempt finds nothing to do."""
    chance = random.Random(f"{cluster}")
    table = Table(tmp_path, name, partitions, LIMITS, cluster=cluster)
    for _ in range(3):
        numbers = chance.sample(range(400), 120)
        table.apply({n: None if n in table.rows and chance.random() < 0.2 else row(chance, n) for n in numbers})
    before = table.open()
    files, rows = before.files(None), before.to_arrow().num_rows
    done = recluster(table)
    assert done.removed > 1
    assert done.added > 0
    after = table.open()
    assert (after.position, after.number, after.version) == (before.position, before.number, done.version)
    assert (len(after.files(None)), after.folder.layout) == (
        len(files) - done.removed + done.added,
        before.folder.layout,
    )
    table.check()
    work = Reclustering(after, table.limits)
    assert overlapping([task() for task in work.keys_tasks()]) == []
    assert recluster(table) == Reclustered(0, 0, None)
    assert table.open().version == done.version
    after.load_version(before.version)
    assert after.to_arrow().num_rows == rows
    table.apply({n: row(chance, n) for n in range(0, 400, 7)})
    table.check()
    assert not any(file.deletes for file in table.open().files(None)) or name == ICEBERG


@formats
def test_readers_of_changes_skip_the_commit(tmp_path: Path, name: str) -> None:
    chance = random.Random(5)
    table = Table(tmp_path, name, limits=LIMITS, cluster=("at",))
    for first in (0, 50):
        table.apply({n: row(chance, n) for n in range(first, first + 50)})
    table.apply({n: row(chance, n) for n in range(0, 100, 50)})
    assert recluster(table).removed > 1
    stored = table.open()
    if isinstance(stored, StoredIcebergTable):
        snapshots = stored.table.snapshots()
        summaries = [snapshot.summary for snapshot in snapshots[-2:] if snapshot.summary is not None]
        assert [summary.operation.value for summary in summaries] == ["overwrite", "replace"]
        totals = ("total-records", "total-position-deletes")
        before, after = ([int(summary.additional_properties[name]) for name in totals] for summary in summaries)
        assert after == [before[0] - before[1], 0] == [100, 0]
    else:
        log = Path(str(table.path)) / "_delta_log" / f"{stored.version:020}.json"
        actions = [json.loads(line) for line in log.read_text().splitlines()]
        changes = {action[kind]["dataChange"] for action in actions for kind in ("add", "remove") if kind in action}
        assert changes == {False}
        assert DeltaTable(str(table.path)).to_pyarrow_table().num_rows == 100


@formats
def test_another_commit_comes_first(tmp_path: Path, name: str) -> None:
    chance = random.Random(6)
    table = Table(tmp_path, name, limits=LIMITS, cluster=("at",))
    for first in (0, 50):
        table.apply({n: row(chance, n) for n in range(first, first + 50)})
    work, added = write_again(table)
    table.apply({7: row(chance, 7)})
    with pytest.raises(CommitConflict):
        work.commit(added)
    table.check()
    work, added = write_again(table)
    with pytest.raises(ApplyError, match=r"its files have \d+ rows, and those in their place have \d+"):
        work.commit(added[:-1])
    table.check()
    assert work.commit(added).removed > 0
    table.check()


@formats
def test_a_table_without_cluster_columns_stays(tmp_path: Path, name: str) -> None:
    chance = random.Random(7)
    table = Table(tmp_path, name, limits=LIMITS)
    for first in (0, 50):
        table.apply({n: row(chance, n) for n in range(first, first + 50)})
    assert recluster(table) == Reclustered(0, 0, None)
