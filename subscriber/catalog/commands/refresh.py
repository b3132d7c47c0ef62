"""The tables of a subscription: the list of the publications, and the changes of added and removed tables.

Source: fetch_table_list() and AlterSubscription_refresh() in src/backend/commands/subscriptioncmds.c.
"""

from __future__ import annotations

from collections.abc import Sequence

import asyncpg

from subscriber.apply.batch.eligibility import FIRST_NORMAL_OID
from subscriber.apply.hooks.config import Hooks
from subscriber.apply.table_states import TableState
from subscriber.catalog import hooked_tables, identity, origins, table_names
from subscriber.catalog.application_owner import application_owner
from subscriber.catalog.commands import (
    dead_tuples,
    ownership,
    publisher_connection,
    refresh_sequences,
    worker_shutdown,
)
from subscriber.catalog.commands.publisher_connection import Notice
from subscriber.catalog.store import progress_records
from subscriber.catalog.store.subscription_rel import insert_relations, load_stored_relations, remove_relation
from subscriber.catalog.store.workers import remove_worker
from subscriber.display import sql_identifier, table_dump
from subscriber.errors import StatementError
from subscriber.failpoints import Point, reached
from subscriber.names import table_sync_origin, table_sync_slot
from subscriber.publisher.own_schema import is_own_name
from subscriber.remedy import Remedy
from subscriber.server_version import Wording
from subscriber.sqlstate import (
    DUPLICATE_TABLE,
    INSUFFICIENT_PRIVILEGE,
    INVALID_SCHEMA_NAME,
    UNDEFINED_TABLE,
    WRONG_OBJECT_TYPE,
)
from subscriber.subscription import Subscription, TableCopy

LOCAL_RELATIONS = """
SELECT w.nspname, w.relname, n.oid IS NOT NULL AS has_schema, c.oid AS relid, c.relkind::text AS relkind,
       coalesce(pg_catalog.has_schema_privilege(n.oid, 'USAGE'), true) AS may_use
  FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS w (nspname, relname, number)
  LEFT JOIN pg_catalog.pg_namespace n ON n.nspname = w.nspname
  LEFT JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = w.relname
 ORDER BY w.number
"""
# Tables of extensions that are not empty. CREATE EXTENSION has filled them on the publisher, too.
FILLED_BY_EXTENSION = """
WITH members AS MATERIALIZED (  -- the size of a table waits for its lock
    SELECT c.oid FROM pg_catalog.pg_class c
     WHERE c.oid = ANY ($1::bigint[]::oid[]) AND c.relkind = 'r'
       AND EXISTS (SELECT FROM pg_catalog.pg_depend x WHERE x.classid = 'pg_catalog.pg_class'::pg_catalog.regclass
                      AND x.objid = c.oid AND x.deptype = 'e'))
SELECT m.oid::bigint AS relid FROM members m WHERE pg_catalog.pg_relation_size(m.oid) > 0
"""
# The words of errdetail_relkind_not_supported() in src/backend/catalog/pg_class.c
RELKINDS = {
    "i": "indexes",
    "I": "partitioned indexes",
    "S": "sequences",
    "t": "TOAST tables",
    "v": "views",
    "m": "materialized views",
    "c": "composite types",
    "f": "foreign tables",
}


async def local_relids(connection: asyncpg.Connection, tables: list[tuple[str, str]]) -> list[int]:
    """Return the OIDs of the target's tables with these (schema, name), in their order.

    Raises StatementError for the first that is missing or is not an ordinary table. The publisher chooses the names,
    and rows in a system catalog, or in a table of this program, would be roles, functions and subscriptions.
    """
    rows = await connection.fetch(LOCAL_RELATIONS, [schema for schema, _ in tables], [name for _, name in tables])
    for row in rows:
        schema, name = row["nspname"], row["relname"]
        if not row["has_schema"]:
            raise StatementError(
                f'schema "{schema}" does not exist',
                hint=await _missing(connection, schema, name),
                sqlstate=INVALID_SCHEMA_NAME,
            )
        if not row["may_use"]:
            user = sql_identifier(await connection.fetchval("SELECT current_user"))
            raise StatementError(
                f"permission denied for schema {schema}",
                hint=Remedy("on the target", f"GRANT USAGE ON SCHEMA {sql_identifier(schema)} TO {user};"),
                sqlstate=INSUFFICIENT_PRIVILEGE,
            )
        if row["relid"] is None:
            raise StatementError(
                f'relation "{schema}.{name}" does not exist',
                hint=await _missing(connection, schema, name),
                sqlstate=UNDEFINED_TABLE,
            )
        kind = None if row["relkind"] in ("r", "p") else RELKINDS.get(row["relkind"], "this")
        if row["relid"] < FIRST_NORMAL_OID or is_own_name(schema, name):
            kind = "system tables"
        if kind is not None:
            raise StatementError(
                f'cannot use relation "{schema}.{name}" as logical replication target',
                detail=f"This operation is not supported for {kind}.",
                sqlstate=WRONG_OBJECT_TYPE,
            )
    return [row["relid"] for row in rows]


async def _missing(connection: asyncpg.Connection, schema: str, name: str) -> Remedy:
    owner = await application_owner(connection, schema)
    advice = "the table is published. On the target it is missing; to create it there"
    if await connection.fetchval("SELECT current_setting('is_superuser')::bool"):
        return Remedy(advice, table_dump(schema, name, owner))
    advice += ", with connection strings of administrators in SOURCE and TARGET"
    return Remedy(advice, table_dump(schema, name, owner, own_dsns=False))


async def add_tables(
    connection: asyncpg.Connection,
    subid: int,
    published: Sequence[tuple[str, str]],
    *,
    copy_data: TableCopy | None,
    hooks: Hooks | None = None,
) -> list[int]:
    """Make published tables part of the subscription; those that are already stay as they are.

    Args:
        connection: a connection to the target.
        subid: OID of the subscription.
        published: schema and name of the publications' tables.
        copy_data: the way in which new tables are synchronized. None: they are ready.
        hooks: may have their rows go to tables of other names.

    Returns:
        The OIDs of all the publications' tables on the target.
    """
    known = {source: relid for relid, source in (await hooked_tables.sources(connection, subid)).items()}
    new = [table for table in published if table not in known]
    relids = await local_relids(connection, [_target(table, hooks) for table in new])
    _require_distinct(new, relids, known)
    state = TableState.INIT if copy_data else TableState.READY
    # A table that was part of the subscription before has rows.
    filled = set(await table_names.load_former(connection, subid))
    filled |= {row["relid"] for row in await connection.fetch(FILLED_BY_EXTENSION, relids)}
    compared = [relid for relid in relids if relid in filled]
    copied = [relid for relid in relids if relid not in filled]
    await insert_relations(connection, subid, copied, state, copy_data or TableCopy.COPY)
    await insert_relations(connection, subid, compared, state, TableCopy.COMPARE)
    for table, relid in zip(new, relids, strict=True):
        if hooks is not None and hooks.find(*table) is not None:
            await hooked_tables.set_source(connection, subid, relid, table)
    return relids + [known[table] for table in published if table in known]


def _target(table: tuple[str, str], hooks: Hooks | None) -> tuple[str, str]:
    """Return schema and name of the table on the target that gets the rows of a published table."""
    return table if hooks is None else hooks.target(*table)


def _require_distinct(tables: list[tuple[str, str]], relids: list[int], known: dict[tuple[str, str], int]) -> None:
    taken = {relid: source for source, relid in known.items()}
    for table, relid in zip(tables, relids, strict=True):
        if relid in taken:
            raise StatementError(
                f'hooks send tables "{".".join(taken[relid])}" and "{".".join(table)}" to one table of the target',
                sqlstate=DUPLICATE_TABLE,
            )
        taken[relid] = table


async def refresh(
    connection: asyncpg.Connection,
    subscription: Subscription,
    publications: tuple[str, ...],
    notice: Notice,
    *,
    copy_data: TableCopy | None,
    validate: tuple[str, ...],
    hooks: Hooks | None = None,
) -> None:
    """Make the subscription's tables those of `publications`, in the connection's transaction.

    A table that was dropped and created again is a new one. One that another table has replaced is not, nor is one that
    both sides have renamed. Workers commit no change of a removed table when the statement has ended.

    `validate` are publications to warn of if the publisher has none of that name. Slots are dropped last of all: no
    rollback brings them back.
    """
    subid = subscription.oid
    password = subscription.must_use_password
    async with publisher_connection.connect_to_publisher(
        connection, subscription.name, subscription.conninfo, password=password
    ) as publisher:
        if validate:
            await publisher_connection.warn_of_missing_publications(publisher, validate, notice)
        published = await publisher.tables(publications)
        names = [_target(table, hooks) for table in published]
        await table_names.store_names(connection, subscription, names)
        await table_names.follow(connection, subscription, names)
        known = await load_stored_relations(connection, subid)
        lost = {table.relid for table in await table_names.load_lost(connection, subid)}
        removed = [row for row in known if row["relid"] in lost]
        begun = [row for row in removed if await _remove_table(connection, subid, row["relid"], row["state"])]
        await publisher_connection.warn_of_other_origins(
            publisher,
            subscription.name,
            publications,
            notice,
            origin=subscription.origin,
            copy_data=copy_data is not None,
            retain_dead_tuples=subscription.retain_dead_tuples,
            wording=Wording.of(connection.get_server_version().major),
            known=[(row["nspname"], row["relname"]) for row in known],
        )
        wanted = set(await add_tables(connection, subid, published, copy_data=copy_data, hooks=hooks))
        begun += [
            row
            for row in known
            if row["relid"] not in wanted | lost and await _remove_table(connection, subid, row["relid"], row["state"])
        ]
        await refresh_sequences.refresh(
            connection, subscription, publisher, publications, notice, copy_data=copy_data is not None
        )
        await dead_tuples.set_triggers(connection, subid, notice)
        await ownership.check_rules(connection, subid, notice, copy_data=copy_data)
        sync_id = await identity.sync_id(connection)
        for row in begun:
            slot = table_sync_slot(subid, row["relid"], sync_id)
            await publisher_connection.drop_slot(publisher, slot, notice, missing_ok=True)


async def _remove_table(connection: asyncpg.Connection, subid: int, relid: int, state: str) -> bool:
    """Take a table out of the subscription; true if its synchronization may have left a slot behind."""
    if state is not TableState.READY:
        # The state may still move until the worker is gone, so it is read again below.
        await worker_shutdown.end_workers(connection, subid, relid)
    state = await remove_relation(connection, subid, relid) or state
    await reached(Point.TABLE_REMOVED)
    await progress_records.remove(connection, subid, relid)
    await remove_worker(connection, subid, relid)
    if state is TableState.READY:
        return False
    await origins.drop_origin(connection, table_sync_origin(subid, relid), missing_ok=True)
    return True
