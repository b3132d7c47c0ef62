"""Rows that quarantined transactions hold: which later transaction depends on which earlier one.

Purpose. A transaction claims rows. A later transaction depends on an earlier one if their claims meet:

    claim                                   meets
    a value of a unique index               the same value of the same index
    a table as a whole                      every claim on the table
    a row that appears or disappears in a   a row of the referencing table with that value
    referenced table
    a row of a referencing table            a row that appears or disappears in the referenced table with that value

Two rows that reference the same row are independent of each other. `parents_any` and `children_any` hold a foreign key
whose value is not in the stream, because the publisher sends only the key of a former row.

Invariants.

- A claim on less than a table contains values whose equality in Python is that of the target.
- Nothing here knows a transaction's changes: worker/apply/quarantine_claims.py finds the claims of a change.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from subscriber.lsn import Lsn

Row = tuple[Hashable, ...]  # a constraint, and the values of its columns


@dataclass(slots=True)
class Claims:
    """The claims of one transaction."""

    tables: set[int] = field(default_factory=set)  # all tables that it changes, by the OID of the whole table
    names: set[str] = field(default_factory=set)  # tables that the target does not have
    whole: set[int] = field(default_factory=set)
    rows: set[Row] = field(default_factory=set)
    parents: set[Row] = field(default_factory=set)
    children: set[Row] = field(default_factory=set)
    parents_any: set[Hashable] = field(default_factory=set)
    children_any: set[Hashable] = field(default_factory=set)

    @property
    def size(self) -> int:
        """The number of claims that take memory."""
        return len(self.rows) + len(self.parents) + len(self.children)


class HeldRows:
    """The claims of all quarantined transactions of a subscription."""

    def __init__(self) -> None:
        self.claims: dict[Lsn, Claims] = {}  # by finish LSN, in the publisher's order
        self.size = 0
        self._holders: dict[tuple[str, Hashable], set[Lsn]] = {}

    def __bool__(self) -> bool:
        return bool(self.claims)

    def add(self, lsn: Lsn, claims: Claims) -> None:
        """Add the claims of a transaction."""
        self.claims[lsn] = claims
        self.size += claims.size
        for key in _held(claims):
            self._holders.setdefault(key, set()).add(lsn)

    def remove(self, lsn: Lsn) -> None:
        """Remove the claims of a transaction that has left the quarantine."""
        claims = self.claims.pop(lsn, None)
        if claims is None:
            return
        self.size -= claims.size
        for key in _held(claims):
            holders = self._holders[key]
            holders.discard(lsn)
            if not holders:
                del self._holders[key]

    def has_table(self, table: int) -> bool:
        """Return True if a quarantined transaction changes the table."""
        return ("table", table) in self._holders

    def has_name(self, name: str) -> bool:
        """Return True if a quarantined transaction changes this table, which the target does not have."""
        return ("name", name) in self._holders

    def has_foreign_key(self, key: Hashable) -> bool:
        """Return True if a quarantined transaction claims rows by this foreign key."""
        return ("parent key", key) in self._holders or ("child key", key) in self._holders

    def find(self, claims: Claims) -> set[Lsn]:
        """Return the quarantined transactions that a later transaction with these claims depends on."""
        holders: set[Lsn] = set()
        for key in _meeting(claims):
            holders |= self._holders.get(key, _NONE)
        return holders


_NONE: set[Lsn] = set()


def _held(claims: Claims) -> Iterable[tuple[str, Hashable]]:
    """The keys under which the claims are held."""
    for table in claims.tables:
        yield "table", table
    for name in claims.names:
        yield "name", name
    for table in claims.whole:
        yield "whole", table
    for row in claims.rows:
        yield "row", row
    for key in claims.parents_any:
        yield "any parent", key
    for key in claims.children_any:
        yield "any child", key
    for row in claims.parents:
        yield "parent", row
    for row in claims.children:
        yield "child", row
    for key in {row[0] for row in claims.parents} | claims.parents_any:
        yield "parent key", key
    for key in {row[0] for row in claims.children} | claims.children_any:
        yield "child key", key


def _meeting(claims: Claims) -> Iterable[tuple[str, Hashable]]:
    """The keys of held claims that these meet.

    A row that leaves a referencing table has entered it before, so `children_any` of a later transaction meets nothing.
    """
    for name in claims.names:
        yield "name", name
    for table in claims.whole:
        yield "table", table
    for table in claims.tables:
        yield "whole", table
    for row in claims.rows:
        yield "row", row
    for row in claims.children:
        yield "parent", row
        yield "any parent", row[0]
    for row in claims.parents:
        yield "child", row
        yield "any child", row[0]
    for key in claims.parents_any:
        yield "child key", key
