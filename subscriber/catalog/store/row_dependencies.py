"""The unique indexes and foreign keys of a table, with those of its partitions and of the table that it is part of."""

from __future__ import annotations

import json
from dataclasses import dataclass

import asyncpg

# An index whose values do not follow from the columns' values alone, or whose equality is not that of the values, has
# no columns. `nulls` is true for NULLS NOT DISTINCT.
FIND = """
WITH named AS (
    SELECT c.oid FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
     WHERE n.nspname = $1::text AND c.relname = $2::text),
top AS (SELECT coalesce(pg_catalog.pg_partition_root(n.oid)::oid, n.oid) AS oid FROM named n),
members AS (
    SELECT oid FROM top UNION SELECT p.relid FROM top, LATERAL pg_catalog.pg_partition_tree(top.oid) p),
links AS (
    SELECT k.conrelid, k.confrelid, r.root AS child, f.root AS parent,
           (SELECT pg_catalog.json_agg(a.attname ORDER BY u.place)
              FROM pg_catalog.unnest(k.conkey) WITH ORDINALITY AS u (attnum, place)
              JOIN pg_catalog.pg_attribute a ON a.attrelid = k.conrelid AND a.attnum = u.attnum) AS child_columns,
           (SELECT pg_catalog.json_agg(a.attname ORDER BY u.place)
              FROM pg_catalog.unnest(k.confkey) WITH ORDINALITY AS u (attnum, place)
              JOIN pg_catalog.pg_attribute a ON a.attrelid = k.confrelid AND a.attnum = u.attnum) AS parent_columns
      FROM pg_catalog.pg_constraint k,
           LATERAL (SELECT coalesce(pg_catalog.pg_partition_root(k.conrelid)::oid, k.conrelid)) AS r (root),
           LATERAL (SELECT coalesce(pg_catalog.pg_partition_root(k.confrelid)::oid, k.confrelid)) AS f (root)
     WHERE k.contype = 'f'
       AND (k.conrelid IN (SELECT oid FROM members) OR k.confrelid IN (SELECT oid FROM members)))
SELECT pg_catalog.json_build_object(
  'root', top.oid::bigint,
  'label', (SELECT n.nspname || '.' || c.relname FROM pg_catalog.pg_class c
              JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = top.oid),
  'uniques', (
    SELECT pg_catalog.json_agg(DISTINCT pg_catalog.jsonb_build_array(
             CASE WHEN NOT i.indisexclusion AND i.indexprs IS NULL AND c.plain THEN c.names END,
             coalesce((pg_catalog.to_jsonb(i) ->> 'indnullsnotdistinct')::boolean, false)))
      FROM pg_catalog.pg_index i,
           LATERAL (SELECT pg_catalog.jsonb_agg(a.attname ORDER BY a.attname) AS names,
                           pg_catalog.bool_and(a.attgenerated = '' AND oc.opcdefault
                             AND i.indcollation[k.place::int - 1] = a.attcollation) AS plain
                      FROM pg_catalog.unnest(i.indkey::pg_catalog.int2[]) WITH ORDINALITY AS k (attnum, place)
                      LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
                      JOIN pg_catalog.pg_opclass oc ON oc.oid = i.indclass[k.place::int - 1]
                     WHERE k.place <= i.indnkeyatts) c
     WHERE i.indrelid IN (SELECT oid FROM members) AND (i.indisunique OR i.indisexclusion)),
  'links', (SELECT pg_catalog.json_agg(DISTINCT pg_catalog.jsonb_build_array(
              l.child::bigint, l.parent::bigint, l.child_columns, l.parent_columns)) FROM links l),
  'types', (
    SELECT pg_catalog.json_object_agg(a.attname, pg_catalog.json_build_array(
             base.oid::bigint, a.atttypmod, base.typtype,
             NOT EXISTS (SELECT FROM pg_catalog.pg_collation l
                          WHERE l.oid = a.attcollation AND NOT l.collisdeterministic)))
      FROM pg_catalog.pg_attribute a,
           LATERAL (WITH RECURSIVE d AS (
                      SELECT t.oid, t.typtype, t.typbasetype FROM pg_catalog.pg_type t WHERE t.oid = a.atttypid
                      UNION ALL
                      SELECT t.oid, t.typtype, t.typbasetype FROM d JOIN pg_catalog.pg_type t ON t.oid = d.typbasetype
                       WHERE d.typtype = 'd')
                    SELECT d.oid, d.typtype FROM d WHERE d.typtype <> 'd') base
     WHERE a.attrelid = top.oid AND a.attnum > 0 AND NOT a.attisdropped))
  FROM top
"""
# Triggers and rules that run for replicated changes. The triggers of this schema only remember deleted rows.
FOREIGN_EFFECTS = """
WITH members AS (
    SELECT r.srrelid AS oid FROM subscriber.subscription_rel r WHERE r.srsubid = $1
    UNION
    SELECT p.relid FROM subscriber.subscription_rel r, LATERAL pg_catalog.pg_partition_tree(r.srrelid) p
     WHERE r.srsubid = $1)
SELECT found.what FROM (
    SELECT pg_catalog.format('trigger %I of table %s', t.tgname, t.tgrelid::pg_catalog.regclass) AS what
      FROM pg_catalog.pg_trigger t JOIN pg_catalog.pg_proc f ON f.oid = t.tgfoid
     WHERE (t.tgenabled IN ('R', 'A') OR NOT $2::boolean AND t.tgenabled = 'O')
       AND NOT (f.pronamespace = 'subscriber'::pg_catalog.regnamespace AND f.proname ~ '^deleted_')
       AND t.tgrelid IN (SELECT m.oid FROM members m)
    UNION ALL
    SELECT pg_catalog.format('rule %I of table %s', r.rulename, r.ev_class::pg_catalog.regclass)
      FROM pg_catalog.pg_rewrite r
     WHERE r.ev_class IN (SELECT m.oid FROM members m)
       AND (r.ev_enabled IN ('R', 'A') OR NOT $2::boolean AND r.ev_enabled = 'O')) found
 ORDER BY 1 LIMIT 3
"""


@dataclass(frozen=True, slots=True)
class UniqueColumns:
    """The columns of a unique index, sorted. None: its values are not those of columns, as in an expression."""

    columns: tuple[str, ...] | None
    nulls_are_equal: bool


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """A foreign key between two tables, given by their OIDs."""

    child: int
    parent: int
    child_columns: tuple[str, ...]
    parent_columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ColumnType:
    """The type of a column, of a domain the base type."""

    oid: int
    modifier: int
    kind: str  # pg_type.typtype
    is_deterministic: bool  # equal values have the same bytes, as far as the collation decides


@dataclass(frozen=True, slots=True)
class RowDependencies:
    """The constraints by which rows of a table depend on others. Of a partition: those of the whole table."""

    root: int  # OID of the table, or of the partitioned table that it is part of
    label: str
    uniques: tuple[UniqueColumns, ...]
    foreign_keys: tuple[ForeignKey, ...]
    types: dict[str, ColumnType]


async def find_row_dependencies(connection: asyncpg.Connection, schema: str, name: str) -> RowDependencies | None:
    """Return the constraints of a table of the target. None: there is no such table."""
    text = await connection.fetchval(FIND, schema, name)
    if text is None:
        return None
    dependencies = json.loads(text)
    return RowDependencies(
        dependencies["root"],
        dependencies["label"],
        tuple(
            UniqueColumns(None if unique_columns is None else tuple(unique_columns), nulls)
            for unique_columns, nulls in dependencies["uniques"] or ()
        ),
        tuple(
            ForeignKey(child, parent, tuple(columns), tuple(referenced))
            for child, parent, columns, referenced in dependencies["links"] or ()
        ),
        {column: ColumnType(*facts) for column, facts in (dependencies["types"] or {}).items()},
    )


async def find_foreign_effects(connection: asyncpg.Connection, subid: int, *, replica_role: bool) -> list[str]:
    """Return triggers and rules of the subscription's tables that run for replicated changes, at most three."""
    return [row["what"] for row in await connection.fetch(FOREIGN_EFFECTS, subid, replica_role)]
