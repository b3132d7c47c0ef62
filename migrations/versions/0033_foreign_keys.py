"""Foreign keys that are added to tables when they are ready, with copy_indexes = after."""

from __future__ import annotations

from alembic import op

revision = "0033"
down_revision = "0032"

STATEMENTS = [
    "ALTER TABLE subscriber.subscription_rel ADD COLUMN srforeignkeys boolean NOT NULL DEFAULT false",
    # The large objects of the rows have the column as well.
    "UPDATE subscriber.subscription_rel SET kept = kept",
]


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    for statement in STATEMENTS:
        op.execute(statement)
