"""A plain table without any code is opened without the search for foreign code.

Each session of a worker asks for the foreign code of each table that it opens. The search covers triggers, rules,
defaults, constraints, indexes, types and partitions, and each session plans it. Since this script, the rows of the
table in pg_class, pg_attribute and pg_index are read first. The search takes place unless they exclude any code.
"""

from __future__ import annotations

from alembic import op

revision = "0041"
down_revision = "0040"

SEARCH = "RETURN QUERY"
# 16384 is the first OID of objects that users create. A foreign key has triggers on both tables.
CHECK_AND_SEARCH = """IF EXISTS (
        SELECT FROM pg_catalog.pg_class c
         WHERE c.oid = relation AND c.relkind = 'r' AND NOT c.relispartition
           AND NOT c.relhastriggers AND NOT c.relhasrules AND c.relchecks = 0)
       AND NOT EXISTS (
        SELECT FROM pg_catalog.pg_attribute a
         WHERE a.attrelid = relation AND (a.atthasdef OR a.attnum > 0 AND NOT a.attisdropped AND a.atttypid >= 16384))
       AND NOT EXISTS (
        SELECT FROM pg_catalog.pg_index i
         WHERE i.indrelid = relation AND (i.indisexclusion OR i.indexprs IS NOT NULL OR i.indpred IS NOT NULL
                                          OR 16384 <= ANY (i.indclass::oid[])))
    THEN
        RETURN;
    END IF;
    RETURN QUERY"""


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    deleted_rows = op.get_context().script.get_revision("0022").module
    changes = ((SEARCH, CHECK_AND_SEARCH),)
    op.execute(deleted_rows._replace("foreign_code(oid, name[], boolean, name)", changes))
