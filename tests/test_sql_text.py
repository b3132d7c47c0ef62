"""SQL to paste: the same statements, without a character that a terminal, psql or a message changes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from subscriber.quoting import identifier, literal, qualified
from subscriber.remedy import Remedy
from subscriber.sql_text import sql_comment, sql_text
from tests.plugins.fix_cluster import Database
from tests.test_display import NASTY, unseen

# All control characters but NUL, and syntax of psql, of a shell and of SQL.
CONTROLS = [chr(code) for code in (*range(1, 32), *range(0x7F, 0xA0))]
SYNTAX = (
    "\n\\! touch f\n", "\\", "\\'", '"', "'", "--", "/*", "*/", ";", "$$", "$(touch f)", "`touch f`", ":HOST", "\u202e",
    "\u2028", "\ufeff", "e'", "U&", "\n\\copy (SELECT 1) TO PROGRAM 'touch f'\n",
)  # fmt: skip
anything = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]) | st.sampled_from(NASTY + "'\"\\$-/*:")
)


NAMES = [f"a{part}b" for part in (*CONTROLS, *SYNTAX)] + [f"{SYNTAX[0]}{part}" for part in SYNTAX]


@given(st.text())
def test_quoted_text_has_no_invisible_characters(text: str) -> None:
    for text_shown in (sql_text(text), sql_comment(text), str(Remedy("do it", text))):
        assert {*unseen(text_shown)} <= {"\n", "\t"}
    assert unseen(sql_comment(text)) == []


@given(anything, anything)
def test_quoted_names_are_on_one_line(name: str, text: str) -> None:
    for statement in (f"ALTER TABLE {qualified(name, name)} RENAME TO {identifier(text)}", f"SELECT {literal(text)}"):
        command = Remedy(command=sql_text(statement)).command
        assert command is not None
        assert unseen(command) == []
        assert sql_text(command) == command


def test_statements_are_recognized() -> None:
    body = "AS $function$\n\tBEGIN RAISE '\\'; END\n$function$"
    assert sql_text(f"CREATE FUNCTION f() {body}") == f"CREATE FUNCTION f() {body}"
    assert sql_text("SELECT $$a\x1b'\\$$") == "SELECT E'a\\x1B''\\\\'"
    assert sql_text("SELECT 'a\\', somee'\\'") == "SELECT E'a\\\\', someeE'\\\\'"
    assert (
        sql_text("SELECT E'\\'\n', u&'\\0041\n', x::int, a[1:n]")
        == "SELECT E'\\'\\n', u&'\\0041\\000A', x::int, a[1: n]"
    )
    assert sql_text('SELECT a$b$, "x\n$b$"') == 'SELECT a$b$, U&"x\\000A$b$"'
    assert sql_text("SELECT 1 -- a\\! b\x1b\n, 2") == "SELECT 1 -- a\\! b\\x1B\n, 2"
    assert sql_text("SELECT 1\n\\! id") == "SELECT 1\n\ufffd! id"
    assert sql_text("SELECT 'open\n\\! id") == "-- SELECT 'open\\n\\! id"


async def test_psql_gets_the_names(target_db: Database, tmp_path: Path) -> None:
    """Names, strings and bodies of functions arrive in a server, whatever its settings are."""
    wanted = sorted(NAMES)
    statements = [
        statement
        for number, name in enumerate(wanted)
        for statement in (
            f"CREATE TYPE {identifier(f'{number} {name}')} AS ENUM ()",
            f"COMMENT ON TYPE {identifier(f'{number} {name}')} IS {literal(name)}",
            f"CREATE FUNCTION f{number}() RETURNS text LANGUAGE sql AS $body$ SELECT {literal(name)}::text $body$",
        )
    ]
    script = "".join(f"{sql_comment(statement)}\n{sql_text(statement)};\n" for statement in statements)
    for setting in ("on", "off"):
        environment = {**os.environ, "PGOPTIONS": f"-c standard_conforming_strings={setting}"}
        process = await asyncio.create_subprocess_exec(
            "psql",
            "-qX",
            "-v",
            "ON_ERROR_STOP=1",
            "-d",
            target_db.dsn(),
            stdin=-1,
            stdout=-1,
            stderr=-1,
            env=environment,
            cwd=tmp_path,
        )
        assert await process.communicate(script.encode()) == (b"", b"")
        comments = await target_db.rows(
            "SELECT obj_description(oid, 'pg_type') FROM pg_type WHERE typtype = 'e' AND oid >= 16384"
        )
        assert sorted(comment for (comment,) in comments) == wanted
        labels = await target_db.rows("SELECT typname::text FROM pg_type WHERE typtype = 'e' AND oid >= 16384")
        assert sorted(label.split(" ", 1)[1] for (label,) in labels) == wanted
        for number, name in enumerate(wanted):
            assert await target_db.value(f"SELECT f{number}()") == name
            await target_db.execute(f"DROP FUNCTION f{number}()")
        for (label,) in labels:
            await target_db.execute(f"DROP TYPE {identifier(label)}")
    assert list(tmp_path.iterdir()) == []
