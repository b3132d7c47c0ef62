"""docs/reference/catalog.md: schema "subscriber" in the target, from the comments of migrations/schema.sql.

tests/catalog/test_schema.py compares the result of read() with the server's catalogs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from subscriber.catalog.schema import schema_text
from tools.docs import markdown
from tools.docs.markdown import code

INTRODUCTION = """
The first command that needs schema `subscriber` of the target database creates it. The whole schema is one file,
`migrations/schema.sql`. This page has its comments, which psql shows, too: `\\d+ subscriber.hold`,
`\\df+ subscriber.create_origin`. Read the views in your programs. The tables and functions are internal and may change in any
version; they are described here for troubleshooting. Only a subscription's owner and superusers can see the rows of the tables.
Times are of the target's clock unless the description names another one.
""".strip()

VIEWS_HEAD = """
## Views

The views have the names, columns, types and meaning of the server's own views, and show subscriber's subscriptions. With
`search_path = public, subscriber, pg_catalog`, a query without schema names finds these views before the server's own. As in
PostgreSQL, only the owner sees the connection string; it is NULL for other roles.
""".strip()

DUTIES = """
Each function is for the callers that its description names. Roles receive duties from the administrator: see
[Roles](../roles.md). A row of a durable table is also in a large object, which is not emptied by a crash of the server.
""".strip()

_SECTION = re.compile(r"^-- (\d+)\. (.+?) -+$", re.MULTILINE)
_LITERAL = r"'(?:[^']|'')*'"
_COMMENT = re.compile(
    r"^\s*COMMENT ON (?P<kind>COLUMN|DOMAIN|FUNCTION|MATERIALIZED VIEW|SEQUENCE|TABLE|VIEW) subscriber\.(?P<name>[\w.]+)"
    rf"(?P<arguments>\([^)]*\))? IS\s+(?P<texts>{_LITERAL}(?:\s+{_LITERAL})*);$",
    re.MULTILINE,
)
_TABLE = re.compile(r"^CREATE UNLOGGED TABLE subscriber\.(\w+) \(\n(.*?)\n\)[^\n]*;$", re.MULTILINE | re.DOTALL)
_COLUMN = re.compile(r"""^    (\w+) ((?:"char"|[\w.]+)(?:\[\])?)""", re.MULTILINE)
_PUBLIC_VIEWS = "17"  # the section with the views for users


@dataclass
class Relation:
    """A table, view or sequence with its comments. `types` has those of a table's columns."""

    kind: str
    name: str
    about: str
    columns: dict[str, str] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)


@dataclass
class Section:
    """A section of schema.sql: its number and title, its relations and functions, each in the order of the file."""

    number: str
    title: str
    relations: dict[str, Relation] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)  # name, with arguments if there are several; comment


def read(text: str) -> list[Section]:
    """Return the sections of schema.sql. The form of the file is regular: migrations/README.md."""
    starts = [*_SECTION.finditer(text)]
    sections = []
    for start, end in zip(starts, [*(match.start() for match in starts[1:]), len(text)], strict=True):
        section = Section(start[1], start[2])
        body = text[start.end() : end]
        for match in _COMMENT.finditer(body):
            _add(section, match)
        for table in _TABLE.finditer(body):
            types = dict(_COLUMN.findall(table[2]))
            section.relations[table[1]].types = {name: types[name] for name in section.relations[table[1]].columns}
        sections.append(section)
    return sections


def _add(section: Section, comment: re.Match[str]) -> None:
    about = "".join(literal[1:-1].replace("''", "'") for literal in re.findall(_LITERAL, comment["texts"]))
    name = comment["name"]
    if comment["kind"] == "FUNCTION":
        section.functions[name + (comment["arguments"] or "")] = about
    elif comment["kind"] == "COLUMN":
        relation, _, column = name.partition(".")
        section.relations[relation].columns[column] = about
    else:
        section.relations[name] = Relation(comment["kind"].lower(), name, about)


def page() -> str:
    """Return the page: the views for users, and then all sections."""
    sections = read(schema_text())
    parts = [INTRODUCTION, VIEWS_HEAD]
    for section in sections:
        if section.number == _PUBLIC_VIEWS:
            for view in section.relations.values():
                parts += _described(view)
    parts.append(DUTIES)
    for section in sections:
        parts.append(f"## {section.title}")
        if section.number != _PUBLIC_VIEWS:
            for relation in section.relations.values():
                parts += _described(relation)
        if section.functions:
            rows = [[code(name), _cell(about)] for name, about in section.functions.items()]
            parts.append(markdown.table(["function", ""], rows))
    return markdown.page("Catalog", *parts)


def _described(relation: Relation) -> list[str]:
    kind = "" if relation.kind in ("table", "view") else f" ({relation.kind})"
    parts = [f"### {relation.name}{kind}", _cell(relation.about)]
    if relation.types:
        rows = [[code(name), code(relation.types[name]), _cell(about)] for name, about in relation.columns.items()]
        parts.append(markdown.table(["column", "type", ""], rows))
    elif relation.columns:
        parts.append(
            markdown.table(["column", ""], [[code(name), _cell(about)] for name, about in relation.columns.items()])
        )
    return parts


def _cell(text: str) -> str:
    """Return a comment as a cell of a table."""
    return text.replace("|", "\\|")
