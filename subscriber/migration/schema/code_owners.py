"""The code of a database's roles that the statements of an archive run, and the roles that they run as.

A foreign key calls casts of its columns, an expression is parsed with the input functions of its literals, and the
planner computes functions whose arguments are constants. None of that may have the rights of the session.

- Pre-data runs as the session's own role: a statement there needs many privileges of a superuser. All objects are new,
  so the source decides which code runs. A definition that would run code of an untrusted role is refused. Few do: those
  with a literal of a type with a domain that calls a function, or a generated column, partition key or constraint that
  calls a function for constants.
- Post-data: the owner of a table can have added code on the target meanwhile. Each statement that has an expression,
  checks rows or reads other definitions of the table runs as the role that owns the table on the target, in an
  operation that the code cannot leave: targets/postgres/restricted_operation.py.
- A table of a superuser, or of another role that the session trusts, may use types and functions of roles that it does
  not trust. Then no role can run a statement of post-data that uses them, and it is refused.

PostgreSQL itself calls the functions of an index as the owner of the table, and restricts them.

The catalogs are read in the snapshot of pg_dump. Otherwise an object could have other expressions in the archive.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from subscriber import server_features as features
from subscriber.apply.relation_map import trust_option
from subscriber.catalog.connection import Connection
from subscriber.display import shell_word
from subscriber.errors import StatementError
from subscriber.remedy import Remedy
from subscriber.sqlstate import INSUFFICIENT_PRIVILEGE

PG_CLASS, PG_TYPE = 1259, 1247  # OIDs of catalogs are the same in all versions

# The owners of functions, and of types in literals, by the object whose expression has them. `present`: a domain within
# the type calls a function. Otherwise the owner of the type could add one. An enum has only labels.
_CODE = """
WITH RECURSIVE functions (classid, objid, owner) AS (
    SELECT d.classid, d.objid, p.proowner FROM pg_catalog.pg_depend d
      LEFT JOIN pg_catalog.pg_operator o
        ON d.refclassid = 'pg_catalog.pg_operator'::pg_catalog.regclass AND o.oid = d.refobjid
      JOIN pg_catalog.pg_proc p ON p.oid = coalesce(o.oprcode::pg_catalog.oid, d.refobjid)
     WHERE d.refclassid IN ('pg_catalog.pg_operator'::pg_catalog.regclass, 'pg_catalog.pg_proc'::pg_catalog.regclass)
       AND p.oid >= 16384
), parts (container, part) AS (
    SELECT t.oid, t.typelem FROM pg_catalog.pg_type t WHERE t.typelem <> 0
    UNION ALL SELECT t.oid, t.typbasetype FROM pg_catalog.pg_type t WHERE t.typbasetype <> 0
    UNION ALL SELECT c.reltype, a.atttypid FROM pg_catalog.pg_class c
                JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
               WHERE c.reltype <> 0
    UNION ALL SELECT r.rngtypid, r.rngsubtype FROM pg_catalog.pg_range r
    UNION ALL SELECT (pg_catalog.to_jsonb(r) ->> 'rngmultitypid')::pg_catalog.oid, r.rngtypid FROM pg_catalog.pg_range r
), types (oid, owner, present) AS (
    SELECT k.contypid, v.owner, true FROM pg_catalog.pg_constraint k
      JOIN functions f ON f.classid = 'pg_catalog.pg_constraint'::pg_catalog.regclass AND f.objid = k.oid
      JOIN pg_catalog.pg_type t ON t.oid = k.contypid, LATERAL (VALUES (f.owner), (t.typowner)) v (owner)
    UNION
    SELECT t.oid, t.typowner, false FROM pg_catalog.pg_type t WHERE t.oid >= 16384 AND t.typtype IN ('d', 'c', 'r', 'm')
    UNION
    SELECT p.container, t.owner, t.present FROM types t JOIN parts p ON p.part = t.oid
), literals (classid, objid, owner, present, type) AS (
    SELECT d.classid, d.objid, t.owner, t.present, t.oid FROM pg_catalog.pg_depend d
      JOIN types t ON d.refclassid = 'pg_catalog.pg_type'::pg_catalog.regclass AND t.oid = d.refobjid
     WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_constraint k WHERE k.contypid = t.oid AND k.oid = d.objid
                          AND d.classid = 'pg_catalog.pg_constraint'::pg_catalog.regclass)  -- VALUE
), code (classid, objid, owner, present) AS (
    SELECT f.classid, f.objid, f.owner, true FROM functions f
    UNION SELECT l.classid, l.objid, l.owner, l.present FROM literals l
)
"""
# Objects whose literals call a function, by the entry that is refused. The planner also converts a literal of another
# type, so every type counts in expressions that it reads.
_LITERALS = f"""{_CODE}
SELECT x.catalog::pg_catalog.oid::bigint, x.oid::bigint, r.rolname::text
  FROM (SELECT l.classid, p.oid, pg_catalog.concat(p.proargdefaults::text, pg_catalog.to_jsonb(p) ->> 'prosqlbody',
               (SELECT pg_catalog.concat(':consttype ', l.type, ' ') FROM pg_catalog.pg_aggregate g
                 WHERE g.aggfnoid = p.oid AND coalesce(g.agginitval, g.aggminitval) IS NOT NULL)),
               l.type, l.owner, l.present
          FROM literals l JOIN pg_catalog.pg_proc p ON p.oid = l.objid
         WHERE l.classid = 'pg_catalog.pg_proc'::pg_catalog.regclass
        UNION ALL
        SELECT l.classid, t.oid, coalesce(t.typdefaultbin::text, ''), l.type, l.owner, l.present
          FROM literals l JOIN pg_catalog.pg_type t ON t.oid = l.objid
         WHERE l.classid = 'pg_catalog.pg_type'::pg_catalog.regclass
        UNION ALL
        SELECT {PG_CLASS}, w.ev_class, w.ev_action::text, l.type, l.owner, l.present
          FROM literals l JOIN pg_catalog.pg_rewrite w ON w.oid = l.objid AND w.ev_type = '1'
         WHERE l.classid = 'pg_catalog.pg_rewrite'::pg_catalog.regclass
        UNION ALL
        SELECT {PG_CLASS}, a.adrelid, CASE c.attgenerated WHEN '' THEN a.adbin::text END, l.type, l.owner, l.present
          FROM literals l JOIN pg_catalog.pg_attrdef a ON a.oid = l.objid
          JOIN pg_catalog.pg_attribute c ON c.attrelid = a.adrelid AND c.attnum = a.adnum
         WHERE l.classid = 'pg_catalog.pg_attrdef'::pg_catalog.regclass
        UNION ALL
        SELECT CASE k.contypid WHEN 0 THEN {PG_CLASS} ELSE {PG_TYPE} END,
               CASE k.contypid WHEN 0 THEN k.conrelid ELSE k.contypid END,
               CASE WHEN c.relispartition OR c.relkind = 'p' THEN NULL ELSE k.conbin::text END,
               l.type, l.owner, l.present
          FROM literals l JOIN pg_catalog.pg_constraint k ON k.oid = l.objid AND k.convalidated
          LEFT JOIN pg_catalog.pg_class c ON c.oid = k.conrelid
         WHERE l.classid = 'pg_catalog.pg_constraint'::pg_catalog.regclass
        UNION ALL
        SELECT {PG_CLASS}, p.partrelid, NULL, t.oid, t.owner, t.present
          FROM pg_catalog.pg_partitioned_table p
          JOIN pg_catalog.pg_attribute a ON a.attrelid = p.partrelid AND a.attnum = ANY (p.partattrs::pg_catalog.int2[])
          JOIN types t ON t.oid = a.atttypid
        UNION ALL
        SELECT {PG_CLASS}, p.partrelid, NULL, l.type, l.owner, l.present
          FROM pg_catalog.pg_partitioned_table p JOIN literals l ON l.objid = p.partrelid
         WHERE l.classid = {PG_CLASS} AND p.partexprs IS NOT NULL) x (catalog, oid, text, type, owner, present)
  JOIN pg_catalog.pg_roles r ON r.oid = x.owner AND NOT r.rolsuper
 WHERE x.present AND (x.text IS NULL OR x.text ~ pg_catalog.concat(':consttype ', x.type, ' '))
"""
# Expressions that the planner reads when a table is created or a partition is attached. A constraint that is not valid
# is part of post-data.
_PLANNED = """
SELECT a.adrelid::bigint, a.adbin::text FROM pg_catalog.pg_attrdef a
  JOIN pg_catalog.pg_attribute c ON c.attrelid = a.adrelid AND c.attnum = a.adnum AND c.attgenerated <> ''
UNION ALL SELECT p.partrelid::bigint, p.partexprs::text FROM pg_catalog.pg_partitioned_table p
           WHERE p.partexprs IS NOT NULL
UNION ALL SELECT k.conrelid::bigint, k.conbin::text FROM pg_catalog.pg_constraint k
             JOIN pg_catalog.pg_class c ON c.oid = k.conrelid AND (c.relispartition OR c.relkind = 'p')
           WHERE k.contype = 'c' AND k.convalidated
"""
# Functions of roles, and those of operators. The planner replaces a call of a function in SQL by its body, which has to
# write the names of schemas: search_path is empty.
_FUNCTIONS = """
SELECT p.oid::bigint, r.rolname::text,
       l.lanname = 'sql' AND NOT p.prosecdef AND p.proconfig IS NULL AND (
         EXISTS (SELECT FROM pg_catalog.pg_namespace n
                  WHERE n.nspname !~ '^pg_'
                    AND pg_catalog.strpos(pg_catalog.lower(pg_catalog.replace(p.prosrc, '""', '"')),
                                          pg_catalog.lower(n.nspname)) > 0)
         OR pg_catalog.strpos(pg_catalog.lower(p.prosrc), 'u&') > 0
         OR EXISTS (SELECT FROM pg_catalog.pg_depend d
                     WHERE d.classid = 'pg_catalog.pg_proc'::pg_catalog.regclass AND d.objid = p.oid
                       AND d.refclassid IN ('pg_catalog.pg_proc'::pg_catalog.regclass,
                                            'pg_catalog.pg_operator'::pg_catalog.regclass)))
  FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_roles r ON r.oid = p.proowner
  JOIN pg_catalog.pg_language l ON l.oid = p.prolang
 WHERE p.oid >= 16384 AND NOT r.rolsuper
"""
_OPERATORS = (
    "SELECT o.oid::bigint, o.oprcode::pg_catalog.oid::bigint FROM pg_catalog.pg_operator o WHERE o.oid >= 16384"
)
# Statements about a table that has rows, or about a domain that is used.
_POST_DATA = f"""{_CODE}, casts (oid, owner) AS (  -- of the columns of foreign keys
    SELECT k.oid, p.proowner FROM pg_catalog.pg_constraint k
      JOIN pg_catalog.pg_attribute a ON a.attrelid = k.conrelid AND a.attnum = ANY (k.conkey)
                                     OR a.attrelid = k.confrelid AND a.attnum = ANY (k.confkey)
      JOIN pg_catalog.pg_cast s ON s.castsource = a.atttypid JOIN pg_catalog.pg_proc p ON p.oid = s.castfunc
     WHERE k.contype = 'f' AND p.oid >= 16384
), runs (catalog, oid, owner) AS (
    SELECT c.classid, c.objid, c.owner FROM code c
    UNION SELECT 'pg_catalog.pg_constraint'::pg_catalog.regclass, s.oid, s.owner FROM casts s
), found (catalog, oid, text, relation, domain) AS (
    SELECT 'pg_catalog.pg_class'::pg_catalog.regclass::pg_catalog.oid, i.indexrelid, '', i.indrelid, 0
      FROM pg_catalog.pg_index i WHERE i.indexprs IS NOT NULL OR i.indpred IS NOT NULL
    UNION ALL SELECT 'pg_catalog.pg_constraint'::pg_catalog.regclass, k.oid, '', k.conrelid, k.contypid
      FROM pg_catalog.pg_constraint k WHERE k.contype <> 'u'
    UNION ALL SELECT 'pg_catalog.pg_trigger'::pg_catalog.regclass, g.oid, '', g.tgrelid, 0
      FROM pg_catalog.pg_trigger g WHERE g.tgqual IS NOT NULL
    UNION ALL SELECT 'pg_catalog.pg_policy'::pg_catalog.regclass, p.oid, '', p.polrelid, 0 FROM pg_catalog.pg_policy p
    UNION ALL SELECT 'pg_catalog.pg_rewrite'::pg_catalog.regclass, w.oid, '', w.ev_class, 0
      FROM pg_catalog.pg_rewrite w
    UNION ALL SELECT 'pg_catalog.pg_statistic_ext'::pg_catalog.regclass, s.oid, '', s.stxrelid, 0
      FROM pg_catalog.pg_statistic_ext s WHERE pg_catalog.to_jsonb(s) ->> 'stxexprs' IS NOT NULL
    UNION ALL
    SELECT 0, 0, pg_catalog.concat_ws(' ', 'INDEX ATTACH', n.nspname, x.relname, o.owner), t.oid, 0
      FROM pg_catalog.pg_inherits h JOIN pg_catalog.pg_class x ON x.oid = h.inhrelid AND x.relkind IN ('i', 'I')
      JOIN pg_catalog.pg_namespace n ON n.oid = x.relnamespace
      JOIN pg_catalog.pg_index i ON i.indexrelid = h.inhparent AND (i.indexprs IS NOT NULL OR i.indpred IS NOT NULL)
      JOIN pg_catalog.pg_class t ON t.oid = i.indrelid,
           LATERAL (VALUES (''::text), (pg_catalog.pg_get_userbyid(t.relowner)::text)) o (owner)
)
SELECT f.catalog::bigint, f.oid::bigint, f.text, n.nspname::text, coalesce(c.relname, t.typname)::text, c.oid IS NULL,
       pg_catalog.array_agg(DISTINCT r.rolname::text) FILTER (WHERE r.oid IS NOT NULL)
  FROM found f LEFT JOIN pg_catalog.pg_class c ON c.oid = f.relation LEFT JOIN pg_catalog.pg_type t ON t.oid = f.domain
  JOIN pg_catalog.pg_namespace n ON n.oid = coalesce(c.relnamespace, t.typnamespace)
  LEFT JOIN runs x ON x.catalog = f.catalog AND x.oid = f.oid
  LEFT JOIN pg_catalog.pg_roles r ON r.oid = x.owner AND NOT r.rolsuper
 WHERE f.oid >= 16384 OR f.text <> ''
 GROUP BY f.catalog, f.oid, f.text, n.nspname, c.relname, t.typname, c.oid
"""
# Roles whose code may have the rights of the session. $1 has further ones.
TRUSTED = f"""
SELECT r.rolname::text FROM pg_catalog.pg_roles r
 WHERE r.rolsuper OR r.rolname = session_user OR r.rolname = ANY ($1::text[])
    OR pg_catalog.pg_has_role(r.oid, session_user, {features.MAY_SET_ROLE})
"""
_OWNER = """
SELECT pg_catalog.pg_get_userbyid(c.relowner)::text
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = $1 AND c.relname = $2 AND NOT $3
UNION ALL
SELECT pg_catalog.pg_get_userbyid(t.typowner)::text
  FROM pg_catalog.pg_type t JOIN pg_catalog.pg_namespace n ON n.oid = t.typnamespace
 WHERE n.nspname = $1 AND t.typname = $2 AND $3
"""


class EntryKey(NamedTuple):
    """An entry of an archive. One without an OID is identified by its text."""

    catalog: int
    oid: int
    text: str


class EntryCode(NamedTuple):
    """The relation or domain whose owner's code the statements of an entry run.

    Attributes:
        schema: its schema.
        name: its name.
        is_domain: it is a domain.
        code_owners: roles of the source, no superusers, whose types and functions the statements use.
    """

    schema: str
    name: str
    is_domain: bool
    code_owners: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ArchiveCode:
    """The code of the statements of an archive.

    Attributes:
        refused: roles of the source, no superusers, whose code statements of pre-data run.
        post_data: the code of statements of post-data.
    """

    refused: Mapping[EntryKey, frozenset[str]]
    post_data: Mapping[EntryKey, EntryCode]


async def read_code(source: Connection) -> ArchiveCode:
    """Find the statements that run code, in the transaction that has exported the snapshot of pg_dump."""
    refused: dict[EntryKey, frozenset[str]] = {}

    def add(key: EntryKey, role: str) -> None:
        refused[key] = refused.get(key, frozenset()) | {role}

    for catalog, oid, role in await source.fetch(_LITERALS):
        add(EntryKey(catalog, oid, ""), role)
    functions = {row[0]: (row[1], row[2]) for row in await source.fetch(_FUNCTIONS)}
    operators = {row[0]: row[1] for row in await source.fetch(_OPERATORS)}
    for relid, expression in await source.fetch(_PLANNED) if functions else ():
        for function, has_variable in calls(expression, operators):
            role, has_calls = functions.get(function, ("", False))
            if role and (has_calls or not has_variable):
                add(EntryKey(PG_CLASS, relid, ""), role)
    post_data = {}
    for row in await source.fetch(_POST_DATA):
        catalog, oid, text, schema, name, is_domain, code_owners = row
        key = EntryKey(catalog, oid, text.replace("\n", " ").replace("\r", " "))  # as pg_restore lists them
        post_data[key] = EntryCode(schema, name, is_domain, tuple(code_owners or ()))
    return ArchiveCode(refused, post_data)


_TOKEN = re.compile(r"\\.|\{([A-Z]+)|\}|:(funcid|opno) (\d+)|:opnos \(o ([\d ]+)\)", re.DOTALL)
_VARIABLES = frozenset({"VAR", "PARAM", "COERCETODOMAINVALUE"})


def calls(expression: str, operators: Mapping[int, int]) -> Iterable[tuple[int, bool]]:
    """Yield the functions that a stored expression calls, each with whether its arguments contain a variable.

    Args:
        expression: the text of a pg_node_tree.
        operators: the functions of operators, by OID.
    """
    nodes: list[tuple[list[int], list[bool]]] = []
    for token in _TOKEN.finditer(expression):
        if token[1]:
            nodes.append(([], [token[1] in _VARIABLES]))
        elif token[2] and nodes:
            oid = int(token[3])
            nodes[-1][0].append(oid if token[2] == "funcid" else operators.get(oid, 0))
        elif token[4] and nodes:
            nodes[-1][0].extend(operators.get(int(oid), 0) for oid in token[4].split())
        elif token[0] == "}" and nodes:
            functions, variables = nodes.pop()
            has_variable = any(variables)
            yield from ((function, has_variable) for function in functions if function)
            if nodes:
                nodes[-1][1].append(has_variable)


class CodeOwners:
    """The roles of an archive's statements on one target."""

    def __init__(self, code: ArchiveCode, trusted_owners: Sequence[str]) -> None:
        """Create the roles.

        Args:
            code: the code of the archive's entries.
            trusted_owners: roles whose code may have all rights of a session of the target.
        """
        self._code = code
        self._trusted_owners = list(trusted_owners)

    async def refused(self, target: Connection) -> dict[EntryKey, frozenset[str]]:
        """Return the roles whose code statements of pre-data would run, by entry.

        Args:
            target: a session of the target. A role that it lacks is not trusted.
        """
        if not self._code.refused:
            return {}
        trusted = await self._trusted(target)
        return {key: roles - trusted for key, roles in self._code.refused.items() if roles - trusted}

    async def check_definitions(self, target: Connection, entries: Mapping[EntryKey, str]) -> None:
        """Check that statements of pre-data run no code of untrusted roles.

        Args:
            target: a session of the target.
            entries: the objects of the entries, for an error.

        Raises:
            StatementError: a statement would run such code.
        """
        for key, roles in (await self.refused(target)).items():
            if key in entries:
                raise _refused(entries[key], roles)

    async def role(self, target: Connection, key: EntryKey, about: str) -> str | None:
        """Return the role that the statements of an entry of post-data run as.

        Args:
            target: a session of the target, in the transaction of the statements.
            key: the entry.
            about: its object, for an error.

        Returns:
            None for the session's own role.

        Raises:
            StatementError: no role can run the statements.
        """
        code = self._code.post_data.get(key)
        if code is None:
            return None
        trusted = await self._trusted(target)
        owner: str | None = await target.fetchval(_OWNER, code.schema, code.name, code.is_domain)
        if owner is not None and owner not in trusted:
            return owner
        if roles := {*code.code_owners} - trusted:
            raise _refused(about, roles)
        return None

    async def _trusted(self, target: Connection) -> set[str]:
        return {name for (name,) in await target.fetch(TRUSTED, self._trusted_owners)}


def how_to_trust(roles: Collection[str]) -> str:
    """Return the option of the commands of a move that lets code of these roles run."""
    return f"subscriber migrate start … --with {shell_word(trust_option(sorted(roles)))}"


def _refused(about: str, roles: Collection[str]) -> StatementError:
    names = ", ".join(f'"{role}"' for role in sorted(roles))
    return StatementError(
        f"the definition of {about} runs code of role{'s' * (len(roles) > 1)} {names}",
        detail="The code would have the rights of the session's own role.",
        hint=Remedy(
            "change the definition on the source, or trust the code",
            how_to_trust(roles),
            Remedy('"subscriber migrate schema" has the option --trusted-owner.'),
        ),
        sqlstate=INSUFFICIENT_PRIVILEGE,
    )
