"""The audit of actions: who has changed a subscription through the console, when, from where, and with which result.

A row is written before the action, and completed after it. A row without an end belongs to a process that was killed,
so the result of its action is unknown. The row stays when its subscription is dropped: only the schema's owner sees it
then. Roles cannot change rows, and only the schema's owner can delete them.
"""

from __future__ import annotations

from alembic import op

revision = "0032"
down_revision = "0031"

STATEMENTS = [
    """
    CREATE UNLOGGED TABLE subscriber.audit (
        id bigint PRIMARY KEY DEFAULT subscriber.new_id(),
        began timestamptz NOT NULL DEFAULT clock_timestamp(),
        ended timestamptz,
        subid oid NOT NULL,
        subname name NOT NULL,
        who text NOT NULL,
        role name NOT NULL DEFAULT session_user,
        address text NOT NULL,
        action text NOT NULL,
        arguments jsonb NOT NULL,
        result text,
        summary jsonb,
        kept oid NOT NULL UNIQUE DEFAULT subscriber.new_record_of_many()
    )
    """,
    "CREATE INDEX audit_subid_id_idx ON subscriber.audit (subid, id)",
    "ALTER TABLE subscriber.audit ENABLE ROW LEVEL SECURITY",
    """
    CREATE POLICY follow ON subscriber.audit
    USING (EXISTS (SELECT FROM subscriber.subscription s WHERE s.subid = audit.subid))
    """,
    """
    CREATE TRIGGER keep AFTER INSERT OR UPDATE OR DELETE ON subscriber.audit
    FOR EACH ROW EXECUTE FUNCTION subscriber.keep()
    """,
    "ALTER TABLE subscriber.audit ENABLE ALWAYS TRIGGER keep",
    """
    CREATE FUNCTION subscriber.begin_action(subscription oid, who text, address text, action text, arguments jsonb)
    RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        number bigint;
    BEGIN
        PERFORM subscriber.check_manager(subscription);
        INSERT INTO subscriber.audit (subid, subname, who, address, action, arguments)
        SELECT s.subid, s.subname, begin_action.who, begin_action.address, begin_action.action, begin_action.arguments
          FROM subscriber.subscription s WHERE s.subid = subscription
        RETURNING id INTO number;
        RETURN number;
    END $$
    """,
    """
    CREATE FUNCTION subscriber.end_action(number bigint, outcome text, figures jsonb) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
        UPDATE subscriber.audit a SET ended = pg_catalog.clock_timestamp(), result = outcome, summary = figures
         WHERE a.id = number AND a.role = session_user AND a.ended IS NULL
    $$
    """,
    "REVOKE ALL ON subscriber.audit FROM PUBLIC",
    "REVOKE ALL ON FUNCTION subscriber.begin_action(oid, text, text, text, jsonb) FROM PUBLIC",
    "REVOKE ALL ON FUNCTION subscriber.end_action(bigint, text, jsonb) FROM PUBLIC",
]
DUTIES = (
    (
        "subscriber.repair_transaction, subscriber.repairs",
        "subscriber.repair_transaction, subscriber.repairs, subscriber.audit",
    ),
    (
        "subscriber.forget_repairs(name, timestamptz)",
        "subscriber.forget_repairs(name, timestamptz), subscriber.begin_action(oid, text, text, text, jsonb),"
        " subscriber.end_action(bigint, text, jsonb)",
    ),
)
REPLACED = {
    "restore()": (("'repair_transaction'", "'repair_transaction', 'audit'"),),
    "admit(text, text)": DUTIES,
    "dismiss(text, text)": DUTIES,
}


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    deleted_rows = op.get_context().script.get_revision("0022").module
    for statement in STATEMENTS:
        op.execute(statement)
    for function, changes in REPLACED.items():
        op.execute(deleted_rows._replace(function, changes))
    op.execute(deleted_rows.ADMITTED)
