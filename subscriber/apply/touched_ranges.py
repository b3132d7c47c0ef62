"""TouchedRanges: the ranges of keys that the changes of a stream have touched since the last comparison.

**Purpose.** `subscriber verify --since LAST` reads only these ranges. The apply worker records each range once, in the
transaction that changes its rows.

**Invariants.**

- A recorded range contains the keys of all rows that the stream has changed, before and after the change. It may
  contain other keys.
- A range is known here only if a transaction records it that commits before every transaction that relies on it.
- A table has at most `limit` known ranges. If more are touched, ranges of an integer key double their width, and any
  other key is replaced by the whole table.

A key of one integer column has ranges of 2 ** width values. Any other key is a range of its own.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from subscriber.apply.relation_map import RelationMapping
from subscriber.protocol.messages import Delete, Insert, Update
from subscriber.protocol.tuple_data import BINARY, TEXT, TupleData

# Widths that stand for something else than a power of two.
SINGLE_KEYS = -1
WHOLE_TABLE = -2

_INTEGERS = frozenset((20, 21, 23))  # OIDs of types, which are the same on all servers
_TEXTS = frozenset((19, 25, 1042, 1043))  # have the same bytes in text and binary
_UUID = 2950
_LENGTH = 4  # bytes before a value in the binary format

Range = int | tuple[str, ...]  # a number, or the bytes of each key column's text in hexadecimal


class _NotRepresentable(Exception):
    """A key cannot be recorded, so the whole table is."""


@dataclass(frozen=True, slots=True)
class TouchedTable:
    """Ranges of one table, as they are stored.

    Attributes:
        relid: the OID on the target.
        key: the columns of the key on the target.
        width: the width of the ranges as a power of two, SINGLE_KEYS or WHOLE_TABLE.
        ranges: the first value of a range divided by its width, or keys. Empty for WHOLE_TABLE.
    """

    relid: int
    key: tuple[str, ...]
    width: int
    ranges: set[Range] = field(default_factory=set)

    def as_json(self) -> dict[str, Any]:
        return {"relid": self.relid, "key": self.key, "width": self.width, "ranges": list(self.ranges)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TouchedTable:
        """Return the ranges that as_json() has described."""
        ranges = {tuple(cell) if isinstance(cell, list) else cell for cell in value["ranges"]}
        return cls(value["relid"], tuple(value["key"]), value["width"], ranges)


@dataclass(slots=True)
class _KnownRanges:
    """The known ranges of one table."""

    key: tuple[str, ...]
    width: int
    ranges: set[Range] = field(default_factory=set)


class TouchedRanges:
    """The ranges that are recorded, of all tables of a worker."""

    def __init__(self, limit: int) -> None:
        """Create an empty set. `limit`: the number of ranges that are known of a table."""
        self._limit = limit
        self._tables: dict[int, _KnownRanges] = {}

    def empty(self) -> TouchedRanges:
        """Return another set with the same limit, for a transaction that others do not wait for."""
        return TouchedRanges(self._limit)

    def load(self, stored: Iterable[TouchedTable]) -> None:
        """Replace the known ranges by stored ones. Only those with the largest width of a table are known."""
        self._tables.clear()
        for table in stored:
            known = self._tables.get(table.relid)
            if known is None or known.key != table.key or _is_wider(table.width, known.width):
                self._tables[table.relid] = _KnownRanges(table.key, table.width, set(table.ranges))
            elif known.width == table.width:
                known.ranges.update(table.ranges)

    def forget(self) -> None:
        """Forget the known ranges, because a transaction that records some was rolled back. Widths remain."""
        for known in self._tables.values():
            known.ranges.clear()
        self._tables = {relid: known for relid, known in self._tables.items() if known.width != WHOLE_TABLE}

    def touch(self, mapping: RelationMapping, keys: Collection[Any], form: int) -> TouchedTable | None:
        """Add the ranges of keys.

        Args:
            mapping: the table.
            keys: as in apply/batch/table_batch.py.
            form: TEXT or BINARY.

        Returns:
            The ranges that have to be recorded. None: all are known.
        """
        try:
            return self._add(mapping, keys, form)
        except _NotRepresentable:
            return self.touch_all(mapping)

    def touch_all(self, mapping: RelationMapping) -> TouchedTable | None:
        """Add a whole table. Returns None if it is known."""
        known = self._known(mapping)
        if known.width == WHOLE_TABLE and known.ranges:
            return None
        known.width, known.ranges = WHOLE_TABLE, {0}
        return TouchedTable(mapping.local.oid, known.key, WHOLE_TABLE)

    def touch_row(self, mapping: RelationMapping, change: Insert | Update | Delete) -> TouchedTable | None:
        """Add the ranges of one change. Returns those that have to be recorded. None: all are known."""
        widest = None
        rows = [row for row in (getattr(change, "old", None), getattr(change, "new", None)) if row is not None]
        for row in rows:
            key = _key_of_row(mapping, row)
            if key is None:
                return self.touch_all(mapping)
            more = self.touch(mapping, *key)
            if widest is not None and more is not None and more.width == widest.width:
                more = TouchedTable(more.relid, more.key, more.width, {*widest.ranges, *more.ranges})
            widest = more or widest
        return widest

    def _known(self, mapping: RelationMapping) -> _KnownRanges:
        """Return the known ranges of a table. Another key than before begins with none."""
        names = tuple(mapping.attributes[index].name for index in mapping.search or ())
        known = self._tables.get(mapping.local.oid)
        if known is None or known.key != names:
            types = [mapping.remote.columns[index].type_oid for index in mapping.search or ()]
            is_integer = len(types) == 1 and types[0] in _INTEGERS
            known = self._tables[mapping.local.oid] = _KnownRanges(names, 0 if is_integer else SINGLE_KEYS)
        return known

    def _add(self, mapping: RelationMapping, keys: Collection[Any], form: int) -> TouchedTable | None:
        known = self._known(mapping)
        if known.width == WHOLE_TABLE and known.ranges:
            return None
        if mapping.search is None or known.width == WHOLE_TABLE:
            raise _NotRepresentable
        if known.width == SINGLE_KEYS:
            touched: set[Range] = {_single(mapping, key, form) for key in keys}
        else:
            touched = {value >> known.width for value in _integers(keys, form)}
        new = touched - known.ranges
        if not new:
            return None
        known.ranges |= new
        if len(known.ranges) <= self._limit:
            return TouchedTable(mapping.local.oid, known.key, known.width, new)
        if known.width == SINGLE_KEYS:
            raise _NotRepresentable
        wider: set[int] = {value for value in known.ranges if isinstance(value, int)}
        while len(wider) > self._limit // 2:
            known.width += 1
            wider = {value >> 1 for value in wider}
        known.ranges = {*wider}
        # All of them have to be recorded: of each only a part was.
        return TouchedTable(mapping.local.oid, known.key, known.width, {*wider})


class RangesToRecord:
    """The ranges that a transaction has to record at its end."""

    def __init__(self) -> None:
        self._tables: dict[int, TouchedTable] = {}  # by OID on the target
        self._others: list[TouchedTable] = []

    def add(self, touched: TouchedTable) -> None:
        """Add ranges of one TouchedRanges. Wider ones contain all those of the table that were added since keep()."""
        present = self._tables.get(touched.relid)
        if present is not None and present.key != touched.key:
            self._others.append(present)
        elif present is not None and present.width == touched.width:
            present.ranges.update(touched.ranges)
            return
        self._tables[touched.relid] = touched

    def keep(self) -> None:
        """Keep all ranges, because TouchedRanges.forget() is called: later ranges do not contain them."""
        self._others += self._tables.values()
        self._tables.clear()

    def clear(self) -> None:
        """Remove all ranges."""
        self._tables.clear()
        self._others.clear()

    def take(self) -> list[TouchedTable]:
        """Remove and return all ranges."""
        taken = [*self._others, *self._tables.values()]
        self.clear()
        return taken


def _is_wider(width: int, than: int) -> bool:
    return than != WHOLE_TABLE and (width == WHOLE_TABLE or width > than)


def _integers(keys: Iterable[bytes], form: int) -> Iterable[int]:
    try:
        if form == BINARY:
            return [int.from_bytes(key[_LENGTH:], "big", signed=True) for key in keys]
        return [int(key) for key in keys]
    except ValueError as error:
        raise _NotRepresentable from error


def _single(mapping: RelationMapping, key: bytes | Sequence[bytes], form: int) -> tuple[str, ...]:
    """Return the text of each column, in the encoding of the target."""
    search = mapping.search or ()
    values = [key] if isinstance(key, bytes) else key
    types = [mapping.remote.columns[index].type_oid for index in search]
    return tuple(_in_hex(value, type_oid, form) for value, type_oid in zip(values, types, strict=True))


def _in_hex(value: bytes, type_oid: int, form: int) -> str:
    if form != BINARY:
        return value.hex()
    value = value[_LENGTH:]
    if type_oid in _INTEGERS:
        return (b"%d" % int.from_bytes(value, "big", signed=True)).hex()
    if type_oid == _UUID:
        return str(UUID(bytes=value)).encode().hex()
    if type_oid not in _TEXTS:
        raise _NotRepresentable
    return value.hex()


def _key_of_row(mapping: RelationMapping, row: TupleData) -> tuple[list[Any], int] | None:
    """Return the key of a row and its format, as in a batch. None: it has none, or a column was not sent."""
    if mapping.search is None:
        return None
    statuses, values = row.split()
    form = BINARY if BINARY in [statuses[index] for index in mapping.search] else TEXT
    cells = []
    for index in mapping.search:
        value = values[index]
        if statuses[index] != form or value is None:
            return None
        cells.append(value if form == TEXT else len(value).to_bytes(_LENGTH, "big") + value)
    return [cells[0] if len(cells) == 1 else tuple(cells)], form


def as_parameter(tables: Iterable[TouchedTable]) -> str:
    """Return ranges as the JSON that is stored."""
    return json.dumps([table.as_json() for table in tables])
