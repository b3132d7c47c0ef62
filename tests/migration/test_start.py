"""start and rehearse, without another launcher: from an empty target to the estimate of a pause."""

from __future__ import annotations

import re
from dataclasses import replace

import anyio
import pytest

from subscriber import MoveOptions, Settings, StartOptions, StepEvent, move_database
from subscriber.catalog.commands.execute import execute
from subscriber.catalog.connection import Connection
from subscriber.demo.servers import embedded_bin
from subscriber.errors import StatementError, SubscriptionFailed
from subscriber.migration.diff.schema_diff import own_publications, schema_diff
from subscriber.migration.plan import START, Side
from tests.migration.scene import QUICK, admits, listen
from tests.migration.shop import drop_roles
from tests.migration.writers import SCHEMA
from tests.plugins.fix_cluster import Database, numbers

INDEXES = (
    "CREATE INDEX token ON item (token)",
    "CREATE INDEX lower ON item (lower(token)); ALTER INDEX lower ALTER COLUMN 1 SET STATISTICS 7",
    "ALTER TABLE item ADD CONSTRAINT one UNIQUE (ticket) DEFERRABLE, CLUSTER ON lower",
    "CREATE INDEX days ON part (day)",
)
WAIVED = ("unknown:nothing",)


async def different(source: Connection, target: Connection) -> list[str]:
    """Return the names of the objects that differ, without the publications of the move."""
    own = await own_publications(source, target)
    assert own == {"s"}
    return [difference.name for difference in await schema_diff(source, target, without=own)]


@pytest.mark.timeout(180)
async def test_an_empty_target_follows_and_the_pause_is_rehearsed(source_db: Database, target_db: Database) -> None:
    if not (embedded_bin() / "pg_dump").exists():
        pytest.skip("the servers have no pg_dump beside them")
    options = StartOptions(programs=embedded_bin())
    await source_db.execute(*SCHEMA, "INSERT INTO item (token) VALUES ('a'), ('b')", *INDEXES)
    events: list[StepEvent] = []
    servers = source_db.dsn(), target_db.dsn()
    async with move_database(*servers, "s", dry_run=True) as move:
        await listen(move, move.start(options), events.append)
    planned = {event.step: str(event.detail["statements"]) for event in events}
    assert list(planned) == [step.name for step in START]
    assert "CREATE TABLE public.item" in planned["definitions"]
    assert "ADD CONSTRAINT part_1_pkey PRIMARY KEY" in planned["definitions"]
    assert "item_pkey" not in planned["definitions"]
    assert "ADD CONSTRAINT item_pkey PRIMARY KEY" in planned["rest"]
    assert "copy_indexes = after" in planned["subscribe"]
    assert planned["subscribe"].count("CREATE TRIGGER") == 5
    assert "CREATE INDEX token ON public.item" in planned["rest"]
    assert await target_db.value("SELECT to_regclass('item') IS NULL AND to_regnamespace('subscriber') IS NULL")
    events.clear()
    async with move_database(*servers, "s", options=QUICK) as move:
        with pytest.raises(StatementError, match='there is no finding "unknown:nothing" to waive'):
            await move.start(replace(options, waive=WAIVED))
        for _ in range(2):  # a repeated call finds nothing to do
            await listen(move, move.start(options), events.append)
        assert await target_db.rows("SELECT token FROM item ORDER BY id") == [("a",), ("b",)]
        source, target = await source_db.connect(), await target_db.connect()
        assert await different(source, target) == []
        # A publication that the move has not created belongs to the definitions, whatever its name is.
        await source.execute("CREATE PUBLICATION s_back")
        assert await different(source, target) == ["s_back"]
        await source.execute("DROP PUBLICATION s_back")
        assert await target_db.value("SELECT subcopyindexes FROM subscriber.subscription") == "after"
        assert [event.step for event in events if event.state == "done"][-len(START) :] == [step.name for step in START]
        status = await move.status()
        assert [server.fence for server in status.servers] == ["none", "closed"]
        for freeze in (False, True):
            rehearsed = await move.rehearse(freeze=freeze)
            assert (rehearsed.pause is not None) == freeze
            assert rehearsed.estimate < QUICK.max_pause
        assert [server.fence for server in (await move.status()).servers] == ["open", "closed"]
        await source_db.execute("INSERT INTO item (token) VALUES ('c')")
        assert (await move.cutover()).serving is Side.TARGET
        with pytest.raises(StatementError, match="applications already write to the target"):
            await move.start(options)
        assert [server.fence for server in (await move.status()).servers] == ["closed", "open"]
        await move.finish()
        with pytest.raises(StatementError, match="the move is finished, and the target has the database"):
            await move.start(options)
        for database in (source_db, target_db):
            assert await database.value("SELECT count(*) FROM pg_publication") == 0
    assert await target_db.rows("SELECT token FROM item ORDER BY id") == [("a",), ("b",), ("c",)]
    assert MoveOptions().max_pause == 5.0
    assert await admits(target_db, "postgres")


@pytest.mark.timeout(120)
async def test_jobs_is_the_number_of_tables_that_are_copied_at_a_time(source_db: Database, target_db: Database) -> None:
    """The launcher of the process copies them, also that of a program."""
    slots = "SELECT count(*) FROM pg_replication_slots WHERE slot_name ~ '_sync_' AND database = current_database()"
    names = [f"t{number}" for number in range(5)]
    for database in (source_db, target_db):
        await database.execute(*[f"CREATE TABLE {name} (id int PRIMARY KEY)" for name in names])
    await source_db.execute(*[f"INSERT INTO {name} SELECT generate_series(1, 10000)" for name in names])
    seen = 0
    async with (
        move_database(source_db.dsn(), target_db.dsn(), "s", settings=Settings(copy_rate=60_000)) as move,
        move.running(move.start(StartOptions(schema=False, jobs=3))) as start,
        anyio.create_task_group() as tasks,
    ):

        async def watch() -> None:
            nonlocal seen
            while True:
                seen = max(seen, await source_db.value(slots))
                await anyio.sleep(0.05)

        tasks.start_soon(watch)
        async for _ in start:
            pass
        tasks.cancel_scope.cancel()
    assert seen == 3


FOREIGN_CODE = """
CREATE ROLE "{owner}";
CREATE TABLE item (id int PRIMARY KEY, price int);
CREATE FUNCTION with_tax(price int) RETURNS int IMMUTABLE LANGUAGE sql RETURN price * 2;
ALTER FUNCTION with_tax(int) OWNER TO "{owner}";
ALTER TABLE item ADD gross int GENERATED ALWAYS AS (with_tax(price)) STORED;
INSERT INTO item VALUES (1, 10);
"""


@pytest.mark.timeout(180)
async def test_a_table_that_cannot_be_copied_ends_start_with_its_error(
    source_db: Database, target_db: Database
) -> None:
    if not (embedded_bin() / "pg_dump").exists():
        pytest.skip("the servers have no pg_dump beside them")
    suffix = f"_{next(numbers)}"
    owner = f"owner{suffix}"
    options = StartOptions(programs=embedded_bin())
    await source_db.execute(FOREIGN_CODE.format(owner=owner))
    try:
        async with move_database(source_db.dsn(), target_db.dsn(), "s", options=QUICK) as move:
            with pytest.raises(SubscriptionFailed, match=f'table public.item: .* code of role "{owner}"') as failed:
                await move.start(options)
            match = re.search(r"SET \((trusted_owners = .*)\)", failed.value.hint or "")
            assert match is not None
            async with target_db.connection() as connection:
                await execute(connection, f"ALTER SUBSCRIPTION s SET ({match[1]})", notice=lambda *_: None)
            await move.start(options)
            assert (await move.cutover()).serving is Side.TARGET
            await target_db.execute("INSERT INTO item VALUES (2, 20)")
            assert (await move.back()).serving is Side.SOURCE
        assert await source_db.rows("SELECT id, gross FROM item ORDER BY id") == [(1, 20), (2, 40)]
    finally:
        await drop_roles(suffix, source_db.server, target_db.server)
