"""The kinds of transactions that a change stream delivers."""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    """What a transaction is. Without further options every transaction is a COMMIT."""

    COMMIT = "commit"  # its changes are committed
    PREPARE = "prepare"  # its changes are prepared under `gid`: the end is still open
    COMMIT_PREPARED = "commit prepared"  # the one prepared under `gid` is committed; no changes
    ROLLBACK_PREPARED = "rollback prepared"  # the one prepared under `gid` is rolled back; no changes
    MESSAGE = "message"  # a logical message that belongs to no transaction: the one change

    # Large transactions in progress, with in_progress="blocks". A block and an abort need no ack.
    STREAM_BLOCK = "stream block"  # some changes of a transaction that is not committed
    STREAM_ABORT = "stream abort"  # that transaction, or its subtransaction `subxid`, is rolled back
    STREAM_COMMIT = "stream commit"  # its blocks are committed; no changes here
    STREAM_PREPARE = "stream prepare"  # its blocks are prepared under `gid`; no changes here
