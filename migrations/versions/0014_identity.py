"""The database to which this catalog belongs, and the names of the subscriptions' tables and owners.

A dump, a template and a physical copy carry the catalog to another database, where no user has decided to run the
subscriptions. A launcher there would take the changes away from the original. The catalog therefore names the database
to which it belongs, and subscriptions run only there. subscriber.rebind() makes the catalog belong to its present
database.

A restored dump has other OIDs. Tables and owners are therefore stored with their names as well.
"""

from __future__ import annotations

from alembic import op

revision = "0014"
down_revision = "0013"

# The relations to which changes can be applied, as `named`, for each row `r` of subscription_rel.
NAMED = """
(pg_catalog.pg_namespace n JOIN pg_catalog.pg_class named ON named.relnamespace = n.oid AND named.relkind IN ('r', 'p'))
    ON n.nspname = r.srnspname AND named.relname = r.srrelname
"""

# A copy has committed rows of the table, and is not complete. `subscriber copy` commits each part.
COPY_BEGUN = """
(r.srsubstate = 'f' OR r.srsubstate IN ('i', 'd') AND EXISTS (
    SELECT FROM subscriber.bulk_copy b JOIN subscriber.bulk_copy_rel p USING (copyid)
     WHERE b.subid = r.srsubid AND p.relid = r.srrelid))
"""

STATEMENTS = [
    # `sync_id` is part of the names of slots for table synchronization. It does not change when a server is upgraded.
    """
    CREATE UNLOGGED TABLE subscriber.identity (
        only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
        system_identifier text NOT NULL,
        timeline bigint,
        database_oid oid NOT NULL,
        database_name name NOT NULL,
        sync_id text NOT NULL,
        accept_timelines boolean NOT NULL DEFAULT false,
        kept oid NOT NULL UNIQUE DEFAULT subscriber.new_record()
    )
    """,
    """
    CREATE TRIGGER keep AFTER INSERT OR UPDATE OR DELETE ON subscriber.identity
    FOR EACH ROW EXECUTE FUNCTION subscriber.keep()
    """,
    "ALTER TABLE subscriber.identity ENABLE ALWAYS TRIGGER keep",
    # The timeline is that of the current WAL. NULL on a standby, and if it cannot be queried.
    """
    CREATE FUNCTION subscriber.present_identity(OUT system_identifier text, OUT timeline bigint, OUT database_oid oid,
                                                OUT database_name name)
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        SELECT c.system_identifier::text, d.oid, d.datname INTO system_identifier, database_oid, database_name
          FROM pg_catalog.pg_control_system() c, pg_catalog.pg_database d
         WHERE d.datname = pg_catalog.current_database();
        IF NOT pg_catalog.pg_is_in_recovery() THEN
            timeline := ('x' || substring(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()) FOR 8))::bit(32)
                        ::bigint;
        END IF;
    EXCEPTION WHEN insufficient_privilege OR feature_not_supported THEN
        NULL;
    END $$
    """,
    """
    INSERT INTO subscriber.identity (system_identifier, timeline, database_oid, database_name, sync_id)
    SELECT i.system_identifier, i.timeline, i.database_oid, i.database_name, i.system_identifier
      FROM subscriber.present_identity() i
    """,
    """
    ALTER TABLE subscriber.subscription_rel ADD COLUMN srnspname name, ADD COLUMN srrelname name
    """,
    """
    UPDATE subscriber.subscription_rel r SET srnspname = n.nspname, srrelname = c.relname
      FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = r.srrelid
    """,
    # Tables that were dropped before names were stored.
    "DELETE FROM subscriber.subscription_rel r WHERE r.srrelname IS NULL",
    """
    CREATE FUNCTION subscriber.name_relation() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        SELECT n.nspname, c.relname INTO NEW.srnspname, NEW.srrelname
          FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = NEW.srrelid;
        RETURN NEW;
    END $$
    """,
    """
    CREATE TRIGGER name_relation BEFORE INSERT ON subscriber.subscription_rel
    FOR EACH ROW WHEN (NEW.srrelname IS NULL) EXECUTE FUNCTION subscriber.name_relation()
    """,
    "ALTER TABLE subscriber.subscription_rel ENABLE ALWAYS TRIGGER name_relation",
    "ALTER TABLE subscriber.subscription ADD COLUMN subownername name",
    """
    UPDATE subscriber.subscription s SET subownername = r.rolname FROM pg_catalog.pg_roles r WHERE r.oid = s.subowner
    """,
    """
    CREATE FUNCTION subscriber.name_owner() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        SELECT r.rolname INTO NEW.subownername FROM pg_catalog.pg_roles r WHERE r.oid = NEW.subowner;
        RETURN NEW;
    END $$
    """,
    # restore() inserts the stored name, because the OID may belong to another role by then.
    """
    CREATE TRIGGER name_new_owner BEFORE INSERT ON subscriber.subscription
    FOR EACH ROW WHEN (NEW.subownername IS NULL) EXECUTE FUNCTION subscriber.name_owner()
    """,
    """
    CREATE TRIGGER name_owner BEFORE UPDATE OF subowner ON subscriber.subscription
    FOR EACH ROW EXECUTE FUNCTION subscriber.name_owner()
    """,
    "ALTER TABLE subscriber.subscription ENABLE ALWAYS TRIGGER name_new_owner",
    "ALTER TABLE subscriber.subscription ENABLE ALWAYS TRIGGER name_owner",
    # Gives rows of subscription_rel new OIDs in one statement, because tables may have exchanged their names.
    """
    CREATE FUNCTION subscriber.renumber(subscription oid, olds oid[], news oid[]) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        moved subscriber.subscription_rel[];
    BEGIN
        WITH gone AS (
            DELETE FROM subscriber.subscription_rel r WHERE r.srsubid = subscription AND r.srrelid = ANY (olds)
            RETURNING r AS content)
        SELECT pg_catalog.array_agg(g.content) INTO moved FROM gone g;
        INSERT INTO subscriber.subscription_rel
        SELECT p.* FROM unnest(moved) m JOIN unnest(olds, news) AS o (old, new) ON o.old = m.srrelid,
             LATERAL pg_catalog.jsonb_populate_record(m, pg_catalog.jsonb_build_object('srrelid', o.new::bigint)) p
        ON CONFLICT DO NOTHING;
    END $$
    """,
    # If a row's table has been renamed and another table has the stored name, the row gets that table's OID. So do rows
    # that wait for their copy. Returns their names. catalog/table_names.py handles the other rows.
    f"""
    CREATE FUNCTION subscriber.follow_names(subscription oid) RETURNS TABLE (nspname name, relname name)
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        olds oid[];
        news oid[];
        fewer oid[];
    BEGIN
        SELECT pg_catalog.array_agg(r.srrelid ORDER BY r.srrelid), pg_catalog.array_agg(named.oid ORDER BY r.srrelid)
          INTO olds, news
          FROM subscriber.subscription_rel r JOIN {NAMED}
         WHERE r.srsubid = subscription AND named.oid <> r.srrelid
           AND (r.srsubstate IN ('i', 'd') OR EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.oid = r.srrelid))
           AND NOT {COPY_BEGUN};
        LOOP  -- the new OID must not be that of a row that stays
            SELECT pg_catalog.array_agg(m.old ORDER BY m.old), pg_catalog.array_agg(m.new ORDER BY m.old)
              INTO fewer, news
              FROM unnest(olds, news) AS m (old, new)
             WHERE NOT EXISTS (SELECT FROM subscriber.subscription_rel r
                                WHERE r.srsubid = subscription AND r.srrelid = m.new AND r.srrelid <> ALL (olds));
            EXIT WHEN fewer IS NOT DISTINCT FROM olds;
            olds := fewer;
        END LOOP;
        IF olds IS NOT NULL THEN
            PERFORM subscriber.renumber(subscription, olds, news);
        END IF;
        RETURN QUERY SELECT r.srnspname, r.srrelname FROM subscriber.subscription_rel r
                      WHERE r.srsubid = subscription AND r.srrelid = ANY (news);
    END $$
    """,
    # All rows get the OID of the table that has the stored name, because OIDs are invalid in a restored dump. In a copy
    # of a database, no table's initial copy can continue: its slot belongs to the original.
    f"""
    CREATE FUNCTION subscriber.find_relations(forget text[], is_copy boolean) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        names text;
        quoted text;
        subscription oid;
        olds oid[];
        news oid[];
    BEGIN
        DELETE FROM subscriber.subscription_rel r
         WHERE pg_catalog.format('%I.%I', r.srnspname, r.srrelname) = ANY (forget);
        SELECT string_agg(DISTINCT l.label, ', '), string_agg(DISTINCT pg_catalog.quote_literal(l.label), ', ')
          INTO names, quoted
          FROM subscriber.subscription_rel r LEFT JOIN {NAMED},
               LATERAL pg_catalog.format('%I.%I', r.srnspname, r.srrelname) AS l (label)
         WHERE named.oid IS NULL;
        IF names IS NOT NULL THEN
            RAISE EXCEPTION USING ERRCODE = 'undefined_table',
                MESSAGE = pg_catalog.format('tables of subscriptions do not exist in this database: %s', names),
                HINT = pg_catalog.format('Restore them. Or take them out of their subscriptions:'
                                         ' SELECT subscriber.rebind(forget => ARRAY[%s]);'
                                         ' ALTER SUBSCRIPTION ... REFRESH PUBLICATION copies them once they exist.',
                                         quoted);
        END IF;
        SELECT string_agg(DISTINCT l.label, ', '), string_agg(DISTINCT pg_catalog.quote_literal(l.label), ', ')
          INTO names, quoted
          FROM subscriber.subscription_rel r JOIN {NAMED},
               LATERAL pg_catalog.format('%I.%I', r.srnspname, r.srrelname) AS l (label)
         WHERE is_copy AND {COPY_BEGUN};
        IF names IS NOT NULL THEN
            RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
                MESSAGE = pg_catalog.format('the copy of tables had begun when this database was copied: %s', names),
                HINT = pg_catalog.format('Empty these tables and have them copied again:'
                                         ' SELECT subscriber.rebind(forget => ARRAY[%s]);'
                                         ' then ALTER SUBSCRIPTION ... REFRESH PUBLICATION.', quoted);
        END IF;
        FOR subscription, olds, news IN
            SELECT r.srsubid, pg_catalog.array_agg(r.srrelid), pg_catalog.array_agg(named.oid)
              FROM subscriber.subscription_rel r JOIN {NAMED} WHERE named.oid <> r.srrelid GROUP BY r.srsubid LOOP
            PERFORM subscriber.renumber(subscription, olds, news);
        END LOOP;
    END $$
    """,
    # For the schema's owner, to run the subscriptions in this database. `forget` are tables, as quoted names with
    # schema, to remove from their subscriptions. Raises an error if the database lacks a table or role that they need.
    f"""
    CREATE FUNCTION subscriber.rebind(forget text[] DEFAULT '{{}}') RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        missing text;
        present record;
        stored subscriber.identity;
        is_copy boolean;
    BEGIN
        PERFORM subscriber.restore();
        SELECT * INTO present FROM subscriber.present_identity();
        SELECT * INTO stored FROM subscriber.identity;
        SELECT string_agg(pg_catalog.quote_ident(s.subname), ', ') INTO missing
          FROM subscriber.subscription s
          LEFT JOIN subscriber.progress_record p ON p.subid = s.subid AND p.relid = 0
         WHERE subscriber.read_position(p.record) IS NULL;
        IF missing IS NOT NULL THEN
            RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
                MESSAGE = pg_catalog.format('the progress of subscriptions is missing: %s', missing),
                DETAIL = 'It is in large objects, which the dump that was restored here did not contain.',
                HINT = 'Restore a dump with large objects. Or remove the subscriptions and create them again with a'
                       ' fresh copy: ALTER SUBSCRIPTION ... DISABLE, ALTER SUBSCRIPTION ... SET (slot_name = NONE),'
                       ' DROP SUBSCRIPTION, SELECT subscriber.rebind(), CREATE SUBSCRIPTION.';
        END IF;
        IF (present.system_identifier, present.database_oid)
           IS DISTINCT FROM (stored.system_identifier, stored.database_oid) THEN
            SELECT string_agg(DISTINCT pg_catalog.quote_ident(s.subownername), ', ') INTO missing
              FROM subscriber.subscription s
             WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_roles r WHERE r.rolname = s.subownername);
            IF missing IS NOT NULL THEN
                RAISE EXCEPTION USING ERRCODE = 'undefined_object',
                    MESSAGE = pg_catalog.format('owners of subscriptions do not exist: %s', missing),
                    HINT = 'Create these roles as the original server has them.';
            END IF;
            SELECT string_agg(pg_catalog.quote_literal(p.gid), ', ') INTO missing FROM subscriber.saved_prepared() p
             WHERE NOT p.committed
               AND NOT EXISTS (SELECT FROM pg_catalog.pg_prepared_xacts x
                                WHERE x.database = pg_catalog.current_database() AND x.gid = p.gid)
               AND NOT EXISTS (SELECT FROM subscriber.saved_prepared() c
                                WHERE c.committed AND (c.subid, c.xid) = (p.subid, p.xid));
            IF missing IS NOT NULL THEN
                RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
                    MESSAGE = pg_catalog.format('prepared transactions of subscriptions are missing: %s', missing),
                    DETAIL = 'A dump does not contain prepared transactions.',
                    HINT = 'Dump the original again while none is prepared. Or remove the subscriptions and create'
                           ' them again with a fresh copy: ALTER SUBSCRIPTION ... DISABLE, ALTER SUBSCRIPTION ... SET'
                           ' (slot_name = NONE), DROP SUBSCRIPTION, SELECT subscriber.rebind(), CREATE SUBSCRIPTION.';
            END IF;
            -- A server that was upgraded has another system identifier, and the same OIDs.
            is_copy := present.system_identifier = stored.system_identifier
                       OR EXISTS (SELECT FROM subscriber.subscription_rel r JOIN {NAMED} WHERE named.oid <> r.srrelid);
            PERFORM subscriber.find_relations(forget, is_copy);
            UPDATE subscriber.subscription s SET subowner = r.oid
              FROM pg_catalog.pg_roles r WHERE r.rolname = s.subownername AND r.oid <> s.subowner;
            DELETE FROM subscriber.session;
            DELETE FROM subscriber.launcher;
            DELETE FROM subscriber.worker;
            DELETE FROM subscriber.hold;
        END IF;
        INSERT INTO subscriber.identity AS i (system_identifier, timeline, database_oid, database_name, sync_id)
        VALUES (present.system_identifier, present.timeline, present.database_oid, present.database_name,
                present.system_identifier)
        ON CONFLICT (only_row) DO UPDATE
           SET system_identifier = excluded.system_identifier, timeline = excluded.timeline,
               database_oid = excluded.database_oid, database_name = excluded.database_name,
               sync_id = CASE WHEN is_copy THEN  -- the original may have slots with its own
                                  floor(pg_catalog.random() * 1e18)::bigint::text ELSE i.sync_id END;
    END $$
    """,
    # For the schema's owner: whether subscriptions continue after a failover of the target without rebind().
    """
    CREATE FUNCTION subscriber.accept_timelines(accept boolean) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
        UPDATE subscriber.identity SET accept_timelines = accept
    $$
    """,
    # Returns the former timeline if a new one has been accepted, else NULL.
    """
    CREATE FUNCTION subscriber.adopt_timeline() RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        present record;
        former bigint;
    BEGIN
        SELECT * INTO present FROM subscriber.present_identity();
        SELECT i.timeline INTO former FROM subscriber.identity i
         WHERE i.accept_timelines AND i.timeline < present.timeline
           AND (i.system_identifier, i.database_oid) = (present.system_identifier, present.database_oid) FOR UPDATE;
        IF former IS NOT NULL THEN
            UPDATE subscriber.identity i SET timeline = present.timeline;
        END IF;
        RETURN former;
    END $$
    """,
    # The publisher's timeline when its history was last compared with the progress, and the system identifier of that
    # publisher. ALTER SUBSCRIPTION ... CONNECTION clears the publisher's system identifier, and may name a promoted
    # standby.
    "ALTER TABLE subscriber.subscription ADD COLUMN subtimeline bigint, ADD COLUMN subtimelinesystem text",
]


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    for statement in STATEMENTS:
        op.execute(statement)
