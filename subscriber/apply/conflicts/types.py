"""Conflicts between a change and what the target has: their names, and PostgreSQL's words for them.

Source: conflict.c and conflict.h.
"""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from subscriber.apply.batch.eligibility import FIRST_NORMAL_OID
from subscriber.apply.relation_map import Partition, RelationMapping
from subscriber.protocol.encodings import encode
from subscriber.protocol.messages import Delete, Insert, Update
from subscriber.protocol.tuple_data import BINARY, NULL, UNCHANGED, TupleData
from subscriber.quoting import identifier
from subscriber.server_version import Wording

VALUE_BYTES = 64  # a value of a whole row is cut there in a message; one of a key is not

_PLAIN_NAME = re.compile("[a-z_][a-z0-9_]*")  # keywords apart, what quote_identifier() leaves as it is


class ConflictType(StrEnum):
    INSERT_EXISTS = "insert_exists"  # the row's key is there already
    UPDATE_ORIGIN_DIFFERS = "update_origin_differs"  # another origin wrote the row last
    UPDATE_EXISTS = "update_exists"  # the new key is there already
    UPDATE_DELETED = "update_deleted"  # another origin deleted the row
    UPDATE_MISSING = "update_missing"  # there is no such row
    DELETE_ORIGIN_DIFFERS = "delete_origin_differs"
    DELETE_MISSING = "delete_missing"
    MULTIPLE_UNIQUE_CONFLICTS = "multiple_unique_conflicts"  # more than one unique index refuses


def is_ours(origin: str | None, ours: str) -> bool:
    """Return True if a row with replication origin `origin` was applied by the subscription of origin `ours`.

    The apply worker's origin is pg_<subid>, and those of its parallel workers are pg_<subid>_<n> with small numbers.
    The origin of a table's copy has the table's OID in place of n. It counts as another origin, as in PostgreSQL.
    """
    return origin is not None and _worker(origin) == _worker(ours)


def _worker(origin: str) -> str:
    head, _, number = origin.rpartition("_")
    return head if head.count("_") == 1 and number.isdigit() and int(number) < FIRST_NORMAL_OID else origin


@dataclass(frozen=True, slots=True)
class RowWriter:
    """Who wrote a row of the target last."""

    xid: str  # on the target
    time: str | None  # of the commit, as the server prints it; None: the target does not track them
    foreign: bool  # through a replication origin
    origin: str | None  # its name; None: it does not exist any more, or there was none
    committed: int | None = None  # microseconds since 2000-01-01 UTC; None as `time`, or too long ago to be known


@dataclass(frozen=True, slots=True)
class LocalRow:
    """A row of the target: the one that a change is about, or one that has the key the change would give to another."""

    index: str | None  # the unique index that refuses because of this row; None: it is the row to be changed
    key: tuple[str, ...]  # the index's columns
    writer: RowWriter
    values: dict[str, str | None]  # by column, in the table's order, as the server prints them


@dataclass(frozen=True, slots=True)
class Conflict:
    """A conflict: sentences for the log, and the values they refer to.

    `sentences` state the conflict; `rows`, one for each sentence, contain the values. The values of `key`, `remote`
    and `local_rows` are texts as a server prints them, None for NULL.
    """

    type: ConflictType
    relation: str  # schema.table on the target; a partition's own name
    sentences: tuple[str, ...]
    rows: tuple[str, ...]
    wording: Wording
    key: dict[str, str | None] = field(default_factory=dict)  # of the replica identity; empty: the whole row is
    # What the publisher sent of the new row, by column of the target; None: it is deleted. A large value that did
    # not change is not sent, and not in it.
    remote: dict[str, str | None] | None = None
    local_rows: tuple[LocalRow, ...] = ()  # none for a missing row, several for multiple_unique_conflicts
    deleted: RowWriter | None = None  # of update_deleted: the transaction that deleted the row
    commit_time: datetime | None = None  # on the publisher; set when a function is asked
    resolution: str | None = None  # the outcome and its policy; None: PostgreSQL's behavior

    @property
    def local(self) -> dict[str, str | None] | None:
        """The (first) row of the target; None if there is none."""
        return self.local_rows[0].values if self.local_rows else None

    @property
    def several_rows(self) -> bool:
        """Return True if different rows of the target conflict, and not one row by several of its keys."""
        return any(row.values != self.local for row in self.local_rows)

    @property
    def detail(self) -> str:
        """The conflict in a sentence, without any value."""
        return "\n".join([*self.sentences, *self._resolved])

    @property
    def exact_detail(self) -> str:
        """The DETAIL as PostgreSQL words it, values and all."""
        pairs = [
            _with_values(sentence, row, self.wording) for sentence, row in zip(self.sentences, self.rows, strict=True)
        ]
        return "\n".join([*pairs, *self._resolved])

    @property
    def _resolved(self) -> list[str]:
        return [] if self.resolution is None else [f"Resolution: {self.resolution}."]

    @property
    def message(self) -> str:
        """The message of the conflict's log entry, in PostgreSQL's words."""
        return f'conflict detected on relation "{self.relation}": conflict={self.type}'


def unique(
    mapping: RelationMapping,
    change: Insert | Update,
    relation: str,
    columns: Sequence[str],
    found: Sequence[LocalRow],
    wording: Wording,
) -> Conflict:
    """A unique index refuses `change`: `found` has a row for each index that does."""
    what = ConflictType.INSERT_EXISTS if isinstance(change, Insert) else ConflictType.UPDATE_EXISTS
    if len(found) > 1:
        what = ConflictType.MULTIPLE_UNIQUE_CONFLICTS
    remote = [f"remote row {_local_row(mapping, columns, change.new)}"]
    if isinstance(change, Update):
        remote.append(_identity(mapping, columns, change.old or change.new))
    sentences, rows = [], []
    if wording is Wording.POSTGRESQL_19:
        sentences.append("Could not apply remote change.")
        rows.append(_values(wording, *remote))
        remote = []
    for row in found:
        sentences.append(f'Key already exists in unique index "{row.index}", modified{_written(row.writer, "origin")}.')
        names = ", ".join(_quoted(name) for name in row.key)
        key = ", ".join(_text(mapping, row.values[name]) for name in row.key)
        existing = ", ".join(_text(mapping, value, VALUE_BYTES) for value in row.values.values())
        rows.append(_values(wording, f"key ({names})=({key})", _existing(existing, wording), *remote))
    identity = {} if isinstance(change, Insert) else _key(mapping, change.old or change.new)
    new = texts(mapping, change.new)
    return Conflict(what, relation, tuple(sentences), tuple(rows), wording, identity, new, tuple(found))


def differs(
    mapping: RelationMapping,
    change: Update | Delete,
    writer: RowWriter,
    values: Sequence[str | None],
    wording: Wording,
    leaf: Partition | None = None,
) -> Conflict:
    """Create the conflict for a row that another origin wrote last. The change is applied all the same.

    `values` are the target's row, in the order of its columns, as the server prints them.
    """
    label = leaf.label if leaf else mapping.label
    whole = tuple(column.name for column in mapping.local.columns)
    columns = leaf.columns if leaf else whole
    known = dict(zip(whole, values, strict=False))  # a column added just now is found out by the next check
    existing = ", ".join(_text(mapping, known.get(name), VALUE_BYTES) for name in columns)
    values_of = [_existing(existing, wording)]
    if isinstance(change, Update):
        what, doing = ConflictType.UPDATE_ORIGIN_DIFFERS, "Updating"
        values_of.append(f"remote row {_local_row(mapping, columns, change.new)}")
        values_of.append(_identity(mapping, columns, change.old or change.new))
    else:
        what, doing = ConflictType.DELETE_ORIGIN_DIFFERS, "Deleting"
        values_of.append(_identity(mapping, columns, change.old))
    sentence = f"{doing} the row that was modified{_written(writer, 'a different origin')}."
    key = _key(mapping, change.old or change.new if isinstance(change, Update) else change.old)
    row = LocalRow(None, (), writer, {name: known.get(name) for name in columns})
    return Conflict(
        what, label, (sentence,), (_values(wording, *values_of),), wording, key, _new(mapping, change), (row,)
    )


def _existing(row: str, wording: Wording) -> str:
    return f"local row ({row})" if wording is Wording.POSTGRESQL_19 else f"existing local row ({row})"


def _values(wording: Wording, *parts: str) -> str:
    """Join the parts of a row of values as the target's version does: a clause in 19, a sentence before."""
    if wording is Wording.POSTGRESQL_19:
        return ", ".join(parts)
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _with_values(sentence: str, values: str, wording: Wording) -> str:
    if not values:
        return sentence
    return f"{sentence[:-1]}: {values}." if wording is Wording.POSTGRESQL_19 else f"{sentence}\n{values}"


def _written(writer: RowWriter, origin: str) -> str:
    if writer.time is None:
        return f" in transaction {writer.xid}"
    if not writer.foreign:
        who = "locally"
    elif writer.origin is None:
        who = "by a non-existent origin"
    else:
        who = f'by {origin} "{writer.origin}"'
    return f" {who} in transaction {writer.xid} at {writer.time}"


def _text(mapping: RelationMapping, value: str | None, limit: int | None = None) -> str:
    return "null" if value is None else _cut(encode(value, mapping.codec), limit, mapping.codec)


def missing(
    mapping: RelationMapping,
    change: Update | Delete,
    wording: Wording,
    leaf: Partition | None = None,
    deleted: RowWriter | None = None,
) -> Conflict:
    """The row that `change` is about is not there.

    Args:
        mapping: the table.
        change: the change.
        wording: of the target's server.
        leaf: the partition that the row belongs to, if any.
        deleted: the transaction of another origin that deleted the row to be updated; None: it is unknown.
    """
    label = leaf.label if leaf else mapping.label
    columns = leaf.columns if leaf else tuple(column.name for column in mapping.local.columns)
    if isinstance(change, Update):
        what = ConflictType.UPDATE_MISSING
        detail = "Could not find the row to be updated."
        new = f"remote row {_local_row(mapping, columns, change.new)}"
        rows = _values(wording, new, _identity(mapping, columns, change.old or change.new))
    else:
        what = ConflictType.DELETE_MISSING
        detail = "Could not find the row to be deleted."
        rows = _values(wording, _identity(mapping, columns, change.old))
    key = _key(mapping, change.old or change.new if isinstance(change, Update) else change.old)
    if deleted is not None:
        what = ConflictType.UPDATE_DELETED
        cause = f"The row to be updated was deleted{_deleted(deleted)}."
        return Conflict(what, label, (detail, cause), (rows, ""), wording, key, _new(mapping, change), deleted=deleted)
    return Conflict(what, label, (detail,), (rows,), wording, key, _new(mapping, change))


def inserted_before_deletion(
    mapping: RelationMapping, change: Insert, wording: Wording, leaf: Partition | None, deleted: RowWriter
) -> Conflict:
    """The row that `change` inserts was deleted by another origin, at a later time. PostgreSQL has no such conflict."""
    label = leaf.label if leaf else mapping.label
    columns = leaf.columns if leaf else tuple(column.name for column in mapping.local.columns)
    sentences = ("Could not apply remote change.", f"A row with this key was deleted{_deleted(deleted)}.")
    rows = (_values(wording, f"remote row {_local_row(mapping, columns, change.new)}"), "")
    key, new = _key(mapping, change.new), texts(mapping, change.new)
    return Conflict(ConflictType.UPDATE_DELETED, label, sentences, rows, wording, key, new, deleted=deleted)


def _deleted(writer: RowWriter) -> str:
    return "" if writer.time is None else _written(writer, "a different origin")


def texts(mapping: RelationMapping, row: TupleData) -> dict[str, str | None]:
    r"""Return the values that were sent of a row, by column of the target. Binary values are hexadecimal, as \x…."""
    status, values = row.split()
    return {
        column.name: None if status[i] == NULL else _shown(mapping, status[i], values[i])
        for i, column in enumerate(mapping.attributes)
        if status[i] != UNCHANGED
    }


def _new(mapping: RelationMapping, change: Update | Delete) -> dict[str, str | None] | None:
    return texts(mapping, change.new) if isinstance(change, Update) else None


def _key(mapping: RelationMapping, row: TupleData) -> dict[str, str | None]:
    if mapping.search is None:
        return {}
    sent = texts(mapping, row)
    return {name: sent.get(name) for name in (mapping.attributes[i].name for i in mapping.search)}


def _identity(mapping: RelationMapping, columns: Sequence[str], row: TupleData) -> str:
    if mapping.search is None:
        return f"replica identity full {_local_row(mapping, columns, row)}"
    status, values = row.split()
    names = ", ".join(_quoted(mapping.attributes[i].name) for i in mapping.search)
    shown = ", ".join(_shown(mapping, status[i], values[i]) for i in mapping.search)
    return f"replica identity ({names})=({shown})"


def _quoted(name: str) -> str:
    return name if _PLAIN_NAME.fullmatch(name) else identifier(name)


def _local_row(mapping: RelationMapping, columns: Sequence[str], row: TupleData) -> str:
    """Print all columns of the target's table or partition, in its order. A column that was not sent prints as null."""
    status, values = row.split()
    sent = {
        column.name: _shown(mapping, status[i], values[i], VALUE_BYTES) for i, column in enumerate(mapping.attributes)
    }
    return "(" + ", ".join(sent.get(name, "null") for name in columns) + ")"


def _shown(mapping: RelationMapping, status: int, value: bytes | None, limit: int | None = None) -> str:
    if status in (NULL, UNCHANGED) or value is None:
        return "null"
    if status == BINARY:
        return "\\x" + value[:limit].hex() + ("..." if limit is not None and len(value) > limit else "")
    return _cut(value, limit, mapping.codec)


def _cut(value: bytes, limit: int | None, codec: str) -> str:
    r"""Decode a value. Bytes that are no text in the encoding become \x…; a character that is cut in two is dropped."""
    decoder = getincrementaldecoder(codec)("backslashreplace")
    if limit is None or len(value) <= limit:
        return decoder.decode(value, final=True)
    return decoder.decode(value[:limit]) + "..."
