"""Names and strings in SQL and in replication commands.

The replication grammar has `"identifier"` and `'string'` with the quote doubled, and nothing else: no E'', no
backslashes. SQL may read a backslash differently (standard_conforming_strings), so such a string becomes an E''.
display.py has the variant for text that you paste into a terminal: it also escapes characters that cannot be seen.
"""

from __future__ import annotations

from collections.abc import Iterable


def identifier(name: str) -> str:
    """Return a name in quotes, which is right for every name, keywords included."""
    return '"' + name.replace('"', '""') + '"'


def qualified(schema: str, name: str) -> str:
    """Return the name of a table with its schema."""
    return f"{identifier(schema)}.{identifier(name)}"


def replication_literal(text: str) -> str:
    """Return a string for a replication command."""
    return "'" + text.replace("'", "''") + "'"


def literal(text: str) -> str:
    """Return a string for SQL that does not depend on standard_conforming_strings."""
    if "\\" in text:
        return " E'" + text.replace("\\", "\\\\").replace("'", "''") + "'"
    return replication_literal(text)


def literals(texts: Iterable[str]) -> str:
    """Return the list of some strings for SQL, as an IN or an ARRAY takes it."""
    return ", ".join(literal(text) for text in texts)
