"""Progress on the target: a row that is committed with the data, and the replication origin beside it.

Theory of operation. The row decides. It is updated in the transaction that applies a remote
transaction, so what it says is what the tables have. The origin is kept in step for those who read
pg_replication_origin_status, tags our commits (origin = none, conflict detection) and carries the
remote commit time; but it is never believed: from PostgreSQL 16 on an abort moves it to the position
that was set up last, although nothing was committed. A restart puts it back to what the row says.

The update names the position it starts from and raises an error when the row says something else, or is
not there: its subscription was dropped. So commits can be sent one after another without waiting: if one
fails, every later one fails as well, and so does one from a session that was believed dead and is not.

Kill points considered, W the worker, T the target:
- W dies, or its connection, before COMMIT reaches T: T rolls back; the row has the old position.
- after COMMIT reached T, before the answer: the row has the new position or the old, as the data has.
- T's backend still works while a new worker starts: the advisory lock makes the new one wait until the
  backend is gone (or ends it), and only then is the row read.
- T crashes with synchronous_commit = off: commits that were answered may be gone, row and data alike;
  nothing was confirmed to the publisher before a flush said it is on disk. A restarted worker flushes
  before it reads, since the row it sees may not be on disk either.
- COMMIT fails on a deferred constraint after the origin was set up: the origin is ahead, the row is not.
"""

from __future__ import annotations

from struct import Struct

from subscriber.connection.pipeline import Pipeline
from subscriber.lsn import Lsn

OUT_OF_STEP = "SB002"  # SQLSTATE of our own: the row does not say what this session left there

_ADVANCE = f"""
WITH moved AS (
 UPDATE subscriber.progress SET remote_lsn = $4 WHERE subid = $1 AND relid = $2 AND remote_lsn = $3
 RETURNING EFFECT AS done)
SELECT CASE WHEN count(done) = 1 THEN true
            ELSE subscriber.raise_error('{OUT_OF_STEP}', 'another session has moved the progress of this subscription')
       END
  FROM moved
"""
_WITH_ORIGIN = _ADVANCE.replace("EFFECT", "pg_catalog.pg_replication_origin_xact_setup($4, $5)")
_WITHOUT_ORIGIN = _ADVANCE.replace("EFFECT", "$5::pg_catalog.timestamptz")

_SET_ORIGIN = "SELECT pg_catalog.pg_replication_origin_xact_setup($1, $2)"

_ALL_BINARY = b"\0\1\0\1"
_POSITION_AND_TIME = Struct(">HiQiq")
_PARAMETERS = Struct(">HiIiIiQiQiq")


class ProgressRow:
    """The row of one worker: the apply worker's (`relid` 0) or that of a table sync worker.

    `position` is what the row says once everything sent has been committed.
    """

    def __init__(self, subid: int, relid: int, position: Lsn, *, with_origin: bool) -> None:
        self.position = position
        self._subid, self._relid = subid, relid
        self._with_origin = with_origin
        self._sql = _WITH_ORIGIN if with_origin else _WITHOUT_ORIGIN

    def copy(self) -> ProgressRow:
        """The same row, for another session of the same worker."""
        return ProgressRow(self._subid, self._relid, self.position, with_origin=self._with_origin)

    def advance(self, pipeline: Pipeline, end_lsn: Lsn, commit_time: int, note: object) -> None:
        """Queue the update; the last statement before COMMIT. `commit_time` as the protocol has it."""
        parameters = _PARAMETERS.pack(5, 4, self._subid, 4, self._relid, 8, self.position, 8, end_lsn, 8, commit_time)
        pipeline.execute(self._sql, _ALL_BINARY, parameters, note=note)
        self.position = end_lsn

    def set_origin(self, pipeline: Pipeline, lsn: Lsn, time: int, note: object) -> None:
        """Queue what PREPARE TRANSACTION and COMMIT PREPARED, which move no row, tell the origin."""
        if self._with_origin:
            parameters = _POSITION_AND_TIME.pack(2, 8, lsn, 8, time)
            pipeline.execute(_SET_ORIGIN, _ALL_BINARY, parameters, note=note)
