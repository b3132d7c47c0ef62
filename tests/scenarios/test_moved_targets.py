"""A target that is restored from a dump, copied, upgraded or failed over: it stops until that is confirmed.

The tools are PostgreSQL's own. No test may end with missing rows and a status without problems.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from subscriber import failpoints
from subscriber.cli.commands.status import status as show_status
from subscriber.demo.servers import Server, Servers, ServersError
from subscriber.errors import CatalogMoved, ConnectionLost, StatementError
from subscriber.failpoints import Point
from tests.matrix import debian
from tests.matrix.programs import NotAvailable
from tests.plugins.fix_cluster import SETTINGS, Database, fresh_database
from tests.plugins.fix_subscriber import Subscriber, running_subscriber
from tests.scenarios.conftest import Pair
from tests.scenarios.standbys import promote, standby_of

MOVED = "the subscriptions of this database belong to another database"
NEW_TIMELINE = "the target is on another timeline than its subscriptions"
REBIND = "SELECT subscriber.rebind();"
SLOT = "SELECT confirmed_flush_lsn::text, active_pid FROM pg_replication_slots WHERE slot_name = 's'"


@asynccontextmanager
async def subscribed(source: Database, target: Database) -> AsyncIterator[Pair]:
    """Tables t and u with 100 rows each, which were copied and follow the publisher."""
    async with running_subscriber(target) as subscriber:
        pair = Pair(source, target, subscriber)
        await pair.both("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)")
        await source.execute("INSERT INTO t SELECT generate_series(1, 100)", "INSERT INTO u SELECT * FROM t")
        await pair.subscribe("FOR TABLE t, u")
        await pair.subscriber.wait_for_ready(source)
        yield pair


async def server(servers: Servers, name: str, *, filler: int = 0) -> Database:
    """Create a server whose OIDs are `filler` tables ahead."""
    created = await servers.create(name, SETTINGS)
    await created.start()
    database = Database(created, "postgres")
    await database.execute(*(f"CREATE TABLE filler{n} ()" for n in range(filler)))
    await database.execute(*(f"DROP TABLE filler{n}" for n in range(filler)))
    return database


async def dump(database: Database, *options: str) -> Path:
    file = database.server.directory / "dump"
    await database.server.program("pg_dump", "-Fc", "-f", str(file), *options, dbname=database.name)
    return file


async def restore(database: Database, file: Path) -> None:
    await database.server.program("pg_restore", "--exit-on-error", "-d", database.name, str(file))


async def refused(subscriber: Subscriber, message: str = MOVED) -> CatalogMoved:
    """Launcher, status and statements refuse with the same error; which."""
    dsn = subscriber.database.dsn()
    done = subprocess.run(
        [sys.executable, "-m", "subscriber", "run", "--target", dsn, "--log-format", "postgres"],
        capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert done.returncode == 3
    assert message in done.stderr
    with pytest.raises(CatalogMoved) as by_status:
        await show_status(dsn)
    for statement in ("ALTER SUBSCRIPTION s ENABLE", "ALTER SUBSCRIPTION s REFRESH PUBLICATION", "DROP SUBSCRIPTION s"):
        with pytest.raises(CatalogMoved) as by_exec:
            await subscriber.execute(statement)
        assert (by_exec.value.message, by_exec.value.detail) == (message, by_status.value.detail)
    assert REBIND in (by_status.value.hint or "")
    assert by_status.value.sqlstate == "55000"
    return by_status.value


async def assert_followed(pair: Pair) -> None:
    """Check that earlier and new rows arrive, and that the status is good."""
    await pair.caught_up()
    await pair.change("DELETE FROM t WHERE id = 1", "INSERT INTO t VALUES (1000)")
    for (table,) in await pair.source.rows("SELECT tablename FROM pg_publication_tables WHERE pubname = 'p'"):
        await pair.assert_same(f"SELECT * FROM {table} ORDER BY 1")
    await pair.subscriber.wait_for_state("streaming")
    assert await show_status(pair.target.dsn()) == 0


@pytest.mark.parametrize("options", [[], ["--no-unlogged-table-data"]], ids=["all", "no-unlogged"])
async def test_a_restored_dump_runs_once_it_is_confirmed(
    new_servers: Servers, source_db: Database, options: Sequence[str]
) -> None:
    old, new = await server(new_servers, "old"), await server(new_servers, "new", filler=50)
    async with subscribed(source_db, old) as pair:
        await pair.subscriber.stop()
        before = await source_db.rows(SLOT)
        await restore(new, await dump(old, *options))
    await source_db.execute("INSERT INTO t SELECT generate_series(101, 200)")
    async with running_subscriber(new, start=False) as subscriber:
        await refused(subscriber)
        assert await source_db.rows(SLOT) == before
        await new.execute(REBIND)
        subscriber.start()
        await assert_followed(Pair(source_db, new, subscriber))


async def test_a_dump_without_large_objects_has_no_progress(new_servers: Servers, source_db: Database) -> None:
    old, new = await server(new_servers, "old"), await server(new_servers, "new", filler=50)
    async with subscribed(source_db, old) as pair:
        await pair.subscriber.stop()
        await restore(new, await dump(old, "--no-large-objects"))
    await source_db.execute("INSERT INTO t SELECT generate_series(101, 200)")
    async with running_subscriber(new, start=False) as subscriber:
        await refused(subscriber)
        with pytest.raises(Exception, match="the progress of subscriptions is missing: s"):
            await new.execute(REBIND)
        await subscriber.execute(
            "ALTER SUBSCRIPTION s DISABLE", "ALTER SUBSCRIPTION s SET (slot_name = NONE)", "DROP SUBSCRIPTION s"
        )
        await new.execute(REBIND, "TRUNCATE t, u")
        await source_db.execute("SELECT pg_drop_replication_slot('s')")
        await subscriber.create(source_db, "p")
        subscriber.start()
        await assert_followed(Pair(source_db, new, subscriber))


async def test_a_dump_without_large_objects_and_unlogged_rows_has_no_subscriptions(
    new_servers: Servers, source_db: Database
) -> None:
    """Neither large objects nor rows of UNLOGGED tables: the subscriptions are missing, and `status` reports that."""
    old, new = await server(new_servers, "old"), await server(new_servers, "new")
    async with subscribed(source_db, old) as pair:
        await pair.subscriber.stop()
        await restore(new, await dump(old, "--no-large-objects", "--no-unlogged-table-data"))
    async with running_subscriber(new, start=False) as subscriber:
        with pytest.raises(CatalogMoved):
            await show_status(new.dsn())
        await new.execute(REBIND)
        assert await show_status(new.dsn()) == 0
        with pytest.raises(StatementError, match='subscription "s" does not exist'):
            await subscriber.execute("DROP SUBSCRIPTION s")


async def test_a_restored_dump_of_a_target_that_went_on_is_behind(new_servers: Servers, source_db: Database) -> None:
    old, new = await server(new_servers, "old"), await server(new_servers, "new", filler=50)
    async with subscribed(source_db, old) as pair:
        await restore(new, await dump(old))
        await pair.change("INSERT INTO t SELECT generate_series(101, 200)")
        await pair.subscriber.stop()
    async with running_subscriber(new, start=False) as subscriber:
        await new.execute(REBIND)
        subscriber.start()
        status = await subscriber.wait_for_state("stopped")
        assert status["error"] == 'the target is behind replication slot "s"'
        assert await show_status(new.dsn()) == 1


async def test_tables_and_owners_that_a_restored_dump_lacks_are_named(
    new_servers: Servers, source_db: Database
) -> None:
    old, new = await server(new_servers, "old"), await server(new_servers, "new", filler=50)
    await old.execute("CREATE ROLE tenant")
    async with subscribed(source_db, old) as pair:
        await pair.subscriber.stop()
        await pair.subscriber.execute("ALTER SUBSCRIPTION s SET (password_required = false)")
        await old.execute("GRANT CREATE ON DATABASE postgres TO tenant")
        await pair.subscriber.execute("ALTER SUBSCRIPTION s OWNER TO tenant")
        await new.execute("CREATE ROLE other", "CREATE ROLE tenant")
        await restore(new, await dump(old, "--exclude-table=public.u"))
    await new.execute("DROP OWNED BY tenant", "DROP ROLE tenant")
    with pytest.raises(Exception, match="owners of subscriptions do not exist: tenant"):
        await new.execute(REBIND)
    await new.execute("CREATE ROLE tenant")
    with pytest.raises(Exception, match=r"tables of subscriptions do not exist in this database: public\.u") as caught:
        await new.execute(REBIND)
    hint: str = caught.value.hint  # type: ignore[attr-defined]
    await new.execute(hint[hint.index("SELECT") : hint.index(";")])
    assert await new.rows(
        "SELECT r.rolname::text FROM subscriber.subscription s JOIN pg_roles r ON r.oid = s.subowner"
    ) == [("tenant",)]
    assert await new.rows("SELECT srrelid = 't'::regclass FROM subscriber.subscription_rel") == [(True,)]


async def test_a_copy_from_a_template_does_not_touch_the_original(
    target: Server, source_db: Database, target_db: Database
) -> None:
    async with subscribed(source_db, target_db) as pair, fresh_database(target) as copied:
        await pair.subscriber.stop()
        root = Database(target, "postgres")
        target_db.close_sessions()
        await root.execute(f"DROP DATABASE {copied.name}", f"CREATE DATABASE {copied.name} TEMPLATE {target_db.name}")
        await pair.subscriber.restart()
        await pair.caught_up()
        async with running_subscriber(copied, start=False) as subscriber:
            await refused(subscriber)
            await subscriber.execute(
                "ALTER SUBSCRIPTION s DISABLE", "ALTER SUBSCRIPTION s SET (slot_name = NONE)", "DROP SUBSCRIPTION s"
            )
        await source_db.execute("INSERT INTO t SELECT generate_series(101, 200)")
        await assert_followed(pair)


async def test_a_copy_made_during_a_table_copy_leaves_the_original_its_slot(
    target: Server, source_db: Database, target_db: Database
) -> None:
    async with running_subscriber(target_db) as subscriber, fresh_database(target) as copied:
        pair = Pair(source_db, target_db, subscriber)
        await stop_after_the_copy(pair)
        root = Database(target, "postgres")
        target_db.close_sessions()
        await root.execute(f"DROP DATABASE {copied.name}", f"CREATE DATABASE {copied.name} TEMPLATE {target_db.name}")
        with pytest.raises(Exception, match=r"the copy of tables had begun when this database was copied: public\.t"):
            await copied.execute(REBIND)
        async with running_subscriber(copied, start=False) as other:
            await other.execute(
                "ALTER SUBSCRIPTION s DISABLE", "ALTER SUBSCRIPTION s SET (slot_name = NONE)", "DROP SUBSCRIPTION s"
            )
        assert await sync_slots(source_db) == 1
        await subscriber.restart()
        await assert_followed(pair)
        await pair.subscriber.wait_for_ready(source_db)
        assert await sync_slots(source_db) == 0


async def stop_after_the_copy(pair: Pair) -> None:
    """Subscribe to table t. The launcher ends when its rows are copied, before it has caught up."""
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.source.execute("INSERT INTO t VALUES (1)", "CREATE PUBLICATION p FOR TABLE t")
    failpoints.armed[Point.COPY_COMMITTED] = pair.subscriber.cancel
    try:
        await pair.subscriber.create(pair.source, "p")
        await pair.target.wait_for("SELECT srsubstate = 'f' FROM subscriber.subscription_rel")
    finally:
        failpoints.armed.clear()
    await pair.subscriber.stop()


async def sync_slots(source: Database) -> int:
    count: int = await source.value(r"SELECT count(*) FROM pg_replication_slots WHERE slot_name LIKE 'pg\_%\_sync\_%'")
    return count


async def test_a_crash_is_no_move(servers: Servers, source_db: Database) -> None:
    target = await server(servers, "target")
    async with subscribed(source_db, target) as pair:
        for _ in range(2):
            await target.server.stop("immediate")
            await source_db.execute("INSERT INTO t SELECT max(id) + 1 FROM t")
            await target.server.start()
            assert await show_status(target.dsn()) in (0, 1)
            await pair.caught_up()
        await pair.subscriber.restart()
        await assert_followed(pair)
        assert await target.value("SELECT count(*) FROM subscriber.identity") == 1


async def test_a_renamed_database_is_confirmed(target: Server, source_db: Database) -> None:
    async with fresh_database(target) as database, subscribed(source_db, database) as pair:
        await pair.subscriber.stop()
        root, former = Database(target, "postgres"), database.name
        database.name += "_renamed"
        database.close_sessions()
        await root.execute(f"ALTER DATABASE {former} RENAME TO {database.name}")
        await refused(pair.subscriber)
        await database.execute(REBIND)
        pair.subscriber.start()
        await assert_followed(pair)


@pytest.mark.parametrize("accepted", [False, True])
async def test_a_promoted_standby_runs_once_its_timeline_is_accepted(
    servers: Servers, source_db: Database, accepted: bool
) -> None:
    primary = await server(servers, "primary")
    async with subscribed(source_db, primary) as pair:
        standby = Database(await standby_of(primary.server, servers, "standby"), "postgres")
        if accepted:
            await primary.execute("SELECT subscriber.accept_timelines(true)")
        with pytest.raises(ConnectionLost, match="the target is a standby, which cannot read the subscriptions"):
            await show_status(standby.dsn())
        await source_db.execute("INSERT INTO t SELECT generate_series(101, 200)")
        await pair.caught_up()
        await pair.subscriber.stop()
        await primary.server.stop()
    async with running_subscriber(standby) as subscriber:
        await subscriber.log.wait_for("the target is a standby")
        if not accepted:
            await subscriber.stop()
        await promote(standby.server)
        if not accepted:
            await refused(subscriber, NEW_TIMELINE)
            await standby.execute(REBIND)
            subscriber.start()
        else:
            await subscriber.log.wait_for("LOG:  the target continues on timeline 2 after 1")
        await assert_followed(Pair(source_db, standby, subscriber))


@pytest.mark.parametrize("first", ["original", "clone"])
async def test_a_physical_clone_and_its_original_do_not_both_run(
    servers: Servers, source_db: Database, first: str
) -> None:
    """The servers do not differ internally. The slot shows which one has fallen behind."""
    original = await server(servers, "original")
    async with subscribed(source_db, original) as pair:
        await pair.subscriber.stop()
        await original.server.stop()
        twin = await servers.create("clone", SETTINGS)
        shutil.rmtree(twin.data)
        subprocess.run(["cp", "-a", original.server.data, twin.data], check=True)
        await original.server.start()
        await twin.start()
        clone = Database(twin, "postgres")
        async with running_subscriber(clone, start=False) as other:
            leading, late = (pair.subscriber, other) if first == "original" else (other, pair.subscriber)
            leading.start()
            await leading.wait_for_state("streaming")
            await source_db.execute("INSERT INTO t SELECT generate_series(101, 200)")
            await source_db.wait_for_catchup("s")
            late.start()
            assert (await late.wait_for_state("stopped"))["error"] == 'the target is behind replication slot "s"'
            assert await show_status(late.database.dsn()) == 1


@pytest.mark.parametrize("during_copy", [pytest.param(False, marks=pytest.mark.soak), True])
async def test_a_target_continues_after_pg_upgrade(servers: Servers, source_db: Database, during_copy: bool) -> None:
    """The system identifier is new, OIDs are the same. A copy that was interrupted continues with its slot."""
    try:
        programs = debian.debian(19)
    except NotAvailable as error:
        pytest.skip(str(error))
    old = await servers.create("old", SETTINGS)
    await old.start()
    target = Database(old, "postgres")
    if during_copy:
        async with running_subscriber(target) as subscriber:
            pair = Pair(source_db, target, subscriber)
            await stop_after_the_copy(pair)
    else:
        async with subscribed(source_db, target) as pair:
            await pair.subscriber.stop()
    await old.stop()
    new = await servers.create("new", SETTINGS, bin=programs)
    await upgrade(old, new)
    await new.start()
    await source_db.execute("INSERT INTO t SELECT generate_series(101, 200)")
    upgraded = Database(new, "postgres")
    async with running_subscriber(upgraded, start=False) as subscriber:
        await refused(subscriber)
        await upgraded.execute(REBIND)
        subscriber.start()
        await assert_followed(Pair(source_db, upgraded, subscriber))
    assert await sync_slots(source_db) == 0


async def upgrade(old: Server, new: Server) -> None:
    work = new.directory / "upgrade"
    work.mkdir()
    shutil.chown(work, new.account.uid, new.account.gid)
    own_bin = "/usr/lib/postgresql/19/bin"  # as pg_upgrade sees its own programs, which run where it runs
    done = subprocess.run(
        [new.bin / "pg_upgrade", "-U", "postgres", "-b", old.bin, "-B", own_bin, "-d", old.data, "-D", new.data],
        cwd=work, capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
        **new.account.keywords,
    )  # fmt: skip
    if done.returncode:
        raise ServersError("pg_upgrade failed", detail=done.stdout + done.stderr)
