"""The position confirmed to the publisher: never too far, and in the end complete."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from subscriber.apply.progress import Positions, Progress
from subscriber.lsn import Lsn


def positions(write: int, flush: int, apply: int) -> Positions:
    return Positions(Lsn(write), Lsn(flush), Lsn(apply))


def test_a_fresh_connection_has_what_the_last_one_left() -> None:
    assert Progress(Lsn(7)).positions == positions(7, 7, 7)


def test_a_position_is_confirmed_at_once_when_nothing_is_pending() -> None:
    progress = Progress(Lsn(7))
    progress.note(Lsn(9))
    assert progress.positions == positions(9, 9, 9)


def test_a_commit_is_confirmed_when_it_is_on_disk() -> None:
    progress = Progress(Lsn(7))
    assert progress.commit_sent(Lsn(10)) == 1
    assert progress.positions == positions(10, 7, 7)
    progress.commit_done(1)
    assert progress.positions == positions(10, 7, 10)
    progress.made_durable(1)
    assert progress.positions == positions(10, 10, 10)


def test_a_keepalive_waits_for_what_came_before_it_and_for_nothing_else() -> None:
    progress = Progress(Lsn(0))
    progress.commit_sent(Lsn(10))
    progress.note(Lsn(15))
    progress.commit_sent(Lsn(20))
    progress.note(Lsn(25))
    progress.note(Lsn(26))
    progress.made_durable(1)
    assert progress.positions == positions(26, 15, 15)
    progress.commit_done(2)
    assert progress.positions == positions(26, 15, 26)
    progress.made_durable(2)
    assert progress.positions == positions(26, 26, 26)


def test_positions_do_not_go_back() -> None:
    progress = Progress(Lsn(50))
    progress.note(Lsn(40))  # of a change: these may be lower than the commit before
    progress.commit_sent(Lsn(60))
    progress.note(Lsn(55))
    progress.commit_sent(Lsn(70))
    progress.made_durable(2)
    progress.made_durable(1)
    assert progress.positions == positions(70, 70, 70)


class Confirming(RuleBasedStateMachine):
    """Any order of commits, their answers, flushes of the target and other positions."""

    @initialize(start=st.integers(0, 5))
    def connect(self, start: int) -> None:
        self.progress = Progress(Lsn(start))
        self.at = start  # end of the stream so far
        self.commits: list[int] = []  # their ends, in order
        self.highest = [start]  # [n]: highest position noted before commit n + 1 was sent
        self.committed = self.durable = 0
        self.before = self.progress.positions

    @rule(step=st.integers(1, 5))
    def commit(self, step: int) -> None:
        self.at += step
        self.commits.append(self.at)
        assert self.progress.commit_sent(Lsn(self.at)) == len(self.commits)
        self.highest.append(self.at)

    @rule(step=st.integers(-3, 5))
    def keepalive_or_empty_transaction(self, step: int) -> None:
        position = max(0, self.at + step)
        self.progress.note(Lsn(position))
        self.at = max(self.at, position)
        self.highest[-1] = max(self.highest[-1], position)

    @precondition(lambda self: self.committed < len(self.commits))
    @rule(data=st.data())
    def answered(self, data: st.DataObject) -> None:
        self.committed = data.draw(st.integers(self.committed + 1, len(self.commits)))
        self.progress.commit_done(self.committed)

    @precondition(lambda self: self.durable < self.committed)
    @rule(data=st.data())
    def flushed(self, data: st.DataObject) -> None:
        self.durable = data.draw(st.integers(self.durable + 1, self.committed))
        self.progress.made_durable(self.durable)

    @rule()
    def everything_comes_to_an_end(self) -> None:
        self.committed = self.durable = len(self.commits)
        self.progress.commit_done(self.committed)
        self.progress.made_durable(self.durable)
        assert self.progress.positions == positions(self.at, self.at, self.at)

    @invariant()
    def exactly_what_is_durable_is_confirmed(self) -> None:
        now = self.progress.positions
        assert now.write == max(self.highest)
        assert now.flush == max(self.highest[: self.durable + 1])
        assert now.apply == max(self.highest[: self.committed + 1])

    @invariant()
    def in_order_and_never_back(self) -> None:
        now = self.progress.positions
        assert now.flush <= now.apply <= now.write
        assert all(new >= old for new, old in zip(now, self.before, strict=True))
        self.before = now


Confirming.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestConfirming = Confirming.TestCase


def test_a_flush_that_takes_long_does_not_make_commits_slow() -> None:
    """While many commits wait for the disk, the answer to one is handled without looking at all the others."""
    comparisons = 0

    class Counted(Lsn):
        def __gt__(self, other: int) -> bool:
            nonlocal comparisons
            comparisons += 1
            return int(self) > int(other)

    progress = Progress(Lsn(0))
    for number in range(1, 501):
        progress.commit_sent(Counted(number))
        progress.commit_done(number)
    assert comparisons < 10 * 500
    progress.made_durable(500)
    assert progress.positions == positions(500, 500, 500)
