"""The options of a data source: an unknown one is an error, because a misspelt option would be ignored."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from subscriber.errors import StatementError
from subscriber.sqlstate import INVALID_PARAMETER_VALUE


def check_options(source: str, options: Iterable[str], known: Collection[str]) -> None:
    """Check the names of options, in which case does not matter.

    Raises:
        StatementError: an option is not one of `known`.
    """
    names = {name.lower() for name in known}
    for option in options:
        if option.lower() not in names:
            raise StatementError(
                f'{source} has no option "{option}"',
                hint=f"Its options are {', '.join(sorted(known))}.",
                sqlstate=INVALID_PARAMETER_VALUE,
            )
