"""`subscriber config`: the configured targets, and the problems of their file."""

from __future__ import annotations

import typer

from subscriber.cli.dsn import required_config
from subscriber.cli.lazy_commands import CommandGroup
from subscriber.cli.messages import print_error
from subscriber.cli.options import Json
from subscriber.display import printable_lines

config = CommandGroup("Show and check the configuration file, whose targets --target can name.")


@config.add
def show(context: typer.Context, json: Json = False) -> int:
    """Print the configured targets without passwords."""
    from json import dumps

    from subscriber.cli.config import TARGETS

    shown = {name: target.redacted() for name, target in required_config(context).targets.items()}
    if json:
        print(dumps({TARGETS: shown}))
        return 0
    lines = [
        "\n".join([f"[{TARGETS}.{_key(name)}]", *(f"{key} = {_text(text)}" for key, text in keys.items())])
        for name, keys in shown.items()
    ]
    print(printable_lines("\n\n".join(lines), "") or "no targets")
    return 0


@config.add
def check(context: typer.Context) -> int:
    """Find the problems of the configuration file, without a connection.

    Reports unknown keys, connection strings that are invalid, variables and files that do not exist, and a password in
    a file that others can read. Exits 1 if there is a problem. `subscriber check` examines the servers.
    """
    from subscriber.cli.config import unresolved

    file = required_config(context)
    problems = [*file.problems, *unresolved(file)]
    for problem in problems:
        print_error(problem)
    if not problems:
        print(printable_lines(f"{file.file}: {len(file.targets)} targets, no problems", ""))
    return 1 if problems else 0


def _key(name: str) -> str:
    """Return a name as a key of TOML."""
    return name if name.isascii() and name.replace("-", "_").isidentifier() else _text(name)


def _text(text: str) -> str:
    """Return a text as TOML writes it, which is as JSON does."""
    from json import dumps

    return dumps(text, ensure_ascii=False)
