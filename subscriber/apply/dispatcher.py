"""The action for each message of a stream. protocol/stream_state.py decides which messages are legal.

    BEGIN, BEGIN PREPARE                  BeginTransaction
    INSERT, UPDATE, DELETE                ApplyChange
    TRUNCATE                              TruncateTables
    RELATION                              none: the relation map is updated
    COMMIT, PREPARE                       EndTransaction
    COMMIT PREPARED, ROLLBACK PREPARED    FinishPrepared
    STREAM START                          BeginStreamBlock
    changes in a block                    spooled without decoding: must_spool()
    STREAM STOP                           EndStreamBlock
    STREAM ABORT                          AbortStreamed
    STREAM COMMIT, STREAM PREPARE         ApplySpooled
    ORIGIN, TYPE, MESSAGE                 none

The dispatcher does no I/O and does not depend on a target: it returns actions as values.

The spooled changes of a streamed transaction are read by a dispatcher of their own, which replaying() creates. It is
within that transaction from the start, and has the relation map of that transaction alone. This is sufficient, because
the publisher describes every table again in each streamed transaction.

Source: apply_dispatch() in worker.c and the apply_handle_* functions.
"""

from __future__ import annotations

from dataclasses import dataclass

from subscriber.apply.relation_map import RelationMap
from subscriber.apply.transaction import RemoteTransaction
from subscriber.lsn import Lsn
from subscriber.protocol.encodings import UTF8
from subscriber.protocol.messages import (
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
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
    Update,
)
from subscriber.protocol.stream_state import StreamState, next_state, out_of_order, require_finish_lsn


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

    def __init__(
        self, known: RelationMap | None = None, codec: str = UTF8, *, relation_limit: int | None = None
    ) -> None:
        """Create a dispatcher.

        Args:
            known: mappings that may be used again.
            codec: of the stream's texts.
            relation_limit: bytes of memory for descriptions of tables. None: there is no limit.
        """
        self.relations = RelationMap(known, relation_limit)
        self._codec = codec
        self.transaction: RemoteTransaction | None = None
        self.block: int | None = None
        self._state = StreamState.IDLE

    @classmethod
    def replaying(
        cls,
        transaction: RemoteTransaction,
        known: RelationMap | None = None,
        codec: str = UTF8,
        *,
        relation_limit: int | None = None,
    ) -> Dispatcher:
        """Create a dispatcher for the spooled changes of a streamed transaction, for one use."""
        dispatcher = cls(known, codec, relation_limit=relation_limit)
        dispatcher.transaction = transaction
        dispatcher._state = StreamState.TRANSACTION if transaction.gid is None else StreamState.PREPARING
        return dispatcher

    @property
    def idle(self) -> bool:
        """True between two transactions."""
        return self._state is StreamState.IDLE

    def must_spool(self, letter: int) -> bool:
        """Return True if a message that begins with `letter` belongs to an open block and must not be decoded now."""
        return self.block is not None and letter in _KEPT

    def receive(self, message: Message) -> Action:
        """Return the action for `message`, or None if it needs none.

        Raises:
            ProtocolError: the message is not legal in this state.
        """
        transaction = self.transaction
        after = next_state(self._state, message, self.block if transaction is None else transaction.xid)
        if transaction is not None:
            action = self._inside(transaction, message)
        elif self.block is not None:
            action = self._in_block(self.block, message)
        else:
            action = self._between(message)
        self._state = after
        return action

    def _inside(self, transaction: RemoteTransaction, message: Message) -> Action:
        match message:
            case Insert() | Update() | Delete():
                return ApplyChange(transaction, message)
            case Commit() | Prepare():
                require_finish_lsn(message, transaction.finish_lsn)
                self.transaction = None
                return EndTransaction(transaction, message.end_lsn)
            case Relation():
                self.relations.update(message.recoded(self._codec))
            case Truncate():
                return TruncateTables(transaction, message)
        return None

    def _in_block(self, xid: int, message: Message) -> Action:
        match message:
            case StreamStop():
                self.block = None
                return EndStreamBlock(xid)
            case Origin():
                return None
        raise out_of_order(message, self._state, xid)  # the caller spools changes, see must_spool()

    def _between(self, message: Message) -> Action:
        match message:
            case Begin():
                return self._begin(RemoteTransaction(message.xid, message.final_lsn, message.commit_time))
            case BeginPrepare():
                return self._begin(
                    RemoteTransaction(message.xid, message.prepare_lsn, message.prepare_time, message.gid)
                )
            case CommitPrepared() | RollbackPrepared():
                return FinishPrepared(message)
            case StreamStart():
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
        return None

    def _begin(self, transaction: RemoteTransaction) -> BeginTransaction:
        self.transaction = transaction
        return BeginTransaction(transaction)
