"""Helpers that write Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. Cells are single lines of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def code(text: str) -> str:
    """Return the text as code that is valid also inside a table."""
    return "`" + text.replace("|", "\\|") + "`" if text else ""


def page(title: str, *parts: str) -> str:
    """Return a whole page."""
    return "\n\n".join([f"# {title}", "<!-- Written from the code by `make docs`. -->", *parts]) + "\n"
