"""The two subscriptions of a move: the one that copies the database, and the one of the way back.

A subscription is *stopped* while the server that has it is serving. It is disabled then, and has no slot. To start it,
a slot is created on the following server, and the progress record gets the slot's position. The two servers are equal
before that position, apart from changes that the serving server has and the other one still receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import anyio
import asyncpg

from subscriber import server_features as features
from subscriber.catalog.commands import publisher_connection, worker_shutdown
from subscriber.catalog.commands.execute import execute
from subscriber.catalog.store import progress_records
from subscriber.catalog.store.subscription_rel import finish_relations, load_mapped_relations, load_relation_states
from subscriber.catalog.store.subscriptions import disable_subscription, enable_subscription, forget_publisher, set_slot
from subscriber.catalog.store.workers import APPLY_WORKER
from subscriber.display import sql_identifier, sql_name
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.migration import record
from subscriber.migration.plan import Standing
from subscriber.migration.preflight.rules import PUBLICATION_EXISTS
from subscriber.migration.record import MoveFacts, StoppedSubscription
from subscriber.migration.server import MoveServer
from subscriber.quoting import identifier, literal, qualified
from subscriber.sqlstate import OBJECT_NOT_IN_PREREQUISITE_STATE
from subscriber.subscription import Subscription

POLL = 0.05  # seconds
STOP_GRACE = 1.0  # seconds for workers to stop before their sessions are ended

# Tables, and whether their changes can be published.
TABLES = """
SELECT c.oid::bigint AS relid, n.nspname::text AS schema, c.relname::text AS name, c.relkind = 'p' AS partitioned,
       c.relreplident = 'f' OR EXISTS (SELECT FROM pg_catalog.pg_index i WHERE i.indrelid = c.oid AND i.indisvalid
           AND CASE c.relreplident WHEN 'i' THEN i.indisreplident WHEN 'd' THEN i.indisprimary ELSE false END)
       AS identified
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.oid = ANY ($1::bigint[]::oid[]) ORDER BY 2, 3
"""
# Tables that have rows of their own: those of $1, and the partitions of the partitioned ones. No table is locked.
LEAVES = """
WITH RECURSIVE tree AS (
    SELECT given.relid::oid AS relid FROM pg_catalog.unnest($1::bigint[]) AS given (relid)
     UNION SELECT i.inhrelid FROM tree JOIN pg_catalog.pg_inherits i ON i.inhparent = tree.relid
                            JOIN pg_catalog.pg_class p ON p.oid = i.inhparent AND p.relkind = 'p')
SELECT n.nspname::text AS schema, c.relname::text AS name
  FROM tree JOIN pg_catalog.pg_class c ON c.oid = tree.relid AND c.relkind <> 'p'
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
"""
# Publications, unlike pg_publication_tables without a lock of their tables.
PUBLICATIONS = """
SELECT p.pubname::text AS name, p.puballtables AS has_all_tables,
       p.pubinsert AND p.pubupdate AND p.pubdelete AND p.pubtruncate AS has_all_changes
  FROM pg_catalog.pg_publication p WHERE p.pubname = ANY ($1::text[]) ORDER BY 1
"""
IN_NAMED_SCHEMAS = """
SELECT c.oid::bigint AS relid FROM pg_catalog.pg_publication_namespace s
  JOIN pg_catalog.pg_publication p ON p.oid = s.pnpubid JOIN pg_catalog.pg_class c ON c.relnamespace = s.pnnspid
 WHERE p.pubname = ANY ($1::text[]) AND c.relkind IN ('r', 'p')
"""
DROP_SLOT = """
SELECT pg_catalog.pg_drop_replication_slot(s.slot_name) FROM pg_catalog.pg_replication_slots s
 WHERE s.slot_name = $1 AND s.database = pg_catalog.current_database() AND s.active_pid IS NULL
"""
HAS_SLOT = """
SELECT EXISTS (SELECT FROM pg_catalog.pg_replication_slots s
                WHERE s.slot_name = $1 AND s.database = pg_catalog.current_database())
"""


def origin_option(publisher: MoveServer) -> str:
    """Return the value of option `origin` for a subscription to that server."""
    return "none" if features.ORIGIN_FILTER.is_in(publisher.version) else "any"


async def publication_statement(publisher: MoveServer, subscription: str, publication: str) -> str | None:
    """Return the statement that publishes the tables of a subscription of that server. None: the publication exists.

    Raises:
        StatementError: an UPDATE of a table would fail as soon as it is published, or tables have other names.
    """
    live = await publisher.subscription(subscription)
    async with publisher.use() as connection:
        relids = [relation.relid for relation in await load_relation_states(connection, live.oid)]
        renamed = await load_mapped_relations(connection, live.oid)
        rows = await connection.fetch(TABLES, relids)
        exists = await connection.fetchval(PUBLICATION_EXISTS, publication)
    mapped = [qualified(row["schema"], row["name"]) for row in rows if row["relid"] in renamed]
    if mapped:
        raise StatementError(
            f'hooks of subscription "{subscription}" change tables or rows',
            detail=f"The way back would need hooks that do the opposite, for: {', '.join(mapped)}.",
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )
    _check_tables(publisher, subscription, rows)
    if exists:
        return None
    tables = ", ".join(qualified(row["schema"], row["name"]) for row in rows)
    root = " WITH (publish_via_partition_root = true)" if any(row["partitioned"] for row in rows) else ""
    return f"CREATE PUBLICATION {identifier(publication)} FOR TABLE {tables}{root}"


async def check_published(publisher: MoveServer, subscription: str, publications: Sequence[str]) -> None:
    """Check that publications of the way back have all changes of a subscription of that server, if they exist.

    Raises:
        StatementError: a table is missing, or some of its rows, columns or changes are. They would not go the way back.
    """
    live, names = await publisher.subscription(subscription), list(publications)
    async with publisher.use() as connection:
        existing = await connection.fetch(PUBLICATIONS, names)
        if not existing:  # they are created with all tables
            return
        entries = await connection.fetch(_named_tables(publisher.version), names)
        whole = [row["relid"] for row in entries if row["is_whole"] and not row["is_excepted"]]
        if features.COLUMN_LISTS.is_in(publisher.version):  # FOR TABLES IN SCHEMA is of the same version
            whole += [row["relid"] for row in await connection.fetch(IN_NAMED_SCHEMAS, names)]
    _check_changes(publisher, existing)
    subscribed = await leaves(publisher, live)
    if any(row["has_all_tables"] for row in existing):
        missing = subscribed & await _leaves(publisher, [row["relid"] for row in entries if row["is_excepted"]])
        mend = [f"ALTER PUBLICATION {sql_identifier(publications[0])} SET ALL TABLES;"]
    else:
        missing = subscribed - await _leaves(publisher, whole)
        parts = [row for row in entries if not row["is_whole"]]
        absent = missing - await _leaves(publisher, [row["relid"] for row in parts])
        mend = [
            f"ALTER PUBLICATION {sql_identifier(entry['publication'])} {verb} TABLE"
            f" {sql_name(entry['schema'], entry['name'])};"
            for entry in parts
            for verb in ("DROP", "ADD")
        ]
        if absent:
            tables = ", ".join(sql_name(*table) for table in sorted(absent))
            mend.append(f"ALTER PUBLICATION {sql_identifier(publications[0])} ADD TABLE {tables};")
    if missing:
        raise StatementError(
            f'publication "{publications[0]}" of the {publisher.side} lacks tables, or rows or columns of them, which'
            " would not go the way back",
            detail=f"Tables: {', '.join(sql_name(*table) for table in sorted(missing))}.",
            hint=f"On the {publisher.side}: {' '.join(mend)}",
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )


def _check_changes(publisher: MoveServer, publications: Sequence[asyncpg.Record]) -> None:
    reduced = [row["name"] for row in publications if not row["has_all_changes"]]
    if reduced:
        every = "publish = 'insert, update, delete, truncate'"
        mend = " ".join(f"ALTER PUBLICATION {sql_identifier(name)} SET ({every});" for name in reduced)
        raise StatementError(
            f'publication "{reduced[0]}" of the {publisher.side} does not publish every kind of change, and the others'
            " would not go the way back",
            hint=f"On the {publisher.side}: {mend}",
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )


def _named_tables(version: int) -> str:
    """Rows: the tables that publications name, and whether with all rows and columns, or as an exception."""
    whole = "r.prqual IS NULL AND r.prattrs IS NULL" if features.COLUMN_LISTS.is_in(version) else "true"
    excepted = "r.prexcept" if features.PUBLICATION_EXCEPTIONS.is_in(version) else "false"
    return (
        "SELECT p.pubname::text AS publication, c.oid::bigint AS relid, n.nspname::text AS schema,"
        f" c.relname::text AS name, {whole} AS is_whole, {excepted} AS is_excepted"
        " FROM pg_catalog.pg_publication_rel r JOIN pg_catalog.pg_publication p ON p.oid = r.prpubid"
        " JOIN pg_catalog.pg_class c ON c.oid = r.prrelid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
        " WHERE p.pubname = ANY ($1::text[]) ORDER BY 1, 3, 4"
    )


async def leaves(server: MoveServer, subscription: Subscription) -> set[tuple[str, str]]:
    """Return the tables of a subscription of that server by name, with partitions instead of partitioned tables."""
    async with server.use() as connection:
        relids = [relation.relid for relation in await load_relation_states(connection, subscription.oid)]
    return await _leaves(server, relids)


async def _leaves(server: MoveServer, relids: Sequence[int]) -> set[tuple[str, str]]:
    async with server.use() as connection:
        return {(row["schema"], row["name"]) for row in await connection.fetch(LEAVES, relids)}


async def refresh(server: MoveServer, statement: str) -> None:
    """Execute a statement that adds tables to a subscription of that server, or removes them."""
    async with server.use() as connection:
        await execute(connection, statement, notice=lambda *_: None)


def _check_tables(publisher: MoveServer, subscription: str, rows: Sequence[asyncpg.Record]) -> None:
    if not rows:
        raise StatementError(f'subscription "{subscription}" has no tables', sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE)
    unidentified = [qualified(row["schema"], row["name"]) for row in rows if not row["identified"]]
    if unidentified:
        raise StatementError(
            f"tables of the {publisher.side} have no replica identity, and the way back could not replicate them",
            detail=f"Tables: {', '.join(unidentified)}.",
            hint=" ".join(f"ALTER TABLE {name} REPLICA IDENTITY FULL;" for name in unidentified),
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )


def create_statement(name: str, publisher: MoveServer, connection: str, trusted_owners: Sequence[str]) -> str:
    """Return the statement that create() executes. `connection`: a literal."""
    options = f"copy_data = false, origin = {origin_option(publisher)}"
    if trusted_owners:
        options += f", trusted_owners = {literal(', '.join(map(identifier, trusted_owners)))}"
    return (
        f"CREATE SUBSCRIPTION {identifier(name)} CONNECTION {connection} PUBLICATION {identifier(name)}"
        f" WITH ({options})"
    )


def alter_statement(subscription: Subscription, change: str) -> str:
    """Return the statement that changes a subscription."""
    return f"ALTER SUBSCRIPTION {identifier(subscription.name)} {change}"


def drop_slot_statement(slot: str) -> str:
    """Return the statement that drops a slot."""
    return f"SELECT pg_catalog.pg_drop_replication_slot({literal(slot)})"


async def create(
    server: MoveServer, name: str, publisher: MoveServer, conninfo: str, trusted_owners: Sequence[str]
) -> None:
    """Create a subscription on a server, with a slot at the present position of the publisher."""
    statement = create_statement(name, publisher, literal(conninfo), trusted_owners)
    async with server.use() as connection:
        await execute(connection, statement, notice=lambda *_: None)


async def start(
    server: MoveServer, subscription: Subscription, publisher: MoveServer, slot: str, standing: Standing
) -> None:
    """Start a stopped subscription with a new slot at the present position of the publisher.

    Killed before the end: the slot exists and the subscription is stopped. The next call replaces the slot.
    """
    async with server.use() as connection:
        async with publisher_connection.connect_to_publisher(
            connection, subscription.name, subscription.conninfo, password=subscription.must_use_password
        ) as walsender:
            await walsender.drop_slot(slot, missing_ok=True, wait=True)
            created = await walsender.create_slot(slot, snapshot="nothing", failover=subscription.failover)
        async with connection.transaction():
            subid = subscription.oid
            await set_slot(connection, subid, slot, origin_option(publisher))
            await forget_publisher(connection, subid)
            await progress_records.save(connection, subid, APPLY_WORKER, created.consistent_point)
            await progress_records.save_confirmed(connection, subid, None)
            await finish_relations(connection, subid, created.consistent_point)
            await record.save(connection, server.migration, server.side, standing, _started)
            await enable_subscription(connection, subid)


def _started(facts: MoveFacts) -> MoveFacts:
    return replace(facts, stopped=None)


async def disable(server: MoveServer, subscription: Subscription, at: Lsn, standing: Standing) -> None:
    """Disable a subscription at a position, and wait until its workers have ended. The slot stays."""
    async with server.use() as connection:
        async with connection.transaction():
            await disable_subscription(connection, subscription.oid)
            stopped = StoppedSubscription(at, subscription.slot_name or subscription.name)
            await record.save(
                connection, server.migration, server.side, standing, lambda facts: replace(facts, stopped=stopped)
            )
        await worker_shutdown.wait_until_gone(connection, subscription.oid, grace=STOP_GRACE)


async def enable(server: MoveServer, subscription: Subscription, standing: Standing) -> None:
    """Enable a subscription that disable() has disabled and that still has its slot."""
    async with server.use() as connection, connection.transaction():
        await enable_subscription(connection, subscription.oid)
        await record.save(connection, server.migration, server.side, standing, _started)


async def give_up_slot(server: MoveServer, subscription: Subscription, publisher: MoveServer) -> None:
    """Drop the slot of a disabled subscription, which would keep the publisher's WAL. The caller limits the time."""
    slot = subscription.slot_name
    if slot is None:
        return
    while True:
        async with publisher.use() as connection:
            await connection.fetch(DROP_SLOT, slot)
            if not await connection.fetchval(HAS_SLOT, slot):
                break
        await anyio.sleep(POLL)  # its walsender has not noticed the end of the worker yet
    async with server.use() as connection:
        await execute(connection, alter_statement(subscription, "SET (slot_name = NONE)"), notice=lambda *_: None)
