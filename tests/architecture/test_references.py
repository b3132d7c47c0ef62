"""Docstrings and comments name files, functions and methods that exist."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.architecture.source import FILES, each_file, text

ROOT = Path(__file__).resolve().parents[2]
# Schemas of SQL, libraries, and variables of examples.
ELSEWHERE = {
    "subscriber",
    "pg_catalog",
    "app",
    "asyncpg",
    "builder",
    "date",
    "db",
    "log",
    "move",
    "row",
    "str",
    "stream",
}
_FOLDERS = ("subscriber", "tests", "tools", "migrations", "examples", "benchmarks")
_FILE = re.compile(r"(?<![\w/.-])([\w/-]+\.py)\b(?::(\w+))?")
_CALL = re.compile(r"(?<![\w./])(\w+)\.(\w+)\(\)")  # of a module or class, as in retry.reaction()


@cache
def defined() -> dict[str, set[str]]:
    """Return the functions, methods and classes of each module and class of the repository, by its last name."""
    names: dict[str, set[str]] = {}
    for folder in _FOLDERS:
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef):
                    names.setdefault(node.name, set()).update(_members(node))
                    names.setdefault(file.stem, set()).add(node.name)
                elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    names.setdefault(file.stem, set()).add(node.name)
    return names


def _members(node: ast.ClassDef) -> Iterator[str]:
    for part in node.body:
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            yield part.name


@cache
def files() -> set[str]:
    """Return the paths of all Python files, each with all ends of its path: c.py, b/c.py, a/b/c.py."""
    paths = [file.relative_to(ROOT).parts for folder in _FOLDERS for file in (ROOT / folder).rglob("*.py")]
    return {"/".join(parts[start:]) for parts in paths for start in range(len(parts))}


def sentences(source: str) -> Iterator[str]:
    """Yield the docstrings and comments of a file."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def words(source: str) -> set[str]:
    """Return the names that the code of a file has."""
    words_used = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.alias(name=name):
                words_used.add(name.rpartition(".")[2])
    return words_used


@each_file()
def test_names_in_prose_exist(name: str) -> None:
    source = text(FILES[name])
    known, unknown = words(source) | ELSEWHERE, []
    for sentence in sentences(source):
        unknown += [path for path, _ in _FILE.findall(sentence) if path not in files() and "h11_impl" not in path]
        for owner, member in _CALL.findall(sentence):
            if owner in ELSEWHERE or owner in sys.stdlib_module_names:
                continue
            if member not in defined().get(owner, known) or owner not in defined().keys() | known:
                unknown.append(f"{owner}.{member}()")
    assert not unknown, f"rename or remove: {unknown}"
