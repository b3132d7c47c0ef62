"""The effect of a hook on the changes of a table. A test with random filters covers all kinds of updates."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subscriber import UNCHANGED, Hook, HookError, Hooks
from subscriber.apply.hooks.table_hook import Change, TableHook, bind
from subscriber.apply.relation_map import map_relation
from subscriber.protocol.copy_text import join_line, split_line
from subscriber.protocol.messages import Delete, Insert, OldPart, ReplicaIdentity, Update
from subscriber.protocol.tuple_data import TupleData
from tests.apply.build import UNSENT, column, local, remote, row

FULL = ReplicaIdentity.FULL


def hooked(hook: Hook, *columns: str, replica_identity: ReplicaIdentity = ReplicaIdentity.DEFAULT) -> TableHook:
    bound = bind(Hooks({"s.t": hook}), remote(*columns, replica_identity=replica_identity))
    assert bound is not None
    return bound


def insert(*values: str | bytes | object | None) -> Insert:
    return Insert(None, 16384, row(*values))


def update(new: TupleData, old: TupleData | None = None, part: OldPart | None = None) -> Update:
    return Update(None, 16384, part, old, new)


def delete(*values: str | None, part: OldPart = OldPart.KEY) -> Delete:
    return Delete(None, 16384, part, row(*values))


# --- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hooks", "expected"),
    [
        (Hooks(), ("s", "t")),
        (Hooks({"t": Hook(to="x")}), ("s", "t")),  # of schema public
        (Hooks({"s.t": Hook(to="x")}), ("s", "x")),
        (Hooks({"s.t": Hook(to="x.y")}), ("x", "y")),
        (Hooks({("s", "t"): Hook(to=("x.y", "z"))}), ("x.y", "z")),
        (Hooks(schemas={"s": "x"}), ("x", "t")),
        (Hooks({"s.t": Hook(to="y")}, schemas={"s": "x"}), ("x", "y")),
        (Hooks({"s.t": Hook()}, schemas={"s": "x"}), ("x", "t")),
    ],
)
def test_a_hook_sends_rows_to_its_table(hooks: Hooks, expected: tuple[str, str]) -> None:
    assert hooks.target("s", "t") == expected


async def test_a_hook_that_only_renames_does_not_copy_the_change() -> None:
    hook = hooked(Hook(to="x.y", rename={"b": "c"}), "a*", "b")
    assert (hook.relation.schema, hook.relation.name) == ("x", "y")
    assert [c.name for c in hook.relation.columns] == ["a", "c"]
    change = insert("1", b"\0")
    assert await hook.change(change) is change


@pytest.mark.parametrize("hook", [Hook(drop=["b"]), Hook(keep=["a", "c"])])
async def test_a_hook_leaves_out_dropped_columns(hook: Hook) -> None:
    bound_hook = hooked(hook, "a*", "b", "c")
    assert [c.name for c in bound_hook.relation.columns] == ["a", "c"]
    assert await bound_hook.change(insert("1", "2", b"\3")) == insert("1", b"\3")
    assert await bound_hook.change(update(row("1", UNSENT, UNSENT))) == update(row("1", UNSENT))
    assert await bound_hook.change(delete("1", None, None)) == delete("1", None)


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (Hook(mask={"nope": "x"}), 'not published: "nope"'),
        (Hook(drop=["nope"]), 'not published: "nope"'),
        (Hook(rename={"b": "c"}), 'two columns the name "c"'),
        (Hook(mask={"a": "x"}), 'masks key column "a"'),
        (Hook(drop=["a"]), 'drops key column "a"'),
        (Hook(keep=["b"]), 'drops key column "a"'),
    ],
)
def test_a_hook_that_does_not_fit_its_table_is_refused(hook: Hook, message: str) -> None:
    with pytest.raises(HookError, match=message):
        hooked(hook, "a*", "b", "c")


def test_a_mask_of_the_targets_key_is_refused_under_replica_identity_full() -> None:
    hook = hooked(Hook(mask={"b": "x"}, rename={"b": "c"}), "a", "b", replica_identity=FULL)
    hook.fit(map_relation(hook.relation, local("a", column("c", "text"), identity=("a",))))
    with pytest.raises(HookError, match='masks key column "b"'):
        hook.fit(map_relation(hook.relation, local("a", column("c", "text"), identity=("c",))))


# --- values -------------------------------------------------------------------------------------


async def test_a_mask_replaces_values_but_neither_null_nor_unsent_values() -> None:
    hook = hooked(Hook(mask={"b": str.upper, "c": "x", "d": None}), "a*", "b", "c", "d")
    assert await hook.change(insert("1", "b", "c", "d")) == insert("1", "B", "x", None)
    assert await hook.change(insert("1", None, None, None)) == insert("1", None, "x", None)
    assert await hook.change(update(row("1", UNSENT, UNSENT, UNSENT))) == update(row("1", UNSENT, UNSENT, UNSENT))
    assert await hook.change(delete("1", None, None, None)) == delete("1", None, None, None)


async def test_a_mask_may_be_async() -> None:
    async def mask(text: str) -> int:
        return len(text)

    assert await hooked(Hook(mask={"b": mask}), "a*", "b").change(insert("1", "abc")) == insert("1", "3")
    with pytest.raises(HookError, match='no value for column "b"'):
        await hooked(Hook(mask={"b": lambda _: UNCHANGED}), "a*", "b").change(insert("1", "abc"))


async def test_a_function_sees_texts_and_gives_anything() -> None:
    seen: list[dict[str, Any]] = []

    async def function(values: dict[str, Any]) -> dict[str, Any]:
        seen.append(values)
        return {**values, "b": 7, "c": b"\1"}

    hook = hooked(Hook(row=function), "a*", "b", "c")
    assert await hook.change(insert("1", None, "é")) == insert("1", "7", "\\x01")
    assert await hook.change(update(row("1", UNSENT, "z"))) == update(row("1", "7", "\\x01"))
    assert seen == [{"a": "1", "b": None, "c": "é"}, {"a": "1", "b": UNCHANGED, "c": "z"}]


async def test_a_function_may_leave_an_unsent_value_unsent() -> None:
    hook = hooked(Hook(row=lambda values: {**values, "b": "x"}), "a*", "b", "c")
    assert await hook.change(update(row("1", "2", UNSENT))) == update(row("1", "x", UNSENT))


async def test_a_function_sees_unsent_values_under_replica_identity_full() -> None:
    hook = hooked(Hook(row=lambda values: {**values, "b": values["b"][::-1]}), "a", "b", replica_identity=FULL)
    change = update(row("2", UNSENT), row("1", "ab"), OldPart.ROW)
    assert await hook.change(change) == update(row("2", "ba"), row("1", "ba"), OldPart.ROW)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda values: {**values, "a": "2"}, "changes the key of a row"),
        (lambda values: {"a": "1"}, "something else than a row"),
        (lambda values: {**values, "z": "1"}, "something else than a row"),
        (lambda values: "secret", "something else than a row"),
        (lambda values: {**values, "b": UNCHANGED}, 'no value for column "b"'),
        (lambda values: None, "leaves out a row"),
        (lambda values: {"b": int(values["b"])}, r"raised ValueError\n.*In <lambda>\(\), line \d+ of test_table_hook"),
    ],
)
async def test_a_function_with_an_invalid_result_is_refused(
    function: Callable[[dict[str, Any]], Any], message: str
) -> None:
    with pytest.raises(HookError, match=message) as caught:
        await hooked(Hook(row=function), "a*", "b").change(insert("1", "secret"))
    assert "secret" not in str(caught.value)


async def test_values_in_binary_are_not_read() -> None:
    with pytest.raises(HookError, match="sent in binary"):
        await hooked(Hook(mask={"b": str.upper}), "a*", "b").change(insert(b"1", b"2"))


# --- leaving rows out ---------------------------------------------------------------------------


@pytest.mark.parametrize("read", [lambda values: values["b"], lambda values: values.get("b") == "x"])
async def test_a_filter_sees_what_every_change_has(read: Callable[[dict[str, Any]], Any]) -> None:
    with pytest.raises(HookError, match='reads column "b"'):
        await hooked(Hook(where=read), "a*", "b").change(insert("1", "x"))
    assert await hooked(Hook(where=read), "a", "b").change(insert("1", "x"))  # without a key, no updates
    assert await hooked(Hook(where=read), "a", "b", replica_identity=FULL).change(insert("1", "x"))


async def test_a_row_that_enters_must_be_whole() -> None:
    hook = hooked(Hook(where=lambda values: values["a"] != "1"), "a*", "b")
    with pytest.raises(HookError, match="was not sent as a whole"):
        await hook.change(update(row("2", UNSENT), row("1", None), OldPart.KEY))


KINDS = list(itertools.product(["where", "row"], [True, False], ["in", "out"], ["in", "out"]))


@pytest.mark.parametrize(("how", "full", "before", "after"), [k for k in KINDS if k[1] or k[0] == "where"])
async def test_a_filter_turns_updates_into_inserts_and_deletes(how: str, full: bool, before: str, after: str) -> None:
    """An update from a row to another one is, for a target that has only the one or the other, as expected."""
    hook = Hook(where=lambda values: values["a"].startswith("in"))
    if how == "row":
        hook = Hook(row=lambda values: values if values["a"].startswith("in") else None)
    old_row = row(before, "old") if full else row(before, None)
    part = OldPart.ROW if full else OldPart.KEY
    columns = ("a", "b") if full else ("a*", "b")
    bound_hook = hooked(hook, *columns, replica_identity=FULL if full else ReplicaIdentity.DEFAULT)
    expected: dict[tuple[str, str], Change | None] = {
        ("in", "in"): update(row(after, "new"), old_row, part),
        ("in", "out"): Delete(None, 16384, part, old_row),
        ("out", "in"): insert(after, "new"),
        ("out", "out"): None,
    }
    assert await bound_hook.change(update(row(after, "new"), old_row, part)) == expected[before, after]
    assert await bound_hook.change(Delete(None, 16384, part, old_row)) == (
        Delete(None, 16384, part, old_row) if before == "in" else None
    )
    assert await bound_hook.change(insert(after, "new")) == (insert(after, "new") if after == "in" else None)


async def test_a_filter_of_the_key_alone_leaves_updates_with_that_key_unchanged() -> None:
    hook = hooked(Hook(where=lambda values: values["a"] == "in"), "a*", "b")
    assert await hook.change(update(row("in", UNSENT))) == update(row("in", UNSENT))
    assert await hook.change(update(row("out", UNSENT))) is None


# --- the copy -----------------------------------------------------------------------------------


async def test_a_copied_row_is_changed_like_an_inserted_row() -> None:
    hook = hooked(Hook(mask={"b": str.upper}, drop=["c"], where=lambda values: values["a"] != "2"), "a*", "b", "c")
    assert await hook.copied(split_line(b"1\tb\\tx\t\\N\n", 3)) == [b"1", b"B\tX"]
    assert await hook.copied(split_line(b"2\tb\tc\n", 3)) is None


@given(st.lists(st.none() | st.binary().filter(lambda value: b"\0" not in value), min_size=1))
def test_lines_of_copy_are_joined_and_split_without_loss(values: list[bytes | None]) -> None:
    line = join_line(values)
    assert line.count(b"\n") == 1
    assert split_line(line, len(values))[1] == values
