"""A table of a subscription is its OID while that exists. Removed tables get no change of an earlier transaction.

- Tables of a subscription that exchange their names keep their rows in subscription_rel, as in PostgreSQL.
- A row follows its stored name to another table only for names that the caller gives: the names that arrive from the
  publisher. If the publisher has renamed its table too, no change arrives under the former name.
- srformer is the table that the row has left. Its changes are an error until a refresh compares the table.
- A statement that removes a table changes the generation of the subscription's settings. So a worker commits nothing
  that it has applied to the table before.
"""

from __future__ import annotations

from alembic import op

revision = "0044"
down_revision = "0043"

STATEMENTS = [
    "ALTER TABLE subscriber.subscription_rel ADD COLUMN srformer oid",
    # The large objects of the rows have the column as well.
    "UPDATE subscriber.subscription_rel SET kept = kept",
    # Returns the state of the removed table, or NULL.
    """
    CREATE FUNCTION subscriber.remove_relation(subscription oid, relation oid) RETURNS text
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        state text;
    BEGIN
        PERFORM subscriber.check_manager(subscription);
        UPDATE subscriber.subscription s SET subgeneration = (s.subgeneration + 1) % 2147483647
         WHERE s.subid = subscription;
        DELETE FROM subscriber.copied_range r WHERE (r.subid, r.relid) = (subscription, relation);
        DELETE FROM subscriber.subscription_rel r WHERE (r.srsubid, r.srrelid) = (subscription, relation)
        RETURNING r.srsubstate::text INTO state;
        RETURN state;
    END $$
    """,
    # Rows of copies that have committed a part of the table follow no name: their rows are in the old table.
    """
    CREATE FUNCTION subscriber.copy_has_begun(subscription oid, relation oid) RETURNS boolean
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
        SELECT EXISTS (SELECT FROM subscriber.subscription_rel r
                        WHERE (r.srsubid, r.srrelid, r.srsubstate) = (subscription, relation, 'f'))
            OR EXISTS (SELECT FROM subscriber.subscription_rel r JOIN subscriber.copied_range c
                                ON (c.subid, c.relid) = (r.srsubid, r.srrelid)
                        WHERE (r.srsubid, r.srrelid, r.srsubstate) = (subscription, relation, 'd'))
            OR EXISTS (SELECT FROM subscriber.subscription_rel r JOIN subscriber.bulk_copy b ON b.subid = r.srsubid
                         JOIN subscriber.bulk_copy_rel p ON (p.copyid, p.relid) = (b.copyid, r.srrelid)
                        WHERE (r.srsubid, r.srrelid) = (subscription, relation) AND r.srsubstate IN ('i', 'd'))
    $$
    """,
    "DROP FUNCTION subscriber.follow_names(oid)",
    # `names` are arrays of schema and name. Returns the names of the rows that have followed one.
    """
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
    END $$
    """,
    "REVOKE ALL ON FUNCTION subscriber.remove_relation(oid, oid) FROM PUBLIC",
    "REVOKE ALL ON FUNCTION subscriber.copy_has_begun(oid, oid) FROM PUBLIC",
    "REVOKE ALL ON FUNCTION subscriber.follow_names(oid, text[], text[]) FROM PUBLIC",
]
DUTIES = (
    (
        "subscriber.follow_names(oid)",
        "subscriber.follow_names(oid, text[], text[]), subscriber.copy_has_begun(oid, oid),"
        " subscriber.remove_relation(oid, oid)",
    ),
)
REPLACED = {
    # OIDs of a restored dump are those of other tables.
    "find_relations(text[], boolean)": (
        (
            "        FOR subscription, olds",
            "        UPDATE subscriber.subscription_rel r SET srformer = NULL;\n        FOR subscription, olds",
        ),
    ),
    "admit(text, text)": DUTIES,
    "dismiss(text, text)": DUTIES,
}


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    deleted_rows = op.get_context().script.get_revision("0022").module
    for statement in STATEMENTS:
        op.execute(statement)
    for function, changes in REPLACED.items():
        op.execute(deleted_rows._replace(function, changes))
    op.execute(deleted_rows.ADMITTED)
