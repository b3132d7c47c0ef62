"""The sessions of each subscription, and the leading launcher, in tables instead of advisory locks.

Every role may take an advisory lock, and could stop replication with it. These tables change only through functions. A
session counts as long as its backend lives. Both tables are empty after a crash, when all backends are gone.
"""

from __future__ import annotations

from alembic import op

revision = "0012"
down_revision = "0011"

TABLES = [
    """
    CREATE UNLOGGED TABLE subscriber.session (
        subid oid REFERENCES subscriber.subscription ON DELETE CASCADE,
        relid oid,
        pid integer NOT NULL,
        backend_start timestamptz NOT NULL,
        role oid NOT NULL,
        PRIMARY KEY (subid, relid)
    )
    """,
    """
    CREATE UNLOGGED TABLE subscriber.launcher (
        leads boolean PRIMARY KEY DEFAULT true CHECK (leads),
        instance text NOT NULL,
        pid integer NOT NULL,
        backend_start timestamptz NOT NULL,
        role oid NOT NULL,
        renewed timestamptz NOT NULL
    )
    """,
    "GRANT SELECT ON subscriber.launcher TO PUBLIC",
]

FUNCTIONS = [
    # If the caller may not see the start time of another role's backend, process ID and role identify it.
    """
    CREATE FUNCTION subscriber.is_alive(backend integer, started timestamptz, session_role oid) RETURNS boolean
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
        SELECT EXISTS (SELECT FROM pg_catalog.pg_stat_activity a
                        WHERE a.pid = backend AND a.usesysid = session_role
                          AND coalesce(a.backend_start = started, true))
    $$
    """,
    # Waits at most five seconds for a statement about the subscription, which locks its row. Returns the process ID of
    # the live session that is already registered, or NULL if the caller's session now is. Only a launcher can register
    # sessions other than its own, because registered sessions can be terminated.
    """
    CREATE FUNCTION subscriber.register_session(subscription oid, relation oid, backend integer, started timestamptz,
                                                session_role oid) RETURNS integer
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
    DECLARE
        holder subscriber.session;
    BEGIN
        PERFORM subscriber.check_manager(subscription);
        IF backend <> pg_catalog.pg_backend_pid() AND NOT pg_catalog.has_function_privilege(
               session_user, 'subscriber.claim_progress(oid, oid)', 'EXECUTE') THEN
            RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
                MESSAGE = 'only a launcher may register other sessions than its own';
        END IF;
        PERFORM 1 FROM subscriber.subscription s WHERE s.subid = subscription FOR SHARE;
        IF NOT FOUND THEN
            RAISE EXCEPTION USING ERRCODE = 'undefined_object',
                MESSAGE = pg_catalog.format('subscription with OID %s does not exist', subscription);
        END IF;
        INSERT INTO subscriber.session AS s VALUES (subscription, relation, backend, started, session_role)
        ON CONFLICT (subid, relid) DO UPDATE
           SET pid = excluded.pid, backend_start = excluded.backend_start, role = excluded.role
         WHERE (s.pid, s.backend_start) = (excluded.pid, excluded.backend_start)
            OR NOT subscriber.is_alive(s.pid, s.backend_start, s.role);
        IF FOUND THEN
            RETURN NULL;
        END IF;
        SELECT * INTO holder FROM subscriber.session s WHERE (s.subid, s.relid) = (subscription, relation);
        RETURN holder.pid;
    END $$
    """,
    """
    CREATE FUNCTION subscriber.release_session(subscription oid, relation oid, backend integer) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        PERFORM subscriber.check_manager(subscription);
        DELETE FROM subscriber.session s
         WHERE (s.subid, s.relid) = (subscription, relation) AND s.pid = backend;
    END $$
    """,
    """
    CREATE FUNCTION subscriber.living_sessions(subscription oid) RETURNS TABLE (relid oid, pid integer)
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        PERFORM subscriber.check_manager(subscription);
        RETURN QUERY SELECT s.relid, s.pid FROM subscriber.session s
                      WHERE s.subid = subscription AND subscriber.is_alive(s.pid, s.backend_start, s.role);
    END $$
    """,
    # Terminates the sessions of a subscription: those of one relation, or with NULL all. Returns the number of live
    # ones.
    """
    CREATE OR REPLACE FUNCTION subscriber.terminate_workers(subscription_oid oid, relation_oid oid) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        PERFORM subscriber.check_manager(subscription_oid);
        RETURN (SELECT count(*) FILTER (WHERE pg_catalog.pg_terminate_backend(s.pid)) FROM subscriber.session s
                 WHERE s.subid = subscription_oid AND (relation_oid IS NULL OR s.relid = relation_oid)
                   AND s.pid <> pg_catalog.pg_backend_pid()
                   AND subscriber.is_alive(s.pid, s.backend_start, s.role));
    END $$
    """,
    """
    CREATE FUNCTION subscriber.terminate_session(subscription_oid oid, backend integer) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        PERFORM subscriber.check_manager(subscription_oid);
        RETURN (SELECT coalesce(bool_or(pg_catalog.pg_terminate_backend(s.pid)), false) FROM subscriber.session s
                 WHERE s.subid = subscription_oid AND s.pid = backend
                   AND subscriber.is_alive(s.pid, s.backend_start, s.role));
    END $$
    """,
    # Makes the candidate the leading launcher, unless the backend of another leader lives and has renewed its lease
    # within `patience`. Terminates the former session of the same instance, and that of an expired leader.
    """
    CREATE FUNCTION subscriber.lead(candidate text, backend integer, started timestamptz, session_role oid,
                                    patience interval) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
    DECLARE
        leader subscriber.launcher;
    BEGIN
        LOOP
            SELECT * INTO leader FROM subscriber.launcher FOR UPDATE;
            EXIT WHEN FOUND;
            INSERT INTO subscriber.launcher
            VALUES (true, candidate, backend, started, session_role, pg_catalog.clock_timestamp())
            ON CONFLICT DO NOTHING;
            IF FOUND THEN
                RETURN true;
            END IF;
        END LOOP;
        IF subscriber.is_alive(leader.pid, leader.backend_start, leader.role) AND leader.pid <> backend THEN
            IF leader.instance <> candidate AND leader.renewed > pg_catalog.clock_timestamp() - patience THEN
                RETURN false;
            END IF;
            PERFORM pg_catalog.pg_terminate_backend(leader.pid);
        END IF;
        UPDATE subscriber.launcher SET instance = candidate, pid = backend, backend_start = started,
               role = session_role, renewed = pg_catalog.clock_timestamp();
        RETURN true;
    END $$
    """,
    # Returns false if another launcher leads now.
    """
    CREATE FUNCTION subscriber.renew_lead(leader text, backend integer) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
    BEGIN
        UPDATE subscriber.launcher l SET renewed = pg_catalog.clock_timestamp()
         WHERE l.instance = leader AND l.pid = backend;
        RETURN FOUND;
    END $$
    """,
    """
    CREATE FUNCTION subscriber.resign(leader text, backend integer) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
    BEGIN
        DELETE FROM subscriber.launcher l WHERE l.instance = leader AND l.pid = backend;
    END $$
    """,
]


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    for statement in [*TABLES, *FUNCTIONS]:
        op.execute(statement)
