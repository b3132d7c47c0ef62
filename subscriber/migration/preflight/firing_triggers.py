"""Triggers and rules that fire again on a server for replicated changes, because no role sets the replica role there.

An ordinary trigger has changed the row on the serving server already. Without session_replication_role it also fires on
the following one, and may change the row once more: a trigger that appends a letter appends it twice. So a move names
such tables before it starts, and applications move only if the rows were compared or the table was waived.

Triggers of foreign keys are left out: they refuse a row, or change rows to what the serving server sends.
"""

from __future__ import annotations

from typing import NamedTuple

from subscriber import server_features as features
from subscriber.catalog import worker_sessions
from subscriber.catalog.connection import Connection

# $1: OIDs of tables, whose partitions count. NULL: all tables of users.
_FIRING = """
SELECT n.nspname::text || '.' || c.relname::text AS table, pg_catalog.array_agg(f.name ORDER BY f.name) AS names
  FROM (SELECT t.tgrelid AS relid, t.tgname::text AS name
          FROM pg_catalog.pg_trigger t JOIN pg_catalog.pg_proc p ON p.oid = t.tgfoid
          JOIN pg_catalog.pg_namespace pn ON pn.oid = p.pronamespace
         WHERE NOT t.tgisinternal AND t.tgenabled = 'O' AND pn.nspname <> 'subscriber'
         UNION ALL
        SELECT w.ev_class, w.rulename::text FROM pg_catalog.pg_rewrite w
         WHERE w.ev_type <> '1' AND w.ev_enabled = 'O') f
  JOIN pg_catalog.pg_class c ON c.oid = f.relid AND c.relkind IN ('r', 'p') AND c.oid >= 16384
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE $1::bigint[] IS NULL
    OR c.oid IN (SELECT p.relid FROM pg_catalog.unnest($1::bigint[]::oid[]) g (relid)
                   CROSS JOIN LATERAL (SELECT g.relid UNION SELECT t.relid FROM pg_catalog.pg_partition_tree(g.relid) t
                                       UNION SELECT a.relid FROM pg_catalog.pg_partition_ancestors(g.relid) a) p)
 GROUP BY 1 ORDER BY 1
"""
# Functions of a schema that belongs to a superuser set the replica role. Otherwise the role of the apply worker does.
# While there is no worker, its role is that of this session. $1: the OID of the role, or NULL.
_LACKS_REPLICA_ROLE = """
SELECT NOT pg_catalog.bool_or(o.rolsuper OR r.rolsuper{may_set})
  FROM pg_catalog.pg_namespace n JOIN pg_catalog.pg_roles o ON o.oid = n.nspowner
 CROSS JOIN pg_catalog.pg_roles r
 WHERE n.nspname = 'subscriber'
   AND r.oid = coalesce($1::bigint::oid, pg_catalog.quote_ident(current_user)::regrole::oid)
"""
_MAY_SET = " OR pg_catalog.has_parameter_privilege(r.oid, 'session_replication_role', 'SET')"


class FiringTable(NamedTuple):
    """A table, and its triggers and rules that fire for replicated changes."""

    table: str
    names: list[str]


async def find_firing(connection: Connection, relids: list[int] | None = None) -> list[FiringTable]:
    """Return the tables with ordinary triggers or rules.

    Args:
        relids: OIDs of tables. Their partitions count. None: all tables of users.
    """
    return [FiringTable(row["table"], row["names"]) for row in await connection.fetch(_FIRING, relids)]


async def lacks_replica_role(connection: Connection, subid: int) -> bool:
    """Return True if the apply worker of a subscription cannot set session_replication_role."""
    grants = features.GRANT_SET.is_in_major(connection.get_server_version().major)
    role = await worker_sessions.apply_role(connection, subid)
    return bool(await connection.fetchval(_LACKS_REPLICA_ROLE.format(may_set=_MAY_SET if grants else ""), role))
