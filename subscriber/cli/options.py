"""Arguments and options that several commands share. This module imports only what --help needs."""

from __future__ import annotations

from typing import Annotated

import typer

from subscriber.cli.logs import LogFormat

Name = Annotated[str, typer.Argument(help="The subscription.", metavar="NAME")]
_PUBLICATIONS = typer.Option("--publication", "-p", help="A publication; may be given several times.", metavar="NAME")
Publications = Annotated[list[str], _PUBLICATIONS]
MaybePublications = Annotated[list[str] | None, _PUBLICATIONS]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
LogFormatOption = Annotated[LogFormat, typer.Option(help="Format of the log lines on stderr.")]
Until = Annotated[str | None, typer.Option(help="End at this position.", metavar="LSN")]
Batch = Annotated[int | None, typer.Option(help="Changes in each batch.", min=1, show_default="1000000")]
ServerJobs = Annotated[int, typer.Option("--jobs", "-j", help="Connections to each server.", min=1)]
