"""The options of a data source. An unknown one is an error, because a misspelt option would be ignored."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from subscriber.display import near_word
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.sqlstate import INVALID_PARAMETER_VALUE, INVALID_TEXT_REPRESENTATION

OF_BATCHES = ("end",)
OF_STREAMS = ("consumer", "maxChangesPerTrigger", "maxBytesPerTrigger")


def check_options(source: str, options: Iterable[str], known: Collection[str], *, has_streams: bool = False) -> None:
    """Check the names of options, in which case does not matter.

    Args:
        source: the name of the data source.
        options: the names.
        known: the names that a query of this kind may have.
        has_streams: the source has streams and batches, with the options OF_STREAMS and OF_BATCHES.

    Raises:
        StatementError: an option is not one of `known`.
    """
    names = {name.lower() for name in known}
    for option in options:
        if option.lower() not in names:
            if has_streams:
                _check_kind(source, option)
            raise StatementError(
                f'{source} has no option "{option}"',
                hint=" ".join(filter(None, [near_word(option, known), f"Its options are {', '.join(sorted(known))}."])),
                sqlstate=INVALID_PARAMETER_VALUE,
            )


def _check_kind(source: str, option: str) -> None:
    """Raise StatementError if an option is of the other kind of query."""
    for kind, names, hint in (
        ("streams", OF_STREAMS, "Leave it out, or read with spark.readStream."),
        ("batches", OF_BATCHES, "Leave it out: .trigger(availableNow=True) ends a stream where the log ends."),
    ):
        for name in names:
            if option.lower() == name.lower():  # Spark passes names in lower case
                raise StatementError(
                    f'option "{name}" of {source} is for {kind}', hint=hint, sqlstate=INVALID_PARAMETER_VALUE
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


def position_option(source: str, options: Any, name: str, words: Collection[str] = ()) -> Lsn | None:
    """Return the LSN of an option, None without it, or if it is one of `words`.

    Raises:
        StatementError: it is another text.
    """
    text = options.get(name)
    if not text or text in words:
        return None
    try:
        return Lsn.parse(text)
    except ValueError:
        choices = ["an LSN such as 16/B374D848", *(f'"{word}"' for word in words)]
        wanted = f"{', '.join(choices[:-1])} or {choices[-1]}" if words else choices[0]
        raise StatementError(
            f'option "{name}" of {source} must be {wanted}, not "{text}"', sqlstate=INVALID_TEXT_REPRESENTATION
        ) from None


def name_list(names: Collection[str] | str) -> list[str]:
    """Return names that a caller may also write as one text, which is one name."""
    return [names] if isinstance(names, str) else list(names)
