"""Moves of databases: where each one stands, and the steps that it has taken.

A move has a row on both servers (subscriber/migration/__init__.py says which one decides). The rows are durable and
never published, as those of other tables (0013_unpublished.py). Only the owner of the schema moves a database.
"""

from __future__ import annotations

from alembic import op

revision = "0028"
down_revision = "0027"

TABLES = [
    """
    CREATE UNLOGGED TABLE subscriber.migration (
        name text PRIMARY KEY,
        serving text NOT NULL,
        phase text NOT NULL,
        facts jsonb NOT NULL DEFAULT '{}'::jsonb,
        changed timestamptz NOT NULL DEFAULT clock_timestamp(),
        kept oid NOT NULL UNIQUE DEFAULT subscriber.new_record()
    )
    """,
    """
    CREATE UNLOGGED TABLE subscriber.migration_step (
        stepid bigint PRIMARY KEY DEFAULT subscriber.new_id(),
        migration text NOT NULL,
        command text NOT NULL,
        step text NOT NULL,
        began timestamptz NOT NULL DEFAULT clock_timestamp(),
        ended timestamptz,
        error text,
        detail jsonb NOT NULL DEFAULT '{}'::jsonb,
        kept oid NOT NULL UNIQUE DEFAULT subscriber.new_record_of_many()
    )
    """,
    *(
        statement
        for table in ("migration", "migration_step")
        for statement in (
            f"""
            CREATE TRIGGER keep AFTER INSERT OR UPDATE OR DELETE ON subscriber.{table}
            FOR EACH ROW EXECUTE FUNCTION subscriber.keep()
            """,
            f"ALTER TABLE subscriber.{table} ENABLE ALWAYS TRIGGER keep",
            f"REVOKE ALL ON subscriber.{table} FROM PUBLIC",
        )
    ),
]

# For the trigger of a fence: whether the current session is registered as one that works for a subscription.
IS_WORKER = [
    """
    CREATE FUNCTION subscriber.is_worker() RETURNS boolean
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
        SELECT EXISTS (SELECT FROM subscriber.session s JOIN pg_catalog.pg_stat_activity a ON a.pid = s.pid
                        WHERE s.pid = pg_catalog.pg_backend_pid() AND s.backend_start = a.backend_start)
    $$
    """,
    "REVOKE ALL ON FUNCTION subscriber.is_worker() FROM PUBLIC",
]

# The first change adds to the names of all tables, and the second one to those whose records are in the larger range.
REPLACED = {
    "restore()": (
        ("ARRAY['identity', ", "ARRAY['identity', 'migration', "),
        ("'subscription_sequence', 'quarantine'", "'subscription_sequence', 'quarantine', 'migration_step'"),
    ),
}


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    earlier = op.get_context().script.get_revision("0022").module
    for statement in [*TABLES, *IS_WORKER]:
        op.execute(statement)
    for function, changes in REPLACED.items():
        op.execute(earlier._replace(function, changes))
