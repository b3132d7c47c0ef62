"""conflict_policy = 'call name': an async function of the embedding program decides."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime

import pytest

from subscriber.apply.conflicts.rules import Resolver
from subscriber.apply.conflicts.types import Conflict
from subscriber.errors import ApplyError, ConflictError
from subscriber.protocol.messages import Update
from tests.apply.build import UNSENT, row
from tests.conflicts.conftest import IN_FUTURE, LONG_AGO, Deciders
from tests.conflicts.test_policies import CHANGES, HERE, HISTORY, LOCAL, MISSING, REMOTE, ROWS, change, make
from tests.plugins.fix_cluster import Database

Answer = str | Mapping[str, object]


def answering(answer: Answer, asked: list[Conflict]) -> Mapping[str, Resolver]:
    async def merge(conflict: Conflict) -> Answer:
        asked.append(conflict)
        await asyncio.sleep(0)
        return answer

    return {"Merge": merge}


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("answer", ["apply_remote", "keep_local", "error"])
async def test_a_function_may_answer_with_a_policy(db: Database, deciders: Deciders, kind: str, answer: str) -> None:
    t = await make(db, CHANGES[kind][0])
    asked: list[Conflict] = []
    session = await deciders.open(f"{kind}: call Merge", resolvers=answering(answer, asked))
    resolution, rows = {"apply_remote": REMOTE[kind], "keep_local": LOCAL, "error": ("error", HERE)}[answer]
    if answer == "error":
        with pytest.raises(ConflictError, match=f"conflict={kind}"):
            await session.apply(change(t, kind, binary=False))
    else:
        await session.apply(change(t, kind, binary=False))
    assert await db.rows(ROWS) == rows
    assert {line[1:3] for line in await db.rows(HISTORY) if line[0] == kind} == {("call Merge", resolution)}
    assert [conflict.type for conflict in asked] == [kind]


MERGED = {
    "insert_exists": [(1, 11, "both"), (2, 20, "other")],
    "update_exists": [(1, 20, "both")],
    "multiple_unique_conflicts": [(1, 20, "both")],
    "update_missing": [*HERE, (3, 30, "both")],
    "delete_missing": [*HERE, (3, None, "both")],
    "update_origin_differs": [(1, 11, "both"), (2, 20, "other")],
    "delete_origin_differs": [(1, 10, "both"), (2, 20, "other")],
}


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
async def test_a_function_may_answer_with_a_row(db: Database, deciders: Deciders, kind: str, binary: bool) -> None:
    """The returned values override the publisher's. All other columns keep their values."""
    t = await make(db, CHANGES[kind][0])
    answer: dict[str, object] = {"b": "both"}
    if kind == "delete_missing":
        answer["id"] = 3
    session = await deciders.open(f"{kind}: call Merge", resolvers=answering(answer, []))
    await session.apply(change(t, kind, binary=binary))
    assert await db.rows(ROWS) == MERGED[kind]


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
async def test_a_function_receives_the_conflict_with_both_rows(db: Database, deciders: Deciders, binary: bool) -> None:
    asked: list[Conflict] = []
    t = await make(db, HERE)
    session = await deciders.open("call Merge", resolvers=answering("keep_local", asked))
    for kind in CHANGES:
        await session.apply(change(t, kind, binary=binary), at=IN_FUTURE)
    by_type = {conflict.type.value: conflict for conflict in asked}
    differs, several = by_type["update_origin_differs"], by_type["multiple_unique_conflicts"]
    assert differs.relation == "public.t"
    assert differs.key == {"id": "1"}
    assert differs.local == {"b": "local", "id": "1", "more": None, "a": "10"}
    assert differs.remote in ({"id": "1", "a": "11", "b": "remote"}, {"id": "1", "a": "20", "b": "remote"})
    assert differs.commit_time == datetime(2126, 10, 3, 7, 6, 40, tzinfo=UTC)
    committed = differs.local_rows[0].writer.committed
    assert committed is not None
    assert LONG_AGO < committed < IN_FUTURE
    assert [(local_row.index, local_row.key) for local_row in several.local_rows] == [
        ("t_pkey", ("id",)),
        ("t_a_key", ("a",)),
    ]
    assert by_type["delete_origin_differs"].remote is None
    for kind in MISSING:
        assert by_type[kind].local is None
    assert await db.rows(ROWS) == HERE


async def broken(_conflict: Conflict) -> str:
    raise ValueError("a secret of the row")


async def confused(_conflict: Conflict) -> str:
    return "whatever"


async def generous(_conflict: Conflict) -> Mapping[str, object]:
    return {"b": "x", "more": 7, "nothing": 8}


@pytest.mark.parametrize(
    ("function", "hint"),
    [
        (broken, "raised ValueError."),
        (confused, "answered with neither a policy nor a row."),
        (generous, "gave values for columns that are not replicated: more, nothing."),
    ],
)
async def test_a_function_that_fails_stops_the_stream(
    db: Database, deciders: Deciders, function: Resolver, hint: str
) -> None:
    t = await make(db, HERE)
    for attempt in range(2):
        session = await deciders.open("call f", resolvers={"f": function})
        with pytest.raises(ConflictError, match="conflict=insert_exists") as caught:
            await session.apply(t.insert("3", "30", "before"), change(t, "insert_exists", binary=False))
        assert caught.value.hint == f'Conflict resolver "f" {hint}'
        assert "secret" not in str(caught.value)
        assert await db.rows(ROWS) == HERE
        assert [line[1:3] + line[-1:] for line in await db.rows(HISTORY)] == [("call f", "error", attempt + 1)]


async def test_a_function_that_is_not_registered_is_refused(db: Database, deciders: Deciders) -> None:
    with pytest.raises(ApplyError, match='conflict resolver "f" of subscription "s" is not registered'):
        await deciders.open("public.other: call f", resolvers={"F": confused})


async def test_a_large_value_that_was_not_sent(db: Database, deciders: Deciders) -> None:
    """The function does not get the value, and a row can only be inserted if the function returns it."""
    t = await make(db, HERE)
    asked: list[Conflict] = []
    update = t.relation, Update(None, t.relation.relid, None, None, row("3", "30", UNSENT))
    session = await deciders.open("call Merge", resolvers=answering("apply_remote", asked))
    await session.apply(update)
    assert asked[0].remote == {"id": "3", "a": "30"}
    assert await db.rows(ROWS) == HERE
    assert [line[2] for line in await db.rows(HISTORY)] == ["skipped"]
    session = await deciders.open("call Merge", resolvers=answering({"b": "given"}, asked))
    await session.apply(update)
    assert await db.rows(ROWS) == [*HERE, (3, 30, "given")]
