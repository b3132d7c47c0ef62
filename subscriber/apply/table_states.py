"""States of a table during its synchronization, and the worker that applies its changes in each.

    init ─▶ datasync ─▶ finishedcopy ─▶ syncwait ─▶ catchup ─▶ syncdone ─▶ ready
    (i)       (d)           (f)            (w)         (c)        (s)        (r)

    state         set by         stored   meaning
    init          statement      yes      the copy has not started
    datasync      sync worker    yes      copying; after a crash the copy starts over
    finishedcopy  sync worker    yes      the copy is committed; after a crash the next step resumes from there
    syncwait      sync worker    no       waits for the apply worker to name a position
    catchup       apply worker   no       sync worker applies its own table's changes up to that position
    syncdone      sync worker    yes      caught up at srsublsn; apply worker takes the table from there
    ready         apply worker   yes      the apply worker alone has the table

Why no change is lost or applied twice. F is the start of a transaction's commit record. The copy contains
exactly the transactions with F < P, the snapshot's position. The sync worker applies those with
P <= F < T, and the apply worker those with F >= T, where T is srsublsn of syncdone. T is the end of a
commit record or a position at which no transaction was open, so no commit record straddles it. T is never
below the apply worker's own position: otherwise the apply worker would already have skipped changes that it must apply.

If the apply worker has skipped no change of the table with P <= F, its own stream shows that the sync worker has no
change to apply, and the sync worker is not started. The apply worker's stream must have begun at or before P.

A table that is copied by ranges goes from datasync to syncdone. The apply worker has its changes from the start:
subscriber/ranges/__init__.py. T is a position from which on no range contains a transaction of the stream.

srsublsn stays T in ready, and is still compared. Transactions that the apply worker skipped leave no trace in its
progress row. After a crash of the publisher they may be sent again, and must be skipped again.

Source: tablesync.c and should_apply_changes_for_rel() in worker.c.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from subscriber.lsn import Lsn
from subscriber.ranges.table_ranges import TableRanges


class TableState(StrEnum):
    """`pg_subscription_rel.srsubstate`; the values are the catalog's letters."""

    INIT = "i"
    DATASYNC = "d"
    FINISHEDCOPY = "f"
    SYNCWAIT = "w"
    CATCHUP = "c"
    SYNCDONE = "s"
    READY = "r"


# Which states may follow which; a restart of the sync worker goes back from w and c to f.
NEXT: dict[TableState, frozenset[TableState]] = {
    TableState.INIT: frozenset({TableState.DATASYNC}),
    # A table that is copied by ranges needs no position to catch up to.
    TableState.DATASYNC: frozenset({TableState.DATASYNC, TableState.FINISHEDCOPY, TableState.SYNCDONE}),
    TableState.FINISHEDCOPY: frozenset({TableState.SYNCWAIT}),
    TableState.SYNCWAIT: frozenset({TableState.CATCHUP, TableState.FINISHEDCOPY}),
    TableState.CATCHUP: frozenset({TableState.SYNCDONE, TableState.FINISHEDCOPY}),
    TableState.SYNCDONE: frozenset({TableState.READY}),
    TableState.READY: frozenset(),
}

STORED = frozenset(
    {TableState.INIT, TableState.DATASYNC, TableState.FINISHEDCOPY, TableState.SYNCDONE, TableState.READY}
)


NOWHERE = Lsn(0)


@dataclass(slots=True)
class RelationState:
    """One table of a subscription, as its workers see it. `relid` is the OID on the target.

    `lsn` belongs to the state: the snapshot's position in syncwait, the target in catchup, srsublsn
    in syncdone and ready; 0 when no position is known, and in ready when the table was not copied.

    `ranges` belongs to datasync: the ranges of a table that is copied by ranges. They decide the changes that applies()
    leaves. They go with the state, so a table without ranges is one whose changes the apply worker does not have.
    """

    relid: int
    state: TableState
    lsn: Lsn = NOWHERE
    ranges: TableRanges | None = None

    def move(self, state: TableState, lsn: Lsn) -> None:
        """Go to `state`. Raises ValueError for a step that the table above does not have."""
        if state not in NEXT[self.state]:
            raise ValueError(f"table {self.relid} cannot go from {self.state.name} to {state.name}")
        self.correct(state, lsn)

    def correct(self, state: TableState, lsn: Lsn) -> None:
        """Take over the stored state, from any other one."""
        self.state, self.lsn = state, lsn
        if state is not TableState.DATASYNC:
            self.ranges = None

    def applies(self, finish_lsn: Lsn) -> bool:
        """Return True if the apply worker applies a change of a transaction that finished at `finish_lsn`."""
        return self.state in (TableState.SYNCDONE, TableState.READY) and self.lsn <= finish_lsn


def catchup_target(snapshot: Lsn, position: Lsn) -> Lsn:
    """Return the position that a sync worker has to reach: not below its snapshot nor below the apply worker."""
    return max(snapshot, position)
