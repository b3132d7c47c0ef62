"""Subscriptions with hooks, on real servers.

The copy and the changes have the same result, and no excluded value reaches the target.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import subscriber
from subscriber import Hook, Hooks, StatementError
from subscriber.check.check import collect
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Log, running_subscriber

pytestmark = pytest.mark.usefixtures("with_schema")


class Staging:
    """A publisher `source`, a `target`, and hooks for subscription s between them."""

    def __init__(self, source: Database, target: Database, hooks: Hooks | None) -> None:
        self.source = source
        self.target = target
        self.hooks = {} if hooks is None else {"s": hooks}

    async def create(self, publication: str = "FOR ALL TABLES", options: str = "") -> None:
        await self.source.execute(f"CREATE PUBLICATION p {publication}")
        dsn = self.source.dsn(options="-c logical_decoding_work_mem=64kB")
        await self.execute(f"CREATE SUBSCRIPTION s CONNECTION '{dsn}' PUBLICATION p {options}")

    async def execute(self, statement: str) -> None:
        async with subscriber.connect(self.target.dsn(), hooks=self.hooks) as db:
            await db.execute(statement)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Wait until everything is copied. At the end of the block, wait for the changes made inside."""
        async with subscriber.connect(self.target.dsn(), hooks=self.hooks) as db, db.running():
            with anyio.fail_after(20):
                await db.wait_for_sync("s")
            yield
            await self.source.wait_for_catchup("s")

    async def rows(self, query: str) -> list[tuple[Any, ...]]:
        return await self.target.rows(query)


async def shout(row: dict[str, Any]) -> dict[str, Any]:
    await anyio.lowlevel.checkpoint()
    return {**row, "note": (row["note"] or "").upper()}


PERSON = """
CREATE TABLE person (id int PRIMARY KEY, name text, email text, secret text, note text);
INSERT INTO person SELECT i, 'name ' || i, i || '@example.org', 'secret', E'a\\tb' FROM generate_series(1, 3) i;
"""
STAGING = """
CREATE SCHEMA staging;
CREATE TABLE staging.people (note text, id int PRIMARY KEY, full_name text, email text)
"""


@pytest.mark.parametrize("streaming", ["off", "parallel"])
async def test_hooks_change_copied_rows_and_changes(source_db: Database, target_db: Database, streaming: str) -> None:
    person = Hook(
        to="staging.people",
        rename={"name": "full_name"},
        drop=["secret"],
        mask={"email": lambda text: f"{len(text)}@masked", "name": "N. N."},
        row=shout,
    )
    staging = Staging(source_db, target_db, Hooks({"person": person}))
    await source_db.execute(PERSON, "CREATE TABLE plain (a int PRIMARY KEY)", "INSERT INTO plain VALUES (1)")
    await target_db.execute(STAGING, "CREATE TABLE plain (a int PRIMARY KEY)")
    await staging.create(options=f"WITH (streaming = {streaming})")
    async with staging.running():
        assert await staging.rows("SELECT id, full_name, email, note FROM staging.people ORDER BY id") == [
            (i, "N. N.", "13@masked", "A\tB") for i in (1, 2, 3)
        ]
        await source_db.execute(
            "BEGIN; UPDATE person SET email = 'x' WHERE id = 1; DELETE FROM person WHERE id = 2;"
            " UPDATE person SET id = 4 WHERE id = 3; INSERT INTO plain VALUES (2); COMMIT",
            # Many rows use the batch path, and arrive in blocks if the subscription streams.
            "INSERT INTO person SELECT i, 'n', 'e', 's', 'many' FROM generate_series(100, 3000) i",
        )
        await target_db.wait_for(
            "SELECT format || ': ' || format_reason FROM subscriber.worker WHERE relid = 0",
            'text: the hook of table "public.person" reads values',
        )
    assert await staging.rows("SELECT id, full_name, email, note FROM staging.people WHERE id < 100 ORDER BY id") == [
        (1, "N. N.", "1@masked", "A\tB"),
        (4, "N. N.", "13@masked", "A\tB"),
    ]
    assert await staging.rows("SELECT DISTINCT full_name, email, note FROM staging.people WHERE id >= 100") == [
        ("N. N.", "1@masked", "MANY")
    ]
    assert await staging.rows("SELECT a FROM plain ORDER BY a") == [(1,), (2,)]
    assert await staging.rows("SELECT count(*) FROM staging.people") == [(2903,)]


async def test_schemas_names_and_columns_in_binary(source_db: Database, target_db: Database) -> None:
    hooks = Hooks({"t": Hook(rename={"b": "c"}, drop=["x"])}, schemas={"public": "here"})
    staging = Staging(source_db, target_db, hooks)
    await source_db.execute(
        "CREATE TABLE t (x text, a int PRIMARY KEY, b int)",
        "INSERT INTO t VALUES ('x', 1, 2)",
        "CREATE TABLE u (a int PRIMARY KEY)",
    )
    await target_db.execute(
        "CREATE SCHEMA here; CREATE TABLE here.t (c int, a int PRIMARY KEY); CREATE TABLE here.u (a int PRIMARY KEY)"
    )
    await staging.create(options="WITH (binary = true)")
    async with staging.running():
        await source_db.execute("INSERT INTO t VALUES ('x', 2, 3)", "UPDATE t SET b = 4 WHERE a = 1")
        await source_db.execute(
            "INSERT INTO u SELECT generate_series(1, 100)", "TRUNCATE u", "INSERT INTO u VALUES (7)"
        )
    assert await staging.rows("SELECT a, c FROM here.t ORDER BY a") == [(1, 4), (2, 3)]
    assert await staging.rows("SELECT a FROM here.u") == [(7,)]


async def test_a_filter_follows_rows_that_enter_and_leave(source_db: Database, target_db: Database) -> None:
    staging = Staging(source_db, target_db, Hooks({"t": Hook(where=lambda row: row["country"] == "DE")}))
    await source_db.execute(
        "CREATE TABLE t (id int PRIMARY KEY, country text, large text)",
        "ALTER TABLE t ALTER large SET STORAGE external",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        "INSERT INTO t VALUES (1, 'DE', repeat('x', 9000)), (2, 'FR', repeat('y', 9000))",
    )
    await target_db.execute("CREATE TABLE t (id int PRIMARY KEY, country text, large text)")
    await staging.create()
    async with staging.running():
        assert await staging.rows("SELECT id FROM t") == [(1,)]
        await source_db.execute("UPDATE t SET country = CASE id WHEN 1 THEN 'FR' ELSE 'DE' END")
        await source_db.execute("INSERT INTO t VALUES (3, 'FR', ''), (4, 'DE', '')", "DELETE FROM t WHERE id = 3")
    assert await staging.rows("SELECT id, left(large, 1), length(large) FROM t ORDER BY id") == [
        (2, "y", 9000),
        (4, "", 0),
    ]


@asynccontextmanager
async def refused(target: Database, pattern: str, hooks: dict[str, Hooks]) -> AsyncIterator[Log]:
    """Run a launcher with these hooks until its log has an error that matches `pattern`."""
    async with (
        running_subscriber(target, start=False) as guard,
        subscriber.connect(target.dsn(), hooks=hooks) as db,
        db.running(),
    ):
        await guard.log.wait_for(pattern)
        yield guard.log


async def test_a_subscription_does_not_run_without_its_hooks(source_db: Database, target_db: Database) -> None:
    staging = Staging(source_db, target_db, Hooks({"t": Hook(mask={"b": "x"})}))
    await source_db.execute("CREATE TABLE t (a int PRIMARY KEY, b text)")
    await target_db.execute("CREATE TABLE t (a int PRIMARY KEY, b text)")
    await staging.create()
    async with staging.running():
        await source_db.execute("INSERT INTO t VALUES (1, 'secret')")
    async with refused(target_db, 'subscription "s" has hooks, and this program has none', {}):
        await source_db.execute("INSERT INTO t VALUES (2, 'secret')")
        await anyio.sleep(0.5)
    async with refused(target_db, 'name a table that is not part of it: "public.typo"', {"s": Hooks({"typo": Hook()})}):
        pass
    async with refused(target_db, "which the hooks send to", {"s": Hooks({"t": Hook(to="other")})}):
        pass
    async with staging.running():
        await source_db.execute("INSERT INTO t VALUES (3, 'secret')")
    assert await staging.rows("SELECT a, b FROM t ORDER BY a") == [(1, "x"), (2, "x"), (3, "x")]
    staging.hooks = {"s": Hooks()}  # on purpose
    async with staging.running():
        await source_db.execute("INSERT INTO t VALUES (4, 'open')")
    assert await staging.rows("SELECT b FROM t WHERE a = 4") == [("open",)]
    staging.hooks = {}
    async with staging.running():
        pass


async def test_a_hook_that_does_not_fit_stops_before_the_copy(source_db: Database, target_db: Database) -> None:
    hooks = Hooks({"t": Hook(mask={"a": "1"})})
    staging = Staging(source_db, target_db, hooks)
    await source_db.execute("CREATE TABLE t (a int PRIMARY KEY, b text)", "INSERT INTO t VALUES (1, 'x')")
    await target_db.execute("CREATE TABLE t (a int PRIMARY KEY, b text)")
    await staging.create()
    async with refused(target_db, 'hook of table "public.t" masks key column "a"', {"s": hooks}):
        assert await staging.rows("SELECT * FROM t") == []
    await staging.execute("ALTER SUBSCRIPTION s SET (binary = true)")
    async with refused(target_db, "reads values, which are sent in binary", {"s": Hooks({"t": Hook(mask={"b": "x"})})}):
        pass


async def test_an_error_of_a_function_says_where_and_what_to_skip(source_db: Database, target_db: Database) -> None:
    def fragile(text: str) -> str:
        return str(int(text))

    hooks = Hooks({"t": Hook(mask={"b": fragile})})
    staging = Staging(source_db, target_db, hooks)
    for database in (source_db, target_db):
        await database.execute("CREATE TABLE t (a int PRIMARY KEY, b text)")
    await staging.create()
    async with staging.running():
        await source_db.execute("INSERT INTO t VALUES (1, '1')")
    await source_db.execute("INSERT INTO t VALUES (2, 'secret')", "INSERT INTO t VALUES (3, '3')")
    async with refused(target_db, 'mask of the hook of table "public.t" raised ValueError', {"s": hooks}) as log:
        match = await log.wait_for(r"In fragile\(\), line .*\n.*finished at (\S+)")
        assert "secret" not in log.text()
        await staging.execute(f"ALTER SUBSCRIPTION s SKIP (lsn = '{match[1]}')")
        await target_db.wait_for("SELECT b FROM t WHERE a = 3", "3")


async def test_an_error_of_a_function_in_the_copy(source_db: Database, target_db: Database) -> None:
    staging = Staging(source_db, target_db, Hooks({"t": Hook(mask={"b": int})}))
    for database in (source_db, target_db):
        await database.execute("CREATE TABLE t (a int PRIMARY KEY, b text)")
    await source_db.execute(
        "INSERT INTO t SELECT i, i FROM generate_series(1, 5000) i; INSERT INTO t VALUES (0, 'secret')"
    )
    await staging.create()
    async with refused(target_db, 'mask of the hook of table "public.t" raised ValueError', staging.hooks) as log:
        assert "secret" not in log.text()
        assert await staging.rows("SELECT * FROM t") == []
    staging.hooks = {"s": Hooks({"t": Hook(mask={"b": len})})}
    async with staging.running():
        assert await staging.rows("SELECT b, count(*) FROM t GROUP BY b ORDER BY b") == [
            ("1", 9),
            ("2", 90),
            ("3", 900),
            ("4", 4001),
            ("6", 1),
        ]


async def test_a_table_that_comes_later(source_db: Database, target_db: Database) -> None:
    staging = Staging(source_db, target_db, Hooks(schemas={"public": "here"}))
    await source_db.execute("CREATE TABLE t (a int PRIMARY KEY)")
    await target_db.execute("CREATE SCHEMA here", "CREATE TABLE here.t (a int PRIMARY KEY)")
    await staging.create()
    async with staging.running():
        await source_db.execute("CREATE TABLE u (a int PRIMARY KEY)", "INSERT INTO u VALUES (1)")
        with pytest.raises(StatementError, match=r'relation "here\.u" does not exist'):
            await staging.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
        await target_db.execute("CREATE TABLE here.u (a int PRIMARY KEY)")
        await staging.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
        await target_db.wait_for("SELECT count(*) FROM here.u", 1)
        async with subscriber.connect(target_db.dsn()) as db:  # the definitions of tables stay known
            await db.execute("ALTER SUBSCRIPTION s REFRESH PUBLICATION")
        await source_db.execute("INSERT INTO t VALUES (1)")
    assert await staging.rows("SELECT a FROM here.t") == [(1,)]


async def test_hooks_that_send_two_tables_to_one_are_refused(source_db: Database, target_db: Database) -> None:
    staging = Staging(source_db, target_db, Hooks({"t": Hook(to="u")}))
    await source_db.execute("CREATE TABLE t (a int PRIMARY KEY)", "CREATE TABLE u (a int PRIMARY KEY)")
    await target_db.execute("CREATE TABLE u (a int PRIMARY KEY)")
    with pytest.raises(StatementError, match="to one table of the target"):
        await staging.create()


async def test_check_leaves_tables_with_hooks_to_the_program(source_db: Database, target_db: Database) -> None:
    staging = Staging(source_db, target_db, Hooks({"t": Hook(to="u", drop=["b"])}))
    await source_db.execute("CREATE TABLE t (a int PRIMARY KEY, b int)", "INSERT INTO t VALUES (1, 2)")
    await target_db.execute("CREATE TABLE u (a int PRIMARY KEY)")
    await staging.create()
    async with staging.running():
        facts = await collect(target_db.dsn(), None, [], "s")
        assert facts.tables == []
        assert not facts.failures
    assert await staging.rows("SELECT a FROM u") == [(1,)]
