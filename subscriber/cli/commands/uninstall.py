"""`subscriber uninstall`: remove schema "subscriber", and print what is removed."""

from __future__ import annotations

import sys

from subscriber.catalog.commands.uninstall import Removed, uninstall
from subscriber.catalog.connection import CatalogConnection
from subscriber.catalog.identity import refuse_standby
from subscriber.cli.commands.exec import print_message
from subscriber.cli.progress import ProgressLine
from subscriber.display import printable
from subscriber.formatting import count
from subscriber.settings import Settings


async def run_uninstall(target: str, *, drop_subscriptions: bool, dry_run: bool, settings: Settings) -> int:
    """Remove everything that subscriber has created in the target. Returns the exit status."""
    async with CatalogConnection.open(target, "subscriber uninstall") as catalog, catalog.use() as connection:
        await refuse_standby(connection)
        with ProgressLine("waiting for locks and publishers"):
            removed = await uninstall(
                connection, _notice, drop_subscriptions=drop_subscriptions, dry_run=dry_run, settings=settings
            )
    print('schema "subscriber" does not exist' if removed is None else describe(removed, dry_run=dry_run))
    return 0


def describe(removed: Removed, *, dry_run: bool) -> str:
    """Return a line for each subscription, and one for the schema."""
    verb = "would remove" if dry_run else "removed"
    lines = [
        printable(f'{verb} subscription "{name}" and its slots on the publisher') for name in removed.subscriptions
    ]
    parts = [
        count(removed.tables, "table"),
        count(removed.views, "view"),
        count(removed.functions, "function"),
        count(removed.records, "large object"),
    ]
    return "\n".join([*lines, f'{verb} schema "subscriber": {", ".join(parts)}'])


def _notice(severity: str, message: str, detail: str | None, hint: str | None) -> None:
    print_message(severity, message, detail, hint, sys.stderr)
