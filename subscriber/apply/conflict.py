"""Conflicts between a change and what the target has: their names, and the words PostgreSQL 18 has for them.

Source: conflict.c and conflict.h.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from subscriber.apply.relation_map import Partition, RelationMapping
from subscriber.protocol.messages import Delete, Update
from subscriber.protocol.tuples import BINARY, NULL, UNCHANGED, TupleData

VALUE_BYTES = 64  # a value of a whole row is cut there in a message; one of a key is not

_PLAIN_NAME = re.compile("[a-z_][a-z0-9_]*")  # keywords apart, what quote_identifier() leaves as it is


class ConflictType(StrEnum):
    INSERT_EXISTS = "insert_exists"  # the row's key is there already
    UPDATE_ORIGIN_DIFFERS = "update_origin_differs"  # somebody else wrote the row last
    UPDATE_EXISTS = "update_exists"  # the new key is there already
    UPDATE_MISSING = "update_missing"  # there is no such row
    DELETE_ORIGIN_DIFFERS = "delete_origin_differs"
    DELETE_MISSING = "delete_missing"
    MULTIPLE_UNIQUE_CONFLICTS = "multiple_unique_conflicts"  # more than one unique index refuses


@dataclass(frozen=True, slots=True)
class Conflict:
    """`detail` says what happened; `rows` is the part of the detail that has values in it."""

    type: ConflictType
    relation: str  # schema.table on the target; a partition's own name
    detail: str
    rows: str

    @property
    def message(self) -> str:
        return f'conflict detected on relation "{self.relation}": conflict={self.type}'


def missing(mapping: RelationMapping, change: Update | Delete, leaf: Partition | None = None) -> Conflict:
    """The row that `change` is about is not there. `leaf` is the partition it belongs to, if any."""
    label = leaf.label if leaf else mapping.label
    columns = leaf.columns if leaf else tuple(column.name for column in mapping.local.columns)
    if isinstance(change, Update):
        what = ConflictType.UPDATE_MISSING
        detail = "Could not find the row to be updated."
        rows = f"Remote row {_local_row(mapping, columns, change.new)}; "
        rows += f"{_identity(mapping, columns, change.old or change.new)}."
    else:
        what = ConflictType.DELETE_MISSING
        detail = "Could not find the row to be deleted."
        identity = _identity(mapping, columns, change.old)
        rows = f"{identity[0].upper()}{identity[1:]}."
    return Conflict(what, label, detail, rows)


def _identity(mapping: RelationMapping, columns: Sequence[str], row: TupleData) -> str:
    if mapping.search is None:
        return f"replica identity full {_local_row(mapping, columns, row)}"
    status, values = row.split()
    names = ", ".join(_quoted(mapping.attributes[i].name) for i in mapping.search)
    shown = ", ".join(_shown(status[i], values[i]) for i in mapping.search)
    return f"replica identity ({names})=({shown})"


def _quoted(name: str) -> str:
    return name if _PLAIN_NAME.fullmatch(name) else '"' + name.replace('"', '""') + '"'


def _local_row(mapping: RelationMapping, columns: Sequence[str], row: TupleData) -> str:
    """All columns of the target's table or partition, in its order; what was not sent is null."""
    status, values = row.split()
    sent = {column.name: _shown(status[i], values[i], VALUE_BYTES) for i, column in enumerate(mapping.attributes)}
    return "(" + ", ".join(sent.get(name, "null") for name in columns) + ")"


def _shown(status: int, value: bytes | None, limit: int | None = None) -> str:
    if status in (NULL, UNCHANGED) or value is None:
        return "null"
    cut = value[:limit]
    text = "\\x" + cut.hex() if status == BINARY else cut.decode("utf-8", "ignore")
    return text + "..." if len(cut) < len(value) else text
