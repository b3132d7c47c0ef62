"""The grammar: the result of each form, and PostgreSQL's message for everything else."""

from __future__ import annotations

import string
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from subscriber.catalog.grammar.lexer import RESERVED, StatementSyntaxError
from subscriber.catalog.grammar.parser import (
    AlterConnection,
    AlterEnabled,
    AlterOptions,
    AlterOwner,
    AlterPublications,
    AlterRefresh,
    AlterRename,
    AlterSkip,
    CreateSubscription,
    DropSubscription,
    Option,
    Statement,
    parse,
)
from subscriber.catalog.grammar.role_word import RoleWord
from subscriber.errors import StatementError

FORMS: list[tuple[str, Statement]] = [
    ("CREATE SUBSCRIPTION s CONNECTION 'c' PUBLICATION p", CreateSubscription("s", "c", ("p",))),
    (
        'create subscription "S" connection $x$it\'s$x$ publication p, "Q""q" with (connect, slot_name = NONE)',
        CreateSubscription("S", "it's", ("p", 'Q"q'), (Option("connect"), Option("slot_name", "none"))),
    ),
    ("ALTER SUBSCRIPTION Foo CONNECTION 'c'", AlterConnection("foo", "c")),
    ("ALTER SUBSCRIPTION s SET PUBLICATION a, b", AlterPublications("s", "set", ("a", "b"))),
    (
        "ALTER SUBSCRIPTION s ADD PUBLICATION a WITH (refresh = false, copy_data = 0)",
        AlterPublications("s", "add", ("a",), (Option("refresh", "false"), Option("copy_data", 0))),
    ),
    ("ALTER SUBSCRIPTION s DROP PUBLICATION a", AlterPublications("s", "drop", ("a",))),
    ("ALTER SUBSCRIPTION s REFRESH PUBLICATION", AlterRefresh("s")),
    (
        "ALTER SUBSCRIPTION s REFRESH PUBLICATION WITH (copy_data = on)",
        AlterRefresh("s", (Option("copy_data", "on"),)),
    ),
    ("ALTER SUBSCRIPTION s ENABLE", AlterEnabled("s", True)),
    ("ALTER SUBSCRIPTION s DISABLE", AlterEnabled("s", False)),
    (
        "ALTER SUBSCRIPTION s SET (streaming = parallel, \"Quoted\" = 'x', origin = any, binary = +1, x = -2.5e3)",
        AlterOptions(
            "s",
            (
                Option("streaming", "parallel"),
                Option("Quoted", "x"),
                Option("origin", "any"),
                Option("binary", 1),
                Option("x", "-2.5e3"),
            ),
        ),
    ),
    ("ALTER SUBSCRIPTION s SKIP (lsn = '0/1')", AlterSkip("s", (Option("lsn", "0/1"),))),
    ("ALTER SUBSCRIPTION s SKIP (lsn=-1)", AlterSkip("s", (Option("lsn", -1),))),
    ("ALTER SUBSCRIPTION s SET (a = pg_catalog.Int4)", AlterOptions("s", (Option("a", "pg_catalog.int4"),))),
    ("ALTER SUBSCRIPTION s SET (a = 9999999999)", AlterOptions("s", (Option("a", "9999999999"),))),
    ("ALTER SUBSCRIPTION s OWNER TO joe", AlterOwner("s", "joe")),
    ("ALTER SUBSCRIPTION s OWNER TO CURRENT_USER", AlterOwner("s", RoleWord.CURRENT_USER)),
    ('ALTER SUBSCRIPTION s OWNER TO "current_user"', AlterOwner("s", "current_user")),
    ("ALTER SUBSCRIPTION s RENAME TO t", AlterRename("s", "t")),
    ("DROP SUBSCRIPTION s", DropSubscription("s")),
    ("DROP SUBSCRIPTION IF EXISTS s CASCADE", DropSubscription("s", if_exists=True, cascade=True)),
    ("DROP SUBSCRIPTION s RESTRICT", DropSubscription("s")),
    ("DROP SUBSCRIPTION if", DropSubscription("if")),
    ("/* a /* b */ c */ DROP -- here; too\n SUBSCRIPTION s", DropSubscription("s")),
    ("ALTER SUBSCRIPTION enable DISABLE", AlterEnabled("enable", False)),
    ("ALTER SUBSCRIPTION s CONNECTION 'a' \n 'b'", AlterConnection("s", "ab")),
    ("ALTER SUBSCRIPTION s CONNECTION E'a\\'b\\n\\x41\\u00e4\\303\\244\\\\'", AlterConnection("s", "a'b\nAää\\")),
    ("ALTER SUBSCRIPTION s CONNECTION 'a\\b'", AlterConnection("s", "a\\b")),
    (f"DROP SUBSCRIPTION {'x' * 70}", DropSubscription("x" * 63)),
    (f"DROP SUBSCRIPTION {'ä' * 40}", DropSubscription("ä" * 31)),
]


@pytest.mark.parametrize(("sql", "statement"), FORMS)
def test_each_form_of_a_statement_is_parsed(sql: str, statement: Statement) -> None:
    assert parse(sql) == [statement]


def test_several_statements_are_parsed_and_empty_statements_are_ignored() -> None:
    assert parse(";; DROP SUBSCRIPTION a; DROP SUBSCRIPTION b ;\n-- end") == [
        DropSubscription("a"),
        DropSubscription("b"),
    ]
    assert parse("") == []


WRONG = [
    ("CREATE SUBSCRIPTION s CONNECTION 'foo';", 'syntax error at or near ";"', 38),
    ("CREATE SUBSCRIPTION s CONNECTION 'foo'", "syntax error at end of input", 38),
    ("CREATE SUBSCRIPTION s PUBLICATION foo", 'syntax error at or near "PUBLICATION"', 22),
    ("CREATE SUBSCRIPTION s CONNECTION foo PUBLICATION p", 'syntax error at or near "foo"', 33),
    ("CREATE SUBSCRIPTION table CONNECTION 'c' PUBLICATION p", 'syntax error at or near "table"', 20),
    ("CREATE SUBSCRIPTION full CONNECTION 'c' PUBLICATION p", 'syntax error at or near "full"', 20),
    ("CREATE SUBSCRIPTION s CONNECTION 'c' PUBLICATION p,", "syntax error at end of input", 51),
    ("CREATE SUBSCRIPTION s CONNECTION 'c' PUBLICATION p WITH ()", 'syntax error at or near ")"', 57),
    ("CREATE SUBSCRIPTION s CONNECTION 'c' PUBLICATION p WITH (a = )", 'syntax error at or near ")"', 61),
    ("CREATE SUBSCRIPTION s CONNECTION 'c' PUBLICATION p WITH (a b)", 'syntax error at or near "b"', 59),
    ("CREATE SUBSCRIPTION s CONNECTION 'c' PUBLICATION p WITH ('a')", "syntax error at or near \"'a'\"", 57),
    ("CREATE SUBSCRIPTION s CONNECTION X'00' PUBLICATION p", "syntax error at or near \"X'00'\"", 33),
    ("ALTER SUBSCRIPTION s", "syntax error at end of input", 20),
    ("ALTER SUBSCRIPTION s REFRESH", "syntax error at end of input", 28),
    ("ALTER SUBSCRIPTION s OWNER TO table", 'syntax error at or near "table"', 30),
    ("ALTER SUBSCRIPTION s OWNER TO none", 'role name "none" is reserved', 30),
    ("DROP SUBSCRIPTION a b", 'syntax error at or near "b"', 20),
    ("DROP SUBSCRIPTION 1a", 'trailing junk after numeric literal at or near "1a"', 18),
    ("DROP SUBSCRIPTION 'a", 'unterminated quoted string at or near "\'a"', 18),
    ('DROP SUBSCRIPTION "a', 'unterminated quoted identifier at or near ""a"', 18),
    ('DROP SUBSCRIPTION ""', 'zero-length delimited identifier at or near """"', 18),
    ("DROP SUBSCRIPTION $a$ x", 'unterminated dollar-quoted string at or near "$a$ x"', 18),
    ("DROP /* SUBSCRIPTION s", 'unterminated /* comment at or near "/* SUBSCRIPTION s"', 5),
    ("ALTER SUBSCRIPTION s CONNECTION 'a' 'b'", "syntax error at or near \"'b'\"", 36),
]


@pytest.mark.parametrize(("sql", "message", "position"), WRONG)
def test_a_syntax_error_has_postgresqls_message_and_position(sql: str, message: str, position: int) -> None:
    with pytest.raises(StatementSyntaxError) as caught:
        parse(sql)
    assert (caught.value.message, caught.value.position) == (message, position)


@pytest.mark.parametrize("value", [r"E'\xff'", r"E'\000'", r"E'\x00'", "'\0'", "'\udc80'"])
def test_text_that_is_no_utf8_is_refused(value: str) -> None:
    with pytest.raises(StatementSyntaxError, match='invalid byte sequence for encoding "UTF8"'):
        parse(f"ALTER SUBSCRIPTION s CONNECTION {value}")


@pytest.mark.parametrize(
    "sql", ["SELECT 1", "CREATE TABLE t ()", "ALTER SYSTEM SET a = 1", "COMMENT ON SUBSCRIPTION s"]
)
def test_other_statements_are_refused(sql: str) -> None:
    with pytest.raises(StatementError, match="only CREATE, ALTER and DROP SUBSCRIPTION") as caught:
        parse(sql)
    assert caught.value.sqlstate == "0A000"


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=15)
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40)


@given(name=NAMES, publications=st.lists(NAMES, min_size=1, max_size=4), conninfo=TEXTS, value=TEXTS)
def test_quoting_brings_any_text_through(name: str, publications: list[str], conninfo: str, value: str) -> None:
    def identifier(text: str) -> str:
        return '"' + text.replace('"', '""') + '"'

    def literal(text: str) -> str:
        return "'" + text.replace("'", "''") + "'"

    sql = (
        f"CREATE SUBSCRIPTION {identifier(name)} CONNECTION {literal(conninfo)}"
        f" PUBLICATION {', '.join(map(identifier, publications))} WITH (slot_name = {literal(value)})"
    )
    expected = CreateSubscription(name, conninfo, tuple(publications), (Option("slot_name", value),))
    assert parse(sql) == [expected]
    escaped = "E'" + conninfo.replace("\\", "\\\\").replace("'", "\\'") + "'"
    assert parse(f"ALTER SUBSCRIPTION s CONNECTION {escaped}") == [AlterConnection("s", conninfo)]


@given(word=st.text(string.ascii_letters + string.digits + "_$é", min_size=1, max_size=20))
def test_words_fold_to_lower_case(word: str) -> None:
    if word[0].isdigit() or word[0] == "$" or word.lower() in RESERVED:
        return
    with suppress(StatementSyntaxError):
        assert parse(f"DROP SUBSCRIPTION {word}") == [DropSubscription(word.lower())]


@given(sql=st.text(st.characters(codec="utf-8")))
@example(sql="E'\\")
@example(sql="drop subscription E'\\ud800'")
def test_the_parser_of_statements_raises_only_statement_errors(sql: str) -> None:
    for prefix in ("", "ALTER SUBSCRIPTION s SET (", "CREATE SUBSCRIPTION s CONNECTION "):
        with suppress(StatementError):
            parse(prefix + sql)
