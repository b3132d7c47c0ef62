"""Comparison of all tables of a subscription, with queries that Spark's executors send.

The queries and their results are those of package comparison. Executors of a cluster open more connections than one
program, and retry a query on another machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import anyio.to_thread

from subscriber.comparison.comparison import compare
from subscriber.comparison.progress import ComparisonProgress, OnProgress
from subscriber.comparison.queries import ChecksumTask, OnTaskDone, Outcome, is_error_of_table, run_task_on_executor
from subscriber.comparison.result import Comparison
from subscriber.errors import SubscriberError
from subscriber.publisher.partitions import PART_BYTES
from subscriber.spark.session import MASTER, QUICK, spark_session
from subscriber.spark.tasks import run_in_thread

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


async def verify(
    target: str,
    name: str,
    *,
    apply_target: str | None = None,
    spark: SparkSession | None = None,
    master: str = MASTER,
    part_bytes: int = PART_BYTES,
    since_last: bool = False,
    resume: Path | None = None,
    on_progress: OnProgress = lambda _: None,
) -> Comparison:
    """Compare every table of a subscription with the publisher's.

    The launcher must be running. Writes may continue.

    Args:
        target: the connection string of the subscription's database.
        name: the subscription.
        apply_target: the connection string of the role that applies changes, which also reads the tables. None:
            `target`.
        spark: the session in which to compare; None: a new session on `master`.
        master: Spark's master URL, used without `spark`.
        part_bytes: the size of a part of a table in bytes.
        since_last: read only rows in ranges of keys that the stream has changed since the last comparison.
        resume: a file for the results of tables that are compared, see subscriber.comparison.verify().
        on_progress: called at the beginning of each phase.

    Returns:
        The differences of each table, as of one position of the publisher.

    Raises:
        StatementError: there is no such subscription.
        SubscriberError: the apply worker cannot be paused, or a server cannot be queried.
        PublisherError: the publisher cannot serve the subscription.
        ServerError: a server refuses a query.
        ConnectionLost: a server cannot be reached, or the connection is lost.

    Cancellation: the apply worker is resumed, and running queries are interrupted.
    """
    with ExitStack() as stack:
        on_progress(ComparisonProgress("starting Spark"))
        opening = spark_session(spark, master=master, java_options=QUICK)
        session = await anyio.to_thread.run_sync(stack.enter_context, opening)

        async def run(tasks: Sequence[ChecksumTask], _on_done: OnTaskDone) -> list[Outcome]:
            outcomes: list[Outcome] = await run_in_thread(session, run_task_on_executor, tasks)
            for outcome in outcomes:
                if isinstance(outcome, SubscriberError) and not is_error_of_table(outcome):
                    raise outcome
            return outcomes

        return await compare(
            target,
            name,
            run,
            apply_target=apply_target,
            part_bytes=part_bytes,
            since_last=since_last,
            resume=resume,
            on_progress=on_progress,
        )
