"""The queries of `subscriber check` on both servers. They change nothing on either server."""

from __future__ import annotations

import json
from collections.abc import Sequence

import asyncpg

from subscriber import quoting
from subscriber import server_features as features
from subscriber.apply.relation_map import ForeignCode
from subscriber.catalog import schema, worker_sessions
from subscriber.catalog.connection import Connection
from subscriber.catalog.store.subscriptions import find_subscription
from subscriber.catalog.store.table_writers import SubscriptionOwnership, load_ownership, load_writers
from subscriber.check.model import (
    AppliedTable,
    ApplyFacts,
    CheckedSourceTable,
    CheckedTargetTable,
    ColumnFacts,
    Facts,
    Finding,
    Level,
    PublicationFacts,
    PublisherFacts,
    SlotFacts,
    SubscriptionOwner,
    TargetFacts,
)
from subscriber.connection.session import Session
from subscriber.connection.settings import READ_NO_VIEW
from subscriber.errors import SubscriberError
from subscriber.publisher.answers import count, parsing
from subscriber.publisher.connection import Publisher
from subscriber.publisher.tables import PublishedTable
from subscriber.subscription import Subscription

_PUBLISHER = """
SELECT current_setting('server_version_num'), current_setting('server_version'), current_setting('wal_level'),
       (SELECT count(*) FROM pg_catalog.pg_replication_slots), current_setting('max_replication_slots'),
       (SELECT count(*) FROM pg_catalog.pg_stat_replication), current_setting('max_wal_senders'), current_user,
       (SELECT r.rolsuper OR r.rolreplication FROM pg_catalog.pg_roles r WHERE r.rolname = current_user),
       current_setting('server_encoding'), pg_catalog.pg_is_in_recovery(), current_setting('max_prepared_transactions'),
       current_setting('effective_wal_level', true)
"""
_SOURCE_COLUMNS = """
SELECT a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod) FROM pg_catalog.pg_attribute a
 WHERE a.attrelid = {relid} AND a.attnum > 0 AND NOT a.attisdropped
"""
_READABLE = """
SELECT pg_catalog.has_table_privilege(c.oid, 'SELECT') AND pg_catalog.has_schema_privilege(c.relnamespace, 'USAGE'),
       pg_catalog.row_security_active(c.oid)
  FROM pg_catalog.pg_class c WHERE c.oid = {relid}
"""
_CLOSED_PARTITIONS = """
SELECT n.nspname, c.relname
  FROM pg_catalog.pg_partition_tree({relid}) p
  JOIN pg_catalog.pg_class c ON c.oid = p.relid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE p.isleaf AND p.relid <> {relid}
   AND NOT (pg_catalog.has_table_privilege(c.oid, 'SELECT') AND pg_catalog.has_schema_privilege(n.oid, 'USAGE'))
 ORDER BY 1, 2
"""
_TARGET = """
SELECT current_setting('server_version_num')::int, current_setting('server_version'), current_user::text,
       current_setting('is_superuser')::bool, current_setting('server_encoding'), pg_catalog.pg_is_in_recovery(),
       coalesce(current_setting('max_active_replication_origins', true), current_setting('max_replication_slots'))::int,
       current_setting('max_active_replication_origins', true) IS NOT NULL, current_database()::text,
       current_setting('max_prepared_transactions')::int
"""
_MAY_CREATE = """
SELECT pg_catalog.has_database_privilege(current_database(), 'CREATE')
   AND pg_catalog.pg_has_role(current_user, 'pg_create_subscription', 'USAGE')
"""
# The owner of schema "subscriber", or the role that would create it now.
_OWNED_BY_SUPERUSER = """
SELECT coalesce((SELECT r.rolsuper FROM pg_catalog.pg_namespace n JOIN pg_catalog.pg_roles r ON r.oid = n.nspowner
                  WHERE n.nspname = 'subscriber'), current_setting('is_superuser')::bool)
"""
_MAY_LEAD = """
SELECT pg_catalog.has_function_privilege(p.oid, 'EXECUTE') FROM pg_catalog.pg_proc p
 WHERE p.pronamespace = 'subscriber'::regnamespace AND p.proname = 'lead'
"""
_MAY_SET = "SELECT pg_catalog.has_parameter_privilege('session_replication_role', 'SET')"
_SESSION = "SELECT session_user::text, current_setting('is_superuser')::bool"
# $3 is the owner of the subscription if it applies the changes, and $4 the owner of the subscription. NULL: none.
_APPLIED_TABLE = """
SELECT c.oid, r.rolname::text, a.rolname::text, pg_catalog.pg_has_role(session_user, a.oid, '{membership}'),
       $4::text IS NULL OR $3::text IS NOT NULL OR pg_catalog.pg_has_role($4::text::name, r.oid, '{membership}'),
       ARRAY(SELECT p FROM pg_catalog.unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE']) p
              WHERE NOT pg_catalog.has_table_privilege(a.oid, c.oid, p)),
       pg_catalog.has_schema_privilege(a.oid, n.oid, 'USAGE')
       OR pg_catalog.has_schema_privilege(session_user, n.oid, 'USAGE')
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_catalog.pg_roles r ON r.oid = c.relowner
  JOIN pg_catalog.pg_roles a ON a.rolname = coalesce($3::text::name, r.rolname)
 WHERE n.nspname = $1 AND c.relname = $2
"""
_INHERITED = "SELECT pg_catalog.pg_has_role($1::text::name, 'USAGE')"
_SAFETY = "SELECT subscriber.table_safety($1::oid, $2::text[]::name[], $3, $4::text::name)::text"
_RELID = """
SELECT c.oid FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = $1 AND c.relname = $2
"""
_TARGET_TABLE = """
SELECT c.relkind::text, r.rolname::text, pg_catalog.pg_has_role(c.relowner, '{membership}'),
       c.relrowsecurity AND c.relforcerowsecurity AND NOT (r.rolsuper OR r.rolbypassrls),
       pg_catalog.has_table_privilege(c.oid, 'SELECT'), pg_catalog.has_schema_privilege(n.oid, 'USAGE'),
       (SELECT pg_catalog.json_agg(pg_catalog.json_build_array(a.attname,
                 pg_catalog.format_type(a.atttypid, a.atttypmod), {generated},
                 a.attnotnull AND NOT a.atthasdef AND a.attidentity = '') ORDER BY a.attnum)
          FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped)::text,
       (SELECT pg_catalog.json_agg(a.attname)
          FROM (SELECT i.indkey::int2[], i.indnkeyatts FROM pg_catalog.pg_index i
                 WHERE i.indrelid = c.oid AND i.indisvalid AND i.indimmediate AND (i.indisreplident OR i.indisprimary)
                 ORDER BY i.indisreplident DESC LIMIT 1) i (columns, number)
          JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum = ANY (i.columns[0:i.number - 1]))::text,
       EXISTS (SELECT FROM pg_catalog.pg_index i WHERE i.indrelid = c.oid AND i.indisprimary AND NOT i.indimmediate)
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_catalog.pg_roles r ON r.oid = c.relowner
 WHERE n.nspname = $1 AND c.relname = $2
"""


async def read_publisher(session: Session) -> PublisherFacts:
    rows = await session.rows(_PUBLISHER)
    with parsing("its settings"):
        (row,) = rows
        version, text, level, slots, max_slots, senders, max_senders, role, may, encoding, *more = row
        recovery, prepared, effective = more
        return PublisherFacts(
            version=count(version),
            version_text=(text or "").split()[0],
            wal_level=level or "",
            slots=count(slots),
            max_slots=count(max_slots),
            senders=count(senders),
            max_senders=count(max_senders),
            role=role or "",
            may_replicate=may == "t",
            encoding=encoding or "",
            in_recovery=recovery == "t",
            max_prepared=count(prepared),
            effective_wal_level=effective,
        )


async def read_publications(session: Session, names: Sequence[str]) -> list[PublicationFacts]:
    truncates = "pubtruncate" if features.PUBLISHED_TRUNCATE.is_in(session.server_version) else "false"
    rows = await session.rows(
        f"SELECT pubname, puballtables, pubinsert, pubupdate, pubdelete, {truncates} FROM pg_catalog.pg_publication"
        f" WHERE pubname IN ({quoting.literals(names)})"
    )
    with parsing("publications"):
        known = {
            name: PublicationFacts(
                name,
                exists=True,
                all_tables=all_tables == "t",
                inserts=inserts == "t",
                updates=updates == "t",
                deletes=deletes == "t",
                truncates=truncated == "t",
            )
            for name, all_tables, inserts, updates, deletes, truncated in rows
            if name is not None
        }
    others = tuple(await Publisher(session).publication_names()) if len(known) < len(names) else ()
    return [known.get(name, PublicationFacts(name, exists=False, others=others)) for name in names]


async def read_slot(publisher: Publisher, subscription: Subscription) -> SlotFacts | None:
    """Return the state of the subscription's slot, or None if the subscription has no slot."""
    if subscription.slot_name is None:
        return None
    slot = await publisher.slot(subscription.slot_name)
    if slot is None:
        return SlotFacts(subscription.slot_name, exists=False)
    return SlotFacts(slot.name, True, slot.plugin, slot.is_lost, slot.in_this_database, two_phase=slot.two_phase)


async def read_source_tables(
    publisher: Publisher, publications: Sequence[str], facts: Facts
) -> list[CheckedSourceTable]:
    """Return the published tables. A table that cannot be read becomes a failure in `facts`."""
    tables = []
    for schema_name, name in await publisher.tables(publications):
        try:
            table = await publisher.table(schema_name, name, publications)
            tables.append(await _source_table(publisher.session, table))
        except SubscriberError as error:
            facts.failures.append(Finding(Level.ERROR, f"table {schema_name}.{name}", error.message, error.remedy))
    return tables


async def _source_table(session: Session, table: PublishedTable) -> CheckedSourceTable:
    with parsing(f'table "{table.schema}.{table.name}"'):
        rows = await session.rows(_SOURCE_COLUMNS.format(relid=table.relid))
        types = {name or "": kind or "" for name, kind in rows}
        ((readable, row_security),) = await session.rows(_READABLE.format(relid=table.relid))
        closed = await session.rows(_CLOSED_PARTITIONS.format(relid=table.relid)) if table.relkind == "p" else []
    return CheckedSourceTable(
        schema=table.schema,
        name=table.name,
        replica_identity=table.replica_identity,
        partitioned=table.relkind == "p",
        columns=tuple(ColumnFacts(c.name, types.get(c.name, "")) for c in table.columns),
        key=tuple(c.name for c in table.columns if c.is_key),
        readable=readable == "t",
        row_security=row_security == "t",
        closed_partitions=tuple((schema or "", name or "") for schema, name in closed),
    )


async def read_target(connection: Connection) -> TargetFacts:
    row = await connection.fetchrow(_TARGET)
    assert row is not None
    version, text, role, is_superuser, encoding, recovery, max_origins, own_setting, database, max_prepared = row
    may_create = may_set = is_superuser
    may_create_schema = await connection.fetchval(schema.MAY_UPGRADE)
    if not is_superuser:
        has_role = features.CREATE_SUBSCRIPTION_ROLE.is_in(version)
        may_create = await connection.fetchval(_MAY_CREATE) if has_role else may_create_schema
    if not is_superuser and features.GRANT_SET.is_in(version):
        may_set = await connection.fetchval(_MAY_SET)
    return TargetFacts(
        version=version,
        version_text=text.split()[0],
        role=role,
        is_superuser=is_superuser,
        encoding=encoding,
        in_recovery=recovery,
        has_schema=await schema.current_revision(connection) is not None,
        has_foreign_schema=await connection.fetchrow(schema.FOREIGN) is not None,
        may_create_schema=may_create_schema,
        origins_by_superuser=await connection.fetchval(_OWNED_BY_SUPERUSER),
        may_create_subscription=may_create,
        may_set_replication_role=may_set,
        origins=await connection.fetchval("SELECT count(*) FROM pg_catalog.pg_replication_origin"),
        max_origins=max_origins,
        origins_setting="max_active_replication_origins" if own_setting else "max_replication_slots",
        database=database,
        max_prepared=max_prepared,
        is_unserved=await _is_unserved(connection),
    )


async def _is_unserved(connection: Connection) -> bool:
    """Return True if no launcher runs, and the role may not run one."""
    if await schema.current_revision(connection) is None or await connection.fetchval(_MAY_LEAD) is not False:
        return False
    try:
        return await worker_sessions.leader(connection) is None
    except asyncpg.InsufficientPrivilegeError:
        return True


async def read_target_table(
    connection: Connection,
    source: CheckedSourceTable,
    *,
    rows: bool,
    ownership: SubscriptionOwnership | None = None,
    has_schema: bool = False,
) -> CheckedTargetTable | None:
    """Return the target table of the same name, or None if there is none.

    Args:
        connection: a connection to the target.
        source: the published table.
        rows: also check whether the target's table has rows.
        ownership: which rows of the tables belong to the subscription. None: there is no subscription yet.
        has_schema: there are subscriptions, of which some may write to the table.
    """
    major = connection.get_server_version().major
    query = _TARGET_TABLE.format(
        membership=features.set_role_privilege(major),
        generated="a.attgenerated <> ''" if features.GENERATED_COLUMNS.is_in_major(major) else "false",
    )
    row = await connection.fetchrow(query, source.schema, source.name)
    if row is None:
        return None
    relkind, owner, may_act, row_security, readable, uses_schema, columns, key, deferrable = row
    has_rows = None
    if rows and readable and uses_schema and relkind in ("r", "p"):
        name = quoting.qualified(source.schema, source.name)
        async with connection.transaction():
            await connection.execute(READ_NO_VIEW)
            has_rows = await connection.fetchval(f"SELECT EXISTS (SELECT FROM {name})")
    return CheckedTargetTable(
        relkind=relkind,
        columns=tuple(ColumnFacts(*column) for column in json.loads(columns or "[]")),
        key=tuple(json.loads(key or "[]")),
        owner=owner,
        may_act_as_owner=may_act,
        row_security=row_security,
        has_rows=has_rows,
        deferrable=deferrable,
        uses_schema=uses_schema,
        writers=await _read_writers(connection, source, ownership, has_schema=has_schema),
    )


async def read_ownership(connection: Connection, subscription: Subscription) -> SubscriptionOwnership | None:
    """Return which rows belong to a subscription. None: the role may not know, or the catalog is older."""
    if not await schema.is_current(connection):
        return None
    try:
        return await load_ownership(connection, subscription)
    except asyncpg.InsufficientPrivilegeError:
        return None


async def _read_writers(
    connection: Connection, source: CheckedSourceTable, ownership: SubscriptionOwnership | None, *, has_schema: bool
) -> tuple[str, ...]:
    """Return the other subscriptions that may own rows of a subscription."""
    relid = await connection.fetchval(_RELID, source.schema, source.name)
    if ownership is not None:
        return tuple(writer.name for writer in ownership.of(relid, (source.schema, source.name)).doubtful)
    if not has_schema:
        return ()
    return tuple(await load_writers(connection, relid))


async def read_apply(
    connection: Connection,
    sources: Sequence[CheckedSourceTable],
    subscription: Subscription | None,
    *,
    origins_by_superuser: bool,
) -> ApplyFacts | None:
    """Query the session that applies changes about its role and the tables.

    Args:
        connection: a session of that role.
        sources: the published tables.
        subscription: None: it does not exist yet.
        origins_by_superuser: functions of schema "subscriber" set the replica role.

    Returns:
        None if schema "subscriber" does not exist, because its functions find foreign code.
    """
    if not await schema.is_current(connection):
        return None
    major = connection.get_server_version().major
    row = await connection.fetchrow(_SESSION)
    assert row is not None
    role, is_superuser = row
    may_set = features.GRANT_SET.is_in_major(major) and await connection.fetchval(_MAY_SET)
    is_replica = is_superuser or origins_by_superuser or may_set
    acting = subscription.owner if subscription is not None and subscription.run_as_owner else None
    trusted = list(subscription.trusted_owners) if subscription is not None else []
    query = _APPLIED_TABLE.format(membership=features.set_role_privilege(major))
    tables = []
    for source in sources:
        owner_of_subscription = None if subscription is None else subscription.owner
        row = await connection.fetchrow(query, source.schema, source.name, acting, owner_of_subscription)
        if row is None:
            continue
        oid, owner, acts_as, may_act, owner_may_act, lacks, uses_schema = row
        try:
            safety = json.loads(await connection.fetchval(_SAFETY, oid, trusted, is_replica, acting))
        except asyncpg.InsufficientPrivilegeError:
            return ApplyFacts(role, is_superuser, is_admitted=False)
        sent = {column.name for column in source.columns}
        code = [ForeignCode(*fields) for fields in safety["foreign"] or []]
        runs = tuple(default for default in code if default.default_of not in sent)
        tables.append(
            AppliedTable(
                source.schema, source.name, owner, acts_as, may_act, runs, owner_may_act, tuple(lacks), uses_schema
            )
        )
    return ApplyFacts(role, is_superuser, is_admitted=True, tables=tuple(tables))


async def read_owner(connection: Connection, subscription: Subscription) -> SubscriptionOwner:
    """Return the owner of a subscription, as seen by the role of the connection."""
    inherited = await connection.fetchval(_INHERITED, subscription.owner)
    return SubscriptionOwner(subscription.owner, subscription.owner_is_superuser, inherited)


async def read_subscription(connection: Connection, name: str) -> Subscription | None:
    """Return the subscription of that name. None if it does not exist, or if there is no catalog."""
    if await schema.current_revision(connection) is None:
        return None
    return await find_subscription(connection, name)
