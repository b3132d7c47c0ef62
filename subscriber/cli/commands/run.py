"""`subscriber run`: the launcher as a program that ends on SIGTERM."""

from __future__ import annotations

import gc
import logging
import os
import signal
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import anyio
from anyio.abc import TaskGroup

from subscriber import telemetry
from subscriber.app import App, RunningApp
from subscriber.settings import DEFAULTS, Settings
from subscriber.worker.supervision.launcher import Launcher

if TYPE_CHECKING:
    from subscriber.cli.http import Address
    from subscriber.console.access import Tokens


async def run(
    target: str,
    apply_target: str | None = None,
    http: Address | None = None,
    settings: Settings = DEFAULTS,
    app: App | None = None,
    tokens: Tokens | None = None,
    *,
    opentelemetry: bool = False,
) -> NoReturn:
    """Run all enabled subscriptions of `target` until SIGTERM or SIGINT, then end the process with status 0.

    Args:
        apply_target: the connection string of the role that applies changes. None: `target`.
        http: the address that serves the status. None: no HTTP server.
        app: hooks, resolvers and a handler of errors. None: there are none.
        tokens: of the persons who may act on the console. None: it is read-only.
        opentelemetry: send traces and metrics, as the variables OTEL_… say.

    Raises:
        SubscriberError: the launcher cannot start, or an error that `app.on_error` raises.
    """
    _collect_rarely()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop_on_signal, tasks)
        app = app or App()
        program = RunningApp(app, tasks.cancel_scope.cancel)
        launcher = Launcher(target, app.resolvers, app.hooks, apply_target, settings, app.only, program.handle)
        if http is not None:
            from subscriber.cli.http import serve

            console = partial(serve, tokens=tokens, apply_target=apply_target, hooks=app.hooks)
            tasks.start_soon(console, http, target, launcher, settings)
        async with _exporting(target, settings) if opentelemetry else nullcontext():
            await program.run(launcher)
    if program.error is not None:
        raise program.error
    _leave()


def _exporting(target: str, settings: Settings) -> AbstractAsyncContextManager[None]:
    from subscriber.cli.opentelemetry_export import exporting

    return exporting(target, settings)


def _collect_rarely() -> None:
    """Make garbage collection rare.

    Applying creates millions of objects and few cycles; collection took 20 % of the time.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


def _leave() -> NoReturn:
    """End the process now; all tasks have ended.

    Closing the event loop would also wait for threads. A name lookup of the target in a thread cannot be stopped, and
    takes ten seconds or more if the name server is unreachable.
    """
    logging.shutdown()
    os._exit(0)


async def stop_on_signal(tasks: TaskGroup) -> None:
    """Cancel `tasks` at SIGTERM or SIGINT."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            telemetry.log(telemetry.LOG, "received shutdown request", event="launcher.stopping")
            tasks.cancel_scope.cancel()
            return
