"""Subscriptions, their tables, progress, workers and statistics; the views shaped like PostgreSQL's."""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None

TABLES = [
    # Not from the server's own OID counter, which would give the same numbers to other objects. The names of origins
    # contain these numbers, and origins belong to the whole cluster. Each database therefore starts at another number,
    # and skips used ones.
    "CREATE SEQUENCE subscriber.subscription_oid MINVALUE 3500000000 MAXVALUE 4294967294 CYCLE",
    """
    SELECT pg_catalog.setval('subscriber.subscription_oid', 3500000000 + (d.oid::bigint * 1000) % 790000000, false)
      FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database()
    """,
    """
    CREATE FUNCTION subscriber.new_subscription_oid() RETURNS oid
    LANGUAGE plpgsql SET search_path = pg_catalog AS $$
    DECLARE
        candidate bigint;
    BEGIN
        LOOP
            candidate := nextval('subscriber.subscription_oid');
            EXIT WHEN NOT EXISTS (SELECT FROM pg_replication_origin o WHERE o.roname = 'pg_' || candidate);
        END LOOP;
        RETURN candidate;
    END $$
    """,
    """
    CREATE TABLE subscriber.subscription (
        subid oid PRIMARY KEY DEFAULT subscriber.new_subscription_oid(),
        subname name NOT NULL UNIQUE,
        subowner oid NOT NULL,
        subenabled boolean NOT NULL,
        subconninfo text NOT NULL,
        subslotname name,
        subsynccommit text NOT NULL,
        subpublications text[] NOT NULL,
        subbinary boolean NOT NULL,
        substream "char" NOT NULL,
        subtwophasestate "char" NOT NULL,
        subdisableonerr boolean NOT NULL,
        subpasswordrequired boolean NOT NULL,
        subrunasowner boolean NOT NULL,
        suborigin text NOT NULL,
        subfailover boolean NOT NULL,
        subskiplsn pg_lsn NOT NULL DEFAULT '0/0'
    )
    """,
    """
    CREATE TABLE subscriber.subscription_rel (
        srsubid oid REFERENCES subscriber.subscription ON DELETE CASCADE,
        srrelid oid,
        srsubstate "char" NOT NULL,
        srsublsn pg_lsn,
        PRIMARY KEY (srsubid, srrelid)
    )
    """,
    # The row is updated at every commit. Free space on its page keeps the update on the page, without index changes.
    """
    CREATE TABLE subscriber.progress (
        subid oid REFERENCES subscriber.subscription ON DELETE CASCADE,
        relid oid DEFAULT 0,
        remote_lsn pg_lsn NOT NULL,
        system_id text,
        PRIMARY KEY (subid, relid)
    ) WITH (fillfactor = 10)
    """,
    """
    CREATE UNLOGGED TABLE subscriber.worker (
        subid oid,
        relid oid DEFAULT 0,
        worker_type text NOT NULL,
        pid integer,
        state text NOT NULL,
        received_lsn pg_lsn,
        last_msg_send_time timestamptz,
        last_msg_receipt_time timestamptz,
        latest_end_lsn pg_lsn,
        latest_end_time timestamptz,
        error text,
        error_time timestamptz,
        error_hint text,
        next_retry timestamptz,
        started timestamptz NOT NULL,
        transactions bigint NOT NULL DEFAULT 0,
        changes bigint NOT NULL DEFAULT 0,
        bytes bigint NOT NULL DEFAULT 0,
        copy_rows bigint NOT NULL DEFAULT 0,
        copy_bytes bigint NOT NULL DEFAULT 0,
        copy_total_bytes bigint NOT NULL DEFAULT 0,
        updated_at timestamptz NOT NULL,
        PRIMARY KEY (subid, relid),
        FOREIGN KEY (subid) REFERENCES subscriber.subscription ON DELETE CASCADE
    ) WITH (fillfactor = 50)
    """,
    """
    CREATE TABLE subscriber.subscription_stats (
        subid oid PRIMARY KEY REFERENCES subscriber.subscription ON DELETE CASCADE,
        apply_error_count bigint NOT NULL DEFAULT 0,
        sync_error_count bigint NOT NULL DEFAULT 0,
        confl_insert_exists bigint NOT NULL DEFAULT 0,
        confl_update_origin_differs bigint NOT NULL DEFAULT 0,
        confl_update_exists bigint NOT NULL DEFAULT 0,
        confl_update_missing bigint NOT NULL DEFAULT 0,
        confl_delete_origin_differs bigint NOT NULL DEFAULT 0,
        confl_delete_missing bigint NOT NULL DEFAULT 0,
        confl_multiple_unique_conflicts bigint NOT NULL DEFAULT 0,
        stats_reset timestamptz
    )
    """,
]

FUNCTIONS = [
    # Called inside CASE by statements of the apply worker: an expression that fails when it is evaluated.
    """
    CREATE FUNCTION subscriber.raise_error(sqlstate text, message text) RETURNS boolean
    LANGUAGE plpgsql SET search_path = pg_catalog AS $$
    BEGIN
        RAISE EXCEPTION USING ERRCODE = sqlstate, MESSAGE = message;
    END $$
    """,
    # Wakes the launcher. Not in replica role, so that workers do not wake it with their own progress.
    """
    CREATE FUNCTION subscriber.notify_launcher() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog AS $$
    BEGIN
        PERFORM pg_notify('subscriber', TG_TABLE_NAME);
        RETURN NULL;
    END $$
    """,
    # For the functions below, which run with their owner's rights. They check session_user, because current_user is
    # that owner.
    """
    CREATE FUNCTION subscriber.may_manage(subscription oid) RETURNS boolean
    LANGUAGE sql STABLE SET search_path = pg_catalog AS $$
        SELECT coalesce((SELECT pg_has_role(session_user, s.subowner, 'USAGE') FROM subscriber.subscription s
                          WHERE s.subid = subscription),
                        (SELECT r.rolsuper FROM pg_roles r WHERE r.rolname = session_user))
    $$
    """,
    """
    CREATE FUNCTION subscriber.check_origin_owner(name text) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog AS $$
    BEGIN
        IF name !~ '^pg_[0-9]{10}(_[0-9]{1,10})?$' THEN
            RAISE EXCEPTION USING ERRCODE = 'reserved_name',
                MESSAGE = format('"%s" is not the name of a subscription''s replication origin', name);
        END IF;
        IF NOT subscriber.may_manage(substring(name FROM '^pg_([0-9]{10})')::bigint) THEN
            RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
                MESSAGE = format('permission denied for replication origin "%s"', name);
        END IF;
    END $$
    """,
    # The lock serializes callers: the next statement of a waiting caller sees the result of the other one.
    """
    CREATE FUNCTION subscriber.create_origin(name text) RETURNS oid
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog AS $$
    DECLARE
        origin oid;
    BEGIN
        PERFORM subscriber.check_origin_owner(name);
        PERFORM pg_advisory_xact_lock(hashtextextended(name, 1937072755));
        SELECT o.roident INTO origin FROM pg_replication_origin o WHERE o.roname = name;
        IF origin IS NULL THEN
            origin := pg_replication_origin_create('subscriber_' || name);
            UPDATE pg_replication_origin o SET roname = name WHERE o.roident = origin;
        END IF;
        RETURN origin;
    END $$
    """,
    # A worker's session releases its locks before its origin, so the origin can be in use a moment longer.
    """
    CREATE FUNCTION subscriber.drop_origin(name text) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog AS $$
    DECLARE
        attempts int := 0;
    BEGIN
        PERFORM subscriber.check_origin_owner(name);
        PERFORM pg_advisory_xact_lock(hashtextextended(name, 1937072755));
        LOOP
            IF NOT EXISTS (SELECT FROM pg_replication_origin o WHERE o.roname = name) THEN
                RETURN false;
            END IF;
            BEGIN
                PERFORM pg_replication_origin_drop(name);
                RETURN true;
            EXCEPTION WHEN object_in_use THEN
                attempts := attempts + 1;
                IF attempts = 100 THEN
                    RAISE;
                END IF;
            END;
            PERFORM pg_sleep(0.05);
        END LOOP;
    END $$
    """,
    # The progress of an origin, for owners who may not call pg_replication_origin_progress().
    """
    CREATE FUNCTION subscriber.origin_progress(name text) RETURNS pg_lsn
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog AS $$
    BEGIN
        PERFORM subscriber.check_origin_owner(name);
        IF EXISTS (SELECT FROM pg_replication_origin o WHERE o.roname = name) THEN
            RETURN pg_replication_origin_progress(name, false);
        END IF;
        RETURN NULL;
    END $$
    """,
    # Ends the sessions of a subscription's workers, which it finds by their locks (catalog/locks.py). With a relation,
    # only the worker that synchronizes it; with NULL all.
    """
    CREATE FUNCTION subscriber.terminate_workers(subscription_oid oid, relation_oid oid) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog AS $$
    BEGIN
        IF NOT subscriber.may_manage(subscription_oid) THEN
            RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
                MESSAGE = format('permission denied for subscription with OID %s', subscription_oid);
        END IF;
        RETURN (SELECT count(*) FILTER (WHERE pg_terminate_backend(l.pid)) FROM pg_locks l
                 WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 2 AND l.pid <> pg_backend_pid()
                   AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
                   AND (l.classid = subscription_oid AND (relation_oid IS NULL OR l.objid = relation_oid)
                        OR relation_oid IS NULL AND l.classid = 1937072755 AND l.objid = subscription_oid));
    END $$
    """,
    # Found before the function of pg_catalog, as the views are. With NULL or an OID that is not ours, the server's own
    # function runs too.
    """
    CREATE FUNCTION subscriber.pg_stat_reset_subscription_stats(subid oid) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog AS $$
    #variable_conflict use_column
    BEGIN
        UPDATE subscriber.subscription_stats SET (
            apply_error_count, sync_error_count, confl_insert_exists, confl_update_origin_differs, confl_update_exists,
            confl_update_missing, confl_delete_origin_differs, confl_delete_missing, confl_multiple_unique_conflicts,
            stats_reset) = (SELECT 0, 0, 0, 0, 0, 0, 0, 0, 0, now())
         WHERE $1 IS NULL OR subid = $1;
        IF $1 IS NULL OR NOT FOUND THEN
            PERFORM pg_catalog.pg_stat_reset_subscription_stats($1);
        END IF;
    END $$
    """,
    "REVOKE ALL ON FUNCTION subscriber.pg_stat_reset_subscription_stats(oid) FROM PUBLIC",
]

TRIGGERS = [
    f"""
    CREATE TRIGGER notify_launcher AFTER INSERT OR UPDATE OR DELETE ON subscriber.{table}
    FOR EACH STATEMENT EXECUTE FUNCTION subscriber.notify_launcher()
    """
    for table in ("subscription", "subscription_rel")
]

VIEWS = [
    """
    CREATE VIEW subscriber.pg_subscription AS
    SELECT s.subid AS oid, d.oid AS subdbid, s.subskiplsn, s.subname, s.subowner, s.subenabled, s.subbinary,
           s.substream, s.subtwophasestate, s.subdisableonerr, s.subpasswordrequired, s.subrunasowner, s.subfailover,
           CASE WHEN pg_catalog.pg_has_role(s.subowner, 'USAGE') THEN s.subconninfo END AS subconninfo,
           s.subslotname, s.subsynccommit, s.subpublications, s.suborigin
      FROM subscriber.subscription s
      JOIN pg_catalog.pg_database d ON d.datname = pg_catalog.current_database()
    """,
    # PostgreSQL removes a table's row with the table. Here the row stays, but the view does not show it.
    """
    CREATE VIEW subscriber.pg_subscription_rel AS
    SELECT r.srsubid, r.srrelid, r.srsubstate, r.srsublsn
      FROM subscriber.subscription_rel r
     WHERE EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.oid = r.srrelid)
    """,
    # A worker counts while the backend that wrote its row lives: the same pid, started before the worker.
    """
    CREATE VIEW subscriber.pg_stat_subscription AS
    SELECT s.subid, s.subname, w.worker_type, w.pid, NULL::integer AS leader_pid, nullif(w.relid, 0) AS relid,
           w.received_lsn, w.last_msg_send_time, w.last_msg_receipt_time, w.latest_end_lsn, w.latest_end_time
      FROM subscriber.subscription s
      LEFT JOIN (subscriber.worker w
                 JOIN pg_catalog.pg_stat_activity a
                   ON a.pid = w.pid AND a.datname = pg_catalog.current_database()
                  AND (a.backend_start IS NULL OR a.backend_start <= w.started)) ON w.subid = s.subid
    """,
    """
    CREATE VIEW subscriber.pg_stat_subscription_stats AS
    SELECT s.subid, s.subname, t.apply_error_count, t.sync_error_count, t.confl_insert_exists,
           t.confl_update_origin_differs, t.confl_update_exists, t.confl_update_missing, t.confl_delete_origin_differs,
           t.confl_delete_missing, t.confl_multiple_unique_conflicts, t.stats_reset
      FROM subscriber.subscription s JOIN subscriber.subscription_stats t USING (subid)
    """,
]

# Connection strings contain passwords, so only a subscription's owner may see or change its row. Creating one requires
# the same privileges as in PostgreSQL 16: those of pg_create_subscription, and CREATE on the database. The policies of
# dependent tables show only rows of subscriptions that the caller may see.
PRIVILEGES = [
    "GRANT USAGE ON SCHEMA subscriber TO PUBLIC",
    "GRANT USAGE ON SEQUENCE subscriber.subscription_oid TO PUBLIC",
    "GRANT SELECT ON subscriber.alembic_version TO PUBLIC",
    *[
        f"GRANT SELECT ON subscriber.{view} TO PUBLIC"
        for view in ("pg_subscription", "pg_subscription_rel", "pg_stat_subscription", "pg_stat_subscription_stats")
    ],
    *[
        statement
        for table in ("subscription", "subscription_rel", "progress", "worker", "subscription_stats")
        for statement in (
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON subscriber.{table} TO PUBLIC",
            f"ALTER TABLE subscriber.{table} ENABLE ROW LEVEL SECURITY",
        )
    ],
    """
    CREATE POLICY see ON subscriber.subscription FOR SELECT
    USING (pg_catalog.pg_has_role(subowner, 'MEMBER'))
    """,
    """
    CREATE POLICY add ON subscriber.subscription FOR INSERT
    WITH CHECK (pg_catalog.pg_has_role(subowner, 'USAGE') AND subpasswordrequired
        AND pg_catalog.has_database_privilege(pg_catalog.current_database(), 'CREATE')
        AND EXISTS (SELECT FROM pg_catalog.pg_roles r
                     WHERE r.rolname = 'pg_create_subscription' AND pg_catalog.pg_has_role(r.oid, 'USAGE')))
    """,
    # The new owner may be another role, which the old one can SET ROLE to.
    """
    CREATE POLICY change ON subscriber.subscription FOR UPDATE
    USING (pg_catalog.pg_has_role(subowner, 'USAGE') AND subpasswordrequired)
    WITH CHECK (pg_catalog.pg_has_role(subowner, 'MEMBER') AND subpasswordrequired)
    """,
    """
    CREATE POLICY remove ON subscriber.subscription FOR DELETE
    USING (pg_catalog.pg_has_role(subowner, 'USAGE'))
    """,
    *[
        f"""
        CREATE POLICY follow ON subscriber.{table}
        USING (EXISTS (SELECT FROM subscriber.subscription s WHERE s.subid = {table}.{column}))
        """
        for table, column in (
            ("subscription_rel", "srsubid"),
            ("progress", "subid"),
            ("worker", "subid"),
            ("subscription_stats", "subid"),
        )
    ],
]


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    for statement in [*TABLES, *FUNCTIONS, *TRIGGERS, *VIEWS, *PRIVILEGES]:
        op.execute(statement)
