"""conflict_policy: parsing, the entry that applies, and the winner."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subscriber.apply.conflicts.policy import Policy, PolicyOutcome, Rule, decide, parse_policies
from subscriber.apply.conflicts.types import Conflict, ConflictType, LocalRow, RowWriter
from subscriber.errors import StatementError
from subscriber.protocol.messages import Delete, Insert, Update
from subscriber.server_version import Wording

ROOT = Path(__file__).parent.parent.parent
T, U = ("public", "t"), ("Odd, one", "U")
EXISTS, MISSING = ConflictType.INSERT_EXISTS, ConflictType.UPDATE_MISSING
MULTIPLE = ConflictType.MULTIPLE_UNIQUE_CONFLICTS
DIFFERS = ConflictType.UPDATE_ORIGIN_DIFFERS


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("", {(T, EXISTS): "default"}),
        ("keep_local", {(T, EXISTS): "keep_local", (T, MULTIPLE): "keep_local", (U, MISSING): "keep_local"}),
        ("*:skip", {(T, EXISTS): "skip"}),
        ("Public.T : Keep_Local, * : error", {(T, EXISTS): "keep_local", (U, EXISTS): "error"}),
        (
            "skip, update_missing: apply_remote, public.t: keep_local, public.t update_missing: error",
            {(T, MISSING): "error", (T, EXISTS): "keep_local", (U, MISSING): "apply_remote", (U, EXISTS): "skip"},
        ),
        ('"Odd, one"."U" insert_exists: call Merge', {(U, EXISTS): "call Merge", (T, EXISTS): "default"}),
        ("* insert_exists: skip", {(T, EXISTS): "skip", (T, MISSING): "default"}),
        ('public."t": default, skip', {(T, EXISTS): "default", (U, EXISTS): "skip"}),
        # An entry without a type never deletes several rows, and last_update_wins does not apply to missing rows.
        ("apply_remote", {(T, EXISTS): "apply_remote", (T, MULTIPLE): "default", (T, MISSING): "apply_remote"}),
        ("last_update_wins", {(T, DIFFERS): "last_update_wins", (T, MULTIPLE): "default", (T, MISSING): "default"}),
        ("*: skip", {(T, MULTIPLE): "skip"}),
        ("multiple_unique_conflicts: apply_remote", {(T, MULTIPLE): "apply_remote"}),
        ("public.t: last_update_wins, skip", {(T, MISSING): "default", (U, MISSING): "skip"}),
        ("call f", {(T, MULTIPLE): "call f", (T, MISSING): "call f"}),
        # add_delta decides about UPDATEs of rows that another origin wrote, whatever the entry for all types says.
        (
            "last_update_wins, public.t(a): add_delta",
            {(T, DIFFERS): "add_delta", (U, DIFFERS): "last_update_wins", (T, EXISTS): "last_update_wins"},
        ),
        ("public.t(a): add_delta, public.t: keep_local", {(T, DIFFERS): "add_delta", (T, EXISTS): "keep_local"}),
    ],
)
def test_the_most_specific_entry_of_a_policy_decides(
    text: str, rules: dict[tuple[tuple[str, str], ConflictType], str]
) -> None:
    policies = parse_policies(text)
    rule_of = {(table, what): policies.rule(table, what, several_rows=what is MULTIPLE) for table, what in rules}
    assert {key: str(rule) for key, rule in rule_of.items()} == rules
    assert bool(policies) == bool(text)


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("last_update_win", 'There is no policy "last_update_win".'),
        ("t: skip", '"t" is no type of conflict'),
        ("public.t update_lost: skip", '"update_lost" is no type of conflict'),
        ("public.t skip", '"skip" is no type of conflict'),
        ("public.t", "A colon is missing."),
        ("public.t insert_exists", "A colon is missing."),
        ("public.: skip", "The name of a table is missing."),
        ("*:", "A policy is missing."),
        ("skip,", "A comma or an entry is missing."),
        ("skip error", "A comma or an entry is missing."),
        (",", "A policy is missing."),
        ("skip, *: error", "Two entries are about the same."),
        ('"skip"', 'There is no policy "skip".'),
        ("call", "The name of a function is missing."),
        ("public.t; skip", "It cannot be read at character 9."),
        ("add_delta", "The policy add_delta names its columns"),
        ("public.t: add_delta", "The policy add_delta names its columns"),
        ("public.t(a): skip", "The only policy for columns is add_delta."),
        ("public.t(): add_delta", "The name of a column is missing."),
        ("public.t(a,): add_delta", "The name of a column is missing."),
        ("public.t(a: add_delta", "A closing parenthesis is missing."),
        ("public.t(a) update_missing: add_delta", "A colon is missing."),
        ("public.t(a, A): add_delta", "A column is named twice."),
        ("public.t(a): add_delta, public.t(b): add_delta", "Two entries are about the same."),
        (
            "public.t(a): add_delta, public.t update_origin_differs: skip",
            "Table public.t has add_delta and another policy for update_origin_differs.",
        ),
        ("(a): add_delta", "A policy is missing."),
    ],
)
def test_a_policy_that_cannot_be_parsed_is_refused(text: str, detail: str) -> None:
    with pytest.raises(StatementError) as caught:
        parse_policies(text)
    assert caught.value.message == f'invalid value for parameter "conflict_policy": "{text}"'
    assert (caught.value.detail or "").startswith(detail)
    assert caught.value.sqlstate == "22023"


@given(st.text(alphabet='ab.,:*()" \t_', max_size=20) | st.text(max_size=20))
def test_the_parser_of_policies_raises_only_statement_errors(text: str) -> None:
    try:
        policies = parse_policies(text)
    except StatementError:
        return
    assert isinstance(policies.rule(T, EXISTS), Rule)


@pytest.mark.parametrize(
    ("text", "looking"),
    [
        ("", ()),
        ("error", (Update, Delete)),  # where a unique index refuses it is an error anyway
        ("insert_exists: error", ()),
        ("insert_exists: skip", (Insert,)),
        ("update_exists: skip", (Update,)),
        ("multiple_unique_conflicts: skip", (Insert, Update)),
        ("delete_missing: skip", (Delete,)),
        ("public.u: skip", ()),
        ("public.t: default, skip", ()),
        ("public.t(a): add_delta", (Update,)),
        ("public.u(a): add_delta", ()),
    ],
)
def test_policies_concern_only_the_changes_that_they_can_decide(text: str, looking: tuple[type, ...]) -> None:
    policies = parse_policies(text)
    assert tuple(kind for kind in (Insert, Update, Delete) if policies.concern(T, kind)) == looking


@pytest.mark.parametrize(
    ("text", "needing"),
    [
        ("keep_local", None),
        ("public.t: last_update_wins", "last_update_wins"),
        ("delete_origin_differs: skip", "delete_origin_differs"),
        ("public.t(a): add_delta", None),
    ],
)
def test_policies_that_compare_times_need_commit_timestamps(text: str, needing: str | None) -> None:
    assert parse_policies(text).needs_commit_times == needing


def test_columns_with_add_delta() -> None:
    policies = parse_policies('public.t(a, "B b"): add_delta, *: skip')
    assert policies.delta_columns(T) == ("a", "B b")
    assert policies.delta_columns(U) == ()
    assert parse_policies("public.t(a): add_delta")


def test_a_policy_lists_the_functions_that_it_calls() -> None:
    assert parse_policies("call a, public.t: call b, insert_exists: skip").functions == {"a", "b"}
    assert str(Rule(Policy.CALL, "a")) == "call a"


def conflict(*written: tuple[int | None, str | None], remote: dict[str, str | None] | None = None) -> Conflict:
    """Return a conflict with rows of the target, by time and origin of their writers; None: a local one."""
    rows = tuple(
        LocalRow("i", ("a",), RowWriter("7", None, origin is not None, origin, at), {"a": "1", "b": "m", "c": None})
        for at, origin in written
    )
    return Conflict(EXISTS, "public.t", (), (), Wording.POSTGRESQL_18, remote=remote, local_rows=rows)


@pytest.mark.parametrize(
    ("found", "outcome"),
    [
        (conflict((99, None)), PolicyOutcome.APPLY),
        (conflict((101, None)), PolicyOutcome.KEEP),
        (conflict((101, "pg_other")), PolicyOutcome.KEEP),
        (conflict((101, "pg_ours")), PolicyOutcome.APPLY),  # from the same stream, and therefore older
        (conflict((None, None)), PolicyOutcome.APPLY),
        (conflict((99, None), (98, "pg_other")), PolicyOutcome.APPLY),
        (conflict((99, None), (101, None)), PolicyOutcome.KEEP),
        # In the same microsecond: a delete, else the greater row.
        (conflict((100, None)), PolicyOutcome.APPLY),
        (conflict((100, None), remote={"a": "1", "b": "n"}), PolicyOutcome.APPLY),
        (conflict((100, None), remote={"a": "1", "b": "l"}), PolicyOutcome.KEEP),
        (conflict((100, None), remote={"c": "", "b": "m"}), PolicyOutcome.APPLY),
        (conflict((100, None), remote={"a": "1", "b": None}), PolicyOutcome.KEEP),
    ],
)
def test_the_last_update_wins(found: Conflict, outcome: PolicyOutcome) -> None:
    assert decide(Policy.LAST_UPDATE_WINS, found, 100, "pg_ours") is outcome


@given(st.dictionaries(st.sampled_from("abc"), st.none() | st.text(max_size=2), min_size=3), st.data())
def test_last_update_wins_keeps_the_same_row_on_both_sides_in_a_tie(
    one: dict[str, str | None], data: st.DataObject
) -> None:
    other = {name: data.draw(st.none() | st.text(max_size=2)) for name in one}

    def kept(local: dict[str, str | None], remote: dict[str, str | None]) -> dict[str, str | None]:
        row = LocalRow("i", ("a",), RowWriter("7", None, False, None, 100), local)
        reported_conflict = Conflict(
            EXISTS, "public.t", (), (), Wording.POSTGRESQL_18, remote=remote, local_rows=(row,)
        )
        return (
            remote
            if decide(Policy.LAST_UPDATE_WINS, reported_conflict, 100, "pg_ours") is PolicyOutcome.APPLY
            else local
        )

    assert kept(one, other) == kept(other, one)


def test_the_documentation_has_policies_that_can_be_read() -> None:
    text = (ROOT / "docs" / "conflicts.md").read_text() + (ROOT / "README.md").read_text()
    written = re.findall(r"conflict_policy =\s+'([^']+)'", text)
    assert len(written) >= 3
    for policy in written:
        assert parse_policies(policy)
    for name in [*ConflictType, *Policy]:
        assert f"`{name}`" in text or f"`{name} " in text or f"**{name}**" in text
