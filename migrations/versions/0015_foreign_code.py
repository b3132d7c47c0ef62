"""Code that runs when a table is written, and that belongs to a role which the session must not trust.

Triggers, rules, expressions, domains and operators of a table run with every change that a worker applies. SET ROLE to
the table's owner is no protection: the code can reset the role, and then has the rights of the session's own role.

A role is *trusted* in three cases: it is a superuser, it may SET ROLE to the session's own role, or the subscription
names it in trusted_owners. Code of all other roles is *foreign*. The owner of a function, a type or an operator
decides, because the owner can replace it at any time. The text of an expression belongs to the table's owner, so it may
only use functions that run no other code.

foreign_code() lists the foreign code of a table and its partitions. exceeds() returns whether the session's role has
more rights than another role. Foreign code of such a role must not run in the session.

The functions are in PL/pgSQL, whose plans a session keeps. The plans of a function in SQL are made for each call.
"""

from __future__ import annotations

from alembic import op

revision = "0015"
down_revision = "0014"

# Node types of stored expressions that run nothing but the functions and types they name, in the formats of PostgreSQL
# 13 to 18. An expression with any other node counts as foreign.
NODES = """
ARRAY ARRAYCOERCEEXPR ARRAYEXPR BOOLEANTEST BOOLEXPR CASE CASEEXPR CASETESTEXPR CASEWHEN COALESCE COALESCEEXPR
COERCETODOMAIN COERCETODOMAINVALUE COERCEVIAIO COLLATE COLLATEEXPR CONST DISTINCTEXPR FIELDSELECT FUNCEXPR MINMAX
MINMAXEXPR NAMEDARGEXPR NEXTVALUEEXPR NULLIFEXPR NULLTEST OPEXPR RELABELTYPE ROW ROWCOMPARE ROWCOMPAREEXPR
ROWEXPR SCALARARRAYOPEXPR SQLVALUEFUNCTION SUBSCRIPTINGREF VAR WHEN
"""
# Functions of the server that are not immutable and run no other code than output functions of their arguments.
HARMLESS = """
now clock_timestamp statement_timestamp transaction_timestamp timeofday random random_normal gen_random_uuid uuidv4
uuidv7 nextval currval lastval txid_current pg_current_xact_id concat concat_ws format array_to_string
current_setting inet_client_addr inet_server_addr pg_backend_pid pg_typeof quote_literal quote_nullable
"""
# A stable function of the server whose arguments all have these types cannot be given code to run.
SCALARS = """
bool int2 int4 int8 float4 float8 numeric text varchar bpchar char bytea date time timetz timestamp timestamptz
interval uuid json jsonb inet cidr macaddr bit varbit money pg_lsn tsvector tsquery
"""


def _array(words: str) -> str:
    return "ARRAY['" + "', '".join(words.split()) + "']"


FUNCTIONS = [
    """
    CREATE FUNCTION subscriber.is_trusted(role oid, trusted_owners name[]) RETURNS boolean
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
    #variable_conflict use_column
    BEGIN
        RETURN (
        SELECT coalesce((
            SELECT r.rolsuper OR r.rolname = session_user OR r.rolname = ANY (trusted_owners)
                   OR pg_catalog.pg_has_role(r.oid, session_user, CASE
                          WHEN pg_catalog.current_setting('server_version_num')::int4 >= 160000 THEN 'SET'
                          ELSE 'MEMBER' END)
              FROM pg_catalog.pg_roles r WHERE r.oid = role), false));
    END
    $$
    """,
    # All grants to the session's role and objects owned by it count as more rights, except those that these duties
    # need.
    """
    CREATE FUNCTION subscriber.exceeds(role oid) RETURNS boolean
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
    #variable_conflict use_column
    BEGIN
        RETURN (
        SELECT s.oid <> role AND (
               s.rolsuper OR s.rolcreaterole OR s.rolcreatedb OR s.rolreplication OR s.rolbypassrls
               OR pg_catalog.has_function_privilege(s.oid, 'subscriber.claim_progress(oid, oid)', 'EXECUTE')
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
    $$
    """,
    # Functions and types that a stored expression names. Texts in it are escaped, so all matching words are its own.
    """
    CREATE FUNCTION subscriber.code_in(expression text) RETURNS SETOF oid
    LANGUAGE plpgsql STABLE ROWS 10 SET search_path = pg_catalog, pg_temp AS $$
    #variable_conflict use_column
    BEGIN
        RETURN QUERY
        SELECT m[1]::oid FROM regexp_matches(expression, '[:]funcid (\\d+)', 'g') m
        UNION
        SELECT o.oprcode::oid FROM regexp_matches(expression, '[:]opno (\\d+)', 'g') m
          JOIN pg_catalog.pg_operator o ON o.oid = m[1]::oid
        UNION
        SELECT o.oprcode::oid FROM regexp_matches(expression, '[:]opnos \\(o ([\\d ]+)\\)', 'g') m,
               LATERAL regexp_split_to_table(m[1], ' ') s JOIN pg_catalog.pg_operator o ON o.oid = s::oid;
    END
    $$
    """,
    """
    CREATE FUNCTION subscriber.types_in(expression text) RETURNS SETOF oid
    LANGUAGE plpgsql STABLE ROWS 10 SET search_path = pg_catalog, pg_temp AS $$
    #variable_conflict use_column
    BEGIN
        RETURN QUERY
        SELECT t.oid FROM regexp_matches(expression, '[:][a-z_]*type(id)? (\\d+)', 'g') m
          JOIN pg_catalog.pg_type t ON t.oid = m[2]::oid;
    END
    $$
    """,
    # A type and all types that it contains.
    """
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
    $$
    """,
    # The functions of an operator class, and the operators of an exclusion constraint.
    """
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
    $$
    """,
    # Code that belongs to a type: the code that its owner can change. An enum has only labels.
    """
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
    $$
    """,
    # Whether a function of a trusted owner only computes with its arguments.
    f"""
    CREATE FUNCTION subscriber.is_harmless(function oid) RETURNS boolean
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
    #variable_conflict use_column
    BEGIN
        RETURN (
        SELECT CASE
            WHEN f.provolatile = 'i' THEN true
            WHEN f.pronamespace <> 'pg_catalog'::pg_catalog.regnamespace THEN f.pronargs = 0
            WHEN f.proname = ANY ({_array(HARMLESS)}) THEN true
            ELSE f.provolatile = 's' AND f.proname !~ '_to_xml'
                 AND NOT EXISTS (SELECT FROM unnest(f.proargtypes::oid[] || f.prorettype) u (oid)
                                   JOIN pg_catalog.pg_type t ON t.oid = u.oid
                                  WHERE t.typnamespace <> f.pronamespace
                                     OR ltrim(t.typname, '_') <> ALL ({_array(SCALARS)}))
            END
          FROM pg_catalog.pg_proc f WHERE f.oid = function);
    END
    $$
    """,
    # Code that belongs to a stored expression written by `author`.
    f"""
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
          FROM regexp_matches(expression, '(?<!\\\\)\\{{([A-Z0-9_]+)', 'g') m
         WHERE NOT trusted_author AND m[1] <> ALL ({_array(NODES)});
    END
    $$
    """,
]

# `used_as_default` is a column whose default runs only if the publisher does not send the column. `acting` is the role
# that runs all code if it is not the table's owner. It has chosen to run the code, and is the role whose rights must
# not be exceeded.
FOREIGN_CODE = """
CREATE FUNCTION subscriber.foreign_code(relation oid, trusted_owners name[], replica boolean, acting name)
RETURNS TABLE (owner name, what text, used_as_default name, exceeded boolean)
LANGUAGE plpgsql STABLE ROWS 10 SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
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
        SELECT k.relowner, k.trusted, k.expression, 'partition key', NULL FROM keys k WHERE k.expression IS NOT NULL),
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
         WHERE NOT replica AND (k.confdeltype IN ('c', 'n', 'd') OR k.confupdtype IN ('c', 'n', 'd')))
    SELECT DISTINCT pg_catalog.pg_get_userbyid(f.owner), f.what, f.used_as_default,
           subscriber.exceeds(coalesce((SELECT r.oid FROM pg_catalog.pg_roles r WHERE r.rolname = acting), f.owner))
      FROM found f WHERE NOT subscriber.is_trusted(f.owner, trusted_owners);
END
$$
"""

# The foreign code of a table for a session of the login role, and whether the table is *guarded*. The session may have
# more rights than an owner of the table, of a partition or of a parent, who could add foreign code at any time. Each
# transaction then has to lock the table and compare its shape before it uses the table. Attaching a partition takes a
# weaker lock than any other change of a table, so partitioned tables are locked in a stronger mode.
TABLE_SAFETY = """
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
$$
"""

# The shape of a table, the versions of all objects that its safety depends on, and whether the session's role has more
# rights than the roles whose code it runs.
GUARDED_SHAPE = """
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
            (SELECT string_agg(concat(i.indexrelid, ':', i.xmin), ',' ORDER BY i.indexrelid)
               FROM pg_catalog.pg_index i WHERE i.indrelid = c.oid), '/',
            (SELECT string_agg(concat(r.oid, ':', r.xmin), ',' ORDER BY r.oid) FROM pg_catalog.pg_rewrite r
              WHERE r.ev_class = c.oid), '/',
            (SELECT string_agg(concat(t.oid, ':', t.xmin), ',' ORDER BY t.oid) FROM pg_catalog.pg_trigger t
              WHERE t.tgrelid = c.oid)), ' ' ORDER BY c.oid))
          FROM pg_catalog.pg_class c WHERE c.oid IN (SELECT t.oid FROM tree t)));
END $$
"""


STATEMENTS = [*FUNCTIONS, FOREIGN_CODE, TABLE_SAFETY, GUARDED_SHAPE]


def upgrade() -> None:
    """Upgrade the catalog. There is no downgrade."""
    for statement in STATEMENTS:
        op.execute(statement)
    op.execute("ALTER TABLE subscriber.subscription ADD COLUMN subtrustedowners name[] NOT NULL DEFAULT '{}'")
    op.execute("ALTER FUNCTION subscriber.table_shape(oid, text) SET search_path = pg_catalog, pg_temp")
