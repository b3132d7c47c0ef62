"""`subscriber verify`: print the differences between both sides, for people or as JSON."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from enum import StrEnum
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subscriber import formatting
from subscriber.cli.dsn import ApplyTarget, Target
from subscriber.cli.messages import print_message
from subscriber.cli.options import MIB, Json, ServerJobs
from subscriber.cli.progress import ProgressLine
from subscriber.comparison.result import ComparedRows, Comparison, Key, TableComparison
from subscriber.display import json_text, printable, printable_lines
from subscriber.errors import SubscriberError
from subscriber.remedy import json_of

if TYPE_CHECKING:
    from subscriber.comparison.union import SharedTable

DIFFERENT = 1  # the exit status if anything differs
INCOMPLETE = 4  # the exit status if nothing differs, and some rows were not read
RECORD_TIMEOUT = 10.0  # seconds
NAMED = 5  # rows named on the screen, for each table and kind of difference


class ComparisonStart(StrEnum):
    """The state whose later changes are compared."""

    LAST = "last"  # comparison


async def verify_(
    target: Target,
    name: Annotated[str | None, typer.Argument(help="The subscription.", metavar="NAME", show_default=False)] = None,
    apply_target: ApplyTarget = None,
    jobs: ServerJobs = 4,
    max_rate: Annotated[
        int | None, typer.Option(help="MiB of tables to read from each server in a second.", min=1)
    ] = None,
    since: Annotated[
        ComparisonStart | None,
        typer.Option(help="Read only what the stream has changed since then. Needs track_ranges.", show_default=False),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Stores results in this file, table by table, and continues if it exists.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Compare all subscriptions, and prove that each row belongs to exactly one.")
    ] = False,
    json: Json = False,
) -> int:
    """Compare all tables of a subscription with the publisher's.

    Both sides are compared as of one position, while writes continue; `subscriber run` must be running. Reports the
    keys of the rows that differ, and in which columns. Exits 1 if a table differs or could not be compared, and 4 if
    nothing differs and some rows were not read, because the stream has not changed them since the last comparison.
    """
    if (name is None) != every:
        raise typer.BadParameter("give the NAME of a subscription, or --all")
    if every and (since or resume):
        raise typer.BadParameter("--all has no --since and --resume")
    from subscriber.comparison.comparison import verify

    started = monotonic()
    compare = partial(verify, apply_target=apply_target, jobs=jobs, max_rate=max_rate * MIB if max_rate else None)
    if name is None:
        return await _verify_all(target, apply_target, compare, started, json=json)
    with ProgressLine("connecting", json=json) as shown:
        since_last, on_progress = since is not None, shown.comparison
        comparison = await _recorded(
            target, name, partial(compare, target, name, since_last=since_last, resume=resume, on_progress=on_progress)
        )
    if json:
        print(json_text(as_json(comparison)))
    else:
        for line in describe(comparison):
            print(printable(line))
        for remedy in comparison.remedies():
            print(f"HINT:  {printable_lines(str(remedy), ' ' * 7)}")
        print(f"compared in {formatting.in_seconds(monotonic() - started)}")
    if not comparison.is_same:
        return DIFFERENT
    return 0 if comparison.is_complete else INCOMPLETE


async def _verify_all(
    target: str,
    apply_target: str | None,
    compare: Callable[..., Awaitable[Comparison]],
    started: float,
    *,
    json: bool,
) -> int:
    """Compare all subscriptions, and the tables that several of them write to. Returns the exit status."""
    from subscriber.catalog.connection import CatalogConnection
    from subscriber.catalog.schema import ensure_schema
    from subscriber.catalog.store.subscriptions import load_subscriptions
    from subscriber.comparison.consistent_snapshot import APPLICATION_NAME
    from subscriber.comparison.union import compare_union

    async with CatalogConnection.open(target, APPLICATION_NAME) as catalog, catalog.use() as connection:
        await ensure_schema(connection)
        names = [subscription.name for subscription in await load_subscriptions(connection)]
    compared: dict[str, Comparison | SubscriberError] = {}
    with ProgressLine("connecting", json=json) as shown:
        for name in names:
            try:
                once = partial(compare, target, name, on_progress=shown.comparison)
                compared[name] = await _recorded(target, name, once)
            except SubscriberError as error:
                compared[name] = error  # the others are compared
        tables = await compare_union(target, apply_target)
    same = all(isinstance(each, Comparison) and each.is_same for each in compared.values())
    same = same and all(table.is_proven for table in tables)
    if json:
        print(json_text(_union_as_json(compared, tables, is_same=same)))
        return 0 if same else DIFFERENT
    for name, comparison in compared.items():
        print(printable(f"subscription {name}"))
        lines = describe(comparison) if isinstance(comparison, Comparison) else str(comparison).splitlines()
        for line in lines:
            print(printable(f"  {line}"))
        for remedy in comparison.remedies() if isinstance(comparison, Comparison) else ():
            print(f"  HINT:  {printable_lines(str(remedy), ' ' * 9)}")
    for table in tables:
        print(printable(_describe_shared(table)))
    count = formatting.count(len(compared), "subscription")
    verdict = "identical" if same else "DIFFERENT"
    print(f"{count} compared in {formatting.in_seconds(monotonic() - started)}: {verdict}")
    return 0 if same else DIFFERENT


def _describe_shared(table: SharedTable) -> str:
    if table.unproven:
        return (
            f"UNPROVEN   {table.name}: a row may belong to several of {', '.join(table.unproven)}, whose rules of"
            " ownership (source_tag) are missing or not disjoint"
        )
    if table.unowned is None:
        return f"UNPROVEN   {table.name}: {table.note}"
    if table.unowned:
        verb = "belongs" if table.unowned == 1 else "belong"
        return f"DIFFERENT  {table.name}: {formatting.count(table.unowned, 'row')} {verb} to no subscription"
    return f"union      {table.name}: each row belongs to one of {len(table.subscriptions)} subscriptions"


def _union_as_json(
    compared: dict[str, Comparison | SubscriberError], tables: list[SharedTable], *, is_same: bool
) -> dict[str, Any]:
    return {
        "same": is_same,
        "subscriptions": {
            name: as_json(comparison)
            if isinstance(comparison, Comparison)
            else {"same": False, "error": comparison.message}
            for name, comparison in compared.items()
        },
        "shared_tables": [
            {
                "table": table.name,
                "subscriptions": list(table.subscriptions),
                "proven": table.is_proven,
                "unproven": list(table.unproven),
                "unowned": table.unowned,
                "note": table.note,
            }
            for table in tables
        ],
    }


async def _recorded(target: str, name: str, compare: Callable[[], Awaitable[Comparison]]) -> Comparison:
    """Compare, and record the result in `subscriber.audit`, for `subscriber status` and the console.

    Raises:
        The errors of verify().

    Cancellation: the record says so.
    """
    import anyio

    from subscriber.catalog.connection import CatalogConnection
    from subscriber.catalog.store import audit
    from subscriber.comparison.comparison import load_compared
    from subscriber.comparison.consistent_snapshot import APPLICATION_NAME
    from subscriber.comparison.summary import summary_of

    async with CatalogConnection.open(target, APPLICATION_NAME) as catalog:
        subscription = await load_compared(catalog, name)
        async with catalog.use() as connection:
            address = await audit.client_address(connection)
            number = await audit.begin(connection, subscription.oid, audit.COMMAND_LINE, address, audit.VERIFY, {})
    result, summary = "canceled", None
    try:
        comparison = await compare()
        result, summary = audit.DONE, summary_of(comparison)
    except SubscriberError as error:
        result = error.message
        raise
    finally:
        with anyio.move_on_after(RECORD_TIMEOUT, shield=True):
            try:
                async with CatalogConnection.open(target, APPLICATION_NAME) as catalog, catalog.use() as connection:
                    await audit.end(connection, number, result, summary)
            except (SubscriberError, OSError) as error:
                print_message("WARNING", "the result is not recorded", str(error))
    return comparison


def describe(found: Comparison) -> Iterator[str]:
    """Yield the lines of the result: each table, its differences, and the sum."""
    for table in found.tables:
        at = "" if found.is_at_one_position or table.note is not None else f", at {table.lsn}"
        yield f"{describe_table(table)}{at}"
        yield from _named("missing", [_key(table, key) for key in table.missing], table.missing_count)
        yield from _named("extra", [_key(table, key) for key in table.extra], table.extra_count)
        changed = [f"{_key(table, key)}: {', '.join(columns)}" for key, columns in table.changed.items()]
        yield from _named("changed", changed, table.changed_count)
    different = sum(not table.is_same for table in found.tables)
    rows = sum(table.rows for table in found.tables)
    verdict = "identical" if found.is_complete else "no difference in the rows that were read"
    if different:
        verdict = f"{different} DIFFERENT"
    position = found.lsn if found.is_at_one_position else "different positions"
    yield f"{verdict} at {position}: {formatting.count(len(found.tables), 'table')}, {formatting.count(rows, 'row')}"


def describe_table(table: TableComparison) -> str:
    """Format the summary of a table: `same       public.t: 1,000 rows`."""
    if table.note is not None:
        return f"DIFFERENT  {table.name}: not compared, {table.note}"
    rest = f"unchanged by the stream since {table.since}, target not read"
    if table.is_same and table.compared is ComparedRows.NONE:
        return f"unread     {table.name}: {rest}"
    if table.is_same and table.compared is ComparedRows.TOUCHED:
        return f"touched    {table.name}: {formatting.count(table.rows, 'row')} same; the others {rest}"
    if table.is_same:
        return f"same       {table.name}: {formatting.count(table.rows, 'row')}"
    if table.differing_buckets:
        return (
            f"DIFFERENT  {table.name}: {formatting.count(table.rows, 'row')} on the publisher, "
            f"{table.target_rows:,} on the target; too many differences to list"
        )
    counts = {
        "missing": table.missing_count,
        "extra": table.extra_count,
        "changed": table.changed_count,
        "outside the rule of ownership": table.foreign_count,
    }
    said = ", ".join(f"{number:,} {kind}" for kind, number in counts.items() if number)
    if table.unexplained_buckets:
        groups = formatting.count(table.unexplained_buckets, "group")
        said = ", ".join(filter(None, [said, f"{groups} with different checksums and no different row found"]))
    return f"DIFFERENT  {table.name}: of {formatting.count(table.rows, 'row')} {said}"


def _key(table: TableComparison, key: Key) -> str:
    if not table.key:
        return "a row without key"
    return ", ".join(f"{name}={value}" for name, value in zip(table.key, key, strict=True))


def _named(kind: str, rows: list[str], count: int) -> Iterator[str]:
    for row in rows[:NAMED]:
        yield f"             {kind}  {row}"
    if rows and count > NAMED:
        yield f"             {kind}  … and {count - NAMED:,} more"


def as_json(found: Comparison) -> dict[str, Any]:
    """Return the result as a JSON value. Keys are lists of texts in the order of `key`."""
    return {
        "lsn": str(found.lsn),
        "same": found.is_same,
        "complete": found.is_complete,
        "tables": [
            {
                "table": table.name,
                "same": table.is_same,
                "note": table.note,
                "remedy": json_of(table.remedy),
                "lsn": None if table.lsn is None else str(table.lsn),
                "compared": table.compared.value,
                "since": None if table.since is None else str(table.since),
                "rows": table.rows,
                "target_rows": table.target_rows,
                "key": list(table.key),
                "missing": table.missing_count,
                "extra": table.extra_count,
                "changed": table.changed_count,
                "outside": table.foreign_count,
                "too_many_to_name": bool(table.differing_buckets),
                "unexplained_groups": table.unexplained_buckets,
                "missing_keys": [list(key) for key in table.missing] if table.key else [],
                "extra_keys": [list(key) for key in table.extra] if table.key else [],
                "changed_keys": [
                    {"key": list(key), "columns": list(columns)} for key, columns in table.changed.items()
                ],
            }
            for table in found.tables
        ],
    }
