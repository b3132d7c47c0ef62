"""The history of conflicts: what each was about and what was done, in subscriber.conflict_history.

Kill points considered, W the worker:

- A conflict that does not stop the stream is recorded in the transaction that applies the change, which is also the
  one that moves the progress: both are there, or neither is and the change comes again.
- One that stops the stream takes its transaction back, so it is recorded in a transaction of its own afterwards. If W
  is killed before that, the change comes again, the same conflict with it. If W is killed after that, it comes again
  as well, and finds its line: `occurrences` counts the attempts, a line is one conflict.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from subscriber.apply.conflict import Conflict, LocalRow
from subscriber.apply.context import RemoteTransaction
from subscriber.apply.policy import Outcome, Rule
from subscriber.connection.pipeline import Pipeline
from subscriber.protocol import wire
from subscriber.subscription import ConflictHistory

EPOCH = datetime(2000, 1, 1, tzinfo=UTC)

_COLUMNS = (
    "subid",
    "relid",
    "relation",
    "conflict_type",
    "index_name",
    "key",
    "remote_xid",
    "remote_finish_lsn",
    "remote_commit_time",
    "local_xid",
    "local_origin",
    "local_commit_time",
    "policy",
    "resolution",
    "local_row",
    "remote_row",
)
_NUMBERS = ", ".join(f"${number}" for number in range(1, len(_COLUMNS) + 1))
_RECORD = f"INSERT INTO subscriber.conflict_history ({', '.join(_COLUMNS)}) VALUES ({_NUMBERS})"
# The lock of the worker that has failed is still held, so nobody else records for the subscription.
_AGAIN = """
UPDATE subscriber.conflict_history SET occurrences = occurrences + 1, last_detected = pg_catalog.clock_timestamp()
 WHERE subid = $1 AND relid = $2 AND conflict_type = $3 AND index_name IS NOT DISTINCT FROM $4
   AND key IS NOT DISTINCT FROM $5 AND remote_finish_lsn = $6 AND resolution = 'error'
RETURNING 1
"""


@dataclass(frozen=True, slots=True)
class History:
    """What of a subscription's conflicts is recorded, and how."""

    subid: int
    kept: ConflictHistory
    with_rows: bool

    def record(
        self,
        pipeline: Pipeline,
        conflict: Conflict,
        relid: int,
        transaction: RemoteTransaction,
        rule: Rule,
        resolution: str,
        note: object,
    ) -> None:
        """Queue what records a conflict with the transaction that is open. `relid` is the mapped table's."""
        if self.kept is ConflictHistory.NONE:
            return
        for line in self._lines(conflict, relid, transaction, rule, resolution):
            pipeline.execute(_RECORD, parameters=wire.text_parameters(line), note=note)

    async def record_error(
        self, pipeline: Pipeline, conflict: Conflict, relid: int, transaction: RemoteTransaction, rule: Rule
    ) -> None:
        """Record a conflict that has stopped the stream, or that it has stopped it again.

        `pipeline` is a fresh one, on a session that nothing was applied on.
        """
        if self.kept is ConflictHistory.NONE:
            return
        await pipeline.rows("BEGIN")
        for line in self._lines(conflict, relid, transaction, rule, Outcome.ERROR):
            value = dict(zip(_COLUMNS, line, strict=True))
            known = ("subid", "relid", "conflict_type", "index_name", "key", "remote_finish_lsn")
            if not await pipeline.rows(_AGAIN, *(value[name] for name in known)):
                await pipeline.rows(_RECORD, *line)
        await pipeline.rows("COMMIT")

    def _lines(
        self, conflict: Conflict, relid: int, transaction: RemoteTransaction, rule: Rule, resolution: str
    ) -> Iterator[tuple[str | None, ...]]:
        """The values of _COLUMNS: for each row that was in conflict, or once if there was none."""
        rows: tuple[LocalRow | None, ...] = conflict.local_rows or (None,)
        for row in rows:
            key = conflict.key
            if row is not None and row.index is not None:
                key = {name: row.values.get(name) for name in row.key}
            writer = row.writer if row is not None else None
            yield (
                str(self.subid),
                str(relid),
                conflict.relation,
                conflict.type,
                row.index if row is not None else None,
                _json(key or None),
                str(transaction.xid),
                str(transaction.finish_lsn),
                _time(transaction.commit_time),
                writer.xid if writer is not None else None,
                writer.origin if writer is not None else None,
                _time(writer.committed) if writer is not None else None,
                str(rule),
                resolution,
                _json(row.values if row is not None and self.with_rows else None),
                _json(conflict.remote if self.with_rows else None),
            )


def _json(row: Mapping[str, str | None] | None) -> str | None:
    return None if row is None else json.dumps(row, ensure_ascii=False)


def _time(microseconds: int | None) -> str | None:
    return None if microseconds is None else (EPOCH + timedelta(microseconds=microseconds)).isoformat()
