"""Commands as functions that return an exit status. Each is imported and built when it is looked up.

Typer builds all commands of a program at its start: 40 ms, and the import of their modules. A program runs one of them.
The help of a group has the first sentence of each command's docstring, and does not build the commands either.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from importlib import import_module
from inspect import iscoroutinefunction
from typing import Any, NoReturn, TypeVar

import typer
from typer.core import TyperGroup

Function = TypeVar("Function", bound=Callable[..., Any])


class LazyCommands(Mapping[str, Any]):
    """The commands by name, in the order of --help. Only iteration over the values builds all of them."""

    def __init__(self, places: Mapping[str, str | Callable[..., Any]]) -> None:
        """`places` has each command's function, or the module and the name of a function or a CommandGroup."""
        self._places = places
        self._built: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._built:
            self._built[name] = _build(name, self._find(name))
        return self._built[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def summary(self, name: str) -> str:
        """Return the first sentence of the command's help."""
        command = self._find(name)
        text = command.help if isinstance(command, CommandGroup) else command.__doc__ or ""
        return " ".join(text.split()).partition(". ")[0].rstrip(".") + "."

    def _find(self, name: str) -> Any:
        place = self._places[name]
        if not isinstance(place, str):
            return place
        module, _, attribute = place.partition(":")
        return getattr(import_module(module), attribute)


class LazyGroup(TyperGroup):
    """A group with LazyCommands."""

    commands: Any

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.commands.summary(name)) for name in self.commands])


class CommandGroup:
    """Commands with a common first word, such as `subscriber migrate`."""

    def __init__(self, help: str) -> None:
        self.help = help
        self._functions: dict[str, Callable[..., Any]] = {}

    def add(self, function: Function) -> Function:
        """Add the command of a function, which has its name. Returns the function."""
        self._functions[function.__name__] = function
        return function

    def build(self, name: str) -> LazyGroup:
        """Return the group of Typer."""
        app = typer.Typer(name=name, help=self.help, cls=LazyGroup, no_args_is_help=True, rich_markup_mode=None)
        group = typer.main.get_group(app)
        assert isinstance(group, LazyGroup)
        group.commands = LazyCommands(self._functions)
        return group


def _build(name: str, found: Any) -> Any:
    if isinstance(found, CommandGroup):
        return found.build(name)
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name)(_callback(found))
    return typer.main.get_command(app)


def _callback(function: Callable[..., Any]) -> Callable[..., NoReturn]:
    """Return a function that runs a command, a coroutine function on uvloop if it is installed, and exits."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> NoReturn:
        if not iscoroutinefunction(function):
            raise typer.Exit(function(*args, **kwargs))
        import anyio

        options = {"use_uvloop": importlib.util.find_spec("uvloop") is not None}
        raise typer.Exit(anyio.run(partial(function, *args, **kwargs), backend_options=options))

    return run
