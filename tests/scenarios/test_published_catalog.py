"""A target whose tables are all published: no row of schema "subscriber" is sent, whatever happens to subscriptions.

Each version of pgoutput's protocol decodes the changes here, from a slot that is older than the schema.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator

import pytest

import subscriber
from subscriber.catalog import pause_requests, schema, worker_sessions
from subscriber.lsn import Lsn
from subscriber.protocol import messages
from subscriber.protocol.decode import Decoder
from tests.plugins.fix_cluster import Database
from tests.scenarios.conftest import Pair

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
        by_table: Counter[str] = Counter()
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
                    by_table[names[relid]] += 1
                case messages.Truncate(relids=relids):
                    by_table.update(names[relid] for relid in relids)
        return by_table

    async def assert_only_tables_of_users(self) -> None:
        """Check that every protocol version sends changes of schema "public", and none of schema "subscriber"."""
        major = await self.database.major()
        for protocol, (since, _) in PROTOCOLS.items():
            if major < since:
                continue
            for streamed in (False, True) if major >= 17 and protocol == "4" else (False,):
                changes_by_table = await self.changes_by_table(protocol, streamed=streamed)
                assert {name.partition(".")[0] for name in changes_by_table} == {"public"}, (protocol, changes_by_table)


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


async def test_a_stream_has_no_messages_of_the_program(pair: Pair) -> None:
    """Also in the blocks of a large transaction."""
    await pair.source.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION everything FOR ALL TABLES")
    if await pair.source.major() >= 16:
        await pair.source.stream_everything()
    seen: list[str] = []
    async with subscriber.stream(
        pair.source.dsn(), slot="stream", create="missing", publications=["everything"], messages=True
    ) as changes:
        emit = "SELECT pg_logical_emit_message({}, '{}', '')"
        await pair.source.execute(
            "INSERT INTO t VALUES (1)",
            *(
                emit.format(transactional, prefix)
                for transactional in (True, False)
                for prefix in ("subscriber", "theirs")
            ),
            f"BEGIN; {emit.format(True, 'subscriber')}; {emit.format(True, 'abcdsubscriber')}; COMMIT",
            "INSERT INTO t VALUES (2)",
        )
        async for transaction in changes:
            seen += [
                change.prefix if isinstance(change, subscriber.Message) else change.kind async for change in transaction
            ]
            await transaction.ack()
            if seen.count("insert") == 2:
                break
    assert sorted(seen) == ["abcdsubscriber", "insert", "insert", "theirs", "theirs"]
    await pair.source.execute("SELECT pg_drop_replication_slot('stream')")
