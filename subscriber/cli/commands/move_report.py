"""`subscriber migrate report`: write the report of a move, or compare one with both servers."""

from __future__ import annotations

from pathlib import Path

import anyio

from subscriber.display import printable
from subscriber.errors import StatementError
from subscriber.migration.report.agreement import disagreements
from subscriber.migration.report.collect import collect_report
from subscriber.migration.report.document import as_json, parse
from subscriber.migration.report.page import report_page
from subscriber.sqlstate import INVALID_PARAMETER_VALUE

DISAGREEMENT = 1  # the exit status if file and servers disagree


async def write_report(source: str, target: str, name: str, *, output: Path | None, checksums: bool) -> int:
    """Write the report of a move. Returns the exit status.

    Args:
        output: a file; HTML if its name ends so, else JSON. None: JSON on stdout.
        checksums: False: rows are neither counted nor read.
    """
    entries = await collect_report(source, target, name, checksums=checksums)
    is_page = output is not None and output.suffix.lower() in (".html", ".htm")
    text = report_page(entries) if is_page else as_json(entries)
    if output is None:
        print(text, end="")
    else:
        await anyio.Path(output).write_text(text, encoding="utf-8")
        print(f"{printable(str(output))}: {entries[-1]['hash']}")
    return 0


async def check_report(source: str, target: str, name: str, file: Path) -> int:
    """Print the differences between a report and both servers. Returns the exit status.

    Raises:
        StatementError: the report is about another move.
    """
    entries = parse(await anyio.Path(file).read_text(encoding="utf-8", errors="replace"))
    if entries[0]["name"] != name:
        raise StatementError(
            f'the report is about move "{entries[0]["name"]}", not "{name}"', sqlstate=INVALID_PARAMETER_VALUE
        )
    found = await disagreements(entries, source, target)
    for sentence in found:
        print(printable(sentence))
    if not found:
        print(f"the file and both servers agree: {entries[-1]['hash']}")
    return DISAGREEMENT if found else 0
