"""Roles and settings, which pg_dump does not read because they belong to the whole server.

Equal names do not make two roles the same person: on the source, a role with CREATEROLE can create a role with the name
of an administrator of the target, and grant it. So a role that the target has had before stays as it is, and no role
becomes a member of it. Only roles that the move has made, and those whose names were accepted, get memberships and
settings. What is left out for that reason is listed. find_collisions() lists the roles of the target that definitions
of the source name: they would get objects and privileges of another person.

Password verifiers are copied if the source shows them, which it does to superusers only. A statement that the role of
the target may not execute is left out, and is listed with the reason.

Before PostgreSQL 16 a role with CREATEROLE grants all roles that are no superusers, also those that run programs and
read files of the server. Such a target gives the attribute to no role of the source, and memberships in these roles are
not copied from such a source.

The database itself is part of this module as well: its owner, privileges, settings and comment.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import asyncpg

from subscriber import server_features as features
from subscriber.catalog.connection import Connection
from subscriber.quoting import identifier, literal, literals

_ROLES = """
SELECT r.rolname::text, r.rolsuper, r.rolinherit, r.rolcreaterole, r.rolcreatedb, r.rolcanlogin, r.rolreplication,
       r.rolbypassrls, r.rolconnlimit, r.rolvaliduntil::text, {password},
       pg_catalog.shobj_description(r.oid, 'pg_authid')
  FROM {table} r WHERE NOT pg_catalog.starts_with(r.rolname::text, 'pg_') ORDER BY 1
"""
_NAMES = "SELECT r.rolname::text, r.rolsuper FROM pg_catalog.pg_roles r"
_MAY_READ_PASSWORDS = "SELECT pg_catalog.has_table_privilege('pg_catalog.pg_authid', 'SELECT')"
# Roles of the source that own objects of the database or have privileges there. The bootstrap superuser is not listed.
# The last column: a definition needs the role. Privileges on objects of the system are not definitions.
_NAMED = """
SELECT r.rolname::text, r.rolsuper,
       pg_catalog.bool_or(d.objid >= 16384 OR d.classid = 'pg_catalog.pg_namespace'::pg_catalog.regclass)
  FROM pg_catalog.pg_shdepend d JOIN pg_catalog.pg_roles r ON r.oid = d.refobjid
 WHERE d.refclassid = 'pg_catalog.pg_authid'::pg_catalog.regclass
   AND NOT pg_catalog.starts_with(r.rolname::text, 'pg_')
   AND (d.dbid = (SELECT b.oid FROM pg_catalog.pg_database b WHERE b.datname = current_database())
        OR d.classid = 'pg_catalog.pg_database'::pg_catalog.regclass
           AND d.objid = (SELECT b.oid FROM pg_catalog.pg_database b WHERE b.datname = current_database()))
 GROUP BY 1, 2 ORDER BY 1
"""
_MEMBERSHIPS = """
SELECT pg_catalog.pg_get_userbyid(m.roleid)::text, pg_catalog.pg_get_userbyid(m.member)::text,
       pg_catalog.bool_or(m.admin_option), {inherit}, {set}
  FROM pg_catalog.pg_auth_members m GROUP BY 1, 2 ORDER BY 1, 2
"""
_SETTINGS = """
SELECT CASE s.setrole WHEN 0 THEN NULL ELSE pg_catalog.pg_get_userbyid(s.setrole)::text END, s.setdatabase <> 0,
       s.setconfig
  FROM pg_catalog.pg_db_role_setting s
 WHERE s.setdatabase IN (0, (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = current_database()))
 ORDER BY 1 NULLS FIRST, 2
"""
_DATABASE = """
SELECT d.datname::text, pg_catalog.pg_get_userbyid(d.datdba)::text, pg_catalog.shobj_description(d.oid, 'pg_database'),
       (SELECT pg_catalog.array_agg(pg_catalog.concat_ws(
                 ' ', a.privilege_type, a.is_grantable,
                 CASE a.grantee WHEN 0 THEN '' ELSE pg_catalog.pg_get_userbyid(a.grantee)::text END) ORDER BY 1)
          FROM pg_catalog.aclexplode(d.datacl) a WHERE a.grantee <> d.datdba)
  FROM pg_catalog.pg_database d WHERE d.datname = current_database()
"""
_CREATOR = """
SELECT r.rolname::text, r.rolsuper, r.rolcreaterole, r.rolcreatedb, r.rolreplication, r.rolbypassrls,
       d.datdba = r.oid OR r.rolsuper, d.datname::text
  FROM pg_catalog.pg_roles r, pg_catalog.pg_database d
 WHERE r.rolname = current_user AND d.datname = current_database()
"""
# Memberships that a role with CREATEROLE gives itself before 16, and that reach beyond the database.
_BEYOND = frozenset(
    {
        "pg_execute_server_program",
        "pg_read_server_files",
        "pg_write_server_files",
        "pg_read_all_data",
        "pg_write_all_data",
    }
)
# Settings whose value is a list of quoted names. Source: src/backend/utils/misc/guc_tables.c, GUC_LIST_QUOTE.
_LISTS_OF_NAMES = frozenset(
    {
        "local_preload_libraries",
        "search_path",
        "session_preload_libraries",
        "shared_preload_libraries",
        "temp_tablespaces",
        "unix_socket_directories",
    }
)
_ELEMENT = re.compile(r'"((?:[^"]|"")*)"|([^,\s]+)')


@dataclass(frozen=True, slots=True)
class RoleStatement:
    """A statement about a role or the database. `repr()` and `shown` have no password verifier."""

    object: str  # name of the role, or database
    shown: str
    secret: str | None = None  # the verifier, which `shown` hides

    @property
    def sql(self) -> str:
        return self.shown if self.secret is None else self.shown.replace(_HIDDEN, literal(self.secret), 1)

    def __repr__(self) -> str:
        return f"RoleStatement({self.object!r}, {self.shown!r})"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Something that a role may not read or create.

    Attributes:
        kind: role, password, role_attribute, membership, setting, or definition.
        object: the name of the role, with an attribute behind a dot; or database.
        reason: a sentence without its full stop.
        statement: an administrator can run it on the target.
    """

    kind: str
    object: str
    reason: str
    statement: str


@dataclass(frozen=True, slots=True)
class RolesPlan:
    """The statements for the roles of the source.

    Attributes:
        statements: in their order.
        left_out: everything that no statement does.
        created: names of the roles that the statements create.
    """

    statements: tuple[RoleStatement, ...]
    left_out: tuple[LeftOut, ...]
    created: tuple[str, ...] = ()


_HIDDEN = "'********'"
# The target does not let this role do it, or it has no such setting or value.
_REFUSED = (
    asyncpg.InsufficientPrivilegeError,
    asyncpg.UndefinedObjectError,
    asyncpg.InvalidParameterValueError,
    asyncpg.CantChangeRuntimeParamError,
    asyncpg.InvalidGrantOperationError,  # ADMIN of a role is not given back to the own grantor
)


@dataclass(frozen=True, slots=True)
class _Role:
    name: str
    attributes: dict[str, bool]
    connection_limit: int
    valid_until: str | None
    password: str | None
    comment: str | None


class _Names(NamedTuple):
    own: frozenset[str]  # that the move may change
    known: frozenset[str]  # that the target has, or is going to have


@dataclass(frozen=True, slots=True)
class _Creator:
    """The role that creates roles on the target."""

    name: str
    attributes: dict[str, bool]
    owns_database: bool
    database: str
    major: int

    def may_give(self, attribute: str) -> bool:
        """Return True for an attribute that this role can give to another role, and that the other role may have."""
        if attribute == "CREATEROLE" and not features.LIMITED_CREATEROLE.is_in_major(self.major):
            return False
        if self.attributes["SUPERUSER"] or attribute in ("INHERIT", "LOGIN"):
            return True
        if attribute == "CREATEDB" and not features.LIMITED_CREATEROLE.is_in_major(self.major):
            return True
        return attribute != "SUPERUSER" and self.attributes.get(attribute, False)


async def find_collisions(source: Connection, target: Connection, own: Collection[str] = ()) -> list[str]:
    """Return the roles of the target that get objects or privileges of roles with the same name on the source.

    A superuser of both servers is left out, because superusers of the source are trusted. So is the role of both
    sessions.

    Args:
        own: roles that the move has made.
    """
    existing: dict[str, bool] = {row[0]: row[1] for row in await target.fetch(_NAMES)}
    sessions = {await side.fetchval("SELECT session_user::text") for side in (source, target)}
    same = {*own, *(sessions if len(sessions) == 1 else ())}
    return [
        name
        for name, is_superuser, _ in await source.fetch(_NAMED)
        if name in existing and name not in same and not (is_superuser and existing[name])
    ]


async def needed_roles(source: Connection) -> set[str]:
    """Return the roles that definitions of the source name as owners, or with privileges."""
    return {name for name, _, is_needed in await source.fetch(_NAMED) if is_needed}


async def plan_roles(source: Connection, target: Connection, own: Collection[str] = ()) -> RolesPlan:
    """Return the statements for the roles of the source that the target lacks. Changes nothing.

    Args:
        own: roles of the target that the move has made, or whose names were accepted. They get memberships, too.
    """
    creator = await _read_creator(target)
    existing = {name for name, _ in await target.fetch(_NAMES)}
    reads_passwords = await source.fetchval(_MAY_READ_PASSWORDS)
    statements: list[RoleStatement] = []
    left_out: list[LeftOut] = []
    created = []
    for role in await _read_roles(source, passwords=reads_passwords):
        if role.name in existing:
            continue
        if not (creator.attributes["SUPERUSER"] or creator.attributes["CREATEROLE"]):
            statement = f"CREATE ROLE {identifier(role.name)} {_attributes(role, role.attributes)};"
            statement += f" GRANT {identifier(role.name)} TO {identifier(creator.name)};"
            left_out.append(LeftOut("role", role.name, f'role "{creator.name}" may not create roles', statement))
            continue
        created.append(role.name)
        statements += _create(role, creator)
        left_out += _not_given(role, creator)
        if not reads_passwords and role.attributes["LOGIN"]:
            statement = f"ALTER ROLE {identifier(role.name)} PASSWORD '…';"
            left_out.append(LeftOut("password", role.name, "it cannot be read on the source", statement))
    names = _Names(frozenset({*own, *created}), frozenset({*existing, *created}))
    for plan in (
        await _memberships(source, target, names, creator.name),
        await _settings(source, target, names, creator),
    ):
        statements += plan.statements
        left_out += plan.left_out
    return RolesPlan(tuple(statements), tuple(left_out), tuple(created))


async def create_roles(source: Connection, target: Connection, own: Collection[str] = ()) -> RolesPlan:
    """Create the roles of the source that the target lacks, in one transaction.

    Args:
        own: roles of the target that the move has made, or whose names were accepted.

    Returns:
        The executed statements, and those that the target has refused.

    Raises:
        asyncpg.PostgresError: a statement failed for a reason that is not about the role or the setting. The
            transaction was rolled back.
    """
    plan = await plan_roles(source, target, own)
    executed: list[RoleStatement] = []
    left_out = list(plan.left_out)
    async with target.transaction():
        for statement in plan.statements:
            try:
                async with target.transaction():
                    await target.execute(statement.sql)
            except _REFUSED as error:
                left_out.append(LeftOut("setting", statement.object, error.message, f"{statement.shown};"))
            else:
                executed.append(statement)
    return RolesPlan(tuple(executed), tuple(left_out), plan.created)


async def _read_creator(target: Connection) -> _Creator:
    row = await target.fetchrow(_CREATOR)
    assert row is not None
    name, superuser, create_role, create_db, replication, bypass, owns, database = row
    attributes = {
        "SUPERUSER": superuser,
        "CREATEROLE": create_role,
        "CREATEDB": create_db,
        "REPLICATION": replication,
        "BYPASSRLS": bypass,
    }
    return _Creator(name, attributes, owns, database, target.get_server_version().major)


async def _read_roles(source: Connection, *, passwords: bool) -> list[_Role]:
    table = "pg_catalog.pg_authid" if passwords else "pg_catalog.pg_roles"
    rows = await source.fetch(_ROLES.format(table=table, password="r.rolpassword" if passwords else "NULL"))
    names = ("SUPERUSER", "INHERIT", "CREATEROLE", "CREATEDB", "LOGIN", "REPLICATION", "BYPASSRLS")
    return [_Role(row[0], dict(zip(names, row[1:8], strict=True)), *row[8:]) for row in rows]


def _attributes(role: _Role, attributes: dict[str, bool]) -> str:
    words = [name if value else f"NO{name}" for name, value in attributes.items()]
    if role.connection_limit != -1:
        words.append(f"CONNECTION LIMIT {role.connection_limit}")
    if role.valid_until is not None:
        words.append(f"VALID UNTIL {literal(role.valid_until)}")
    return " ".join(words)


def _create(role: _Role, creator: _Creator) -> Iterator[RoleStatement]:
    about, name = role.name, identifier(role.name)
    given = {attribute: value for attribute, value in role.attributes.items() if creator.may_give(attribute)}
    create = f"CREATE ROLE {name} {_attributes(role, given)}"
    if role.password is not None:
        yield RoleStatement(about, f"{create} PASSWORD {_HIDDEN}", role.password)
    else:
        yield RoleStatement(about, create)
    if role.comment is not None:
        yield RoleStatement(about, f"COMMENT ON ROLE {name} IS {literal(role.comment)}")
    if not creator.attributes["SUPERUSER"]:
        # Only a member can make another role the owner of an object.
        yield RoleStatement(about, f"GRANT {name} TO {identifier(creator.name)}")


def _not_given(role: _Role, creator: _Creator) -> Iterator[LeftOut]:
    for attribute, value in role.attributes.items():
        if value and not creator.may_give(attribute):
            statement = f"ALTER ROLE {identifier(role.name)} {attribute};"
            reason = f'role "{creator.name}" may not give {attribute}'
            if attribute == "CREATEROLE" and not features.LIMITED_CREATEROLE.is_in_major(creator.major):
                reason = (
                    f"on PostgreSQL {creator.major} it could grant itself each role of the target that is no superuser"
                )
            yield LeftOut("role_attribute", f"{role.name}.{attribute}", reason, statement)


async def _memberships(source: Connection, target: Connection, names: _Names, creator: str) -> RolesPlan:
    """Return the grants between roles that the move may change. Rules of the preflight are about the target's role."""
    here = {(row[0], row[1]) for row in await _read_memberships(target)}
    versions = [side.get_server_version().major for side in (source, target)]
    superusers = [
        {name for name, is_superuser in await side.fetch(_NAMES) if is_superuser} for side in (source, target)
    ]
    statements, left_out = [], []
    for role, member, admin, inherit, set_role in await _read_memberships(source):
        if (role, member) in here or not {role, member} <= names.known or member == creator:
            continue
        options = " WITH ADMIN OPTION" if admin else ""
        if features.MEMBERSHIP_OPTIONS.is_in_major(min(versions)):
            options = f" WITH ADMIN {_word(admin)}, INHERIT {_word(inherit)}, SET {_word(set_role)}"
        grant = f"GRANT {identifier(role)} TO {identifier(member)}{options}"
        reason = None
        if member not in names.own:
            reason = f'role "{member}" of the target was not made by the move'
        elif role in _BEYOND and not features.LIMITED_CREATEROLE.is_in_major(versions[0]):
            reason = f"on PostgreSQL {versions[0]} a role with CREATEROLE can have granted it"
        elif role not in names.own and role not in superusers[0] & superusers[1] and not role.startswith("pg_"):
            reason = f'role "{role}" of the target was not made by the move'
        if reason is None:
            statements.append(RoleStatement(member, grant))
        else:
            left_out.append(LeftOut("membership", f"{member}.{role}", reason, f"{grant};"))
    return RolesPlan(tuple(statements), tuple(left_out))


async def _read_memberships(connection: Connection) -> list[Any]:
    newer = features.MEMBERSHIP_OPTIONS.is_in_major(connection.get_server_version().major)
    options = {
        "inherit": "pg_catalog.bool_or(m.inherit_option)" if newer else "true",
        "set": "pg_catalog.bool_or(m.set_option)" if newer else "true",
    }
    return await connection.fetch(_MEMBERSHIPS.format(**options))


def _word(value: bool) -> str:
    return "TRUE" if value else "FALSE"


async def _settings(source: Connection, target: Connection, names: _Names, creator: _Creator) -> RolesPlan:
    """Return the statements for settings of roles and of the database, and for the database itself."""
    database = identifier(creator.database)
    here = {(row[0], row[1], setting) for row in await target.fetch(_SETTINGS) for setting in row[2]}
    statements, left_out = [], []
    for role, of_database, settings in await source.fetch(_SETTINGS):
        if role is not None and role not in names.known:
            continue
        if role is None:
            about, what = "database", f"ALTER DATABASE {database}"
        else:
            about, what = role, f"ALTER ROLE {identifier(role)}"
            what += f" IN DATABASE {database}" if of_database else ""
        for setting in settings:
            name, _, value = setting.partition("=")
            statement = f"{what} SET {_quoted_setting(name)} TO {_value(name, value)}"
            if role is None or role in names.own:
                statements.append(RoleStatement(about, statement))
            elif (role, of_database, setting) not in here:
                reason = f'role "{role}" of the target was not made by the move'
                left_out.append(LeftOut("setting", f"{role}.{name}", reason, f"{statement};"))
    row = await source.fetchrow(_DATABASE)
    assert row is not None
    _, owner, comment, privileges = row
    if comment is not None:
        statements.append(RoleStatement("database", f"COMMENT ON DATABASE {database} IS {literal(comment)}"))
    if privileges is not None:
        statements += _privileges(database, privileges, names.known)
    if owner in names.known:
        statements.append(RoleStatement("database", f"ALTER DATABASE {database} OWNER TO {identifier(owner)}"))
    return RolesPlan(tuple(statements), tuple(left_out))


def _privileges(database: str, privileges: Iterable[str], known: Set[str]) -> Iterator[RoleStatement]:
    yield RoleStatement("database", f"REVOKE ALL ON DATABASE {database} FROM PUBLIC")
    for privilege, grantable, grantee in (text.split(" ", 2) for text in privileges):
        if grantee and grantee not in known:
            continue
        to = identifier(grantee) if grantee else "PUBLIC"
        options = " WITH GRANT OPTION" if grantable == "t" else ""
        yield RoleStatement("database", f"GRANT {privilege} ON DATABASE {database} TO {to}{options}")


def _quoted_setting(name: str) -> str:
    """Return the name of a setting for SET. A name with a dot is of an extension or of an application."""
    return ".".join(map(identifier, name.split(".")))


def _value(name: str, value: str) -> str:
    if name.lower() not in _LISTS_OF_NAMES:
        return literal(value)
    elements = [bare or quoted.replace('""', '"') for quoted, bare in _ELEMENT.findall(value)]
    return literals(elements) if elements else "''"
