"""The options that name a database, and files with connection strings: --target @FILE."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from subscriber.cli.environment import APPLY_VARIABLE, SOURCE_VARIABLE, TARGET_VARIABLE
from subscriber.connection.dsn import read_named


def read_dsn(value: str | None) -> str | None:
    """Return the connection string of an option: the value itself, or the first line of FILE for @FILE.

    Raises:
        ConninfoError: the file cannot be read, or users other than its owner may read it.
    """
    # The shell has replaced its variables already.
    return read_named(value) if value is not None and value.startswith("@") else value


def _option(what: str, variable: str, *, default: str | None = None) -> Any:
    """Return the option. `default` is the text that --help shows for an omitted value; None: nothing."""
    return typer.Option(
        help=f"{what}: a URI or key=value pairs, directly or in @FILE.",
        envvar=variable,
        metavar="DSN",
        show_default=default or False,
        callback=read_dsn,
    )


def read_targets(given: list[str] | None) -> list[str]:
    """Return the targets of a repeated --target, or else the lines of the variable.

    Raises:
        typer.BadParameter: there is none.
        ConninfoError: a file cannot be read, or users other than its owner may read it.
    """
    found = given or [line.strip() for line in os.environ.get(TARGET_VARIABLE, "").splitlines() if line.strip()]
    if not found:
        raise typer.BadParameter(f"--target is missing, and {TARGET_VARIABLE} is not set", param_hint="'--target'")
    return [read_dsn(target) or "" for target in found]


_SOURCE = _option("The publisher's database", SOURCE_VARIABLE)
_APPLY = _option("The target database again, for the role that applies changes", APPLY_VARIABLE, default="--target")

Target = Annotated[str, _option("The target database", TARGET_VARIABLE)]
Targets = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        help="A target database: a URI or key=value pairs, directly or in @FILE; may be given several times.",
        metavar="DSN",
        show_default=f"the lines of {TARGET_VARIABLE}",
    ),
]
Source = Annotated[str, _SOURCE]
MaybeSource = Annotated[str | None, _SOURCE]
ApplyTarget = Annotated[str | None, _APPLY]
