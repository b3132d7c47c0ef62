"""`subscriber status`: print the state of a target's subscriptions."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from subscriber.cli.dsn import Target
from subscriber.cli.options import Json
from subscriber.cli.setting_option import SettingOption, read_settings
from subscriber.display import json_text, printable
from subscriber.errors import ConnectionLost, ServerError
from subscriber.sqlstate import (
    CLASS_CONNECTION_EXCEPTION,
    CLASS_SERVER_SHUTDOWN,
    LOCK_NOT_AVAILABLE,
    TOO_MANY_CONNECTIONS,
)

if TYPE_CHECKING:
    from subscriber.settings import Settings
    from subscriber.status.model import SubscriptionStatus
    from subscriber.status.snapshot import StatusSnapshot

    Look: TypeAlias = tuple[StatusSnapshot, list[SubscriptionStatus]] | str  # or an error

NAME = "subscriber status"
WRONG = 1  # the exit status if a subscription has a problem


async def status(
    target: Target,
    names: Annotated[
        list[str] | None, typer.Argument(help="Only these subscriptions.", metavar="[NAME]...", show_default=False)
    ] = None,
    json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Repeat until Ctrl-C, with rates.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between two snapshots with --watch.", min=0.1)] = 1.0,
    setting: SettingOption = None,
) -> int:
    """Show subscriptions: state, lag, tables, errors.

    Exits 1 if a subscription is stopped, failing, or enabled without a launcher. --watch adds rates. With --json, each
    snapshot is one line.
    """
    settings = read_settings(setting)
    if watch:
        await _watch(target, names or [], json=json, interval=interval, settings=settings)
        return 0
    from subscriber.catalog.connection import CatalogConnection
    from subscriber.cli.status_lines import print_status, to_json
    from subscriber.status.collect import assess_all, read_catalog

    async with CatalogConnection.open(target, NAME, lock_timeout=settings.status_lock_timeout) as catalog:
        look = await read_catalog(catalog, names or [])
    statuses = await assess_all(look, settings)
    if json:
        print(to_json(look, statuses))
    else:
        print_status(look, statuses)
    return WRONG if any(status.is_wrong for status in statuses) else 0


async def _watch(target: str, names: Sequence[str], *, json: bool, interval: float, settings: Settings) -> None:
    """Print snapshots until interrupted. If the target is unreachable, print the error and retry."""
    from subscriber.cli.status_lines import to_json, to_text

    looks = _looks(target, names, interval, settings)
    if json or not sys.stdout.isatty():
        async for outcome in looks:
            if isinstance(outcome, str):
                print(json_text({"error": outcome}) if json else printable(f"target: {outcome}"), flush=True)
            else:
                print(to_json(*outcome) if json else to_text(*outcome) + "\n", flush=True)
        return
    from rich.live import Live
    from rich.text import Text

    from subscriber.status.panels import to_rich

    with Live(Text("connecting"), auto_refresh=False) as live:
        async for outcome in looks:
            if isinstance(outcome, str):
                live.update(Text(printable(f"target: {outcome}"), style="red"), refresh=True)
            else:
                live.update(to_rich(*outcome), refresh=True)


async def _looks(target: str, names: Sequence[str], interval: float, settings: Settings) -> AsyncGenerator[Look, None]:
    """Yield one snapshot after another, or the text of the error that prevented it."""
    import anyio

    from subscriber.catalog.connection import CatalogConnection
    from subscriber.status.collect import assess_all, read_catalog
    from subscriber.status.history import StatusHistory

    history = StatusHistory()
    while True:
        try:
            async with CatalogConnection.open(target, NAME, lock_timeout=settings.status_lock_timeout) as catalog:
                while True:
                    look = await read_catalog(catalog, names)
                    yield look, history.add(look, await assess_all(look, settings))
                    await anyio.sleep(interval)
        except ConnectionLost as error:
            yield error.message
        except ServerError as error:
            if not error.sqlstate.startswith(
                (CLASS_CONNECTION_EXCEPTION, CLASS_SERVER_SHUTDOWN, TOO_MANY_CONNECTIONS, LOCK_NOT_AVAILABLE)
            ):
                raise
            yield error.message
        await anyio.sleep(interval)
