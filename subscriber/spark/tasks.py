"""Many small pieces of work on Spark's executors, one task each.

A task that raises is tried again, on another executor if there is one, as Spark is set up; a piece of work must
be harmless to begin twice. What trying again cannot help is returned, not raised.

They are RDDs of pickled objects: nothing here is a table, and Python workers start in a third of the time without
pandas and Arrow.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.to_thread

from subscriber.errors import SubscriberError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Task = TypeVar("Task")
Result = TypeVar("Result")

_numbers = itertools.count()


async def run_in_thread(spark: SparkSession, function: Callable[[Task], Result], tasks: Sequence[Task]) -> list[Result]:
    """run_tasks() for an event loop; who is cancelled while waiting has what is left of it interrupted."""
    tag = f"subscriber-{next(_numbers)}"
    try:
        return await anyio.to_thread.run_sync(
            lambda: run_tasks(spark, function, tasks, tag=tag), abandon_on_cancel=True
        )
    except anyio.get_cancelled_exc_class():
        spark.sparkContext.cancelJobsWithTag(tag)
        raise


def run_tasks(
    spark: SparkSession, function: Callable[[Task], Result], tasks: Sequence[Task], *, tag: str | None = None
) -> list[Result]:
    """function(task) for each of `tasks`; the results in their order.

    `function` is one of a module's, and tasks and results are picklable. Blocks: call it in a thread. Another
    thread ends it by `spark.sparkContext.cancelJobsWithTag(tag)`. Raises SubscriberError when a task keeps failing.
    """
    if not tasks:
        return []
    context = spark.sparkContext
    if tag is not None:
        context.addJobTag(tag)
    try:
        with spark_errors():
            return context.parallelize(tasks, len(tasks)).map(function).collect()
    finally:
        if tag is not None:
            context.removeJobTag(tag)


@contextmanager
def spark_errors() -> Iterator[None]:
    """What Spark raises in the block, as SubscriberError."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    try:
        yield
    except (Py4JError, PySparkException) as error:
        java = getattr(error, "java_exception", None)
        lines = str(error if java is None else java.getMessage()).splitlines()
        raise SubscriberError("Spark could not finish the work", detail=lines[0] if lines else None) from error
