"""The end of commands that run until they are stopped."""

from __future__ import annotations

import signal

import anyio
from anyio.abc import TaskGroup

from subscriber import telemetry


async def stop_on_signal(tasks: TaskGroup) -> None:
    """Cancel `tasks` at SIGTERM or SIGINT."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            telemetry.log(telemetry.LOG, "received shutdown request", event="command.stopping")
            tasks.cancel_scope.cancel()
            return
