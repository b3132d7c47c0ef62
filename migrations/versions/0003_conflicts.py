"""Conflict policies of subscriptions, and the history of conflicts."""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"

STATEMENTS = [
    """
    ALTER TABLE subscriber.subscription
        ADD COLUMN subconflictpolicy text NOT NULL DEFAULT '',
        ADD COLUMN subconflicthistory text NOT NULL DEFAULT 'decided',
        ADD COLUMN subconflictrows boolean NOT NULL DEFAULT false
    """,
    # A line for each target row that conflicted with a change, or for the change if there was no such row.
    """
    CREATE TABLE subscriber.conflict_history (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        subid oid NOT NULL REFERENCES subscriber.subscription ON DELETE CASCADE,
        detected timestamptz NOT NULL DEFAULT clock_timestamp(),
        last_detected timestamptz NOT NULL DEFAULT clock_timestamp(),
        occurrences bigint NOT NULL DEFAULT 1,
        relid oid NOT NULL,
        relation text NOT NULL,
        conflict_type text NOT NULL,
        index_name text,
        key jsonb,
        remote_xid bigint NOT NULL,
        remote_finish_lsn pg_lsn NOT NULL,
        remote_commit_time timestamptz,
        local_xid bigint,
        local_origin text,
        local_commit_time timestamptz,
        policy text NOT NULL,
        resolution text NOT NULL,
        local_row jsonb,
        remote_row jsonb
    )
    """,
    "CREATE INDEX ON subscriber.conflict_history (subid, detected)",
    "CREATE INDEX ON subscriber.conflict_history (subid, remote_finish_lsn)",
    # It contains rows of tables, so it is visible only to the subscription's owner, like its connection string.
    "GRANT SELECT, INSERT, UPDATE, DELETE ON subscriber.conflict_history TO PUBLIC",
    "ALTER TABLE subscriber.conflict_history ENABLE ROW LEVEL SECURITY",
    """
    CREATE POLICY follow ON subscriber.conflict_history
    USING (EXISTS (SELECT FROM subscriber.subscription s
                    WHERE s.subid = conflict_history.subid AND pg_catalog.pg_has_role(s.subowner, 'USAGE')))
    """,
]


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    for statement in STATEMENTS:
        op.execute(statement)
