"""`subscriber uninstall`: remove schema "subscriber", and print what is removed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from subscriber.cli.dsn import Target
from subscriber.cli.messages import print_message
from subscriber.cli.progress import ProgressLine
from subscriber.cli.setting_option import SettingOption, read_settings
from subscriber.display import printable
from subscriber.formatting import count

if TYPE_CHECKING:
    from subscriber.catalog.commands.uninstall import Removed


async def uninstall_(
    target: Target,
    drop_subscriptions: Annotated[
        bool, typer.Option("--drop-subscriptions", help="Drop all subscriptions and their slots first.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be removed, and change nothing.")
    ] = False,
    setting: SettingOption = None,
) -> int:
    """Remove schema "subscriber" from the target database, with all that belongs to it.

    The replicated tables and their rows stay. The command refuses while subscriptions exist, a launcher runs, or
    objects of other schemas depend on the schema. Roles that `check --fix` created stay as well.
    """
    from subscriber.catalog.commands.uninstall import uninstall
    from subscriber.catalog.connection import CatalogConnection
    from subscriber.catalog.identity import refuse_standby

    settings = read_settings(setting)
    async with CatalogConnection.open(target, "subscriber uninstall") as catalog, catalog.use() as connection:
        await refuse_standby(connection)
        with ProgressLine("waiting for locks and publishers"):
            removed = await uninstall(
                connection, print_message, drop_subscriptions=drop_subscriptions, dry_run=dry_run, settings=settings
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
