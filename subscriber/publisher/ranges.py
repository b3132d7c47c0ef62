"""Queries of the initial copy by ranges. subscriber/ranges/__init__.py explains their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from subscriber.lsn import Lsn
from subscriber.publisher.answers import oid, parsing
from subscriber.publisher.connection import Publisher
from subscriber.publisher.tables import PublishedTable
from subscriber.quoting import literal, literals, qualified
from subscriber.ranges.key_types import KEY_TYPES
from subscriber.ranges.keys import Key, KeyColumn, KeyRangeError, RangeKey
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
SELECT DISTINCT l.virtualtransaction FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_database d ON d.oid = l.database
 WHERE l.locktype = 'relation' AND l.relation = {relid} AND d.datname = pg_catalog.current_database() AND l.granted
   AND l.mode IN ('RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
"""
_SNAPSHOT = "SELECT pg_catalog.pg_current_snapshot()::text, pg_catalog.pg_current_wal_insert_lsn()::text"


async def range_key(publisher: Publisher, table: PublishedTable, publications: Sequence[str]) -> RangeKey:
    """Return the columns by which a table can be divided into ranges.

    Args:
        publisher: the publisher.
        table: the table.
        publications: the publications of the subscription.

    Raises:
        KeyRangeError: it cannot be divided. The message is the reason.
    """
    if publisher.server_version < 130000:
        raise KeyRangeError("the publisher is older than PostgreSQL 13")
    if publisher.in_recovery:
        raise KeyRangeError("the publisher is a standby")
    if table.relkind != "r":
        raise KeyRangeError("the published table is partitioned")
    if table.replica_identity == "n":
        raise KeyRangeError("the table has no replica identity")
    # A row whose key moves from a range that is not read to one that is copied arrives by an UPDATE only.
    if not await _publish_all_changes(publisher, publications):
        raise KeyRangeError("a publication does not publish all of INSERT, UPDATE and DELETE")
    if not await _may_lock(publisher, table):
        raise KeyRangeError("the role has no SELECT on the whole table")
    columns = await _identity(publisher, table)
    if not columns:
        raise KeyRangeError("the table has no replica identity that is an index, and no primary key")
    published = {column.name for column in table.columns}
    for column in columns:
        if column.name not in published:
            raise KeyRangeError(f'key column "{column.name}" is not published')
    return RangeKey(columns)


async def _publish_all_changes(publisher: Publisher, publications: Sequence[str]) -> bool:
    rows = await publisher.session.rows(
        "SELECT pg_catalog.bool_and(pubinsert AND pubupdate AND pubdelete) FROM pg_catalog.pg_publication"
        f" WHERE pubname IN ({literals(publications)})"
    )
    return rows[0][0] == "t"


async def _may_lock(publisher: Publisher, table: PublishedTable) -> bool:
    rows = await publisher.session.rows(f"SELECT pg_catalog.has_table_privilege({table.relid}::oid, 'SELECT')")
    return rows[0][0] == "t"


async def _identity(publisher: Publisher, table: PublishedTable) -> tuple[KeyColumn, ...]:
    """Return the columns of a table's key. Raises KeyRangeError."""
    identity = f"i.indexrelid = pg_catalog.pg_get_replica_identity_index({table.relid})"
    if table.replica_identity == "f":
        identity = "i.indisprimary AND i.indisvalid"
    version = publisher.server_version
    default_is_c = _DEFAULT_IS_C.format(
        libc="d.datlocprovider = 'c'" if version >= 150000 else "true",
        builtin="d.datlocprovider = 'b'" if version >= 150000 else "false",
    )
    query = _IDENTITY.format(relid=table.relid, identity=identity, default_is_c=default_is_c)
    parameters = publisher.session.parameters
    rows = await publisher.session.rows(query)
    columns = []
    for name, type_oid, kind, schema, type_name, collation_schema, collation, is_deterministic, in_bytes in rows:
        with parsing("a replica identity"):
            column = KeyColumn(name or "", oid(type_oid))
        kind_of_key = KEY_TYPES.get(column.type_oid)
        type_in_sql = qualified(schema or "", type_name or "")
        if kind_of_key is None and kind != "e":
            raise KeyRangeError(f'the order of the type of key column "{column.name}" is not known')
        if kind_of_key is None or kind_of_key.is_text:
            if parameters.get("client_encoding") != "UTF8" or parameters.get("server_encoding") == "SQL_ASCII":
                raise KeyRangeError(f'the texts of key column "{column.name}" are not in UTF8')
            if kind_of_key is None:
                column = replace(column, compared_as=type_in_sql)
            elif is_deterministic != "t":
                raise KeyRangeError(f'the collation of key column "{column.name}" is not deterministic')
            elif in_bytes != "t" or parameters.get("server_encoding") != "UTF8":
                collate = qualified(collation_schema or "", collation or "")
                column = replace(column, compared_as=f"{type_in_sql} COLLATE {collate}")
        columns.append(column)
    return tuple(columns)


async def place(publisher: Publisher, key: RangeKey, value: Key, lows: Sequence[Key]) -> int:
    """Ask the publisher how many of the keys `lows` are not greater than `value`."""
    rows = await publisher.session.rows(key.place_query(value, lows))
    return int(rows[0][0] or 0)


async def filenode(publisher: Publisher, table: PublishedTable) -> str | None:
    """Return the number of the file that has the rows of a table. A TRUNCATE changes it."""
    rows = await publisher.session.rows(f"SELECT pg_catalog.pg_relation_filenode({table.relid})")
    return rows[0][0]


async def writers(publisher: Publisher, table: PublishedTable) -> set[str]:
    """Return the virtual transactions that hold a lock for writing to a table."""
    return {name or "" for (name,) in await publisher.session.rows(_WRITERS.format(relid=table.relid))}


async def boundary(publisher: Publisher, table: PublishedTable, key: RangeKey, condition: str, rows: int) -> Key | None:
    """Return the key behind the first `rows` rows that satisfy a condition. None: there are no more rows.

    Raises:
        ServerError: the table is locked, or the role may not read it.
    """
    answer = await publisher.session.rows(
        f"{_lock(table)}; SELECT {key.names} FROM ONLY {qualified(table.schema, table.name)} WHERE {condition}"
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
    return (
        f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS};"
        f" LOCK TABLE ONLY {qualified(table.schema, table.name)} IN ACCESS SHARE MODE"
    )


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
