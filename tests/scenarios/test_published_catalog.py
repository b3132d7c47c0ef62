"""A target whose tables are all published: no row of schema "subscriber" is sent, whatever happens to subscriptions.

Each version of pgoutput's protocol decodes the changes here, from a slot that is older than the schema.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

import subscriber
from subscriber.catalog import copy_jobs, pause_requests, schema, worker_sessions
from subscriber.connection.connect import open_session
from subscriber.connection.pipeline import Pipeline
from subscriber.demo.servers import Server
from subscriber.errors import ServerError
from subscriber.lsn import Lsn
from subscriber.protocol import messages
from subscriber.protocol.decode import Decoder
from tests.plugins.fix_cluster import Database, fresh_database
from tests.plugins.fix_subscriber import Subscriptions, running_subscriber
from tests.scenarios.conftest import Pair
from tests.scenarios.former_catalog import add_former_subscription, install_former_catalog

# Options of pgoutput for each version of its protocol, and the first server that knows it.
PROTOCOLS = {
    "1": (13, {}),
    "2": (14, {"streaming": "on"}),
    "3": (15, {"streaming": "on", "two_phase": "on"}),
    "4": (16, {"streaming": "parallel", "two_phase": "on"}),
}


class Probe:
    """An unused slot of `database`, on publication `everything`, which is FOR ALL TABLES."""

    def __init__(self, database: Database) -> None:
        self.database = database

    async def create(self) -> None:
        await self.database.execute(
            "CREATE PUBLICATION everything FOR ALL TABLES",
            "SELECT pg_create_logical_replication_slot('probe', 'pgoutput')",
        )

    async def drop(self) -> None:
        await self.database.execute("SELECT pg_drop_replication_slot('probe')")

    async def changes_by_table(self, protocol: str, *, streamed: bool = False) -> Counter[str]:
        """Decode all changes of the slot. Returns the number of changes of each table.

        `streamed`: each transaction is sent in blocks, including rolled-back changes.
        """
        options = {"proto_version": protocol, "publication_names": "everything", **PROTOCOLS[protocol][1]}
        decoder = Decoder(parallel=options.get("streaming") == "parallel")
        names: dict[int, str] = {}
        found: Counter[str] = Counter()
        settings = {"debug_logical_replication_streaming": "immediate"} if streamed else {}
        connection = await self.database.connect(**settings)
        rows = await connection.fetch(
            "SELECT data FROM pg_logical_slot_peek_binary_changes('probe', NULL, NULL, VARIADIC $1)",
            [text for option in options.items() for text in option],
        )
        await connection.close()
        for (data,) in rows:
            message = decoder.decode(data)
            match message:
                case messages.Relation(relid=relid, namespace=namespace, name=name):
                    names[relid] = f"{namespace}.{name}"
                case messages.Insert(relid=relid) | messages.Update(relid=relid) | messages.Delete(relid=relid):
                    found[names[relid]] += 1
                case messages.Truncate(relids=relids):
                    found.update(names[relid] for relid in relids)
        return found

    async def assert_only_tables_of_users(self) -> None:
        """Check that every protocol version sends changes of schema "public", and none of schema "subscriber"."""
        major = await self.database.major()
        for protocol, (since, _) in PROTOCOLS.items():
            if major < since:
                continue
            for streamed in (False, True) if major >= 17 and protocol == "4" else (False,):
                found = await self.changes_by_table(protocol, streamed=streamed)
                assert {name.partition(".")[0] for name in found} == {"public"}, (protocol, found)


@pytest.fixture
async def probe(target_db: Database) -> AsyncIterator[Probe]:
    """Before there is a schema "subscriber" on the target."""
    probe = Probe(target_db)
    await probe.create()
    yield probe
    await probe.drop()


async def test_no_statement_and_no_worker_is_published(probe: Probe, pair: Pair) -> None:
    await pair.both(
        *(f"CREATE TABLE {name} (id int PRIMARY KEY, v text)" for name in "tuv"),
        "CREATE TABLE later (id int PRIMARY KEY)",
    )
    await pair.source.execute(
        "CREATE PUBLICATION p FOR TABLE t", "CREATE PUBLICATION q FOR TABLE u", "CREATE PUBLICATION r FOR TABLE v"
    )
    await pair.source.execute(*(f"INSERT INTO {name} SELECT generate_series(1, 10), 'copied'" for name in "tuv"))
    await pair.subscriber.create(
        pair.source, "p", "s", conflict_policy="skip", conflict_log_rows=True, streaming="parallel", apply_sessions=2
    )
    await pair.subscriber.create(pair.source, "q", "s2", two_phase=True, streaming=True)
    await pair.subscriber.create(pair.source, "r", "s3", enabled=False)
    await pair.subscriber.wait_for_ready(pair.source, "s")
    await pair.subscriber.wait_for_ready(pair.source, "s2")

    await pair.target.execute("INSERT INTO t VALUES (100, 'local')")
    await pair.source.execute(
        "INSERT INTO t VALUES (100, 'remote')",
        "INSERT INTO t SELECT generate_series(101, 300), 'many'",
        "BEGIN; INSERT INTO u VALUES (100, 'prepared'); PREPARE TRANSACTION 'one'",
        "COMMIT PREPARED 'one'",
        "BEGIN; INSERT INTO u VALUES (101, 'prepared'); PREPARE TRANSACTION 'two'",
        "ROLLBACK PREPARED 'two'",
        "ALTER PUBLICATION p ADD TABLE later",
    )
    await pair.source.wait_for_catchup("s")
    await pair.source.wait_for_catchup("s2")
    assert await pair.target.value("SELECT count(*) FROM subscriber.conflict_history") == 1
    await pair.subscriber.execute(
        "ALTER SUBSCRIPTION s REFRESH PUBLICATION",
        "ALTER SUBSCRIPTION s2 SET (streaming = off)",
        "ALTER SUBSCRIPTION s2 DISABLE",
        "ALTER SUBSCRIPTION s2 SKIP (lsn = 'F/0')",
        "ALTER SUBSCRIPTION s2 SKIP (lsn = NONE)",
        "ALTER SUBSCRIPTION s2 ENABLE",
        "ALTER SUBSCRIPTION s3 RENAME TO s4",
        "ALTER SUBSCRIPTION s4 OWNER TO CURRENT_USER",
        f"ALTER SUBSCRIPTION s4 CONNECTION '{pair.source.dsn()}'",
        "ALTER SUBSCRIPTION s4 SET PUBLICATION q WITH (refresh = false)",
    )
    await pair.subscriber.wait_for_ready(pair.source, "s")
    connection = await pair.target.connect()
    subid = await connection.fetchval("SELECT subid FROM subscriber.subscription WHERE subname = 's4'")
    copy = await copy_jobs.add(connection, subid, Lsn(1), {1: 2, 2: 1})
    session = await open_session(pair.target.dsn())
    pipeline = Pipeline(session)
    assert await copy_jobs.claim(pipeline, copy.copyid, copy.fence, [(1, 0), (2, 0)]) == {(1, 0), (2, 0)}
    await copy_jobs.record(pipeline, copy.copyid, copy.fence, {(1, 0): (10, 100)})
    session.abort()
    await copy_jobs.spoil(connection, copy.copyid, 1)
    assert await worker_sessions.register_own(connection, subid, pause_requests.HOLDER)
    await pause_requests.request(connection, subid, Lsn(1))
    await pause_requests.acknowledge(connection, subid, Lsn(1), Lsn(1))
    # As after a crash of the server.
    await connection.execute(
        "ALTER TABLE subscriber.conflict_history DISABLE TRIGGER keep; DELETE FROM subscriber.conflict_history;"
        "ALTER TABLE subscriber.conflict_history ENABLE ALWAYS TRIGGER keep; DELETE FROM subscriber.complete;"
    )
    await schema.restore(connection)
    assert await connection.fetchval("SELECT count(*) FROM subscriber.conflict_history") == 1
    await pair.subscriber.execute(*(f"DROP SUBSCRIPTION {name}" for name in ("s", "s2", "s4")))
    await probe.assert_only_tables_of_users()
    permanent = "relnamespace = 'subscriber'::regnamespace AND relkind IN ('r', 'p') AND relpersistence = 'p'"
    assert await pair.target.rows(f"SELECT relname::text FROM pg_class WHERE {permanent}") == []


# --- former versions, whose tables are published ------------------------------------------------

CONTENT = """
SELECT (SELECT pg_catalog.jsonb_agg(t ORDER BY t::text) FROM subscriber.alembic_version t),
       (SELECT pg_catalog.jsonb_agg(t ORDER BY t::text) FROM subscriber.subscription t),
       (SELECT pg_catalog.jsonb_agg(t ORDER BY t::text) FROM subscriber.subscription_rel t),
       (SELECT pg_catalog.jsonb_agg(t ORDER BY t::text) FROM subscriber.progress t),
       (SELECT pg_catalog.jsonb_agg(t ORDER BY t::text) FROM subscriber.confirmed t)
"""


@pytest.fixture
async def downstream(publisher: Server) -> AsyncIterator[Database]:
    """Create a third database, with subscriptions of its server."""
    async with fresh_database(publisher) as database:
        yield database
        for (name,) in await database.rows(
            "SELECT subname FROM pg_subscription WHERE subdbid = (SELECT oid FROM pg_database"
            " WHERE datname = current_database())"
        ):
            await database.execute(f"ALTER SUBSCRIPTION {name} DISABLE")
            await database.execute(f"ALTER SUBSCRIPTION {name} SET (slot_name = NONE)", f"DROP SUBSCRIPTION {name}")


async def subscribe_natively(downstream: Database, upstream: Database, name: str, publication: str) -> None:
    """CREATE SUBSCRIPTION of the server itself; until all tables are copied."""
    await downstream.execute(f"CREATE SUBSCRIPTION {name} CONNECTION '{upstream.dsn()}' PUBLICATION {publication}")
    await downstream.wait_for("SELECT count(*) FROM pg_subscription_rel WHERE srsubstate <> 'r'", 0)


async def test_an_upgrade_is_not_published(source_db: Database, target_db: Database, downstream: Database) -> None:
    """A former version runs a subscription, and all its tables are published to a subscription of a server."""
    for database in (source_db, target_db, downstream):
        await database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    await source_db.execute(
        "CREATE PUBLICATION p FOR ALL TABLES", "SELECT pg_create_logical_replication_slot('s', 'pgoutput')"
    )
    reached = await source_db.value("SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = 's'")
    await source_db.execute("INSERT INTO t VALUES (1)")
    for database in (target_db, downstream):
        await install_former_catalog(database)
    await downstream.execute("TRUNCATE subscriber.alembic_version")
    await add_former_subscription(target_db, "s", source_db.dsn(), "p", reached)
    await target_db.execute("CREATE PUBLICATION everything FOR ALL TABLES")
    await subscribe_natively(downstream, target_db, "native", "everything")
    arrived = await downstream.rows(CONTENT)
    assert source_db.dsn() in str(arrived), "a former version's connection strings travel"

    async with running_subscriber(target_db) as upgraded:
        await source_db.execute("INSERT INTO t VALUES (2)")
        await source_db.wait_for_catchup("s")
        await target_db.execute("INSERT INTO t VALUES (3)")
        holder = "SELECT active_pid FROM pg_replication_slots WHERE slot_name = 's'"
        former = await source_db.value(holder)
        await upgraded.execute("ALTER SUBSCRIPTION s SET (binary = true)")
        await source_db.wait_for(f"SELECT active_pid <> {former} FROM pg_replication_slots WHERE slot_name = 's'")
        pid = await source_db.value(holder)
        await target_db.wait_for_catchup("native")
        assert await downstream.rows("SELECT id FROM t ORDER BY 1") == [(1,), (2,), (3,)]
        assert await downstream.rows(CONTENT) == arrived

        # The downstream server's own upgrade: subscriptions that arrived by replication do not run.
        with pytest.raises(ServerError, match="while subscription native of the server replicates its tables") as error:
            await Subscriptions(downstream).execute("ALTER SUBSCRIPTION s ENABLE")
        assert "ALTER SUBSCRIPTION native REFRESH PUBLICATION" in (error.value.hint or "")
        await downstream.execute("ALTER SUBSCRIPTION native REFRESH PUBLICATION")
        async with running_subscriber(downstream) as other:
            await downstream.wait_for("SELECT to_regclass('subscriber.launcher') IS NOT NULL")
            await source_db.execute("INSERT INTO t VALUES (4)")
            await source_db.wait_for_catchup("s")
            await target_db.wait_for_catchup("native")
            assert await downstream.rows("SELECT subname::text, subenabled FROM subscriber.pg_subscription") == [
                ("s", False)
            ]
            assert (await other.worker())["error"].startswith("the subscription has no replication origin")
            assert await source_db.value(holder) == pid
            await other.execute("ALTER SUBSCRIPTION s SET (slot_name = NONE)", "DROP SUBSCRIPTION s")
        assert await downstream.rows("SELECT id FROM t ORDER BY 1") == [(1,), (2,), (3,), (4,)]
        await upgraded.execute("DROP SUBSCRIPTION s")


@pytest.mark.prints_password("the server logs a statement of its own that fails")
async def test_a_former_catalog_does_not_arrive(target_db: Database, downstream: Database) -> None:
    """Neither in an empty database nor in one with the present schema, by the server's subscriptions and by ours."""
    await install_former_catalog(target_db)
    await add_former_subscription(target_db, "s", "host=nowhere", "p", "0/1")
    await target_db.execute("CREATE PUBLICATION everything FOR ALL TABLES")
    create = f"CREATE SUBSCRIPTION native CONNECTION '{target_db.dsn()}' PUBLICATION everything"
    with pytest.raises(asyncpg.PostgresError, match=r"schema \"subscriber\" does not exist"):
        await downstream.execute(create)
    async with running_subscriber(downstream) as ours:
        await ours.create(target_db, "everything", "ours")
        await ours.wait_for_sync(target_db, "ours")
        with pytest.raises(
            asyncpg.PostgresError, match=r"relation \"subscriber\.\w+\"|cannot use relation \"subscriber"
        ):
            await downstream.execute(create)
        assert await downstream.rows("SELECT subname::text FROM subscriber.pg_subscription") == [("ours",)]
        await ours.execute("DROP SUBSCRIPTION ours")


@pytest.fixture
async def former_target(target_db: Database) -> Database:
    """Create a publisher that is a target of a former version: publication `everything` has its catalog."""
    await install_former_catalog(target_db)
    await target_db.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION everything FOR ALL TABLES")
    return target_db


WORK = (
    "INSERT INTO t VALUES (1)",
    "BEGIN; UPDATE subscriber.subscription SET subenabled = false; INSERT INTO t VALUES (2); COMMIT",
    "SELECT pg_logical_emit_message(true, 'subscriber', '')",
    "SELECT pg_logical_emit_message(true, 'theirs', 'message')",
    "TRUNCATE subscriber.confirmed, t",
    "INSERT INTO t VALUES (3)",
)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "in blocks"])
async def test_a_stream_leaves_a_former_catalog_out(former_target: Database, streamed: bool) -> None:
    if streamed:
        await former_target.stream_everything()
    seen: list[str] = []
    async with subscriber.stream(
        former_target.dsn(), slot="stream", create="missing", publications=["everything"], messages=True
    ) as changes:
        await add_former_subscription(former_target, "s", "host=nowhere password=secret", "p", "0/1")
        await former_target.execute(*WORK)
        async for transaction in changes:
            async for change in transaction:
                if isinstance(change, subscriber.Insert | subscriber.Update | subscriber.Delete):
                    seen.append(f"{change.kind} {change.relation}")
                elif isinstance(change, subscriber.Truncate):
                    seen.append("truncate " + ", ".join(str(relation) for relation in change.relations))
                else:
                    seen.append(f"message {change.prefix}")
            await transaction.ack()
            if seen.count("insert public.t") == 3:
                break
    assert seen == ["insert public.t", "insert public.t", "message theirs", "truncate public.t", "insert public.t"]
    await former_target.execute("SELECT pg_drop_replication_slot('stream')")


async def test_an_archive_leaves_a_former_catalog_out(former_target: Database, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = ["archive", "--source", former_target.dsn(), "--publication", "everything", "--directory", str(log)]
    await run_command(*command, "--slot", "archive", "--until", "0/1")
    await add_former_subscription(former_target, "s", "host=nowhere password=secret", "p", "0/1")
    await former_target.execute(*WORK)
    end = await former_target.value("SELECT pg_current_wal_flush_lsn()::text")
    await run_command(*command, "--slot", "archive", "--until", end)
    stored = b"".join(file.read_bytes() for file in log.rglob("*") if file.is_file())
    assert b"public\0t\0" in stored
    assert b"theirs\0" in stored
    assert b"subscriber\0" not in stored
    assert b"secret" not in stored
    await former_target.execute("SELECT pg_drop_replication_slot('archive')")


async def test_a_mirror_leaves_a_former_catalog_out(former_target: Database, tmp_path: Path) -> None:
    await add_former_subscription(former_target, "s", "host=nowhere password=secret", "p", "0/1")
    target = tmp_path / "mirror.db"
    for statements in ((), WORK):
        await former_target.execute(*statements)
        end = Lsn.parse(await former_target.value("SELECT pg_current_wal_flush_lsn()::text"))
        await subscriber.mirror(
            former_target.dsn(),
            slot="mirror",
            publications=["everything"],
            target=f"sqlite+aiosqlite:///{target}",
            until=end,
        )
    with sqlite3.connect(target) as mirrored:
        tables = {name for (name,) in mirrored.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        assert tables == {"t", "subscriber_mirror", "subscriber_mirror_table", "subscriber_mirror_timeline"}
        assert mirrored.execute("SELECT id FROM t").fetchall() == [(3,)]
    await former_target.execute("SELECT pg_drop_replication_slot('mirror')")


async def test_tail_and_check_leave_a_former_catalog_out(former_target: Database, source_db: Database) -> None:
    await add_former_subscription(former_target, "s", "host=nowhere password=secret", "p", "0/1")
    await former_target.execute("SELECT pg_create_logical_replication_slot('tail', 'pgoutput')", *WORK)
    tail = ["tail", "--source", former_target.dsn(), "--publication", "everything", "--slot", "tail", "--limit", "5"]
    printed = await run_command(*tail, "--json")
    assert [line["op"] for line in map(json.loads, printed.splitlines()) if line["op"] not in ("begin", "commit")] == [
        "insert",
        "insert",
        "message",
        "truncate",
        "insert",
    ]
    assert "subscriber" not in printed
    await former_target.execute("SELECT pg_drop_replication_slot('tail')")

    await source_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    check = ["check", "--source", former_target.dsn(), "--target", source_db.dsn(), "--publication", "everything"]
    printed = await run_command(*check, "--json", status=None)
    found = [finding for finding in json.loads(printed) if "schema subscriber" in finding["message"]]
    assert [finding["level"] for finding in found] == ["warning"]
    assert "confirmed, " in found[0]["message"]
    assert "Upgrade subscriber on the publisher" in found[0]["fix"]


async def run_command(*arguments: str, status: int | None = 0) -> str:
    """Run a command of this program. Returns its output. `status`: its exit status; None: any."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "subscriber", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    printed, errors = await asyncio.wait_for(process.communicate(), 60)
    assert status is None or process.returncode == status, errors.decode()
    return printed.decode()
