"""Many small tasks on Spark's executors.

A task that raises is retried, on another executor if there is one, as Spark is configured. A task must therefore be
harmless to start twice. A permanent error is returned, not raised.

Tasks are RDDs of pickled objects. They hold no tables, and Python workers start in a third of the time without pandas
and Arrow. A session of Spark Connect has no RDDs, so tasks are rows of a DataFrame there.
"""

from __future__ import annotations

import functools
import gc
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar

from subscriber.errors import SubscriberError
from subscriber.spark.error_text import cause

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

Task = TypeVar("Task")
Result = TypeVar("Result")
Given = TypeVar("Given")


def is_connect(spark: SparkSession) -> bool:
    """Return True if the session is one of Spark Connect, which has no SparkContext."""
    return type(spark).__module__.startswith("pyspark.sql.connect.")


def parallelism(spark: SparkSession) -> int:
    """Return how many tasks Spark runs at a time, as far as it says."""
    return _partitions(spark) if is_connect(spark) else spark.sparkContext.defaultParallelism


@functools.lru_cache(maxsize=1)
def _partitions(spark: SparkSession) -> int:
    """Return the number of partitions of a large range, which is Spark's default parallelism."""
    return spark.range(1 << 20).selectExpr("spark_partition_id()").distinct().count()


def run_tasks(spark: SparkSession, function: Callable[[Task], Result], tasks: Sequence[Task]) -> list[Result]:
    """Call function(task) on the executors for each of `tasks`. Returns the results in order.

    This call blocks, so call it in a thread.

    Args:
        function: a function of a module, picklable.
        tasks: picklable, as their results are.

    Raises:
        SubscriberError: a task failed in every attempt.
    """
    if not tasks:
        return []
    if is_connect(spark):
        with spark_errors():
            return run_tasks_of_rows(spark, function, tasks)
    with spark_errors():
        results = spark.sparkContext.parallelize(tasks, len(tasks)).mapPartitions(sparing(partial(map, function)))
        return results.collect()


def run_tasks_of_rows(spark: SparkSession, function: Callable[[Task], Result], tasks: Sequence[Task]) -> list[Result]:
    """Call function(task) as run_tasks() does, but as the work of a DataFrame: a Spark Connect session has no other.

    Args:
        function: a function of a module, picklable.
        tasks: picklable, as their results are.
    """
    if not tasks:
        return []
    import pyarrow as pa

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            results = [pickle.dumps(function(tasks[number])) for number in batch["id"].to_pylist()]
            yield pa.record_batch([batch["id"], pa.array(results, pa.binary())], names=["id", "result"])

    rows = spark.range(0, len(tasks), 1, len(tasks)).mapInArrow(sparing(run), "id long, result binary").collect()
    return [pickle.loads(row.result) for row in sorted(rows, key=itemgetter(0))]


def spare_collector() -> None:
    """Exclude imported objects from garbage collection, which Spark's workers run after each task.

    The collection took 25 ms of a task, and 40 ms with pandas, which a worker imports when it writes its first batch.
    Objects of modules that were imported since the last call are excluded as well. Without new modules nothing is done:
    objects of a task are never excluded again and again.
    """
    _freeze(len(sys.modules))


def sparing_collector(results: Iterable[Result]) -> Iterator[Result]:
    """Yield the results of a task, then call spare_collector()."""
    yield from results
    spare_collector()


def sparing(function: Callable[[Given], Iterable[Result]]) -> Callable[[Given], Iterator[Result]]:
    """Return the function of a task, which calls spare_collector() at its end."""
    return lambda given: sparing_collector(function(given))


@functools.cache
def _freeze(_modules: int) -> None:
    gc.freeze()


@contextmanager
def spark_errors() -> Iterator[None]:
    """Convert Spark's exceptions in the block to SubscriberError."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    try:
        yield
    except (Py4JError, PySparkException) as error:
        java = getattr(error, "java_exception", None)
        text = str(error if java is None else java.getMessage())
        raise SubscriberError("Spark could not finish the work", detail=cause(text)) from error
