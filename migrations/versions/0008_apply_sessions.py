"""Transactions applied in parallel in several sessions of the target."""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    op.execute("ALTER TABLE subscriber.subscription ADD COLUMN subapplysessions integer NOT NULL DEFAULT 1")
