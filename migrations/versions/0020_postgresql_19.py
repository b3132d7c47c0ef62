"""PostgreSQL 19: sequences, connections through foreign servers, and views with the columns of the server's version.

A sequence is identified by its name, so its row needs no new OID in a restored dump. View pg_subscription_rel shows
sequences like PostgreSQL 19 does, on every version.

The views have the columns of the server's own views. make_views() creates them again after an upgrade of the server.
"""

from __future__ import annotations

from alembic import op

revision = "0020"
down_revision = "0019"

COLUMNS = [
    """
    ALTER TABLE subscriber.subscription
        ADD COLUMN subserver oid NOT NULL DEFAULT 0,
        ADD COLUMN subwalrcvtimeout text NOT NULL DEFAULT '-1',
        ADD COLUMN subsequences text NOT NULL DEFAULT 'copy',
        ADD COLUMN subsequencenames text[] NOT NULL DEFAULT '{}'::text[],
        ALTER COLUMN subconninfo DROP NOT NULL
    """,
    "UPDATE subscriber.subscription SET kept = kept",
    "ALTER TABLE subscriber.subscription_stats ADD COLUMN sync_seq_error_count bigint NOT NULL DEFAULT 0",
    """
    CREATE OR REPLACE FUNCTION subscriber.pg_stat_reset_subscription_stats(subid oid) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
    #variable_conflict use_column
    BEGIN
        UPDATE subscriber.subscription_stats SET (
            apply_error_count, sync_error_count, sync_seq_error_count, confl_insert_exists,
            confl_update_origin_differs, confl_update_exists, confl_update_missing, confl_delete_origin_differs,
            confl_delete_missing, confl_multiple_unique_conflicts, stats_reset)
            = (SELECT 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, pg_catalog.now())
         WHERE $1 IS NULL OR subid = $1;
        IF $1 IS NULL OR NOT FOUND THEN
            PERFORM pg_catalog.pg_stat_reset_subscription_stats($1);
        END IF;
    END $$
    """,
]

SEQUENCES = [
    """
    CREATE UNLOGGED TABLE subscriber.subscription_sequence (
        subid oid REFERENCES subscriber.subscription ON DELETE CASCADE,
        nspname name,
        seqname name,
        state "char" NOT NULL,
        lsn pg_lsn,
        problem text,
        kept oid NOT NULL UNIQUE DEFAULT subscriber.new_record_of_many(),
        PRIMARY KEY (subid, nspname, seqname)
    )
    """,
    "ALTER TABLE subscriber.subscription_sequence ENABLE ROW LEVEL SECURITY",
    """
    CREATE POLICY follow ON subscriber.subscription_sequence
    USING (EXISTS (SELECT FROM subscriber.subscription s WHERE s.subid = subscription_sequence.subid))
    """,
    """
    CREATE TRIGGER keep AFTER INSERT OR UPDATE OR DELETE ON subscriber.subscription_sequence
    FOR EACH ROW EXECUTE FUNCTION subscriber.keep()
    """,
    "ALTER TABLE subscriber.subscription_sequence ENABLE ALWAYS TRIGGER keep",
    """
    CREATE TRIGGER notify_launcher AFTER INSERT OR UPDATE OR DELETE ON subscriber.subscription_sequence
    FOR EACH STATEMENT EXECUTE FUNCTION subscriber.notify_launcher()
    """,
    # Sets one sequence to the publisher's value, with the rights of the sequence's owner or, with run_as_owner, of the
    # subscription's owner. Nothing of theirs runs: setval() calls no trigger. With `ahead` the sequence only moves in
    # the direction of its increment. Returns the outcome: set, ahead, dropped, mismatched or denied.
    """
    CREATE FUNCTION subscriber.set_sequence(subscription oid, namespace name, name name, last_value bigint,
                                            is_called boolean, typid oid, start_value bigint, increment bigint,
                                            least_value bigint, greatest_value bigint, cycles boolean, ahead boolean)
    RETURNS text
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '10s' AS $$
    DECLARE
        acting oid;
        owner oid;
        sequence oid;
        definition pg_catalog.pg_sequence;
        present bigint;
        present_called boolean;
        needed text := CASE WHEN pg_catalog.current_setting('server_version_num')::int >= 160000
                            THEN 'SET' ELSE 'MEMBER' END;
    BEGIN
        PERFORM subscriber.check_manager(subscription);
        SELECT c.oid, c.relowner INTO sequence, owner
          FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
         WHERE n.nspname = namespace AND c.relname = name AND c.relkind = 'S' AND n.nspname <> 'subscriber'
           AND c.oid >= 16384;
        IF sequence IS NULL THEN
            RETURN 'dropped';
        END IF;
        SELECT s.* INTO definition FROM pg_catalog.pg_sequence s WHERE s.seqrelid = sequence;
        IF (definition.seqtypid, definition.seqstart, definition.seqincrement, definition.seqmin, definition.seqmax,
            definition.seqcycle)
           IS DISTINCT FROM (typid, start_value, increment, least_value, greatest_value, cycles) THEN
            RETURN 'mismatched';
        END IF;
        SELECT CASE WHEN s.subrunasowner THEN s.subowner
                    WHEN pg_catalog.pg_has_role(s.subowner, owner, needed) THEN owner END
          INTO acting FROM subscriber.subscription s WHERE s.subid = subscription;
        IF acting IS NULL OR NOT pg_catalog.has_sequence_privilege(acting, sequence, 'UPDATE') THEN
            RETURN 'denied';
        END IF;
        IF ahead THEN
            -- By its number: another relation could take its name meanwhile, a view that calls functions.
            IF pg_catalog.current_setting('server_version_num')::int >= 180000 THEN
                EXECUTE 'SELECT d.last_value, d.is_called FROM pg_catalog.pg_get_sequence_data($1) d'
                   INTO present, present_called USING sequence::pg_catalog.regclass;
            ELSE
                present := pg_catalog.pg_sequence_last_value(sequence::pg_catalog.regclass);
                present_called := present IS NOT NULL;
                present := coalesce(present, definition.seqstart);
            END IF;
            IF (increment > 0 AND present > last_value) OR (increment < 0 AND present < last_value)
               OR present = last_value AND present_called >= is_called THEN
                RETURN 'ahead';
            END IF;
        END IF;
        PERFORM pg_catalog.setval(sequence::pg_catalog.regclass, last_value, is_called);
        RETURN 'set';
    EXCEPTION WHEN insufficient_privilege THEN
        RETURN 'denied';
    END $$
    """,
]

# The options of a foreign server and of a user mapping that are parameters of libpq. Other options are those of the
# foreign-data wrapper.
PARAMETERS = (
    "application_name, channel_binding, connect_timeout, dbname, gssdelegation, gssencmode, gsslib, host, hostaddr,"
    " keepalives, keepalives_count, keepalives_idle, keepalives_interval, krbsrvname, load_balance_hosts,"
    " max_protocol_version, min_protocol_version, options, passfile, password, port, require_auth, requirepeer,"
    " requiressl, service, ssl_max_protocol_version, ssl_min_protocol_version, sslcert, sslcertmode, sslcompression,"
    " sslcrl, sslcrldir, sslkey, sslmode, sslnegotiation, sslpassword, sslrootcert, sslsni, target_session_attrs,"
    " tcp_user_timeout, user"
)
SERVERS = [
    # The connection string of a foreign server for a role, or the reason why there is none.
    f"""
    CREATE FUNCTION subscriber.connection_of_server(owner oid, server oid, OUT conninfo text, OUT problem text)
    LANGUAGE plpgsql STABLE STRICT SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        present record;
        mapping record;
        is_launcher boolean := EXISTS (SELECT FROM pg_catalog.pg_roles r WHERE r.rolname = session_user AND r.rolsuper)
            OR pg_catalog.has_function_privilege(session_user,
                   'subscriber.lead(text, integer, timestamptz, oid, interval)', 'EXECUTE');
        role name := (SELECT r.rolname FROM pg_catalog.pg_roles r WHERE r.oid = owner);
    BEGIN
        SELECT f.srvname, f.srvoptions INTO present FROM pg_catalog.pg_foreign_server f WHERE f.oid = server;
        IF present IS NULL THEN
            problem := pg_catalog.format('foreign server with OID %s does not exist', server);
        ELSIF NOT is_launcher AND NOT pg_catalog.pg_has_role(session_user, owner, 'USAGE') THEN
            problem := 'permission denied for user mappings of role "' || role || '"';
        ELSIF NOT pg_catalog.has_server_privilege(owner, server, 'USAGE') THEN
            problem := pg_catalog.format(
                'subscription owner "%s" does not have permission on foreign server "%s"', role, present.srvname);
        ELSE
            SELECT m.umuser, m.umoptions INTO mapping FROM pg_catalog.pg_user_mappings m
             WHERE m.srvid = server AND m.umuser IN (owner, 0) ORDER BY m.umuser DESC LIMIT 1;
            IF NOT FOUND THEN
                problem := pg_catalog.format('user mapping not found for user "%s", server "%s"', role,
                                             present.srvname);
            ELSIF mapping.umuser = 0 AND NOT is_launcher THEN
                problem := pg_catalog.format('only the launcher may read the user mapping of PUBLIC for server "%s"',
                                             present.srvname);
            ELSE
                SELECT coalesce(string_agg(o.name || '=''' || pg_catalog.replace(pg_catalog.replace(
                           o.value, '\\', '\\\\'), '''', '\\''') || '''', ' ' ORDER BY o.name), '')
                  INTO conninfo
                  FROM (SELECT DISTINCT ON (every.option_name) every.option_name AS name, every.option_value AS value
                          FROM (SELECT 1 AS place, * FROM pg_catalog.pg_options_to_table(mapping.umoptions)
                                UNION ALL
                                SELECT 2, * FROM pg_catalog.pg_options_to_table(present.srvoptions)) every
                         WHERE every.option_name = ANY (pg_catalog.string_to_array('{PARAMETERS}', ', '))
                         ORDER BY every.option_name, every.place) o;
            END IF;
        END IF;
    END $$
    """,
    """
    CREATE FUNCTION subscriber.server_conninfo(subscription oid, OUT conninfo text, OUT problem text)
    LANGUAGE sql STABLE STRICT SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
        SELECT c.conninfo, c.problem
          FROM subscriber.subscription s, LATERAL subscriber.connection_of_server(s.subowner, s.subserver) c
         WHERE s.subid = subscription
    $$
    """,
]

# With the columns of PostgreSQL 18 or 19. A view of the user that depends on one of these views keeps it as it is.
VIEWS = """
CREATE FUNCTION subscriber.make_views() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    is_19 boolean := pg_catalog.current_setting('server_version_num')::int >= 190000;
BEGIN
    DROP VIEW IF EXISTS subscriber.pg_subscription;
    EXECUTE pg_catalog.format($view$
        CREATE VIEW subscriber.pg_subscription AS
        SELECT s.subid AS oid, d.oid AS subdbid, s.subskiplsn, s.subname, s.subowner, s.subenabled,
               coalesce(s.subbinary, false) AS subbinary,
               s.substream, s.subtwophasestate, s.subdisableonerr, s.subpasswordrequired, s.subrunasowner,
               s.subfailover, %s
               CASE WHEN pg_catalog.pg_has_role(s.subowner, 'USAGE') THEN s.subconninfo END AS subconninfo,
               s.subslotname, s.subsynccommit, %s s.subpublications, s.suborigin
          FROM subscriber.subscription s
          JOIN pg_catalog.pg_database d ON d.datname = pg_catalog.current_database()
        $view$,
        CASE WHEN is_19 THEN 'false AS subretaindeadtuples, 0 AS submaxretention, false AS subretentionactive,'
                             ' s.subserver,' END,
        CASE WHEN is_19 THEN 's.subwalrcvtimeout,' END);
    DROP VIEW IF EXISTS subscriber.pg_stat_subscription_stats;
    EXECUTE pg_catalog.format($view$
        CREATE VIEW subscriber.pg_stat_subscription_stats AS
        SELECT s.subid, s.subname, t.apply_error_count, %s, t.confl_insert_exists, t.confl_update_origin_differs,
               t.confl_update_exists, %s t.confl_update_missing, t.confl_delete_origin_differs, t.confl_delete_missing,
               t.confl_multiple_unique_conflicts, t.stats_reset
          FROM subscriber.subscription s JOIN subscriber.subscription_stats t USING (subid)
        $view$,
        CASE WHEN is_19 THEN 't.sync_seq_error_count, t.sync_error_count AS sync_table_error_count'
             ELSE 't.sync_error_count' END,
        CASE WHEN is_19 THEN '0::bigint AS confl_update_deleted,' END);
    GRANT SELECT ON subscriber.pg_subscription, subscriber.pg_stat_subscription_stats TO PUBLIC;
EXCEPTION WHEN dependent_objects_still_exist THEN
    NULL;
END $$
"""
# PostgreSQL removes the row of a relation with the relation. Here the row stays, but the view does not show it.
RELATIONS = """
CREATE OR REPLACE VIEW subscriber.pg_subscription_rel AS
SELECT r.srsubid, r.srrelid, r.srsubstate, r.srsublsn
  FROM subscriber.subscription_rel r
 WHERE EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.oid = r.srrelid)
 UNION ALL
SELECT q.subid, c.oid, q.state, q.lsn
  FROM subscriber.subscription_sequence q
  JOIN pg_catalog.pg_namespace n ON n.nspname = q.nspname
  JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = q.seqname AND c.relkind = 'S'
"""
MORE_COLUMNS = "subserver, subwalrcvtimeout, subsequences, subsequencenames"
MORE_FUNCTIONS = (
    "set_sequence(oid, name, name, bigint, boolean, oid, bigint, bigint, bigint, bigint, boolean, boolean)",
    "connection_of_server(oid, oid)",
    "server_conninfo(oid)",
    "make_views()",
)
# Roles that have a duty get the privileges that it has since this version.
ADMITTED = """
DO $$
DECLARE
    role text;
    duty text;
BEGIN
    FOR role, duty IN
        SELECT DISTINCT r.rolname, CASE p.proname WHEN 'lead' THEN 'launcher' ELSE 'owner' END
          FROM pg_catalog.pg_proc p, pg_catalog.aclexplode(p.proacl) a JOIN pg_catalog.pg_roles r ON r.oid = a.grantee
         WHERE p.proname IN ('lead', 'create_origin') AND p.pronamespace = 'subscriber'::regnamespace
           AND a.grantee <> p.proowner LOOP
        PERFORM subscriber.admit(role, duty);
    END LOOP;
END $$
"""


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    script = op.get_context().script
    unpublished, duties, generation = (script.get_revision(number).module for number in ("0013", "0016", "0018"))
    for statement in [*COLUMNS, *SEQUENCES, *SERVERS, RELATIONS, VIEWS, "SELECT subscriber.make_views()"]:
        op.execute(statement)
    restore = next(statement for statement in unpublished.RESTORING if "FUNCTION subscriber.restore()" in statement)
    restore = restore.replace(
        "'conflict_history', 'copy_done'", "'conflict_history', 'copy_done', 'subscription_sequence'"
    )
    op.execute(restore.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", 1))
    for name, verb, preposition in (("admit", "GRANT", "TO"), ("dismiss", "REVOKE", "FROM")):
        function = duties.change(name, verb, preposition, more=("check_generation(oid, integer)",))
        function = function.replace("subscriber.hold", "subscriber.hold, subscriber.subscription_sequence")
        function = function.replace("subtimelinesystem", f"subtimelinesystem, {MORE_COLUMNS}")
        more = ", ".join(f"subscriber.{one}" for one in MORE_FUNCTIONS)
        function = function.replace("subscriber.restore()", f"subscriber.restore(), {more}")
        op.execute(function.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", 1))
    op.execute(ADMITTED)
    settings = (*generation.SETTINGS, "subserver", "subwalrcvtimeout")
    old, new = (", ".join(f"{prefix}.{column}" for column in settings) for prefix in ("OLD", "NEW"))
    op.execute("DROP TRIGGER next_generation ON subscriber.subscription")
    op.execute(f"""
        CREATE TRIGGER next_generation BEFORE UPDATE ON subscriber.subscription
        FOR EACH ROW WHEN (({old}) IS DISTINCT FROM ({new})) EXECUTE FUNCTION subscriber.next_generation()
    """)
    op.execute("ALTER TABLE subscriber.subscription ENABLE ALWAYS TRIGGER next_generation")
