"""The pure parts: where a move stands, the statements of a fence, and the values of sequences."""

from __future__ import annotations

import pytest

from subscriber.failpoints import Point
from subscriber.migration import fence
from subscriber.migration.fence import Grant
from subscriber.migration.plan import STEPS, ContradictoryRows, Phase, Side, Standing, StepStage, standing
from subscriber.migration.sequences import SequenceState, advances, obstacles

OLD = Standing(Side.SOURCE, Phase.FOLLOWING)
FROZEN = Standing(Side.SOURCE, Phase.FROZEN)
SWITCHING = Standing(Side.SOURCE, Phase.SWITCHING)
NEW = Standing(Side.TARGET, Phase.FOLLOWING)
RETURNING = Standing(Side.TARGET, Phase.SWITCHING)


@pytest.mark.parametrize(
    ("source", "target", "found"),
    [
        (None, None, OLD),
        (None, OLD, OLD),  # killed in the first step
        (FROZEN, OLD, FROZEN),  # the row of the serving server decides
        (SWITCHING, OLD, SWITCHING),
        (SWITCHING, NEW, NEW),  # opened, and killed before the source was told
        (NEW, NEW, NEW),
        (NEW, RETURNING, RETURNING),
        (OLD, RETURNING, OLD),
    ],
)
def test_the_rows_of_both_servers_say_where_a_move_stands(
    source: Standing | None, target: Standing | None, found: Standing
) -> None:
    assert standing(source, target) == found


@pytest.mark.parametrize(
    ("source", "target"), [(OLD, NEW), (FROZEN, NEW), (SWITCHING, RETURNING), (NEW, OLD), (NEW, FROZEN)]
)
def test_two_servers_that_claim_the_role_are_an_error(source: Standing, target: Standing) -> None:
    with pytest.raises(ContradictoryRows):
        standing(source, target)


def test_the_new_server_opens_last_in_the_pause() -> None:
    pause = [step.name for step in STEPS if step.stage is StepStage.PAUSE]
    assert pause[:2] == ["hold", "freeze"]
    assert pause[-2:] == ["switch", "open"]
    assert [step.name for step in STEPS if step.stage is StepStage.PAUSE and step.undo is None] == ["open"]
    steps = [f"MIGRATE_{step.name.upper()}" for step in STEPS]
    assert [point.name for point in Point if point.name in steps] == steps


def test_a_fence_restores_the_grants() -> None:
    grants = [Grant(None, False), Grant('o"wner', False), Grant("app", True)]
    closed = fence.close_statements("shop", grants, ["repl"])
    assert closed[1:] == [
        'REVOKE CONNECT ON DATABASE "shop" FROM PUBLIC, "o""wner", "app"',
        'GRANT CONNECT ON DATABASE "shop" TO "repl"',
    ]
    assert fence.open_statements("shop", grants, ["repl"])[1:] == [
        'REVOKE CONNECT ON DATABASE "shop" FROM "repl"',
        'GRANT CONNECT ON DATABASE "shop" TO PUBLIC, "o""wner"',
        'GRANT CONNECT ON DATABASE "shop" TO "app" WITH GRANT OPTION',
    ]
    kept = [Grant("repl", False)]
    assert fence.close_statements("shop", kept, ["repl"])[1:] == ['GRANT CONNECT ON DATABASE "shop" TO "repl"']
    assert fence.open_statements("shop", kept, ["repl"])[1:] == ['GRANT CONNECT ON DATABASE "shop" TO "repl"']


def sequence(name: str, increment: int = 1, readable: bool = True) -> SequenceState:
    return SequenceState("public", name, increment, -100, 100, readable, True)


def test_sequences_only_move_forward() -> None:
    known = [sequence("up"), sequence("down", -1), sequence("same"), sequence("called"), sequence("behind")]
    values = zip(
        [sequence_state.quoted for sequence_state in known],
        [(20, True), (-20, True), (7, True), (7, True), (7, False)],
        strict=True,
    )
    own = zip(
        [sequence_state.quoted for sequence_state in known],
        [(10, True), (-10, True), (7, True), (7, False), (9, True)],
        strict=True,
    )
    here, there = dict(values), dict(own)
    assert advances(known, here, there) == [
        ('"public"."up"', 20, True),
        ('"public"."down"', -20, True),
        ('"public"."called"', 7, True),
    ]
    assert advances(known, here, there, 90)[:2] == [('"public"."up"', 100, True), ('"public"."down"', -100, True)]


def test_a_sequence_that_cannot_be_advanced_is_named() -> None:
    problems = obstacles([sequence("a"), sequence("b", readable=False)], [sequence("b")])
    assert problems == [
        'Sequence "public"."a" does not exist on the following server.',
        'Sequence "public"."b" of the serving server cannot be read: SELECT is needed.',
    ]
