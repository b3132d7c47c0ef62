"""Each scenario in many orders of its tasks. `python -m tests.interleavings` runs more orders, and replays one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

from tests.interleavings.explorer import KILL, Choice, Search
from tests.interleavings.scenarios import SCENARIOS
from tests.interleavings.stage import Scenario, Stage, explore, run
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import running_subscriber

SOAK_SECONDS = 600.0 / len(SCENARIOS)  # of each scenario
DEPTH = 40  # choices that are varied
# The number of schedules of the scenarios whose first orders are run each time.
QUICK = {
    "ranges-key": 4,
    "ranges-truncate-behind-lock": 4,
    "sync-alter": 4,
    "sync-refresh": 4,
    "repair-rows": 4,
    "repair-truncate": 4,
    "resync-truncate-lock": 4,
    "resync-delete_extra-rows": 4,
    "quarantine-retry": 4,
    "quarantine-discard": 4,
    "streaming-savepoint": 4,
    "streaming-rollback-commit": 4,
    "archive": 4,
    "cutover": 2,
}

# Schedules that have found a defect, by scenario.
FOUND = {
    "ranges-insert": (
        "tablesync-t@RANGES_READ tablesync-t@SNAPSHOT_TAKEN tablesync-t@COPY_COMMITTED tablesync-t@SNAPSHOT_TAKEN"
        " tablesync-t@COPY_COMMITTED apply@SETTLED writer:change_1 tablesync-t@INDEX_BUILT"
        " tablesync-t@INDEX_BUILT tablesync-t@LAST_INDEX_BUILT tablesync-t@SYNCDONE_STORED apply@CHANGE_DELAYED"
    ),
    "ranges-truncate-behind-lock": (
        "writer:lock tablesync-t@RANGES_READ tablesync-t@SNAPSHOT_TAKEN! writer:truncate tablesync-t@RANGES_READ"
        " tablesync-t@SNAPSHOT_TAKEN tablesync-t@COPY_COMMITTED"
    ),
}


@pytest.fixture
async def stage(source_db: Database, target_db: Database, with_schema: None) -> AsyncIterator[Stage]:
    async with (
        running_subscriber(target_db, start=False) as subscriber,
        Stage.open(source_db, target_db, subscriber) as stage,
    ):
        yield stage


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("name", "schedules"), QUICK.items())
async def test_no_order_of_tasks_loses_a_row(stage: Stage, name: str, schedules: int) -> None:
    exploration = await explore(SCENARIOS[name], stage, schedules=schedules, depth=DEPTH)
    print(exploration)
    assert not exploration.failures, "\n".join(map(str, exploration.failures))


@pytest.mark.soak
@pytest.mark.timeout(SOAK_SECONDS + 120)
@pytest.mark.parametrize("name", SCENARIOS)
async def test_no_order_of_tasks_loses_a_row_at_length(stage: Stage, name: str) -> None:
    exploration = await explore(SCENARIOS[name], stage, seconds=SOAK_SECONDS, depth=DEPTH, tell=print)
    print(exploration)
    assert not exploration.failures, "\n".join(map(str, exploration.failures))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", FOUND)
async def test_an_order_of_tasks_that_once_lost_rows_loses_none(stage: Stage, name: str) -> None:
    outcome = await run(SCENARIOS[name], stage, tuple(FOUND[name].split()))
    assert not outcome.differences


async def counters(stage: Stage) -> None:
    await stage.both("CREATE TABLE t (n int)", "INSERT INTO t VALUES (2)")
    await stage.source.execute("CREATE PUBLICATION p")
    stage.subscriber.start()
    await stage.subscriber.create(stage.source, "p", "s")


async def counting(stage: Stage) -> None:
    """A decision from memory: the value may have changed since it was read."""
    await stage.step("read")
    number = await stage.target.value("SELECT n FROM t") - 1
    await stage.step("write")
    await stage.target.execute(f"UPDATE t SET n = {number}")


async def test_the_explorer_finds_a_lost_update(stage: Stage) -> None:
    """Both actors read before the first one writes. In the default order they do not."""
    scenario = Scenario(
        "counters",
        (),
        frozenset(),
        counters,
        {"one": counting, "other": counting},
        may_fail=False,
        check=lambda stage: stage.target.rows("SELECT n FROM t WHERE n <> 0"),
    )
    exploration = await explore(scenario, stage, seconds=30, most_failures=9)
    assert not exploration.left
    assert 0 < len(exploration.failures) < exploration.runs
    assert {choice.taken for choice in exploration.failures[0].choices[:2]} == {"one:read", "other:read"}
    replayed = await run(scenario, stage, tuple(choice.taken for choice in exploration.failures[0].choices))
    assert replayed.differences
    assert not replayed.diverged


def test_each_schedule_is_taken_once_and_those_with_few_deviations_first() -> None:
    search, taken = Search(depth=3), []
    while (one := search.take()) is not None:
        deviations, schedule = one
        taken.append((deviations, schedule))
        made = [*schedule, *["a"] * (4 - len(schedule))]
        choices = [Choice(("a", "b", KILL) if place == 1 else ("a", "b"), made[place]) for place in range(4)]
        search.add(deviations, schedule, [Choice(c.options, c.taken, str(made[:i])) for i, c in enumerate(choices)])
    assert len({schedule for _, schedule in taken}) == len(taken) == 2 * 3 * 2
    assert [deviations for deviations, _ in taken] == sorted(deviations for deviations, _ in taken)


def test_a_known_state_is_varied_once() -> None:
    search = Search(depth=9)
    assert search.take() == (0, ())
    search.add(0, (), [Choice(("a", "b"), "a", "start"), Choice(("a", "b"), "a", "same")])
    search = Search.from_json(json.loads(json.dumps(search.to_json())))  # another run continues it
    assert search.take() == (1, ("b",))
    search.add(1, ("b",), [Choice(("a", "b"), "b", "start"), Choice(("a", "b"), "a", "same")])
    assert search.known == 1
    assert search.take() == (1, ("a", "b"))
    assert search.take() is None
