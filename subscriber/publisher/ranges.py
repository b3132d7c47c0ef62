"""Queries of the initial copy by ranges. subscriber/ranges/__init__.py explains their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from subscriber import server_features as features
from subscriber.lsn import Lsn
from subscriber.publisher.answers import oid, parsing
from subscriber.publisher.connection import Publisher
from subscriber.publisher.table_versions import FIRST_USER_OID, PARTITION_TREE
from subscriber.publisher.tables import PublishedTable
from subscriber.quoting import literal, literals, qualified
from subscriber.ranges.key_types import KEY_TYPES
from subscriber.ranges.keys import PRINTED, Key, KeyColumn, KeyRangeError, RangeKey
from subscriber.ranges.snapshot import TransactionSnapshot
from subscriber.ranges.table_ranges import RangeSnapshot

LOCK_TIMEOUT_MS = 10_000
# The columns of the index that identifies rows, in its order. With REPLICA IDENTITY FULL: of the primary key. Texts of
# collation C, and of the collations that the server itself provides, are ordered by their bytes.
_IDENTITY = """
SELECT a.attname, a.atttypid, t.typtype, tn.nspname, t.typname, ln.nspname, l.collname, l.collisdeterministic,
       CASE a.attcollation WHEN 0 THEN true WHEN 100 THEN {default_is_c}
         ELSE l.collprovider = 'b' OR l.collprovider = 'c' AND l.collcollate IN ('C', 'POSIX') END
  FROM pg_catalog.pg_index i
       CROSS JOIN pg_catalog.unnest(i.indkey::pg_catalog.int2[]) WITH ORDINALITY AS k (attnum, place)
       JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
       JOIN pg_catalog.pg_type t ON t.oid = a.atttypid JOIN pg_catalog.pg_namespace tn ON tn.oid = t.typnamespace
       LEFT JOIN pg_catalog.pg_collation l ON l.oid = a.attcollation
       LEFT JOIN pg_catalog.pg_namespace ln ON ln.oid = l.collnamespace
 WHERE i.indrelid = {relid} AND k.place <= i.indnkeyatts AND {identity} ORDER BY k.place
"""
_DEFAULT_IS_C = """(SELECT {builtin} OR {libc} AND d.datcollate IN ('C', 'POSIX')
  FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database())"""
# A transaction that has written to the table holds its lock until every new snapshot sees it.
_WRITERS = """
{tree} SELECT DISTINCT l.virtualtransaction FROM pg_catalog.pg_locks l JOIN tree ON l.relation = tree.oid
  JOIN pg_catalog.pg_database d ON d.oid = l.database
 WHERE l.locktype = 'relation' AND d.datname = pg_catalog.current_database() AND l.granted
   AND l.mode IN ('RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
"""
_FILES = """
{tree} SELECT f.oid, pg_catalog.pg_relation_filenode(f.oid) FROM pg_catalog.pg_class f JOIN tree ON tree.oid = f.oid
 WHERE f.relkind = 'r' ORDER BY 1
"""
_SNAPSHOT = "SELECT pg_catalog.pg_current_snapshot()::text, pg_catalog.pg_current_wal_insert_lsn()::text"


async def range_key(publisher: Publisher, table: PublishedTable, publications: Sequence[str]) -> RangeKey:
    """Return the columns by which a table can be divided into ranges, and how their values are compared.

    Args:
        publisher: the publisher.
        table: the table.
        publications: the publications of the subscription.

    Raises:
        KeyRangeError: it cannot be divided. The message is the reason.
    """
    if table.relkind != "r":
        raise KeyRangeError("the published table is partitioned")
    identity = await _identity(publisher, table, publications)
    return RangeKey(tuple(_compared(publisher, column) for column in identity))


async def printed_range_key(publisher: Publisher, table: PublishedTable, publications: Sequence[str]) -> RangeKey:
    """Return the columns as range_key() does, for readers that do not compare their values: these are texts.

    The table may be partitioned.
    """
    identity = await _identity(publisher, table, publications)
    return RangeKey(tuple(_printed(publisher, column) for column in identity))


async def _publish_all_changes(publisher: Publisher, publications: Sequence[str]) -> bool:
    rows = await publisher.session.rows(
        "SELECT pg_catalog.bool_and(pubinsert AND pubupdate AND pubdelete) FROM pg_catalog.pg_publication"
        f" WHERE pubname IN ({literals(publications)})"
    )
    return rows[0][0] == "t"


async def _may_lock(publisher: Publisher, table: PublishedTable) -> bool:
    rows = await publisher.session.rows(f"SELECT pg_catalog.has_table_privilege({table.relid}::oid, 'SELECT')")
    return rows[0][0] == "t"


class _IdentityColumn(NamedTuple):
    """A column of a table's key."""

    name: str
    type_oid: int
    kind: str  # pg_type.typtype
    type_in_sql: str
    collation: str  # in SQL; empty: values are no texts
    is_deterministic: bool
    in_bytes: bool  # its texts are ordered by their bytes


async def _identity(publisher: Publisher, table: PublishedTable, publications: Sequence[str]) -> list[_IdentityColumn]:
    """Return the columns of a table's key. Raises KeyRangeError."""
    version = publisher.server_version
    if not features.SNAPSHOT_FUNCTIONS.is_in(version):
        raise KeyRangeError("the publisher is older than PostgreSQL 13")
    if publisher.in_recovery:
        raise KeyRangeError("the publisher is a standby")
    if table.replica_identity == "n":
        raise KeyRangeError("the table has no replica identity")
    # A row whose key moves from a range that is not read to one that is copied arrives by an UPDATE only.
    if not await _publish_all_changes(publisher, publications):
        raise KeyRangeError("a publication does not publish all of INSERT, UPDATE and DELETE")
    if not await _may_lock(publisher, table):
        raise KeyRangeError("the role has no SELECT on the whole table")
    identity = f"i.indexrelid = pg_catalog.pg_get_replica_identity_index({table.relid})"
    if table.replica_identity == "f":
        identity = "i.indisprimary AND i.indisvalid"
    has_provider = features.DATABASE_LOCALE_PROVIDER.is_in(version)
    default_is_c = _DEFAULT_IS_C.format(
        libc="d.datlocprovider = 'c'" if has_provider else "true",
        builtin="d.datlocprovider = 'b'" if has_provider else "false",
    )
    rows = await publisher.session.rows(
        _IDENTITY.format(relid=table.relid, identity=identity, default_is_c=default_is_c)
    )
    if not rows:
        raise KeyRangeError("the table has no replica identity that is an index, and no primary key")
    published = {column.name for column in table.columns}
    columns = []
    for name, type_oid, kind, schema, type_name, collation_schema, collation, is_deterministic, in_bytes in rows:
        if name not in published:
            raise KeyRangeError(f'key column "{name}" is not published')
        with parsing("a replica identity"):
            columns.append(
                _IdentityColumn(
                    name or "",
                    oid(type_oid),
                    kind or "",
                    qualified(schema or "", type_name or ""),
                    qualified(collation_schema or "", collation) if collation else "",
                    is_deterministic == "t",
                    in_bytes == "t" and publisher.session.parameters.get("server_encoding") == "UTF8",
                )
            )
    return columns


def _compared(publisher: Publisher, column: _IdentityColumn) -> KeyColumn:
    """Return a column whose values Python compares, or the publisher. Raises KeyRangeError if none of them can."""
    kind_of_key = KEY_TYPES.get(column.type_oid)
    if kind_of_key is None and column.kind != "e":
        raise KeyRangeError(f'the order of the type of key column "{column.name}" is not known')
    if kind_of_key is None:
        _check_encoding(publisher, column)
        return KeyColumn(column.name, column.type_oid, column.type_in_sql)
    if kind_of_key.is_text:
        _check_encoding(publisher, column)
        if not column.is_deterministic:
            raise KeyRangeError(f'the collation of key column "{column.name}" is not deterministic')
        if not column.in_bytes:
            return KeyColumn(column.name, column.type_oid, f"{column.type_in_sql} COLLATE {column.collation}")
    return KeyColumn(column.name, column.type_oid)


def _printed(publisher: Publisher, column: _IdentityColumn) -> KeyColumn:
    """Return a column whose values are texts. Raises KeyRangeError if the publisher may have two orders for its type.

    Conditions use operators of the schema pg_catalog. Types of extensions have operators of their own, by which an
    index is ordered.
    """
    if column.type_oid >= FIRST_USER_OID and column.kind != "e":
        raise KeyRangeError(f'the type of key column "{column.name}" is not one of PostgreSQL')
    if column.collation or column.kind == "e":
        _check_encoding(publisher, column)
    return KeyColumn(column.name, PRINTED, column.type_in_sql)


def _check_encoding(publisher: Publisher, column: _IdentityColumn) -> None:
    parameters = publisher.session.parameters
    if parameters.get("client_encoding") != "UTF8" or parameters.get("server_encoding") == "SQL_ASCII":
        raise KeyRangeError(f'the texts of key column "{column.name}" are not in UTF8')


async def place(publisher: Publisher, key: RangeKey, value: Key, lows: Sequence[Key]) -> int:
    """Ask the publisher how many of the keys `lows` are not greater than `value`."""
    rows = await publisher.session.rows(key.place_query(value, lows))
    return int(rows[0][0] or 0)


async def filenode(publisher: Publisher, table: PublishedTable) -> str | None:
    """Return the number of the file that has the rows of a table. A TRUNCATE changes it."""
    rows = await publisher.session.rows(f"SELECT pg_catalog.pg_relation_filenode({table.relid})")
    return rows[0][0]


async def files(publisher: Publisher, table: PublishedTable) -> list[tuple[int, int]]:
    """Return the OIDs of a table, or of its partitions, and the numbers of their files, which a rewrite changes."""
    rows = await publisher.session.rows(_FILES.format(tree=PARTITION_TREE.format(relid=table.relid)))
    with parsing("the files of a table"):
        return [(oid(relid), oid(number)) for relid, number in rows]


async def writers(publisher: Publisher, table: PublishedTable) -> set[str]:
    """Return the virtual transactions that hold a lock for writing to a table or its partitions."""
    query = _WRITERS.format(tree=PARTITION_TREE.format(relid=table.relid))
    return {name or "" for (name,) in await publisher.session.rows(query)}


async def boundary(publisher: Publisher, table: PublishedTable, key: RangeKey, condition: str, rows: int) -> Key | None:
    """Return the key behind the first `rows` rows that satisfy a condition. None: there are no more rows.

    Raises:
        ServerError: the table is locked, or the role may not read it.
    """
    answer = await publisher.session.rows(
        f"{_lock(table)}; SELECT {key.names} FROM {_rows_of(table)} WHERE {condition}"
        f" ORDER BY {key.names} OFFSET {rows} LIMIT 1"
    )
    with parsing("a key"):
        return key.from_texts(answer[0]) if answer else None


async def begin(publisher: Publisher, table: PublishedTable) -> RangeSnapshot:
    """Open the transaction of a range: lock the table, then take the snapshot.

    Raises:
        ServerError: the table is locked, or the role may not read it.
    """
    await publisher.begin_snapshot()
    # TRUNCATE and rewrites of the table remove rows from snapshots that are older.
    await publisher.session.query(_lock(table))
    rows = await publisher.session.rows(_SNAPSHOT)
    with parsing("a snapshot"):
        ((snapshot, position),) = rows
        return RangeSnapshot(TransactionSnapshot.parse(snapshot or ""), Lsn.parse(position or ""))


def _lock(table: PublishedTable) -> str:
    """Return the statements that lock a table before the transaction has a snapshot.

    A query takes its snapshot first, and would hold it while it waits for the lock.
    """
    return f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}; LOCK TABLE {_rows_of(table)} IN ACCESS SHARE MODE"


def _rows_of(table: PublishedTable) -> str:
    """Return a table in SQL, with its partitions and without the tables that inherit from it."""
    return f"{'ONLY ' if table.relkind == 'r' else ''}{qualified(table.schema, table.name)}"


async def current_snapshot(publisher: Publisher) -> TransactionSnapshot:
    """Return a snapshot that the session has taken now, and that it does not keep."""
    rows = await publisher.session.rows("SELECT pg_catalog.pg_current_snapshot()::text")
    with parsing("a snapshot"):
        return TransactionSnapshot.parse(rows[0][0] or "")


async def is_flushed(publisher: Publisher, position: Lsn) -> bool:
    """Return True if the publisher's WAL is durable up to `position`."""
    rows = await publisher.session.rows(
        f"SELECT pg_catalog.pg_current_wal_flush_lsn() OPERATOR(pg_catalog.>=) {literal(str(position))}::pg_lsn"
    )
    return rows[0][0] == "t"


async def request_flush(publisher: Publisher) -> None:
    """Have the publisher flush its WAL within wal_writer_delay.

    WAL that no commit requires may stay in memory for 15 s, such as that of pages which a query has pruned. The WAL
    writer flushes the commit of a transaction that has a number and nothing else, and all WAL before it.
    """
    await publisher.session.query("BEGIN READ WRITE; SELECT pg_catalog.pg_current_xact_id(); COMMIT")
