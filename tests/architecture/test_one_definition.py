"""Values and rules that the package defines in one module, found where another module writes them again."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from tests.architecture.source import FILES, each_file, nodes, text

# Five characters of an SQLSTATE's alphabet that are no word: a class of PostgreSQL's, then a code.
_SQLSTATE = re.compile("(?:[0-9][0-9A-Z]|XX|SB|HV|P0)[0-9A-Z]{3}")


def strings(tree: Iterable[ast.AST]) -> Iterator[str]:
    for node in tree:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@each_file(but=("sqlstate.py",))
def test_sqlstates_have_names(name: str) -> None:
    match = [value for value in strings(nodes(FILES[name])) if _SQLSTATE.fullmatch(value)]
    assert not match, f"import {match} by name from subscriber.sqlstate"


# server_version_num of a first release, and a comparison with a major version.
_VERSION = re.compile(r"(?<![\d_])(?:9[0-6]0[0-9]00|1[0-9]_?0000)\b|\bmajor(?:\(\))? *(?:<|>)=? *1[0-9]\b")


# native_subscription.py knows a defect of minor releases, and connection/session.py explains the number.
@each_file(but=("server_features.py", "server_version.py", "catalog/native_subscription.py", "connection/session.py"))
def test_features_of_versions_have_names(name: str) -> None:
    assert not (matches := _VERSION.findall(text(FILES[name]))), f"name {matches} in subscriber/server_features.py"


# A call of datetime or date for PostgreSQL's epoch, and its distance from the Unix epoch.
_EPOCH = re.compile(r"\b(?:datetime|date)\(2000, 1, 1\b|946_?684_?800")


@each_file(but=("timestamps.py",))
def test_the_epoch_has_one_definition(name: str) -> None:
    assert not _EPOCH.search(text(FILES[name])), "import the epoch from subscriber.timestamps"


# A quote that is doubled. Two other formats double it, too: values of `subscriber tail`, and tsvector.
_DOUBLED = re.compile(r"""replace\((?:'"', '""'|"'", "''")\)""")


@each_file(but=("quoting.py", "cli/change_lines.py", "change_stream/types/binary.py"))
def test_sql_is_quoted_in_one_module(name: str) -> None:
    assert not _DOUBLED.search(text(FILES[name])), "quote names and strings with subscriber.quoting"


# The fields of a NULL and of a tab in COPY's text format.
_COPY_TEXT = {rb"\N", rb"\t"}


@each_file(but=("protocol/copy_text.py",))
def test_copy_text_is_escaped_in_one_module(name: str) -> None:
    texts_found = [
        node.value for node in nodes(FILES[name]) if isinstance(node, ast.Constant) and node.value in _COPY_TEXT
    ]
    assert not texts_found, "read and write COPY's text format with subscriber.protocol.copy_text"


# The name of a slot, origin, savepoint or prepared transaction of a subscription, as an f-string or SQL builds it.
_OWN_NAME = re.compile(r"pg_\{|pg_(?:gid|sp)_\{|'\^?pg(?:\\?_gid\\?)?_' \|\|")


@each_file(but=("names.py",))
def test_names_of_slots_and_origins_are_made_in_one_module(name: str) -> None:
    assert not _OWN_NAME.search(text(FILES[name])), "take the name from subscriber.names"


# A table or view of ours in a statement; a name before a parenthesis is a function.
_OWN_TABLE = re.compile(r"\b(?:FROM|JOIN|INTO|UPDATE|TABLE)\s+(?:ONLY\s+)?subscriber\.\w+\b(?!\()", re.IGNORECASE)


# Modules of the catalog with such statements outside of catalog/store: of the tables of one feature, and two statements
# that are part of what the command says or does to all of the schema.
_OUTSIDE_OF_STORE = {
    *("catalog/hooked_tables.py", "catalog/identity.py", "catalog/pause_requests.py"),
    *("catalog/schema.py", "catalog/table_names.py", "catalog/worker_sessions.py"),
    *("catalog/commands/hand_back.py", "catalog/commands/uninstall.py"),
}


@each_file(but=(*(name for name in FILES if name.startswith("catalog/store/")), *_OUTSIDE_OF_STORE))
def test_statements_on_our_tables_are_in_the_store_of_the_catalog(name: str) -> None:
    tree = nodes(FILES[name])
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    prose = {ast.get_docstring(node, clean=False) for node in tree if isinstance(node, documented)}
    match = [value for value in strings(tree) if value not in prose and _OWN_TABLE.search(value)]
    assert not match, "move the statement to the module of package catalog/store that owns the table"
