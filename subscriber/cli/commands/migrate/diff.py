"""`subscriber migrate diff`: print the differences between the definitions of both servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from subscriber import formatting
from subscriber.cli.commands.migrate.options import NAME, Without
from subscriber.cli.dsn import Source, Target
from subscriber.cli.options import Json
from subscriber.display import json_text, printable, printable_lines
from subscriber.sql_text import sql_comment

if TYPE_CHECKING:
    from subscriber.migration.diff.difference import SchemaDifference

DIFFERENT = 1  # the exit status if there are differences


async def diff(
    source: Source,
    target: Target,
    without: Without = None,
    sql: Annotated[bool, typer.Option("--sql", help="Print statements that make the target like the source.")] = False,
    json: Json = False,
) -> int:
    """Compare the definitions of both servers, from their catalogs. Exits 1 if they differ."""
    from subscriber.catalog.two_databases import open_both
    from subscriber.migration.diff.schema_diff import own_publications, schema_diff

    async with open_both(source, target, NAME) as (there, here):
        differences = await schema_diff(there, here, without={*(without or ()), *await own_publications(there, here)})
    if json:
        print(json_text([asdict(difference) for difference in differences]))
    elif sql:
        for difference in differences:
            print(sql_comment(difference.describe()), *difference.statements, sep="\n")
    else:
        _print(differences)
    return DIFFERENT if differences else 0


def _print(found: Sequence[SchemaDifference]) -> None:
    for difference in found:
        print(printable(difference.describe()))
        for statement in difference.statements:
            print(f"    {printable_lines(statement, ' ' * 4)}")
    print(formatting.count(len(found), "difference"))
