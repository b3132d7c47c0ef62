"""The option copy_indexes of a subscription: indexes that are built after the copy of a table."""

from __future__ import annotations

from alembic import op

revision = "0026"
down_revision = "0025"

DUTIES = (("subonerror, subquarantinelimit", "subonerror, subquarantinelimit, subcopyindexes"),)
REPLACED = {"admit(text, text)": DUTIES, "dismiss(text, text)": DUTIES}


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    deleted_rows = op.get_context().script.get_revision("0022").module
    op.execute("ALTER TABLE subscriber.subscription ADD COLUMN subcopyindexes text NOT NULL DEFAULT 'none'")
    op.execute("UPDATE subscriber.subscription SET kept = kept")
    for function, changes in REPLACED.items():
        op.execute(deleted_rows._replace(function, changes))
    op.execute(deleted_rows.ADMITTED)
