"""Progress on the target: a record that is committed with the data, and the replication origin beside it.

Purpose. The record decides. It is moved in the transaction that applies a remote transaction, so it says what the
tables have. It is a large object: PostgreSQL never publishes large objects, while FOR ALL TABLES publishes every
permanent table, also to subscribers that have no such table. The origin is kept in step for readers of
pg_replication_origin_status, tags our commits (origin = none, conflict detection) and carries the remote commit time.
It never decides: from PostgreSQL 16 on an abort moves it to the position that was set up last, although nothing was
committed. A restart puts it back to where the record is.

Invariants. Each move names the position it starts from and shows the fence, random bytes that the worker got when it
claimed the record (subscriber.claim_progress()). The server refuses a move from another position or with an older
fence. So commits can be sent one after another without waiting: if one fails, every later one fails as well, and so
does one from a session that was believed dead and is not.

Each move also names the generation of the subscription's settings that the worker has. The server refuses
it once a statement has changed them, although the launcher has not stopped the worker yet. So commits after an
ALTER SUBSCRIPTION use the new settings, and there are none after DISABLE.

Failure cases, W the worker, T the target:
- W dies, or its connection, before COMMIT reaches T: T rolls back; the record has the old position.
- W dies after COMMIT reached T, before the answer: the record has the new position or the old, as the data has.
- T's backend still works while a new worker starts: the claim waits for its commit, or makes it fail.
- T crashes with synchronous_commit = off: commits that were answered may be gone, record and data alike; nothing was
  confirmed to the publisher before a flush said it is on disk. The claim of a worker that starts again is committed
  synchronously, so the position it read is on disk.
- COMMIT fails on a deferred constraint after the origin was set up: the origin is ahead, the record is not.
"""

from __future__ import annotations

from struct import Struct

from subscriber.apply.progress import ProgressClaim
from subscriber.connection.pipeline import Pipeline
from subscriber.lsn import Lsn

_ADVANCE = "SELECT subscriber.advance($1, $2, $5, $6, $7, WITH_ORIGIN), subscriber.check_generation($3, $4)"
_SET_ORIGIN = "SELECT subscriber.set_origin($1, $2, $5, $6), subscriber.check_generation($3, $4)"

_ALL_BINARY = b"\0\1\0\1"
_CLAIM = Struct(">HiIi12siIii")  # the number of parameters, the record, the fence, the subscription, its generation
_MOVE = Struct(">iQiQiq")
_POSITION_AND_TIME = Struct(">iQiq")


class ProgressRecord:
    """The record of one worker.

    `position` is what the record says once everything sent has been committed.
    """

    def __init__(self, claim: ProgressClaim, *, with_origin: bool) -> None:
        self.position = claim.position
        self.claim = claim
        self._with_origin = with_origin
        self._sql = _ADVANCE.replace("WITH_ORIGIN", str(with_origin).lower())

    @property
    def shown(self) -> tuple[str, str]:
        """Record and fence as text parameters."""
        return str(self.claim.record), f"\\x{self.claim.fence.hex()}"

    def follow(self, position: Lsn) -> None:
        """Another session of the worker has moved the record to `position`, or will have before this one moves it."""
        self.position = position

    def advance(self, pipeline: Pipeline, end_lsn: Lsn, commit_time: int, note: object) -> None:
        """Queue the move; the last statement before COMMIT. `commit_time` as the protocol has it."""
        parameters = self._claimed(7) + _MOVE.pack(8, self.position, 8, end_lsn, 8, commit_time)
        pipeline.execute(self._sql, _ALL_BINARY, parameters, note=note)
        self.position = end_lsn

    def set_origin(self, pipeline: Pipeline, lsn: Lsn, time: int, note: object) -> None:
        """Queue the origin's position for PREPARE TRANSACTION and COMMIT PREPARED, which move no record."""
        if self._with_origin:
            parameters = self._claimed(6) + _POSITION_AND_TIME.pack(8, lsn, 8, time)
            pipeline.execute(_SET_ORIGIN, _ALL_BINARY, parameters, note=note)

    def _claimed(self, count: int) -> bytes:
        """The first four of `count` parameters."""
        claim = self.claim
        return _CLAIM.pack(count, 4, claim.record, 12, claim.fence, 4, claim.subid, 4, claim.generation)
