"""Transactions applied in several sessions of the target side by side."""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Upgrade only: nobody goes back."""
    op.execute("ALTER TABLE subscriber.subscription ADD COLUMN subapplysessions integer NOT NULL DEFAULT 1")
