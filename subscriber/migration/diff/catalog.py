"""The objects of one database as its catalogs describe them.

Each query returns for its objects: the name, the attributes as JSON, the statement that creates the object, and the one
that drops it. The statements are SQL of the source, in which all names are quoted by the server. A statement is NULL if
only pg_dump can write it.

Objects of extensions, of the system, and of the program's own schema are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from subscriber import server_features as features
from subscriber.catalog.connection import Connection
from subscriber.publisher.own_schema import IS_OURS, OWN_SCHEMA


class ObjectKey(NamedTuple):
    """The identity of an object in both databases."""

    kind: str
    name: str  # quoted as in SQL


@dataclass(frozen=True, slots=True)
class CatalogObject:
    """An object.

    Attributes:
        attributes: JSON values by name. Attributes of other versions are missing.
        create: a statement. None: only pg_dump can write it.
        drop: a statement. None: there is none.
        table: the quoted table whose columns its expressions use.
    """

    attributes: Mapping[str, Any]
    create: str | None = None
    drop: str | None = None
    table: str | None = None


# Schemas of users. Temporary schemas, and those of the system, are left out.
_USER = f"n.nspname !~ '^pg_' AND n.nspname <> 'information_schema' AND NOT {IS_OURS}"


def _own(catalog: str, oid: str, deptypes: str = "'e'") -> str:
    """Return the condition that an object does not belong to an extension, or with "'i'" to another object."""
    return (
        f"NOT EXISTS (SELECT FROM pg_catalog.pg_depend e WHERE e.classid = 'pg_catalog.{catalog}'::pg_catalog.regclass"
        f" AND e.objid = {oid} AND e.deptype IN ({deptypes}))"
    )


def _acl(acl: str, kind: str, owner: str) -> str:
    """Return the privileges as a sorted list. {maintain} excludes one that is only in newer versions."""
    return (
        "(SELECT coalesce(pg_catalog.jsonb_agg(x ORDER BY x), '[]') FROM (SELECT pg_catalog.concat_ws(' ',"
        " a.privilege_type, CASE a.grantee WHEN 0 THEN 'PUBLIC'"
        " ELSE pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(a.grantee)) END,"
        " CASE WHEN a.is_grantable THEN 'WITH GRANT OPTION' END) x"
        f" FROM pg_catalog.aclexplode(coalesce({acl}, pg_catalog.acldefault('{kind}', {owner}))) a"
        f" WHERE a.grantee <> {owner} AND a.privilege_type <> {{maintain}}) p)"
    )


def _comment(oid: str, catalog: str, column: str | None = None) -> str:
    if column is not None:
        return f"pg_catalog.col_description({oid}, {column})"
    return f"pg_catalog.obj_description({oid}, '{catalog}')"


_TABLE = "pg_catalog.format('%I.%I', n.nspname, c.relname)"
_KIND = (
    "CASE c.relkind WHEN 'v' THEN 'VIEW' WHEN 'm' THEN 'MATERIALIZED VIEW' WHEN 'S' THEN 'SEQUENCE'"
    " WHEN 'f' THEN 'FOREIGN TABLE' ELSE 'TABLE' END"
)
_RELATION = f"""
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE {_USER} AND c.relpersistence <> 't' AND {_own("pg_class", "c.oid")}
"""
_JOINED = f"""
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE {_USER} AND c.relpersistence <> 't' AND {_own("pg_class", "c.oid")}
"""
_OWNER = "pg_catalog.pg_get_userbyid({})"

# kind -> query. {maintain}, {generated}, {compression}, {nulls} and so on depend on the version, see _parts().
_QUERIES: dict[str, str] = {
    # The owner of schema public has another default since 15.
    "schema": f"""
SELECT pg_catalog.quote_ident(n.nspname),
       pg_catalog.jsonb_build_object('owner', CASE WHEN n.nspname <> 'public' THEN {_OWNER.format("n.nspowner")} END,
           'acl', {_acl("n.nspacl", "n", "n.nspowner")}, 'comment', {_comment("n.oid", "pg_namespace")}),
       pg_catalog.format('CREATE SCHEMA %I AUTHORIZATION %I', n.nspname, {_OWNER.format("n.nspowner")}),
       pg_catalog.format('DROP SCHEMA %I', n.nspname), NULL
  FROM pg_catalog.pg_namespace n WHERE {_USER} AND {_own("pg_namespace", "n.oid")}
""",
    "extension": """
SELECT pg_catalog.quote_ident(e.extname),
       pg_catalog.jsonb_build_object('version', e.extversion, 'schema', n.nspname),
       pg_catalog.format('CREATE EXTENSION %I SCHEMA %I', e.extname, n.nspname),
       pg_catalog.format('DROP EXTENSION %I', e.extname), NULL
  FROM pg_catalog.pg_extension e JOIN pg_catalog.pg_namespace n ON n.oid = e.extnamespace WHERE e.extname <> 'plpgsql'
""",
    "enum": f"""
SELECT pg_catalog.format('%I.%I', n.nspname, t.typname),
       pg_catalog.jsonb_build_object('owner', {_OWNER.format("t.typowner")}, 'acl',
           {_acl("t.typacl", "T", "t.typowner")},
           'comment', {_comment("t.oid", "pg_type")}, 'labels',
           (SELECT pg_catalog.jsonb_agg(l.enumlabel ORDER BY l.enumsortorder) FROM pg_catalog.pg_enum l
             WHERE l.enumtypid = t.oid)),
       pg_catalog.format('CREATE TYPE %I.%I AS ENUM (%s)', n.nspname, t.typname,
           (SELECT pg_catalog.string_agg(pg_catalog.quote_literal(l.enumlabel), ', ' ORDER BY l.enumsortorder)
              FROM pg_catalog.pg_enum l WHERE l.enumtypid = t.oid)),
       pg_catalog.format('DROP TYPE %I.%I', n.nspname, t.typname), NULL
  FROM pg_catalog.pg_type t JOIN pg_catalog.pg_namespace n ON n.oid = t.typnamespace
 WHERE t.typtype = 'e' AND {_USER} AND {_own("pg_type", "t.oid")}
""",
    "domain": f"""
SELECT pg_catalog.format('%I.%I', n.nspname, t.typname),
       pg_catalog.jsonb_build_object('owner', {_OWNER.format("t.typowner")}, 'acl',
           {_acl("t.typacl", "T", "t.typowner")},
           'comment', {_comment("t.oid", "pg_type")}, 'type', pg_catalog.format_type(t.typbasetype, t.typtypmod),
           'not null', t.typnotnull, 'default', t.typdefault,
           'constraints', (SELECT pg_catalog.jsonb_agg(pg_catalog.format('%I %s', k.conname,
               pg_catalog.pg_get_constraintdef(k.oid)) ORDER BY k.conname) FROM pg_catalog.pg_constraint k
               WHERE k.contypid = t.oid AND k.contype = 'c')),
       NULL, pg_catalog.format('DROP DOMAIN %I.%I', n.nspname, t.typname), NULL
  FROM pg_catalog.pg_type t JOIN pg_catalog.pg_namespace n ON n.oid = t.typnamespace
 WHERE t.typtype = 'd' AND {_USER} AND {_own("pg_type", "t.oid")}
""",
    "type": f"""
SELECT pg_catalog.format('%I.%I', n.nspname, t.typname),
       pg_catalog.jsonb_build_object('owner', {_OWNER.format("t.typowner")}, 'acl',
           {_acl("t.typacl", "T", "t.typowner")},
           'comment', {_comment("t.oid", "pg_type")}, 'attributes',
           (SELECT pg_catalog.jsonb_agg(pg_catalog.format('%I %s', a.attname,
               pg_catalog.format_type(a.atttypid, a.atttypmod)) ORDER BY a.attnum) FROM pg_catalog.pg_attribute a
             WHERE a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped),
           'subtype', (SELECT pg_catalog.format_type(r.rngsubtype, NULL) FROM pg_catalog.pg_range r
             WHERE r.rngtypid = t.oid)),
       NULL, pg_catalog.format('DROP TYPE %I.%I', n.nspname, t.typname), NULL
  FROM pg_catalog.pg_type t JOIN pg_catalog.pg_namespace n ON n.oid = t.typnamespace
  LEFT JOIN pg_catalog.pg_class c ON c.oid = t.typrelid
 WHERE (t.typtype = 'r' OR t.typtype = 'c' AND c.relkind = 'c') AND {_USER} AND {_own("pg_type", "t.oid")}
""",
    "relation": f"""
SELECT {_TABLE},
       pg_catalog.jsonb_build_object('kind', {_KIND}, 'owner', {_OWNER.format("c.relowner")},
           'acl', CASE c.relkind WHEN 'S' THEN {_acl("c.relacl", "s", "c.relowner")}
                  ELSE {_acl("c.relacl", "r", "c.relowner")} END,
           'comment', {_comment("c.oid", "pg_class")}, 'logged', c.relpersistence = 'p',
           'options', (SELECT pg_catalog.jsonb_agg(o ORDER BY o) FROM pg_catalog.unnest(c.reloptions) o),
           'replica identity', c.relreplident::text, 'identity index', (SELECT x.relname FROM pg_catalog.pg_index i
               JOIN pg_catalog.pg_class x ON x.oid = i.indexrelid WHERE i.indrelid = c.oid AND i.indisreplident),
           'clustered on', (SELECT x.relname FROM pg_catalog.pg_index i
               JOIN pg_catalog.pg_class x ON x.oid = i.indexrelid WHERE i.indrelid = c.oid AND i.indisclustered),
           'row security', c.relrowsecurity, 'forced row security', c.relforcerowsecurity,
           'partitioned by', CASE WHEN c.relkind = 'p' THEN pg_catalog.pg_get_partkeydef(c.oid) END,
           'partition', pg_catalog.pg_get_expr(c.relpartbound, c.oid),
           'parents', (SELECT pg_catalog.jsonb_agg(pg_catalog.format('%I.%I', pn.nspname, p.relname)
               ORDER BY h.inhseqno)
               FROM pg_catalog.pg_inherits h JOIN pg_catalog.pg_class p ON p.oid = h.inhparent
               JOIN pg_catalog.pg_namespace pn ON pn.oid = p.relnamespace WHERE h.inhrelid = c.oid),
           'definition', CASE WHEN c.relkind IN ('v', 'm') THEN pg_catalog.pg_get_viewdef(c.oid) END),
       CASE WHEN c.relkind IN ('v', 'm') THEN pg_catalog.format('CREATE %s %s AS %s', {_KIND}, {_TABLE},
           pg_catalog.rtrim(pg_catalog.pg_get_viewdef(c.oid), ';')) END,
       pg_catalog.format('DROP %s %s', {_KIND}, {_TABLE}), NULL
{_RELATION} AND c.relkind IN ('r', 'p', 'v', 'm', 'f', 'S')
""",
    "sequence": f"""
SELECT {_TABLE},
       pg_catalog.jsonb_build_object('type', pg_catalog.format_type(s.seqtypid, NULL), 'start', s.seqstart,
           'increment', s.seqincrement, 'minimum', s.seqmin, 'maximum', s.seqmax, 'cycle', s.seqcycle,
           'cache', s.seqcache, 'owned by', (SELECT pg_catalog.format('%I.%I.%I', tn.nspname, t.relname, a.attname)
               FROM pg_catalog.pg_depend d JOIN pg_catalog.pg_class t ON t.oid = d.refobjid
               JOIN pg_catalog.pg_namespace tn ON tn.oid = t.relnamespace
               JOIN pg_catalog.pg_attribute a ON a.attrelid = t.oid AND a.attnum = d.refobjsubid
              WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objid = c.oid
                AND d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.deptype IN ('a', 'i') LIMIT 1)),
       pg_catalog.format('CREATE SEQUENCE %s AS %s INCREMENT %s MINVALUE %s MAXVALUE %s START %s CACHE %s %s', {_TABLE},
           pg_catalog.format_type(s.seqtypid, NULL), s.seqincrement, s.seqmin, s.seqmax, s.seqstart, s.seqcache,
           CASE WHEN s.seqcycle THEN 'CYCLE' ELSE 'NO CYCLE' END),
       NULL, NULL
  FROM pg_catalog.pg_sequence s JOIN pg_catalog.pg_class c ON c.oid = s.seqrelid {_JOINED}
""",
    "column": f"""
SELECT pg_catalog.format('%s.%I', {_TABLE}, a.attname),
       pg_catalog.jsonb_build_object('type', pg_catalog.format_type(a.atttypid, a.atttypmod),
           'collation', CASE WHEN a.attcollation <> t.typcollation THEN (SELECT pg_catalog.format('%I.%I', cn.nspname,
               l.collname) FROM pg_catalog.pg_collation l JOIN pg_catalog.pg_namespace cn ON cn.oid = l.collnamespace
               WHERE l.oid = a.attcollation) END,
           'not null', a.attnotnull, 'default', pg_catalog.pg_get_expr(d.adbin, d.adrelid),
           'identity', CASE WHEN NOT c.relispartition THEN a.attidentity::text END, 'generated',
               a.attgenerated::text, 'storage', a.attstorage::text,
           'statistics', nullif(a.attstattarget, -1), 'options', a.attoptions, 'compression', {{compression}},
           'acl', (SELECT pg_catalog.jsonb_agg(x ORDER BY x) FROM (SELECT pg_catalog.concat_ws(' ', p.privilege_type,
               CASE p.grantee WHEN 0 THEN 'PUBLIC'
                   ELSE pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(p.grantee)) END,
               CASE WHEN p.is_grantable THEN 'WITH GRANT OPTION' END) x
               FROM pg_catalog.aclexplode(a.attacl) p WHERE p.grantee <> c.relowner) y),
           'comment', {_comment("c.oid", "pg_class", "a.attnum")}),
       CASE WHEN a.attgenerated = '' AND a.attidentity = '' THEN pg_catalog.format(
           'ALTER TABLE %s ADD COLUMN %I %s%s%s', {_TABLE}, a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod),
           ' DEFAULT ' || pg_catalog.pg_get_expr(d.adbin, d.adrelid), CASE WHEN a.attnotnull THEN ' NOT NULL' END)
           WHEN a.attgenerated = 's' THEN pg_catalog.format('ALTER TABLE %s ADD COLUMN %I %s GENERATED ALWAYS AS (%s)'
           ' STORED', {_TABLE}, a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod),
           pg_catalog.pg_get_expr(d.adbin, d.adrelid))
           WHEN a.attidentity <> '' THEN pg_catalog.format('ALTER TABLE %s ADD COLUMN %I %s GENERATED %s AS IDENTITY',
           {_TABLE}, a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod),
           CASE a.attidentity WHEN 'a' THEN 'ALWAYS' ELSE 'BY DEFAULT' END) END,
       pg_catalog.format('ALTER TABLE %s DROP COLUMN %I', {_TABLE}, a.attname), {_TABLE}
  FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
  LEFT JOIN pg_catalog.pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
  JOIN pg_catalog.pg_class c ON c.oid = a.attrelid {_JOINED}
   AND c.relkind IN ('r', 'p', 'f', 'v', 'm') AND a.attnum > 0 AND NOT a.attisdropped
""",
    "constraint": f"""
SELECT pg_catalog.format('%s.%I', {_TABLE}, k.conname),
       pg_catalog.jsonb_build_object('definition', CASE
           WHEN k.contype <> 'c' THEN pg_catalog.pg_get_constraintdef(k.oid)
           ELSE pg_catalog.concat_ws(' ', 'CHECK', CASE WHEN k.connoinherit THEN 'NO INHERIT' END,
               CASE WHEN NOT k.convalidated THEN 'NOT VALID' END) END,
           'check', CASE WHEN k.contype = 'c' THEN pg_catalog.pg_get_expr(k.conbin, k.conrelid) END,
           'comment', {_comment("k.oid", "pg_constraint")}),
       pg_catalog.format('ALTER TABLE %s ADD CONSTRAINT %I %s', {_TABLE}, k.conname,
           pg_catalog.pg_get_constraintdef(k.oid)),
       pg_catalog.format('ALTER TABLE %s DROP CONSTRAINT %I', {_TABLE}, k.conname), {_TABLE}
  FROM pg_catalog.pg_constraint k JOIN pg_catalog.pg_class c ON c.oid = k.conrelid {_JOINED}
   AND k.contype IN ('c', 'f', 'p', 'u', 'x') AND NOT (k.contype = 'f' AND k.conparentid <> 0) AND k.conislocal
""",
    "index": f"""
SELECT pg_catalog.format('%I.%I', n.nspname, x.relname),
       pg_catalog.jsonb_build_object('table', {_TABLE}, 'unique', i.indisunique, 'method', m.amname,
           'valid', i.indisvalid, 'options', x.reloptions, 'nulls not distinct', {{nulls}},
           'columns', (SELECT pg_catalog.jsonb_agg(pg_catalog.pg_get_indexdef(x.oid, g, false) ORDER BY g)
               FROM pg_catalog.generate_series(1, i.indnatts) g),
           'included', i.indnatts - i.indnkeyatts, 'order', i.indoption::text,
           'classes', (SELECT pg_catalog.jsonb_agg(o.opcname ORDER BY u.n) FROM
               pg_catalog.unnest(i.indclass::oid[]) WITH ORDINALITY u (oid, n)
               JOIN pg_catalog.pg_opclass o ON o.oid = u.oid),
           'collations', (SELECT pg_catalog.jsonb_agg(l.collname ORDER BY u.n) FROM
               pg_catalog.unnest(i.indcollation::oid[]) WITH ORDINALITY u (oid, n)
               LEFT JOIN pg_catalog.pg_collation l ON l.oid = u.oid),
           'predicate', pg_catalog.pg_get_expr(i.indpred, i.indrelid),
           'statistics', (SELECT pg_catalog.jsonb_agg(nullif(a.attstattarget, -1) ORDER BY a.attnum)
               FROM pg_catalog.pg_attribute a WHERE a.attrelid = x.oid),
           'parent', (SELECT pg_catalog.format('%I.%I', pn.nspname, p.relname) FROM pg_catalog.pg_inherits h
               JOIN pg_catalog.pg_class p ON p.oid = h.inhparent
                   JOIN pg_catalog.pg_namespace pn ON pn.oid = p.relnamespace
               WHERE h.inhrelid = x.oid),
           'comment', {_comment("x.oid", "pg_class")}),
       pg_catalog.pg_get_indexdef(x.oid), pg_catalog.format('DROP INDEX %I.%I', n.nspname, x.relname), {_TABLE}
  FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class x ON x.oid = i.indexrelid
      JOIN pg_catalog.pg_am m ON m.oid = x.relam
  JOIN pg_catalog.pg_class c ON c.oid = i.indrelid {_JOINED}
   AND NOT EXISTS (SELECT FROM pg_catalog.pg_constraint k WHERE k.conindid = x.oid AND k.contype IN ('p', 'u', 'x'))
""",
    "function": f"""
SELECT pg_catalog.format('%I.%I(%s)', n.nspname, p.proname, pg_catalog.pg_get_function_identity_arguments(p.oid)),
       pg_catalog.jsonb_build_object('kind', p.prokind::text, 'owner', {_OWNER.format("p.proowner")},
           'acl', {_acl("p.proacl", "f", "p.proowner")}, 'comment', {_comment("p.oid", "pg_proc")},
           'arguments', pg_catalog.pg_get_function_arguments(p.oid), 'result', pg_catalog.pg_get_function_result(p.oid),
           'language', l.lanname, 'volatility', p.provolatile::text, 'strict', p.proisstrict,
           'security definer', p.prosecdef, 'leakproof', p.proleakproof, 'parallel', p.proparallel::text,
           'cost', p.procost, 'rows', p.prorows, 'settings', p.proconfig,
           'body', pg_catalog.md5(coalesce({{body}}, p.prosrc) || coalesce(p.probin, '')),
           'aggregate', (SELECT pg_catalog.jsonb_build_array(a.aggtransfn::oid::pg_catalog.regprocedure::text,
               a.aggfinalfn::oid::pg_catalog.regprocedure::text, pg_catalog.format_type(a.aggtranstype, NULL),
               a.agginitval) FROM pg_catalog.pg_aggregate a WHERE a.aggfnoid = p.oid)),
       CASE WHEN p.prokind <> 'a' THEN pg_catalog.rtrim(pg_catalog.pg_get_functiondef(p.oid), E'\\n') END,
       pg_catalog.format('DROP %s %I.%I(%s)', CASE p.prokind WHEN 'p' THEN 'PROCEDURE' WHEN 'a' THEN 'AGGREGATE'
           ELSE 'FUNCTION' END, n.nspname, p.proname, pg_catalog.pg_get_function_identity_arguments(p.oid)), NULL
  FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
  JOIN pg_catalog.pg_language l ON l.oid = p.prolang WHERE {_USER} AND {_own("pg_proc", "p.oid")}
   AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend i WHERE i.classid = 'pg_catalog.pg_proc'::pg_catalog.regclass
                      AND i.objid = p.oid AND i.deptype = 'i')
""",
    "trigger": f"""
SELECT pg_catalog.format('%s.%I', {_TABLE}, t.tgname),
       pg_catalog.jsonb_build_object('definition', pg_catalog.pg_get_triggerdef(t.oid), 'enabled', t.tgenabled::text,
           'comment', {_comment("t.oid", "pg_trigger")}),
       pg_catalog.pg_get_triggerdef(t.oid), pg_catalog.format('DROP TRIGGER %I ON %s', t.tgname, {_TABLE}), {_TABLE}
  FROM pg_catalog.pg_trigger t JOIN pg_catalog.pg_class c ON c.oid = t.tgrelid {_JOINED} AND NOT t.tgisinternal
   AND t.tgparentid = 0 AND NOT EXISTS (SELECT FROM pg_catalog.pg_proc p
       JOIN pg_catalog.pg_namespace f ON f.oid = p.pronamespace
                    WHERE p.oid = t.tgfoid AND f.nspname = '{OWN_SCHEMA}')
""",
    "rule": f"""
SELECT pg_catalog.format('%s.%I', {_TABLE}, w.rulename),
       pg_catalog.jsonb_build_object('definition', pg_catalog.pg_get_ruledef(w.oid), 'enabled', w.ev_enabled::text,
           'comment', {_comment("w.oid", "pg_rewrite")}),
       pg_catalog.pg_get_ruledef(w.oid), pg_catalog.format('DROP RULE %I ON %s', w.rulename, {_TABLE}), {_TABLE}
  FROM pg_catalog.pg_rewrite w JOIN pg_catalog.pg_class c ON c.oid = w.ev_class {_JOINED} AND w.rulename <> '_RETURN'
""",
    "policy": f"""
SELECT pg_catalog.format('%s.%I', {_TABLE}, y.polname),
       pg_catalog.jsonb_build_object('command', y.polcmd::text, 'permissive', y.polpermissive,
           'roles', (SELECT pg_catalog.jsonb_agg(r ORDER BY r) FROM (SELECT CASE u WHEN 0 THEN 'PUBLIC'
               ELSE pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(u)) END r
                   FROM pg_catalog.unnest(y.polroles) u) z),
           'using', pg_catalog.pg_get_expr(y.polqual, y.polrelid), 'check', pg_catalog.pg_get_expr(y.polwithcheck,
           y.polrelid), 'comment', {_comment("y.oid", "pg_policy")}),
       pg_catalog.concat_ws(' ', pg_catalog.format('CREATE POLICY %I ON %s AS %s FOR %s TO %s', y.polname, {_TABLE},
           CASE WHEN y.polpermissive THEN 'PERMISSIVE' ELSE 'RESTRICTIVE' END, CASE y.polcmd WHEN 'r' THEN 'SELECT'
           WHEN 'a' THEN 'INSERT' WHEN 'w' THEN 'UPDATE' WHEN 'd' THEN 'DELETE' ELSE 'ALL' END,
           (SELECT pg_catalog.string_agg(CASE u WHEN 0 THEN 'PUBLIC' ELSE pg_catalog.quote_ident(
               pg_catalog.pg_get_userbyid(u)) END, ', ') FROM pg_catalog.unnest(y.polroles) u)),
           'USING (' || pg_catalog.pg_get_expr(y.polqual, y.polrelid) || ')',
           'WITH CHECK (' || pg_catalog.pg_get_expr(y.polwithcheck, y.polrelid) || ')'),
       pg_catalog.format('DROP POLICY %I ON %s', y.polname, {_TABLE}), {_TABLE}
  FROM pg_catalog.pg_policy y JOIN pg_catalog.pg_class c ON c.oid = y.polrelid {_JOINED}
""",
    "statistics": f"""
SELECT pg_catalog.format('%I.%I', n.nspname, s.stxname),
       pg_catalog.jsonb_build_object('definition', pg_catalog.pg_get_statisticsobjdef(s.oid),
           'owner', {_OWNER.format("s.stxowner")}, 'target', nullif(s.stxstattarget, -1),
           'comment', {_comment("s.oid", "pg_statistic_ext")}),
       pg_catalog.pg_get_statisticsobjdef(s.oid), pg_catalog.format('DROP STATISTICS %I.%I', n.nspname, s.stxname), NULL
  FROM pg_catalog.pg_statistic_ext s JOIN pg_catalog.pg_namespace n ON n.oid = s.stxnamespace WHERE {_USER}
""",
    "publication": """
SELECT pg_catalog.quote_ident(p.pubname),
       pg_catalog.jsonb_build_object('owner', pg_catalog.pg_get_userbyid(p.pubowner), 'all tables', p.puballtables,
           'publish', pg_catalog.concat_ws(', ', CASE WHEN p.pubinsert THEN 'insert' END,
               CASE WHEN p.pubupdate THEN 'update' END, CASE WHEN p.pubdelete THEN 'delete' END,
               CASE WHEN p.pubtruncate THEN 'truncate' END), 'via root', p.pubviaroot,
           'comment', pg_catalog.obj_description(p.oid, 'pg_publication'),
           'tables', CASE WHEN NOT p.puballtables THEN (SELECT pg_catalog.jsonb_agg(pg_catalog.format('%I.%I',
               n.nspname,
               c.relname) ORDER BY n.nspname, c.relname) FROM pg_catalog.pg_publication_rel r JOIN pg_catalog.pg_class c
               ON c.oid = r.prrelid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
                   WHERE r.prpubid = p.oid) END),
       CASE WHEN p.puballtables THEN pg_catalog.format('CREATE PUBLICATION %I FOR ALL TABLES', p.pubname) END,
       pg_catalog.format('DROP PUBLICATION %I', p.pubname), NULL
  FROM pg_catalog.pg_publication p
""",
    "event trigger": f"""
SELECT pg_catalog.quote_ident(v.evtname),
       pg_catalog.jsonb_build_object('owner', pg_catalog.pg_get_userbyid(v.evtowner), 'event', v.evtevent,
           'tags', v.evttags, 'enabled', v.evtenabled::text, 'function', pg_catalog.format('%I.%I', n.nspname,
               p.proname),
           'comment', pg_catalog.obj_description(v.oid, 'pg_event_trigger')),
       CASE WHEN v.evttags IS NULL THEN pg_catalog.format('CREATE EVENT TRIGGER %I ON %s EXECUTE FUNCTION %I.%I()',
           v.evtname, v.evtevent, n.nspname, p.proname) END,
       pg_catalog.format('DROP EVENT TRIGGER %I', v.evtname), NULL
  FROM pg_catalog.pg_event_trigger v JOIN pg_catalog.pg_proc p ON p.oid = v.evtfoid
  JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
 WHERE n.nspname <> '{OWN_SCHEMA}' AND {_own("pg_event_trigger", "v.oid")}
""",
    "default privileges": """
SELECT pg_catalog.concat_ws(' ', pg_catalog.pg_get_userbyid(d.defaclrole), d.defaclnamespace::pg_catalog.regnamespace,
           d.defaclobjtype),
       pg_catalog.jsonb_build_object('acl', (SELECT pg_catalog.jsonb_agg(x ORDER BY x)
           FROM (SELECT pg_catalog.concat_ws(
           ' ', a.privilege_type, CASE a.grantee WHEN 0 THEN 'PUBLIC'
               ELSE pg_catalog.pg_get_userbyid(a.grantee)::text END,
           a.is_grantable) x FROM pg_catalog.aclexplode(d.defaclacl) a
           WHERE a.privilege_type <> {maintain}) y)), NULL, NULL, NULL
  FROM pg_catalog.pg_default_acl d
""",
}
# Kinds of which only the existence, and the comment, are compared.
_OTHERS = (
    "pg_cast", "pg_collation", "pg_conversion", "pg_foreign_data_wrapper", "pg_foreign_server", "pg_language",
    "pg_opclass", "pg_operator", "pg_opfamily", "pg_transform", "pg_ts_config", "pg_ts_dict", "pg_ts_parser",
    "pg_ts_template", "pg_user_mapping",
)  # fmt: skip
_OTHER = """
SELECT i.type, i.identity, pg_catalog.jsonb_build_object('comment', pg_catalog.obj_description(o.oid, '{catalog}'))
  FROM pg_catalog.{catalog} o, pg_catalog.pg_identify_object('pg_catalog.{catalog}'::pg_catalog.regclass, o.oid, 0) i
 WHERE o.oid >= 16384 AND {own}
"""


def _parts(major: int, other_major: int) -> dict[str, str]:
    """Return the parts of queries that depend on the version, and on the version of the other server."""
    compression = "nullif(a.attcompression::text, '')"
    return {
        "maintain": "'MAINTAIN'" if not features.MAINTAIN.is_in_major(min(major, other_major)) else "''",
        "compression": compression if features.COLUMN_COMPRESSION.is_in_major(major) else "NULL::text",
        "nulls": "i.indnullsnotdistinct" if features.NULLS_NOT_DISTINCT.is_in_major(major) else "false",
        "body": "pg_catalog.pg_get_function_sqlbody(p.oid)" if features.SQL_BODIES.is_in_major(major) else "NULL",
    }


def _filled(query: str, parts: Mapping[str, str]) -> str:
    """Return a query with its parts. Other braces of a query are SQL."""
    for part, text in parts.items():
        query = query.replace(f"{{{part}}}", text)
    return query


async def read_catalog(connection: Connection, other_major: int) -> dict[ObjectKey, CatalogObject]:
    """Return the objects of a database.

    Args:
        other_major: the major version of the server that it is compared with.
    """
    major = connection.get_server_version().major
    parts = _parts(major, other_major)
    objects: dict[ObjectKey, CatalogObject] = {}
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        for kind, query in _QUERIES.items():
            for name, attributes, create, drop, table in await connection.fetch(_filled(query, parts)):
                objects[ObjectKey(kind, name)] = CatalogObject(json.loads(attributes), create, drop, table)
        for catalog in _OTHERS:
            if catalog == "pg_user_mapping" and not await connection.fetchval(
                "SELECT pg_catalog.has_table_privilege('pg_catalog.pg_user_mapping', 'SELECT')"
            ):
                continue
            query = _OTHER.format(catalog=catalog, own=_own(catalog, "o.oid", "'e', 'i'"))
            for kind, name, attributes in await connection.fetch(query):
                objects[ObjectKey(kind, name)] = CatalogObject(json.loads(attributes))
    return objects
