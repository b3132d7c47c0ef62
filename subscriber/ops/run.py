"""`subscriber run`: the launcher as a program that ends on SIGTERM."""

from __future__ import annotations

import gc
import signal
from pathlib import Path

import anyio
from anyio.abc import TaskGroup

from subscriber import telemetry
from subscriber.worker.launcher import Launcher
from subscriber.worker.surroundings import SpoolPlace


async def run(target: str, spool_dir: str | None = None, spool_limit: int | None = None) -> int:
    """Run all enabled subscriptions of `target` until SIGTERM or SIGINT; the exit status.

    `spool_dir` and `spool_limit`, in bytes, are those of SpoolPlace; None: its defaults.
    """
    _collect_rarely()
    spool = SpoolPlace(limit=spool_limit) if spool_dir is None else SpoolPlace(Path(spool_dir), spool_limit)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_stop_on_signal, tasks)
        await Launcher(target, spool=spool).run()
    return 0


def _collect_rarely() -> None:
    """Applying makes objects by the million and hardly a cycle; looking for cycles took a fifth of the time."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


async def _stop_on_signal(tasks: TaskGroup) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            telemetry.log(telemetry.LOG, "received shutdown request", event="launcher.stopping")
            tasks.cancel_scope.cancel()
            return
