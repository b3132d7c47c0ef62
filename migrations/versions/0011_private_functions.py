"""Functions that no temporary object can hijack, granted only to the roles that need them; no table writable by PUBLIC.

With `search_path = pg_catalog` alone, the server searches schema pg_temp first. A caller's temporary view could replace
a system catalog inside a SECURITY DEFINER function. Every function here therefore names pg_temp last.

subscriber.admit() gives a role the privileges of its duty. A trigger admits owners of subscriptions.
"""

from __future__ import annotations

from alembic import op

revision = "0011"
down_revision = "0010"

FUNCTIONS = [
    """
    CREATE OR REPLACE FUNCTION subscriber.raise_error(sqlstate text, message text) RETURNS boolean
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        RAISE EXCEPTION USING ERRCODE = sqlstate, MESSAGE = message;
    END $$
    """,
    """
    CREATE OR REPLACE FUNCTION subscriber.notify_launcher() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        PERFORM pg_catalog.pg_notify('subscriber', TG_TABLE_NAME);
        RETURN NULL;
    END $$
    """,
    # The number is the time in seconds, so that it is never used twice; origins belong to the whole cluster. It is not
    # a sequence, because sequences can be published.
    """
    CREATE OR REPLACE FUNCTION subscriber.new_subscription_oid() RETURNS oid
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        candidate bigint := 3500000000 + pg_catalog.date_part('epoch',
            pg_catalog.clock_timestamp() - '2026-01-01 00:00:00+00'::pg_catalog.timestamptz)::bigint % 790000000;
    BEGIN
        WHILE EXISTS (SELECT FROM pg_catalog.pg_replication_origin o WHERE o.roname = 'pg_' || candidate)
              OR EXISTS (SELECT FROM subscriber.pg_subscription s WHERE s.oid = candidate::oid) LOOP
            candidate := candidate + 1;
        END LOOP;
        RETURN candidate;
    END $$
    """,
    """
    CREATE OR REPLACE FUNCTION subscriber.may_manage(subscription oid) RETURNS boolean
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
        SELECT coalesce((SELECT pg_catalog.pg_has_role(session_user, s.subowner, 'USAGE')
                           FROM subscriber.subscription s WHERE s.subid = subscription),
                        (SELECT r.rolsuper FROM pg_catalog.pg_roles r WHERE r.rolname = session_user))
    $$
    """,
    """
    CREATE OR REPLACE FUNCTION subscriber.check_manager(subscription oid) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        IF NOT subscriber.may_manage(subscription) THEN
            RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
                MESSAGE = pg_catalog.format('permission denied for subscription with OID %s', subscription);
        END IF;
    END $$
    """,
    """
    CREATE OR REPLACE FUNCTION subscriber.check_origin_owner(name text) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        IF name !~ '^pg_[0-9]{10}(_[0-9]{1,10})?$' THEN
            RAISE EXCEPTION USING ERRCODE = 'reserved_name',
                MESSAGE = pg_catalog.format('"%s" is not the name of a subscription''s replication origin', name);
        END IF;
        IF NOT subscriber.may_manage(substring(name FROM '^pg_([0-9]{10})')::bigint) THEN
            RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
                MESSAGE = pg_catalog.format('permission denied for replication origin "%s"', name);
        END IF;
    END $$
    """,
    # Two concurrent callers: the second one's INSERT into the server's catalog fails on its unique index.
    """
    CREATE OR REPLACE FUNCTION subscriber.create_origin(name text) RETURNS oid
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        origin oid;
    BEGIN
        PERFORM subscriber.check_origin_owner(name);
        IF NOT (SELECT r.rolsuper FROM pg_catalog.pg_roles r WHERE r.rolname = current_user) THEN
            RETURN NULL;
        END IF;
        LOOP
            SELECT o.roident INTO origin FROM pg_catalog.pg_replication_origin o WHERE o.roname = name;
            IF origin IS NOT NULL THEN
                RETURN origin;
            END IF;
            BEGIN
                origin := pg_catalog.pg_replication_origin_create('subscriber_' || name);
                UPDATE pg_catalog.pg_replication_origin o SET roname = name WHERE o.roident = origin;
                RETURN origin;
            EXCEPTION WHEN unique_violation THEN
                NULL;
            END;
        END LOOP;
    END $$
    """,
    """
    CREATE OR REPLACE FUNCTION subscriber.drop_origin(name text) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        attempts int := 0;
    BEGIN
        PERFORM subscriber.check_origin_owner(name);
        LOOP
            IF NOT EXISTS (SELECT FROM pg_catalog.pg_replication_origin o WHERE o.roname = name) THEN
                RETURN false;
            END IF;
            BEGIN
                PERFORM pg_catalog.pg_replication_origin_drop(name);
                RETURN true;
            EXCEPTION WHEN object_in_use THEN
                attempts := attempts + 1;
                IF attempts = 100 THEN
                    RAISE;
                END IF;
            WHEN undefined_object THEN  -- dropped by another session
                RETURN false;
            END;
            PERFORM pg_catalog.pg_sleep(0.05);
        END LOOP;
    END $$
    """,
    """
    CREATE OR REPLACE FUNCTION subscriber.origin_progress(name text) RETURNS pg_lsn
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        PERFORM subscriber.check_origin_owner(name);
        IF EXISTS (SELECT FROM pg_catalog.pg_replication_origin o WHERE o.roname = name) THEN
            RETURN pg_catalog.pg_replication_origin_progress(name, false);
        END IF;
        RETURN NULL;
    END $$
    """,
    """
    CREATE OR REPLACE FUNCTION subscriber.pg_stat_reset_subscription_stats(subid oid) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
    #variable_conflict use_column
    BEGIN
        UPDATE subscriber.subscription_stats SET (
            apply_error_count, sync_error_count, confl_insert_exists, confl_update_origin_differs, confl_update_exists,
            confl_update_missing, confl_delete_origin_differs, confl_delete_missing, confl_multiple_unique_conflicts,
            stats_reset) = (SELECT 0, 0, 0, 0, 0, 0, 0, 0, 0, pg_catalog.now())
         WHERE $1 IS NULL OR subid = $1;
        IF $1 IS NULL OR NOT FOUND THEN
            PERFORM pg_catalog.pg_stat_reset_subscription_stats($1);
        END IF;
    END $$
    """,
]

# Changing the owner needs a check of its own, because an UPDATE of the column does not check SET on the new role.
OWNERS = [
    """
    CREATE FUNCTION subscriber.set_owner(subscription oid, owner oid) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        privilege text := CASE WHEN pg_catalog.current_setting('server_version_num')::int >= 160000
                               THEN 'SET' ELSE 'MEMBER' END;
    BEGIN
        PERFORM subscriber.check_manager(subscription);
        IF NOT pg_catalog.pg_has_role(session_user, owner, privilege) THEN
            RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
                MESSAGE = pg_catalog.format('must be able to SET ROLE "%s"', pg_catalog.pg_get_userbyid(owner));
        END IF;
        UPDATE subscriber.subscription s SET subowner = owner WHERE s.subid = subscription;
    END $$
    """,
    """
    CREATE FUNCTION subscriber.admit_owner() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        IF TG_OP <> 'DELETE' AND NOT (SELECT r.rolsuper FROM pg_catalog.pg_roles r WHERE r.oid = NEW.subowner) THEN
            PERFORM subscriber.admit(pg_catalog.pg_get_userbyid(NEW.subowner), 'owner');
        END IF;
        IF TG_OP <> 'INSERT'
           AND EXISTS (SELECT FROM pg_catalog.pg_roles r WHERE r.oid = OLD.subowner AND NOT r.rolsuper)
           AND NOT EXISTS (SELECT FROM subscriber.subscription s WHERE s.subowner = OLD.subowner) THEN
            PERFORM subscriber.dismiss(pg_catalog.pg_get_userbyid(OLD.subowner), 'owner');
        END IF;
        RETURN NULL;
    END $$
    """,
    """
    CREATE TRIGGER admit_owner AFTER INSERT OR DELETE OR UPDATE OF subowner ON subscriber.subscription
    FOR EACH ROW EXECUTE FUNCTION subscriber.admit_owner()
    """,
    "ALTER TABLE subscriber.subscription ENABLE ALWAYS TRIGGER admit_owner",
    """
    ALTER POLICY change ON subscriber.subscription
    USING (pg_catalog.pg_has_role(subowner, 'USAGE') AND subpasswordrequired) WITH CHECK (subpasswordrequired)
    """,
]


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade.

    The last script grants the privileges, because it knows all functions.
    """
    for statement in [*FUNCTIONS, *OWNERS]:
        op.execute(statement)
    op.execute("ALTER TABLE subscriber.subscription ALTER COLUMN subid SET DEFAULT subscriber.new_subscription_oid()")
    op.execute("DROP SEQUENCE subscriber.subscription_oid")
