"""Settings that a database or a role can have, each at an unusual value, compared with PostgreSQL's own worker.

The source's and the target's databases get the setting before both subscriptions are created. Both must have the same
rows after the copy, and after every kind of change. All settings together take seconds; one by one they are a soak
test.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import asyncpg
import pytest

from subscriber.demo.servers import Server
from subscriber.display import sql_literal
from subscriber.quoting import identifier
from tests.environment.beside import NATIVE, OURS, Stage, beside, contents

Connection = asyncpg.Connection

# Listed values take precedence over values derived from type and range.
VALUES = {
    "client_encoding": "LATIN1",
    "DateStyle": "German",
    "IntervalStyle": "sql_standard",
    "TimeZone": "Asia/Tokyo",
    "TimeZoneAbbreviations": "India",
    "timezone_abbreviations": "India",
    "default_text_search_config": "pg_catalog.german",
    "search_path": "evil, pg_catalog",
    "restrict_nonsystem_relation_kind": "view, foreign-table",
    "extra_float_digits": "-15",
    "statement_timeout": "3000",
    "idle_in_transaction_session_timeout": "3000",
    "idle_session_timeout": "3000",
    "lock_timeout": "100",
    "jit_above_cost": "0",
    "jit_inline_above_cost": "0",
    "jit_optimize_above_cost": "0",
    "default_transaction_isolation": "serializable",
    "synchronous_commit": "off",
    "session_replication_role": "replica",
    "deadlock_timeout": "10",
    "commit_delay": "1000",
    "log_statement": "all",
    "log_min_messages": "debug5",
    "log_min_error_statement": "debug5",
    "log_error_verbosity": "verbose",
    "wal_compression": "on",
    "track_functions": "all",
    "compute_query_id": "on",
    "max_stack_depth": "100",
}
# With these settings, PostgreSQL's own worker behaves differently, or no session can connect.
LEFT_OUT = {
    "local_preload_libraries": "nobody can connect",
    "session_preload_libraries": "nobody can connect",
    "dynamic_library_path": "the server's own worker is not found",
    "transaction_timeout": "ends the copy of PostgreSQL's own worker",
    "temp_file_limit": "ends the publisher's decoding",
    "logical_decoding_work_mem": "is the same for both",
    "allow_system_table_mods": "means nothing for rows",
    "ignore_checksum_failure": "means nothing for rows",
    "zero_damaged_pages": "means nothing for rows",
    "lo_compat_privileges": "means nothing for rows",
    "debug_discard_caches": "takes minutes",
    "jit_dump_bitcode": "writes files into the data directory",
    "jit_profiling_support": "writes files",
    "jit_debugging_support": "means nothing for rows",
    "trace_sort": "means nothing for rows",
    "log_btree_build_stats": "means nothing for rows",
    "role": "is nobody's whom both know",
    "session_authorization": "is no setting of a database",
}
# PostgreSQL's own worker does not survive these on the publisher.
NOT_ON_THE_SOURCE = ("statement_timeout", "lock_timeout", "exit_on_error", "idle_session_timeout")
# And with these on the target it stores other values than the publisher has.
NOT_ON_THE_NATIVE_TARGET = ("client_encoding", "array_nulls", "xmloption")
SETTINGS = """
SELECT name, setting, vartype, min_val, max_val, enumvals FROM pg_catalog.pg_settings
 WHERE context = ANY ($1) AND name NOT LIKE 'transaction\\_%' AND name NOT LIKE '%.%' ORDER BY name
"""
TABLES = (
    """
    CREATE TABLE wide (
        id int PRIMARY KEY, words text[], numbers int[], plain text, bytes bytea, span interval, at timestamptz,
        local timestamp, day date, clock timetz, real float4, double float8, exact numeric, tree jsonb,
        letter "char", short name, found tsvector, asked tsquery, part int4range, parts int4multirange, place point,
        address inet, bits varbit, flag bool, class regclass, said money)
    """,
    "CREATE TABLE bare (id int, words text[], plain text, at timestamptz)",
    "ALTER TABLE bare REPLICA IDENTITY FULL",
    "CREATE TABLE parted (id int PRIMARY KEY, plain text) PARTITION BY RANGE (id)",
    "CREATE TABLE parted_low PARTITION OF parted FOR VALUES FROM (MINVALUE) TO (50)",
    "CREATE TABLE parted_high PARTITION OF parted FOR VALUES FROM (50) TO (MAXVALUE)",
)
# Defaults on the target that depend on the session's settings.
ON_TARGET = (
    "ALTER TABLE wide ADD seen text DEFAULT concat_ws('/', '2024-02-03'::date, '1 day 2 hours'::interval, 0.1::float8)",
)
ROW = r"""
    i, ARRAY['a', NULL, 'NULL', E'b\\"', ''], ARRAY[i, NULL], E'a\\b''"\n\t' || i, E'\\x00ff5c27',
    '-1 year -2 mons +3 days -04:05:06.7'::interval * (i % 2 * 2 - 1), '2024-01-02 03:04:05.678+09'::timestamptz,
    '0044-03-15 BC', CASE i % 3 WHEN 0 THEN 'infinity' ELSE '2024-02-03' END::date, '04:05:06-08', 'NaN',
    0.1 + 0.2 + i, 'NaN',
    '{"a": "\\ \u00e9"}', E'\\377', 'a b',
    'fat:1A cat', 'fat & !cat', '[1,5)', '{[1,3),[7,9)}', '(0.1,-2)', '10.0.0.1/8', B'101', i % 2 = 0, 'pg_class',
    12.34::numeric::money
"""
CHANGES = (
    f"INSERT INTO wide SELECT {ROW} FROM generate_series(101, 140) i",
    f"INSERT INTO wide SELECT {ROW} FROM generate_series(201, 203) i",
    r"UPDATE wide SET plain = E'\\' || plain, words = words || ARRAY[NULL, 'x'], at = at + '1 day' WHERE id < 30",
    "UPDATE wide SET id = id + 1000, double = double / 3 WHERE id BETWEEN 102 AND 104",
    "UPDATE wide SET numbers = '{NULL,1}', span = '-1 day' WHERE id = 105",
    "DELETE FROM wide WHERE id BETWEEN 110 AND 130",
    "DELETE FROM wide WHERE id = 5",
    r"UPDATE bare SET plain = E'\\', words = NULL WHERE id % 2 = 0; DELETE FROM bare WHERE id % 3 = 0",
    "UPDATE parted SET id = id + 45, plain = '''' WHERE id % 3 = 0; DELETE FROM parted WHERE id % 3 = 1",
    "TRUNCATE bare; INSERT INTO bare VALUES (7, '{NULL}', 'after', now())",
)
FILL = (
    f"INSERT INTO wide SELECT {ROW} FROM generate_series(1, 40) i",
    r"INSERT INTO bare SELECT i, ARRAY['a', NULL], E'\\' || i, now() FROM generate_series(1, 9) i",
    "INSERT INTO parted SELECT i, i FROM generate_series(1, 20) i",
)


@dataclass
class Scene:
    """Sessions that were opened before the settings."""

    stage: Stage
    source: Connection
    native: Connection
    ours: Connection

    async def set(self, settings: Mapping[str, str], *, role: str | None = None) -> int:
        """Set the settings for all new sessions, or those of a role. Returns the number that were set for ours.

        Settings that this server refuses for a database are skipped.
        """
        count = 0
        stage = self.stage
        for database, connection, left_out in (
            (stage.source, self.source, NOT_ON_THE_SOURCE),
            (stage.native, self.native, NOT_ON_THE_NATIVE_TARGET),
            (stage.ours, self.ours, ()),
        ):
            for name in settings.keys() - set(left_out):
                whose = f"DATABASE {database.name}" if role is None else f"ROLE {role} IN DATABASE {database.name}"
                try:
                    await connection.execute(f"ALTER {whose} SET {identifier(name)} = {sql_literal(settings[name])}")
                except (asyncpg.InvalidParameterValueError, asyncpg.CantChangeRuntimeParamError):
                    continue
                count += database is stage.ours
        return count

    async def compare(self, what: str) -> None:
        for query in contents(("wide", "bare", "parted")):
            native = [row[0] for row in await self.native.fetch(query)]
            ours = [row[0] for row in await self.ours.fetch(query)]
            assert native, (what, query)
            for row, wanted in zip(ours, native, strict=False):
                assert row == wanted, (what, query)
            assert len(ours) == len(native), (what, query)


@asynccontextmanager
async def scene(publisher: Server, target: Server) -> AsyncIterator[Scene]:
    """Create the databases and a launcher that is not started yet."""
    async with beside(publisher, target, start=False) as stage:
        await stage.source.execute(*TABLES, *FILL)
        await stage.source.execute("CREATE PUBLICATION p FOR ALL TABLES WITH (publish_via_partition_root)")
        await stage.on_targets(*TABLES, *ON_TARGET)
        databases = (stage.source, stage.native, stage.ours)
        sessions = [await database.connect() for database in databases]
        try:
            yield Scene(stage, *sessions)
        finally:
            await stage.subscriber.stop()
            for database, session in zip(databases, sessions, strict=True):
                await session.execute(f"ALTER DATABASE {database.name} RESET ALL")
                await session.execute(f"ALTER ROLE postgres IN DATABASE {database.name} RESET ALL")


async def follow(scene: Scene, *, binary: bool) -> None:
    """Subscribe both, and compare them after the copy and after every change."""
    stage = scene.stage
    stage.subscriber.start()
    options = f"binary = {str(binary).lower()}"
    await scene.native.execute(stage.creation(NATIVE, options))
    await stage.subscriber.execute(stage.creation(OURS, options))
    async with asyncio.timeout(60):
        await _until(scene.native, "SELECT count(*) FROM pg_subscription_rel WHERE srsubstate NOT IN ('s', 'r')")
        await _until(scene.ours, "SELECT count(*) FROM subscriber.subscription_rel WHERE srsubstate NOT IN ('s', 'r')")
        await _caught_up(scene)
    await scene.compare("copy")
    for change in CHANGES:
        await scene.source.execute(change)
    async with asyncio.timeout(60):
        await _caught_up(scene)
    await scene.compare("changes")
    assert not stage.subscriber.log.has("ERROR|WARNING|FATAL|PANIC"), stage.subscriber.log.text()


async def _until(connection: Connection, query: str, expected: int = 0) -> None:
    while await connection.fetchval(query) != expected:
        await asyncio.sleep(0.05)


async def _caught_up(scene: Scene) -> None:
    position = await scene.source.fetchval("SELECT pg_current_wal_lsn()::text")
    await _until(
        scene.source,
        f"SELECT count(*) FROM pg_stat_replication WHERE application_name IN ('{NATIVE}', '{OURS}')"
        f" AND state = 'streaming' AND replay_lsn >= '{position}'",
        2,
    )


async def hostile(connection: Connection, *contexts: str) -> dict[str, str]:
    """Return every setting of the contexts with a value that differs from its current one."""
    chosen = {}
    for name, setting, vartype, least, most, choices in await connection.fetch(SETTINGS, list(contexts)):
        if name in LEFT_OUT:
            continue
        if name in VALUES:
            chosen[name] = VALUES[name]
        elif vartype == "bool":
            chosen[name] = "off" if setting == "on" else "on"
        elif vartype == "enum":
            chosen[name] = next((choice for choice in choices if choice != setting), setting)
        elif vartype in ("integer", "real"):
            chosen[name] = most if setting == least else least
    return chosen


@pytest.mark.prints_password("a setting makes the server log the statements of PostgreSQL's own subscription")
@pytest.mark.parametrize(
    ("context", "least", "binary"),
    [("user", 100, False), pytest.param("superuser", 25, True, marks=pytest.mark.soak)],
    ids=["user", "superuser"],
)
async def test_rows_arrive_with_all_settings_at_unusual_values(
    publisher: Server, target: Server, context: str, least: int, binary: bool
) -> None:
    async with scene(publisher, target) as played:
        assert await played.set(await hostile(played.ours, context)) >= least
        await follow(played, binary=binary)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("role", [None, "postgres"], ids=["database", "role"])
async def test_rows_arrive_with_each_setting_at_an_unusual_value(
    publisher: Server, target: Server, role: str | None
) -> None:
    """Both contexts, in text and in binary by turns."""
    connection = await asyncpg.connect(target.dsn())
    settings = await hostile(connection, "user", "superuser")
    await connection.close()
    count = 0
    for number, (name, value) in enumerate(settings.items()):
        async with scene(publisher, target) as played:
            count += await played.set({name: value}, role=role)
            try:
                await follow(played, binary=bool(number % 2))
            except BaseException as error:
                error.add_note(f"with {name} = {value}")
                error.add_note(target.log.read_text()[-3000:])
                raise
    assert count > 120
