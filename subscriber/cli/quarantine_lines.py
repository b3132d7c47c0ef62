"""The changes of transactions in quarantine, as lines with the numbers that an edit takes."""

from __future__ import annotations

from dataclasses import replace

from subscriber.catalog.commands.quarantine_edit import Change, numbered
from subscriber.change_stream.types.registry import Types
from subscriber.cli.change_lines import ChangeLines, as_text
from subscriber.display import json_text
from subscriber.protocol.messages import Delete, Insert, Message, Relation, Truncate, Update
from subscriber.protocol.tuple_data import BINARY, TEXT, TupleData

_TYPES = Types()


class NumberedLines:
    """Formats the changes of one transaction, with the numbers that an edit takes."""

    def __init__(self) -> None:
        self._lines = ChangeLines()
        self._relations: dict[int, Relation] = {}
        self._number = 0

    def of(self, messages: list[bytes], *, json: bool) -> list[str]:
        """Return a line for each change of some messages."""
        lines = []
        for message, _ in numbered(messages, self._relations):
            line = self._lines.line(_in_text(message, self._relations))
            if line is None:
                continue
            self._number += 1
            line.pop("xid")
            lines.append(json_text({"change": self._number, **line}) if json else f"{self._number:4}  {as_text(line)}")
        return lines


def _in_text(message: Message, relations: dict[int, Relation]) -> Message:
    """Return a change with its binary values as text."""
    if not isinstance(message, Change) or isinstance(message, Truncate):
        return message
    relation = relations[message.relid]
    match message:
        case Insert():
            return replace(message, new=_row_in_text(message.new, relation))
        case Delete():
            return replace(message, old=_row_in_text(message.old, relation))
        case Update():
            old = None if message.old is None else _row_in_text(message.old, relation)
            return replace(message, old=old, new=_row_in_text(message.new, relation))


def _row_in_text(row: TupleData, relation: Relation) -> TupleData:
    status, values = row.split()
    kinds = bytearray(status)
    for at, column in enumerate(relation.columns):
        value = values[at]
        if kinds[at] == BINARY and value is not None:
            kinds[at], values[at] = TEXT, _text(column.type_oid, value)
    return TupleData.join(bytes(kinds), values)


def _text(oid: int, value: bytes) -> bytes:
    try:
        decoded = _TYPES.get(oid).binary(value)
    except (ValueError, ArithmeticError):
        decoded = value
    return (rf"\x{decoded.hex()}" if isinstance(decoded, bytes) else str(decoded)).encode()
