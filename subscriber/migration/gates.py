"""The gates of a move: conditions that must hold before applications are kept from writing."""

from __future__ import annotations

from collections.abc import Sequence

import asyncpg

from subscriber.catalog.store import quarantine
from subscriber.catalog.store.subscription_rel import load_relation_states
from subscriber.errors import StatementError
from subscriber.migration.sequences import list_sequences, obstacles
from subscriber.migration.server import MoveServer
from subscriber.migration.sessions import prepared_transactions
from subscriber.quoting import identifier, literal
from subscriber.sqlstate import OBJECT_NOT_IN_PREREQUISITE_STATE
from subscriber.subscription import Subscription

# PostgreSQL's own subscriptions write with session_replication_role = replica, which passes a fence.
NATIVE = """
SELECT s.subname::text AS name FROM pg_catalog.pg_subscription s JOIN pg_catalog.pg_database d ON d.oid = s.subdbid
 WHERE d.datname = pg_catalog.current_database() AND s.subenabled ORDER BY 1
"""
LONG_TRANSACTIONS = """
SELECT a.pid, a.usename::text AS role, a.application_name, extract(epoch FROM now() - a.xact_start)::int AS age
  FROM pg_catalog.pg_stat_activity a
 WHERE a.datname = pg_catalog.current_database() AND a.xact_start < now() - $1::float8 * interval '1 second'
   AND a.backend_type = 'client backend' AND a.application_name NOT LIKE 'subscriber%' ORDER BY a.xact_start
"""
# Rows and columns that a publication leaves out would be missing on the new server.
FILTERED = """
SELECT p.schemaname::text || '.' || p.tablename::text AS name FROM pg_catalog.pg_publication_tables p
 WHERE p.pubname = ANY ($1::text[]) AND (p.rowfilter IS NOT NULL OR pg_catalog.array_length(p.attnames, 1) < (
           SELECT count(*) FROM pg_catalog.pg_attribute a
             JOIN pg_catalog.pg_class c ON c.oid = a.attrelid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
            WHERE n.nspname = p.schemaname AND c.relname = p.tablename AND a.attnum > 0 AND NOT a.attisdropped
              AND a.attgenerated = '')) ORDER BY 1
"""
FILTERS_SINCE = 150000
PUBLISHED = """
SELECT DISTINCT p.schemaname::text AS schema, p.tablename::text AS name FROM pg_catalog.pg_publication_tables p
 WHERE p.pubname = ANY ($1::text[]) ORDER BY 1, 2
"""


async def check(serving: MoveServer, following: MoveServer, live: Subscription) -> None:
    """Check the conditions that waiting does not change.

    Args:
        serving: the server that applications write to.
        following: the other one.
        live: its subscription.

    Raises:
        StatementError: the detail has all reasons why applications cannot move, and the hint has a statement for each.
    """
    problems: list[tuple[str, str]] = []
    async with following.use() as connection:
        if not live.enabled:
            problems.append(
                (
                    f'Subscription "{live.name}" is disabled.',
                    f"On the {following.side}: ALTER SUBSCRIPTION {identifier(live.name)} ENABLE;",
                )
            )
        relations = await load_relation_states(connection, live.oid)
        unready = [f"{relation.namespace}.{relation.name}" for relation in relations if relation.state != "r"]
        if unready:
            problems.append(
                (
                    f"Tables are not copied yet, or not handed over: {_few(unready)}.",
                    f"Wait, see: subscriber status {live.name}",
                )
            )
        if parked := await quarantine.count(connection, live.oid):
            problems.append(
                (
                    f"Transactions in quarantine: {parked}.",
                    f"Apply or discard them: subscriber quarantine list {live.name}",
                )
            )
        problems += await _check_native(connection, following)
        there = await list_sequences(connection)
    async with serving.use() as connection:
        problems += await _check_native(connection, serving)
        for gid in await prepared_transactions(connection):
            problems.append(
                (
                    f"Transaction {literal(gid)} is prepared on the {serving.side}.",
                    f"COMMIT PREPARED {literal(gid)}; or ROLLBACK PREPARED {literal(gid)};",
                )
            )
        problems += [
            (problem, "Grant the privilege, or create the sequence.")
            for problem in obstacles(await list_sequences(connection), there)
        ]
        published = [tuple(row) for row in await connection.fetch(PUBLISHED, list(live.publications))]
        if serving.version >= FILTERS_SINCE:
            filtered = [row["name"] for row in await connection.fetch(FILTERED, list(live.publications))]
            if filtered:
                problems.append(
                    (
                        f"The publication leaves out rows or columns of: {_few(filtered)}.",
                        "Publish these tables without a row filter and a column list.",
                    )
                )
    subscribed = {(relation.namespace, relation.name) for relation in relations}
    missing = [f"{schema}.{name}" for schema, name in published if (schema, name) not in subscribed]
    if missing:
        problems.append(
            (
                f'Published tables that subscription "{live.name}" does not have: {_few(missing)}.',
                f"On the {following.side}: ALTER SUBSCRIPTION {identifier(live.name)} REFRESH PUBLICATION;",
            )
        )
    if problems:
        raise StatementError(
            "applications cannot move yet",
            detail="\n".join(problem for problem, _ in problems),
            hint="\n".join(dict.fromkeys(remedy for _, remedy in problems)),
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )


async def _check_native(connection: asyncpg.Connection, server: MoveServer) -> list[tuple[str, str]]:
    if not await connection.fetchval("SELECT pg_catalog.has_table_privilege('pg_catalog.pg_subscription', 'SELECT')"):
        return []
    return [
        (
            f'PostgreSQL\'s own subscription "{row["name"]}" writes on the {server.side}, in spite of a fence.',
            f"On the {server.side}: ALTER SUBSCRIPTION {identifier(row['name'])} DISABLE;",
        )
        for row in await connection.fetch(NATIVE)
    ]


async def long_transactions(server: MoveServer, seconds: float) -> list[str]:
    """Return descriptions of sessions with a transaction that is older than that. The pause would end them."""
    async with server.use() as connection:
        rows = await connection.fetch(LONG_TRANSACTIONS, seconds)
    return [f'process {row["pid"]} of role "{row["role"]}" for {row["age"]} s' for row in rows]


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown}, and {len(names) - 5} more"
