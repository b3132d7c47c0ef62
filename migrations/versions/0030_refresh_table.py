"""REFRESH TABLE, and copy_data = 'compare': srcopy is the way in which the rows of a table are synchronized.

A table of state init may have rows. With `compare` the rows that differ from the publisher's are repaired. With
`truncate` the table is emptied before its copy. The transaction that empties it sets `copy`, so a kill of the copy does
not empty it again.
"""

from __future__ import annotations

from alembic import op

revision = "0030"
down_revision = "0029"

STATEMENTS = [
    "ALTER TABLE subscriber.subscription_rel ADD COLUMN srcopy text NOT NULL DEFAULT 'copy'",
    # The large objects of the rows have the column as well.
    "UPDATE subscriber.subscription_rel SET kept = kept",
    # Workers commit nothing with the state that the table had: they have the earlier generation.
    """
    CREATE FUNCTION subscriber.synchronize_again(subscription oid, relation oid, how text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        PERFORM subscriber.check_manager(subscription);
        UPDATE subscriber.subscription s SET subgeneration = (s.subgeneration + 1) % 2147483647
         WHERE s.subid = subscription;
        DELETE FROM subscriber.copied_range r WHERE (r.subid, r.relid) = (subscription, relation);
        UPDATE subscriber.subscription_rel r SET srsubstate = 'i', srsublsn = NULL, srcopy = how
         WHERE (r.srsubid, r.srrelid) = (subscription, relation);
    END $$
    """,
    # For the session that copies the table, which has no privilege on the table.
    """
    CREATE FUNCTION subscriber.note_emptied(progress oid, fence bytea) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        worker record;
    BEGIN
        worker := subscriber.check_fence(progress, fence);
        UPDATE subscriber.subscription_rel r SET srcopy = 'copy'
         WHERE (r.srsubid, r.srrelid) = (worker.subid, worker.relid);
    END $$
    """,
    "REVOKE ALL ON FUNCTION subscriber.synchronize_again(oid, oid, text) FROM PUBLIC",
    "REVOKE ALL ON FUNCTION subscriber.note_emptied(oid, bytea) FROM PUBLIC",
]
DUTIES = (
    ("subscriber.restore()", "subscriber.restore(), subscriber.synchronize_again(oid, oid, text)"),
    (
        "subscriber.check_generation(oid, integer)",
        "subscriber.check_generation(oid, integer), subscriber.note_emptied(oid, bytea)",
    ),
)


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    deleted_rows = op.get_context().script.get_revision("0022").module
    for statement in STATEMENTS:
        op.execute(statement)
    for function in ("admit(text, text)", "dismiss(text, text)"):
        op.execute(deleted_rows._replace(function, DUTIES))
    op.execute(deleted_rows.ADMITTED)
