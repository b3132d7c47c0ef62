"""The functions of 0015 where they were made in SQL: in PL/pgSQL a session keeps their plans."""

from __future__ import annotations

from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    """Upgrade only: nobody goes back."""
    for statement in op.get_context().script.get_revision("0015").module.STATEMENTS:
        op.execute(statement.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", 1))
