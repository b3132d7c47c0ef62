"""Which table of the target has the stored name of each table of a subscription.

A row of `subscription_rel` has the OID of its table, and a name under which the publisher's changes arrive. The OID is
the table while that exists, as in PostgreSQL. So a table that both sides rename keeps its state: its changes arrive
under the new name, and REFRESH PUBLICATION stores it (store_names()). A dump and an upgrade change OIDs. Then the names
lead to the tables (`subscriber.rebind()`).

If only the target gives the name to another table, the changes go there, as in PostgreSQL. This is decided when a
change arrives under the name, because the publisher may have renamed its table as well:

    OID of the row          table of the stored name    when a change arrives under the stored name
    has the stored name     the same                    nothing
    has another name        one of another row          each row stores the present name of its table
    has another name        one without a row           the row follows its name: follow()
    is gone                 another table               lost: the other table lacks the rows that were copied
    has another name        none                        lost: it was renamed
    is gone                 none                        lost: it was dropped

A table that waits for its copy follows its name in every case: it has no copied rows. One whose copy has begun never
does: what is copied is in the old table. A change of a lost table is an error, and `subscriber status` names the table.

A row remembers the table that it has left. If changes arrive for that one, too, the publisher has renamed it later, and
the changes in between are in the other table. This is an error, and REFRESH PUBLICATION compares the table.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import asyncpg

from subscriber import telemetry
from subscriber.display import sql_identifier
from subscriber.errors import MappingError
from subscriber.remedy import Remedy
from subscriber.subscription import Subscription

FOLLOW = "SELECT f.nspname::text, f.relname::text FROM subscriber.follow_names($1::oid, $2::text[], $3::text[]) f"
# A table of the subscription that has another name there keeps its row, and gets that name.
STORE_NAMES = """
UPDATE subscriber.subscription_rel r SET srnspname = n.nspname, srrelname = c.relname
  FROM unnest($2::text[], $3::text[]) AS w (nspname, relname)
  JOIN pg_catalog.pg_namespace n ON n.nspname = w.nspname
  JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = w.relname
 WHERE r.srsubid = $1 AND r.srrelid = c.oid AND (r.srnspname, r.srrelname) IS DISTINCT FROM (n.nspname, c.relname)
RETURNING r.srnspname::text, r.srrelname::text
"""
# Tables whose stored name leads elsewhere, and whose rows cannot follow it.
LOST = """
SELECT s.subname::text AS subscription, r.srrelid AS relid, r.srnspname::text AS namespace,
       r.srrelname::text AS name, r.srsubstate::text AS state,
       old.oid IS NOT NULL AS exists, named.oid IS NOT NULL AS has_successor
  FROM subscriber.subscription_rel r JOIN subscriber.subscription s ON s.subid = r.srsubid
  LEFT JOIN pg_catalog.pg_class old ON old.oid = r.srrelid
  LEFT JOIN (pg_catalog.pg_class named JOIN pg_catalog.pg_namespace n ON n.oid = named.relnamespace)
    ON n.nspname = r.srnspname AND named.relname = r.srrelname
 WHERE r.srsubid = $1 AND named.oid IS DISTINCT FROM r.srrelid
   AND NOT (named.oid IS NOT NULL AND named.relkind IN ('r', 'p')
            AND (old.oid IS NOT NULL OR r.srsubstate IN ('i', 'd'))
            AND NOT subscriber.copy_has_begun(r.srsubid, r.srrelid))
 ORDER BY r.srnspname, r.srrelname
"""
# Tables of which a row has followed its name to another one.
FORMER = "SELECT r.srformer FROM subscriber.subscription_rel r WHERE r.srsubid = $1 AND r.srformer IS NOT NULL"


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
        """The reason why the table is lost, in a few words."""
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


async def follow(
    connection: asyncpg.Connection, subscription: Subscription, names: Collection[tuple[str, str]]
) -> None:
    """Store the new OID of each table that another table of the target has replaced, and log it.

    Args:
        connection: a connection to the target.
        subscription: the subscription.
        names: schema and name of tables whose changes go to the table that has the name now.
    """
    schemas, tables = [schema for schema, _ in names], [table for _, table in names]
    for namespace, name in await connection.fetch(FOLLOW, subscription.oid, schemas, tables):
        telemetry.log(
            telemetry.LOG,
            f'table "{namespace}.{name}" of subscription "{subscription.name}" was replaced:'
            " changes go to the table that has the name now",
            event="table.replaced",
            relation=f"{namespace}.{name}",
        )


async def store_names(
    connection: asyncpg.Connection, subscription: Subscription, names: Collection[tuple[str, str]]
) -> None:
    """Store the names of tables that the publisher and the target have renamed.

    Args:
        connection: a connection to the target.
        subscription: the subscription.
        names: schema and name on the target of all published tables.
    """
    schemas, tables = [schema for schema, _ in names], [table for _, table in names]
    for namespace, name in await connection.fetch(STORE_NAMES, subscription.oid, schemas, tables):
        telemetry.log(
            telemetry.LOG,
            f'a table of subscription "{subscription.name}" has the name "{namespace}.{name}" now, and keeps its state',
            event="table.renamed",
            relation=f"{namespace}.{name}",
        )


async def load_former(connection: asyncpg.Connection, subid: int) -> set[int]:
    """Return the OIDs of tables that were part of the subscription before another table took their names."""
    return {row["srformer"] for row in await connection.fetch(FORMER, subid)}


async def load_lost(connection: asyncpg.Connection, subid: int) -> list[LostTable]:
    """Return the tables of a subscription whose stored name leads elsewhere, by name."""
    return [LostTable(**dict(row)) for row in await connection.fetch(LOST, subid)]


def divided_changes(former: tuple[str, str], present: tuple[str, str]) -> MappingError:
    """Return the error for changes of a table whose row has followed its name to another table.

    Args:
        former: the present name of the table.
        present: the name that the row has followed.
    """
    left, followed = (".".join(name) for name in (former, present))
    return MappingError(
        f'table "{left}" is published under a new name, and table "{followed}" has got its changes',
        detail=f'Table "{followed}" took the name on the target before the publisher renamed its table.',
        hint="ALTER SUBSCRIPTION ... REFRESH PUBLICATION compares the table with the publisher's, and repairs the rows"
        " that differ.",
    )
