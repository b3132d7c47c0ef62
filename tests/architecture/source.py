"""The package's files, each read and parsed once for all tests of this folder."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent.parent / "subscriber"
FILES = {file.relative_to(PACKAGE).as_posix(): file for file in sorted(PACKAGE.rglob("*.py"))}


@cache
def text(file: Path) -> str:
    return file.read_text()


@cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    """Return the file's syntax tree in the order of ast.walk(), the module first. Do not change it."""
    return tuple(ast.walk(ast.parse(text(file))))
