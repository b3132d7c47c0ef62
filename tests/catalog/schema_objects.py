"""All objects of schema "subscriber" as texts, to compare two databases object by object.

A text has everything that PostgreSQL stores about the object and that a statement can change: definition, owner,
privileges and comment. OIDs are left out, and the order of columns, which no statement of the program depends on.
"""

from __future__ import annotations

import asyncpg

# Rows: the kind of object, its name and what it is.
OBJECTS = """
WITH ours AS (SELECT 'subscriber'::pg_catalog.regnamespace::oid AS oid),
     relations AS (SELECT c.* FROM pg_catalog.pg_class c, ours WHERE c.relnamespace = ours.oid),
     acls (classid, objid, objsubid, acl, initial) AS (
    SELECT 'pg_namespace', n.oid, 0, n.nspacl, pg_catalog.acldefault('n', n.nspowner)
      FROM pg_catalog.pg_namespace n, ours WHERE n.oid = ours.oid
    UNION ALL
    SELECT 'pg_class', r.oid, 0, r.relacl,
           pg_catalog.acldefault(CASE r.relkind WHEN 'S' THEN 's'::"char" ELSE 'r' END, r.relowner) FROM relations r
    UNION ALL
    SELECT 'pg_class', a.attrelid, a.attnum, a.attacl, '{}' FROM relations r
      JOIN pg_catalog.pg_attribute a ON a.attrelid = r.oid WHERE a.attacl IS NOT NULL
    UNION ALL
    SELECT 'pg_proc', p.oid, 0, p.proacl, pg_catalog.acldefault('f', p.proowner)
      FROM pg_catalog.pg_proc p, ours WHERE p.pronamespace = ours.oid
    UNION ALL
    SELECT 'pg_type', t.oid, 0, t.typacl, pg_catalog.acldefault('T', t.typowner)
      FROM pg_catalog.pg_type t, ours WHERE t.typnamespace = ours.oid),
     privileges (classid, objid, objsubid, list) AS (
    SELECT l.classid, l.objid, l.objsubid, string_agg(
               CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE pg_catalog.pg_get_userbyid(a.grantee)::text END || ': '
               || a.privilege_type || CASE WHEN a.is_grantable THEN ' *' ELSE '' END,
               E'\n' ORDER BY a.grantee = 0, pg_catalog.pg_get_userbyid(a.grantee), a.privilege_type)
      FROM acls l, LATERAL pg_catalog.aclexplode(coalesce(l.acl, l.initial)) a GROUP BY 1, 2, 3),
     objects (kind, name, classid, objid, objsubid, owner, definition) AS (
    SELECT 'schema', n.nspname::text, 'pg_namespace', n.oid, 0, n.nspowner, NULL
      FROM pg_catalog.pg_namespace n, ours WHERE n.oid = ours.oid
    UNION ALL
    SELECT 'relation', r.relname, 'pg_class', r.oid, 0, r.relowner,
           pg_catalog.concat_ws(' ', r.relkind, r.relpersistence, r.reloptions, r.relrowsecurity,
                                r.relforcerowsecurity, r.relreplident, r.reltablespace, m.amname, r.relispopulated,
                                (SELECT pg_catalog.to_jsonb(q) - 'seqrelid' FROM pg_catalog.pg_sequence q
                                  WHERE q.seqrelid = r.oid),
                                CASE WHEN r.relkind IN ('v', 'm') THEN pg_catalog.pg_get_viewdef(r.oid) END)
      FROM relations r LEFT JOIN pg_catalog.pg_am m ON m.oid = r.relam
     WHERE r.relkind NOT IN ('i', 'c', 't')
    UNION ALL
    SELECT 'column', pg_catalog.concat(r.relname, '.', a.attname), 'pg_class', r.oid, a.attnum, r.relowner,
           pg_catalog.concat_ws(' ', pg_catalog.format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attstorage,
                                a.attcollation::pg_catalog.regcollation, a.attidentity, a.attgenerated,
                                a.attoptions, pg_catalog.pg_get_expr(d.adbin, d.adrelid))
      FROM relations r JOIN pg_catalog.pg_attribute a ON a.attrelid = r.oid AND a.attnum > 0 AND NOT a.attisdropped
      LEFT JOIN pg_catalog.pg_attrdef d ON (d.adrelid, d.adnum) = (a.attrelid, a.attnum)
     WHERE r.relkind IN ('r', 'p', 'v', 'm')
    UNION ALL
    SELECT 'constraint', pg_catalog.concat_ws('.', coalesce(r.relname, t.typname), k.conname), 'pg_constraint', k.oid,
           0, coalesce(r.relowner, t.typowner),
           pg_catalog.concat_ws(' ', pg_catalog.pg_get_constraintdef(k.oid), k.convalidated)
      FROM pg_catalog.pg_constraint k JOIN ours ON ours.oid = k.connamespace
      LEFT JOIN relations r ON r.oid = k.conrelid LEFT JOIN pg_catalog.pg_type t ON t.oid = k.contypid
    UNION ALL
    SELECT 'index', r.relname, 'pg_class', r.oid, 0, r.relowner,
           pg_catalog.concat_ws(' ', pg_catalog.pg_get_indexdef(r.oid), i.indisunique, i.indisprimary,
                                i.indisclustered, i.indisvalid, i.indisreplident, r.relpersistence, r.reloptions)
      FROM relations r JOIN pg_catalog.pg_index i ON i.indexrelid = r.oid
    UNION ALL
    SELECT 'trigger', pg_catalog.concat(r.relname, '.', g.tgname), 'pg_trigger', g.oid, 0, r.relowner,
           pg_catalog.concat_ws(' ', pg_catalog.pg_get_triggerdef(g.oid), g.tgenabled)
      FROM relations r JOIN pg_catalog.pg_trigger g ON g.tgrelid = r.oid AND NOT g.tgisinternal
    UNION ALL
    SELECT 'rule', pg_catalog.concat(r.relname, '.', w.rulename), 'pg_rewrite', w.oid, 0, r.relowner,
           pg_catalog.concat_ws(' ', w.ev_enabled, pg_catalog.pg_get_ruledef(w.oid))
      FROM relations r JOIN pg_catalog.pg_rewrite w ON w.ev_class = r.oid
    UNION ALL
    SELECT 'policy', pg_catalog.concat(r.relname, '.', y.polname), 'pg_policy', y.oid, 0, r.relowner,
           pg_catalog.concat_ws(' ', y.polcmd, y.polpermissive, y.polroles,
                                pg_catalog.pg_get_expr(y.polqual, y.polrelid), 'CHECK',
                                pg_catalog.pg_get_expr(y.polwithcheck, y.polrelid))
      FROM relations r JOIN pg_catalog.pg_policy y ON y.polrelid = r.oid
    UNION ALL
    SELECT 'function', pg_catalog.regexp_replace(p.oid::pg_catalog.regprocedure::text, '^subscriber[.]', ''),
           'pg_proc', p.oid, 0, p.proowner, pg_catalog.pg_get_functiondef(p.oid)
      FROM pg_catalog.pg_proc p, ours WHERE p.pronamespace = ours.oid
    UNION ALL
    SELECT 'type', t.typname, 'pg_type', t.oid, 0, t.typowner,
           pg_catalog.concat_ws(' ', t.typtype, pg_catalog.format_type(t.typbasetype, t.typtypmod), t.typnotnull,
                                t.typdefault, t.typcollation::pg_catalog.regcollation)
      FROM pg_catalog.pg_type t, ours WHERE t.typnamespace = ours.oid
       AND t.typtype NOT IN ('b', 'p') AND (t.typrelid = 0 OR EXISTS (
           SELECT FROM relations r WHERE r.oid = t.typrelid AND r.relkind = 'c'))
    UNION ALL
    SELECT 'default privileges', pg_catalog.concat(d.defaclrole::pg_catalog.regrole, ' ', d.defaclobjtype),
           'pg_default_acl', d.oid, 0, d.defaclrole, d.defaclacl::text
      FROM pg_catalog.pg_default_acl d, ours WHERE d.defaclnamespace = ours.oid
    UNION ALL
    SELECT 'statistics', s.stxname, 'pg_statistic_ext', s.oid, 0, s.stxowner, pg_catalog.pg_get_statisticsobjdef(s.oid)
      FROM pg_catalog.pg_statistic_ext s, ours WHERE s.stxnamespace = ours.oid)
SELECT o.kind, o.name,
       pg_catalog.concat_ws(E'\n', 'owner ' || pg_catalog.pg_get_userbyid(o.owner), o.definition, p.list) AS definition,
       d.description AS comment
  FROM objects o
  LEFT JOIN privileges p ON (p.classid, p.objid, p.objsubid) = (o.classid, o.objid, o.objsubid)
  LEFT JOIN pg_catalog.pg_description d ON (d.classoid, d.objoid, d.objsubid)
         = (('pg_catalog.' || o.classid)::pg_catalog.regclass, o.objid, o.objsubid)
"""
# Kinds without comments: their columns, types and functions have one.
UNCOMMENTED = frozenset(("index", "constraint", "trigger", "rule", "policy", "default privileges"))


async def read_objects(connection: asyncpg.Connection) -> dict[tuple[str, str], str]:
    """Return the definition of each object of the schema, by its kind and name."""
    rows = await connection.fetch(OBJECTS)
    objects = {(row["kind"], row["name"]): row["definition"] for row in rows}
    assert len(objects) == len(rows), "two objects of the same name"
    return objects


async def read_comments(connection: asyncpg.Connection) -> dict[tuple[str, str], str | None]:
    """Return the comment of each object of a kind that has one; None: it is missing."""
    rows = await connection.fetch(OBJECTS)
    return {(row["kind"], row["name"]): row["comment"] for row in rows if row["kind"] not in UNCOMMENTED}


def differences(first: dict[tuple[str, str], str], second: dict[tuple[str, str], str]) -> list[str]:
    """Return a line for each object that only one database has, and both definitions of each other difference."""
    lines = [f"only in the first: {' '.join(name)}" for name in sorted(first.keys() - second.keys())]
    lines += [f"only in the second: {' '.join(name)}" for name in sorted(second.keys() - first.keys())]
    for name in sorted(first.keys() & second.keys()):
        if first[name] != second[name]:
            lines.append(f"{' '.join(name)}:\n{first[name]}\n--- is in the second\n{second[name]}")
    return lines
