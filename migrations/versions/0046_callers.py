"""A function that acts for its caller knows the caller, and not only the role that has logged in.

Within a SECURITY DEFINER function current_user is the owner of the function. So these functions have compared
session_user with the owner of the subscription. But PostgreSQL runs functions of an index as the owner of the table,
for example in autovacuum, in sessions of a superuser: such a function could call them with the superuser's rights.

The last argument of these functions is the caller. Its default, current_user, is evaluated before the call. A domain
accepts no other value, and only the owner of the schema may use the domain for columns and functions.

connection_of_server() and server_conninfo() have given the role that runs the launcher the passwords of all user
mappings. The caller has to inherit from the role whose user mapping it reads.
"""

from __future__ import annotations

from alembic import op

revision = "0046"
down_revision = "0045"

CALLERS = [
    "CREATE DOMAIN subscriber.caller AS name CHECK (VALUE = CURRENT_USER)",
    "REVOKE ALL ON DOMAIN subscriber.caller FROM PUBLIC",
    """
    CREATE FUNCTION subscriber.may_manage(subscription oid, caller name) RETURNS boolean
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
        SELECT coalesce((SELECT pg_catalog.pg_has_role(caller, s.subowner, 'USAGE')
                           FROM subscriber.subscription s WHERE s.subid = subscription),
                        (SELECT r.rolsuper FROM pg_catalog.pg_roles r WHERE r.rolname = caller))
    $$
    """,
    """
    CREATE FUNCTION subscriber.check_manager(subscription oid, caller name) RETURNS void
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        IF subscriber.may_manage(subscription, caller) IS NOT TRUE THEN  -- also if the caller is NULL
            RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
                MESSAGE = pg_catalog.format('permission denied for subscription with OID %s', subscription);
        END IF;
    END $$
    """,
    """
    CREATE FUNCTION subscriber.check_origin_owner(name text, caller name) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        IF name !~ '^pg_[0-9]{10}(_[0-9]{1,10})?$' THEN
            RAISE EXCEPTION USING ERRCODE = 'reserved_name',
                MESSAGE = pg_catalog.format('"%s" is not the name of a subscription''s replication origin', name);
        END IF;
        IF subscriber.may_manage(substring(name FROM '^pg_([0-9]{10})')::bigint::oid, caller) IS NOT TRUE THEN
            RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
                MESSAGE = pg_catalog.format('permission denied for replication origin "%s"', name);
        END IF;
    END $$
    """,
]

# {parameters} are those of libpq. The user mapping of PUBLIC is read for launchers and superusers only.
SERVERS = [
    """
    CREATE FUNCTION subscriber.user_mapping_of(owner oid, server oid, caller name, OUT conninfo text, OUT problem text)
    LANGUAGE plpgsql STABLE STRICT SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        present record;
        mapping record;
        is_launcher boolean := EXISTS (SELECT FROM pg_catalog.pg_roles r WHERE r.rolname = caller AND r.rolsuper)
            OR pg_catalog.has_function_privilege(caller,
                   'subscriber.lead(text, integer, timestamptz, oid, interval)', 'EXECUTE');
        role name := (SELECT r.rolname FROM pg_catalog.pg_roles r WHERE r.oid = owner);
    BEGIN
        SELECT f.srvname, f.srvoptions INTO present FROM pg_catalog.pg_foreign_server f WHERE f.oid = server;
        IF present IS NULL THEN
            problem := pg_catalog.format('foreign server with OID %s does not exist', server);
        ELSIF NOT pg_catalog.pg_has_role(caller, owner, 'USAGE') THEN
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
                         WHERE every.option_name = ANY (pg_catalog.string_to_array('{parameters}', ', '))
                         ORDER BY every.option_name, every.place) o;
            END IF;
        END IF;
    END $$
    """,
    "REVOKE ALL ON FUNCTION subscriber.user_mapping_of(oid, oid, name) FROM PUBLIC",
    """
    CREATE OR REPLACE FUNCTION subscriber.connection_of_server(owner oid, server oid, OUT conninfo text,
                                                               OUT problem text)
    LANGUAGE sql STABLE STRICT SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
        SELECT m.conninfo, m.problem FROM subscriber.user_mapping_of(owner, server, session_user) m
    $$
    """,
    """
    CREATE OR REPLACE FUNCTION subscriber.server_conninfo(subscription oid, OUT conninfo text, OUT problem text)
    LANGUAGE sql STABLE STRICT SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
        SELECT m.conninfo, m.problem
          FROM subscriber.subscription s, LATERAL subscriber.user_mapping_of(s.subowner, s.subserver, session_user) m
         WHERE s.subid = subscription
    $$
    """,
]

# Each function that compares session_user gets the argument, with the privileges of the one that it replaces. The
# lists of functions for a duty, and texts that name a function, follow. Two functions stay: end_action() compares the
# role that is recorded, and prepared_transactions() is part of a view.
CHANGE = r"""
DO $do$
DECLARE
    found record;
    grantee record;
    former text;
    definition text;
    arguments text;
    listed text;
    other record;
BEGIN
    FOR found IN
        SELECT p.oid, p.proname, p.pronargs, p.proacl, p.proowner, p.oid::pg_catalog.regprocedure::text AS signature,
               pg_catalog.pg_get_function_arguments(p.oid) AS arguments
          FROM pg_catalog.pg_proc p
         WHERE p.pronamespace = 'subscriber'::pg_catalog.regnamespace AND p.prosecdef
           AND p.prosrc ~ 'session_user|check_manager\(|check_origin_owner\('
           AND p.proname NOT IN ('end_action', 'prepared_transactions')
    LOOP
        arguments := pg_catalog.concat_ws(', ', nullif(found.arguments, ''),
                                          'caller subscriber.caller DEFAULT CURRENT_USER');
        definition := pg_catalog.format('FUNCTION subscriber.%I(%s)', found.proname, found.arguments);
        former := pg_catalog.pg_get_functiondef(found.oid);  -- an earlier turn may have changed it
        ASSERT pg_catalog.strpos(former, definition) > 0;
        definition := pg_catalog.replace(former, definition,
                                         pg_catalog.format('FUNCTION subscriber.%I(%s)', found.proname, arguments));
        definition := pg_catalog.regexp_replace(definition, '\msession_user\M', 'caller', 'gi');
        definition := pg_catalog.regexp_replace(
            definition, 'subscriber\.(check_manager|check_origin_owner)\(([^()]*)\)', 'subscriber.\1(\2, caller)', 'g');
        EXECUTE pg_catalog.format('DROP FUNCTION %s', found.signature);
        EXECUTE definition;
        listed := pg_catalog.format('subscriber.%I', found.proname);
        SELECT p.oid::pg_catalog.regprocedure::text AS signature INTO other FROM pg_catalog.pg_proc p
         WHERE p.pronamespace = 'subscriber'::pg_catalog.regnamespace AND p.proname = found.proname
           AND p.proargtypes[p.pronargs - 1] = 'subscriber.caller'::pg_catalog.regtype;
        EXECUTE pg_catalog.format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', other.signature);
        FOR grantee IN SELECT DISTINCT a.grantee AS oid FROM pg_catalog.aclexplode(found.proacl) a
                        WHERE a.grantee NOT IN (0, found.proowner) LOOP
            EXECUTE pg_catalog.format('GRANT EXECUTE ON FUNCTION %s TO %I', other.signature,
                                      pg_catalog.pg_get_userbyid(grantee.oid));
        END LOOP;
        FOR other IN
            SELECT pg_catalog.pg_get_functiondef(p.oid) AS definition FROM pg_catalog.pg_proc p
             WHERE p.pronamespace = 'subscriber'::pg_catalog.regnamespace
               AND p.proname IN ('admit', 'dismiss', 'exceeds', 'register_session')
               AND pg_catalog.strpos(p.prosrc, listed || '(') > 0
        LOOP
            EXECUTE pg_catalog.regexp_replace(
                other.definition,
                pg_catalog.format('%s\(((?:[^(),]*,){%s}[^(),]+)\)', pg_catalog.replace(listed, '.', '\.'),
                                  found.pronargs - 1),
                listed || '(\1, subscriber.caller)', 'g');
        END LOOP;
    END LOOP;
END $do$
"""
DROPPED = ("may_manage(oid)", "check_manager(oid)", "check_origin_owner(text)")


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    parameters = op.get_context().script.get_revision("0020").module.PARAMETERS
    for statement in (*CALLERS, *SERVERS, CHANGE):
        op.execute(statement.replace("{parameters}", parameters))
    for function in DROPPED:
        op.execute(f"DROP FUNCTION subscriber.{function}")
