"""The SQLSTATE of a worker's last error, by which a program decides whether a retry can help."""

from __future__ import annotations

from alembic import op

revision = "0027"
down_revision = "0026"


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    op.execute("ALTER TABLE subscriber.worker ADD COLUMN error_sqlstate text, ADD COLUMN error_is_transient boolean")
