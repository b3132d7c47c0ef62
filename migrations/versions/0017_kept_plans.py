"""The functions of 0015 in PL/pgSQL, for catalogs in which they are in SQL: a session keeps PL/pgSQL's plans."""

from __future__ import annotations

from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    for statement in op.get_context().script.get_revision("0015").module.STATEMENTS:
        op.execute(statement.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", 1))
