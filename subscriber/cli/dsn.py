"""The options that name a database: a connection string, @FILE, or the NAME of a target of the configuration file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subscriber.cli.environment import APPLY_VARIABLE, CONFIG_VARIABLE, SOURCE_VARIABLE, TARGET_VARIABLE
from subscriber.connection.dsn import read_named
from subscriber.errors import ConninfoError
from subscriber.remedy import Remedy

if TYPE_CHECKING:
    from subscriber.cli.config import Config

# Neither a URI, nor key=value pairs, nor @FILE.
_TARGET_NAME = re.compile(r"[\w.-]+")

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="A file of targets that --target can name.",
        metavar="FILE",
        envvar=CONFIG_VARIABLE,
        show_default=False,
    ),
]


def read_given_config(context: typer.Context) -> Config | None:
    """Return the configuration file of the command line. None: there is none.

    Raises:
        ConninfoError: the file cannot be read, or is not TOML.
    """
    from subscriber.cli.config import read_config

    file = context.find_root().params.get("config")  # as it was given, or a Path since Typer 0.29
    return None if file is None else read_config(Path(file))


def check_config(file: Path) -> None:
    """Check that the configuration file can be opened, whether the command uses a target of it or not.

    Raises:
        ConninfoError: it cannot be opened.
    """
    try:
        file.open("rb").close()
    except OSError as error:
        from subscriber.cli.config import unreadable

        raise unreadable(file, error) from None


def required_config(context: typer.Context) -> Config:
    """Return the configuration file of the command line.

    Raises:
        typer.BadParameter: there is none.
        ConninfoError: the file cannot be read, or is not TOML.
    """
    if (config := read_given_config(context)) is None:
        raise typer.BadParameter(
            f"give it before the command, as in subscriber --config FILE config check, or set {CONFIG_VARIABLE}",
            param_hint="'--config'",
        )
    return config


def read_dsn(value: str | None) -> str | None:
    """Return the connection string of an option: the value itself, or the first line of FILE for @FILE.

    Raises:
        ConninfoError: the file cannot be read, or users other than its owner may read it.
    """
    # The shell has replaced its variables already.
    return read_named(value) if value is not None and value.startswith("@") else value


def _read_target(context: typer.Context, value: str | None) -> str | None:
    """Return the connection string of a target, which may be the name of a configured one."""
    if value is None or not _TARGET_NAME.fullmatch(value):
        return read_dsn(value)
    if (config := read_given_config(context)) is None:
        raise ConninfoError(
            f'missing "=" after "{value}" in connection info string',
            hint=Remedy(
                "for a target of a configuration file, name the file", f"export {CONFIG_VARIABLE}=subscriber.toml"
            ),
        )
    target = config.target(value)
    context.meta[_APPLY] = target.apply_connection()
    return target.connection()


def _read_apply_target(context: typer.Context, value: str | None) -> str | None:
    """Return the connection string for the role that applies changes; by default, that of the configured target.

    Options that are not given are read last, and in their order. The target is therefore known.
    """
    return context.meta.get(_APPLY) if value is None else read_dsn(value)


def _option(
    what: str,
    variable: str,
    *,
    read: Callable[..., str | None] = read_dsn,
    forms: str = "a URI or key=value pairs, directly or in @FILE",
    default: str | None = None,
) -> Any:
    """Return the option. `default` is the text that --help shows for an omitted value; None: nothing."""
    return typer.Option(
        help=f"{what}: {forms}.", envvar=variable, metavar="DSN", show_default=default or False, callback=read
    )


def read_targets(context: typer.Context, given: list[str] | None) -> list[str]:
    """Return the targets of a repeated --target, or else the lines of the variable, or all configured targets.

    Raises:
        typer.BadParameter: there is none.
        ConninfoError: a file cannot be read, or users other than its owner may read it.
    """
    targets = given or [line.strip() for line in os.environ.get(TARGET_VARIABLE, "").splitlines() if line.strip()]
    if not targets and (config := read_given_config(context)) is not None:
        targets = list(config.targets)
    if not targets:
        raise typer.BadParameter(f"--target is missing, and {TARGET_VARIABLE} is not set", param_hint="'--target'")
    return [_read_target(context, target) or "" for target in targets]


_APPLY = "subscriber.apply_target"  # in the context of a command
_TARGET_FORMS = "a URI or key=value pairs, directly or in @FILE, or a NAME of --config"
_SOURCE = _option("The publisher's database", SOURCE_VARIABLE)

Target = Annotated[str, _option("The target database", TARGET_VARIABLE, read=_read_target, forms=_TARGET_FORMS)]
Targets = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        help=f"A target database: {_TARGET_FORMS}; may be given several times.",
        metavar="DSN",
        show_default=f"the lines of {TARGET_VARIABLE}, or all targets of --config",
    ),
]
Source = Annotated[str, _SOURCE]
MaybeSource = Annotated[str | None, _SOURCE]
ApplyTarget = Annotated[
    str | None,
    _option(
        "The target database again, for the role that applies changes",
        APPLY_VARIABLE,
        read=_read_apply_target,
        default="--target",
    ),
]
