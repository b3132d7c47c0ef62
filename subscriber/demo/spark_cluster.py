"""A standalone Spark cluster on this machine: a master and two workers of one core each, in processes of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

import anyio

from subscriber.demo.object_store import free_ports
from subscriber.demo.processes import Process
from subscriber.demo.servers import ServersError

WORKERS = ("one", "two")
TIMEOUT = 120.0  # seconds until the master has the workers


@asynccontextmanager
async def standalone(directory: Path, *, worker: Sequence[str] = ()) -> AsyncIterator[str]:
    """Start a cluster, and stop it at the end of the block. Yields the URL of its master.

    Its processes have the environment of this process, which has to have JAVA_HOME.

    Args:
        directory: where the workers keep the files of their executors, in directories `one` and `two`.
        worker: a command that starts a worker, whose command line is appended; empty: none.
    """
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    # Without the variable that makes a checkout importable.
    program = ["env", "-u", "PYTHONPATH", str(Path(spec.origin).parent / "bin" / "spark-class")]
    (port,) = free_ports(1)
    url, deploy = f"spark://127.0.0.1:{port}", "org.apache.spark.deploy"
    master_options = ["--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"]
    worker_options = ["--host", "127.0.0.1", "--cores", "1", "--memory", "1g", "--webui-port", "0"]
    master = Process("master", [*program, f"{deploy}.master.Master", *master_options], directory)
    async with AsyncExitStack() as stack:
        master.start()
        stack.push_async_callback(master.stop)
        await _said(master, "New state: ALIVE", 1)
        for name in WORKERS:
            place = ["--work-dir", str(directory / name), url]
            process = Process(name, [*worker, *program, f"{deploy}.worker.Worker", *worker_options, *place], directory)
            process.start()
            stack.push_async_callback(process.stop)
        await _said(master, "Registering worker", len(WORKERS))
        yield url


async def _said(process: Process, text: str, times: int) -> None:
    with anyio.move_on_after(TIMEOUT):
        while sum(text in line for line in process.lines()) < times:
            if process.pid is None:
                break
            await anyio.sleep(0.1)
        else:
            return
    raise ServersError("the Spark cluster did not start", detail=process.last_lines(50))


def executors(directory: Path) -> list[int]:
    """Return the process ids of the executors, by their directories below that of standalone()."""
    numbers = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        try:
            place = path.readlink()
            is_executor = "CoarseGrainedExecutorBackend" in (path.parent / "cmdline").read_text(errors="replace")
        except OSError:  # the process has ended
            continue
        if is_executor and any(place.is_relative_to(directory / name) for name in WORKERS):
            numbers.append(int(path.parent.name))
    return numbers
