"""LakeMerge: the staged rows of several tables are applied to them, by executors, and committed table by table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from subscriber.changelog.storage import Location
from subscriber.errors import ApplyError
from subscriber.spark.lake.batch import BatchTables
from subscriber.spark.lake.lake_table import LakeTable
from subscriber.spark.lake.table_store import TableStore
from subscriber.spark.tables.data_files import NewFile
from subscriber.spark.tables.merge import Columns, Files, run
from subscriber.spark.tables.stage import Staged
from subscriber.spark.tables.table_merge import TableMerge
from subscriber.spark.tasks import run_tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class LakeMerge:
    """The merge of one batch. A table whose rows cannot be merged is set aside, and the others are merged."""

    def __init__(self, spark: SparkSession, store: TableStore, batch: BatchTables, staging: Location) -> None:
        """Describe the merge.

        Args:
            spark: the session.
            store: the tables.
            batch: the batch, which sets tables aside.
            staging: the directory of staged rows.
        """
        self._spark = spark
        self._store = store
        self._batch = batch
        self._staging = staging

    def apply(self, states: Mapping[str, LakeTable], staged: Mapping[str, list[Staged]]) -> None:
        """Apply staged rows to their tables, and store the states of these.

        Args:
            states: the states of the tables after the batch, by label.
            staged: the rows of each table.
        """
        end, limits = self._batch.end, self._store.limits
        merges = {
            label: TableMerge(
                partial(self._store.open, label),
                Columns(tuple(states[label].names())),
                parts,
                end,
                self._staging,
                limits,
            )
            for label, parts in staged.items()
        }
        while merges:
            tasks = {}
            for label, merge in merges.items():
                with self._batch.table(label), self._store.storing():
                    tasks[label] = merge.file_tasks()
            files: dict[str, list[Files]] = self._run(tasks)
            inserts = {label: merges[label].insert_tasks(task_files) for label, task_files in files.items()}
            inserted: dict[str, list[list[NewFile]]] = self._run(inserts)
            conflicts = {}
            for label, new in inserted.items():
                with self._batch.table(label):
                    if not self._commit(states[label], merges[label], files[label], new):
                        conflicts[label] = merges[label]
            merges = conflicts

    def _commit(self, state: LakeTable, merge: TableMerge, files: list[Files], new: list[list[NewFile]]) -> bool:
        """Commit one table, and store its state. Returns False if the tasks have to be repeated."""
        self._store.check_lock()
        with self._store.storing():
            if not merge.commit(files, new):
                return False
            self._store.add_version(state.label, self._batch.end, merge.version)
        self._store.save(state)
        return True

    def _run(self, tasks: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Run the tasks of tables on executors.

        Returns the results of the tables that are not set aside by an error.
        """
        labels = [label for label, some in tasks.items() for _ in some]
        results = run_tasks(self._spark, run, [task for some in tasks.values() for task in some])
        by_label: dict[str, list[Any]] = {label: [] for label in tasks}
        for label, result in zip(labels, results, strict=True):
            if isinstance(result, ApplyError) and label in by_label:
                self._batch.set_aside(label, result)
                del by_label[label]
            elif label in by_label:
                by_label[label].append(result)
        return by_label
