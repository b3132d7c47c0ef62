"""The options of CREATE and ALTER SUBSCRIPTION: parsers of their values, and which exclude each other.

The table of options is in subscriber/subscription.py. A new option needs a change here only if its value has a new
syntax, or if it excludes other options.

Pure. Messages and SQLSTATEs are PostgreSQL's, in its order: options are read as they were written, and the first one
that is wrong is reported. Source: parse_subscription_options() in src/backend/commands/subscriptioncmds.c,
defGetBoolean() in define.c, ReplicationSlotValidateName() in slot.c.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from enum import StrEnum
from typing import Any

from subscriber.catalog.grammar.conflict_options import check_policy
from subscriber.catalog.grammar.lexer import NAMEDATALEN, TokenKind, tokenize
from subscriber.catalog.grammar.parser import Option
from subscriber.display import near_word
from subscriber.durations import GREATEST, parse_milliseconds
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.ownership import parse_ownership
from subscriber.sizes import parse_size
from subscriber.sqlstate import (
    DUPLICATE_OBJECT,
    INVALID_NAME,
    INVALID_OBJECT_DEFINITION,
    INVALID_PARAMETER_VALUE,
    INVALID_TEXT_REPRESENTATION,
    NAME_TOO_LONG,
    RESERVED_NAME,
)
from subscriber.subscription import (
    OPTIONS,
    OptionStatement,
    OptionValue,
    StatementOptions,
    Streaming,
    TableCopy,
    ValueSyntax,
)

CONFLICT_DETECTION_SLOT = "pg_conflict_detection"  # reserved by servers since 19
SYNCHRONOUS_COMMIT = ("local", "remote_write", "remote_apply", "on", "off")
SYNCHRONOUS_COMMIT_HIDDEN = ("true", "false", "yes", "no", "1", "0")  # accepted, but not in the hint


def _options_of(statement: OptionStatement) -> frozenset[str]:
    return frozenset(name for name, option in OPTIONS.items() if statement in option.statements)


FOR_CREATE = _options_of(OptionStatement.CREATE)
FOR_SET = _options_of(OptionStatement.SET)
FOR_PUBLICATIONS = _options_of(OptionStatement.PUBLICATION)
FOR_REFRESH = _options_of(OptionStatement.REFRESH)
FOR_REFRESH_TABLE = _options_of(OptionStatement.REFRESH_TABLE)
FOR_SKIP = _options_of(OptionStatement.SKIP)


def parse_options(options: Iterable[Option], supported: frozenset[str]) -> StatementOptions:
    """Check the options of a statement that knows those in `supported` (one of the FOR_ sets)."""
    values: dict[str, Any] = {}
    for option in options:
        if option.name not in supported:
            use = "Use ALTER SUBSCRIPTION … ENABLE or DISABLE." if option.name == "enabled" else None
            hint = use or near_word(option.name, sorted(supported))
            raise StatementError(f'unrecognized subscription parameter: "{option.name}"', hint=hint)
        if option.name in values:
            raise StatementError("conflicting or redundant options")
        value = OPTIONS[option.name].value
        values[option.name] = PARSERS[value.syntax](option, value)
    parsed = StatementOptions(**values, specified=frozenset(values))
    if "connect" in supported and not parsed.connect:
        parsed = _without_connection(parsed)
    if parsed.delete_extra:
        parsed = _deleting_extra(parsed, supported)
    if parsed.slot_name is None and "slot_name" in parsed.specified and supported >= FOR_CREATE:
        _check_without_slot(parsed)
    return parsed


def _exclusive(one: str, other: str) -> StatementError:
    return StatementError(f"{one} and {other} are mutually exclusive options")


def _without_connection(parsed: StatementOptions) -> StatementOptions:
    """With connect = false, refuse options that need a connection, and turn off their defaults."""
    for name in ("enabled", "create_slot", "copy_data"):
        if name in parsed.specified and getattr(parsed, name):
            raise _exclusive("connect = false", f"{name} = true")
    return replace(parsed, enabled=False, create_slot=False, copy_data=None)


def _deleting_extra(parsed: StatementOptions, supported: frozenset[str]) -> StatementOptions:
    """With delete_extra, compare tables so that rows that the publisher does not have are deleted."""
    if "copy_data" not in supported:
        if parsed.truncate:
            raise _exclusive("delete_extra = true", "truncate = true")
        return parsed
    if parsed.copy_data is not TableCopy.COMPARE:
        raise StatementError("delete_extra = true requires copy_data = 'compare'", sqlstate=INVALID_PARAMETER_VALUE)
    return replace(parsed, copy_data=TableCopy.DELETE_EXTRA)


def _check_without_slot(parsed: StatementOptions) -> None:
    """Check slot_name = NONE: the same statement must switch off the options that need a slot."""
    for name in ("enabled", "create_slot"):
        if getattr(parsed, name):
            if name in parsed.specified:
                raise _exclusive("slot_name = NONE", f"{name} = true")
            raise StatementError(f"subscription with slot_name = NONE must also set {name} = false")


def _all_of(words: Iterable[str]) -> str:
    return f"Valid are: {', '.join(words)}."


def string(option: Option) -> str:
    """The value as text, a number as it was written."""
    if option.value is None:
        raise StatementError(f"{option.name} requires a parameter")
    return str(option.value)


def boolean(option: Option) -> bool:
    """Return the value of true, false, on, off, 1, 0. A missing value means true. '1' in quotes is invalid."""
    value = option.value
    if value is None or value == 1:
        return True
    if value == 0:
        return False
    if isinstance(value, str):
        if value.lower() in ("true", "on"):
            return True
        if value.lower() in ("false", "off"):
            return False
    raise StatementError(f"{option.name} requires a Boolean value", hint=_all_of(("on", "off")))


def _streaming(option: Option) -> Streaming:
    if isinstance(option.value, str) and option.value.lower() == "parallel":
        return Streaming.PARALLEL
    try:
        return Streaming.ON if boolean(option) else Streaming.OFF
    except StatementError:
        hint = _all_of(("on", "off", "parallel"))
        raise StatementError(f'{option.name} requires a Boolean value or "parallel"', hint=hint) from None


def _copy_data(option: Option) -> TableCopy | None:
    if isinstance(option.value, str) and option.value.lower() == TableCopy.COMPARE:
        return TableCopy.COMPARE
    return TableCopy.COPY if boolean(option) else None


def _slot_name(option: Option) -> str | None:
    name = string(option)
    if name == "none":
        return None
    check_slot_name(name)
    return name


def check_slot_name(name: str) -> None:
    """Raises StatementError unless a replication slot may have that name."""
    if name == CONFLICT_DETECTION_SLOT:
        raise StatementError(
            f'replication slot name "{name}" is reserved',
            hint=f'The name "{name}" is reserved for the conflict detection slot.',
            sqlstate=RESERVED_NAME,
        )
    if not name:
        raise StatementError(f'replication slot name "{name}" is too short', sqlstate=INVALID_NAME)
    if len(name.encode()) >= NAMEDATALEN:
        raise StatementError(f'replication slot name "{name}" is too long', sqlstate=NAME_TOO_LONG)
    if not all(c.isascii() and (c.islower() or c.isdigit() or c == "_") for c in name):
        raise StatementError(
            f'replication slot name "{name}" contains invalid character',
            hint="Replication slot names may only contain lower case letters, numbers, and the underscore character.",
            sqlstate=INVALID_NAME,
        )


def _synchronous_commit(option: Option) -> str:
    value = string(option)
    if value.lower() not in SYNCHRONOUS_COMMIT + SYNCHRONOUS_COMMIT_HIDDEN:
        raise StatementError(
            f'invalid value for parameter "synchronous_commit": "{value}"',
            hint=f"Available values: {', '.join(SYNCHRONOUS_COMMIT)}.",
            sqlstate=INVALID_PARAMETER_VALUE,
        )
    return value


def _origin(option: Option) -> str:
    value = string(option)
    if value.lower() not in ("none", "any"):
        raise StatementError(
            f'unrecognized origin value: "{value}"',
            hint=near_word(value, ("none", "any")),
            sqlstate=INVALID_PARAMETER_VALUE,
        )
    return value


def _choice(option: Option, known: OptionValue) -> StrEnum:
    assert known.choices is not None
    value = string(option)
    try:
        return known.choices(value.lower())
    except ValueError:
        raise StatementError(
            f'invalid value for parameter "{option.name}": "{value}"',
            hint=f"{_near(value, known.choices)}Available values: {', '.join(known.choices)}.",
            sqlstate=INVALID_PARAMETER_VALUE,
        ) from None


def _near(value: str, choices: Iterable[str]) -> str:
    near = near_word(value, choices)
    return "" if near is None else f"{near} "


def _number(option: Option, known: OptionValue) -> int:
    least, greatest = known.limits
    value = string(option)
    number = int(value) if value.isascii() and value.isdigit() else None
    if number is None or not least <= number <= greatest:
        raise StatementError(
            f'invalid value for parameter "{option.name}": "{value}"',
            hint=f"It is a number from {least} to {greatest}.",
            sqlstate=INVALID_PARAMETER_VALUE,
        )
    return number


def _milliseconds(option: Option) -> int:
    value = option.value
    if not isinstance(value, int) or not -(2**31) <= value < 2**31:
        raise StatementError(f"{option.name} requires an integer value")
    if value < 0:
        raise StatementError(f'option "{option.name}" cannot be negative', sqlstate=INVALID_PARAMETER_VALUE)
    return value


def _roles(option: Option) -> tuple[str, ...]:
    """Names of roles, separated by commas, quoted where SQL has to quote them."""
    value = string(option)
    *tokens, _ = tokenize(value)
    names, commas = tokens[::2], tokens[1::2]
    wrong = (tokens and len(tokens) % 2 == 0) or any(comma.source != "," for comma in commas)
    if wrong or any(name.kind not in (TokenKind.WORD, TokenKind.IDENTIFIER) for name in names):
        raise StatementError(
            f'invalid value for parameter "{option.name}": "{value}"',
            hint="It is a list of roles, as 'alice, \"Bob\"'; '' for none.",
            sqlstate=INVALID_PARAMETER_VALUE,
        )
    return tuple(dict.fromkeys(name.text for name in names))


def _size(option: Option) -> str:
    """A size as it was written."""
    value = string(option)
    try:
        parse_size(value)
    except ValueError as error:
        message = f'invalid value for parameter "{option.name}": "{value}"'
        raise StatementError(message, hint=str(error), sqlstate=INVALID_PARAMETER_VALUE) from None
    return value


def _duration(option: Option) -> str:
    """A duration as it was written, or -1."""
    value = string(option)
    if value == "-1":
        return value
    try:
        milliseconds = parse_milliseconds(value)
    except ValueError as error:
        message = f'invalid value for parameter "{option.name}": "{value}"'
        raise StatementError(message, hint=str(error) or None, sqlstate=INVALID_PARAMETER_VALUE) from None
    if milliseconds < 0:
        raise StatementError(
            f'{milliseconds} ms is outside the valid range for parameter "{option.name}" (0 ms .. {GREATEST} ms)',
            sqlstate=INVALID_PARAMETER_VALUE,
        )
    return value


def _ownership(option: Option) -> str:
    """Rules of ownership as they were written."""
    value = string(option)
    parse_ownership(value)
    return value.strip()


def _sequences(option: Option) -> tuple[tuple[str, str], ...]:
    """Names of sequences with their schemas, separated by commas, quoted where SQL has to quote them."""
    value = string(option)
    *tokens, _ = tokenize(value)
    names: list[tuple[str, str]] = []
    for at in range(0, len(tokens), 4):
        schema, *rest = tokens[at : at + 4]
        named = [schema, *rest[1:2]]
        signs = [token.source for token in (*rest[:1], *rest[2:])]
        is_last = at + 4 >= len(tokens)
        if (
            len(named) < 2
            or signs != ["."] + [","] * (not is_last)
            or any(token.kind not in (TokenKind.WORD, TokenKind.IDENTIFIER) for token in named)
        ):
            raise StatementError(
                f'invalid value for parameter "{option.name}": "{value}"',
                hint="It is a list of sequences with their schemas, as 'public.a, app.\"B\"'; '' for none.",
                sqlstate=INVALID_PARAMETER_VALUE,
            )
        names.append((named[0].text, named[1].text))
    return tuple(dict.fromkeys(names))


def _lsn(option: Option) -> Lsn:
    return Lsn(0) if string(option) == "none" else position(option)


def position(option: Option) -> Lsn:
    """Return a position that is not 0."""
    value = string(option)
    try:
        lsn = Lsn.parse(value)
    except ValueError as error:
        hint = "An LSN has the form 16/B374D848. subscriber status shows the one to skip."
        raise StatementError(str(error), hint=hint, sqlstate=INVALID_TEXT_REPRESENTATION) from None
    if not lsn:
        raise StatementError(f"invalid WAL location (LSN): {value}", sqlstate=INVALID_PARAMETER_VALUE)
    return lsn


PARSERS: dict[ValueSyntax, Callable[[Option, OptionValue], Any]] = {
    ValueSyntax.BOOLEAN: lambda option, _: boolean(option),
    ValueSyntax.CHOICE: _choice,
    ValueSyntax.NUMBER: _number,
    ValueSyntax.MILLISECONDS: lambda option, _: _milliseconds(option),
    ValueSyntax.SLOT_NAME: lambda option, _: _slot_name(option),
    ValueSyntax.SYNCHRONOUS_COMMIT: lambda option, _: _synchronous_commit(option),
    ValueSyntax.STREAMING: lambda option, _: _streaming(option),
    ValueSyntax.ORIGIN: lambda option, _: _origin(option),
    ValueSyntax.LSN: lambda option, _: _lsn(option),
    ValueSyntax.CONFLICT_POLICY: lambda option, _: check_policy(string(option)),
    ValueSyntax.OWNERSHIP: lambda option, _: _ownership(option),
    ValueSyntax.ROLES: lambda option, _: _roles(option),
    ValueSyntax.DURATION: lambda option, _: _duration(option),
    ValueSyntax.SIZE: lambda option, _: _size(option),
    ValueSyntax.COPY_DATA: lambda option, _: _copy_data(option),
    ValueSyntax.SEQUENCES: lambda option, _: _sequences(option),
}


def check_publications(publications: Iterable[str]) -> None:
    """Raises StatementError (42710) if a publication is named twice."""
    seen: set[str] = set()
    for name in publications:
        if name in seen:
            raise StatementError(f'publication name "{name}" used more than once', sqlstate=DUPLICATE_OBJECT)
        seen.add(name)


def merge_publications(
    old: tuple[str, ...], names: tuple[str, ...], *, add: bool, subscription: str
) -> tuple[str, ...]:
    """The subscription's publications after ADD or DROP PUBLICATION."""
    check_publications(names)
    merged = list(old)
    for name in names:
        if add:
            if name in merged:
                message = f'publication "{name}" is already in subscription "{subscription}"'
                raise StatementError(message, sqlstate=DUPLICATE_OBJECT)
            merged.append(name)
        elif name in merged:
            merged.remove(name)
        else:
            raise StatementError(
                f'publication "{name}" is not in subscription "{subscription}"', sqlstate=INVALID_OBJECT_DEFINITION
            )
    if not merged:
        raise StatementError("cannot drop all the publications from a subscription", sqlstate=INVALID_OBJECT_DEFINITION)
    return tuple(merged)
