"""Statements on `subscriber.worker`: the reports that workers write about themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from enum import StrEnum

import asyncpg

from subscriber.display import jsonb_text, printable_lines
from subscriber.lsn import Lsn, optional_lsn
from subscriber.remedy import Remedy, hint_of


class WorkerState(StrEnum):
    """The state of a worker, as it reports it. A report may have details behind the state."""

    STARTING = "starting"
    CONNECTING = "connecting"
    WAITING_TO_RETRY = "waiting to retry"
    STOPPED = "stopped"  # until somebody acts
    DISABLED = "disabled"
    # Apply workers, and their additional sessions.
    STREAMING = "streaming"
    APPLYING = "applying"
    # Table synchronization workers.
    COPYING = "copying"
    COMPARING = "comparing"
    REPAIRING = "repairing"
    CATCHING_UP = "catching up"
    PAUSED = "paused outside of range_window"
    BUILDING_INDEXES = "building indexes"
    ADDING_CONSTRAINTS = "adding constraints"
    ADDING_FOREIGN_KEYS = "adding foreign keys"
    WAITING_FOR_USERS = "waiting for transactions that use the table"
    WAITING_FOR_WRITERS = "waiting for transactions that write to the table"
    WAITING_FOR_APPLY_WORKER = "waiting for the apply worker"
    # Sequence synchronization workers.
    WAITING_FOR_TABLES = "waiting for a table synchronization worker to finish"
    SYNCHRONIZING = "synchronizing"
    FOLLOWING = "following"


APPLY_WORKER = 0  # the relid in the rows of apply workers

REPORT_WORKER = """
INSERT INTO subscriber.worker AS w (subid, relid, worker_type, pid, state, received_lsn, last_msg_send_time,
       last_msg_receipt_time, latest_end_lsn, latest_end_time, error, error_time, error_hint, next_retry, transactions,
       changes, bytes, copy_rows, copy_bytes, copy_total_bytes, leader_pid, waiting_for, streamed, limits, one_by_one,
       format, format_reason, error_sqlstate, error_is_transient, error_remedy, started, updated_at)
SELECT $1::oid, $2::oid, $3::text, $4::int, $5::text, $6::text::pg_lsn, $7::timestamptz, $8::timestamptz,
       $9::text::pg_lsn, $10::timestamptz, $11::text, $12::timestamptz, $13::text, $14::timestamptz, $15::bigint,
       $16::bigint, $17::bigint, $18::bigint, $19::bigint, $20::bigint, $21::int, $22::text, $23::text::jsonb,
       nullif($24::text[], '{}'), $25::text::jsonb, $26::text, $27::text,
       $28::text, $29::boolean, $30::text::jsonb, now(), now()
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
       format_reason = excluded.format_reason, error_sqlstate = excluded.error_sqlstate,
       error_is_transient = excluded.error_is_transient, error_remedy = excluded.error_remedy,
       started = CASE WHEN w.pid IS DISTINCT FROM excluded.pid THEN excluded.started ELSE w.started END,
       updated_at = excluded.updated_at
"""
REMOVE_WORKER = "DELETE FROM subscriber.worker WHERE subid = $1 AND relid = $2"
WORKERS = """
SELECT w.subid, w.relid, w.worker_type, w.pid, w.state, w.received_lsn::text AS received_lsn, w.last_msg_send_time,
       w.last_msg_receipt_time, w.latest_end_lsn::text AS latest_end_lsn, w.latest_end_time, w.error, w.error_time,
       w.error_remedy::text AS error_remedy, w.next_retry, w.transactions, w.changes, w.bytes, w.copy_rows,
       w.copy_bytes, w.copy_total_bytes, w.leader_pid, w.waiting_for, w.streamed::text AS streamed,
       coalesce(w.limits, '{}') AS limits,
       w.one_by_one::text AS one_by_one, w.format, w.format_reason, w.error_sqlstate, w.error_is_transient,
       w.started, w.updated_at
  FROM subscriber.worker w ORDER BY w.subid, w.relid
"""


@dataclass(frozen=True, slots=True)
class StreamedStatus:
    """A streamed transaction that has not ended."""

    xid: int
    changes: int
    bytes: int
    since: float  # seconds since 1970
    worker: int | None  # the parallel apply worker that applies it; None: it is in its spool file


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """The report of one worker. None means that the worker does not know the value. Counters start with the worker.

    The server sets `started` and `updated_at`; a report ignores them. `started` changes when `pid` does.
    """

    subid: int
    relid: int  # APPLY_WORKER, the table being synchronized, or the number of a parallel apply worker
    worker_type: str  # "apply", "parallel apply" or "table synchronization", as in pg_stat_subscription
    state: str  # a WorkerState and details. Another version of the program may have other states
    pid: int | None = None  # the worker's backend on the target
    received_lsn: Lsn | None = None
    last_msg_send_time: datetime | None = None
    last_msg_receipt_time: datetime | None = None
    latest_end_lsn: Lsn | None = None
    latest_end_time: datetime | None = None
    error: str | None = None
    error_time: datetime | None = None
    error_remedy: Remedy | None = None
    error_sqlstate: str | None = None
    error_is_transient: bool | None = None  # whether a retry alone can solve it
    next_retry: datetime | None = None
    transactions: int = 0
    changes: int = 0
    bytes: int = 0
    copy_rows: int = 0
    copy_bytes: int = 0
    copy_total_bytes: int = 0
    leader_pid: int | None = None  # of a parallel apply worker
    waiting_for: str | None = None  # the lock or session that its backend has waited for, for a second or more
    streamed: tuple[StreamedStatus, ...] = ()
    limits: tuple[str, ...] = ()  # capabilities that the target lacks
    one_by_one: Mapping[str, int] = field(
        default_factory=dict
    )  # number of changes that were not applied in batches, by reason
    format: str | None = None  # how an apply worker receives values: binary or text
    format_reason: str | None = None  # the reason for text, if the option binary is not set
    started: datetime | None = None
    updated_at: datetime | None = None

    @property
    def error_hint(self) -> str | None:
        """The text of `error_remedy`."""
        return hint_of(self.error_remedy)


async def report_worker(connection: asyncpg.Connection, status: WorkerStatus) -> None:
    """Insert or update the worker's row. Does nothing if the subscription has been dropped."""
    await connection.execute(REPORT_WORKER, *_worker_values(status))


def _shown(text: str | None) -> str | None:
    """Escape text that may be the publisher's, so that views can show it and every server encoding can store it."""
    return None if text is None else printable_lines(text, "")


def _worker_values(status: WorkerStatus) -> tuple[object, ...]:
    remedy = None if status.error_remedy is None else status.error_remedy.map(lambda text: printable_lines(text, ""))
    return (
        status.subid,
        status.relid,
        status.worker_type,
        status.pid,
        status.state,
        None if status.received_lsn is None else str(status.received_lsn),
        status.last_msg_send_time,
        status.last_msg_receipt_time,
        None if status.latest_end_lsn is None else str(status.latest_end_lsn),
        status.latest_end_time,
        _shown(status.error),
        status.error_time,
        hint_of(remedy),
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
        status.error_sqlstate,
        status.error_is_transient,
        None if remedy is None else jsonb_text(remedy.as_json()),
    )


async def remove_worker(connection: asyncpg.Connection, subid: int, relid: int) -> None:
    """Delete the row of a worker that has ended and will not restart."""
    await connection.execute(REMOVE_WORKER, subid, relid)


async def load_workers(connection: asyncpg.Connection) -> list[WorkerStatus]:
    """Return the last report of every worker. pg_stat_subscription shows which workers are running."""
    statuses = []
    for row in await connection.fetch(WORKERS):
        values = dict(row)
        values["received_lsn"] = optional_lsn(values["received_lsn"])
        values["latest_end_lsn"] = optional_lsn(values["latest_end_lsn"])
        values["error_remedy"] = Remedy.from_json(json.loads(values["error_remedy"] or "null"))
        values["limits"] = tuple(values["limits"])
        values["one_by_one"] = json.loads(values["one_by_one"])
        values["streamed"] = tuple(StreamedStatus(**transaction) for transaction in json.loads(values["streamed"]))
        statuses.append(WorkerStatus(**values))
    return statuses


async def load_permanent_error(connection: asyncpg.Connection, subid: int) -> WorkerStatus | None:
    """Return the report of the subscription's apply worker if it has an error that a retry alone cannot solve."""
    for worker in await load_workers(connection):
        if (worker.subid, worker.relid) == (subid, APPLY_WORKER) and worker.error and not worker.error_is_transient:
            return worker
    return None
