"""Why a worker applies changes one by one."""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Upgrade only: nobody goes back."""
    # Reason to number of changes, since the worker started; see targets/postgres/batch_applier.py.
    op.execute("ALTER TABLE subscriber.worker ADD COLUMN one_by_one jsonb NOT NULL DEFAULT '{}'")
