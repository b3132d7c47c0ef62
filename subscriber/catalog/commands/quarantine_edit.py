"""Changes of a quarantined transaction: shown with the names of their columns, edited and discarded.

Changes have numbers from 1 on, in the order of the transaction. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from subscriber.errors import StatementError
from subscriber.protocol.decode import Decoder
from subscriber.protocol.encode import encode
from subscriber.protocol.messages import Delete, Insert, Message, OldPart, Relation, Truncate, Update
from subscriber.protocol.tuple_data import NULL, TEXT, TupleData
from subscriber.spool.record_format import HEADER
from subscriber.sqlstate import INVALID_PARAMETER_VALUE, UNDEFINED_COLUMN, UNDEFINED_OBJECT

Change = Insert | Update | Delete | Truncate


@dataclass(frozen=True, slots=True)
class NumberedChange:
    """A change with its number. `relations` are the tables that it changes."""

    number: int
    change: Change
    relations: tuple[Relation, ...]


@dataclass(frozen=True, slots=True)
class EditedTransaction:
    """The messages after an edit, as records of the spool, and facts about them."""

    records: bytes
    relations: tuple[str, ...]
    changes: int


def numbered(messages: Iterable[bytes], known: dict[int, Relation]) -> Iterator[tuple[Message, NumberedChange | None]]:
    """Decode the messages of a transaction.

    Args:
        messages: the messages. Descriptions of tables give no change.
        known: the described tables by OID, which is updated.
    """
    decoder, number = Decoder(), 0
    for payload in messages:
        message = decoder.decode(payload)
        if isinstance(message, Relation):
            known[message.relid] = message
        if not isinstance(message, Change):
            yield message, None
            continue
        number += 1
        relids = message.relids if isinstance(message, Truncate) else (message.relid,)
        yield message, NumberedChange(number, message, tuple(known[relid] for relid in relids))


def edit_messages(messages: Sequence[bytes], change: int, column: str | None, value: str | None) -> EditedTransaction:
    """Edit one change.

    Args:
        messages: the messages of the transaction.
        change: the number of the change.
        column: the column whose new value is set. None: the change is discarded.
        value: the value as text. None: NULL.

    Raises:
        StatementError: there is no such change or column, or the change has no new row.
    """
    records = bytearray()
    relations: dict[str, None] = {}
    left, is_found = 0, False
    for message, numbered_change in numbered(messages, {}):
        edited = message
        if numbered_change is not None:
            if numbered_change.number == change:
                is_found = True
                if column is None:
                    continue
                edited = _with_value(numbered_change, column, value)
            left += 1
            relations |= dict.fromkeys(f"{relation.schema}.{relation.name}" for relation in numbered_change.relations)
        payload = encode(edited)
        records += HEADER.pack(len(payload), 0) + payload
    if not is_found:
        raise StatementError(
            f"change {change} does not exist", detail=f"The transaction has {left}.", sqlstate=UNDEFINED_OBJECT
        )
    return EditedTransaction(bytes(records), tuple(relations), left)


def _with_value(one: NumberedChange, column: str, value: str | None) -> Insert | Update:
    change = one.change
    if not isinstance(change, Insert | Update):
        raise StatementError(
            f"change {one.number} is a {change.message_type} and has no new row",
            hint="It can be discarded: … QUARANTINE EDIT (…, discard).",
            sqlstate=INVALID_PARAMETER_VALUE,
        )
    names = [described.name for described in one.relations[0].columns]
    if column not in names:
        raise StatementError(
            f'column "{column}" of change {one.number} does not exist',
            detail=f"Its columns are: {', '.join(names)}.",
            sqlstate=UNDEFINED_COLUMN,
        )
    status, values = change.new.split()
    kinds, at = bytearray(status), names.index(column)
    kinds[at] = NULL if value is None else TEXT
    values[at] = None if value is None else value.encode()
    new = TupleData.join(bytes(kinds), values)
    if isinstance(change, Update) and change.old is None and one.relations[0].columns[at].is_key:
        # The row is found by its former key from now on.
        return replace(change, new=new, old_part=OldPart.KEY, old=_key_of(one.relations[0], change.new))
    return replace(change, new=new)


def _key_of(relation: Relation, row: TupleData) -> TupleData:
    """Return the key of a row as the publisher sends it: other columns are NULL."""
    status, values = row.split()
    in_key = [column.is_key for column in relation.columns]
    kinds = bytes(kind if key else NULL for kind, key in zip(status, in_key, strict=True))
    return TupleData.join(kinds, [value if key else None for value, key in zip(values, in_key, strict=True)])
