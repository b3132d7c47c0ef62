"""The rows that repairs have changed: who changed which key, when, and at which position of the publisher.

A row of repair_transaction is written by the transaction that repairs the rows, and has all of them. The view
`repairs` has a row for each of them. Roles with duty "owner" see the repairs of their subscriptions. They change none,
and forget_repairs() removes old ones.
"""

from __future__ import annotations

from alembic import op

revision = "0025"
down_revision = "0024"

TABLES = [
    """
    CREATE UNLOGGED TABLE subscriber.repair_transaction (
        id bigint PRIMARY KEY DEFAULT subscriber.new_id(),
        subid oid NOT NULL REFERENCES subscriber.subscription ON DELETE CASCADE,
        repaired_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        role name NOT NULL,
        command text NOT NULL,
        relation text NOT NULL,
        lsn pg_lsn NOT NULL,
        changes jsonb NOT NULL,
        kept oid NOT NULL UNIQUE DEFAULT subscriber.new_record_of_many()
    )
    """,
    "CREATE INDEX repair_transaction_subid_repaired_at_idx ON subscriber.repair_transaction (subid, repaired_at)",
    "ALTER TABLE subscriber.repair_transaction ENABLE ROW LEVEL SECURITY",
    """
    CREATE POLICY follow ON subscriber.repair_transaction
    USING (EXISTS (SELECT FROM subscriber.subscription s WHERE s.subid = repair_transaction.subid))
    """,
    """
    CREATE TRIGGER keep AFTER INSERT OR UPDATE OR DELETE ON subscriber.repair_transaction
    FOR EACH ROW EXECUTE FUNCTION subscriber.keep()
    """,
    "ALTER TABLE subscriber.repair_transaction ENABLE ALWAYS TRIGGER keep",
    """
    CREATE VIEW subscriber.repairs WITH (security_barrier) AS
    SELECT t.subid, s.subname, t.repaired_at, t.role, t.command, t.relation, t.lsn, c.action, c.key, c.row_before,
           c.row_after
      FROM subscriber.repair_transaction t JOIN subscriber.subscription s USING (subid),
           LATERAL pg_catalog.jsonb_to_recordset(t.changes)
                   AS c (action text, key jsonb, row_before jsonb, row_after jsonb)
     WHERE pg_catalog.pg_has_role(s.subowner, 'MEMBER')
    """,
]
FUNCTIONS = [
    # For a session that repairs rows, which has no privilege on the table.
    """
    CREATE FUNCTION subscriber.record_repair(progress oid, fence bytea, repaired jsonb) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        worker record;
    BEGIN
        worker := subscriber.check_fence(progress, fence);
        INSERT INTO subscriber.repair_transaction (subid, role, command, relation, lsn, changes)
        SELECT worker.subid, r.role, r.command, r.relation, r.lsn, r.changes
          FROM pg_catalog.jsonb_populate_record(NULL::subscriber.repair_transaction, repaired) r;
    END $$
    """,
    """
    CREATE FUNCTION subscriber.forget_repairs(subscription name, before timestamptz) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        number oid;
        forgotten bigint;
    BEGIN
        SELECT s.subid INTO number FROM subscriber.subscription s WHERE s.subname = subscription;
        IF number IS NULL THEN
            RAISE EXCEPTION USING ERRCODE = 'undefined_object',
                MESSAGE = pg_catalog.format('subscription "%s" does not exist', subscription);
        END IF;
        PERFORM subscriber.check_manager(number);
        DELETE FROM subscriber.repair_transaction t WHERE t.subid = number AND t.repaired_at < before;
        GET DIAGNOSTICS forgotten = ROW_COUNT;
        RETURN forgotten;
    END $$
    """,
    "REVOKE ALL ON subscriber.repair_transaction, subscriber.repairs FROM PUBLIC",
    "REVOKE ALL ON FUNCTION subscriber.record_repair(oid, bytea, jsonb) FROM PUBLIC",
    "REVOKE ALL ON FUNCTION subscriber.forget_repairs(name, timestamptz) FROM PUBLIC",
]
DUTIES = (
    ("subscriber.identity", "subscriber.identity, subscriber.repair_transaction, subscriber.repairs"),
    ("subscriber.restore()", "subscriber.restore(), subscriber.forget_repairs(name, timestamptz)"),
    (
        "subscriber.check_generation(oid, integer)",
        "subscriber.check_generation(oid, integer), subscriber.record_repair(oid, bytea, jsonb)",
    ),
)
REPLACED = {
    "restore()": (("'quarantine'", "'quarantine', 'repair_transaction'"),),
    "admit(text, text)": DUTIES,
    "dismiss(text, text)": DUTIES,
}


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    deleted_rows = op.get_context().script.get_revision("0022").module
    for statement in [*TABLES, *FUNCTIONS]:
        op.execute(statement)
    for function, changes in REPLACED.items():
        op.execute(deleted_rows._replace(function, changes))
    op.execute(deleted_rows.ADMITTED)
