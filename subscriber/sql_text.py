r"""SQL that a person pastes, or pipes into psql: the same statements without invisible characters.

**Purpose.** A name may contain any character. In a script for psql a line break in a name, behind `--`, ends the
comment, and a line that begins with `\!` is a command of a shell. A terminal executes escape sequences, and indentation
of a message would become part of the name. So each name and string with such a character is written with escapes.

**Invariants.**

- A statement has the same meaning, whatever `standard_conforming_strings` is.
- Outside of dollar quotes the result has no character of INVISIBLE but line breaks and tabs between words. In dollar
  quotes, line breaks and tabs of a body stay.
- Outside of quotes there is no backslash, and no colon with a name behind it. So psql finds neither a command nor a
  variable.
- A text whose quotes do not end is no statement. It becomes a comment.

Source: src/backend/parser/scan.l, src/fe_utils/psqlscan.l.
"""

from __future__ import annotations

import re

from subscriber.quoting import replication_literal

# Control characters, separators of lines and paragraphs, invisible characters, and those that change the direction of
# text. Also halves of surrogate pairs, which represent bytes that are not UTF-8. Joiners stay: some scripts need them.
INVISIBLE = (
    "\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f"
)
_invisible = re.compile(f"[\x00-\x1f{INVISIBLE}]")
_invisible_in_lines = re.compile(f"[\x00-\x08\x0b-\x1f{INVISIBLE}]")  # all but tabs and line breaks
_TOKEN = re.compile(
    r"""
    (?P<name>(?:[uU]&)?"(?:[^"]|"")*")
  | (?P<escaped>[eE]'(?:[^'\\]|''|\\.)*')
  | (?P<string>(?:[uU]&|[bBxXnN])?'(?:[^']|'')*')
  | (?P<body>\$(?P<tag>(?:[A-Za-z_\x80-\U0010ffff][A-Za-z0-9_\x80-\U0010ffff]*)?)\$.*?\$(?P=tag)\$)
  | (?P<comment>--[^\n]*)
  | (?P<word>[A-Za-z_\x80-\U0010ffff][A-Za-z0-9_$\x80-\U0010ffff]*)
  | (?P<cast>::|:=)
  | (?P<open>['"]|\$[A-Za-z_\x80-\U0010ffff]*\$|/\*)
  | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}


def sql_text(statements: str) -> str:
    """Return statements without invisible characters.

    Args:
        statements: SQL in which a backslash in a plain string is itself, as with standard_conforming_strings.

    Returns:
        Equal statements, or a comment if the text is no SQL.
    """
    parts = []
    for token in _TOKEN.finditer(statements):
        kind, text = token.lastgroup, token[0]
        if kind == "tag" or token["body"]:
            kind = "body"
        if kind == "open":
            return sql_comment(statements)
        parts.append(_WRITERS[kind](text) if kind in _WRITERS else text)
    return "".join(parts)


def sql_comment(text: str) -> str:
    """Return a text as a comment of SQL, on one line."""
    return f"-- {printable(text)}"


def printable(text: str) -> str:
    """Return `text` on one line, with an escape for each invisible character."""
    return _invisible.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    character = found[0]
    code = ord(character)
    if code < 0x80:
        return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(character, f"\\x{code:02X}")
    return f"\\u{code:04X}" if code <= 0xFFFF else f"\\U{code:08X}"


def _name(text: str) -> str:
    if not _invisible.search(text):
        return text
    body = text[2:] if text[0] in "uU" else text.replace("\\", "\\\\")
    return f"U&{_invisible.sub(_unicode_escape, body)}"


def _string(text: str) -> str:
    """Write a string with an escape, or a backslash that the settings of a session explain, as E''."""
    if text[0] in "uU":
        return _invisible.sub(_unicode_escape, text)
    if text[0] not in "'nN" or not (_invisible.search(text) or "\\" in text):
        return text
    return _as_escaped(text[text.index("'") + 1 : -1])


def _as_escaped(content: str) -> str:
    """Return a string constant with escapes. A quote in `content` is doubled."""
    return f"E'{_invisible.sub(_string_escape, content.replace(chr(92), chr(92) * 2))}'"


def _escaped(text: str) -> str:
    return _invisible.sub(_string_escape, text)


def _body(text: str) -> str:
    if not _invisible_in_lines.search(text):
        return text
    tag = text[: text.index("$", 1) + 1]
    return _as_escaped(replication_literal(text[len(tag) : -len(tag)])[1:-1])


def _other(text: str) -> str:
    if text == ":":
        return ": "
    return "\ufffd" if text == "\\" or _invisible_in_lines.search(text) else text


_WRITERS = {
    "name": _name,
    "string": _string,
    "escaped": _escaped,
    "body": _body,
    "comment": printable,
    "word": lambda text: _invisible.sub("\ufffd", text),
    "other": _other,
}


def _known(code: int) -> int:
    return 0xFFFD if code == 0 or 0xD800 <= code <= 0xDFFF else code  # no name on a server contains these


def _unicode_escape(found: re.Match[str]) -> str:
    code = _known(ord(found[0]))
    return f"\\{code:04X}" if code <= 0xFFFF else f"\\+{code:06X}"


def _string_escape(found: re.Match[str]) -> str:
    code = _known(ord(found[0]))
    if code < 0x80:
        return _NAMED.get(found[0], f"\\x{code:02X}")
    return f"\\u{code:04X}" if code <= 0xFFFF else f"\\U{code:08X}"
