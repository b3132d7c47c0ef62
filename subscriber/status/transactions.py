"""The part of `subscriber status` about open transactions, streamed and prepared, and about waits. No I/O here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from subscriber import formatting
from subscriber.catalog.store.workers import StreamedStatus, WorkerStatus

SHOWN = 5  # of each kind in text; JSON has all
PARALLEL = "parallel apply"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prepared transaction on the target."""

    gid: str  # on the target
    publisher_gid: str | None
    since: datetime | None  # when the publisher prepared it


@dataclass(frozen=True, slots=True)
class OpenTransactions:
    """The open transactions of one subscription, at one moment."""

    streamed: tuple[StreamedStatus, ...] = ()
    prepared: tuple[Prepared, ...] = ()
    parallel_pids: tuple[int, ...] = ()  # backends of parallel apply workers on the target, both busy and idle
    waiting_for: str | None = (
        None  # the lock holder that has blocked the apply worker for a second or more; None: nothing
    )


def find(
    worker: WorkerStatus | None, workers: Iterable[WorkerStatus], prepared: Sequence[Prepared]
) -> OpenTransactions:
    """Collect the open transactions of a subscription.

    Args:
        worker: the apply worker, if it runs.
        workers: all running workers of any subscription.
    """
    if worker is None:
        return OpenTransactions(prepared=tuple(prepared))
    pids = [w.pid for w in workers if w.subid == worker.subid and w.worker_type == PARALLEL and w.pid is not None]
    return OpenTransactions(worker.streamed, tuple(prepared), tuple(pids), worker.waiting_for)


def describe(unfinished: OpenTransactions, now: datetime) -> list[tuple[str, str]]:
    """Return (label, text) of each line."""
    lines = []
    if unfinished.waiting_for is not None:
        lines.append(("waiting for", unfinished.waiting_for))
    if unfinished.parallel_pids:
        number = formatting.count(len(unfinished.parallel_pids), "worker")
        lines.append(("parallel", f"{number} ({', '.join(map(str, unfinished.parallel_pids))})"))
    lines += _shortened("streamed", [_streamed(transaction, now) for transaction in unfinished.streamed])
    lines += _shortened("prepared", [_prepared(transaction, now) for transaction in unfinished.prepared])
    return lines


def _shortened(label: str, texts: list[str]) -> list[tuple[str, str]]:
    lines = [(label, text) for text in texts[:SHOWN]]
    if len(texts) > SHOWN:
        lines.append((label, f"and {len(texts) - SHOWN:,} more"))
    return lines


def _streamed(transaction: StreamedStatus, now: datetime) -> str:
    size = f"{formatting.count(transaction.changes, 'change')}, {formatting.in_bytes(transaction.bytes)}"
    where = "kept" if transaction.worker is None else f"applied by parallel worker {transaction.worker}"
    return f"transaction {transaction.xid}: {size}, for {formatting.in_seconds(_age(transaction, now))}, {where}"


def _prepared(transaction: Prepared, now: datetime) -> str:
    since = "" if transaction.since is None else f", for {formatting.in_seconds(_passed(transaction.since, now))}"
    return f"{transaction.gid}, on the publisher '{transaction.publisher_gid}'{since}"


def as_json(unfinished: OpenTransactions, now: datetime) -> dict[str, Any]:
    """Return the transactions as a JSON value: sizes in bytes, ages in seconds."""
    return {
        "waiting_for": unfinished.waiting_for,
        "parallel_pids": list(unfinished.parallel_pids),
        "streamed": [
            {
                "xid": transaction.xid,
                "changes": transaction.changes,
                "bytes": transaction.bytes,
                "age": round(_age(transaction, now), 1),
                "worker": transaction.worker,
            }
            for transaction in unfinished.streamed
        ],
        "prepared": [
            {
                "gid": transaction.gid,
                "publisher_gid": transaction.publisher_gid,
                "age": None if transaction.since is None else round(_passed(transaction.since, now), 1),
            }
            for transaction in unfinished.prepared
        ],
    }


def _age(transaction: StreamedStatus, now: datetime) -> float:
    return _passed(datetime.fromtimestamp(transaction.since, UTC), now)


def _passed(since: datetime, now: datetime) -> float:
    return max(0.0, (now - since).total_seconds())
