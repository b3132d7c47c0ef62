"""The commands that run until they are stopped, and the demo.

As in main.py, only the modules that --help needs are imported here.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from subscriber.cli.app_option import AppOption
from subscriber.cli.dsn import ApplyTarget, Source, Target, Targets, read_targets
from subscriber.cli.environment import run_command
from subscriber.cli.http_option import HostOption, TokenOption, read_address, read_tokens
from subscriber.cli.logs import LogFormat
from subscriber.cli.options import LogFormatOption, Publications
from subscriber.cli.setting_option import SettingOption, read_settings


def run(
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
) -> None:
    """Run all enabled subscriptions of the target database until SIGTERM or Ctrl-C.

    Changes of the catalog take effect immediately. If you start the command twice on one database, the second waits,
    and takes over when the first ends.
    """
    from subscriber import telemetry
    from subscriber.cli.commands.run import run
    from subscriber.cli.logs import configure

    address = tokens = None
    if http is not None:
        address, tokens = read_address(http, http_hosts), read_tokens(http_tokens)
    elif http_hosts:
        raise typer.BadParameter("--http-host needs --http")
    configure(log_format, level=telemetry.DEBUG if debug else telemetry.LOG)
    limit = None if spool_limit is None else spool_limit * 1024 * 1024
    settings = read_settings(setting, spool_dir=spool_dir, spool_limit=limit, takeover_after=takeover_after)
    from subscriber.cli.app_name import load_app

    start = partial(run, opentelemetry=opentelemetry)
    run_command(start, target, apply_target, address, settings, load_app(app_name), tokens)


def console(
    context: typer.Context,
    targets: Targets = None,
    http: Annotated[
        str, typer.Option(help="Address of the page.", metavar="[HOST:]PORT", show_default="127.0.0.1:8000")
    ] = "8000",
    http_hosts: HostOption = None,
    http_tokens: TokenOption = None,
    log_format: LogFormatOption = LogFormat.RICH,
    setting: SettingOption = None,
) -> None:
    """Serve one page for the subscriptions of several target databases.

    The command runs no subscriptions: each target has its own launcher. A target that does not answer does not hide the
    others. `subscriber run --http` serves the same page for its own target.
    """
    from subscriber import telemetry
    from subscriber.cli.commands.console import run_console
    from subscriber.cli.logs import configure

    found, address, tokens = read_targets(context, targets), read_address(http, http_hosts), read_tokens(http_tokens)
    configure(log_format, level=telemetry.LOG)
    run_command(run_console, found, address, tokens, read_settings(setting))


def tail(
    source: Source,
    publications: Publications,
    slot: Annotated[
        str | None,
        typer.Option(help="Read this slot and confirm printed changes. Default: a temporary slot.", metavar="NAME"),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", "-n", help="Stop after this many changes.", min=1)] = None,
    json: Annotated[bool, typer.Option("--json/--text", help="JSON lines, or text for people.")] = True,
    setting: SettingOption = None,
) -> None:
    """Print the decoded change stream of a publisher.

    Prints one line for each change, begin and commit. With --slot, printed changes are confirmed, in whole
    transactions, and are not sent again.
    """
    from subscriber.cli.commands.tail import follow

    run_command(follow, source, publications, slot=slot, limit=limit, json=json, settings=read_settings(setting))


def demo(
    migrate: Annotated[
        bool, typer.Option("--migrate", help="Move a database with its applications, back, and there again instead.")
    ] = False,
    seconds: Annotated[int, typer.Option(help="Seconds for which applications write undisturbed.", min=1)] = 20,
    scale: Annotated[int, typer.Option(help="pgbench's scale: 100,000 accounts each.", min=1)] = 1,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the servers running until Ctrl-C, and print their connection strings.")
    ] = False,
) -> None:
    """Replicate between two temporary servers, and verify the result.

    While pgbench and a writer of many types write, the worker is killed with SIGKILL and restarted. Then both sides are
    compared row by row; exits 1 if they differ.

    With --migrate, applications write to a shop that moves to the other server. Exits 1 if an order that was
    acknowledged is not there once.
    """
    if migrate:
        from subscriber.demo.move import run_move_demo

        run_command(run_move_demo, seconds=seconds, scale=scale, keep=keep)
    from subscriber.demo.demo import run_demo

    run_command(run_demo, seconds=seconds, scale=scale, keep=keep)
