"""The messages of pgoutput, protocol versions 1 to 4.

Field names are PostgreSQL's (include/replication/logicalproto.h). Everywhere:

- positions are `Lsn`; times are microseconds since 2000-01-01 00:00 UTC;
- `relid` is the table's OID on the publisher and means nothing on the target;
- `xid` of a change is the (sub)transaction that made it inside a stream block, and None outside of one,
  where the bytes have no such field;
- strings are taken for UTF-8, with surrogate escapes for bytes that are not; see Relation.recoded().

`message_type` is the name PostgreSQL prints for the message; `letter` is its first byte.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum, StrEnum
from typing import ClassVar

from subscriber.errors import ProtocolError
from subscriber.lsn import Lsn
from subscriber.protocol.encodings import UTF8, decode, encode
from subscriber.protocol.tuple_data import TupleData
from subscriber.sqlstate import DATETIME_FIELD_OVERFLOW
from subscriber.timestamps import to_datetime


def moment(microseconds: int) -> datetime:
    """Return a message's time. Raises ProtocolError for a year that Python does not have, from 10000 on."""
    try:
        return to_datetime(microseconds)
    except OverflowError:
        raise ProtocolError("timestamp out of range", sqlstate=DATETIME_FIELD_OVERFLOW) from None


class OldPart(Enum):
    """The columns of the old row that were sent. The values are the bytes of the message."""

    KEY = 0x4B  # K: the replica identity's columns, the others are n
    ROW = 0x4F  # O: every column; REPLICA IDENTITY FULL


class ReplicaIdentity(StrEnum):
    """`pg_class.relreplident`; the values are the catalog's letters."""

    DEFAULT = "d"
    NOTHING = "n"
    FULL = "f"
    INDEX = "i"


# A stream has millions of Begin, Commit and row messages: they have slots, but are not frozen (see TupleData).
@dataclass(slots=True)
class Begin:
    """A transaction starts; it is sent whole, after its commit."""

    message_type: ClassVar = "BEGIN"
    letter: ClassVar = b"B"

    final_lsn: Lsn  # of the commit record, the same as Commit.commit_lsn; never 0
    commit_time: int
    xid: int


@dataclass(slots=True)
class Commit:
    """The transaction that Begin opened ends."""

    message_type: ClassVar = "COMMIT"
    letter: ClassVar = b"C"

    commit_lsn: Lsn  # of the commit record
    end_lsn: Lsn  # end of the commit record: the position to confirm to the publisher
    commit_time: int


@dataclass(frozen=True, slots=True)
class Origin:
    """The transaction was itself replicated to the publisher, from the origin `name`."""

    message_type: ClassVar = "ORIGIN"
    letter: ClassVar = b"O"

    origin_lsn: Lsn  # on that origin; 0 in a stream block, where the commit is not known yet
    name: str


@dataclass(frozen=True, slots=True)
class RelationColumn:
    """One published column."""

    is_key: bool  # part of the replica identity; with FULL every column is
    name: str
    type_oid: int  # on the publisher
    type_modifier: int  # -1: none


@dataclass(frozen=True, slots=True)
class Relation:
    """The shape of a table; holds until the next Relation with the same `relid` replaces it."""

    message_type: ClassVar = "RELATION"
    letter: ClassVar = b"R"

    xid: int | None
    relid: int
    namespace: str  # as sent: empty means pg_catalog
    name: str
    replica_identity: ReplicaIdentity
    columns: tuple[RelationColumn, ...]  # in the order of every row of this table

    def recoded(self, codec: str) -> Relation:
        """The same with its names decoded by `codec`, that of the session, instead of as UTF-8."""
        if codec == UTF8:
            return self

        def name(text: str) -> str:
            return decode(encode(text), codec)

        columns = tuple(replace(column, name=name(column.name)) for column in self.columns)
        return replace(self, namespace=name(self.namespace), name=name(self.name), columns=columns)

    @property
    def schema(self) -> str:
        """The schema's real name."""
        return self.namespace or "pg_catalog"


@dataclass(frozen=True, slots=True)
class Type:
    """The name of a column type that is not built in; for a domain that of its base type."""

    message_type: ClassVar = "TYPE"
    letter: ClassVar = b"Y"

    xid: int | None
    type_oid: int
    namespace: str  # as sent: empty means pg_catalog
    name: str

    @property
    def schema(self) -> str:
        """The schema's real name."""
        return self.namespace or "pg_catalog"


@dataclass(slots=True)
class Insert:
    """A new row."""

    message_type: ClassVar = "INSERT"
    letter: ClassVar = b"I"

    xid: int | None
    relid: int
    new: TupleData


@dataclass(slots=True)
class Update:
    """A row before (as much as the replica identity gives) and after."""

    message_type: ClassVar = "UPDATE"
    letter: ClassVar = b"U"

    xid: int | None
    relid: int
    old_part: OldPart | None  # None: the key did not change, find the row by `new`
    old: TupleData | None  # None exactly when `old_part` is
    new: TupleData


@dataclass(slots=True)
class Delete:
    """A deleted row: its key columns, or all columns under REPLICA IDENTITY FULL."""

    message_type: ClassVar = "DELETE"
    letter: ClassVar = b"D"

    xid: int | None
    relid: int
    old_part: OldPart
    old: TupleData


@dataclass(frozen=True, slots=True)
class Truncate:
    """Tables emptied by one statement; foreign keys between them need one statement again."""

    message_type: ClassVar = "TRUNCATE"
    letter: ClassVar = b"T"

    xid: int | None
    cascade: bool
    restart_identity: bool
    relids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LogicalMessage:
    """A message of pg_logical_emit_message(). It is sent only with the option `messages`."""

    message_type: ClassVar = "MESSAGE"
    letter: ClassVar = b"M"

    xid: int | None
    transactional: bool  # False: the message belongs to no transaction, and is sent again after a reconnect
    lsn: Lsn
    prefix: str
    content: bytes


@dataclass(frozen=True, slots=True)
class StreamStart:
    """A block of changes of a transaction that has not ended yet begins."""

    message_type: ClassVar = "STREAM START"
    letter: ClassVar = b"S"

    xid: int  # of the top-level transaction
    first_segment: bool  # True: the first block of this transaction; discard changes that are kept from before


@dataclass(frozen=True, slots=True)
class StreamStop:
    """The block ends."""

    message_type: ClassVar = "STREAM STOP"
    letter: ClassVar = b"E"


@dataclass(frozen=True, slots=True)
class StreamCommit:
    """A streamed transaction committed: apply its blocks."""

    message_type: ClassVar = "STREAM COMMIT"
    letter: ClassVar = b"c"

    xid: int
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_time: int


@dataclass(frozen=True, slots=True)
class StreamAbort:
    """A streamed transaction or one of its subtransactions was rolled back."""

    message_type: ClassVar = "STREAM ABORT"
    letter: ClassVar = b"A"

    xid: int  # of the top-level transaction
    subxid: int  # equal to `xid` if the whole transaction is rolled back; may be an xid without changes
    abort_lsn: Lsn | None  # None, both, unless streaming = parallel was asked for
    abort_time: int | None


@dataclass(frozen=True, slots=True)
class BeginPrepare:
    """A transaction starts that ends with Prepare."""

    message_type: ClassVar = "BEGIN PREPARE"
    letter: ClassVar = b"b"

    prepare_lsn: Lsn
    end_lsn: Lsn
    prepare_time: int
    xid: int
    gid: str  # on the publisher, where two subscriptions can get the same one


@dataclass(frozen=True, slots=True)
class Prepare:
    """PREPARE TRANSACTION of what BeginPrepare opened."""

    message_type: ClassVar = "PREPARE"
    letter: ClassVar = b"P"

    prepare_lsn: Lsn
    end_lsn: Lsn
    prepare_time: int
    xid: int  # never 0
    gid: str


@dataclass(frozen=True, slots=True)
class CommitPrepared:
    """COMMIT PREPARED; sent alone, outside any other transaction."""

    message_type: ClassVar = "COMMIT PREPARED"
    letter: ClassVar = b"K"

    commit_lsn: Lsn
    end_lsn: Lsn
    commit_time: int
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class RollbackPrepared:
    """ROLLBACK PREPARED; the transaction is the one whose Prepare had these two `prepare_` values."""

    message_type: ClassVar = "ROLLBACK PREPARED"
    letter: ClassVar = b"r"

    prepare_end_lsn: Lsn
    rollback_end_lsn: Lsn
    prepare_time: int
    rollback_time: int
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class StreamPrepare:
    """A streamed transaction was prepared: apply its blocks and prepare."""

    message_type: ClassVar = "STREAM PREPARE"
    letter: ClassVar = b"p"

    prepare_lsn: Lsn
    end_lsn: Lsn
    prepare_time: int
    xid: int  # never 0
    gid: str


Message = (
    Begin
    | Commit
    | Origin
    | Relation
    | Type
    | Insert
    | Update
    | Delete
    | Truncate
    | LogicalMessage
    | StreamStart
    | StreamStop
    | StreamCommit
    | StreamAbort
    | BeginPrepare
    | Prepare
    | CommitPrepared
    | RollbackPrepared
    | StreamPrepare
)
