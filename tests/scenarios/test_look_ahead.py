"""Definitions of tables that are read ahead of the first change: they are used, and detected as stale after ALTER."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import anyio
import pytest

from subscriber.apply.relation_map import LocalRelation
from subscriber.connection.pipeline import Pipeline
from subscriber.targets.postgres.session import introspection
from subscriber.targets.postgres.session.introspection import Terms
from subscriber.targets.postgres.session.target_session import TargetSession
from subscriber.worker.apply import look_ahead
from tests.plugins.fix_subscriber import QUICK
from tests.scenarios.conftest import Pair

TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text, w int)"
LOOKING = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'subscriber: s tables'"


class Looked:
    """Counts the reads of table definitions: ahead, and by the sessions that apply changes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead: list[str] = []
        self.late: list[str] = []
        introspect = introspection.introspect

        async def ahead(pipeline: Pipeline, schema: str, name: str, terms: Terms) -> LocalRelation:
            table = await introspect(pipeline, schema, name, terms)
            self.ahead.append(name)
            return table

        async def late(pipeline: Pipeline, schema: str, name: str, terms: Terms) -> LocalRelation:
            self.late.append(name)
            return await introspect(pipeline, schema, name, terms)

        monkeypatch.setattr(look_ahead, "introspect", ahead)
        monkeypatch.setattr(introspection, "introspect", late)

    async def wait_for(self, count: int) -> None:
        with anyio.fail_after(20):
            while len(self.ahead) < count:
                await anyio.sleep(0.01)


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Looked:
    return Looked(monkeypatch)


async def test_a_transaction_over_many_tables_looks_at_none(pair: Pair, looked: Looked) -> None:
    names = [f"t{number}" for number in range(60)]
    await pair.both(*(f"CREATE TABLE {name} (id int PRIMARY KEY)" for name in names))
    await pair.subscribe("FOR ALL TABLES", copy_data=False)
    await looked.wait_for(len(names))
    await pair.target.wait_for(LOOKING, 0)
    await pair.source.execute("; ".join(f"INSERT INTO {name} VALUES (1)" for name in names))
    await pair.source.wait_for_catchup("s")
    assert looked.late == []
    assert await pair.target.value(f"SELECT count(*) FROM ({' UNION ALL '.join(f'TABLE {n}' for n in names)}) t") == 60
    await pair.subscriber.restart()  # another process would know nothing either
    await looked.wait_for(2 * len(names))
    await pair.source.execute("; ".join(f"UPDATE {name} SET id = 2" for name in names))
    await pair.source.wait_for_catchup("s")
    assert looked.late == []


async def test_the_shapes_of_tables_are_compared_ahead(pair: Pair, looked: Looked) -> None:
    """The first change of a table finds that they have been, and an altered table is still found out."""
    names = [f"t{number}" for number in range(30)]
    await pair.both(*(f"CREATE TABLE {name} (id int PRIMARY KEY, v text)" for name in names))
    await pair.target.execute(f"ALTER DATABASE {pair.target.name} SET track_functions = 'all'")
    await pair.subscribe("FOR ALL TABLES", copy_data=False)
    compared = "SELECT coalesce(sum(calls), 0) FROM pg_stat_user_functions WHERE funcname = 'table_shape'"
    await pair.target.wait_for(f"SELECT ({compared}) >= {2 * len(names)}")  # both sessions
    before = await pair.target.value(compared)
    await pair.source.execute("; ".join(f"INSERT INTO {name} VALUES (1, 'a')" for name in names))
    await pair.source.wait_for_catchup("s")
    await anyio.sleep(1.2)  # servers report the calls once a second
    await pair.change("INSERT INTO t0 VALUES (2, 'a')")
    assert await pair.target.value(compared) == before
    await pair.target.execute("ALTER TABLE t1 RENAME v TO w", "ALTER TABLE t1 ADD v text")
    await pair.change("INSERT INTO t1 VALUES (2, 'b')")
    assert await pair.target.rows("SELECT id, w, v FROM t1 ORDER BY id") == [(1, "a", None), (2, None, "b")]
    assert not pair.subscriber.log.has("ERROR")


async def test_a_table_is_altered_between_the_look_and_the_comparison(
    pair: Pair, looked: Looked, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_ahead = TargetSession.check_ahead
    compared: list[str] = []

    def with_other_shapes(self: TargetSession, tables: Iterable[LocalRelation]) -> None:
        altered = list(tables)
        compared.extend(table.name for table in altered)
        check_ahead(
            self, [replace(table, shape=f"not {table.shape}") for table in altered] if len(compared) == 1 else altered
        )

    monkeypatch.setattr(TargetSession, "check_ahead", with_other_shapes)
    await pair.both(TABLE)
    await pair.subscribe("FOR ALL TABLES", copy_data=False)
    with anyio.fail_after(10):
        while not compared:
            await anyio.sleep(0.02)
    await pair.change("INSERT INTO t VALUES (1, 'a', 7)")
    assert await pair.target.rows("SELECT id, v, w FROM t") == [(1, "a", 7)]
    assert compared == ["t"]  # everything was forgotten, and is looked at when it is needed
    assert not pair.subscriber.log.has("ERROR")


@pytest.mark.parametrize("settings", [replace(QUICK, look_ahead_pause=1)])
async def test_a_backlog_is_applied_before_the_look(pair: Pair, looked: Looked) -> None:
    await pair.both(TABLE, "CREATE TABLE other (id int PRIMARY KEY)")
    await pair.subscribe("FOR ALL TABLES", copy_data=False)
    await pair.change("INSERT INTO t VALUES (1, 'a', 7)")
    assert looked.late == ["t"]
    await looked.wait_for(1)
    await pair.target.wait_for(LOOKING, 0)
    assert looked.ahead == ["other"]


@pytest.mark.parametrize(
    "altered",
    [
        ("ALTER TABLE t ADD x int", "ALTER TABLE t ADD x int"),  # not in the definition that was read ahead
        ("ALTER TABLE t ALTER w TYPE bigint", "ALTER TABLE t ALTER w TYPE bigint"),
        ("", "ALTER TABLE t ALTER w TYPE text"),
        ("", "ALTER TABLE t ADD x int DEFAULT 3, DROP v, ADD v text"),
        ("", "DROP TABLE t; CREATE TABLE t (w int, v text, id int PRIMARY KEY)"),
        ("", "ALTER TABLE t DROP CONSTRAINT t_pkey; ALTER TABLE t ADD PRIMARY KEY (id)"),
        ("ALTER TABLE t REPLICA IDENTITY FULL", "ALTER TABLE t DROP CONSTRAINT t_pkey"),
        ("", "CREATE TABLE u (LIKE t INCLUDING ALL); ALTER TABLE t RENAME TO old; ALTER TABLE u RENAME TO t"),
        ("", "CREATE RULE nothing AS ON INSERT TO t DO ALSO SELECT 1"),
    ],
)
async def test_a_table_is_altered_after_the_look(pair: Pair, looked: Looked, altered: tuple[str, str]) -> None:
    await pair.both(TABLE)
    await pair.subscribe("FOR ALL TABLES", copy_data=False)
    await looked.wait_for(1)
    await pair.target.wait_for(LOOKING, 0)
    for database, statements in zip((pair.source, pair.target), altered, strict=True):
        await database.execute(statements or "SELECT")
    dropped = "DROP TABLE t;" in altered[1]
    if dropped:  # a dropped table requires a refresh
        await pair.subscriber.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION WITH (copy_data = false)")
    await pair.source.execute("INSERT INTO t (id, v, w) VALUES (1, 'a', 7), (2, NULL, NULL)")
    await pair.source.execute("UPDATE t SET v = 'b', id = 5 WHERE id = 1", "DELETE FROM t WHERE id = 2")
    await pair.source.wait_for_catchup("s")
    assert await pair.target.rows("SELECT id, v, w::text FROM t") == [(5, "b", "7")]
    assert not pair.subscriber.log.has("ERROR")


async def test_the_look_is_cut_off(pair: Pair) -> None:
    names = [f"t{number}" for number in range(300)]
    await pair.both(*(f"CREATE TABLE {name} (id int PRIMARY KEY)" for name in names))
    await pair.subscribe("FOR ALL TABLES", copy_data=False)
    await pair.target.wait_for(LOOKING, 1)
    await pair.target.execute(LOOKING.replace("count(*)", "pg_terminate_backend(pid)"))
    await pair.source.execute("; ".join(f"INSERT INTO {name} VALUES (1)" for name in names))
    await pair.source.wait_for_catchup("s")
    assert await pair.target.value("SELECT count(*) FROM t299") == 1
    assert not pair.subscriber.log.has("ERROR|WARNING")


async def test_a_streamed_transaction_after_one_that_found_its_table_altered(pair: Pair, looked: Looked) -> None:
    """The parallel worker restarts with the first. The changes of both reach the target before their COMMIT."""
    await pair.source.stream_everything()
    await pair.both(TABLE)
    await pair.subscribe("FOR ALL TABLES", copy_data=False, streaming="parallel")
    await looked.wait_for(1)
    await pair.target.wait_for(LOOKING, 0)
    await pair.target.execute("CREATE INDEX ON t (v)")
    async with pair.source.connection() as connection:
        for number in (1, 2):
            await connection.execute(f"BEGIN; INSERT INTO t VALUES ({number}, 'a', 7)")
            await pair.source.flush_wal()
            writing = (
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_xid IS NOT NULL"
            )
            await pair.target.wait_for(writing, 1)
            await connection.execute("COMMIT")
            await pair.source.wait_for_catchup("s")
    await pair.assert_same("SELECT * FROM t ORDER BY id")
    assert not pair.subscriber.log.has("ERROR")
