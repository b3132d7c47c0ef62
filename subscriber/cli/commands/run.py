"""`subscriber run`: the launcher as a program that ends on SIGTERM."""

from __future__ import annotations

import gc
import logging
import os
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from subscriber import telemetry
from subscriber.cli.app_option import AppOption, load_app
from subscriber.cli.dsn import ApplyTarget, Target
from subscriber.cli.http_option import HostOption, TokenOption, read_address, read_tokens
from subscriber.cli.logs import LogFormat, configure
from subscriber.cli.options import MIB, LogFormatOption
from subscriber.cli.setting_option import SettingOption, read_settings


async def run(
    target: Target,
    apply_target: ApplyTarget = None,
    log_format: LogFormatOption = LogFormat.RICH,
    debug: Annotated[bool, typer.Option("--debug", help="Also log DEBUG1 lines.")] = False,
    spool_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory for streamed transactions that have not ended.",
            metavar="DIRECTORY",
            show_default="SUBSCRIBER_SPOOL_DIR, TMPDIR, or /var/tmp",
        ),
    ] = None,
    spool_limit: Annotated[
        int | None,
        typer.Option(
            help="Limit of each worker's files there, in MiB.",
            min=1,
            show_default="half of the free space at its start",
        ),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            help="Serve /metrics for Prometheus, /health, /status.json, and a page for people at /.",
            metavar="[HOST:]PORT",
            show_default="nowhere; HOST is 127.0.0.1",
        ),
    ] = None,
    http_hosts: HostOption = None,
    http_tokens: TokenOption = None,
    opentelemetry: Annotated[
        bool,
        typer.Option("--opentelemetry", help="Send traces and metrics over OTLP, as the variables OTEL_… say."),
    ] = False,
    takeover_after: Annotated[
        float | None,
        typer.Option(
            help="Take over from another launcher that has not renewed its lease for this long.",
            metavar="SECONDS",
            min=1,
            show_default="30",
        ),
    ] = None,
    app_name: AppOption = None,
    setting: SettingOption = None,
) -> NoReturn:
    """Run all enabled subscriptions of the target database until SIGTERM or Ctrl-C.

    Changes of the catalog take effect immediately. If you start the command twice on one database, the second waits,
    and takes over when the first ends.
    """
    address = tokens = None
    if http is not None:
        address, tokens = read_address(http, http_hosts), read_tokens(http_tokens)
    elif http_hosts:
        raise typer.BadParameter("--http-host needs --http")
    configure(log_format, level=telemetry.DEBUG if debug else telemetry.LOG)
    limit = None if spool_limit is None else spool_limit * MIB
    settings = read_settings(setting, spool_dir=spool_dir, spool_limit=limit, takeover_after=takeover_after)
    import anyio

    from subscriber.app import RunningApp
    from subscriber.cli.signals import stop_on_signal
    from subscriber.worker.supervision.launcher import Launcher

    app = load_app(app_name)
    _collect_rarely()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop_on_signal, tasks)
        program = RunningApp(app, tasks.cancel_scope.cancel)
        launcher = Launcher(target, app.resolvers, app.hooks, apply_target, settings, app.only, program.handle)
        if address is not None:
            from subscriber.cli.http import serve

            console = partial(serve, tokens=tokens, apply_target=apply_target, hooks=app.hooks)
            tasks.start_soon(console, address, target, launcher, settings)
        async with AsyncExitStack() as stack:
            if opentelemetry:
                from subscriber.cli.opentelemetry_export import exporting

                await stack.enter_async_context(exporting(target, settings))
            await program.run(launcher)
    if program.error is not None:
        raise program.error
    _leave()


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
