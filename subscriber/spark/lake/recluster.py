"""Tables of a lake whose files are written again in the order of their cluster columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from subscriber.display import shell_word
from subscriber.errors import ApplyError, StatementError
from subscriber.spark.lake.lake import Lake
from subscriber.spark.lake.table_store import LOAD_CONDITION
from subscriber.spark.tables.recluster import Reclustered, recluster
from subscriber.spark.tables.table_format import CommitConflict
from subscriber.sqlstate import OBJECT_IN_USE, OBJECT_NOT_IN_PREREQUISITE_STATE, UNDEFINED_TABLE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def check_recluster(lake: Lake, label: str) -> None:
    """Raise StatementError if the files of a table cannot be put in order.

    Args:
        lake: the lake.
        label: schema.name of the table.
    """
    state = lake.store.present().get(label)
    if state is None:
        raise StatementError(
            f'the lake has no table "{label}"',
            hint=f"Its tables: subscriber lake show {shell_word(str(lake.directory))}",
            sqlstate=UNDEFINED_TABLE,
        )
    if state.problem is not None:
        raise StatementError(
            f'table "{label}" of the lake is set aside: {state.problem.message}',
            hint=state.problem.hint or None,
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )
    if not lake.store.open(label).folder.cluster:
        raise StatementError(
            f'table "{label}" of the lake has no cluster columns',
            hint=f"Load it with some, {LOAD_CONDITION}: subscriber lake reload --log LOG --cluster"
            f" {label}.COLUMN {shell_word(str(lake.directory))} {shell_word(label)}",
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )


def recluster_table(
    spark: SparkSession, lake: Lake, label: str, on_rows: Callable[[int, int], None] = lambda *_: None
) -> Reclustered:
    """Write the files of a table again whose ranges overlap in its cluster columns. Its rows stay the same.

    Args:
        spark: the session.
        lake: the lake, which this process has locked.
        label: schema.name of the table.
        on_rows: called with the number of rows that are written, and of all that are to be.

    Returns:
        What was done.

    Raises:
        StatementError: the files cannot be read or written, or another program has committed to the table first.
    """
    store = lake.store
    try:
        with store.storing():
            stored = store.open(label)
            done = recluster(spark, stored, store.limits, check=store.check_lock, on_rows=on_rows)
    except CommitConflict as error:
        raise StatementError(
            f'another program has changed table "{label}" meanwhile, and its files stay as they are',
            hint="Run the command again.",
            sqlstate=OBJECT_IN_USE,
        ) from error
    except ApplyError as error:
        raise StatementError(
            f'the files of table "{label}" stay as they are: {error.message}', hint=error.hint
        ) from error
    if done.version is not None:  # the files of the version before may be gone when the position is read
        store.replace_version(label, stored.position, done.version)
    return done
