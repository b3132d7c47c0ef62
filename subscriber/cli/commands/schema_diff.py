"""`subscriber migrate diff`: print the differences between the definitions of both servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from subscriber import formatting
from subscriber.catalog.two_databases import open_both
from subscriber.display import json_text, printable, printable_lines
from subscriber.migration.diff.difference import SchemaDifference
from subscriber.migration.diff.schema_diff import own_publications, schema_diff
from subscriber.sql_text import sql_comment

NAME = "subscriber migrate"
DIFFERENT = 1  # the exit status if there are differences


async def print_schema_diff(source: str, target: str, *, without: Sequence[str], json: bool, sql: bool) -> int:
    """Print the differences as text, as JSON, or as the statements that repair them. Returns the exit status.

    Args:
        without: names of publications that are left out, in addition to those of moves.
    """
    async with open_both(source, target, NAME) as (there, here):
        found = await schema_diff(there, here, without={*without, *await own_publications(there, here)})
    if json:
        print(json_text([asdict(difference) for difference in found]))
    elif sql:
        for difference in found:
            print(sql_comment(difference.describe()), *difference.statements, sep="\n")
    else:
        _print(found)
    return DIFFERENT if found else 0


def _print(found: Sequence[SchemaDifference]) -> None:
    for difference in found:
        print(printable(difference.describe()))
        for statement in difference.statements:
            print(f"    {printable_lines(statement, ' ' * 4)}")
    print(formatting.count(len(found), "difference"))
