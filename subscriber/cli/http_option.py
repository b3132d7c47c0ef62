"""The options of commands that serve the console: other host names, and the tokens of persons who may act."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from subscriber.cli.environment import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE

if TYPE_CHECKING:
    from subscriber.cli.http import Address
    from subscriber.console.access import Tokens

HostOption = Annotated[
    list[str] | None,
    typer.Option(
        "--http-host",
        help="Also answer requests to this host name; may be given several times.",
        metavar="NAME",
        show_default="localhost, this machine's name and addresses",
    ),
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        "--http-token-file",
        help="Let persons with a token of this file act on the page; lines of LABEL:TOKEN.",
        metavar="FILE",
        envvar=TOKEN_FILE_VARIABLE,
        show_default=f"{TOKEN_VARIABLE}, or the page is read-only",
    ),
]


def read_address(http: str, names: list[str] | None) -> Address:
    """Return the address of --http.

    Raises:
        typer.BadParameter: the text is not an address, or a name is not a host name.
    """
    from subscriber.cli.http import Address

    try:
        return Address.parse(http, names or [])
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--http'") from None


def read_tokens(file: str | None) -> Tokens | None:
    """Return the tokens of the file, or else of the variable; None if there are none.

    Raises:
        ConninfoError: the file cannot be read, or users other than its owner may read it; or a line is invalid.
    """
    from subscriber.connection.private_file import read_private_file
    from subscriber.console.access import WRITE_TOKENS, Tokens

    text = os.environ.pop(TOKEN_VARIABLE, "")  # so that no other process inherits it
    if file is not None:
        return Tokens.parse(read_private_file(file, "token", WRITE_TOKENS), f'token file "{file}"')
    return Tokens.parse(text, f"environment variable {TOKEN_VARIABLE}") if text else None
