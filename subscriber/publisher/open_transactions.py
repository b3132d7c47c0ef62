"""The transactions of a publisher for which a new slot waits.

A slot begins when each transaction has ended that was running before, in any database of the server. That includes
prepared transactions. pg_stat_activity does not list these, and they outlive their sessions and the server.
"""

from __future__ import annotations

from dataclasses import dataclass

from subscriber.connection.session import Session
from subscriber.display import sql_literal
from subscriber.errors import SubscriberError
from subscriber.publisher.answers import parsing

SHOWN = 3  # transactions in a message

_PREPARED = "SELECT gid, database FROM pg_catalog.pg_prepared_xacts ORDER BY prepared"
# Without pg_read_all_stats a role sees its own sessions only.
_RUNNING = """
SELECT pid, datname FROM pg_catalog.pg_stat_activity
 WHERE backend_xid IS NOT NULL AND pid <> pg_catalog.pg_backend_pid() ORDER BY xact_start
"""


@dataclass(frozen=True, slots=True)
class UnfinishedTransactions:
    """The publisher's open transactions, for an error about a slot that had to wait for too long."""

    detail: str
    hint: str


async def open_transactions(session: Session, then: str) -> UnfinishedTransactions:
    """Read the transactions that have not ended.

    Args:
        session: a session with the publisher, which is not in a failed transaction.
        then: the end of the hint, as "compare again".

    Returns:
        The transactions, prepared ones first, and statements that end them. If the publisher lists none, the hint says
        how to find them.
    """
    try:
        prepared = await session.rows(_PREPARED)
        running = await session.rows(_RUNNING)
        with parsing("transactions"):
            details = [f"prepared transaction {sql_literal(gid or '')} in database {name}" for gid, name in prepared]
            pids = [int(pid or "") for pid, _ in running]
            details += [f"process {pid} in database {name}" for pid, (_, name) in zip(pids, running, strict=True)]
    except SubscriberError:
        prepared, running, details = [], [], []
    if not details:
        return UnfinishedTransactions(
            "Transactions on the publisher did not end in time.",
            f"Find them on the publisher in pg_stat_activity by xact_start, and in pg_prepared_xacts, then {then}.",
        )
    more = f" and {len(details) - SHOWN} more" if len(details) > SHOWN else ""
    detail = f"Transactions on the publisher did not end in time: {', '.join(details[:SHOWN])}{more}."
    if prepared:
        gid, database = prepared[0]
        statements = f"COMMIT PREPARED {sql_literal(gid or '')}; or ROLLBACK PREPARED {sql_literal(gid or '')};"
        return UnfinishedTransactions(
            detail, f"Run on the publisher, in database {database}: {statements} Then {then}."
        )
    statement = f"SELECT pg_terminate_backend({pids[0]});"
    return UnfinishedTransactions(detail, f"Wait for their end, or run on the publisher: {statement} Then {then}.")
