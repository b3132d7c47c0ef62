"""The option --app. This module imports only what --help needs."""

from __future__ import annotations

from typing import Annotated

import typer

AppOption = Annotated[
    str | None,
    typer.Option(
        "--app",
        help="A subscriber.App with hooks, resolvers and a handler of errors.",
        metavar="MODULE:NAME",
        show_default=False,
    ),
]
