"""`subscriber check`: print the findings, with a fix for each."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from subscriber import formatting
from subscriber.check.check import collect
from subscriber.check.model import Finding, Level
from subscriber.check.recipe import write_recipe
from subscriber.check.rules import findings
from subscriber.cli.commands.recipe_output import execute_recipe, print_recipe
from subscriber.cli.progress import ProgressLine
from subscriber.display import json_text, printable, printable_lines

OBSTACLE = 1  # the exit status if a finding is an error


async def run_checks(
    target_dsn: str,
    source_dsn: str | None,
    publications: Sequence[str],
    *,
    name: str | None = None,
    apply_target: str | None = None,
    two_phase: bool = False,
    json: bool,
) -> int:
    """Print each finding with its fix.

    Args:
        name: an existing subscription, whose source and publications are used. None: the subscription does not exist
            yet.
        apply_target: the connection string of the role that applies changes. None: `target_dsn`.
        two_phase: check for two_phase as well if the subscription does not have it yet.

    Returns:
        OBSTACLE if a finding is an error, else 0.

    Raises:
        StatementError: there is no subscription called `name`.
    """
    with ProgressLine("reading the catalogs of both servers", json=json):
        facts = await collect(
            target_dsn, source_dsn, publications, name, apply_target=apply_target, two_phase=two_phase
        )
    found = findings(facts)
    if json:
        print(json_text([finding.as_json() for finding in found]))
    else:
        _print(found)
    return OBSTACLE if any(finding.level is Level.ERROR for finding in found) else 0


async def run_fix(
    target_dsn: str,
    source_dsn: str | None,
    publications: Sequence[str],
    *,
    name: str | None = None,
    apply_target: str | None = None,
    json: bool = False,
    execute: bool = False,
    credentials: Path | None = None,
) -> int:
    """Print the recipe of least privilege. With `execute`, run the target's part and print the publisher's part.

    Args:
        name: an existing subscription, whose publisher is part of the recipe. None: the publisher is that of
            `source_dsn`, if given.
        apply_target: the connection string of the role that applies changes. None: the recipe creates a role.
        credentials: with `execute`, the directory for connection strings. None: they are printed.

    Returns:
        OBSTACLE if a server did not answer, else 0.

    Raises:
        StatementError: there is no subscription called `name`, or the recipe cannot be executed.
        ServerError: a statement of the recipe failed.
    """
    with ProgressLine("reading the catalogs of both servers", json=json):
        facts = await collect(target_dsn, source_dsn, publications, name, apply_target=apply_target)
    recipe = write_recipe(facts.target_roles, facts.publisher_roles)
    for failure in facts.failures:
        print(f"{failure.level.upper()}:  {printable(f'{failure.subject}: {failure.message}')}", file=sys.stderr)
    if execute and recipe.target is not None:
        await execute_recipe(recipe, target_dsn, credentials)
        recipe = write_recipe(None, facts.publisher_roles)
    print_recipe(recipe, json=json)
    return OBSTACLE if facts.failures else 0


def _print(found: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.text import Text

    styles = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "bold red"}
    console = Console(highlight=False, soft_wrap=True, file=sys.stdout)
    for finding in found:
        subject = printable(finding.subject)
        line = Text.assemble((f"{finding.level:<9}", styles[finding.level]), (f"{subject}: ", "bold"))
        console.print(line.append(printable(finding.message)))
        if finding.fix:
            console.print(Text.assemble((f"{'':9}fix: ", "dim"), printable_lines(finding.fix, " " * 14)))
    counts = [sum(finding.level is level for finding in found) for level in (Level.ERROR, Level.WARNING)]
    console.print(f"{formatting.count(counts[0], 'error')}, {formatting.count(counts[1], 'warning')}")
