"""`subscriber migrate report`: write the report of a move, or compare one with both servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from subscriber.cli.commands.migrate.options import Name
from subscriber.cli.dsn import Source, Target
from subscriber.display import printable
from subscriber.errors import StatementError
from subscriber.sqlstate import INVALID_PARAMETER_VALUE

DISAGREEMENT = 1  # the exit status if file and servers disagree


async def report(
    source: Source,
    target: Target,
    name: Name,
    output: Annotated[
        Path | None,
        typer.Option(
            help="A file: HTML if its name ends so, else JSON.", metavar="FILE", show_default="JSON on stdout"
        ),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(help="Compare this report with both servers in place of writing one.", metavar="FILE"),
    ] = None,
    rows: Annotated[bool, typer.Option(help="Count the rows of each table, and add their checksums.")] = True,
) -> int:
    """Write the report of a move: steps, statements, times, positions, rows, the pause and waived findings.

    With --check, exits 1 if the file was changed, or the servers disagree with it.
    """
    if check is not None:
        return await _check_report(source, target, name, check)
    import anyio

    from subscriber.migration.report.collect import collect_report
    from subscriber.migration.report.document import as_json
    from subscriber.migration.report.page import report_page

    entries = await collect_report(source, target, name, checksums=rows)
    is_page = output is not None and output.suffix.lower() in (".html", ".htm")
    text = report_page(entries) if is_page else as_json(entries)
    if output is None:
        print(text, end="")
    else:
        await anyio.Path(output).write_text(text, encoding="utf-8")
        print(f"{printable(str(output))}: {entries[-1]['hash']}")
    return 0


async def _check_report(source: str, target: str, name: str, file: Path) -> int:
    """Print the differences between a report and both servers. Returns the exit status.

    Raises:
        StatementError: the report is about another move.
    """
    import anyio

    from subscriber.migration.report.agreement import disagreements
    from subscriber.migration.report.document import parse

    entries = parse(await anyio.Path(file).read_text(encoding="utf-8", errors="replace"))
    if entries[0]["name"] != name:
        raise StatementError(
            f'the report is about move "{entries[0]["name"]}", not "{name}"', sqlstate=INVALID_PARAMETER_VALUE
        )
    disagreeing = await disagreements(entries, source, target)
    for sentence in disagreeing:
        print(printable(sentence))
    if not disagreeing:
        print(f"the file and both servers agree: {entries[-1]['hash']}")
    return DISAGREEMENT if disagreeing else 0
