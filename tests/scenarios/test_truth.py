"""Situations of an operator: within 30 s status, /health, metrics and console say it, and the command they name works.

No state is shown from memory or from one side only. Each test makes one cause, reads all places, and pastes the
commands of the remedy.
"""

from __future__ import annotations

import re
from dataclasses import replace

import anyio
import asyncpg
import pytest

from subscriber.demo.servers import Server, Servers
from subscriber.settings import Settings
from tests.cli.test_http import FRESH
from tests.passwords import MARK
from tests.plugins.fix_cluster import SETTINGS, Database, ServerOf, fresh_database
from tests.plugins.fix_proxy import Proxies
from tests.plugins.fix_subscriber import QUICK
from tests.scenarios.conftest import Pair
from tests.scenarios.test_outages import overtake
from tests.scenarios.truth import truth

TABLES = ("CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE TABLE u (id int PRIMARY KEY, v text)")
SAME = "SELECT id, v FROM t ORDER BY id"


@pytest.fixture
async def publisher_of_its_own(servers: Servers, pair: Pair) -> Server:
    """Create a publisher that the test may damage, as the source of `pair`."""
    server = await servers.create("publisher", SETTINGS)
    await server.start()
    pair.source = Database(server, "postgres")
    return server


async def subscribed(pair: Pair, publication: str = "FOR TABLE t, u", **options: object) -> None:
    await pair.both(*TABLES)
    await pair.source.execute("INSERT INTO t VALUES (1, 'a')", "INSERT INTO u VALUES (1, 'a')")
    await pair.subscribe(publication, **options)
    await pair.subscriber.wait_for_ready(pair.source)
    # The launcher has seen what publishes the tables.
    await pair.target.wait_for("SELECT bool_and(srmemberships IS NOT NULL) FROM subscriber.subscription_rel")


# --- publications ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cause",
    [
        "DROP PUBLICATION p",
        "ALTER PUBLICATION p DROP TABLE t",
        pytest.param("ALTER PUBLICATION p SET TABLE u", marks=pytest.mark.soak),
        pytest.param("ALTER PUBLICATION p DROP TABLE t, u", marks=pytest.mark.soak),
    ],
)
async def test_a_table_that_is_not_published_any_more(pair: Pair, cause: str) -> None:
    await subscribed(pair)
    async with truth(pair) as places:
        await places.ends()
        await pair.source.execute(cause, "INSERT INTO t VALUES (2, 'b')", "UPDATE t SET v = 'c' WHERE id = 1")
        if cause.startswith("DROP"):
            await places.says("publication", 'publication "p" does not exist on the publisher')
        since = r"not published: changes since [0-9A-F]+/[0-9A-F]+ \(noticed 20.* UTC\) are not replicated"
        publish, resync, *_ = await places.says("publication", since)
        status, output = await places.run("check", "s")
        assert status == 1
        assert "not published" in output
        await places.paste(publish)
        await places.says("publication", "not published for a time: changes since .* and before .* may be missing")
        assert "repaired" in await places.paste(resync)
        await places.ends()
    await pair.assert_same(SAME)
    await pair.change("INSERT INTO t VALUES (3, 'd')")
    await pair.assert_same(SAME)


async def test_a_table_that_is_removed_and_added_while_nobody_looks(pair: Pair) -> None:
    await subscribed(pair)
    await pair.subscriber.stop()
    await pair.source.execute(
        "ALTER PUBLICATION p DROP TABLE t", "INSERT INTO t VALUES (2, 'b')", "ALTER PUBLICATION p ADD TABLE t"
    )
    pair.subscriber.start()
    async with truth(pair) as places:
        (resync,) = await places.says("publication", "table public.t was not published for a time: changes since .*")
        await pair.source.wait_for_catchup("s")
        assert await pair.rows(SAME) == [(1, "a")]
        await places.paste(resync)
        await places.ends()
    await pair.assert_same(SAME)


async def test_a_table_that_was_not_published_and_is_found_equal(pair: Pair) -> None:
    """The rows of the time in between are compared. A comparison since the last one reads them as well."""
    await subscribed(pair, track_ranges=True)
    async with truth(pair) as places:
        assert (await places.run("verify", "s"))[0] == 0
        await pair.source.execute("ALTER PUBLICATION p DROP TABLE t", "INSERT INTO t VALUES (2, 'b')")
        await places.says("publication", "table public.t is not published")
        await pair.source.execute("ALTER PUBLICATION p ADD TABLE t")
        await places.says("publication", "table public.t was not published for a time")
        assert (await places.run("verify", "s", "--since-last"))[0] != 0
        assert (await places.run("verify", "s"))[0] == 1
        await places.says("publication", "table public.t was not published for a time")
        await pair.target.execute("INSERT INTO t VALUES (2, 'b')")
        assert (await places.run("verify", "s"))[0] == 0
        await places.ends()


async def test_a_table_that_left_the_publication_is_reported_until_refresh(pair: Pair) -> None:
    await subscribed(pair)
    async with truth(pair) as places:
        await pair.source.execute("ALTER PUBLICATION p DROP TABLE t")
        *_, refresh = await places.says("publication", "table public.t is not published")
        await places.paste(refresh)
        await places.ends()
    assert await pair.rows("SELECT srrelname FROM subscriber.subscription_rel") == [("u",)]


async def test_a_table_that_was_dropped_on_the_publisher(pair: Pair) -> None:
    await subscribed(pair, "FOR ALL TABLES")
    async with truth(pair) as places:
        await pair.source.execute("DROP TABLE t")
        (refresh,) = await places.says("publication", "table public.t is not on the publisher any more")
        await places.paste(refresh)
        await places.ends()


async def test_a_disabled_subscription_whose_table_is_not_published(pair: Pair) -> None:
    await subscribed(pair)
    await pair.subscriber.execute("ALTER SUBSCRIPTION s DISABLE")
    async with truth(pair) as places:
        await pair.source.execute("ALTER PUBLICATION p DROP TABLE t")
        await places.says("publication", "table public.t is not published")


async def test_a_partition_whose_root_is_published_instead(pair: Pair) -> None:
    await pair.both(
        "CREATE TABLE p (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10)",
    )
    await pair.subscribe("FOR TABLE p")
    async with truth(pair) as places:
        await pair.source.execute("ALTER PUBLICATION p SET (publish_via_partition_root)")
        *_, refresh = await places.says("publication", r"table public.p1 is not published")
        await places.paste(refresh)
        await places.ends()
    await pair.change("INSERT INTO p VALUES (1)")
    await pair.assert_same("SELECT id FROM p")


# --- both sides -----------------------------------------------------------------------------------


async def test_tables_that_differ(pair: Pair) -> None:
    """The result of a comparison is a problem until the rows are repaired, or found equal."""
    await subscribed(pair)
    await pair.target.execute("DELETE FROM t", "UPDATE u SET v = 'wrong'")
    async with truth(pair) as places:
        await places.ends()
        assert (await places.run("verify", "s"))[0] == 1
        message = "2 tables differed from the publisher in the last comparison: public.t, public.u at "
        (repair,) = await places.says("different", message)
        await pair.target.execute("UPDATE u SET v = 'a'")
        assert (await places.run("verify", "s"))[0] == 1
        (repair,) = await places.says("different", "1 table differed from the publisher .*: public.t at ")
        await places.paste(repair)
        await places.ends()
    await pair.assert_same(SAME)


async def test_rows_that_only_the_target_has(pair: Pair) -> None:
    """They differ until a repair has counted and kept them. More of them differ again."""
    await subscribed(pair)
    await pair.target.execute("INSERT INTO t VALUES (50, 'ours')")
    async with truth(pair) as places:
        assert (await places.run("verify", "s"))[0] == 1
        (repair,) = await places.says("different", "1 table differed .*: public.t at ")
        assert "--delete-extra" in await places.paste(repair, exit_status=1)
        await places.ends()
        assert (await places.run("verify", "s"))[0] == 1
        await places.ends()
        await pair.target.execute("INSERT INTO t VALUES (51, 'ours')")
        assert (await places.run("verify", "s"))[0] == 1
        await places.says("different", "1 table differed .*: public.t at ")


async def test_changes_of_rows_that_are_not_there(pair: Pair) -> None:
    """They are no error, as in PostgreSQL. The counters and the status show them."""
    await subscribed(pair)
    await pair.target.execute("DELETE FROM t", "DELETE FROM u")
    await pair.change("UPDATE t SET v = 'b'", "DELETE FROM u")
    async with truth(pair) as places:
        await pair.target.wait_for(
            "SELECT confl_update_missing + confl_delete_missing FROM subscriber.subscription_stats", 2
        )
        exit_status, text = await places.run("status")
        assert exit_status == 0
        assert "conflicts     1 update_missing, 1 delete_missing" in text
        (verify,) = re.findall("subscriber verify s", text)
        assert (await places.run(*verify.split()[1:]))[0] == 1
        await places.says("different", "1 table differed .*: public.t at ")


async def test_a_role_that_may_not_log_in_any_more(pair: Pair) -> None:
    """The walsender of an earlier login continues to stream. The status cannot see the publisher's side."""
    await pair.both(*TABLES)
    role = f"repl_{pair.source.name}"
    await pair.source.execute(
        f"CREATE ROLE {role} LOGIN REPLICATION", f"GRANT SELECT ON t, u TO {role}", "CREATE PUBLICATION p FOR TABLE t"
    )
    try:
        await pair.subscriber.create(pair.source.dsn().replace("postgres@", f"{role}@"), "p")
        await pair.caught_up()
        async with truth(pair) as places:
            await places.ends()
            await pair.source.execute(f"ALTER ROLE {role} NOLOGIN")
            login, *_ = await places.says("publisher", "does not answer the status: .* not permitted to log in")
            await places.paste(login)
            await places.ends()
    finally:
        await pair.subscriber.execute("DROP SUBSCRIPTION s")
        await pair.source.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


async def test_a_publisher_that_is_away(pair: Pair, proxies: Proxies) -> None:
    await pair.both(*TABLES)
    await pair.source.execute("CREATE PUBLICATION p FOR TABLE t")
    proxy = await proxies.to(pair.source.server.port)
    await pair.subscriber.create(proxy.dsn(pair.source.dsn()), "p")
    await pair.caught_up()
    async with truth(pair) as places:
        await proxy.cut()
        await places.says("publisher", "the publisher does not answer the status")
        await places.says("failing", "could not connect|closed the connection")
        await proxy.restore()
        await places.ends()


# --- things that keep WAL -------------------------------------------------------------------------


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Make everything count as forgotten after a second, also for commands."""
    monkeypatch.setenv("SUBSCRIBER_FORGOTTEN_AFTER", "1s")
    return replace(FRESH, forgotten_after=1)


async def test_a_disabled_subscription_that_keeps_wal(pair: Pair, soon: Settings) -> None:
    await subscribed(pair)
    async with truth(pair, soon) as places:
        await places.ends()
        await pair.subscriber.execute("ALTER SUBSCRIPTION s DISABLE")
        enable, drop = await places.says(
            "forgotten", r'disabled for \d+.*: its slot keeps .* of WAL on the publisher; role "postgres" owns'
        )
        assert drop == 'DROP SUBSCRIPTION "s";'
        await places.paste(enable)
        await places.ends()


async def test_an_open_transaction_on_the_publisher(pair: Pair, soon: Settings) -> None:
    await subscribed(pair)
    stranger = await pair.source.connect(application_name="night report")
    async with truth(pair, soon) as places:
        await stranger.execute("BEGIN")
        await stranger.execute("INSERT INTO t VALUES (7, 'x')")
        name = pair.source.name
        (end,) = await places.says(
            "forgotten", rf'process \d+ \("night report"\) of role "postgres" in database "{name}" has not ended for'
        )
        await places.paste(end)
        await places.ends()


async def test_a_prepared_transaction_that_is_forgotten_on_the_publisher(pair: Pair, soon: Settings) -> None:
    await subscribed(pair)
    stranger = await pair.source.connect()
    async with truth(pair, soon) as places:
        await stranger.execute("BEGIN; INSERT INTO t VALUES (7, 'x'); PREPARE TRANSACTION 'it''s'")
        rollback, _ = await places.says("forgotten", "prepared transaction 'it's' of role \"postgres\" in database")
        await places.paste(rollback)
        await places.ends()
    await stranger.close()


# --- the slot -------------------------------------------------------------------------------------


async def drop_slot(pair: Pair) -> None:
    await pair.source.execute("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = 's'")
    with anyio.fail_after(20):
        while True:
            try:
                await pair.source.execute("SELECT pg_drop_replication_slot('s')")
                return
            except asyncpg.ObjectInUseError:
                await pair.source.execute(
                    "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = 's'"
                )


async def test_a_slot_that_was_dropped(pair: Pair) -> None:
    await subscribed(pair)
    async with truth(pair) as places:
        await drop_slot(pair)
        await pair.source.execute("INSERT INTO t VALUES (2, 'b')")
        reseed, *_ = await places.says("slot", 'replication slot "s" does not exist on the publisher')
        _, text = await places.run("status")
        assert "  lag  " not in text  # nothing is known without a slot
        await places.paste(reseed)
        await places.ends()
    await pair.assert_same(SAME)


async def test_a_slot_that_was_dropped_while_the_subscription_is_disabled(pair: Pair) -> None:
    await subscribed(pair)
    await pair.subscriber.execute("ALTER SUBSCRIPTION s DISABLE")
    await pair.source.wait_for("SELECT active FROM pg_replication_slots WHERE slot_name = 's'", False)
    async with truth(pair) as places:
        await pair.source.execute("SELECT pg_drop_replication_slot('s')", "INSERT INTO t VALUES (2, 'b')")
        reseed, *_ = await places.says("slot", 'replication slot "s" does not exist on the publisher')
        await places.paste(reseed)
        await places.ends()
    await pair.assert_same(SAME)


@pytest.mark.parametrize("settings", [replace(QUICK, wal_budget_interval=0.2)])
async def test_a_subscription_over_its_budget(pair: Pair) -> None:
    await subscribed(pair, wal_budget="'4MB'")
    await pair.subscriber.execute("ALTER SUBSCRIPTION s DISABLE")
    async with truth(pair) as places:
        await pair.source.execute("SELECT pg_logical_emit_message(false, 'test', repeat('x', 6000000))")
        (reseed,) = await places.says("given up", "given up: .* more than the wal_budget 4MB")
        await places.paste(reseed)
        await places.ends()


# --- the worker -----------------------------------------------------------------------------------


async def test_a_key_that_is_there_already(pair: Pair) -> None:
    await subscribed(pair)
    await pair.target.execute("INSERT INTO t VALUES (2, 'in the way')")
    async with truth(pair) as places:
        await pair.source.execute("INSERT INTO t VALUES (2, 'b')")
        skip, repair = await places.says("failing", 'conflict detected on relation "public.t"')
        await places.paste(skip)
        await places.paste(repair)
        await places.ends()
    await pair.assert_same(SAME)


async def test_a_loop_of_errors_has_one_state(pair: Pair) -> None:
    """The worker connects and streams in each attempt, until it fails at the same position again."""
    await subscribed(pair)
    await pair.target.execute("INSERT INTO t VALUES (2, 'in the way')")
    async with truth(pair) as places:
        await pair.source.execute("INSERT INTO t VALUES (2, 'b')")
        await places.says("failing", "conflict detected")
        states = set()
        for _ in range(40):
            _, health = await places.health()
            states.add(health["state"])
            await anyio.sleep(0.05)
        assert states == {"waiting to retry"}
        await pair.target.execute("DELETE FROM t WHERE id = 2")
        await places.ends()


@pytest.mark.parametrize(
    ("cause", "message", "cure"),
    [
        (
            "ALTER TABLE t ADD CONSTRAINT short CHECK (v < 'b')",
            "check constraint",
            "ALTER TABLE t DROP CONSTRAINT short",
        ),
        ("ALTER TABLE t DROP COLUMN v", "missing", "ALTER TABLE t ADD COLUMN v text"),
        ("ALTER TABLE t RENAME TO away", 'relation "public.t" does not exist', "ALTER TABLE away RENAME TO t"),
    ],
)
async def test_a_table_of_the_target_that_was_altered(pair: Pair, cause: str, message: str, cure: str) -> None:
    await subscribed(pair)
    async with truth(pair) as places:
        await pair.target.execute(cause)
        await pair.source.execute("INSERT INTO t VALUES (2, 'b')")
        await places.says("failing", message)
        await pair.target.execute(cure)
        await places.ends()


async def test_a_subscription_that_an_error_has_disabled(pair: Pair) -> None:
    await subscribed(pair, disable_on_error=True)
    await pair.target.execute("INSERT INTO t VALUES (2, 'b')")
    async with truth(pair) as places:
        await pair.source.execute("INSERT INTO t VALUES (2, 'b')")
        await places.says(
            "disabled by an error",
            "disabled because of an error: conflict detected",
            "disabled\n +last error +conflict",
        )
        await pair.target.execute("DELETE FROM t WHERE id = 2")
        await pair.subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
        await places.ends()


async def test_transactions_in_quarantine(pair: Pair) -> None:
    await subscribed(pair, on_error="quarantine")
    await pair.target.execute("INSERT INTO t VALUES (2, 'in the way')")
    async with truth(pair) as places:
        await pair.source.execute("INSERT INTO t VALUES (2, 'b')")
        look, retry = await places.says("quarantine", "1 transaction in quarantine could not be applied")
        await places.paste(look, exit_status=1)
        await pair.target.execute("DELETE FROM t WHERE id = 2")
        await places.paste(retry)
        await places.ends()
    await pair.assert_same(SAME)


async def test_a_launcher_that_has_ended(pair: Pair) -> None:
    await subscribed(pair)
    await pair.subscriber.stop()
    async with truth(pair) as places:
        (run,) = await places.says("no launcher", "no launcher is running", "no launcher running")
        assert run == "subscriber run"
        pair.subscriber.start()
        await places.ends()


# --- tables ---------------------------------------------------------------------------------------


async def test_a_copy_into_a_table_that_has_rows(pair: Pair) -> None:
    await pair.both(*TABLES)
    await pair.source.execute("INSERT INTO t VALUES (1, 'a')", "CREATE PUBLICATION p FOR TABLE t, u")
    await pair.target.execute("INSERT INTO t VALUES (1, 'in the way')")
    async with truth(pair) as places:
        await pair.subscriber.create(pair.source, "p")
        resync, truncate = await places.says(
            "table", "table public.t: duplicate key value", "public.t: failed: duplicate key value"
        )
        assert truncate == f"{resync} --truncate"
        await places.paste(resync)
        await places.ends()
    await pair.assert_same(SAME)


async def test_a_role_that_may_not_read_a_table(pair: Pair) -> None:
    await pair.both(*TABLES)
    role = f"repl_{pair.source.name}"
    await pair.source.execute(f"CREATE ROLE {role} LOGIN REPLICATION", "CREATE PUBLICATION p FOR TABLE t")
    try:
        async with truth(pair) as places:
            await pair.subscriber.create(pair.source.dsn().replace("postgres@", f"{role}@"), "p")
            grant, *_ = await places.says(
                "table", "table public.t: permission denied for table t", "public.t: failed: permission denied"
            )
            await places.paste(grant)
            await places.ends()
    finally:
        await pair.subscriber.execute("DROP SUBSCRIPTION s")
        await pair.source.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


async def test_a_table_that_was_dropped_and_created_again(pair: Pair) -> None:
    await subscribed(pair)
    async with truth(pair) as places:
        await pair.target.execute("DROP TABLE t", TABLES[0])
        refresh, _ = await places.says("table", 'table "public.t" of subscription "s" was dropped and created again')
        await places.paste(refresh)
        await places.ends()
    await pair.assert_same(SAME)


# --- more causes ----------------------------------------------------------------------------------


async def test_a_sequence_with_another_definition(pair: Pair) -> None:
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)", "CREATE SEQUENCE other")
    await pair.source.execute("ALTER SEQUENCE other RESTART 10 START 10", "CREATE PUBLICATION p FOR TABLE t")
    async with truth(pair) as places:
        await pair.subscriber.create(pair.source, "p", sequence_names="'public.other'")
        (check,) = await places.says("sequence", "public.other")
        assert "public.other" in await places.paste(check, exit_status=1)
        await pair.source.execute("ALTER SEQUENCE other START 1")
        await places.ends()
    await pair.subscriber.execute("DROP SUBSCRIPTION s")


async def test_a_lock_of_somebody_else(pair: Pair) -> None:
    await subscribed(pair)
    stranger = await pair.target.connect(application_name="night report")
    async with truth(pair) as places:
        await stranger.execute("BEGIN; LOCK TABLE t")
        await pair.source.execute("INSERT INTO t VALUES (2, 'b')")
        await places.says("locked", r'waiting for a lock held by process \d+ \("night report"\)')
        await stranger.close()
        await places.ends()


async def test_a_password_that_was_changed(pair: Pair, publisher_of_its_own: Server) -> None:
    hba = publisher_of_its_own.data / "pg_hba.conf"
    hba.write_text(f"host all repl 127.0.0.1/32 scram-sha-256\n{hba.read_text()}")
    await publisher_of_its_own.reload()
    await pair.both(*TABLES)
    await pair.source.execute(
        f"CREATE ROLE repl LOGIN REPLICATION PASSWORD '{MARK}-first'",
        "GRANT SELECT ON t TO repl",
        "CREATE PUBLICATION p FOR TABLE t",
    )
    dsn = pair.source.dsn(password=f"{MARK}-first").replace("postgres@", "repl@")
    await pair.subscriber.create(dsn, "p")
    await pair.caught_up()
    async with truth(pair) as places:
        await places.ends()
        await pair.source.execute(f"ALTER ROLE repl PASSWORD '{MARK}-second'")
        await places.says("publisher", 'password authentication failed for user "repl"')
        await pair.source.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_replication")
        await places.says("failing", 'password authentication failed for user "repl"')
        changed = pair.source.dsn(password=f"{MARK}-second").replace("postgres@", "repl@")
        await pair.subscriber.execute(f"ALTER SUBSCRIPTION s CONNECTION '{changed}'")
        await places.ends()


@pytest.mark.parametrize("enabled", [True, pytest.param(False, marks=pytest.mark.soak)])
async def test_a_slot_that_was_invalidated(pair: Pair, publisher_of_its_own: Server, enabled: bool) -> None:
    await publisher_of_its_own.restart(max_slot_wal_keep_size="1MB", max_wal_size="32MB", min_wal_size="32MB")
    await subscribed(pair)
    await pair.subscriber.execute("ALTER SUBSCRIPTION s DISABLE")
    await pair.source.wait_for("SELECT active FROM pg_replication_slots WHERE slot_name = 's'", False)
    async with truth(pair) as places:
        await pair.source.execute("INSERT INTO t VALUES (2, 'b')")
        await overtake(pair.source)
        await pair.source.wait_for("SELECT wal_status FROM pg_replication_slots WHERE slot_name = 's'", "lost")
        if enabled:
            await pair.subscriber.execute("ALTER SUBSCRIPTION s ENABLE")
            reseed, *_ = await places.says("stopped", 'can(not| no longer) .* replication slot "s"')
            _, text = await places.run("status")
            assert text.startswith("s: stopped: needs you\n")
            assert "0 s" not in text.partition("  lag ")[2].partition("\n")[0]
        else:
            reseed, *_ = await places.says("slot", 'replication slot "s" has been invalidated on the publisher')
        await places.paste(reseed)
        await places.ends()
    await pair.assert_same(SAME)


@pytest.mark.parametrize("settings", [replace(QUICK, spool_limit=10_000)])
async def test_a_spool_that_is_full(pair: Pair) -> None:
    await pair.source.execute(f"ALTER DATABASE {pair.source.name} SET logical_decoding_work_mem = '64kB'")
    await subscribed(pair, streaming="on")
    async with truth(pair) as places:
        await pair.source.execute("INSERT INTO t SELECT g, repeat('x', 100) FROM generate_series(10, 5000) g")
        await places.says("failing", "spool")
        await pair.subscriber.stop()
        pair.subscriber.settings = replace(QUICK, spool_limit=None)
        pair.subscriber.start()
        await places.ends()
    await pair.assert_same(SAME)


async def test_a_publication_that_was_dropped_before_18(pair: Pair, server_of: ServerOf) -> None:
    """The publisher looks for the publication as of each change, so it remains an error when it is created again."""
    async with fresh_database(server_of("publisher", 17)) as pair.source:
        await subscribed(pair)
        async with truth(pair) as places:
            await pair.source.execute("DROP PUBLICATION p", "INSERT INTO t VALUES (2, 'b')")
            create, *_ = await places.says("publication", 'publication "p" does not exist on the publisher')
            (reseed,) = await places.says("failing", 'publication "p" does not exist')
            await places.paste(create)
            await places.says("publication", "2 tables .* were not published for a time")
            await places.paste(reseed)
            await places.ends()
        await pair.assert_same(SAME)
        await pair.subscriber.execute("DROP SUBSCRIPTION s")
