"""Tables whose rows a program's hooks change."""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"

STATEMENTS = [
    # Schema and name on the publisher; see catalog/hooked_tables.py. NULL: the rows come as they are, from the same
    # name.
    "ALTER TABLE subscriber.subscription_rel ADD COLUMN srsource text[]",
]


def upgrade() -> None:
    """Upgrade only: nobody goes back."""
    for statement in STATEMENTS:
        op.execute(statement)
