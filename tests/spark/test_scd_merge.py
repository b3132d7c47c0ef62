"""What apply_changes() does without Spark: the net effect of a micro-batch, its merge and commit."""

from __future__ import annotations

import random
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, Schema
from pyiceberg.catalog import load_catalog
from pyiceberg.table.sorting import NullOrder
from pyiceberg.transforms import IdentityTransform
from pyiceberg.utils.config import Config

from subscriber.changelog.objects import ObjectPath
from subscriber.changelog.row_columns import sequence_number
from subscriber.changelog.storage import Location
from subscriber.errors import ApplyError, StatementError
from subscriber.lsn import Lsn
from subscriber.spark.scd.apply import checkpoint_of
from subscriber.spark.scd.net_rows import net_rows
from subscriber.spark.scd.staged_rows import stage
from subscriber.spark.scd.target import END, START, ScdTarget, split_sequence
from subscriber.spark.tables.data_files import FileLimits
from subscriber.spark.tables.delta import CLUSTER
from subscriber.spark.tables.merge import run
from subscriber.spark.tables.table_format import FORMATS, ICEBERG
from subscriber.spark.tables.table_merge import TableMerge
from tests.spark.test_partitions import cluster_key

Change = tuple[str, int | None, int | None, str | None, list[str]]


def changes(*rows: Change, first: int = 0) -> pa.Table:
    """Return changes: op, former key, key, value, unsent columns."""
    names = ("op", "old0", "value0", "value1", "unsent")
    kinds = (pa.string(), pa.int32(), pa.int32(), pa.string(), pa.list_(pa.string()))
    columns = {
        name: pa.array(column, kind) for name, column, kind in zip(names, zip(*rows, strict=True), kinds, strict=True)
    }
    numbers = range(first, first + len(rows))
    times = pa.array(numbers, pa.timestamp("us", tz="UTC"))
    return pa.table({**columns, "seq": [sequence_number(0, number) for number in numbers], "time": times})


class Model:
    """The versions of a table's rows: start, end, key, value."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.versions: list[list[Any]] = []
        self.number = 0

    def current(self) -> dict[int, list[Any]]:
        return {version[2]: version for version in self.versions if version[1] is None}

    def change(self) -> Change:
        self.number += 1
        keys = list(self.current())
        op = self.chance.choices("iudmt", (4, 4, 2, 2, 0.2))[0] if keys else "i"
        old, free = self.chance.choice(keys or [0]), self.chance.choice(list(set(range(40)) - set(keys)))
        new = {"i": free, "u": old, "m": free}.get(op)
        for key in keys if op == "t" else [old] if op in "udm" else []:
            self.current()[key][1] = self.number
        if new is not None:
            self.versions.append([self.number, None, new, f"v{self.number}"])
        value = None if new is None else f"v{self.number}"
        return ("u" if op == "m" else op), (old if op in "dm" else None), new, value, []


class Applied:
    """A target whose tasks run in this process, with small files."""

    def __init__(self, target: ScdTarget, directory: Location) -> None:
        self.target = target
        self.directory = directory

    def start(self, number: int, *changed: Change) -> TableMerge:
        history, columns = self.target.history, self.target.columns
        made = changes(*changed, first=number - len(changed) + 1)
        rows = net_rows(made, columns.names, [0], history=history)
        half = pc.equal(pc.bit_wise_and(rows["key0"], 1), 1).fill_null(False)
        parts = [
            stage(part, len(columns), [0], self.directory, history=history)
            for part in (rows.filter(half), rows.filter(pc.invert(half)))
        ]
        limits = FileLimits(rows=5, largest=900, small=600, many=4, rewritten=0, deleted=0.3)
        return TableMerge(
            self.target.open, self.target.all_columns(), parts, Lsn(1), self.directory, limits, number=number
        )

    def finish(self, merge: TableMerge) -> bool:
        files: Any = [run(task) for task in merge.file_tasks()]
        return merge.commit(files, [cast("Any", run(task)) for task in merge.insert_tasks(files)])

    def versions(self) -> set[tuple[Any, ...]]:
        rows = self.target.open().to_arrow().to_pylist()
        numbers = [(self._number(row.get(START)), self._number(row.get(END))) for row in rows]
        versions = [(*pair, row["k"], row["v"]) for pair, row in zip(numbers, rows, strict=True)]
        assert len(set(versions)) == len(versions)
        return set(versions)

    @staticmethod
    def _number(sequence: str | None) -> int | None:
        return None if sequence is None else split_sequence(sequence)[1]


@pytest.fixture(params=[(name, history) for name in FORMATS for history in (False, True)], ids=str)
def applied(request: pytest.FixtureRequest, tmp_path: Path, catalog: str) -> Applied:
    (name, history), columns = request.param, pa.schema([("k", pa.int32()), ("v", pa.string())])
    into = "shop.items" if name == ICEBERG else tmp_path / "items"
    of_iceberg = catalog if name == ICEBERG else None
    return Applied(ScdTarget(into, columns, [0], history=history, catalog=of_iceberg), tmp_path / "staged")


@pytest.fixture
def partitioned(applied: Applied) -> Applied:
    """Create the table with partitions, as another program does."""
    target = applied.target
    if target.catalog is None:
        DeltaTable.create(str(target.into), Schema.from_arrow(target.schema()), partition_by=["v"])
    else:
        target.open()
        load_catalog(target.catalog).load_table(str(target.into)).update_spec().add_identity("v").commit()
    return applied


def test_changed_rows_move_between_partitions(partitioned: Applied) -> None:
    """Each value is a partition of its own, so each change of a row moves it to another one."""
    history, model = partitioned.target.history, Model(5)
    for _ in range(4):
        batch = [model.change() for _ in range(15)]
        assert partitioned.finish(partitioned.start(model.number, *batch))
        wanted = {tuple(version) for version in model.versions if history or version[1] is None}
        assert partitioned.versions() == {row if history else (None, None, *row[2:]) for row in wanted}
    files = partitioned.target.open().files(None)
    assert len({file.partition for file in files}) == len(wanted)


def test_cluster_columns_named_by_another_program_are_kept(applied: Applied) -> None:
    """Another program names them: in the sort order of an Iceberg table, in the metadata of a column of Delta."""
    target, model = applied.target, Model(6)
    target.open()
    if target.catalog is None:
        DeltaTable(str(target.into)).alter.set_column_metadata("v", {CLUSTER: "1"})
    else:
        table = load_catalog(target.catalog).load_table(str(target.into))
        table.update_sort_order().asc("v", IdentityTransform(), NullOrder.NULLS_LAST).commit()
    for _ in range(4):
        batch = [model.change() for _ in range(15)]
        assert applied.finish(applied.start(model.number, *batch))
        wanted = {tuple(version) for version in model.versions if target.history or version[1] is None}
        assert applied.versions() == {row if target.history else (None, None, *row[2:]) for row in wanted}
    stored = target.open()
    assert stored.folder.cluster == ("v",)
    for file in stored.files(None):
        rows = [row for batch in stored.folder.rows([file]) for row in batch.to_pylist()]
        keys = [cluster_key(row, ("v",)) for row in rows]
        assert keys == sorted(keys)


def test_random_batches_leave_the_versions_of_a_model(applied: Applied) -> None:
    history, model, with_deletes = applied.target.history, Model(7), 0
    for _ in range(16):
        batch = [model.change() for _ in range(model.chance.randint(1, 25))]
        assert applied.finish(applied.start(model.number, *batch))
        wanted = {tuple(version) for version in model.versions if history or version[1] is None}
        assert applied.versions() == {row if history else (None, None, *row[2:]) for row in wanted}
        assert applied.target.applied(applied.target.open()) == sequence_number(1, model.number)
        assert applied.finish(applied.start(model.number, *batch))  # again: nothing changes
        assert len(applied.versions()) == len(wanted)
        with_deletes += any(file.deletes for file in applied.target.open().files(None))
    assert (with_deletes > 2) == (applied.target.catalog is not None)


def test_the_second_of_two_commits_changes_nothing(applied: Applied) -> None:
    first, second = (applied.start(1, ("i", None, key, "x", [])) for key in (1, 2))
    for merge in (first, second):
        assert merge.file_tasks() == []
    inserted: Any = [[run(task) for task in merge.insert_tasks([])] for merge in (first, second)]
    assert first.commit([], inserted[0])
    assert not second.commit([], inserted[1])
    assert {row[2] for row in applied.versions()} == {1}


# A server has place for the buckets of several catalogs.
@pytest.mark.parametrize("number", [1, *(pytest.param(number, marks=pytest.mark.soak) for number in (2, 3, 4))])
def test_a_catalog_that_is_a_server(objects: ObjectPath, rest_catalog: str, number: int) -> None:
    columns = pa.schema([("k", pa.int32()), ("v", pa.string())])
    applied = Applied(ScdTarget("shop.items", columns, [0], history=True, catalog=rest_catalog), objects)
    model = Model(3)
    for _ in range(5):
        batch = [model.change() for _ in range(10)]
        assert applied.finish(applied.start(model.number, *batch))
    assert applied.versions() == {tuple(version) for version in model.versions}


def test_lists_are_stored_and_read_by_others(tmp_path: Path, catalog: str) -> None:
    columns = pa.schema([("k", pa.int16()), ("tags", pa.list_(pa.string())), ("sums", pa.list_(pa.decimal128(9, 2)))])
    for into, name in ((tmp_path / "items", None), ("shop.lists", catalog)):
        target = ScdTarget(into, columns, [0], history=False, catalog=name)
        rows = {
            "op": ["put", "put"],
            "key0": pa.array([1, 2], pa.int16()),
            "value1": [["a", None], None],
            "value2": pa.array([[], [Decimal("1.25")]], columns.field("sums").type),
        }
        staged = stage(pa.table(rows), 3, [0], tmp_path / "staged", history=False)
        merge = TableMerge(target.open, target.all_columns(), [staged], Lsn(1), tmp_path / "staged", number=1)
        assert Applied(target, tmp_path).finish(merge)
        rows_read = target.open().to_arrow().select(columns.names).to_pylist()
        assert rows_read == [
            {"k": 1, "tags": ["a", None], "sums": []},
            {"k": 2, "tags": None, "sums": [Decimal("1.25")]},
        ]


def test_a_table_with_other_columns_is_refused(applied: Applied, tmp_path: Path) -> None:
    target = applied.target
    target.open()
    for columns in (target.columns.remove(1), target.columns.set(1, pa.field("v", pa.int64()))):
        other = ScdTarget(target.into, columns, [0], history=target.history, catalog=target.catalog)
        with pytest.raises(StatementError, match="does not have the columns"):
            other.open()


def test_a_table_of_the_other_type_is_refused(applied: Applied) -> None:
    target = applied.target
    target.open()
    other = ScdTarget(target.into, target.columns, [0], history=not target.history, catalog=target.catalog)
    with pytest.raises(StatementError, match=f"is one of SCD type {2 if target.history else 1}") as raised:
        other.open()
    assert f"stored_as_scd_type={2 if target.history else 1}" in str(raised.value.hint)


@pytest.mark.parametrize(
    ("into", "catalog_name", "message"),
    [
        ("items", "shop", "does not name a table"),
        ("shop.items", "shop", "needs a checkpoint"),
        ("s3://bucket/items", None, "needs a checkpoint"),
        ("shop.items", "nowhere", "cannot load catalog"),
    ],
)
def test_an_unusable_table_is_refused_with_a_hint(
    into: str, catalog_name: str | None, message: str, catalog: str
) -> None:
    target = ScdTarget(into, pa.schema([("k", pa.int32())]), [0], history=False, catalog=catalog_name)
    with pytest.raises(StatementError, match=message) as caught:
        checkpoint_of(target) if "checkpoint" in message else target.open()
    assert caught.value.hint


def test_a_catalog_without_a_place_for_tables(catalog: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYICEBERG_CATALOG__SHOP__WAREHOUSE")
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())
    target = ScdTarget("shop.items", pa.schema([("k", pa.int32())]), [0], history=False, catalog=catalog)
    with pytest.raises(StatementError, match="cannot be created") as caught:
        target.open()
    assert "warehouse" in str(caught.value.hint)


def test_values_that_were_not_sent_come_from_the_first_key() -> None:
    moved = changes(
        ("u", None, 1, "x", []), ("u", 1, 2, None, ["v"]), ("u", 5, 6, None, ["v"]), ("u", 6, 7, None, ["v"])
    )
    rows = net_rows(moved, ("k", "v"), [0], history=False).to_pylist()
    assert {(row["op"], row["key0"], row["value1"], row["from0"], str(row["unsent"])) for row in rows} == {
        ("delete", 1, None, None, "None"),
        ("delete", 5, None, None, "None"),
        ("delete", 6, None, None, "None"),
        ("put", 2, "x", None, "None"),
        ("put", 7, None, 5, "[1]"),
    }
    for history in (False, True):
        with pytest.raises(ApplyError, match="does not exist"):
            net_rows(changes(("d", 1, None, None, []), ("u", 1, 2, None, ["v"])), ("k", "v"), [0], history=history)


def test_a_key_is_in_each_change() -> None:
    """A large value of a key that did not change is in the old key. Other keys are not those of the changes."""
    (row,) = net_rows(changes(("u", 7, None, "x", ["k"])), ("k", "v"), [0], history=False).to_pylist()
    assert (row["op"], row["key0"], row["value0"], row["value1"], row["unsent"]) == ("put", 7, 7, "x", None)
    wrong: list[Change] = [("d", None, None, None, []), ("r", None, None, "x", []), ("u", None, None, "x", [])]
    for change in wrong:
        with pytest.raises(ApplyError, match="no value of a column of the key"):
            net_rows(changes(change), ("k", "v"), [0], history=False)
