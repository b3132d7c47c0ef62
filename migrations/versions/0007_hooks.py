"""Tables whose rows a program's hooks change."""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"

STATEMENTS = [
    # Schema and name on the publisher; see catalog/hooked_tables.py. NULL: the same names, and unchanged rows.
    "ALTER TABLE subscriber.subscription_rel ADD COLUMN srsource text[]",
]


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    for statement in STATEMENTS:
        op.execute(statement)
