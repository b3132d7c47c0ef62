"""Order of messages: the states of a stream, and the messages that are legal in each. No I/O.

    state          message                                       next
    IDLE           BEGIN                                         BEGUN
                   BEGIN PREPARE                                 BEGUN_PREPARE
                   STREAM START                                  FIRST_BLOCK, or BLOCK for a further segment
                   STREAM ABORT, STREAM COMMIT, STREAM PREPARE   IDLE
                   COMMIT PREPARED, ROLLBACK PREPARED            IDLE
                   MESSAGE, if it is not transactional           IDLE
    BEGUN          as TRANSACTION, and ORIGIN                    TRANSACTION
    TRANSACTION    changes                                       TRANSACTION
                   COMMIT                                        IDLE
    BEGUN_PREPARE  as PREPARING, and ORIGIN                      PREPARING
    PREPARING      changes                                       PREPARING
                   PREPARE                                       IDLE
    FIRST_BLOCK    as BLOCK, and ORIGIN                          BLOCK
    BLOCK          changes                                       BLOCK
                   STREAM STOP                                   IDLE

Changes are INSERT, UPDATE, DELETE, TRUNCATE, RELATION, TYPE and MESSAGE. Any other message is out of order: the stream
is damaged, and its reader restarts from a durable position. A consumer that supports fewer messages, such as the change
log, calls out_of_order() for the others.

Source: apply_dispatch() in worker.c and the apply_handle_* functions; pgoutput.c for the order in which it sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

from subscriber.errors import ProtocolError
from subscriber.lsn import Lsn
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


class StreamState(Enum):
    """A position in the stream: between transactions, in one, or in a block of a streamed one."""

    IDLE = auto()
    BEGUN = auto()
    TRANSACTION = auto()
    BEGUN_PREPARE = auto()
    PREPARING = auto()
    FIRST_BLOCK = auto()
    BLOCK = auto()


_CHANGES = (Insert, Update, Delete, Truncate, Relation, Type, LogicalMessage)
_TRANSACTION = {**dict.fromkeys(_CHANGES, StreamState.TRANSACTION), Commit: StreamState.IDLE}
_PREPARING = {**dict.fromkeys(_CHANGES, StreamState.PREPARING), Prepare: StreamState.IDLE}
_BLOCK = {**dict.fromkeys(_CHANGES, StreamState.BLOCK), StreamStop: StreamState.IDLE}
_NEXT: Mapping[StreamState, Mapping[type, StreamState]] = {
    StreamState.IDLE: {
        Begin: StreamState.BEGUN,
        BeginPrepare: StreamState.BEGUN_PREPARE,
        StreamStart: StreamState.FIRST_BLOCK,
        **dict.fromkeys((StreamAbort, StreamCommit, StreamPrepare), StreamState.IDLE),
        **dict.fromkeys((CommitPrepared, RollbackPrepared, LogicalMessage), StreamState.IDLE),
    },
    StreamState.BEGUN: {**_TRANSACTION, Origin: StreamState.TRANSACTION},
    StreamState.TRANSACTION: _TRANSACTION,
    StreamState.BEGUN_PREPARE: {**_PREPARING, Origin: StreamState.PREPARING},
    StreamState.PREPARING: _PREPARING,
    StreamState.FIRST_BLOCK: {**_BLOCK, Origin: StreamState.BLOCK},
    StreamState.BLOCK: _BLOCK,
}
_BLOCKS = (StreamState.FIRST_BLOCK, StreamState.BLOCK)


def next_state(state: StreamState, message: Message, xid: int | None = None) -> StreamState:
    """Return the state after `message`.

    Args:
        state: the state before the message.
        message: the next message of the stream.
        xid: ID of the open transaction, for the error. None: no transaction is open.

    Raises:
        ProtocolError: the message is not legal in this state.
    """
    after = _NEXT[state].get(type(message))
    if after is None:
        raise out_of_order(message, state, xid)
    if after is StreamState.FIRST_BLOCK and isinstance(message, StreamStart) and not message.first_segment:
        return StreamState.BLOCK
    if state is StreamState.IDLE and isinstance(message, LogicalMessage) and message.transactional:
        raise out_of_order(message, state, xid)
    return after


def out_of_order(message: Message | str, state: StreamState, xid: int | None = None) -> ProtocolError:
    """Create the error for a message that is not legal, or not supported, in this state.

    Args:
        message: the message, or its name.
        state: the state before the message.
        xid: ID of the open transaction. None: no transaction is open, or its ID is unknown.
    """
    name = message if isinstance(message, str) else message.message_type
    which = "" if xid is None else f" {xid}"
    if state is StreamState.IDLE:
        where = "outside a transaction"
    elif state in _BLOCKS:
        where = f"in a block of streamed transaction{which}" if which else "in a block of a streamed transaction"
    else:
        where = f"in transaction{which}" if which else "in a transaction"
    return ProtocolError(f"{name} message sent out of order", detail=f"It came {where}.")


def require_finish_lsn(message: Commit | Prepare, expected: Lsn | int) -> None:
    """Check that COMMIT or PREPARE has the position that the beginning of the transaction announced.

    Raises:
        ProtocolError: it has another one.
    """
    lsn = message.commit_lsn if isinstance(message, Commit) else message.prepare_lsn
    if lsn != expected:
        what = message.message_type.lower()
        raise ProtocolError(f"incorrect {what} LSN {lsn} in {what} message (expected {Lsn(expected)})")
