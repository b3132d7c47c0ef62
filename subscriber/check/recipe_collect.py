"""The queries of the recipe of least privilege on both servers. They change nothing on either server."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from subscriber.catalog import schema
from subscriber.catalog.application_owner import application_owner
from subscriber.catalog.connection import Connection
from subscriber.catalog.store.subscription_rel import load_relation_states
from subscriber.check.model import PublisherFacts, TargetFacts
from subscriber.check.recipe import (
    APPLY,
    LAUNCHER,
    PUBLISHER,
    OwnedSubscription,
    OwnedTable,
    PublishedTableAccess,
    PublisherRoles,
    TargetRoles,
)
from subscriber.connection.conninfo import Conninfo
from subscriber.connection.session import Session
from subscriber.errors import ConninfoError
from subscriber.publisher.answers import parsing
from subscriber.quoting import literal
from subscriber.subscription import Subscription

_TARGET = """
SELECT ARRAY(SELECT r.rolname::text FROM pg_catalog.pg_roles r WHERE r.rolname = ANY ($1::text[])),
       ARRAY(SELECT r.rolname::text FROM pg_catalog.pg_roles r WHERE r.rolsuper AND r.rolname = ANY ($1::text[])),
       ARRAY(SELECT r.rolname::text FROM pg_catalog.pg_roles r WHERE r.rolcanlogin AND r.rolname = ANY ($1::text[])),
       pg_catalog.has_database_privilege('public', pg_catalog.current_database(), 'CONNECT'),
       coalesce(pg_catalog.current_setting('reserved_connections', true), '0')::int
"""
_TABLE = """
SELECT r.rolname::text, r.rolsuper, c.oid, pg_catalog.has_schema_privilege('public', n.oid, 'USAGE'), c.relkind = 'S'
  FROM pg_catalog.pg_class c
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace JOIN pg_catalog.pg_roles r ON r.oid = c.relowner
 WHERE n.nspname = $1 AND c.relname = $2
"""
_CODE_OF = "SELECT DISTINCT f.owner::text FROM subscriber.foreign_code($1, '{}', true, NULL) f ORDER BY 1"
_IS_SUPERUSER = "SELECT r.rolsuper FROM pg_catalog.pg_roles r WHERE r.rolname = current_user"
_PUBLISHER = """
SELECT pg_catalog.current_database(),
       (SELECT r.rolname FROM pg_catalog.pg_roles r WHERE r.rolname = 'rds_replication'),
       EXISTS (SELECT FROM pg_catalog.pg_roles r WHERE r.rolname = {role}),
       EXISTS (SELECT FROM pg_catalog.pg_roles r WHERE r.rolname = {role} AND r.rolcanlogin),
       pg_catalog.has_database_privilege('public', pg_catalog.current_database(), 'CONNECT')
"""
# A comparison reads each partition of a table, and so does a copy by ranges.
_PUBLISHED = """
SELECT n.nspname, c.relname, pg_catalog.has_schema_privilege('public', n.oid, 'USAGE'), c.relrowsecurity,
       c.relkind = 'S'
  FROM pg_catalog.pg_class root JOIN pg_catalog.pg_namespace rn ON rn.oid = root.relnamespace
  JOIN pg_catalog.pg_class c
    ON c.oid = root.oid
       OR root.relkind = 'p' AND c.oid IN (SELECT p.relid FROM pg_catalog.pg_partition_tree(root.oid) p)
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE rn.nspname = {schema} AND root.relname = {name}
 ORDER BY 1, 2
"""


async def read_target_roles(
    connection: Connection,
    facts: TargetFacts,
    subscriptions: Sequence[Subscription],
    published: Sequence[tuple[str, str]],
    apply_role: str | None,
    *,
    is_new: bool,
) -> TargetRoles:
    """Collect the facts about the target.

    Args:
        published: the publisher's tables and sequences, as far as they are known.
        apply_role: the role of --apply-target; None: the option was not given.
        is_new: the subscription does not exist yet.
    """
    launcher = LAUNCHER if facts.is_superuser else facts.role
    row = await connection.fetchrow(_TARGET, [launcher, APPLY, apply_role])
    assert row is not None
    roles, superusers, logins, everybody_connects, reserved = row
    apply = APPLY if apply_role is None or apply_role in superusers else apply_role
    names = {*published}
    for subscription in subscriptions:
        states = await load_relation_states(connection, subscription.oid)
        names |= {(state.namespace, state.name) for state in states}
    has_schema = await schema.is_current(connection)
    tables = [await _owned_table(connection, *name, has_schema=has_schema) for name in sorted(names)]
    owners = {schema_name: await application_owner(connection, schema_name) for schema_name, _ in names}
    return TargetRoles(
        version=facts.version,
        version_text=facts.version_text,
        database=facts.database,
        launcher=launcher,
        apply=apply,
        roles=frozenset(roles),
        logins=frozenset(logins),
        has_schema=has_schema,
        schema_by_superuser=facts.origins_by_superuser,
        everybody_connects=everybody_connects,
        reserved_connections=reserved,
        subscriptions=tuple(map(_owned, subscriptions)),
        tables=tuple(table for table in tables if table is not None),
        is_new=is_new,
        application_owners={relation: owner for relation, owner in owners.items() if owner is not None},
        launcher_creates=not facts.is_superuser and facts.may_create_subscription,
    )


def _owned(subscription: Subscription) -> OwnedSubscription:
    has_password = False
    with suppress(ConninfoError):
        has_password = bool(Conninfo.parse(subscription.conninfo).get("password"))
    return OwnedSubscription(
        subscription.name,
        subscription.owner,
        subscription.owner_is_superuser,
        subscription.run_as_owner,
        has_password,
        subscription.trusted_owners,
    )


async def _owned_table(connection: Connection, schema_name: str, name: str, *, has_schema: bool) -> OwnedTable | None:
    row = await connection.fetchrow(_TABLE, schema_name, name)
    if row is None:
        return None
    owner, is_superuser, oid, everybody, is_sequence = row
    has_code = has_schema and not is_sequence
    code_of = [code for (code,) in await connection.fetch(_CODE_OF, oid)] if has_code else []
    return OwnedTable(schema_name, name, owner, is_superuser, everybody, tuple(code_of), is_sequence)


async def read_publisher_roles(
    session: Session, facts: PublisherFacts, published: Sequence[tuple[str, str]]
) -> PublisherRoles:
    """Collect the facts about the publisher. `published` are the published tables, and sequences to synchronize."""
    ((is_superuser,),) = await session.rows(_IS_SUPERUSER)
    role = PUBLISHER if is_superuser == "t" else facts.role
    rows = await session.rows(_PUBLISHER.format(role=literal(role)))
    with parsing("its roles"):
        ((database, managed, exists, may_login, everybody_connects),) = rows
    access: dict[tuple[str, str], PublishedTableAccess] = {}
    for schema_name, name in published:
        rows = await session.rows(_PUBLISHED.format(schema=literal(schema_name), name=literal(name)))
        with parsing("its tables"):
            for schema, table, everybody, security, sequence in rows:
                assert schema is not None
                assert table is not None
                access_of_table = PublishedTableAccess(
                    schema, table, everybody == "t", security == "t", sequence == "t"
                )
                access[schema, table] = access_of_table
    return PublisherRoles(
        version_text=facts.version_text,
        database=database or "",
        role=role,
        role_exists=exists == "t",
        role_may_login=may_login == "t",
        replication_role=managed,
        everybody_connects=everybody_connects == "t",
        tables=tuple(access.values()),
    )
