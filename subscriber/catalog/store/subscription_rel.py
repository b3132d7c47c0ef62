"""Statements on `subscriber.subscription_rel`: the tables of each subscription and their states."""

from __future__ import annotations

from dataclasses import dataclass

import asyncpg

from subscriber.apply.table_states import TableState
from subscriber.lsn import Lsn, optional_lsn
from subscriber.subscription import TableCopy

RELATION_STATES = """
SELECT r.srrelid, r.srsubstate::text AS srsubstate, r.srsublsn::text AS srsublsn,
       r.srnspname::text AS nspname, r.srrelname::text AS relname, r.srcopy, r.srforeignkeys, r.srformer, r.srextra
  FROM subscriber.subscription_rel r JOIN pg_catalog.pg_class c ON c.oid = r.srrelid
 WHERE r.srsubid = $1 AND (NOT $2::boolean OR r.srsubstate <> 'r')
 ORDER BY r.srrelid
"""
RELATION_STATE = """
SELECT r.srrelid, r.srsubstate::text AS srsubstate, r.srsublsn::text AS srsublsn,
       r.srnspname::text AS nspname, r.srrelname::text AS relname, r.srcopy, r.srforeignkeys, r.srformer, r.srextra
  FROM subscriber.subscription_rel r JOIN pg_catalog.pg_class c ON c.oid = r.srrelid
 WHERE r.srsubid = $1 AND r.srrelid = $2
"""
ADD_RELATION = """
INSERT INTO subscriber.subscription_rel (srsubid, srrelid, srsubstate, srsublsn)
VALUES ($1, $2, $3::text::"char", $4::text::pg_lsn) ON CONFLICT DO NOTHING
"""
# Sequences are in a table of their own (subscription_sequence.py).
ADD_NATIVE_RELATIONS = """
INSERT INTO subscriber.subscription_rel (srsubid, srrelid, srsubstate, srsublsn, srnspname, srrelname)
SELECT $1::oid, r.srrelid, r.srsubstate, r.srsublsn, n.nspname, c.relname
  FROM pg_catalog.pg_subscription_rel r JOIN pg_catalog.pg_class c ON c.oid = r.srrelid
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE r.srsubid = $2::oid AND c.relkind <> 'S'
"""
ADD_RELATIONS = """
INSERT INTO subscriber.subscription_rel (srsubid, srrelid, srsubstate, srcopy, srnspname, srrelname)
SELECT $1::oid, c.oid, $3::text::"char", $4, n.nspname, c.relname
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = ANY ($2::oid[])
ON CONFLICT DO NOTHING
"""
STORED_RELATIONS = """
SELECT r.srrelid AS relid, r.srsubstate::text AS state, r.srnspname::text AS nspname, r.srrelname::text AS relname
  FROM subscriber.subscription_rel r
 WHERE r.srsubid = $1 ORDER BY r.srrelid
"""
SET_RELATION_STATE = """
UPDATE subscriber.subscription_rel
   SET srsubstate = $3::text::"char", srsublsn = $4::text::pg_lsn, srforeignkeys = srforeignkeys OR $5
 WHERE srsubid = $1 AND srrelid = $2 AND (srsubstate <> 'i' OR $3::text IN ('i', 'd'))
"""
SET_EXTRA = "UPDATE subscriber.subscription_rel SET srextra = $3 WHERE srsubid = $1 AND srrelid = $2"
SYNCHRONIZE_AGAIN = "SELECT subscriber.synchronize_again($1::oid, $2::oid, $3)"
FINISH_RELATIONS = """
UPDATE subscriber.subscription_rel SET srsubstate = 'r', srsublsn = $2::text::pg_lsn
 WHERE srsubid = $1 AND srsubstate IN ('s', 'r')
"""
# A table that is refreshed meanwhile keeps the mark.
REMOVE_MARK = """
UPDATE subscriber.subscription_rel SET srforeignkeys = false WHERE srsubid = $1 AND srrelid = $2 AND srsubstate = 'r'
"""
REMOVE_RELATION = "SELECT subscriber.remove_relation($1::oid, $2::oid)"

SOURCES = """
SELECT srrelid::bigint, srsubstate::text, coalesce(srsublsn::text, ''), srsource[1]::text, srsource[2]::text
  FROM subscriber.subscription_rel WHERE srsubid = $1
"""
MAPPED = "SELECT srrelid FROM subscriber.subscription_rel WHERE srsubid = $1 AND srsource IS NOT NULL"


@dataclass(frozen=True, slots=True)
class SubscriptionRel:
    """One table of a subscription. `lsn` is None until the table has a position."""

    relid: int  # OID on the target
    namespace: str  # as stored, like the name; table_names.py finds names that now belong to another table
    name: str
    state: TableState
    lsn: Lsn | None
    copy: TableCopy = TableCopy.COPY  # the way in which it is synchronized until state f
    lacks_foreign_keys: bool = False  # the publisher's are to be added when it is ready
    former: int | None = None  # OID of the table that had the name before. None: there is none
    extra: int = 0  # rows that its last comparison has kept, because the publisher does not have them


def _relation_state(row: asyncpg.Record) -> SubscriptionRel:
    return SubscriptionRel(
        row["srrelid"],
        row["nspname"],
        row["relname"],
        TableState(row["srsubstate"]),
        optional_lsn(row["srsublsn"]),
        TableCopy(row["srcopy"]),
        row["srforeignkeys"],
        row["srformer"],
        row["srextra"],
    )


async def load_relation_states(
    connection: asyncpg.Connection, subid: int, *, not_ready: bool = False
) -> list[SubscriptionRel]:
    """Return the subscription's tables, ordered by OID, without tables that were dropped on the target.

    `not_ready` excludes tables in state READY.
    """
    return [_relation_state(row) for row in await connection.fetch(RELATION_STATES, subid, not_ready)]


async def finish_relations(connection: asyncpg.Connection, subid: int, position: Lsn) -> None:
    """Record that the tables whose copy has ended, SYNCDONE and READY, have all changes before `position`."""
    await connection.execute(FINISH_RELATIONS, subid, str(position))


async def load_relation_state(connection: asyncpg.Connection, subid: int, relid: int) -> SubscriptionRel | None:
    """Return one table, or None if it does not exist or is no part of the subscription."""
    row = await connection.fetchrow(RELATION_STATE, subid, relid)
    return None if row is None else _relation_state(row)


async def add_relation(
    connection: asyncpg.Connection, subid: int, relid: int, state: TableState, lsn: Lsn | None = None
) -> bool:
    """Add a table to the subscription. Returns False if the subscription has it already."""
    return (
        await connection.execute(ADD_RELATION, subid, relid, state, None if lsn is None else str(lsn)) == "INSERT 0 1"
    )


async def insert_relations(
    connection: asyncpg.Connection, subid: int, relids: list[int], state: str, copy: TableCopy = TableCopy.COPY
) -> None:
    """Insert tables of the target in this state. `copy`: how they are copied, if the state requires it."""
    await connection.execute(ADD_RELATIONS, subid, relids, state, copy)


async def load_stored_relations(connection: asyncpg.Connection, subid: int) -> list[asyncpg.Record]:
    """Return relid, state, nspname and relname of all tables, by the stored names, also of those that were dropped."""
    return list(await connection.fetch(STORED_RELATIONS, subid))


async def add_native_relations(connection: asyncpg.Connection, subid: int, native_oid: int) -> None:
    """Add the tables of PostgreSQL's own subscription `native_oid`, with their states and positions."""
    await connection.execute(ADD_NATIVE_RELATIONS, subid, native_oid)


async def set_relation_state(
    connection: asyncpg.Connection,
    subid: int,
    relid: int,
    state: TableState,
    lsn: Lsn | None,
    *,
    lacks_foreign_keys: bool = False,
) -> bool:
    """Set the state and position of a table.

    Args:
        connection: a connection to the target.
        subid: OID of the subscription.
        relid: OID of the table.
        state: the state.
        lsn: the position. None: the table has none.
        lacks_foreign_keys: the publisher's foreign keys are to be added when the table is ready.

    Returns:
        False if a refresh has removed the table, or has set it to state init, which datasync follows.
    """
    position = None if lsn is None else str(lsn)
    done = await connection.execute(SET_RELATION_STATE, subid, relid, state, position, lacks_foreign_keys)
    return done == "UPDATE 1"


async def set_extra(connection: asyncpg.Connection, subid: int, relid: int, rows: int) -> None:
    """Record the number of rows that a comparison has kept, because the publisher does not have them."""
    await connection.execute(SET_EXTRA, subid, relid, rows)


async def remove_mark(connection: asyncpg.Connection, subid: int, relid: int) -> None:
    """Record that a table that is ready has the publisher's foreign keys."""
    await connection.execute(REMOVE_MARK, subid, relid)


async def synchronize_again(connection: asyncpg.Connection, subid: int, relid: int, copy: TableCopy) -> None:
    """Set a table to state init. The workers of the subscription commit nothing before they have started again."""
    await connection.execute(SYNCHRONIZE_AGAIN, subid, relid, copy)


async def remove_relation(connection: asyncpg.Connection, subid: int, relid: int) -> TableState | None:
    """Remove a table from the subscription. Workers commit nothing before they have started again.

    Returns:
        The state of the table. None: the subscription does not have it.
    """
    state = await connection.fetchval(REMOVE_RELATION, subid, relid)
    return None if state is None else TableState(state)


async def load_relation_sources(
    connection: asyncpg.Connection, subid: int
) -> list[tuple[int, str, str, str | None, str | None]]:
    """Return OID, state, its position, and the publisher's schema and table if hooks send its rows to the table."""
    return [tuple(row) for row in await connection.fetch(SOURCES, subid)]


async def load_mapped_relations(connection: asyncpg.Connection, subid: int) -> set[int]:
    """Return the OIDs of the subscription's tables whose rows pass hooks."""
    return {row["srrelid"] for row in await connection.fetch(MAPPED, subid)}
