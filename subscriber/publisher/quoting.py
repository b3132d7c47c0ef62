"""Names and strings inside commands for a publisher.

The replication grammar knows `"identifier"` and `'string'` with the quote doubled, and nothing else: no
E'', no backslashes. SQL may see a backslash differently (standard_conforming_strings), so it gets E''.
"""

from __future__ import annotations

from collections.abc import Iterable


def identifier(name: str) -> str:
    """Quoted always, which is right for every name, keywords too."""
    return '"' + name.replace('"', '""') + '"'


def qualified(schema: str, name: str) -> str:
    return f"{identifier(schema)}.{identifier(name)}"


def replication_literal(text: str) -> str:
    """A string in a replication command."""
    return "'" + text.replace("'", "''") + "'"


def literal(text: str) -> str:
    """A string in SQL, whatever standard_conforming_strings says."""
    if "\\" in text:
        return " E'" + text.replace("\\", "\\\\").replace("'", "''") + "'"
    return replication_literal(text)


def literals(texts: Iterable[str]) -> str:
    return ", ".join(literal(text) for text in texts)
