"""The indexes of a published table, with the constraints that they belong to."""

from __future__ import annotations

from dataclasses import dataclass

from subscriber.connection.session import Session
from subscriber.publisher.answers import parsing
from subscriber.publisher.index_definition import IndexDefinition
from subscriber.quoting import identifier, literal, qualified

# Indexes of exclusion constraints, and of constraints WITHOUT OVERLAPS, are not copied.
_INDEXES = """
SELECT i.relname, pg_catalog.pg_get_indexdef(x.indexrelid), pg_catalog.pg_relation_size(i.oid),
       coalesce(k.contype, ''), k.condeferrable, k.condeferred, x.indisreplident,
       x.indexrelid = pg_catalog.pg_get_replica_identity_index(c.oid) OR c.relreplident = 'f' AND x.indisprimary
  FROM pg_catalog.pg_index x JOIN pg_catalog.pg_class i ON i.oid = x.indexrelid
  JOIN pg_catalog.pg_am m ON m.oid = i.relam
  JOIN pg_catalog.pg_class c ON c.oid = x.indrelid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
  LEFT JOIN pg_catalog.pg_constraint k
       ON k.conindid = x.indexrelid AND k.conrelid = x.indrelid AND k.contype IN ('p', 'u', 'x')
 WHERE n.nspname = {schema} AND c.relname = {name} AND c.relkind = 'r' AND x.indisvalid AND NOT x.indisexclusion
   AND (k.oid IS NULL OR k.contype IN ('p', 'u') AND m.amname = 'btree')
 ORDER BY pg_catalog.pg_relation_size(i.oid) DESC, i.relname
"""
_CONSTRAINTS = {"p": "PRIMARY KEY", "u": "UNIQUE"}


@dataclass(frozen=True, slots=True)
class PublishedIndex:
    """An index of the publisher.

    Attributes:
        name: its name, which is also that of its constraint.
        definition: the columns, and all that CREATE INDEX says of them.
        size: its size in bytes.
        constraint: PRIMARY KEY or UNIQUE. Empty: the index belongs to no constraint.
        deferral: the words about checks at the end of a transaction. Empty: the constraint is checked immediately.
        is_replica_identity: the table has REPLICA IDENTITY USING INDEX with this index.
        is_key: the publisher sends the columns of the index with UPDATE and DELETE, as the key of the row.
    """

    name: str
    definition: IndexDefinition
    size: int
    constraint: str
    deferral: str
    is_replica_identity: bool
    is_key: bool

    def create(self, schema: str, table: str) -> str:
        """Return the statement that builds the index of a table of the target.

        Raises:
            ProtocolError: the definition has a text that no server has.
        """
        return self.definition.create(self.name, schema, table)

    def add_constraint(self, schema: str, table: str) -> str:
        """Return the statement that makes the index of the target's table the one of its constraint."""
        name = identifier(self.name)
        return (
            f"ALTER TABLE {qualified(schema, table)} ADD CONSTRAINT {name} {self.constraint} USING INDEX {name}"
            f"{' ' * bool(self.deferral)}{self.deferral}"
        )


async def published_indexes(source: Session, schema: str, name: str) -> list[PublishedIndex]:
    """Return the valid indexes of a table of the publisher, the largest first. A partitioned table has none.

    Args:
        source: a session with an empty search_path, and standard_conforming_strings.
        schema: the schema of the table.
        name: the name of the table.

    Raises:
        ServerError: the publisher refuses the query.
        ProtocolError: a definition cannot be parsed.
    """
    rows = await source.rows(_INDEXES.format(schema=literal(schema), name=literal(name)))
    with parsing(f'the indexes of table "{schema}.{name}"'):
        return [
            PublishedIndex(
                index or "",
                IndexDefinition.parse(definition or "", schema, name),
                int(size or 0),
                _CONSTRAINTS.get(kind or "", ""),
                "DEFERRABLE" * (deferrable == "t") + " INITIALLY DEFERRED" * (deferred == "t"),
                identity == "t",
                key == "t",
            )
            for index, definition, size, kind, deferrable, deferred, identity, key in rows
        ]
