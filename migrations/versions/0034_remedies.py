"""The remedy of a worker's error as fields, beside its text in error_hint."""

from __future__ import annotations

from alembic import op

revision = "0034"
down_revision = "0033"


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    op.execute("ALTER TABLE subscriber.worker ADD COLUMN error_remedy jsonb")
