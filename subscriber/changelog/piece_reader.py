"""The changes of a piece of the change log, one by one, or in parts whose values are gathered by column.

    read()         each change, decoded
    scan()         each change as it was received, for readers that decode few of them
    scan_rows()    rows in parts, for readers that need values by column

**Failure cases.** Segment sealed or removed while a piece is read: the piece is read to its end from the open
descriptor. A message that cannot be decoded is ChangeLogDamaged, which names its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from subscriber.changelog.files import damaged
from subscriber.changelog.pieces import Piece, open_segment
from subscriber.changelog.row_columns import FoundRows, GatheredRows, Transaction, find_rows, gather_columns
from subscriber.changelog.segment import TornBlock, split_messages
from subscriber.changelog.storage import Location
from subscriber.errors import ProtocolError
from subscriber.lsn import Lsn
from subscriber.protocol.decode import Decoder
from subscriber.protocol.messages import (
    Begin,
    Delete,
    Insert,
    LogicalMessage,
    Relation,
    Truncate,
    Type,
    Update,
)
from subscriber.timestamps import to_unix

BODY = 1024 * 1024  # bytes of messages whose rows a reader gathers together
_COMMIT = 0x43  # C


@dataclass(slots=True)
class LoggedChange:
    """One change of a committed transaction."""

    begin: Begin
    number: int  # position of the change in its transaction, from 0; a truncate has one for each of its tables
    relations: tuple[Relation, ...]  # one for a row, all tables of a TRUNCATE, none for a logical message
    message: Insert | Update | Delete | Truncate | LogicalMessage


Scanned: TypeAlias = tuple[Begin, int, tuple[Relation, ...], bytes]


@dataclass(frozen=True, slots=True)
class LoggedRows:
    """Rows of a piece, with their values in `body`."""

    directory: Location
    piece: Piece
    body: bytes
    found: FoundRows

    def payload(self, start: int) -> bytes:
        """Return the message that starts at an offset of the body."""
        return self.body[start : start + int.from_bytes(self.body[start - 4 : start], "big")]

    def gather(self, kind: int, width: int, sources: Sequence[int], fills: Sequence[bytes | None]) -> GatheredRows:
        """Return the values of the rows of a kind. Args are those of gather_columns().

        Raises:
            ChangeLogDamaged: a row is damaged.
        """
        with _readable(self.directory, self.piece):
            located, wanted = self.found, list(sources)
            rows = gather_columns(self.body, located.starts, located.kinds, kind, width, wanted, list(fills))
        return GatheredRows(*rows)


def read(
    directory: Location, piece: Piece, *, wanted: Callable[[Relation], bool] = lambda _: True
) -> Iterator[LoggedChange]:
    """Yield the changes of a piece's transactions in commit order.

    Args:
        directory: the directory of the log.
        piece: from ChangeLog.pieces().
        wanted: returns False to skip the row changes of a relation. Truncates and logical messages are not skipped.

    Raises:
        ChangeLogDamaged: the piece is damaged. The changes before the damage have been yielded.
        ChangeLogError: the piece cannot be read, or retention has removed its segment.
    """
    decode = Decoder().decode
    with _readable(directory, piece):
        for begin, number, relations, payload in scan(directory, piece, wanted=wanted):
            message = decode(payload)
            assert isinstance(message, Insert | Update | Delete | Truncate | LogicalMessage)
            yield LoggedChange(begin, number, relations, message)


def scan(
    directory: Location, piece: Piece, *, wanted: Callable[[Relation], bool] = lambda _: True
) -> Iterator[Scanned]:
    """Yield (begin, number, relations, payload) of each change, for readers that decode few changes.

    Row changes are not decoded and not checked. Consecutive changes of a relation have the same tuple object, until the
    log describes the relation again. Args and errors are those of read().
    """
    relations: dict[int, Relation] = {}
    rows: dict[int, tuple[Relation]] = {}  # the wanted relations, by OID
    decode = Decoder().decode
    begin, number = piece.transaction, piece.number
    with _readable(directory, piece):
        for payload in _messages(directory, piece):
            if payload[0] in b"IUD":
                number += 1
                if begin is not None:
                    relid = int.from_bytes(payload[1:5], "big")
                    relation = rows.get(relid)
                    if relation is not None:
                        yield begin, number - 1, relation, payload
                    elif relid not in relations:
                        raise ProtocolError(f"no relation with OID {relid} has been described")
                continue
            if payload[0] == _COMMIT:
                begin = None
                continue
            message = decode(payload)
            match message:
                case Begin():
                    begin = message if piece.has(message) else None
                    number = 0
                    if message.final_lsn >= piece.upto:
                        return
                case Relation():
                    relations[message.relid] = message
                    rows.pop(message.relid, None)
                    if wanted(message):
                        rows[message.relid] = (message,)
                case Truncate():
                    if begin is not None:
                        yield begin, number, tuple(relations[relid] for relid in message.relids), payload
                    number += len(message.relids)
                case LogicalMessage():
                    if begin is not None:
                        yield begin, number, (), payload
                    number += 1
                case Type():
                    pass


def scan_rows(
    directory: Location,
    piece: Piece,
    kind_of: Callable[[Relation, Lsn], int],
    *,
    message_kind: int | None = None,
) -> Iterator[LoggedRows]:
    """Yield the row changes and truncates of a piece in parts, for readers that need values by column.

    A truncate is a row of each of its tables, with the operation t, a number of its own and without values. A logical
    message is a row with the operation m. Row changes are not decoded and not checked before LoggedRows.gather().

    Args:
        directory: the directory of the log.
        piece: from ChangeLog.pieces().
        kind_of: returns a number for a relation, as of a commit; negative: its rows are not wanted. Called again when
            the log describes the relation again.
        message_kind: the number of logical messages. None: they are skipped.

    Raises:
        The errors of read().
    """
    search = _RowSearch(piece, kind_of, message_kind)
    with _readable(directory, piece):
        for body in _bodies(directory, piece):
            yield LoggedRows(directory, piece, body, search.rows(body))
            if search.is_over:
                return


class _RowSearch:
    """Finds the rows of a piece, across its bodies."""

    def __init__(self, piece: Piece, kind_of: Callable[[Relation, Lsn], int], message_kind: int | None) -> None:
        self._piece = piece
        self._kind_of = kind_of
        self._message_kind = message_kind
        self._relations: dict[int, Relation] = {}
        self._kinds: dict[int, int] = {}  # by the OIDs of described relations that had rows
        begin = piece.transaction
        self._transaction: Transaction | None = None
        if begin is not None:
            self._transaction = int(begin.final_lsn), to_unix(begin.commit_time), begin.xid, piece.number
        self._decode = Decoder().decode
        self.is_over = False

    def rows(self, body: bytes) -> FoundRows:
        """Return the rows of the next body."""
        located = FoundRows.none()
        position, piece = 0, self._piece
        while not self.is_over:
            position, self._transaction = find_rows(
                body, position, self._transaction, self._kinds, piece.after, piece.upto, located
            )
            if position == len(body):
                break
            start = position + 4
            end = start + int.from_bytes(body[position:start], "big")
            if start == end or end > len(body):
                raise ProtocolError("a message does not end where its block ends")
            if self._handle(start, body[start:end], located):
                position = end
        return located

    def _handle(self, start: int, payload: bytes, found: FoundRows) -> bool:
        """Handle a message that find_rows() does not. Returns False if it has to see the message again."""
        match self._decode(payload):
            case Insert(relid=relid) | Update(relid=relid) | Delete(relid=relid):
                self._kinds[relid] = self._kind(relid)
                return False
            case Begin():  # those of the range have been handled
                self.is_over = True
            case Relation() as relation:
                self._relations[relation.relid] = relation
                self._kinds.pop(relation.relid, None)
            case Truncate(relids=relids) if self._transaction is not None:
                for relid in relids:
                    if (kind := self._kind(relid)) >= 0:
                        found.add(-1, kind, b"t", self._transaction)
                    self._count()
            case LogicalMessage():
                if self._message_kind is not None and self._transaction is not None:
                    found.add(start, self._message_kind, b"m", self._transaction)
                self._count()
            case _:
                pass
        return True

    def _kind(self, relid: int) -> int:
        if relid not in self._relations:
            raise ProtocolError(f"no relation with OID {relid} has been described")
        assert self._transaction is not None
        return self._kind_of(self._relations[relid], Lsn(self._transaction[0]))

    def _count(self) -> None:
        if self._transaction is not None:
            self._transaction = (*self._transaction[:3], self._transaction[3] + 1)


def _bodies(directory: Location, piece: Piece) -> Iterator[bytes]:
    """Yield the messages of a piece, each after its length, in parts of about BODY bytes."""
    waiting: list[bytes] = []
    size = 0
    with open_segment(directory, piece.segment) as reader:
        for _, block in reader.blocks(piece.offset, piece.stop, is_cut=piece.is_cut):
            if waiting and size + len(block.body) > BODY:
                yield b"".join(waiting)
                waiting, size = [], 0
            waiting.append(block.body)
            size += len(block.body)
    if waiting:
        yield b"".join(waiting)


@contextmanager
def _readable(directory: Location, piece: Piece) -> Iterator[None]:
    try:
        yield
    except (ProtocolError, KeyError) as error:
        raise damaged(
            f'the change log in "{directory}" has a message that cannot be decoded',
            detail=f"It is in the segment that starts at {piece.segment}, between offsets {piece.offset} and "
            f"{piece.stop}: {error}.",
        ) from error


def _messages(directory: Location, piece: Piece) -> Iterator[bytes]:
    with open_segment(directory, piece.segment) as reader:
        for offset, block in reader.blocks(piece.offset, piece.stop, is_cut=piece.is_cut):
            try:
                yield from split_messages(block.body)
            except TornBlock:
                raise reader.damage(offset) from None
