"""`subscriber config`: the configured targets, and the problems of their file."""

from __future__ import annotations

import json as json_module
import sys

from subscriber.cli.commands.exec import print_error
from subscriber.cli.config import TARGETS, Config, unresolved
from subscriber.display import printable_lines


def print_config(config: Config, *, json: bool) -> int:
    """Print the targets as the file has them, without passwords. Returns the exit status."""
    shown = {name: target.redacted() for name, target in config.targets.items()}
    if json:
        print(json_module.dumps({TARGETS: shown}))
        return 0
    lines = [
        "\n".join([f"[{TARGETS}.{_key(name)}]", *(f"{key} = {_text(text)}" for key, text in keys.items())])
        for name, keys in shown.items()
    ]
    print(printable_lines("\n\n".join(lines), "") or "no targets")
    return 0


def print_problems(config: Config) -> int:
    """Print each problem to stderr. Returns the exit status: 1 if there is one."""
    found = [*config.problems, *unresolved(config)]
    for problem in found:
        print_error(problem, "", sys.stderr)
    if not found:
        print(printable_lines(f"{config.file}: {len(config.targets)} targets, no problems", ""))
    return 1 if found else 0


def _key(name: str) -> str:
    """Return a name as a key of TOML."""
    return name if name.isascii() and name.replace("-", "_").isidentifier() else _text(name)


def _text(text: str) -> str:
    """Return a text as TOML writes it, which is as JSON does."""
    return json_module.dumps(text, ensure_ascii=False)
