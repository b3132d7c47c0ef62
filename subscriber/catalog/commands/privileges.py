"""Who is executing a statement, and what PostgreSQL lets that role do with subscriptions."""

from __future__ import annotations

from dataclasses import dataclass

import asyncpg

from subscriber import server_features as features
from subscriber.catalog import schema
from subscriber.catalog.grammar.role_word import RoleWord
from subscriber.catalog.store import subscriptions
from subscriber.catalog.store.subscriptions import load_subscription
from subscriber.display import near_word, sql_identifier
from subscriber.errors import StatementError
from subscriber.remedy import Remedy
from subscriber.sqlstate import DUPLICATE_OBJECT, INSUFFICIENT_PRIVILEGE, UNDEFINED_OBJECT
from subscriber.subscription import Subscription

CALLER = f"""
SELECT r.oid, r.rolname::text AS name, r.rolsuper, pg_catalog.current_database()::text AS database,
       pg_catalog.has_database_privilege(pg_catalog.current_database(), 'CREATE') AS may_create,
       r.rolsuper OR EXISTS (SELECT FROM pg_catalog.pg_roles g WHERE g.rolname = 'pg_create_subscription'
                                AND pg_catalog.pg_has_role(g.oid, 'USAGE'))
       OR pg_catalog.current_setting('server_version_num')::int < {features.CREATE_SUBSCRIPTION_ROLE.since * 10_000}
          AND EXISTS (SELECT FROM pg_catalog.pg_namespace n WHERE n.nspname = 'subscriber'
                         AND pg_catalog.pg_has_role(n.nspowner, 'USAGE')) AS may_subscribe
  FROM pg_catalog.pg_roles r WHERE r.rolname = current_user
"""
MAY_TRUST = """
SELECT pg_catalog.has_column_privilege('subscriber.subscription'::pg_catalog.regclass, 'subtrustedowners', 'UPDATE')
"""
ROLE = """
SELECT r.oid, r.rolname::text FROM pg_catalog.pg_roles r
 WHERE r.rolname = CASE $1::text WHEN 'current_user' THEN current_user WHEN 'session_user' THEN session_user
                   ELSE $2::name END
"""


AS_SUPERUSER = Remedy("run the statement as a superuser of the target.")


@dataclass(frozen=True, slots=True)
class Caller:
    """The current role."""

    oid: int
    name: str
    is_superuser: bool
    database: str
    may_create: bool  # CREATE on the database
    may_subscribe: bool  # superuser; the privileges of pg_create_subscription; before 16 the schema's owner, too


async def current_role(connection: asyncpg.Connection) -> Caller:
    """Return the role that executes statements on this connection. SET ROLE counts."""
    row = await connection.fetchrow(CALLER)
    assert row is not None
    return Caller(row["oid"], row["name"], row["rolsuper"], row["database"], row["may_create"], row["may_subscribe"])


def password_required_error() -> StatementError:
    return StatementError(
        "password_required=false is superuser-only",
        hint="Subscriptions with the password_required option set to false may only be created or modified by the"
        " superuser.",
        sqlstate=INSUFFICIENT_PRIVILEGE,
    )


async def check_trusted_owners(connection: asyncpg.Connection, names: tuple[str, ...]) -> None:
    """Raises StatementError if a role does not exist (42704), or the caller may not decide whom to trust (42501)."""
    if not await connection.fetchval(MAY_TRUST):
        raise StatementError(
            "trusted_owners is superuser-only",
            detail="Code of these roles runs with the rights of the role that applies changes.",
            hint=AS_SUPERUSER,
            sqlstate=INSUFFICIENT_PRIVILEGE,
        )
    for name in names:
        await find_role(connection, name)


def check_database(who: Caller) -> None:
    """Raises StatementError (42501) without CREATE on the database."""
    if not who.may_create:
        grant = f"GRANT CREATE ON DATABASE {sql_identifier(who.database)} TO {sql_identifier(who.name)};"
        raise StatementError(
            f"permission denied for database {who.database}",
            hint=Remedy("on the target, as the owner of the database", grant),
            sqlstate=INSUFFICIENT_PRIVILEGE,
        )


def check_create(who: Caller, *, password_required: bool, server_major: int) -> None:
    """May this role create a subscription? Raises StatementError (42501)."""
    if not who.may_subscribe:
        if not features.CREATE_SUBSCRIPTION_ROLE.is_in_major(server_major):
            raise StatementError(
                "must be superuser to create subscriptions",
                hint=created_by_superuser(who.name),
                sqlstate=INSUFFICIENT_PRIVILEGE,
            )
        raise StatementError(
            "permission denied to create subscription",
            detail='Only roles with privileges of the "pg_create_subscription" role may create subscriptions.',
            hint=Remedy("on the target", f"GRANT pg_create_subscription TO {sql_identifier(who.name)};"),
            sqlstate=INSUFFICIENT_PRIVILEGE,
        )
    check_database(who)
    if not password_required and not who.is_superuser:
        raise password_required_error()


async def check_name_is_free(connection: asyncpg.Connection, name: str) -> None:
    """Raises StatementError (42710) if there is a subscription of that name."""
    if await subscriptions.subscription_exists(connection, name):
        raise already_exists(name)


def already_exists(name: str) -> StatementError:
    return StatementError(
        f'subscription "{name}" already exists',
        hint=f"Use another name, or change it with ALTER SUBSCRIPTION {sql_identifier(name)}.",
        sqlstate=DUPLICATE_OBJECT,
    )


async def get_owned_subscription(connection: asyncpg.Connection, name: str, *, to_drop: bool = False) -> Subscription:
    """The subscription, locked until the transaction ends, after checking that the caller may change it.

    Raises StatementError if there is none (42704) or the caller may not (42501). One whose password_required is
    false may be changed by superusers only, but `to_drop` it its owner may.
    """
    row = await subscriptions.load_rights(connection, name)
    if row is None:
        raise await does_not_exist(connection, name)
    if not row["is_owner"]:
        raise await must_be_owner(connection, name)
    if not row["subpasswordrequired"] and not row["is_superuser"] and not to_drop:
        raise password_required_error()
    await subscriptions.lock_subscription(connection, row["oid"])
    subscription = await load_subscription(connection, row["oid"])
    if subscription is None or subscription.name != name:  # dropped or renamed while we waited
        raise await does_not_exist(connection, name)
    return subscription


async def subscription_names(connection: asyncpg.Connection) -> list[str]:
    """Return the names of all subscriptions of this database. Any role may ask."""
    if await schema.current_revision(connection) is None:
        return []
    return await subscriptions.load_names(connection)


async def may_manage(connection: asyncpg.Connection, subscription: Subscription) -> bool:
    """Return True if the current role has the rights of the owner. True also if the subscription has been dropped."""
    return await subscriptions.may_manage(connection, subscription.oid)


async def check_manager(connection: asyncpg.Connection, subscription: Subscription) -> None:
    """Raises StatementError (42501) for a role that sees the subscription, and lacks the rights of its owner."""
    if not await may_manage(connection, subscription):
        raise await must_be_owner(connection, subscription.name)


async def must_be_owner(connection: asyncpg.Connection, name: str) -> StatementError:
    """Return the error for a subscription of a role that the current one does not inherit from."""
    row = await subscriptions.load_owner(connection, name)
    detail = hint = None
    if row is not None:
        owner, owner_is_superuser, role = row
        detail = f'It belongs to role "{owner}" of the target. The statement runs as role "{role}".'
        hint = owner_remedy(name, owner, role, owner_is_superuser=owner_is_superuser)
    return StatementError(
        f"must be owner of subscription {name}", detail=detail, hint=hint, sqlstate=INSUFFICIENT_PRIVILEGE
    )


def owner_remedy(name: str, owner: str, role: str, *, owner_is_superuser: bool) -> Remedy:
    """Return how a role may change and run a subscription of another role. It becomes no member of a superuser."""
    if owner_is_superuser:
        statement = f"ALTER SUBSCRIPTION {sql_identifier(name)} OWNER TO {sql_identifier(role)};"
        return Remedy("as a superuser of the target, with subscriber exec", statement)
    grant = f"GRANT {sql_identifier(owner)} TO {sql_identifier(role)};"
    return Remedy(f'connect as role "{owner}".', alternative=Remedy("on the target, as an administrator", grant))


def created_by_superuser(role: str) -> Remedy:
    """Return how a role gets a subscription on a server without pg_create_subscription."""
    create = "CREATE SUBSCRIPTION … WITH (enabled = false)"
    alter = f"ALTER SUBSCRIPTION … OWNER TO {sql_identifier(role)}; ALTER SUBSCRIPTION … ENABLE"
    return Remedy(f"before PostgreSQL 16 a superuser creates it, with subscriber exec: {create}; {alter};")


async def does_not_exist(connection: asyncpg.Connection, name: str) -> StatementError:
    """Return the error for a name that no subscription has, or one that the current role does not see.

    The hint has the names of this database.
    """
    known = await subscription_names(connection)
    if name in known:
        return await must_be_owner(connection, name)
    listed = f"This database has: {', '.join(map(sql_identifier, known))}." if known else "This database has none."
    return StatementError(
        f'subscription "{name}" does not exist', hint=near_word(name, known) or listed, sqlstate=UNDEFINED_OBJECT
    )


async def find_role(connection: asyncpg.Connection, role: str | RoleWord) -> tuple[int, str]:
    """OID and name of a role of the statement. Raises StatementError (42704) if there is none."""
    if isinstance(role, RoleWord):
        word = "session_user" if role is RoleWord.SESSION_USER else "current_user"
        row = await connection.fetchrow(ROLE, word, None)
    else:
        row = await connection.fetchrow(ROLE, None, role)
    if row is None:
        raise StatementError(f'role "{role}" does not exist', sqlstate=UNDEFINED_OBJECT)
    return row["oid"], row["rolname"]
