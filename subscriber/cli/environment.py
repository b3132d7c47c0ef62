"""Settings of the commands that depend on the environment: the servers, and the event loop."""

from __future__ import annotations

import importlib.util
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NoReturn, ParamSpec

import typer

P = ParamSpec("P")

# The defaults of --target, --source and --apply-target are taken from these variables.
TARGET_VARIABLE = "SUBSCRIBER_TARGET_DSN"
SOURCE_VARIABLE = "SUBSCRIBER_SOURCE_DSN"
APPLY_VARIABLE = "SUBSCRIBER_APPLY_DSN"
# The default of --config.
CONFIG_VARIABLE = "SUBSCRIBER_CONFIG"
# The tokens of the console, or the file that has them.
TOKEN_VARIABLE = "SUBSCRIBER_HTTP_TOKEN"
TOKEN_FILE_VARIABLE = "SUBSCRIBER_HTTP_TOKEN_FILE"


def run_command(function: Callable[P, Awaitable[int]], *args: P.args, **kwargs: P.kwargs) -> NoReturn:
    """Run a command's coroutine function to its end, on uvloop if that is installed, and exit with its status."""
    import anyio

    options = {"use_uvloop": importlib.util.find_spec("uvloop") is not None}
    raise typer.Exit(anyio.run(partial(function, *args, **kwargs), backend_options=options))
