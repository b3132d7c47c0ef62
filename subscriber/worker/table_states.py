"""TableStates: the states of one subscription's tables, shared by its apply worker and its synchronization workers.

States of the catalog are loaded into this object. States by which the workers coordinate (syncwait, catchup) exist only
here, because all workers are tasks of one process. Every change wakes all waiting tasks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic

import anyio

from subscriber.apply.relation_map import LocalRelation
from subscriber.apply.table_states import NOWHERE, STORED, RelationState, TableState, catchup_target
from subscriber.catalog.hooked_tables import Sources
from subscriber.catalog.store.subscription_rel import SubscriptionRel
from subscriber.catalog.table_names import LostTable, divided_changes
from subscriber.errors import StaleCatalog
from subscriber.lsn import Lsn
from subscriber.ranges.table_ranges import TableRanges
from subscriber.settings import DEFAULTS
from subscriber.subscription import TableCopy


@dataclass(slots=True)
class StreamTimeline:
    """The publisher's timeline.

    Attributes:
        started: the timeline when the apply worker started. 0: none has started.
        latest: the timeline that a copy has found since. The apply worker starts again if it is another one.
    """

    started: int = 0
    latest: int = 0

    def start(self, timeline: int) -> None:
        """Record the timeline with which an apply worker starts."""
        self.started = self.latest = timeline

    def see(self, timeline: int) -> bool:
        """Record the timeline that a copy has found. Returns True if the apply worker has to start again."""
        self.latest = timeline
        return self.has_changed

    @property
    def has_changed(self) -> bool:
        """True if a copy has found another timeline than that of the apply worker."""
        return self.started != self.latest


class TableStates:
    """The states of one subscription's tables. Tables are identified by their OID on the target.

    Attributes:
        names: schema and name of each table, as the catalog stores them.
        replaced: names under which changes have arrived while another table has the name on the target.
        sources: the published table of each table with a hook.
        unready: the tables that are not ready.
        copies: the way in which the rows of each table are synchronized, by OID.
        without_foreign_keys: tables to which the publisher's foreign keys are to be added when they are ready, by OID.
        indexing: tables whose indexes are being built, by OID. No range of them is read meanwhile.
        timeline: the publisher's timeline, as the apply worker and copies have found it.
        listeners: called after each change. One wakes the apply loop.
        claiming: held from the claim of copies until their ranges are loaded. A copy that an apply worker and a
            synchronization worker claimed in turns would commit ranges that the apply worker does not know.
    """

    def __init__(self, hold_time: float = DEFAULTS.sync_hold_time) -> None:
        """Create the states. `hold_time` limits the seconds for which incomplete() is True because of one table."""
        self._hold_time = hold_time
        self._since: dict[int, float] = {}  # monotonic time at which a table that is not ready was first loaded
        self._states: dict[int, RelationState] = {}
        self.names: dict[int, tuple[str, str]] = {}
        self.replaced: set[tuple[str, str]] = set()
        self._relids: dict[tuple[str, str], int] = {}  # OIDs by schema and name, including lost tables
        self._lost: dict[tuple[str, str], LostTable] = {}
        self._successors: dict[int, int] = {}  # OIDs of tables that have taken a name, by OID of the former table
        self.sources: Sources = {}
        self.unready: dict[int, RelationState] = {}
        self.copies: dict[int, TableCopy] = {}
        self.without_foreign_keys: set[int] = set()
        self.indexing: set[int] = set()
        self.timeline = StreamTimeline()
        self.claiming = anyio.Lock()
        self._changed = anyio.Event()
        self.listeners: list[Callable[[], None]] = []
        self._watched: Lsn | None = None  # start of the apply worker's stream; None: applies() does not see all changes
        self._missed: dict[int, Lsn] = {}  # finish LSN of the newest change that the apply worker has skipped since
        self._quiet: set[int] = set()  # tables in catchup without a change to catch up with

    def load(
        self,
        rows: Iterable[SubscriptionRel],
        syncing: Iterable[int],
        lost: Iterable[LostTable] = (),
        sources: Sources | None = None,
    ) -> None:
        """Take over the states of the catalog, except for tables whose synchronization worker runs.

        The catalog is never behind, because a state is stored before the table moves to it. The caller must use the
        catalog session exclusively, so that no state is stored between reading `rows` and this call. REFRESH TABLE sets
        a table to init while its worker may run. That worker is being canceled, and stores no other state.

        Args:
            rows: the subscription's tables as stored.
            syncing: OIDs of tables whose worker runs. Their states stay as they are.
            lost: tables whose name belongs to another table now.
            sources: see the attribute. None: no table has a hook.
        """
        self.sources = {} if sources is None else sources
        busy, rows = set(syncing), list(rows)
        states = {}
        for row in rows:
            known = self._states.get(row.relid)
            if known is None:
                known = RelationState(row.relid, TableState(row.state), row.lsn or Lsn(0))
            elif row.relid not in busy or row.state == TableState.INIT:
                known.correct(TableState(row.state), row.lsn or Lsn(0))
            states[row.relid] = known
            self.names[row.relid] = (row.namespace, row.name)
            self.copies[row.relid] = row.copy
        self._states = {relid: states[relid] for relid in (*self._states, *states) if relid in states}
        self.without_foreign_keys = {row.relid for row in rows if row.lacks_foreign_keys}
        self._lost = {(table.namespace, table.name): table for table in lost}
        self._successors = {row.former: row.relid for row in rows if row.former is not None}
        self._relids = {self.names[relid]: relid for relid in states}
        self._relids |= {name: table.relid for name, table in self._lost.items()}
        self.notify()

    def relid(self, local: LocalRelation) -> int | None:
        """Return the stored OID of the subscription's table that has the name of `local`. None: there is none."""
        return self._relids.get((local.schema, local.name))

    def find(self, local: LocalRelation) -> RelationState | None:
        """Return the state of the table that changes are going to be applied to.

        A table of the subscription is known by its OID, as in PostgreSQL, also if both sides have renamed it.

        Returns:
            None if the table is not part of the subscription: its changes are not applied.

        Raises:
            StaleCatalog: another table had the name when the tables were loaded, and load() may find them again.
            MappingError: another table had the name, and load() has not found them again. Or another table has taken
                the place of this one in the subscription, and both get changes now.
        """
        if (state := self._states.get(local.oid)) is not None:
            return state
        name = (local.schema, local.name)
        if name in self._relids:
            if (lost := self._lost.get(name)) is not None:
                raise lost.error()
            self.replaced.add(name)
            raise StaleCatalog(f'table "{local.schema}.{local.name}" was replaced')
        if (successor := self._successors.get(local.oid)) is not None:
            raise divided_changes(name, self.names[successor])
        return None

    def get(self, relid: int) -> RelationState | None:
        """Return the state of a table. None: it is not part of the subscription, and its changes are not applied."""
        return self._states.get(relid)

    @property
    def relids(self) -> frozenset[int]:
        """The OIDs of all tables of the subscription."""
        return frozenset(self._states)

    @property
    def all_ready(self) -> bool:
        """True if the subscription has tables and all are ready."""
        return bool(self._states) and not self.unready

    # --- division of changes between the apply worker and synchronization workers -----------------

    def watch(self, start: Lsn | None) -> None:
        """Start to record the changes that an apply worker skips.

        Args:
            start: the start of the worker's stream. None: applies() will not see all changes, so no table is quiet.
        """
        self._watched = start
        self._missed.clear()

    def applies(self, local: LocalRelation, finish_lsn: Lsn) -> bool:
        """Return True if the apply worker applies a change. Must be called in the order of the stream.

        Raises:
            StaleCatalog, MappingError: the table was replaced, see find().
        """
        state = self.find(local)
        if state is not None and state.applies(finish_lsn):
            return True
        self._missed[local.oid] = finish_lsn
        return False

    def hand_over(self, relid: int, position: Lsn) -> None:
        """Move a table from syncwait to catchup. `position` is the apply worker's.

        The table is quiet if the apply worker has skipped no change of the table since the snapshot. Then the
        synchronization worker has no change to catch up with. This stays true if another apply worker starts.
        """
        table = self._states[relid]
        quiet = self._watched is not None and self._watched <= table.lsn > self._missed.get(relid, NOWHERE)
        (self._quiet.add if quiet else self._quiet.discard)(relid)
        self.move(relid, TableState.CATCHUP, catchup_target(table.lsn, position))

    def is_quiet(self, relid: int) -> bool:
        """Return True if a table in catchup has no change to catch up with."""
        return relid in self._quiet

    # --- tables that are copied by ranges ---------------------------------------------------------

    @property
    def divided(self) -> dict[int, TableRanges]:
        """The ranges of each table that is being copied by ranges, by OID."""
        return {relid: table.ranges for relid, table in self.unready.items() if table.ranges is not None}

    def ranges(self, relid: int) -> TableRanges | None:
        """Return the ranges of a table. None: it is not being copied by ranges."""
        table = self._states.get(relid)
        return None if table is None else table.ranges

    def move(self, relid: int, state: TableState, lsn: Lsn) -> None:
        """Move a table to another state, which has been stored if the catalog stores it.

        Raises:
            ValueError: the state cannot follow the table's current state.
        """
        self._states[relid].move(state, lsn)
        self.notify()

    def correct(self, row: SubscriptionRel) -> None:
        """Take over the stored state of one table. Called by its synchronization worker after it has the place."""
        table = self._states.get(row.relid)
        if table is not None:
            table.correct(TableState(row.state), row.lsn or Lsn(0))
            self.copies[row.relid] = row.copy

    def restore(self, relid: int) -> None:
        """Update a table whose synchronization worker has ended, with or without an error.

        A table in syncwait or catchup returns to finishedcopy, because no worker is left to continue. The table becomes
        the last one, so that workers of other tables start before its next attempt.
        """
        table = self._states.pop(relid, None)
        if table is not None:
            self._states[relid] = table
            if table.state not in STORED:
                table.correct(TableState.FINISHEDCOPY, Lsn(0))
        self.notify()

    def notify(self) -> None:
        """Update `unready`, wake all waiting tasks, and call the listeners."""
        self.unready = {relid: table for relid, table in self._states.items() if table.state is not TableState.READY}
        self._since = {relid: self._since.get(relid, monotonic()) for relid in self.unready}
        event, self._changed = self._changed, anyio.Event()
        event.set()
        for listener in self.listeners:
            listener()

    def incomplete(self) -> bool:
        """Return True while the reported apply position must not advance.

        The apply worker skips changes of tables that are not ready. The publisher shows the apply position, and waits
        for it under synchronous_commit = remote_apply. So the position stays until the tables are ready, or for
        `sync_hold_time`. The write and flush positions advance.
        """
        now = monotonic()
        return any(now - self._since[relid] < self._hold_time for relid in self.unready)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` is true. It is evaluated after each change."""
        while not condition():
            await self._changed.wait()


@asynccontextmanager
async def building_indexes(tables: TableStates, relid: int) -> AsyncIterator[None]:
    """Exclude other builds of a table's indexes, and reads of its ranges, for the length of the block."""
    await tables.wait_until(lambda: relid not in tables.indexing)
    tables.indexing.add(relid)
    try:
        yield
    finally:
        tables.indexing.discard(relid)
        tables.notify()
