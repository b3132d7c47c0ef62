"""`subscriber migrate preflight`: print the obstacles of a move, with a fix for each."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from subscriber import formatting
from subscriber.cli.commands.migrate.options import Programs, Schema, Waive
from subscriber.cli.dsn import Source, Target
from subscriber.cli.options import Json
from subscriber.display import json_text, printable, printable_lines

if TYPE_CHECKING:
    from subscriber.migration.preflight.model import PreflightResult

OBSTACLE = 1  # the exit status if an error was neither fixed nor waived


async def preflight(
    source: Source,
    target: Target,
    waive: Waive = None,
    schema: Schema = True,
    large_objects: Annotated[bool, typer.Option("--large-objects", help="The move copies large objects.")] = False,
    programs: Programs = None,
    publication: Annotated[
        str | None,
        typer.Option(help="An existing publication that the move uses.", metavar="NAME", show_default=False),
    ] = None,
    json: Json = False,
) -> int:
    """Find what a move would leave behind, and what prevents it. Changes nothing.

    Prints a fix for each finding. Exits 1 if an error is neither fixed nor waived.
    """
    from subscriber.migration.preflight.preflight import run_preflight

    result = await run_preflight(
        source,
        target,
        schema=schema,
        large_objects=large_objects,
        programs=programs,
        names=waive or [],
        publication=publication,
    )
    if json:
        print(json_text(_as_json(result)))
    else:
        print_findings(result)
    return OBSTACLE if result.errors else 0


def _as_json(result: PreflightResult) -> list[dict[str, object]]:
    findings = [(finding, False) for finding in result.findings] + [(finding, True) for finding in result.waived]
    return [{"name": finding.name, **asdict(finding), "waived": waived} for finding, waived in findings]


def print_findings(result: PreflightResult) -> None:
    """Print findings for people."""
    from rich.console import Console
    from rich.text import Text

    from subscriber.migration.preflight.model import Severity

    styles = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.INFORMATION: "blue"}
    console = Console(highlight=False, soft_wrap=True, file=sys.stdout)
    for finding in result.findings:
        head = (f"{finding.severity:<12}", styles[finding.severity])
        line = Text.assemble(head, (f"{printable(finding.name)}: ", "bold"))
        console.print(line.append(printable(finding.message)))
        console.print(Text(f"{'':12}{printable(finding.why)}.", "dim"))
        if finding.fix:
            fix = printable_lines(finding.fix, " " * 12)
            console.print(Text.assemble((f"{'':12}fix ({finding.fixed_on}): ", "dim"), fix))
    for finding in result.waived:
        text = f"{printable(finding.name)}: {printable(finding.message)}"
        console.print(Text.assemble((f"{'waived':<12}", "dim"), text))
    counts = [sum(finding.severity is severity for finding in result.findings) for severity in Severity]
    console.print(f"{formatting.count(counts[0], 'error')}, {formatting.count(counts[1], 'warning')}")
