"""Expressions of extended statistics are code of a table.

The planner computes functions of constants in them, whenever it reads the statistics of a table. They count as foreign
code, and are part of the shape of a guarded table.
"""

from __future__ import annotations

from alembic import op

revision = "0047"
down_revision = "0046"

CODE = (
    # A table with statistics is not taken for one without any code.
    (
        "OR 16384 <= ANY (i.indclass::oid[])))\n    THEN",
        "OR 16384 <= ANY (i.indclass::oid[])))\n"
        "       AND NOT EXISTS (SELECT FROM pg_catalog.pg_statistic_ext s WHERE s.stxrelid = relation)\n    THEN",
    ),
    (
        "SELECT k.relowner, k.trusted, k.expression, 'partition key', NULL FROM keys k WHERE k.expression IS NOT NULL)",
        "SELECT k.relowner, k.trusted, k.expression, 'partition key', NULL FROM keys k WHERE k.expression IS NOT NULL\n"
        "        UNION ALL\n"
        "        SELECT s.stxowner, subscriber.is_trusted(s.stxowner, trusted_owners),\n"
        "               pg_catalog.to_jsonb(s) ->> 'stxexprs',\n"
        "               'statistics ' || pg_catalog.quote_ident(s.stxname), NULL\n"
        "          FROM tree t JOIN pg_catalog.pg_statistic_ext s ON s.stxrelid = t.oid\n"
        "         WHERE pg_catalog.to_jsonb(s) ->> 'stxexprs' IS NOT NULL)",
    ),
)
SHAPE = (
    (
        "FROM pg_catalog.pg_trigger t\n              WHERE t.tgrelid = c.oid)), ' ' ORDER BY c.oid))",
        "FROM pg_catalog.pg_trigger t\n              WHERE t.tgrelid = c.oid), '/',\n"
        "            (SELECT string_agg(concat(s.oid, ':', s.xmin), ',' ORDER BY s.oid)\n"
        "               FROM pg_catalog.pg_statistic_ext s WHERE s.stxrelid = c.oid)), ' ' ORDER BY c.oid))",
    ),
)


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    earlier = op.get_context().script.get_revision("0022").module
    op.execute(earlier._replace("foreign_code(oid, name[], boolean, name)", CODE))
    op.execute(earlier._replace("guarded_shape(oid, text, name[])", SHAPE))
