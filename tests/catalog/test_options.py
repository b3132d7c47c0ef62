"""Options: values, defaults, and PostgreSQL's error messages."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subscriber.catalog.grammar import options
from subscriber.catalog.grammar.options import merge_publications, parse_options
from subscriber.catalog.grammar.parser import AlterOptions, Option, parse
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.subscription import (
    MAX_APPLY_SESSIONS,
    OPTIONS,
    STORED_OPTIONS,
    CopyEngine,
    StatementOptions,
    Streaming,
    TableCopy,
    ValueSyntax,
)

SCHEMA = Path(__file__).parents[2] / "migrations" / "schema.sql"


def read(text: str, supported: frozenset[str] = options.FOR_CREATE) -> StatementOptions:
    (statement,) = parse(f"ALTER SUBSCRIPTION s SET ({text})")
    assert isinstance(statement, AlterOptions)
    return parse_options(statement.options, supported)


def test_defaults_are_postgresql_18s() -> None:
    parsed = parse_options((), options.FOR_CREATE)
    assert parsed == StatementOptions()
    assert parsed.streaming is Streaming.PARALLEL
    assert parsed.password_required
    assert not parsed.two_phase
    assert parsed.binary is None  # unset, unlike PostgreSQL, whose default is false


def test_every_syntax_of_a_value_has_a_parser() -> None:
    assert set(options.PARSERS) == set(ValueSyntax)


def test_an_option_that_a_statement_sets_is_stored() -> None:
    for name in options.FOR_SET:
        assert OPTIONS[name].column is not None, name


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        *[(f"binary{form}", "binary", True) for form in ("", " = true", " = on", " = 1", " = 'ON'", " = True")],
        *[(f"binary = {form}", "binary", False) for form in ("false", "off", "0", "'False'")],
        ("streaming", "streaming", Streaming.ON),
        ("streaming = on", "streaming", Streaming.ON),
        ("streaming = 0", "streaming", Streaming.OFF),
        ("streaming = Parallel", "streaming", Streaming.PARALLEL),
        ("slot_name = NONE, connect = false", "slot_name", None),
        ("slot_name = 'none', connect = false", "slot_name", None),
        ("slot_name = a1_", "slot_name", "a1_"),
        ("slot_name = 7", "slot_name", "7"),
        ("synchronous_commit = Remote_Apply", "synchronous_commit", "remote_apply"),
        ("synchronous_commit = 'LOCAL'", "synchronous_commit", "LOCAL"),
        ("synchronous_commit = 1", "synchronous_commit", "1"),
        ("origin = 'NONE'", "origin", "NONE"),
        ("origin = any", "origin", "any"),
        ("conflict_policy = ' public.t: skip, error '", "conflict_policy", "public.t: skip, error"),
        ("conflict_policy = last_update_wins", "conflict_policy", "last_update_wins"),
        ("conflict_history = ALL", "conflict_history", "all"),
        ("conflict_log_rows", "conflict_log_rows", True),
        ("copy_engine = Ranges", "copy_engine", CopyEngine.RANGES),
        ("apply_sessions = 4", "apply_sessions", 4),
        ("apply_sessions = '64'", "apply_sessions", 64),
        ("trusted_owners = Alice", "trusted_owners", ("alice",)),
        ("trusted_owners = 'Alice, \"Bo,b\" ,carl'", "trusted_owners", ("alice", "Bo,b", "carl")),
        ("trusted_owners = ''", "trusted_owners", ()),
        ("two_phase", "two_phase", True),
        ("two_phase = off, streaming = parallel", "two_phase", False),
        ("connect = false", "copy_data", None),
        ("copy_data = Compare", "copy_data", TableCopy.COMPARE),
        ("copy_data = on", "copy_data", TableCopy.COPY),
        ("connect = false", "enabled", False),
        ("connect = false, create_slot = false", "create_slot", False),
    ],
)
def test_option_values_are_parsed_as_by_postgresql(text: str, name: str, value: object) -> None:
    assert getattr(read(text), name) == value


BOOLEANS = sorted(name for name in options.FOR_CREATE if OPTIONS[name].value.syntax is ValueSyntax.BOOLEAN)
EXCLUSIVE = "are mutually exclusive options"
SLOT_HINT = "Replication slot names may only contain lower case letters, numbers, and the underscore character."


@pytest.mark.parametrize(
    ("text", "message", "hint", "sqlstate"),
    [
        *[(f"{name} = foo", f"{name} requires a Boolean value", "Valid are: on, off.", "42601") for name in BOOLEANS],
        *[
            (
                f"apply_sessions = {value}",
                f'invalid value for parameter "apply_sessions": "{value}"',
                "It is a number from 1 to 64.",
                "22023",
            )
            for value in ("0", "65", "many")
        ],
        *[
            (
                f"trusted_owners = '{value}'",
                f'invalid value for parameter "trusted_owners": "{value}"',
                "It is a list of roles, as 'alice, \"Bob\"'; '' for none.",
                "22023",
            )
            for value in ("a b", "a,", ",a", "a;b", "1")
        ],
        (
            "copy_engine = fast",
            'invalid value for parameter "copy_engine": "fast"',
            "Available values: snapshot, ranges.",
            "22023",
        ),
        ("binary = 2", "binary requires a Boolean value", "Valid are: on, off.", "42601"),
        ("binary = '1'", "binary requires a Boolean value", "Valid are: on, off.", "42601"),
        *[
            (text, 'streaming requires a Boolean value or "parallel"', "Valid are: on, off, parallel.", "42601")
            for text in ("streaming = foo", "streaming = 2")
        ],
        ("slot_name", "slot_name requires a parameter", None, "42601"),
        ("slot_name = ''", 'replication slot name "" is too short', None, "42602"),
        ("slot_name = 'A'", 'replication slot name "A" contains invalid character', SLOT_HINT, "42602"),
        (f"slot_name = '{'a' * 64}'", f'replication slot name "{"a" * 64}" is too long', None, "42622"),
        (
            "synchronous_commit = foobar",
            'invalid value for parameter "synchronous_commit": "foobar"',
            "Available values: local, remote_write, remote_apply, on, off.",
            "22023",
        ),
        ("origin = foo", 'unrecognized origin value: "foo"', None, "22023"),
        (
            "conflict_history = some",
            'invalid value for parameter "conflict_history": "some"',
            "Available values: none, decided, all.",
            "22023",
        ),
        ("refresh = false", 'unrecognized subscription parameter: "refresh"', None, "42601"),
        ('"Binary"', 'unrecognized subscription parameter: "Binary"', 'Perhaps you meant "binary".', "42601"),
        ("binary, binary", "conflicting or redundant options", None, "42601"),
        *[
            (f"connect = false, {name} = true", f"connect = false and {name} = true {EXCLUSIVE}", None, "42601")
            for name in ("copy_data", "enabled", "create_slot")
        ],
        ("slot_name = NONE, enabled = true", f"slot_name = NONE and enabled = true {EXCLUSIVE}", None, "42601"),
        (
            "slot_name = NONE, enabled = false, create_slot = true",
            f"slot_name = NONE and create_slot = true {EXCLUSIVE}",
            None,
            "42601",
        ),
        ("slot_name = NONE", "subscription with slot_name = NONE must also set enabled = false", None, "42601"),
        (
            "slot_name = NONE, enabled = false",
            "subscription with slot_name = NONE must also set create_slot = false",
            None,
            "42601",
        ),
        (
            "slot_name = NONE, create_slot = false",
            "subscription with slot_name = NONE must also set enabled = false",
            None,
            "42601",
        ),
    ],
)  # fmt: skip
def test_an_invalid_option_has_postgresqls_message(text: str, message: str, hint: str | None, sqlstate: str) -> None:
    with pytest.raises(StatementError) as caught:
        read(text)
    error = caught.value
    assert (error.message, error.hint, error.sqlstate) == (message, hint, sqlstate)


@pytest.mark.parametrize(
    ("supported", "allowed", "refused"),
    [
        (options.FOR_SET, "slot_name = NONE", "create_slot = false"),
        (options.FOR_SET, "failover", "enabled"),
        (options.FOR_PUBLICATIONS, "copy_data, refresh = off", "binary"),
        (options.FOR_REFRESH, "copy_data = false", "refresh"),
        (options.FOR_SKIP, "lsn = NONE", "slot_name = x"),
    ],
)
def test_each_statement_has_its_own_options(supported: frozenset[str], allowed: str, refused: str) -> None:
    read(allowed, supported)
    with pytest.raises(StatementError, match=f'unrecognized subscription parameter: "{refused.split(maxsplit=1)[0]}"'):
        read(refused, supported)


@pytest.mark.parametrize(
    ("text", "message", "sqlstate"),
    [
        ("lsn = '0/0'", "invalid WAL location (LSN): 0/0", "22023"),
        ("lsn = foo", 'invalid input syntax for type pg_lsn: "foo"', "22P02"),
        ("lsn", "lsn requires a parameter", "42601"),
    ],
)
def test_skip_accepts_only_a_valid_position(text: str, message: str, sqlstate: str) -> None:
    assert read("lsn = '0/12345'", options.FOR_SKIP).lsn == Lsn(0x12345)
    with pytest.raises(StatementError) as caught:
        read(text, options.FOR_SKIP)
    assert (caught.value.message, caught.value.sqlstate) == (message, sqlstate)


@pytest.mark.parametrize(
    ("add", "names", "merged"),
    [
        (True, ("c",), ("a", "b", "c")),
        (False, ("a",), ("b",)),
        (True, ("b",), 'publication "b" is already in subscription "s"'),
        (True, ("c", "c"), 'publication name "c" used more than once'),
        (False, ("b", "b"), 'publication name "b" used more than once'),
        (False, ("c",), 'publication "c" is not in subscription "s"'),
        (False, ("b", "a"), "cannot drop all the publications from a subscription"),
    ],
)
def test_adding_and_dropping_publications(add: bool, names: tuple[str, ...], merged: tuple[str, ...] | str) -> None:
    if isinstance(merged, tuple):
        assert merge_publications(("a", "b"), names, add=add, subscription="s") == merged
    else:
        with pytest.raises(StatementError) as caught:
            merge_publications(("a", "b"), names, add=add, subscription="s")
        assert caught.value.message == merged


@given(
    st.lists(
        st.builds(
            Option,
            st.sampled_from([*sorted(options.FOR_CREATE), "lsn", "refresh", "other"]),
            st.one_of(st.none(), st.integers(-2, 2), st.sampled_from(["none", "on", "off", "0/1", "x"]), st.text()),
        ),
        max_size=4,
    )
)
def test_the_parser_of_options_raises_only_statement_errors(given_options: list[Option]) -> None:
    for supported in (options.FOR_CREATE, options.FOR_SET, options.FOR_SKIP, options.FOR_PUBLICATIONS):
        try:
            parsed = parse_options(given_options, supported)
        except StatementError:
            continue
        assert parsed.specified == {option.name for option in given_options}


def test_the_catalog_refuses_values_that_no_statement_writes() -> None:
    """One launcher reads the rows of all owners, who write them (tests/privileges/test_owner_of_a_subscription.py)."""
    text = SCHEMA.read_text()
    checks = {
        column: set(re.findall(r"'([^']*)'", values))
        for column, values in re.findall(r"^    (sub\w+) .* CHECK \(\1 IN \((.*)\)\),$", text, re.MULTILINE)
    }
    choices: dict[str, set[str]] = {
        column.name: {str(choice.value) for choice in reads}
        for column in STORED_OPTIONS.values()
        if isinstance(reads := column.read, type) and issubclass(reads, StrEnum)
    }
    assert checks == choices
    assert f"CHECK (subapplysessions BETWEEN 1 AND {MAX_APPLY_SESSIONS})" in text
