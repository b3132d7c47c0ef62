r"""Untrusted text, made safe for a terminal, a log, SQL and a shell.

**Purpose.** Names, error texts and values are received from publishers, and a publisher may be an attacker. A terminal
executes escape sequences. A line break forges a line of a log. A bidirectional override displays a different text.
Therefore invisible characters are displayed as escapes: `\n`, `\r`, `\t`, `\x1B` for the rest of ASCII, `\u202E` for
others. JSON has its own escapes, which readers of JSON decode.

Text that an operator pastes, such as the fixes of `subscriber check`, is quoted for SQL or for the shell. It contains
no invisible characters either: SQL has `U&"…"` and `E'…'` (sql_text.py), shells have `$'…'`.

A server can send a text of a gigabyte, such as the value in an error. shortened() is applied to a text before any other
function of this package reads it: to the parts of a server's error or notice when they are received, and to other texts
when an error or a log record is made of them. Names are identities and are not cut. A message of the change stream with
a name that no server has is refused (protocol/reader.py).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable
from typing import Any

from subscriber.quoting import identifier, replication_literal
from subscriber.sql_text import INVISIBLE, sql_text
from subscriber.sql_text import printable as printable

_unseen = re.compile(f"[\x00-\x1f{INVISIBLE}]")
_no_text = re.compile("[\udc80-\udcff]")  # bytes that are no text in the encoding of the session

# The names of several words that format_type() prints. All other types have one name, which may have a schema.
_FIELD = "(?:year|month|day|hour|minute|second)"
_SEVERAL_WORDS = re.compile(
    r"(?:double precision|(?:character|bit) varying(?:\(\d+\))?|time(?:stamp)?(?:\(\d\))? with(?:out)? time zone"
    rf"|interval(?: {_FIELD}(?: to {_FIELD})?)?(?:\(\d\))?)(?:\[\])*"
)
_NAME = '(?:[a-z_][a-z0-9_]*|"(?:[^"]|"")+")'
_ONE_NAME = re.compile(rf"(?:({_NAME})\.)?({_NAME})((?:\([A-Za-z0-9_,. +-]*\))?(?:\[\])*)")


TEXT_LIMIT = 8 * 1024  # characters; longer than any message of a server without a value in it
_WORD_LIMIT = 1024  # characters; a longer word is cut
_CUT = "characters in all)"


def shortened(text: str, size: int | None = None) -> str:
    """Return the beginning of a text of more than TEXT_LIMIT characters, and a note of its length.

    The cut is between two words: what follows a password decides that it is one.

    Args:
        text: a text for people. A short one is returned unchanged.
        size: the number of characters of which `text` is the beginning. None: it is whole.
    """
    if len(text) <= TEXT_LIMIT:
        return text
    head = text[: TEXT_LIMIT - 100]
    end = max(head.rfind(" "), head.rfind("\n"))
    return f"{head[:end] if len(head) - end < _WORD_LIMIT else head} … ({len(text) if size is None else size:,} {_CUT}"


def is_shortened(text: str) -> bool:
    """Return True if a part of `text` is the result of shortened(). A quote in it may have no end."""
    return _CUT in text


def printable_lines(text: str, indent: str = "\t") -> str:
    """Return `text` with its tabs and line breaks, and with an escape for each other invisible character.

    Args:
        text: the text of one record.
        indent: inserted after each line break, so that no line resembles the first line of a record.
    """
    lines = text.split("\n")
    return f"\n{indent}".join("\t".join(map(printable, line.split("\t"))) for line in lines)


def json_text(value: object, default: Callable[[Any], Any] | None = None) -> str:
    """Return `value` as JSON on one line, with JSON's escapes. `default` is passed to json.dumps()."""
    return _unseen.sub(_json_escape, json.dumps(value, ensure_ascii=False, default=default))


def jsonb_text(value: object) -> str:
    r"""Return `value` as JSON for a column of type jsonb. A byte that is not text becomes an escape such as `\xE9`."""
    return _no_text.sub(lambda found: f"\\\\x{ord(found[0]) - 0xDC00:02x}", json.dumps(value, ensure_ascii=False))


def _json_escape(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1] if found[0] != "\x7f" else "\\u007f"


# --- text to paste into a terminal ----------------------------------------------------------------


def sql_identifier(name: str) -> str:
    """Return a quoted name for SQL."""
    return sql_text(identifier(name))


def sql_name(schema: str, name: str) -> str:
    """Return a name with its schema for SQL."""
    return f"{sql_identifier(schema)}.{sql_identifier(name)}"


def sql_literal(text: str) -> str:
    """Return a string literal for SQL."""
    return sql_text(replication_literal(text))


def sql_type(text: str) -> str | None:
    """Return the name of a type for SQL. None: format_type() cannot have printed `text`."""
    if _SEVERAL_WORDS.fullmatch(text):
        return text
    match = _ONE_NAME.fullmatch(text)
    if match is None:
        return None
    schema, name, rest = match.groups()
    return (f"{_again(schema)}." if schema else "") + _again(name) + rest


def table_dump(schema: str, name: str, owner: str | None = None, *, own_dsns: bool = True) -> str:
    """Return the shell command that creates a table of the publisher on the target, with its schema.

    Args:
        schema: its schema.
        name: its name.
        owner: the role of the target that gets the table. None: the role that owns it on the publisher.
        own_dsns: the command's own variables name roles that may create it. False: SOURCE and TARGET name
            administrators, as in docs/roles.md.
    """
    variable = '"$SUBSCRIBER_{}_DSN"' if own_dsns else '"${}"'
    source, target = map(variable.format, ("SOURCE", "TARGET"))
    pattern = shell_word(f"{identifier(schema)}.{identifier(name)}")  # in a pattern, quotes have SQL's meaning
    authorization = ""
    dump = f"pg_dump --schema-only --table={pattern} {source}"
    if owner is not None:
        authorization = f" AUTHORIZATION {sql_identifier(owner)}"
        role = shell_word(f"SET ROLE {sql_identifier(owner)};")
        dump = dump.replace("--schema-only", "--schema-only --no-owner --no-privileges", 1)
        dump = f"(printf '%s\\n' {role}; {dump})"
    dump += f" | psql {target}"
    if schema == "public":
        return dump
    create = shell_word(f"CREATE SCHEMA IF NOT EXISTS {sql_identifier(schema)}{authorization}")
    return f"psql {target} -c {create}; {dump}"


def near_word(word: str, choices: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return a sentence with the choice that is most like a mistyped word. None: no choice is like it.

    >>> near_word("ofF", ["off", "on"])
    'Perhaps you meant "off".'
    """
    near = nearest_word(word, choices, cutoff=cutoff)
    return None if near is None else f'Perhaps you meant "{near}".'


def nearest_word(word: str, choices: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the choice that is most like a mistyped word, see near_word()."""
    import difflib  # needed only for an error

    folded = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(word.lower(), folded, 1, cutoff)
    return folded[near[0]] if near else None


def shell_word(text: str) -> str:
    """Return one argument of a shell command. With invisible characters it requires bash, zsh or ksh.

    A name that begins with a hyphen follows `--`, and is no option: `--target=…` would lead the command to another
    server. Options behind it are arguments then, and refused.
    """
    end_of_options = "-- " if text.startswith("-") else ""
    if not _unseen.search(text):
        return end_of_options + shlex.quote(text)
    return f"{end_of_options}$'" + _unseen.sub(_byte_escapes, text.replace("\\", "\\\\").replace("'", "\\'")) + "'"


def _again(name: str) -> str:
    return sql_identifier(name[1:-1].replace('""', '"')) if name.startswith('"') else name


def _byte_escapes(found: re.Match[str]) -> str:
    code = ord(found[0])
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return "".join(f"\\x{byte:02x}" for byte in found[0].encode("utf-8", "replace"))
