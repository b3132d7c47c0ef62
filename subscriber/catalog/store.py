"""What workers and commands read and write in schema "subscriber": every statement, and nothing but the statement.

All take an asyncpg connection and are part of its transaction, if there is one. Positions go as text, so that any
connection will do, whatever codecs it has. The SQL is in constants because the apply worker sends some of it on its own
session, and because a test prepares each of them on a migrated database.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime

import asyncpg

from subscriber.catalog.names import prepared_prefix
from subscriber.display import printable_lines
from subscriber.lsn import Lsn
from subscriber.subscription import STORED_OPTIONS, Subscription, TwoPhaseState

APPLY_WORKER = 0  # the relid of a row that belongs to the apply worker and not to a table

_SUBSCRIPTION = f"""
SELECT s.subid, s.subname, coalesce(r.rolname::text, s.subowner::text) AS owner, s.subconninfo, s.subpublications,
       {", ".join(column.selected for column in STORED_OPTIONS.values())},
       s.subskiplsn::text AS subskiplsn, coalesce(r.rolsuper, false) AS owner_is_superuser,
       s.subsystemid, s.subtimeline, s.subtimelinesystem, s.subgeneration,
       s.xmin::text AS version
  FROM subscriber.subscription s LEFT JOIN pg_catalog.pg_roles r ON r.oid = s.subowner
"""
SUBSCRIPTIONS = f"{_SUBSCRIPTION} ORDER BY s.subid"
SUBSCRIPTION_BY_OID = f"{_SUBSCRIPTION} WHERE s.subid = $1"
SUBSCRIPTION_BY_NAME = f"{_SUBSCRIPTION} WHERE s.subname = $1::text"
DISABLE = "UPDATE subscriber.subscription SET subenabled = false WHERE subid = $1 AND subenabled"
# Only the position that was skipped: the user may have asked for another one since.
CLEAR_SKIP_LSN = """
UPDATE subscriber.subscription SET subskiplsn = '0/0' WHERE subid = $1 AND subskiplsn = $2::text::pg_lsn
"""
SET_TWO_PHASE_STATE = 'UPDATE subscriber.subscription SET subtwophasestate = $2::text::"char" WHERE subid = $1'
# Two statements: the second sees what a REFRESH PUBLICATION added for which the first had to wait.
LOCK_TWO_PHASE_STATE = "SELECT 1 FROM subscriber.subscription s WHERE s.subid = $1 FOR NO KEY UPDATE"
ENABLE_TWO_PHASE = """
UPDATE subscriber.subscription s SET subtwophasestate = 'e' WHERE s.subid = $1 AND s.subtwophasestate = 'p'
   AND EXISTS (SELECT FROM subscriber.pg_subscription_rel r WHERE r.srsubid = s.subid)
   AND NOT EXISTS (SELECT FROM subscriber.pg_subscription_rel r WHERE r.srsubid = s.subid AND r.srsubstate <> 'r')
"""
# The database's own: other databases of the cluster have other subscriptions.
PREPARED_HERE = """
SELECT EXISTS (SELECT FROM pg_catalog.pg_prepared_xacts x WHERE x.database = pg_catalog.current_database()
                  AND starts_with(x.gid, $1::text))
"""
COMMITTED_AHEAD = "SELECT EXISTS (SELECT FROM subscriber.prepared p WHERE p.subid = $1 AND p.committed)"
PREPARED = """
SELECT subid::bigint, gid, publisher_gid, prepared_at FROM subscriber.prepared WHERE NOT committed ORDER BY prepared_at
"""
FORGET_PREPARED = "SELECT subscriber.forget_prepared($1::oid)"

RELATION_STATES = """
SELECT r.srrelid, r.srsubstate::text AS srsubstate, r.srsublsn::text AS srsublsn,
       r.srnspname::text AS nspname, r.srrelname::text AS relname
  FROM subscriber.subscription_rel r JOIN pg_catalog.pg_class c ON c.oid = r.srrelid
 WHERE r.srsubid = $1 AND (NOT $2::boolean OR r.srsubstate <> 'r')
 ORDER BY r.srrelid
"""
RELATION_STATE = """
SELECT r.srrelid, r.srsubstate::text AS srsubstate, r.srsublsn::text AS srsublsn,
       r.srnspname::text AS nspname, r.srrelname::text AS relname
  FROM subscriber.subscription_rel r JOIN pg_catalog.pg_class c ON c.oid = r.srrelid
 WHERE r.srsubid = $1 AND r.srrelid = $2
"""
ADD_RELATION = """
INSERT INTO subscriber.subscription_rel (srsubid, srrelid, srsubstate, srsublsn)
VALUES ($1, $2, $3::text::"char", $4::text::pg_lsn) ON CONFLICT DO NOTHING
"""
SET_RELATION_STATE = """
UPDATE subscriber.subscription_rel SET srsubstate = $3::text::"char", srsublsn = $4::text::pg_lsn
 WHERE srsubid = $1 AND srrelid = $2
"""
REMOVE_RELATION = "DELETE FROM subscriber.subscription_rel WHERE srsubid = $1 AND srrelid = $2"

# The worker that has failed is still registered, so nobody else records for the subscription.
RECORD_CONFLICT_ERROR = "SELECT subscriber.record_conflict_error($1::oid, $2::text::jsonb)"
# The timeline is kept: the next publisher may be a standby of the former one that was promoted.
FORGET_PUBLISHER = "UPDATE subscriber.subscription SET subsystemid = NULL WHERE subid = $1 AND subsystemid IS NOT NULL"
SET_PUBLISHER = """
UPDATE subscriber.subscription
   SET subsystemid = $2::text, subtimeline = $3::bigint, subtimelinesystem = $2::text
 WHERE subid = $1
   AND (subsystemid, subtimeline, subtimelinesystem) IS DISTINCT FROM ($2::text, $3::bigint, $2::text)
"""
# Of all that was applied or copied. A table applies no change of a transaction that finishes before its own position.
REACHED = """
SELECT max(reached.lsn)::text
  FROM (SELECT p.remote_lsn AS lsn FROM subscriber.progress p WHERE p.subid = $1
        UNION ALL
        SELECT r.srsublsn FROM subscriber.subscription_rel r
         WHERE r.srsubid = $1 AND r.srsubstate IN ('f', 's', 'r')) reached
"""

# A table's own position is one that the other tables had reached when it was handed over. All changes before it are on
# the target.
HANDED_OVER = "SELECT max(srsublsn)::text FROM subscriber.subscription_rel WHERE srsubid = $1"

REPORT_WORKER = """
INSERT INTO subscriber.worker AS w (subid, relid, worker_type, pid, state, received_lsn, last_msg_send_time,
       last_msg_receipt_time, latest_end_lsn, latest_end_time, error, error_time, error_hint, next_retry, transactions,
       changes, bytes, copy_rows, copy_bytes, copy_total_bytes, leader_pid, waiting_for, streamed, limits, one_by_one,
       format, format_reason, started, updated_at)
SELECT $1::oid, $2::oid, $3::text, $4::int, $5::text, $6::text::pg_lsn, $7::timestamptz, $8::timestamptz,
       $9::text::pg_lsn, $10::timestamptz, $11::text, $12::timestamptz, $13::text, $14::timestamptz, $15::bigint,
       $16::bigint, $17::bigint, $18::bigint, $19::bigint, $20::bigint, $21::int, $22::text, $23::text::jsonb,
       nullif($24::text[], '{}'), $25::text::jsonb, $26::text, $27::text, now(), now()
 WHERE EXISTS (SELECT FROM subscriber.subscription s WHERE s.subid = $1)
ON CONFLICT (subid, relid) DO UPDATE SET worker_type = excluded.worker_type, pid = excluded.pid,
       state = excluded.state, received_lsn = excluded.received_lsn, last_msg_send_time = excluded.last_msg_send_time,
       last_msg_receipt_time = excluded.last_msg_receipt_time, latest_end_lsn = excluded.latest_end_lsn,
       latest_end_time = excluded.latest_end_time, error = excluded.error, error_time = excluded.error_time,
       error_hint = excluded.error_hint, next_retry = excluded.next_retry, transactions = excluded.transactions,
       changes = excluded.changes, bytes = excluded.bytes, copy_rows = excluded.copy_rows,
       copy_bytes = excluded.copy_bytes, copy_total_bytes = excluded.copy_total_bytes,
       leader_pid = excluded.leader_pid, waiting_for = excluded.waiting_for, streamed = excluded.streamed,
       limits = excluded.limits, one_by_one = excluded.one_by_one, format = excluded.format,
       format_reason = excluded.format_reason,
       started = CASE WHEN w.pid IS DISTINCT FROM excluded.pid THEN excluded.started ELSE w.started END,
       updated_at = excluded.updated_at
"""
REMOVE_WORKER = "DELETE FROM subscriber.worker WHERE subid = $1 AND relid = $2"
WORKERS = """
SELECT w.subid, w.relid, w.worker_type, w.pid, w.state, w.received_lsn::text AS received_lsn, w.last_msg_send_time,
       w.last_msg_receipt_time, w.latest_end_lsn::text AS latest_end_lsn, w.latest_end_time, w.error, w.error_time,
       w.error_hint, w.next_retry, w.transactions, w.changes, w.bytes, w.copy_rows, w.copy_bytes, w.copy_total_bytes,
       w.leader_pid, w.waiting_for, w.streamed::text AS streamed, coalesce(w.limits, '{}') AS limits,
       w.one_by_one::text AS one_by_one, w.format, w.format_reason, w.started, w.updated_at
  FROM subscriber.worker w ORDER BY w.subid, w.relid
"""


@dataclass(frozen=True, slots=True)
class SubscriptionRel:
    """One table of a subscription. `lsn` is None until a position is known."""

    relid: int  # OID on the target
    namespace: str  # as stored, like the name; table_names.py tells when they lead elsewhere
    name: str
    state: str  # i, d, f, s or r
    lsn: Lsn | None


@dataclass(frozen=True, slots=True)
class StreamedStatus:
    """A streamed transaction that has not ended yet."""

    xid: int
    changes: int
    bytes: int
    since: float  # seconds since 1970
    worker: int | None  # the parallel apply worker that applies it meanwhile; None: it waits in its file


@dataclass(slots=True)
class WorkerStatus:
    """What a worker tells about itself; None where nothing is known yet. Counters run since the worker started.

    `started` and `updated_at` are the server's, and only read back; a report starts `started` anew when `pid` changes.
    """

    subid: int
    relid: int  # APPLY_WORKER, the table being synchronized, or the number of a parallel apply worker
    worker_type: str  # "apply", "parallel apply" or "table synchronization", as in pg_stat_subscription
    state: str
    pid: int | None = None  # the worker's backend on the target
    received_lsn: Lsn | None = None
    last_msg_send_time: datetime | None = None
    last_msg_receipt_time: datetime | None = None
    latest_end_lsn: Lsn | None = None
    latest_end_time: datetime | None = None
    error: str | None = None
    error_time: datetime | None = None
    error_hint: str | None = None
    next_retry: datetime | None = None
    transactions: int = 0
    changes: int = 0
    bytes: int = 0
    copy_rows: int = 0
    copy_bytes: int = 0
    copy_total_bytes: int = 0
    leader_pid: int | None = None  # of a parallel apply worker
    waiting_for: str | None = None  # what its backend has been waiting for, for a second or more
    streamed: tuple[StreamedStatus, ...] = ()
    limits: tuple[str, ...] = ()  # what it has to do without on this target
    one_by_one: Mapping[str, int] = field(default_factory=dict)  # changes not applied set-based, by the reason why
    format: str | None = None  # how an apply worker receives values: binary or text
    format_reason: str | None = None  # why as text, where the subscription does not say
    started: datetime | None = None
    updated_at: datetime | None = None


def _lsn(text: str | None) -> Lsn | None:
    return None if text is None else Lsn.parse(text)


def _text(lsn: Lsn | None) -> str | None:
    return None if lsn is None else str(Lsn(lsn))


def _subscription(row: asyncpg.Record) -> Subscription:
    return Subscription(
        oid=row["subid"],
        name=row["subname"],
        owner=row["owner"],
        conninfo=row["subconninfo"],
        publications=tuple(row["subpublications"]),
        skip_lsn=Lsn.parse(row["subskiplsn"]),
        owner_is_superuser=row["owner_is_superuser"],
        system_id=row["subsystemid"],
        timeline=row["subtimeline"],
        timeline_system=row["subtimelinesystem"],
        version=row["version"],
        generation=row["subgeneration"],
        **{name: column.read_value(row[column.name]) for name, column in STORED_OPTIONS.items()},
    )


async def load_subscriptions(connection: asyncpg.Connection) -> list[Subscription]:
    """All subscriptions of this database, enabled or not, oldest first."""
    return [_subscription(row) for row in await connection.fetch(SUBSCRIPTIONS)]


async def load_subscription(connection: asyncpg.Connection, subid: int) -> Subscription | None:
    """None if it is gone."""
    row = await connection.fetchrow(SUBSCRIPTION_BY_OID, subid)
    return None if row is None else _subscription(row)


async def find_subscription(connection: asyncpg.Connection, name: str) -> Subscription | None:
    """By its name; None if there is none."""
    row = await connection.fetchrow(SUBSCRIPTION_BY_NAME, name)
    return None if row is None else _subscription(row)


async def disable(connection: asyncpg.Connection, subid: int) -> None:
    """What disable_on_error does."""
    await connection.execute(DISABLE, subid)


async def clear_skip_lsn(connection: asyncpg.Connection, subid: int, skipped: Lsn) -> None:
    """Forget the position to skip, unless the user has given another one since."""
    await connection.execute(CLEAR_SKIP_LSN, subid, str(skipped))


async def set_two_phase_state(connection: asyncpg.Connection, subid: int, state: TwoPhaseState) -> None:
    """What a statement or a worker found it to be."""
    await connection.execute(SET_TWO_PHASE_STATE, subid, state.value)


async def enable_two_phase(connection: asyncpg.Connection, subid: int) -> bool:
    """Pending becomes enabled, if there are tables and all of them are ready; whether that is so.

    To be asked before the stream is started with two_phase, which cannot be taken back: a REFRESH PUBLICATION may be
    adding a table at this moment. A worker that is killed in between finds it enabled, and starts the stream so.
    """
    async with connection.transaction():
        await connection.execute(LOCK_TWO_PHASE_STATE, subid)
        return await connection.execute(ENABLE_TWO_PHASE, subid) == "UPDATE 1"


async def has_prepared_transactions(connection: asyncpg.Connection, subid: int) -> bool:
    """Whether a transaction of the subscription is prepared on the target, `pg_gid_<subid>_<xid>`."""
    return bool(await connection.fetchval(PREPARED_HERE, prepared_prefix(subid)))


async def has_committed_ahead(connection: asyncpg.Connection, subid: int) -> bool:
    """Whether a prepared transaction was committed on the target and progress does not know yet.

    The worker was killed in between, or somebody committed it by hand.
    """
    return bool(await connection.fetchval(COMMITTED_AHEAD, subid))


async def load_prepared(connection: asyncpg.Connection) -> list[asyncpg.Record]:
    """Return subid, gid, publisher_gid and prepared_at of the transactions that are prepared, oldest first."""
    return list(await connection.fetch(PREPARED))


async def delete_prepared(connection: asyncpg.Connection, subid: int) -> None:
    """Remove what is noted about prepared transactions; they themselves stay prepared."""
    await connection.execute(FORGET_PREPARED, subid)


def _relation_state(row: asyncpg.Record) -> SubscriptionRel:
    return SubscriptionRel(row["srrelid"], row["nspname"], row["relname"], row["srsubstate"], _lsn(row["srsublsn"]))


async def load_relation_states(
    connection: asyncpg.Connection, subid: int, *, not_ready: bool = False
) -> list[SubscriptionRel]:
    """The subscription's tables by OID, without those that were dropped on the target."""
    return [_relation_state(row) for row in await connection.fetch(RELATION_STATES, subid, not_ready)]


async def load_relation_state(connection: asyncpg.Connection, subid: int, relid: int) -> SubscriptionRel | None:
    """One table; None if it is not part of the subscription, or does not exist."""
    row = await connection.fetchrow(RELATION_STATE, subid, relid)
    return None if row is None else _relation_state(row)


async def add_relation(
    connection: asyncpg.Connection, subid: int, relid: int, state: str, lsn: Lsn | None = None
) -> bool:
    """Make a table part of the subscription; false if it is already."""
    return await connection.execute(ADD_RELATION, subid, relid, state, _text(lsn)) == "INSERT 0 1"


async def set_relation_state(
    connection: asyncpg.Connection, subid: int, relid: int, state: str, lsn: Lsn | None
) -> bool:
    """False if the table is no longer part of the subscription: a refresh removed it."""
    return await connection.execute(SET_RELATION_STATE, subid, relid, state, _text(lsn)) == "UPDATE 1"


async def set_relation_states(connection: asyncpg.Connection, subid: int, relids: Sequence[int], state: str) -> None:
    """Several tables at once, all or none; those that are no longer part of the subscription are left out."""
    await connection.executemany(SET_RELATION_STATE, [(subid, relid, state, None) for relid in relids])


async def remove_relation(connection: asyncpg.Connection, subid: int, relid: int) -> bool:
    """False if it was not part of the subscription."""
    return await connection.execute(REMOVE_RELATION, subid, relid) == "DELETE 1"


async def record_conflict_error(connection: asyncpg.Connection, subid: int, line: str) -> None:
    """Record a conflict that has stopped the stream, once more if it is known; `line` is of a target's history.py."""
    await connection.execute(RECORD_CONFLICT_ERROR, subid, line)


async def set_publisher(connection: asyncpg.Connection, subid: int, system_id: str, timeline: int) -> None:
    """Store the publisher's system identifier and timeline."""
    await connection.execute(SET_PUBLISHER, subid, system_id, timeline)


async def forget_publisher(connection: asyncpg.Connection, subid: int) -> None:
    """Have the next connection find out which cluster the publisher is."""
    await connection.execute(FORGET_PUBLISHER, subid)


async def load_reached(connection: asyncpg.Connection, subid: int) -> Lsn:
    """Return the highest position of changes of the publisher that were applied or copied."""
    return _lsn(await connection.fetchval(REACHED, subid)) or Lsn(0)


def relation_sources_query(subid: int) -> str:
    """Return a query without parameters: OID, state, and the source's schema and table of each table with hooks."""
    return (
        f"SELECT srrelid, srsubstate, srsource[1], srsource[2] FROM subscriber.subscription_rel WHERE srsubid = {subid}"
    )


async def load_handed_over(connection: asyncpg.Connection, subid: int) -> Lsn:
    """Return the highest position at which a table was handed over to the apply worker."""
    return _lsn(await connection.fetchval(HANDED_OVER, subid)) or Lsn(0)


async def report_worker(connection: asyncpg.Connection, status: WorkerStatus) -> None:
    """Write the worker's row, new or again; nothing happens if the subscription is gone."""
    await connection.execute(REPORT_WORKER, *_worker_values(status))


async def report_workers(connection: asyncpg.Connection, statuses: Sequence[WorkerStatus]) -> None:
    """The same for several, all or none, without an answer to wait for between them."""
    await connection.executemany(REPORT_WORKER, [_worker_values(status) for status in statuses])


def _shown(text: str | None) -> str | None:
    """Text that may be the publisher's, as people see it who ask the views; no database refuses it."""
    return None if text is None else printable_lines(text, "")


def _worker_values(status: WorkerStatus) -> tuple[object, ...]:
    return (
        status.subid,
        status.relid,
        status.worker_type,
        status.pid,
        status.state,
        _text(status.received_lsn),
        status.last_msg_send_time,
        status.last_msg_receipt_time,
        _text(status.latest_end_lsn),
        status.latest_end_time,
        _shown(status.error),
        status.error_time,
        _shown(status.error_hint),
        status.next_retry,
        status.transactions,
        status.changes,
        status.bytes,
        status.copy_rows,
        status.copy_bytes,
        status.copy_total_bytes,
        status.leader_pid,
        _shown(status.waiting_for),
        json.dumps([asdict(transaction) for transaction in status.streamed]),
        list(status.limits),
        json.dumps(dict(status.one_by_one)),
        status.format,
        _shown(status.format_reason),
    )


async def remove_worker(connection: asyncpg.Connection, subid: int, relid: int) -> None:
    """For a worker that has ended for good."""
    await connection.execute(REMOVE_WORKER, subid, relid)


async def load_workers(connection: asyncpg.Connection) -> list[WorkerStatus]:
    """All rows as the workers left them; whether a worker still lives, pg_stat_subscription says."""
    statuses = []
    for row in await connection.fetch(WORKERS):
        values = dict(row)
        values["received_lsn"] = _lsn(values["received_lsn"])
        values["latest_end_lsn"] = _lsn(values["latest_end_lsn"])
        values["limits"] = tuple(values["limits"])
        values["one_by_one"] = json.loads(values["one_by_one"])
        values["streamed"] = tuple(StreamedStatus(**found) for found in json.loads(values["streamed"]))
        statuses.append(WorkerStatus(**values))
    return statuses
