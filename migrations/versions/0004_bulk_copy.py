"""Copies by several executors, the choice of the copy engine, and pausing a worker at a position."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"

STATEMENTS = [
    "ALTER TABLE subscriber.subscription ADD COLUMN subcopyengine text NOT NULL DEFAULT 'auto'",
    # Tables of a subscription that are copied together, from one snapshot. The number distinguishes the copy from the
    # previous one, whose executors may still be alive.
    """
    CREATE TABLE subscriber.bulk_copy (
        copyid bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        subid oid NOT NULL UNIQUE REFERENCES subscriber.subscription ON DELETE CASCADE,
        lsn pg_lsn NOT NULL
    )
    """,
    """
    CREATE TABLE subscriber.bulk_copy_rel (
        copyid bigint REFERENCES subscriber.bulk_copy ON DELETE CASCADE,
        relid oid,
        parts integer NOT NULL,
        PRIMARY KEY (copyid, relid)
    )
    """,
    # Inserted by the transaction that copies the part, before its rows.
    """
    CREATE TABLE subscriber.copy_done (
        copyid bigint,
        relid oid,
        part integer,
        rows bigint,
        bytes bigint,
        PRIMARY KEY (copyid, relid, part),
        FOREIGN KEY (copyid, relid) REFERENCES subscriber.bulk_copy_rel ON DELETE CASCADE
    )
    """,
    # Requests that the apply worker pause before the first transaction that finishes at or after stop_at. The worker
    # answers in held_at.
    """
    CREATE TABLE subscriber.hold (
        subid oid PRIMARY KEY REFERENCES subscriber.subscription ON DELETE CASCADE,
        stop_at pg_lsn NOT NULL,
        held_at pg_lsn
    )
    """,
    *[
        statement
        for table in ("bulk_copy", "bulk_copy_rel", "copy_done", "hold")
        for statement in (
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON subscriber.{table} TO PUBLIC",
            f"ALTER TABLE subscriber.{table} ENABLE ROW LEVEL SECURITY",
        )
    ],
    *[
        f"""
        CREATE POLICY follow ON subscriber.{table}
        USING (EXISTS (SELECT FROM subscriber.subscription s WHERE s.subid = {table}.subid))
        """
        for table in ("bulk_copy", "hold")
    ],
    *[
        f"""
        CREATE POLICY follow ON subscriber.{table}
        USING (EXISTS (SELECT FROM subscriber.bulk_copy c WHERE c.copyid = {table}.copyid))
        """
        for table in ("bulk_copy_rel", "copy_done")
    ],
    *[
        f"""
        CREATE TRIGGER notify_launcher AFTER INSERT OR UPDATE OR DELETE ON subscriber.{table}
        FOR EACH STATEMENT EXECUTE FUNCTION subscriber.notify_launcher()
        """
        for table in ("bulk_copy", "hold")
    ],
]


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    for statement in STATEMENTS:
        op.execute(statement)
