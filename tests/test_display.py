"""Text from other sources in our output: no invisible character is printed unescaped."""

from __future__ import annotations

import io
import json
import logging
import os
import shlex
import subprocess
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subscriber import telemetry
from subscriber.cli import main
from subscriber.cli.logs import LogFormat, configure
from subscriber.cli.messages import print_error
from subscriber.display import (
    TEXT_LIMIT,
    json_text,
    printable,
    printable_lines,
    shell_word,
    shortened,
    sql_identifier,
    sql_literal,
    sql_name,
    sql_type,
)
from subscriber.errors import PublisherError, ServerError, SubscriberError
from subscriber.redaction import redact
from subscriber.telemetry import parts_without_values
from tests.plugins.fix_cluster import Database

DIRECTIONS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
NASTY = "a\x1b[31m\x07\r\n\tb\x7f\x85\u200b\u202e\u2028\udcff\U000e0041"
texts = st.text(st.characters(codec=None, categories=None) | st.sampled_from(NASTY))


def unseen(text: str) -> list[str]:
    """Return the characters that move the cursor, break a line, change the text direction, or cannot be encoded."""
    return [
        c
        for c in text
        if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or unicodedata.bidirectional(c) in DIRECTIONS
    ]


def test_every_character_that_moves_something_is_escaped() -> None:
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    moving = set(unseen(every))
    assert moving & set(printable(every)) == set()
    assert moving & set(printable_lines(every)) == {"\n", "\t"}
    assert moving & set(json_text(every)) == set()
    assert json.loads(json_text(list(every))) == list(every)


def test_escapes_are_psqls() -> None:
    assert printable(NASTY) == ("a\\x1B[31m\\x07\\r\\n\\tb\\x7F\\u0085\\u200B\\u202E\\u2028\\uDCFF\\U000E0041")
    assert printable_lines("a\nERROR:  b\rc\td") == "a\n\tERROR:  b\\rc\td"
    for readable in ('Ünï \\ "x"', "日本語", "\u0645\u200c\u06cc", "👩\u200d💻"):
        assert printable(readable) == readable


@given(texts, texts)
def test_quoted_text_for_pasting_has_no_invisible_characters(schema: str, name: str) -> None:
    for text in (sql_name(schema, name), sql_literal(name), shell_word(name)):
        assert unseen(text) == []


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]) | st.sampled_from(NASTY)))
def test_a_shell_gets_the_argument(text: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f'set -- {shell_word(text)}; printf %s "${{@: -1}}"'], capture_output=True, check=True
    )
    assert done.stdout == text.encode("utf-8", "surrogateescape")


@pytest.mark.parametrize("name", ["--target=postgresql://other.example/x", "-h", "--delete-extra"])
def test_no_name_is_an_option(target_db: Database, name: str) -> None:
    """The owner of a subscription chooses the name, and administrators paste the commands of hints."""
    command = f"{shlex.quote(sys.executable)} -m subscriber repair {shell_word(name)}"
    environment = {**os.environ, "SUBSCRIBER_TARGET_DSN": target_db.dsn()}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, check=False)
    assert f'subscription "{name}" does not exist' in done.stderr


async def test_a_server_gets_the_name(target_db: Database) -> None:
    name = "a\"b'c\\d\n\x1b[31m\u202e\U000e0041$(x)"
    await target_db.execute(f"CREATE TABLE public.{sql_identifier(name)} ()")
    assert await target_db.value(f"SELECT relname::text FROM pg_class WHERE relname = {sql_literal(name)}") == name
    assert await target_db.value("SELECT relname::text FROM pg_class WHERE relname = $1", name) == name


@pytest.mark.parametrize(
    "text",
    [
        *("integer", "numeric(10,2)", '"My ""T"[]', 'public."weird "', "timestamp(3) without time zone[]", '"char"'),
        *("interval day to second(3)", "interval", "geometry(Point,4326)", "character varying(3)", "bit varying(5)[]"),
    ],
)
def test_the_name_of_a_type_is_accepted_unchanged(text: str) -> None:
    assert sql_type(text) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "integer; DROP TABLE t", "integer default f()", "text default pg_sleep(1)", "text collate x", "int)--"),
        *("integer primary key", "integer references t", "integer generated always as identity", '"x', "$(touch x)"),
        *("integer\n; x", "INTEGER", "a.b.c", "a.b(c(d))", "text check (true)", "interval day; x", "time zone"),
    ],
)
def test_text_that_is_no_type_is_rejected(text: str) -> None:
    assert sql_type(text) is None


def test_a_type_with_invisible_characters_is_quoted_with_escapes() -> None:
    assert sql_type('public."a\nb"[]') == 'public.U&"a\\000Ab"[]'


# --- outputs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("log_format", LogFormat)
def test_a_record_cannot_forge_another(log_format: LogFormat) -> None:
    stream = io.StringIO()
    configure(log_format, stream=stream)
    error = PublisherError(f"m{NASTY}", detail=f"d{NASTY}", hint=f"h{NASTY}")
    error.context = [f"c{NASTY}"]
    telemetry.log_error(error)
    telemetry.log_error(ValueError(NASTY))
    logging.getLogger("other").warning("from elsewhere %s", NASTY)
    text = stream.getvalue()
    assert set(unseen(text)) <= {"\n", "\t"}
    assert not any(line.startswith(("b", "\\tb", "a")) for line in text.splitlines())
    if log_format is LogFormat.JSON:
        first, bug, other = map(json.loads, text.splitlines())
        assert (first["message"], first["detail"]) == (f"m{NASTY}", f"d{NASTY}")
        assert bug["error_class"] == "ValueError"
        assert other["message"] == f"from elsewhere {NASTY}"


def test_handlers_of_others_get_one_line(caplog: pytest.LogCaptureFixture) -> None:
    telemetry.log(telemetry.WARNING, NASTY)
    (record,) = caplog.records
    assert record.getMessage() == printable(NASTY)


def test_errors_and_tracebacks_are_printed_with_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    error = PublisherError(f"m{NASTY}", detail=f"d{NASTY}", hint=f"h{NASTY}")
    error.context = [f"c{NASTY}"]
    print_error(error, "", sys.stderr)
    main._print_errors(ExceptionGroup("several", [error, error]))
    main._print_bug(ValueError(NASTY))
    text = capsys.readouterr().err
    assert set(unseen(text)) <= {"\n", "\t"}
    assert text.count("\nCONTEXT:  c") == 3
    assert text.count("\n\t\tb\\x7F") == 12


# --- long texts -----------------------------------------------------------------------------------


def test_a_long_text_is_cut_between_words() -> None:
    text = "word " * 2_000 + "postgres://user:secret@host" + " word" * 600_000
    short = shortened(text)
    assert len(short) <= TEXT_LIMIT
    assert short.endswith("word … (3,010,027 characters in all)")
    assert shortened(short) == short
    assert shortened("x" * TEXT_LIMIT) == "x" * TEXT_LIMIT
    assert shortened("x" * 3_000_000).startswith("x" * (TEXT_LIMIT - 100))


@pytest.mark.parametrize("padding", range(TEXT_LIMIT - 160, TEXT_LIMIT, 3))
def test_no_cut_shows_a_password(padding: int) -> None:
    text = "word " * (padding // 5) + "." * (padding % 5) + " app:topsecret@host/db" + " word" * 600_000
    assert "topsec" not in redact(shortened(text))
    assert "topsec" not in SubscriberError(text).message


@pytest.mark.parametrize(
    ("sqlstate", "message", "context"),
    [
        ("22P02", 'invalid input syntax for type integer: "{}"', "unnamed portal parameter $1 = '{}'"),
        ("22001", 'value of "{}" is "{}"', 'COPY t, line 1, column a: "{}"\nPL/pgSQL function f() line 1'),
        ("23505", "duplicate", 'SQL statement "x"\nCOPY t, line 12: "{}"'),
    ],
)
@pytest.mark.parametrize("length", [1, 10_000])
def test_no_cut_shows_a_value(sqlstate: str, message: str, context: str, length: int) -> None:
    value = 'topsecret" and "topsecret: ' * length
    error = ServerError({"C": sqlstate, "M": message.replace("{}", value), "W": context.replace("{}", value)})
    parts = parts_without_values(error)
    assert "topsecret" not in f"{parts}"
    assert parts.message.startswith(message.partition('"')[0])
    assert parts.context[0].startswith(context[:6])
