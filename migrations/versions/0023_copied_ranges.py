"""Ranges of tables that are copied with copy_engine = ranges, each with its own snapshot.

A row is written in the transaction that writes the rows of its range. The session that copies has no privilege on the
table: record_range() checks the fence of the progress record. It also writes to the record, so that a session that
claims it waits for this transaction, and then reads the row.
"""

from __future__ import annotations

from alembic import op

revision = "0023"
down_revision = "0022"

TABLES = [
    """
    CREATE UNLOGGED TABLE subscriber.copied_range (
        rangeid bigint PRIMARY KEY DEFAULT subscriber.new_id(),
        subid oid NOT NULL REFERENCES subscriber.subscription ON DELETE CASCADE,
        relid oid NOT NULL,
        key_columns text[] NOT NULL,
        key_types oid[] NOT NULL,
        low text[],
        high text[],
        single boolean NOT NULL DEFAULT false,
        snapshot text,
        lsn pg_lsn,
        timeline bigint NOT NULL,
        kept oid NOT NULL DEFAULT subscriber.new_record_of_many() UNIQUE
    )
    """,
    "CREATE INDEX copied_range_subid_relid_idx ON subscriber.copied_range (subid, relid)",
    "ALTER TABLE subscriber.copied_range ENABLE ROW LEVEL SECURITY",
    """
    CREATE POLICY follow ON subscriber.copied_range
    USING (EXISTS (SELECT FROM subscriber.subscription s WHERE s.subid = copied_range.subid))
    """,
    """
    CREATE TRIGGER keep AFTER INSERT OR UPDATE OR DELETE ON subscriber.copied_range
    FOR EACH ROW EXECUTE FUNCTION subscriber.keep()
    """,
    "ALTER TABLE subscriber.copied_range ENABLE ALWAYS TRIGGER keep",
    """
    CREATE FUNCTION subscriber.record_range(progress oid, fence bytea, copied jsonb) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        worker record;
        result bigint;
    BEGIN
        worker := subscriber.check_fence(progress, fence);
        PERFORM pg_catalog.lo_put(progress, 0, fence);
        DELETE FROM subscriber.copied_range r
         WHERE (r.subid, r.relid) = (worker.subid, worker.relid) AND r.rangeid = (copied ->> 'rangeid')::bigint;
        INSERT INTO subscriber.copied_range
               (subid, relid, key_columns, key_types, low, high, single, snapshot, lsn, timeline)
        SELECT worker.subid, worker.relid,
               c.key_columns, c.key_types, c.low, c.high, c.single, c.snapshot, c.lsn, c.timeline
          FROM pg_catalog.jsonb_populate_record(NULL::subscriber.copied_range, copied) c
        RETURNING rangeid INTO result;
        RETURN result;
    END $$
    """,
    "REVOKE ALL ON FUNCTION subscriber.record_range(oid, bytea, jsonb) FROM PUBLIC",
    "REVOKE ALL ON subscriber.copied_range FROM PUBLIC",
]
DUTIES = (
    ("subscriber.hold", "subscriber.hold, subscriber.copied_range"),
    ("subscriber.finish_copy(", "subscriber.record_range(oid, bytea, jsonb), subscriber.finish_copy("),
)
# Functions of earlier scripts, and the parts of them that are replaced.
RENUMBERED = """ON CONFLICT DO NOTHING;
        UPDATE subscriber.copied_range r SET relid = o.new FROM unnest(olds, news) AS o (old, new)
         WHERE r.subid = subscription AND r.relid = o.old;"""
REPLACED = {
    "restore()": (("'conflict_history', 'copy_done'", "'conflict_history', 'copy_done', 'copied_range'"),),
    "renumber(oid, oid[], oid[])": (("ON CONFLICT DO NOTHING;", RENUMBERED),),
    "admit(text, text)": DUTIES,
    "dismiss(text, text)": DUTIES,
}


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    earlier = op.get_context().script.get_revision("0022").module
    for statement in TABLES:
        op.execute(statement)
    for function, changes in REPLACED.items():
        op.execute(earlier._replace(function, changes))
    op.execute(earlier.ADMITTED)
