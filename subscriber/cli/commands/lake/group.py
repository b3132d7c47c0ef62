"""The commands `subscriber lake …`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from subscriber.cli.dsn import MaybeSource, Source
from subscriber.cli.lazy_commands import CommandGroup
from subscriber.cli.options import LOCAL_MASTER, MIB, Batch, Json, Master, Until, read_position
from subscriber.cli.setting_option import SettingOption, read_settings

lake = CommandGroup("Keep Delta or Iceberg tables in step with the publisher's tables, from its change log.")

Directory = Annotated[
    str, typer.Argument(help="The directory of the lake, or its URL in an object store.", metavar="LAKE")
]
Log = Annotated[str, typer.Option(help="The change log of `subscriber archive`.", metavar="DIRECTORY|URL")]
Text = Annotated[
    list[str] | None, typer.Option("--text", help="Keep this column as text.", metavar="SCHEMA.TABLE.COLUMN")
]
Partition = Annotated[
    list[str] | None,
    typer.Option(
        "--partition",
        help="Divide the files of a table that is loaded by this column; may be given several times. Of times in"
        " Iceberg tables also year(…), month(…), day(…), hour(…).",
        metavar="SCHEMA.TABLE.COLUMN",
    ),
]
Cluster = Annotated[
    list[str] | None,
    typer.Option(
        "--cluster",
        help="Store the rows of a table that is loaded in the order of this column; may be given several times.",
        metavar="SCHEMA.TABLE.COLUMN",
    ),
]
RangesAbove = Annotated[
    int,
    typer.Option(help="Load a table of more MiB by ranges of its key, while the lake advances the others.", min=0),
]
History = Annotated[bool, typer.Option(help="Also keep the changes themselves as Parquet.")]


@lake.add
def load(
    directory: Directory,
    log: Log,
    source: Source,
    tables: Annotated[
        list[str] | None,
        typer.Option("--table", help="Load only this table; may be given several times.", metavar="SCHEMA.TABLE"),
    ] = None,
    text: Text = None,
    partition: Partition = None,
    cluster: Cluster = None,
    format: Annotated[
        str | None,
        typer.Option(help="How the tables are stored: as Delta tables, unless given.", metavar="delta|iceberg"),
    ] = None,
    catalog: Annotated[
        str | None,
        typer.Option(
            help="The Iceberg catalog, from the configuration of PyIceberg; a file in the lake, unless given.",
            metavar="NAME",
        ),
    ] = None,
    ranges_above: RangesAbove = 1024,
    batch: Batch = None,
    history: History = True,
    master: Master = LOCAL_MASTER,
    json: Json = False,
    setting: SettingOption = None,
) -> int:
    """Load a new lake from the publisher, and bring it to the end of the log.

    After a kill, run it again. In a lake that exists, the command loads the tables that `advance` with --source would
    load. The exit status is 1 if a table is set aside, or cannot be read yet.
    """
    return _run(is_new=True, **locals())


@lake.add
def advance(
    directory: Directory,
    log: Log,
    source: MaybeSource = None,
    until: Until = None,
    text: Text = None,
    partition: Partition = None,
    cluster: Cluster = None,
    ranges_above: RangesAbove = 1024,
    batch: Batch = None,
    history: History = True,
    master: Master = LOCAL_MASTER,
    json: Json = False,
    setting: SettingOption = None,
) -> int:
    """Bring the lake to the end of the log.

    Each commit holds whole transactions and the position that the table has reached, so that all tables can be read as
    of one position. A table whose changes cannot be stored exactly is set aside with the reason; the others follow the
    log. `reload` loads it again. With --source, tables are loaded that are set aside because of DDL, or were published
    since. The command ends when the lake has reached the end of the log, and the positions of the tables that
    it has loaded. The exit status is 1 if a table is set aside, or cannot be read yet.
    """
    return _run(**locals() | {"until": read_position(until)})


@lake.add
def follow(
    directory: Directory,
    log: Log,
    source: MaybeSource = None,
    keep_age: Annotated[
        float | None,
        typer.Option(
            help="Forget positions older than this many hours, and remove their files, every hour.",
            min=1,
            show_default=False,
        ),
    ] = None,
    text: Text = None,
    partition: Partition = None,
    cluster: Cluster = None,
    ranges_above: RangesAbove = 1024,
    batch: Batch = None,
    history: History = True,
    master: Master = LOCAL_MASTER,
    json: Json = False,
    setting: SettingOption = None,
) -> int:
    """Follow the log until Ctrl-C, as `advance` does."""
    return _run(follow=True, **locals())


@lake.add
def reload(
    directory: Directory,
    tables: Annotated[list[str], typer.Argument(help="The tables.", metavar="SCHEMA.TABLE...", show_default=False)],
    log: Log,
    source: Source,
    text: Text = None,
    partition: Partition = None,
    cluster: Cluster = None,
    ranges_above: RangesAbove = 1024,
    batch: Batch = None,
    history: History = True,
    master: Master = LOCAL_MASTER,
    json: Json = False,
    setting: SettingOption = None,
) -> int:
    """Load tables again from the publisher, and bring the lake to the end of the log."""
    options = locals()
    return _run(reload=options.pop("tables"), **options)


@lake.add
def verify(
    directory: Directory,
    log: Log,
    source: Source,
    batch: Batch = None,
    history: History = True,
    master: Master = LOCAL_MASTER,
    json: Json = False,
    setting: SettingOption = None,
) -> int:
    """Compare all tables with the publisher's, at one position.

    The lake is brought to the end of the log first, as by `advance`. The exit status is 1 if a table differs.
    """
    return _run(verify=True, **locals())


@lake.add
def recluster(
    directory: Directory,
    tables: Annotated[list[str], typer.Argument(help="The tables.", metavar="SCHEMA.TABLE...", show_default=False)],
    master: Master = LOCAL_MASTER,
    json: Json = False,
    setting: SettingOption = None,
) -> int:
    """Write the files of tables again whose ranges overlap in their cluster columns."""
    from subscriber.cli.commands.lake.run import recluster_tables

    return recluster_tables(directory, tables, master=master, json=json, settings=read_settings(setting))


@lake.add
def forget(
    directory: Directory,
    keep_age: Annotated[
        float, typer.Option(help="Forget positions older than this many hours, and remove their files.", min=1)
    ],
    json: Json = False,
) -> int:
    """Remove the rows of older positions once. `follow` has the option --keep-age."""
    from subscriber.cli.commands.lake.run import forget_positions

    return forget_positions(directory, keep_age * 3600, json=json)


@lake.add
def show(directory: Directory, json: Json = False) -> int:
    """Print the tables of the lake and their positions. Exits 1 if a table is set aside."""
    from subscriber.cli.commands.lake.run import describe

    return describe(directory, json=json)


def _run(*, setting: list[str] | None, keep_age: float | None = None, ranges_above: int = 1024, **options: Any) -> int:
    from subscriber.cli.commands.lake.run import run_lake

    age = None if keep_age is None else keep_age * 3600
    return run_lake(settings=read_settings(setting), keep_age=age, larger=ranges_above * MIB, **options)
