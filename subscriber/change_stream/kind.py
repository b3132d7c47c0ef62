"""The kinds of transactions that a change stream delivers."""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    """The kind of a transaction. Without further options of stream(), each transaction is a COMMIT."""

    COMMIT = "commit"  # a committed transaction with its changes
    PREPARE = "prepare"  # a transaction prepared as `gid`, with its changes; its outcome is not known yet
    COMMIT_PREPARED = "commit prepared"  # the commit of the transaction prepared as `gid`; no changes
    ROLLBACK_PREPARED = "rollback prepared"  # the rollback of the transaction prepared as `gid`; no changes
    MESSAGE = "message"  # a logical message that is not transactional; its one change is the message

    # Large transactions in progress, with in_progress="blocks". A block and an abort need no ack.
    STREAM_BLOCK = "stream block"  # some changes of an in-progress transaction
    STREAM_ABORT = "stream abort"  # the rollback of an in-progress transaction, or of its subtransaction `subxid`
    STREAM_COMMIT = "stream commit"  # the commit of the transaction of the blocks; no changes
    STREAM_PREPARE = "stream prepare"  # the blocks' transaction is prepared as `gid`; no changes
