"""docs/reference/commands.md: each command with its arguments and options, from `--help`."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from functools import cache
from types import NoneType
from typing import Any, NamedTuple, get_args, get_type_hints

import typer.core
import typer.main

from subscriber.cli.main import app
from tools.docs import markdown
from tools.docs.markdown import code

HEAD = """
Every command has `--help`. `subscriber --version` prints the version, and if the package is compiled. `subscriber
--install-completion` completes commands and options in bash, zsh, fish and PowerShell. A DSN is a URI or libpq's `key=value` string, with
several hosts, `service`, `passfile`, `sslmode` and libpq's other keywords. It may also be `@FILE`: the DSN is then the first line
of that file, which only its owner may read. With `subscriber --config FILE COMMAND`, `--target` also takes the name of a target of the
[configuration file](../configuration.md). If an option with a variable is not given, its value is taken from the
[environment](environment.md).

A command that takes longer than a second shows what it does on stderr, with the time that is left where it is known. It does so on
a terminal only, and not with `--json`.
""".strip()
EXIT_STATUSES = [
    ("0", "success"),
    ("1", "the answer is no: a difference, a problem, or a failed check"),
    ("2", "wrong usage; the error is on stderr"),
    ("3", "an error, printed on stderr as psql prints one; see [errors](errors.md)"),
    ("130", "ended by Ctrl-C"),
]


class Parameter(NamedTuple):
    """An argument or option of a command.

    Attributes:
        usage: its place in the usage line; empty for an option.
        names: its spellings.
        opposites: the spellings of the opposite of a flag.
        default: its default value or `required`; empty: none.
        is_literal: the default is a value, and not words.
        variable: the environment variable that replaces it; empty: none.
        help: what it is.
    """

    usage: str
    names: tuple[str, ...]
    opposites: tuple[str, ...]
    default: str
    is_literal: bool
    variable: str
    help: str


def root() -> typer.core.TyperGroup:
    """Return `subscriber` without a command, which has options of its own."""
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    return group


@cache
def commands() -> dict[str, typer.core.TyperCommand]:
    """Return all commands by name, in the order of `subscriber --help`. A command of a group has the group's name, too."""
    found: dict[str, typer.core.TyperCommand] = {}
    for name, command in root().commands.items():
        if isinstance(command, typer.core.TyperCommand):
            found[name] = command
        elif isinstance(command, typer.core.TyperGroup):
            members = command.commands.items()
            found |= {f"{name} {one}": call for one, call in members if isinstance(call, typer.core.TyperCommand)}
    return found


def page() -> str:
    statuses = markdown.table(["exit status", "means"], EXIT_STATUSES)
    return markdown.page("Commands", HEAD, statuses, *(_command(name, command) for name, command in commands().items()))


def usage_line(name: str, command: typer.core.TyperCommand) -> str:
    """Return the usage line of a command."""
    return " ".join(["subscriber", name, "[OPTIONS]", *(one.usage for one in parameters(command) if one.usage)])


def _command(name: str, command: typer.core.TyperCommand) -> str:
    rows = [
        [
            " / ".join([", ".join(map(code, one.names)), *map(code, one.opposites)]),
            code(one.default) if one.is_literal else one.default,
            code(one.variable),
            one.help,
        ]
        for one in parameters(command)
    ]
    return "\n\n".join(
        [
            f"## subscriber {name}",
            f"```text\n{usage_line(name, command)}\n```",
            (command.help or "").strip(),
            markdown.table(["argument or option", "default", "variable", ""], rows),
        ]
    )


def parameters(command: typer.core.TyperCommand) -> Iterator[Parameter]:
    """Yield the arguments and options of a command that are for users."""
    types = get_type_hints(command.callback)
    for parameter in command.params:
        if getattr(parameter, "hidden", False):
            continue
        assert isinstance(parameter, typer.core.TyperArgument | typer.core.TyperOption)
        assert parameter.name in types
        assert parameter.help, f"{command.name} {parameter.name} says nothing about itself"
        default, is_literal = _default(parameter)
        if isinstance(parameter, typer.core.TyperOption):
            usage, names = "", _names(parameter, types[parameter.name])
        else:
            usage = parameter.metavar or ""
            names = (usage,)
        yield Parameter(
            usage=usage,
            names=names,
            opposites=tuple(parameter.secondary_opts),
            default=default,
            is_literal=is_literal,
            variable=str(parameter.envvar or ""),
            help=parameter.help,
        )


def _names(parameter: typer.core.TyperOption, annotation: Any) -> tuple[str, ...]:
    value = "" if parameter.is_flag else f" {parameter.metavar or _kind(annotation)}"
    return tuple(name + value for name in sorted(parameter.opts, key=len, reverse=True))


def _kind(annotation: Any) -> str:
    """Return the choices of an enum; else INTEGER, NUMBER or TEXT."""
    kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not NoneType]
    if issubclass(kinds[0], StrEnum):
        return "|".join(kinds[0])
    return {int: "INTEGER", float: "NUMBER"}.get(kinds[0], "TEXT")


def _default(parameter: typer.core.TyperArgument | typer.core.TyperOption) -> tuple[str, bool]:
    """Return the default value, and whether it is written as code."""
    if parameter.required:
        return "required", False
    if isinstance(parameter.show_default, str):
        return parameter.show_default, False
    if getattr(parameter, "is_flag", False):
        return ("", False) if not parameter.secondary_opts else (parameter.opts[0], True)
    default = parameter.default
    return ("", False) if default is None or default == [] else (str(getattr(default, "value", default)), True)
