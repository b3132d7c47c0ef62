"""The commands that use the change log: archive, lake.

As in main.py, only the modules that --help needs are imported here.
"""

from __future__ import annotations

from typing import Annotated

import typer

from subscriber.cli.dsn import MaybeSource
from subscriber.cli.environment import run_command
from subscriber.cli.logs import LogFormat
from subscriber.cli.options import Batch, Json, LogFormatOption, MaybePublications, Until
from subscriber.cli.setting_option import SettingOption, read_settings

Log = Annotated[
    str | None,
    typer.Option(help="The change log of `subscriber archive`.", metavar="DIRECTORY|URL", show_default=False),
]
Master = Annotated[
    str,
    typer.Option(
        help="Spark's master: local[N] for this machine, a cluster's address, or sc://HOST for Spark Connect.",
        metavar="URL",
    ),
]
LOCAL = "local[*,4]"


def archive(
    directory: Annotated[
        str,
        typer.Option(help="The directory of the change log, or its URL in an object store.", metavar="DIRECTORY|URL"),
    ],
    source: MaybeSource = None,
    publications: MaybePublications = None,
    slot: Annotated[
        str, typer.Option(help="The slot to read; created if it does not exist.", metavar="NAME")
    ] = "archive",
    segment_size: Annotated[int, typer.Option(help="MiB after which a segment is sealed.", min=1)] = 64,
    segment_age: Annotated[
        float | None,
        typer.Option(
            help="Seconds after its first change after which a segment is sealed.",
            min=1,
            show_default="300, or 10 in an object store",
        ),
    ] = None,
    keep_size: Annotated[
        int | None, typer.Option(help="Remove the oldest segments beyond this many MiB.", min=1, show_default=False)
    ] = None,
    keep_age: Annotated[
        float | None, typer.Option(help="Remove segments older than this many hours.", min=0, show_default=False)
    ] = None,
    max_size: Annotated[
        int | None,
        typer.Option(
            help="Remove the oldest segments beyond this many MiB even if a consumer has not read them.",
            min=1,
            show_default=False,
        ),
    ] = None,
    until: Annotated[
        str | None, typer.Option(help="End when all changes before this position are stored.", metavar="LSN")
    ] = None,
    standby: Annotated[
        bool,
        typer.Option(
            "--standby", help="Wait while another `subscriber archive` writes the log, and take over when it ends."
        ),
    ] = False,
    info: Annotated[bool, typer.Option("--info", help="Only check all files and summarize the log.")] = False,
    forget: Annotated[
        str | None, typer.Option(help="Only remove this consumer, for which the log keeps segments.", metavar="NAME")
    ] = None,
    json: Json = False,
    log_format: LogFormatOption = LogFormat.RICH,
    setting: SettingOption = None,
) -> None:
    """Keep a change log: all committed transactions of a publisher, as files.

    Transactions are stored whole, in commit order, and synced to disk before they are confirmed to the publisher.
    Programs can read the log while it is written; see `lake`. The command ends on SIGTERM or Ctrl-C, and
    resumes from its last position when it is started again. With --info it reads the whole log, and exits 1 if a file
    is damaged or missing. In an object store, segments are stored whole when they are sealed, and their transactions
    are confirmed then. A log has one writer; start a second one with --standby. --keep-size and --keep-age remove old
    segments, but none that a consumer has not read: a lake, or a stream of Spark with the option
    `consumer`. --info lists the consumers.
    """
    from subscriber.cli.commands import archive as archive_command
    from subscriber.cli.logs import configure

    if info:
        raise typer.Exit(archive_command.describe(directory, json=json))
    if forget is not None:
        raise typer.Exit(archive_command.forget_consumer(directory, forget, json=json))
    missing = [name for name, given in (("--source", source), ("--publication", publications)) if not given]
    if source is None or not publications:
        raise typer.BadParameter(f"give {' and '.join(missing)}, or --info")
    configure(log_format)
    end, settings = archive_command.position(until), read_settings(setting)
    writer = archive_command.writer(directory, segment_size, segment_age, keep_size, keep_age, max_size, settings)
    command = archive_command.archive
    run_command(command, source, slot, publications, writer, until=end, standby=standby, settings=settings)


def lake(
    to: Annotated[
        str,
        typer.Option(help="The directory of the lake, or its URL in an object store.", metavar="DIRECTORY|URL"),
    ],
    log: Log = None,
    source: MaybeSource = None,
    tables: Annotated[
        list[str] | None,
        typer.Option(
            "--table", help="Load only this table into a new lake; may be given several times.", metavar="SCHEMA.TABLE"
        ),
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option("--text", help="Keep this column as text.", metavar="SCHEMA.TABLE.COLUMN")
    ] = None,
    partition: Annotated[
        list[str] | None,
        typer.Option(
            "--partition",
            help="Divide the files of a table that is loaded by this column; may be given several times. Of times in"
            " Iceberg tables also year(…), month(…), day(…), hour(…).",
            metavar="SCHEMA.TABLE.COLUMN",
        ),
    ] = None,
    cluster: Annotated[
        list[str] | None,
        typer.Option(
            "--cluster",
            help="Store the rows of a table that is loaded in the order of this column; may be given several times.",
            metavar="SCHEMA.TABLE.COLUMN",
        ),
    ] = None,
    reload: Annotated[
        list[str] | None,
        typer.Option(help="Load this table again; may be given several times.", metavar="SCHEMA.TABLE"),
    ] = None,
    recluster: Annotated[
        list[str] | None,
        typer.Option(
            help="Write the files of this table again whose ranges overlap in its cluster columns; may be given several"
            " times.",
            metavar="SCHEMA.TABLE",
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Compare all tables with those of --source at the end, at one position."),
    ] = False,
    until: Until = None,
    follow: Annotated[bool, typer.Option("--follow", help="Follow the log until Ctrl-C.")] = False,
    batch: Batch = None,
    history: Annotated[bool, typer.Option(help="Also keep the changes themselves as Parquet.")] = True,
    keep_age: Annotated[
        float | None,
        typer.Option(
            help="Forget positions older than this many hours, and remove their files.", min=1, show_default=False
        ),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            help="How the tables of a new lake are stored: as Delta tables, unless given.", metavar="delta|iceberg"
        ),
    ] = None,
    catalog: Annotated[
        str | None,
        typer.Option(
            help="The Iceberg catalog of a new lake, from the configuration of PyIceberg; a file in the lake, unless"
            " given.",
            metavar="NAME",
        ),
    ] = None,
    ranges_above: Annotated[
        int,
        typer.Option(help="Load a table of more MiB by ranges of its key, while the lake advances the others.", min=0),
    ] = 1024,
    master: Master = LOCAL,
    info: Annotated[bool, typer.Option("--info", help="Only print the contents of the lake.")] = False,
    json: Json = False,
    setting: SettingOption = None,
) -> None:
    """Keep Delta or Iceberg tables in step with the publisher's tables, from its change log.

    If the lake does not exist yet, it is loaded from --source. Each commit holds whole transactions and the position
    that the table has reached, so that all tables can be read as of one position. A table whose changes cannot be
    stored exactly is set aside with the reason; the others follow the log. It is loaded again by --reload, or with
    --source by itself if DDL is the reason. With --source, tables that are published later are loaded too. With
    --keep-age, rows of older positions are removed, at the end of the run or every hour. The command ends when the lake
    has reached the end of the log, and the positions of the tables that it has loaded. With --verify, all tables are
    compared with the publisher's then. The exit status is 1 if a table is set aside, differs, or cannot be read yet.
    """
    from subscriber.cli.commands import lake as lake_command
    from subscriber.cli.commands.archive import position

    if info:
        raise typer.Exit(lake_command.describe(to, json=json))
    if log is None:
        raise typer.BadParameter("give --log, or --info")
    if verify and (source is None or follow or until is not None):
        raise typer.BadParameter("--verify needs --source, and compares current rows: without --follow and --until")
    status = lake_command.run_lake(
        log,
        to,
        source,
        tables=tables or [],
        text=text or [],
        partition=partition or [],
        cluster=cluster or [],
        reload=reload or [],
        recluster=recluster or [],
        verify=verify,
        until=position(until),
        follow=follow,
        batch=batch,
        history=history,
        keep_age=None if keep_age is None else keep_age * 3600,
        format=format,
        catalog=catalog,
        larger=ranges_above * 1024 * 1024,
        master=master,
        json=json,
        settings=read_settings(setting),
    )
    raise typer.Exit(status)
