"""The rows of a change as statement parameters: the publisher's values, text or binary, unchanged."""

from __future__ import annotations

from struct import Struct

from subscriber.apply.relation_map import RelationMapping
from subscriber.errors import ProtocolError
from subscriber.protocol import frontend
from subscriber.protocol.messages import Delete, Update
from subscriber.protocol.tuple_data import BINARY, TupleData
from subscriber.targets.postgres.sql.row_statements import Plan

Row = tuple[bytes, list[bytes | None]]  # what TupleData.split() gives
NO_ROW: Row = (b"", [])

_COUNT = Struct(">H").pack
_LENGTH = Struct(">i").pack


def bind(plan: Plan, new: Row, old: Row) -> tuple[bytes, frontend.Parameters]:
    """The formats and parameters of Pipeline.execute()."""
    rows = (new, old)
    number = _COUNT(len(plan.parameters))
    parts, formats = [number], [number]
    binary = large = False
    for row, index in plan.parameters:
        status, values = rows[row]
        value = values[index]
        if value is None:
            parts.append(frontend.NULL)
        else:
            size = len(value)
            if size > frontend.LARGE:
                large = True
            parts += (_LENGTH(size), value)
        if status[index] == BINARY:
            binary = True
            formats.append(b"\0\1")
        else:
            formats.append(b"\0\0")
    return b"".join(formats) if binary else frontend.ALL_TEXT, parts if large else b"".join(parts)


def searched(change: Update | Delete) -> TupleData:
    """The row by which the row to be changed is found: the old one if it was sent, else the new one."""
    if isinstance(change, Update):
        return change.old if change.old is not None else change.new
    return change.old


def require_columns(mapping: RelationMapping, status: bytes) -> None:
    """A row must have every column that the RELATION message announced."""
    if len(status) < len(mapping.attributes):
        raise ProtocolError(
            f"logical replication column {len(status)} not found in tuple: only {len(status)} column(s) received"
        )
