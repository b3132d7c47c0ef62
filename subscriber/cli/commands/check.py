"""`subscriber check`: print the findings, with a fix for each, or the recipe of least privilege."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from subscriber import formatting
from subscriber.cli.dsn import ApplyTarget, MaybeSource, Target
from subscriber.cli.options import Json, MaybePublications
from subscriber.cli.progress import ProgressLine
from subscriber.display import json_text, printable, printable_lines

if TYPE_CHECKING:
    from subscriber.check.model import Facts, Finding

OBSTACLE = 1  # the exit status if a finding is an error, or a server did not answer


async def check(
    target: Target,
    name: Annotated[
        str | None, typer.Argument(help="An existing subscription.", metavar="[NAME]", show_default=False)
    ] = None,
    source: MaybeSource = None,
    publications: MaybePublications = None,
    apply_target: ApplyTarget = None,
    two_phase: Annotated[bool, typer.Option("--two-phase", help="Also check for two_phase = true.")] = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="Print statements for roles with the least privileges, for both servers.")
    ] = False,
    execute: Annotated[
        bool, typer.Option("--execute", help="With --fix: run the target's statements, as its superuser.")
    ] = False,
    credentials: Annotated[
        Path | None,
        typer.Option(
            help="With --execute: the directory for the connection strings of new roles.",
            metavar="DIRECTORY",
            show_default="they are printed",
        ),
    ] = None,
    json: Json = False,
) -> int:
    """Find the problems that would keep a subscription from working.

    Each finding has a fix; exits 1 if a finding is an error. Give the name of an existing subscription, or the source
    and publications of a new one. --fix prints scripts for psql instead: they set up the roles of the launcher, of the
    session that applies changes, and of the connection to the publisher.
    """
    if name is None and (source is None or not publications) and not fix:
        raise typer.BadParameter("give the NAME of a subscription, or --source and --publication")
    if execute and not fix:
        raise typer.BadParameter("--execute needs --fix")
    if credentials is not None and not execute:
        raise typer.BadParameter("--credentials needs --execute")
    from subscriber.check.check import collect
    from subscriber.check.model import Level
    from subscriber.check.rules import findings

    with ProgressLine("reading the catalogs of both servers", json=json):
        facts = await collect(
            target,
            None if name else source,
            publications or [],
            name,
            apply_target=apply_target,
            two_phase=two_phase and not fix,
        )
    if fix:
        return await _fix(facts, target, execute=execute, credentials=credentials, json=json)
    reported = findings(facts)
    if json:
        print(json_text([finding.as_json() for finding in reported]))
    else:
        _print(reported)
    return OBSTACLE if any(finding.level is Level.ERROR for finding in reported) else 0


async def _fix(facts: Facts, target: str, *, execute: bool, credentials: Path | None, json: bool) -> int:
    """Print the recipe of least privilege. With `execute`, run the target's part and print the publisher's part."""
    from subscriber.check.recipe import write_recipe
    from subscriber.cli.recipe_output import execute_recipe, print_recipe

    recipe = write_recipe(facts.target_roles, facts.publisher_roles)
    for failure in facts.failures:
        print(f"{failure.level.upper()}:  {printable(f'{failure.subject}: {failure.message}')}", file=sys.stderr)
    if execute and recipe.target is not None:
        await execute_recipe(recipe, target, credentials)
        recipe = write_recipe(None, facts.publisher_roles)
    print_recipe(recipe, json=json)
    return OBSTACLE if facts.failures else 0


def _print(found: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.text import Text

    from subscriber.check.model import Level

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
