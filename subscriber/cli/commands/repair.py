"""`subscriber repair` and `reseed`: make both sides equal, and print the number of repaired rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subscriber import formatting
from subscriber.cli.dsn import ApplyTarget, Target
from subscriber.cli.messages import print_message
from subscriber.cli.options import MIB, DeleteExtra, Json, Name, ServerJobs
from subscriber.cli.progress import ProgressLine
from subscriber.display import json_text, printable, sql_literal
from subscriber.errors import StatementError
from subscriber.remedy import json_of
from subscriber.sqlstate import INVALID_PARAMETER_VALUE, UNDEFINED_FILE

if TYPE_CHECKING:
    from subscriber.catalog.store.repairs import RepairedRow
    from subscriber.comparison.result import Key
    from subscriber.repair.result import Repair, TableRepair

INCOMPLETE = 1  # the exit status if rows were not repaired
RecordRows = Annotated[
    bool, typer.Option("--record-rows", help="Record rows in subscriber.repairs before and after, not only their keys.")
]


async def repair_(
    target: Target,
    name: Name,
    tables: Annotated[
        list[str] | None,
        typer.Argument(help="Only these tables of the publisher.", metavar="[SCHEMA.TABLE]...", show_default=False),
    ] = None,
    apply_target: ApplyTarget = None,
    from_verify: Annotated[
        Path | None,
        typer.Option(help="Output of verify --json: repair the rows that it names.", metavar="FILE", dir_okay=False),
    ] = None,
    delete_extra: DeleteExtra = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the statements, and change nothing.")] = False,
    record_rows: RecordRows = False,
    history: Annotated[
        bool, typer.Option("--history", help="Print the rows that earlier repairs have changed, and change nothing.")
    ] = False,
    jobs: ServerJobs = 4,
    max_rate: Annotated[
        int | None, typer.Option(help="MiB of tables to read from each server in a second.", min=1)
    ] = None,
    json: Json = False,
) -> int:
    """Make the rows of a subscription's tables equal to the publisher's.

    Compares the tables as verify does, and changes the rows that differ. Replication continues, and `subscriber run`
    must be running. Rows that the publisher does not have are kept and counted, unless a rule of ownership (source_tag)
    says that they belong to the subscription. Exits 1 if a table could not be repaired completely, or has such rows.
    """
    if history:
        return await _print_history(target, name, tables, json=json)
    import anyio.to_thread

    from subscriber.repair.tables import repair

    started = monotonic()
    keys = None
    if from_verify is not None:
        keys = await anyio.to_thread.run_sync(read_differences, from_verify)
    with ProgressLine("connecting", json=json) as shown:
        result = await repair(
            target,
            name,
            tables=tables or None,
            keys=keys,
            apply_target=apply_target,
            delete_extra=delete_extra,
            dry_run=dry_run,
            record_rows=record_rows,
            jobs=jobs,
            max_rate=max_rate * MIB if max_rate else None,
            on_progress=shown.comparison,
        )
    _print(result, json=json, dry_run=dry_run)
    if not json and not dry_run:
        print(f"repaired in {formatting.in_seconds(monotonic() - started)}")
    return 0 if result.is_complete else INCOMPLETE


async def reseed_(
    target: Target,
    name: Name,
    delete_extra: DeleteExtra = False,
    json: Json = False,
) -> int:
    """Give a subscription a new slot, and make its tables equal to the publisher's without a copy.

    For a slot that is lost, a target that was restored, and tables that were copied by other means. The launcher's
    workers compare and repair the tables, and continue after a kill of this command. Run it again to wait for them.
    Exits 1 if a table could not be repaired, or has rows that the publisher does not have.
    """
    from subscriber.repair.new_slot import reseed

    started = monotonic()
    with ProgressLine("connecting", json=json) as shown:
        result = await reseed(
            target, name, delete_extra=delete_extra, on_notice=print_message, on_progress=shown.comparison
        )
    _print(result, json=json)
    if not json:
        print(f"streams from {result.lsn}; took {formatting.in_seconds(monotonic() - started)}")
    return 0 if result.is_complete else INCOMPLETE


async def _print_history(target: str, name: str, tables: list[str] | None, *, json: bool) -> int:
    """Print the rows that repairs have changed. Returns the exit status."""
    from subscriber.catalog.commands.privileges import get_owned_subscription
    from subscriber.catalog.connection import CatalogConnection
    from subscriber.catalog.identity import refuse_standby
    from subscriber.catalog.schema import ensure_schema
    from subscriber.catalog.store import repairs

    async with CatalogConnection.open(target, "subscriber repair") as catalog, catalog.use() as connection:
        await refuse_standby(connection)
        await ensure_schema(connection)
        subscription = await get_owned_subscription(connection, name)
        async for row in repairs.load(connection, subscription.oid):
            if not tables or row.relation in tables:
                print(json_text(_row_as_json(row)) if json else printable(_describe_row(row)))
    return 0


def _print(result: Repair, *, json: bool, dry_run: bool = False) -> None:
    if json:
        print(json_text(as_json(result)))
        return
    for line in describe(result, dry_run=dry_run):
        print(printable(line))


def _describe_row(row: RepairedRow) -> str:
    key = _pairs(row.key) if row.key is not None else "a row without a key"
    line = f"{row.repaired_at.isoformat(timespec='seconds')}  {row.role}  {row.command}  {row.lsn}"
    line += f"  {row.action} {row.relation} {key}"
    if row.row_before is not None:
        line += f"  before ({_pairs(row.row_before)})"
    if row.row_after is not None:
        line += f"  after ({_pairs(row.row_after)})"
    return line


def _pairs(values: dict[str, str | None]) -> str:
    return ", ".join(f"{name}={'NULL' if value is None else sql_literal(value)}" for name, value in values.items())


def _row_as_json(row: RepairedRow) -> dict[str, Any]:
    return {**asdict(row), "repaired_at": row.repaired_at.isoformat(), "lsn": str(row.lsn)}


def read_differences(file: Path) -> dict[str, list[Key]]:
    """Return the keys that differ, by table, from a file with the output of `verify --json`.

    Raises:
        StatementError: the file cannot be read, is no such output, or does not name all rows of a table.
    """
    from json import loads

    write = "Write it with: subscriber verify NAME --json > FILE"
    try:
        text = file.read_bytes()
    except OSError as error:
        raise StatementError(
            f'could not open file "{file}": {error.strerror}', hint=write, sqlstate=UNDEFINED_FILE
        ) from error
    try:
        differing = {table["table"]: table for table in loads(text)["tables"] if not table["same"]}
        keys = {name: _keys(table) for name, table in differing.items() if table["note"] is None}
        counts = {name: sum(differing[name][kind] for kind in ("missing", "extra", "changed")) for name in keys}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StatementError(
            f'file "{file}" is not the output of verify --json',
            hint=write,
            sqlstate=INVALID_PARAMETER_VALUE,
        ) from error
    for name, listed in keys.items():
        if differing[name]["too_many_to_name"] or counts[name] != len(listed):
            raise StatementError(
                f'file "{file}" does not name all rows of table "{name}" that differ',
                detail="verify names 1,000 rows of each kind, and no row of a table without a key.",
                hint=f"Run repair without --from-verify for table {name}.",
                sqlstate=INVALID_PARAMETER_VALUE,
            )
    return keys


def _keys(table: dict[str, Any]) -> list[Key]:
    changed = [row["key"] for row in table["changed_keys"]]
    return [tuple(key) for key in (*table["extra_keys"], *changed, *table["missing_keys"])]


def describe(result: Repair, *, dry_run: bool) -> Iterator[str]:
    """Yield the lines of the result: with `dry_run` the statements, else each table and the sum."""
    if dry_run:
        yield from result.statements
    for table in result.tables:
        line = _describe_table(table)
        yield f"-- {line}" if dry_run else line
    for remedy in result.remedies():
        yield f"{'-- ' * dry_run}HINT:  {remedy}"
    if not dry_run:
        line = f"{formatting.count(sum(table.repaired for table in result.tables), 'row')} repaired"
        if extra := sum(table.extra for table in result.tables):
            line += f", {formatting.count(extra, 'extra row')} kept"
        if result.bytes_read:
            line += f"; the publisher has sent {formatting.in_bytes(result.bytes_read)} of rows"
        yield line


def _describe_table(table: TableRepair) -> str:
    from subscriber.repair.row_repair import MOST_REFUSED

    counts = {"inserted": table.inserted, "updated": table.updated, "deleted": table.deleted}
    said = ", ".join(f"{number:,} {kind}" for kind, number in counts.items() if number)
    left = []
    if table.refused:
        more = " or more" if table.refused >= MOST_REFUSED else ""
        left.append(f"{formatting.count(table.refused, 'row')}{more} refused: {table.note}")
    elif table.note is not None:
        left.append(table.note)
    if table.unrepaired:
        left.append(f"{formatting.count(table.unrepaired, 'row')} locked by another transaction")
    if table.outside:
        left.append(f"{formatting.count(table.outside, 'row')} of the publisher outside the rule of ownership")
    if table.extra:
        owners = f", or of {', '.join(table.doubtful)}" if table.doubtful else ""
        said = ", ".join(filter(None, [said, f"{table.extra:,} extra: not the publisher's{owners}"]))
    if left:
        return f"NOT REPAIRED  {table.name}: {', '.join([said] * bool(said) + left)}"
    if table.extra:
        return f"EXTRA KEPT    {table.name}: {said}"
    return f"repaired      {table.name}: {said}" if said else f"same          {table.name}"


def as_json(result: Repair) -> dict[str, Any]:
    """Return the result as a JSON value."""
    return {
        "lsn": str(result.lsn),
        "complete": result.is_complete,
        "bytes_read": result.bytes_read,
        "tables": [
            {
                "table": table.name,
                "note": table.note,
                "remedy": json_of(table.remedy),
                "inserted": table.inserted,
                "updated": table.updated,
                "deleted": table.deleted,
                "unrepaired": table.unrepaired,
                "refused": table.refused,
                "extra": table.extra,
                "outside": table.outside,
            }
            for table in result.tables
        ],
        "statements": result.statements,
    }
