"""Errors, notices and warnings, printed as psql prints those of a server."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

from subscriber.display import printable_lines
from subscriber.redaction import RedactedStatement

if TYPE_CHECKING:
    from subscriber.errors import SubscriberError

DISPLAY_WIDTH = 60  # columns of the statement that psql shows for a syntax error
RIGHT_MARGIN = 10  # at least this many columns after the error


def print_message(
    severity: str, message: str, detail: str | None = None, hint: str | None = None, output: TextIO | None = None
) -> None:
    """Print one NOTICE, WARNING or ERROR with its parts, to stderr unless there is an `output`."""
    _print_parts(output or sys.stderr, (severity, message), ("DETAIL", detail), ("HINT", hint))


def print_error(error: SubscriberError, statements: str = "", output: TextIO | None = None) -> None:
    """Print the error as psql does. A syntax error shows the line of `statements` with a caret below the position."""
    output = output or sys.stderr
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
