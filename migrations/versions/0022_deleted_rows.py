"""PostgreSQL 19's retain_dead_tuples: deleted rows are remembered, so that a later UPDATE of them is recognized.

Dead rows cannot be read with SQL. A trigger on each table of a subscription with retain_dead_tuples writes a row to
deleted_row for each deleted row: a hash of its key, and the transaction. pg_xact_commit_timestamp_origin() has the
transaction's commit time and origin.

Large objects make these rows durable (0013_unpublished.py), one for each statement that deletes rows:

     0  del1
     4  the transaction, 8 bytes
    12  the table, 8 bytes
    20  32 bytes for each key

The trigger function runs with the rights of the schema's owner in the session of any role. It calls no function that a
role could have replaced: format() prints values by their types' output functions, not by casts.
"""

from __future__ import annotations

from alembic import op

revision = "0022"
down_revision = "0021"

# The number range of the large objects.
DELETED = (4_200_000_000, 4_290_000_000)
KEYS_IN_RECORD = 10_000
# Large objects that one transaction may remove: each takes a lock until it ends.
REMOVED_AT_ONCE = 500
# Types whose text depends on settings of the session or has no normal form, with the function that replaces it. They
# are the same in targets/postgres/sql/deleted_rows.py.
NORMAL_FORMS = {
    "bytea": "encode({}, 'hex')",
    "date": "encode(pg_catalog.date_send({}), 'hex')",
    "time": "encode(pg_catalog.time_send({}), 'hex')",
    "timetz": "encode(pg_catalog.timetz_send({}), 'hex')",
    "timestamp": "encode(pg_catalog.timestamp_send({}), 'hex')",
    "timestamptz": "encode(pg_catalog.timestamptz_send({}), 'hex')",
    "interval": "encode(pg_catalog.interval_send({}), 'hex')",
    "float4": "encode(pg_catalog.float4send({}), 'hex')",
    "float8": "encode(pg_catalog.float8send({}), 'hex')",
    "money": "encode(pg_catalog.cash_send({}), 'hex')",
    "numeric": "trim_scale({})",
}
_FORMS = ", ".join(
    f"('{name}', '{form.replace(chr(39), chr(39) * 2).format('%s')}')" for name, form in NORMAL_FORMS.items()
)

TABLES = [
    """
    ALTER TABLE subscriber.subscription
        ADD COLUMN subretaindeadtuples boolean NOT NULL DEFAULT false,
        ADD COLUMN submaxretention integer NOT NULL DEFAULT 0
    """,
    "UPDATE subscriber.subscription SET kept = kept",
    "ALTER TABLE subscriber.subscription_stats ADD COLUMN confl_update_deleted bigint NOT NULL DEFAULT 0",
    """
    CREATE UNLOGGED TABLE subscriber.deleted_row (
        relid oid NOT NULL,
        key bytea NOT NULL,
        xid xid8 NOT NULL,
        record oid NOT NULL
    )
    """,
    "CREATE INDEX deleted_row_relid_key_idx ON subscriber.deleted_row (relid, key)",
    "CREATE INDEX deleted_row_xid_record_idx ON subscriber.deleted_row (xid, record)",
    # After a crash nothing is removed until the workers have found new limits.
    """
    CREATE UNLOGGED TABLE subscriber.retention (
        subid oid PRIMARY KEY REFERENCES subscriber.subscription ON DELETE CASCADE,
        horizon xid8,
        expired xid8
    )
    """,
]

REMEMBERING = [
    f"""
    CREATE FUNCTION subscriber.new_delete_record() RETURNS oid
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        candidate oid;
    BEGIN
        FOR attempt IN 1 .. 100 LOOP
            candidate := ({DELETED[0]} + pg_catalog.nextval('subscriber.number') % {DELETED[1] - DELETED[0]})::oid;
            IF NOT EXISTS (SELECT FROM pg_catalog.pg_largeobject_metadata m WHERE m.oid = candidate) THEN
                RETURN candidate;
            END IF;
            -- A crash has reset the sequence, and many neighboring numbers may be in use.
            PERFORM pg_catalog.setval('subscriber.number', 1 + floor(pg_catalog.random() * 999999999)::bigint);
        END LOOP;
        RETURN 0;  -- the server chooses a number, and the record does not survive a crash
    END $$
    """,
    # Returns the expression for the key of row `prefix`, or NULL if the table has no key. The columns are those of the
    # index that identifies a row.
    f"""
    CREATE FUNCTION subscriber.key_expression(relation oid, prefix text) RETURNS text
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
        WITH RECURSIVE key_columns (place, attname, typid) AS (
            SELECT k.place, a.attname, a.atttypid
              FROM (SELECT i.indkey, i.indnkeyatts FROM pg_catalog.pg_index i
                     WHERE i.indrelid = relation AND i.indisvalid AND i.indimmediate
                       AND (i.indisreplident OR i.indisprimary)
                     ORDER BY i.indisreplident DESC LIMIT 1) i,
                   unnest(i.indkey::int2[]) WITH ORDINALITY AS k (attnum, place)
              JOIN pg_catalog.pg_attribute a ON a.attrelid = relation AND a.attnum = k.attnum
             WHERE k.place <= i.indnkeyatts
            UNION ALL
            SELECT k.place, k.attname, t.typbasetype
              FROM key_columns k JOIN pg_catalog.pg_type t ON t.oid = k.typid WHERE t.typtype = 'd'),
        printed AS (
            SELECT k.place, pg_catalog.format(coalesce('pg_catalog.' || f.form, '%s'),
                                              pg_catalog.format('%s.%I', prefix, k.attname)) AS value
              FROM key_columns k JOIN pg_catalog.pg_type t ON t.oid = k.typid AND t.typtype <> 'd'
              LEFT JOIN (VALUES {_FORMS}) AS f (name, form)
                     ON t.typname = f.name AND t.typnamespace = 'pg_catalog'::regnamespace)
        SELECT pg_catalog.format('pg_catalog.sha256(pg_catalog.convert_to(pg_catalog.format(%L, %s),'
                                 ' pg_catalog.getdatabaseencoding()))',
                                 repeat('%L,', count(*)::int), string_agg(p.value, ', ' ORDER BY p.place))
          FROM printed p HAVING count(*) > 0
    $$
    """,
    # Creates the trigger function for tables with these key columns, unless it exists. Returns its name.
    f"""
    CREATE FUNCTION subscriber.delete_function(by_statement boolean, key text) RETURNS name
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        name name := 'deleted_' || CASE WHEN by_statement THEN 'rows_' ELSE 'row_' END || md5(key);
        header text := $_$'del1'::bytea || int8send(pg_current_xact_id()::text::bigint)
                          || int8send(TG_RELID::bigint)$_$;
    BEGIN
        IF EXISTS (SELECT FROM pg_catalog.pg_proc p
                    WHERE p.pronamespace = 'subscriber'::regnamespace AND p.proname = name) THEN
            RETURN name;
        END IF;
        EXECUTE pg_catalog.format(
            'CREATE FUNCTION subscriber.%I() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER'
            ' SET search_path = pg_catalog, pg_temp AS %L', name,
            CASE WHEN by_statement THEN $_$
            BEGIN
                WITH gone AS MATERIALIZED (
                    SELECT $_$ || key || $_$ AS key, (row_number() OVER () - 1) / {KEYS_IN_RECORD} AS part
                      FROM deleted),
                records AS MATERIALIZED (
                    SELECT g.part, lo_from_bytea(subscriber.new_delete_record(),
                                                 $_$ || header || $_$ || string_agg(g.key, '')) AS record
                      FROM gone g GROUP BY g.part)
                INSERT INTO subscriber.deleted_row (relid, key, xid, record)
                SELECT TG_RELID, g.key, pg_current_xact_id(), r.record FROM gone g JOIN records r ON r.part = g.part;
                RETURN NULL;
            END $_$
            ELSE $_$
            DECLARE
                key bytea := $_$ || key || $_$;
            BEGIN
                INSERT INTO subscriber.deleted_row (relid, key, xid, record)
                VALUES (TG_RELID, key, pg_current_xact_id(),
                        lo_from_bytea(subscriber.new_delete_record(), $_$ || header || $_$ || key));
                RETURN NULL;
            END $_$ END);
        EXECUTE pg_catalog.format('REVOKE ALL ON FUNCTION subscriber.%I() FROM PUBLIC', name);
        RETURN name;
    END $$
    """,
    # Creates, replaces and drops triggers, so that exactly the tables of subscriptions with retain_dead_tuples have
    # one. Returns the tables for which that is impossible. A trigger for each statement is cheaper. One for each row is
    # necessary where a statement on another table deletes rows: partitions and inheritance. If another subscription
    # has the table, the trigger also fires for replicated changes. `dropped` is a subscription that is being dropped.
    f"""
    CREATE FUNCTION subscriber.set_delete_triggers(patience text, dropped oid)
    RETURNS TABLE (subid oid, relation text, state text, problem text, hint text)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '10s' AS $$
    #variable_conflict use_column
    DECLARE
        wanted record;
        found record;
    BEGIN
        PERFORM pg_catalog.set_config('lock_timeout', patience, true);
        FOR wanted IN
            SELECT t.*, subscriber.key_expression(t.oid, CASE WHEN t.by_statement THEN 'deleted' ELSE 'OLD' END) AS key
              FROM (SELECT c.oid, pg_catalog.format('%I.%I', n.nspname, c.relname) AS label, c.relowner, s.subid,
                           s.subowner, c.relkind = 'r' AND NOT EXISTS (
                               SELECT FROM pg_catalog.pg_inherits i WHERE c.oid IN (i.inhrelid, i.inhparent)
                           ) AS by_statement,
                           EXISTS (SELECT FROM subscriber.subscription_rel o
                                    WHERE o.srrelid = c.oid AND o.srsubid <> s.subid
                                      AND o.srsubid IS DISTINCT FROM dropped)
                           OR EXISTS (SELECT FROM pg_catalog.pg_subscription_rel o WHERE o.srrelid = c.oid) AS several,
                           row_number() OVER (PARTITION BY c.oid ORDER BY s.subid) AS number
                      FROM subscriber.subscription s JOIN subscriber.subscription_rel r ON r.srsubid = s.subid
                      JOIN pg_catalog.pg_class c ON c.oid = r.srrelid AND c.relkind IN ('r', 'p')
                      JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
                     WHERE s.subretaindeadtuples AND s.subid IS DISTINCT FROM dropped) t
             WHERE t.number = 1 ORDER BY t.label LOOP
            subid := wanted.subid;
            relation := wanted.label;
            IF wanted.key IS NULL THEN
                state := '01000';
                problem := pg_catalog.format('deleted rows of table %s are not remembered', wanted.label);
                hint := 'Give it a primary key, or a unique index as REPLICA IDENTITY.';
                RETURN NEXT;
                CONTINUE;
            END IF;
            SELECT g.tgenabled, p.proname, p.pronamespace = 'subscriber'::regnamespace AS ours INTO found
              FROM pg_catalog.pg_trigger g JOIN pg_catalog.pg_proc p ON p.oid = g.tgfoid
             WHERE g.tgrelid = wanted.oid AND g.tgname = 'subscriber_deleted_rows';
            CONTINUE WHEN found.ours AND (found.tgenabled = 'A') = wanted.several
                AND found.proname = subscriber.delete_function(wanted.by_statement, wanted.key);
            IF NOT pg_catalog.pg_has_role(current_user, wanted.relowner, 'USAGE') THEN
                state := '42501';
                problem := pg_catalog.format('must be owner of table %s to remember its deleted rows', wanted.label);
                hint := pg_catalog.format('As a superuser: GRANT %I TO %I;',
                                          pg_catalog.pg_get_userbyid(wanted.relowner), current_user);
                RETURN NEXT;
                CONTINUE;
            END IF;
            IF NOT pg_catalog.has_table_privilege(wanted.subowner, wanted.oid, 'TRIGGER') THEN
                state := '42501';
                problem := pg_catalog.format('permission denied for table %s', wanted.label);
                hint := pg_catalog.format('As the owner of the table: GRANT TRIGGER ON %s TO %I;', wanted.label,
                                          pg_catalog.pg_get_userbyid(wanted.subowner));
                RETURN NEXT;
                CONTINUE;
            END IF;
            BEGIN
                IF found.ours THEN
                    EXECUTE pg_catalog.format('DROP TRIGGER subscriber_deleted_rows ON %s', wanted.label);
                END IF;
                EXECUTE pg_catalog.format('CREATE TRIGGER subscriber_deleted_rows AFTER DELETE ON %s %s'
                                          ' EXECUTE FUNCTION subscriber.%I()', wanted.label,
                                          CASE WHEN wanted.by_statement
                                               THEN 'REFERENCING OLD TABLE AS deleted FOR EACH STATEMENT'
                                               ELSE 'FOR EACH ROW' END,
                                          subscriber.delete_function(wanted.by_statement, wanted.key));
                IF wanted.several THEN
                    EXECUTE pg_catalog.format('ALTER TABLE %s ENABLE ALWAYS TRIGGER subscriber_deleted_rows',
                                              wanted.label);
                END IF;
            EXCEPTION WHEN lock_not_available THEN
                state := '55P03';
                problem := pg_catalog.format('could not lock table %s to create its trigger', wanted.label);
                hint := 'Try again when the transactions that use the table have ended.';
                RETURN NEXT;
            END;
        END LOOP;
        subid := NULL;
        FOR found IN
            SELECT c.oid, pg_catalog.format('%I.%I', n.nspname, c.relname) AS label, c.relowner
              FROM pg_catalog.pg_trigger g JOIN pg_catalog.pg_proc p ON p.oid = g.tgfoid
              JOIN pg_catalog.pg_class c ON c.oid = g.tgrelid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
             WHERE g.tgname = 'subscriber_deleted_rows' AND p.pronamespace = 'subscriber'::regnamespace
               AND g.tgparentid = 0
               AND NOT EXISTS (SELECT FROM subscriber.subscription s
                                 JOIN subscriber.subscription_rel r ON r.srsubid = s.subid
                                WHERE r.srrelid = c.oid AND s.subretaindeadtuples
                                  AND s.subid IS DISTINCT FROM dropped) LOOP
            BEGIN
                EXECUTE pg_catalog.format('DROP TRIGGER subscriber_deleted_rows ON %s', found.label);
            EXCEPTION WHEN lock_not_available OR insufficient_privilege THEN
                relation := found.label;
                state := '01000';
                problem := pg_catalog.format('table %s still has the trigger subscriber_deleted_rows', found.label);
                hint := pg_catalog.format('As the owner of the table: DROP TRIGGER subscriber_deleted_rows ON %s;',
                                          found.label);
                RETURN NEXT;
            END;
        END LOOP;
        DELETE FROM subscriber.retention r USING subscriber.subscription s
         WHERE s.subid = r.subid AND NOT s.subretaindeadtuples;
        IF NOT EXISTS (SELECT FROM subscriber.subscription s
                        WHERE s.subretaindeadtuples AND s.subid IS DISTINCT FROM dropped) THEN
            -- The others are removed by the next subscription that remembers deleted rows.
            WITH records AS (
                SELECT d.xid, d.record FROM subscriber.deleted_row d GROUP BY d.xid, d.record LIMIT {REMOVED_AT_ONCE}),
            gone AS (
                DELETE FROM subscriber.deleted_row d USING records r WHERE d.xid = r.xid AND d.record = r.record)
            SELECT count(pg_catalog.lo_unlink(m.oid)) INTO found
              FROM records r JOIN pg_catalog.pg_largeobject_metadata m ON m.oid = r.record;
        END IF;
    END $$
    """,
]

# For apply workers. `relation` can be a partitioned table. The result is the last deletion of a key.
FINDING = [
    """
    CREATE FUNCTION subscriber.deleted_by(progress oid, fence bytea, relation oid, key bytea)
    RETURNS TABLE (committed timestamptz, origin oid, xid xid)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    #variable_conflict use_column
    DECLARE
        is_tracked boolean := pg_catalog.current_setting('track_commit_timestamp')::boolean;
        next numeric := pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text::numeric;
    BEGIN
        PERFORM subscriber.check_fence($1, $2);
        RETURN QUERY
        -- Of an old transaction the time is not known any more, and a later one has its number.
        SELECT w.timestamp, w.roident, d.xid::xid
          FROM subscriber.deleted_row d
          LEFT JOIN LATERAL pg_catalog.pg_xact_commit_timestamp_origin(
                        CASE WHEN is_tracked AND next - d.xid::text::numeric < 2000000000 THEN d.xid::xid END) w ON true
         WHERE d.key = $4 AND d.xid IS DISTINCT FROM pg_catalog.pg_current_xact_id_if_assigned()
           AND d.relid IN (SELECT $3 UNION SELECT p.relid FROM pg_catalog.pg_partition_tree($3) p)
         ORDER BY w.timestamp DESC NULLS LAST, d.xid DESC LIMIT 1;
    END $$
    """,
    # For a replicated DELETE of a row that is missing.
    """
    CREATE FUNCTION subscriber.remember_delete(progress oid, fence bytea, relation oid, key bytea) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        PERFORM subscriber.check_fence(progress, fence);
        INSERT INTO subscriber.deleted_row (relid, key, xid, record)
        VALUES (relation, $4, pg_current_xact_id(), lo_from_bytea(subscriber.new_delete_record(), 'del1'::bytea
                || int8send(pg_current_xact_id()::text::bigint) || int8send(relation::bigint) || $4));
    END $$
    """,
]

# For launchers, which call these functions on a connection that other tasks wait for. A statement that drops a
# subscription may hold locks until the publisher answers; then the next call does the work.
#
# A deleted row is forgotten when no subscription with retain_dead_tuples needs it (see worker/apply/retention.py), or
# when it is older than all of them are to remember it.
FORGETTING = [
    """
    CREATE FUNCTION subscriber.set_retention(subscription oid, reached xid8) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s' AS $$
    BEGIN
        PERFORM subscriber.check_manager(subscription);
        INSERT INTO subscriber.retention AS r (subid, horizon) VALUES (subscription, reached)
        ON CONFLICT (subid) DO UPDATE SET horizon = greatest(r.horizon, excluded.horizon);
    EXCEPTION WHEN lock_not_available THEN
        NULL;
    END $$
    """,
    f"""
    CREATE FUNCTION subscriber.forget_deletes(subscription oid, OUT forgotten bigint, OUT expired bigint,
                                              OUT active boolean)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s' AS $$
    DECLARE
        needed_from xid8;
        longest integer;
        written record;
        last_expired xid8;
        is_tracked boolean := pg_catalog.current_setting('track_commit_timestamp')::boolean;
    BEGIN
        PERFORM subscriber.check_manager(subscription);
        forgotten := 0;
        expired := 0;
        SELECT CASE WHEN bool_and(r.horizon IS NOT NULL) THEN min(r.horizon::text::numeric)::text::xid8 END,
               CASE WHEN bool_and(s.submaxretention > 0) THEN max(s.submaxretention) END
          INTO needed_from, longest
          FROM subscriber.subscription s LEFT JOIN subscriber.retention r USING (subid) WHERE s.subretaindeadtuples;
        FOR written IN SELECT d.xid, d.record, count(*) AS rows FROM subscriber.deleted_row d
                        GROUP BY d.xid, d.record ORDER BY d.xid, d.record LIMIT {REMOVED_AT_ONCE} LOOP
            IF written.xid < needed_from THEN
                forgotten := forgotten + written.rows;
            ELSIF longest IS NOT NULL AND is_tracked AND written.xid < pg_snapshot_xmin(pg_current_snapshot())
                  AND coalesce(pg_catalog.pg_xact_commit_timestamp(written.xid::xid), '-infinity')
                      < pg_catalog.clock_timestamp() - longest * interval '1 ms' THEN
                expired := expired + written.rows;
                last_expired := written.xid;
            ELSE
                EXIT;
            END IF;
            DELETE FROM subscriber.deleted_row d WHERE d.xid = written.xid AND d.record = written.record;
            PERFORM pg_catalog.lo_unlink(m.oid) FROM pg_catalog.pg_largeobject_metadata m WHERE m.oid = written.record;
        END LOOP;
        IF last_expired IS NOT NULL THEN
            INSERT INTO subscriber.retention AS r (subid, expired)
            SELECT s.subid, last_expired FROM subscriber.subscription s WHERE s.subretaindeadtuples
            ON CONFLICT (subid) DO UPDATE SET expired = excluded.expired;
        END IF;
        active := subscriber.retains(subscription);
    EXCEPTION WHEN lock_not_available THEN
        forgotten := 0;
        expired := 0;
        active := subscriber.retains(subscription);
    END $$
    """,
    # Whether no row has been forgotten that the subscription could still need.
    """
    CREATE FUNCTION subscriber.retains(subscription oid) RETURNS boolean
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
        SELECT NOT EXISTS (SELECT FROM subscriber.retention r
                            WHERE r.subid = subscription AND r.expired >= coalesce(r.horizon, '0'::xid8))
    $$
    """,
    # Reads the large objects that have no row: all of them after a crash, and those of a transaction that was prepared
    # before a crash and committed later.
    f"""
    CREATE FUNCTION subscriber.restore_deletes() RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
        INSERT INTO subscriber.deleted_row (relid, key, xid, record)
        SELECT ('x' || encode(substring(r.content FROM 13 FOR 8), 'hex'))::bit(64)::bigint::oid,
               substring(r.content FROM 21 + 32 * n FOR 32),
               ('x' || encode(substring(r.content FROM 5 FOR 8), 'hex'))::bit(64)::bigint::text::xid8, r.record
          FROM (SELECT m.oid AS record, pg_catalog.lo_get(m.oid) AS content
                  FROM pg_catalog.pg_largeobject_metadata m
                 WHERE m.oid >= {DELETED[0]}::oid AND m.oid < {DELETED[1]}::oid AND m.lomowner = current_user::regrole
                   AND NOT EXISTS (SELECT FROM subscriber.deleted_row d WHERE d.record = m.oid)) r,
               LATERAL pg_catalog.generate_series(0, (octet_length(r.content) - 20) / 32 - 1) n
         WHERE substring(r.content FOR 4) = 'del1'
    $$
    """,
    # In another database the transactions are others.
    f"""
    CREATE FUNCTION subscriber.forget_all_deletes() RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        DELETE FROM subscriber.deleted_row;
        PERFORM pg_catalog.lo_unlink(m.oid) FROM pg_catalog.pg_largeobject_metadata m
          WHERE m.oid >= {DELETED[0]}::oid AND m.oid < {DELETED[1]}::oid AND m.lomowner = current_user::regrole
            AND pg_catalog.lo_get(m.oid, 0, 4) = 'del1';
    END $$
    """,
]

IGNORED = """WHERE NOT g.tgisinternal
           AND NOT EXISTS (SELECT FROM pg_catalog.pg_proc own
                            WHERE own.oid = g.tgfoid AND own.pronamespace = 'subscriber'::pg_catalog.regnamespace
                              AND pg_catalog.starts_with(own.proname, 'deleted_'))"""
RETAINED = """s.subretaindeadtuples, s.submaxretention, s.subretaindeadtuples AND NOT EXISTS (
                                 SELECT FROM subscriber.retention r
                                  WHERE r.subid = s.subid AND r.expired >= coalesce(r.horizon, ''0''::xid8)
                             ) AS subretentionactive,"""
OWNER_FUNCTIONS = "subscriber.set_delete_triggers(text, oid), subscriber.restore_deletes()"
LAUNCHER_FUNCTIONS = "subscriber.set_retention(oid, xid8), subscriber.forget_deletes(oid), subscriber.retains(oid)"
APPLY_FUNCTIONS = "subscriber.deleted_by(oid, bytea, oid, bytea), subscriber.remember_delete(oid, bytea, oid, bytea)"
DUTIES = (
    ("subtimelinesystem", "subtimelinesystem, subretaindeadtuples, submaxretention"),
    ("subscriber.restore()", f"subscriber.restore(), {OWNER_FUNCTIONS}"),
    ("subscriber.resign(", f"{LAUNCHER_FUNCTIONS}, subscriber.resign("),
    ("subscriber.check_generation(oid, integer)", f"subscriber.check_generation(oid, integer), {APPLY_FUNCTIONS}"),
)
# Functions of earlier scripts, and the parts of them that are replaced.
REPLACED = {
    "restore()": (
        ("INSERT INTO subscriber.complete", "PERFORM subscriber.restore_deletes(); INSERT INTO subscriber.complete"),
    ),
    "rebind(text[])": (
        ("DELETE FROM subscriber.session;", "PERFORM subscriber.forget_all_deletes(); DELETE FROM subscriber.session;"),
    ),
    "foreign_code(oid, name[], boolean, name)": (("WHERE NOT g.tgisinternal", IGNORED),),
    "make_views()": (
        ("false AS subretaindeadtuples, 0 AS submaxretention, false AS subretentionactive,", RETAINED),
        ("0::bigint AS confl_update_deleted,", "t.confl_update_deleted,"),
    ),
    "pg_stat_reset_subscription_stats(oid)": (
        ("confl_update_exists,", "confl_update_exists, confl_update_deleted,"),
        ("SELECT 0,", "SELECT 0, 0,"),
    ),
    "admit(text, text)": DUTIES,
    "dismiss(text, text)": DUTIES,
}
# Roles that have a duty get the privileges that it has since this version.
ADMITTED = """
DO $$
DECLARE
    role text;
    duty text;
BEGIN
    FOR role, duty IN
        SELECT DISTINCT r.rolname,
               CASE p.proname WHEN 'lead' THEN 'launcher' WHEN 'advance' THEN 'apply' ELSE 'owner' END
          FROM pg_catalog.pg_proc p, pg_catalog.aclexplode(p.proacl) a JOIN pg_catalog.pg_roles r ON r.oid = a.grantee
         WHERE p.proname IN ('lead', 'advance', 'create_origin') AND p.pronamespace = 'subscriber'::regnamespace
           AND a.grantee <> p.proowner LOOP
        PERFORM subscriber.admit(role, duty);
    END LOOP;
END $$
"""


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    for statement in [*TABLES, *REMEMBERING, *FINDING, *FORGETTING]:
        op.execute(statement)
    for function, changes in REPLACED.items():
        op.execute(_replace(function, changes))
    op.execute("SELECT subscriber.make_views()")
    op.execute(ADMITTED)
    generation = op.get_context().script.get_revision("0018").module
    settings = (*generation.SETTINGS, "subserver", "subwalrcvtimeout", "subretaindeadtuples")
    old, new = (", ".join(f"{prefix}.{column}" for column in settings) for prefix in ("OLD", "NEW"))
    op.execute("DROP TRIGGER next_generation ON subscriber.subscription")
    op.execute(f"""
        CREATE TRIGGER next_generation BEFORE UPDATE ON subscriber.subscription
        FOR EACH ROW WHEN (({old}) IS DISTINCT FROM ({new})) EXECUTE FUNCTION subscriber.next_generation()
    """)
    op.execute("ALTER TABLE subscriber.subscription ENABLE ALWAYS TRIGGER next_generation")


def _replace(function: str, changes: tuple[tuple[str, str], ...]) -> str:
    """Return a statement that replaces parts of a function's definition. A missing part is an error."""
    steps = "\n".join(
        f"""
        ASSERT pg_catalog.strpos(definition, $_${old}$_$) > 0;
        definition := pg_catalog.replace(definition, $_${old}$_$, $_${new}$_$);"""
        for old, new in changes
    )
    return f"""
    DO $do$
    DECLARE
        definition text := pg_catalog.pg_get_functiondef('subscriber.{function}'::regprocedure);
    BEGIN
        {steps}
        EXECUTE definition;
    END $do$
    """
