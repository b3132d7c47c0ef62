"""The states of one subscription's tables, shared by its apply worker and its table sync workers.

What the catalog stores is loaded into here, and what workers tell each other (syncwait, catchup) is only
here: both are tasks of one process. Everybody who waits is woken at every change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic

import anyio

from subscriber.apply.relation_map import LocalRelation
from subscriber.apply.table_states import NOWHERE, STORED, RelationState, TableState, catchup_target
from subscriber.catalog.copy_jobs import BulkCopy
from subscriber.catalog.hooked_tables import Sources
from subscriber.catalog.store.subscription_rel import SubscriptionRel
from subscriber.catalog.table_names import LostTable
from subscriber.errors import StaleCatalog
from subscriber.lsn import Lsn
from subscriber.settings import DEFAULTS


class TableStates:
    def __init__(self, hold_time: float = DEFAULTS.sync_hold_time) -> None:
        """`hold_time`: seconds for which tables that are not ready hold the applied position back."""
        self._hold_time = hold_time
        self._since: dict[int, float] = {}  # when a table that is not ready was first seen
        self._states: dict[int, RelationState] = {}
        self.names: dict[int, tuple[str, str]] = {}  # relid on the target -> schema, name, as stored
        self._relids: dict[tuple[str, str], int] = {}  # the other way round, with the lost ones
        self._lost: dict[tuple[str, str], LostTable] = {}
        self.sources: Sources = {}  # of tables with hooks: whose rows they take
        self.unready: dict[int, RelationState] = {}
        self.bulk: BulkCopy | None = None  # tables that are copied together, and handed over together
        self._changed = anyio.Event()
        self.on_change: Callable[[], None] | None = None  # wakes the apply loop
        self._watched: Lsn | None = None  # where the apply worker began, if it asks applies() about every change
        self._missed: dict[int, Lsn] = {}  # the finish LSN of the newest change that it has passed over since
        self._quiet: set[int] = set()  # tables in catchup that have nothing to catch up with

    def load(self, rows: Iterable[SubscriptionRel], syncing: Iterable[int], lost: Iterable[LostTable] = ()) -> None:
        """Take over what the catalog says, but leave alone the tables that are `syncing` just now.

        The catalog is never behind: every state is stored before it is moved to. (Call this under the
        catalog's lock, so that nothing is stored between reading the rows and taking them over.)
        """
        busy = set(syncing)
        found = {}
        for row in rows:
            known = self._states.get(row.relid)
            if known is None:
                known = RelationState(row.relid, TableState(row.state), row.lsn or Lsn(0))
            elif row.relid not in busy:
                known.state, known.lsn = TableState(row.state), row.lsn or Lsn(0)
            found[row.relid] = known
            self.names[row.relid] = (row.namespace, row.name)
        self._states = {relid: found[relid] for relid in (*self._states, *found) if relid in found}
        self._lost = {(table.namespace, table.name): table for table in lost}
        self._relids = {self.names[relid]: relid for relid in found}
        self._relids |= {name: table.relid for name, table in self._lost.items()}
        self.notify()

    def relid(self, local: LocalRelation) -> int | None:
        """Return the stored OID of the subscription's table that has the name of `local`; None if it has none."""
        return self._relids.get((local.schema, local.name))

    def find(self, local: LocalRelation) -> RelationState | None:
        """Return the state of a table of the target that changes are about to go to.

        Returns:
            None if the table is not part of the subscription: its changes are not applied.

        Raises:
            StaleCatalog: another table had the name when the tables were loaded, and load() may find them again.
            MappingError: another table had the name, and load() has not found them again.
        """
        relid = self.relid(local)
        if relid is None:  # renamed on both sides, if it is one of the subscription's
            return self._states.get(local.oid)
        if relid != local.oid:
            lost = self._lost.get((local.schema, local.name))
            if lost is not None:
                raise lost.error()
            raise StaleCatalog(f'table "{local.schema}.{local.name}" was replaced')
        return self._states.get(relid)

    def get(self, relid: int) -> RelationState | None:
        """None: the table is not part of the subscription, and its changes are not applied."""
        return self._states.get(relid)

    @property
    def relids(self) -> frozenset[int]:
        """All tables of the subscription."""
        return frozenset(self._states)

    @property
    def all_ready(self) -> bool:
        """Whether there are tables, and all of them are ready."""
        return bool(self._states) and not self.unready

    def group(self) -> list[int]:
        """The tables of the subscription that were copied together."""
        return [relid for relid in self.bulk.parts if relid in self._states] if self.bulk is not None else []

    # --- what the apply worker applies, and what it leaves to sync workers ------------------------

    def watch(self, start: Lsn | None) -> None:
        """An apply worker begins at `start`, and applies() will see every change; None: some never come that way."""
        self._watched = start
        self._missed.clear()

    def applies(self, local: LocalRelation, finish_lsn: Lsn) -> bool:
        """Whether the apply worker applies a change; it asks in the stream's order. Raises as find() does."""
        state = self.find(local)
        if state is not None and state.applies(finish_lsn):
            return True
        self._missed[local.oid] = finish_lsn
        return False

    def hand_over(self, relid: int, position: Lsn) -> None:
        """From syncwait to catchup: the apply worker stands at `position`.

        If it has passed over nothing of the table since the snapshot, it has seen for the sync worker that there is
        nothing to catch up with. That stays so if another apply worker begins.
        """
        table = self._states[relid]
        quiet = self._watched is not None and self._watched <= table.lsn > self._missed.get(relid, NOWHERE)
        (self._quiet.add if quiet else self._quiet.discard)(relid)
        self.move(relid, TableState.CATCHUP, catchup_target(table.lsn, position))

    def is_quiet(self, relid: int) -> bool:
        """Whether a table in catchup has nothing to catch up with."""
        return relid in self._quiet

    def move(self, relid: int, state: TableState, lsn: Lsn) -> None:
        self._states[relid].move(state, lsn)
        self.notify()

    def correct(self, row: SubscriptionRel) -> None:
        """Take over what the catalog says of one table; its sync worker does, once it has the table's lock."""
        table = self._states.get(row.relid)
        if table is not None:
            table.state, table.lsn = TableState(row.state), row.lsn or Lsn(0)

    def restore(self, relid: int) -> None:
        """A sync worker has ended early: what it and the apply worker agreed on is void. Other tables come first."""
        table = self._states.pop(relid, None)
        if table is not None:
            self._states[relid] = table
            if table.state not in STORED:
                table.state, table.lsn = TableState.FINISHEDCOPY, Lsn(0)
        self.notify()

    def notify(self) -> None:
        self.unready = {relid: table for relid, table in self._states.items() if table.state is not TableState.READY}
        self._since = {relid: self._since.get(relid, monotonic()) for relid in self.unready}
        event, self._changed = self._changed, anyio.Event()
        event.set()
        if self.on_change is not None:
            self.on_change()

    def incomplete(self) -> bool:
        """Whether "applied" would be too much said: tables have been on their way for a short time only.

        What came for them has been passed over, so the applied position that the publisher shows (and waits for
        under synchronous_commit = remote_apply) stays where it is, until they are there or `sync_hold_time` is over.
        Nothing else waits for them: written and flushed positions go on.
        """
        now = monotonic()
        return any(now - self._since[relid] < self._hold_time for relid in self.unready)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()
