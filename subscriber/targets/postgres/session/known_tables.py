"""Tables of the target that were looked at before, so that the first change of one need not wait for that.

To look at a table takes the target some milliseconds. A mapping made of what is known here is checked in the
transaction that uses it, as one of an earlier transaction is (schema_check.py). An altered table fails that check, and
everything is forgotten.
"""

from __future__ import annotations

from subscriber.apply.relation_map import LocalRelation
from subscriber.targets.postgres.session.introspection import Terms


class KnownTables:
    """For the sessions of one subscription, which all have the same role."""

    def __init__(self) -> None:
        self.complete = False  # somebody has looked at all tables of the subscription, or does so now
        self._terms = Terms()
        self._tables: dict[tuple[str, str], LocalRelation] = {}

    def find(self, schema: str, name: str, terms: Terms) -> LocalRelation | None:
        """None: it was not looked at on these terms."""
        return self._tables.get((schema, name)) if terms == self._terms else None

    def add(self, table: LocalRelation, terms: Terms) -> None:
        if terms != self._terms:
            self._terms, self._tables = terms, {}
        self._tables[table.schema, table.name] = table

    def all(self, terms: Terms) -> list[LocalRelation]:
        """Those that were looked at on these terms."""
        return list(self._tables.values()) if terms == self._terms else []

    def forget(self) -> None:
        """Have every table looked at again."""
        self._tables = {}
