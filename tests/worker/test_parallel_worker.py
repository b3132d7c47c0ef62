"""The changes that a parallel worker may apply and when, and the victim of a deadlock: without a server."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import anyio
import anyio.lowlevel
import pytest

from subscriber.apply.batch.batch import AppendedChanges
from subscriber.spool.spool import Spool, SpooledTransaction
from subscriber.targets.postgres.target import PostgresTarget
from subscriber.worker.apply.lock_waits import _holder, _stuck
from subscriber.worker.apply_hooks import ApplyRules
from subscriber.worker.streaming.parallel_worker import Assignment, AssignmentOutcome, ParallelWorker, Pool


class File:
    """The part of SpooledTransaction that the leader's side uses."""

    xid = 731
    written = 0


def assignment() -> tuple[Assignment, File]:
    file = File()
    return Assignment(cast(SpooledTransaction, file), 3500000001, ApplyRules()), file


async def test_changes_after_a_commit_wait_for_it() -> None:
    following, file = assignment()
    file.written = 100
    following.extend(4)
    following.committed(3)
    assert following.until == 0
    file.written = 250
    following.extend(5)
    following.committed(4)
    assert following.until == 100
    following.committed(7)
    assert following.until == 250


async def test_a_truncated_file_withdraws_the_permission_for_its_later_bytes() -> None:
    following, file = assignment()
    file.written = 100
    following.extend(1)
    file.written = 300
    following.extend(2)
    following.committed(1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(following.truncate, 50)
        await anyio.wait_all_tasks_blocked()
        assert following.is_leader_waiting
        following.resolve(AssignmentOutcome.GIVEN_UP)
    assert following.until == 50
    file.written = 200
    following.extend(3)
    following.committed(2)
    assert following.until == 50
    following.committed(3)
    assert following.until == 200


class Taking:
    """A target that records its input, and a leader that extends the assignment while the target works."""

    codec = "utf-8"
    takes_payloads = True

    def __init__(self, following: Assignment, allow: list[int]) -> None:
        self.taken: list[bytes] = []
        self._following = following
        self._allow = allow

    def append_raw_changes(
        self, _transaction: object, waiting: deque[bytes], _limit: int, *_: object
    ) -> AppendedChanges:
        self.taken += waiting
        count = len(waiting)
        waiting.clear()
        return AppendedChanges(count, count)

    def flush(self) -> None:
        pass

    async def flush_if_full(self) -> None:
        if self._allow:
            self._following.committed(self._allow.pop(0))

    async def flush_transaction(self, _transaction: object) -> None:
        await self.flush_if_full()

    async def leave_batch_mode(self, _transaction: object) -> None:
        pass


async def test_changes_allowed_in_the_middle_of_a_run_are_applied(tmp_path: Path) -> None:
    """Commits of the leader are answered while a part of a run is applied that ends where they allowed no more."""
    spool = Spool(tmp_path / "spool", limit=None)
    await spool.open()
    spooled = spool.start(731, first=True)
    following = Assignment(spooled, 3500000001, ApplyRules())
    messages = [b"I%d" % number for number in range(1000)]
    for number, message in enumerate(messages):
        spooled.append(731, message)
        if number % 100 == 99:
            await spooled.write()
            following.extend(number // 100)
    target = Taking(following, [5, 9])
    following.committed(0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(following.run, cast(PostgresTarget, target))
        with anyio.fail_after(5):
            assert await _ended(following)
    assert [frame[25:] for frame in target.taken] == messages
    await spool.close()


class HoldingBack(Taking):
    """A target that holds changes back until the transaction is flushed."""

    def __init__(self, following: Assignment, caplog: pytest.LogCaptureFixture) -> None:
        super().__init__(following, [])
        self.early: list[str] = []
        self._caplog = caplog

    async def flush_transaction(self, _transaction: object) -> None:
        self.early += applied(self._caplog)


def applied(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if "in the streaming chunk" in message]


async def test_changes_that_are_held_back_are_not_called_applied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "subscriber")
    spool = Spool(tmp_path / "spool", limit=None)
    await spool.open()
    spooled = spool.start(731, first=True)
    following = Assignment(spooled, 3500000001, ApplyRules())
    for number in range(1000):
        spooled.append(731, b"I%d" % number)
    await spooled.write()
    following.extend(0)
    following.committed(0)
    target = HoldingBack(following, caplog)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(following.run, cast(PostgresTarget, target))
        with anyio.fail_after(5):
            await _ended(following)
    assert target.early == []
    assert applied(caplog) == ["applied 1000 changes in the streaming chunk"]
    await spool.close()


async def _ended(following: Assignment) -> bool:
    while following.applied < 1000:
        await anyio.sleep(0.01)

    async def end(_: PostgresTarget) -> None:
        following.resolve(AssignmentOutcome.DONE)

    return await following.finish_with(end)


@pytest.mark.parametrize("outcome", [AssignmentOutcome.DONE, AssignmentOutcome.GIVEN_UP])
async def test_the_leader_waits_for_the_end(outcome: AssignmentOutcome) -> None:
    following, file = assignment()
    file.written = 100
    outcomes = []

    async def leader() -> None:
        outcomes.append(await following.finish_with(lambda _: anyio.lowlevel.checkpoint()))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(leader)
        await anyio.wait_all_tasks_blocked()
        assert (following.is_leader_waiting, following.until, outcomes) == (True, 100, [])
        following.resolve(outcome)
    assert outcomes == [outcome is AssignmentOutcome.DONE]
    assert not following.is_leader_waiting
    with anyio.fail_after(1):
        await following.truncate(0)  # there is no worker to wait for


def test_a_pool_has_no_more_workers_than_it_may() -> None:
    nobody = Pool(0, lambda _number, _told: pytest.fail("no session is wanted"), lambda _found, _note: None)
    assert nobody.assign(assignment()[0]) is None


# --- deadlocks ------------------------------------------------------------------------------------

LEADER, STRANGER = 1, 99


def worker(pid: int, *, awaited: bool) -> ParallelWorker:
    return cast(ParallelWorker, SimpleNamespace(pid=pid, assignment=SimpleNamespace(is_leader_waiting=awaited)))


@pytest.mark.parametrize(
    ("blockers", "awaited", "victim"),
    [
        ({}, [], None),
        ({LEADER: [STRANGER]}, [], None),
        ({LEADER: [11]}, [], 11),
        ({LEADER: [STRANGER, 11]}, [], 11),
        ({LEADER: [11], 11: [12]}, [11], 12),
        ({LEADER: [11], 11: [STRANGER]}, [11], None),
        ({LEADER: [11], 11: [12], 12: [11]}, [11, 12], None),  # that one the server sees
        ({12: [11]}, [], None),  # 12 blocks no worker yet
        ({LEADER: [0]}, [], None),  # something prepared
    ],
)
def test_the_worker_that_holds_up_the_stream_is_found(
    blockers: Mapping[int, Sequence[int]], awaited: Sequence[int], victim: int | None
) -> None:
    workers = {pid: worker(pid, awaited=pid in awaited) for pid in (11, 12)}
    holder = _holder([LEADER], blockers, workers)
    assert (holder and holder.pid) == victim


@pytest.mark.parametrize(
    ("prepared", "stuck"),
    [
        ({}, None),
        ({LEADER: ["pg_gid_7_1"]}, None),
        ({11: ["pg_gid_8_1", "somebody's"]}, None),
        ({11: ["somebody's", "pg_gid_7_1"]}, (11, "pg_gid_7_1")),
    ],
)
def test_a_worker_that_waits_for_a_prepared_transaction_of_its_subscription_is_found(
    prepared: Mapping[int, Sequence[str]], stuck: tuple[int, str] | None
) -> None:
    holder = _stuck(prepared, {11: worker(11, awaited=True)}, "pg_gid_7_")
    assert (holder and (holder[0].pid, holder[1])) == stuck
