"""The gates of a move: conditions that must hold before applications are kept from writing.

Applications write until the fence closes, while the other gates are waited for. So check_again() looks once more at the
conditions that their writes can end, when no application writes any more and the following server has everything.
"""

from __future__ import annotations

from collections.abc import Sequence

from subscriber import server_features as features
from subscriber.catalog import native_subscription
from subscriber.catalog.store import migrations, quarantine
from subscriber.catalog.store.subscription_rel import load_relation_states
from subscriber.catalog.two_databases import open_both
from subscriber.display import shell_word, sql_identifier, sql_literal, sql_name
from subscriber.errors import StatementError
from subscriber.migration import sessions
from subscriber.migration.diff.schema_diff import schema_diff
from subscriber.migration.preflight import firing_triggers
from subscriber.migration.preflight.model import PreflightFinding, Severity
from subscriber.migration.preflight.rules import UNPUBLISHED
from subscriber.migration.schema.upkeep import populated_views
from subscriber.migration.sequences import list_sequences, obstacles
from subscriber.migration.server import MoveServer
from subscriber.migration.server_session import APPLICATION_NAME
from subscriber.sqlstate import INVALID_PARAMETER_VALUE, OBJECT_NOT_IN_PREREQUISITE_STATE
from subscriber.subscription import Subscription

# Rows and columns that a publication leaves out would be missing on the new server.
FILTERED = """
SELECT p.schemaname::text || '.' || p.tablename::text AS name FROM pg_catalog.pg_publication_tables p
 WHERE p.pubname = ANY ($1::text[]) AND (p.rowfilter IS NOT NULL OR pg_catalog.array_length(p.attnames, 1) < (
           SELECT count(*) FROM pg_catalog.pg_attribute a
             JOIN pg_catalog.pg_class c ON c.oid = a.attrelid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
            WHERE n.nspname = p.schemaname AND c.relname = p.tablename AND a.attnum > 0 AND NOT a.attisdropped
              AND a.attgenerated = '')) ORDER BY 1
"""
UNLOGGED = """
SELECT n.nspname::text || '.' || c.relname::text AS name
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind = 'r' AND c.relpersistence = 'u' AND n.nspname <> 'subscriber' ORDER BY 1
"""
PUBLISHED = """
SELECT DISTINCT p.schemaname::text AS schema, p.tablename::text AS name FROM pg_catalog.pg_publication_tables p
 WHERE p.pubname = ANY ($1::text[]) ORDER BY 1, 2
"""


# Conditions whose waiver leaves nothing undone but what its name says. Of the others, each has a fix.
WAIVABLE = (
    "filter",
    "lag",
    "long_transaction",
    "native_subscription",
    "prepared_transaction",
    "quarantine",
    "trigger",
    "unpublished",
    "verify",
)


def check_waivers(names: Sequence[str]) -> None:
    """Refuse names of conditions that do not exist or cannot be waived.

    Raises:
        StatementError: a name has another kind than those of WAIVABLE.
    """
    for name in names:
        if name.partition(":")[0] not in WAIVABLE:
            raise StatementError(
                f'there is no condition "{name}" to waive',
                hint=f"Waive one of: {', '.join(WAIVABLE)}; or one object of it, as in prepared_transaction:NAME.",
                sqlstate=INVALID_PARAMETER_VALUE,
            )


def is_waived(kind: str, name: str, waived: Sequence[str]) -> bool:
    """Return True if a condition was waived, for all objects or for this one."""
    return kind in waived or f"{kind}:{name}" in waived


async def check(
    serving: MoveServer,
    following: MoveServer,
    live: Subscription,
    waived: Sequence[str] = (),
    verified_within: float | None = None,
    *,
    is_compared: bool = False,
) -> list[str]:
    """Check the conditions that waiting does not change.

    Args:
        serving: the server that applications write to.
        following: the other one.
        live: its subscription.
        waived: names of conditions that need not hold, see WAIVABLE.
        verified_within: seconds within which `subscriber migrate verify` must have found no difference. None: not.
        is_compared: all rows are compared during the pause.

    Returns:
        The names of the conditions that do not hold and are waived.

    Raises:
        StatementError: the detail has all reasons why applications cannot move, and the hint has a statement for each.
    """
    unmet = [
        *await _check_following(following, live),
        *await _check_prepared(serving),
        *await _check_sequences(serving, following),
        *await _check_tables(serving, following, live),
        *await _check_native(following),
        *await _check_native(serving),
    ]
    if verified_within is None and not is_compared:
        unmet += await _check_triggers(following, live)
    if verified_within is not None:
        unmet += await _check_verified(following, live, verified_within)
    _refuse(unmet, waived)
    return sorted({obstacle.name for obstacle in unmet})


async def check_again(serving: MoveServer, following: MoveServer, live: Subscription, waived: Sequence[str]) -> None:
    """Check, behind the closed fence, the conditions that applications could end after check().

    The sequences and prepared transactions of the serving server have steps of their own.

    Args:
        serving: the fenced server.
        following: the other one, which has everything that was committed there.
        live: its subscription.
        waived: names of conditions that need not hold, see WAIVABLE.

    Raises:
        StatementError: see check().
    """
    _refuse(
        [
            *await _check_following(following, live),
            *await _check_tables(serving, following, live),
            *await _check_native(following),
            *await _check_native(serving),
        ],
        waived,
    )


def _refuse(unmet: Sequence[PreflightFinding], waived: Sequence[str]) -> None:
    left = [obstacle for obstacle in unmet if not is_waived(obstacle.kind, obstacle.object, waived)]
    if left:
        raise StatementError(
            "applications cannot move yet",
            detail="\n".join(obstacle.message for obstacle in left),
            hint="\n".join(dict.fromkeys(str(obstacle.fix) for obstacle in left)),
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )


def _finding(kind: str, name: str, message: str, fix: str) -> PreflightFinding:
    return PreflightFinding(
        kind, name, Severity.ERROR, message, "Applications cannot move", fix, is_waivable=kind in WAIVABLE
    )


async def _check_following(following: MoveServer, live: Subscription) -> list[PreflightFinding]:
    unmet = []
    async with following.use() as connection:
        if not live.enabled:
            unmet.append(
                _finding(
                    "subscription",
                    live.name,
                    f'Subscription "{live.name}" is disabled.',
                    f"On the {following.side}: ALTER SUBSCRIPTION {sql_identifier(live.name)} ENABLE;",
                )
            )
        relations = await load_relation_states(connection, live.oid, not_ready=True)
        if unready := [f"{relation.namespace}.{relation.name}" for relation in relations]:
            unmet.append(
                _finding(
                    "table",
                    live.name,
                    f"Tables are not copied yet, or not handed over: {_few(unready)}.",
                    f"Wait, see: subscriber status {shell_word(live.name)}",
                )
            )
        if parked := await quarantine.count(connection, live.oid):
            unmet.append(
                _finding(
                    "quarantine",
                    live.name,
                    f"Transactions in quarantine: {parked}.",
                    f"Apply or discard them: subscriber quarantine list {shell_word(live.name)}",
                )
            )
    return unmet


async def _check_prepared(serving: MoveServer) -> list[PreflightFinding]:
    async with serving.use() as connection:
        return [
            _finding(
                "prepared_transaction",
                gid,
                f"Transaction {sql_literal(gid)} is prepared on the {serving.side}.",
                f"COMMIT PREPARED {sql_literal(gid)}; or ROLLBACK PREPARED {sql_literal(gid)};",
            )
            for gid in await sessions.prepared_transactions(connection)
        ]


async def _check_sequences(serving: MoveServer, following: MoveServer) -> list[PreflightFinding]:
    async with following.use() as connection:
        there = await list_sequences(connection)
    async with serving.use() as connection:
        return [
            _finding("sequence", serving.database, problem, "Grant the privilege, or create the sequence.")
            for problem in obstacles(await list_sequences(connection), there)
        ]


async def _check_tables(serving: MoveServer, following: MoveServer, live: Subscription) -> list[PreflightFinding]:
    async with following.use() as connection:
        relations = await load_relation_states(connection, live.oid)
    subscribed = {(relation.namespace, relation.name) for relation in relations}
    async with serving.use() as connection:
        published = [tuple(row) for row in await connection.fetch(PUBLISHED, list(live.publications))]
        unmet = [
            _finding(
                "unpublished",
                f"{row['schema']}.{row['name']}",
                f"Table {row['schema']}.{row['name']} of the {serving.side} is not published, and would stay behind.",
                f"Create it on the {following.side}. On the {serving.side}: ALTER PUBLICATION"
                f" {sql_identifier(live.publications[0])} ADD TABLE {sql_name(row['schema'], row['name'])};"
                f" Then, on the {following.side}: ALTER SUBSCRIPTION {sql_identifier(live.name)} REFRESH PUBLICATION;",
            )
            for row in await connection.fetch(UNPUBLISHED, list(live.publications))
        ]
        if features.COLUMN_LISTS.is_in(serving.version):
            filtered = [row["name"] for row in await connection.fetch(FILTERED, list(live.publications))]
            unmet += [
                _finding(
                    "filter",
                    name,
                    f"The publication leaves out rows or columns of {name}.",
                    "Publish these tables without a row filter and a column list.",
                )
                for name in filtered
            ]
    if missing := [f"{schema}.{name}" for schema, name in published if (schema, name) not in subscribed]:
        unmet.append(
            _finding(
                "table",
                live.name,
                f'Published tables that subscription "{live.name}" does not have: {_few(missing)}.',
                f"On the {following.side}: ALTER SUBSCRIPTION {sql_identifier(live.name)} REFRESH PUBLICATION;",
            )
        )
    return unmet


async def _check_triggers(following: MoveServer, live: Subscription) -> list[PreflightFinding]:
    """Return the tables whose rows may differ, because their triggers have fired on both servers."""
    async with following.use() as connection:
        if not await firing_triggers.lacks_replica_role(connection, live.oid):
            return []
        relids = [relation.relid for relation in await load_relation_states(connection, live.oid)]
        tables = await firing_triggers.find_firing(connection, relids)
    return [
        _finding(
            "trigger",
            trigger.table,
            f"Triggers or rules of table {trigger.table} fire again on the {following.side}, whose worker cannot set"
            f" session_replication_role: {_few(trigger.names)}.",
            f"Compare the rows: subscriber migrate verify {shell_word(following.migration)}, and then repeat the"
            f" command with --verified-within 3600. Or with --waive {shell_word(f'trigger:{trigger.table}')}",
        )
        for trigger in tables
    ]


async def _check_native(server: MoveServer) -> list[PreflightFinding]:
    """Return PostgreSQL's own subscriptions, which write as session_replication_role = replica through a fence."""
    async with server.use() as connection:
        names = await native_subscription.load_enabled(connection)
    return [
        _finding(
            "native_subscription",
            name,
            f'PostgreSQL\'s own subscription "{name}" writes on the {server.side}, in spite of a fence.',
            f"On the {server.side}: ALTER SUBSCRIPTION {sql_identifier(name)} DISABLE;",
        )
        for name in names
    ]


async def _check_verified(following: MoveServer, live: Subscription, within: float) -> list[PreflightFinding]:
    async with following.use() as connection:
        steps = await migrations.load_steps(connection, following.migration)
        now = await connection.fetchval("SELECT pg_catalog.clock_timestamp()")
    # A comparison of the other direction is stored on the other server.
    last = next((step for step in reversed(steps) if step.command == "verify" and step.ended is not None), None)
    if last is None:
        reason = "have not been compared"
    elif last.error is not None:
        reason = f"were different: {last.error}"
    elif (age := (now - last.began).total_seconds()) > within:
        reason = f"were compared {age:.0f} s ago, which is longer than {within:.0f} s"
    else:
        return []
    fix = f"subscriber migrate verify {shell_word(following.migration)}"
    return [_finding("verify", live.name, f"The rows of both servers {reason}.", fix)]


async def not_replicated(serving: MoveServer) -> dict[str, list[str]]:
    """Return the relations whose rows are not those of the serving server: unlogged tables, materialized views."""
    async with serving.use() as connection:
        unlogged = [row["name"] for row in await connection.fetch(UNLOGGED)]
        return {"unlogged": unlogged, "not refreshed": await populated_views(connection)}


async def differences(serving: str, following: str) -> list[str]:
    """Return the objects whose definitions differ between two databases, apart from publications.

    A move does not copy what is created or altered after `start`.
    """
    async with open_both(serving, following, APPLICATION_NAME) as (there, here):
        differing = await schema_diff(there, here)
    return list(
        dict.fromkeys(
            f"{difference.kind} {difference.name}" for difference in differing if difference.kind != "publication"
        )
    )


async def long_transactions(server: MoveServer, seconds: float) -> list[str]:
    """Return descriptions of sessions with a transaction that is older than that. The pause would end them."""
    async with server.use() as connection:
        return await sessions.long_transactions(connection, seconds)


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown}, and {len(names) - 5} more"
