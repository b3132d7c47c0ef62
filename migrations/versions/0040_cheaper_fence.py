"""The closed fence of a move costs a statement of a worker some 10 microseconds, and no longer a millisecond.

The fence calls is_worker() for each statement of a worker whose role cannot set session_replication_role. Before
PostgreSQL 18, a function in SQL is planned in each transaction, and pg_stat_activity is a join of all sessions with
their databases and roles. PL/pgSQL keeps the plan, and pg_stat_get_activity() returns one session.

The owner of the schema may be unable to see when the session of another role has started. Then process ID and role
identify it, as in is_alive().
"""

from __future__ import annotations

from alembic import op

revision = "0040"
down_revision = "0039"

IS_WORKER = """
CREATE OR REPLACE FUNCTION subscriber.is_worker() RETURNS boolean
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN EXISTS (SELECT FROM pg_catalog.pg_stat_get_activity(pg_catalog.pg_backend_pid()) a
                     JOIN subscriber.session s ON s.pid = a.pid AND s.role = a.usesysid
                    WHERE coalesce(s.backend_start = a.backend_start, true));
END $$
"""


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    op.execute(IS_WORKER)
