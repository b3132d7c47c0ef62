"""Which database this catalog belongs to, and the names of the subscriptions' tables.

A dump, a template and a physical copy carry the catalog to another database, where nobody has said that subscriptions
are to run: their launcher would take the changes away from the original. So the catalog says where it belongs, and
only runs there. subscriber.rebind() makes it belong to the database it is in.

Tables are known by number and by name: after a restored dump the same number may be another table's.
"""

from __future__ import annotations

from alembic import op

revision = "0014"
down_revision = "0013"

STATEMENTS = [
    # `sync_id` is part of the names of slots for table synchronization, and stays when a server is upgraded.
    """
    CREATE UNLOGGED TABLE subscriber.identity (
        only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
        system_identifier text NOT NULL,
        timeline bigint,
        database_oid oid NOT NULL,
        database_name name NOT NULL,
        sync_id text NOT NULL,
        kept oid NOT NULL UNIQUE DEFAULT subscriber.new_record()
    )
    """,
    """
    CREATE TRIGGER keep AFTER INSERT OR UPDATE OR DELETE ON subscriber.identity
    FOR EACH ROW EXECUTE FUNCTION subscriber.keep()
    """,
    "ALTER TABLE subscriber.identity ENABLE ALWAYS TRIGGER keep",
    # The timeline is that of the WAL that is written now. NULL on a standby, and where it cannot be asked for.
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
    # By name. A table whose copy had begun has a slot under its old number.
    """
    CREATE FUNCTION subscriber.find_relations() RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        begun text;
    BEGIN
        CREATE TEMPORARY TABLE subscriber_found ON COMMIT DROP AS
        SELECT r.srsubid, r.srrelid AS old, c.oid AS new, r.srsubstate, r.srnspname, r.srrelname
          FROM subscriber.subscription_rel r JOIN pg_catalog.pg_namespace n ON n.nspname = r.srnspname
          JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = r.srrelname AND c.oid <> r.srrelid;
        SELECT string_agg(pg_catalog.format('%I.%I', f.srnspname, f.srrelname), ', ') INTO begun
          FROM pg_temp.subscriber_found f WHERE f.srsubstate NOT IN ('i', 'r');
        IF begun IS NOT NULL THEN
            RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
                MESSAGE = pg_catalog.format('the copy of tables had begun when the database was dumped: %s', begun),
                HINT = 'Empty these tables, then begin anew: ALTER SUBSCRIPTION ... SET (slot_name = NONE),'
                       ' DROP SUBSCRIPTION, CREATE SUBSCRIPTION.';
        END IF;
        WITH moved AS (
            DELETE FROM subscriber.subscription_rel r USING pg_temp.subscriber_found f
             WHERE (r.srsubid, r.srrelid) = (f.srsubid, f.old)
            RETURNING r.srsubid, f.new, r.srsubstate, r.srsublsn, r.srsource, r.srnspname, r.srrelname)
        INSERT INTO subscriber.subscription_rel (srsubid, srrelid, srsubstate, srsublsn, srsource, srnspname, srrelname)
        SELECT * FROM moved;
    END $$
    """,
    # For the schema's owner: this database is to go on with the subscriptions. Tables of a restored dump are found by
    # their names. Where progress did not come along, nobody knows what the tables contain.
    """
    CREATE FUNCTION subscriber.rebind() RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        missing text;
        moved boolean;
    BEGIN
        SELECT string_agg(pg_catalog.quote_ident(s.subname), ', ') INTO missing
          FROM subscriber.subscription s
          LEFT JOIN subscriber.progress_record p ON p.subid = s.subid AND p.relid = 0
         WHERE subscriber.read_position(p.record) IS NULL;
        IF missing IS NOT NULL THEN
            RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
                MESSAGE = pg_catalog.format('the progress of subscriptions is missing: %s', missing),
                DETAIL = 'It is in large objects, which the dump that was restored here did not contain.',
                HINT = 'Restore a dump with large objects, or begin anew:'
                       ' ALTER SUBSCRIPTION ... SET (slot_name = NONE),'
                       ' DROP SUBSCRIPTION, CREATE SUBSCRIPTION.';
        END IF;
        SELECT (i.system_identifier, i.database_oid) IS DISTINCT FROM (b.system_identifier, b.database_oid)
          INTO moved FROM subscriber.present_identity() i, subscriber.identity b;
        IF moved THEN
            PERFORM subscriber.find_relations();
        END IF;
        UPDATE subscriber.identity b
           SET system_identifier = i.system_identifier, timeline = i.timeline, database_oid = i.database_oid,
               database_name = i.database_name
          FROM subscriber.present_identity() i;
    END $$
    """,
]


def upgrade() -> None:
    """Upgrade only: nobody goes back."""
    for statement in STATEMENTS:
        op.execute(statement)
