"""Quoting of names and strings in SQL and in replication commands.

The grammar of replication commands has `"identifier"` and `'string'`, in which a quote is doubled. It has no E'' and no
backslashes. In SQL the meaning of a backslash depends on standard_conforming_strings. So a string with a backslash
becomes an E''. display.py quotes text that you paste into a terminal: it also escapes invisible characters.
"""

from __future__ import annotations

from collections.abc import Iterable


def identifier(name: str) -> str:
    """Return a quoted name. Quotes make any name valid, keywords included."""
    return '"' + name.replace('"', '""') + '"'


def qualified(schema: str, name: str) -> str:
    """Return the quoted name of a table with its schema."""
    return f"{identifier(schema)}.{identifier(name)}"


def replication_literal(text: str) -> str:
    """Return a string literal for a replication command."""
    return "'" + text.replace("'", "''") + "'"


def literal(text: str) -> str:
    """Return a string literal for SQL that does not depend on standard_conforming_strings."""
    if "\\" in text:
        return " E'" + text.replace("\\", "\\\\").replace("'", "''") + "'"
    return replication_literal(text)


def literals(texts: Iterable[str]) -> str:
    """Return string literals for SQL, separated by commas, for IN (…) or ARRAY[…]."""
    return ", ".join(literal(text) for text in texts)
