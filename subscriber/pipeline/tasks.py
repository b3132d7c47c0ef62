"""Many small pieces of work on Spark's executors, one task each.

A task that raises is tried again, on another executor if there is one, as Spark is set up; a piece of work must
be harmless to begin twice. What trying again cannot help is returned, not raised.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import anyio
import anyio.to_thread

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

Task = TypeVar("Task")
Result = TypeVar("Result")

_numbers = itertools.count()
_SCHEMA = "number long, result binary"


async def run_in_thread(spark: SparkSession, function: Callable[[Task], Result], tasks: Sequence[Task]) -> list[Result]:
    """run_tasks() for an event loop; who is cancelled while waiting has what is left of it interrupted."""
    tag = f"subscriber-{next(_numbers)}"
    try:
        return await anyio.to_thread.run_sync(
            lambda: run_tasks(spark, function, tasks, tag=tag), abandon_on_cancel=True
        )
    except anyio.get_cancelled_exc_class():
        spark.interruptTag(tag)
        raise


def run_tasks(
    spark: SparkSession, function: Callable[[Task], Result], tasks: Sequence[Task], *, tag: str | None = None
) -> list[Result]:
    """function(task) for each of `tasks`; the results in their order.

    `function` is one of a module's, and tasks and results are picklable. Blocks: call it in a thread. Another
    thread ends it by `spark.interruptTag(tag)`.
    """
    if not tasks:
        return []
    if tag is not None:
        spark.addTag(tag)
    try:
        numbers = spark.range(0, len(tasks), 1, len(tasks))
        rows = numbers.mapInArrow(_Work(function, tuple(tasks)), _SCHEMA).collect()
    finally:
        if tag is not None:
            spark.removeTag(tag)
    return [pickle.loads(row.result) for row in sorted(rows, key=lambda row: row.number)]


class _Work(Generic[Task, Result]):
    """What an executor is sent."""

    def __init__(self, function: Callable[[Task], Result], tasks: tuple[Task, ...]) -> None:
        self._function = function
        self._tasks = tasks

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        schema = pa.schema([("number", pa.int64()), ("result", pa.binary())])
        for batch in batches:
            for number in batch.column(0).to_pylist():
                result = pickle.dumps(self._function(self._tasks[number]))
                yield pa.RecordBatch.from_pydict({"number": [number], "result": [result]}, schema=schema)
