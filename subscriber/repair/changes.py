"""The changes that make the rows of the target equal to the publisher's. Pure: nothing here talks to a server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from subscriber.apply.relation_map import RelationMapping
from subscriber.comparison.columns import ComparedColumn
from subscriber.comparison.result import Key
from subscriber.connection.settings import EXACT_TEXT
from subscriber.protocol.encodings import encode
from subscriber.protocol.messages import Delete, Insert, OldPart, Update
from subscriber.protocol.tuple_data import NULL, TEXT, TupleData
from subscriber.quoting import identifier, literal, qualified
from subscriber.sql_text import sql_text

# Statements set these before they read and write texts.
STATEMENT_SETTINGS = {
    name: EXACT_TEXT[name] for name in ("datestyle", "intervalstyle", "extra_float_digits", "timezone")
}

Row = tuple[str | None, ...]  # the text of each compared column
Rows = Mapping[Key, Counter[Row]]


@dataclass(slots=True)
class RowChanges:
    """Changes of one table, in the order in which they are applied: deletes, updates, inserts.

    `extra` are rows that the publisher does not have, and that are not deleted: they may belong to another
    subscription or to an application. `respelled` is the number of updates that change the text of a key.
    """

    deletes: list[Row] = field(default_factory=list)
    updates: list[tuple[Row, Row]] = field(default_factory=list)  # before, after
    inserts: list[Row] = field(default_factory=list)
    extra: list[Row] = field(default_factory=list)
    respelled: int = 0

    def __bool__(self) -> bool:
        return bool(self.deletes or self.updates or self.inserts)

    def add(self, later: RowChanges) -> None:
        """Add changes of other rows of the table."""
        self.deletes += later.deletes
        self.updates += later.updates
        self.inserts += later.inserts
        self.extra += later.extra
        self.respelled += later.respelled

    def without_updates(self) -> RowChanges:
        """Return changes with the same effect, in which each update is a delete and an insert.

        Rows can then exchange the values of a unique index.
        """
        return RowChanges(
            [*self.deletes, *(before for before, _ in self.updates)],
            [],
            [*(after for _, after in self.updates), *self.inserts],
        )


@dataclass(frozen=True, slots=True)
class KeyedRows:
    """The rows of one side that have some keys.

    Attributes:
        rows: the rows with the text of each key.
        equal: by key, the row whose key is equal for the server and has another text.
    """

    rows: Rows
    equal: Mapping[Key, Row]

    @classmethod
    def of(cls, rows: Sequence[tuple[int, Row]], keys: Sequence[Key], key: Sequence[int]) -> KeyedRows:
        """Return the rows by key.

        Args:
            rows: each row, with the place in `keys` of the key that has found it.
            keys: the texts of the keys.
            key: the indexes of the key's columns. Empty: the key is the whole row.
        """
        rows_by_key: dict[Key, Counter[Row]] = {}
        equal: dict[Key, Row] = {}
        for place, row in rows:
            text = tuple(row[index] for index in key) if key else row
            if text == tuple(keys[place]):
                rows_by_key.setdefault(text, Counter())[row] += 1
            else:
                equal[tuple(keys[place])] = row
        return cls(rows_by_key, equal)


def row_changes(source: KeyedRows, target: KeyedRows, key: Sequence[int], *, deletes: bool) -> RowChanges:
    """Return the changes that turn the rows of `target` into those of `source`.

    A row of the publisher whose key has another text on the target is updated there, if both keys are equal for the
    target. A unique index refuses an INSERT of it.

    Args:
        source: the publisher's rows.
        target: the target's rows.
        key: the indexes of the key's columns, which no two rows have in common. Empty: rows are a multiset.
        deletes: delete rows that the publisher does not have. False: they are extra.
    """
    changes = RowChanges()
    updated = set[Key]()
    for text, wanted in source.rows.items():
        present = target.rows.get(text, Counter())
        if not key or max(len(wanted), len(present)) > 1:
            changes.inserts += (wanted - present).elements()
            continue
        (after,) = wanted
        before = next(iter(present), target.equal.get(text))
        if before is None:
            changes.inserts.append(after)
        elif before != after:
            changes.updates.append((before, after))
            former = tuple(before[index] for index in key)
            changes.respelled += former != text
            updated.add(former)
    unknown = changes.deletes if deletes else changes.extra
    for text, present in target.rows.items():
        if text not in updated:
            unknown += (present - source.rows.get(text, Counter())).elements()
    return changes


def as_messages(changes: RowChanges, mapping: RelationMapping) -> list[Insert | Update | Delete]:
    """Return the changes as messages of a publisher, for RowApplier.change()."""
    relid, codec = mapping.remote.relid, mapping.codec

    def old(row: Row) -> tuple[OldPart, TupleData]:
        if mapping.search is None:
            return OldPart.ROW, _tuple(row, codec)
        key = frozenset(mapping.search)
        return OldPart.KEY, _tuple([value if n in key else None for n, value in enumerate(row)], codec)

    return [
        *(Delete(None, relid, *old(row)) for row in changes.deletes),
        *(Update(None, relid, None, None, _tuple(after, codec)) for _, after in changes.updates),
        *(Insert(None, relid, _tuple(row, codec)) for row in changes.inserts),
    ]


def _tuple(row: Sequence[str | None], codec: str) -> TupleData:
    status = bytes(NULL if value is None else TEXT for value in row)
    return TupleData.join(status, [None if value is None else encode(value, codec) for value in row])


def as_statements(changes: RowChanges, mapping: RelationMapping) -> list[str]:
    """Return the changes as SQL for psql, in an order in which unique values do not collide.

    Rows of a table without a key are found by the texts of their columns: equal values may have different texts, and
    some types have no operator for equality. The texts have the format of STATEMENT_SETTINGS.
    """
    if mapping.local.other_unique:
        changes = changes.without_updates()
    table, only = qualified(mapping.local.schema, mapping.local.name), mapping.local.only
    names = [identifier(column.name) for column in mapping.attributes]
    key = range(len(names)) if mapping.search is None else mapping.search

    def where(row: Row) -> str:
        def condition(number: int) -> str:
            value = row[number]
            if value is None:
                return f"{names[number]} IS NOT DISTINCT FROM NULL"
            if mapping.search is None:
                return f"{ComparedColumn(mapping.attributes[number].name).text} = {literal(value)}"
            return f"{names[number]} = {_typed(value, mapping.attributes[number].type_name)}"

        conditions = " AND ".join(map(condition, key))
        if mapping.search is not None:
            return conditions
        return f"ctid = (SELECT ctid FROM {only} WHERE {conditions or 'true'} LIMIT 1)"

    def one(value: str | None) -> str:
        return "NULL" if value is None else literal(value)

    def settable(number: int) -> bool:
        return not mapping.attributes[number].generated

    def update(before: Row, after: Row) -> str:
        changed = [n for n in range(len(names)) if before[n] != after[n] and settable(n)]
        return f"UPDATE {only} SET {', '.join(f'{names[n]} = {one(after[n])}' for n in changed)} WHERE {where(after)};"

    def insert(row: Row) -> str:
        numbers = [n for n in range(len(names)) if settable(n)]
        if not numbers:
            return f"INSERT INTO {table} DEFAULT VALUES;"
        overriding = " OVERRIDING SYSTEM VALUE" if any(c.identity_always for c in mapping.attributes) else ""
        columns, values = ", ".join(names[n] for n in numbers), ", ".join(one(row[n]) for n in numbers)
        return f"INSERT INTO {table} ({columns}){overriding} VALUES ({values});"

    statements = [
        *(f"DELETE FROM {only} WHERE {where(row)};" for row in changes.deletes),
        *(update(before, after) for before, after in changes.updates),
        *map(insert, changes.inserts),
    ]
    return list(map(sql_text, statements))


def _typed(value: str, type_name: str) -> str:
    return f"{literal(value)}::{type_name}"
