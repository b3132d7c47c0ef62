"""The command `subscriber`.

`--help` and `exec` have to answer within 0.3 s. This module therefore imports no command. The module of a command is
imported when its name is looked up. Its function has the options as parameters, and the help as docstring. It imports
what its work needs, and returns the exit status.

Exit statuses:

- 0: success.
- 1: the answer is no (something differs, a check failed).
- 2: wrong usage.
- 3: an error, printed as psql prints one.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subscriber import __version__
from subscriber.cli import arguments, logs
from subscriber.cli.dsn import ConfigOption, check_config
from subscriber.cli.lazy_commands import LazyCommands, LazyGroup
from subscriber.cli.messages import print_error
from subscriber.display import printable_lines
from subscriber.errors import SubscriberError
from subscriber.redaction import redact

if TYPE_CHECKING:
    from collections.abc import Iterator

FAILED = 3
BUG = 1  # as in Python

# In the order of --help.
COMMANDS = {
    "exec": "subscriber.cli.commands.exec:exec_",
    "run": "subscriber.cli.commands.run:run",
    "console": "subscriber.cli.commands.console:console",
    "status": "subscriber.cli.commands.status:status",
    "tail": "subscriber.cli.commands.tail:tail",
    "check": "subscriber.cli.commands.check:check",
    "archive": "subscriber.cli.commands.archive:archive",
    "lake": "subscriber.cli.commands.lake.group:lake",
    "adopt": "subscriber.cli.commands.adopt:adopt",
    "hand-back": "subscriber.cli.commands.adopt:hand_back",
    "quarantine": "subscriber.cli.commands.quarantine:quarantine_",
    "verify": "subscriber.cli.commands.verify:verify_",
    "repair": "subscriber.cli.commands.repair:repair_",
    "resync": "subscriber.cli.commands.resync:resync",
    "reseed": "subscriber.cli.commands.repair:reseed_",
    "prepare-spark": "subscriber.cli.commands.prepare_spark:prepare_spark",
    "demo": "subscriber.cli.commands.demo:demo",
    "uninstall": "subscriber.cli.commands.uninstall:uninstall_",
    "config": "subscriber.cli.commands.config:config",
    "migrate": "subscriber.cli.commands.migrate.group:migrate",
}
_UsageError: Any = typer.BadParameter.__base__  # Typer does not export it


class _Commands(LazyGroup):
    """The group of commands. A usage error that quotes an argument shows no password of a connection string."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**{**attributes, "commands": LazyCommands(COMMANDS)})

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _redacted_messages():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _redacted_messages():
            return super().invoke(ctx)


@contextmanager
def _redacted_messages() -> Iterator[None]:
    try:
        yield
    except _UsageError as error:
        if not error.message and getattr(getattr(error, "param", None), "metavar", None) == "DSN":  # it is missing
            error.message = f"Such as: {error.param.opts[0]} postgresql://user@host/database"
        error.message = redact(_without_arguments(error.message))
        raise


def _without_arguments(message: str) -> str:
    """Redact the arguments that a message quotes. As a literal, with its escapes, one is not as easily redacted."""
    for argument in sys.argv[1:]:
        for given in (argument, argument.partition("=")[2]):
            if given and (shown := redact(given)) != given:
                message = message.replace(given, shown).replace(repr(given)[1:-1], shown)
    return message


app = typer.Typer(
    cls=_Commands,
    help="PostgreSQL's logical-replication subscriber, outside the server.",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: rich costs 0.1 s, and help is often piped into less
    pretty_exceptions_enable=False,  # its tracebacks print local variables, which include passwords
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from subscriber._speedups import module, why_not

        speed = "compiled" if module is not None else f"not compiled, so slower: {why_not}"
        print(f"subscriber {__version__} ({speed})")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version, and if it is compiled.", callback=_version, is_eager=True),
    ] = False,
    config: ConfigOption = None,
) -> None:
    if config is not None:
        # A command whose target is a connection string does not read the file. A mistyped name must not be silent.
        check_config(config)


def _print_errors(*errors: BaseException) -> None:
    """Print our errors as psql prints a server's. The members of a group are printed one after another."""
    for error in errors:
        if isinstance(error, BaseExceptionGroup):
            _print_errors(*error.exceptions)
        else:
            assert isinstance(error, SubscriberError)
            print_error(error)


def _print_bug(error: BaseException) -> None:
    """Print a traceback. It is filtered, because the text of an exception may come from the publisher."""
    for line in traceback.format_exception(error):
        sys.stderr.write(printable_lines(redact(line.rstrip("\n")), "") + "\n")


def main() -> None:
    """Run the command line.

    Our errors become psql's lines on stderr and exit status 3. A bug becomes a traceback and exit status 1.
    """
    arguments.hide_passwords()
    logs.redact_unconfigured()
    try:
        app()
    except SubscriberError as error:
        _print_errors(error)
        sys.exit(FAILED)
    except BaseExceptionGroup as group:
        if group.split(SubscriberError)[1] is not None:
            _print_bug(group)
            sys.exit(BUG)
        _print_errors(group)
        sys.exit(FAILED)
    except BrokenPipeError:  # `subscriber tail | head`: the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        _print_bug(error)
        sys.exit(BUG)
