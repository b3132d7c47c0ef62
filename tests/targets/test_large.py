"""Large values are received in the middle of a transaction, which still ends where the publisher's did."""

from __future__ import annotations

from typing import cast

import pytest

from subscriber.apply.transaction import RemoteTransaction
from subscriber.connection.pipeline import BEHIND
from subscriber.errors import ServerError
from subscriber.lsn import Lsn
from subscriber.protocol.decode import Decoder, in_place
from subscriber.protocol.encode import encode
from subscriber.protocol.messages import Insert, ReplicaIdentity, Update
from subscriber.settings import DEFAULTS
from subscriber.targets.postgres.target import PostgresTarget
from tests.apply.build import UNSENT
from tests.plugins.fix_cluster import Database
from tests.targets.conftest import Applier, Change, Sessions, Table

WORTHWHILE = DEFAULTS.batch_min_rows

LARGE = "0123456789abcdef" * (BEHIND // 16 + 1)  # more than may be unanswered


@pytest.fixture
async def t(db: Database) -> Table:
    await db.execute("CREATE TABLE t (a int PRIMARY KEY, b text)")
    return Table("t", "a*", "b")


def received(change: Change) -> Change:
    """Return the change as the worker receives it, with rows that are views of the received bytes."""
    relation, message = change
    assert not isinstance(relation, list)
    decoded = Decoder().decode(in_place(encode(message)))
    assert isinstance(decoded, Insert | Update)
    assert isinstance(cast(object, decoded.new.raw), memoryview)
    return relation, decoded


async def test_the_rest_of_a_large_value_is_awaited_and_its_transaction_is_invisible(
    db: Database, applier: Applier, t: Table
) -> None:
    transaction = RemoteTransaction(7, Lsn(190), 1_000_000)
    mapping = await applier.mapping(t.relation)
    _, small = t.insert("1", "small")
    await applier.target.change(transaction, mapping, small)
    assert not applier.target.session.pipeline.idle
    for number in "23":
        _, change = received(t.insert(number, LARGE))
        assert isinstance(change, Insert)
        await applier.target.change(transaction, mapping, change)
        assert applier.target.session.pipeline.idle
    assert await db.value("SELECT count(*) FROM t") == 0
    await applier.target.commit(transaction, Lsn(200), lambda: None)
    await applier.target.sync()
    assert await db.value("SELECT count(*) FROM t") == 3


async def test_an_error_after_large_values_rolls_all_back(db: Database, applier: Applier, t: Table) -> None:
    changes = [t.insert("1", "small"), received(t.insert("2", LARGE)), received(t.insert("3", LARGE))]
    with pytest.raises(ServerError) as caught:
        await applier.apply(*changes, received(t.insert("2", LARGE)), t.insert("4", "small"))
    assert caught.value.sqlstate == "23505"
    assert 'message type "INSERT" for replication target relation "public.t"' in str(caught.value.context)
    assert await db.value("SELECT count(*) FROM t") == 0


async def test_a_rollback_to_a_savepoint_removes_large_values(db: Database, applier: Applier, t: Table) -> None:
    target, mapping = applier.target, await applier.mapping(t.relation)
    transaction = RemoteTransaction(7, Lsn(190), 1_000_000)

    async def insert(number: str) -> None:
        _, change = received(t.insert(number, LARGE))
        assert isinstance(change, Insert)
        await target.change(transaction, mapping, change)

    await insert("1")
    await target.savepoint(transaction, "s")
    await insert("2")
    await target.roll_back_to(transaction, "s")
    await insert("3")
    await target.commit(transaction, Lsn(200), lambda: None)
    await target.sync()
    assert await db.rows("SELECT a FROM t ORDER BY a") == [(1,), (3,)]


async def test_large_values_are_updated_by_key_and_by_the_whole_row_and_left_unchanged(
    db: Database, applier: Applier
) -> None:
    await db.execute(
        "CREATE TABLE t (a int PRIMARY KEY, b text)",
        "CREATE TABLE f (a int, b text)",
        "ALTER TABLE f ALTER b SET STORAGE EXTERNAL",
    )
    t, f = Table("t", "a*", "b"), Table("f", "a", "b", identity=ReplicaIdentity.FULL)
    await applier.apply(*[received(t.insert(number, LARGE)) for number in "12"], received(f.insert("1", LARGE)))
    await applier.apply(
        received(t.update("1", LARGE[:-1])),
        t.update("3", UNSENT, old=("2", None)),
        received(f.update("1", LARGE[:-2], old=("1", LARGE))),
    )
    assert await db.rows("SELECT a, length(b) FROM t ORDER BY a") == [(1, len(LARGE) - 1), (3, len(LARGE))]
    assert await db.rows("SELECT a, length(b) FROM f") == [(1, len(LARGE) - 2)]
    await applier.apply(received(t.update("9", LARGE)))
    assert applier.missing == ["UPDATE public.t"]


async def test_small_changes_around_large_values_may_be_in_batches(db: Database, sessions: Sessions, t: Table) -> None:
    applier = await sessions.open(batching=True)
    assert isinstance(applier.target, PostgresTarget)
    context = [t.insert(str(number), "small") for number in range(100, 100 + 2 * WORTHWHILE)]
    await applier.send(*context[:WORTHWHILE])
    await applier.send(*context[WORTHWHILE:], received(t.insert("1", LARGE)), received(t.insert("2", LARGE)))
    await applier.send(*[t.update(str(number), "changed") for number in range(100, 100 + WORTHWHILE)])
    await applier.apply(t.delete("100", None))
    assert applier.committed[-1] == applier.end
    rows_read = await db.rows("SELECT b, count(*) FROM t WHERE a >= 100 GROUP BY b ORDER BY b")
    assert rows_read == [("changed", WORTHWHILE - 1), ("small", WORTHWHILE)]
    assert await db.rows("SELECT a, length(b) FROM t WHERE a < 100 ORDER BY a") == [(1, len(LARGE)), (2, len(LARGE))]
