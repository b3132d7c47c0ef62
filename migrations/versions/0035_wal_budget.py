"""The WAL that the publisher may keep for a subscription, and the reason why the launcher has dropped its slot.

The reason is in the row of the subscription, which survives a crash, and not in the report of a worker.
"""

from __future__ import annotations

from alembic import op

revision = "0035"
down_revision = "0034"

COLUMNS = [
    """
    ALTER TABLE subscriber.subscription
        ADD COLUMN subwalbudget text NOT NULL DEFAULT '0',
        ADD COLUMN subgaveup text
    """,
    "UPDATE subscriber.subscription SET kept = kept",
]
DUTIES = (("subcopyindexes", "subcopyindexes, subwalbudget, subgaveup"),)


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    deleted_rows = op.get_context().script.get_revision("0022").module
    for statement in COLUMNS:
        op.execute(statement)
    for function in ("admit(text, text)", "dismiss(text, text)"):
        op.execute(deleted_rows._replace(function, DUTIES))
    op.execute(deleted_rows.ADMITTED)
