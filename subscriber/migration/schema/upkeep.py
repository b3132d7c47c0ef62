"""Materialized views and statistics of the planner, which pg_dump --schema-only leaves empty on the target.

Logical replication publishes neither. A materialized view is refreshed on the target, after the views that it reads. A
view that has no rows on the source, WITH NO DATA, stays so on the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import TopologicalSorter

import anyio

from subscriber.catalog.connection import Connection
from subscriber.migration.schema.restore import target_session
from subscriber.publisher.own_schema import OWN_SCHEMA
from subscriber.quoting import qualified

_VIEWS = f"""
SELECT n.nspname::text, c.relname::text, c.relispopulated FROM pg_catalog.pg_class c
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind = 'm' AND n.nspname <> '{OWN_SCHEMA}' ORDER BY 1, 2
"""
# The materialized views that each one reads, also through ordinary views.
_READS = """
WITH RECURSIVE reads (view, relation) AS (
    SELECT r.ev_class, d.refobjid FROM pg_catalog.pg_rewrite r
      JOIN pg_catalog.pg_class c ON c.oid = r.ev_class AND c.relkind IN ('m', 'v')
      JOIN pg_catalog.pg_depend d ON d.classid = 'pg_catalog.pg_rewrite'::pg_catalog.regclass AND d.objid = r.oid
       AND d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.refobjid <> r.ev_class
), indirect (view, relation) AS (
    SELECT view, relation FROM reads
    UNION
    SELECT i.view, r.relation FROM indirect i JOIN reads r ON r.view = i.relation
)
SELECT vn.nspname::text, v.relname::text, mn.nspname::text, m.relname::text
  FROM (SELECT DISTINCT view, relation FROM indirect) i
  JOIN pg_catalog.pg_class v ON v.oid = i.view AND v.relkind = 'm'
  JOIN pg_catalog.pg_namespace vn ON vn.oid = v.relnamespace
  JOIN pg_catalog.pg_class m ON m.oid = i.relation AND m.relkind = 'm'
  JOIN pg_catalog.pg_namespace mn ON mn.oid = m.relnamespace
"""
# Partitioned tables have statistics of their own, which autovacuum never collects. Counters of a crashed server are
# empty, so a table may be analyzed twice.
_NOT_ANALYZED = """
SELECT n.nspname::text, c.relname::text FROM pg_catalog.pg_class c
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p', 'm') AND c.relpersistence <> 't' AND c.oid >= 16384 AND c.relispopulated
   AND n.nspname NOT IN ('information_schema', 'pg_toast')
   AND coalesce(pg_catalog.pg_stat_get_last_analyze_time(c.oid),
                pg_catalog.pg_stat_get_last_autoanalyze_time(c.oid)) IS NULL
 ORDER BY c.relkind, pg_catalog.pg_table_size(c.oid) DESC
"""


async def populated_views(source: Connection) -> list[str]:
    """Return the quoted names of the materialized views that have rows."""
    return [qualified(row[0], row[1]) for row in await source.fetch(_VIEWS) if row[2]]


async def refresh_materialized_views(source: Connection, target: Connection, *, all_views: bool = False) -> list[str]:
    """Refresh the materialized views that have rows on the source, in the order of their dependencies.

    Args:
        all_views: refresh also views that have rows on the target already.

    Returns:
        The quoted names of the refreshed views.

    Raises:
        asyncpg.PostgresError: a refresh failed. Views that were refreshed before keep their rows.
    """
    populated = {(row[0], row[1]) for row in await source.fetch(_VIEWS) if row[2]}
    here = {(row[0], row[1]): row[2] for row in await target.fetch(_VIEWS)}
    order: TopologicalSorter[tuple[str, str]] = TopologicalSorter(dict.fromkeys(sorted(here), ()))
    for schema, name, other_schema, other_name in await target.fetch(_READS):
        order.add((schema, name), (other_schema, other_name))
    refreshed = []
    for view in order.static_order():
        if view in populated and view in here and (all_views or not here[view]):
            await target.execute(f"REFRESH MATERIALIZED VIEW {qualified(*view)}")
            refreshed.append(qualified(*view))
    return refreshed


async def analyze(target: str, *, jobs: int = 2) -> int:
    """Collect statistics of each table and materialized view that was never analyzed, the largest first.

    Args:
        target: the connection string.
        jobs: the number of sessions.

    Returns:
        The number of tables.
    """
    async with target_session(target) as connection:
        tables = await connection.fetch(_NOT_ANALYZED)
    waiting = iter([qualified(schema, name) for schema, name in tables])
    async with anyio.create_task_group() as group:
        for _ in range(min(jobs, len(tables))):
            group.start_soon(_analyze, target, waiting)
    return len(tables)


async def _analyze(target: str, waiting: Iterator[str]) -> None:
    async with target_session(target) as connection:
        for name in waiting:
            await connection.execute(f"ANALYZE {name}")
