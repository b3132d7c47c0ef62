r"""Text of other parties as a person, a shell and a server may be given it.

**Purpose.** Names, error texts and values come from publishers, and a publisher may be an attacker. A terminal executes
escape sequences, a line break forges a line of a log, a bidirectional override shows another text than there is. So
a character that nobody can see is shown as an escape in every output: `\n`, `\r`, `\t`, `\x1B` for the rest of ASCII,
`\u202E` for others. JSON has escapes of its own, which its readers turn back.

What an operator pastes, as the fixes of `subscriber check`, is quoted for SQL or for the shell, without any such
character: SQL has `U&"…"`, shells have `$'…'`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from typing import Any

from subscriber.quoting import identifier, replication_literal

# Separators of lines and paragraphs, characters that change the direction of text or are not seen at all, and halves
# of surrogate pairs, which stand for bytes that are no UTF-8. Joiners are not among them: some scripts need them.
_UNSEEN = (
    "\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f"
)
_unseen = re.compile(f"[\x00-\x1f{_UNSEEN}]")
_unseen_in_lines = re.compile(f"[\x00-\x08\x0b-\x1f{_UNSEEN}]")  # all but tabs and line breaks
_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}

# What format_type() prints for types whose names are of several words. All others are one name, perhaps with a schema.
_FIELD = "(?:year|month|day|hour|minute|second)"
_SEVERAL_WORDS = re.compile(
    r"(?:double precision|(?:character|bit) varying(?:\(\d+\))?|time(?:stamp)?(?:\(\d\))? with(?:out)? time zone"
    rf"|interval(?: {_FIELD}(?: to {_FIELD})?)?(?:\(\d\))?)(?:\[\])*"
)
_NAME = '(?:[a-z_][a-z0-9_]*|"(?:[^"]|"")+")'
_ONE_NAME = re.compile(rf"(?:({_NAME})\.)?({_NAME})((?:\([A-Za-z0-9_,. +-]*\))?(?:\[\])*)")


def printable(text: str) -> str:
    """Return `text` on one line, with an escape for each character that cannot be seen."""
    return _unseen.sub(_escape, text)


def printable_lines(text: str, indent: str = "\t") -> str:
    """Return `text` with its tabs and line breaks. `indent` follows each break, so no line can pass for a first one."""
    return _unseen_in_lines.sub(_escape, text).replace("\n", f"\n{indent}")


def json_text(value: object, default: Callable[[Any], Any] | None = None) -> str:
    """Return `value` as JSON on one line, with JSON's escapes; `default` is that of json.dumps()."""
    return _unseen.sub(_json_escape, json.dumps(value, ensure_ascii=False, default=default))


def _escape(found: re.Match[str]) -> str:
    character = found[0]
    code = ord(character)
    if code < 0x80:
        return _NAMED.get(character, f"\\x{code:02X}")
    return f"\\u{code:04X}" if code <= 0xFFFF else f"\\U{code:08X}"


def _json_escape(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1] if found[0] != "\x7f" else "\\u007f"


# --- to be pasted ---------------------------------------------------------------------------------


def sql_identifier(name: str) -> str:
    """Return a name for SQL, always quoted."""
    quoted = identifier(name)
    return f"U&{_with_unicode_escapes(quoted)}" if _unseen.search(name) else quoted


def sql_name(schema: str, name: str) -> str:
    """Return a name with its schema for SQL."""
    return f"{sql_identifier(schema)}.{sql_identifier(name)}"


def sql_literal(text: str) -> str:
    """Return a string for SQL."""
    quoted = replication_literal(text)
    return f"U&{_with_unicode_escapes(quoted)}" if _unseen.search(text) or "\\" in text else quoted


def sql_type(text: str) -> str | None:
    """Return the type that format_type() printed as `text`; None if it cannot have printed that."""
    if _SEVERAL_WORDS.fullmatch(text):
        return text
    found = _ONE_NAME.fullmatch(text)
    if found is None:
        return None
    schema, name, rest = found.groups()
    return (f"{_again(schema)}." if schema else "") + _again(name) + rest


def shell_word(text: str) -> str:
    """Return one argument of a command for a shell; with characters that cannot be seen for bash, zsh and ksh."""
    if not _unseen.search(text):
        return shlex.quote(text)
    return "$'" + _unseen.sub(_byte_escapes, text.replace("\\", "\\\\").replace("'", "\\'")) + "'"


def _again(name: str) -> str:
    return sql_identifier(name[1:-1].replace('""', '"')) if name.startswith('"') else name


def _with_unicode_escapes(quoted: str) -> str:
    return _unseen.sub(_unicode_escape, quoted.replace("\\", "\\\\"))


def _unicode_escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code == 0 or 0xD800 <= code <= 0xDFFF:  # what no name of a server has
        code = 0xFFFD
    return f"\\{code:04X}" if code <= 0xFFFF else f"\\+{code:06X}"


def _byte_escapes(found: re.Match[str]) -> str:
    code = ord(found[0])
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is no UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return "".join(f"\\x{byte:02x}" for byte in found[0].encode("utf-8", "replace"))
