"""The commands that copy, compare and repair the tables of a subscription, and prepare Spark for it.

As in main.py, only the modules that --help needs are imported here.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from subscriber.cli.dsn import ApplyTarget, Target
from subscriber.cli.environment import run_command
from subscriber.cli.options import Json, Name, ServerJobs


class ComparisonStart(StrEnum):
    """The state whose later changes are compared."""

    LAST = "last"  # comparison


DeleteExtra = Annotated[
    bool,
    typer.Option(
        "--delete-extra",
        help="Delete rows that the publisher does not have, unless they may belong to another subscription.",
    ),
]
RecordRows = Annotated[
    bool, typer.Option("--record-rows", help="Record rows in subscriber.repairs before and after, not only their keys.")
]


def copy_(
    target: Target,
    name: Name,
    apply_target: ApplyTarget = None,
    master: Annotated[
        str, typer.Option(help="Spark's master: local[4], spark://host:7077, yarn, …", metavar="URL")
    ] = "local[*,4]",
    part_size: Annotated[int, typer.Option(help="MiB of a table that one task copies.", min=1)] = 128,
    indexes: Annotated[
        bool, typer.Option("--indexes", help="Build the publisher's indexes that the target lacks, after the copy.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Make the initial copy of a subscription's tables with Spark.

    All tables that wait for their initial copy are split into partitions, which executors copy in parallel. `subscriber
    run` then brings the tables up to date. It starts such a copy itself for subscriptions WITH (copy_engine = spark).
    """
    from subscriber.cli.commands.copy import run_copy

    run_command(
        run_copy,
        target,
        name,
        apply_target=apply_target,
        master=master,
        part_bytes=part_size * 1024 * 1024,
        indexes=indexes,
        quiet=quiet,
    )


def verify_(
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
) -> None:
    """Compare all tables of a subscription with the publisher's.

    Both sides are compared as of one position, while writes continue; `subscriber run` must be running. Reports the
    keys of the rows that differ, and in which columns. Exits 1 if a table differs or could not be compared, and 4 if
    nothing differs and some rows were not read, because the stream has not changed them since the last comparison.
    """
    if (name is None) != every:
        raise typer.BadParameter("give the NAME of a subscription, or --all")
    if every and (since or resume):
        raise typer.BadParameter("--all has no --since and --resume")
    from subscriber.cli.commands.verify import run_verify

    run_command(
        run_verify,
        target,
        name,
        apply_target=apply_target,
        jobs=jobs,
        max_rate=max_rate * 1024 * 1024 if max_rate else None,
        since_last=since is not None,
        resume=resume,
        json=json,
    )


def repair_(
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
) -> None:
    """Make the rows of a subscription's tables equal to the publisher's.

    Compares the tables as verify does, and changes the rows that differ. Replication continues, and `subscriber run`
    must be running. Rows that the publisher does not have are kept and counted, unless a rule of ownership (source_tag)
    says that they belong to the subscription. Exits 1 if a table could not be repaired completely, or has such rows.
    """
    from subscriber.cli.commands.repair import run_history, run_repair

    if history:
        run_command(run_history, target, name, tables or None, json=json)
    run_command(
        run_repair,
        target,
        name,
        tables=tables or None,
        apply_target=apply_target,
        from_verify=from_verify,
        delete_extra=delete_extra,
        dry_run=dry_run,
        record_rows=record_rows,
        jobs=jobs,
        max_rate=max_rate * 1024 * 1024 if max_rate else None,
        json=json,
    )


def resync(
    target: Target,
    name: Name,
    tables: Annotated[
        list[str], typer.Argument(help="Tables of the target.", metavar="[SCHEMA.]TABLE...", show_default=False)
    ],
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Empty the tables and copy them, instead of repairing rows that differ.")
    ] = False,
    delete_extra: DeleteExtra = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the tables are synchronized.")] = True,
) -> None:
    """Synchronize tables again, while the others stream.

    Runs ALTER SUBSCRIPTION … REFRESH TABLE, and waits for the launcher. A kill of this command does not interrupt the
    launcher. Exits 1 if a table could not be synchronized at the first attempt, or has rows that the publisher does not
    have.
    """
    from subscriber.cli.commands.resync import run_resync

    run_command(run_resync, target, name, tables, truncate=truncate, wait=wait, delete_extra=delete_extra)


def reseed(
    target: Target,
    name: Name,
    delete_extra: DeleteExtra = False,
    json: Json = False,
) -> None:
    """Give a subscription a new slot, and make its tables equal to the publisher's without a copy.

    For a slot that is lost, a target that was restored, and tables that were copied by other means. The launcher's
    workers compare and repair the tables, and continue after a kill of this command. Run it again to wait for them.
    Exits 1 if a table could not be repaired, or has rows that the publisher does not have.
    """
    from subscriber.cli.commands.repair import run_reseed

    run_command(run_reseed, target, name, json=json, delete_extra=delete_extra)


def prepare_spark() -> None:
    """Store Spark's classes for this user, so that Spark starts in half of the time.

    The file is in SUBSCRIBER_SPARK_CLASSES, or in ~/.cache/subscriber/spark, and has 200 MB. All commands and programs
    of this user that start Spark use it. It belongs to one Java runtime and one installation of pyspark: repeat the
    command after an upgrade. If the file is there and usable, nothing is done.
    """
    from subscriber.cli.commands.prepare_spark import run_prepare_spark

    raise typer.Exit(run_prepare_spark())
