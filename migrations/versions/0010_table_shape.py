"""The shape of a table as a function, which apply workers call only when the table may have changed."""

from __future__ import annotations

from alembic import op

revision = "0010"
down_revision = "0009"

# Returns whether the subscription's owner, if given, may act as the table's owner, and the versions of the table's rows
# in the catalog. In PL/pgSQL, which keeps the plan. Without SET search_path, because the callers have set it.
TABLE_SHAPE = """
CREATE FUNCTION subscriber.table_shape(relation pg_catalog.oid, owner pg_catalog.text) RETURNS pg_catalog.text
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (
        SELECT pg_catalog.concat_ws(' ',
          CASE WHEN owner = '' THEN true
               ELSE pg_catalog.pg_has_role(owner::pg_catalog.name, c.relowner,
                      CASE WHEN pg_catalog.current_setting('server_version_num')::pg_catalog.int4 >= 160000
                           THEN 'SET' ELSE 'MEMBER' END) END,
          n.nspname, c.relname, c.relkind, c.relreplident, c.relowner,
          c.relrowsecurity, c.relforcerowsecurity, c.relhasrules, c.relchecks,
          (SELECT pg_catalog.string_agg(a.xmin::pg_catalog.text, ',' ORDER BY a.attnum)
             FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0), '/',
          (SELECT pg_catalog.string_agg(pg_catalog.concat(i.indexrelid, ':', i.xmin), ',' ORDER BY i.indexrelid)
             FROM pg_catalog.pg_index i WHERE i.indrelid = c.oid), '/',
          (SELECT pg_catalog.string_agg(t.xmin::pg_catalog.text, ',' ORDER BY t.oid)
             FROM pg_catalog.pg_trigger t WHERE t.tgrelid = c.oid),
          CASE WHEN c.relkind = 'p' THEN
            (SELECT pg_catalog.string_agg(pg_catalog.concat(p.relid::pg_catalog.oid, ':', i.indexrelid, ':', i.xmin),
                                          ',' ORDER BY p.relid::pg_catalog.oid, i.indexrelid)
               FROM pg_catalog.pg_partition_tree(c.oid) p LEFT JOIN pg_catalog.pg_index i ON i.indrelid = p.relid) END)
          FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
         WHERE c.oid = relation);
END $$
"""


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    op.execute(TABLE_SHAPE)
