"""Arguments and options that several commands of `subscriber migrate` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

NAME = "subscriber migrate"  # of connections

Name = Annotated[str, typer.Argument(help="The subscription on the target that replicates the source.", metavar="NAME")]
Back = Annotated[
    str | None,
    typer.Option(
        "--back-name", help="The subscription on the source for the way back.", metavar="NAME", show_default="NAME_back"
    ),
]
BackConnection = Annotated[
    str | None,
    typer.Option(
        "--back-connection",
        help="The connection string by which the source's worker reaches the target.",
        metavar="DSN",
        show_default="--target",
    ),
]
MaxPause = Annotated[
    float, typer.Option(help="Seconds without writes, after which the old server opens again.", min=0.1)
]
MaxLag = Annotated[float, typer.Option(help="Seconds that the new server may be behind before the pause.", min=0.01)]
LagWindow = Annotated[float, typer.Option(help="Seconds for which the lag must be lower than --max-lag.", min=0)]
MaxAge = Annotated[float, typer.Option(help="Wait for older transactions, in seconds. Younger ones are ended.", min=0)]
Margin = Annotated[int, typer.Option(help="Increments by which sequences are advanced further.", min=0)]
LargeObjects = Annotated[
    bool, typer.Option("--large-objects", help="Copy the large objects that differ, during the pause.")
]
Verify = Annotated[bool, typer.Option("--verify", help="Compare all tables during the pause.")]
VerifiedWithin = Annotated[
    float | None,
    typer.Option(
        "--verified-within",
        help="Seconds within which `migrate verify` must have found no difference.",
        min=1,
        show_default="not checked",
    ),
]
WaiveGate = Annotated[
    list[str] | None,
    typer.Option(
        "--waive",
        help="A condition that need not hold, such as long_transaction; may be given several times.",
        metavar="CONDITION",
    ),
]
HookOption = Annotated[
    list[str] | None,
    typer.Option(
        "--hook",
        help="A shell command or a URL, called for pause, switch and resume, or for one EVENT; repeatable.",
        metavar="[EVENT=]ACTION",
        show_default=False,
    ),
]
Pgbouncer = Annotated[
    str | None,
    typer.Option("--pgbouncer", help="The admin console of a PgBouncer that pauses clients.", metavar="DSN"),
]
PgbouncerConfig = Annotated[
    Path | None,
    typer.Option("--pgbouncer-config", help="Its file with section [databases].", metavar="FILE", dir_okay=False),
]
PgbouncerDatabase = Annotated[
    str | None,
    typer.Option(
        "--pgbouncer-database",
        help="The database by which clients connect to it.",
        metavar="NAME",
        show_default="that of --source",
    ),
]
Programs = Annotated[
    Path | None,
    typer.Option(help="The directory of pg_dump and pg_restore.", metavar="DIRECTORY", show_default="found on PATH"),
]
Publication = Annotated[
    str | None,
    typer.Option(
        help="The publication on the source; created for all tables if missing.", metavar="NAME", show_default="NAME"
    ),
]
Schema = Annotated[bool, typer.Option(help="Copy roles and definitions to the target.")]
Waive = Annotated[
    list[str] | None,
    typer.Option("--waive", help="The name of a finding to accept; may be given several times.", metavar="FINDING"),
]
Without = Annotated[
    list[str] | None,
    typer.Option(
        "--without-publication", help="A publication to leave out; may be given several times.", metavar="NAME"
    ),
]
Jobs = Annotated[int, typer.Option("--jobs", "-j", help="Sessions that build indexes and foreign keys.", min=1)]
StartJobs = Annotated[
    int,
    typer.Option("--jobs", "-j", help="Tables that are copied, and indexes that are built, at the same time.", min=1),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the steps and statements, and change nothing.")]
