"""Commands of a group that are imported and built when they are looked up.

Typer builds all commands of a program at its start: 40 ms, and the import of their modules. A program runs one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import typer


class LazyCommands(Mapping[str, Any]):
    """The commands by name, in the order of --help. Only iteration over the values builds all of them."""

    def __init__(self, places: Mapping[str, str]) -> None:
        """`places` has the module and the name of each command's function, or of a group's `typer.Typer`."""
        self._places = places
        self._built: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._built:
            self._built[name] = _build(name, self._places[name])
        return self._built[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _build(name: str, place: str) -> Any:
    module, _, attribute = place.partition(":")
    found = getattr(import_module(module), attribute)
    if isinstance(found, typer.Typer):
        return typer.main.get_group(found)
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name)(found)
    return typer.main.get_command(app)
