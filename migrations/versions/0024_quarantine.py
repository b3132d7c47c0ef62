"""Quarantine: transactions that cannot be applied, and later ones that depend on them, wait on the target.

The messages of a transaction are a large object, so they are durable and never published (0013_unpublished.py). The
row about it is durable in the same way as other rows.

A content is records of spool/record_format.py after a header:

     0  qtn1
     4  the records
"""

from __future__ import annotations

from alembic import op

revision = "0024"
down_revision = "0023"

TABLES = [
    """
    ALTER TABLE subscriber.subscription
        ADD COLUMN subonerror text NOT NULL DEFAULT 'retry',
        ADD COLUMN subquarantinelimit integer NOT NULL DEFAULT 1000
    """,
    "UPDATE subscriber.subscription SET kept = kept",
    """
    CREATE UNLOGGED TABLE subscriber.quarantine (
        subid oid REFERENCES subscriber.subscription ON DELETE CASCADE,
        finish_lsn pg_lsn,
        remote_xid bigint NOT NULL,
        commit_time timestamptz,
        parked timestamptz NOT NULL DEFAULT clock_timestamp(),
        relations text[] NOT NULL,
        changes bigint NOT NULL,
        bytes bigint NOT NULL DEFAULT 0,
        depends_on pg_lsn[] NOT NULL DEFAULT '{}'::pg_lsn[],
        error text,
        error_detail text,
        attempts integer NOT NULL DEFAULT 0,
        retry boolean NOT NULL DEFAULT false,
        edited integer NOT NULL DEFAULT 0,
        content oid NOT NULL UNIQUE,
        kept oid NOT NULL UNIQUE DEFAULT subscriber.new_record_of_many(),
        PRIMARY KEY (subid, finish_lsn)
    )
    """,
    "ALTER TABLE subscriber.quarantine ENABLE ROW LEVEL SECURITY",
    """
    CREATE POLICY follow ON subscriber.quarantine
    USING (EXISTS (SELECT FROM subscriber.subscription s WHERE s.subid = quarantine.subid))
    """,
    """
    CREATE FUNCTION subscriber.drop_quarantine_content() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        PERFORM pg_catalog.lo_unlink(m.oid) FROM pg_catalog.pg_largeobject_metadata m WHERE m.oid = OLD.content;
        RETURN NULL;
    END $$
    """,
    """
    CREATE TRIGGER keep AFTER INSERT OR UPDATE OR DELETE ON subscriber.quarantine
    FOR EACH ROW EXECUTE FUNCTION subscriber.keep()
    """,
    "ALTER TABLE subscriber.quarantine ENABLE ALWAYS TRIGGER keep",
    """
    CREATE TRIGGER drop_content AFTER DELETE ON subscriber.quarantine
    FOR EACH ROW EXECUTE FUNCTION subscriber.drop_quarantine_content()
    """,
    "ALTER TABLE subscriber.quarantine ENABLE ALWAYS TRIGGER drop_content",
    # The worker itself inserts rows, and knows about them.
    """
    CREATE TRIGGER notify_launcher AFTER UPDATE OR DELETE ON subscriber.quarantine
    FOR EACH STATEMENT EXECUTE FUNCTION subscriber.notify_launcher()
    """,
]

# For apply workers: they show the fence of their progress record, and have no privilege on the table.
APPLYING = [
    """
    CREATE FUNCTION subscriber.park(progress oid, fence bytea, parked jsonb) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        worker record;
        subscription record;
        number oid := subscriber.new_record_of_many();
    BEGIN
        worker := subscriber.check_fence(progress, fence);
        SELECT s.subname, s.subquarantinelimit AS most INTO subscription
          FROM subscriber.subscription s WHERE s.subid = worker.subid;
        IF (SELECT count(*) FROM subscriber.quarantine q WHERE q.subid = worker.subid) >= subscription.most THEN
            RAISE EXCEPTION USING ERRCODE = 'SB004',
                MESSAGE = pg_catalog.format('quarantine of subscription "%s" is full', subscription.subname),
                DETAIL = pg_catalog.format('It has %s transactions, which is its quarantine_limit. %s',
                    subscription.most, coalesce('The next one failed: ' || (parked ->> 'error') || '.',
                                                'The next one depends on them.')),
                HINT = pg_catalog.format('Repair the cause, then: ALTER SUBSCRIPTION %1$I QUARANTINE RETRY. Or raise'
                    ' the limit: ALTER SUBSCRIPTION %1$I SET (quarantine_limit = %2$s).', subscription.subname,
                    least(2147483647, 10 * greatest(subscription.most::bigint, 1)));
        END IF;
        PERFORM pg_catalog.lo_from_bytea(number, 'qtn1'::bytea);
        INSERT INTO subscriber.quarantine (subid, finish_lsn, remote_xid, commit_time, relations, changes, bytes,
                                           depends_on, error, error_detail, content)
        SELECT worker.subid, p.finish_lsn, p.remote_xid, p.commit_time, p.relations, p.changes, p.bytes,
               p.depends_on, p.error, p.error_detail, number
          FROM pg_catalog.jsonb_populate_record(NULL::subscriber.quarantine, parked) p;
    END $$
    """,
    """
    CREATE FUNCTION subscriber.park_content(progress oid, fence bytea, lsn pg_lsn, place bigint, records bytea)
    RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        worker record;
    BEGIN
        worker := subscriber.check_fence(progress, fence);
        PERFORM pg_catalog.lo_put(q.content, 4 + place, records)
           FROM subscriber.quarantine q WHERE q.subid = worker.subid AND q.finish_lsn = lsn;
    END $$
    """,
    # `edited` is the number of edits that the worker has seen.
    """
    CREATE FUNCTION subscriber.unpark(progress oid, fence bytea, lsn pg_lsn, edits integer) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        worker record;
    BEGIN
        worker := subscriber.check_fence(progress, fence);
        DELETE FROM subscriber.quarantine q WHERE q.subid = worker.subid AND q.finish_lsn = lsn AND q.edited = edits;
        IF NOT FOUND THEN
            RAISE EXCEPTION USING ERRCODE = 'SB003', MESSAGE = 'the quarantined transaction has been altered';
        END IF;
    END $$
    """,
]

# For statements, and for the launcher's session.
MANAGING = [
    """
    CREATE FUNCTION subscriber.read_quarantine(subscription oid, lsn pg_lsn, place bigint, size integer) RETURNS bytea
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        PERFORM subscriber.check_manager(subscription);
        RETURN (SELECT pg_catalog.lo_get(q.content, 4 + place, size)
                  FROM subscriber.quarantine q WHERE q.subid = subscription AND q.finish_lsn = lsn);
    END $$
    """,
    # `edits` is the number of edits that the caller has read.
    """
    CREATE FUNCTION subscriber.edit_quarantine(subscription oid, lsn pg_lsn, edits integer, records bytea,
                                               changed_relations text[], changed bigint) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        number oid;
    BEGIN
        PERFORM subscriber.check_manager(subscription);
        UPDATE subscriber.quarantine q
           SET edited = q.edited + 1, bytes = octet_length(records), relations = changed_relations, changes = changed
         WHERE q.subid = subscription AND q.finish_lsn = lsn AND q.edited = edits AND NOT q.retry
        RETURNING q.content INTO number;
        IF number IS NULL THEN
            RETURN false;
        END IF;
        PERFORM pg_catalog.lo_unlink(number);
        PERFORM pg_catalog.lo_from_bytea(number, 'qtn1'::bytea || records);
        RETURN true;
    END $$
    """,
]

OWNER_FUNCTIONS = (
    "subscriber.read_quarantine(oid, pg_lsn, bigint, integer),"
    " subscriber.edit_quarantine(oid, pg_lsn, integer, bytea, text[], bigint)"
)
APPLY_FUNCTIONS = (
    "subscriber.park(oid, bytea, jsonb), subscriber.park_content(oid, bytea, pg_lsn, bigint, bytea),"
    " subscriber.unpark(oid, bytea, pg_lsn, integer)"
)
REVOKED = [
    "REVOKE ALL ON subscriber.quarantine FROM PUBLIC",
    f"REVOKE ALL ON FUNCTION {OWNER_FUNCTIONS}, {APPLY_FUNCTIONS} FROM PUBLIC",
    "REVOKE ALL ON FUNCTION subscriber.drop_quarantine_content() FROM PUBLIC",
]
DUTIES = (
    ("submaxretention", "submaxretention, subonerror, subquarantinelimit"),
    ("subscriber.subscription_sequence", "subscriber.subscription_sequence, subscriber.quarantine"),
    ("subscriber.restore()", f"subscriber.restore(), {OWNER_FUNCTIONS}"),
    ("subscriber.check_generation(oid, integer)", f"subscriber.check_generation(oid, integer), {APPLY_FUNCTIONS}"),
)
REPLACED = {
    "restore()": (
        ("'copied_range', 'subscription_sequence'", "'copied_range', 'subscription_sequence', 'quarantine'"),
    ),
    "admit(text, text)": DUTIES,
    "dismiss(text, text)": DUTIES,
}


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    script = op.get_context().script
    generation, deleted_rows = (script.get_revision(number).module for number in ("0018", "0022"))
    for statement in [*TABLES, *APPLYING, *MANAGING, *REVOKED]:
        op.execute(statement)
    for function, changes in REPLACED.items():
        op.execute(deleted_rows._replace(function, changes))
    op.execute(deleted_rows.ADMITTED)
    settings = (*generation.SETTINGS, "subserver", "subwalrcvtimeout", "subretaindeadtuples", "subonerror")
    old, new = (", ".join(f"{prefix}.{column}" for column in settings) for prefix in ("OLD", "NEW"))
    op.execute("DROP TRIGGER next_generation ON subscriber.subscription")
    op.execute(f"""
        CREATE TRIGGER next_generation BEFORE UPDATE ON subscriber.subscription
        FOR EACH ROW WHEN (({old}) IS DISTINCT FROM ({new})) EXECUTE FUNCTION subscriber.next_generation()
    """)
    op.execute("ALTER TABLE subscriber.subscription ENABLE ALWAYS TRIGGER next_generation")
