"""`subscriber exec`: execute statements, and print messages as psql does."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from subscriber.cli.app_option import AppOption, load_app
from subscriber.cli.dsn import Target
from subscriber.cli.messages import print_error, print_message
from subscriber.cli.progress import ProgressLine
from subscriber.cli.setting_option import SettingOption, read_settings
from subscriber.errors import SubscriberError
from subscriber.settings import DEFAULTS, Settings

if TYPE_CHECKING:
    from subscriber.apply.hooks.config import Hooks

FAILED = 3


def exec_(
    target: Target,
    statements: Annotated[
        str,
        typer.Argument(help="One or more statements, separated by semicolons; - reads stdin.", metavar="STATEMENTS"),
    ],
    app_name: AppOption = None,
    setting: SettingOption = None,
) -> int:
    """Run CREATE, ALTER and DROP SUBSCRIPTION statements.

    The syntax is that of PostgreSQL 18. The command prints nothing on success. NOTICE and WARNING lines go to stderr as
    psql prints them. After an error the command exits 3, and a failed statement has changed nothing. The role of the
    connection string owns the subscription. An empty text ('') creates or upgrades schema "subscriber" on the target,
    and nothing else.
    """
    import asyncio

    settings = read_settings(setting)
    text = sys.stdin.read() if statements == "-" else statements
    hooks = {} if app_name is None else load_app(app_name).hooks
    try:
        with ProgressLine("waiting for the servers"):
            asyncio.run(execute_statements(target, text, sys.stderr, settings, hooks))
    except SubscriberError as error:
        print_error(error, text)
        return FAILED
    return 0


async def execute_statements(
    target: str,
    statements: str,
    output: TextIO,
    settings: Settings = DEFAULTS,
    hooks: Mapping[str, Hooks] = MappingProxyType({}),
) -> None:
    """Connect, upgrade the schema, and execute the statements. Notices are printed as they arrive.

    A text without statements creates or upgrades the schema, and nothing else.
    """
    from subscriber.catalog.commands.execute import execute
    from subscriber.catalog.grammar.parser import parse
    from subscriber.catalog.identity import refuse_standby
    from subscriber.catalog.schema import ensure_schema
    from subscriber.connection.connect import connect

    def notice(severity: str, message: str, detail: str | None, hint: str | None) -> None:
        print_message(severity, message, detail, hint, output)

    parse(statements)  # report a syntax error before connecting
    connection = await connect(target, application_name="subscriber exec", settings={"synchronous_commit": "on"})
    try:
        await refuse_standby(connection)
        await ensure_schema(connection)
        await execute(connection, statements, notice=notice, hooks=hooks, settings=settings)
    finally:
        if not connection.is_closed():
            connection.terminate()
