"""The code blocks of the documents match the programs, the grammar and the package.

test_tutorials.py runs the tutorials; programs that need more than a page are run from examples/.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import subscriber
from subscriber.catalog.grammar import options, parser
from subscriber.catalog.grammar.quarantine_options import parse_quarantine_options
from tools.docs import commands
from tools.docs.documents import DOCUMENTS, ROOT, all_blocks, prose
from tools.docs.documents import commands as calls

SHELL = all_blocks("sh")
PYTHON = all_blocks("python")
SUBSCRIPTION = re.compile(r"\b(?:CREATE|ALTER|DROP) SUBSCRIPTION\b[^;]*", re.IGNORECASE)


def named(values: list[tuple[Path, str]]) -> list[str]:
    return [f"{document.stem}-{number}" for number, (document, _) in enumerate(values)]


@pytest.mark.parametrize(("document", "block"), SHELL, ids=named(SHELL))
def test_commands_are_understood(document: Path, block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("SUBSCRIBER_TARGET_DSN", "SUBSCRIBER_SOURCE_DSN"):
        monkeypatch.setenv(variable, "dbname=given")
    for name, *arguments in calls(block, "subscriber"):
        if not name.startswith("-"):
            if name not in commands.commands():
                name = f"{name} {arguments.pop(0)}"  # a command of a group
            commands.commands()[name].make_context(name, list(arguments))


@pytest.mark.parametrize(("document", "block"), SHELL, ids=named(SHELL))
def test_files_modules_and_targets_of_make_are_there(document: Path, block: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for arguments in calls(block, r"make"):
        assert re.search(rf"^{arguments[0]}:", makefile, re.MULTILINE), arguments
    for arguments in calls(block, r"\.venv/bin/pytest|pytest"):
        for file in [argument for argument in arguments if argument.startswith("tests/")]:
            assert (ROOT / file.partition("::")[0]).exists(), file
    for arguments in calls(block, r"\.venv/bin/python|python"):
        if arguments[:1] == ["-m"]:
            assert find_spec(arguments[1]), arguments[1]


def written_statements() -> Iterator[tuple[Path, str]]:
    """Yield the texts that are written as a statement about a subscription, except those in running text."""
    for document, block in all_blocks("sql"):
        for statement in SUBSCRIPTION.findall(re.sub("--.*", "", block)):
            yield document, statement
    for document, block in SHELL:
        for name, *arguments in calls(block, "subscriber"):
            if name == "exec" and arguments[-1]:  # '' only creates the schema
                yield document, arguments[-1]
    for document, block in PYTHON:
        for text in texts(parsed(block)):
            if SUBSCRIPTION.match(text):
                yield document, text


def texts(tree: ast.AST) -> Iterator[str]:
    """Yield the strings of a program. Values in an f-string are replaced by x."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in child.values)
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value
        else:
            yield from texts(child)


def parsed(block: str) -> ast.AST:
    """Parse an example as the body of an async function."""
    return ast.parse("async def example():\n" + "".join(f"    {line}\n" for line in block.splitlines()))


@pytest.mark.parametrize(("document", "statement"), list(written_statements()))
def test_statements_are_in_the_grammar(document: Path, statement: str) -> None:
    (parsed_statement,) = parser.parse(statement, ["x"] * statement.count("$"))
    if isinstance(parsed_statement, parser.AlterQuarantine):
        parse_quarantine_options(parsed_statement)
        return
    given = getattr(parsed_statement, "options", ())
    supported = {
        parser.CreateSubscription: options.FOR_CREATE,
        parser.AlterOptions: options.FOR_SET,
        parser.AlterPublications: options.FOR_PUBLICATIONS,
        parser.AlterRefresh: options.FOR_REFRESH,
        parser.AlterSkip: options.FOR_SKIP,
    }.get(type(parsed_statement), frozenset())
    options.parse_options(given, supported)


def test_statements_are_found_in_the_documents() -> None:
    assert len(list(written_statements())) > 20


@pytest.mark.parametrize(("document", "block"), PYTHON, ids=named(PYTHON))
def test_programs_in_the_documents_name_existing_attributes(document: Path, block: str) -> None:
    for node in ast.walk(parsed(block)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("subscriber"):
            for alias in node.names:
                assert hasattr(import_module(node.module or ""), alias.name), alias.name
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "subscriber":
            assert node.attr in subscriber.__all__, node.attr
        if isinstance(node, ast.Call) and (called := _called(node.func)) is not None:
            known = inspect.signature(called).parameters
            for keyword in node.keywords:
                assert keyword.arg is None or keyword.arg in known, f"{ast.unparse(node.func)}({keyword.arg}=…)"


def _called(function: ast.expr) -> Any:
    """Return our function that is called; None if it is not ours."""
    match function:
        case ast.Attribute(ast.Name("subscriber"), name) if name in subscriber.__all__:
            return getattr(subscriber, name)
        case ast.Attribute(ast.Name("db"), name):
            return getattr(subscriber.Database, name)
        case ast.Name("Hook" | "Hooks" as name):
            return getattr(subscriber, name)
    return None


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_options_in_the_text_are_options(document: Path) -> None:
    ours = {option for command in [commands.root(), *commands.commands().values()] for parameter in command.params
            for option in [*parameter.opts, *parameter.secondary_opts]}  # fmt: skip
    for code in re.findall(r"`([^`\n]*)`", prose(document)):
        program = re.search(r"\bbenchmarks\.(\w+)", code)
        known = _options_of(ROOT / f"benchmarks/{program[1]}.py") if program else ours
        assert set(re.findall(r"(?<!\S)--[a-z-]+", code)) <= known | {"--help"}, code


def _options_of(benchmark: Path) -> set[str]:
    return set(re.findall(r'add_argument\("(--[a-z-]+)"', benchmark.read_text()))


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_files_and_tests_in_the_text_are_there(document: Path) -> None:
    text = (ROOT / document).read_text()
    for path in re.findall(r"\b(?:subscriber|tests|examples|benchmarks|migrations|docs)/[\w/.-]*\w", text):
        assert (ROOT / path).exists() or (ROOT / path).with_suffix(".py").exists(), path
    for path, name in re.findall(r"\b(tests/[\w/]+\.py)::(\w+)", text):
        assert re.search(rf"def {name}\(", (ROOT / path).read_text()), f"{path} has no {name}"


def test_the_guarantees_name_their_tests() -> None:
    rows = [line for line in (ROOT / "docs/guarantees.md").read_text().splitlines() if line.startswith("|")][2:]
    assert rows
    assert all("`tests/" in row for row in rows)
