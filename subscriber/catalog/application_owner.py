"""The role of the target that owns the tables of an application, for hints that create tables or change owners."""

from __future__ import annotations

from subscriber.catalog.connection import Connection

_OWNER = """
SELECT r.rolname::text
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_roles r ON r.oid = c.relowner
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p') AND c.oid >= 16384 AND NOT r.rolsuper
   AND n.nspname <> 'subscriber' AND n.nspname !~ '^pg_'
 GROUP BY r.rolname
 ORDER BY pg_catalog.bool_or(n.nspname = $1) DESC, pg_catalog.count(*) DESC, r.rolname LIMIT 1
"""


async def application_owner(connection: Connection, schema: str) -> str | None:
    """Return the role that owns most tables of a schema, or of the other ones. None: superusers own all of them."""
    owner: str | None = await connection.fetchval(_OWNER, schema)
    return owner
