"""Queries for the published tables, their published columns and rows, and the COPY that reads them.

Source: src/backend/replication/logical/tablesync.c, fetch_remote_table_info() and copy_table();
src/backend/commands/subscriptioncmds.c, fetch_table_list().
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from subscriber import quoting
from subscriber import server_features as features
from subscriber.protocol.messages import Relation, RelationColumn, ReplicaIdentity


@dataclass(frozen=True, slots=True)
class PublishedColumn:
    """One published column; `is_key`: it is in the index that is the replica identity."""

    name: str
    type_oid: int  # on the publisher
    type_modifier: int  # -1: none
    is_key: bool
    is_generated: bool


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A table as a subscription's publications together publish it."""

    schema: str
    name: str
    relid: int  # on the publisher
    replica_identity: str  # pg_class.relreplident: d default, i index, f full, n nothing
    relkind: str  # r table, p partitioned table
    columns: tuple[PublishedColumn, ...]  # in the table's order, without those that are not published
    row_filters: tuple[str, ...]  # SQL; a row is published if one of them holds. Empty: all rows are published
    total_bytes: int  # on disk with its partitions; an estimate of what a copy will read


def as_relation(table: PublishedTable) -> Relation:
    """The table as a RELATION message would describe it: the same mapping, the same errors."""
    full = table.replica_identity == "f"
    columns = tuple(RelationColumn(full or c.is_key, c.name, c.type_oid, c.type_modifier) for c in table.columns)
    return Relation(None, table.relid, table.schema, table.name, ReplicaIdentity(table.replica_identity), columns)


def copy_statement(table: PublishedTable, *, binary: bool, condition: str | None = None) -> str:
    """The COPY … TO STDOUT that reads the table's published rows and columns, in binary or text format.

    `condition` is a condition in SQL on the rows. None: all rows.
    """
    name = quoting.qualified(table.schema, table.name)
    columns = ", ".join(quoting.identifier(column.name) for column in table.columns)
    plain = (
        condition is None
        and table.relkind == "r"
        and not table.row_filters
        and not any(c.is_generated for c in table.columns)
    )
    if plain:
        what = f"{name} ({columns})" if columns else name
    else:
        # A plain table's inheritance children are published, and copied, on their own.
        only = "ONLY " if table.relkind == "r" else ""
        filters = " OR ".join(table.row_filters)
        if condition is not None:
            filters = f"({filters}) AND {condition}" if filters else condition
        where = f" WHERE {filters}" if filters else ""
        what = f"(SELECT {columns} FROM {only}{name}{where})"
    return f"COPY {what} TO STDOUT{' WITH (FORMAT binary)' * binary}"


def copies_binary(binary: bool, server_version: int) -> bool:
    """Return True if the initial copy is in binary: the option is set, and the publisher supports it."""
    return binary and features.BINARY_COPY.is_in(server_version)


def tables_query(publications: Sequence[str], server_version: int) -> str:
    """Rows: schema, name and, since 15, the column list. A table with two different lists has two rows."""
    names = quoting.literals(publications)
    if features.PUBLISHED_TOGETHER.is_in(server_version):
        # Given all publications together, the function leaves out partitions whose root is published too.
        return (
            "SELECT DISTINCT n.nspname, c.relname, gpt.attrs FROM pg_catalog.pg_class c"
            " JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
            " JOIN (SELECT (pg_catalog.pg_get_publication_tables(VARIADIC array_agg(pubname::text))).*"
            f" FROM pg_catalog.pg_publication WHERE pubname IN ({names})) AS gpt ON gpt.relid = c.oid ORDER BY 1, 2"
        )
    columns = "schemaname, tablename" + (", attnames" if features.COLUMN_LISTS.is_in(server_version) else "")
    return f"SELECT DISTINCT {columns} FROM pg_catalog.pg_publication_tables WHERE pubname IN ({names}) ORDER BY 1, 2"


def _size(server_version: int) -> str:
    """Bytes on disk of c, of pg_class, with its partitions."""
    if not features.PARTITION_TREES.is_in(server_version):
        return "pg_catalog.pg_table_size(c.oid)"
    tree = "SELECT sum(pg_catalog.pg_table_size(relid)) FROM pg_catalog.pg_partition_tree(c.oid)"
    return f"CASE c.relkind WHEN 'p' THEN ({tree}) ELSE pg_catalog.pg_table_size(c.oid) END"


def columns_without_binary_query() -> str:
    """Servers since 14. Rows: schema, table, column and type, where the type or a part of it has no binary format.

    Only types that users or extensions have created are searched. Such types are rare, and without one the query reads
    only pg_type.
    """
    return """
WITH RECURSIVE lacking (oid) AS (
    SELECT t.oid FROM pg_catalog.pg_type t WHERE t.oid >= 16384 AND t.typsend = 0 AND t.typtype <> 'p'
    UNION
    SELECT p.whole FROM lacking l JOIN (
        SELECT t.oid AS whole, t.typelem AS part FROM pg_catalog.pg_type t WHERE t.typelem <> 0
        UNION ALL SELECT t.oid, t.typbasetype FROM pg_catalog.pg_type t WHERE t.typtype = 'd'
        UNION ALL SELECT r.rngtypid, r.rngsubtype FROM pg_catalog.pg_range r
        UNION ALL SELECT r.rngmultitypid, r.rngtypid FROM pg_catalog.pg_range r
        UNION ALL SELECT c.reltype, a.atttypid FROM pg_catalog.pg_class c
          JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
         WHERE c.reltype <> 0) p ON p.part = l.oid
)
SELECT n.nspname, c.relname, a.attname, pg_catalog.format_type(a.atttypid, NULL)
  FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_class c ON c.oid = a.attrelid AND c.relkind IN ('r', 'p')
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE a.attnum > 0 AND NOT a.attisdropped AND a.atttypid IN (SELECT l.oid FROM lacking l) ORDER BY 1, 2, a.attnum
"""


def relation_query(schema: str, name: str, server_version: int) -> str:
    """Return a query for oid, relreplident, relkind and bytes on disk. No row: there is no such table."""
    return (
        f"SELECT c.oid, c.relreplident, c.relkind, {_size(server_version)} FROM pg_catalog.pg_class c"
        " JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
        f" WHERE n.nspname = {quoting.literal(schema)} AND c.relname = {quoting.literal(name)}"
    )


def foreign_partitions_query(relid: int) -> str:
    """Rows: the name of each foreign table that is a partition, and an owner who is neither this role nor a superuser.

    The owners are those of the partition, of its server, and of the partitioned tables above it.
    """
    return f"""
SELECT pg_catalog.quote_ident(n.nspname) || '.' || pg_catalog.quote_ident(c.relname),
       (SELECT r.rolname FROM pg_catalog.pg_roles r
         WHERE NOT r.rolsuper AND r.rolname <> current_user
           AND r.oid IN (SELECT c.relowner UNION SELECT s.srvowner UNION
                         SELECT t.relowner FROM pg_catalog.pg_class t
                          WHERE t.oid IN (SELECT a.relid FROM pg_catalog.pg_partition_ancestors(c.oid) a))
         ORDER BY 1 LIMIT 1)
  FROM pg_catalog.pg_partition_tree({relid}) p JOIN pg_catalog.pg_class c ON c.oid = p.relid AND c.relkind = 'f'
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace JOIN pg_catalog.pg_foreign_table f ON f.ftrelid = c.oid
  JOIN pg_catalog.pg_foreign_server s ON s.oid = f.ftserver ORDER BY 1
"""


def column_lists_query(relid: int, publications: Sequence[str]) -> str:
    """Servers since 15. One row for each different column list: attribute numbers, or NULL for all columns."""
    return (
        "SELECT DISTINCT CASE WHEN array_length(gpt.attrs, 1) = c.relnatts THEN NULL ELSE gpt.attrs END"
        " FROM pg_catalog.pg_publication p, LATERAL pg_catalog.pg_get_publication_tables(p.pubname) gpt,"
        f" pg_catalog.pg_class c WHERE gpt.relid = {relid} AND c.oid = gpt.relid"
        f" AND p.pubname IN ({quoting.literals(publications)})"
    )


def row_filters_query(relid: int, publications: Sequence[str]) -> str:
    """Servers since 15. One row for each different filter; NULL: some publication has every row."""
    return (
        "SELECT DISTINCT pg_catalog.pg_get_expr(gpt.qual, gpt.relid)"
        " FROM pg_catalog.pg_publication p, LATERAL pg_catalog.pg_get_publication_tables(p.pubname) gpt"
        f" WHERE gpt.relid = {relid} AND p.pubname IN ({quoting.literals(publications)})"
    )


def columns_query(relid: int, server_version: int) -> str:
    """Rows: attnum, name, type, modifier, in the replica identity's index?, generated?

    Generated columns can be published since 18, and are left out from 12 to 17.
    """
    publishes_generated = features.PUBLISHED_GENERATED_COLUMNS.is_in(server_version)
    generated = "a.attgenerated <> ''" if publishes_generated else "false"
    has_generated = features.GENERATED_COLUMNS.is_in(server_version)
    skipped = " AND a.attgenerated = ''" if has_generated and not publishes_generated else ""
    return (
        f"SELECT a.attnum, a.attname, a.atttypid, a.atttypmod, coalesce(a.attnum = ANY(i.indkey), false), {generated}"
        " FROM pg_catalog.pg_attribute a LEFT JOIN pg_catalog.pg_index i"
        f" ON i.indexrelid = pg_catalog.pg_get_replica_identity_index({relid})"
        f" WHERE a.attnum > 0 AND NOT a.attisdropped{skipped} AND a.attrelid = {relid} ORDER BY a.attnum"
    )


def primary_key_query(relid: int) -> str:
    """Rows: the names of the primary key's columns, in its order."""
    return (
        "SELECT a.attname FROM pg_catalog.pg_index i,"
        " pg_catalog.unnest(i.indkey::pg_catalog.int2[]) WITH ORDINALITY AS k (attnum, place),"
        " pg_catalog.pg_attribute a"
        f" WHERE i.indrelid = {relid} AND i.indisprimary AND a.attrelid = {relid} AND a.attnum = k.attnum"
        " AND k.place <= i.indnkeyatts ORDER BY k.place"
    )


def foreign_origins_query(publications: Sequence[str], known: Sequence[tuple[str, str]], table: str) -> str:
    """Rows: the publications with a table that the publisher itself replicates from another server.

    `known` are tables, by schema and name, to leave out. `table` has the publisher's
    own subscriptions' tables in its column srrelid.
    """
    known_too = "".join(
        f" AND NOT (n.nspname = {quoting.literal(schema)} AND c.relname = {quoting.literal(name)})"
        for schema, name in known
    )
    return (
        "SELECT DISTINCT p.pubname FROM pg_catalog.pg_publication p,"
        " LATERAL pg_catalog.pg_get_publication_tables(p.pubname) gpt"
        f" JOIN {table} ps ON gpt.relid = ps.srrelid"
        " OR gpt.relid IN (SELECT relid FROM pg_catalog.pg_partition_ancestors(ps.srrelid)"
        " UNION SELECT relid FROM pg_catalog.pg_partition_tree(ps.srrelid)),"
        " pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
        f" WHERE c.oid = gpt.relid AND p.pubname IN ({quoting.literals(publications)}){known_too} ORDER BY 1"
    )
