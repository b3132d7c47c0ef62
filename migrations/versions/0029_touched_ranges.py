"""The ranges that the stream has touched since the last comparison, for subscriptions with track_ranges.

A row of touched_range is written by the transaction that changes the rows, so it is there if and only if they are. A
comparison gives its number to the rows that its snapshot sees, and deletes them when it has found no difference. A row
of a transaction that was prepared before and is committed later has no number, and remains.

The row of verification has the tables without a difference. It is deleted in a transaction that makes the target differ
without touching a range: a transaction is skipped or put in quarantine, or the subscription follows another publisher.
"""

from __future__ import annotations

from alembic import op

revision = "0029"
down_revision = "0028"

TABLES = [
    "ALTER TABLE subscriber.subscription ADD COLUMN subtrackranges boolean NOT NULL DEFAULT false",
    "UPDATE subscriber.subscription SET kept = kept",
    """
    CREATE UNLOGGED TABLE subscriber.touched_range (
        id bigint PRIMARY KEY DEFAULT subscriber.new_id(),
        subid oid NOT NULL REFERENCES subscriber.subscription ON DELETE CASCADE,
        touched jsonb NOT NULL,
        verification bigint,
        kept oid NOT NULL DEFAULT subscriber.new_record_of_many() UNIQUE
    )
    """,
    "CREATE INDEX touched_range_subid_idx ON subscriber.touched_range (subid)",
    """
    CREATE UNLOGGED TABLE subscriber.verification (
        subid oid PRIMARY KEY REFERENCES subscriber.subscription ON DELETE CASCADE,
        number bigint NOT NULL,
        publisher text,
        tables jsonb NOT NULL DEFAULT '[]'::jsonb,
        kept oid NOT NULL DEFAULT subscriber.new_record_of_many() UNIQUE
    )
    """,
    *(
        statement
        for table in ("touched_range", "verification")
        for statement in (
            f"ALTER TABLE subscriber.{table} ENABLE ROW LEVEL SECURITY",
            f"""
            CREATE POLICY follow ON subscriber.{table}
            USING (EXISTS (SELECT FROM subscriber.subscription s WHERE s.subid = {table}.subid))
            """,
            f"""
            CREATE TRIGGER keep AFTER INSERT OR UPDATE OR DELETE ON subscriber.{table}
            FOR EACH ROW EXECUTE FUNCTION subscriber.keep()
            """,
            f"ALTER TABLE subscriber.{table} ENABLE ALWAYS TRIGGER keep",
            f"REVOKE ALL ON subscriber.{table} FROM PUBLIC",
        )
    ),
]
FUNCTIONS = [
    # For sessions that apply changes, which have no privilege on the table.
    """
    CREATE FUNCTION subscriber.touch(progress oid, fence bytea, ranges jsonb) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        worker record;
    BEGIN
        worker := subscriber.check_fence(progress, fence);
        INSERT INTO subscriber.touched_range (subid, touched) VALUES (worker.subid, ranges);
    END $$
    """,
    "REVOKE ALL ON FUNCTION subscriber.touch(oid, bytea, jsonb) FROM PUBLIC",
    """
    CREATE FUNCTION subscriber.forget_verification() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        DELETE FROM subscriber.verification v WHERE v.subid = NEW.subid;
        IF TG_TABLE_NAME = 'subscription' AND NOT (pg_catalog.to_jsonb(NEW) ->> 'subtrackranges')::boolean THEN
            DELETE FROM subscriber.touched_range t WHERE t.subid = NEW.subid;
        END IF;
        RETURN NULL;
    END $$
    """,
    "REVOKE ALL ON FUNCTION subscriber.forget_verification() FROM PUBLIC",
]
FOLLOWED = ("subconninfo", "subserver", "subslotname", "subpublications", "suborigin", "subskiplsn", "subtrackranges")
OLD, NEW = (", ".join(f"{prefix}.{column}" for column in FOLLOWED) for prefix in ("OLD", "NEW"))
TRIGGERS = [
    f"""
    CREATE TRIGGER forget_verification AFTER UPDATE ON subscriber.subscription
    FOR EACH ROW WHEN (({OLD}) IS DISTINCT FROM ({NEW})) EXECUTE FUNCTION subscriber.forget_verification()
    """,
    "ALTER TABLE subscriber.subscription ENABLE ALWAYS TRIGGER forget_verification",
    """
    CREATE TRIGGER forget_verification AFTER INSERT ON subscriber.quarantine
    FOR EACH ROW EXECUTE FUNCTION subscriber.forget_verification()
    """,
    "ALTER TABLE subscriber.quarantine ENABLE ALWAYS TRIGGER forget_verification",
]
DUTIES = (
    ("subscriber.copied_range", "subscriber.copied_range, subscriber.touched_range, subscriber.verification"),
    ("submaxretention", "submaxretention, subtrackranges"),
    (
        "subscriber.check_generation(oid, integer)",
        "subscriber.check_generation(oid, integer), subscriber.touch(oid, bytea, jsonb)",
    ),
)
# Tables have other OIDs after a restore.
RENUMBERED = """UPDATE subscriber.copied_range r SET relid = o.new"""
REPLACED = {
    "restore()": (("'repair_transaction'", "'repair_transaction', 'touched_range', 'verification'"),),
    "renumber(oid, oid[], oid[])": (
        (RENUMBERED, f"DELETE FROM subscriber.verification v WHERE v.subid = subscription;\n        {RENUMBERED}"),
    ),
    "admit(text, text)": DUTIES,
    "dismiss(text, text)": DUTIES,
}


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    script = op.get_context().script
    generation, deleted_rows = (script.get_revision(number).module for number in ("0018", "0022"))
    for statement in [*TABLES, *FUNCTIONS, *TRIGGERS]:
        op.execute(statement)
    for function, changes in REPLACED.items():
        op.execute(deleted_rows._replace(function, changes))
    op.execute(deleted_rows.ADMITTED)
    later = ("subserver", "subwalrcvtimeout", "subretaindeadtuples", "subonerror", "subtrackranges")
    settings = (*generation.SETTINGS, *later)
    old, new = (", ".join(f"{prefix}.{column}" for column in settings) for prefix in ("OLD", "NEW"))
    op.execute("DROP TRIGGER next_generation ON subscriber.subscription")
    op.execute(f"""
        CREATE TRIGGER next_generation BEFORE UPDATE ON subscriber.subscription
        FOR EACH ROW WHEN (({old}) IS DISTINCT FROM ({new})) EXECUTE FUNCTION subscriber.next_generation()
    """)
    op.execute("ALTER TABLE subscriber.subscription ENABLE ALWAYS TRIGGER next_generation")
