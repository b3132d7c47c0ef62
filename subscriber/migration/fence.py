"""The fence of a server: SQL that keeps applications from writing. Pure.

A fence has three parts:

1. Statement triggers on every published table and its partitions. They call subscriber.fence(), which does nothing
   while the fence is open. Replication passes them: triggers of this kind do not fire with session_replication_role =
   replica, and a worker without that setting is known by its registration.
2. CONNECT on the database, which is revoked from all roles but those of subscriber: roles with duty "launcher" or
   "apply", those of its sessions and of walsenders, and that of the command. Superusers do not need it.
3. The sessions of applications are ended (sessions.py). A transaction that has begun before sees the open fence.

One transaction closes or opens the fence: it replaces the function, changes the grants, and updates the row of the
move. A function is in the system catalog, so the state of the fence is durable and is not published. A table would be
one or the other: FOR ALL TABLES publishes permanent tables, and a crash empties UNLOGGED ones.

Closing does not wait for statements that run. They belong to sessions that are ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from subscriber.quoting import identifier

TRIGGER = "subscriber_fence"

OPEN = """CREATE OR REPLACE FUNCTION subscriber.fence() RETURNS trigger LANGUAGE plpgsql AS $fence$
BEGIN
    RETURN NULL;
END $fence$"""
CLOSE = """CREATE OR REPLACE FUNCTION subscriber.fence() RETURNS trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $fence$
BEGIN  -- closed
    IF subscriber.is_worker() THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION USING ERRCODE = 'read_only_sql_transaction',
        MESSAGE = pg_catalog.format('cannot execute %s on table "%s", because the database has another server',
                                    TG_OP, TG_TABLE_NAME),
        HINT = 'Connect to the other server.';
END $fence$"""
DROP = "DROP FUNCTION IF EXISTS subscriber.fence()"

PUBLISHED = """
SELECT pc.oid::bigint AS relid FROM pg_catalog.pg_publication_tables p
  JOIN pg_catalog.pg_namespace pn ON pn.nspname = p.schemaname
  JOIN pg_catalog.pg_class pc ON pc.relnamespace = pn.oid AND pc.relname = p.tablename
 WHERE p.pubname = ANY ($1::text[])
"""
# Tables with the partitions and partitioned tables of their trees. Each needs its own trigger: statement triggers fire
# for the table that a statement names.
TABLES = """
SELECT c.oid::bigint AS relid, n.nspname::text AS schema, c.relname::text AS name,
       EXISTS (SELECT FROM pg_catalog.pg_trigger t WHERE t.tgrelid = c.oid AND t.tgname = 'subscriber_fence'
                  AND t.tgenabled = 'O' AND t.tgfoid = pg_catalog.to_regproc('subscriber.fence')) AS fenced
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p') AND c.oid IN (
           SELECT tree.relid
             FROM pg_catalog.unnest($1::bigint[]) AS given (relid)
             CROSS JOIN LATERAL (SELECT given.relid::oid AS relid
                                 UNION SELECT a.relid FROM pg_catalog.pg_partition_ancestors(given.relid::oid) a
                                 UNION SELECT t.relid FROM pg_catalog.pg_partition_tree(given.relid::oid) t) tree)
 ORDER BY 2, 3
"""

FENCED = """
SELECT n.nspname::text AS schema, c.relname::text AS name
  FROM pg_catalog.pg_trigger t JOIN pg_catalog.pg_class c ON c.oid = t.tgrelid
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE t.tgname = 'subscriber_fence' AND NOT t.tgisinternal ORDER BY 1, 2
"""
# NULL: there is no fence.
IS_CLOSED = """
SELECT pg_catalog.strpos(p.prosrc, '-- closed') > 0 FROM pg_catalog.pg_proc p
 WHERE p.oid = pg_catalog.to_regproc('subscriber.fence')
"""
GRANTS = """
SELECT g.grantee::bigint AS oid, r.rolname::text AS role, g.is_grantable AS grantable,
       g.grantor = d.datdba AS is_owners,
       pg_catalog.pg_get_userbyid(g.grantor)::text AS grantor
  FROM pg_catalog.pg_database d
  CROSS JOIN LATERAL pg_catalog.aclexplode(coalesce(d.datacl, pg_catalog.acldefault('d', d.datdba))) g
  LEFT JOIN pg_catalog.pg_roles r ON r.oid = g.grantee
 WHERE d.datname = pg_catalog.current_database() AND g.privilege_type = 'CONNECT' ORDER BY 1
"""
# $1: process IDs of the sessions that launchers and workers have registered. The functions are those of the duties.
ROLES = """
SELECT DISTINCT r.rolname::text AS role FROM pg_catalog.pg_roles r
 WHERE NOT r.rolsuper
   AND (r.oid IN (SELECT a.usesysid FROM pg_catalog.pg_stat_activity a
                   WHERE a.datname = pg_catalog.current_database()
                     AND (a.pid = ANY ($1::int[]) OR a.backend_type = 'walsender'
                          OR a.pid = pg_catalog.pg_backend_pid()))
        OR r.oid IN (SELECT g.grantee FROM pg_catalog.pg_proc p, pg_catalog.aclexplode(p.proacl) g
                      WHERE p.pronamespace = pg_catalog.to_regnamespace('subscriber')
                        AND p.proname IN ('lead', 'advance')))
 ORDER BY 1
"""


@dataclass(frozen=True, slots=True)
class Grant:
    """CONNECT on the database, for one role. None: PUBLIC."""

    role: str | None
    grantable: bool

    def as_json(self) -> list[Any]:
        """Return the grant as a JSON value."""
        return [self.role, self.grantable]


def create_trigger(schema: str, name: str) -> str:
    """Return the statement that adds the trigger of the fence to a table."""
    return (
        f"CREATE TRIGGER {TRIGGER} BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON {identifier(schema)}."
        f"{identifier(name)} FOR EACH STATEMENT EXECUTE FUNCTION subscriber.fence()"
    )


def drop_trigger(schema: str, name: str) -> str:
    """Return the statement that removes the trigger of the fence from a table."""
    return f"DROP TRIGGER IF EXISTS {TRIGGER} ON {identifier(schema)}.{identifier(name)}"


def close_statements(database: str, grants: Iterable[Grant], kept: Sequence[str]) -> list[str]:
    """Return the statements that close the fence, for one transaction.

    Args:
        database: the name of the database.
        grants: who may connect now.
        kept: roles that may connect to a fenced server. Superusers need not be named.
    """
    lost = [grant.role for grant in grants if grant.role not in kept]
    statements = [CLOSE]
    if lost:
        statements.append(f"REVOKE CONNECT ON DATABASE {identifier(database)} FROM {_roles(lost)}")
    if kept:
        statements.append(f"GRANT CONNECT ON DATABASE {identifier(database)} TO {_roles(kept)}")
    return statements


def open_statements(database: str, grants: Sequence[Grant], kept: Sequence[str]) -> list[str]:
    """Return the statements that open the fence, for one transaction.

    Args:
        database: the name of the database.
        grants: who could connect before the fence was closed.
        kept: roles that could connect meanwhile.
    """
    added = [role for role in kept if role not in {grant.role for grant in grants}]
    statements = [OPEN]
    if added:
        statements.append(f"REVOKE CONNECT ON DATABASE {identifier(database)} FROM {_roles(added)}")
    for grantable in (False, True):
        roles = [grant.role for grant in grants if grant.grantable is grantable]
        if roles:
            option = " WITH GRANT OPTION" if grantable else ""
            statements.append(f"GRANT CONNECT ON DATABASE {identifier(database)} TO {_roles(roles)}{option}")
    return statements


def _roles(names: Iterable[str | None]) -> str:
    return ", ".join("PUBLIC" if name is None else identifier(name) for name in names)
