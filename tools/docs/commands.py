"""docs/reference/commands.md: each command with its arguments and options, from `--help`."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from types import NoneType
from typing import Any, get_args, get_type_hints

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

| exit status | means |
|---|---|
| 0 | success |
| 1 | the answer is no: a difference, a problem, or a failed check |
| 2 | wrong usage; the error is on stderr |
| 3 | an error, printed on stderr as psql prints one; see [errors](errors.md) |
| 130 | ended by Ctrl-C |
""".strip()


def root() -> typer.core.TyperGroup:
    """Return `subscriber` without a command, which has options of its own."""
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    return group


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
    return markdown.page("Commands", HEAD, *(_command(name, command) for name, command in commands().items()))


def _command(name: str, command: typer.core.TyperCommand) -> str:
    parameters = list(_parameters(command))
    usage = " ".join(["subscriber", name, "[OPTIONS]", *(usage for usage, _ in parameters if usage)])
    rows = [row for _, row in parameters]
    return "\n\n".join(
        [
            f"## subscriber {name}",
            f"```text\n{usage}\n```",
            (command.help or "").strip(),
            markdown.table(["argument or option", "default", "variable", ""], rows),
        ]
    )


def _parameters(command: typer.core.TyperCommand) -> Iterator[tuple[str, list[str]]]:
    """Yield each parameter's place in the usage line (empty for an option), and its row of the table."""
    types = get_type_hints(command.callback)
    for parameter in command.params:
        if getattr(parameter, "hidden", False):  # not for users
            continue
        assert isinstance(parameter, typer.core.TyperArgument | typer.core.TyperOption)
        assert parameter.name in types
        assert parameter.help, f"{command.name} {parameter.name} says nothing about itself"
        usage = parameter.metavar or "" if isinstance(parameter, typer.core.TyperArgument) else ""
        spelling = _spelling(parameter, types[parameter.name])
        yield usage, [spelling, _default(parameter), code(str(parameter.envvar or "")), parameter.help]


def _spelling(parameter: typer.core.TyperArgument | typer.core.TyperOption, annotation: Any) -> str:
    if isinstance(parameter, typer.core.TyperArgument):
        return code(parameter.metavar or "")
    value = "" if parameter.is_flag else f" {parameter.metavar or _kind(annotation)}"
    names = ", ".join(code(name + value) for name in sorted(parameter.opts, key=len, reverse=True))
    return " / ".join([names, *(code(name) for name in parameter.secondary_opts)])


def _kind(annotation: Any) -> str:
    """Return the choices of an enum; else INTEGER, NUMBER or TEXT."""
    kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not NoneType]
    if issubclass(kinds[0], StrEnum):
        return "|".join(kinds[0])
    return {int: "INTEGER", float: "NUMBER"}.get(kinds[0], "TEXT")


def _default(parameter: typer.core.TyperArgument | typer.core.TyperOption) -> str:
    if parameter.required:
        return "required"
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    if getattr(parameter, "is_flag", False):
        return "" if not parameter.secondary_opts else code(parameter.opts[0])
    default = parameter.default
    return "" if default is None or default == [] else code(str(getattr(default, "value", default)))
