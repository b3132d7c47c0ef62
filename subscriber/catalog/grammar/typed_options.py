"""Options of statements from Python values, for programs that call methods in place of writing statements."""

from __future__ import annotations

from collections.abc import Mapping

from subscriber.catalog.grammar.parser import Option
from subscriber.quoting import identifier, qualified


def typed_options(values: Mapping[str, object]) -> tuple[Option, ...]:
    """Return the options that a statement with these values has.

    Args:
        values: by name of the option: True and False, numbers, texts, None for NONE, sequences of roles, and sequences
            of (schema, name). options.py checks the names and the values.

    Raises:
        TypeError: a value has none of these types.
    """
    return tuple(Option(name, _value(name, value)) for name, value in values.items())


def _value(name: str, value: object) -> str | int:
    match value:
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case int():
            return value
        case str():
            return str(value)
        case list() | tuple() | set() | frozenset():
            return ", ".join(_name(name, part) for part in value)
    raise TypeError(f"option {name} has a value of type {type(value).__name__}")


def _name(option: str, part: object) -> str:
    match part:
        case str():
            return identifier(part)
        case (str() as schema, str() as name):
            return qualified(schema, name)
    raise TypeError(f"option {option} is a sequence of names, and of (schema, name) for sequences")
