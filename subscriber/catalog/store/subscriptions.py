"""Statements on `subscriber.subscription`: read a subscription, and change its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import asyncpg

from subscriber.lsn import Lsn, optional_lsn
from subscriber.subscription import STORED_OPTIONS, StatementOptions, Subscription, TwoPhaseState

_SUBSCRIPTION = f"""
SELECT s.subid, s.subname, coalesce(r.rolname::text, s.subowner::text) AS owner, s.subpublications,
       coalesce(s.subconninfo, f.conninfo) AS subconninfo, f.problem AS conninfo_problem, v.srvname::text AS server,
       {", ".join(column.selected for column in STORED_OPTIONS.values())},
       s.subskiplsn::text AS subskiplsn, coalesce(r.rolsuper, false) AS owner_is_superuser,
       s.subsystemid, s.subtimeline, s.subtimelinesystem, s.subtimelinehistory, s.subacceptloss,
       s.subdisabledat, s.subgaveup, s.subgeneration,
       s.xmin::text AS version
  FROM subscriber.subscription s LEFT JOIN pg_catalog.pg_roles r ON r.oid = s.subowner
  LEFT JOIN pg_catalog.pg_foreign_server v ON v.oid = s.subserver
  LEFT JOIN LATERAL subscriber.server_conninfo(CASE WHEN s.subserver <> 0 THEN s.subid END) f ON true
"""
_TRUSTED = "trusted_owners"  # a column of its own privilege
_INSERTED = {name: column for name, column in STORED_OPTIONS.items() if name != _TRUSTED}
INSERT = f"""
INSERT INTO subscriber.subscription (subname, subowner, subconninfo, subserver, subpublications,
       {", ".join(column.name for column in _INSERTED.values())})
VALUES ($1::text::name, $2::oid, $3, $4::oid, $5::text[],
       {", ".join(f"${at}::{column.parameter}" for at, column in enumerate(_INSERTED.values(), 6))})
RETURNING subid
"""
# The view shows everybody's subscriptions, so that "does not exist" and "must be owner" are two things.
RIGHTS = """
SELECT s.oid, s.subpasswordrequired, pg_catalog.pg_has_role(s.subowner, 'USAGE') AS is_owner,
       (SELECT r.rolsuper FROM pg_catalog.pg_roles r WHERE r.rolname = current_user) AS is_superuser
  FROM subscriber.pg_subscription s WHERE s.subname = $1::text
"""
OWNER = """
SELECT r.rolname::text, r.rolsuper, current_user::text
  FROM subscriber.pg_subscription s JOIN pg_catalog.pg_roles r ON r.oid = s.subowner WHERE s.subname = $1::text
"""
# A member that does not inherit from the owner sees the subscription, and may neither change nor run it.
MAY_MANAGE = "SELECT pg_catalog.pg_has_role(s.subowner, 'USAGE') FROM subscriber.subscription s WHERE s.subid = $1"
NAMES = "SELECT s.subname::text FROM subscriber.pg_subscription s ORDER BY 1"
EXISTS = "SELECT EXISTS (SELECT FROM subscriber.pg_subscription s WHERE s.subname = $1::text)"
SET_ENABLED = """
UPDATE subscriber.subscription SET subenabled = $2, subgaveup = CASE WHEN $2 THEN NULL ELSE subgaveup END
 WHERE subid = $1
"""
SET_CONNINFO = "UPDATE subscriber.subscription SET subconninfo = $2, subserver = $3::oid WHERE subid = $1"
SET_PUBLICATIONS = "UPDATE subscriber.subscription SET subpublications = $2::text[] WHERE subid = $1"
SET_NAME = "UPDATE subscriber.subscription SET subname = $2::text::name WHERE subid = $1"
SUBSCRIPTIONS = f"{_SUBSCRIPTION} ORDER BY s.subid"
SUBSCRIPTION_BY_OID = f"{_SUBSCRIPTION} WHERE s.subid = $1"
SUBSCRIPTION_BY_NAME = f"{_SUBSCRIPTION} WHERE s.subname = $1::text"
DISABLE = "UPDATE subscriber.subscription SET subenabled = false WHERE subid = $1 AND subenabled"
IS_ENABLED = "SELECT s.subenabled FROM subscriber.subscription s WHERE s.subid = $1"
# The reason stays until the subscription is enabled again. A statement may have raised the budget meanwhile.
GIVE_UP = """
UPDATE subscriber.subscription SET subenabled = false, subgaveup = $2::text
 WHERE subid = $1 AND subwalbudget = $3::text AND (subenabled OR subgaveup IS NULL)
RETURNING true
"""
LOCK_GIVEN_UP = """
SELECT true FROM subscriber.subscription
 WHERE subid = $1 AND subwalbudget = $2::text AND NOT subenabled AND subgaveup IS NOT NULL FOR NO KEY UPDATE
"""
ENABLE = "UPDATE subscriber.subscription SET subenabled = true, subgaveup = NULL WHERE subid = $1 AND NOT subenabled"
DELETE = "DELETE FROM subscriber.subscription WHERE subid = $1"
SET_SLOT = "UPDATE subscriber.subscription SET subslotname = $2::text::name, suborigin = $3::text WHERE subid = $1"
SET_SKIP_LSN = "UPDATE subscriber.subscription SET subskiplsn = $2::text::pg_lsn WHERE subid = $1"
# For RowApplier.execute_at_end(). Both clear the skipped position alone: a statement may have set another one since.
CLEAR_SKIP = "SELECT subscriber.clear_skip($1, $2, $3)"
CLEAR_SKIP_LSN = """
UPDATE subscriber.subscription SET subskiplsn = '0/0' WHERE subid = $1 AND subskiplsn = $2::text::pg_lsn
"""
SET_TWO_PHASE_STATE = 'UPDATE subscriber.subscription SET subtwophasestate = $2::text::"char" WHERE subid = $1'
# Statements about one subscription wait for each other here. Not FOR UPDATE: workers that insert a row
# which refers to it must not wait, since the statement may be waiting for them.
LOCK_ROW = "SELECT 1 FROM subscriber.subscription s WHERE s.subid = $1 FOR NO KEY UPDATE"
ENABLE_TWO_PHASE = """
UPDATE subscriber.subscription s SET subtwophasestate = 'e' WHERE s.subid = $1 AND s.subtwophasestate = 'p'
   AND EXISTS (SELECT FROM subscriber.pg_subscription_rel r WHERE r.srsubid = s.subid)
   AND NOT EXISTS (SELECT FROM subscriber.pg_subscription_rel r WHERE r.srsubid = s.subid AND r.srsubstate <> 'r')
"""

COUNT_CONFLICTS = "SELECT count(*) FROM subscriber.conflict_history WHERE subid = $1"
# The failed worker is still registered, so no other worker of the subscription records conflicts.
RECORD_CONFLICT_ERROR = "SELECT subscriber.record_conflict_error($1::oid, $2::text::jsonb)"
# The timeline stays: the next publisher may be a promoted standby of the former one.
FORGET_PUBLISHER = "UPDATE subscriber.subscription SET subsystemid = NULL WHERE subid = $1 AND subsystemid IS NOT NULL"
SET_PUBLISHER = """
UPDATE subscriber.subscription
   SET subsystemid = $2::text, subtimeline = $3::bigint, subtimelinesystem = $2::text, subtimelinehistory = $4::text,
       subacceptloss = false
 WHERE subid = $1
   AND (subsystemid, subtimeline, subtimelinesystem, subtimelinehistory, subacceptloss)
       IS DISTINCT FROM ($2::text, $3::bigint, $2::text, $4::text, false)
"""
ACCEPT_LOSS = "UPDATE subscriber.subscription SET subacceptloss = true WHERE subid = $1"
# The highest position that was applied or copied. A transaction that ends before a table's own position changes
# nothing in that table.
REACHED = """
SELECT max(reached.lsn)::text
  FROM (SELECT p.remote_lsn AS lsn FROM subscriber.progress p WHERE p.subid = $1
        UNION ALL
        SELECT r.srsublsn FROM subscriber.subscription_rel r
         WHERE r.srsubid = $1 AND r.srsubstate IN ('f', 's', 'r')) reached
"""


def _subscription(row: asyncpg.Record) -> Subscription:
    return Subscription(
        oid=row["subid"],
        name=row["subname"],
        owner=row["owner"],
        stored_conninfo=row["subconninfo"],
        publications=tuple(row["subpublications"]),
        skip_lsn=Lsn.parse(row["subskiplsn"]),
        owner_is_superuser=row["owner_is_superuser"],
        system_id=row["subsystemid"],
        timeline=row["subtimeline"],
        timeline_system=row["subtimelinesystem"],
        timeline_history=row["subtimelinehistory"],
        accepts_loss=row["subacceptloss"],
        server=row["server"],
        conninfo_problem=row["conninfo_problem"],
        version=row["version"],
        disabled_at=row["subdisabledat"],
        gave_up=row["subgaveup"],
        generation=row["subgeneration"],
        **{name: column.read_value(row[column.name]) for name, column in STORED_OPTIONS.items()},
    )


async def load_subscriptions(connection: asyncpg.Connection) -> list[Subscription]:
    """Return all subscriptions of this database, enabled or not, oldest first."""
    return [_subscription(row) for row in await connection.fetch(SUBSCRIPTIONS)]


async def load_subscription(connection: asyncpg.Connection, subid: int) -> Subscription | None:
    """Return the subscription, or None if it has been dropped."""
    row = await connection.fetchrow(SUBSCRIPTION_BY_OID, subid)
    return None if row is None else _subscription(row)


async def find_subscription(connection: asyncpg.Connection, name: str) -> Subscription | None:
    """Return the subscription with this name, or None if there is none."""
    row = await connection.fetchrow(SUBSCRIPTION_BY_NAME, name)
    return None if row is None else _subscription(row)


async def add_subscription(
    connection: asyncpg.Connection,
    name: str,
    owner: int,
    conninfo: str | None,
    server: int,
    publications: Sequence[str],
    options: StatementOptions,
) -> int:
    """Insert a subscription. Its origin does not exist yet.

    Args:
        connection: in a transaction.
        name: of the subscription.
        owner: OID of the role.
        conninfo: the connection string. None: the foreign server has it.
        server: OID of the foreign server, or 0.
        publications: their names.
        options: of CREATE SUBSCRIPTION.

    Returns:
        The subscription's OID.

    Raises:
        asyncpg.UniqueViolationError: the name is taken.
    """
    values = [column.write_value(getattr(options, option)) for option, column in _INSERTED.items()]
    subid: int = await connection.fetchval(INSERT, name, owner, conninfo, server, list(publications), *values)
    if options.trusted_owners:
        await set_options(connection, subid, {_TRUSTED: options.trusted_owners})
    return subid


async def set_options(connection: asyncpg.Connection, subid: int, options: Mapping[str, object]) -> None:
    """Store options of a subscription, by name."""
    columns = [STORED_OPTIONS[name] for name in options]
    settings = ", ".join(f"{column.name} = ${at}::{column.parameter}" for at, column in enumerate(columns, 2))
    values = [column.write_value(value) for column, value in zip(columns, options.values(), strict=True)]
    await connection.execute(f"UPDATE subscriber.subscription SET {settings} WHERE subid = $1", subid, *values)


async def set_enabled(connection: asyncpg.Connection, subid: int, *, enabled: bool) -> None:
    """Enable or disable a subscription, as a statement says."""
    await connection.execute(SET_ENABLED, subid, enabled)


async def set_conninfo(connection: asyncpg.Connection, subid: int, conninfo: str | None, server: int) -> None:
    """Store the connection string, or the OID of the foreign server that has it."""
    await connection.execute(SET_CONNINFO, subid, conninfo, server)


async def set_publications(connection: asyncpg.Connection, subid: int, publications: Sequence[str]) -> None:
    """Store the names of the publications."""
    await connection.execute(SET_PUBLICATIONS, subid, list(publications))


async def rename_subscription(connection: asyncpg.Connection, subid: int, name: str) -> None:
    """Store another name.

    Raises:
        asyncpg.UniqueViolationError: the name is taken.
    """
    await connection.execute(SET_NAME, subid, name)


async def lock_subscription(connection: asyncpg.Connection, subid: int) -> None:
    """Lock the row of a subscription until the end of the transaction. Other statements on it wait."""
    await connection.execute(LOCK_ROW, subid)


async def load_rights(connection: asyncpg.Connection, name: str) -> asyncpg.Record | None:
    """Return `oid` and `subpasswordrequired` of a subscription, and if the role `is_owner` and `is_superuser`."""
    return await connection.fetchrow(RIGHTS, name)


async def load_owner(connection: asyncpg.Connection, name: str) -> asyncpg.Record | None:
    """Return the owner of a subscription, True if that is a superuser, and the current role. None: it is dropped."""
    return await connection.fetchrow(OWNER, name)


async def may_manage(connection: asyncpg.Connection, subid: int) -> bool:
    """Return True if the current role has the rights of the owner. True also if the subscription has been dropped."""
    return await connection.fetchval(MAY_MANAGE, subid) is not False


async def load_names(connection: asyncpg.Connection) -> list[str]:
    """Return the names of all subscriptions. Any role may ask."""
    return [row["subname"] for row in await connection.fetch(NAMES)]


async def subscription_exists(connection: asyncpg.Connection, name: str) -> bool:
    """Return True if there is a subscription of that name. Any role may ask."""
    return bool(await connection.fetchval(EXISTS, name))


async def disable_subscription(connection: asyncpg.Connection, subid: int) -> bool:
    """Disable the subscription, as `disable_on_error` requests after a permanent error.

    Returns:
        False if the role may not change the subscription, which remains enabled.
    """
    await connection.execute(DISABLE, subid)
    return not await connection.fetchval(IS_ENABLED, subid)


async def give_up(connection: asyncpg.Connection, subid: int, reason: str, budget: str) -> bool:
    """Disable a subscription because its `wal_budget` is exceeded.

    Args:
        connection: a connection to the target.
        subid: the subscription.
        reason: the message of the error.
        budget: the value of `wal_budget` that is exceeded. With another value the subscription is not changed.

    Returns:
        False if it had been given up before, or has another budget.
    """
    return bool(await connection.fetchval(GIVE_UP, subid, reason, budget))


async def lock_given_up(connection: asyncpg.Connection, subid: int, budget: str) -> bool:
    """Lock the row of a subscription that was given up, until the end of the transaction.

    Statements on the subscription wait meanwhile, so it is not enabled, and nobody gives it another slot.

    Returns:
        False if it is enabled again, or has another budget.
    """
    return bool(await connection.fetchval(LOCK_GIVEN_UP, subid, budget))


async def enable_subscription(connection: asyncpg.Connection, subid: int) -> None:
    """Enable the subscription, after a command that had to disable it."""
    await connection.execute(ENABLE, subid)


async def delete_subscription(connection: asyncpg.Connection, subid: int) -> None:
    """Delete the subscription with its rows in all tables, but not its origins."""
    await connection.execute(DELETE, subid)


async def set_slot(connection: asyncpg.Connection, subid: int, slot: str, origin: str) -> None:
    """Store the slot and option `origin` of a subscription that is disabled."""
    await connection.execute(SET_SLOT, subid, slot, origin)


async def set_skip_lsn(connection: asyncpg.Connection, subid: int, lsn: Lsn) -> None:
    """Store the position of ALTER SUBSCRIPTION … SKIP; 0: none."""
    await connection.execute(SET_SKIP_LSN, subid, str(lsn))


async def clear_skip_lsn(connection: asyncpg.Connection, subid: int, skipped: Lsn) -> None:
    """Clear the position to skip, unless a statement has set another one since."""
    await connection.execute(CLEAR_SKIP_LSN, subid, str(skipped))


async def set_two_phase_state(connection: asyncpg.Connection, subid: int, state: TwoPhaseState) -> None:
    """Store the state of two-phase commit."""
    await connection.execute(SET_TWO_PHASE_STATE, subid, state.value)


async def enable_two_phase(connection: asyncpg.Connection, subid: int) -> bool:
    """Change two-phase commit from pending to enabled if the subscription has tables and all are READY.

    Call this before the stream is started with two_phase, because a slot keeps two_phase. A concurrent REFRESH
    PUBLICATION may be adding a table: the row lock orders the two. A worker that is killed after this call finds the
    state enabled, and starts the stream with two_phase.

    Returns:
        True if the state is enabled now and was pending before.
    """
    async with connection.transaction():
        # It waits for a concurrent REFRESH PUBLICATION, and the second statement sees the tables that it added.
        await lock_subscription(connection, subid)
        return await connection.execute(ENABLE_TWO_PHASE, subid) == "UPDATE 1"


async def record_conflict_error(connection: asyncpg.Connection, subid: int, line: str) -> None:
    """Record a conflict that has stopped the stream, or count it again. The target's `History` builds `line`."""
    await connection.execute(RECORD_CONFLICT_ERROR, subid, line)


async def set_publisher(
    connection: asyncpg.Connection, subid: int, system_id: str, timeline: int, history: str | None
) -> None:
    """Store the publisher's system identifier and timeline. A consent to a loss was for this connection.

    Args:
        connection: a connection to the target.
        subid: the subscription.
        system_id: the publisher's system identifier.
        timeline: the number of its timeline.
        history: the ends of earlier timelines (publisher/timelines.py). None: it can change unnoticed, because the
            publisher is a standby.
    """
    await connection.execute(SET_PUBLISHER, subid, system_id, timeline, history)


async def accept_loss(connection: asyncpg.Connection, subid: int) -> None:
    """Let the next connection accept a publisher that lacks applied changes. Restarts a running worker."""
    await connection.execute(ACCEPT_LOSS, subid)


async def count_conflicts(connection: asyncpg.Connection, subid: int) -> int:
    """Return the number of the subscription's conflicts in `subscriber.conflict_history`."""
    count: int = await connection.fetchval(COUNT_CONFLICTS, subid)
    return count


async def forget_publisher(connection: asyncpg.Connection, subid: int) -> None:
    """Delete the publisher's system identifier, so that the next connection stores that of its cluster."""
    await connection.execute(FORGET_PUBLISHER, subid)


async def load_reached(connection: asyncpg.Connection, subid: int) -> Lsn:
    """Return the highest position of the publisher's changes that have been applied or copied."""
    return optional_lsn(await connection.fetchval(REACHED, subid)) or Lsn(0)
