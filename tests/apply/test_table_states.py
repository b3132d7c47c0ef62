"""The table states, and their guarantee: every change reaches the table exactly once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from subscriber.apply.table_states import NEXT, NOWHERE, STORED, RelationState, TableState, catchup_target
from subscriber.lsn import Lsn

STEPS = {
    (TableState.INIT, TableState.DATASYNC),
    (TableState.DATASYNC, TableState.DATASYNC),
    (TableState.DATASYNC, TableState.FINISHEDCOPY),
    (TableState.DATASYNC, TableState.SYNCDONE),
    (TableState.FINISHEDCOPY, TableState.SYNCWAIT),
    (TableState.SYNCWAIT, TableState.CATCHUP),
    (TableState.SYNCWAIT, TableState.FINISHEDCOPY),
    (TableState.CATCHUP, TableState.SYNCDONE),
    (TableState.CATCHUP, TableState.FINISHEDCOPY),
    (TableState.SYNCDONE, TableState.READY),
}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(TableState, TableState)))
def test_table_states_change_only_by_the_listed_steps(before: TableState, after: TableState) -> None:
    table = RelationState(16384, before, Lsn(7))
    if (before, after) in STEPS:
        table.move(after, Lsn(8))
        assert (table.state, table.lsn) == (after, 8)
    else:
        with pytest.raises(ValueError, match=f"cannot go from {before.name} to {after.name}"):
            table.move(after, Lsn(8))
        assert (table.state, table.lsn) == (before, 7)


def test_every_table_state_has_a_row_in_the_list_of_steps() -> None:
    assert set(NEXT) == set(TableState)
    assert {letter.value for letter in TableState} == set("idfwcsr")
    assert {letter.value for letter in STORED} == set("idfsr")


@pytest.mark.parametrize("state", TableState)
def test_the_state_of_a_table_decides_which_worker_applies_a_change(state: TableState) -> None:
    table = RelationState(16384, state, Lsn(100))
    handed_over = state in (TableState.SYNCDONE, TableState.READY)
    assert not table.applies(Lsn(99))
    assert table.applies(Lsn(100)) is handed_over
    assert table.applies(Lsn(101)) is handed_over


def test_a_table_that_was_never_copied_is_the_apply_workers_from_the_start() -> None:
    assert RelationState(16384, TableState.READY).applies(Lsn(1))


def test_the_catch_up_target_is_the_later_of_both_positions() -> None:
    assert catchup_target(Lsn(5), Lsn(3)) == catchup_target(Lsn(3), Lsn(5)) == 5


class Handover(RuleBasedStateMachine):
    """One table, an apply worker and a table sync worker that run in any order and die at any time.

    A transaction is (start of its commit record, end of it). After a restart, the apply worker resumes from its
    progress row or from the confirmed position. Either may be older than the transactions that it has seen, because a
    transaction without changes does not update the row.
    """

    @initialize(gaps=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=8))
    def publish(self, gaps: list[tuple[int, int]]) -> None:
        self.wal: list[tuple[Lsn, Lsn]] = []
        position = 10
        for gap, length in gaps:
            self.wal.append((Lsn(position + gap), Lsn(position + gap + length)))
            position += gap + length
        self.table = RelationState(16384, TableState.INIT)
        self.position = Lsn(10)  # of the apply worker
        self.row = Lsn(10)  # its progress row
        self.sync_position = NOWHERE
        self.applied: dict[Lsn, list[str]] = {finish: [] for finish, _ in self.wal}

    def next_of(self, position: Lsn) -> tuple[Lsn, Lsn] | None:
        return next(((finish, end) for finish, end in self.wal if finish >= position), None)

    def between_transactions(self, data: st.DataObject, start: Lsn) -> Lsn:
        """Return a position from `start` on, up to the next commit record, as a keepalive has it."""
        following = self.next_of(start)
        return Lsn(data.draw(st.integers(start, following[0] if following else start + 3)))

    def boundary(self) -> None:
        """Run the apply worker's work between transactions."""
        if self.table.state is TableState.SYNCWAIT:
            self.table.move(TableState.CATCHUP, catchup_target(self.table.lsn, self.position))
        elif self.table.state is TableState.SYNCDONE and self.position >= self.table.lsn:
            self.table.move(TableState.READY, self.table.lsn)

    @property
    def waits_for_sync(self) -> bool:
        return self.table.state is TableState.CATCHUP

    @precondition(lambda self: not self.waits_for_sync)
    @rule()
    def apply_worker_gets_a_transaction(self) -> None:
        if following := self.next_of(self.position):
            finish, end = following
            if self.table.applies(finish):
                self.applied[finish].append("apply worker")
                self.row = end
            self.position = end
            self.boundary()

    @precondition(lambda self: not self.waits_for_sync)
    @rule(data=st.data())
    def apply_worker_gets_a_keepalive(self, data: st.DataObject) -> None:
        self.position = self.between_transactions(data, self.position)
        self.boundary()

    @rule(data=st.data())
    def apply_worker_dies(self, data: st.DataObject) -> None:
        candidates = [self.row, *(end for _, end in self.wal if self.row <= end <= self.position)]
        self.position = data.draw(st.sampled_from(candidates))
        self.boundary()

    @precondition(lambda self: self.table.state in (TableState.INIT, TableState.DATASYNC))
    @rule(data=st.data(), dies=st.booleans())
    def sync_worker_copies(self, data: st.DataObject, dies: bool) -> None:
        self.table.move(TableState.DATASYNC, NOWHERE)
        if dies:
            return
        snapshot = self.between_transactions(data, data.draw(st.sampled_from([Lsn(10), *(end for _, end in self.wal)])))
        for finish, _ in self.wal:
            if finish < snapshot:
                self.applied[finish].append("copy")
        self.sync_position = snapshot
        self.table.move(TableState.FINISHEDCOPY, snapshot)

    @precondition(lambda self: self.table.state is TableState.FINISHEDCOPY)
    @rule()
    def sync_worker_waits(self) -> None:
        self.table.move(TableState.SYNCWAIT, self.sync_position)

    @precondition(lambda self: self.table.state is TableState.CATCHUP)
    @rule(data=st.data(), idle=st.booleans())
    def sync_worker_goes_on(self, data: st.DataObject, idle: bool) -> None:
        following = self.next_of(self.sync_position)
        if self.sync_position >= self.table.lsn:
            self.table.move(TableState.SYNCDONE, self.sync_position)
        elif idle or following is None:
            self.sync_position = self.between_transactions(data, self.sync_position)
        else:
            finish, self.sync_position = following
            self.applied[finish].append("sync worker")

    @precondition(lambda self: self.table.state in (TableState.SYNCWAIT, TableState.CATCHUP))
    @rule()
    def sync_worker_dies(self) -> None:
        self.table.move(TableState.FINISHEDCOPY, NOWHERE)

    @invariant()
    def nothing_twice(self) -> None:
        assert all(len(by) <= 1 for by in self.applied.values()), self.applied

    @invariant()
    def nothing_lost(self) -> None:
        if self.table.state is TableState.READY:
            assert all(by for finish, by in self.applied.items() if finish < self.position), self.applied


Handover.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestHandover = Handover.TestCase
