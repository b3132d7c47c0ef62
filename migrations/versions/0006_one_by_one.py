"""The reasons for which a worker applies changes row by row."""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    # Reason to number of changes, since the worker started; see targets/postgres/batch_applier.py.
    op.execute("ALTER TABLE subscriber.worker ADD COLUMN one_by_one jsonb NOT NULL DEFAULT '{}'")
