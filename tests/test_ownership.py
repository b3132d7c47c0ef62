"""The option source_tag: the rows of a table that belong to a subscription."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subscriber.errors import StatementError
from subscriber.ownership import ALL_ROWS, OwnershipRule, parse_ownership

TYPES = {
    "id": "bigint", "n": "numeric(10,2)", "t": "character varying(5)", "u": "uuid", "d": "date", "b": "boolean",
    "f": "double precision", "c": "public.citext", "Odd \"name": "text",
}  # fmt: skip


def rule(text: str) -> OwnershipRule:
    default = parse_ownership(text).default
    assert default is not None
    return default


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("id = 7", """("id" OPERATOR(pg_catalog.=) '7'::pg_catalog.int8)"""),
        ("(id=-7)", """("id" OPERATOR(pg_catalog.=) '-7'::pg_catalog.int8)"""),
        (
            "ID in (1, 2)",
            """("id" OPERATOR(pg_catalog.=) '1'::pg_catalog.int8"""
            """ OR "id" OPERATOR(pg_catalog.=) '2'::pg_catalog.int8)""",
        ),
        (
            "id between 1 AND 9 and n < 0.5",
            """"id" OPERATOR(pg_catalog.>=) '1'::pg_catalog.int8"""
            """ AND "id" OPERATOR(pg_catalog.<=) '9'::pg_catalog.int8"""
            """ AND "n" OPERATOR(pg_catalog.<) '0.5'::pg_catalog.numeric""",
        ),
        ("t = 'it''s'", """("t" COLLATE pg_catalog."C" OPERATOR(pg_catalog.=) 'it''s'::pg_catalog.text)"""),
        (
            '"Odd ""name" > \'\\a\'',
            """"Odd ""name" COLLATE pg_catalog."C" OPERATOR(pg_catalog.>)  E'\\\\a'::pg_catalog.text""",
        ),
        ("d >= '2026-01-02'", """"d" OPERATOR(pg_catalog.>=) '2026-01-02'::pg_catalog.date"""),
        ("b = true", """("b" OPERATOR(pg_catalog.=) 'true'::pg_catalog.bool)"""),
        ("all", "true"),
    ],
)
def test_a_rule_becomes_a_condition(text: str, condition: str) -> None:
    assert rule(text).condition(TYPES) == condition


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("id", "An operator is missing."),
        ("id <> 7", "A constant is missing."),
        ("id = 7; DROP TABLE t", "cannot be read at character 7"),
        ("id = now()", "A constant is missing."),
        ("id = 7 OR true", "A comma or an entry is missing."),
        ("id = '7", "cannot be read"),
        ("id = 7x", "cannot be read"),
        ("id = 7,", "A comma or an entry is missing."),
        ("id = 7, t = 'a'", "Two entries are about the same."),
        ("public.t: id = 7, public.t: id = 8", "Two entries are about the same."),
        ("id = 7 AND id = 8", "Column id can have no value."),
        ("id BETWEEN 9 AND 1", "Column id can have no value."),
        ("id IN (1, 'a')", "Column id is compared with constants of different kinds."),
        ("id > 1 AND id = true", "Column id is compared with constants of different kinds."),
        ("public.t id = 7", ": is missing."),
        ("id = 7 " * 2000, "longer than"),
    ],
)
def test_values_that_are_refused(text: str, detail: str) -> None:
    with pytest.raises(StatementError) as caught:
        parse_ownership(text)
    assert detail in (caught.value.detail or "")
    assert caught.value.sqlstate == "22023"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("missing = 7", 'column "missing" does not exist'),
        ("f = 7", "rules of ownership do not support"),
        ("c = 'a'", "rules of ownership do not support"),
        ("id = 7.5", "another kind of constant"),
        ("id = 9223372036854775808", "another kind of constant"),
        ("id = '7'", "another kind of constant"),
        ("t = 7", "another kind of constant"),
        ("u = 'x'", "another kind of constant"),
        ("u = 'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'", "another kind of constant"),
        ("d = '2026-1-2'", "another kind of constant"),
        ("b > false", "has no ranges"),
        ("t > 'ä'", "not ASCII"),
    ],
)
def test_rules_that_do_not_fit_a_table(text: str, problem: str) -> None:
    assert problem in (rule(text).problem(TYPES) or "")
    with pytest.raises(StatementError, match="rule of ownership does not fit"):
        rule(text).condition(TYPES)


def test_tables_have_rules_of_their_own() -> None:
    rules = parse_ownership('tenant = 7, public.lines: "order" > 7, app."Odd.Name": all')
    assert rules.rule(("public", "t")) == rules.default == rule("tenant = 7")
    assert rules.rule(("public", "lines")) == rule('"order" > 7')
    assert rules.rule(("app", "Odd.Name")) == ALL_ROWS
    assert parse_ownership("public.lines: id = 7").rule(("public", "t")) is None
    assert not parse_ownership("")


@pytest.mark.parametrize(
    ("one", "other", "are_disjoint"),
    [
        ("id = 7", "id = 8", True),
        ("id = 7", "id = 7", False),
        ("id = 7", "id = 7.0", False),
        ("id IN (1, 2)", "id IN (3, 4) AND n = 1", True),
        ("id IN (1, 2)", "id IN (2, 4)", False),
        ("id < 10", "id >= 10", True),
        ("id <= 10", "id >= 10", False),
        ("id < 10", "id > 5", False),
        ("id BETWEEN 1 AND 9", "id BETWEEN 10 AND 19", True),
        ("id = 7 AND n = 1", "id = 7 AND n = 2", True),
        ("id = 7", "n = 8", False),
        ("id = 7", "id = '8'", False),
        ("id = 7", "all", False),
        ("all", "all", False),
        ("t < 'm'", "t >= 'm'", True),
        ("b = true", "b = false", True),
    ],
)
def test_rules_that_share_no_row(one: str, other: str, are_disjoint: bool) -> None:
    assert rule(one).is_disjoint(rule(other)) is are_disjoint
    assert rule(other).is_disjoint(rule(one)) is are_disjoint


CONDITIONS = st.one_of(
    st.integers(0, 9).map(lambda n: f"id = {n}"),
    st.lists(st.integers(0, 9), min_size=1, max_size=3).map(lambda n: f"id IN ({', '.join(map(str, n))})"),
    st.tuples(st.sampled_from(("<", "<=", ">", ">=")), st.integers(0, 9)).map(lambda n: f"id {n[0]} {n[1]}"),
    st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda n: f"id BETWEEN {min(n)} AND {max(n)}"),
)


@given(st.lists(CONDITIONS, min_size=1, max_size=3), st.lists(CONDITIONS, min_size=1, max_size=3))
def test_disjoint_rules_have_no_number_in_common(one: list[str], other: list[str]) -> None:
    try:
        rules = [rule(" AND ".join(conditions)) for conditions in (one, other)]
    except StatementError:
        return  # no value satisfies it
    numbers = [{n for n in range(-1, 11) if each.columns["id"].contains(n)} for each in rules]  # type: ignore[arg-type]
    if rules[0].is_disjoint(rules[1]):
        assert not numbers[0] & numbers[1]
    elif not numbers[0] & numbers[1]:
        assert any(values.listed is None for each in rules for values in each.columns.values())
