"""Descriptions of target tables that were read earlier, so that the first change of a table does not wait for them.

Reading the description of a table takes the target some milliseconds. A mapping made of a known description is checked
in the transaction that uses it, like that of an earlier transaction (schema_check.py). An altered table fails that
check, and all descriptions are dropped.
"""

from __future__ import annotations

from subscriber.apply.relation_map import LocalRelation
from subscriber.targets.postgres.session.introspection import Terms


class KnownTables:
    """The definitions that the sessions of one subscription have read. All sessions have the same role."""

    def __init__(self) -> None:
        self.complete = False  # all tables of the subscription have been read, or a session is reading them
        self._terms = Terms()
        self._tables: dict[tuple[str, str], LocalRelation] = {}

    def find(self, schema: str, name: str, terms: Terms) -> LocalRelation | None:
        """Return the description, or None if the table was not read on these terms."""
        return self._tables.get((schema, name)) if terms == self._terms else None

    def add(self, table: LocalRelation, terms: Terms) -> None:
        if terms != self._terms:
            self._terms, self._tables = terms, {}
        self._tables[table.schema, table.name] = table

    def all(self, terms: Terms) -> list[LocalRelation]:
        """Return the tables that were read on these terms."""
        return list(self._tables.values()) if terms == self._terms else []

    def forget(self) -> None:
        """Drop all descriptions, so that every table is read again."""
        self._tables = {}
