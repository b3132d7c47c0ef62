"""The CONTEXT line of an error: the change being applied, and the position that ALTER SUBSCRIPTION … SKIP needs."""

from __future__ import annotations

from subscriber.apply.transaction import RemoteTransaction
from subscriber.server_version import Wording


def error_context(
    origin: str,
    message: str,
    wording: Wording,
    relation: str | None = None,
    column: str | None = None,
    transaction: RemoteTransaction | None = None,
) -> str:
    """Return the CONTEXT line in PostgreSQL's words, without the parts that are not known.

    `message` is a name as "INSERT"; `relation` as "public.t". Source: apply_error_callback() in worker.c.
    """
    line = f'processing remote data for replication origin "{origin}" during message type "{message}"'
    if relation is not None:
        line += f' for replication target relation "{relation}"'
    if column is not None:
        line += f' column "{column}"'
    if transaction is not None:
        line += f" in transaction {transaction.xid}"
        if transaction.finish_lsn:
            line += f", finished at {wording.position(transaction.finish_lsn)}"
    return line
