"""The option --app package.module:name. This module imports only what --help needs."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from subscriber.display import near_word

if TYPE_CHECKING:
    from subscriber.app import App

AppOption = Annotated[
    str | None,
    typer.Option(
        "--app",
        help="A subscriber.App with hooks, resolvers and a handler of errors.",
        metavar="MODULE:NAME",
        show_default=False,
    ),
]


def load_app(name: str | None) -> App:
    """Return the App that `name` names. None: an App without hooks and resolvers.

    The working directory is searched for the module first.

    Raises:
        typer.BadParameter: there is no such module or object, or it is no App.
    """
    from subscriber.app import App

    if name is None:
        return App()
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise _bad(f'"{name}" is not of the form package.module:name')
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, and imports another one that does not
        raise _bad(
            f'there is no module "{error.name}" in {here} or on sys.path. Run the command in its directory.'
        ) from None
    app = getattr(module, attribute, None)
    if app is None:
        near = near_word(attribute, [name_there for name_there in vars(module) if not name_there.startswith("_")])
        raise _bad(" ".join(filter(None, [f'module "{module_name}" has no "{attribute}".', near])))
    if not isinstance(app, App):
        raise _bad(f"{name} is no subscriber.App, but a {type(app).__name__}")
    return app


def _bad(message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint="'--app'")
