"""The history of rates, lag and kept WAL of each subscription, by the minute, with the setting `history_retention`.

A crash of the target's server loses it, as it loses the reports of workers.
"""

from __future__ import annotations

from alembic import op

revision = "0036"
down_revision = "0035"

STATEMENTS = [
    """
    CREATE UNLOGGED TABLE subscriber.history (
        subid oid REFERENCES subscriber.subscription ON DELETE CASCADE,
        at timestamptz,
        transactions float8,
        changes float8,
        bytes float8,
        lag_bytes bigint,
        lag_seconds float8,
        retained_bytes bigint,
        PRIMARY KEY (subid, at)
    )
    """,
    "CREATE INDEX history_at_idx ON subscriber.history (at)",
    "ALTER TABLE subscriber.history ENABLE ROW LEVEL SECURITY",
    """
    CREATE POLICY follow ON subscriber.history
    USING (EXISTS (SELECT FROM subscriber.subscription s WHERE s.subid = history.subid))
    """,
    "REVOKE ALL ON subscriber.history FROM PUBLIC",
]
DUTIES = (("subscriber.verification", "subscriber.verification, subscriber.history"),)


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    deleted_rows = op.get_context().script.get_revision("0022").module
    for statement in STATEMENTS:
        op.execute(statement)
    for function in ("admit(text, text)", "dismiss(text, text)"):
        op.execute(deleted_rows._replace(function, DUTIES))
    op.execute(deleted_rows.ADMITTED)
