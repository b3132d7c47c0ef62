"""Build indexes of the publisher that a table of the target lacks, with their primary keys and unique constraints.

**Invariants.**

- No existing index or constraint is dropped or changed. A published index is missing if the table of the target has no
  index with the same definition, and the schema has no relation with its name. A table has one primary key at most.
- No text of the publisher is executed: a definition is parsed and written again (publisher/index_definition.py). It
  runs as the table's owner and with an empty search_path. Code that a statement runs has no more rights than the owner:
  run_as_owner().

**Failure cases.**

- Process killed while an index is built: the transaction rolls back. A target since 14 notices within a second that the
  process is gone. An older one builds the index to its end.
- Process killed between an index and its constraint: the index is found again, and only the constraint is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import asyncpg

from subscriber.catalog.connection import Connection
from subscriber.errors import ProtocolError
from subscriber.publisher.index_definition import IndexDefinition
from subscriber.publisher.published_foreign_keys import PublishedForeignKey, foreign_keys_query, parse_foreign_keys
from subscriber.publisher.published_indexes import PublishedIndex
from subscriber.quoting import identifier, qualified
from subscriber.targets.postgres.restricted_operation import run_restricted

NOTICED = "1s"  # delay after which the target stops building an index, and releases our locks, if this process is gone

_TABLE = """
SELECT c.relkind::text AS relkind, c.relreplident::text AS identity,
       pg_catalog.pg_get_userbyid(c.relowner)::text AS owner,
       ARRAY(SELECT o.relname::text FROM pg_catalog.pg_class o WHERE o.relnamespace = c.relnamespace) AS names
  FROM pg_catalog.pg_class c WHERE c.oid = $1
"""
_INDEXES = """
SELECT i.relname::text AS name, pg_catalog.pg_get_indexdef(x.indexrelid) AS definition, x.indisprimary AS is_primary,
       x.indisreplident AS is_identity, EXISTS (SELECT FROM pg_catalog.pg_constraint k WHERE k.conindid = x.indexrelid
        AND k.conrelid = x.indrelid AND k.contype IN ('p', 'u', 'x')) AS is_constraint
  FROM pg_catalog.pg_index x JOIN pg_catalog.pg_class i ON i.oid = x.indexrelid WHERE x.indrelid = $1 AND x.indisvalid
"""

_IS_RESTRICTED = """
SELECT NOT subscriber.is_trusted(r.oid, $2::pg_catalog.name[]) AND subscriber.exceeds(r.oid)
  FROM pg_catalog.pg_roles r WHERE r.rolname = $1
"""


@dataclass(frozen=True, slots=True)
class MissingIndexes:
    """The indexes and constraints that a table of the target lacks.

    Attributes:
        schema: the schema of the table on the target.
        name: its name.
        owner: the role that owns it.
        indexes: the indexes to build, the largest first.
        constraints: the constraints to add when their indexes are there.
        identity: the index that REPLICA IDENTITY names on the publisher and that the target does not use yet.
    """

    schema: str
    name: str
    owner: str
    indexes: tuple[PublishedIndex, ...] = ()
    constraints: tuple[PublishedIndex, ...] = ()
    identity: PublishedIndex | None = None

    @property
    def last_statements(self) -> list[str]:
        """The statements that follow the builds of indexes."""
        statements = [index.add_constraint(self.schema, self.name) for index in self.constraints]
        if self.identity is not None:
            table, index = qualified(self.schema, self.name), identifier(self.identity.name)
            statements.append(f"ALTER TABLE {table} REPLICA IDENTITY USING INDEX {index}")
        return statements


async def find_missing(
    connection: Connection, relid: int, schema: str, name: str, published: Sequence[PublishedIndex]
) -> MissingIndexes:
    """Return the published indexes and constraints that a table of the target lacks.

    Args:
        connection: a connection to the target.
        relid: the table's OID on the target. A table that does not exist, or is partitioned, lacks nothing.
        schema: the table's schema.
        name: the table's name.
        published: the indexes of the publisher's table.
    """
    async with connection.transaction():
        await connection.execute("SET LOCAL search_path = ''")
        table = await connection.fetchrow(_TABLE, relid)
        there = await connection.fetch(_INDEXES, relid)
    if table is None or table["relkind"] != "r":
        return MissingIndexes(schema, name, "")
    known = {row["name"]: _parsed(row["definition"], schema, name) for row in there}
    has_primary_key = any(row["is_primary"] for row in there)
    of_constraints = {row["name"] for row in there if row["is_constraint"]}
    indexes, constraints = [], []
    for index in published:
        if index.constraint == "PRIMARY KEY" and has_primary_key:
            continue
        is_missing = index.definition not in known.values() and index.name not in table["names"]
        if is_missing:
            indexes.append(index)
        is_same = known.get(index.name) == index.definition and index.name not in of_constraints
        if index.constraint and (is_missing or is_same):
            constraints.append(index)
    names = {index.name for index in indexes} | known.keys()
    identity = None
    if table["identity"] == "d" and not has_primary_key:
        identity = next((index for index in published if index.is_replica_identity and index.name in names), None)
    return MissingIndexes(schema, name, table["owner"], tuple(indexes), tuple(constraints), identity)


@dataclass(frozen=True, slots=True)
class TableForeignKeys:
    """The foreign keys of a table of the target, and the role that owns the table."""

    owner: str
    keys: tuple[PublishedForeignKey, ...]


async def find_foreign_keys(connection: Connection, relid: int, schema: str, name: str) -> TableForeignKeys:
    """Return the foreign keys that a table of the target has.

    Args:
        connection: a connection to the target.
        relid: the table's OID on the target.
        schema: the table's schema.
        name: the table's name.
    """
    version = connection.get_server_version()
    query = foreign_keys_query(schema, name, version.major * 10_000)
    async with connection.transaction():
        await connection.execute("SET LOCAL standard_conforming_strings = on")
        table = await connection.fetchrow(_TABLE, relid)
        rows = await connection.fetch(query)
    return TableForeignKeys("" if table is None else table["owner"], tuple(parse_foreign_keys(map(tuple, rows))))


def _parsed(definition: str, schema: str, name: str) -> IndexDefinition | None:
    with suppress(ProtocolError):
        return IndexDefinition.parse(definition, schema, name)
    return None


async def run_as_owner(
    connection: Connection, owner: str, statements: Sequence[str], *, trusted_owners: Sequence[str] = ()
) -> None:
    """Run statements about a table in the connection's transaction, as the owner of the table.

    The statements run code of the owner. If the session's role has more rights, the code cannot reach them
    (restricted_operation.py).

    Args:
        connection: a session with a target that has schema "subscriber". It is in a transaction.
        owner: the owner of the table.
        statements: the statements.
        trusted_owners: roles whose code may have all rights of the session.

    Raises:
        asyncpg.PostgresError: a statement failed. The driver's error is raised as it is.
        StatementError: the session or the owner may not create temporary tables.
    """
    with suppress(asyncpg.PostgresError):  # older servers do not have the setting, and some systems do not support it
        async with connection.transaction():
            await connection.execute(f"SET LOCAL client_connection_check_interval = '{NOTICED}'")
    if await connection.fetchval(_IS_RESTRICTED, owner, list(trusted_owners)):
        for statement in statements:
            await run_restricted(connection, owner, statement)
        return
    await connection.execute("SET LOCAL standard_conforming_strings = on")
    await connection.execute(f"SET LOCAL ROLE {identifier(owner)}")
    await connection.execute("SET LOCAL search_path = ''")
    for statement in statements:
        await connection.fetch(statement, timeout=None)  # execute() would accept several statements
    await connection.execute("RESET ROLE")
