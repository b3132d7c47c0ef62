"""`subscriber status`: print the state of a target's subscriptions."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio

from subscriber.catalog.connection import CatalogConnection
from subscriber.display import json_text, printable
from subscriber.errors import ConnectionLost, ServerError
from subscriber.settings import DEFAULTS, Settings
from subscriber.sqlstate import (
    CLASS_CONNECTION_EXCEPTION,
    CLASS_SERVER_SHUTDOWN,
    LOCK_NOT_AVAILABLE,
    TOO_MANY_CONNECTIONS,
)
from subscriber.status import table_states
from subscriber.status.collect import assess_all, read_catalog
from subscriber.status.history import StatusHistory
from subscriber.status.model import SubscriptionStatus
from subscriber.status.panels import escaped, to_rich
from subscriber.status.report import HINT, as_json, describe, state_in_words
from subscriber.status.snapshot import StatusSnapshot

if TYPE_CHECKING:
    pass

WRONG = 1  # the exit status if a subscription has a problem

Look: TypeAlias = tuple[StatusSnapshot, list[SubscriptionStatus]] | str  # or an error


async def show(
    target_dsn: str,
    names: Sequence[str],
    *,
    json: bool,
    watch: bool,
    interval: float,
    settings: Settings = DEFAULTS,
) -> int:
    """Print the subscriptions called `names` (empty: all), with `watch` every `interval` seconds.

    Returns:
        WRONG if a subscription has a problem (problems.py), else 0.
    """
    if watch:
        await _watch(target_dsn, names, json=json, interval=interval, settings=settings)
        return 0
    lock_timeout = settings.status_lock_timeout
    async with CatalogConnection.open(target_dsn, "subscriber status", lock_timeout=lock_timeout) as catalog:
        look = await read_catalog(catalog, names)
    statuses = await assess_all(look, settings)
    if json:
        print(to_json(look, statuses))
    else:
        _print(look, statuses)
    return WRONG if any(status.is_wrong for status in statuses) else 0


def to_json(look: StatusSnapshot, statuses: Sequence[SubscriptionStatus]) -> str:
    """Format the status as one line of JSON."""
    document: dict[str, Any] = {
        "time": look.at.isoformat(timespec="milliseconds"),
        "launcher_pid": look.launcher_pid,
        "subscriptions": [as_json(status, look.at) for status in statuses],
    }
    return json_text(document)


def to_text(look: StatusSnapshot, statuses: Sequence[SubscriptionStatus]) -> str:
    """Format the status as plain lines, for a pipe."""
    if not statuses:
        return "no subscriptions"
    lines = []
    for status in statuses:
        lines.append(printable(f"{status.name}: {state_in_words(status)}"))
        lines += [f"  {label:<13} {escaped(label, text, ' ' * 16)}" for label, text in describe(status, look.at)]
        for table in status.not_ready:
            lines.append(printable(f"    {table.name}: {table_states.describe(table)}"))
            if table.error_hint:
                lines.append(f"      {HINT}: {escaped(HINT, table.error_hint, ' ' * 12)}")
    return "\n".join(lines)


def _print(look: StatusSnapshot, statuses: Sequence[SubscriptionStatus]) -> None:
    if not sys.stdout.isatty():
        print(to_text(look, statuses))
        return
    from rich.console import Console

    Console(highlight=False).print(to_rich(look, statuses))


async def _watch(target_dsn: str, names: Sequence[str], *, json: bool, interval: float, settings: Settings) -> None:
    """Print snapshots until interrupted. If the target is unreachable, print the error and retry."""
    if json or not sys.stdout.isatty():
        await _watch_plain(_looks(target_dsn, names, interval, settings), json=json)
        return
    from rich.live import Live
    from rich.text import Text

    with Live(Text("connecting"), auto_refresh=False) as live:
        async for outcome in _looks(target_dsn, names, interval, settings):
            if isinstance(outcome, str):
                live.update(Text(printable(f"target: {outcome}"), style="red"), refresh=True)
            else:
                live.update(to_rich(*outcome), refresh=True)


async def _watch_plain(looks: AsyncIterator[Look], *, json: bool) -> None:
    async for outcome in looks:
        if isinstance(outcome, str):
            print(json_text({"error": outcome}) if json else printable(f"target: {outcome}"), flush=True)
        else:
            print(to_json(*outcome) if json else to_text(*outcome) + "\n", flush=True)


async def _looks(
    target_dsn: str, names: Sequence[str], interval: float, settings: Settings
) -> AsyncGenerator[Look, None]:
    """Yield one snapshot after another, or the text of the error that prevented it."""
    history = StatusHistory()
    while True:
        try:
            lock_timeout = settings.status_lock_timeout
            async with CatalogConnection.open(target_dsn, "subscriber status", lock_timeout=lock_timeout) as catalog:
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
