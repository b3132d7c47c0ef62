"""The facts of a move: what is stored of them, and rows that are not understood."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.migration import record
from subscriber.migration.fence import Grant
from subscriber.migration.plan import Phase, Side, Standing
from subscriber.migration.record import ClosedFence, MoveFacts, StoppedSubscription
from tests.plugins.fix_cluster import Database

NAMES = st.lists(st.text()).map(tuple)
FACTS = st.builds(
    MoveFacts,
    st.sampled_from(Side),
    st.none()
    | st.builds(ClosedFence, st.lists(st.builds(Grant, st.none() | st.text(), st.booleans())).map(tuple), NAMES),
    st.none() | st.builds(StoppedSubscription, st.integers(0, 2**64 - 1).map(Lsn), st.text()),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(1, 2**32 - 1)).map(tuple),
)
FOLLOWING = Standing(Side.SOURCE, Phase.FOLLOWING)


@given(FACTS)
def test_facts_are_read_as_they_were_stored(facts: MoveFacts) -> None:
    assert MoveFacts.from_json(facts.as_json(), "move") == facts


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("side", "left"),
        ("side", None),
        ("fence", {"grants": []}),
        ("fence", {"grants": [["a"]], "kept": []}),
        ("fence", {"grants": [], "kept": "a"}),
        ("stopped", {"at": "here", "slot": "s"}),
        ("stopped", {"at": 5, "slot": "s"}),
        ("stopped", "0/5"),
        ("held", 1),
        ("redirect", None),
        ("publications", "p"),
        ("publications", ["p"]),
        ("publications", [True]),
    ],
)
def test_a_value_that_is_not_understood_is_an_error(name: str, value: object) -> None:
    stored = json.loads(MoveFacts(Side.SOURCE).as_json()) | {name: value}
    with pytest.raises(StatementError, match="the row of move 'move' is not understood") as error:
        MoveFacts.from_json(json.dumps(stored), "move")
    assert error.value.detail == f"The value of fact '{name}' is missing or has another type."


@pytest.mark.parametrize("name", list(json.loads(MoveFacts(Side.SOURCE).as_json())))
def test_a_fact_that_is_missing_is_an_error(name: str) -> None:
    stored = json.loads(MoveFacts(Side.SOURCE, ClosedFence((), ()), StoppedSubscription(Lsn(1), "s")).as_json())
    del stored[name]
    with pytest.raises(StatementError, match="is not understood"):
        MoveFacts.from_json(json.dumps(stored), "move")


async def test_the_command_of_the_hint_removes_a_fact_that_is_not_known(target_db: Database, with_schema: None) -> None:
    async with target_db.connection() as connection:
        async with connection.transaction():
            await record.save(connection, "it's", Side.SOURCE, FOLLOWING)
        await connection.execute("UPDATE subscriber.migration SET facts = facts || '{\"it''s_new\": 1}'")
        with pytest.raises(StatementError) as error:
            await record.load(connection, "it's")
        assert error.value.detail == "Fact 'it''s_new' is not known."
        assert error.value.remedy is not None
        await connection.execute(error.value.remedy.commands[0])
        assert await record.load(connection, "it's") == record.ServerRecord(FOLLOWING, MoveFacts(Side.SOURCE))


async def test_a_change_of_facts_leaves_the_others(target_db: Database, with_schema: None) -> None:
    stopped = StoppedSubscription(Lsn(5), "slot")
    async with target_db.connection() as connection, connection.transaction():
        for facts in (MoveFacts(Side.TARGET, held=True), MoveFacts(Side.TARGET, None, stopped, True)):
            await record.save(connection, "move", Side.TARGET, FOLLOWING, lambda known, facts=facts: facts)  # type: ignore[misc]
            known = await record.load(connection, "move")
            assert known is not None
            assert known.facts == facts
        await record.save(connection, "move", Side.TARGET, Standing(Side.SOURCE, Phase.FROZEN))
        known = await record.load(connection, "move")
        assert known == record.ServerRecord(Standing(Side.SOURCE, Phase.FROZEN), facts)
