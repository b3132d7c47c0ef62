"""${message}"""

from __future__ import annotations

from alembic import op

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    ${upgrades if upgrades else "pass"}
