"""`subscriber console`: one page for the subscriptions of several targets, without a launcher."""

from __future__ import annotations

from typing import Annotated

import typer

from subscriber.cli.dsn import Targets, read_targets
from subscriber.cli.http_option import HostOption, TokenOption, read_address, read_tokens
from subscriber.cli.logs import LogFormat, configure
from subscriber.cli.options import LogFormatOption
from subscriber.cli.setting_option import SettingOption, read_settings


async def console(
    context: typer.Context,
    targets: Targets = None,
    http: Annotated[
        str, typer.Option(help="Address of the page.", metavar="[HOST:]PORT", show_default="127.0.0.1:8000")
    ] = "8000",
    http_hosts: HostOption = None,
    http_tokens: TokenOption = None,
    log_format: LogFormatOption = LogFormat.RICH,
    setting: SettingOption = None,
) -> int:
    """Serve one page for the subscriptions of several target databases.

    The command runs no subscriptions: each target has its own launcher. A target that does not answer does not hide the
    others. `subscriber run --http` serves the same page for its own target.
    """
    import anyio

    from subscriber.cli.http import serve_targets
    from subscriber.cli.signals import stop_on_signal

    dsns, address, tokens = read_targets(context, targets), read_address(http, http_hosts), read_tokens(http_tokens)
    configure(log_format)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop_on_signal, tasks)
        await serve_targets(address, dsns, tokens, read_settings(setting))
    return 0
