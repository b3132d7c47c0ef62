"""What publishes each table of a subscription, as the launcher has last seen it, and since when changes may be missing.

A publisher decodes a change with the publications of its time. A table that is published again lacks the changes in
between, and nothing on either server shows it later. So the launcher stores what publishes a table, and compares it
with the publisher. A table that is synchronized again lacks nothing.
"""

from __future__ import annotations

from alembic import op

revision = "0043"
down_revision = "0042"

STATEMENTS = [
    """
    ALTER TABLE subscriber.subscription_rel
        ADD COLUMN srmemberships text,
        ADD COLUMN srmissedlsn pg_lsn,
        ADD COLUMN srmisseduntil pg_lsn,
        ADD COLUMN srmissedat timestamptz
    """,
    """
    CREATE FUNCTION subscriber.forget_missed() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        NEW.srmemberships := NULL;
        NEW.srmissedlsn := NULL;
        NEW.srmisseduntil := NULL;
        NEW.srmissedat := NULL;
        RETURN NEW;
    END $$
    """,
    "REVOKE ALL ON FUNCTION subscriber.forget_missed() FROM PUBLIC",
    """
    CREATE TRIGGER forget_missed BEFORE UPDATE ON subscriber.subscription_rel
    FOR EACH ROW WHEN (NEW.srsubstate = 'i' AND OLD.srsubstate <> 'i') EXECUTE FUNCTION subscriber.forget_missed()
    """,
    "ALTER TABLE subscriber.subscription_rel ENABLE ALWAYS TRIGGER forget_missed",
]


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    for statement in STATEMENTS:
        op.execute(statement)
