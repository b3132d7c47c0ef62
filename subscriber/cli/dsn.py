"""The options that name a database, and files with connection strings: --target @FILE."""

from __future__ import annotations

import os
import shlex
import stat
from typing import Annotated, Any

import typer

from subscriber.cli.environment import APPLY_VARIABLE, SOURCE_VARIABLE, TARGET_VARIABLE
from subscriber.errors import ConninfoError
from subscriber.sqlstate import UNDEFINED_FILE


def read_dsn(value: str | None) -> str | None:
    """Return the connection string of an option: the value itself, or the first line of FILE for @FILE.

    Raises:
        ConninfoError: the file cannot be read, or users other than its owner may read it.
    """
    if value is None or not value.startswith("@"):
        return value
    name = value[1:]
    try:
        # Opening a pipe would wait for its other end.
        descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, encoding="utf-8", errors="surrogateescape") as file:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise ConninfoError(f'connection string file "{name}" is not a plain file')
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConninfoError(
                    f'connection string file "{name}" has group or world access',
                    detail="Permissions should be u=rw (0600) or less.",
                    hint=f"chmod 600 {shlex.quote(name)}",
                )
            line = file.readline().strip()
    except OSError as error:
        raise ConninfoError(
            f'could not open connection string file "{name}": {error.strerror}', sqlstate=UNDEFINED_FILE
        ) from None
    if not line:
        raise ConninfoError(f'connection string file "{name}" has nothing in its first line')
    return line


def _option(what: str, variable: str, *, default: str | None = None) -> Any:
    """Return the option. `default` is the text that --help shows for an omitted value; None: nothing."""
    return typer.Option(
        help=f"{what}: a URI, key=value pairs, or @FILE with one of them.",
        envvar=variable,
        metavar="DSN",
        show_default=default or False,
        callback=read_dsn,
    )


_SOURCE = _option("The publisher's database", SOURCE_VARIABLE)
_APPLY = _option("The target database again, for the role that applies changes", APPLY_VARIABLE, default="--target")

Target = Annotated[str, _option("The target database", TARGET_VARIABLE)]
Source = Annotated[str, _SOURCE]
MaybeSource = Annotated[str | None, _SOURCE]
ApplyTarget = Annotated[str | None, _APPLY]
