"""The package's source text, for facts that objects do not have: comments, and calls."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent.parent / "subscriber"


def modules() -> Iterator[tuple[str, str]]:
    """Yield (name within the package, text) of every module."""
    for file in sorted(PACKAGE.rglob("*.py")):
        yield str(file.relative_to(PACKAGE)), file.read_text()


def calls(text: str) -> Iterator[ast.Call]:
    return (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))


def field_comments(text: str, name: str) -> dict[str, str]:
    """Return the annotated names of class `name`, each with its end-of-line comment; empty without one."""
    found = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name]
    comments = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    }
    return {
        node.target.id: comments.get(node.end_lineno or 0, "")
        for node in found[0].body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def member_comments(text: str, name: str) -> dict[str, str]:
    """Return the members of enum `name`, each with its end-of-line comment; empty without one."""
    return field_comments(re.sub(r"^(    \w+) = ", r"\1: object = ", text, flags=re.MULTILINE), name)
