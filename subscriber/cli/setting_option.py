"""The option --setting NAME=VALUE, which changes any field of `Settings`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from subscriber.settings import Settings, parse_assignments

SettingOption = Annotated[
    list[str] | None,
    typer.Option(
        "--setting",
        help="Change a limit, an interval or a time-out; may be given several times.",
        metavar="NAME=VALUE",
        show_default="SUBSCRIBER_NAME in the environment",
    ),
]


def read_settings(assignments: Sequence[str] | None, **options: Any) -> Settings:
    """Read the settings of a command.

    Args:
        assignments: the values of --setting.
        options: settings that have an option of their own, which takes precedence; None if it was not given.

    Raises:
        typer.BadParameter: no such setting, or no value of the setting.
    """
    given = {name: value for name, value in options.items() if value is not None}
    hint = None if assignments is None else "'--setting'"  # of the environment otherwise
    try:
        return Settings.from_environment(**{**parse_assignments(assignments or ()), **given})
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=hint) from None
