"""Rules of ownership: which rows of a table belong to a subscription, and which subscriptions write to a table.

subsourcetag is the option source_tag. The apply worker reads it for a TRUNCATE, so a change restarts the worker. A
comparison with another rule says nothing about the rows of the new one.

srextra is the number of rows that the last comparison of a table's synchronization has kept, because the publisher
does not have them, and they may belong to another subscription or to an application.

other_writers() returns names and rules of subscriptions that the caller may not see otherwise. Only a role that
manages the subscription may ask, and only about tables of that subscription.
"""

from __future__ import annotations

from alembic import op

revision = "0045"
down_revision = "0044"

STATEMENTS = [
    "ALTER TABLE subscriber.subscription ADD COLUMN subsourcetag text NOT NULL DEFAULT ''",
    "UPDATE subscriber.subscription SET kept = kept",
    "ALTER TABLE subscriber.subscription_rel ADD COLUMN srextra bigint NOT NULL DEFAULT 0",
    "UPDATE subscriber.subscription_rel SET kept = kept",
    # A partition, and the table that it belongs to, have rows in common.
    """
    CREATE FUNCTION subscriber.other_writers(subscription oid)
    RETURNS TABLE (relid oid, writer text, native boolean, sourcetag text, nspname text, relname text)
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        PERFORM subscriber.check_manager(subscription);
        RETURN QUERY
        WITH shared (own, other) AS (
            SELECT r.srrelid, r.srrelid FROM subscriber.subscription_rel r WHERE r.srsubid = subscription
            UNION
            SELECT r.srrelid, f.relid
              FROM subscriber.subscription_rel r JOIN pg_catalog.pg_class c ON c.oid = r.srrelid, LATERAL (
                   SELECT a.relid::oid FROM pg_catalog.pg_partition_ancestors(r.srrelid) a
                   UNION SELECT t.relid::oid FROM pg_catalog.pg_partition_tree(r.srrelid) t) f (relid)
             WHERE r.srsubid = subscription AND (c.relispartition OR c.relkind = 'p'))
        SELECT s.own, w.subname::text, false, w.subsourcetag, o.srnspname::text, o.srrelname::text
          FROM shared s
          JOIN subscriber.subscription_rel o ON o.srrelid = s.other AND o.srsubid <> subscription
          JOIN subscriber.subscription w ON w.subid = o.srsubid
        UNION ALL
        SELECT s.own, w.subname::text, true, '', n.nspname::text, c.relname::text
          FROM shared s
          JOIN pg_catalog.pg_subscription_rel o ON o.srrelid = s.other
          JOIN pg_catalog.pg_subscription w ON w.oid = o.srsubid
          JOIN pg_catalog.pg_class c ON c.oid = o.srrelid
          JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
         ORDER BY 1, 2;
    END $$
    """,
    "REVOKE ALL ON FUNCTION subscriber.other_writers(oid) FROM PUBLIC",
    "DROP TRIGGER forget_verification ON subscriber.subscription",
    "DROP TRIGGER next_generation ON subscriber.subscription",
]
DUTIES = (
    ("subscriber.restore()", "subscriber.restore(), subscriber.other_writers(oid)"),
    ("subgaveup", "subgaveup, subsourcetag"),
)


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    script = op.get_context().script
    generation, deleted_rows, touched = (script.get_revision(number).module for number in ("0018", "0022", "0029"))
    for statement in STATEMENTS:
        op.execute(statement)
    for function in ("admit(text, text)", "dismiss(text, text)"):
        op.execute(deleted_rows._replace(function, DUTIES))
    op.execute(deleted_rows.ADMITTED)
    again = (("srcopy = how", "srcopy = how, srextra = 0"),)
    op.execute(deleted_rows._replace("synchronize_again(oid, oid, text)", again))
    later = ("subserver", "subwalrcvtimeout", "subretaindeadtuples", "subonerror", "subtrackranges", "subsourcetag")
    for trigger, timing, columns in (
        ("next_generation", "BEFORE", (*generation.SETTINGS, *later)),
        ("forget_verification", "AFTER", (*touched.FOLLOWED, "subsourcetag")),
    ):
        old, new = (", ".join(f"{prefix}.{column}" for column in columns) for prefix in ("OLD", "NEW"))
        op.execute(f"""
            CREATE TRIGGER {trigger} {timing} UPDATE ON subscriber.subscription
            FOR EACH ROW WHEN (({old}) IS DISTINCT FROM ({new})) EXECUTE FUNCTION subscriber.{trigger}()
        """)
        op.execute(f"ALTER TABLE subscriber.subscription ENABLE ALWAYS TRIGGER {trigger}")
