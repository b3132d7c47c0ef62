"""The table states that workers share, and the apply worker's part in changing them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from subscriber.apply.relation_map import LocalRelation
from subscriber.apply.table_states import TableState
from subscriber.catalog.store.subscription_rel import SubscriptionRel
from subscriber.catalog.table_names import LostTable
from subscriber.errors import MappingError, StaleCatalog
from subscriber.lsn import Lsn
from subscriber.subscription import TwoPhaseState
from subscriber.worker.apply.pause import PauseGate
from subscriber.worker.apply.worker import ApplyWorker
from subscriber.worker.table_states import TableStates


def stored(relid: int, state: str, lsn: int | None = None) -> SubscriptionRel:
    return SubscriptionRel(relid, "s", f"t{relid}", TableState(state), None if lsn is None else Lsn(lsn))


def local(relid: int, name: str | None = None) -> LocalRelation:
    """Return the target's table with that OID, and with the stored name or another one."""
    return LocalRelation(relid, "s", name or f"t{relid}", False, "owner", (), (), "")


def loaded(*rows: SubscriptionRel) -> TableStates:
    tables = TableStates()
    tables.load(rows, ())
    return tables


def states(tables: TableStates, *relids: int) -> str:
    return "".join(table.state.value if (table := tables.get(relid)) else "-" for relid in relids)


def test_states_of_the_catalog_are_taken_over() -> None:
    tables = loaded(stored(1, "r", 50), stored(2, "s", 70), stored(3, "i"))
    assert states(tables, 1, 2, 3, 4) == "rsi-"
    assert tables.names[1] == ("s", "t1")
    assert set(tables.unready) == {2, 3}
    assert tables.applies(local(1), Lsn(50))
    assert tables.applies(local(2), Lsn(70))
    assert not tables.applies(local(2), Lsn(69))
    assert not tables.applies(local(3), Lsn(99))
    assert not tables.applies(local(4), Lsn(99))


def test_a_table_under_the_name_of_another_gets_no_change_unnoticed() -> None:
    lost = LostTable("sub", 3, "s", "t3", "r", exists=False, has_successor=True)
    tables = loaded(stored(1, "r"), stored(2, "r"))
    tables.load([stored(1, "r"), stored(2, "r")], (), [lost])
    assert tables.applies(local(1, "renamed on both sides"), Lsn(9))
    assert tables.applies(local(2, "t1"), Lsn(9)), "both tables have exchanged their names"
    assert not tables.replaced
    with pytest.raises(StaleCatalog, match=r'table "s\.t1" was replaced'):
        tables.applies(local(7, "t1"), Lsn(9))
    assert tables.replaced == {("s", "t1")}
    with pytest.raises(MappingError, match=r'table "s\.t3" of subscription "sub" was dropped and created again'):
        tables.applies(local(8, "t3"), Lsn(9))


def test_a_table_that_has_lost_its_place_to_another_one_gets_no_change() -> None:
    """The target gave its name to another table, and the publisher renamed its table afterwards."""
    tables = loaded()
    tables.load([replace(stored(2, "r"), former=1)], ())
    assert tables.applies(local(2), Lsn(9))
    with pytest.raises(MappingError, match=r'table "s\.t1_old" is published under a new name') as raised:
        tables.applies(local(1, "t1_old"), Lsn(9))
    assert "REFRESH PUBLICATION compares" in str(raised.value.hint)


def test_tables_are_added_and_removed() -> None:
    tables = loaded(stored(1, "r"), stored(2, "r"))
    tables.load([stored(2, "r"), stored(3, "i")], ())
    assert states(tables, 1, 2, 3) == "-ri"


def test_a_table_taken_out_and_put_back_is_copied_again() -> None:
    tables = loaded(stored(1, "r", 50))
    tables.load([stored(1, "i")], ())
    assert states(tables, 1) == "i"
    assert set(tables.unready) == {1}


def test_states_that_workers_agreed_on_are_kept() -> None:
    tables = loaded(stored(1, "f", 50), stored(2, "f", 50))
    for relid in (1, 2):
        tables.move(relid, TableState.SYNCWAIT, Lsn(50))
    tables.load([stored(1, "f", 50), stored(2, "f", 50)], [1])
    assert states(tables, 1, 2) == "wf"


@pytest.mark.parametrize(("before", "after"), [("f", "f"), ("w", "f"), ("c", "f"), ("s", "s"), ("i", "i"), ("d", "d")])
def test_a_sync_worker_that_has_ended_early(before: str, after: str) -> None:
    tables = loaded(stored(1, "f" if before in "wc" else before, 50))
    if before in "wc":
        tables.move(1, TableState.SYNCWAIT, Lsn(50))
    if before == "c":
        tables.move(1, TableState.CATCHUP, Lsn(60))
    tables.restore(1)
    tables.restore(99)
    assert states(tables, 1) == after


async def test_every_waiter_is_woken() -> None:
    tables = loaded(stored(1, "i"))
    changes = 0

    def changed() -> None:
        nonlocal changes
        changes += 1

    seen: list[str] = []

    async def wait_for(state: TableState) -> None:
        await tables.wait_until(lambda: states(tables, 1) == state.value)
        seen.append(state.value)

    tables.listeners.append(changed)
    async with anyio.create_task_group() as tasks:
        for state in (TableState.DATASYNC, TableState.DATASYNC, TableState.FINISHEDCOPY):
            tasks.start_soon(wait_for, state)
        await anyio.wait_all_tasks_blocked()
        tables.move(1, TableState.DATASYNC, Lsn(0))
        await anyio.wait_all_tasks_blocked()
        assert seen == ["d", "d"]
        tables.move(1, TableState.FINISHEDCOPY, Lsn(9))
    assert seen == ["d", "d", "f"]
    assert changes == 2


# --- nothing to catch up with ---------------------------------------------------------------------


def handed_over(tables: TableStates, snapshot: int, position: int) -> bool:
    """Return True if table 1, copied at `snapshot`, has nothing to catch up with at the apply worker's `position`."""
    tables.move(1, TableState.SYNCWAIT, Lsn(snapshot))
    tables.hand_over(1, Lsn(position))
    table = tables.get(1)
    assert table is not None
    assert (table.state, table.lsn) == (TableState.CATCHUP, max(snapshot, position))
    return tables.is_quiet(1)


@pytest.mark.parametrize(
    ("passed_over", "quiet"), [((), True), ((49,), True), ((50,), False), ((40, 79), False)], ids=str
)
def test_a_table_is_quiet_if_nothing_of_it_was_passed_over_since_its_snapshot(
    passed_over: tuple[int, ...], quiet: bool
) -> None:
    tables = loaded(stored(1, "f", 50), stored(2, "i"))
    tables.watch(Lsn(30))
    for finish_lsn in passed_over:
        assert not tables.applies(local(1), Lsn(finish_lsn))
    assert not tables.applies(local(2), Lsn(70))
    assert handed_over(tables, 50, 80) is quiet


@pytest.mark.parametrize("since", [None, 51])
def test_no_table_is_quiet_that_was_not_watched_since_its_snapshot(since: int | None) -> None:
    tables = loaded(stored(1, "f", 50))
    tables.watch(None if since is None else Lsn(since))
    assert not handed_over(tables, 50, 80)


def test_observations_of_an_apply_worker_hold_for_the_next_one() -> None:
    tables = loaded(stored(1, "f", 50))
    tables.watch(Lsn(30))
    assert handed_over(tables, 50, 80)
    tables.watch(Lsn(60))
    assert tables.is_quiet(1)
    tables.restore(1)  # the sync worker dies: the next one asks again, from where this one stood
    assert not handed_over(tables, 50, 60)


# --- the apply worker's part ----------------------------------------------------------------------


def apply_worker(tables: TableStates, syncing: set[int], started: list[int]) -> Callable[[Lsn], Any]:
    """Return on_boundary() of an apply worker. No code in it that needs a server is reached."""
    worker = ApplyWorker.__new__(ApplyWorker)
    worker.subscription = cast(Any, SimpleNamespace(two_phase=TwoPhaseState.DISABLED))
    worker._tables = tables
    worker._pause = PauseGate(cast(Any, None), 0)
    worker._sync = cast(Any, None)
    worker._supervision = cast(Any, SimpleNamespace(is_syncing=syncing.__contains__, start_sync=started.append))
    return worker.on_boundary


async def test_a_sync_worker_is_started_for_a_table_without_one() -> None:
    tables, started = loaded(stored(1, "i"), stored(2, "f", 5), stored(3, "r"), stored(4, "d")), list[int]()
    assert await apply_worker(tables, {4}, started)(Lsn(100)) is False
    assert started == [1, 2]


async def test_the_hand_over_waits_for_the_sync_worker() -> None:
    tables = loaded(stored(1, "f", 50))
    tables.move(1, TableState.SYNCWAIT, Lsn(50))
    process = apply_worker(tables, {1}, [])
    finished = False

    async def hand_over() -> None:
        nonlocal finished
        await process(Lsn(80))
        finished = True

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hand_over)
        await anyio.wait_all_tasks_blocked()
        table = tables.get(1)
        assert table is not None
        assert (table.state, table.lsn) == (TableState.CATCHUP, 80)
        tables.notify()
        await anyio.wait_all_tasks_blocked()
        assert not finished
        tables.move(1, TableState.SYNCDONE, Lsn(85))
    assert finished


async def test_an_apply_worker_that_is_started_again_waits_for_the_hand_over_of_the_one_before() -> None:
    """It would skip transactions that the sync worker does not apply either, because it has ended before them."""
    tables = loaded(stored(1, "f", 50))
    tables.move(1, TableState.SYNCWAIT, Lsn(50))
    syncing = {1}
    with anyio.move_on_after(0.01):
        await apply_worker(tables, syncing, [])(Lsn(80))
    assert states(tables, 1) == "c"
    finished = False

    async def again() -> None:
        nonlocal finished
        await apply_worker(tables, syncing, [])(Lsn(60))
        finished = True

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(again)
        await anyio.wait_all_tasks_blocked()
        assert not finished
        table = tables.get(1)
        assert table is not None
        assert (table.state, table.lsn) == (TableState.CATCHUP, 80)
        tables.move(1, TableState.SYNCDONE, Lsn(85))


@pytest.mark.parametrize("end", ["dies", "table is dropped"])
async def test_the_hand_over_ends_when_there_is_nothing_to_wait_for(end: str) -> None:
    tables = loaded(stored(1, "f", 50))
    tables.move(1, TableState.SYNCWAIT, Lsn(50))
    syncing = {1}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(apply_worker(tables, syncing, []), Lsn(80))
        await anyio.wait_all_tasks_blocked()
        if end == "dies":
            syncing.clear()
            tables.restore(1)
            assert states(tables, 1) == "f"
        else:
            tables.load([], syncing)


async def test_a_table_is_not_taken_over_before_its_position() -> None:
    tables = loaded(stored(1, "s", 90))
    await apply_worker(tables, set(), [])(Lsn(89))
    assert states(tables, 1) == "s"
