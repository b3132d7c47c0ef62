"""TableAccess: the roles that read the rows of a table, and what a role lacks for that.

A session on the publisher reads as the role that has logged in. A session on the target may read as the role that
changes of a table are applied as: the table's owner, or the subscription's (run_as_owner). It does so only where the
role that has logged in may not read the heap itself. A superuser and a member of pg_read_all_data never switch.

**Invariants.** A table that a role cannot read is refused before its first query, with the side, the role, and the
statement that grants the privilege. The heaps of a partitioned table are read one by one, and each has its own grants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from subscriber import server_features as features
from subscriber.connection.session import Session
from subscriber.display import sql_identifier, sql_name
from subscriber.publisher.answers import parsing
from subscriber.publisher.partitions import TablePartition
from subscriber.quoting import literal, qualified
from subscriber.remedy import Remedy

_ACCESS = """
SELECT n.nspname, c.relname, session_user,
       pg_catalog.has_schema_privilege(session_user, n.oid, 'USAGE'),
       pg_catalog.has_table_privilege(session_user, c.oid, 'SELECT'),
       pg_catalog.row_security_active(c.oid),
       CASE WHEN pg_catalog.pg_has_role(session_user, r.oid, '{membership}') THEN r.rolname END,
       r.rolname,
       pg_catalog.has_schema_privilege(r.oid, n.oid, 'USAGE'), pg_catalog.has_table_privilege(r.oid, c.oid, 'SELECT'),
       c.relrowsecurity AND NOT (r.rolsuper OR r.rolbypassrls)
         AND (c.relforcerowsecurity OR NOT pg_catalog.pg_has_role(r.oid, c.relowner, 'USAGE'))
  FROM (VALUES {heaps}) h (schema, name)
  JOIN pg_catalog.pg_namespace n ON n.nspname = h.schema
  JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = h.name
  JOIN pg_catalog.pg_roles r ON {acting}
"""


@dataclass(frozen=True, slots=True)
class TableAccess:
    """The way in which a session reads the rows of a table.

    Attributes:
        roles: the role that the session switches to, by the quoted name of a heap. Not there: it does not switch.
        problem: what keeps the session from reading the table, as words that follow its name. None: nothing.
        remedy: the statements that let it read. None: there is no problem.
    """

    roles: Mapping[str, str] = field(default_factory=dict)
    problem: str | None = None
    remedy: Remedy | None = None


def grant_read(tables: Sequence[tuple[str, str]], role: str) -> str:
    """Return the statements with which a role may read tables. `tables`: schema and name of each."""
    to = sql_identifier(role)
    schemas = ", ".join(sql_identifier(schema) for schema in dict.fromkeys(schema for schema, _ in tables))
    names = ", ".join(sql_name(*table) for table in tables)
    return f"GRANT USAGE ON SCHEMA {schemas} TO {to}; GRANT SELECT ON TABLE {names} TO {to};"


async def read_access(
    session: Session, side: str, heaps: Sequence[TablePartition], *, switches: bool = False, acting: str | None = None
) -> TableAccess:
    """Find the roles that read some heaps.

    Args:
        session: a session with the server, as the role that has logged in.
        side: the server's name in messages: publisher or target.
        heaps: the heaps, and the table itself if it is read as a whole.
        switches: the session may act as the role that changes are applied as.
        acting: that role for all tables. None: the owner of each heap.
    """
    names = dict.fromkeys((heap.schema, heap.name) for heap in heaps)
    rows = await session.rows(
        _ACCESS.format(
            membership=features.set_role_privilege(session.server_version // 10_000),
            heaps=", ".join(f"({literal(schema)}, {literal(name)})" for schema, name in names),
            acting="r.oid = c.relowner" if acting is None else f"r.rolname = {literal(acting)}",
        )
    )
    roles: dict[str, str] = {}
    closed: dict[str, list[tuple[str, str]]] = {}  # unreadable heaps, by role
    filtered: dict[str, tuple[str, str]] = {}  # the first heap with row security, by role
    with parsing("privileges"):
        for schema, name, user, *access in rows:
            assert schema is not None
            assert name is not None
            assert user is not None
            uses, selects, is_filtered, settable, other, other_uses, other_selects, other_filtered = access
            role = user
            if "f" in (uses, selects) and switches and settable not in (None, user):
                assert other is not None
                role, uses, selects, is_filtered = other, other_uses, other_selects, other_filtered
                roles[qualified(schema, name)] = role
            if "f" in (uses, selects):
                closed.setdefault(role, []).append((schema, name))
            elif is_filtered == "t":
                filtered.setdefault(role, (schema, name))
    if closed:
        role = next(iter(closed))
        statements = [grant_read(tables, reader) for reader, tables in closed.items()]
        remedy = Remedy(f"on the {side}", " ".join(statements))
        return TableAccess(roles, f'role "{role}" may not read it on the {side}', remedy)
    for role, heap in filtered.items():
        problem = f'row-level security of {".".join(heap)} on the {side} hides rows from role "{role}"'
        exempt = f"ALTER ROLE {sql_identifier(role)} BYPASSRLS;"
        if qualified(*heap) in roles and acting is None:  # the owner, upon which it is forced
            exempt = f"ALTER TABLE {sql_name(*heap)} NO FORCE ROW LEVEL SECURITY;"
        return TableAccess(roles, problem, Remedy(f"on the {side}", exempt))
    return TableAccess(roles)
