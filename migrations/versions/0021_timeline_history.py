"""The history of the publisher's timeline, and the consent to changes that a failover of the publisher has lost.

Two standbys of a primary can get the same timeline number. Only their histories show that they are different servers.
"""

from __future__ import annotations

from alembic import op

revision = "0021"
down_revision = "0020"

STATEMENTS = [
    """
    ALTER TABLE subscriber.subscription
        ADD COLUMN subtimelinehistory text,
        ADD COLUMN subacceptloss boolean NOT NULL DEFAULT false
    """,
    "UPDATE subscriber.subscription SET kept = kept",
    # A running worker starts again, so that the consent applies to the publisher that the user knows.
    """
    CREATE TRIGGER accept_loss BEFORE UPDATE ON subscriber.subscription
    FOR EACH ROW WHEN (NEW.subacceptloss AND NOT OLD.subacceptloss)
    EXECUTE FUNCTION subscriber.next_generation()
    """,
    "ALTER TABLE subscriber.subscription ENABLE ALWAYS TRIGGER accept_loss",
    # The privileges of duties include the new columns.
    """
    DO $$
    DECLARE
        function regprocedure;
        role text;
        duty text;
    BEGIN
        FOREACH function IN ARRAY ARRAY['subscriber.admit(text, text)', 'subscriber.dismiss(text, text)'] LOOP
            EXECUTE replace(pg_catalog.pg_get_functiondef(function), 'subtimelinesystem',
                            'subtimelinesystem, subtimelinehistory, subacceptloss');
        END LOOP;
        FOR role, duty IN
            SELECT DISTINCT r.rolname, CASE p.proname WHEN 'lead' THEN 'launcher' ELSE 'owner' END
              FROM pg_catalog.pg_proc p, pg_catalog.aclexplode(p.proacl) a
              JOIN pg_catalog.pg_roles r ON r.oid = a.grantee
             WHERE p.proname IN ('lead', 'create_origin') AND p.pronamespace = 'subscriber'::regnamespace
               AND a.grantee <> p.proowner LOOP
            PERFORM subscriber.admit(role, duty);
        END LOOP;
    END $$
    """,
]


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    for statement in STATEMENTS:
        op.execute(statement)
