"""The states a table goes through while it is synchronized, and who applies its changes meanwhile.

    init ─▶ datasync ─▶ finishedcopy ─▶ syncwait ─▶ catchup ─▶ syncdone ─▶ ready
    (i)       (d)           (f)            (w)         (c)        (s)        (r)

    state         set by         stored   what happens in it
    init          statement      yes      nobody has begun
    datasync      sync worker    yes      copying; a crash starts the copy again
    finishedcopy  sync worker    yes      the copy is committed; a crash goes on from there
    syncwait      sync worker    no       waits for the apply worker to name a position
    catchup       apply worker   no       sync worker applies its own table's changes up to that position
    syncdone      sync worker    yes      caught up at srsublsn; apply worker takes the table from there
    ready         apply worker   yes      the apply worker alone has the table

Why no change is lost or applied twice. F is where a transaction's commit record starts. The copy has
exactly the transactions with F < P, the snapshot's position. The sync worker applies those with
P <= F < T, and the apply worker those with F >= T, where T is srsublsn of syncdone. T is the end of a
commit record or a position at which nothing was open, so no commit record straddles it; and T is never
below the apply worker's own position, or it would already have passed over what it should apply.

If the apply worker has passed over nothing of the table with P <= F, it has seen in its own stream that the sync
worker's would bring nothing, and that one need not be started. It must have begun to look at or before P.

srsublsn stays T in ready, and is still looked at: transactions that the apply worker passed over leave no
trace in its progress row, so after a crash of the publisher they may come again, and must be passed over again.

Source: tablesync.c and should_apply_changes_for_rel() in worker.c.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from subscriber.lsn import Lsn


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
    TableState.DATASYNC: frozenset({TableState.DATASYNC, TableState.FINISHEDCOPY}),
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
    """

    relid: int
    state: TableState
    lsn: Lsn = NOWHERE

    def move(self, state: TableState, lsn: Lsn) -> None:
        """Go to `state`. Raises ValueError for a step that the table above does not have."""
        if state not in NEXT[self.state]:
            raise ValueError(f"table {self.relid} cannot go from {self.state.name} to {state.name}")
        self.state, self.lsn = state, lsn

    def applies(self, finish_lsn: Lsn) -> bool:
        """Whether the apply worker applies a change of a transaction that finished at `finish_lsn`."""
        return self.state in (TableState.SYNCDONE, TableState.READY) and self.lsn <= finish_lsn


def catchup_target(snapshot: Lsn, position: Lsn) -> Lsn:
    """The position a sync worker has to reach: not below its snapshot nor below the apply worker."""
    return max(snapshot, position)
