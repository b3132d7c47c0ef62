"""Arguments and options that several commands share. This module imports only what --help needs."""

from __future__ import annotations

from typing import Annotated

import typer

from subscriber.cli.logs import LogFormat
from subscriber.errors import StatementError
from subscriber.lsn import Lsn, optional_lsn
from subscriber.sqlstate import INVALID_TEXT_REPRESENTATION

MIB = 1024 * 1024
LOCAL_MASTER = "local[*,4]"

Name = Annotated[str, typer.Argument(help="The subscription.", metavar="NAME")]
_PUBLICATIONS = typer.Option("--publication", "-p", help="A publication; may be given several times.", metavar="NAME")
Publications = Annotated[list[str], _PUBLICATIONS]
MaybePublications = Annotated[list[str] | None, _PUBLICATIONS]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
LogFormatOption = Annotated[LogFormat, typer.Option(help="Format of the log lines on stderr.")]
Until = Annotated[str | None, typer.Option(help="End at this position.", metavar="LSN")]
Batch = Annotated[int | None, typer.Option(help="Changes in each batch.", min=1, show_default="1000000")]
ServerJobs = Annotated[int, typer.Option("--jobs", "-j", help="Connections to each server.", min=1)]
DeleteExtra = Annotated[
    bool,
    typer.Option(
        "--delete-extra",
        help="Delete rows that the publisher does not have, unless they may belong to another subscription.",
    ),
]
Master = Annotated[
    str,
    typer.Option(
        help="Spark's master: local[N] for this machine, a cluster's address, or sc://HOST for Spark Connect.",
        metavar="URL",
    ),
]


def read_position(text: str | None) -> Lsn | None:
    """Parse the option --until. Raises StatementError for anything that is not an LSN."""
    try:
        return optional_lsn(text)
    except ValueError:
        raise StatementError(
            f'--until must be an LSN such as 16/B374D848, not "{text}"', sqlstate=INVALID_TEXT_REPRESENTATION
        ) from None
