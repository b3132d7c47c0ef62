"""The conflict policy add_delta: sums by type and format, its record, and what cannot be added."""

from __future__ import annotations

from struct import pack

import pytest

from subscriber.errors import ConflictError, MappingError, ServerError
from subscriber.protocol.messages import Insert, OldPart, Relation, ReplicaIdentity, Update
from subscriber.subscription import ConflictHistory
from tests.apply.build import UNSENT, row
from tests.conflicts.conftest import IN_FUTURE, Deciders
from tests.plugins.fix_cluster import Database
from tests.targets.conftest import Table, Values

POLICY = "public.t(n): add_delta"
FULL = ReplicaIdentity.FULL


def update(table: Table, new: Values, old: Values) -> tuple[Relation, Update]:
    return table.relation, Update(None, table.relation.relid, OldPart.ROW, row(*old), row(*new))


async def one_row(db: Database, type_: str, value: str | None, more: str = "") -> Table:
    await db.execute(f"CREATE TABLE t (b text, n {type_}, id int PRIMARY KEY) {more}")
    if more:
        await db.execute("CREATE TABLE part PARTITION OF t DEFAULT")
    literal = "NULL" if value is None else f"'{value}'"
    await db.execute(f"INSERT INTO t (b, n, id) OVERRIDING SYSTEM VALUE VALUES ('local', {literal}, 1)")
    return Table("t", "id*", "n", "b", identity=FULL)


@pytest.mark.parametrize(
    ("type_", "local", "old", "new", "expected"),
    [
        ("int2", "10", "100", "130", "40"),
        ("int4", "2000000000", "-2000000000", "-2000000005", "1999999995"),
        ("int4", "0", "-2000000000", "100000000", "2100000000"),  # the difference alone is 2,100,000,000
        ("int4", "-2000000000", "-2000000000", "2000000000", "2000000000"),  # and here no int4
        ("int8", "9", "-1", "9223372036854775800", None),  # the sum is no int8
        ("int8", "-9223372036854775808", "-9223372036854775808", "9223372036854775807", "9223372036854775807"),
        ("numeric", "0.10", "0.1", "0.125", "0.125"),
        ("numeric(10,2)", "10.25", "3.50", "3.75", "10.50"),
        ("float8", "1.5", "0.25", "0.5", "1.75"),
        ("float4", "1.5", "0.25", "0.5", "1.75"),
        ("money", "$10.00", "$1.00", "$1.50", "$10.50"),
        ("quantity", "7", "1", "4", "10"),
        ("int4 GENERATED ALWAYS AS IDENTITY", "7", "1", "4", "10"),
        ("int4", "7", "4", "4", "7"),
        # If one of the values is NULL there is no difference, and the publisher's value is taken.
        ("int4", None, "1", "4", "4"),
        ("int4", "7", None, "4", "4"),
        ("int4", "7", "1", None, None),
    ],
)
async def test_add_delta_adds_values_of_each_numeric_type(
    db: Database,
    deciders: Deciders,
    type_: str,
    local: str | None,
    old: str | None,
    new: str | None,
    expected: str | None,
) -> None:
    await db.execute("CREATE DOMAIN quantity AS int4 CHECK (value >= 0)")
    t = await one_row(db, type_, local)
    session = await deciders.open(POLICY)
    changed = update(t, ("1", new, "remote"), ("1", old, "before"))
    if expected is None and new is not None:
        with pytest.raises(ServerError, match="out of range"):
            await session.apply(changed)
        expected = local
    else:
        await session.apply(changed)
    assert await db.value("SELECT n::text FROM t") == expected


@pytest.mark.parametrize("more", ["", "PARTITION BY RANGE (id)"])
async def test_add_delta_adds_binary_values_in_partitions(db: Database, deciders: Deciders, more: str) -> None:
    t = await one_row(db, "int4", "7", more)
    session = await deciders.open(POLICY)
    four, three, one = pack(">i", 4), pack(">i", 3), pack(">i", 1)
    await session.apply(update(t, (one, four, b"remote"), (one, three, b"before")))
    # The key and another column change, too. Values come as text and binary.
    await session.apply(update(t, (four, "10", "again"), (one, four, "remote")))
    assert await db.rows("SELECT id, n, b FROM t") == [(4, 14, "again")]


async def test_every_update_adds(db: Database, deciders: Deciders) -> None:
    """Several updates of one row in one transaction and in several add up, between local writes."""
    t = await one_row(db, "int4", "100")
    session = await deciders.open(POLICY)
    await session.apply(
        *[update(t, ("1", str(n + 1), "x"), ("1", str(n), "x")) for n in range(5)],
    )
    await db.execute("UPDATE t SET n = n + 1000")
    await session.apply(update(t, ("1", "3", "x"), ("1", "5", "x")))
    assert await db.value("SELECT n FROM t") == 1103


async def test_a_value_that_was_not_sent_stays(db: Database, deciders: Deciders) -> None:
    t = await one_row(db, "numeric", "7")
    session = await deciders.open(POLICY)
    await session.apply(update(t, ("1", UNSENT, "remote"), ("1", "5", "before")))
    assert await db.rows("SELECT n::int, b FROM t") == [(7, "remote")]


async def test_a_decision_of_add_delta_is_recorded(db: Database, deciders: Deciders) -> None:
    t = await one_row(db, "int4", "7")
    session = await deciders.open(f"{POLICY}, last_update_wins", history=ConflictHistory.DECIDED)
    await session.apply(update(t, ("1", "4", "remote"), ("1", "3", "before")))
    (conflict,) = session.reported
    assert conflict.type == "update_origin_differs"
    assert conflict.detail.endswith('Resolution: added, by conflict policy "add_delta".')
    rows = await db.rows(
        "SELECT conflict_type, policy, resolution, local_row->>'n', remote_row->>'n' FROM subscriber.conflict_history"
    )
    assert rows == [("update_origin_differs", "add_delta", "added", "7", "4")]
    # The row is the publisher's now. The next change is no conflict, and adds.
    await session.apply(update(t, ("1", "5", "remote"), ("1", "4", "remote")))
    assert len(session.reported) == 1
    assert await db.value("SELECT n FROM t") == 9


async def test_add_delta_decides_no_other_type_of_conflict(db: Database, deciders: Deciders) -> None:
    """A row that exists, or is missing, gets the publisher's values: there is nothing to add to."""
    t = await one_row(db, "int4", "7")
    session = await deciders.open(f"public.t: apply_remote, {POLICY}")
    await session.apply((t.relation, Insert(None, t.relation.relid, row("1", "30", "remote"))), at=IN_FUTURE)
    await session.apply(update(t, ("2", "50", "missing"), ("2", "40", "missing")))
    await session.apply(update(t, ("2", "31", "moved"), ("1", "30", "remote")))
    assert await db.rows("SELECT id, n, b FROM t ORDER BY id") == [(2, 31, "moved")]
    assert [str(conflict.type) for conflict in session.reported] == ["insert_exists", "update_missing", "update_exists"]


async def test_the_publisher_must_send_old_rows(db: Database, deciders: Deciders) -> None:
    await one_row(db, "int4", "7")
    t = Table("t", "id*", "n", "b")
    session = await deciders.open(POLICY)
    with pytest.raises(MappingError, match="needs the old rows") as caught:
        await session.apply(t.update("1", "4", "remote"))
    assert 'ALTER TABLE "public"."t" REPLICA IDENTITY FULL;' in (caught.value.hint or "")
    # A table description with FULL is no proof for a single row.
    full = Table("t", "id*", "n", "b", identity=FULL)
    session = await deciders.open(POLICY)
    with pytest.raises(MappingError, match="needs the old rows"):
        await session.apply(full.update("1", "4", "remote"))
    assert await db.value("SELECT n FROM t") == 7


@pytest.mark.parametrize(
    ("definition", "policy", "message", "detail"),
    [
        ("id int, n int, b text", POLICY, "needs a primary key", "cannot be found by its old values"),
        ("id int PRIMARY KEY, n int, b text", "public.t(m): add_delta", 'column "m"', "sends no column"),
        ("id int PRIMARY KEY, n int, b text", "public.t(id): add_delta", 'column "id"', "part of the key"),
        ("id int PRIMARY KEY, n int, b text", "public.t(b): add_delta", 'column "b"', "type is text"),
    ],
)
async def test_add_delta_refuses_columns_that_cannot_be_added(
    db: Database, deciders: Deciders, definition: str, policy: str, message: str, detail: str
) -> None:
    await db.execute(f"CREATE TABLE t ({definition})", "INSERT INTO t VALUES (1, 7, 'local')")
    t = Table("t", "id*", "n", "b", identity=FULL)
    session = await deciders.open(policy)
    with pytest.raises(MappingError) as caught:
        await session.apply(update(t, ("1", "4", "remote"), ("1", "3", "before")))
    assert message in caught.value.message
    assert detail in (caught.value.detail or "")
    assert caught.value.hint


async def test_a_function_cannot_answer_add_delta(db: Database, deciders: Deciders) -> None:
    async def answer(_conflict: object) -> str:
        return "add_delta"

    t = await one_row(db, "int4", "7")
    session = await deciders.open("call f", resolvers={"f": answer})
    with pytest.raises(ConflictError):
        await session.apply(update(t, ("1", "4", "remote"), ("1", "3", "before")))
