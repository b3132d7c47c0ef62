"""Prepared transactions, and the workers' reports about streamed transactions."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"

STATEMENTS = [
    # Each prepared transaction has two rows. The transaction itself inserts the one with `committed`. It is visible
    # after COMMIT PREPARED, so a restarted worker knows that this is done. The other row is written separately, with
    # the progress, and lists the waiting transactions. There is no foreign key: the first row must not lock the
    # subscription while it is dropped.
    """
    CREATE TABLE subscriber.prepared (
        subid oid,
        xid bigint,
        committed boolean,
        gid text NOT NULL,
        publisher_gid text,
        prepare_end_lsn pg_lsn,
        prepared_at timestamptz,
        PRIMARY KEY (subid, xid, committed)
    )
    """,
    "GRANT SELECT, INSERT, UPDATE, DELETE ON subscriber.prepared TO PUBLIC",
    "ALTER TABLE subscriber.prepared ENABLE ROW LEVEL SECURITY",
    """
    CREATE POLICY follow ON subscriber.prepared
    USING (EXISTS (SELECT FROM subscriber.subscription s WHERE s.subid = prepared.subid))
    """,
    # `streamed` is a list of objects: xid, changes, bytes, since, worker.
    """
    ALTER TABLE subscriber.worker
        ADD COLUMN leader_pid integer,
        ADD COLUMN waiting_for text,
        ADD COLUMN streamed jsonb NOT NULL DEFAULT '[]'
    """,
    """
    CREATE OR REPLACE VIEW subscriber.pg_stat_subscription AS
    SELECT s.subid, s.subname, w.worker_type, w.pid, w.leader_pid,
           CASE WHEN w.worker_type = 'table synchronization' THEN w.relid END AS relid,
           w.received_lsn, w.last_msg_send_time, w.last_msg_receipt_time, w.latest_end_lsn, w.latest_end_time
      FROM subscriber.subscription s
      LEFT JOIN (subscriber.worker w
                 JOIN pg_catalog.pg_stat_activity a
                   ON a.pid = w.pid AND a.datname = pg_catalog.current_database()
                  AND (a.backend_start IS NULL OR a.backend_start <= w.started)) ON w.subid = s.subid
    """,
]


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    for statement in STATEMENTS:
        op.execute(statement)
