"""Since when a table is known to differ, and a subscription is disabled.

The position of a comparison with differences remains until a later comparison finds the table equal, or until the table
is synchronized again.
"""

from __future__ import annotations

from alembic import op

revision = "0048"
down_revision = "0047"

STATEMENTS = [
    "ALTER TABLE subscriber.subscription_rel ADD COLUMN srdifferentlsn pg_lsn",
    """
    CREATE OR REPLACE FUNCTION subscriber.forget_missed() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        NEW.srmemberships := NULL;
        NEW.srmissedlsn := NULL;
        NEW.srmisseduntil := NULL;
        NEW.srmissedat := NULL;
        NEW.srdifferentlsn := NULL;
        RETURN NEW;
    END $$
    """,
    "ALTER TABLE subscriber.subscription ADD COLUMN subdisabledat timestamptz",
    "UPDATE subscriber.subscription SET subdisabledat = clock_timestamp() WHERE NOT subenabled",
    """
    CREATE FUNCTION subscriber.note_disabled() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        NEW.subdisabledat := CASE WHEN NOT NEW.subenabled THEN coalesce(NEW.subdisabledat, clock_timestamp()) END;
        RETURN NEW;
    END $$
    """,
    "REVOKE ALL ON FUNCTION subscriber.note_disabled() FROM PUBLIC",
    """
    CREATE TRIGGER note_disabled BEFORE INSERT OR UPDATE ON subscriber.subscription
    FOR EACH ROW EXECUTE FUNCTION subscriber.note_disabled()
    """,
    "ALTER TABLE subscriber.subscription ENABLE ALWAYS TRIGGER note_disabled",
]


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    for statement in STATEMENTS:
        op.execute(statement)
