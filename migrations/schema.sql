-- Schema "subscriber" of a target database: everything that subscriptions need there.
--
-- This file is the present schema, and a new database gets it as a whole. The schema of an earlier release gets the
-- files of changes/ that it lacks, and a test compares both ways. README.md, beside this file, says how to change the
-- schema.
--
-- How to read it. Each section has its tables first, and then its functions, triggers and views. COMMENT ON says what
-- each object is. The same words are in docs/reference/catalog.md, and psql shows them: \d+ subscriber.hold,
-- \df+ subscriber.origin_progress.
--
-- Who may call what. PUBLIC may read the views of section 17 and call nothing. Roles have duties (section 18):
--
--     owner       owns subscriptions, and sees only its own: statements, `subscriber verify`
--     launcher    runs subscriptions; it may also do what the other duties may
--     apply       applies changes: it may read no table. Functions that change a record check the fence of its worker
--
-- The comment of each function ends with its callers. The schema's owner may call all functions.
--
-- Rules for all objects
--
-- 1. Everything runs as a role that is not a superuser, as on a managed service, and on PostgreSQL 14 to 19. If a
--    superuser creates the schema, it belongs to the bootstrap superuser, and its functions may use replication origins.
-- 2. No table is permanent. FOR ALL TABLES publishes permanent tables, and a connection string must not be published.
--    Section 1 says how the rows of UNLOGGED tables survive a crash.
-- 3. A function that runs with its owner's rights (SECURITY DEFINER) sets search_path to pg_catalog and, last, pg_temp.
--    No object of a caller is found before the server's own. It calls no function that a caller could have replaced.
-- 4. Such a function knows the role that calls it by its argument of type subscriber.caller (section 1).
-- 5. A trigger that must also fire for replicated changes is ENABLE ALWAYS.
-- 6. The file is ASCII, because a database may have any encoding.
-- 7. No statement depends on the order of columns: a later change can only add them at the end.
--
-- Sections
--
--      1  Callers and durable rows                      10  Repairs, comparisons and ranges of keys
--      2  Subscriptions and their options               11  Sequences
--      3  Tables of subscriptions, and their copies     12  Foreign servers
--      4  Progress, claims and origins                  13  Moves of databases
--      5  Workers, sessions and the launcher            14  Audit and history
--      6  Prepared transactions                         15  Code that runs when a table is written
--      7  Quarantine                                    16  Identity, crashes and restored dumps
--      8  Conflicts and statistics                      17  Views named like PostgreSQL's
--      9  Deleted rows                                  18  Roles, duties and rights


-- 1. Callers and durable rows -----------------------------------------------------------------------------------------
--
-- A crash of the server empties UNLOGGED tables. Large objects survive it, are transactional and are never published.
-- So they have the content of the tables:
--
--     a row of a durable table    one large object: JSON that trigger `keep` writes in the same transaction. Its number
--                                 is in column `kept` of the row
--     progress of a worker        one large object: section 4
--     a prepared transaction      large objects only: section 6
--     deleted rows                large objects with up to 10,000 keys each: section 9
--     changes in quarantine       one large object for each transaction: section 7
--
-- restore() fills the tables after a crash (section 16). Reports of workers, statistics, rates, sessions, requests to
-- pause at a position, and the limits of deleted rows may be lost, and have no large objects.
--
-- The numbers of large objects are in ranges that the server's own counter does not reach soon:
--
--     3,400,000,000 to 3,499,999,999    prepared transactions
--     3,500,000,000 to 3,599,999,999    rows of tables with few rows, and progress
--     3,600,000,000 to 4,199,999,999    rows of tables with many rows, and changes in quarantine
--     4,200,000,000 to 4,289,999,999    deleted rows
--
-- vacuumlo removes large objects that no column of type oid references. The materialized view large_objects references
-- the first 16,384 numbers of the second range, even while the tables are empty.

CREATE DOMAIN subscriber.caller AS name CHECK (VALUE = CURRENT_USER);
REVOKE ALL ON DOMAIN subscriber.caller FROM PUBLIC;
COMMENT ON DOMAIN subscriber.caller IS
    'The role that calls a function. Within a SECURITY DEFINER function, CURRENT_USER is the owner of the function. So '
    'the last argument of such a function has this type and the default CURRENT_USER, which is evaluated before the '
    'call. The domain accepts no other value. SESSION_USER would be wrong: PostgreSQL runs the functions of an index '
    'as the owner of the table, in sessions of a superuser.';

CREATE FUNCTION subscriber.set_role_privilege() RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN pg_catalog.current_setting('server_version_num')::pg_catalog.int4 OPERATOR(pg_catalog.>=) 160000
                THEN 'SET' ELSE 'MEMBER' END
$$;
COMMENT ON FUNCTION subscriber.set_role_privilege IS
    'Returns the privilege of a role that allows SET ROLE to it, as pg_has_role() takes it. The function is inlined, '
    'so it names the schema of its operator. Callers: duties owner and apply.';

CREATE UNLOGGED TABLE subscriber.complete (
    since timestamptz NOT NULL
);
COMMENT ON TABLE subscriber.complete IS
    'Has a row while all other tables have all rows: a crash of the server empties them. Everybody may read it.';
COMMENT ON COLUMN subscriber.complete.since IS 'the time at which the tables were filled';

-- Sequences can be published since PostgreSQL 19, and can be UNLOGGED since 15.
DO $$
BEGIN
    IF pg_catalog.current_setting('server_version_num')::int >= 150000 THEN
        CREATE UNLOGGED SEQUENCE subscriber.number MAXVALUE 1000000000 CYCLE;
    ELSE
        CREATE SEQUENCE subscriber.number MAXVALUE 1000000000 CYCLE;
    END IF;
END $$;
COMMENT ON SEQUENCE subscriber.number IS
    'Numbers that differ between concurrent callers, for large objects and identifiers. A crash resets it, except on '
    'PostgreSQL 14.';

CREATE MATERIALIZED VIEW subscriber.large_objects AS
SELECT (3500000000 + n)::pg_catalog.oid AS record FROM pg_catalog.generate_series(0, 16383) n;
COMMENT ON MATERIALIZED VIEW subscriber.large_objects IS
    'The numbers of large objects that vacuumlo must not remove. Nothing reads it.';
COMMENT ON COLUMN subscriber.large_objects.record IS 'the number of a large object, which need not exist';

CREATE FUNCTION subscriber.draw_number(first bigint, past bigint, attempts integer) RETURNS oid
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    candidate oid;
BEGIN
    FOR attempt IN 1 .. attempts LOOP
        candidate := (first + pg_catalog.nextval('subscriber.number') % (past - first))::oid;
        IF NOT EXISTS (SELECT FROM pg_catalog.pg_largeobject_metadata m WHERE m.oid = candidate) THEN
            RETURN candidate;
        END IF;
    END LOOP;
    RETURN NULL;
END $$;
COMMENT ON FUNCTION subscriber.draw_number IS
    'Returns a number from `first` to `past` - 1 that no large object has; NULL: not found in that many attempts. '
    'Callers: other functions.';

CREATE FUNCTION subscriber.new_record() RETURNS oid
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(subscriber.draw_number(3500000000, 3500016384, 16384),
                    subscriber.draw_number(3500016384, 3600000000, 16384))
$$;
COMMENT ON FUNCTION subscriber.new_record IS
    'Returns a number for the large object of a row, for a table with few rows: one of the numbers that large_objects '
    'lists, if one is free. Default of columns `kept`. Callers: duty owner.';

CREATE FUNCTION subscriber.new_record_of_many() RETURNS oid
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT subscriber.draw_number(3600000000, 4200000000, 16384)
$$;
COMMENT ON FUNCTION subscriber.new_record_of_many IS
    'Returns a number for the large object of a row, for a table with many rows. Default of columns `kept`. Callers: '
    'duty owner.';

CREATE FUNCTION subscriber.new_id() RETURNS bigint
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT (pg_catalog.date_part('epoch', pg_catalog.clock_timestamp() - '2026-01-01 00:00:00+00'::timestamptz)
            * 1000000)::bigint * 1024 + pg_catalog.nextval('subscriber.number') % 1024
$$;
COMMENT ON FUNCTION subscriber.new_id IS
    'Returns a number that identifies a row. It rises with time, so that rows can be read in the order of their '
    'creation. Callers: duty owner.';

CREATE FUNCTION subscriber.as_record(relation name, content jsonb) RETURNS bytea
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT pg_catalog.convert_to(pg_catalog.jsonb_build_object('table', relation, 'row', content)::text,
                                 CASE WHEN pg_catalog.getdatabaseencoding() IN ('SQL_ASCII', 'MULE_INTERNAL')
                                      THEN pg_catalog.getdatabaseencoding() ELSE 'UTF8' END)
$$;
COMMENT ON FUNCTION subscriber.as_record IS
    'Returns the content of the large object of a row: JSON in UTF-8. In a database with encoding SQL_ASCII, texts are '
    'bytes of unknown encoding, and MULE_INTERNAL cannot be converted: their bytes are stored as they are. Callers: '
    'other functions.';

CREATE FUNCTION subscriber.keep() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    content bytea;
    known bytea;
BEGIN
    IF TG_OP = 'DELETE' THEN
        -- A restored dump without large objects has none.
        PERFORM pg_catalog.lo_unlink(m.oid) FROM pg_catalog.pg_largeobject_metadata m WHERE m.oid = OLD.kept;
        RETURN NULL;
    END IF;
    IF TG_OP = 'UPDATE' AND NEW.kept <> OLD.kept THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = pg_catalog.format('the large object of a row of table subscriber.%I cannot be changed',
                                        TG_TABLE_NAME);
    END IF;
    content := subscriber.as_record(TG_TABLE_NAME, pg_catalog.to_jsonb(NEW));
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_largeobject_metadata m WHERE m.oid = NEW.kept) THEN
        PERFORM pg_catalog.lo_from_bytea(NEW.kept, content);
        RETURN NULL;
    END IF;
    known := pg_catalog.lo_get(NEW.kept);
    content := content
        || pg_catalog.convert_to(repeat(' ', octet_length(known) - octet_length(content)),
                                 CASE WHEN pg_catalog.getdatabaseencoding() IN ('SQL_ASCII', 'MULE_INTERNAL')
                                      THEN pg_catalog.getdatabaseencoding() ELSE 'UTF8' END);
    IF known = content THEN  -- restore() has inserted the row
        RETURN NULL;
    END IF;
    IF TG_OP = 'INSERT' THEN
        RAISE EXCEPTION USING ERRCODE = 'unique_violation',
            MESSAGE = pg_catalog.format('large object %s holds another row', NEW.kept);
    END IF;
    PERFORM pg_catalog.lo_put(NEW.kept, 0, content);
    RETURN NULL;
END $$;
COMMENT ON FUNCTION subscriber.keep IS
    'Writes the row to its large object, or removes the object with the row. Roles with duty owner write rows, so a '
    'row cannot take the object of another row or role: a new row finds no object with its number, and the number of a '
    'row does not change. Blanks overwrite the rest of a longer earlier record: they have no meaning in JSON. Callers: '
    'the triggers `keep`.';

CREATE FUNCTION subscriber.saved(relation name, first bigint, past bigint) RETURNS SETOF jsonb
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    record oid;
    document jsonb;
BEGIN
    FOR record IN SELECT m.oid FROM pg_catalog.pg_largeobject_metadata m
                   WHERE m.oid >= first::oid AND m.oid < past::oid
                     AND m.lomowner = pg_catalog.quote_ident(current_user)::regrole LOOP
        IF pg_catalog.lo_get(record, 0, 1) = '{' THEN
            document := pg_catalog.convert_from(
                pg_catalog.lo_get(record),
                CASE WHEN pg_catalog.getdatabaseencoding() IN ('SQL_ASCII', 'MULE_INTERNAL')
                     THEN pg_catalog.getdatabaseencoding() ELSE 'UTF8' END)::jsonb;
        ELSIF pg_catalog.lo_get(record, 0, 4) = 'prg1' THEN
            document := pg_catalog.convert_from(
                pg_catalog.lo_get(record, 20, 256),
                CASE WHEN pg_catalog.getdatabaseencoding() IN ('SQL_ASCII', 'MULE_INTERNAL')
                     THEN pg_catalog.getdatabaseencoding() ELSE 'UTF8' END)::jsonb;
        ELSE
            CONTINUE;
        END IF;
        IF document ->> 'table' = relation THEN
            RETURN NEXT document -> 'row';
        END IF;
    END LOOP;
END $$;
COMMENT ON FUNCTION subscriber.saved IS
    'Returns the rows of one table from the large objects of a number range. Other programs may have large objects '
    'with these numbers, so owner and content decide. Callers: other functions.';

CREATE FUNCTION subscriber.notify_launcher() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM pg_catalog.pg_notify('subscriber', TG_TABLE_NAME);
    RETURN NULL;
END $$;
COMMENT ON FUNCTION subscriber.notify_launcher IS
    'Wakes the launcher by NOTIFY subscriber. Not in session_replication_role = replica, so that workers do not wake '
    'it with their own progress. Callers: the triggers `notify_launcher`.';


-- 2. Subscriptions and their options ----------------------------------------------------------------------------------
--
-- A row of `subscription` is what CREATE SUBSCRIPTION and ALTER SUBSCRIPTION were told, and what the launcher has to
-- know about the publisher. Columns of options have the names of PostgreSQL's pg_subscription where it has the option.
-- subscriber/subscription.py has the same columns, and a test compares the two.
--
-- Owners write these rows themselves, and one launcher reads the rows of all owners. So the columns have CHECK
-- constraints: a value that statements do not write would stop the subscriptions of others.

-- Origins belong to the whole cluster, and their names contain this number. So it is the time in seconds and never used
-- twice. It is not a sequence, because sequences can be published.
CREATE FUNCTION subscriber.new_subscription_oid() RETURNS oid
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
END $$;
COMMENT ON FUNCTION subscriber.new_subscription_oid IS
    'Returns the OID of a new subscription, in a range that PostgreSQL''s own OIDs do not reach soon. Callers: duty '
    'owner.';

CREATE UNLOGGED TABLE subscriber.subscription (
    subid oid PRIMARY KEY DEFAULT subscriber.new_subscription_oid(),
    subname name NOT NULL UNIQUE,
    subowner oid NOT NULL,
    subownername name,
    subenabled boolean NOT NULL,
    subdisabledat timestamptz,
    subconninfo text,
    subserver oid NOT NULL DEFAULT 0,
    subslotname name,
    subpublications text[] NOT NULL CHECK (array_position(subpublications, NULL) IS NULL),
    subsynccommit text NOT NULL,
    subbinary boolean,
    substream "char" NOT NULL CHECK (substream IN ('f', 't', 'p')),
    subtwophasestate "char" NOT NULL CHECK (subtwophasestate IN ('d', 'p', 'e')),
    subdisableonerr boolean NOT NULL,
    subpasswordrequired boolean NOT NULL,
    subrunasowner boolean NOT NULL,
    suborigin text NOT NULL,
    subfailover boolean NOT NULL,
    subretaindeadtuples boolean NOT NULL DEFAULT false,
    submaxretention integer NOT NULL DEFAULT 0 CHECK (submaxretention >= 0),
    subwalrcvtimeout text NOT NULL DEFAULT '-1',
    subconflictpolicy text NOT NULL DEFAULT '',
    subconflicthistory text NOT NULL DEFAULT 'decided' CHECK (subconflicthistory IN ('none', 'decided', 'all')),
    subconflictrows boolean NOT NULL DEFAULT false,
    subonerror text NOT NULL DEFAULT 'retry' CHECK (subonerror IN ('retry', 'quarantine')),
    subquarantinelimit integer NOT NULL DEFAULT 1000 CHECK (subquarantinelimit >= 0),
    subtrackranges boolean NOT NULL DEFAULT false,
    subcopyengine text NOT NULL DEFAULT 'snapshot' CHECK (subcopyengine IN ('snapshot', 'ranges')),
    subcopyindexes text NOT NULL DEFAULT 'none' CHECK (subcopyindexes IN ('none', 'after')),
    subapplysessions integer NOT NULL DEFAULT 1 CHECK (subapplysessions BETWEEN 1 AND 64),
    subtrustedowners name[] NOT NULL DEFAULT '{}',
    subsequences text NOT NULL DEFAULT 'copy' CHECK (subsequences IN ('none', 'copy', 'follow')),
    subsequencenames text[] NOT NULL DEFAULT '{}' CHECK (cardinality(subsequencenames) % 2 = 0),
    subsourcetag text NOT NULL DEFAULT '',
    subwalbudget text NOT NULL DEFAULT '0',
    subskiplsn pg_lsn NOT NULL DEFAULT '0/0',
    subgeneration integer NOT NULL DEFAULT 0,
    subsystemid text,
    subtimeline bigint,
    subtimelinesystem text,
    subtimelinehistory text,
    subacceptloss boolean NOT NULL DEFAULT false,
    subgaveup text,
    kept oid NOT NULL UNIQUE DEFAULT subscriber.new_record()
);
COMMENT ON TABLE subscriber.subscription IS
    'The subscriptions. Connection strings contain passwords, so a role sees only the subscriptions of roles that it '
    'belongs to. Creating one takes the privileges that PostgreSQL 16 asks for: those of pg_create_subscription, and '
    'CREATE on the database. Duty owner reads and deletes rows, and writes the columns that privileges_of() lists.';
COMMENT ON COLUMN subscriber.subscription.subid IS 'the number of the subscription';
COMMENT ON COLUMN subscriber.subscription.subname IS 'its name';
COMMENT ON COLUMN subscriber.subscription.subowner IS 'the role that owns it';
COMMENT ON COLUMN subscriber.subscription.subownername IS
    'the name of the owner, because a restored dump has other OIDs; written by triggers';
COMMENT ON COLUMN subscriber.subscription.subenabled IS 'option enabled: the launcher is to run it';
COMMENT ON COLUMN subscriber.subscription.subdisabledat IS 'the time at which it was disabled; NULL: it is enabled';
COMMENT ON COLUMN subscriber.subscription.subconninfo IS
    'the connection string, as it was written; NULL: a foreign server has it';
COMMENT ON COLUMN subscriber.subscription.subserver IS 'the foreign server that has the connection string; 0: none';
COMMENT ON COLUMN subscriber.subscription.subslotname IS
    'option slot_name: the slot on the publisher; NULL: slot_name = NONE';
COMMENT ON COLUMN subscriber.subscription.subpublications IS 'the publications';
COMMENT ON COLUMN subscriber.subscription.subsynccommit IS 'option synchronous_commit';
COMMENT ON COLUMN subscriber.subscription.subbinary IS 'option binary; NULL: not said, so it depends on the types';
COMMENT ON COLUMN subscriber.subscription.substream IS 'option streaming: f off, t on, p parallel';
COMMENT ON COLUMN subscriber.subscription.subtwophasestate IS
    'option two_phase: d disabled, p pending until all tables are there, e enabled';
COMMENT ON COLUMN subscriber.subscription.subdisableonerr IS 'option disable_on_error';
COMMENT ON COLUMN subscriber.subscription.subpasswordrequired IS
    'option password_required; only a superuser sets it to false';
COMMENT ON COLUMN subscriber.subscription.subrunasowner IS 'option run_as_owner';
COMMENT ON COLUMN subscriber.subscription.suborigin IS 'option origin: any or none';
COMMENT ON COLUMN subscriber.subscription.subfailover IS 'option failover';
COMMENT ON COLUMN subscriber.subscription.subretaindeadtuples IS 'option retain_dead_tuples';
COMMENT ON COLUMN subscriber.subscription.submaxretention IS
    'option max_retention_duration, in milliseconds; 0: no limit';
COMMENT ON COLUMN subscriber.subscription.subwalrcvtimeout IS
    'option wal_receiver_timeout; -1: the setting receiver_timeout';
COMMENT ON COLUMN subscriber.subscription.subconflictpolicy IS 'option conflict_policy';
COMMENT ON COLUMN subscriber.subscription.subconflicthistory IS 'option conflict_history';
COMMENT ON COLUMN subscriber.subscription.subconflictrows IS 'option conflict_log_rows';
COMMENT ON COLUMN subscriber.subscription.subonerror IS 'option on_error: retry or quarantine';
COMMENT ON COLUMN subscriber.subscription.subquarantinelimit IS 'option quarantine_limit';
COMMENT ON COLUMN subscriber.subscription.subtrackranges IS 'option track_ranges';
COMMENT ON COLUMN subscriber.subscription.subcopyengine IS 'option copy_engine';
COMMENT ON COLUMN subscriber.subscription.subcopyindexes IS 'option copy_indexes';
COMMENT ON COLUMN subscriber.subscription.subapplysessions IS 'option apply_sessions';
COMMENT ON COLUMN subscriber.subscription.subtrustedowners IS 'option trusted_owners; only a superuser sets it';
COMMENT ON COLUMN subscriber.subscription.subsequences IS 'option sequences: none, copy or follow';
COMMENT ON COLUMN subscriber.subscription.subsequencenames IS 'option sequence_names: quoted names with schema';
COMMENT ON COLUMN subscriber.subscription.subsourcetag IS
    'option source_tag: the rows of tables with several subscriptions that belong to this one';
COMMENT ON COLUMN subscriber.subscription.subwalbudget IS 'option wal_budget; 0: no limit';
COMMENT ON COLUMN subscriber.subscription.subskiplsn IS 'the position that SKIP was told; 0/0: none';
COMMENT ON COLUMN subscriber.subscription.subgeneration IS
    'rises with each statement that a worker is restarted for; each commit of a worker passes it';
COMMENT ON COLUMN subscriber.subscription.subsystemid IS
    'the system identifier of the publisher; NULL: not known before the next connection';
COMMENT ON COLUMN subscriber.subscription.subtimeline IS
    'the timeline of the publisher when its history was last compared with the progress; NULL: not yet';
COMMENT ON COLUMN subscriber.subscription.subtimelinesystem IS
    'the system identifier of the publisher that the timeline belongs to';
COMMENT ON COLUMN subscriber.subscription.subtimelinehistory IS
    'number and end of the timelines before it; NULL: of a standby, which may follow another timeline';
COMMENT ON COLUMN subscriber.subscription.subacceptloss IS
    'the user accepts that the next publisher lacks applied changes';
COMMENT ON COLUMN subscriber.subscription.subgaveup IS
    'the reason why the launcher has dropped the slot; NULL: it has not';
COMMENT ON COLUMN subscriber.subscription.kept IS 'the large object with this row';
ALTER TABLE subscriber.subscription ENABLE ROW LEVEL SECURITY;

CREATE FUNCTION subscriber.may_become(role name, owner oid) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT pg_catalog.pg_has_role(role, owner, 'USAGE')
        OR pg_catalog.pg_has_role(role, owner, subscriber.set_role_privilege())
$$;
COMMENT ON FUNCTION subscriber.may_become IS
    'Returns true if the role has the rights of the owner, or may SET ROLE to it. A member with neither, which is '
    'possible since PostgreSQL 16, sees nothing of the owner. Callers: duty owner.';

CREATE POLICY see ON subscriber.subscription FOR SELECT
USING (subscriber.may_become(CURRENT_USER, subowner));
CREATE POLICY add ON subscriber.subscription FOR INSERT
WITH CHECK (pg_catalog.pg_has_role(subowner, 'USAGE') AND subpasswordrequired
    AND pg_catalog.has_database_privilege(pg_catalog.current_database(), 'CREATE')
    AND EXISTS (SELECT FROM pg_catalog.pg_roles r
                 WHERE r.rolname = 'pg_create_subscription' AND pg_catalog.pg_has_role(r.oid, 'USAGE')));
-- The owner is no column that duty owner may update: set_owner() checks the new role.
CREATE POLICY change ON subscriber.subscription FOR UPDATE
USING (pg_catalog.pg_has_role(subowner, 'USAGE')) WITH CHECK (pg_catalog.pg_has_role(subowner, 'USAGE'));
CREATE POLICY remove ON subscriber.subscription FOR DELETE
USING (pg_catalog.pg_has_role(subowner, 'USAGE'));
CREATE TRIGGER keep AFTER INSERT OR UPDATE OR DELETE ON subscriber.subscription
FOR EACH ROW EXECUTE FUNCTION subscriber.keep();
ALTER TABLE subscriber.subscription ENABLE ALWAYS TRIGGER keep;
CREATE TRIGGER notify_launcher AFTER INSERT OR UPDATE OR DELETE ON subscriber.subscription
FOR EACH STATEMENT EXECUTE FUNCTION subscriber.notify_launcher();

CREATE FUNCTION subscriber.may_manage(subscription oid, caller name) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce((SELECT pg_catalog.pg_has_role(caller, s.subowner, 'USAGE')
                       FROM subscriber.subscription s WHERE s.subid = subscription),
                    (SELECT r.rolsuper FROM pg_catalog.pg_roles r WHERE r.rolname = caller))
$$;
COMMENT ON FUNCTION subscriber.may_manage IS
    'Returns true if the caller has the rights of the subscription''s owner, or is a superuser and the subscription '
    'does not exist. NULL: a caller of NULL. Callers: other functions.';

CREATE FUNCTION subscriber.check_manager(subscription oid, caller name) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF subscriber.may_manage(subscription, caller) IS NOT TRUE THEN  -- also if the caller is NULL
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = pg_catalog.format('permission denied for subscription with OID %s', subscription);
    END IF;
END $$;
COMMENT ON FUNCTION subscriber.check_manager IS
    'Refuses a caller that may not manage the subscription (42501), also if the caller is NULL. Callers: other '
    'functions.';

CREATE FUNCTION subscriber.set_owner(subscription oid, owner oid, caller subscriber.caller DEFAULT CURRENT_USER)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM subscriber.check_manager(subscription, caller);
    IF NOT pg_catalog.pg_has_role(caller, owner, subscriber.set_role_privilege()) THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = pg_catalog.format('must be able to SET ROLE "%s"', pg_catalog.pg_get_userbyid(owner));
    ELSIF NOT pg_catalog.has_database_privilege(caller, pg_catalog.current_database(), 'CREATE') THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = pg_catalog.format('permission denied for database %s', pg_catalog.current_database());
    ELSIF EXISTS (SELECT FROM subscriber.subscription s, pg_catalog.pg_roles r
                   WHERE s.subid = subscription AND NOT s.subpasswordrequired
                     AND r.rolname = caller AND NOT r.rolsuper) THEN  -- keep_terms() does not see the caller
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = 'password_required=false is superuser-only';
    END IF;
    UPDATE subscriber.subscription s SET subowner = owner WHERE s.subid = subscription;
END $$;
COMMENT ON FUNCTION subscriber.set_owner IS
    'Gives the subscription to another role, which the caller can SET ROLE to. The conditions are those of ALTER '
    'SUBSCRIPTION ... OWNER TO. Callers: duty owner.';

CREATE FUNCTION subscriber.name_owner() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    SELECT r.rolname INTO NEW.subownername FROM pg_catalog.pg_roles r WHERE r.oid = NEW.subowner;
    RETURN NEW;
END $$;
COMMENT ON FUNCTION subscriber.name_owner IS 'Stores the name of the owner. Callers: triggers.';

-- restore() inserts the stored name, because the OID may belong to another role by then.
CREATE TRIGGER name_new_owner BEFORE INSERT ON subscriber.subscription
FOR EACH ROW WHEN (NEW.subownername IS NULL) EXECUTE FUNCTION subscriber.name_owner();
ALTER TABLE subscriber.subscription ENABLE ALWAYS TRIGGER name_new_owner;
CREATE TRIGGER name_owner BEFORE UPDATE OF subowner ON subscriber.subscription
FOR EACH ROW EXECUTE FUNCTION subscriber.name_owner();
ALTER TABLE subscriber.subscription ENABLE ALWAYS TRIGGER name_owner;

-- Row-level security is not active for superusers, and for the schema's owner.
CREATE FUNCTION subscriber.keep_terms() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    states text[] := ARRAY['subenabled', 'subtwophasestate', 'subskiplsn', 'subsystemid', 'subtimeline',
                           'subtimelinesystem', 'subtimelinehistory', 'subacceptloss', 'subgaveup'];
BEGIN
    IF pg_catalog.row_security_active(TG_RELID)
       AND pg_catalog.to_jsonb(OLD) - states IS DISTINCT FROM pg_catalog.to_jsonb(NEW) - states THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = 'password_required=false is superuser-only',
            HINT = 'Subscriptions with the password_required option set to false may only be created or modified by '
                'the superuser.';
    END IF;
    RETURN NEW;
END $$;
COMMENT ON FUNCTION subscriber.keep_terms IS
    'Refuses changes of a subscription with password_required = false by roles that are no superusers. A launcher '
    'still stores the states of its workers. Callers: the trigger of the same name.';

CREATE TRIGGER keep_terms BEFORE UPDATE ON subscriber.subscription
FOR EACH ROW WHEN (NOT OLD.subpasswordrequired) EXECUTE FUNCTION subscriber.keep_terms();
ALTER TABLE subscriber.subscription ENABLE ALWAYS TRIGGER keep_terms;

CREATE FUNCTION subscriber.note_disabled() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    NEW.subdisabledat := CASE WHEN NOT NEW.subenabled THEN coalesce(NEW.subdisabledat, clock_timestamp()) END;
    RETURN NEW;
END $$;
COMMENT ON FUNCTION subscriber.note_disabled IS
    'Stores the time at which the subscription was disabled. Callers: the trigger of the same name.';

CREATE TRIGGER note_disabled BEFORE INSERT OR UPDATE ON subscriber.subscription
FOR EACH ROW EXECUTE FUNCTION subscriber.note_disabled();
ALTER TABLE subscriber.subscription ENABLE ALWAYS TRIGGER note_disabled;

CREATE FUNCTION subscriber.next_generation() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    NEW.subgeneration := (OLD.subgeneration + 1) % 2147483647;
    RETURN NEW;
END $$;
COMMENT ON FUNCTION subscriber.next_generation IS
    'Counts a statement that changes a worker''s settings. After ALTER SUBSCRIPTION the launcher restarts the worker. '
    'Until then a worker could commit transactions with the old settings, but each commit passes the generation of its '
    'settings. Callers: triggers.';

-- The columns whose change restarts a worker. SETTINGS in worker/supervision/supervisor.py has the same, and a test
-- compares the two.
CREATE TRIGGER next_generation BEFORE UPDATE ON subscriber.subscription
FOR EACH ROW WHEN (
    (OLD.subname, OLD.subowner, OLD.subenabled, OLD.subconninfo, OLD.subslotname, OLD.subsynccommit,
     OLD.subpublications, OLD.subbinary, OLD.substream, OLD.subpasswordrequired, OLD.subrunasowner, OLD.suborigin,
     OLD.subconflictpolicy, OLD.subconflicthistory, OLD.subconflictrows, OLD.subapplysessions, OLD.subtrustedowners,
     OLD.subserver, OLD.subwalrcvtimeout, OLD.subretaindeadtuples, OLD.subonerror, OLD.subtrackranges,
     OLD.subsourcetag)
    IS DISTINCT FROM
    (NEW.subname, NEW.subowner, NEW.subenabled, NEW.subconninfo, NEW.subslotname, NEW.subsynccommit,
     NEW.subpublications, NEW.subbinary, NEW.substream, NEW.subpasswordrequired, NEW.subrunasowner, NEW.suborigin,
     NEW.subconflictpolicy, NEW.subconflicthistory, NEW.subconflictrows, NEW.subapplysessions, NEW.subtrustedowners,
     NEW.subserver, NEW.subwalrcvtimeout, NEW.subretaindeadtuples, NEW.subonerror, NEW.subtrackranges,
     NEW.subsourcetag))
EXECUTE FUNCTION subscriber.next_generation();
ALTER TABLE subscriber.subscription ENABLE ALWAYS TRIGGER next_generation;
-- A running worker starts again, so that the consent applies to the publisher that the user knows.
CREATE TRIGGER accept_loss BEFORE UPDATE ON subscriber.subscription
FOR EACH ROW WHEN (NEW.subacceptloss AND NOT OLD.subacceptloss) EXECUTE FUNCTION subscriber.next_generation();
ALTER TABLE subscriber.subscription ENABLE ALWAYS TRIGGER accept_loss;

CREATE FUNCTION subscriber.check_generation(subscription oid, generation integer) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM FROM subscriber.subscription s WHERE s.subid = subscription AND s.subgeneration = generation;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'SB003', MESSAGE = 'the subscription has been altered';
    END IF;
END $$;
COMMENT ON FUNCTION subscriber.check_generation IS
    'Refuses the commit of a worker whose settings a statement has replaced (SB003). Called with advance() and '
    'set_origin(), in the same statement. Callers: duty apply.';


-- 3. Tables of subscriptions, and their copies ------------------------------------------------------------------------
--
-- A table of a subscription is its OID while that exists. PostgreSQL removes the row of a table with the table. Here
-- the row stays: a table with the stored name can take its place. A row follows its name only for the names that arrive
-- from the publisher. If the publisher has renamed its table too, no change arrives under the former name.
--
-- The states of a table are those of PostgreSQL: i init, d data is being copied, f finished copy, s synchronized, r
-- ready.
--
-- copied_range belongs to copy_engine = ranges: each range of keys has a snapshot of its own. A row is written in the
-- transaction that writes the rows of its range.

CREATE UNLOGGED TABLE subscriber.subscription_rel (
    srsubid oid REFERENCES subscriber.subscription ON DELETE CASCADE,
    srrelid oid,
    srnspname name,
    srrelname name,
    srsubstate "char" NOT NULL CHECK (srsubstate IN ('i', 'd', 'f', 's', 'r')),
    srsublsn pg_lsn,
    srsource text[] CHECK (array_position(srsource, NULL) IS NULL AND cardinality(srsource) = 2),
    srcopy text NOT NULL DEFAULT 'copy' CHECK (srcopy IN ('copy', 'compare', 'delete_extra', 'truncate')),
    srforeignkeys boolean NOT NULL DEFAULT false,
    srmemberships text,
    srmissedlsn pg_lsn,
    srmisseduntil pg_lsn,
    srmissedat timestamptz CHECK (srmissedat BETWEEN '2000-01-01 00:00+00' AND '9999-01-01 00:00+00'),
    srdifferentlsn pg_lsn,
    srextra bigint NOT NULL DEFAULT 0,
    srformer oid,
    kept oid NOT NULL UNIQUE DEFAULT subscriber.new_record(),
    PRIMARY KEY (srsubid, srrelid),
    CHECK ((srmissedlsn IS NULL) = (srmissedat IS NULL))
);
COMMENT ON TABLE subscriber.subscription_rel IS
    'The tables of each subscription, and how far their copies are. Duty owner reads and writes it.';
COMMENT ON COLUMN subscriber.subscription_rel.srsubid IS 'the subscription';
COMMENT ON COLUMN subscriber.subscription_rel.srrelid IS 'the table on the target';
COMMENT ON COLUMN subscriber.subscription_rel.srnspname IS
    'the schema of the table, because a restored dump has other OIDs; written by a trigger';
COMMENT ON COLUMN subscriber.subscription_rel.srrelname IS 'the name of the table';
COMMENT ON COLUMN subscriber.subscription_rel.srsubstate IS
    'the state: i init, d data is being copied, f finished copy, s synchronized, r ready';
COMMENT ON COLUMN subscriber.subscription_rel.srsublsn IS
    'the position of the publisher at which the table has reached the state; NULL: not known yet';
COMMENT ON COLUMN subscriber.subscription_rel.srsource IS
    'schema and name on the publisher, where hooks change the rows; NULL: the same names, and no hooks';
COMMENT ON COLUMN subscriber.subscription_rel.srcopy IS
    'the way to synchronize the rows, until state f: copy; compare, and delete_extra, repair the rows that differ; '
    'truncate empties the table and copies it';
COMMENT ON COLUMN subscriber.subscription_rel.srforeignkeys IS
    'the foreign keys of the publisher are to be added when the table is ready';
COMMENT ON COLUMN subscriber.subscription_rel.srmemberships IS
    'the system identifier of the publisher, and the entries of its publications with the table, as last seen; NULL: '
    'not seen yet';
COMMENT ON COLUMN subscriber.subscription_rel.srmissedlsn IS
    'the position since which changes may be missing, because the table was not published; NULL: it always was';
COMMENT ON COLUMN subscriber.subscription_rel.srmisseduntil IS
    'the position at which it was seen published again; NULL: it is not';
COMMENT ON COLUMN subscriber.subscription_rel.srmissedat IS 'the time at which the launcher has noticed it';
COMMENT ON COLUMN subscriber.subscription_rel.srdifferentlsn IS
    'the position of the last comparison, which has found differences; NULL: it has found none, or there was none';
COMMENT ON COLUMN subscriber.subscription_rel.srextra IS
    'rows that the publisher did not have when a repair or a synchronization compared the table, and that were kept: '
    'they may belong to another subscription or to an application';
COMMENT ON COLUMN subscriber.subscription_rel.srformer IS
    'the table that had the name before, if it still exists; its changes are an error until a refresh';
COMMENT ON COLUMN subscriber.subscription_rel.kept IS 'the large object with this row';
ALTER TABLE subscriber.subscription_rel ENABLE ROW LEVEL SECURITY;
CREATE POLICY follow ON subscriber.subscription_rel
USING (EXISTS (SELECT FROM subscriber.subscription s WHERE s.subid = subscription_rel.srsubid));
CREATE TRIGGER keep AFTER INSERT OR UPDATE OR DELETE ON subscriber.subscription_rel
FOR EACH ROW EXECUTE FUNCTION subscriber.keep();
ALTER TABLE subscriber.subscription_rel ENABLE ALWAYS TRIGGER keep;
CREATE TRIGGER notify_launcher AFTER INSERT OR UPDATE OR DELETE ON subscriber.subscription_rel
FOR EACH STATEMENT EXECUTE FUNCTION subscriber.notify_launcher();

CREATE UNLOGGED TABLE subscriber.copied_range (
    rangeid bigint PRIMARY KEY DEFAULT subscriber.new_id(),
    subid oid NOT NULL REFERENCES subscriber.subscription ON DELETE CASCADE,
    relid oid NOT NULL,
    key_columns text[] NOT NULL,
    key_types oid[] NOT NULL,
    key_comparisons text[] NOT NULL,
    low text[],
    high text[],
    single boolean NOT NULL DEFAULT false,
    snapshot text,
    lsn pg_lsn,
    timeline bigint NOT NULL,
    kept oid NOT NULL UNIQUE DEFAULT subscriber.new_record_of_many()
);
COMMENT ON TABLE subscriber.copied_range IS
    'Ranges of tables that are being copied with copy_engine = ranges. Duty owner reads and writes it.';
COMMENT ON COLUMN subscriber.copied_range.rangeid IS 'a number, by time';
COMMENT ON COLUMN subscriber.copied_range.subid IS 'the subscription';
COMMENT ON COLUMN subscriber.copied_range.relid IS 'the table on the target';
COMMENT ON COLUMN subscriber.copied_range.key_columns IS 'the columns of the key';
COMMENT ON COLUMN subscriber.copied_range.key_types IS 'their types';
COMMENT ON COLUMN subscriber.copied_range.key_comparisons IS
    'for each column that only the publisher can compare, its type and collation there; NULL: the target can, too';
COMMENT ON COLUMN subscriber.copied_range.low IS 'the lowest key; NULL: no limit';
COMMENT ON COLUMN subscriber.copied_range.high IS 'the first key behind the range; NULL: no limit';
COMMENT ON COLUMN subscriber.copied_range.single IS 'the range is the key `low` alone';
COMMENT ON COLUMN subscriber.copied_range.snapshot IS
    'the snapshot of the publisher that has the rows; NULL: the key is to be read again';
COMMENT ON COLUMN subscriber.copied_range.lsn IS
    'a WAL position behind all transactions that the snapshot sees; NULL: as for snapshot';
COMMENT ON COLUMN subscriber.copied_range.timeline IS 'the timeline of the publisher';
COMMENT ON COLUMN subscriber.copied_range.kept IS 'the large object with this row';
CREATE INDEX copied_range_subid_relid_idx ON subscriber.copied_range (subid, relid);
ALTER TABLE subscriber.copied_range ENABLE ROW LEVEL SECURITY;
CREATE POLICY follow ON subscriber.copied_range
USING (EXISTS (SELECT FROM subscriber.subscription s WHERE s.subid = copied_range.subid));
CREATE TRIGGER keep AFTER INSERT OR UPDATE OR DELETE ON subscriber.copied_range
FOR EACH ROW EXECUTE FUNCTION subscriber.keep();
ALTER TABLE subscriber.copied_range ENABLE ALWAYS TRIGGER keep;

CREATE FUNCTION subscriber.name_relation() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    SELECT n.nspname, c.relname INTO NEW.srnspname, NEW.srrelname
      FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = NEW.srrelid;
    RETURN NEW;
END $$;
COMMENT ON FUNCTION subscriber.name_relation IS
    'Stores schema and name of the table. Callers: the trigger of the same name.';

CREATE TRIGGER name_relation BEFORE INSERT ON subscriber.subscription_rel
FOR EACH ROW WHEN (NEW.srrelname IS NULL) EXECUTE FUNCTION subscriber.name_relation();
ALTER TABLE subscriber.subscription_rel ENABLE ALWAYS TRIGGER name_relation;

CREATE FUNCTION subscriber.forget_missed() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    NEW.srmemberships := NULL;
    NEW.srmissedlsn := NULL;
    NEW.srmisseduntil := NULL;
    NEW.srmissedat := NULL;
    NEW.srdifferentlsn := NULL;
    RETURN NEW;
END $$;
COMMENT ON FUNCTION subscriber.forget_missed IS
    'Forgets missing changes and differences of a table that is synchronized again: it lacks nothing then. Callers: '
    'the trigger of the same name.';

CREATE TRIGGER forget_missed BEFORE UPDATE ON subscriber.subscription_rel
FOR EACH ROW WHEN (NEW.srsubstate = 'i' AND OLD.srsubstate <> 'i') EXECUTE FUNCTION subscriber.forget_missed();
ALTER TABLE subscriber.subscription_rel ENABLE ALWAYS TRIGGER forget_missed;

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
    DELETE FROM subscriber.verification v WHERE v.subid = subscription;
    UPDATE subscriber.copied_range r SET relid = o.new FROM unnest(olds, news) AS o (old, new)
     WHERE r.subid = subscription AND r.relid = o.old;
END $$;
COMMENT ON FUNCTION subscriber.renumber IS
    'Gives rows of subscription_rel other OIDs, in one statement, because tables may have exchanged their names. '
    'Ranges follow, and the last comparison is forgotten. Callers: duty owner.';

CREATE FUNCTION subscriber.copy_has_begun(subscription oid, relation oid) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT EXISTS (SELECT FROM subscriber.subscription_rel r
                    WHERE (r.srsubid, r.srrelid, r.srsubstate) = (subscription, relation, 'f'))
        OR EXISTS (SELECT FROM subscriber.subscription_rel r JOIN subscriber.copied_range c
                            ON (c.subid, c.relid) = (r.srsubid, r.srrelid)
                    WHERE (r.srsubid, r.srrelid, r.srsubstate) = (subscription, relation, 'd'))
$$;
COMMENT ON FUNCTION subscriber.copy_has_begun IS
    'Returns true if a copy has committed a part of the table. Such a row follows no name: its rows are in the old '
    'table. Callers: duty owner.';

CREATE FUNCTION subscriber.follow_names(subscription oid, schemas text[], names text[])
RETURNS TABLE (nspname name, relname name)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    olds oid[];
    news oid[];
    fewer oid[];
BEGIN
    -- Tables of the subscription have exchanged their names.
    UPDATE subscriber.subscription_rel r SET srnspname = n.nspname, srrelname = c.relname
      FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
     WHERE r.srsubid = subscription AND c.oid = r.srrelid
       AND (r.srnspname, r.srrelname) IS DISTINCT FROM (n.nspname, c.relname)
       AND (EXISTS (SELECT FROM subscriber.subscription_rel o JOIN pg_catalog.pg_class oc ON oc.oid = o.srrelid
                      JOIN pg_catalog.pg_namespace m ON m.oid = oc.relnamespace
                     WHERE o.srsubid = subscription AND (m.nspname, oc.relname) = (r.srnspname, r.srrelname))
            OR EXISTS (SELECT FROM subscriber.subscription_rel o
                        WHERE o.srsubid = subscription AND (o.srnspname, o.srrelname) = (n.nspname, c.relname)));
    SELECT pg_catalog.array_agg(r.srrelid ORDER BY r.srrelid), pg_catalog.array_agg(named.oid ORDER BY r.srrelid)
      INTO olds, news
      FROM subscriber.subscription_rel r JOIN
           (pg_catalog.pg_namespace n JOIN pg_catalog.pg_class named
            ON named.relnamespace = n.oid AND named.relkind IN ('r', 'p'))
           ON n.nspname = r.srnspname AND named.relname = r.srrelname
     WHERE r.srsubid = subscription AND named.oid <> r.srrelid
       AND (r.srnspname::text, r.srrelname::text) IN (SELECT * FROM ROWS FROM (unnest(schemas), unnest(names)))
       AND (r.srsubstate IN ('i', 'd') OR EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.oid = r.srrelid))
       AND NOT subscriber.copy_has_begun(subscription, r.srrelid);
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
        UPDATE subscriber.subscription_rel r SET srformer = o.old FROM unnest(olds, news) AS o (old, new)
         WHERE r.srsubid = subscription AND r.srrelid = o.new
           AND EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.oid = o.old);
    END IF;
    RETURN QUERY SELECT r.srnspname, r.srrelname FROM subscriber.subscription_rel r
                  WHERE r.srsubid = subscription AND r.srrelid = ANY (news);
END $$;
COMMENT ON FUNCTION subscriber.follow_names IS
    'Gives rows of subscription_rel the OIDs of the tables that have their stored names now. `schemas` and `names` are '
    'the names that arrive from the publisher, and only these rows follow. Returns the names of the rows that have '
    'followed. Callers: duty owner.';

CREATE FUNCTION subscriber.remove_relation(subscription oid, relation oid,
                                           caller subscriber.caller DEFAULT CURRENT_USER)
RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    state text;
BEGIN
    PERFORM subscriber.check_manager(subscription, caller);
    UPDATE subscriber.subscription s SET subgeneration = (s.subgeneration + 1) % 2147483647
     WHERE s.subid = subscription;
    DELETE FROM subscriber.copied_range r WHERE (r.subid, r.relid) = (subscription, relation);
    DELETE FROM subscriber.subscription_rel r WHERE (r.srsubid, r.srrelid) = (subscription, relation)
    RETURNING r.srsubstate::text INTO state;
    RETURN state;
END $$;
COMMENT ON FUNCTION subscriber.remove_relation IS
    'Removes the table from the subscription, and changes its generation, so that a worker commits nothing that it has '
    'applied to the table before. Returns the state of the table; NULL: it was not part of the subscription. Callers: '
    'duty owner.';

CREATE FUNCTION subscriber.synchronize_again(subscription oid, relation oid, how text,
                                             caller subscriber.caller DEFAULT CURRENT_USER)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM subscriber.check_manager(subscription, caller);
    UPDATE subscriber.subscription s SET subgeneration = (s.subgeneration + 1) % 2147483647
     WHERE s.subid = subscription;
    DELETE FROM subscriber.copied_range r WHERE (r.subid, r.relid) = (subscription, relation);
    UPDATE subscriber.subscription_rel r SET srsubstate = 'i', srsublsn = NULL, srcopy = how, srextra = 0
     WHERE (r.srsubid, r.srrelid) = (subscription, relation);
END $$;
COMMENT ON FUNCTION subscriber.synchronize_again IS
    'Makes the worker synchronize the table again, in the way `how` (see srcopy). Workers commit nothing with the '
    'state that the table had: they have the earlier generation. Callers: duty owner.';

CREATE FUNCTION subscriber.note_emptied(progress oid, fence bytea) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    worker record;
BEGIN
    worker := subscriber.check_fence(progress, fence);
    UPDATE subscriber.subscription_rel r SET srcopy = 'copy'
     WHERE (r.srsubid, r.srrelid) = (worker.subid, worker.relid);
END $$;
COMMENT ON FUNCTION subscriber.note_emptied IS
    'The session that copies a table has emptied it: a kill of the copy does not empty it again. Callers: duty apply.';

CREATE FUNCTION subscriber.finish_copy(progress oid, fence bytea, reached pg_lsn) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    worker record;
BEGIN
    worker := subscriber.check_fence(progress, fence);
    PERFORM pg_catalog.lo_put(progress, 12, pg_catalog.pg_lsn_send(reached));
    UPDATE subscriber.subscription_rel r SET srsubstate = 'f', srsublsn = reached
     WHERE (r.srsubid, r.srrelid) = (worker.subid, worker.relid);
END $$;
COMMENT ON FUNCTION subscriber.finish_copy IS
    'Sets the table of the worker to state f, and its progress to the position of the copy. Callers: duty apply.';

CREATE FUNCTION subscriber.other_writers(subscription oid, caller subscriber.caller DEFAULT CURRENT_USER)
RETURNS TABLE (relid oid, writer text, native boolean, sourcetag text, nspname text, relname text)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM subscriber.check_manager(subscription, caller);
    -- Services hide pg_subscription from the administrator, who owns the schema there. View pg_stat_subscription shows
    -- the names to all roles.
    RETURN QUERY
    WITH shared (own, other) AS (
        SELECT r.srrelid, r.srrelid FROM subscriber.subscription_rel r WHERE r.srsubid = subscription
        UNION
        SELECT r.srrelid, f.relid
          FROM subscriber.subscription_rel r JOIN pg_catalog.pg_class c ON c.oid = r.srrelid, LATERAL (
               SELECT a.relid::oid FROM pg_catalog.pg_partition_ancestors(r.srrelid) a
               UNION SELECT t.relid::oid FROM pg_catalog.pg_partition_tree(r.srrelid) t) f (relid)
         WHERE r.srsubid = subscription AND (c.relispartition OR c.relkind = 'p'))
    SELECT s.own, w.subname::text, false, w.subsourcetag, o.srnspname::text, o.srrelname::text
      FROM shared s
      JOIN subscriber.subscription_rel o ON o.srrelid = s.other AND o.srsubid <> subscription
      JOIN subscriber.subscription w ON w.subid = o.srsubid
    UNION ALL
    SELECT s.own, w.subname::text, true, '', n.nspname::text, c.relname::text
      FROM shared s
      JOIN pg_catalog.pg_subscription_rel o ON o.srrelid = s.other
      JOIN (SELECT DISTINCT v.subid, v.subname FROM pg_catalog.pg_stat_subscription v) w ON w.subid = o.srsubid
      JOIN pg_catalog.pg_class c ON c.oid = o.srrelid
      JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
     ORDER BY 1, 2;
END $$;
COMMENT ON FUNCTION subscriber.other_writers IS
    'Returns the subscriptions that write to the tables of a subscription as well, with the rows that belong to them, '
    'also if the caller may not see these subscriptions otherwise. A partition and the table that it belongs to have '
    'rows in common. `native`: a subscription of the server itself. Callers: duty owner.';

CREATE FUNCTION subscriber.record_range(progress oid, fence bytea, copied jsonb) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    worker record;
    result bigint;
BEGIN
    worker := subscriber.check_fence(progress, fence);
    PERFORM pg_catalog.lo_put(progress, 0, fence);
    DELETE FROM subscriber.copied_range r
     WHERE (r.subid, r.relid) = (worker.subid, worker.relid) AND r.rangeid = (copied ->> 'rangeid')::bigint;
    INSERT INTO subscriber.copied_range
           (subid, relid, key_columns, key_types, low, high, single, snapshot, lsn, timeline, key_comparisons)
    SELECT worker.subid, worker.relid,
           c.key_columns, c.key_types, c.low, c.high, c.single, c.snapshot, c.lsn, c.timeline, c.key_comparisons
      FROM pg_catalog.jsonb_populate_record(NULL::subscriber.copied_range, copied) c
    RETURNING rangeid INTO result;
    RETURN result;
END $$;
COMMENT ON FUNCTION subscriber.record_range IS
    'Inserts a row of copied_range, in place of the one whose rangeid the argument has. Returns its number. It also '
    'writes the fence to the progress record, so that a session that claims the record waits for this transaction, and '
    'then reads the row. Callers: duty apply.';


-- 4. Progress, claims and origins -------------------------------------------------------------------------------------
--
-- The progress of a worker is a large object. advance() moves its position in the transaction that applies the changes:
--
--          0  prg1
--          4  the fence: eight random bytes that only the current worker knows
--         12  the position, 8 bytes
--         20  the row of progress_record as JSON, with blanks up to 256 bytes
--     65,536  the position confirmed without a commit, 8 bytes; zeros: none. Each page of a large object is a row
--             of its own, so the sessions that write position and confirmation do not wait for each other
--
-- A worker claims the record: it writes a new fence. The session of an earlier worker shows the old fence, and cannot
-- commit. Functions with the arguments `progress` and `fence` are for sessions that apply changes. The fence proves for
-- which subscription they work, so they need no privilege on any table. `fence` is prg1 and the eight bytes.
--
-- Replication origins are those of PostgreSQL's own subscriptions: pg_OID for the apply worker, and pg_OID_NUMBER for a
-- table or a further session. Only a superuser may use them. In a schema of an ordinary role there are none.

CREATE UNLOGGED TABLE subscriber.progress_record (
    subid oid REFERENCES subscriber.subscription ON DELETE CASCADE,
    relid oid DEFAULT 0,
    record oid NOT NULL UNIQUE,
    PRIMARY KEY (subid, relid)
);
COMMENT ON TABLE subscriber.progress_record IS
    'The large objects that hold how far each worker is. View `progress` reads them. Duty owner reads it.';
COMMENT ON COLUMN subscriber.progress_record.subid IS 'the subscription';
COMMENT ON COLUMN subscriber.progress_record.relid IS '0: the apply worker; else the table that is synchronized';
COMMENT ON COLUMN subscriber.progress_record.record IS 'the large object';
ALTER TABLE subscriber.progress_record ENABLE ROW LEVEL SECURITY;
CREATE POLICY follow ON subscriber.progress_record
USING (EXISTS (SELECT FROM subscriber.subscription s WHERE s.subid = progress_record.subid));

CREATE FUNCTION subscriber.drop_progress_record() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM pg_catalog.lo_unlink(m.oid) FROM pg_catalog.pg_largeobject_metadata m WHERE m.oid = OLD.record;
    RETURN NULL;
END $$;
COMMENT ON FUNCTION subscriber.drop_progress_record IS
    'Removes the large object with its row. Callers: the trigger of the same name.';

CREATE TRIGGER drop_progress_record AFTER DELETE ON subscriber.progress_record
FOR EACH ROW EXECUTE FUNCTION subscriber.drop_progress_record();
ALTER TABLE subscriber.progress_record ENABLE ALWAYS TRIGGER drop_progress_record;

CREATE FUNCTION subscriber.to_lsn(bytes bytea) RETURNS pg_lsn
LANGUAGE sql IMMUTABLE STRICT SET search_path = pg_catalog, pg_temp AS $$
    SELECT (pg_catalog.encode(substring(bytes FROM 1 FOR 4), 'hex') || '/'
            || pg_catalog.encode(substring(bytes FROM 5 FOR 4), 'hex'))::pg_lsn
$$;
COMMENT ON FUNCTION subscriber.to_lsn IS
    'Converts eight bytes to a position. NULL: the argument is NULL. Callers: other functions.';

CREATE FUNCTION subscriber.read_position(record oid) RETURNS pg_lsn
LANGUAGE sql STABLE STRICT SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT subscriber.to_lsn(pg_catalog.lo_get(m.oid, 12, 8))
      FROM subscriber.progress_record p JOIN pg_catalog.pg_largeobject_metadata m ON m.oid = p.record
     WHERE p.record = $1
$$;
COMMENT ON FUNCTION subscriber.read_position IS
    'Returns the position of a progress record; NULL: there is no such record, or no large object. Callers: duty '
    'owner.';

CREATE FUNCTION subscriber.read_confirmed(record oid) RETURNS pg_lsn
LANGUAGE sql STABLE STRICT SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT nullif(subscriber.to_lsn(pg_catalog.lo_get(m.oid, 65536, 8)), '0/0')
      FROM subscriber.progress_record p JOIN pg_catalog.pg_largeobject_metadata m ON m.oid = p.record
     WHERE p.record = $1
$$;
COMMENT ON FUNCTION subscriber.read_confirmed IS
    'Returns the confirmed position of a progress record; NULL: none, or there is no such record or no large object. '
    'Callers: duty owner.';

CREATE VIEW subscriber.progress AS
SELECT p.subid, p.relid, subscriber.read_position(p.record) AS remote_lsn,
       CASE WHEN p.relid = 0 THEN s.subsystemid END AS system_id,
       CASE WHEN p.relid = 0 THEN subscriber.read_confirmed(p.record) END AS confirmed_lsn
  FROM subscriber.progress_record p JOIN subscriber.subscription s USING (subid)
 WHERE subscriber.may_become(CURRENT_USER, s.subowner);
COMMENT ON VIEW subscriber.progress IS 'The progress of each worker. Duty owner reads it.';
COMMENT ON COLUMN subscriber.progress.subid IS 'the subscription';
COMMENT ON COLUMN subscriber.progress.relid IS '0: the apply worker; else the table that is synchronized';
COMMENT ON COLUMN subscriber.progress.remote_lsn IS 'the position of the last applied commit; a worker resumes there';
COMMENT ON COLUMN subscriber.progress.system_id IS
    'the system identifier of the publisher; NULL: not known, or of a table';
COMMENT ON COLUMN subscriber.progress.confirmed_lsn IS
    'the position that is confirmed to the publisher without a commit; NULL: none, or of a table';

CREATE FUNCTION subscriber.set_progress(subscription oid, relation oid, reached pg_lsn,
                                        caller subscriber.caller DEFAULT CURRENT_USER)
RETURNS oid
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    found oid;
    header bytea;
BEGIN
    PERFORM subscriber.check_manager(subscription, caller);
    SELECT p.record INTO found FROM subscriber.progress_record p
     WHERE (p.subid, p.relid) = (subscription, relation);
    IF found IS NOT NULL THEN
        PERFORM pg_catalog.lo_put(found, 12, pg_catalog.pg_lsn_send(reached));
        RETURN found;
    END IF;
    found := subscriber.new_record();
    header := subscriber.as_record('progress_record', pg_catalog.jsonb_build_object(
        'subid', subscription::bigint, 'relid', relation::bigint, 'record', found::bigint));
    PERFORM pg_catalog.lo_from_bytea(found, 'prg1'::bytea || '\x0000000000000000'::bytea
        || pg_catalog.pg_lsn_send(reached) || header
        || pg_catalog.convert_to(repeat(' ', 256 - octet_length(header)),
                                 CASE WHEN pg_catalog.getdatabaseencoding() IN ('SQL_ASCII', 'MULE_INTERNAL')
                                      THEN pg_catalog.getdatabaseencoding() ELSE 'UTF8' END));
    PERFORM pg_catalog.lo_put(found, 65536, '\x0000000000000000'::bytea);
    INSERT INTO subscriber.progress_record (subid, relid, record) VALUES (subscription, relation, found);
    RETURN found;
END $$;
COMMENT ON FUNCTION subscriber.set_progress IS
    'Sets the position of a worker, and creates its record if there is none. Returns the number of the record. '
    'Callers: duty owner.';

CREATE FUNCTION subscriber.remove_progress(subscription oid, relation oid,
                                           caller subscriber.caller DEFAULT CURRENT_USER)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM subscriber.check_manager(subscription, caller);
    DELETE FROM subscriber.progress_record p WHERE (p.subid, p.relid) = (subscription, relation);
END $$;
COMMENT ON FUNCTION subscriber.remove_progress IS 'Removes the record of a worker. Callers: duty owner.';

CREATE FUNCTION subscriber.set_confirmed(subscription oid, reached pg_lsn,
                                         caller subscriber.caller DEFAULT CURRENT_USER)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    found oid;
BEGIN
    PERFORM subscriber.check_manager(subscription, caller);
    -- A restored dump without large objects has none.
    SELECT p.record INTO found
      FROM subscriber.progress_record p JOIN pg_catalog.pg_largeobject_metadata m ON m.oid = p.record
     WHERE (p.subid, p.relid) = (subscription, 0);
    IF found IS NOT NULL
       AND (reached IS NULL OR reached > coalesce(subscriber.read_confirmed(found), '0/0')) THEN
        PERFORM pg_catalog.lo_put(found, 65536, pg_catalog.pg_lsn_send(coalesce(reached, '0/0')));
    END IF;
END $$;
COMMENT ON FUNCTION subscriber.set_confirmed IS
    'Raises the confirmed position of the apply worker; NULL removes it. Callers: duty owner.';

CREATE FUNCTION subscriber.claim_progress(subscription oid, relation oid, OUT record oid, OUT fence bytea,
                                          OUT reached pg_lsn, OUT confirmed pg_lsn,
                                          caller subscriber.caller DEFAULT CURRENT_USER)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '10s' AS $$
BEGIN
    PERFORM subscriber.check_manager(subscription, caller);
    SELECT p.record INTO record FROM subscriber.progress_record p
     WHERE (p.subid, p.relid) = (subscription, relation);
    IF record IS NULL THEN
        RETURN;
    END IF;
    fence := 'prg1'::bytea || substring(pg_catalog.uuid_send(pg_catalog.gen_random_uuid()) FOR 8);
    BEGIN
        PERFORM pg_catalog.lo_put(record, 0, fence);
    EXCEPTION WHEN internal_error THEN  -- tuple concurrently updated
        RAISE EXCEPTION USING ERRCODE = 'serialization_failure',
            MESSAGE = 'another session has moved the progress of this subscription';
    END;
    reached := subscriber.read_position(record);
    confirmed := subscriber.read_confirmed(record);
END $$;
COMMENT ON FUNCTION subscriber.claim_progress IS
    'Sets a new fence: the earlier worker cannot commit any more. Waits for a commit that moves the position, and then '
    'fails (40001), so that the next attempt reads the new position. Returns the record, its fence and both positions; '
    'record NULL: there is none. Callers: duty launcher.';

CREATE FUNCTION subscriber.check_fence(progress oid, fence bytea, OUT subid oid, OUT relid oid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    head bytea := (SELECT pg_catalog.lo_get(m.oid, 0, 276)
                     FROM pg_catalog.pg_largeobject_metadata m WHERE m.oid = progress);
    worker jsonb;
BEGIN
    IF octet_length(fence) IS DISTINCT FROM 12 OR substring(head FROM 1 FOR 12) IS DISTINCT FROM fence THEN
        RAISE EXCEPTION USING ERRCODE = 'SB002',
            MESSAGE = 'another session has moved the progress of this subscription';
    END IF;
    worker := pg_catalog.convert_from(
                  substring(head FROM 21),
                  CASE WHEN pg_catalog.getdatabaseencoding() IN ('SQL_ASCII', 'MULE_INTERNAL')
                       THEN pg_catalog.getdatabaseencoding() ELSE 'UTF8' END)::jsonb -> 'row';
    subid := (worker ->> 'subid')::oid;
    relid := (worker ->> 'relid')::oid;
END $$;
COMMENT ON FUNCTION subscriber.check_fence IS
    'Returns subscription and table of the worker whose progress record has the fence, and refuses any other fence '
    '(SB002). Callers: other functions.';

CREATE FUNCTION subscriber.advance(progress oid, fence bytea, before pg_lsn, after pg_lsn, committed timestamptz,
                                   with_origin boolean)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF octet_length(fence) IS DISTINCT FROM 12
       OR (SELECT pg_catalog.lo_get(m.oid, 0, 20) FROM pg_catalog.pg_largeobject_metadata m WHERE m.oid = progress)
          IS DISTINCT FROM fence || pg_catalog.pg_lsn_send(before) THEN
        RAISE EXCEPTION USING ERRCODE = 'SB002',
            MESSAGE = 'another session has moved the progress of this subscription';
    END IF;
    PERFORM pg_catalog.lo_put(progress, 12, pg_catalog.pg_lsn_send(after));
    IF with_origin THEN
        PERFORM pg_catalog.pg_replication_origin_xact_setup(after, committed);
    END IF;
END $$;
COMMENT ON FUNCTION subscriber.advance IS
    'Moves the position of a worker from `before` to `after`. Called at the end of each transaction. If two sessions '
    'move the same position, lo_put() fails in the second one. `with_origin`: also sets the origin''s position in the '
    'commit. Callers: duty apply.';

CREATE FUNCTION subscriber.become_replica() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM pg_catalog.set_config('session_replication_role', 'replica', false);
END $$;
COMMENT ON FUNCTION subscriber.become_replica IS
    'Sets session_replication_role = replica for the session. Callers: duty apply.';

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
END $$;
COMMENT ON FUNCTION subscriber.check_origin_owner IS
    'Refuses a name that is not one of a subscription''s origins (42939), and a caller that may not manage the '
    'subscription (42501). Callers: other functions.';

CREATE FUNCTION subscriber.make_origin(name text) RETURNS oid
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    origin oid;
BEGIN
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
END $$;
COMMENT ON FUNCTION subscriber.make_origin IS
    'Creates an origin if there is none, and returns its number. pg_replication_origin_create() refuses names that '
    'begin with "pg_", so the origin is renamed. Of two concurrent callers, the second one fails on the unique index '
    'of the server''s catalog, and finds the origin. It checks no caller. Callers: other functions.';

CREATE FUNCTION subscriber.create_origin(name text, caller subscriber.caller DEFAULT CURRENT_USER) RETURNS oid
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM subscriber.check_origin_owner(name, caller);
    IF NOT (SELECT r.rolsuper FROM pg_catalog.pg_roles r WHERE r.rolname = current_user) THEN
        RETURN NULL;
    END IF;
    RETURN subscriber.make_origin(name);
END $$;
COMMENT ON FUNCTION subscriber.create_origin IS
    'Creates an origin of a subscription if there is none. Returns its number; NULL: the schema belongs to an ordinary '
    'role, so there are no origins. Callers: duty owner.';

CREATE FUNCTION subscriber.drop_origin(name text, caller subscriber.caller DEFAULT CURRENT_USER) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    attempts int := 0;
BEGIN
    PERFORM subscriber.check_origin_owner(name, caller);
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
END $$;
COMMENT ON FUNCTION subscriber.drop_origin IS
    'Drops an origin of a subscription, and returns false if there was none. A session that has just ended may use its '
    'origin a moment longer, so this tries for five seconds. Callers: duty owner.';

CREATE FUNCTION subscriber.origin_progress(name text, caller subscriber.caller DEFAULT CURRENT_USER) RETURNS pg_lsn
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM subscriber.check_origin_owner(name, caller);
    IF EXISTS (SELECT FROM pg_catalog.pg_replication_origin o WHERE o.roname = name) THEN
        RETURN pg_catalog.pg_replication_origin_progress(name, false);
    END IF;
    RETURN NULL;
END $$;
COMMENT ON FUNCTION subscriber.origin_progress IS
    'Returns the position of a subscription''s origin, for owners that may not call pg_replication_origin_progress(). '
    'NULL: there is no such origin, or it has no position. Callers: duty owner.';

CREATE FUNCTION subscriber.bind_origin(progress oid, fence bytea, number oid) RETURNS oid
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    worker record := subscriber.check_fence(progress, fence);
    suffix oid := CASE WHEN number = 0 THEN worker.relid ELSE number END;
    name text := 'pg_' || worker.subid || CASE WHEN suffix = 0 THEN '' ELSE '_' || suffix END;
    reached pg_lsn := subscriber.read_position(progress);
    origin oid := subscriber.make_origin(name);
BEGIN
    IF pg_catalog.pg_replication_origin_progress(name, false) IS DISTINCT FROM nullif(reached, '0/0') THEN
        PERFORM pg_catalog.pg_replication_origin_advance(name, reached);
    END IF;
    PERFORM pg_catalog.pg_replication_origin_session_setup(name);
    RETURN origin;
END $$;
COMMENT ON FUNCTION subscriber.bind_origin IS
    'Makes the session use the origin of its worker, at the position of the progress record, and returns its number. '
    '`number`: that of a further session of an apply worker, which has an origin of its own; 0: the worker''s own. '
    'Callers: duty apply.';

CREATE FUNCTION subscriber.release_origin() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM pg_catalog.pg_replication_origin_session_reset();
END $$;
COMMENT ON FUNCTION subscriber.release_origin IS 'Makes the session use no origin. Callers: duty apply.';

CREATE FUNCTION subscriber.set_origin(progress oid, fence bytea, lsn pg_lsn, committed timestamptz) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM subscriber.check_fence(progress, fence);
    PERFORM pg_catalog.pg_replication_origin_xact_setup(lsn, committed);
END $$;
COMMENT ON FUNCTION subscriber.set_origin IS
    'Sets the position and the time that the next commit stores for the origin. Callers: duty apply.';

CREATE FUNCTION subscriber.raise_error(sqlstate text, message text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = sqlstate, MESSAGE = message;
END $$;
COMMENT ON FUNCTION subscriber.raise_error IS
    'Raises an error with this SQLSTATE and message. Statements of workers call it inside CASE: an expression that '
    'fails when it is evaluated. Callers: duty apply.';


-- 5. Workers, sessions and the launcher -------------------------------------------------------------------------------
--
-- Every role can hold an advisory lock, and could stop replication with it. So a session that works for a subscription
-- has a row here, which only functions write. A row counts as long as its backend lives. All these tables are empty
-- after a crash, when all backends are gone.
--
-- Functions end the sessions of these tables. So a session is in them only by its own statement: a role that registers
-- the sessions of others could end any session of the server. A session of a worker registers itself for one
-- subscription, and the launcher gives it a place there.
--
-- At most one session has a place, which is (subid, relid) of `session`. catalog/worker_sessions.py has the numbers.

CREATE UNLOGGED TABLE subscriber.worker (
    subid oid REFERENCES subscriber.subscription ON DELETE CASCADE,
    relid oid DEFAULT 0,
    worker_type text NOT NULL,
    pid integer,
    leader_pid integer,
    state text NOT NULL,
    started timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    received_lsn pg_lsn,
    last_msg_send_time timestamptz,
    last_msg_receipt_time timestamptz,
    latest_end_lsn pg_lsn,
    latest_end_time timestamptz,
    error text,
    error_time timestamptz,
    error_hint text,
    error_remedy jsonb,
    error_sqlstate text,
    error_is_transient boolean,
    next_retry timestamptz,
    transactions bigint NOT NULL DEFAULT 0,
    changes bigint NOT NULL DEFAULT 0,
    bytes bigint NOT NULL DEFAULT 0,
    copy_rows bigint NOT NULL DEFAULT 0,
    copy_bytes bigint NOT NULL DEFAULT 0,
    copy_total_bytes bigint NOT NULL DEFAULT 0,
    waiting_for text,
    streamed jsonb NOT NULL DEFAULT '[]',
    limits text[],
    one_by_one jsonb NOT NULL DEFAULT '{}',
    format text,
    format_reason text,
    PRIMARY KEY (subid, relid)
) WITH (fillfactor = 50);
COMMENT ON TABLE subscriber.worker IS
    'The report of each worker, once a second. Duty owner reads it, and duty launcher writes it.';
COMMENT ON COLUMN subscriber.worker.subid IS 'the subscription';
COMMENT ON COLUMN subscriber.worker.relid IS
    '0: the apply worker; else the table, or below 16384 the number of a parallel worker';
COMMENT ON COLUMN subscriber.worker.worker_type IS 'apply, parallel apply, or table synchronization';
COMMENT ON COLUMN subscriber.worker.pid IS 'the backend on the target; NULL: there is no connection';
COMMENT ON COLUMN subscriber.worker.leader_pid IS
    'of a parallel apply worker: the pid of the apply worker; NULL: of other workers';
COMMENT ON COLUMN subscriber.worker.state IS 'the state, in the words of `subscriber status`';
COMMENT ON COLUMN subscriber.worker.started IS 'the time at which it started';
COMMENT ON COLUMN subscriber.worker.updated_at IS 'the time at which this row was written';
COMMENT ON COLUMN subscriber.worker.received_lsn IS 'the position received so far; NULL: nothing yet';
COMMENT ON COLUMN subscriber.worker.last_msg_send_time IS
    'the time at which the publisher sent the last message, by its clock; NULL: none yet';
COMMENT ON COLUMN subscriber.worker.last_msg_receipt_time IS 'the time at which it came; NULL: none yet';
COMMENT ON COLUMN subscriber.worker.latest_end_lsn IS 'the last position confirmed to the publisher; NULL: none yet';
COMMENT ON COLUMN subscriber.worker.latest_end_time IS
    'the time at which the publisher sent that position, by its clock; lag is measured from it; NULL: none yet';
COMMENT ON COLUMN subscriber.worker.error IS 'the last error; NULL: changes have flowed since';
COMMENT ON COLUMN subscriber.worker.error_time IS 'the time of the error';
COMMENT ON COLUMN subscriber.worker.error_hint IS 'the advice about the error';
COMMENT ON COLUMN subscriber.worker.error_remedy IS 'the advice as fields: advice, command, then, alternative';
COMMENT ON COLUMN subscriber.worker.error_sqlstate IS 'the SQLSTATE of the error';
COMMENT ON COLUMN subscriber.worker.error_is_transient IS 'a retry alone can solve it';
COMMENT ON COLUMN subscriber.worker.next_retry IS
    'the time of the next attempt; NULL: the worker works, or has stopped';
COMMENT ON COLUMN subscriber.worker.transactions IS 'transactions applied since the start';
COMMENT ON COLUMN subscriber.worker.changes IS 'changes applied since the start';
COMMENT ON COLUMN subscriber.worker.bytes IS 'bytes received since the start';
COMMENT ON COLUMN subscriber.worker.copy_rows IS 'rows copied';
COMMENT ON COLUMN subscriber.worker.copy_bytes IS 'bytes copied';
COMMENT ON COLUMN subscriber.worker.copy_total_bytes IS
    'an estimate of the bytes to copy: those on the publisher''s disk';
COMMENT ON COLUMN subscriber.worker.waiting_for IS
    'the sessions that its backend has been waiting for, for a second or more; NULL: none';
COMMENT ON COLUMN subscriber.worker.streamed IS
    'the transactions that have not ended yet: a list of objects with xid, changes, bytes, since, worker';
COMMENT ON COLUMN subscriber.worker.limits IS 'rights and functions that this target lacks; NULL: none';
COMMENT ON COLUMN subscriber.worker.one_by_one IS
    'the numbers of changes that were not applied as part of a batch, by the reason';
COMMENT ON COLUMN subscriber.worker.format IS
    'the format in which the apply worker receives values, binary or text; NULL: not known yet';
COMMENT ON COLUMN subscriber.worker.format_reason IS
    'the reason for text, where the subscription does not say binary; NULL: there is none';
ALTER TABLE subscriber.worker ENABLE ROW LEVEL SECURITY;
CREATE POLICY follow ON subscriber.worker
USING (EXISTS (SELECT FROM subscriber.subscription s WHERE s.subid = worker.subid));

CREATE UNLOGGED TABLE subscriber.session (
    subid oid REFERENCES subscriber.subscription ON DELETE CASCADE,
    relid oid,
    pid integer NOT NULL,
    backend_start timestamptz NOT NULL,
    role oid NOT NULL,
    PRIMARY KEY (subid, relid)
);
COMMENT ON TABLE subscriber.session IS
    'The sessions that work for each subscription. One whose backend has ended does not count. Duty owner reads it.';
COMMENT ON COLUMN subscriber.session.subid IS 'the subscription';
COMMENT ON COLUMN subscriber.session.relid IS
    'the place of the session: 0 is the apply worker, see catalog/worker_sessions.py';
COMMENT ON COLUMN subscriber.session.pid IS 'the backend';
COMMENT ON COLUMN subscriber.session.backend_start IS 'the time at which the backend began';
COMMENT ON COLUMN subscriber.session.role IS 'the role that logged in';
ALTER TABLE subscriber.session ENABLE ROW LEVEL SECURITY;
CREATE POLICY follow ON subscriber.session
USING (EXISTS (SELECT FROM subscriber.subscription s WHERE s.subid = session.subid));

CREATE UNLOGGED TABLE subscriber.launcher (
    leads boolean PRIMARY KEY DEFAULT true CHECK (leads),
    instance text NOT NULL,
    pid integer NOT NULL,
    backend_start timestamptz NOT NULL,
    role oid NOT NULL,
    renewed timestamptz NOT NULL
);
COMMENT ON TABLE subscriber.launcher IS 'The launcher that leads. Duty owner reads it.';
COMMENT ON COLUMN subscriber.launcher.leads IS 'always true: there is one row';
COMMENT ON COLUMN subscriber.launcher.instance IS 'the process: host, process ID and a random part';
COMMENT ON COLUMN subscriber.launcher.pid IS 'its backend';
COMMENT ON COLUMN subscriber.launcher.backend_start IS 'the time at which the backend began';
COMMENT ON COLUMN subscriber.launcher.role IS 'the role that logged in';
COMMENT ON COLUMN subscriber.launcher.renewed IS 'the time at which it has renewed its lease';

CREATE UNLOGGED TABLE subscriber.own_session (
    pid integer PRIMARY KEY,
    backend_start timestamptz NOT NULL,
    role oid NOT NULL,
    subid oid
);
COMMENT ON TABLE subscriber.own_session IS
    'Sessions of launchers and workers, which have registered themselves. The fence of a move ends every session that '
    'this catalog does not know. Any program can have a session with any application_name, so a name proves nothing. '
    'One whose backend has ended does not count. Nobody but functions uses it.';
COMMENT ON COLUMN subscriber.own_session.pid IS 'the backend';
COMMENT ON COLUMN subscriber.own_session.backend_start IS 'the time at which the backend began';
COMMENT ON COLUMN subscriber.own_session.role IS 'the role that logged in';
COMMENT ON COLUMN subscriber.own_session.subid IS
    'the subscription that it works for, whose launcher can give it a place and end it; NULL: none';

CREATE UNLOGGED TABLE subscriber.hold (
    subid oid PRIMARY KEY REFERENCES subscriber.subscription ON DELETE CASCADE,
    stop_at pg_lsn NOT NULL,
    held_at pg_lsn
);
COMMENT ON TABLE subscriber.hold IS
    'Apply workers that are held while `subscriber verify` takes its snapshots. Duty owner reads and writes it.';
COMMENT ON COLUMN subscriber.hold.subid IS 'the subscription';
COMMENT ON COLUMN subscriber.hold.stop_at IS
    'the apply worker is to stop before a transaction that finishes here or later; 0/0: immediately';
COMMENT ON COLUMN subscriber.hold.held_at IS 'the position at which it stays now; NULL: not yet';
ALTER TABLE subscriber.hold ENABLE ROW LEVEL SECURITY;
CREATE POLICY follow ON subscriber.hold
USING (EXISTS (SELECT FROM subscriber.subscription s WHERE s.subid = hold.subid));
CREATE TRIGGER notify_launcher AFTER INSERT OR UPDATE OR DELETE ON subscriber.hold
FOR EACH STATEMENT EXECUTE FUNCTION subscriber.notify_launcher();

CREATE FUNCTION subscriber.is_alive(backend integer, started timestamptz, session_role oid) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT EXISTS (SELECT FROM pg_catalog.pg_stat_activity a
                    WHERE a.pid = backend AND a.usesysid = session_role
                      AND coalesce(a.backend_start = started, true))
$$;
COMMENT ON FUNCTION subscriber.is_alive IS
    'Returns true if the session lives. The caller may be unable to see the start of another role''s backend: process '
    'ID and role identify it then. Callers: other functions.';

CREATE FUNCTION subscriber.register_session(subscription oid, relation oid, backend integer, started timestamptz,
                                            caller subscriber.caller DEFAULT CURRENT_USER)
RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
DECLARE
    session_role oid;
    holder subscriber.session;
BEGIN
    PERFORM subscriber.check_manager(subscription, caller);
    IF backend = pg_catalog.pg_backend_pid() THEN
        SELECT a.usesysid INTO session_role FROM pg_catalog.pg_stat_get_activity(backend) a;
    ELSE
        SELECT o.role INTO session_role FROM subscriber.own_session o
         WHERE (o.pid, o.backend_start, o.subid) = (backend, started, subscription)
           AND subscriber.is_alive(o.pid, o.backend_start, o.role);
    END IF;
    IF session_role IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = pg_catalog.format('session %s has not registered itself for subscription with OID %s', backend,
                                        subscription);
    END IF;
    PERFORM 1 FROM subscriber.subscription s WHERE s.subid = subscription FOR SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'undefined_object',
            MESSAGE = pg_catalog.format('subscription with OID %s does not exist', subscription);
    END IF;
    INSERT INTO subscriber.session AS s (subid, relid, pid, backend_start, role)
    VALUES (subscription, relation, backend, started, session_role)
    ON CONFLICT (subid, relid) DO UPDATE
       SET pid = excluded.pid, backend_start = excluded.backend_start, role = excluded.role
     WHERE (s.pid, s.backend_start) = (excluded.pid, excluded.backend_start)
        OR NOT subscriber.is_alive(s.pid, s.backend_start, s.role);
    IF FOUND THEN
        RETURN NULL;
    END IF;
    SELECT * INTO holder FROM subscriber.session s WHERE (s.subid, s.relid) = (subscription, relation);
    RETURN holder.pid;
END $$;
COMMENT ON FUNCTION subscriber.register_session IS
    'Gives a place to the caller''s session, or to one that has registered itself for the subscription: sessions with '
    'a place can be terminated. Waits at most five seconds for a statement about the subscription, which locks its '
    'row. Returns the process ID of the living session that has the place; NULL: the place is the session''s now. '
    'Callers: duty owner.';

CREATE FUNCTION subscriber.release_session(subscription oid, relation oid, backend integer,
                                           caller subscriber.caller DEFAULT CURRENT_USER)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM subscriber.check_manager(subscription, caller);
    DELETE FROM subscriber.session s
     WHERE (s.subid, s.relid) = (subscription, relation) AND s.pid = backend;
END $$;
COMMENT ON FUNCTION subscriber.release_session IS 'Takes the place from a session. Callers: duty owner.';

CREATE FUNCTION subscriber.living_sessions(subscription oid, caller subscriber.caller DEFAULT CURRENT_USER)
RETURNS TABLE (relid oid, pid integer)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM subscriber.check_manager(subscription, caller);
    RETURN QUERY SELECT s.relid, s.pid FROM subscriber.session s
                  WHERE s.subid = subscription AND subscriber.is_alive(s.pid, s.backend_start, s.role);
END $$;
COMMENT ON FUNCTION subscriber.living_sessions IS 'Returns the places that living sessions have. Callers: duty owner.';

CREATE FUNCTION subscriber.terminate_workers(subscription_oid oid, relation_oid oid,
                                             caller subscriber.caller DEFAULT CURRENT_USER)
RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM subscriber.check_manager(subscription_oid, caller);
    RETURN (SELECT count(*) FILTER (WHERE pg_catalog.pg_terminate_backend(s.pid)) FROM subscriber.session s
             WHERE s.subid = subscription_oid AND (relation_oid IS NULL OR s.relid = relation_oid)
               AND s.pid <> pg_catalog.pg_backend_pid()
               AND subscriber.is_alive(s.pid, s.backend_start, s.role));
END $$;
COMMENT ON FUNCTION subscriber.terminate_workers IS
    'Terminates the sessions of a subscription: the one of a place, or all if relation_oid is NULL. The caller''s '
    'session stays. Returns the number of those that lived. Callers: duty owner.';

CREATE FUNCTION subscriber.terminate_session(subscription_oid oid, backend integer,
                                             caller subscriber.caller DEFAULT CURRENT_USER)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM subscriber.check_manager(subscription_oid, caller);
    RETURN (SELECT coalesce(bool_or(pg_catalog.pg_terminate_backend(s.pid)), false) FROM subscriber.session s
             WHERE s.subid = subscription_oid AND s.pid = backend
               AND subscriber.is_alive(s.pid, s.backend_start, s.role));
END $$;
COMMENT ON FUNCTION subscriber.terminate_session IS
    'Terminates one session of a subscription. Returns false if it does not live. Callers: duty owner.';

CREATE FUNCTION subscriber.lead(candidate text, started timestamptz, patience interval)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
DECLARE
    backend integer := pg_catalog.pg_backend_pid();
    session_role oid := (SELECT a.usesysid FROM pg_catalog.pg_stat_get_activity(backend) a);
    leader subscriber.launcher;
BEGIN
    LOOP
        SELECT * INTO leader FROM subscriber.launcher FOR UPDATE;
        EXIT WHEN FOUND;
        INSERT INTO subscriber.launcher (leads, instance, pid, backend_start, role, renewed)
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
END $$;
COMMENT ON FUNCTION subscriber.lead IS
    'Makes the caller''s session that of the leading launcher, unless the backend of another leader lives and has '
    'renewed its lease within `patience`. `started` is the start of the session. Terminates the earlier session of '
    'the same instance, and that of an expired leader. Returns true if the candidate leads. Callers: duty launcher.';

CREATE FUNCTION subscriber.renew_lead(leader text, backend integer) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    UPDATE subscriber.launcher l SET renewed = pg_catalog.clock_timestamp()
     WHERE l.instance = leader AND l.pid = backend;
    RETURN FOUND;
END $$;
COMMENT ON FUNCTION subscriber.renew_lead IS
    'Renews the lease of the leader. Returns false if another launcher leads now. Callers: duty launcher.';

CREATE FUNCTION subscriber.resign(leader text, backend integer) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    DELETE FROM subscriber.launcher l WHERE l.instance = leader AND l.pid = backend;
END $$;
COMMENT ON FUNCTION subscriber.resign IS 'Removes the leader. Callers: duty launcher.';

CREATE FUNCTION subscriber.is_worker() RETURNS boolean
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN EXISTS (SELECT FROM pg_catalog.pg_stat_get_activity(pg_catalog.pg_backend_pid()) a
                     JOIN subscriber.session s ON s.pid = a.pid AND s.role = a.usesysid
                    WHERE coalesce(s.backend_start = a.backend_start, true));
END $$;
COMMENT ON FUNCTION subscriber.is_worker IS
    'Returns true if the present session works for a subscription. The fence of a move calls it for each statement of '
    'a worker whose role cannot set session_replication_role. Callers: other functions.';

CREATE FUNCTION subscriber.register_own_session(subscription oid, started timestamptz) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    DELETE FROM subscriber.own_session o
     WHERE o.pid IN (SELECT f.pid FROM subscriber.own_session f
                      WHERE (subscription IS NULL OR f.subid = subscription)
                        AND NOT subscriber.is_alive(f.pid, f.backend_start, f.role) FOR UPDATE SKIP LOCKED);
    INSERT INTO subscriber.own_session AS o (pid, backend_start, role, subid)
    SELECT a.pid, started, a.usesysid, subscription
      FROM pg_catalog.pg_stat_get_activity(pg_catalog.pg_backend_pid()) a
    ON CONFLICT (pid) DO UPDATE
       SET backend_start = excluded.backend_start, role = excluded.role, subid = excluded.subid;
END $$;
COMMENT ON FUNCTION subscriber.register_own_session IS
    'Registers the present session as one of a launcher or worker, and removes those of the same subscription that '
    'have ended. `subscription` is the one that it works for. NULL: it works for all, and sessions of all are '
    'removed. `started` is the start of the session, which the function may not see. Callers: duty apply.';

CREATE FUNCTION subscriber.own_sessions() RETURNS TABLE (pid integer, role oid)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT s.pid, s.role
      FROM (SELECT o.pid, o.backend_start, o.role FROM subscriber.own_session o
            UNION SELECT w.pid, w.backend_start, w.role FROM subscriber.session w
            UNION SELECT l.pid, l.backend_start, l.role FROM subscriber.launcher l) s
     WHERE subscriber.is_alive(s.pid, s.backend_start, s.role)
$$;
COMMENT ON FUNCTION subscriber.own_sessions IS
    'Returns the living sessions of launchers and workers. Callers: the schema''s owner.';


-- 6. Prepared transactions --------------------------------------------------------------------------------------------
--
-- They have no table, because a row has to appear with COMMIT PREPARED, also after a crash. Each has two large objects.
-- The transaction itself creates the one with `committed`. It is visible after COMMIT PREPARED, so a restarted worker
-- knows that this is done. The other one is created separately, with the progress, and lists the waiting transactions.

CREATE FUNCTION subscriber.saved_prepared()
RETURNS TABLE (record oid, subid oid, xid bigint, committed boolean, gid text, publisher_gid text,
               prepare_end_lsn pg_lsn, prepared_at timestamptz)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT p.* FROM subscriber.saved('prepared', 3400000000, 3500000000) s,
         LATERAL pg_catalog.jsonb_to_record(s) AS p (record oid, subid oid, xid bigint, committed boolean,
             gid text, publisher_gid text, prepare_end_lsn pg_lsn, prepared_at timestamptz)
$$;
COMMENT ON FUNCTION subscriber.saved_prepared IS
    'Returns the large objects of all subscriptions. Callers: other functions.';

CREATE FUNCTION subscriber.add_prepared(subscription oid, remote_xid bigint, is_committed boolean, name text,
                                        publisher_name text, end_lsn pg_lsn, at timestamptz)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    number oid := subscriber.draw_number(3400000000, 3500000000, 16384);
BEGIN
    PERFORM pg_catalog.lo_unlink(p.record) FROM subscriber.saved_prepared() p
      WHERE (p.subid, p.xid, p.committed) = (subscription, remote_xid, is_committed);
    PERFORM pg_catalog.lo_from_bytea(number, subscriber.as_record('prepared', pg_catalog.jsonb_build_object(
        'record', number::bigint, 'subid', subscription::bigint, 'xid', remote_xid, 'committed', is_committed,
        'gid', name, 'publisher_gid', publisher_name, 'prepare_end_lsn', end_lsn, 'prepared_at', at)));
END $$;
COMMENT ON FUNCTION subscriber.add_prepared IS
    'Creates a large object, in place of an earlier one. Callers: other functions.';

CREATE FUNCTION subscriber.mark_prepared(progress oid, fence bytea, xid bigint, gid text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM subscriber.add_prepared((subscriber.check_fence(progress, fence)).subid, xid, true, gid,
                                    NULL, NULL, NULL);
END $$;
COMMENT ON FUNCTION subscriber.mark_prepared IS
    'Called in the prepared transaction itself: its record appears with COMMIT PREPARED. Callers: duty apply.';

CREATE FUNCTION subscriber.note_prepared(progress oid, fence bytea, xid bigint, gid text, publisher_gid text,
                                         prepare_end_lsn pg_lsn, prepared_at timestamptz)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM subscriber.add_prepared((subscriber.check_fence(progress, fence)).subid, xid, false, gid,
                                    publisher_gid, prepare_end_lsn, prepared_at);
END $$;
COMMENT ON FUNCTION subscriber.note_prepared IS
    'Records that a transaction waits for COMMIT PREPARED. Callers: duty apply.';

CREATE FUNCTION subscriber.find_prepared(progress oid, fence bytea, xid bigint)
RETURNS TABLE (committed boolean, prepare_end_lsn pg_lsn)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    worker record := subscriber.check_fence($1, $2);
BEGIN
    RETURN QUERY SELECT p.committed, p.prepare_end_lsn FROM subscriber.saved_prepared() p
                  WHERE p.subid = worker.subid AND p.xid = $3;
END $$;
COMMENT ON FUNCTION subscriber.find_prepared IS
    'Returns what is recorded about a transaction of the publisher. `committed`: COMMIT PREPARED is done. Callers: '
    'duty apply.';

CREATE FUNCTION subscriber.forget_prepared(progress oid, fence bytea, xid bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    worker record := subscriber.check_fence($1, $2);
BEGIN
    PERFORM pg_catalog.lo_unlink(p.record) FROM subscriber.saved_prepared() p
      WHERE p.subid = worker.subid AND p.xid = $3;
END $$;
COMMENT ON FUNCTION subscriber.forget_prepared(oid, bytea, bigint) IS
    'Removes what is recorded about a transaction. Callers: duty apply.';

CREATE FUNCTION subscriber.forget_prepared(subscription oid, caller subscriber.caller DEFAULT CURRENT_USER) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM subscriber.check_manager(subscription, caller);
    PERFORM pg_catalog.lo_unlink(p.record) FROM subscriber.saved_prepared() p WHERE p.subid = subscription;
END $$;
COMMENT ON FUNCTION subscriber.forget_prepared(oid, subscriber.caller) IS
    'Removes what is recorded about all transactions of a subscription. Those that are prepared stay prepared. '
    'Callers: duty owner.';

CREATE FUNCTION subscriber.prepared_transactions(caller subscriber.caller DEFAULT CURRENT_USER)
RETURNS TABLE (subid oid, xid bigint, committed boolean, gid text, publisher_gid text, prepare_end_lsn pg_lsn,
               prepared_at timestamptz)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT p.subid, p.xid, p.committed, p.gid, p.publisher_gid, p.prepare_end_lsn, p.prepared_at
      FROM subscriber.saved_prepared() p JOIN subscriber.subscription s USING (subid)
     WHERE subscriber.may_become(caller, s.subowner)
$$;
COMMENT ON FUNCTION subscriber.prepared_transactions IS
    'Returns what is recorded about transactions of subscriptions that the caller may see. A function in a view runs '
    'with the rights of the caller, so it checks the owner of the subscription. Callers: duty owner.';

CREATE VIEW subscriber.prepared AS
SELECT p.subid, p.xid, p.committed, p.gid, p.publisher_gid, p.prepare_end_lsn, p.prepared_at
  FROM subscriber.prepared_transactions() p;
COMMENT ON VIEW subscriber.prepared IS 'What is recorded about prepared transactions. Duty owner reads it.';
COMMENT ON COLUMN subscriber.prepared.subid IS 'the subscription';
COMMENT ON COLUMN subscriber.prepared.xid IS 'the transaction of the publisher';
COMMENT ON COLUMN subscriber.prepared.committed IS
    'true: written by the transaction itself, so COMMIT PREPARED is done; false: it waits';
COMMENT ON COLUMN subscriber.prepared.gid IS 'the name of the prepared transaction on the target';
COMMENT ON COLUMN subscriber.prepared.publisher_gid IS 'the name on the publisher; NULL: where committed is true';
COMMENT ON COLUMN subscriber.prepared.prepare_end_lsn IS
    'the position of PREPARE TRANSACTION; NULL: where committed is true';
COMMENT ON COLUMN subscriber.prepared.prepared_at IS
    'the time of PREPARE TRANSACTION, by the publisher''s clock; NULL: where committed is true';


-- 7. Quarantine -------------------------------------------------------------------------------------------------------
--
-- With on_error = quarantine, a transaction that cannot be applied waits on the target, and so do later ones that
-- depend on it. Its messages are a large object: qtn1, and then the records of spool/record_format.py.

CREATE UNLOGGED TABLE subscriber.quarantine (
    subid oid REFERENCES subscriber.subscription ON DELETE CASCADE,
    finish_lsn pg_lsn,
    remote_xid bigint NOT NULL,
    commit_time timestamptz,
    parked timestamptz NOT NULL DEFAULT clock_timestamp(),
    relations text[] NOT NULL,
    changes bigint NOT NULL,
    bytes bigint NOT NULL DEFAULT 0,
    depends_on pg_lsn[] NOT NULL DEFAULT '{}',
    error text,
    error_detail text,
    attempts integer NOT NULL DEFAULT 0,
    retry boolean NOT NULL DEFAULT false,
    edited integer NOT NULL DEFAULT 0,
    content oid NOT NULL UNIQUE,
    kept oid NOT NULL UNIQUE DEFAULT subscriber.new_record_of_many(),
    PRIMARY KEY (subid, finish_lsn)
);
COMMENT ON TABLE subscriber.quarantine IS
    'Transactions in quarantine: they could not be applied, or depend on such a one. Duty owner reads and deletes '
    'rows, and writes the columns about retries. Only functions write the number of the messages.';
COMMENT ON COLUMN subscriber.quarantine.subid IS 'the subscription';
COMMENT ON COLUMN subscriber.quarantine.finish_lsn IS 'the position of its commit on the publisher, as SKIP takes it';
COMMENT ON COLUMN subscriber.quarantine.remote_xid IS 'the transaction of the publisher';
COMMENT ON COLUMN subscriber.quarantine.commit_time IS
    'the time of its commit, by the publisher''s clock; NULL: not known';
COMMENT ON COLUMN subscriber.quarantine.parked IS 'the time at which it was put in quarantine';
COMMENT ON COLUMN subscriber.quarantine.relations IS 'the tables that it changes, with their schemas';
COMMENT ON COLUMN subscriber.quarantine.changes IS 'the number of its changes';
COMMENT ON COLUMN subscriber.quarantine.bytes IS 'the size of its messages';
COMMENT ON COLUMN subscriber.quarantine.depends_on IS 'earlier ones that must be applied first';
COMMENT ON COLUMN subscriber.quarantine.error IS 'the last error; NULL: it only depends on others';
COMMENT ON COLUMN subscriber.quarantine.error_detail IS 'the detail of the error; NULL: it has none';
COMMENT ON COLUMN subscriber.quarantine.attempts IS 'the number of retries that have failed';
COMMENT ON COLUMN subscriber.quarantine.retry IS 'the worker is to retry it now';
COMMENT ON COLUMN subscriber.quarantine.edited IS 'the number of times that its changes were edited';
COMMENT ON COLUMN subscriber.quarantine.content IS 'the large object with its messages';
COMMENT ON COLUMN subscriber.quarantine.kept IS 'the large object with this row';
ALTER TABLE subscriber.quarantine ENABLE ROW LEVEL SECURITY;
CREATE POLICY follow ON subscriber.quarantine
USING (EXISTS (SELECT FROM subscriber.subscription s WHERE s.subid = quarantine.subid));
CREATE TRIGGER keep AFTER INSERT OR UPDATE OR DELETE ON subscriber.quarantine
FOR EACH ROW EXECUTE FUNCTION subscriber.keep();
ALTER TABLE subscriber.quarantine ENABLE ALWAYS TRIGGER keep;
-- The worker itself inserts rows, and knows about them.
CREATE TRIGGER notify_launcher AFTER UPDATE OR DELETE ON subscriber.quarantine
FOR EACH STATEMENT EXECUTE FUNCTION subscriber.notify_launcher();

CREATE FUNCTION subscriber.drop_quarantine_content() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM pg_catalog.lo_unlink(m.oid) FROM pg_catalog.pg_largeobject_metadata m WHERE m.oid = OLD.content;
    RETURN NULL;
END $$;
COMMENT ON FUNCTION subscriber.drop_quarantine_content IS
    'Removes the messages with the row. Callers: the trigger drop_content.';

CREATE TRIGGER drop_content AFTER DELETE ON subscriber.quarantine
FOR EACH ROW EXECUTE FUNCTION subscriber.drop_quarantine_content();
ALTER TABLE subscriber.quarantine ENABLE ALWAYS TRIGGER drop_content;

CREATE FUNCTION subscriber.park(progress oid, fence bytea, parked jsonb) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    worker record;
    subscription record;
    number oid := subscriber.new_record_of_many();
BEGIN
    worker := subscriber.check_fence(progress, fence);
    SELECT s.subname, s.subquarantinelimit AS most INTO subscription
      FROM subscriber.subscription s WHERE s.subid = worker.subid;
    IF (SELECT count(*) FROM subscriber.quarantine q WHERE q.subid = worker.subid) >= subscription.most THEN
        RAISE EXCEPTION USING ERRCODE = 'SB004',
            MESSAGE = pg_catalog.format('quarantine of subscription "%s" is full', subscription.subname),
            DETAIL = pg_catalog.format('It has %s transactions, which is its quarantine_limit. %s',
                subscription.most, coalesce('The next one failed: ' || (parked ->> 'error') || '.',
                                            'The next one depends on them.')),
            HINT = pg_catalog.format('Repair the cause, then: ALTER SUBSCRIPTION %1$I QUARANTINE RETRY. Or raise'
                ' the limit: ALTER SUBSCRIPTION %1$I SET (quarantine_limit = %2$s).', subscription.subname,
                least(2147483647, 10 * greatest(subscription.most::bigint, 1)));
    END IF;
    PERFORM pg_catalog.lo_from_bytea(number, 'qtn1'::bytea);
    INSERT INTO subscriber.quarantine (subid, finish_lsn, remote_xid, commit_time, relations, changes, bytes,
                                       depends_on, error, error_detail, content)
    SELECT worker.subid, p.finish_lsn, p.remote_xid, p.commit_time, p.relations, p.changes, p.bytes,
           p.depends_on, p.error, p.error_detail, number
      FROM pg_catalog.jsonb_populate_record(NULL::subscriber.quarantine, parked) p;
END $$;
COMMENT ON FUNCTION subscriber.park IS
    'Puts a transaction in quarantine, without its messages. `parked` has columns of the row. Refuses more '
    'transactions than option quarantine_limit (SB004). Callers: duty apply.';

CREATE FUNCTION subscriber.park_content(progress oid, fence bytea, lsn pg_lsn, place bigint, records bytea) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    worker record;
BEGIN
    worker := subscriber.check_fence(progress, fence);
    PERFORM pg_catalog.lo_put(q.content, 4 + place, records)
       FROM subscriber.quarantine q WHERE q.subid = worker.subid AND q.finish_lsn = lsn;
END $$;
COMMENT ON FUNCTION subscriber.park_content IS
    'Writes messages of a transaction in quarantine, at `place` bytes. Callers: duty apply.';

CREATE FUNCTION subscriber.unpark(progress oid, fence bytea, lsn pg_lsn, edits integer) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    worker record;
BEGIN
    worker := subscriber.check_fence(progress, fence);
    DELETE FROM subscriber.quarantine q WHERE q.subid = worker.subid AND q.finish_lsn = lsn AND q.edited = edits;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'SB003', MESSAGE = 'the quarantined transaction has been altered';
    END IF;
END $$;
COMMENT ON FUNCTION subscriber.unpark IS
    'Removes a transaction that is applied now. `edits` is the number of edits that the worker has seen: after another '
    'edit it fails (SB003). Callers: duty apply.';

CREATE FUNCTION subscriber.read_quarantine(subscription oid, lsn pg_lsn, place bigint, size integer,
                                           caller subscriber.caller DEFAULT CURRENT_USER)
RETURNS bytea
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM subscriber.check_manager(subscription, caller);
    RETURN (SELECT pg_catalog.lo_get(q.content, 4 + place, size)
              FROM subscriber.quarantine q WHERE q.subid = subscription AND q.finish_lsn = lsn);
END $$;
COMMENT ON FUNCTION subscriber.read_quarantine IS
    'Returns messages of a transaction in quarantine, from `place` bytes on; NULL: it is not in quarantine. Callers: '
    'duty owner.';

CREATE FUNCTION subscriber.edit_quarantine(subscription oid, lsn pg_lsn, edits integer, records bytea,
                                           changed_relations text[], changed bigint,
                                           caller subscriber.caller DEFAULT CURRENT_USER)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    number oid;
BEGIN
    PERFORM subscriber.check_manager(subscription, caller);
    UPDATE subscriber.quarantine q
       SET edited = q.edited + 1, bytes = octet_length(records), relations = changed_relations, changes = changed
     WHERE q.subid = subscription AND q.finish_lsn = lsn AND q.edited = edits AND NOT q.retry
    RETURNING q.content INTO number;
    IF number IS NULL THEN
        RETURN false;
    END IF;
    PERFORM pg_catalog.lo_unlink(number);
    PERFORM pg_catalog.lo_from_bytea(number, 'qtn1'::bytea || records);
    RETURN true;
END $$;
COMMENT ON FUNCTION subscriber.edit_quarantine IS
    'Replaces the messages of a transaction in quarantine. `edits` is the number of edits that the caller has read. '
    'Returns false if there is another one, or a retry has begun. Callers: duty owner.';


-- 8. Conflicts and statistics -----------------------------------------------------------------------------------------

CREATE UNLOGGED TABLE subscriber.subscription_stats (
    subid oid PRIMARY KEY REFERENCES subscriber.subscription ON DELETE CASCADE,
    apply_error_count bigint NOT NULL DEFAULT 0,
    sync_error_count bigint NOT NULL DEFAULT 0,
    sync_seq_error_count bigint NOT NULL DEFAULT 0,
    confl_insert_exists bigint NOT NULL DEFAULT 0,
    confl_update_origin_differs bigint NOT NULL DEFAULT 0,
    confl_update_exists bigint NOT NULL DEFAULT 0,
    confl_update_deleted bigint NOT NULL DEFAULT 0,
    confl_update_missing bigint NOT NULL DEFAULT 0,
    confl_delete_origin_differs bigint NOT NULL DEFAULT 0,
    confl_delete_missing bigint NOT NULL DEFAULT 0,
    confl_multiple_unique_conflicts bigint NOT NULL DEFAULT 0,
    stats_reset timestamptz
);
COMMENT ON TABLE subscriber.subscription_stats IS
    'Errors and conflicts, counted. Duty owner reads it, and duty launcher writes it.';
COMMENT ON COLUMN subscriber.subscription_stats.subid IS 'the subscription';
COMMENT ON COLUMN subscriber.subscription_stats.apply_error_count IS 'errors of the apply worker';
COMMENT ON COLUMN subscriber.subscription_stats.sync_error_count IS 'errors of table synchronization';
COMMENT ON COLUMN subscriber.subscription_stats.sync_seq_error_count IS 'errors of sequence synchronization';
COMMENT ON COLUMN subscriber.subscription_stats.confl_insert_exists IS 'inserts of a key that was there';
COMMENT ON COLUMN subscriber.subscription_stats.confl_update_origin_differs IS
    'updates of rows that another origin wrote last';
COMMENT ON COLUMN subscriber.subscription_stats.confl_update_exists IS 'updates to a key that was there';
COMMENT ON COLUMN subscriber.subscription_stats.confl_update_deleted IS 'updates of rows that another origin deleted';
COMMENT ON COLUMN subscriber.subscription_stats.confl_update_missing IS 'updates of rows that were not there';
COMMENT ON COLUMN subscriber.subscription_stats.confl_delete_origin_differs IS
    'deletes of rows that another origin wrote last';
COMMENT ON COLUMN subscriber.subscription_stats.confl_delete_missing IS 'deletes of rows that were not there';
COMMENT ON COLUMN subscriber.subscription_stats.confl_multiple_unique_conflicts IS
    'rows with several keys that were there';
COMMENT ON COLUMN subscriber.subscription_stats.stats_reset IS
    'the time since which they count; NULL: since the subscription was created';
ALTER TABLE subscriber.subscription_stats ENABLE ROW LEVEL SECURITY;
CREATE POLICY follow ON subscriber.subscription_stats
USING (EXISTS (SELECT FROM subscriber.subscription s WHERE s.subid = subscription_stats.subid));

CREATE FUNCTION subscriber.begin_stats() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO subscriber.subscription_stats (subid) VALUES (NEW.subid);
    RETURN NULL;
END $$;
COMMENT ON FUNCTION subscriber.begin_stats IS
    'Begins to count for a subscription that is created, or restored after a crash. Callers: the trigger of the same '
    'name.';

CREATE TRIGGER begin_stats AFTER INSERT ON subscriber.subscription
FOR EACH ROW EXECUTE FUNCTION subscriber.begin_stats();
ALTER TABLE subscriber.subscription ENABLE ALWAYS TRIGGER begin_stats;

CREATE UNLOGGED TABLE subscriber.conflict_history (
    id bigint PRIMARY KEY DEFAULT subscriber.new_id(),
    subid oid NOT NULL REFERENCES subscriber.subscription ON DELETE CASCADE,
    detected timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_detected timestamptz NOT NULL DEFAULT clock_timestamp(),
    occurrences bigint NOT NULL DEFAULT 1,
    relid oid NOT NULL,
    relation text NOT NULL,
    conflict_type text NOT NULL,
    index_name text,
    key jsonb,
    remote_xid bigint NOT NULL,
    remote_finish_lsn pg_lsn NOT NULL,
    remote_commit_time timestamptz,
    local_xid bigint,
    local_origin text,
    local_commit_time timestamptz,
    policy text NOT NULL,
    resolution text NOT NULL,
    local_row jsonb,
    remote_row jsonb,
    kept oid NOT NULL UNIQUE DEFAULT subscriber.new_record_of_many()
);
COMMENT ON TABLE subscriber.conflict_history IS
    'A row for each row of the target that conflicted with a change, or for the change if there was no such row, with '
    'the decision. It has rows of tables, so only a role that inherits the rights of the subscription''s owner sees '
    'it. Duty owner reads and writes it.';
COMMENT ON COLUMN subscriber.conflict_history.id IS 'a number, by time';
COMMENT ON COLUMN subscriber.conflict_history.subid IS 'the subscription';
COMMENT ON COLUMN subscriber.conflict_history.detected IS 'the time at which it was met first';
COMMENT ON COLUMN subscriber.conflict_history.last_detected IS 'the time at which it was met last';
COMMENT ON COLUMN subscriber.conflict_history.occurrences IS
    'the number of times that it was met: an error comes again with each attempt';
COMMENT ON COLUMN subscriber.conflict_history.relid IS 'the table on the target';
COMMENT ON COLUMN subscriber.conflict_history.relation IS 'its schema and name; the name of a partition';
COMMENT ON COLUMN subscriber.conflict_history.conflict_type IS 'PostgreSQL''s name of the conflict';
COMMENT ON COLUMN subscriber.conflict_history.index_name IS
    'the unique index that refused; NULL: the row to be changed, or none';
COMMENT ON COLUMN subscriber.conflict_history.key IS 'the values of the key by column; NULL: the whole row is the key';
COMMENT ON COLUMN subscriber.conflict_history.remote_xid IS 'the transaction of the publisher';
COMMENT ON COLUMN subscriber.conflict_history.remote_finish_lsn IS 'the position that SKIP takes';
COMMENT ON COLUMN subscriber.conflict_history.remote_commit_time IS
    'the time of its commit, by the publisher''s clock; NULL: not known';
COMMENT ON COLUMN subscriber.conflict_history.local_xid IS
    'the transaction that wrote the row of the target; NULL: there is no such row, or it is not known';
COMMENT ON COLUMN subscriber.conflict_history.local_origin IS
    'the replication origin that wrote it; NULL: none, or one that is gone';
COMMENT ON COLUMN subscriber.conflict_history.local_commit_time IS 'the time at which it was written; NULL: not known';
COMMENT ON COLUMN subscriber.conflict_history.policy IS 'the policy that decided';
COMMENT ON COLUMN subscriber.conflict_history.resolution IS 'the decision';
COMMENT ON COLUMN subscriber.conflict_history.local_row IS
    'the row of the target, values as texts; NULL: without option conflict_log_rows, or no row';
COMMENT ON COLUMN subscriber.conflict_history.remote_row IS
    'the row of the publisher, values as texts; NULL: as for local_row';
COMMENT ON COLUMN subscriber.conflict_history.kept IS 'the large object with this row';
CREATE INDEX ON subscriber.conflict_history (subid, detected);
CREATE INDEX ON subscriber.conflict_history (subid, remote_finish_lsn);
ALTER TABLE subscriber.conflict_history ENABLE ROW LEVEL SECURITY;
CREATE POLICY follow ON subscriber.conflict_history
USING (EXISTS (SELECT FROM subscriber.subscription s
                WHERE s.subid = conflict_history.subid AND pg_catalog.pg_has_role(s.subowner, 'USAGE')));
CREATE TRIGGER keep AFTER INSERT OR UPDATE OR DELETE ON subscriber.conflict_history
FOR EACH ROW EXECUTE FUNCTION subscriber.keep();
ALTER TABLE subscriber.conflict_history ENABLE ALWAYS TRIGGER keep;

CREATE FUNCTION subscriber.add_conflict(subscription oid, conflict jsonb) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO subscriber.conflict_history (
        subid, relid, relation, conflict_type, index_name, key, remote_xid, remote_finish_lsn, remote_commit_time,
        local_xid, local_origin, local_commit_time, policy, resolution, local_row, remote_row)
    SELECT subscription, c.relid, c.relation, c.conflict_type, c.index_name, c.key, c.remote_xid,
           c.remote_finish_lsn, c.remote_commit_time, c.local_xid, c.local_origin, c.local_commit_time, c.policy,
           c.resolution, c.local_row, c.remote_row
      FROM pg_catalog.jsonb_populate_record(NULL::subscriber.conflict_history, conflict) c
$$;
COMMENT ON FUNCTION subscriber.add_conflict IS
    'Inserts a row of conflict_history; `conflict` has its columns. Callers: other functions.';

CREATE FUNCTION subscriber.record_conflict(progress oid, fence bytea, conflict jsonb) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    worker record;
BEGIN
    worker := subscriber.check_fence(progress, fence);
    PERFORM subscriber.add_conflict(worker.subid, conflict);
END $$;
COMMENT ON FUNCTION subscriber.record_conflict IS
    'Records a conflict that a policy has decided, in the transaction of the change. Callers: duty apply.';

CREATE FUNCTION subscriber.record_conflict_error(subscription oid, conflict jsonb,
                                                 caller subscriber.caller DEFAULT CURRENT_USER)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM subscriber.check_manager(subscription, caller);
    UPDATE subscriber.conflict_history h
       SET occurrences = h.occurrences + 1, last_detected = pg_catalog.clock_timestamp()
      FROM pg_catalog.jsonb_populate_record(NULL::subscriber.conflict_history, conflict) c
     WHERE h.subid = subscription AND h.relid = c.relid AND h.conflict_type = c.conflict_type
       AND h.index_name IS NOT DISTINCT FROM c.index_name AND h.key IS NOT DISTINCT FROM c.key
       AND h.remote_finish_lsn = c.remote_finish_lsn AND h.resolution = 'error';
    IF NOT FOUND THEN
        PERFORM subscriber.add_conflict(subscription, conflict);
    END IF;
END $$;
COMMENT ON FUNCTION subscriber.record_conflict_error IS
    'Records a conflict that stops the stream. It occurs again in each attempt, and is recorded once. Callers: duty '
    'owner.';

CREATE FUNCTION subscriber.clear_skip(progress oid, fence bytea, skipped pg_lsn) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    worker record;
BEGIN
    worker := subscriber.check_fence(progress, fence);
    UPDATE subscriber.subscription s SET subskiplsn = '0/0' WHERE s.subid = worker.subid AND s.subskiplsn = skipped;
END $$;
COMMENT ON FUNCTION subscriber.clear_skip IS
    'Forgets the position of SKIP, in the transaction that skips. Callers: duty apply.';

CREATE FUNCTION subscriber.pg_stat_reset_subscription_stats(subid oid) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    UPDATE subscriber.subscription_stats SET (
        apply_error_count, sync_error_count, sync_seq_error_count, confl_insert_exists,
        confl_update_origin_differs, confl_update_exists, confl_update_deleted, confl_update_missing,
        confl_delete_origin_differs, confl_delete_missing, confl_multiple_unique_conflicts, stats_reset)
        = (SELECT 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, pg_catalog.now())
     WHERE $1 IS NULL OR subid = $1;
    IF $1 IS NULL OR NOT FOUND THEN
        PERFORM pg_catalog.pg_stat_reset_subscription_stats($1);
    END IF;
END $$;
COMMENT ON FUNCTION subscriber.pg_stat_reset_subscription_stats IS
    'Resets the counters of a subscription, or of all with NULL. For the server''s own subscriptions it calls the '
    'server''s function of the same name. Callers: the schema''s owner.';


-- 9. Deleted rows -----------------------------------------------------------------------------------------------------
--
-- Option retain_dead_tuples: deleted rows are remembered, so that a later UPDATE of one is recognized. Dead rows cannot
-- be read with SQL. A trigger on each table of a subscription with the option writes a row for each deleted row: a hash
-- of its key, and the transaction. pg_xact_commit_timestamp_origin() has the time and the origin of the transaction.
--
-- A large object makes the deleted rows of a statement durable:
--
--      0  del1
--      4  the transaction, 8 bytes
--     12  the table, 8 bytes
--     20  32 bytes for each key
--
-- A deleted row is forgotten when no subscription with the option needs it (worker/apply/retention.py), or when it is
-- older than all of them are to remember it.
--
-- The trigger functions run with the rights of the schema's owner in sessions of any role. They call no function that a
-- role could have replaced: format() prints values by the output functions of their types, not by casts.

CREATE UNLOGGED TABLE subscriber.deleted_row (
    relid oid NOT NULL,
    key bytea NOT NULL,
    xid xid8 NOT NULL,
    record oid NOT NULL
);
COMMENT ON TABLE subscriber.deleted_row IS
    'The deleted rows of tables of subscriptions with option retain_dead_tuples. Nobody but functions uses it.';
COMMENT ON COLUMN subscriber.deleted_row.relid IS
    'the table on the target; of a partitioned table the partition, if that was named';
COMMENT ON COLUMN subscriber.deleted_row.key IS 'a hash of the key';
COMMENT ON COLUMN subscriber.deleted_row.xid IS 'the transaction that deleted it';
COMMENT ON COLUMN subscriber.deleted_row.record IS 'the large object with this row and others of the same statement';
CREATE INDEX deleted_row_relid_key_idx ON subscriber.deleted_row (relid, key);
CREATE INDEX deleted_row_xid_record_idx ON subscriber.deleted_row (xid, record);

CREATE UNLOGGED TABLE subscriber.retention (
    subid oid PRIMARY KEY REFERENCES subscriber.subscription ON DELETE CASCADE,
    horizon xid8,
    expired xid8
);
COMMENT ON TABLE subscriber.retention IS
    'The deleted rows that each subscription with option retain_dead_tuples still needs. After a crash nothing is '
    'removed until the workers have found new limits. Nobody but functions uses it.';
COMMENT ON COLUMN subscriber.retention.subid IS 'the subscription';
COMMENT ON COLUMN subscriber.retention.horizon IS
    'the subscription does not need the deleted rows of earlier transactions; NULL: not known yet';
COMMENT ON COLUMN subscriber.retention.expired IS
    'the last transaction whose deleted rows became too old while needed; NULL: none';

CREATE FUNCTION subscriber.new_delete_record() RETURNS oid
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    candidate oid;
BEGIN
    FOR attempt IN 1 .. 100 LOOP
        candidate := (4200000000 + pg_catalog.nextval('subscriber.number') % 90000000)::oid;
        IF NOT EXISTS (SELECT FROM pg_catalog.pg_largeobject_metadata m WHERE m.oid = candidate) THEN
            RETURN candidate;
        END IF;
        -- A crash has reset the sequence, and many neighboring numbers may be in use.
        PERFORM pg_catalog.setval('subscriber.number', 1 + floor(pg_catalog.random() * 999999999)::bigint);
    END LOOP;
    RETURN 0;  -- the server chooses a number, and the record does not survive a crash
END $$;
COMMENT ON FUNCTION subscriber.new_delete_record IS
    'Returns a number for a large object with deleted rows. After a crash many neighboring numbers may be in use, so '
    'it tries distant ones. 0: the server chooses a number, and the record does not survive a crash. Callers: other '
    'functions.';

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
          LEFT JOIN (VALUES ('bytea', 'encode(%s, ''hex'')'),
                        ('date', 'encode(pg_catalog.date_send(%s), ''hex'')'),
                        ('time', 'encode(pg_catalog.time_send(%s), ''hex'')'),
                        ('timetz', 'encode(pg_catalog.timetz_send(%s), ''hex'')'),
                        ('timestamp', 'encode(pg_catalog.timestamp_send(%s), ''hex'')'),
                        ('timestamptz', 'encode(pg_catalog.timestamptz_send(%s), ''hex'')'),
                        ('interval', 'encode(pg_catalog.interval_send(%s), ''hex'')'),
                        ('float4', 'encode(pg_catalog.float4send(%s), ''hex'')'),
                        ('float8', 'encode(pg_catalog.float8send(%s), ''hex'')'),
                        ('money', 'encode(pg_catalog.cash_send(%s), ''hex'')'),
                        ('numeric', 'trim_scale(%s)')) AS f (name, form)
                 ON t.typname = f.name AND t.typnamespace = 'pg_catalog'::regnamespace)
    SELECT pg_catalog.format('pg_catalog.sha256(pg_catalog.convert_to(pg_catalog.format(%L, %s),'
                             ' pg_catalog.getdatabaseencoding()))',
                             repeat('%L,', count(*)::int), string_agg(p.value, ', ' ORDER BY p.place))
      FROM printed p HAVING count(*) > 0
$$;
COMMENT ON FUNCTION subscriber.key_expression IS
    'Returns the expression for the hash of the key of row `prefix`; NULL: the table has no key. The columns are those '
    'of the index that identifies a row. Types whose text depends on settings or has no normal form are printed in '
    'another way, as in targets/postgres/sql/deleted_rows.py. Callers: other functions.';

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
                SELECT $_$ || key || $_$ AS key, (row_number() OVER () - 1) / 10000 AS part
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
END $$;
COMMENT ON FUNCTION subscriber.delete_function IS
    'Creates the trigger function for tables with this expression of the key, unless it exists. Returns its name. A '
    'large object has at most 10,000 keys. Callers: other functions.';

CREATE FUNCTION subscriber.set_delete_triggers(patience text, dropped oid,
                                               caller subscriber.caller DEFAULT CURRENT_USER)
RETURNS TABLE (subid oid, relation text, state text, problem text, hint text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '10s' AS $$
#variable_conflict use_column
DECLARE
    wanted record;
    found record;
BEGIN
    IF dropped IS NOT NULL THEN
        PERFORM subscriber.check_manager(dropped, caller);
    END IF;
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
            SELECT d.xid, d.record FROM subscriber.deleted_row d GROUP BY d.xid, d.record LIMIT 500),
        gone AS (
            DELETE FROM subscriber.deleted_row d USING records r WHERE d.xid = r.xid AND d.record = r.record)
        SELECT count(pg_catalog.lo_unlink(m.oid)) INTO found
          FROM records r JOIN pg_catalog.pg_largeobject_metadata m ON m.oid = r.record;
    END IF;
END $$;
COMMENT ON FUNCTION subscriber.set_delete_triggers IS
    'Creates, replaces and drops triggers, so that exactly the tables of subscriptions with option retain_dead_tuples '
    'have one. Returns the tables for which that is impossible. A trigger for each statement is cheaper. One for each '
    'row is necessary where a statement on another table deletes rows: partitions and inheritance. If another '
    'subscription has the table, the trigger also fires for replicated changes. `patience` is the lock_timeout. '
    '`dropped` is a subscription that the caller is dropping; NULL: none. Callers: duty owner.';

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
END $$;
COMMENT ON FUNCTION subscriber.deleted_by IS
    'Returns time, origin and transaction of the last deletion of a key, or no row. `relation` can be a partitioned '
    'table. Callers: duty apply.';

CREATE FUNCTION subscriber.remember_delete(progress oid, fence bytea, relation oid, key bytea) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM subscriber.check_fence(progress, fence);
    INSERT INTO subscriber.deleted_row (relid, key, xid, record)
    VALUES (relation, $4, pg_current_xact_id(), lo_from_bytea(subscriber.new_delete_record(), 'del1'::bytea
            || int8send(pg_current_xact_id()::text::bigint) || int8send(relation::bigint) || $4));
END $$;
COMMENT ON FUNCTION subscriber.remember_delete IS
    'Remembers a replicated DELETE of a row that is missing. Callers: duty apply.';

-- Launchers call the next two on a connection that other tasks wait for. A statement that drops a subscription may hold
-- locks until the publisher answers. Then the next call does the work.
CREATE FUNCTION subscriber.set_retention(subscription oid, reached xid8, caller subscriber.caller DEFAULT CURRENT_USER)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s' AS $$
BEGIN
    PERFORM subscriber.check_manager(subscription, caller);
    INSERT INTO subscriber.retention AS r (subid, horizon) VALUES (subscription, reached)
    ON CONFLICT (subid) DO UPDATE SET horizon = greatest(r.horizon, excluded.horizon);
EXCEPTION WHEN lock_not_available THEN
    NULL;
END $$;
COMMENT ON FUNCTION subscriber.set_retention IS 'Raises the horizon of a subscription. Callers: duty launcher.';

CREATE FUNCTION subscriber.forget_deletes(subscription oid, OUT forgotten bigint, OUT expired bigint,
                                          OUT active boolean, caller subscriber.caller DEFAULT CURRENT_USER)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s' AS $$
DECLARE
    needed_from xid8;
    longest integer;
    written record;
    last_expired xid8;
    is_tracked boolean := pg_catalog.current_setting('track_commit_timestamp')::boolean;
BEGIN
    PERFORM subscriber.check_manager(subscription, caller);
    forgotten := 0;
    expired := 0;
    SELECT CASE WHEN bool_and(r.horizon IS NOT NULL) THEN min(r.horizon::text::numeric)::text::xid8 END,
           CASE WHEN bool_and(s.submaxretention > 0) THEN max(s.submaxretention) END
      INTO needed_from, longest
      FROM subscriber.subscription s LEFT JOIN subscriber.retention r USING (subid) WHERE s.subretaindeadtuples;
    FOR written IN SELECT d.xid, d.record, count(*) AS rows FROM subscriber.deleted_row d
                    GROUP BY d.xid, d.record ORDER BY d.xid, d.record LIMIT 500 LOOP
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
END $$;
COMMENT ON FUNCTION subscriber.forget_deletes IS
    'Forgets deleted rows that no subscription needs, and those that are too old. It removes at most 500 large '
    'objects, because each takes a lock. Returns their numbers, and whether the subscription still has all rows that '
    'it needs. Callers: duty launcher.';

CREATE FUNCTION subscriber.retains(subscription oid) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT NOT EXISTS (SELECT FROM subscriber.retention r
                        WHERE r.subid = subscription AND r.expired >= coalesce(r.horizon, '0'::xid8))
$$;
COMMENT ON FUNCTION subscriber.retains IS
    'Returns true if no row has been forgotten that the subscription could still need. Callers: duty launcher.';

CREATE FUNCTION subscriber.restore_deletes() RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO subscriber.deleted_row (relid, key, xid, record)
    SELECT ('x' || encode(substring(r.content FROM 13 FOR 8), 'hex'))::bit(64)::bigint::oid,
           substring(r.content FROM 21 + 32 * n FOR 32),
           ('x' || encode(substring(r.content FROM 5 FOR 8), 'hex'))::bit(64)::bigint::text::xid8, r.record
      FROM (SELECT m.oid AS record, pg_catalog.lo_get(m.oid) AS content
              FROM pg_catalog.pg_largeobject_metadata m
             WHERE m.oid >= 4200000000::oid AND m.oid < 4290000000::oid
               AND m.lomowner = pg_catalog.quote_ident(current_user)::regrole
               AND NOT EXISTS (SELECT FROM subscriber.deleted_row d WHERE d.record = m.oid)) r,
           LATERAL pg_catalog.generate_series(0, (octet_length(r.content) - 20) / 32 - 1) n
     WHERE substring(r.content FOR 4) = 'del1'
$$;
COMMENT ON FUNCTION subscriber.restore_deletes IS
    'Inserts the rows of large objects that have none: of all after a crash, and of a transaction that was prepared '
    'before a crash and committed later. Callers: duty owner.';

CREATE FUNCTION subscriber.forget_all_deletes() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    DELETE FROM subscriber.deleted_row;
    PERFORM pg_catalog.lo_unlink(m.oid) FROM pg_catalog.pg_largeobject_metadata m
      WHERE m.oid >= 4200000000::oid AND m.oid < 4290000000::oid
        AND m.lomowner = pg_catalog.quote_ident(current_user)::regrole
        AND pg_catalog.lo_get(m.oid, 0, 4) = 'del1';
END $$;
COMMENT ON FUNCTION subscriber.forget_all_deletes IS
    'Forgets all deleted rows: in another database the transactions are others. Callers: other functions.';


-- 10. Repairs, comparisons and ranges of keys -------------------------------------------------------------------------
--
-- With option track_ranges the stream records the ranges of keys that it changes, in the same transaction. So a
-- comparison reads only these. It gives its number to the rows that its snapshot sees, and deletes them when it has
-- found no difference. A row of a transaction that was prepared before and is committed later has no number, and
-- remains.
--
-- The row of verification has the tables without a difference. It is deleted in a transaction that makes the target
-- differ without touching a range: a transaction is skipped or put in quarantine, or the subscription follows another
-- publisher.

CREATE UNLOGGED TABLE subscriber.repair_transaction (
    id bigint PRIMARY KEY DEFAULT subscriber.new_id(),
    subid oid NOT NULL REFERENCES subscriber.subscription ON DELETE CASCADE,
    repaired_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    role name NOT NULL,
    command text NOT NULL,
    relation text NOT NULL,
    lsn pg_lsn NOT NULL,
    changes jsonb NOT NULL,
    kept oid NOT NULL UNIQUE DEFAULT subscriber.new_record_of_many()
);
COMMENT ON TABLE subscriber.repair_transaction IS
    'The transactions that have repaired rows. View repairs has a row for each row of the target. Duty owner reads it.';
COMMENT ON COLUMN subscriber.repair_transaction.id IS 'a number, by time';
COMMENT ON COLUMN subscriber.repair_transaction.subid IS 'the subscription';
COMMENT ON COLUMN subscriber.repair_transaction.repaired_at IS 'the time of the repair';
COMMENT ON COLUMN subscriber.repair_transaction.role IS 'the role that has run the command';
COMMENT ON COLUMN subscriber.repair_transaction.command IS
    'the command: repair, or resync for tables that a worker has compared';
COMMENT ON COLUMN subscriber.repair_transaction.relation IS 'the table on the target, with its schema';
COMMENT ON COLUMN subscriber.repair_transaction.lsn IS
    'the position of the publisher whose rows the target has since then';
COMMENT ON COLUMN subscriber.repair_transaction.changes IS
    'the rows: action, key, row_before and row_after, as in view repairs';
COMMENT ON COLUMN subscriber.repair_transaction.kept IS 'the large object with this row';
CREATE INDEX repair_transaction_subid_repaired_at_idx ON subscriber.repair_transaction (subid, repaired_at);
ALTER TABLE subscriber.repair_transaction ENABLE ROW LEVEL SECURITY;
CREATE POLICY follow ON subscriber.repair_transaction
USING (EXISTS (SELECT FROM subscriber.subscription s WHERE s.subid = repair_transaction.subid));
CREATE TRIGGER keep AFTER INSERT OR UPDATE OR DELETE ON subscriber.repair_transaction
FOR EACH ROW EXECUTE FUNCTION subscriber.keep();
ALTER TABLE subscriber.repair_transaction ENABLE ALWAYS TRIGGER keep;

CREATE UNLOGGED TABLE subscriber.touched_range (
    id bigint PRIMARY KEY DEFAULT subscriber.new_id(),
    subid oid NOT NULL REFERENCES subscriber.subscription ON DELETE CASCADE,
    touched jsonb NOT NULL,
    verification bigint,
    kept oid NOT NULL UNIQUE DEFAULT subscriber.new_record_of_many()
);
COMMENT ON TABLE subscriber.touched_range IS
    'Ranges of keys that the stream has changed, of subscriptions with option track_ranges. Duty owner reads and '
    'writes it.';
COMMENT ON COLUMN subscriber.touched_range.id IS 'a number, by time';
COMMENT ON COLUMN subscriber.touched_range.subid IS 'the subscription';
COMMENT ON COLUMN subscriber.touched_range.touched IS 'the tables, and the ranges of each';
COMMENT ON COLUMN subscriber.touched_range.verification IS 'the comparison that reads them; NULL: none yet';
COMMENT ON COLUMN subscriber.touched_range.kept IS 'the large object with this row';
CREATE INDEX touched_range_subid_idx ON subscriber.touched_range (subid);
ALTER TABLE subscriber.touched_range ENABLE ROW LEVEL SECURITY;
CREATE POLICY follow ON subscriber.touched_range
USING (EXISTS (SELECT FROM subscriber.subscription s WHERE s.subid = touched_range.subid));
CREATE TRIGGER keep AFTER INSERT OR UPDATE OR DELETE ON subscriber.touched_range
FOR EACH ROW EXECUTE FUNCTION subscriber.keep();
ALTER TABLE subscriber.touched_range ENABLE ALWAYS TRIGGER keep;

CREATE UNLOGGED TABLE subscriber.verification (
    subid oid PRIMARY KEY REFERENCES subscriber.subscription ON DELETE CASCADE,
    number bigint NOT NULL,
    publisher text,
    tables jsonb NOT NULL DEFAULT '[]',
    kept oid NOT NULL UNIQUE DEFAULT subscriber.new_record_of_many()
);
COMMENT ON TABLE subscriber.verification IS
    'The last comparison of each subscription with option track_ranges. Duty owner reads and writes it.';
COMMENT ON COLUMN subscriber.verification.subid IS 'the subscription';
COMMENT ON COLUMN subscriber.verification.number IS
    'the last comparison that has begun; a number by time, see new_id()';
COMMENT ON COLUMN subscriber.verification.publisher IS
    'system identifier and timeline of the publisher; NULL: no comparison has ended';
COMMENT ON COLUMN subscriber.verification.tables IS 'the tables without a difference';
COMMENT ON COLUMN subscriber.verification.kept IS 'the large object with this row';
ALTER TABLE subscriber.verification ENABLE ROW LEVEL SECURITY;
CREATE POLICY follow ON subscriber.verification
USING (EXISTS (SELECT FROM subscriber.subscription s WHERE s.subid = verification.subid));
CREATE TRIGGER keep AFTER INSERT OR UPDATE OR DELETE ON subscriber.verification
FOR EACH ROW EXECUTE FUNCTION subscriber.keep();
ALTER TABLE subscriber.verification ENABLE ALWAYS TRIGGER keep;

CREATE VIEW subscriber.repairs WITH (security_barrier) AS
SELECT t.subid, s.subname, t.repaired_at, t.role, t.command, t.relation, t.lsn, c.action, c.key, c.row_before,
       c.row_after
  FROM subscriber.repair_transaction t JOIN subscriber.subscription s USING (subid),
       LATERAL pg_catalog.jsonb_to_recordset(t.changes) AS c (action text, key jsonb, row_before jsonb, row_after jsonb)
 WHERE subscriber.may_become(CURRENT_USER, s.subowner);
COMMENT ON VIEW subscriber.repairs IS
    'The rows that repairs have changed: who changed which key, when, and at which position of the publisher. Duty '
    'owner reads it.';
COMMENT ON COLUMN subscriber.repairs.subid IS 'the subscription';
COMMENT ON COLUMN subscriber.repairs.subname IS 'its name';
COMMENT ON COLUMN subscriber.repairs.repaired_at IS 'the time of the repair';
COMMENT ON COLUMN subscriber.repairs.role IS 'the role that has run the command';
COMMENT ON COLUMN subscriber.repairs.command IS 'the command: repair, or resync for tables that a worker has compared';
COMMENT ON COLUMN subscriber.repairs.relation IS 'the table on the target, with its schema';
COMMENT ON COLUMN subscriber.repairs.lsn IS 'the position of the publisher whose rows the target has since then';
COMMENT ON COLUMN subscriber.repairs.action IS 'the change: insert, update or delete';
COMMENT ON COLUMN subscriber.repairs.key IS 'the values of the key by column';
COMMENT ON COLUMN subscriber.repairs.row_before IS 'the row before the repair; NULL: there was none';
COMMENT ON COLUMN subscriber.repairs.row_after IS 'the row since the repair; NULL: it was deleted';

CREATE FUNCTION subscriber.record_repair(progress oid, fence bytea, repaired jsonb) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    worker record;
BEGIN
    worker := subscriber.check_fence(progress, fence);
    INSERT INTO subscriber.repair_transaction (subid, role, command, relation, lsn, changes)
    SELECT worker.subid, r.role, r.command, r.relation, r.lsn, r.changes
      FROM pg_catalog.jsonb_populate_record(NULL::subscriber.repair_transaction, repaired) r;
END $$;
COMMENT ON FUNCTION subscriber.record_repair IS
    'Inserts a row of repair_transaction, in the transaction that repairs the rows. Callers: duty apply.';

CREATE FUNCTION subscriber.forget_repairs(subscription name, before timestamptz,
                                          caller subscriber.caller DEFAULT CURRENT_USER)
RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    number oid;
    forgotten bigint;
BEGIN
    SELECT s.subid INTO number FROM subscriber.subscription s WHERE s.subname = subscription;
    IF number IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'undefined_object',
            MESSAGE = pg_catalog.format('subscription "%s" does not exist', subscription);
    END IF;
    PERFORM subscriber.check_manager(number, caller);
    DELETE FROM subscriber.repair_transaction t WHERE t.subid = number AND t.repaired_at < before;
    GET DIAGNOSTICS forgotten = ROW_COUNT;
    RETURN forgotten;
END $$;
COMMENT ON FUNCTION subscriber.forget_repairs IS
    'Removes repairs that are older, and returns their number. `subscription` is a name. Callers: duty owner.';

CREATE FUNCTION subscriber.touch(progress oid, fence bytea, ranges jsonb) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    worker record;
BEGIN
    worker := subscriber.check_fence(progress, fence);
    INSERT INTO subscriber.touched_range (subid, touched) VALUES (worker.subid, ranges);
END $$;
COMMENT ON FUNCTION subscriber.touch IS
    'Records ranges of keys, in the transaction that changes their rows. Callers: duty apply.';

CREATE FUNCTION subscriber.forget_verification() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    DELETE FROM subscriber.verification v WHERE v.subid = NEW.subid;
    IF TG_TABLE_NAME = 'subscription' AND NOT (pg_catalog.to_jsonb(NEW) ->> 'subtrackranges')::boolean THEN
        DELETE FROM subscriber.touched_range t WHERE t.subid = NEW.subid;
    END IF;
    RETURN NULL;
END $$;
COMMENT ON FUNCTION subscriber.forget_verification IS
    'Forgets the last comparison, because the target differs without a touched range now. Without option track_ranges, '
    'the ranges are forgotten, too. Callers: the triggers of the same name.';

CREATE TRIGGER forget_verification AFTER UPDATE ON subscriber.subscription
FOR EACH ROW WHEN (
    (OLD.subconninfo, OLD.subserver, OLD.subslotname, OLD.subpublications, OLD.suborigin, OLD.subskiplsn,
     OLD.subtrackranges, OLD.subsourcetag)
    IS DISTINCT FROM
    (NEW.subconninfo, NEW.subserver, NEW.subslotname, NEW.subpublications, NEW.suborigin, NEW.subskiplsn,
     NEW.subtrackranges, NEW.subsourcetag))
EXECUTE FUNCTION subscriber.forget_verification();
ALTER TABLE subscriber.subscription ENABLE ALWAYS TRIGGER forget_verification;
CREATE TRIGGER forget_verification AFTER INSERT ON subscriber.quarantine
FOR EACH ROW EXECUTE FUNCTION subscriber.forget_verification();
ALTER TABLE subscriber.quarantine ENABLE ALWAYS TRIGGER forget_verification;


-- 11. Sequences -------------------------------------------------------------------------------------------------------
--
-- A sequence is identified by its name, so its row needs no new OID in a restored dump.

CREATE UNLOGGED TABLE subscriber.subscription_sequence (
    subid oid REFERENCES subscriber.subscription ON DELETE CASCADE,
    nspname name,
    seqname name,
    state "char" NOT NULL,
    lsn pg_lsn,
    problem text,
    kept oid NOT NULL UNIQUE DEFAULT subscriber.new_record_of_many(),
    PRIMARY KEY (subid, nspname, seqname)
);
COMMENT ON TABLE subscriber.subscription_sequence IS
    'The sequences of each subscription. Duty owner reads and writes it.';
COMMENT ON COLUMN subscriber.subscription_sequence.subid IS 'the subscription';
COMMENT ON COLUMN subscriber.subscription_sequence.nspname IS 'the schema of the sequence';
COMMENT ON COLUMN subscriber.subscription_sequence.seqname IS 'the name of the sequence';
COMMENT ON COLUMN subscriber.subscription_sequence.state IS 'i init, r ready';
COMMENT ON COLUMN subscriber.subscription_sequence.lsn IS
    'the position of the publisher that has the value; NULL: the sequence is not ready';
COMMENT ON COLUMN subscriber.subscription_sequence.problem IS
    'the reason why the last synchronization failed; NULL: it did not';
COMMENT ON COLUMN subscriber.subscription_sequence.kept IS 'the large object with this row';
ALTER TABLE subscriber.subscription_sequence ENABLE ROW LEVEL SECURITY;
CREATE POLICY follow ON subscriber.subscription_sequence
USING (EXISTS (SELECT FROM subscriber.subscription s WHERE s.subid = subscription_sequence.subid));
CREATE TRIGGER keep AFTER INSERT OR UPDATE OR DELETE ON subscriber.subscription_sequence
FOR EACH ROW EXECUTE FUNCTION subscriber.keep();
ALTER TABLE subscriber.subscription_sequence ENABLE ALWAYS TRIGGER keep;
CREATE TRIGGER notify_launcher AFTER INSERT OR UPDATE OR DELETE ON subscriber.subscription_sequence
FOR EACH STATEMENT EXECUTE FUNCTION subscriber.notify_launcher();

CREATE FUNCTION subscriber.set_sequence(subscription oid, namespace name, name name, last_value bigint,
                                        is_called boolean, typid oid, start_value bigint, increment bigint,
                                        least_value bigint, greatest_value bigint, cycles boolean, ahead boolean,
                                        caller subscriber.caller DEFAULT CURRENT_USER)
RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '10s' AS $$
DECLARE
    acting oid;
    owner oid;
    sequence oid;
    definition pg_catalog.pg_sequence;
    present bigint;
    present_called boolean;
BEGIN
    PERFORM subscriber.check_manager(subscription, caller);
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
                WHEN pg_catalog.pg_has_role(s.subowner, owner, subscriber.set_role_privilege()) THEN owner END
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
END $$;
COMMENT ON FUNCTION subscriber.set_sequence IS
    'Sets one sequence to the value of the publisher, if the sequence''s owner may or, with run_as_owner, the '
    'subscription''s owner. Nothing of theirs runs: setval() calls no trigger. `ahead`: the sequence only moves '
    'in the direction of its increment. Returns the outcome: set, ahead, dropped, mismatched or denied. Callers: duty '
    'owner.';


-- 12. Foreign servers -------------------------------------------------------------------------------------------------
--
-- CREATE SUBSCRIPTION ... SERVER, as in PostgreSQL 19: the options of a foreign server and of a user mapping that are
-- parameters of libpq are the connection string. Other options are those of the foreign-data wrapper.

CREATE FUNCTION subscriber.user_mapping_of(owner oid, server oid, caller name, OUT conninfo text, OUT problem text)
LANGUAGE plpgsql STABLE STRICT SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    present record;
    mapping record;
    is_launcher boolean := EXISTS (SELECT FROM pg_catalog.pg_roles r WHERE r.rolname = caller AND r.rolsuper)
        OR pg_catalog.has_function_privilege(caller,
               'subscriber.lead(text, timestamptz, interval)', 'EXECUTE');
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
                       o.value, '\', '\\'), '''', '\''') || '''', ' ' ORDER BY o.name), '')
              INTO conninfo
              FROM (SELECT DISTINCT ON (every.option_name) every.option_name AS name, every.option_value AS value
                      FROM (SELECT 1 AS place, * FROM pg_catalog.pg_options_to_table(mapping.umoptions)
                            UNION ALL
                            SELECT 2, * FROM pg_catalog.pg_options_to_table(present.srvoptions)) every
                     WHERE every.option_name = ANY (ARRAY[
                        'application_name', 'channel_binding', 'connect_timeout', 'dbname', 'gssdelegation',
                        'gssencmode', 'gsslib', 'host', 'hostaddr', 'keepalives', 'keepalives_count',
                        'keepalives_idle', 'keepalives_interval', 'krbsrvname', 'load_balance_hosts',
                        'max_protocol_version', 'min_protocol_version', 'options', 'passfile', 'password', 'port',
                        'require_auth', 'requirepeer', 'requiressl', 'service', 'ssl_max_protocol_version',
                        'ssl_min_protocol_version', 'sslcert', 'sslcertmode', 'sslcompression', 'sslcrl', 'sslcrldir',
                        'sslkey', 'sslmode', 'sslnegotiation', 'sslpassword', 'sslrootcert', 'sslsni',
                        'target_session_attrs', 'tcp_user_timeout', 'user'])
                     ORDER BY every.option_name, every.place) o;
        END IF;
    END IF;
END $$;
COMMENT ON FUNCTION subscriber.user_mapping_of IS
    'Returns the connection string of a foreign server for role `owner`, or the reason why there is none. The caller '
    'must inherit from the role whose user mapping it reads. The user mapping of PUBLIC is for launchers and '
    'superusers. NULL: an argument is NULL. Callers: other functions.';

CREATE FUNCTION subscriber.connection_of_server(owner oid, server oid, OUT conninfo text, OUT problem text,
                                                caller subscriber.caller DEFAULT CURRENT_USER)
LANGUAGE sql STABLE STRICT SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT m.conninfo, m.problem FROM subscriber.user_mapping_of(owner, server, caller) m
$$;
COMMENT ON FUNCTION subscriber.connection_of_server IS
    'Returns the connection string of a foreign server for role `owner`, or the reason why there is none. Callers: '
    'duty owner.';

CREATE FUNCTION subscriber.server_conninfo(subscription oid, OUT conninfo text, OUT problem text,
                                           caller subscriber.caller DEFAULT CURRENT_USER)
LANGUAGE sql STABLE STRICT SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT m.conninfo, m.problem
      FROM subscriber.subscription s, LATERAL subscriber.user_mapping_of(s.subowner, s.subserver, caller) m
     WHERE s.subid = subscription
$$;
COMMENT ON FUNCTION subscriber.server_conninfo IS
    'Returns the connection string of a subscription with a foreign server, or the reason why there is none. Callers: '
    'duty owner.';


-- 13. Moves of databases ----------------------------------------------------------------------------------------------
--
-- `subscriber migrate` moves a database to another server. A move has a row on both servers;
-- subscriber/migration/__init__.py says which one decides. Only the owner of the schema moves a database.

CREATE UNLOGGED TABLE subscriber.migration (
    name text PRIMARY KEY,
    serving text NOT NULL,
    phase text NOT NULL,
    facts jsonb NOT NULL,
    changed timestamptz NOT NULL DEFAULT clock_timestamp(),
    kept oid NOT NULL UNIQUE DEFAULT subscriber.new_record()
);
COMMENT ON TABLE subscriber.migration IS
    'Moves of this database to another server, or from one. Nobody but the schema''s owner uses it.';
COMMENT ON COLUMN subscriber.migration.name IS 'the subscription that copies the database to its new server';
COMMENT ON COLUMN subscriber.migration.serving IS 'the server that applications write to: source or target';
COMMENT ON COLUMN subscriber.migration.phase IS
    'the progress of the move to the other server: see subscriber/migration/plan.py';
COMMENT ON COLUMN subscriber.migration.facts IS
    'what later steps need, and the undo. `side`: source or target. `fence`: null, or of a closed fence `grants`, the '
    'roles that could connect before, each with its grant option, and `kept`, those that can now. `stopped`: null, or '
    'the position `at` which the subscription was disabled, and its `slot`. `held`: hooks have to resume the '
    'applications. `redirect`: hooks have to lead them here. `publications`: OIDs of those that the move has created';
COMMENT ON COLUMN subscriber.migration.changed IS 'the time at which the row was written';
COMMENT ON COLUMN subscriber.migration.kept IS 'the large object with this row';
CREATE TRIGGER keep AFTER INSERT OR UPDATE OR DELETE ON subscriber.migration
FOR EACH ROW EXECUTE FUNCTION subscriber.keep();
ALTER TABLE subscriber.migration ENABLE ALWAYS TRIGGER keep;

CREATE UNLOGGED TABLE subscriber.migration_step (
    stepid bigint PRIMARY KEY DEFAULT subscriber.new_id(),
    migration text NOT NULL,
    command text NOT NULL,
    step text NOT NULL,
    began timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended timestamptz,
    error text,
    detail jsonb NOT NULL DEFAULT '{}',
    kept oid NOT NULL UNIQUE DEFAULT subscriber.new_record_of_many()
);
COMMENT ON TABLE subscriber.migration_step IS
    'The steps of each move that this server has taken part in, by time. Nobody but the schema''s owner uses it.';
COMMENT ON COLUMN subscriber.migration_step.stepid IS 'a number, by time';
COMMENT ON COLUMN subscriber.migration_step.migration IS 'the name of the move';
COMMENT ON COLUMN subscriber.migration_step.command IS 'the command of `subscriber migrate` that ran the step';
COMMENT ON COLUMN subscriber.migration_step.step IS 'the name of the step';
COMMENT ON COLUMN subscriber.migration_step.began IS 'its start';
COMMENT ON COLUMN subscriber.migration_step.ended IS 'its end; NULL: it runs, or its command was killed';
COMMENT ON COLUMN subscriber.migration_step.error IS 'the reason why it failed; NULL: it did not';
COMMENT ON COLUMN subscriber.migration_step.detail IS 'its statements, positions and figures';
COMMENT ON COLUMN subscriber.migration_step.kept IS 'the large object with this row';
CREATE TRIGGER keep AFTER INSERT OR UPDATE OR DELETE ON subscriber.migration_step
FOR EACH ROW EXECUTE FUNCTION subscriber.keep();
ALTER TABLE subscriber.migration_step ENABLE ALWAYS TRIGGER keep;


-- 14. Audit and history -----------------------------------------------------------------------------------------------

CREATE UNLOGGED TABLE subscriber.audit (
    id bigint PRIMARY KEY DEFAULT subscriber.new_id(),
    began timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended timestamptz,
    subid oid NOT NULL,
    subname name NOT NULL,
    who text NOT NULL,
    role name NOT NULL,
    address text NOT NULL,
    action text NOT NULL,
    arguments jsonb NOT NULL,
    result text,
    summary jsonb,
    kept oid NOT NULL UNIQUE DEFAULT subscriber.new_record_of_many()
);
COMMENT ON TABLE subscriber.audit IS
    'Actions of people on the console, and comparisons of `subscriber verify`. A row is written before the action, and '
    'completed after it. It stays when its subscription is dropped: only the schema''s owner sees it then. Only '
    'begin_action() and end_action() write rows, and only the schema''s owner can delete them. Duty owner reads it.';
COMMENT ON COLUMN subscriber.audit.id IS 'a number, by time';
COMMENT ON COLUMN subscriber.audit.began IS 'the start of the action';
COMMENT ON COLUMN subscriber.audit.ended IS
    'its end; NULL: it runs, or its process was killed and the result is unknown';
COMMENT ON COLUMN subscriber.audit.subid IS 'the subscription, which may be dropped meanwhile';
COMMENT ON COLUMN subscriber.audit.subname IS 'the name that the subscription had';
COMMENT ON COLUMN subscriber.audit.who IS 'the label of the person''s token, or `command line`';
COMMENT ON COLUMN subscriber.audit.role IS 'the role that has run the action';
COMMENT ON COLUMN subscriber.audit.address IS 'the address of the client, or `local`';
COMMENT ON COLUMN subscriber.audit.action IS 'the action: see docs/console.md';
COMMENT ON COLUMN subscriber.audit.arguments IS 'its arguments';
COMMENT ON COLUMN subscriber.audit.result IS '`done`, or the reason why it failed; NULL: it has not ended';
COMMENT ON COLUMN subscriber.audit.summary IS 'the figures of a comparison or a repair; NULL: of another action';
COMMENT ON COLUMN subscriber.audit.kept IS 'the large object with this row';
CREATE INDEX audit_subid_id_idx ON subscriber.audit (subid, id);
ALTER TABLE subscriber.audit ENABLE ROW LEVEL SECURITY;
CREATE POLICY follow ON subscriber.audit
USING (EXISTS (SELECT FROM subscriber.subscription s WHERE s.subid = audit.subid));
CREATE TRIGGER keep AFTER INSERT OR UPDATE OR DELETE ON subscriber.audit
FOR EACH ROW EXECUTE FUNCTION subscriber.keep();
ALTER TABLE subscriber.audit ENABLE ALWAYS TRIGGER keep;

CREATE UNLOGGED TABLE subscriber.history (
    subid oid REFERENCES subscriber.subscription ON DELETE CASCADE,
    at timestamptz,
    transactions float8,
    changes float8,
    bytes float8,
    lag_bytes bigint,
    lag_seconds float8,
    retained_bytes bigint,
    PRIMARY KEY (subid, at)
);
COMMENT ON TABLE subscriber.history IS
    'Rates, lag and kept WAL of each subscription, by the minute, with the setting history_retention. A crash loses '
    'it. Duty owner reads it, and duty launcher writes it.';
COMMENT ON COLUMN subscriber.history.subid IS 'the subscription';
COMMENT ON COLUMN subscriber.history.at IS 'the end of the minute';
COMMENT ON COLUMN subscriber.history.transactions IS 'transactions per second; NULL: not known';
COMMENT ON COLUMN subscriber.history.changes IS 'changes per second; NULL: not known';
COMMENT ON COLUMN subscriber.history.bytes IS 'bytes received per second; NULL: not known';
COMMENT ON COLUMN subscriber.history.lag_bytes IS 'the greatest lag of the minute; NULL: not known';
COMMENT ON COLUMN subscriber.history.lag_seconds IS 'the greatest lag of the minute; NULL: not known';
COMMENT ON COLUMN subscriber.history.retained_bytes IS
    'the WAL that the publisher kept for the slot at the end of the minute; NULL: not known';
CREATE INDEX history_at_idx ON subscriber.history (at);
ALTER TABLE subscriber.history ENABLE ROW LEVEL SECURITY;
CREATE POLICY follow ON subscriber.history
USING (EXISTS (SELECT FROM subscriber.subscription s WHERE s.subid = history.subid));

CREATE FUNCTION subscriber.begin_action(subscription oid, who text, address text, action text, arguments jsonb,
                                        caller subscriber.caller DEFAULT CURRENT_USER)
RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    number bigint;
BEGIN
    PERFORM subscriber.check_manager(subscription, caller);
    INSERT INTO subscriber.audit (subid, subname, who, role, address, action, arguments)
    SELECT s.subid, s.subname, begin_action.who, caller, begin_action.address, begin_action.action,
           begin_action.arguments
      FROM subscriber.subscription s WHERE s.subid = subscription
    RETURNING id INTO number;
    RETURN number;
END $$;
COMMENT ON FUNCTION subscriber.begin_action IS 'Inserts a row of audit and returns its number. Callers: duty owner.';

CREATE FUNCTION subscriber.end_action(number bigint, outcome text, figures jsonb,
                                      caller subscriber.caller DEFAULT CURRENT_USER)
RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    UPDATE subscriber.audit a SET ended = pg_catalog.clock_timestamp(), result = outcome, summary = figures
     WHERE a.id = number AND a.role = caller AND a.ended IS NULL
$$;
COMMENT ON FUNCTION subscriber.end_action IS
    'Completes a row of audit that the caller has written. `outcome` is the column result, and `figures` is '
    'summary. Callers: duty owner.';


-- 15. Code that runs when a table is written --------------------------------------------------------------------------
--
-- Triggers, rules, expressions, domains and operators of a table run with every change that a worker applies, and the
-- planner runs expressions of its extended statistics. SET ROLE to the table's owner is no protection: the code can
-- reset the role, and then has the rights of the session's own role.
--
-- A role is *trusted* in three cases: it is a superuser, it may SET ROLE to the session's own role, or the subscription
-- names it in option trusted_owners. Code of all other roles is *foreign*. The owner of a function, a type or an
-- operator decides, because the owner can replace it at any time. The text of an expression belongs to the table's
-- owner, so it may only use functions that run no other code. Foreign code of a role must not run in a session whose
-- role has more rights than it.
--
-- A table is *guarded* if its session may have more rights than an owner of the table, of a partition or of a parent,
-- who could add foreign code at any time. Each transaction has to lock the table and compare its shape before it uses
-- the table. A shape is a text that changes with the definition of the table.
--
-- The functions are in PL/pgSQL, whose plans a session keeps. The plan of a function in SQL is made for each call.

CREATE FUNCTION subscriber.is_trusted(role oid, trusted_owners name[]) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    RETURN (
    SELECT coalesce((
        SELECT r.rolsuper OR r.rolname = session_user OR r.rolname = ANY (trusted_owners)
               OR pg_catalog.pg_has_role(r.oid, session_user, subscriber.set_role_privilege())
          FROM pg_catalog.pg_roles r WHERE r.oid = role), false));
END
$$;
COMMENT ON FUNCTION subscriber.is_trusted IS
    'Returns true if code of the role may run in the session. Callers: duties owner and apply.';

CREATE FUNCTION subscriber.exceeds(role oid) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    RETURN (
    SELECT s.oid <> role AND (
           s.rolsuper OR s.rolcreaterole OR s.rolcreatedb OR s.rolreplication OR s.rolbypassrls
           OR pg_catalog.has_function_privilege(
                  s.oid, 'subscriber.claim_progress(oid, oid, subscriber.caller)', 'EXECUTE')
           OR pg_catalog.has_any_column_privilege(s.oid, 'subscriber.subscription', 'INSERT')
           OR pg_catalog.has_database_privilege(s.oid, pg_catalog.current_database(), 'CREATE')
              AND NOT pg_catalog.has_database_privilege(role, pg_catalog.current_database(), 'CREATE')
           OR EXISTS (SELECT FROM pg_catalog.pg_roles m
                       WHERE m.oid <> s.oid AND pg_catalog.pg_has_role(s.oid, m.oid, 'MEMBER')
                         AND NOT pg_catalog.pg_has_role(role, m.oid, 'MEMBER'))
           OR EXISTS (SELECT FROM pg_catalog.pg_shdepend d
                       WHERE d.refclassid = 'pg_catalog.pg_authid'::pg_catalog.regclass AND d.refobjid = s.oid
                         AND d.dbid IN (0, (SELECT b.oid FROM pg_catalog.pg_database b
                                             WHERE b.datname = pg_catalog.current_database()))
                         AND d.deptype IN ('o', 'a')
                         AND d.classid <> 'pg_catalog.pg_database'::pg_catalog.regclass
                         AND d.classid::pg_catalog.regclass::text <> 'pg_parameter_acl'
                         AND NOT (d.classid = 'pg_catalog.pg_namespace'::pg_catalog.regclass
                                  AND d.objid = 'subscriber'::pg_catalog.regnamespace AND d.deptype = 'a')
                         AND NOT (d.classid = 'pg_catalog.pg_proc'::pg_catalog.regclass AND d.deptype = 'a'
                                  AND EXISTS (SELECT FROM pg_catalog.pg_proc f
                                               WHERE f.oid = d.objid
                                                 AND (f.pronamespace = 'subscriber'::pg_catalog.regnamespace
                                                      OR f.proname ~ '^pg_replication_origin_')))))
      FROM pg_catalog.pg_roles s WHERE s.rolname = session_user);
END
$$;
COMMENT ON FUNCTION subscriber.exceeds IS
    'Returns true if the session''s role has more rights than the other role. All grants to it and all objects of it '
    'count, except what its duties need. Callers: duties owner and apply.';

CREATE FUNCTION subscriber.code_in(expression text) RETURNS SETOF oid
LANGUAGE plpgsql STABLE ROWS 10 SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT m[1]::oid FROM regexp_matches(expression, '[:]funcid (\d+)', 'g') m
    UNION
    SELECT o.oprcode::oid FROM regexp_matches(expression, '[:]opno (\d+)', 'g') m
      JOIN pg_catalog.pg_operator o ON o.oid = m[1]::oid
    UNION
    SELECT o.oprcode::oid FROM regexp_matches(expression, '[:]opnos \(o ([\d ]+)\)', 'g') m,
           LATERAL regexp_split_to_table(m[1], ' ') s JOIN pg_catalog.pg_operator o ON o.oid = s::oid;
END
$$;
COMMENT ON FUNCTION subscriber.code_in IS
    'Returns the functions that a stored expression names. Texts in it are escaped, so all matching words are its own. '
    'Callers: duties owner and apply.';

CREATE FUNCTION subscriber.types_in(expression text) RETURNS SETOF oid
LANGUAGE plpgsql STABLE ROWS 10 SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT t.oid FROM regexp_matches(expression, '[:][a-z_]*type(id)? (\d+)', 'g') m
      JOIN pg_catalog.pg_type t ON t.oid = m[2]::oid;
END
$$;
COMMENT ON FUNCTION subscriber.types_in IS
    'Returns the types that a stored expression names. Callers: duties owner and apply.';

CREATE FUNCTION subscriber.types_within(type oid) RETURNS SETOF oid
LANGUAGE plpgsql STABLE ROWS 10 SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH RECURSIVE found (oid) AS (
        SELECT type
        UNION
        SELECT part.oid FROM found f JOIN pg_catalog.pg_type t ON t.oid = f.oid,
               LATERAL (
                   SELECT t.typelem WHERE t.typelem <> 0
                   UNION ALL SELECT t.typbasetype WHERE t.typbasetype <> 0
                   UNION ALL SELECT a.atttypid FROM pg_catalog.pg_attribute a
                              WHERE t.typtype = 'c' AND a.attrelid = t.typrelid AND a.attnum > 0
                                AND NOT a.attisdropped
                   UNION ALL SELECT r.rngsubtype FROM pg_catalog.pg_range r
                              WHERE t.typtype = 'r' AND r.rngtypid = t.oid
                   UNION ALL SELECT r.rngtypid FROM pg_catalog.pg_range r
                              WHERE t.typtype = 'm'
                                AND (pg_catalog.to_jsonb(r) ->> 'rngmultitypid')::oid = t.oid
                   UNION ALL SELECT n FROM pg_catalog.pg_constraint k,
                                    LATERAL subscriber.types_in(k.conbin::text) n WHERE k.contypid = t.oid
                   UNION ALL SELECT n FROM subscriber.types_in(t.typdefaultbin::text) n
               ) AS part (oid))
    SELECT oid FROM found;
END
$$;
COMMENT ON FUNCTION subscriber.types_within IS
    'Returns a type and all types that it contains. Callers: duties owner and apply.';

CREATE FUNCTION subscriber.functions_of_opclass(opclass oid) RETURNS SETOF oid
LANGUAGE plpgsql STABLE ROWS 10 SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT p.amproc::oid FROM pg_catalog.pg_opclass c JOIN pg_catalog.pg_amproc p ON p.amprocfamily = c.opcfamily
     WHERE c.oid = opclass
    UNION
    SELECT o.oprcode::oid FROM pg_catalog.pg_opclass c JOIN pg_catalog.pg_amop a ON a.amopfamily = c.opcfamily
      JOIN pg_catalog.pg_operator o ON o.oid = a.amopopr
     WHERE c.oid = opclass;
END
$$;
COMMENT ON FUNCTION subscriber.functions_of_opclass IS
    'Returns the functions of an operator class. Callers: duties owner and apply.';

CREATE FUNCTION subscriber.code_of_type(type oid) RETURNS TABLE (owner oid, what text)
LANGUAGE plpgsql STABLE ROWS 10 SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH parts AS (SELECT t.* FROM subscriber.types_within(type) w JOIN pg_catalog.pg_type t ON t.oid = w),
    functions (oid) AS (
        SELECT f FROM parts p, LATERAL (VALUES (p.typinput::oid), (p.typoutput), (p.typreceive), (p.typsend),
                                               (p.typmodin)) AS v (f)
        UNION SELECT f FROM parts p JOIN pg_catalog.pg_range r ON r.rngtypid = p.oid,
                     LATERAL (VALUES (r.rngcanonical::oid), (r.rngsubdiff)) AS v (f)
        UNION SELECT f FROM parts p JOIN pg_catalog.pg_range r ON r.rngtypid = p.oid,
                     LATERAL subscriber.functions_of_opclass(r.rngsubopc) f
        UNION SELECT f FROM parts p JOIN pg_catalog.pg_opclass c ON c.opcintype = p.oid AND c.opcdefault,
                     LATERAL subscriber.functions_of_opclass(c.oid) f
        UNION SELECT f FROM parts p JOIN pg_catalog.pg_constraint k ON k.contypid = p.oid,
                     LATERAL subscriber.code_in(k.conbin::text) f
        UNION SELECT f FROM parts p, LATERAL subscriber.code_in(p.typdefaultbin::text) f)
    SELECT p.typowner, 'type ' || pg_catalog.format_type(p.oid, -1) FROM parts p
     WHERE p.typtype IN ('d', 'c', 'r', 'm')
    UNION
    SELECT f.proowner, 'function ' || f.oid::pg_catalog.regprocedure::text
      FROM functions u JOIN pg_catalog.pg_proc f ON f.oid = u.oid;
END
$$;
COMMENT ON FUNCTION subscriber.code_of_type IS
    'Returns the code that belongs to a type, with its owners. An enum has only labels. Callers: duties owner and '
    'apply.';

CREATE FUNCTION subscriber.is_harmless(function oid) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    RETURN (
    SELECT CASE
        WHEN f.provolatile = 'i' THEN true
        WHEN f.pronamespace <> 'pg_catalog'::pg_catalog.regnamespace THEN f.pronargs = 0
        WHEN f.proname = ANY (ARRAY['now', 'clock_timestamp', 'statement_timestamp', 'transaction_timestamp',
                                      'timeofday', 'random', 'random_normal', 'gen_random_uuid', 'uuidv4', 'uuidv7',
                                      'nextval', 'currval', 'lastval', 'txid_current', 'pg_current_xact_id',
                                      'concat', 'concat_ws', 'format', 'array_to_string', 'current_setting',
                                      'inet_client_addr', 'inet_server_addr', 'pg_backend_pid', 'pg_typeof',
                                      'quote_literal', 'quote_nullable']) THEN true
        ELSE f.provolatile = 's' AND f.proname !~ '_to_xml'
             AND NOT EXISTS (SELECT FROM unnest(f.proargtypes::oid[] || f.prorettype) u (oid)
                               JOIN pg_catalog.pg_type t ON t.oid = u.oid
                              WHERE t.typnamespace <> f.pronamespace
                                 OR ltrim(t.typname, '_') <> ALL (ARRAY[
                                        'bool', 'int2', 'int4', 'int8', 'float4', 'float8', 'numeric', 'text',
                                        'varchar', 'bpchar', 'char', 'bytea', 'date', 'time', 'timetz', 'timestamp',
                                        'timestamptz', 'interval', 'uuid', 'json', 'jsonb', 'inet', 'cidr', 'macaddr',
                                        'bit', 'varbit', 'money', 'pg_lsn', 'tsvector', 'tsquery']))
        END
      FROM pg_catalog.pg_proc f WHERE f.oid = function);
END
$$;
COMMENT ON FUNCTION subscriber.is_harmless IS
    'Returns true if a function of a trusted owner only computes with its arguments. Immutable functions do, and so '
    'do those that are listed, and functions of extensions and users without arguments. A stable function of the '
    'server whose arguments have the listed types cannot be given code to run. Callers: duties owner and apply.';

CREATE FUNCTION subscriber.code_of_expression(expression text, author oid, trusted_author boolean)
RETURNS TABLE (owner oid, what text)
LANGUAGE plpgsql STABLE ROWS 10 SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH functions AS (
        SELECT f.oid, f.proowner, 'function ' || f.oid::pg_catalog.regprocedure::text AS what
          FROM subscriber.code_in(expression) u JOIN pg_catalog.pg_proc f ON f.oid = u)
    SELECT f.proowner, f.what FROM functions f
    UNION
    SELECT c.owner, c.what FROM subscriber.types_in(expression) t, LATERAL subscriber.code_of_type(t) c
    UNION
    SELECT author, 'a call of ' || f.what FROM functions f
     WHERE NOT trusted_author AND NOT subscriber.is_harmless(f.oid)
    UNION
    SELECT author, 'an expression of kind ' || m[1]
      FROM regexp_matches(expression, '(?<!\\)\{([A-Z0-9_]+)', 'g') m
     WHERE NOT trusted_author AND m[1] <> ALL (ARRAY[
                'ARRAY', 'ARRAYCOERCEEXPR', 'ARRAYEXPR', 'BOOLEANTEST', 'BOOLEXPR', 'CASE', 'CASEEXPR', 'CASETESTEXPR',
                'CASEWHEN', 'COALESCE', 'COALESCEEXPR', 'COERCETODOMAIN', 'COERCETODOMAINVALUE', 'COERCEVIAIO',
                'COLLATE', 'COLLATEEXPR', 'CONST', 'DISTINCTEXPR', 'FIELDSELECT', 'FUNCEXPR', 'MINMAX', 'MINMAXEXPR',
                'NAMEDARGEXPR', 'NEXTVALUEEXPR', 'NULLIFEXPR', 'NULLTEST', 'OPEXPR', 'RELABELTYPE', 'ROW',
                'ROWCOMPARE', 'ROWCOMPAREEXPR', 'ROWEXPR', 'SCALARARRAYOPEXPR', 'SQLVALUEFUNCTION', 'SUBSCRIPTINGREF',
                'VAR', 'WHEN']);
END
$$;
COMMENT ON FUNCTION subscriber.code_of_expression IS
    'Returns the code that belongs to a stored expression, with its owners. `author` has written it. The listed node '
    'types run nothing but the functions and types that they name, in the formats of PostgreSQL 13 to 19. An '
    'expression with another node counts as foreign. Callers: duties owner and apply.';

CREATE FUNCTION subscriber.foreign_code(relation oid, trusted_owners name[], replica boolean, acting name)
RETURNS TABLE (owner name, what text, used_as_default name, exceeded boolean)
LANGUAGE plpgsql STABLE ROWS 10 SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    IF EXISTS (
        SELECT FROM pg_catalog.pg_class c
         WHERE c.oid = relation AND c.relkind = 'r' AND NOT c.relispartition
           AND NOT c.relhastriggers AND NOT c.relhasrules AND c.relchecks = 0)
       AND NOT EXISTS (
        SELECT FROM pg_catalog.pg_attribute a
         WHERE a.attrelid = relation AND (a.atthasdef OR a.attnum > 0 AND NOT a.attisdropped AND a.atttypid >= 16384))
       AND NOT EXISTS (
        SELECT FROM pg_catalog.pg_index i
         WHERE i.indrelid = relation AND (i.indisexclusion OR i.indexprs IS NOT NULL OR i.indpred IS NOT NULL
                                          OR 16384 <= ANY (i.indclass::oid[])))
       AND NOT EXISTS (SELECT FROM pg_catalog.pg_statistic_ext s WHERE s.stxrelid = relation)
    THEN
        RETURN;
    END IF;
    RETURN QUERY
    WITH tree AS MATERIALIZED (
        SELECT c.oid, c.relowner, c.relkind, c.relname, subscriber.is_trusted(c.relowner, trusted_owners) AS trusted
          FROM unnest(ARRAY(SELECT relation
                            UNION SELECT p.relid FROM pg_catalog.pg_partition_tree(relation) p)) AS parts (oid)
          JOIN pg_catalog.pg_class c ON c.oid = parts.oid),
    -- a partition that is written directly is checked against the keys of all it is a part of
    keys AS (
        SELECT p.partrelid, p.partexprs::text AS expression, p.partclass::oid[] AS opclasses, c.relowner,
               subscriber.is_trusted(c.relowner, trusted_owners) AS trusted
          FROM pg_catalog.pg_partitioned_table p JOIN pg_catalog.pg_class c ON c.oid = p.partrelid
         WHERE p.partrelid IN (SELECT t.oid FROM tree t)
            OR p.partrelid IN (SELECT a FROM pg_catalog.pg_partition_ancestors(relation) a)),
    fires (relid, relowner, trusted, function, label, condition) AS (
        SELECT t.oid, t.relowner, t.trusted, g.tgfoid, 'trigger ' || pg_catalog.quote_ident(g.tgname), g.tgqual::text
          FROM tree t JOIN pg_catalog.pg_trigger g ON g.tgrelid = t.oid
         WHERE NOT g.tgisinternal
           AND NOT EXISTS (SELECT FROM pg_catalog.pg_proc own
                            WHERE own.oid = g.tgfoid AND own.pronamespace = 'subscriber'::pg_catalog.regnamespace
                              AND pg_catalog.starts_with(own.proname, 'deleted_'))
           AND CASE WHEN replica THEN g.tgenabled IN ('R', 'A') ELSE g.tgenabled IN ('O', 'A') END),
    indexes AS (
        SELECT t.relowner, t.trusted, 'index ' || pg_catalog.quote_ident(c.relname) AS label,
               i.indclass::oid[] AS opclasses, i.indexprs::text AS columns, i.indpred::text AS predicate
          FROM tree t JOIN pg_catalog.pg_index i ON i.indrelid = t.oid
          JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid),
    expressions (relowner, trusted, expression, label, used_as_default) AS (
        SELECT f.relowner, f.trusted, f.condition, f.label, NULL::name FROM fires f WHERE f.condition IS NOT NULL
        UNION ALL
        SELECT t.relowner, t.trusted, d.adbin::text,
               CASE a.attgenerated WHEN '' THEN 'default' ELSE 'generated column' END || ' of '
               || pg_catalog.quote_ident(a.attname), CASE a.attgenerated WHEN '' THEN a.attname END
          FROM tree t JOIN pg_catalog.pg_attrdef d ON d.adrelid = t.oid
          JOIN pg_catalog.pg_attribute a ON a.attrelid = d.adrelid AND a.attnum = d.adnum
        UNION ALL
        SELECT t.relowner, t.trusted, k.conbin::text, 'constraint ' || pg_catalog.quote_ident(k.conname), NULL
          FROM tree t JOIN pg_catalog.pg_constraint k ON k.conrelid = t.oid WHERE k.conbin IS NOT NULL
        UNION ALL
        SELECT i.relowner, i.trusted, e, i.label, NULL
          FROM indexes i, LATERAL unnest(ARRAY[i.columns, i.predicate]) e WHERE e IS NOT NULL
        UNION ALL
        SELECT k.relowner, k.trusted, k.expression, 'partition key', NULL FROM keys k WHERE k.expression IS NOT NULL
        UNION ALL
        SELECT s.stxowner, subscriber.is_trusted(s.stxowner, trusted_owners),
               pg_catalog.to_jsonb(s) ->> 'stxexprs',
               'statistics ' || pg_catalog.quote_ident(s.stxname), NULL
          FROM tree t JOIN pg_catalog.pg_statistic_ext s ON s.stxrelid = t.oid
         WHERE pg_catalog.to_jsonb(s) ->> 'stxexprs' IS NOT NULL),
    opclasses (oid, label) AS (
        SELECT o, i.label FROM indexes i, LATERAL unnest(i.opclasses) o
        UNION
        SELECT o, 'partition key' FROM keys k, LATERAL unnest(k.opclasses) o),
    functions (oid, label) AS (
        SELECT f.function, f.label FROM fires f
        UNION
        SELECT f, o.label FROM opclasses o, LATERAL subscriber.functions_of_opclass(o.oid) f WHERE o.oid >= 16384
        UNION
        SELECT o.oprcode::oid, 'constraint ' || pg_catalog.quote_ident(k.conname)
          FROM tree t JOIN pg_catalog.pg_constraint k ON k.conrelid = t.oid AND k.contype = 'x',
               LATERAL unnest(k.conexclop) e JOIN pg_catalog.pg_operator o ON o.oid = e),
    types (oid, label) AS (
        SELECT DISTINCT a.atttypid, 'column ' || pg_catalog.quote_ident(a.attname)
          FROM tree t JOIN pg_catalog.pg_attribute a ON a.attrelid = t.oid
         WHERE a.attnum > 0 AND NOT a.attisdropped AND a.atttypid >= 16384),
    -- at once: the owner of each function of the server would be looked at otherwise
    found (owner, what, used_as_default) AS MATERIALIZED (
        SELECT c.owner, e.label || ': ' || c.what, e.used_as_default
          FROM expressions e, LATERAL subscriber.code_of_expression(e.expression, e.relowner, e.trusted) c
        UNION ALL
        SELECT f.proowner, u.label || ': function ' || f.oid::pg_catalog.regprocedure::text, NULL
          FROM functions u JOIN pg_catalog.pg_proc f ON f.oid = u.oid
        UNION ALL
        SELECT c.owner, u.label || ': ' || c.what, NULL FROM types u, LATERAL subscriber.code_of_type(u.oid) c
        UNION ALL  -- these run queries on tables that the arguments name
        SELECT f.relowner, f.label, NULL FROM fires f JOIN pg_catalog.pg_proc p ON p.oid = f.function
         WHERE p.proname IN ('check_primary_key', 'check_foreign_key')
        UNION ALL
        SELECT t.relowner, 'rule ' || pg_catalog.quote_ident(r.rulename), NULL
          FROM tree t JOIN pg_catalog.pg_rewrite r ON r.ev_class = t.oid AND r.ev_type <> '1'
         WHERE CASE WHEN replica THEN r.ev_enabled IN ('R', 'A') ELSE r.ev_enabled IN ('O', 'A') END
        UNION ALL
        SELECT t.relowner, 'foreign table ' || pg_catalog.quote_ident(t.relname), NULL FROM tree t WHERE t.relkind = 'f'
        UNION ALL  -- foreign keys cascade where they are enforced
        SELECT c.relowner, 'foreign key ' || pg_catalog.quote_ident(k.conname), NULL
          FROM tree t JOIN pg_catalog.pg_constraint k ON k.confrelid = t.oid AND k.contype = 'f'
          JOIN pg_catalog.pg_class c ON c.oid = k.conrelid
         WHERE NOT replica AND (k.confdeltype IN ('c', 'n', 'd') OR k.confupdtype IN ('c', 'n', 'd'))
        UNION ALL  -- and their checks call casts, which the owner of a type can replace at any time
        SELECT y.typowner,
               'foreign key ' || pg_catalog.quote_ident(k.conname) || ': casts of type '
               || pg_catalog.format_type(y.oid, -1), NULL
          FROM tree t JOIN pg_catalog.pg_constraint k ON k.contype = 'f' AND t.oid IN (k.conrelid, k.confrelid)
         CROSS JOIN LATERAL unnest(k.conkey, k.confkey) c (referencing, referenced)
          JOIN pg_catalog.pg_attribute a ON a.attrelid = k.conrelid AND a.attnum = c.referencing
          JOIN pg_catalog.pg_attribute b ON b.attrelid = k.confrelid AND b.attnum = c.referenced
          JOIN pg_catalog.pg_type y ON y.oid IN (a.atttypid, b.atttypid)
         WHERE NOT replica AND a.atttypid <> b.atttypid AND y.oid >= 16384)
    SELECT DISTINCT pg_catalog.pg_get_userbyid(f.owner), f.what, f.used_as_default,
           subscriber.exceeds(coalesce((SELECT r.oid FROM pg_catalog.pg_roles r WHERE r.rolname = acting), f.owner))
      FROM found f WHERE NOT subscriber.is_trusted(f.owner, trusted_owners);
END
$$;
COMMENT ON FUNCTION subscriber.foreign_code IS
    'Returns the foreign code of a table and its partitions. `replica`: session_replication_role = replica. `acting` '
    'is the role that runs all code if it is not the table''s owner: it has chosen to run the code, and its rights '
    'must not be exceeded. `exceeded`: the session has more rights than the owner of the code. `used_as_default` is a '
    'column whose default runs only if the publisher does not send the column; NULL: the code always runs. A plain '
    'table without any code is found first, without the search. Callers: duties owner and apply.';

CREATE FUNCTION subscriber.table_safety(relation oid, trusted_owners name[], replica boolean, acting name) RETURNS json
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    RETURN (
    WITH tree AS (
        SELECT c.oid, c.relowner, c.relkind, n.nspname, c.relname
          FROM unnest(ARRAY(SELECT relation
                            UNION SELECT p.relid FROM pg_catalog.pg_partition_tree(relation) p)) AS parts (oid)
          JOIN pg_catalog.pg_class c ON c.oid = parts.oid
          JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace),
    owners AS (
        SELECT t.relowner FROM tree t
        UNION
        SELECT c.relowner FROM pg_catalog.pg_class c
         WHERE c.oid IN (SELECT a FROM pg_catalog.pg_partition_ancestors(relation) a))
    SELECT pg_catalog.json_build_object(
        'foreign', (SELECT pg_catalog.json_agg(pg_catalog.json_build_array(f.owner, f.what, f.used_as_default,
                                                                           f.exceeded) ORDER BY f.owner, f.what)
                      FROM subscriber.foreign_code(relation, trusted_owners, replica, acting) f),
        'guarded', (SELECT bool_or(NOT subscriber.is_trusted(o.relowner, trusted_owners)
                                   AND subscriber.exceeds(coalesce((SELECT r.oid FROM pg_catalog.pg_roles r
                                                                     WHERE r.rolname = acting), o.relowner)))
                      FROM owners o),
        'parents', (SELECT pg_catalog.json_agg(pg_catalog.json_build_array(t.nspname, t.relname) ORDER BY t.oid)
                      FROM tree t WHERE t.relkind = 'p')));
END
$$;
COMMENT ON FUNCTION subscriber.table_safety IS
    'Returns the foreign code of a table, whether it is guarded, and its partitioned tables, as JSON. Attaching a '
    'partition takes a weaker lock than any other change, so partitioned tables are locked in a stronger mode. '
    'Callers: duties owner and apply.';

CREATE FUNCTION subscriber.table_shape(relation oid, owner text) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN (
        SELECT pg_catalog.concat_ws(' ',
          CASE WHEN owner = '' THEN true
               ELSE pg_catalog.pg_has_role(owner::pg_catalog.name, c.relowner, subscriber.set_role_privilege())
          END,
          n.nspname, c.relname, c.relkind, c.relreplident, c.relowner,
          c.relrowsecurity, c.relforcerowsecurity, c.relhasrules, c.relchecks,
          (SELECT pg_catalog.string_agg(a.xmin::pg_catalog.text, ',' ORDER BY a.attnum)
             FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0), '/',
          (SELECT pg_catalog.string_agg(pg_catalog.concat(
                      i.indexrelid, ':', i.indisunique, i.indisprimary, i.indisexclusion, i.indimmediate,
                      i.indisvalid, i.indisready, i.indislive, i.indisreplident), ',' ORDER BY i.indexrelid)
             FROM pg_catalog.pg_index i WHERE i.indrelid = c.oid), '/',
          (SELECT pg_catalog.string_agg(t.xmin::pg_catalog.text, ',' ORDER BY t.oid)
             FROM pg_catalog.pg_trigger t WHERE t.tgrelid = c.oid),
          CASE WHEN c.relkind = 'p' THEN
            (SELECT pg_catalog.string_agg(pg_catalog.concat(
                        p.relid::pg_catalog.oid, ':', i.indexrelid, ':',
                        i.indisunique, i.indisprimary, i.indisexclusion, i.indimmediate,
                        i.indisvalid, i.indisready, i.indislive, i.indisreplident),
                    ',' ORDER BY p.relid::pg_catalog.oid, i.indexrelid)
               FROM pg_catalog.pg_partition_tree(c.oid) p LEFT JOIN pg_catalog.pg_index i ON i.indrelid = p.relid) END)
          FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
         WHERE c.oid = relation);
END $$;
COMMENT ON FUNCTION subscriber.table_shape IS
    'Returns the shape of a table, and whether `owner` may act as its owner. An empty `owner` is not asked. The '
    'versions of rows in the server''s catalog are part of it; of an index it is the properties, because TRUNCATE and '
    'REINDEX write its row. Callers: duties owner and apply.';

CREATE FUNCTION subscriber.guarded_shape(relation oid, owner text, code_of name[]) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN concat_ws(' ', subscriber.table_shape(relation, owner),
        (SELECT bool_or(subscriber.exceeds(r.oid)) FROM pg_catalog.pg_roles r WHERE r.rolname = ANY (code_of)),
        (WITH tree AS (
            SELECT c.oid FROM pg_catalog.pg_class c WHERE c.oid = relation
            UNION SELECT p.relid FROM pg_catalog.pg_partition_tree(relation) p
            UNION SELECT a FROM pg_catalog.pg_partition_ancestors(relation) a)
         SELECT md5(string_agg(concat_ws(',', c.oid, c.relowner, c.relkind, c.relhasrules,
            (SELECT string_agg(a.xmin::text, ',' ORDER BY a.attnum) FROM pg_catalog.pg_attribute a
              WHERE a.attrelid = c.oid AND a.attnum > 0), '/',
            (SELECT string_agg(concat(k.oid, ':', k.xmin), ',' ORDER BY k.oid) FROM pg_catalog.pg_constraint k
              WHERE k.conrelid = c.oid), '/',
            (SELECT string_agg(concat(d.oid, ':', d.xmin), ',' ORDER BY d.oid) FROM pg_catalog.pg_attrdef d
              WHERE d.adrelid = c.oid), '/',
            (SELECT string_agg(concat(
                        i.indexrelid, ':', i.indisunique, i.indisprimary, i.indisexclusion, i.indimmediate,
                        i.indisvalid, i.indisready, i.indislive, i.indisreplident), ',' ORDER BY i.indexrelid)
               FROM pg_catalog.pg_index i WHERE i.indrelid = c.oid), '/',
            (SELECT string_agg(concat(r.oid, ':', r.xmin), ',' ORDER BY r.oid) FROM pg_catalog.pg_rewrite r
              WHERE r.ev_class = c.oid), '/',
            (SELECT string_agg(concat(t.oid, ':', t.xmin), ',' ORDER BY t.oid) FROM pg_catalog.pg_trigger t
              WHERE t.tgrelid = c.oid), '/',
            (SELECT string_agg(concat(s.oid, ':', s.xmin), ',' ORDER BY s.oid)
               FROM pg_catalog.pg_statistic_ext s WHERE s.stxrelid = c.oid)), ' ' ORDER BY c.oid))
          FROM pg_catalog.pg_class c WHERE c.oid IN (SELECT t.oid FROM tree t)));
END $$;
COMMENT ON FUNCTION subscriber.guarded_shape IS
    'Returns the shape of a guarded table: with the versions of all objects that its safety depends on, and whether '
    'the session has more rights than the roles `code_of`, whose code it runs. Callers: duties owner and apply.';


-- 16. Identity, crashes and restored dumps ----------------------------------------------------------------------------
--
-- A dump, a template and a physical copy carry this schema to another database, where no user has decided to run the
-- subscriptions. A launcher there would take the changes away from the original. So the schema names the database that
-- it belongs to, and subscriptions run only there. rebind() makes it belong to its present database.

-- subscriber/catalog/schema.py creates this table, before this file runs.
COMMENT ON TABLE subscriber.alembic_version IS
    'The revision of the schema, for Alembic. The program reads it from the comment of the schema, which survives a '
    'crash. Everybody may read it.';
COMMENT ON COLUMN subscriber.alembic_version.version_num IS 'the revision';

CREATE UNLOGGED TABLE subscriber.identity (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    system_identifier text NOT NULL,
    timeline bigint,
    database_oid oid NOT NULL,
    database_name name NOT NULL,
    sync_id text NOT NULL,
    accept_timelines boolean NOT NULL DEFAULT false,
    kept oid NOT NULL UNIQUE DEFAULT subscriber.new_record()
);
COMMENT ON TABLE subscriber.identity IS
    'The database that this schema belongs to. Elsewhere no subscription runs: see rebind(). Duty owner reads it.';
COMMENT ON COLUMN subscriber.identity.only_row IS 'always true: there is one row';
COMMENT ON COLUMN subscriber.identity.system_identifier IS 'the cluster';
COMMENT ON COLUMN subscriber.identity.timeline IS 'the timeline of the cluster; NULL: not known';
COMMENT ON COLUMN subscriber.identity.database_oid IS 'the number of the database';
COMMENT ON COLUMN subscriber.identity.database_name IS 'the name of the database';
COMMENT ON COLUMN subscriber.identity.sync_id IS
    'part of the names of slots for table synchronization; it does not change when a server is upgraded';
COMMENT ON COLUMN subscriber.identity.accept_timelines IS 'a new timeline needs no rebind(): see accept_timelines()';
COMMENT ON COLUMN subscriber.identity.kept IS 'the large object with this row';
CREATE TRIGGER keep AFTER INSERT OR UPDATE OR DELETE ON subscriber.identity
FOR EACH ROW EXECUTE FUNCTION subscriber.keep();
ALTER TABLE subscriber.identity ENABLE ALWAYS TRIGGER keep;

CREATE FUNCTION subscriber.restore() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    -- Tables by the function of their column `kept`, in the order of foreign keys.
    few name[] := ARRAY['identity', 'migration', 'subscription', 'subscription_rel', 'progress_record'];
    many name[] := ARRAY['conflict_history', 'copied_range', 'subscription_sequence', 'quarantine', 'migration_step',
                         'repair_transaction', 'audit', 'touched_range', 'verification'];
    relation name;
    document jsonb;
    columns text;
BEGIN
    LOCK TABLE subscriber.complete IN EXCLUSIVE MODE;
    IF EXISTS (SELECT FROM subscriber.complete) THEN
        RETURN;
    END IF;
    FOREACH relation IN ARRAY few || many LOOP
        FOR document IN
            SELECT s FROM subscriber.saved(relation,
                                           CASE WHEN relation = ANY (many) THEN 3600000000 ELSE 3500000000 END,
                                           CASE WHEN relation = ANY (many) THEN 4200000000 ELSE 3600000000 END) s LOOP
            -- A column that the record does not know has been added since, and has a default.
            SELECT string_agg(pg_catalog.quote_ident(a.attname), ', ' ORDER BY a.attnum) INTO columns
              FROM pg_catalog.pg_attribute a
             WHERE a.attrelid = pg_catalog.format('subscriber.%I', relation)::regclass AND a.attnum > 0
               AND NOT a.attisdropped AND document ? a.attname::text;
            EXECUTE pg_catalog.format('INSERT INTO subscriber.%1$I (%2$s) SELECT %2$s'
                ' FROM pg_catalog.jsonb_populate_record(NULL::subscriber.%1$I, $1) ON CONFLICT DO NOTHING',
                relation, columns) USING document;
        END LOOP;
    END LOOP;
    PERFORM subscriber.restore_deletes();
    -- Nobody knows whether rows have expired before the crash, so they count as expired until a worker is past it.
    INSERT INTO subscriber.retention (subid, expired)
    SELECT s.subid, pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot()) FROM subscriber.subscription s
     WHERE s.subretaindeadtuples AND s.submaxretention > 0 ON CONFLICT DO NOTHING;
    INSERT INTO subscriber.complete VALUES (pg_catalog.clock_timestamp());
END $$;
COMMENT ON FUNCTION subscriber.restore IS
    'Fills the tables after a crash of the server, from their large objects. Nothing happens while they are complete. '
    'The order is that of foreign keys. Callers: duty owner.';

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
END $$;
COMMENT ON FUNCTION subscriber.present_identity IS
    'Returns the present database. timeline NULL: on a standby, or it cannot be queried. Callers: duty owner.';

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
      FROM subscriber.subscription_rel r LEFT JOIN
           (pg_catalog.pg_namespace n JOIN pg_catalog.pg_class named
            ON named.relnamespace = n.oid AND named.relkind IN ('r', 'p'))
           ON n.nspname = r.srnspname AND named.relname = r.srrelname,
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
      FROM subscriber.subscription_rel r JOIN
           (pg_catalog.pg_namespace n JOIN pg_catalog.pg_class named
            ON named.relnamespace = n.oid AND named.relkind IN ('r', 'p'))
           ON n.nspname = r.srnspname AND named.relname = r.srrelname,
           LATERAL pg_catalog.format('%I.%I', r.srnspname, r.srrelname) AS l (label)
     WHERE is_copy AND r.srsubstate = 'f';
    IF names IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = pg_catalog.format('the copy of tables had begun when this database was copied: %s', names),
            HINT = pg_catalog.format('Empty these tables and have them copied again:'
                                     ' SELECT subscriber.rebind(forget => ARRAY[%s]);'
                                     ' then ALTER SUBSCRIPTION ... REFRESH PUBLICATION.', quoted);
    END IF;
    UPDATE subscriber.subscription_rel r SET srformer = NULL;
    FOR subscription, olds, news IN
        SELECT r.srsubid, pg_catalog.array_agg(r.srrelid), pg_catalog.array_agg(named.oid)
          FROM subscriber.subscription_rel r JOIN
               (pg_catalog.pg_namespace n JOIN pg_catalog.pg_class named
                ON named.relnamespace = n.oid AND named.relkind IN ('r', 'p'))
               ON n.nspname = r.srnspname AND named.relname = r.srrelname
         WHERE named.oid <> r.srrelid GROUP BY r.srsubid LOOP
        PERFORM subscriber.renumber(subscription, olds, news);
    END LOOP;
END $$;
COMMENT ON FUNCTION subscriber.find_relations IS
    'Gives all rows of subscription_rel the OIDs of the tables that have their stored names, because OIDs of a '
    'restored dump are those of other tables. `forget` are tables to remove from their subscriptions. In a copy of a '
    'database, no initial copy can continue: its slot belongs to the original. Callers: other functions.';

CREATE FUNCTION subscriber.rebind(forget text[] DEFAULT '{}'::text[]) RETURNS void
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
                   OR EXISTS (SELECT FROM subscriber.subscription_rel r JOIN
                                  (pg_catalog.pg_namespace n JOIN pg_catalog.pg_class named
                                   ON named.relnamespace = n.oid AND named.relkind IN ('r', 'p'))
                                  ON n.nspname = r.srnspname AND named.relname = r.srrelname
                               WHERE named.oid <> r.srrelid);
        PERFORM subscriber.find_relations(forget, is_copy);
        UPDATE subscriber.subscription s SET subowner = r.oid
          FROM pg_catalog.pg_roles r WHERE r.rolname = s.subownername AND r.oid <> s.subowner;
        PERFORM subscriber.forget_all_deletes();
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
END $$;
COMMENT ON FUNCTION subscriber.rebind IS
    'Makes the schema belong to its present database, so that its subscriptions run there. `forget` are tables, as '
    'quoted names with schema, to remove from their subscriptions. It fails if the database lacks a table or a role '
    'that they need. Callers: the schema''s owner.';

CREATE FUNCTION subscriber.accept_timelines(accept boolean) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    UPDATE subscriber.identity SET accept_timelines = accept
$$;
COMMENT ON FUNCTION subscriber.accept_timelines IS
    'Sets whether subscriptions continue after a failover of the target without rebind(). Callers: the schema''s '
    'owner.';

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
END $$;
COMMENT ON FUNCTION subscriber.adopt_timeline IS
    'Accepts a new timeline of the target, if accept_timelines() has said so. Returns the former timeline; NULL: '
    'nothing has changed. Callers: duty owner.';

INSERT INTO subscriber.identity (system_identifier, timeline, database_oid, database_name, sync_id)
SELECT i.system_identifier, i.timeline, i.database_oid, i.database_name, i.system_identifier
  FROM subscriber.present_identity() i;
INSERT INTO subscriber.complete VALUES (pg_catalog.clock_timestamp());


-- 17. Views named like PostgreSQL's -----------------------------------------------------------------------------------
--
-- They have the names, columns, types and meaning of the server's own views, and show the subscriptions of this schema.
-- Everybody may read them, as in PostgreSQL.
--
-- The columns of two views depend on the version of the server. make_views() creates these views, and creates them
-- again after an upgrade of the server by pg_upgrade.

CREATE FUNCTION subscriber.make_views() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    is_19 boolean := pg_catalog.current_setting('server_version_num')::int >= 190000;
BEGIN
    DROP VIEW IF EXISTS subscriber.pg_subscription;
    IF is_19 THEN
        CREATE VIEW subscriber.pg_subscription AS
        SELECT s.subid AS oid, d.oid AS subdbid, s.subskiplsn, s.subname, s.subowner, s.subenabled,
               coalesce(s.subbinary, false) AS subbinary,
               s.substream, s.subtwophasestate, s.subdisableonerr, s.subpasswordrequired, s.subrunasowner,
               s.subfailover,
               s.subretaindeadtuples, s.submaxretention,
               s.subretaindeadtuples AND NOT EXISTS (
                   SELECT FROM subscriber.retention r
                    WHERE r.subid = s.subid AND r.expired >= coalesce(r.horizon, '0'::xid8)) AS subretentionactive,
               s.subserver,
               CASE WHEN pg_catalog.pg_has_role(s.subowner, 'USAGE') THEN s.subconninfo END AS subconninfo,
               s.subslotname, s.subsynccommit, s.subwalrcvtimeout, s.subpublications, s.suborigin
          FROM subscriber.subscription s
          JOIN pg_catalog.pg_database d ON d.datname = pg_catalog.current_database();
    ELSE
        CREATE VIEW subscriber.pg_subscription AS
        SELECT s.subid AS oid, d.oid AS subdbid, s.subskiplsn, s.subname, s.subowner, s.subenabled,
               coalesce(s.subbinary, false) AS subbinary,
               s.substream, s.subtwophasestate, s.subdisableonerr, s.subpasswordrequired, s.subrunasowner,
               s.subfailover,
               CASE WHEN pg_catalog.pg_has_role(s.subowner, 'USAGE') THEN s.subconninfo END AS subconninfo,
               s.subslotname, s.subsynccommit, s.subpublications, s.suborigin
          FROM subscriber.subscription s
          JOIN pg_catalog.pg_database d ON d.datname = pg_catalog.current_database();
    END IF;
    COMMENT ON VIEW subscriber.pg_subscription IS 'The subscriptions.';
    COMMENT ON COLUMN subscriber.pg_subscription.oid IS
        'the OID of the subscription, in a range that PostgreSQL''s own OIDs do not reach soon';
    COMMENT ON COLUMN subscriber.pg_subscription.subdbid IS 'the database';
    COMMENT ON COLUMN subscriber.pg_subscription.subskiplsn IS 'the position of SKIP; 0/0: none';
    COMMENT ON COLUMN subscriber.pg_subscription.subname IS 'the name of the subscription';
    COMMENT ON COLUMN subscriber.pg_subscription.subowner IS 'the role that owns it';
    COMMENT ON COLUMN subscriber.pg_subscription.subenabled IS 'true if it is enabled';
    COMMENT ON COLUMN subscriber.pg_subscription.subbinary IS 'option binary; false if it is not set';
    COMMENT ON COLUMN subscriber.pg_subscription.substream IS 'option streaming: f off, t on, p parallel';
    COMMENT ON COLUMN subscriber.pg_subscription.subtwophasestate IS
        'option two_phase: d disabled, p pending, e enabled';
    COMMENT ON COLUMN subscriber.pg_subscription.subdisableonerr IS 'option disable_on_error';
    COMMENT ON COLUMN subscriber.pg_subscription.subpasswordrequired IS 'option password_required';
    COMMENT ON COLUMN subscriber.pg_subscription.subrunasowner IS 'option run_as_owner';
    COMMENT ON COLUMN subscriber.pg_subscription.subfailover IS 'option failover';
    COMMENT ON COLUMN subscriber.pg_subscription.subconninfo IS
        'the connection string; NULL: for roles other than the owner, and with a foreign server';
    COMMENT ON COLUMN subscriber.pg_subscription.subslotname IS 'the slot; NULL: slot_name = NONE';
    COMMENT ON COLUMN subscriber.pg_subscription.subsynccommit IS 'option synchronous_commit';
    COMMENT ON COLUMN subscriber.pg_subscription.subpublications IS 'the publications';
    COMMENT ON COLUMN subscriber.pg_subscription.suborigin IS 'option origin';
    IF is_19 THEN
        COMMENT ON COLUMN subscriber.pg_subscription.subretaindeadtuples IS 'option retain_dead_tuples (PostgreSQL 19)';
        COMMENT ON COLUMN subscriber.pg_subscription.submaxretention IS 'option max_retention_duration (PostgreSQL 19)';
        COMMENT ON COLUMN subscriber.pg_subscription.subretentionactive IS
            'true if all deleted rows are remembered that the subscription could need (PostgreSQL 19)';
        COMMENT ON COLUMN subscriber.pg_subscription.subserver IS 'the foreign server; 0: none (PostgreSQL 19)';
        COMMENT ON COLUMN subscriber.pg_subscription.subwalrcvtimeout IS 'option wal_receiver_timeout (PostgreSQL 19)';
    END IF;
    DROP VIEW IF EXISTS subscriber.pg_stat_subscription_stats;
    IF is_19 THEN
        CREATE VIEW subscriber.pg_stat_subscription_stats AS
        SELECT s.subid, s.subname, t.apply_error_count, t.sync_seq_error_count,
               t.sync_error_count AS sync_table_error_count, t.confl_insert_exists, t.confl_update_origin_differs,
               t.confl_update_exists, t.confl_update_deleted, t.confl_update_missing, t.confl_delete_origin_differs,
               t.confl_delete_missing, t.confl_multiple_unique_conflicts, t.stats_reset
          FROM subscriber.subscription s JOIN subscriber.subscription_stats t USING (subid);
    ELSE
        CREATE VIEW subscriber.pg_stat_subscription_stats AS
        SELECT s.subid, s.subname, t.apply_error_count, t.sync_error_count, t.confl_insert_exists,
               t.confl_update_origin_differs, t.confl_update_exists, t.confl_update_missing,
               t.confl_delete_origin_differs, t.confl_delete_missing, t.confl_multiple_unique_conflicts, t.stats_reset
          FROM subscriber.subscription s JOIN subscriber.subscription_stats t USING (subid);
    END IF;
    COMMENT ON VIEW subscriber.pg_stat_subscription_stats IS
        'Errors and conflicts, counted. A role sees those of subscriptions whose owner it belongs to.';
    COMMENT ON COLUMN subscriber.pg_stat_subscription_stats.subid IS 'the subscription';
    COMMENT ON COLUMN subscriber.pg_stat_subscription_stats.subname IS 'its name';
    COMMENT ON COLUMN subscriber.pg_stat_subscription_stats.apply_error_count IS 'errors of the apply worker';
    COMMENT ON COLUMN subscriber.pg_stat_subscription_stats.confl_insert_exists IS 'inserts of a key that was there';
    COMMENT ON COLUMN subscriber.pg_stat_subscription_stats.confl_update_origin_differs IS
        'updates of rows that another origin wrote last';
    COMMENT ON COLUMN subscriber.pg_stat_subscription_stats.confl_update_exists IS 'updates to a key that was there';
    COMMENT ON COLUMN subscriber.pg_stat_subscription_stats.confl_update_missing IS
        'updates of rows that were not there';
    COMMENT ON COLUMN subscriber.pg_stat_subscription_stats.confl_delete_origin_differs IS
        'deletes of rows that another origin wrote last';
    COMMENT ON COLUMN subscriber.pg_stat_subscription_stats.confl_delete_missing IS
        'deletes of rows that were not there';
    COMMENT ON COLUMN subscriber.pg_stat_subscription_stats.confl_multiple_unique_conflicts IS
        'rows with several keys that were there';
    COMMENT ON COLUMN subscriber.pg_stat_subscription_stats.stats_reset IS
        'the time at which the counters were reset; NULL: never';
    IF is_19 THEN
        COMMENT ON COLUMN subscriber.pg_stat_subscription_stats.sync_seq_error_count IS
            'errors of sequence synchronization (PostgreSQL 19)';
        COMMENT ON COLUMN subscriber.pg_stat_subscription_stats.sync_table_error_count IS
            'errors of table synchronization (PostgreSQL 19)';
        COMMENT ON COLUMN subscriber.pg_stat_subscription_stats.confl_update_deleted IS
            'updates of rows that another origin deleted (PostgreSQL 19)';
    ELSE
        COMMENT ON COLUMN subscriber.pg_stat_subscription_stats.sync_error_count IS
            'errors of table synchronization; PostgreSQL 19 calls it sync_table_error_count';
    END IF;
    GRANT SELECT ON subscriber.pg_subscription, subscriber.pg_stat_subscription_stats TO PUBLIC;
-- A view of a user that depends on one of the views keeps it as it is.
EXCEPTION WHEN dependent_objects_still_exist THEN
    NULL;
END $$;
COMMENT ON FUNCTION subscriber.make_views IS
    'Creates the views whose columns depend on the version of the server, in place of earlier ones. Callers: duty '
    'owner.';

SELECT subscriber.make_views();

-- PostgreSQL removes the row of a relation with the relation. Here the row stays, but the view does not show it.
-- Sequences are in it as in PostgreSQL 19, on every version.
CREATE VIEW subscriber.pg_subscription_rel AS
SELECT r.srsubid, r.srrelid, r.srsubstate, r.srsublsn
  FROM subscriber.subscription_rel r
 WHERE EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.oid = r.srrelid)
 UNION ALL
SELECT q.subid, c.oid, q.state, q.lsn
  FROM subscriber.subscription_sequence q
  JOIN pg_catalog.pg_namespace n ON n.nspname = q.nspname
  JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = q.seqname AND c.relkind = 'S';
COMMENT ON VIEW subscriber.pg_subscription_rel IS
    'The tables and sequences of each subscription. A role sees those of subscriptions whose owner it belongs to.';
COMMENT ON COLUMN subscriber.pg_subscription_rel.srsubid IS 'the subscription';
COMMENT ON COLUMN subscriber.pg_subscription_rel.srrelid IS 'the table or sequence';
COMMENT ON COLUMN subscriber.pg_subscription_rel.srsubstate IS
    'the state: i init, d data is being copied, f finished copy, s synchronized, r ready';
COMMENT ON COLUMN subscriber.pg_subscription_rel.srsublsn IS
    'the position of the publisher at which it has reached the state; NULL: not known yet';

-- A worker counts while the backend that wrote its row lives: the same pid, started before the worker.
CREATE VIEW subscriber.pg_stat_subscription AS
SELECT s.subid, s.subname, w.worker_type, w.pid, w.leader_pid,
       CASE WHEN w.worker_type = 'table synchronization' THEN w.relid END AS relid,
       w.received_lsn, w.last_msg_send_time, w.last_msg_receipt_time, w.latest_end_lsn, w.latest_end_time
  FROM subscriber.subscription s
  LEFT JOIN (subscriber.worker w
             JOIN pg_catalog.pg_stat_activity a
               ON a.pid = w.pid AND a.datname = pg_catalog.current_database()
              AND (a.backend_start IS NULL OR a.backend_start <= w.started)) ON w.subid = s.subid;
COMMENT ON VIEW subscriber.pg_stat_subscription IS
    'The workers of each subscription. A subscription without a worker has one row.';
COMMENT ON COLUMN subscriber.pg_stat_subscription.subid IS 'the subscription';
COMMENT ON COLUMN subscriber.pg_stat_subscription.subname IS 'its name';
COMMENT ON COLUMN subscriber.pg_stat_subscription.worker_type IS
    'apply, parallel apply, or table synchronization; NULL: no worker';
COMMENT ON COLUMN subscriber.pg_stat_subscription.pid IS 'the session of the worker on the target; NULL: no worker';
COMMENT ON COLUMN subscriber.pg_stat_subscription.leader_pid IS
    'of a parallel apply worker, the session of the apply worker; NULL: of other workers';
COMMENT ON COLUMN subscriber.pg_stat_subscription.relid IS
    'of table synchronization, the table; NULL: of other workers';
COMMENT ON COLUMN subscriber.pg_stat_subscription.received_lsn IS 'the last position received; NULL: none yet';
COMMENT ON COLUMN subscriber.pg_stat_subscription.last_msg_send_time IS
    'the time at which the publisher sent the last message, by its clock; NULL: none yet';
COMMENT ON COLUMN subscriber.pg_stat_subscription.last_msg_receipt_time IS
    'the time at which the worker received it, by the clock of the worker''s machine; NULL: none yet';
COMMENT ON COLUMN subscriber.pg_stat_subscription.latest_end_lsn IS
    'the last position confirmed to the publisher; NULL: none yet';
COMMENT ON COLUMN subscriber.pg_stat_subscription.latest_end_time IS
    'the time at which the publisher sent that, by its clock; NULL: none yet';


-- 18. Roles, duties and rights ----------------------------------------------------------------------------------------
--
-- An administrator gives a duty to a role with admit(), and takes it with dismiss(). A trigger gives duty owner to the
-- owners of subscriptions. Members of pg_create_subscription have it since PostgreSQL 16, which has that role.
--
-- The comments of functions and tables name the duties, too, and a test compares both.

CREATE FUNCTION subscriber.privileges_of(duty text) RETURNS SETOF text
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    -- Columns of table subscription that statements set. The owner is set once, and later by set_owner(). Only
    -- superusers set subtrustedowners, and change subpasswordrequired.
    columns text :=
        'subname, subenabled, subconninfo, subserver, subslotname, subpublications, subsynccommit, subbinary, substream,
         subtwophasestate, subdisableonerr, subrunasowner, suborigin, subfailover, subretaindeadtuples, submaxretention,
         subwalrcvtimeout, subconflictpolicy, subconflicthistory, subconflictrows, subonerror, subquarantinelimit,
         subtrackranges, subcopyengine, subcopyindexes, subapplysessions, subsequences, subsequencenames, subsourcetag,
         subwalbudget, subskiplsn, subsystemid, subtimeline, subtimelinesystem, subtimelinehistory, subacceptloss,
         subgaveup';
BEGIN
    IF coalesce(duty NOT IN ('owner', 'launcher', 'apply'), true) THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = pg_catalog.format('there is no duty "%s"', duty), HINT = 'Duties are owner, launcher, apply.';
    END IF;
    IF duty IN ('owner', 'launcher') THEN
        RETURN NEXT
            'SELECT ON
                subscriber.subscription, subscriber.progress_record, subscriber.progress, subscriber.prepared,
                subscriber.session, subscriber.launcher, subscriber.identity, subscriber.repair_transaction,
                subscriber.repairs, subscriber.audit, subscriber.worker, subscriber.subscription_stats,
                subscriber.history';
        RETURN NEXT
            'SELECT, INSERT, UPDATE, DELETE ON
                subscriber.subscription_rel, subscriber.copied_range, subscriber.hold, subscriber.conflict_history,
                subscriber.touched_range, subscriber.verification, subscriber.subscription_sequence';
        RETURN NEXT 'SELECT, UPDATE (retry, error, error_detail, attempts), DELETE ON subscriber.quarantine';
        RETURN NEXT pg_catalog.format(
            'INSERT (%1$s, subowner, subpasswordrequired), UPDATE (%1$s), DELETE ON subscriber.subscription', columns);
        RETURN NEXT
            'EXECUTE ON FUNCTION
                subscriber.new_record(), subscriber.new_record_of_many(), subscriber.new_id(),
                subscriber.new_subscription_oid(), subscriber.may_become(name, oid),
                subscriber.set_owner(oid, oid, subscriber.caller),
                subscriber.renumber(oid, oid[], oid[]),
                subscriber.copy_has_begun(oid, oid),
                subscriber.follow_names(oid, text[], text[]),
                subscriber.remove_relation(oid, oid, subscriber.caller),
                subscriber.synchronize_again(oid, oid, text, subscriber.caller),
                subscriber.other_writers(oid, subscriber.caller),
                subscriber.read_position(oid), subscriber.read_confirmed(oid),
                subscriber.set_progress(oid, oid, pg_lsn, subscriber.caller),
                subscriber.remove_progress(oid, oid, subscriber.caller),
                subscriber.set_confirmed(oid, pg_lsn, subscriber.caller),
                subscriber.create_origin(text, subscriber.caller),
                subscriber.drop_origin(text, subscriber.caller),
                subscriber.origin_progress(text, subscriber.caller),
                subscriber.register_session(oid, oid, integer, timestamptz, subscriber.caller),
                subscriber.release_session(oid, oid, integer, subscriber.caller),
                subscriber.living_sessions(oid, subscriber.caller),
                subscriber.terminate_workers(oid, oid, subscriber.caller),
                subscriber.terminate_session(oid, integer, subscriber.caller),
                subscriber.forget_prepared(oid, subscriber.caller),
                subscriber.prepared_transactions(subscriber.caller),
                subscriber.read_quarantine(oid, pg_lsn, bigint, integer, subscriber.caller),
                subscriber.edit_quarantine(oid, pg_lsn, integer, bytea, text[], bigint, subscriber.caller),
                subscriber.record_conflict_error(oid, jsonb, subscriber.caller),
                subscriber.set_delete_triggers(text, oid, subscriber.caller), subscriber.restore_deletes(),
                subscriber.forget_repairs(name, timestamptz, subscriber.caller),
                subscriber.set_sequence(oid, name, name, bigint, boolean, oid, bigint, bigint, bigint, bigint, boolean,
                                        boolean, subscriber.caller),
                subscriber.connection_of_server(oid, oid, subscriber.caller),
                subscriber.server_conninfo(oid, subscriber.caller),
                subscriber.begin_action(oid, text, text, text, jsonb, subscriber.caller),
                subscriber.end_action(bigint, text, jsonb, subscriber.caller),
                subscriber.restore(), subscriber.present_identity(), subscriber.adopt_timeline(),
                subscriber.make_views()';
    END IF;
    IF duty = 'launcher' THEN
        RETURN NEXT
            'INSERT, UPDATE, DELETE ON subscriber.worker, subscriber.history';
        RETURN NEXT 'UPDATE ON subscriber.subscription_stats';
        RETURN NEXT
            'EXECUTE ON FUNCTION
                subscriber.claim_progress(oid, oid, subscriber.caller),
                subscriber.lead(text, timestamptz, interval),
                subscriber.renew_lead(text, integer), subscriber.resign(text, integer),
                subscriber.set_retention(oid, xid8, subscriber.caller),
                subscriber.forget_deletes(oid, subscriber.caller), subscriber.retains(oid)';
    END IF;
    IF duty IN ('apply', 'launcher') THEN
        RETURN NEXT
            'EXECUTE ON FUNCTION
                subscriber.check_generation(oid, integer),
                subscriber.note_emptied(oid, bytea),
                subscriber.finish_copy(oid, bytea, pg_lsn),
                subscriber.record_range(oid, bytea, jsonb),
                subscriber.advance(oid, bytea, pg_lsn, pg_lsn, timestamptz, boolean),
                subscriber.become_replica(),
                subscriber.bind_origin(oid, bytea, oid), subscriber.release_origin(),
                subscriber.set_origin(oid, bytea, pg_lsn, timestamptz),
                subscriber.raise_error(text, text),
                subscriber.register_own_session(oid, timestamptz),
                subscriber.mark_prepared(oid, bytea, bigint, text),
                subscriber.note_prepared(oid, bytea, bigint, text, text, pg_lsn, timestamptz),
                subscriber.find_prepared(oid, bytea, bigint), subscriber.forget_prepared(oid, bytea, bigint),
                subscriber.park(oid, bytea, jsonb),
                subscriber.park_content(oid, bytea, pg_lsn, bigint, bytea),
                subscriber.unpark(oid, bytea, pg_lsn, integer),
                subscriber.record_conflict(oid, bytea, jsonb),
                subscriber.clear_skip(oid, bytea, pg_lsn),
                subscriber.deleted_by(oid, bytea, oid, bytea), subscriber.remember_delete(oid, bytea, oid, bytea),
                subscriber.record_repair(oid, bytea, jsonb),
                subscriber.touch(oid, bytea, jsonb)';
    END IF;
    RETURN NEXT
        'EXECUTE ON FUNCTION
            subscriber.set_role_privilege(), subscriber.is_trusted(oid, name[]), subscriber.exceeds(oid),
            subscriber.code_in(text), subscriber.types_in(text), subscriber.types_within(oid),
            subscriber.functions_of_opclass(oid),
            subscriber.code_of_type(oid), subscriber.is_harmless(oid),
            subscriber.code_of_expression(text, oid, boolean), subscriber.foreign_code(oid, name[], boolean, name),
            subscriber.table_safety(oid, name[], boolean, name), subscriber.table_shape(oid, text),
            subscriber.guarded_shape(oid, text, name[])';
END $$;
COMMENT ON FUNCTION subscriber.privileges_of IS
    'Returns the privileges of a duty, as GRANT and REVOKE take them. Callers: other functions.';

CREATE FUNCTION subscriber.admit(role text, duty text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    privileges text;
BEGIN
    FOR privileges IN SELECT p FROM subscriber.privileges_of(duty) p LOOP
        EXECUTE pg_catalog.format('GRANT %s TO %I', privileges, role);
    END LOOP;
END $$;
COMMENT ON FUNCTION subscriber.admit IS
    'Gives a duty to a role: owner, launcher or apply. Callers: the schema''s owner.';

-- The functions are marks: each is part of one duty, and of the launcher's, which contains both others.
CREATE FUNCTION subscriber.duties_of(role text) RETURNS SETOF text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    WITH marks AS (
        SELECT p.proname FROM pg_catalog.pg_proc p, pg_catalog.aclexplode(p.proacl) a
          JOIN pg_catalog.pg_roles r ON r.oid = a.grantee
         WHERE p.pronamespace = 'subscriber'::regnamespace AND r.rolname = role AND a.grantee <> p.proowner)
    SELECT 'launcher' WHERE 'lead' IN (SELECT proname FROM marks)
    UNION ALL
    SELECT 'apply' WHERE 'advance' IN (SELECT proname FROM marks) AND 'lead' NOT IN (SELECT proname FROM marks)
    UNION ALL
    SELECT 'owner'
     WHERE 'create_origin' IN (SELECT proname FROM marks) AND 'lead' NOT IN (SELECT proname FROM marks)
        OR EXISTS (SELECT FROM subscriber.subscription s JOIN pg_catalog.pg_roles r ON r.oid = s.subowner
                    WHERE r.rolname = role AND NOT r.rolsuper)
$$;
COMMENT ON FUNCTION subscriber.duties_of IS
    'Returns the duties of a role. Those that a launcher has had besides are not known, except that of an owner of '
    'subscriptions. Callers: other functions.';

CREATE FUNCTION subscriber.dismiss(role text, duty text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    privileges text;
BEGIN
    FOR privileges IN SELECT p FROM subscriber.privileges_of(duty) p
                      EXCEPT
                      SELECT p FROM subscriber.duties_of(role) kept, subscriber.privileges_of(kept) p
                       WHERE kept <> duty LOOP
        EXECUTE pg_catalog.format('REVOKE %s FROM %I', privileges, role);
    END LOOP;
END $$;
COMMENT ON FUNCTION subscriber.dismiss IS
    'Takes a duty from a role, which keeps the privileges of its other duties. Callers: the schema''s owner.';

CREATE FUNCTION subscriber.admit_again() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    role text;
    duty text;
BEGIN
    FOR role, duty IN
        SELECT r.rolname, d FROM pg_catalog.pg_roles r, subscriber.duties_of(r.rolname) d WHERE NOT r.rolsuper LOOP
        PERFORM subscriber.admit(role, duty);
    END LOOP;
END $$;
COMMENT ON FUNCTION subscriber.admit_again IS
    'Gives the privileges that a duty has now to all roles that have the duty. A change of the schema that adds to '
    'privileges_of() ends with it. Callers: the schema''s owner.';

CREATE FUNCTION subscriber.admit_owner() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    schema_owner oid := (SELECT n.nspowner FROM pg_catalog.pg_namespace n WHERE n.nspname = 'subscriber');
BEGIN
    IF TG_OP <> 'DELETE' AND NEW.subowner <> schema_owner
       AND NOT (SELECT r.rolsuper FROM pg_catalog.pg_roles r WHERE r.oid = NEW.subowner) THEN
        PERFORM subscriber.admit(pg_catalog.pg_get_userbyid(NEW.subowner), 'owner');
    END IF;
    -- The server's own roles, such as pg_create_subscription, have the duty for all their members.
    IF TG_OP <> 'INSERT' AND OLD.subowner <> schema_owner AND OLD.subowner >= 16384
       AND EXISTS (SELECT FROM pg_catalog.pg_roles r WHERE r.oid = OLD.subowner AND NOT r.rolsuper)
       AND NOT EXISTS (SELECT FROM subscriber.subscription s WHERE s.subowner = OLD.subowner) THEN
        PERFORM subscriber.dismiss(pg_catalog.pg_get_userbyid(OLD.subowner), 'owner');
    END IF;
    RETURN NULL;
END $$;
COMMENT ON FUNCTION subscriber.admit_owner IS
    'Gives duty owner to a role with its first subscription, and takes it with the last one, also if an administrator '
    'has given it. The owner of the schema keeps its privileges, and a superuser needs none. Callers: the trigger of '
    'the same name.';

CREATE TRIGGER admit_owner AFTER INSERT OR DELETE OR UPDATE OF subowner ON subscriber.subscription
FOR EACH ROW EXECUTE FUNCTION subscriber.admit_owner();
ALTER TABLE subscriber.subscription ENABLE ALWAYS TRIGGER admit_owner;

-- Default privileges of the owner may have given more, to PUBLIC and to roles. Functions are for PUBLIC by default.
DO $$
DECLARE
    grantee text;
BEGIN
    FOR grantee IN
        SELECT 'PUBLIC' UNION
        SELECT pg_catalog.quote_ident(r.rolname)
          FROM (SELECT relacl FROM pg_catalog.pg_class WHERE relnamespace = 'subscriber'::pg_catalog.regnamespace
                UNION ALL
                SELECT proacl FROM pg_catalog.pg_proc WHERE pronamespace = 'subscriber'::pg_catalog.regnamespace
                UNION ALL
                SELECT nspacl FROM pg_catalog.pg_namespace WHERE nspname = 'subscriber') o (acl),
               LATERAL pg_catalog.aclexplode(o.acl) a JOIN pg_catalog.pg_roles r ON r.oid = a.grantee
         WHERE r.rolname <> CURRENT_USER LOOP
        EXECUTE pg_catalog.format('REVOKE ALL ON ALL TABLES IN SCHEMA subscriber FROM %s', grantee);
        EXECUTE pg_catalog.format('REVOKE ALL ON ALL SEQUENCES IN SCHEMA subscriber FROM %s', grantee);
        EXECUTE pg_catalog.format('REVOKE ALL ON ALL FUNCTIONS IN SCHEMA subscriber FROM %s', grantee);
        EXECUTE pg_catalog.format('REVOKE ALL ON SCHEMA subscriber FROM %s', grantee);
    END LOOP;
END $$;
GRANT USAGE ON SCHEMA subscriber TO PUBLIC;
GRANT SELECT ON
    subscriber.pg_subscription, subscriber.pg_subscription_rel, subscriber.pg_stat_subscription,
    subscriber.pg_stat_subscription_stats, subscriber.complete, subscriber.alembic_version TO PUBLIC;
SELECT subscriber.admit(r.rolname::text, 'owner') FROM pg_catalog.pg_roles r WHERE r.rolname = 'pg_create_subscription';
