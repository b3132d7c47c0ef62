"""A worker commits nothing with settings that a statement has replaced.

After ALTER SUBSCRIPTION the launcher is notified and restarts the worker. Until then a worker could commit transactions
with the old settings. subgeneration counts the statements that change a worker's settings. Each commit passes the
number of its settings.
"""

from __future__ import annotations

from alembic import op

revision = "0018"
down_revision = "0017"

# The settings whose change restarts the worker. SETTINGS in worker/supervision/supervisor.py has the same fields, and a
# test compares the two.
SETTINGS = (
    "subname",
    "subowner",
    "subenabled",
    "subconninfo",
    "subslotname",
    "subsynccommit",
    "subpublications",
    "subbinary",
    "substream",
    "subpasswordrequired",
    "subrunasowner",
    "suborigin",
    "subconflictpolicy",
    "subconflicthistory",
    "subconflictrows",
    "subapplysessions",
    "subtrustedowners",
)


def _row(prefix: str) -> str:
    return ", ".join(f"{prefix}.{column}" for column in SETTINGS)


STATEMENTS = [
    "ALTER TABLE subscriber.subscription ADD COLUMN subgeneration integer NOT NULL DEFAULT 0",
    """
    CREATE FUNCTION subscriber.next_generation() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        NEW.subgeneration := (OLD.subgeneration + 1) % 2147483647;
        RETURN NEW;
    END $$
    """,
    f"""
    CREATE TRIGGER next_generation BEFORE UPDATE ON subscriber.subscription
    FOR EACH ROW WHEN (({_row("OLD")}) IS DISTINCT FROM ({_row("NEW")}))
    EXECUTE FUNCTION subscriber.next_generation()
    """,
    "ALTER TABLE subscriber.subscription ENABLE ALWAYS TRIGGER next_generation",
    # The large objects of the rows have the column as well.
    "UPDATE subscriber.subscription SET kept = kept",
    # Called with advance() and set_origin(), in the same statement.
    """
    CREATE FUNCTION subscriber.check_generation(subscription oid, generation integer) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        PERFORM FROM subscriber.subscription s WHERE s.subid = subscription AND s.subgeneration = generation;
        IF NOT FOUND THEN
            RAISE EXCEPTION USING ERRCODE = 'SB003', MESSAGE = 'the subscription has been altered';
        END IF;
    END $$
    """,
    "REVOKE ALL ON FUNCTION subscriber.next_generation() FROM PUBLIC",
    "REVOKE ALL ON FUNCTION subscriber.check_generation(oid, integer) FROM PUBLIC",
]
# admit() and dismiss() with one more function in duty "apply", and the grant for roles that have the duty.
ADMITTED = """
DO $$
DECLARE
    role text;
BEGIN
    FOR role IN SELECT DISTINCT r.rolname FROM pg_catalog.pg_proc p, pg_catalog.aclexplode(p.proacl) a
                  JOIN pg_catalog.pg_roles r ON r.oid = a.grantee
                 WHERE p.proname = 'advance' AND p.pronamespace = 'subscriber'::regnamespace LOOP
        EXECUTE pg_catalog.format('GRANT EXECUTE ON FUNCTION subscriber.check_generation(oid, integer) TO %I', role);
    END LOOP;
END $$
"""


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    for statement in STATEMENTS:
        op.execute(statement)
    duties = op.get_context().script.get_revision("0016").module
    for name, verb, preposition in (("admit", "GRANT", "TO"), ("dismiss", "REVOKE", "FROM")):
        function = duties.change(name, verb, preposition, more=("check_generation(oid, integer)",))
        op.execute(function.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", 1))
    op.execute(ADMITTED)
