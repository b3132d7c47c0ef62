"""The transactions of a publisher for which its slots keep WAL: those with changes, in any database, and prepared ones.

pg_stat_activity does not list prepared transactions, and they outlive their sessions and the server. A role without
pg_read_all_stats does not see the transactions of other roles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from subscriber.connection.session import Session
from subscriber.display import sql_literal
from subscriber.publisher.answers import count, parsing, seconds
from subscriber.remedy import Remedy

MOST = 10  # transactions, the oldest first

_HOLDERS = f"""
SELECT * FROM (
    SELECT NULL AS pid, p.gid, p.owner::text, p.database::text, extract(epoch FROM p.prepared)::float8 AS since
      FROM pg_catalog.pg_prepared_xacts p
     UNION ALL
    SELECT a.pid, a.application_name, a.usename::text, a.datname::text, extract(epoch FROM a.xact_start)::float8
      FROM pg_catalog.pg_stat_activity a
     WHERE a.backend_xid IS NOT NULL AND a.xact_start IS NOT NULL AND a.pid <> pg_catalog.pg_backend_pid()
) t ORDER BY t.since LIMIT {MOST}
"""
_SEES_ALL = "SELECT pg_catalog.pg_has_role(current_user, 'pg_read_all_stats', 'USAGE')"


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction of the publisher that has not ended.

    Attributes:
        pid: the backend. None: the transaction is prepared.
        name: its identifier if it is prepared, else the application's name.
        owner: its role.
        database: its database.
        since: its start, or the time at which it was prepared.
    """

    pid: int | None
    name: str
    owner: str
    database: str
    since: datetime

    @property
    def label(self) -> str:
        """The transaction in words, with its owner."""
        what = f'process {self.pid} ("{self.name}")' if self.pid is not None else f"prepared transaction '{self.name}'"
        return f'{what} of role "{self.owner}" in database "{self.database}"'

    @property
    def remedy(self) -> Remedy:
        """The statement on the publisher that ends the transaction."""
        if self.pid is not None:
            end = f"SELECT pg_terminate_backend({self.pid});"
            return Remedy("end the transaction in its application.", alternative=Remedy("on the publisher", end))
        gid = sql_literal(self.name)
        return Remedy(
            f'on the publisher, in database "{self.database}"',
            f"ROLLBACK PREPARED {gid};",
            alternative=Remedy(command=f"COMMIT PREPARED {gid};"),
        )


@dataclass(frozen=True, slots=True)
class WalHolders:
    """The open transactions of a publisher, the oldest first. `sees_all`: those of all roles."""

    transactions: Sequence[OpenTransaction] = ()
    sees_all: bool = True


async def read_wal_holders(session: Session) -> WalHolders:
    """Read the oldest open transactions.

    Raises:
        ServerError: the publisher refuses a query.
        ProtocolError: its answer is malformed.
    """
    rows = await session.rows(_HOLDERS)
    ((sees_all,),) = await session.rows(_SEES_ALL)
    with parsing("its open transactions"):
        holders = tuple(
            OpenTransaction(
                None if pid is None else count(pid),
                name or "",
                owner or "",
                database or "",
                datetime.fromtimestamp(seconds(since), UTC),
            )
            for pid, name, owner, database, since in rows
        )
        return WalHolders(holders, sees_all == "t")
