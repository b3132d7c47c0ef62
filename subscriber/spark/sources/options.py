"""The options of a data source. An unknown one is an error, because a misspelt option would be ignored."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from subscriber.display import near_word
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.sqlstate import INVALID_PARAMETER_VALUE, INVALID_TEXT_REPRESENTATION


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
                hint=" ".join(filter(None, [near_word(option, known), f"Its options are {', '.join(sorted(known))}."])),
                sqlstate=INVALID_PARAMETER_VALUE,
            )


def positive_number(source: str, options: Any, name: str) -> int | None:
    """Return the value of an option, None without it. Raises StatementError if it is not a positive number."""
    value = options.get(name)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit()) or not int(value):
        raise StatementError(
            f'option "{name}" of {source} must be a positive number, not "{value}"', sqlstate=INVALID_PARAMETER_VALUE
        )
    return int(value)


def parse_position(text: str) -> Lsn:
    """Parse an LSN. Raises StatementError for any other text."""
    try:
        return Lsn.parse(text)
    except ValueError as error:
        raise StatementError(str(error), sqlstate=INVALID_TEXT_REPRESENTATION) from None


def position_option(options: Any, name: str) -> Lsn | None:
    """Return the LSN of an option, None without it. Raises StatementError if it is not one."""
    return parse_position(options[name]) if options.get(name) else None
