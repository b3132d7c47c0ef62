"""Positions confirmed to the publisher, and targets on which replication origins cannot be used."""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"

STATEMENTS = [
    # See worker/apply/confirmed_position.py. Not in `progress`, whose row a transaction that is being applied may have
    # locked.
    """
    CREATE TABLE subscriber.confirmed (
        subid oid PRIMARY KEY REFERENCES subscriber.subscription ON DELETE CASCADE,
        confirmed_lsn pg_lsn NOT NULL
    ) WITH (fillfactor = 10)
    """,
    "GRANT SELECT, INSERT, UPDATE, DELETE ON subscriber.confirmed TO PUBLIC",
    "ALTER TABLE subscriber.confirmed ENABLE ROW LEVEL SECURITY",
    """
    CREATE POLICY follow ON subscriber.confirmed
    USING (EXISTS (SELECT FROM subscriber.subscription s WHERE s.subid = confirmed.subid))
    """,
    # Capabilities that this target lacks, as reported by the worker; NULL: none.
    "ALTER TABLE subscriber.worker ADD COLUMN limits text[]",
    # A schema that belongs to an ordinary role, as on a managed service, has no origins: the result is NULL.
    """
    CREATE OR REPLACE FUNCTION subscriber.create_origin(name text) RETURNS oid
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog AS $$
    DECLARE
        origin oid;
    BEGIN
        PERFORM subscriber.check_origin_owner(name);
        IF NOT (SELECT r.rolsuper FROM pg_roles r WHERE r.rolname = current_user) THEN
            RETURN NULL;
        END IF;
        PERFORM pg_advisory_xact_lock(hashtextextended(name, 1937072755));
        SELECT o.roident INTO origin FROM pg_replication_origin o WHERE o.roname = name;
        IF origin IS NULL THEN
            origin := pg_replication_origin_create('subscriber_' || name);
            UPDATE pg_replication_origin o SET roname = name WHERE o.roident = origin;
        END IF;
        RETURN origin;
    END $$
    """,
]


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    for statement in STATEMENTS:
        op.execute(statement)
