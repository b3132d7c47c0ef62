"""Parse the index definitions that a publisher prints, and build such statements for a table of the target.

A definition is SQL that the publisher has written, so no text of it is executed. It is split into tokens: names,
strings, numbers, operators, brackets. It must be one CREATE INDEX of the expected table, with all brackets closed in
order. The executed statement is built from those tokens, with one space between two, for the table and the name that
the caller gives. Comments, semicolons, dollar quotes and escape strings are refused: pg_get_indexdef() never prints
them under standard_conforming_strings, and another lexer could read them differently from this one.

    CREATE [UNIQUE] INDEX name ON schema.table USING method (…)
        [INCLUDE (…)] [NULLS [NOT] DISTINCT] [WITH (…)] [WHERE …]

Expressions in it may call functions that the target has. PostgreSQL lets them be immutable only, and runs them as the
owner of the table, in a security-restricted operation.

Source: src/backend/utils/adt/ruleutils.c, pg_get_indexdef_worker(); src/backend/parser/scan.l.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from subscriber.errors import ProtocolError
from subscriber.quoting import identifier, qualified

# The characters of a word are all but some of ASCII: re takes 5 ms to compile a range up to \U0010FFFF.
_TOKEN = re.compile(
    r"""
    (?P<blank>[ \n]+)
  | (?P<word>[^\x00-@\[-^`{-\x7f][^\x00-#%-/:-@\[-^`{-\x7f]*(?!['&]))
  | (?P<quoted>"(?:[^"\0]|"")+")
  | (?P<string>[bBxX]?'(?:[^'\0]|'')*')
  | (?P<number>[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?)
  | (?P<operator>::|[~!@\#^&|`?+\-*/%<>=]+)
  | (?P<mark>[()\[\],.:])
    """,
    re.VERBOSE,
)
_CLOSING = {"(": ")", "[": "]"}


@dataclass(frozen=True, slots=True)
class IndexDefinition:
    """The definition of an index without its name and its table. Texts are tokens with spaces between them."""

    unique: bool
    method: str
    keys: str
    include: str | None
    nulls_not_distinct: bool
    options: str | None
    predicate: str | None

    @classmethod
    def parse(cls, text: str, schema: str, table: str) -> IndexDefinition:
        """Read what pg_get_indexdef() gives for an index of that table, under an empty search_path.

        Raises ProtocolError for anything else.
        """
        tokens = _Tokens(_cut(text))
        tokens.take("create")
        unique = tokens.has("unique")
        tokens.take("index")
        tokens.name()
        tokens.take("on")
        named = tokens.name()
        tokens.take(".")
        if (named, tokens.name()) != (schema, table):
            raise _malformed()
        tokens.take("using")
        method = tokens.name()
        keys = tokens.bracketed()
        include = tokens.bracketed() if tokens.has("include") else None
        nulls_not_distinct = False
        if tokens.has("nulls"):
            nulls_not_distinct = tokens.has("not")
            tokens.take("distinct")
        options = tokens.bracketed() if tokens.has("with") else None
        predicate = tokens.rest() if tokens.has("where") else None
        tokens.finish()
        return cls(unique, method, keys, include, nulls_not_distinct, options, predicate)

    def create(self, name: str, schema: str, table: str) -> str:
        """Return the statement that makes such an index of a table.

        Raises ProtocolError for a text that no server has: with a NUL, or with bytes that are no UTF-8.
        """
        parts = [
            f"CREATE {'UNIQUE ' * self.unique}INDEX {identifier(name)} ON {qualified(schema, table)}",
            f"USING {identifier(self.method)} ({self.keys})",
        ]
        if self.include is not None:
            parts.append(f"INCLUDE ({self.include})")
        if self.nulls_not_distinct:
            parts.append("NULLS NOT DISTINCT")
        if self.options is not None:
            parts.append(f"WITH ({self.options})")
        if self.predicate is not None:
            parts.append(f"WHERE ({self.predicate})")
        statement = " ".join(parts)
        if "\0" in statement or re.search("[\ud800-\udfff]", statement):
            raise _malformed()
        return statement


def _malformed() -> ProtocolError:
    return ProtocolError("the publisher's definition of an index is none that can be read")


def _cut(text: str) -> list[str]:
    """The tokens, blanks left out. Raises ProtocolError."""
    tokens: list[str] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise _malformed()
        token = match[0]
        if match.lastgroup == "operator" and ("--" in token or "/*" in token):
            raise _malformed()
        if match.lastgroup != "blank":
            tokens.append(token)
        position = match.end()
    return tokens


class _Tokens:
    """Reads forward through tokens; every method raises ProtocolError where there is something else."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens = tokens
        self._at = 0

    def _next(self) -> str:
        if self._at == len(self._tokens):
            raise _malformed()
        self._at += 1
        return self._tokens[self._at - 1]

    def take(self, word: str) -> None:
        """Read this keyword, or mark."""
        if self._next().lower() != word:
            raise _malformed()

    def has(self, word: str) -> bool:
        """Read this keyword if it is the next."""
        matches = self._at < len(self._tokens) and self._tokens[self._at].lower() == word
        self._at += matches
        return matches

    def name(self) -> str:
        """Read a name, quoted or not."""
        token = self._next()
        if token.startswith('"'):
            return token[1:-1].replace('""', '"')
        if not re.fullmatch("[a-z_][a-z0-9_$]*", token):
            raise _malformed()
        return token

    def bracketed(self) -> str:
        """Read a text in round brackets, with its brackets."""
        self.take("(")
        start = self._at
        self._until_closed(")")
        return " ".join(self._tokens[start : self._at - 1])

    def rest(self) -> str:
        """Read everything, which must not be nothing."""
        start = self._at
        while self._at < len(self._tokens):
            if (token := self._next()) in _CLOSING:
                self._until_closed(_CLOSING[token])
            elif token in _CLOSING.values():
                raise _malformed()
        if start == self._at:
            raise _malformed()
        return " ".join(self._tokens[start:])

    def finish(self) -> None:
        if self._at < len(self._tokens):
            raise _malformed()

    def _until_closed(self, mark: str) -> None:
        """Read to the mark that closes a bracket, and over those in between."""
        open_ones = [mark]
        while open_ones:
            token = self._next()
            if token in _CLOSING:
                open_ones.append(_CLOSING[token])
            elif token in _CLOSING.values() and token != open_ones.pop():
                raise _malformed()
