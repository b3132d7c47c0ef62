"""`subscriber run`: the launcher as a program that ends on SIGTERM."""

from __future__ import annotations

import gc
import logging
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import anyio
from anyio.abc import TaskGroup

from subscriber import telemetry
from subscriber.worker.context import SpoolSettings
from subscriber.worker.supervision.launcher import TAKEOVER_AFTER, Launcher

if TYPE_CHECKING:
    from subscriber.cli.http import Address


async def run(
    target: str,
    apply_target: str | None = None,
    spool_dir: str | None = None,
    spool_limit: int | None = None,
    http: Address | None = None,
    takeover_after: float = TAKEOVER_AFTER,
) -> NoReturn:
    """Run all enabled subscriptions of `target` until SIGTERM or SIGINT, then end the process with status 0.

    Args:
        apply_target: the connection string of the role that applies changes; None: `target`.
        spool_dir: the folder of SpoolPlace; None: its default.
        spool_limit: bytes, the limit of SpoolPlace; None: its default.
        http: where the status is served; None: nowhere.
        takeover_after: seconds without a renewed lease after which this launcher takes over from another one.
    """
    _collect_rarely()
    spool = SpoolSettings(limit=spool_limit) if spool_dir is None else SpoolSettings(Path(spool_dir), spool_limit)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_stop_on_signal, tasks)
        launcher = Launcher(target, spool=spool, takeover_after=takeover_after, apply_target=apply_target)
        if http is not None:
            from subscriber.cli.http import serve

            tasks.start_soon(serve, http, target, launcher)
        await launcher.run()
    _leave()


def _collect_rarely() -> None:
    """Applying makes objects by the million and hardly a cycle; looking for cycles took a fifth of the time."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


def _leave() -> NoReturn:
    """All tasks have ended. Closing the event loop would wait for threads as well, and a look-up of the target's name,
    which nobody can stop, takes ten seconds or more where the name server is gone, too.
    """
    logging.shutdown()
    os._exit(0)


async def _stop_on_signal(tasks: TaskGroup) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            telemetry.log(telemetry.LOG, "received shutdown request", event="launcher.stopping")
            tasks.cancel_scope.cancel()
            return
