"""Rules that compare both servers: settings, collations, extensions, roles and tablespaces."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from subscriber import server_features as features
from subscriber.apply.relation_map import trust_option
from subscriber.catalog.connection import Connection
from subscriber.display import shell_word, sql_identifier, sql_literal
from subscriber.formatting import count
from subscriber.migration.diff.difference import is_older
from subscriber.migration.preflight.model import FixedOn, PreflightFinding, Severity
from subscriber.migration.schema.code_owners import CodeOwners, how_to_trust, read_code
from subscriber.migration.schema.large_objects import IS_OF_USERS, count_large_objects
from subscriber.migration.schema.roles import find_collisions, needed_roles, plan_roles
from subscriber.sql_text import sql_text

# Settings with which the same statement or value has another meaning or another text.
_MEANING = (
    "DateStyle", "IntervalStyle", "TimeZone", "array_nulls", "backslash_quote", "bytea_output",
    "default_text_search_config", "default_toast_compression", "default_transaction_isolation",
    "default_transaction_read_only", "extra_float_digits", "lc_monetary", "lc_numeric", "lc_time",
    "plpgsql.variable_conflict", "quote_all_identifiers", "row_security", "search_path", "session_replication_role",
    "standard_conforming_strings", "timezone_abbreviations", "transform_null_equals", "xmlbinary", "xmloption",
)  # fmt: skip
# Limits of the build. They cannot be changed on a server.
_LIMITS = ("block_size", "max_identifier_length", "max_index_keys", "max_function_args", "integer_datetimes")
_SETTINGS = """
SELECT s.name, s.reset_val FROM pg_catalog.pg_settings s
 WHERE s.name = ANY ($1::text[])
"""
_DATABASE_SETTINGS = """
SELECT pg_catalog.split_part(c, '=', 1) FROM pg_catalog.pg_db_role_setting s, pg_catalog.unnest(s.setconfig) c
 WHERE s.setrole = 0
   AND s.setdatabase = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
"""
_LOCALE = """
SELECT d.datname::text, pg_catalog.pg_encoding_to_char(d.encoding)::text, d.datcollate::text, d.datctype::text,
       {provider}, {locale}, {version}
  FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database()
"""
_EXTENSIONS = """
SELECT e.extname::text, e.extversion FROM pg_catalog.pg_extension e WHERE e.extname <> 'plpgsql' ORDER BY 1
"""
_AVAILABLE = """
SELECT a.name::text, a.default_version, a.installed_version, {trusted} OR NOT v.superuser
  FROM pg_catalog.pg_available_extensions a
  LEFT JOIN pg_catalog.pg_available_extension_versions v ON v.name = a.name AND v.version = a.default_version
"""
_OWNERS = """
SELECT DISTINCT pg_catalog.pg_get_userbyid(o.owner)::text
  FROM (SELECT oid, relowner, relnamespace FROM pg_catalog.pg_class
        UNION SELECT oid, proowner, pronamespace FROM pg_catalog.pg_proc
        UNION SELECT oid, typowner, typnamespace FROM pg_catalog.pg_type
        UNION SELECT oid, nspowner, oid FROM pg_catalog.pg_namespace) o (oid, owner, namespace)
  JOIN pg_catalog.pg_namespace n ON n.oid = o.namespace AND n.nspname NOT IN ('subscriber', 'pg_toast')
 WHERE (o.oid >= 16384 OR o.oid = pg_catalog.to_regnamespace('public')
            AND o.owner <> 10 AND pg_catalog.pg_get_userbyid(o.owner) <> 'pg_database_owner')
   AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend e WHERE e.objid = o.oid AND e.deptype = 'e') ORDER BY 1
"""
_MAY_ACT_AS = "SELECT pg_catalog.pg_has_role(r.oid, '{membership}') FROM pg_catalog.pg_roles r WHERE r.rolname = $1"
_USED_TABLESPACES = """
SELECT DISTINCT t.spcname::text, pg_catalog.pg_tablespace_location(t.oid)
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_tablespace t ON t.oid = c.reltablespace
 WHERE t.spcname NOT IN ('pg_default', 'pg_global') ORDER BY 1
"""
# Names of relations of users, in a form that does not depend on the session.
_RELATIONS = """
SELECT n.nspname::text, c.relname::text
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f', 'S') AND c.relpersistence <> 't'
   AND n.nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast', 'subscriber')
   AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend x WHERE x.classid = 'pg_catalog.pg_class'::pg_catalog.regclass
                      AND x.objid = c.oid AND x.deptype = 'e')
"""
# Code that runs when a worker writes a row, with its owner: see section 15 of migrations/schema.sql, which decides
# in the end. Defaults do not run, because all columns are sent.
_CODE = """
WITH used (relid, owner, what) AS (
    SELECT u.relid, p.proowner, 'function ' || p.oid::pg_catalog.regprocedure::text FROM (
        SELECT a.adrelid AS relid, 'pg_catalog.pg_attrdef'::pg_catalog.regclass AS catalog, a.oid AS object
          FROM pg_catalog.pg_attrdef a JOIN pg_catalog.pg_attribute c ON c.attrelid = a.adrelid AND c.attnum = a.adnum
         WHERE c.attgenerated <> ''
        UNION ALL SELECT k.conrelid, 'pg_catalog.pg_constraint', k.oid FROM pg_catalog.pg_constraint k
        UNION ALL SELECT i.indrelid, 'pg_catalog.pg_class', i.indexrelid FROM pg_catalog.pg_index i
        UNION ALL SELECT a.attrelid, 'pg_catalog.pg_constraint', k.oid
          FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_constraint k ON k.contypid = a.atttypid
        UNION ALL SELECT t.tgrelid, 'pg_catalog.pg_trigger', t.oid FROM pg_catalog.pg_trigger t
         WHERE NOT t.tgisinternal AND pg_catalog.strpos($2, t.tgenabled::text) > 0) u
      JOIN pg_catalog.pg_depend d ON d.classid = u.catalog AND d.objid = u.object
       AND d.refclassid = 'pg_catalog.pg_proc'::pg_catalog.regclass
      JOIN pg_catalog.pg_proc p ON p.oid = d.refobjid
    UNION
    SELECT a.attrelid, t.typowner, 'type ' || pg_catalog.format_type(t.oid, -1)
      FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
     WHERE a.attnum > 0 AND NOT a.attisdropped AND t.typtype IN ('d', 'c', 'r', 'm')
    UNION
    SELECT c.oid, c.relowner, 'rule ' || pg_catalog.quote_ident(w.rulename) FROM pg_catalog.pg_rewrite w
      JOIN pg_catalog.pg_class c ON c.oid = w.ev_class
     WHERE w.ev_type <> '1' AND pg_catalog.strpos($2, w.ev_enabled::text) > 0
    UNION
    SELECT k.confrelid, c.relowner, 'foreign key ' || pg_catalog.quote_ident(k.conname) FROM pg_catalog.pg_constraint k
      JOIN pg_catalog.pg_class c ON c.oid = k.conrelid
     WHERE pg_catalog.strpos($2, 'O') > 0 AND k.contype = 'f'
       AND (k.confdeltype IN ('c', 'n', 'd') OR k.confupdtype IN ('c', 'n', 'd')))
SELECT n.nspname::text || '.' || c.relname, pg_catalog.array_agg(DISTINCT r.rolname::text),
       pg_catalog.string_agg(DISTINCT u.what, ', ')
  FROM used u JOIN pg_catalog.pg_class c ON c.oid = u.relid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_catalog.pg_roles r ON r.oid = u.owner
 WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND NOT r.rolsuper AND r.rolname <> $1
   AND n.nspname NOT IN ('pg_catalog', 'information_schema', 'subscriber')
   AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend e WHERE e.objid = c.oid AND e.deptype = 'e'
                      AND e.classid = 'pg_catalog.pg_class'::pg_catalog.regclass)
 GROUP BY n.nspname, c.relname ORDER BY 1
"""
_IDENTITY = """
SELECT i.identity FROM pg_catalog.pg_identify_object($1::bigint::oid, $2::bigint::oid, 0) i
"""
_PROVIDERS = {"c": "libc", "i": "icu", "b": "builtin"}

ROLE_EXISTS = "role_exists"
ERROR, WARNING, INFORMATION = Severity.ERROR, Severity.WARNING, Severity.INFORMATION
TARGET = FixedOn.TARGET


async def compare_settings(source: Connection, target: Connection) -> list[PreflightFinding]:
    """Compare the settings of a new session. Settings of the database are copied, so they are not compared."""
    names = [*_MEANING, *_LIMITS]
    there = {row[0]: row[1] for row in await source.fetch(_SETTINGS, names)}
    here = {row[0]: row[1] for row in await target.fetch(_SETTINGS, names)}
    copied = {name.lower() for (name,) in await source.fetch(_DATABASE_SETTINGS)}
    database = await target.fetchval("SELECT pg_catalog.current_database()::text")
    findings = []
    for name in names:
        if name not in there or name not in here or there[name] == here[name] or name.lower() in copied:
            continue
        message = f"{name} is {there[name]!r} on the source and {here[name]!r} on the target"
        if name in _LIMITS:
            why = "The limit is compiled into the server, and an object of the source can exceed it"
            findings.append(PreflightFinding("limit", name, WARNING, message, why, None, TARGET))
            continue
        quoted = ".".join(map(sql_identifier, name.split(".")))
        fix = f"ALTER DATABASE {sql_identifier(database)} SET {quoted} TO {sql_literal(there[name])};"
        if name == "search_path":
            fix = f"ALTER DATABASE {sql_identifier(database)} SET {quoted} TO {sql_text(there[name])};"
        why = "The same statement or value has another meaning on the target"
        findings.append(PreflightFinding("setting", name, WARNING, message, why, fix, TARGET))
    return findings


async def compare_locales(source: Connection, target: Connection) -> list[PreflightFinding]:
    """Compare encoding, collation, provider of the collation, and its version."""
    there, here = await _locale(source), await _locale(target)
    database, encoding, collate, ctype, provider, locale, version = there
    findings = []
    if (encoding, _normal(there[2:6])) != (here[1], _normal(here[2:6])):
        options = [f"TEMPLATE template0 ENCODING {sql_literal(encoding)}"]
        if provider == "c":
            options.append(f"LC_COLLATE {sql_literal(collate)} LC_CTYPE {sql_literal(ctype)}")
        else:
            options.append(f"LOCALE_PROVIDER {_PROVIDERS[provider]}")
            options.append(f"{'ICU' if provider == 'i' else 'BUILTIN'}_LOCALE {sql_literal(locale)}")
            options.append(f"LC_COLLATE {sql_literal(collate)} LC_CTYPE {sql_literal(ctype)}")
        message = f"the locale is {_described(there)} on the source and {_described(here)} on the target"
        why = "Texts are ordered and compared differently, and bounds of partitions by text can be in another order"
        fix = f"CREATE DATABASE {sql_identifier(database)} {' '.join(options)}; -- in place of the target's database"
        findings.append(PreflightFinding("locale", "database", ERROR, message, why, fix, TARGET))
    elif version and here[6] and version != here[6]:
        message = f"the version of the collation is {version} on the source and {here[6]} on the target"
        why = "Some texts are ordered differently. Indexes are built on the target; bounds of partitions are copied"
        findings.append(PreflightFinding("collation_version", "database", INFORMATION, message, why, None, TARGET))
    return findings


async def _locale(connection: Connection) -> tuple[str, str, str, str, str, str, str | None]:
    major = connection.get_server_version().major
    has_provider = features.DATABASE_LOCALE_PROVIDER.is_in_major(major)
    locale = "coalesce(d.daticulocale, '')" if has_provider else "''"
    if features.DATABASE_LOCALE.is_in_major(major):
        locale = "coalesce(d.datlocale, '')"
    query = _LOCALE.format(
        provider="d.datlocprovider::text" if has_provider else "'c'",
        locale=locale,
        version="pg_catalog.pg_database_collation_actual_version(d.oid)" if has_provider else "NULL",
    )
    row = await connection.fetchrow(query)
    assert row is not None
    return tuple(row)


def _normal(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return names of locales in one spelling: systems write both C.UTF-8 and C.utf8."""
    return tuple(name.lower().replace("utf-8", "utf8") for name in names)


def _described(locale: tuple[str, str, str, str, str, str, str | None]) -> str:
    _, encoding, collate, ctype, provider, name, _ = locale
    words = [encoding, _PROVIDERS.get(provider, provider), name, f"LC_COLLATE {collate}, LC_CTYPE {ctype}"]
    return " ".join(word for word in words if word)


async def compare_extensions(source: Connection, target: Connection) -> list[PreflightFinding]:
    """Compare the extensions of the source with those that the target can create."""
    major = target.get_server_version().major
    rows = await target.fetch(_AVAILABLE.format(trusted="v.trusted"))
    available = {row[0]: tuple(row)[1:] for row in rows}
    is_superuser = await target.fetchval("SELECT pg_catalog.current_setting('is_superuser')::bool")
    role = await target.fetchval("SELECT current_user::text")
    findings = []
    for name, version in await source.fetch(_EXTENSIONS):
        why = "Objects of the source need the extension"
        if name not in available:
            fix = f"apt-get install postgresql-{major}-{name} # on the target's machine"
            message = f"version {version} is installed on the source, and the target has no such extension"
            findings.append(PreflightFinding("extension", name, ERROR, message, why, fix, FixedOn.SHELL))
            continue
        default, installed, may_create = available[name]
        if is_older(installed or default, version):
            message = f"it is version {version} on the source and {installed or default} on the target"
            fix = (
                f"CREATE EXTENSION IF NOT EXISTS {sql_identifier(name)}; ALTER EXTENSION {sql_identifier(name)} UPDATE"
            )
            fix += f" TO {sql_literal(version)}; -- after the server's package has that version"
            findings.append(PreflightFinding("extension", name, WARNING, message, why, fix, TARGET))
        elif installed is None and not may_create and not is_superuser:
            message = f'role "{role}" may not create the extension on the target'
            fix = f"CREATE EXTENSION {sql_identifier(name)}; -- as a superuser"
            findings.append(PreflightFinding("extension", name, ERROR, message, why, fix, TARGET))
    return findings


async def compare_roles(
    source: Connection, target: Connection, own: Collection[str], accepted: Collection[str]
) -> list[PreflightFinding]:
    """Return what a copy of the roles would leave out, and the roles whose names the target has had before.

    Args:
        own: roles of the target that the move has made.
        accepted: roles of the target that are the source's, see accepted_roles().
    """
    plan = await plan_roles(source, target, {*own, *accepted})
    collisions = [
        PreflightFinding(
            ROLE_EXISTS,
            name,
            ERROR,
            "the target has had a role of this name before, which may belong to another person",
            "It would own objects, or have privileges, that the role of the source has. Waive it if both are the same",
            f"ALTER ROLE {sql_identifier(name)} RENAME TO {sql_identifier(f'{name}_old')}; -- if it is another person",
            TARGET,
        )
        for name in await find_collisions(source, target, own)
    ]
    why = "Applications or owners of objects do not find the role as it is on the source"
    missing = {left.object for left in plan.left_out if left.kind == "role"} & await needed_roles(source)
    return collisions + [
        PreflightFinding(
            left.kind,
            left.object,
            ERROR if left.kind == "role" and left.object in missing else WARNING,
            left.reason,
            "Definitions of the source name the role" if left.object in missing else why,
            sql_text(left.statement),
            TARGET,
        )
        for left in plan.left_out
    ]


def accepted_roles(waived: Iterable[str]) -> set[str]:
    """Return the roles of the target that are the source's, by the names of waived findings."""
    prefix = f"{ROLE_EXISTS}:"
    return {name.removeprefix(prefix) for name in waived if name.startswith(prefix)}


async def compare_owners(source: Connection, target: Connection) -> list[PreflightFinding]:
    """Return the owners of objects that exist on the target, and that its role cannot make an owner."""
    role = await target.fetchval("SELECT current_user::text")
    query = _MAY_ACT_AS.format(membership=features.set_role_privilege(target.get_server_version().major))
    return [
        PreflightFinding(
            "owner",
            owner,
            ERROR,
            f'role "{role}" may not make it the owner of objects on the target',
            "The definitions of the source are created together, in one transaction, which ends with an error",
            f"GRANT {sql_identifier(owner)} TO {sql_identifier(role)};",
            TARGET,
        )
        for (owner,) in await source.fetch(_OWNERS)
        if await target.fetchval(query, owner) is False
    ]


async def compare_code(
    source: Connection, target: Connection, *, lacks_replica_role: bool = False
) -> list[PreflightFinding]:
    """Return the tables whose changes run code that the role of the target must not run with its own rights.

    Args:
        lacks_replica_role: a worker of the move cannot set session_replication_role. Ordinary triggers and rules
            run then, and foreign keys cascade.
    """
    role = await target.fetchval("SELECT session_user::text")
    fires = "OAR" if lacks_replica_role else "AR"
    findings = []
    for table, owners, what in await source.fetch(_CODE, role, fires):
        names, option = ", ".join(map(sql_identifier, owners)), trust_option(owners)
        trust = shell_word(option) if set(option) & set('"$`\\!') else f'"{option}"'
        message = f"its changes run code of role {names}: {what}"
        why = f'The copy of the table ends with an error, because the code could use all rights of role "{role}"'
        fix = f"subscriber migrate start NAME --with {trust} # if the role may have these rights"
        findings.append(PreflightFinding("code", table, WARNING, message, why, fix, FixedOn.SHELL))
    return findings


async def compare_definitions(source: Connection, target: Connection) -> list[PreflightFinding]:
    """Return the definitions that run code of a role when they are created, which must not have the target's rights."""
    role = await target.fetchval("SELECT session_user::text")
    refused = await CodeOwners(await read_code(source), ()).refused(target)
    findings = []
    for key, roles in sorted(refused.items()):
        name = await source.fetchval(_IDENTITY, key.catalog, key.oid)
        names = ", ".join(map(sql_identifier, sorted(roles)))
        message = f"its definition runs code of role {names}"
        why = f'Step definitions of start ends with an error, because the code could use all rights of role "{role}"'
        fix = f"{how_to_trust(roles)} # if the role may have these rights"
        findings.append(PreflightFinding("definition", name, WARNING, message, why, fix, FixedOn.SHELL))
    return findings


async def compare_tablespaces(source: Connection, target: Connection) -> list[PreflightFinding]:
    here = {name for (name,) in await target.fetch("SELECT spcname::text FROM pg_catalog.pg_tablespace")}
    return [
        PreflightFinding(
            "tablespace",
            name,
            WARNING,
            "the target has no tablespace of this name",
            "Objects of all tablespaces are created in the default tablespace of the target",
            f"CREATE TABLESPACE {sql_identifier(name)} LOCATION {sql_literal(location)};",
            TARGET,
        )
        for name, location in await source.fetch(_USED_TABLESPACES)
        if name not in here
    ]


async def compare_relations(source: Connection, target: Connection) -> list[PreflightFinding]:
    """Return the relations of the target that a copy of the definitions would create."""
    wanted = {tuple(row) for row in await source.fetch(_RELATIONS)}
    existing = wanted & {tuple(row) for row in await target.fetch(_RELATIONS)}
    if existing == wanted:  # the definitions are copied already
        return []
    return [
        PreflightFinding(
            "exists",
            f"{schema}.{name}",
            ERROR,
            "the target has a relation of this name",
            "The definitions of the source are created together, in one transaction, which ends with an error",
            f"DROP TABLE {sql_identifier(schema)}.{sql_identifier(name)};",
            TARGET,
            is_waivable=False,
        )
        for schema, name in sorted(existing)
    ]


async def compare_large_objects(source: Connection, target: Connection, *, are_copied: bool) -> list[PreflightFinding]:
    """Return the large objects of both sides. `are_copied`: the move copies them."""
    number, existing = [await count_large_objects(side) for side in (source, target)]
    if not number:
        return []
    message = f"the source has {count(number, 'large object')}"
    if not are_copied:
        why = "Logical replication does not publish large objects, so they stay behind"
        fix = "subscriber migrate preflight --large-objects # and the same option of schema --after-copy and cutover"
        return [PreflightFinding("large_objects", "source", ERROR, message, why, fix, FixedOn.SHELL)]
    if existing:
        message = f"the target has {count(existing, 'large object')}"
        why = "The copy of the source's large objects removes others from the target"
        fix = f"SELECT lo_unlink(m.oid) FROM pg_catalog.pg_largeobject_metadata m WHERE {IS_OF_USERS};"
        return [PreflightFinding("large_objects", "target", WARNING, message, why, fix, TARGET)]
    why = "They are copied by schema --after-copy, and compared once more in the pause of cutover, with --large-objects"
    return [PreflightFinding("large_objects", "source", INFORMATION, message, why)]
