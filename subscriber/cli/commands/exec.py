"""`subscriber exec`: execute statements, and print messages as psql does."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, TextIO

from subscriber.cli.progress import ProgressLine
from subscriber.display import printable_lines
from subscriber.errors import SubscriberError
from subscriber.redaction import RedactedStatement
from subscriber.settings import DEFAULTS, Settings

if TYPE_CHECKING:
    from subscriber.apply.hooks.config import Hooks

FAILED = 3

DISPLAY_WIDTH = 60  # columns of the statement that psql shows for a syntax error
RIGHT_MARGIN = 10  # at least this many columns after the error


def run_statements(
    target: str, statements: str, settings: Settings = DEFAULTS, hooks: Mapping[str, Hooks] = MappingProxyType({})
) -> int:
    """Execute statements on the database that `target` names. Returns the exit status, 0 or 3.

    Writes nothing but PostgreSQL's messages, to stderr, as psql prints them.
    """
    try:
        with ProgressLine("waiting for the servers"):
            asyncio.run(execute_statements(target, statements, sys.stderr, settings, hooks))
    except SubscriberError as error:
        print_error(error, statements, sys.stderr)
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


def print_message(severity: str, message: str, detail: str | None, hint: str | None, output: TextIO) -> None:
    """Print one NOTICE or WARNING with its parts."""
    _print_parts(output, (severity, message), ("DETAIL", detail), ("HINT", hint))


def print_error(error: SubscriberError, statements: str, output: TextIO) -> None:
    """Print the error as psql does. A syntax error shows the line of `statements` with a caret below the position."""
    _print_parts(output, ("ERROR", error.message))
    position = getattr(error, "position", None)
    if statements and position is not None:
        shown = RedactedStatement(statements)
        print(point_at(str(shown), shown.position(position)), file=output)
    _print_parts(output, ("DETAIL", error.detail), ("HINT", error.hint), *(("CONTEXT", line) for line in error.context))


def _print_parts(output: TextIO, *parts: tuple[str, str | None]) -> None:
    """Print the non-empty `parts`, each with its label.

    A continuation line starts with a tab, as in the server's log.
    """
    for label, text in parts:
        if text:
            print(f"{label}:  {printable_lines(text)}", file=output)


def point_at(text: str, position: int) -> str:
    """Return the line of `text` that has character `position`, cut to DISPLAY_WIDTH around it, and a caret below.

    Every character is one column wide here.

    Source: reportErrorPosition() in src/interfaces/libpq/fe-protocol3.c.
    """
    start = text.rfind("\n", 0, position) + 1
    end = text.find("\n", position)
    line = text[start : end if end >= 0 else len(text)].replace("\t", " ")
    number, at = text.count("\n", 0, start) + 1, position - start
    first, last = 0, len(line)
    if last > DISPLAY_WIDTH:
        if at + RIGHT_MARGIN <= DISPLAY_WIDTH:
            last = DISPLAY_WIDTH
        else:
            last = min(last, at + RIGHT_MARGIN)
            first = max(0, last - DISPLAY_WIDTH)
    prefix = f"LINE {number}: " + ("..." if first else "")
    suffix = "..." if last < len(line) else ""
    return f"{prefix}{line[first:last]}{suffix}\n{' ' * (len(prefix) + at - first)}^"
