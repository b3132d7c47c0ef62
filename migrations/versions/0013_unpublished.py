"""No table of this schema is published: UNLOGGED tables, with a large object for each row that must be durable.

FOR ALL TABLES publishes every permanent table. Connection strings would be replicated, and a subscriber without schema
"subscriber" would stop. PostgreSQL publishes neither UNLOGGED tables nor large objects. Large objects are transactional
and survive a crash, so they store the contents of the tables:

    a row of a durable table    one large object: JSON that the trigger keep() writes in the same transaction
    progress of a worker        one large object, whose position advance() moves in the transaction of the changes
    a prepared transaction      large objects only: a row has to appear with COMMIT PREPARED, after a crash as well

A crash empties the tables; restore() fills them again. Table `complete` has a row while the others are complete. Data
that may be lost in a crash has no large object: reports of workers, statistics, pause requests.

vacuumlo removes large objects that no column of type oid references. The materialized view large_objects references the
numbers of those that could not be created again, even while the tables are empty.
"""

from __future__ import annotations

from alembic import op

revision = "0013"
down_revision = "0012"

# The number ranges of the large objects. The server's own counter does not reach them soon.
PREPARED = (3_400_000_000, 3_500_000_000)
CORE = (3_500_000_000, 3_600_000_000)
MANY = (3_600_000_000, 4_200_000_000)  # of tables with many rows, which are less important than the others
LISTED = 16_384  # numbers of CORE that the materialized view lists; higher ones are used if these are not enough

MANY_ROWS = ("conflict_history", "copy_done")
KEPT = ("subscription", "subscription_rel", "bulk_copy", "bulk_copy_rel", *MANY_ROWS)
# A permanent table cannot reference an UNLOGGED one, so the referencing tables are first. The previous script is the
# last one that writes to a permanent table: statements here that change a row follow SET UNLOGGED.
BECOME_UNLOGGED = (
    "progress",
    "confirmed",
    "prepared",
    "copy_done",
    "bulk_copy_rel",
    "bulk_copy",
    "conflict_history",
    "subscription_rel",
    "hold",
    "subscription_stats",
    "subscription",
)

# In a database with encoding SQL_ASCII, texts are bytes of unknown encoding. MULE_INTERNAL cannot be converted.
ENCODING = """CASE WHEN pg_catalog.getdatabaseencoding() IN ('SQL_ASCII', 'MULE_INTERNAL')
                   THEN pg_catalog.getdatabaseencoding() ELSE 'UTF8' END"""

RECORDS = [
    f"""
    CREATE MATERIALIZED VIEW subscriber.large_objects AS
    SELECT ({CORE[0]} + n)::pg_catalog.oid AS record FROM pg_catalog.generate_series(0, {LISTED - 1}) n
    """,
    # Returns a number that no large object has. The sequence prevents two callers from getting the same number.
    """
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
    END $$
    """,
    f"""
    CREATE FUNCTION subscriber.new_record() RETURNS oid
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
        SELECT coalesce(subscriber.draw_number({CORE[0]}, {CORE[0] + LISTED}, {LISTED}),
                        subscriber.draw_number({CORE[0] + LISTED}, {CORE[1]}, {LISTED}))
    $$
    """,
    f"""
    CREATE FUNCTION subscriber.new_record_of_many() RETURNS oid
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
        SELECT subscriber.draw_number({MANY[0]}, {MANY[1]}, {LISTED})
    $$
    """,
    # By time, so that rows can be read in the order of their creation.
    """
    CREATE FUNCTION subscriber.new_id() RETURNS bigint
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
        SELECT (pg_catalog.date_part('epoch', pg_catalog.clock_timestamp() - '2026-01-01 00:00:00+00'::timestamptz)
                * 1000000)::bigint * 1024 + pg_catalog.nextval('subscriber.number') % 1024
    $$
    """,
    f"""
    CREATE FUNCTION subscriber.as_record(relation name, content jsonb) RETURNS bytea
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
        SELECT pg_catalog.convert_to(pg_catalog.jsonb_build_object('table', relation, 'row', content)::text, {ENCODING})
    $$
    """,
    # Blanks overwrite the rest of a longer previous record. They have no meaning in JSON.
    f"""
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
        content := subscriber.as_record(TG_TABLE_NAME, pg_catalog.to_jsonb(NEW));
        IF NOT EXISTS (SELECT FROM pg_catalog.pg_largeobject_metadata m WHERE m.oid = NEW.kept) THEN
            PERFORM pg_catalog.lo_from_bytea(NEW.kept, content);
            RETURN NULL;
        END IF;
        known := pg_catalog.lo_get(NEW.kept);
        content := content
            || pg_catalog.convert_to(repeat(' ', octet_length(known) - octet_length(content)), {ENCODING});
        IF known = content THEN  -- restore() has inserted the row
            RETURN NULL;
        END IF;
        IF TG_OP = 'INSERT' THEN
            RAISE EXCEPTION USING ERRCODE = 'unique_violation',
                MESSAGE = pg_catalog.format('large object %s holds another row', NEW.kept);
        END IF;
        PERFORM pg_catalog.lo_put(NEW.kept, 0, content);
        RETURN NULL;
    END $$
    """,
    # Returns the rows of one table from its large objects. Other programs may have large objects with these numbers.
    f"""
    CREATE FUNCTION subscriber.saved(relation name, first bigint, past bigint) RETURNS SETOF jsonb
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        record oid;
        document jsonb;
    BEGIN
        FOR record IN SELECT m.oid FROM pg_catalog.pg_largeobject_metadata m
                       WHERE m.oid >= first::oid AND m.oid < past::oid AND m.lomowner = current_user::regrole LOOP
            IF pg_catalog.lo_get(record, 0, 1) = '{{' THEN
                document := pg_catalog.convert_from(pg_catalog.lo_get(record), {ENCODING})::jsonb;
            ELSIF pg_catalog.lo_get(record, 0, 4) = 'prg1' THEN
                document := pg_catalog.convert_from(pg_catalog.lo_get(record, 20, 256), {ENCODING})::jsonb;
            ELSE
                CONTINUE;
            END IF;
            IF document ->> 'table' = relation THEN
                RETURN NEXT document -> 'row';
            END IF;
        END LOOP;
    END $$
    """,
]

# The large object of a worker's progress:
#      0  prg1
#      4  the fence: eight random bytes that only the current worker knows
#     12  the position, 8 bytes
#     20  the row of progress_record as JSON, blanks up to 256 bytes
# 65,536  the position confirmed without a commit, 8 bytes; zeros: none. Each page of a large object is a row of
#         its own, so the two sessions that write position and confirmation do not wait for each other.
CONFIRMED_AT = 65_536

PROGRESS = [
    """
    CREATE UNLOGGED TABLE subscriber.progress_record (
        subid oid REFERENCES subscriber.subscription ON DELETE CASCADE,
        relid oid DEFAULT 0,
        record oid NOT NULL UNIQUE,
        PRIMARY KEY (subid, relid)
    )
    """,
    # The publisher's system identifier; NULL: unknown until the next connection.
    "ALTER TABLE subscriber.subscription ADD COLUMN subsystemid text",
    """
    CREATE FUNCTION subscriber.to_lsn(bytes bytea) RETURNS pg_lsn
    LANGUAGE sql IMMUTABLE STRICT SET search_path = pg_catalog, pg_temp AS $$
        SELECT (pg_catalog.encode(substring(bytes FROM 1 FOR 4), 'hex') || '/'
                || pg_catalog.encode(substring(bytes FROM 5 FOR 4), 'hex'))::pg_lsn
    $$
    """,
    """
    CREATE FUNCTION subscriber.read_position(record oid) RETURNS pg_lsn
    LANGUAGE sql STABLE STRICT SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
        SELECT subscriber.to_lsn(pg_catalog.lo_get(m.oid, 12, 8))
          FROM pg_catalog.pg_largeobject_metadata m WHERE m.oid = record
    $$
    """,
    f"""
    CREATE FUNCTION subscriber.read_confirmed(record oid) RETURNS pg_lsn
    LANGUAGE sql STABLE STRICT SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
        SELECT nullif(subscriber.to_lsn(pg_catalog.lo_get(m.oid, {CONFIRMED_AT}, 8)), '0/0')
          FROM pg_catalog.pg_largeobject_metadata m WHERE m.oid = record
    $$
    """,
    """
    CREATE FUNCTION subscriber.drop_progress_record() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        PERFORM pg_catalog.lo_unlink(m.oid) FROM pg_catalog.pg_largeobject_metadata m WHERE m.oid = OLD.record;
        RETURN NULL;
    END $$
    """,
    """
    CREATE TRIGGER drop_progress_record AFTER DELETE ON subscriber.progress_record
    FOR EACH ROW EXECUTE FUNCTION subscriber.drop_progress_record()
    """,
    "ALTER TABLE subscriber.progress_record ENABLE ALWAYS TRIGGER drop_progress_record",
    # Creates the record if there is none. Returns its number.
    f"""
    CREATE FUNCTION subscriber.set_progress(subscription oid, relation oid, reached pg_lsn) RETURNS oid
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        found oid;
        header bytea;
    BEGIN
        PERFORM subscriber.check_manager(subscription);
        SELECT p.record INTO found FROM subscriber.progress_record p
         WHERE (p.subid, p.relid) = (subscription, relation);
        IF found IS NOT NULL THEN
            PERFORM pg_catalog.lo_put(found, 12, pg_catalog.pg_lsn_send(reached));
            RETURN found;
        END IF;
        found := subscriber.new_record();
        header := subscriber.as_record('progress_record', pg_catalog.jsonb_build_object(
            'subid', subscription::bigint, 'relid', relation::bigint, 'record', found::bigint));
        PERFORM pg_catalog.lo_from_bytea(found, 'prg1'::bytea || '\\x0000000000000000'::bytea
            || pg_catalog.pg_lsn_send(reached) || header
            || pg_catalog.convert_to(repeat(' ', 256 - octet_length(header)), {ENCODING}));
        PERFORM pg_catalog.lo_put(found, {CONFIRMED_AT}, '\\x0000000000000000'::bytea);
        INSERT INTO subscriber.progress_record VALUES (subscription, relation, found);
        RETURN found;
    END $$
    """,
    """
    CREATE FUNCTION subscriber.remove_progress(subscription oid, relation oid) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        PERFORM subscriber.check_manager(subscription);
        DELETE FROM subscriber.progress_record p WHERE (p.subid, p.relid) = (subscription, relation);
    END $$
    """,
    f"""
    CREATE FUNCTION subscriber.set_confirmed(subscription oid, reached pg_lsn) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        found oid;
    BEGIN
        PERFORM subscriber.check_manager(subscription);
        -- A restored dump without large objects has none.
        SELECT p.record INTO found
          FROM subscriber.progress_record p JOIN pg_catalog.pg_largeobject_metadata m ON m.oid = p.record
         WHERE (p.subid, p.relid) = (subscription, 0);
        IF found IS NOT NULL
           AND (reached IS NULL OR reached > coalesce(subscriber.read_confirmed(found), '0/0')) THEN
            PERFORM pg_catalog.lo_put(found, {CONFIRMED_AT}, pg_catalog.pg_lsn_send(coalesce(reached, '0/0')));
        END IF;
    END $$
    """,
    # Sets a new fence: the previous worker cannot commit any more. Waits for a commit that has moved the position, and
    # then fails (40001), so that the next attempt reads the new position.
    """
    CREATE FUNCTION subscriber.claim_progress(subscription oid, relation oid, OUT record oid, OUT fence bytea,
                                              OUT reached pg_lsn, OUT confirmed pg_lsn)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '10s' AS $$
    BEGIN
        PERFORM subscriber.check_manager(subscription);
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
    END $$
    """,
]

# For sessions that apply changes, which have no privilege on any table. The fence proves which record they work for.
APPLYING = [
    f"""
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
        worker := pg_catalog.convert_from(substring(head FROM 21), {ENCODING})::jsonb -> 'row';
        subid := (worker ->> 'subid')::oid;
        relid := (worker ->> 'relid')::oid;
    END $$
    """,
    # Called at the end of each transaction. If two sessions move the same position, lo_put() fails in the second one.
    """
    CREATE FUNCTION subscriber.advance(progress oid, fence bytea, before pg_lsn, after pg_lsn, committed timestamptz,
                                       with_origin boolean) RETURNS void
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
    END $$
    """,
    """
    CREATE FUNCTION subscriber.finish_copy(progress oid, fence bytea, reached pg_lsn) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        worker record;
    BEGIN
        worker := subscriber.check_fence(progress, fence);
        PERFORM pg_catalog.lo_put(progress, 12, pg_catalog.pg_lsn_send(reached));
        UPDATE subscriber.subscription_rel r SET srsubstate = 'f', srsublsn = reached
         WHERE (r.srsubid, r.srrelid) = (worker.subid, worker.relid);
    END $$
    """,
    """
    CREATE FUNCTION subscriber.clear_skip(progress oid, fence bytea, skipped pg_lsn) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        worker record;
    BEGIN
        worker := subscriber.check_fence(progress, fence);
        UPDATE subscriber.subscription s SET subskiplsn = '0/0' WHERE s.subid = worker.subid AND s.subskiplsn = skipped;
    END $$
    """,
    """
    CREATE FUNCTION subscriber.record_conflict(progress oid, fence bytea, conflict jsonb) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        worker record;
    BEGIN
        worker := subscriber.check_fence(progress, fence);
        PERFORM subscriber.add_conflict(worker.subid, conflict);
    END $$
    """,
    """
    CREATE FUNCTION subscriber.add_conflict(subscription oid, conflict jsonb) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
        INSERT INTO subscriber.conflict_history (
            subid, relid, relation, conflict_type, index_name, key, remote_xid, remote_finish_lsn, remote_commit_time,
            local_xid, local_origin, local_commit_time, policy, resolution, local_row, remote_row)
        SELECT subscription, c.relid, c.relation, c.conflict_type, c.index_name, c.key, c.remote_xid,
               c.remote_finish_lsn, c.remote_commit_time, c.local_xid, c.local_origin, c.local_commit_time, c.policy,
               c.resolution, c.local_row, c.remote_row
          FROM pg_catalog.jsonb_populate_record(NULL::subscriber.conflict_history, conflict) c
    $$
    """,
    # A conflict that stops the stream occurs again in each attempt, and is recorded once.
    """
    CREATE FUNCTION subscriber.record_conflict_error(subscription oid, conflict jsonb) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        PERFORM subscriber.check_manager(subscription);
        UPDATE subscriber.conflict_history h
           SET occurrences = h.occurrences + 1, last_detected = pg_catalog.clock_timestamp()
          FROM pg_catalog.jsonb_populate_record(NULL::subscriber.conflict_history, conflict) c
         WHERE h.subid = subscription AND h.relid = c.relid AND h.conflict_type = c.conflict_type
           AND h.index_name IS NOT DISTINCT FROM c.index_name AND h.key IS NOT DISTINCT FROM c.key
           AND h.remote_finish_lsn = c.remote_finish_lsn AND h.resolution = 'error';
        IF NOT FOUND THEN
            PERFORM subscriber.add_conflict(subscription, conflict);
        END IF;
    END $$
    """,
]

# Prepared transactions have no table. Each has two records. The transaction itself creates the one with `committed`,
# which is visible after COMMIT PREPARED, so a restarted worker knows that this is done. The other record is created
# separately, with the progress, and lists the waiting transactions.
PREPARED_TRANSACTIONS = [
    f"""
    CREATE FUNCTION subscriber.saved_prepared()
    RETURNS TABLE (record oid, subid oid, xid bigint, committed boolean, gid text, publisher_gid text,
                   prepare_end_lsn pg_lsn, prepared_at timestamptz)
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
        SELECT p.* FROM subscriber.saved('prepared', {PREPARED[0]}, {PREPARED[1]}) s,
             LATERAL pg_catalog.jsonb_to_record(s) AS p (record oid, subid oid, xid bigint, committed boolean,
                 gid text, publisher_gid text, prepare_end_lsn pg_lsn, prepared_at timestamptz)
    $$
    """,
    f"""
    CREATE FUNCTION subscriber.add_prepared(subscription oid, remote_xid bigint, is_committed boolean, name text,
                                            publisher_name text, end_lsn pg_lsn, at timestamptz) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        number oid := subscriber.draw_number({PREPARED[0]}, {PREPARED[1]}, {LISTED});
    BEGIN
        PERFORM pg_catalog.lo_unlink(p.record) FROM subscriber.saved_prepared() p
          WHERE (p.subid, p.xid, p.committed) = (subscription, remote_xid, is_committed);
        PERFORM pg_catalog.lo_from_bytea(number, subscriber.as_record('prepared', pg_catalog.jsonb_build_object(
            'record', number::bigint, 'subid', subscription::bigint, 'xid', remote_xid, 'committed', is_committed,
            'gid', name, 'publisher_gid', publisher_name, 'prepare_end_lsn', end_lsn, 'prepared_at', at)));
    END $$
    """,
    """
    CREATE FUNCTION subscriber.mark_prepared(progress oid, fence bytea, xid bigint, gid text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        PERFORM subscriber.add_prepared((subscriber.check_fence(progress, fence)).subid, xid, true, gid,
                                        NULL, NULL, NULL);
    END $$
    """,
    """
    CREATE FUNCTION subscriber.note_prepared(progress oid, fence bytea, xid bigint, gid text, publisher_gid text,
                                             prepare_end_lsn pg_lsn, prepared_at timestamptz) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        PERFORM subscriber.add_prepared((subscriber.check_fence(progress, fence)).subid, xid, false, gid,
                                        publisher_gid, prepare_end_lsn, prepared_at);
    END $$
    """,
    """
    CREATE FUNCTION subscriber.find_prepared(progress oid, fence bytea, xid bigint)
    RETURNS TABLE (committed boolean, prepare_end_lsn pg_lsn)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    #variable_conflict use_column
    BEGIN
        RETURN QUERY SELECT p.committed, p.prepare_end_lsn FROM subscriber.saved_prepared() p
                      WHERE p.subid = (subscriber.check_fence($1, $2)).subid AND p.xid = $3;
    END $$
    """,
    """
    CREATE FUNCTION subscriber.forget_prepared(progress oid, fence bytea, xid bigint) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        PERFORM pg_catalog.lo_unlink(p.record) FROM subscriber.saved_prepared() p
          WHERE p.subid = (subscriber.check_fence(progress, $2)).subid AND p.xid = $3;
    END $$
    """,
    # Deletes the records of a whole subscription; prepared transactions stay prepared.
    """
    CREATE FUNCTION subscriber.forget_prepared(subscription oid) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        PERFORM subscriber.check_manager(subscription);
        PERFORM pg_catalog.lo_unlink(p.record) FROM subscriber.saved_prepared() p WHERE p.subid = subscription;
    END $$
    """,
]

# Operations that an ordinary role may not perform. They run with the rights of the schema's owner, if that is a
# superuser.
SESSIONS = [
    """
    CREATE FUNCTION subscriber.become_replica() RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        PERFORM pg_catalog.set_config('session_replication_role', 'replica', false);
    END $$
    """,
    # `number`: that of a further session of an apply worker, with its own origin; 0: the worker's own. Sets the origin
    # to the record's position. Returns its number.
    """
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
    END $$
    """,
    """
    CREATE FUNCTION subscriber.release_origin() RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        PERFORM pg_catalog.pg_replication_origin_session_reset();
    END $$
    """,
    """
    CREATE FUNCTION subscriber.set_origin(progress oid, fence bytea, lsn pg_lsn, committed timestamptz) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        PERFORM subscriber.check_fence(progress, fence);
        PERFORM pg_catalog.pg_replication_origin_xact_setup(lsn, committed);
    END $$
    """,
    # Without a check of the caller: for functions in this script.
    """
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
    END $$
    """,
    """
    CREATE OR REPLACE FUNCTION subscriber.create_origin(name text) RETURNS oid
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        PERFORM subscriber.check_origin_owner(name);
        IF NOT (SELECT r.rolsuper FROM pg_catalog.pg_roles r WHERE r.rolname = current_user) THEN
            RETURN NULL;
        END IF;
        RETURN subscriber.make_origin(name);
    END $$
    """,
]

# Executors of `subscriber copy` pass the fence of the copy.
COPIES = [
    """
    ALTER TABLE subscriber.bulk_copy
        ADD COLUMN fence bytea NOT NULL DEFAULT pg_catalog.uuid_send(pg_catalog.gen_random_uuid())
    """,
    """
    CREATE FUNCTION subscriber.check_copy(wanted bigint, fence bytea) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        PERFORM 1 FROM subscriber.bulk_copy b WHERE b.copyid = wanted AND b.fence = $2 FOR SHARE;
        IF NOT FOUND THEN
            RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
                MESSAGE = 'another copy of these tables has begun';
        END IF;
    END $$
    """,
    # Inserts in a fixed order, so that callers that want the same parts wait for each other without a deadlock.
    """
    CREATE FUNCTION subscriber.claim_parts(wanted bigint, fence bytea, relids oid[], parts integer[])
    RETURNS TABLE (relid oid, part integer)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    #variable_conflict use_column
    BEGIN
        PERFORM subscriber.check_copy(wanted, $2);
        RETURN QUERY
        INSERT INTO subscriber.copy_done AS d (copyid, relid, part)
        SELECT wanted, t.relid, t.part FROM unnest(relids, parts) AS t (relid, part) ORDER BY t.relid, t.part
        ON CONFLICT DO NOTHING RETURNING d.relid, d.part;
    END $$
    """,
    """
    CREATE FUNCTION subscriber.record_parts(wanted bigint, fence bytea, relids oid[], parts integer[], rows bigint[],
                                            sizes bigint[]) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        PERFORM subscriber.check_copy(wanted, $2);
        UPDATE subscriber.copy_done d SET rows = t.rows, bytes = t.bytes
          FROM unnest(relids, parts, $5, sizes) AS t (relid, part, rows, bytes)
         WHERE d.copyid = wanted AND d.relid = t.relid AND d.part = t.part;
    END $$
    """,
]

RESTORING = [
    "CREATE UNLOGGED TABLE subscriber.complete (since timestamptz NOT NULL)",
    f"""
    CREATE FUNCTION subscriber.restore() RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        relation name;
        document jsonb;
        columns text;
    BEGIN
        LOCK TABLE subscriber.complete IN EXCLUSIVE MODE;
        IF EXISTS (SELECT FROM subscriber.complete) THEN
            RETURN;
        END IF;
        FOREACH relation IN ARRAY ARRAY['identity', 'subscription', 'subscription_rel', 'progress_record', 'bulk_copy',
                                        'bulk_copy_rel', 'conflict_history', 'copy_done']::name[] LOOP
            FOR document IN
                SELECT s FROM subscriber.saved(relation,
                    CASE WHEN relation IN ('conflict_history', 'copy_done') THEN {MANY[0]} ELSE {CORE[0]} END,
                    CASE WHEN relation IN ('conflict_history', 'copy_done') THEN {MANY[1]} ELSE {CORE[1]} END) s LOOP
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
        INSERT INTO subscriber.complete VALUES (pg_catalog.clock_timestamp());
    END $$
    """,
]

# Read-only replacements of `progress` and `prepared`.
VIEWS = [
    # A function in a view runs with the rights of the caller, so it has to check the owner of the subscription.
    """
    CREATE FUNCTION subscriber.prepared_transactions()
    RETURNS TABLE (subid oid, xid bigint, committed boolean, gid text, publisher_gid text, prepare_end_lsn pg_lsn,
                   prepared_at timestamptz)
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
        SELECT p.subid, p.xid, p.committed, p.gid, p.publisher_gid, p.prepare_end_lsn, p.prepared_at
          FROM subscriber.saved_prepared() p JOIN subscriber.subscription s USING (subid)
         WHERE pg_catalog.pg_has_role(session_user, s.subowner, 'MEMBER')
    $$
    """,
    """
    CREATE VIEW subscriber.progress AS
    SELECT p.subid, p.relid, subscriber.read_position(p.record) AS remote_lsn,
           CASE WHEN p.relid = 0 THEN s.subsystemid END AS system_id,
           CASE WHEN p.relid = 0 THEN subscriber.read_confirmed(p.record) END AS confirmed_lsn
      FROM subscriber.progress_record p JOIN subscriber.subscription s USING (subid)
     WHERE pg_catalog.pg_has_role(s.subowner, 'MEMBER')
    """,
    """
    CREATE VIEW subscriber.prepared AS
    SELECT p.subid, p.xid, p.committed, p.gid, p.publisher_gid, p.prepare_end_lsn, p.prepared_at
      FROM subscriber.prepared_transactions() p
    """,
]


# Such a transaction has rows of the old table, and would block its replacement as long as it is prepared.
REFUSE_PREPARED = """
DO $$
BEGIN
    IF EXISTS (SELECT FROM pg_catalog.pg_prepared_xacts x
                WHERE x.database = pg_catalog.current_database() AND pg_catalog.starts_with(x.gid, 'pg_gid_')) THEN
        RAISE EXCEPTION USING ERRCODE = 'object_in_use',
            MESSAGE = 'schema "subscriber" cannot be upgraded while transactions of subscriptions are prepared',
            HINT = 'Let the version that you upgrade from finish them: they are in pg_prepared_xacts, as pg_gid_...';
    END IF;
END $$
"""
# The server's own subscription would stop at the first change of a table that no longer exists. Ordinary roles may not
# read the OIDs of subscriptions before PostgreSQL 14, so the name is read last, and only if there is one.
REFUSE_REPLICATED = """
DO $$
DECLARE
    native oid := (SELECT r.srsubid FROM pg_catalog.pg_subscription_rel r
                     JOIN pg_catalog.pg_class c ON c.oid = r.srrelid
                    WHERE c.relnamespace = 'subscriber'::regnamespace LIMIT 1);
    named text := native;
BEGIN
    IF native IS NULL THEN
        RETURN;
    END IF;
    IF pg_catalog.has_column_privilege('pg_catalog.pg_subscription', 'oid', 'SELECT') THEN
        named := (SELECT pg_catalog.quote_ident(s.subname) FROM pg_catalog.pg_subscription s WHERE s.oid = native);
    END IF;
    RAISE EXCEPTION USING ERRCODE = 'object_in_use',
        MESSAGE = pg_catalog.format('schema "subscriber" cannot be upgraded while subscription %s of the server'
                                    ' replicates its tables', named),
        HINT = pg_catalog.format('Upgrade subscriber on the publisher first, then:'
                                 ' ALTER SUBSCRIPTION %s REFRESH PUBLICATION', named);
END $$
"""
# Replication could have filled permanent tables. A subscription of another server would use its slot and apply its
# changes here. Workers of a subscription leave an origin, or without origins a report.
DISABLE_FOREIGN = [
    """
    UPDATE subscriber.subscription s SET subenabled = false
     WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_replication_origin o WHERE o.roname = 'pg_' || s.subid)
       AND NOT EXISTS (SELECT FROM subscriber.worker w WHERE w.subid = s.subid)
    """,
    """
    INSERT INTO subscriber.worker (subid, worker_type, state, error, error_hint, error_time, started, updated_at)
    SELECT s.subid, 'apply', 'stopped', 'the subscription has no replication origin and has never run on this server',
           pg_catalog.format('If it belongs to another server, keep its slot: ALTER SUBSCRIPTION %1$I'
                             ' SET (slot_name = NONE); DROP SUBSCRIPTION %1$I.'
                             ' Otherwise: ALTER SUBSCRIPTION %1$I ENABLE.', s.subname),
           pg_catalog.now(), pg_catalog.now(), pg_catalog.now()
      FROM subscriber.subscription s
     WHERE NOT s.subenabled
       AND NOT EXISTS (SELECT FROM pg_catalog.pg_replication_origin o WHERE o.roname = 'pg_' || s.subid)
       AND NOT EXISTS (SELECT FROM subscriber.worker w WHERE w.subid = s.subid)
    """,
]
# Sequences can be published since PostgreSQL 19, and can be UNLOGGED since 15.
NUMBER = """
DO $$
BEGIN
    EXECUTE CASE WHEN pg_catalog.current_setting('server_version_num')::int >= 150000
                 THEN 'CREATE UNLOGGED SEQUENCE subscriber.number MAXVALUE 1000000000 CYCLE'
                 ELSE 'CREATE SEQUENCE subscriber.number MAXVALUE 1000000000 CYCLE' END;
END $$
"""


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    for statement in ["SET LOCAL lock_timeout = '30s'", REFUSE_PREPARED, REFUSE_REPLICATED]:
        op.execute(statement)
    for table in BECOME_UNLOGGED:
        op.execute(f"ALTER TABLE subscriber.{table} SET UNLOGGED")
    for statement in [*DISABLE_FOREIGN, NUMBER, *RECORDS, *PROGRESS]:
        op.execute(statement)
    for table, key in (("conflict_history", "id"), ("bulk_copy", "copyid")):
        op.execute(f"ALTER TABLE subscriber.{table} ALTER COLUMN {key} DROP IDENTITY")
        op.execute(f"ALTER TABLE subscriber.{table} ALTER COLUMN {key} SET DEFAULT subscriber.new_id()")
    for statement in COPIES:
        op.execute(statement)
    _carry_over()
    for table in KEPT:
        default = "new_record_of_many" if table in MANY_ROWS else "new_record"
        op.execute(f"ALTER TABLE subscriber.{table} ADD COLUMN kept oid NOT NULL UNIQUE DEFAULT subscriber.{default}()")
        op.execute(f"""
            CREATE TRIGGER keep AFTER INSERT OR UPDATE OR DELETE ON subscriber.{table}
            FOR EACH ROW EXECUTE FUNCTION subscriber.keep()
        """)
        op.execute(f"ALTER TABLE subscriber.{table} ENABLE ALWAYS TRIGGER keep")
        op.execute(f"UPDATE subscriber.{table} SET kept = kept")
    for statement in [*VIEWS, *APPLYING, *SESSIONS, *RESTORING]:
        op.execute(statement)
    op.execute("INSERT INTO subscriber.complete VALUES (pg_catalog.clock_timestamp())")


def _carry_over() -> None:
    """Copy the progress, the confirmed positions and the prepared transactions from the previous tables."""
    for statement in PREPARED_TRANSACTIONS:
        op.execute(statement)
    op.execute("SELECT subscriber.set_progress(p.subid, p.relid, p.remote_lsn) FROM subscriber.progress p")
    op.execute("""
        UPDATE subscriber.subscription s SET subsystemid = p.system_id
          FROM subscriber.progress p WHERE p.subid = s.subid AND p.relid = 0
    """)
    op.execute("SELECT subscriber.set_confirmed(c.subid, c.confirmed_lsn) FROM subscriber.confirmed c")
    op.execute("""
        SELECT subscriber.add_prepared(p.subid, p.xid, p.committed, p.gid, p.publisher_gid, p.prepare_end_lsn,
                                       p.prepared_at)
          FROM subscriber.prepared p
    """)
    for table in ("progress", "confirmed", "prepared"):
        op.execute(f"DROP TABLE subscriber.{table}")
