"""Every type of conflict under every policy: the rows, the counters, the history; by key and by whole row."""

from __future__ import annotations

from struct import pack

import pytest

from subscriber.errors import ConflictError
from subscriber.protocol.messages import Delete, Insert, Relation, ReplicaIdentity, Update
from subscriber.protocol.tuple_data import TupleData
from tests.apply.build import row
from tests.conflicts.conftest import IN_FUTURE, LONG_AGO, Deciders
from tests.plugins.fix_cluster import Database
from tests.targets.conftest import Table

Rows = list[tuple[int, int | None, str | None]]
Change = tuple[Relation, Insert | Update | Delete]

# (local rows before, the change: new row or None, old row or None)
HERE: Rows = [(1, 10, "local"), (2, 20, "other")]
CHANGES: dict[str, tuple[Rows, tuple[object, ...] | None, tuple[object, ...] | None]] = {
    "insert_exists": (HERE, (1, 11, "remote"), None),
    "update_exists": (HERE, (1, 20, "remote"), (1, 10, "local")),
    "multiple_unique_conflicts": (HERE, (1, 20, "remote"), None),
    "update_missing": (HERE, (3, 30, "remote"), (3, 33, "gone")),
    "delete_missing": (HERE, None, (3, 33, "gone")),
    "update_origin_differs": (HERE, (1, 11, "remote"), (1, 10, "local")),
    "delete_origin_differs": (HERE, None, (1, 10, "local")),
}
LOCAL = ("skipped", HERE)
STOPS = ("error", HERE)
# The resolution, and the rows afterwards, if the change is applied.
REMOTE: dict[str, tuple[str, Rows]] = {
    "insert_exists": ("updated", [(1, 11, "remote"), (2, 20, "other")]),
    "update_exists": ("replaced", [(1, 20, "remote")]),
    "multiple_unique_conflicts": ("replaced", [(1, 20, "remote")]),
    "update_missing": ("inserted", [*HERE, (3, 30, "remote")]),
    "delete_missing": LOCAL,
    "update_origin_differs": ("applied", [(1, 11, "remote"), (2, 20, "other")]),
    "delete_origin_differs": ("applied", [(2, 20, "other")]),
}
MISSING = ("update_missing", "delete_missing")


def expected(kind: str, policy: str, later: bool) -> tuple[str, Rows]:
    match policy:
        case "error":
            return STOPS
        case "skip" | "keep_local":
            return LOCAL
        case "apply_remote":
            return REMOTE[kind]
        case _ if kind in MISSING:  # last_update_wins has no timestamp for a deleted row
            return LOCAL
        case _:
            return REMOTE[kind] if later else LOCAL


def values(given: tuple[object, ...], *, binary: bool) -> TupleData:
    return row(
        *[
            pack(">i", value) if binary and isinstance(value, int) else str(value) if isinstance(value, int) else value
            for value in given
        ]
    )


def change(t: Table, kind: str, *, binary: bool) -> Change:
    _, new, old = CHANGES[kind]
    relid = t.relation.relid
    if new is not None and old is None:
        return t.relation, Insert(None, relid, values(new, binary=binary))
    assert old is not None
    before = values(old if t.relation.replica_identity is ReplicaIdentity.FULL else (old[0], None, None), binary=binary)
    if new is None:
        return t.relation, Delete(None, relid, t._part, before)
    return t.relation, Update(None, relid, t._part, before, values(new, binary=binary))


async def make(db: Database, rows: Rows, *, full: bool = False) -> Table:
    key = "UNIQUE" if full else "PRIMARY KEY"
    await db.execute(
        f"CREATE TABLE t (b text, id int {key}, more int, a int UNIQUE)",
        *["INSERT INTO t (id, a, b) VALUES ({}, {}, '{}')".format(*values) for values in rows],
    )
    return Table("t", "id*", "a", "b", identity=ReplicaIdentity.FULL if full else ReplicaIdentity.DEFAULT)


ROWS = "SELECT id, a, b FROM t ORDER BY id"
HISTORY = (
    "SELECT conflict_type, policy, resolution, index_name, key->>'id', key->>'a', local_row->>'b', remote_row->>'b',"
    " remote_xid, local_xid IS NOT NULL, local_commit_time IS NOT NULL, occurrences"
    " FROM subscriber.conflict_history ORDER BY id"
)


# Whether the publisher's transaction is later than the rows of the target.
POLICIES = [
    *[(policy, True) for policy in ("error", "skip", "keep_local", "apply_remote", "last_update_wins")],
    ("last_update_wins", False),
]


def case(policy: str, later: bool, form: str) -> object:
    """Return a case: every policy by key and in text. Other forms run for the main policies, and else as long tests."""
    short = form == "key" or (policy in ("error", "apply_remote") and form != "full binary")
    return pytest.param(policy, later, form, marks=() if short else pytest.mark.soak)


FORMS = ("key", "binary", "full", "full binary")


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize(("policy", "later", "form"), [case(*policy, form) for form in FORMS for policy in POLICIES])
async def test_each_conflict_under_each_policy(
    db: Database, deciders: Deciders, kind: str, policy: str, later: bool, form: str
) -> None:
    full, binary = "full" in form, "binary" in form
    t = await make(db, CHANGES[kind][0], full=full)
    session = await deciders.open(f"{kind}: {policy}")
    resolution, rows = expected(kind, policy, later)
    if resolution == "error":
        with pytest.raises(ConflictError) as caught:
            await session.apply(change(t, kind, binary=binary), at=IN_FUTURE if later else LONG_AGO)
        assert caught.value.conflict_type == kind
        assert caught.value.context[-1].endswith("finished at 0/BE")
        assert not [conflict for conflict in session.reported if conflict.type == kind]
    else:
        await session.apply(change(t, kind, binary=binary), at=IN_FUTURE if later else LONG_AGO)
        (conflict,) = [conflict for conflict in session.reported if conflict.type == kind]
        assert conflict.detail.endswith(f'Resolution: {resolution}, by conflict policy "{policy}".')
    assert await db.rows(ROWS) == rows
    lines = [line for line in await db.rows(HISTORY) if line[0] == kind]
    assert {line[1:3] for line in lines} == {(policy, resolution)}
    assert len(lines) == (2 if kind == "multiple_unique_conflicts" else 1)
    _, new, old = CHANGES[kind]
    for _, _, _, index, id_, a, local, remote, xid, written, timed, occurrences in lines:
        assert (xid, occurrences) == (200, 1)
        assert remote == (None if new is None else "remote")
        assert written == timed == (kind not in MISSING)
        if kind in MISSING:
            assert local is None
        if index is not None:
            assert (id_, a) in {("1", None), (None, "20")}
        elif not full:
            assert (id_, a) == (str((old or new or ())[0]), None)
        else:
            assert (id_, a) == (None, None)
