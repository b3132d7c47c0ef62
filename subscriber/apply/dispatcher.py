"""State machine of the stream: the messages that are legal in each state, and the action for each message.

    state  message                       next   what to do
    idle   BEGIN, BEGIN PREPARE          txn    Open
    txn    ORIGIN (first only)           txn    –
    txn    RELATION                      txn    – (the relation map is replaced)
    txn    TYPE, MESSAGE                 txn    –
    txn    INSERT UPDATE DELETE          txn    Change
    txn    TRUNCATE                      txn    Empty
    txn    COMMIT, PREPARE               idle   Close
    idle   COMMIT PREPARED, ROLLBACK P.  idle   Resolve
    idle   STREAM START                  block  OpenBlock
    block  ORIGIN (first only)           block  –
    block  the messages with an xid      block  – (spooled without decoding: must_spool())
    block  STREAM STOP                   idle   CloseBlock
    idle   STREAM ABORT                  idle   Abort
    idle   STREAM COMMIT, STREAM P.      idle   Replay
    idle   MESSAGE                       idle   – (not transactional)

Any other message is a ProtocolError: the order of the stream is broken, and the worker restarts from its durable
position. The dispatcher does no I/O and does not depend on a target: it returns actions as values.

The spooled changes of a streamed transaction are read by a dispatcher of their own, which replaying() creates. It is
within that transaction from the start, and has the relation map of that transaction alone. This is sufficient, because
the publisher describes every table again in each streamed transaction.

Source: apply_dispatch() in worker.c and the apply_handle_* functions; proto.c for the legal messages.
"""

from __future__ import annotations

from dataclasses import dataclass

from subscriber.apply.relation_map import RelationMap
from subscriber.apply.transaction import RemoteTransaction
from subscriber.errors import ProtocolError
from subscriber.lsn import Lsn
from subscriber.protocol.encodings import UTF8
from subscriber.protocol.messages import (
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    Origin,
    Prepare,
    Relation,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    Type,
    Update,
)


@dataclass(slots=True)
class BeginTransaction:
    """A transaction begins; nothing need be done on the target before its first change."""

    transaction: RemoteTransaction


@dataclass(slots=True)
class ApplyChange:
    """One row changed."""

    transaction: RemoteTransaction
    message: Insert | Update | Delete


@dataclass(slots=True)
class TruncateTables:
    """Tables were truncated, together."""

    transaction: RemoteTransaction
    message: Truncate


@dataclass(slots=True)
class EndTransaction:
    """The transaction is complete: commit it, or prepare it if it has a gid; `end_lsn` is the new progress."""

    transaction: RemoteTransaction
    end_lsn: Lsn


@dataclass(slots=True)
class FinishPrepared:
    """A transaction that was prepared is committed or rolled back."""

    message: CommitPrepared | RollbackPrepared


@dataclass(slots=True)
class BeginStreamBlock:
    """Changes of an incomplete transaction follow, to be spooled. `first`: this is its first block."""

    xid: int
    first: bool


@dataclass(slots=True)
class EndStreamBlock:
    """They end for now."""

    xid: int


@dataclass(slots=True)
class AbortStreamed:
    """All that was kept of the transaction is void, or of one of its subtransactions."""

    message: StreamAbort


@dataclass(slots=True)
class ApplySpooled:
    """Apply the spooled changes of the transaction, then close it as Close describes."""

    transaction: RemoteTransaction
    end_lsn: Lsn


Action = (
    BeginTransaction
    | ApplyChange
    | TruncateTables
    | EndTransaction
    | FinishPrepared
    | BeginStreamBlock
    | EndStreamBlock
    | AbortStreamed
    | ApplySpooled
    | None
)

_KEPT = frozenset(b"RYIUDTM")


class Dispatcher:
    """Holds the state of one stream.

    `transaction` is the transaction being received. `block` is the xid of the streamed transaction whose block is
    open. Both are None between transactions.
    """

    def __init__(self, known: RelationMap | None = None, codec: str = UTF8) -> None:
        """`known` has mappings that may be used again; `codec` is that of the stream's texts."""
        self.relations = RelationMap(known)
        self._codec = codec
        self.transaction: RemoteTransaction | None = None
        self.block: int | None = None
        self._begun = False  # the transaction has begun and has no messages yet

    @classmethod
    def replaying(
        cls, transaction: RemoteTransaction, known: RelationMap | None = None, codec: str = UTF8
    ) -> Dispatcher:
        """Create a dispatcher for the spooled changes of a streamed transaction, for one use."""
        dispatcher = cls(known, codec)
        dispatcher.transaction = transaction
        return dispatcher

    @property
    def idle(self) -> bool:
        """Whether the stream stands between two transactions."""
        return self.transaction is None and self.block is None

    def must_spool(self, letter: int) -> bool:
        """Return True if a message that begins with `letter` belongs to an open block and must not be decoded now."""
        return self.block is not None and letter in _KEPT

    def receive(self, message: Message) -> Action:
        """Return the action for `message`, or None if it needs none.

        Raises:
            ProtocolError: the message is not legal in this state.
        """
        begun, self._begun = self._begun, False
        transaction = self.transaction
        if transaction is not None:
            return self._inside(transaction, message, begun)
        if self.block is not None:
            if isinstance(message, StreamStop):
                xid, self.block = self.block, None
                return EndStreamBlock(xid)
            if isinstance(message, Origin) and begun:
                return None
            raise _out_of_order(message, f"in a block of streamed transaction {self.block}")
        return self._between(message)

    def _inside(self, transaction: RemoteTransaction, message: Message, begun: bool) -> Action:
        match message:
            case Insert() | Update() | Delete():
                return ApplyChange(transaction, message)
            case Commit() if transaction.gid is None:
                return self._close(transaction, message.commit_lsn, message.end_lsn, "commit")
            case Prepare() if transaction.gid is not None:
                return self._close(transaction, message.prepare_lsn, message.end_lsn, "prepare")
            case Relation():
                self.relations.update(message.recoded(self._codec))
            case Truncate():
                return TruncateTables(transaction, message)
            case Type() | LogicalMessage():
                pass
            case Origin() if begun:
                pass
            case _:
                raise _out_of_order(message, f"in transaction {transaction.xid}")
        return None

    def _between(self, message: Message) -> Action:
        match message:
            case Begin():
                return self._open(RemoteTransaction(message.xid, message.final_lsn, message.commit_time))
            case BeginPrepare():
                return self._open(
                    RemoteTransaction(message.xid, message.prepare_lsn, message.prepare_time, message.gid)
                )
            case CommitPrepared() | RollbackPrepared():
                return FinishPrepared(message)
            case StreamStart():
                self._begun = message.first_segment
                self.block = message.xid
                return BeginStreamBlock(message.xid, message.first_segment)
            case StreamAbort():
                return AbortStreamed(message)
            case StreamCommit():
                committed = RemoteTransaction(message.xid, message.commit_lsn, message.commit_time)
                return ApplySpooled(committed, message.end_lsn)
            case StreamPrepare():
                prepared = RemoteTransaction(message.xid, message.prepare_lsn, message.prepare_time, message.gid)
                return ApplySpooled(prepared, message.end_lsn)
            case LogicalMessage() if not message.transactional:
                return None
        raise _out_of_order(message, "outside a transaction")

    def _open(self, transaction: RemoteTransaction) -> BeginTransaction:
        self._begun = True
        self.transaction = transaction
        return BeginTransaction(transaction)

    def _close(self, transaction: RemoteTransaction, lsn: Lsn, end_lsn: Lsn, what: str) -> EndTransaction:
        if lsn != transaction.finish_lsn:
            raise ProtocolError(f"incorrect {what} LSN {lsn} in {what} message (expected {transaction.finish_lsn})")
        self.transaction = None
        return EndTransaction(transaction, end_lsn)


def _out_of_order(message: Message, where: str) -> ProtocolError:
    return ProtocolError(f"{message.message_type} message sent out of order", detail=f"It came {where}.")
