"""Which table of the target has the stored name of each table of a subscription.

A row of `subscription_rel` has the OID of its table, and the name that the table had when it became part of the
subscription. The stored name decides where changes go, as in PostgreSQL, whose worker opens tables by name:

    OID of the row          table of the stored name    then
    has the stored name     the same                    nothing
    has another name        another table               the row follows its name: follow()
    is gone                 another table               lost: the other table lacks the rows that were copied
    has another name        none                        lost: it was renamed
    is gone                 none                        lost: it was dropped

A table that waits for its copy follows its name in every case: it has no copied rows. One whose copy has begun never
does: what is copied is in the old table. A change of a lost table is an error, and `subscriber status` names the table.
"""

from __future__ import annotations

from dataclasses import dataclass

import asyncpg

from subscriber import telemetry
from subscriber.display import sql_identifier
from subscriber.errors import MappingError
from subscriber.remedy import Remedy
from subscriber.subscription import Subscription

FOLLOW = "SELECT f.nspname::text, f.relname::text FROM subscriber.follow_names($1::oid) f"
LOST = """
SELECT s.subname::text AS subscription, r.srrelid AS relid, r.srnspname::text AS namespace,
       r.srrelname::text AS name, r.srsubstate::text AS state,
       old.oid IS NOT NULL AS exists, named.oid IS NOT NULL AS has_successor
  FROM subscriber.subscription_rel r JOIN subscriber.subscription s ON s.subid = r.srsubid
  LEFT JOIN pg_catalog.pg_class old ON old.oid = r.srrelid
  LEFT JOIN (pg_catalog.pg_class named JOIN pg_catalog.pg_namespace n ON n.oid = named.relnamespace)
    ON n.nspname = r.srnspname AND named.relname = r.srrelname
 WHERE r.srsubid = $1 AND named.oid IS DISTINCT FROM r.srrelid
 ORDER BY r.srnspname, r.srrelname
"""


@dataclass(frozen=True, slots=True)
class LostTable:
    """A table of a subscription whose stored name leads to another table, or to none."""

    subscription: str
    relid: int  # as stored
    namespace: str
    name: str
    state: str  # of its synchronization: i, d, f, s or r
    exists: bool  # under another name
    has_successor: bool  # another table has the stored name

    @property
    def label(self) -> str:
        """schema.table, as PostgreSQL's messages name it."""
        return f"{self.namespace}.{self.name}"

    @property
    def what(self) -> str:
        """What became of the table, in a few words."""
        if not self.has_successor:
            return "renamed" if self.exists else "dropped"
        return "replaced" if self.exists else "dropped and created again"

    def error(self) -> MappingError:
        """Return the error for changes that arrive for the table."""
        message = f'table "{self.label}" of subscription "{self.subscription}" was {self.what}'
        if not self.has_successor:
            return MappingError(message, hint="Give the table its name back, or create it and copy it again.")
        refresh = f"ALTER SUBSCRIPTION {sql_identifier(self.subscription)} REFRESH PUBLICATION"
        hint = Remedy("empty the table and copy it again", f"{refresh};")
        if not self.exists:
            keep = Remedy("if it has all rows of the former table", f"{refresh} WITH (copy_data = false);")
            hint = hint.with_alternative(keep)
        detail = "Rows that were copied or applied before may be missing in the table that has the name now."
        return MappingError(message, detail=detail, hint=hint)


async def follow(connection: asyncpg.Connection, subscription: Subscription) -> None:
    """Store the new OID of each table that another table of the target has replaced, and log it."""
    for namespace, name in await connection.fetch(FOLLOW, subscription.oid):
        telemetry.log(
            telemetry.LOG,
            f'table "{namespace}.{name}" of subscription "{subscription.name}" was replaced:'
            " changes go to the table that has the name now",
            event="table.replaced",
            relation=f"{namespace}.{name}",
        )


async def load_lost(connection: asyncpg.Connection, subid: int) -> list[LostTable]:
    """Return the tables of a subscription whose stored name leads elsewhere, by name."""
    return [LostTable(**dict(row)) for row in await connection.fetch(LOST, subid)]


async def require_all(connection: asyncpg.Connection, subscription: Subscription) -> None:
    """Follow replaced tables, for a command that works on all tables of the subscription.

    Raises:
        MappingError: a table is lost.
    """
    await follow(connection, subscription)
    for lost in await load_lost(connection, subscription.oid):
        raise lost.error()
