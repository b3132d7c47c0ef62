"""The sessions of launchers and workers that have no place in table `session`: table `own_session`.

The fence of a move ends every session that this catalog does not know (subscriber/migration/sessions.py). Any program
can have a session with any application_name, so a name proves nothing. Only roles with a duty may register a session,
and each registers its own.
"""

from __future__ import annotations

from alembic import op

revision = "0042"
down_revision = "0041"

STATEMENTS = [
    """
    CREATE UNLOGGED TABLE subscriber.own_session (
        pid integer PRIMARY KEY,
        backend_start timestamptz NOT NULL,
        role oid NOT NULL
    )
    """,
    "REVOKE ALL ON subscriber.own_session FROM PUBLIC",
    # Removes the sessions that have ended.
    """
    CREATE FUNCTION subscriber.register_own_session() RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        DELETE FROM subscriber.own_session o
         WHERE o.pid IN (SELECT f.pid FROM subscriber.own_session f
                          WHERE NOT subscriber.is_alive(f.pid, f.backend_start, f.role) FOR UPDATE SKIP LOCKED);
        INSERT INTO subscriber.own_session AS o
        SELECT a.pid, a.backend_start, a.usesysid FROM pg_catalog.pg_stat_get_activity(pg_catalog.pg_backend_pid()) a
        ON CONFLICT (pid) DO UPDATE SET backend_start = excluded.backend_start, role = excluded.role;
    END $$
    """,
    # One row for each session of a launcher or worker that is alive.
    """
    CREATE FUNCTION subscriber.own_sessions() RETURNS TABLE (pid integer, role oid)
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
        SELECT s.pid, s.role
          FROM (SELECT o.pid, o.backend_start, o.role FROM subscriber.own_session o
                UNION SELECT w.pid, w.backend_start, w.role FROM subscriber.session w
                UNION SELECT l.pid, l.backend_start, l.role FROM subscriber.launcher l) s
         WHERE subscriber.is_alive(s.pid, s.backend_start, s.role)
    $$
    """,
    "REVOKE ALL ON FUNCTION subscriber.register_own_session(), subscriber.own_sessions() FROM PUBLIC",
]
DUTIES = (
    (
        "subscriber.check_generation(oid, integer)",
        "subscriber.check_generation(oid, integer), subscriber.register_own_session()",
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
