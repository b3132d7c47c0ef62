"""A Spark driver as a separate process.

    python -m subscriber.spark.copy.driver_process

It reads its tasks from stdin and writes the results to stdout, both pickled. Its parent may kill it, or may be killed.
The end of stdin ends the process immediately, and the JVM and the executors with it.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import AsyncExitStack

import anyio
import anyio.abc

from subscriber.errors import SubscriberError
from subscriber.spark.copy.executor import Failure, PartTask, copy_parts
from subscriber.spark.copy.plan import spread
from subscriber.spark.session import QUICK, spark_session
from subscriber.spark.tasks import parallelism, run_tasks

KILLED = "the Spark driver has ended before its work was done"


async def run_driver(master: str, tasks: Sequence[tuple[PartTask, ...]]) -> list[list[Failure]]:
    """Copy the parts with a driver started for them. Returns the results in the order of execution.

    Raises:
        SubscriberError: the driver ended early; the detail is the last line that it printed.

    Cancellation: the driver is killed.
    """
    order = pickle.dumps((master, list(tasks)))
    command = [sys.executable, "-m", "subscriber.spark.copy.driver_process"]
    async with AsyncExitStack() as stack:
        directory = tempfile.mkdtemp(prefix="subscriber-driver-")
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        environment = {**os.environ, "TMPDIR": directory}
        process = await anyio.open_process(command, env=environment, start_new_session=True)
        await stack.enter_async_context(process)
        assert process.stdin is not None
        answer, complaint = bytearray(), bytearray()
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(_collect, process.stdout, answer)
                group.start_soon(_collect, process.stderr, complaint)
                await _send(process.stdin, len(order).to_bytes(8, "big") + order)
                await process.wait()
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        lines = complaint.decode(errors="replace").strip().splitlines()
        raise SubscriberError(KILLED, detail=lines[-1] if lines else f"Its exit status was {process.returncode}.")
    results: list[list[Failure]] = pickle.loads(bytes(answer))
    return results


async def _send(stream: anyio.abc.ByteSendStream, data: bytes) -> None:
    try:
        await stream.send(data)
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        return  # the process has ended; its exit status has the reason


async def _collect(stream: anyio.abc.ByteReceiveStream | None, into: bytearray) -> None:
    assert stream is not None
    async for chunk in stream:
        into += chunk


def main() -> None:
    """Run the tasks that arrive on stdin."""
    size = int.from_bytes(sys.stdin.buffer.read(8), "big")
    master, tasks = pickle.loads(sys.stdin.buffer.read(size))
    end_with_parent(tempfile.gettempdir())  # created by the parent for this process
    with spark_session(master=master, java_options=QUICK) as spark:
        results = run_tasks(spark, copy_parts, spread(tasks, parallelism(spark)))
    sys.stdout.buffer.write(pickle.dumps(results))
    sys.stdout.buffer.flush()


def end_with_parent(directory: str | None = None) -> None:
    """End this process silently when stdin ends. The pipe from its parent ends with the parent.

    Args:
        directory: removed before the end; None: none.
    """

    def watch() -> None:
        while os.read(0, 1):
            pass
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main()
