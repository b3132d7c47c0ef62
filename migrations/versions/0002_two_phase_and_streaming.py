"""Prepared transactions, and what workers tell about streamed ones."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"

STATEMENTS = [
    # Two rows for each prepared transaction. One, `committed`, is inserted by the transaction itself: it is seen once
    # COMMIT PREPARED has been done, and so tells a worker that starts again. The other is written beside it, with the
    # progress: it says what waits. No foreign key: the first is locked by nobody while the subscription is dropped.
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
    """Upgrade only: nobody goes back."""
    for statement in STATEMENTS:
        op.execute(statement)
