"""Statements, options and views of PostgreSQL 19 beside PostgreSQL 19's own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import pytest

from subscriber.catalog.schema import ensure_schema
from subscriber.errors import StatementError
from subscriber.settings import Settings
from tests.catalog.test_schema import COLUMNS
from tests.plugins.fix_cluster import Database, ServerOf, database_with_schema, fresh_database
from tests.plugins.fix_subscriber import running_subscriber
from tests.scenarios.conftest import Pair

VIEWS = ("pg_subscription", "pg_subscription_rel", "pg_stat_subscription", "pg_stat_subscription_stats")
SERVER = """
CREATE EXTENSION postgres_fdw;
CREATE SERVER shop FOREIGN DATA WRAPPER postgres_fdw OPTIONS (host '{host}', port '{port}', dbname '{name}');
"""


@pytest.fixture
async def pair_of_19(server_of: ServerOf) -> AsyncIterator[Pair]:
    async with _pair(server_of, 19) as pair:
        yield pair


@pytest.fixture(params=[18, 19])
async def any_pair(request: pytest.FixtureRequest, server_of: ServerOf) -> AsyncIterator[Pair]:
    async with _pair(server_of, request.param) as pair:
        yield pair


@asynccontextmanager
async def _pair(server_of: ServerOf, major: int) -> AsyncIterator[Pair]:
    async with (
        fresh_database(server_of("publisher", major)) as source,
        database_with_schema(server_of("target", major)) as target,
        running_subscriber(target, settings=Settings(retry_interval=0.2, catalog_poll_interval=0.2)) as subscriber,
    ):
        yield Pair(source, target, subscriber)


async def test_views_have_the_columns_of_19(pair_of_19: Pair) -> None:
    target = pair_of_19.target
    await pair_of_19.subscriber.execute()  # makes the schema
    for view in VIEWS:
        ours = [tuple(row) for row in await target.rows(COLUMNS, "subscriber", view)]
        theirs = [tuple(row) for row in await target.rows(COLUMNS, "pg_catalog", view)]
        assert ours == theirs, view


async def test_views_follow_an_upgrade_of_the_server(target_db: Database) -> None:
    """A catalog that was made on another version gets the views of the present one."""
    async with target_db.connection() as connection:
        await ensure_schema(connection)
        await connection.execute("DROP VIEW subscriber.pg_subscription")
        await connection.execute("CREATE VIEW subscriber.pg_subscription AS SELECT 0::oid AS subserver")
        await ensure_schema(connection)
        columns = [name for name, _ in await connection.fetch(COLUMNS, "subscriber", "pg_subscription")]
    assert "subserver" not in columns
    assert columns[0] == "oid"


REFUSED = [
    "wal_receiver_timeout = 'x'",
    "wal_receiver_timeout = '5 foo'",
    "wal_receiver_timeout = -2",
    "wal_receiver_timeout = '9999999d'",
    "wal_receiver_timeout = '- 1'",
    "wal_receiver_timeout",
    "slot_name = pg_conflict_detection",
    "retain_dead_tuples = 2",
    "max_retention_duration = -5",
    "max_retention_duration = '10s'",
    "max_retention_duration = '5000'",
    "max_retention_duration = 2147483648",
    "max_retention_duration = 1.5",
    "max_retention_duration",
]


async def test_refused_options_have_the_errors_of_postgresql_19(pair_of_19: Pair) -> None:
    for options in REFUSED:
        statement = (
            "CREATE SUBSCRIPTION s CONNECTION 'dbname=postgres' PUBLICATION p"
            f" WITH (connect = false, slot_name = none, {options})".replace("slot_name = none, slot_name", "slot_name")
        )
        with pytest.raises(StatementError) as ours:
            await pair_of_19.subscriber.execute(statement)
        with pytest.raises(asyncpg.PostgresError) as theirs:
            await pair_of_19.target.execute(statement)
        assert (ours.value.message, ours.value.sqlstate) == (theirs.value.args[0], theirs.value.sqlstate), options
        hint = getattr(theirs.value, "hint", None)
        assert hint is None or ours.value.hint == hint, options


async def test_values_of_wal_receiver_timeout_are_stored_as_by_postgresql_19(pair_of_19: Pair) -> None:
    stored = (
        "SELECT subwalrcvtimeout FROM {}.pg_subscription s"
        " WHERE subdbid = (SELECT oid FROM pg_database WHERE datname = current_database()) AND subname = '{}'"
    )
    for number, value in enumerate(["90s", "0x10", " 7 s ", "1e3", ".5s", "-1", "+5", "1.5min", "50us", "0"]):
        name = f"s{number}"
        statement = (
            f"CREATE SUBSCRIPTION {name} CONNECTION 'dbname=postgres' PUBLICATION p"
            f" WITH (connect = false, wal_receiver_timeout = '{value}')"
        )
        await pair_of_19.subscriber.execute(statement)
        await pair_of_19.target.execute(statement)
        stored_values = [
            await pair_of_19.target.value(stored.format(schema, name)) for schema in ("subscriber", "pg_catalog")
        ]
        await pair_of_19.target.execute(
            f"ALTER SUBSCRIPTION {name} SET (slot_name = NONE)", f"DROP SUBSCRIPTION {name}"
        )
        assert stored_values == [value, value]


async def test_a_foreign_server_has_the_connection(any_pair: Pair) -> None:
    """The user mapping of the subscription's owner is read. CONNECTION and SERVER replace each other."""
    pair = any_pair
    await pair.both("CREATE TABLE t (id int PRIMARY KEY)")
    await pair.source.execute("CREATE PUBLICATION p FOR TABLE t", "INSERT INTO t VALUES (1)")
    await pair.target.execute(SERVER.format(host="127.0.0.1", port=pair.source.server.port, name=pair.source.name))
    with pytest.raises(StatementError, match='server "nothing" does not exist'):
        await pair.subscriber.execute("CREATE SUBSCRIPTION s SERVER nothing PUBLICATION p")
    with pytest.raises(StatementError, match='user mapping not found for user "postgres", server "shop"') as raised:
        await pair.subscriber.execute("CREATE SUBSCRIPTION s SERVER shop PUBLICATION p")
    assert 'CREATE USER MAPPING FOR "postgres" SERVER "shop" OPTIONS (' in (raised.value.hint or "")
    await pair.target.execute(
        "CREATE USER MAPPING FOR postgres SERVER shop OPTIONS (user 'postgres', password 'o''\\k')"
    )
    await pair.subscriber.execute("CREATE SUBSCRIPTION s SERVER shop PUBLICATION p")
    await pair.caught_up()
    await pair.assert_same("SELECT * FROM t")
    if await pair.target.value("SELECT current_setting('server_version_num')::int >= 190000"):
        shown = await pair.target.rows("SELECT subserver::int, subconninfo FROM subscriber.pg_subscription")
        oid = await pair.target.value("SELECT oid::int FROM pg_foreign_server")
        assert shown == [(oid, None)]
    # A mapping that changes reaches the worker, and one that is missing is an error with a next step.
    await pair.target.execute("DROP USER MAPPING FOR postgres SERVER shop")
    await pair.fails('user mapping not found for user "postgres", server "shop"')
    await pair.source.execute("INSERT INTO t VALUES (2)")
    await pair.target.execute("CREATE USER MAPPING FOR PUBLIC SERVER shop OPTIONS (user 'postgres')")
    await pair.target.wait_for("SELECT count(*) FROM t", 2)
    dsn = pair.source.dsn()
    await pair.subscriber.execute(f"ALTER SUBSCRIPTION s CONNECTION '{dsn}'")
    await pair.target.execute("DROP SERVER shop CASCADE")
    await pair.change("INSERT INTO t VALUES (3)")
    await pair.assert_same("SELECT * FROM t")
    await pair.subscriber.execute("DROP SUBSCRIPTION s")


async def test_the_wrapper_must_make_connections(any_pair: Pair) -> None:
    await any_pair.target.execute("CREATE FOREIGN DATA WRAPPER w", "CREATE SERVER fw FOREIGN DATA WRAPPER w")
    with pytest.raises(StatementError, match='foreign-data wrapper "w" does not support subscription connections'):
        await any_pair.subscriber.execute("CREATE SUBSCRIPTION s SERVER fw PUBLICATION p WITH (connect = false)")


async def test_the_owner_needs_usage_of_the_server(any_pair: Pair) -> None:
    """The mapping of another role, and a server without USAGE, give no connection string."""
    target = any_pair.target
    owner, other = f"owner_{target.name}", f"other_{target.name}"
    await target.execute(
        SERVER.format(host="127.0.0.1", port=1, name="postgres"),
        f"CREATE ROLE {owner} LOGIN IN ROLE pg_create_subscription",
        f"GRANT CREATE ON DATABASE {target.name} TO {owner}",
        f"CREATE ROLE {other} LOGIN",
        f"CREATE USER MAPPING FOR {other} SERVER shop OPTIONS (user 'x', password 'secret')",
    )
    await any_pair.subscriber.execute()  # makes the schema
    async with target.connection() as connection:
        await connection.execute(f"SET SESSION AUTHORIZATION {owner}")
        statement = (
            "SELECT c.conninfo, c.problem FROM pg_foreign_server f,"
            " subscriber.connection_of_server($1::regrole::oid, f.oid) c"
        )
        ((conninfo, problem),) = await connection.fetch(statement, owner)
        assert conninfo is None
        assert problem == f'subscription owner "{owner}" does not have permission on foreign server "shop"'
        ((conninfo, problem),) = await connection.fetch(statement, other)
        assert conninfo is None
        assert "permission denied" in problem
