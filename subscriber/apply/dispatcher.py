"""Which message may come now, and what has to be done about it.

    state  message              next   what to do
    idle   BEGIN                txn    Open
    txn    ORIGIN (first only)  txn    –
    txn    RELATION             txn    – (the relation map is replaced)
    txn    TYPE, MESSAGE        txn    –
    txn    INSERT UPDATE DELETE txn    Change
    txn    TRUNCATE             txn    Empty
    txn    COMMIT               idle   Close
    idle   MESSAGE              idle   – (not transactional)

Anything else is a ProtocolError: the stream is out of order, and the only safe thing is to start again
from what is durable. The dispatcher does no I/O and knows no target: it hands out what to do as values.

Source: apply_dispatch() in worker.c and the apply_handle_* functions; proto.c for what is legal.
"""

from __future__ import annotations

from dataclasses import dataclass

from subscriber.apply.context import RemoteTransaction
from subscriber.apply.relation_map import RelationMap
from subscriber.errors import ProtocolError
from subscriber.lsn import Lsn
from subscriber.protocol.messages import (
    Begin,
    Commit,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    Origin,
    Relation,
    Truncate,
    Type,
    Update,
)


@dataclass(slots=True)
class Open:
    """A transaction begins; nothing need be done on the target before its first change."""

    transaction: RemoteTransaction


@dataclass(slots=True)
class Change:
    """One row changed."""

    transaction: RemoteTransaction
    message: Insert | Update | Delete


@dataclass(slots=True)
class Empty:
    """Tables were truncated, together."""

    transaction: RemoteTransaction
    message: Truncate


@dataclass(slots=True)
class Close:
    """The transaction is complete: commit, with `end_lsn` as the new progress."""

    transaction: RemoteTransaction
    end_lsn: Lsn


Action = Open | Change | Empty | Close | None


class Dispatcher:
    """Holds the state of one stream. `transaction` is the one being received, None between two."""

    def __init__(self) -> None:
        self.relations = RelationMap()
        self.transaction: RemoteTransaction | None = None
        self._begun = False  # nothing but BEGIN has come of the transaction yet

    def receive(self, message: Message) -> Action:
        """What to do about `message`; None for nothing.

        Raises ProtocolError if it may not come now.
        """
        transaction = self.transaction
        match message:
            case Insert() | Update() | Delete() if transaction is not None:
                self._begun = False
                return Change(transaction, message)
            case Begin() if transaction is None:
                self._begun = True
                self.transaction = RemoteTransaction(message.xid, message.final_lsn, message.commit_time)
                return Open(self.transaction)
            case Commit() if transaction is not None:
                return self._commit(transaction, message)
            case Relation() if transaction is not None:
                self._begun = False
                self.relations.update(message)
            case Truncate() if transaction is not None:
                self._begun = False
                return Empty(transaction, message)
            case Type() if transaction is not None:
                self._begun = False
            case Origin() if self._begun:
                self._begun = False
            case Origin():
                raise ProtocolError("ORIGIN message sent out of order")
            case LogicalMessage() if not message.transactional or transaction is not None:
                self._begun = False
            case _:
                where = "outside a transaction" if transaction is None else f"in transaction {transaction.xid}"
                raise ProtocolError(f"{message.message_type} message sent out of order", detail=f"It came {where}.")
        return None

    def _commit(self, transaction: RemoteTransaction, message: Commit) -> Close:
        if message.commit_lsn != transaction.finish_lsn:
            raise ProtocolError(
                f"incorrect commit LSN {message.commit_lsn} in commit message (expected {transaction.finish_lsn})"
            )
        self.transaction = None
        self._begun = False
        return Close(transaction, message.end_lsn)
