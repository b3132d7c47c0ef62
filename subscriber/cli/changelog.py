"""The commands around the change log: archive, lake, catchup.

As in main.py, only what --help needs is imported here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from subscriber.cli.dsn import MaybeSource, Target
from subscriber.cli.environment import run_async
from subscriber.cli.logs import LogFormat

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Log = Annotated[
    Path | None, typer.Option(help="The change log of `subscriber archive`.", metavar="DIRECTORY", show_default=False)
]
Master = Annotated[
    str, typer.Option(help="Spark's master: this machine's processors, or a cluster's address.", metavar="URL")
]
LOCAL = "local[*,4]"


def archive(
    directory: Annotated[Path, typer.Option(help="Where the change log is.", metavar="DIRECTORY")],
    source: MaybeSource = None,
    publications: Annotated[
        list[str] | None,
        typer.Option("--publication", "-p", help="A publication; may be given several times.", metavar="NAME"),
    ] = None,
    slot: Annotated[
        str, typer.Option(help="The slot to read; created if it is not there.", metavar="NAME")
    ] = "archive",
    segment_size: Annotated[int, typer.Option(help="MiB after which a segment is sealed.", min=1)] = 64,
    segment_age: Annotated[float, typer.Option(help="Seconds after which a segment is sealed.", min=1)] = 300,
    keep_size: Annotated[
        int | None, typer.Option(help="Remove the oldest segments beyond so many MiB.", min=1, show_default=False)
    ] = None,
    keep_age: Annotated[
        float | None, typer.Option(help="Remove segments older than so many hours.", min=0, show_default=False)
    ] = None,
    until: Annotated[
        str | None, typer.Option(help="End when everything before this position is stored.", metavar="LSN")
    ] = None,
    info: Annotated[bool, typer.Option("--info", help="Only check all files, and summarize the log.")] = False,
    json: Json = False,
    log_format: Annotated[LogFormat, typer.Option(help="How log lines on stderr look.")] = LogFormat.RICH,
) -> None:
    """Keep a change log: all committed transactions of a publisher, as files.

    They are stored whole, in commit order, and synced before the publisher may forget them. Programs read the
    log while it is written; see `lake` and `catchup`. Ends on SIGTERM or Ctrl-C, and goes on where it stopped.
    With --info it reads the whole log, and exits 1 if a file is damaged or missing.
    """
    from subscriber.cli.commands import archive as archive_command
    from subscriber.cli.logs import configure

    if info:
        raise typer.Exit(archive_command.describe(directory, json=json))
    if source is None or not publications:
        raise typer.BadParameter("give --source and --publication, or --info")
    configure(log_format)
    writer = archive_command.writer(directory, segment_size, segment_age, keep_size, keep_age)
    end = archive_command.position(until)
    raise typer.Exit(run_async(archive_command.archive, source, slot, publications, writer, until=end))


def lake(
    to: Annotated[Path, typer.Option(help="Where the lake is.", metavar="DIRECTORY")],
    log: Log = None,
    source: MaybeSource = None,
    tables: Annotated[
        list[str] | None,
        typer.Option("--table", help="Only this one; may be given several times.", metavar="SCHEMA.TABLE"),
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option("--text", help="Keep this column as text.", metavar="SCHEMA.TABLE.COLUMN")
    ] = None,
    until: Annotated[str | None, typer.Option(help="End at this position.", metavar="LSN")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until Ctrl-C.")] = False,
    batch: Annotated[int | None, typer.Option(help="Changes in a batch.", min=1, show_default="1000000")] = None,
    history: Annotated[bool, typer.Option(help="Keep the changes themselves as Parquet, too.")] = True,
    master: Master = LOCAL,
    info: Annotated[bool, typer.Option("--info", help="Only print what the lake has.")] = False,
    json: Json = False,
) -> None:
    """Keep Delta tables as the publisher's, from its change log.

    A lake that is not there yet is loaded from --source. Each commit holds whole transactions and the position it
    brings the table to, so that all tables can be read as of one position. Ends when the lake has what the log has.
    """
    from subscriber.cli.commands import lake as lake_command
    from subscriber.cli.commands.archive import position

    if info:
        raise typer.Exit(lake_command.describe(to, json=json))
    if log is None:
        raise typer.BadParameter("give --log, or --info")
    status = lake_command.run_lake(
        log,
        to,
        source,
        tables=tables or [],
        text=text or [],
        until=position(until),
        follow=follow,
        batch=batch,
        history=history,
        master=master,
        json=json,
    )
    raise typer.Exit(status)


def catchup(
    target: Target,
    name: Annotated[str, typer.Argument(help="The subscription, which is disabled.", metavar="NAME")],
    log: Annotated[Path, typer.Option(help="The change log of `subscriber archive`.", metavar="DIRECTORY")],
    until: Annotated[str | None, typer.Option(help="End at this position.", metavar="LSN")] = None,
    batch: Annotated[int | None, typer.Option(help="Changes in a batch.", min=1, show_default="1000000")] = None,
    enable: Annotated[bool, typer.Option("--enable", help="Enable the subscription at the end.")] = False,
    master: Master = LOCAL,
    json: Json = False,
) -> None:
    """Apply a backlog to a subscription's tables in large batches.

    The net effect of what the change log has after the subscription's position is merged with that position, in one
    transaction for each batch. Enabled afterwards, the subscription goes on from exactly there.
    """
    from subscriber.cli.commands.archive import position
    from subscriber.cli.commands.catchup import run_catchup

    end = position(until)
    status = run_async(run_catchup, target, name, log, until=end, batch=batch, enable=enable, master=master, json=json)
    raise typer.Exit(status)
