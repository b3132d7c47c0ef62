"""`subscriber migrate preflight`: print the obstacles of a move, with a fix for each."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from subscriber import formatting
from subscriber.display import json_text, printable, printable_lines
from subscriber.migration.preflight.model import PreflightResult, Severity
from subscriber.migration.preflight.preflight import run_preflight

OBSTACLE = 1  # the exit status if an error was neither fixed nor waived


async def print_preflight(
    source: str,
    target: str,
    *,
    schema: bool,
    large_objects: bool,
    programs: Path | None,
    publication: str | None,
    waive: Sequence[str],
    json: bool,
) -> int:
    """Print the findings. Returns the exit status. The arguments are those of run_preflight()."""
    result = await run_preflight(
        source,
        target,
        schema=schema,
        large_objects=large_objects,
        programs=programs,
        names=waive,
        publication=publication,
    )
    if json:
        print(json_text(_as_json(result)))
    else:
        print_findings(result)
    return OBSTACLE if result.errors else 0


def _as_json(result: PreflightResult) -> list[dict[str, object]]:
    found = [(finding, False) for finding in result.findings] + [(finding, True) for finding in result.waived]
    return [{"name": finding.name, **asdict(finding), "waived": waived} for finding, waived in found]


def print_findings(result: PreflightResult) -> None:
    """Print findings for people."""
    from rich.console import Console
    from rich.text import Text

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
