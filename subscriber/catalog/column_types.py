"""The types of a table's columns, as format_type() prints them, with the base type of a domain."""

from __future__ import annotations

_TYPES = """
SELECT a.attrelid::pg_catalog.text, a.attname,
       pg_catalog.format_type(a.atttypid, a.atttypmod), pg_catalog.format_type(b.type, b.modifier)
  FROM pg_catalog.pg_attribute a CROSS JOIN LATERAL (
       WITH RECURSIVE bases(type, modifier, depth) AS (
         SELECT a.atttypid, a.atttypmod, 0
         UNION ALL
         SELECT t.typbasetype, CASE t.typtypmod WHEN -1 THEN b.modifier ELSE t.typtypmod END, b.depth + 1
           FROM bases b JOIN pg_catalog.pg_type t ON t.oid = b.type WHERE t.typtype = 'd')
       SELECT type, modifier FROM bases ORDER BY depth DESC LIMIT 1) b
 WHERE a.attrelid IN ({relids}) AND a.attnum > 0 AND NOT a.attisdropped
"""


def column_types_query(*relids: int) -> str:
    """Return the query for the OID of the table, and each column's name, type, and base type.

    The base type is the type itself unless it is a domain. The query is for servers of both sides, whose sessions have
    no search_path.
    """
    return _TYPES.format(relids=", ".join(map(str, relids)))
