"""The claims of a transaction's changes, for apply/held_rows.py.

Values are compared in Python. That is exact for the types of _COMPARABLE, if the publisher has the same type: numbers,
strings with a deterministic collation, times, uuid, enums. An index of other types, of expressions, with a generated
column or a column that is not published, and an exclusion constraint have no values here: their table is claimed as a
whole. So is a table without a key. A partial index counts as one of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from subscriber.apply.held_rows import Claims, Row
from subscriber.apply.relation_map import LocalRelation
from subscriber.catalog.store.row_dependencies import ColumnType, ForeignKey, RowDependencies
from subscriber.change_stream.types.registry import Types
from subscriber.protocol.messages import Delete, Insert, OldPart, Relation, Update
from subscriber.protocol.tuple_data import BINARY, NULL, TEXT, TupleData

_INTEGERS = (20, 21, 23)
_STRINGS = (25, 1043)
_CHARACTER = 1042
# Types whose values Python compares as PostgreSQL does.
_COMPARABLE = (16, 17, 18, 19, *_INTEGERS, 26, *_STRINGS, 700, 701, _CHARACTER, 1082, 1083, 1114, 1184, 1700, 2950)
_FIRST_NORMAL_OID = 16384

Value = Hashable
_TYPES = Types()


@dataclass(frozen=True, slots=True)
class _Columns:
    """Columns of a constraint: positions in the published row, and the functions that read their values."""

    key: Hashable  # of the constraint
    positions: tuple[int, ...]
    readers: tuple[Callable[[int, bytes], Value], ...]
    nulls_are_equal: bool = False

    def row(self, status: bytes, values: Sequence[bytes | None]) -> Row | None:
        """Return the claim of a row. None: a value is NULL or not in the message."""
        cells: list[Value] = [self.key]
        for position, read in zip(self.positions, self.readers, strict=True):
            kind, value = status[position], values[position]
            if kind in (TEXT, BINARY) and value is not None:
                cells.append(read(kind, value))
            elif kind == NULL and self.nulls_are_equal:
                cells.append(None)
            else:
                return None
        return tuple(cells)


@dataclass(slots=True)
class ClaimedTable:
    """The claims of a published table's changes on rows of the target. `local`: None if the target lacks the table."""

    relation: Relation
    local: LocalRelation | None
    table: int = 0
    name: str = ""
    identity: tuple[int, ...] = ()  # positions of the key; empty: the table is claimed as a whole
    is_whole: bool = True
    uniques: list[_Columns] = field(default_factory=list)
    references: list[_Columns] = field(default_factory=list)  # foreign keys to other tables
    referenced: list[_Columns] = field(default_factory=list)  # foreign keys of other tables to this one
    references_any: list[Hashable] = field(default_factory=list)  # the same, whose values cannot be compared
    referenced_any: list[Hashable] = field(default_factory=list)

    @property
    def foreign_keys(self) -> list[Hashable]:
        """All foreign keys of the table, in both directions."""
        known = [foreign_key.key for foreign_key in (*self.references, *self.referenced)]
        return [*known, *self.references_any, *self.referenced_any]

    def touch(self, claims: Claims) -> None:
        """Claim that the table is changed."""
        if self.local is None:
            claims.names.add(self.name)
            return
        claims.tables.add(self.table)
        if self.is_whole:
            claims.whole.add(self.table)

    def truncate(self, claims: Claims) -> None:
        """Claim all rows of the table."""
        self.touch(claims)
        if self.local is not None:
            claims.whole.add(self.table)
            claims.parents_any.update(foreign_key.key for foreign_key in self.referenced)
            claims.parents_any.update(self.referenced_any)
            claims.children_any.update(foreign_key.key for foreign_key in self.references)
            claims.children_any.update(self.references_any)

    def change(self, claims: Claims, change: Insert | Update | Delete) -> None:
        """Claim the rows of one change."""
        self.touch(claims)
        if self.local is None:
            return
        rows = [row.split() for row in _rows(change)]
        for unique in self.uniques:
            claims.rows.update(row for row in (unique.row(*cells) for cells in rows) if row is not None)
        # The key of an UPDATE without an old row has not changed. Other columns of the old row are only sent with FULL.
        is_full = isinstance(change, Update | Delete) and change.old is not None and change.old_part is OldPart.ROW
        for foreign_key in self.references:
            claims.children.update(row for row in (foreign_key.row(*values) for values in rows) if row is not None)
            if not isinstance(change, Insert) and not is_full:
                claims.children_any.add(foreign_key.key)
        for key in self.references_any:
            claims.children_any.add(key)
        for foreign_key in self.referenced:
            self._claim_referenced(claims, foreign_key, change, rows, is_full=is_full)
        if self.referenced_any and not (isinstance(change, Update) and change.old is None):
            claims.parents_any.update(self.referenced_any)

    def _claim_referenced(
        self,
        claims: Claims,
        one: _Columns,
        change: Insert | Update | Delete,
        rows: list[tuple[bytes, list[bytes | None]]],
        *,
        is_full: bool,
    ) -> None:
        in_key = set(one.positions) <= set(self.identity)
        if isinstance(change, Update) and not is_full:
            if in_key and change.old is None:
                return  # the referenced values stay
            if not in_key:
                claims.parents_any.add(one.key)
                return
        claimed = [row for row in (one.row(*values) for values in rows) if row is not None]
        if isinstance(change, Update) and len(claimed) > 1 and claimed[0] == claimed[-1]:
            return
        claims.parents.update(claimed)
        if not isinstance(change, Insert) and not in_key and not is_full:
            claims.parents_any.add(one.key)


def _rows(change: Insert | Update | Delete) -> list[TupleData]:
    """The rows of a change that have values, the old one first. In an old key, other columns are NULL."""
    match change:
        case Insert():
            return [change.new]
        case Update():
            return [change.new] if change.old is None else [change.old, change.new]
        case Delete():
            return [change.old]


def claimed_table(
    relation: Relation, local: LocalRelation, search: tuple[int, ...] | None, found: RowDependencies
) -> ClaimedTable:
    """Build the description of a table that exists on the target.

    Args:
        relation: the published table.
        local: the target's table.
        search: positions of the columns by which the target finds a row. None: there is no key.
        found: the constraints of the target's table.
    """
    positions = {column.name: at for at, column in enumerate(relation.columns)}

    def columns(key: Hashable, names: Sequence[str], *, nulls: bool = False) -> _Columns | None:
        readers = []
        for name in names:
            at = positions.get(name)
            read = None if at is None else _reader(relation, at, found.types.get(name))
            if read is None:
                return None
            readers.append(read)
        return _Columns(key, tuple(positions[name] for name in names), tuple(readers), nulls)

    table = ClaimedTable(relation, local, found.root, found.label, search or ())
    names = {tuple(sorted(relation.columns[at].name for at in search or ())): False}
    names |= {unique.columns: unique.nulls_are_equal for unique in found.uniques if unique.columns is not None}
    names.pop((), None)
    uniques = [
        columns((found.root, "unique", *names_of_columns), names_of_columns, nulls=nulls)
        for names_of_columns, nulls in names.items()
    ]
    table.uniques = [unique for unique in uniques if unique is not None]
    table.is_whole = search is None or None in uniques or any(unique.columns is None for unique in found.uniques)
    for link in found.foreign_keys:
        _add_link(table, link, columns)
    return table


def _add_link(
    table: ClaimedTable, link: ForeignKey, columns: Callable[[Hashable, Sequence[str]], _Columns | None]
) -> None:
    key = (link.child, link.parent, link.child_columns, link.parent_columns)
    if link.child == table.table:
        known = columns(key, link.child_columns)
        table.references_any.append(key) if known is None else table.references.append(known)
    if link.parent == table.table:
        known = columns(key, link.parent_columns)
        table.referenced_any.append(key) if known is None else table.referenced.append(known)


def _reader(relation: Relation, at: int, local: ColumnType | None) -> Callable[[int, bytes], Value] | None:
    """Return the function that reads a value so that Python compares it as the target does. None: there is none."""
    remote = relation.columns[at]
    oid = remote.type_oid
    if local is None or not local.is_deterministic:
        return None
    if local.kind == "e":
        return (lambda _, value: value) if oid >= _FIRST_NORMAL_OID else None
    same = oid == local.oid or any(oid in family and local.oid in family for family in (_INTEGERS, _STRINGS))
    if not same or oid not in _COMPARABLE or (local.modifier != -1 and local.modifier != remote.type_modifier):
        return None
    if oid == _CHARACTER:
        return lambda _, value: value.rstrip(b" ")
    if oid in (*_STRINGS, 19):
        return lambda _, value: value

    known = _TYPES.get(oid)

    def read(kind: int, value: bytes) -> Value:
        try:
            decoded: Value = (known.binary if kind == BINARY else known.text)(value)
        except (ValueError, ArithmeticError):  # a value that Python does not have
            return value
        return "NaN" if decoded != decoded else decoded  # noqa: PLR0124

    return read
