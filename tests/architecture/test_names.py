"""Names: of modules, of classes, of public methods, of tests, and of the errors that docstrings list."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import subscriber
from tests.architecture.source import FILES, PACKAGE, each_file, nodes
from tools.docs.api import INTERNAL

ROOT = PACKAGE.parent

# Modules and packages whose last word ends in -ing, and why: a name is a noun, and these are nouns of the field.
NOUNS = {
    "pooling": "connection pooling",
    "formatting": "how values are formatted",
    "row_encoding": "an encoding of rows",
    "quoting": "quoting of SQL identifiers and literals",
    "testing": "the usual name of a module for the tests of users",
    "streaming": "the option `streaming`",
}
# Classes that two files define, and why.
TWINS = dict.fromkeys(
    ("Delete", "Insert", "Relation", "Truncate", "Update"), "a message of pgoutput, and what a program receives of it"
)


# First words of a test's name without a subject: it continues the name of another test, or has a pronoun for a noun.
NO_SUBJECT = re.compile(
    "(also|and|but|even|it|its|neither|nor|of|so|such|that|their|then|there|these|they|this|those|what|whatever|where"
    "|whether|which|who|whoever|without)_"
)


# Former words for what the glossary in CONTRIBUTING.md names.
FORMER = {"lane": "session", "portion": "slice", "looking": "lookup"}


@cache
def defined_in() -> dict[str, set[str]]:
    """Return the files that define each class."""
    files_by_class = defaultdict(set)
    for name, file in FILES.items():
        for node in nodes(file):
            if isinstance(node, ast.ClassDef):
                files_by_class[node.name].add(name)
    return files_by_class


@each_file()
def test_variables_have_the_words_of_the_glossary(name: str) -> None:
    for node in nodes(FILES[name]):
        named = node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.arg) else ""
        for word in named.lower().strip("_").split("_"):
            assert word.removesuffix("s") not in FORMER, f"{named}: say {FORMER[word.removesuffix('s')]}"


# Names that say nothing of the value: `for one in tables`, `found = await connection.fetchval(…)`.
NO_NOUN = frozenset({"one", "found"})
FEWER_NOUNS = frozenset({"found"})  # tests have pairs: one, other


@each_file()
def test_variables_have_nouns_of_the_domain(name: str) -> None:
    assert not (lines := _without_noun(nodes(FILES[name]))), f"name the values in lines {lines}: table, conflict, …"


def test_variables_of_tests_have_nouns_of_the_domain() -> None:
    for file in ROOT.glob("tests/**/*.py"):
        lines = _without_noun(tuple(ast.walk(ast.parse(file.read_text()))), FEWER_NOUNS)
        assert not lines, f"name the values in lines {lines} of {file.relative_to(ROOT)}"


def _without_noun(tree: tuple[ast.AST, ...], refused: frozenset[str] = NO_NOUN) -> list[int]:
    """Return the lines in which functions give a value a name that says nothing of it."""
    functions = [node for node in tree if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    named = {node for function in functions for node in ast.walk(function) if isinstance(node, ast.Name)}
    return sorted({node.lineno for node in named if isinstance(node.ctx, ast.Store) and node.id in refused})


def test_a_module_is_named_by_a_noun() -> None:
    names = {file.removesuffix(".py").removesuffix("/__init__").rpartition("/")[2] for file in FILES}
    assert {name for name in names if name.endswith("ing")} == NOUNS.keys()


@pytest.mark.xdist_group("architecture")
def test_a_class_name_is_used_once() -> None:
    assert {name for name, files in defined_in().items() if len(files) > 1} == TWINS.keys()


def test_the_name_of_a_test_has_the_subject_and_what_must_hold() -> None:
    """A failing line of continuous integration has this name only."""
    unclear = []
    for file in [*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("examples/**/test_*.py")]:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                name = node.name.removeprefix("test_")
                if NO_SUBJECT.match(name) or name.count("_") < 2:
                    unclear.append(f"{file.relative_to(ROOT)}::{node.name}")
    assert unclear == [], "say in plain words: subject and verb"


@pytest.mark.parametrize("name", [name for name in subscriber.__all__ if inspect.isclass(getattr(subscriber, name))])
def test_public_methods_are_documented(name: str) -> None:
    page = (ROOT / "docs/reference/python.md").read_text()
    section = re.split(r"\n###? ", page.partition(f"\n### subscriber.{name}\n")[2])[0]
    documented = set(re.findall(r"^#### (\w+)$", section, re.MULTILINE)) | INTERNAL.get(name, set())
    assert set(_public_methods(getattr(subscriber, name))) <= documented


def _public_methods(thing: type) -> Iterator[str]:
    for name, value in vars(thing).items():
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if not name.startswith("_") and inspect.isfunction(function) and function.__name__ == name:
            yield name


@each_file()
def test_errors_in_docstrings_exist(name: str) -> None:
    unknown = [error for docstring in _docstrings(FILES[name]) for error in _raised(docstring) if not _exists(error)]
    assert not unknown, "errors that do not exist"


def _docstrings(file: Path) -> Iterator[str]:
    for node in nodes(file):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def _raised(docstring: str) -> Iterator[str]:
    """Yield the classes of the section Raises, and the class that follows the word in a sentence."""
    section = re.split(r"\n(?=\S)", docstring.partition("Raises:\n")[2])[0]
    for names in re.findall(r"^    (\w[\w., ]*?)(?: \([^)]*\))?: ", section, re.MULTILINE):
        yield from re.split(r", | or ", names)
    yield from re.findall(r"\bRaises ((?:\w+\.)*[A-Z]\w+)", docstring)


def _exists(name: str) -> bool:
    module, _, last = name.rpartition(".")
    return hasattr(import_module(module), last) if module else name in defined_in() or hasattr(builtins, name)
