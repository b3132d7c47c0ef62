"""`subscriber console`: one page for the subscriptions of several targets, without a launcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import anyio

from subscriber.cli.commands.run import stop_on_signal
from subscriber.cli.http import serve_targets
from subscriber.settings import DEFAULTS, Settings

if TYPE_CHECKING:
    from subscriber.cli.http import Address
    from subscriber.console.access import Tokens


async def run_console(
    targets: Sequence[str], address: Address, tokens: Tokens | None = None, settings: Settings = DEFAULTS
) -> int:
    """Serve the page of `targets` until SIGTERM or SIGINT. Returns the exit status.

    Args:
        targets: the connection strings of the targets.
        address: where to listen.
        tokens: of the persons who may act. None: the page is read-only.
        settings: limits and time-outs.
    """
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop_on_signal, tasks)
        await serve_targets(address, targets, tokens, settings)
    return 0
