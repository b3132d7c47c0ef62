"""PostgreSQL's own subscriptions of the target, for the commands that take one over and hand one back.

The statements are for superusers. Versions of PostgreSQL differ in the columns of pg_subscription, so a row is read as
JSON and has the columns of its server.

A command that has disabled a subscription marks it with a comment (COMMENT ON SUBSCRIPTION), which says whether the
subscription was enabled. The mark exists from the transaction that disables the subscription to the transaction that
ends the command's work. So a command that runs again after a kill knows what the killed one has done.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import asyncpg

from subscriber import names
from subscriber.lsn import Lsn, optional_lsn
from subscriber.quoting import identifier, literal
from subscriber.subscription import Streaming, TwoPhaseState

SEQUENCE = "S"  # pg_class.relkind

_FIND = """
SELECT s.oid::bigint, s.subname::text, s.subowner::bigint, r.rolname::text AS owner, r.rolsuper,
       v.oid::bigint AS srvoid, v.srvname::text,
       pg_catalog.to_jsonb(s)::text AS columns, pg_catalog.obj_description(s.oid, 'pg_subscription') AS comment
  FROM pg_catalog.pg_subscription s JOIN pg_catalog.pg_database d ON d.oid = s.subdbid
  LEFT JOIN pg_catalog.pg_roles r ON r.oid = s.subowner
  LEFT JOIN pg_catalog.pg_foreign_server v ON v.oid = (pg_catalog.to_jsonb(s) ->> 'subserver')::oid
 WHERE d.datname = pg_catalog.current_database() AND s.subname = $1::text
"""
_DATABASES = """
SELECT d.datname::text FROM pg_catalog.pg_subscription s JOIN pg_catalog.pg_database d ON d.oid = s.subdbid
 WHERE s.subname = $1::text ORDER BY 1
"""
# For any role: only superusers may read all columns.
_OF_DATABASE = """
SELECT s.subname::text, s.subenabled, pg_catalog.obj_description(s.oid, 'pg_subscription') AS comment
  FROM pg_catalog.pg_subscription s JOIN pg_catalog.pg_database d ON d.oid = s.subdbid
 WHERE d.datname = pg_catalog.current_database() ORDER BY 1
"""
_MAY_READ = """
SELECT pg_catalog.bool_and(pg_catalog.has_column_privilege('pg_catalog.pg_subscription', c.name, 'SELECT'))
  FROM pg_catalog.unnest('{oid,subname,subdbid,subenabled}'::text[]) c (name)
"""
# Some services hide the catalog. The view has the names of all databases; a subscription with a table or a worker is
# one of this database. Whether it is enabled is not visible.
_VISIBLE = """
SELECT DISTINCT v.subname::text, true AS subenabled, pg_catalog.obj_description(v.subid, 'pg_subscription') AS comment
  FROM pg_catalog.pg_stat_subscription v
 WHERE v.subid IN (SELECT r.srsubid FROM pg_catalog.pg_subscription_rel r)
    OR v.pid IN (SELECT a.pid FROM pg_catalog.pg_stat_activity a WHERE a.datname = pg_catalog.current_database())
 ORDER BY 1
"""
_COLUMNS = """
SELECT a.attname::text FROM pg_catalog.pg_attribute a
 WHERE a.attrelid = 'pg_catalog.pg_subscription'::pg_catalog.regclass AND a.attnum > 0 AND NOT a.attisdropped
"""
_RELATIONS = """
SELECT r.srrelid::bigint, n.nspname::text, c.relname::text, c.relkind::text, r.srsubstate::text, r.srsublsn::text
  FROM pg_catalog.pg_subscription_rel r JOIN pg_catalog.pg_class c ON c.oid = r.srrelid
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE r.srsubid = $1::oid ORDER BY n.nspname, c.relname
"""
_WORKERS = """
SELECT w.pid, w.relid IS NULL AND w.received_lsn IS NOT NULL AS streams
  FROM pg_catalog.pg_stat_get_subscription($1::oid) w WHERE w.pid IS NOT NULL ORDER BY w.pid
"""
_TERMINATE = "SELECT pg_catalog.pg_terminate_backend($1::int4)"
_PROGRESS = "SELECT pg_catalog.pg_replication_origin_progress($1::text, true)::text"
_PREPARED = """
SELECT x.gid FROM pg_catalog.pg_prepared_xacts x WHERE x.database = pg_catalog.current_database() ORDER BY x.prepared
"""
_MAY_LOG_IN = """
SELECT r.rolcanlogin AND pg_catalog.has_database_privilege(r.oid, pg_catalog.current_database(), 'CONNECT')
  FROM pg_catalog.pg_roles r WHERE r.rolname = $1::text
"""
_MARK = re.compile(r"subscriber (adopt|hand-back) is under way; enabled before: (yes|no)(?:\n(.*))?", re.DOTALL)


class Move(StrEnum):
    """The commands that move a subscription; the values are their names."""

    ADOPT = "adopt"
    HAND_BACK = "hand-back"


@dataclass(frozen=True, slots=True)
class Mark:
    """The comment of a subscription that a command has disabled."""

    move: Move
    was_enabled: bool
    comment: str | None = None  # the user's

    @classmethod
    def parse(cls, comment: str | None) -> Mark | None:
        """Return the mark, or None for a comment without one."""
        match = _MARK.fullmatch(comment or "")
        return None if match is None else cls(Move(match[1]), match[2] == "yes", match[3])

    def __str__(self) -> str:
        mark = f"subscriber {self.move} is under way; enabled before: {'yes' if self.was_enabled else 'no'}"
        return mark if self.comment is None else f"{mark}\n{self.comment}"


@dataclass(frozen=True, slots=True)
class NativeRelation:
    """A table or sequence of a subscription: one row of pg_subscription_rel."""

    relid: int
    schema: str
    name: str
    relkind: str
    state: str  # i, d, f, s or r
    lsn: Lsn | None


@dataclass(frozen=True, slots=True)
class NativeSubscription:
    """One row of pg_subscription.

    `columns` has the row's values by the name of the column, as JSON has them.
    """

    oid: int
    name: str
    owner_oid: int
    owner: str
    owner_is_superuser: bool
    server_oid: int  # of the foreign server that has the connection string; 0: there is none
    server: str | None  # its name
    comment: str | None
    columns: Mapping[str, Any] = field(repr=False)  # with the connection string

    @property
    def enabled(self) -> bool:
        """True if the server runs it."""
        return bool(self.columns["subenabled"])

    @property
    def slot_name(self) -> str | None:
        """The slot on the publisher; None after `slot_name = NONE`."""
        slot: str | None = self.columns["subslotname"]
        return slot

    @property
    def conninfo(self) -> str | None:
        """The connection string; None if a foreign server has it."""
        return self.columns["subconninfo"] or None

    @property
    def publications(self) -> tuple[str, ...]:
        """The publications, in the order of the statement."""
        return tuple(self.columns["subpublications"])

    @property
    def skip_lsn(self) -> Lsn:
        """The position of ALTER SUBSCRIPTION … SKIP; 0: none."""
        return optional_lsn(self.columns.get("subskiplsn")) or Lsn(0)

    @property
    def mark(self) -> Mark | None:
        """The mark of the command that has disabled it."""
        return Mark.parse(self.comment)

    @property
    def origin_name(self) -> str:
        """The replication origin of its apply worker."""
        return names.apply_origin(self.oid)

    @property
    def streaming(self) -> Streaming:
        """The option `streaming`, a Boolean before PostgreSQL 16."""
        value = self.columns["substream"]
        if isinstance(value, bool):
            return Streaming.ON if value else Streaming.OFF
        return Streaming(value)

    @property
    def two_phase(self) -> TwoPhaseState:
        """The state of two-phase commit, which PostgreSQL 14 does not have."""
        return TwoPhaseState(self.columns.get("subtwophasestate", TwoPhaseState.DISABLED))

    @property
    def must_use_password(self) -> bool:
        """True if the worker's connections must use the password of the connection string."""
        return bool(self.columns.get("subpasswordrequired", True)) and not self.owner_is_superuser

    @property
    def definition(self) -> dict[str, Any]:
        """The columns that no step of a move changes."""
        return {name: value for name, value in self.columns.items() if name not in ("subenabled", "subslotname")}


async def find(connection: asyncpg.Connection, name: str) -> NativeSubscription | None:
    """Return the subscription of this database with this name, or None if there is none."""
    row = await connection.fetchrow(_FIND, name)
    if row is None:
        return None
    return NativeSubscription(
        oid=row["oid"],
        name=row["subname"],
        owner_oid=row["subowner"],
        owner=row["owner"],
        owner_is_superuser=row["rolsuper"],
        server_oid=row["srvoid"] or 0,
        server=row["srvname"],
        comment=row["comment"],
        columns=json.loads(row["columns"]),
    )


async def load_marks(connection: asyncpg.Connection) -> dict[str, Mark | None]:
    """Return the names of this database's subscriptions, with their marks. Any role may ask."""
    return {row["subname"]: Mark.parse(row["comment"]) for row in await _of_database(connection)}


async def load_enabled(connection: asyncpg.Connection) -> list[str]:
    """Return the names of this database's enabled subscriptions. Any role may ask.

    Where a role may not read the catalog, disabled subscriptions with a table count as enabled.
    """
    return [row["subname"] for row in await _of_database(connection) if row["subenabled"]]


async def _of_database(connection: asyncpg.Connection) -> list[asyncpg.Record]:
    return await connection.fetch(_OF_DATABASE if await connection.fetchval(_MAY_READ) else _VISIBLE)


async def databases_of(connection: asyncpg.Connection, name: str) -> list[str]:
    """Return the databases of the server that have a subscription with this name."""
    return [row["datname"] for row in await connection.fetch(_DATABASES, name)]


async def load_columns(connection: asyncpg.Connection) -> frozenset[str]:
    """Return the names of the columns of this server's pg_subscription."""
    return frozenset(row["attname"] for row in await connection.fetch(_COLUMNS))


async def load_relations(connection: asyncpg.Connection, oid: int) -> list[NativeRelation]:
    """Return the tables and sequences of a subscription, by schema and name."""
    return [
        NativeRelation(
            row["srrelid"],
            row["nspname"],
            row["relname"],
            row["relkind"],
            row["srsubstate"],
            optional_lsn(row["srsublsn"]),
        )
        for row in await connection.fetch(_RELATIONS, oid)
    ]


async def load_prepared(connection: asyncpg.Connection, oid: int) -> list[str]:
    """Return the names of the transactions that the subscription has prepared on the target, oldest first."""
    return [row["gid"] for row in await connection.fetch(_PREPARED) if names.is_prepared_gid(row["gid"], oid)]


async def load_workers(connection: asyncpg.Connection, oid: int) -> list[int]:
    """Return the process IDs of a subscription's workers."""
    return [row["pid"] for row in await connection.fetch(_WORKERS, oid)]


async def is_streaming(connection: asyncpg.Connection, oid: int) -> bool:
    """Return True if the apply worker has received a part of the stream, so that it has the slot."""
    return any(row["streams"] for row in await connection.fetch(_WORKERS, oid))


async def may_terminate(connection: asyncpg.Connection) -> bool:
    """Return False for PostgreSQL 16.0 to 16.4: a worker that is ended may move its origin without its transaction."""
    version = int(await connection.fetchval("SHOW server_version_num"))
    return not 160000 <= version < 160005


async def terminate(connection: asyncpg.Connection, pid: int) -> None:
    """End a worker, whose transaction is rolled back."""
    await connection.execute(_TERMINATE, pid)


async def load_progress(connection: asyncpg.Connection, origin: str) -> Lsn:
    """Return the position of an origin, after a flush of the local commit that it belongs to. 0: none yet."""
    return optional_lsn(await connection.fetchval(_PROGRESS, origin)) or Lsn(0)


async def set_enabled(connection: asyncpg.Connection, name: str, *, enabled: bool) -> None:
    """ALTER SUBSCRIPTION … ENABLE or DISABLE."""
    await connection.execute(f"ALTER SUBSCRIPTION {identifier(name)} {'ENABLE' if enabled else 'DISABLE'}")


async def set_slot_name(connection: asyncpg.Connection, name: str, slot: str | None) -> None:
    """ALTER SUBSCRIPTION … SET (slot_name). Other statements about the subscription wait until the transaction ends.

    Raises asyncpg's error (55000) for None and a subscription that is enabled.
    """
    value = "NONE" if slot is None else literal(slot)
    await connection.execute(f"ALTER SUBSCRIPTION {identifier(name)} SET (slot_name = {value})")


async def set_comment(connection: asyncpg.Connection, name: str, comment: str | None) -> None:
    """COMMENT ON SUBSCRIPTION. None deletes the comment."""
    value = "NULL" if comment is None else literal(comment)
    await connection.execute(f"COMMENT ON SUBSCRIPTION {identifier(name)} IS {value}")


async def set_owner(connection: asyncpg.Connection, name: str, owner: str) -> None:
    """ALTER SUBSCRIPTION … OWNER TO."""
    await connection.execute(f"ALTER SUBSCRIPTION {identifier(name)} OWNER TO {identifier(owner)}")


async def skip(connection: asyncpg.Connection, name: str, lsn: Lsn) -> None:
    """ALTER SUBSCRIPTION … SKIP."""
    await connection.execute(f"ALTER SUBSCRIPTION {identifier(name)} SKIP (lsn = {literal(str(lsn))})")


async def has_workers_allowed(connection: asyncpg.Connection) -> bool:
    """Return True if the server runs workers of subscriptions."""
    return int(await connection.fetchval("SHOW max_logical_replication_workers")) > 0


async def may_log_in(connection: asyncpg.Connection, role: str) -> bool:
    """Return True if the role may connect to this database, as PostgreSQL's workers do as the subscription's owner."""
    return bool(await connection.fetchval(_MAY_LOG_IN, role))


async def drop_origin(connection: asyncpg.Connection, name: str) -> None:
    """Drop an origin. Its position is cleared at once, also if the transaction is rolled back."""
    await connection.execute("SELECT pg_catalog.pg_replication_origin_drop($1::text)", name)


async def set_progress(connection: asyncpg.Connection, origin: str, lsn: Lsn) -> None:
    """Set the position of an origin, at once, also if the transaction is rolled back. No worker may have the origin."""
    await connection.execute(
        "SELECT pg_catalog.pg_replication_origin_advance($1::text, $2::text::pg_lsn)", origin, str(lsn)
    )


async def drop(connection: asyncpg.Connection, name: str) -> None:
    """DROP SUBSCRIPTION of one without a slot, with its origin if it has one. The publisher is not contacted."""
    await connection.execute(f"DROP SUBSCRIPTION {identifier(name)}")
