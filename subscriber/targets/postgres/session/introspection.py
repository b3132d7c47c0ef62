"""Target tables as the catalog has them.

A mapping is kept for as long as the table's `shape` stays the same: a text made of the catalog rows' versions (xmin)
of its columns and triggers, and of the properties of its indexes. TRUNCATE, REINDEX and VACUUM do not change it.
schema_check.py describes when it is compared. Section 15 of migrations/schema.sql describes what counts as foreign
code.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from subscriber import server_features as features
from subscriber.apply.relation_map import BatchColumnInfo, ForeignCode, LocalColumn, LocalRelation, Partition
from subscriber.connection.pipeline import Pipeline
from subscriber.errors import MappingError
from subscriber.sqlstate import WRONG_OBJECT_TYPE

# Whether the subscription's owner, if one is given, may act as the table's.
_MAY_SET_ROLE = f"""
CASE WHEN OWNER = '' THEN true
     ELSE pg_catalog.pg_has_role(OWNER::pg_catalog.text::pg_catalog.name, c.relowner, {features.MAY_SET_ROLE}) END
"""

# The operator by which the executor compares two values: that of the type's default btree operator
# class, else of its default hash class (lookup_type_cache with TYPECACHE_EQ_OPR). Without one: null.
_EQUALITY = """
(SELECT pg_catalog.format('OPERATOR(%I.%s)', opn.nspname, o.oprname)
   FROM pg_catalog.pg_opclass oc
   JOIN pg_catalog.pg_amop ao ON ao.amopfamily = oc.opcfamily AND ao.amoplefttype = oc.opcintype
    AND ao.amoprighttype = oc.opcintype AND ao.amopstrategy = CASE oc.opcmethod WHEN 403 THEN 3 ELSE 1 END
   JOIN pg_catalog.pg_operator o ON o.oid = ao.amopopr
   JOIN pg_catalog.pg_namespace opn ON opn.oid = o.oprnamespace
  WHERE oc.opcdefault AND oc.opcmethod IN (403, 405)
    AND (oc.opcintype = base.oid
      OR oc.opcintype = CASE WHEN base.typtype = 'e' THEN 3500 WHEN base.typtype = 'r' THEN 3831
                             WHEN base.typtype = 'm' THEN 4537 WHEN base.typtype = 'c' THEN 2249
                             WHEN base.typcategory = 'A' AND base.typlen = -1 THEN 2277 END
      OR oc.opcintype IN (SELECT ca.casttarget FROM pg_catalog.pg_cast ca
                           WHERE ca.castsource = base.oid AND ca.castmethod = 'b' AND ca.castcontext = 'i'))
  ORDER BY oc.opcintype = base.oid DESC, oc.opcmethod LIMIT 1)
"""

# Names are resolved with the rights of the role that applies changes: the subscription's or the table's owner.
# The built-in worker finds tables and types by their OIDs.
_CLOSED_SCHEMAS = """
(SELECT pg_catalog.json_agg(n.nspname ORDER BY n.nspname) FROM pg_catalog.pg_namespace n
  WHERE OWNER <> ''
    AND (n.oid = rel.relnamespace
         OR n.oid IN (SELECT t.typnamespace FROM domains d JOIN pg_catalog.pg_type t ON t.oid = d.typid))
    AND NOT pg_catalog.has_schema_privilege(
              coalesce($6::pg_catalog.name, pg_catalog.pg_get_userbyid(rel.relowner)), n.oid, 'USAGE'))
"""

# Whether a row that is there may be left as it is by what a statement fires.
_SUPPRESSED = """
EXISTS (
    SELECT FROM pg_catalog.pg_trigger t
     WHERE t.tgenabled IN ('A', CASE WHEN $5::pg_catalog.bool THEN 'R' ELSE 'O' END)
       AND t.tgtype & 3 = 3 AND t.tgtype & 24 <> 0
       AND (t.tgrelid = rel.oid
            OR rel.relkind = 'p' AND t.tgrelid IN (SELECT p.relid FROM pg_catalog.pg_partition_tree(rel.oid) p)))
OR EXISTS (
    SELECT FROM pg_catalog.pg_rewrite r
     WHERE r.ev_class = rel.oid AND r.ev_type IN ('2', '4')
       AND r.ev_enabled IN ('A', CASE WHEN $5::pg_catalog.bool THEN 'R' ELSE 'O' END))
"""

# The columns of the index that identifies a row: the one REPLICA IDENTITY names, else the primary key.
_IDENTITY = """
(SELECT pg_catalog.json_agg(a.attname ORDER BY k.place)
   FROM (SELECT i.indkey, i.indnkeyatts FROM pg_catalog.pg_index i
          WHERE i.indrelid = RELATION AND i.indisvalid AND i.indimmediate AND (i.indisreplident OR i.indisprimary)
          ORDER BY i.indisreplident DESC LIMIT 1) i,
        pg_catalog.unnest(i.indkey::pg_catalog.int2[]) WITH ORDINALITY AS k (attnum, place)
   JOIN pg_catalog.pg_attribute a ON a.attrelid = RELATION AND a.attnum = k.attnum
  WHERE k.place <= i.indnkeyatts)
"""

# The columns of a primary key that is checked at the end of a transaction only: until then two rows can have it.
_DEFERRABLE_KEY = """
(SELECT pg_catalog.json_agg(a.attname ORDER BY k.place)
   FROM pg_catalog.pg_index i, pg_catalog.unnest(i.indkey::pg_catalog.int2[]) WITH ORDINALITY AS k (attnum, place)
   JOIN pg_catalog.pg_attribute a ON a.attnum = k.attnum
  WHERE i.indrelid = rel.oid AND i.indisprimary AND NOT i.indimmediate AND a.attrelid = rel.oid
    AND k.place <= i.indnkeyatts)
"""

# numeric, date and time types whose modifier rounds (a domain may have one): cast to the column's type.
# Composite and reg* types, which are compared as record and oid: without the cast the value would be read as such.
_SEARCH_CAST = """
CASE WHEN (a.atttypmod >= 0 OR a.atttypid <> base.oid) AND base.oid IN (1700, 1114, 1184, 1083, 1266, 1186)
     THEN pg_catalog.format_type(a.atttypid, a.atttypmod)
     WHEN base.typtype = 'c' OR base.typnamespace = 11 AND base.typname ~ '^reg[a-z]+$'
     THEN pg_catalog.format_type(base.oid, -1) END
"""

# A cast from text that is a function may read other texts than the type's input function does. The precision of an
# interval decides how its text is read; a cast applies it only afterwards.
_SETS = """
pg_catalog.json_build_array(a.atttypid::bigint, a.atttypmod, a.attnotnull,
  pg_catalog.format_type(base.oid, -1), base.oid::bigint,
  NOT EXISTS (SELECT FROM pg_catalog.pg_cast k
               WHERE k.castsource = 25 AND k.casttarget = base.oid AND k.castmethod = 'f')
    AND NOT (base.oid = 1186 AND (a.atttypmod >= 0 OR a.atttypid <> base.oid)),
  base.typarray <> 0 AND base.typcategory <> 'A', base.typarray::bigint, base.typtype = 'e')
"""

# Triggers that fire for replicated changes, also those of constraints. Some of schema subscriber are harmless.
_FIRES = """
SELECT t.* FROM pg_catalog.pg_trigger t JOIN pg_catalog.pg_proc f ON f.oid = t.tgfoid, rel
 WHERE t.tgrelid = rel.oid AND t.tgenabled IN ('A', CASE WHEN $5::pg_catalog.bool THEN 'R' ELSE 'O' END)
   AND NOT (f.pronamespace = 'subscriber'::pg_catalog.regnamespace AND f.proname ~ '^(deleted_|fence$)')
"""

# The reason why changes of a table must be applied row by row. User-defined functions may read any table. The triggers
# that remember deleted rows read only those, and the one of a fence reads no table of a user.
_ONE_BY_ONE = """
CASE WHEN rel.relkind = 'p' THEN 'partitioned'
     WHEN closed_schemas.names IS NOT NULL THEN 'schema'
     WHEN EXISTS (SELECT FROM fires t WHERE t.tgisinternal AND t.tgconstrrelid <> 0) THEN 'foreign key'
     WHEN EXISTS (SELECT FROM fires) THEN 'trigger'
     WHEN rel.relhasrules THEN 'rule'
     WHEN EXISTS (
       SELECT FROM pg_catalog.pg_depend d
        WHERE d.refclassid = 'pg_catalog.pg_proc'::pg_catalog.regclass
          AND (d.classid = 'pg_catalog.pg_constraint'::pg_catalog.regclass
               AND d.objid IN (SELECT k.oid FROM pg_catalog.pg_constraint k
                                WHERE k.conrelid = rel.oid
                                   OR k.contypid IN (SELECT dom.typid FROM domains dom))
            OR d.classid = 'pg_catalog.pg_attrdef'::pg_catalog.regclass
               AND d.objid IN (SELECT f.oid FROM pg_catalog.pg_attrdef f WHERE f.adrelid = rel.oid)
            OR d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass
               AND d.objid IN (SELECT i.indexrelid FROM pg_catalog.pg_index i WHERE i.indrelid = rel.oid)))
     THEN 'function' END
"""

# Other unique indexes than the one that identifies rows, and exclusion constraints. Deferrable ones are left out.
_OTHER_UNIQUE = """
SELECT i.* FROM pg_catalog.pg_index i, rel
 WHERE i.indrelid = rel.oid AND (i.indisunique OR i.indisexclusion) AND i.indimmediate
   AND i.indexrelid IS DISTINCT FROM (
     SELECT f.indexrelid FROM pg_catalog.pg_index f
      WHERE f.indrelid = rel.oid AND f.indisvalid AND f.indimmediate AND (f.indisreplident OR f.indisprimary)
      ORDER BY f.indisreplident DESC LIMIT 1)
"""

# The columns of these indexes, if the indexes compare them with the default operators. Null where an index has
# expressions or a predicate, excludes, or has a generated column, whose value depends on other columns.
_UNIQUE_COLUMNS = """
(SELECT CASE WHEN pg_catalog.bool_and(
              NOT i.indisexclusion AND i.indexprs IS NULL AND i.indpred IS NULL AND a.attgenerated = ''
              AND i.indcollation[k.place::int - 1] = a.attcollation AND oc.opcdefault)
        THEN pg_catalog.json_agg(DISTINCT a.attname) END
   FROM other_unique i
   CROSS JOIN LATERAL pg_catalog.unnest(i.indkey::pg_catalog.int2[]) WITH ORDINALITY AS k (attnum, place)
   LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
   JOIN pg_catalog.pg_opclass oc ON oc.oid = i.indclass[k.place::int - 1]
  WHERE k.place <= i.indnkeyatts)
"""

# Nothing but a column's type can refuse a row: indexes refuse keys that are too large.
_BARE = """
rel.relchecks = 0
AND NOT EXISTS (SELECT FROM pg_catalog.pg_attribute a
                 WHERE a.attrelid = rel.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated <> '')
AND NOT EXISTS (SELECT FROM pg_catalog.pg_index i JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indexrelid
                 WHERE i.indrelid = rel.oid AND NOT i.indisprimary
                   AND (i.indexprs IS NOT NULL OR i.indpred IS NOT NULL OR a.attlen < 0))
"""

_INTROSPECT = f"""
WITH RECURSIVE rel AS (
  SELECT c.*, n.nspname, {_MAY_SET_ROLE} AS may_set_role
    FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
   WHERE n.nspname = $1 AND c.relname = $2),
safety AS MATERIALIZED (
  SELECT subscriber.table_safety(rel.oid, TRUSTED::pg_catalog.name[], $5::pg_catalog.bool, $6::pg_catalog.name) AS found
    FROM rel),
code_of AS (
  SELECT ARRAY(SELECT DISTINCT code ->> 0 FROM safety,
                      LATERAL pg_catalog.json_array_elements(
                        CASE WHEN found ->> 'foreign' IS NOT NULL THEN found -> 'foreign' END) AS code
                ORDER BY 1)::pg_catalog.name[] AS names),
domains (attnum, typid) AS (
  SELECT a.attnum, a.atttypid FROM pg_catalog.pg_attribute a, rel
   WHERE a.attrelid = rel.oid AND a.attnum > 0 AND NOT a.attisdropped
  UNION ALL
  SELECT d.attnum, t.typbasetype FROM domains d JOIN pg_catalog.pg_type t ON t.oid = d.typid WHERE t.typtype = 'd'),
fires AS ({_FIRES}),
other_unique AS ({_OTHER_UNIQUE}),
closed_schemas AS (SELECT {_CLOSED_SCHEMAS} AS names FROM rel)
SELECT pg_catalog.json_build_object(
  'oid', rel.oid, 'kind', rel.relkind, 'may_set_role', rel.may_set_role,
  'owner', pg_catalog.pg_get_userbyid(rel.relowner), 'safety', safety.found,
  'shape', CASE WHEN safety.found ->> 'guarded' = 'true' OR safety.found ->> 'foreign' IS NOT NULL
                THEN subscriber.guarded_shape(rel.oid, OWNER, code_of.names)
                ELSE subscriber.table_shape(rel.oid, OWNER) END,
  'columns', (
    SELECT pg_catalog.json_agg(pg_catalog.json_build_array(
             a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod), {_SEARCH_CAST}, {_EQUALITY},
             a.attgenerated <> '', a.attidentity = 'a',
             CASE WHEN base.oid <> a.atttypid THEN pg_catalog.format_type(base.oid, -1) END,
             {_SETS}) ORDER BY a.attnum)
      FROM pg_catalog.pg_attribute a
      JOIN domains d ON d.attnum = a.attnum
      JOIN pg_catalog.pg_type base ON base.oid = d.typid AND base.typtype <> 'd'
     WHERE a.attrelid = rel.oid),
  'identity', {_IDENTITY.replace("RELATION", "rel.oid")}, 'deferrable_key', {_DEFERRABLE_KEY},
  'partitions', CASE rel.relkind WHEN 'p' THEN (
    SELECT pg_catalog.json_agg(pg_catalog.json_build_array(
             ln.nspname || '.' || l.relname, pg_catalog.pg_get_partition_constraintdef(l.oid),
             {_IDENTITY.replace("RELATION", "l.oid")},
             (SELECT pg_catalog.json_agg(a.attname ORDER BY a.attnum) FROM pg_catalog.pg_attribute a
               WHERE a.attrelid = l.oid AND a.attnum > 0 AND NOT a.attisdropped)))
      FROM pg_catalog.pg_partition_tree(rel.oid) p
      JOIN pg_catalog.pg_class l ON l.oid = p.relid JOIN pg_catalog.pg_namespace ln ON ln.oid = l.relnamespace
     WHERE p.isleaf AND p.relid <> rel.oid) END,
  'suppressed', {_SUPPRESSED}, 'closed_schemas', closed_schemas.names,
  'one_by_one', {_ONE_BY_ONE}, 'other_unique', EXISTS (SELECT FROM other_unique),
  'unique_columns', {_UNIQUE_COLUMNS}, 'bare', {_BARE})
  FROM rel, safety, code_of, closed_schemas
"""

_TRUSTED = "ARRAY(SELECT pg_catalog.json_array_elements_text($4::pg_catalog.json))"

_NOT_SUPPORTED = {
    "v": "views",
    "m": "materialized views",
    "f": "foreign tables",
    "S": "sequences",
    "c": "composite types",
    "i": "indexes",
    "I": "partitioned indexes",
    "t": "TOAST tables",
}


@dataclass(frozen=True, slots=True)
class Terms:
    """The roles that apply changes, and their rights: the description of a table depends on them."""

    owner: str = ""  # owner of the subscription; empty: no particular role
    run_as_owner: bool = False
    trusted_owners: tuple[str, ...] = ()
    replica_role: bool = True  # ordinary triggers do not fire
    code_changes_session: bool = False  # trusted code is treated as foreign code (foreign_code.py)


async def introspect(pipeline: Pipeline, schema: str, name: str, terms: Terms) -> LocalRelation:
    """The table that a published table of that name is applied to.

    Raises MappingError when there is none or it is neither a table nor a partitioned one.
    Source: logicalrep_rel_open() in relation.c, CheckSubscriptionRelkind().
    """
    introspection = _INTROSPECT.replace("OWNER", "$3::pg_catalog.text").replace("TRUSTED", _TRUSTED)
    trusted = json.dumps(terms.trusted_owners, ensure_ascii=False)
    acting = terms.owner if terms.run_as_owner and terms.owner else None
    replica = str(terms.replica_role).lower()
    rows = await pipeline.rows(introspection, schema, name, terms.owner, trusted, replica, acting)
    if not rows:
        raise MappingError(
            f'logical replication target relation "{schema}.{name}" does not exist',
            hint="Create the table on the target, or take it out of the publication and refresh the subscription.",
        )
    local = parse_relation(schema, name, json.loads(rows[0][0] or "null"))
    return replace(local, changes_session=terms.code_changes_session and local.batch_exclusion is not None)


def parse_relation(schema: str, name: str, found: dict[str, object]) -> LocalRelation:
    kind = str(found["kind"])
    if kind not in ("r", "p"):
        raise MappingError(
            f'cannot use relation "{schema}.{name}" as logical replication target',
            detail=f"This operation is not supported for {_NOT_SUPPORTED.get(kind, 'this kind of relation')}.",
            sqlstate=WRONG_OBJECT_TYPE,
        )
    columns = _list(found["columns"])
    partitions = _list(found["partitions"])
    safety = found["safety"]
    assert isinstance(safety, dict)
    foreign = tuple(ForeignCode(*code) for code in _list(safety["foreign"]))
    identity = _list(found["identity"]) or _common_identity([_list(part[2]) for part in partitions])
    return LocalRelation(
        oid=int(str(found["oid"])),
        schema=schema,
        name=name,
        partitioned=kind == "p",
        owner=str(found["owner"]),
        columns=tuple(_column(column) for column in columns),
        identity=tuple(identity),
        deferrable_key=tuple(_list(found["deferrable_key"])),
        shape=str(found["shape"]),
        has_row_suppressing_trigger=bool(found["suppressed"]),
        closed_schemas=tuple(_list(found["closed_schemas"])),
        may_set_role=bool(found["may_set_role"]),
        partitions=tuple(Partition(part[0], part[1] or "", tuple(part[3] or ())) for part in partitions),
        batch_exclusion=None if found["one_by_one"] is None else str(found["one_by_one"]),
        other_unique=bool(found["other_unique"]),
        unique_columns=None if found["unique_columns"] is None else tuple(_list(found["unique_columns"])),
        has_only_type_checks=bool(found["bare"]),
        foreign=foreign,
        guarded=bool(safety["guarded"] or foreign),
    )


def _list(value: object) -> list[Any]:
    """A json array that the server gives as null when it is empty."""
    assert value is None or isinstance(value, list)
    return value or []


def _common_identity(identities: list[list[str]]) -> list[str]:
    """Rows of a partitioned table without identity are found by that of its partitions, if they agree.

    The built-in worker routes the row to its partition and searches by that one's identity.
    """
    return identities[0] if identities and all(identity == identities[0] for identity in identities) else []


def _column(found: list[Any]) -> LocalColumn:
    *column, sets = found
    return replace(LocalColumn(*column), batch_info=BatchColumnInfo(*sets))
