"""What the publisher's catalog says about a table that the publisher has described, for the schema history of a log.

The queries take no lock on the table, so a long ALTER TABLE does not delay them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from subscriber import server_features as features
from subscriber.changelog.schema_history import LoggedAttribute, LoggedColumn, LoggedType, PrimaryKey, TableVersion
from subscriber.lsn import Lsn
from subscriber.protocol.messages import Relation, ReplicaIdentity
from subscriber.publisher.answers import count, modifier, oid, parsing
from subscriber.publisher.connection import Publisher
from subscriber.publisher.tables import PublishedTable, as_relation
from subscriber.quoting import literals


@dataclass(frozen=True, slots=True)
class _Attribute:
    """A row of pg_attribute that is not of a dropped column."""

    column: LoggedColumn
    generated: str  # pg_attribute.attgenerated


async def read_table_version(
    publisher: Publisher, relation: Relation, publications: Sequence[str], position: Lsn
) -> TableVersion:
    """Read the catalog of a published table. Two calls in a transaction see the same catalog.

    Args:
        publisher: a session whose settings are those of the log's values.
        relation: the publisher's description of the table.
        publications: the names of publications.
        position: the position of the version.

    Returns:
        The version, with the described columns if the catalog has these. Otherwise the table has been changed since,
        and the columns are those of the catalog.

    Raises:
        ServerError: the publisher refuses a query.
        ConnectionLost: the connection is lost.
    """
    session, relid = publisher.session, relation.relid
    rows = await session.rows(_table_query(relid))
    described = await session.rows(_columns_query(relid))
    members = await session.rows(_members_query(relid, publications, publisher.server_version))
    is_full = relation.replica_identity is ReplicaIdentity.FULL
    keys_found = await session.rows(_PRIMARY_KEY.format(relid=relid)) if is_full else []
    with parsing(f"table {relid}"):
        asked, attributes, storage = rows[0]
        living = [_attribute(row) for row in described if row[2] == "f"]
        candidates = [
            [a for a in living if not a.generated],
            [a for a in living if a.generated in ("", "s")],
            *(
                [a for a in living if str(a.column.number) in (listed or "").split()]
                for listed in {row[1] for row in members}
            ),
        ]
        found_attributes = next((c for c in candidates if _is_described(c, relation)), candidates[0])
        keys = {column.name: column.is_key for column in relation.columns}
        columns = tuple(replace(a.column, is_key=keys.get(a.column.name, False)) for a in found_attributes)
        version = TableVersion(
            position,
            Lsn.parse(asked or ""),
            relid,
            relation.schema,
            relation.name,
            relation.replica_identity.value,
            columns,
            count(attributes),
            tuple(count(row[0]) for row in described if row[2] == "t"),
            _hash(storage or ""),
            _hash("\n".join(sorted(row[0] or "" for row in members))),
            primary_key=next((PrimaryKey(oid(index), _numbers(numbers)) for index, numbers in keys_found), None),
        )
    return replace(version, types=types_of(version, await read_types(publisher, [version])))


async def read_snapshot_version(
    publisher: Publisher, table: PublishedTable, publications: Sequence[str], position: Lsn
) -> TableVersion:
    """Read the catalog of a published table in a transaction whose snapshot has a position of the log.

    Args and errors are those of read_table_version(). The catalog is that of the position, too.
    """
    version = await read_table_version(publisher, as_relation(table), publications, position)
    return replace(version, asked=position)


async def read_types(publisher: Publisher, versions: Iterable[TableVersion]) -> dict[int, LoggedType]:
    """Read the composite types, and arrays of them, that columns of tables have now, by OID. See LoggedType.

    Raises:
        ServerError: the publisher refuses a query.
        ConnectionLost: the connection is lost.
    """
    roots = sorted({c.type_oid for version in versions for c in version.columns if c.type_oid >= FIRST_USER_OID})
    if not roots:
        return {}
    types: dict[int, LoggedType] = {}
    unusable: set[int] = set()
    rows = await publisher.session.rows(_types_query(roots))
    with parsing("composite types"):
        for row in rows:
            number, element, name, kind, given, is_dropped = row
            type_oid = oid(number)
            if element is not None:
                types[type_oid] = LoggedType(type_oid, element=oid(element))
            elif is_dropped == "t":
                unusable.add(type_oid)
            else:
                known = types.get(type_oid, LoggedType(type_oid))
                attribute = LoggedAttribute(name or "", oid(kind), modifier(given))
                types[type_oid] = replace(known, attributes=(*known.attributes, attribute))
    usable = {number: kind for number, kind in types.items() if number not in unusable}
    return {number: kind for number, kind in usable.items() if kind.element is None or kind.element in usable}


def types_of(version: TableVersion, types: dict[int, LoggedType]) -> tuple[LoggedType, ...]:
    """Return the types that the columns of a version have, directly or in other types."""
    used: set[int] = set()
    wanted = [column.type_oid for column in version.columns]
    while wanted:
        kind = types.get(wanted.pop())
        if kind is not None and kind.oid not in used:
            used.add(kind.oid)
            wanted += [attribute.type_oid for attribute in kind.attributes]
            wanted += [] if kind.element is None else [kind.element]
    return tuple(types[number] for number in sorted(used))


# Rows are unique by an immediate key also within a transaction.
_PRIMARY_KEY = (
    "SELECT i.indexrelid, pg_catalog.array_to_string((i.indkey::pg_catalog.int2[])[0:i.indnkeyatts - 1], ' ')"
    " FROM pg_catalog.pg_index i"
    " WHERE i.indrelid = {relid} AND i.indisprimary AND i.indisvalid AND i.indimmediate"
)
FIRST_USER_OID = 16384  # no type of PostgreSQL itself


def _attribute(row: tuple[str | None, ...]) -> _Attribute:
    number, name, _, generated, kind, given, written, leaves, missing, least, greatest = row
    has_missing: bool | None = False
    if count(missing):
        has_missing = True if missing == leaves and least is not None and least == greatest else None
    column = LoggedColumn(
        name or "",
        oid(kind),
        modifier(given),
        False,
        count(number),
        written,
        has_missing,
        least if has_missing else None,
    )
    return _Attribute(column, generated or "")


def _is_described(attributes: Sequence[_Attribute], relation: Relation) -> bool:
    catalog = [(a.column.name, a.column.type_oid, a.column.type_modifier) for a in attributes]
    return catalog == [(c.name, c.type_oid, c.type_modifier) for c in relation.columns]


def _numbers(text: str | None) -> tuple[int, ...]:
    return tuple(count(number) for number in (text or "").split())


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


# The OIDs of a table and its partitions, as "tree". Unlike pg_partition_tree(), these take no locks.
PARTITION_TREE = (
    "WITH RECURSIVE tree (oid) AS (SELECT {relid}::pg_catalog.oid UNION ALL"
    " SELECT i.inhrelid FROM pg_catalog.pg_inherits i JOIN tree ON tree.oid = i.inhparent"
    " JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid AND c.relispartition)"
)
_ANCESTORS = (
    "WITH RECURSIVE ancestors (oid) AS (SELECT {relid}::pg_catalog.oid UNION ALL"
    " SELECT i.inhparent FROM pg_catalog.pg_inherits i JOIN ancestors ON ancestors.oid = i.inhrelid"
    " JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid AND c.relispartition)"
)


def _table_query(relid: int) -> str:
    """Return a query for WAL position, highest column number, and files of a table. No row: there is no such table."""
    return (
        f"{PARTITION_TREE.format(relid=relid)}"
        " SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()"
        " ELSE pg_catalog.pg_current_wal_insert_lsn() END, c.relnatts,"
        " (SELECT pg_catalog.string_agg(f.oid::text || ':' || f.relfilenode::text, ',' ORDER BY f.oid)"
        " FROM pg_catalog.pg_class f JOIN tree ON tree.oid = f.oid AND f.relkind = 'r')"
        f" FROM pg_catalog.pg_class c WHERE c.oid = {relid}"
    )


def _members_query(relid: int, publications: Sequence[str], server_version: int) -> str:
    """A row for each publication of the table: all that decides which changes are published, and its column list."""
    lists = features.COLUMN_LISTS.is_in(server_version)
    generated = "p.pubgencols, " if features.PUBLISHED_GENERATED_COLUMNS.is_in(server_version) else ""
    parts = "p.oid, p.puballtables, p.pubinsert, p.pubupdate, p.pubdelete, p.pubtruncate, p.pubviaroot, "
    schemas = (
        " LEFT JOIN pg_catalog.pg_publication_namespace n ON n.pnpubid = p.oid AND n.pnnspid IN (SELECT relnamespace"
        " FROM pg_catalog.pg_class JOIN ancestors USING (oid))"
        if lists
        else ""
    )
    return (
        f"{_ANCESTORS.format(relid=relid)}"
        f" SELECT pg_catalog.concat_ws(':', {parts}{generated}r.oid"
        f"{', n.oid, r.prqual::text, r.prattrs::text' if lists else ''}),"
        f" {'r.prattrs::text' if lists else 'NULL'}"
        " FROM pg_catalog.pg_publication p LEFT JOIN pg_catalog.pg_publication_rel r ON r.prpubid = p.oid"
        f" AND r.prrelid IN (SELECT oid FROM ancestors){schemas} WHERE p.pubname IN ({literals(publications)})"
        f" AND (p.puballtables OR r.oid IS NOT NULL{' OR n.oid IS NOT NULL' if lists else ''})"
    )


def _columns_query(relid: int) -> str:
    """A row for each column, dropped ones too, in the order of their numbers.

    Number, name, dropped?, generated, type, modifier, transaction of its definition. Of the table or its partitions:
    their number, the number of those with a value for rows before ADD COLUMN, the least and the greatest such value.
    """
    # Only arrays with the delimiter "," can be read as text[].
    missing = "CASE WHEN l.atthasmissing AND t.typdelim = ',' THEN (l.attmissingval::text::text[])[1] END"
    return (
        f"{PARTITION_TREE.format(relid=relid)}, leaves AS (SELECT l.attname, l.atthasmissing, {missing} AS missing"
        " FROM pg_catalog.pg_attribute l JOIN pg_catalog.pg_type t ON t.oid = l.atttypid JOIN tree"
        " ON tree.oid = l.attrelid JOIN pg_catalog.pg_class c ON c.oid = l.attrelid AND c.relkind = 'r'"
        " WHERE l.attnum > 0 AND NOT l.attisdropped)"
        " SELECT a.attnum, a.attname, a.attisdropped, a.attgenerated, a.atttypid, a.atttypmod, a.xmin,"
        " s.leaves, s.has_missing, s.least, s.greatest FROM pg_catalog.pg_attribute a"
        " LEFT JOIN (SELECT attname, pg_catalog.count(*) AS leaves,"
        " pg_catalog.count(*) FILTER (WHERE atthasmissing) AS has_missing,"
        ' pg_catalog.min(missing COLLATE "C") AS least, pg_catalog.max(missing COLLATE "C") AS greatest'
        " FROM leaves GROUP BY attname) s ON s.attname = a.attname AND NOT a.attisdropped"
        f" WHERE a.attrelid = {relid} AND a.attnum > 0 ORDER BY a.attnum"
    )


def _types_query(roots: Sequence[int]) -> str:
    """A row for each attribute of composite types, dropped ones too, and for each array type.

    OID, OID of an array's elements; of an attribute: name, type, modifier, dropped?
    """
    of_types = " OR ".join(f"t.oid = {number}" for number in roots)
    attributes = "pg_catalog.pg_attribute a ON t.typtype = 'c' AND a.attrelid = t.typrelid AND a.attnum > 0"
    elements = "pg_catalog.pg_type e ON e.typarray = t.oid AND e.typdelim = ','"
    return (
        f"WITH RECURSIVE used (oid) AS (SELECT t.oid FROM pg_catalog.pg_type t WHERE {of_types}"
        " UNION SELECT CASE WHEN e.oid IS NOT NULL THEN e.oid ELSE a.atttypid END FROM used JOIN pg_catalog.pg_type t"
        f" ON t.oid = used.oid LEFT JOIN {elements} LEFT JOIN {attributes} AND NOT a.attisdropped"
        f" WHERE CASE WHEN e.oid IS NOT NULL THEN e.oid ELSE a.atttypid END >= {FIRST_USER_OID})"
        " SELECT t.oid, e.oid, a.attname, a.atttypid, a.atttypmod, a.attisdropped"
        f" FROM used JOIN pg_catalog.pg_type t ON t.oid = used.oid LEFT JOIN {elements} LEFT JOIN {attributes}"
        " WHERE e.oid IS NOT NULL OR a.attrelid IS NOT NULL ORDER BY t.oid, a.attnum"
    )
