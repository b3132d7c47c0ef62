"""Statements on a target with an unreachable publisher: checks, messages, and results.

Source: src/test/regress/sql/subscription.sql.
"""

from __future__ import annotations

import asyncpg
import pytest

from subscriber.catalog.commands.execute import execute
from subscriber.demo.servers import Server
from subscriber.errors import SubscriberError
from tests.passwords import MARK
from tests.plugins.fix_cluster import Database

NOT_CONNECTED = (
    "WARNING",
    "subscription was created, but is not connected",
    None,
    "To initiate replication, you must manually create the replication slot, enable the subscription, and refresh"
    " the subscription.",
)
SUPERUSER_ONLY = (
    "Subscriptions with the password_required option set to false may only be created or modified by the superuser."
)
Notices = list[tuple[str, str, str | None, str | None]]


async def run(connection: asyncpg.Connection, sql: str) -> Notices:
    """Execute the statements. Returns their notices."""
    notices: Notices = []
    await execute(connection, sql, notice=lambda *parts: notices.append(parts))
    return notices


async def create(connection: asyncpg.Connection, options: str = "", name: str = "s") -> None:
    """Create a subscription without connection, whose publisher does not exist."""
    sql = f"CREATE SUBSCRIPTION {name} CONNECTION 'dbname=nowhere' PUBLICATION p WITH (connect = false{options})"
    assert await run(connection, sql) == [NOT_CONNECTED]


async def stored(connection: asyncpg.Connection, column: str) -> object:
    return await connection.fetchval(f"SELECT {column} FROM subscriber.subscription WHERE subname = 's'")


async def fails(connection: asyncpg.Connection, sql: str) -> SubscriberError:
    with pytest.raises(SubscriberError) as caught:
        await run(connection, sql)
    return caught.value


async def test_create_without_connection_stores_the_subscription(database: asyncpg.Connection) -> None:
    await create(database)
    (row,) = await database.fetch("SELECT * FROM subscriber.pg_subscription")
    expected = {
        "subname": "s",
        "subenabled": False,
        "subbinary": False,
        "substream": b"p",
        "subtwophasestate": b"d",
        "subdisableonerr": False,
        "subpasswordrequired": True,
        "subrunasowner": False,
        "subfailover": False,
        "subconninfo": "dbname=nowhere",
        "subslotname": "s",
        "subsynccommit": "off",
        "subpublications": ["p"],
        "suborigin": "any",
    }
    assert {name: row[name] for name in expected} == expected
    origin = f"pg_{row['oid']}"
    assert await database.fetchval("SELECT count(*) FROM pg_replication_origin WHERE roname = $1", origin) == 1
    assert await database.fetchval("SELECT count(*) FROM subscriber.pg_stat_subscription_stats") == 1
    assert await database.fetchval("SELECT remote_lsn::text FROM subscriber.progress") == "0/0"
    await run(database, "ALTER SUBSCRIPTION s SET (slot_name = NONE); DROP SUBSCRIPTION s")
    assert await database.fetchval("SELECT count(*) FROM subscriber.subscription") == 0
    assert await database.fetchval("SELECT count(*) FROM pg_replication_origin WHERE roname = $1", origin) == 0


@pytest.mark.parametrize(
    ("sql", "column", "value"),
    [
        ("CONNECTION 'dbname=elsewhere'", "subconninfo", "dbname=elsewhere"),
        ("SET PUBLICATION a, b WITH (refresh = false)", "subpublications", ["a", "b"]),
        ("ADD PUBLICATION a WITH (refresh = false)", "subpublications", ["p", "a"]),
        ("ENABLE", "subenabled", True),
        ("DISABLE", "subenabled", False),
        ("SET (slot_name = 'newname')", "subslotname", "newname"),
        ("SET (slot_name = NONE)", "subslotname", None),
        ("SET (synchronous_commit = local)", "subsynccommit", "local"),
        ("SET (binary = true)", "subbinary", True),
        ("SET (binary = false)", "subbinary", False),
        ("SET (streaming = off)", "subbinary", None),
        ("SET (streaming = on)", "substream", b"t"),
        ("SET (streaming = off, binary)", "substream", b"f"),
        ("SET (disable_on_error)", "subdisableonerr", True),
        ("SET (password_required = false)", "subpasswordrequired", False),
        ("SET (run_as_owner)", "subrunasowner", True),
        ("SET (origin = none)", "suborigin", "none"),
        ("SET (two_phase = true)", "subtwophasestate", b"p"),
        ("SET (two_phase = true, slot_name = NONE)", "subtwophasestate", b"p"),
        ("SKIP (lsn = '0/12345')", "subskiplsn::text", "0/12345"),
        ("SKIP (lsn = NONE)", "subskiplsn::text", "0/0"),
        ("RENAME TO t; ALTER SUBSCRIPTION t RENAME TO s", "subname", "s"),
        ("OWNER TO CURRENT_ROLE", "subowner::regrole::text", "postgres"),
    ],
)
async def test_alter_stores_the_new_value(database: asyncpg.Connection, sql: str, column: str, value: object) -> None:
    await create(database)
    assert await run(database, f"ALTER SUBSCRIPTION s {sql}") == []
    assert await stored(database, column) == value


S = "ALTER SUBSCRIPTION s"
EXISTS = 'Use another name, or change it with ALTER SUBSCRIPTION "s".'
CREATE = "CREATE SUBSCRIPTION t CONNECTION 'dbname=nowhere' PUBLICATION p"


@pytest.mark.parametrize(
    ("sql", "message", "hint", "sqlstate"),
    [
        ("CREATE SUBSCRIPTION s CONNECTION 'foo' PUBLICATION p", 'subscription "s" already exists', EXISTS, "42710"),
        (
            "CREATE SUBSCRIPTION t CONNECTION 'testconn' PUBLICATION p",
            'invalid connection string syntax: missing "=" after "testconn" in connection info string',
            None,
            "42601",
        ),
        (
            "CREATE SUBSCRIPTION t CONNECTION 'i_dont_exist=param' PUBLICATION p",
            'invalid connection string syntax: invalid connection option "i_dont_exist"',
            None,
            "42601",
        ),
        (
            "CREATE SUBSCRIPTION t CONNECTION 'port=-1' PUBLICATION p",
            'subscription "t" could not connect to the publisher: invalid port number: "-1"',
            None,
            "08006",
        ),
        (
            "CREATE SUBSCRIPTION t CONNECTION 'dbname=x' PUBLICATION foo, p, foo WITH (connect = false)",
            'publication name "foo" used more than once',
            None,
            "42710",
        ),
        (f"{CREATE} WITH (connect = false, refresh)", 'unrecognized subscription parameter: "refresh"', None, "42601"),
        (
            f"{S} CONNECTION 'foobar'",
            'invalid connection string syntax: missing "=" after "foobar" in connection info string',
            None,
            "42601",
        ),
        (
            "ALTER SUBSCRIPTION other CONNECTION 'dbname=x'",
            'subscription "other" does not exist',
            'This database has: "s".',
            "42704",
        ),
        (f"{S} SET (create_slot = false)", 'unrecognized subscription parameter: "create_slot"', None, "42601"),
        (f"{S} SET (slot_name = '')", 'replication slot name "" is too short', None, "42602"),
        (f"{S} SKIP (lsn = '0/0')", "invalid WAL location (LSN): 0/0", None, "22023"),
        (f"{S} RENAME TO s", 'subscription "s" already exists', EXISTS, "42710"),
        (f"{S} OWNER TO nobody_here", 'role "nobody_here" does not exist', None, "42704"),
        (f"{S} OWNER TO public", 'role "public" does not exist', None, "42704"),
        (
            f"{S} REFRESH PUBLICATION",
            "ALTER SUBSCRIPTION ... REFRESH is not allowed for disabled subscriptions",
            'Enable it first: ALTER SUBSCRIPTION "s" ENABLE;',
            "55000",
        ),
        (
            f"{S} SET PUBLICATION q",
            "ALTER SUBSCRIPTION with refresh is not allowed for disabled subscriptions",
            "Use ALTER SUBSCRIPTION ... SET PUBLICATION ... WITH (refresh = false).",
            "55000",
        ),
        (
            f"{S} ADD PUBLICATION q",
            "ALTER SUBSCRIPTION with refresh is not allowed for disabled subscriptions",
            "Use ALTER SUBSCRIPTION ... ADD PUBLICATION ... WITH (refresh = false) instead.",
            "55000",
        ),
        (f"{S} DROP PUBLICATION p", "cannot drop all the publications from a subscription", None, "42P17"),
        (
            f"{S} SET (slot_name = NONE); {S} ENABLE",
            "cannot enable subscription that does not have a slot name",
            None,
            "55000",
        ),
        (
            f"{S} ENABLE; {S} SET (slot_name = NONE)",
            "cannot set slot_name = NONE for enabled subscription",
            'Disable it first: ALTER SUBSCRIPTION "s" DISABLE;',
            "55000",
        ),
        (
            f"{S} ENABLE; {S} SET (failover)",
            'cannot set option "failover" for enabled subscription',
            'Disable it first: ALTER SUBSCRIPTION "s" DISABLE;',
            "55000",
        ),
        (
            f"{S} SET (slot_name = NONE); {S} SET (failover)",
            'cannot set option "failover" for a subscription that does not have a slot name',
            None,
            "55000",
        ),
        (
            f"{S} SET (slot_name = x, two_phase = off)",
            '"slot_name" and "two_phase" cannot be altered at the same time',
            None,
            "42601",
        ),
        ("DROP SUBSCRIPTION other", 'subscription "other" does not exist', 'This database has: "s".', "42704"),
    ],
)
async def test_a_refused_statement_has_postgresqls_message_and_changes_nothing(
    database: asyncpg.Connection, sql: str, message: str, hint: str | None, sqlstate: str
) -> None:
    await create(database)
    before = await database.fetch("SELECT * FROM subscriber.subscription")
    error = await fails(database, sql)
    assert (error.message, error.hint, error.sqlstate) == (message, hint, sqlstate)
    if ";" not in sql:
        assert await database.fetch("SELECT * FROM subscriber.subscription") == before
    assert await database.fetchval("SELECT count(*) FROM subscriber.subscription") == 1


async def test_drop_if_exists_reports_a_missing_subscription_as_a_notice(database: asyncpg.Connection) -> None:
    assert await run(database, "DROP SUBSCRIPTION IF EXISTS s") == [
        ("NOTICE", 'subscription "s" does not exist, skipping', None, None)
    ]


async def test_nothing_is_executed_of_a_text_that_cannot_be_parsed(database: asyncpg.Connection) -> None:
    await create(database)
    await fails(database, "ALTER SUBSCRIPTION s SET (binary); ALTER SUBSCRIPTION s SET")
    assert await stored(database, "subbinary") is None


async def test_a_position_already_passed_cannot_be_skipped(database: asyncpg.Connection) -> None:
    await create(database)
    await database.execute("SELECT subscriber.set_progress(subid, 0, '0/200') FROM subscriber.subscription")
    error = await fails(database, "ALTER SUBSCRIPTION s SKIP (lsn = '0/1FF')")
    assert error.message == "skip WAL location (LSN 0/1FF) must be greater than origin LSN 0/200"
    await run(database, "ALTER SUBSCRIPTION s SKIP (lsn = '0/200')")
    oid = await stored(database, "subid")
    await database.execute("SELECT pg_replication_origin_advance($1, '0/300')", f"pg_{oid}")
    error = await fails(database, "ALTER SUBSCRIPTION s SKIP (lsn = '0/200')")
    assert error.message.endswith("must be greater than origin LSN 0/300")


async def test_another_connection_may_mean_another_publisher(database: asyncpg.Connection) -> None:
    await create(database)
    await database.execute("UPDATE subscriber.subscription SET subsystemid = '1'")
    await run(database, "ALTER SUBSCRIPTION s CONNECTION 'dbname=elsewhere'")
    assert await stored(database, "subsystemid") is None


@pytest.mark.parametrize(
    ("sql", "what"),
    [
        (CREATE, "CREATE SUBSCRIPTION ... WITH (create_slot = true)"),
        ("ALTER SUBSCRIPTION s SET PUBLICATION p", "ALTER SUBSCRIPTION with refresh"),
        ("ALTER SUBSCRIPTION s REFRESH PUBLICATION", "ALTER SUBSCRIPTION ... REFRESH"),
        *[
            (
                f"ALTER SUBSCRIPTION s DISABLE; ALTER SUBSCRIPTION s SET ({change})",
                f"ALTER SUBSCRIPTION ... SET ({option})",
            )
            for option, change in (("failover", "failover"), ("two_phase", "two_phase = false"))
        ],
        ("DROP SUBSCRIPTION s", "DROP SUBSCRIPTION"),
    ],
)
async def test_a_statement_that_cannot_be_rolled_back_is_refused_in_a_transaction(
    database: asyncpg.Connection, sql: str, what: str
) -> None:
    await create(database)
    await run(database, "ALTER SUBSCRIPTION s ENABLE")
    async with database.transaction():
        error = await fails(database, sql)
    assert (error.message, error.sqlstate) == (f"{what} cannot run inside a transaction block", "25001")


async def test_a_transaction_of_the_callers_is_kept(database: asyncpg.Connection) -> None:
    await create(database)
    transaction = database.transaction()
    await transaction.start()
    await run(database, "ALTER SUBSCRIPTION s SET (slot_name = NONE); DROP SUBSCRIPTION s")
    await transaction.rollback()
    assert await stored(database, "subslotname") == "s"


async def test_dropping_without_publisher_fails_and_changes_nothing(database: asyncpg.Connection) -> None:
    sql = "CREATE SUBSCRIPTION s CONNECTION 'host=127.0.0.1 port=1' PUBLICATION p WITH (connect = false)"
    await run(database, f"{sql}; ALTER SUBSCRIPTION s ENABLE")
    error = await fails(database, "DROP SUBSCRIPTION s")
    assert error.message.startswith(
        'could not connect to publisher when attempting to drop replication slot "s": connection to server at'
    )
    assert error.hint == (
        "Use ALTER SUBSCRIPTION ... DISABLE to disable the subscription, and then use ALTER SUBSCRIPTION ... SET"
        " (slot_name = NONE) to disassociate it from the slot."
    )
    assert await stored(database, "subenabled") is True
    oid = await stored(database, "subid")
    assert await database.fetchval("SELECT count(*) FROM pg_replication_origin WHERE roname = $1", f"pg_{oid}") == 1


async def test_creating_without_publisher_fails_and_leaves_nothing(database: asyncpg.Connection) -> None:
    error = await fails(database, "CREATE SUBSCRIPTION s CONNECTION 'host=127.0.0.1 port=1' PUBLICATION p")
    assert error.message.startswith('subscription "s" could not connect to the publisher: connection to server at')
    assert await database.fetchval("SELECT count(*) FROM subscriber.subscription") == 0


async def test_a_role_without_superuser_has_the_rights_of_pg_create_subscription(
    target_db: Database, database: asyncpg.Connection, role: str
) -> None:
    if database.get_server_version().major < 16:
        pytest.skip("there is no role pg_create_subscription")
    statement = "CREATE SUBSCRIPTION s CONNECTION '{}' PUBLICATION p WITH (connect = false{})"
    await create(database, name="theirs")
    # The role logs in instead of SET ROLE, so that no statement has a superuser's rights.
    dsn = target_db.dsn(user=role)
    user = await asyncpg.connect(dsn)
    error = await fails(user, statement.format("dbname=x", ""))
    assert error.message == "permission denied to create subscription"
    assert error.detail == ('Only roles with privileges of the "pg_create_subscription" role may create subscriptions.')
    await database.execute(f"GRANT pg_create_subscription TO {role}")
    error = await fails(user, statement.format("dbname=x", ""))
    assert error.message == f"permission denied for database {target_db.name}"
    await database.execute(f"GRANT CREATE ON DATABASE {target_db.name} TO {role}")
    error = await fails(user, statement.format("dbname=x", ""))
    assert (error.message, error.detail) == (
        "password is required",
        "Non-superusers must provide a password in the connection string.",
    )
    error = await fails(user, statement.format("dbname=x", ", password_required = false"))
    assert (error.message, error.hint) == ("password_required=false is superuser-only", SUPERUSER_ONLY)
    assert await run(user, statement.format("dbname=x password=fake", "")) == [NOT_CONNECTED]

    error = await fails(user, "ALTER SUBSCRIPTION s OWNER TO postgres")
    assert error.message == 'must be able to SET ROLE "postgres"'
    error = await fails(user, "ALTER SUBSCRIPTION theirs RENAME TO mine")
    assert (error.message, error.sqlstate) == ("must be owner of subscription theirs", "42501")
    await run(user, "ALTER SUBSCRIPTION s RENAME TO s2; ALTER SUBSCRIPTION s2 RENAME TO s")
    await run(user, "ALTER SUBSCRIPTION s SET (binary, password_required = true)")
    error = await fails(user, "ALTER SUBSCRIPTION s SET (password_required = false)")
    assert error.message == "password_required=false is superuser-only"
    error = await fails(user, "ALTER SUBSCRIPTION s CONNECTION 'dbname=x'")
    assert error.message == "password is required"

    # The role can neither change rows directly by SQL, nor read other owners' rows.
    assert await user.fetchval("SELECT count(*) FROM subscriber.subscription") == 1
    assert [tuple(row) for row in await user.fetch("SELECT subname, subconninfo FROM subscriber.pg_subscription")] == [
        ("theirs", None),
        ("s", "dbname=x password=fake"),
    ]
    assert await user.execute("UPDATE subscriber.subscription SET subenabled = true") == "UPDATE 1"
    for sql in (
        "UPDATE subscriber.subscription SET subpasswordrequired = false",
        "UPDATE subscriber.subscription SET subowner = 'postgres'::regrole",
        "SELECT subscriber.create_origin('pg_' || oid) FROM subscriber.pg_subscription WHERE subname = 'theirs'",
        "SELECT subscriber.terminate_workers(oid, NULL) FROM subscriber.pg_subscription WHERE subname = 'theirs'",
    ):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await user.execute(sql)
    assert await user.execute("DELETE FROM subscriber.subscription WHERE subname = 'theirs'") == "DELETE 0"

    # The owner can only drop a subscription that a superuser has changed in this way.
    await run(database, "ALTER SUBSCRIPTION s DISABLE; ALTER SUBSCRIPTION s SET (password_required = off)")
    error = await fails(user, "ALTER SUBSCRIPTION s SET (binary = false)")
    assert error.message == "password_required=false is superuser-only"
    await database.execute(f"REVOKE pg_create_subscription FROM {role}")
    await database.execute(f"REVOKE CREATE ON DATABASE {target_db.name} FROM {role}")
    await run(database, "ALTER SUBSCRIPTION s SET (password_required = on)")
    error = await fails(user, "ALTER SUBSCRIPTION s RENAME TO t")
    assert error.message == f"permission denied for database {target_db.name}"
    await run(database, "ALTER SUBSCRIPTION s SET (slot_name = NONE, password_required = off)")
    await run(user, "DROP SUBSCRIPTION s")
    await user.close()


async def test_a_superuser_gives_a_subscription_away(database: asyncpg.Connection, role: str) -> None:
    await create(database)
    await run(database, f"ALTER SUBSCRIPTION s OWNER TO {role}")
    assert await stored(database, "subowner::regrole::text") == role
    await run(database, "ALTER SUBSCRIPTION s OWNER TO SESSION_USER")
    assert await stored(database, "subowner::regrole::text") == "postgres"


async def test_an_oid_whose_origin_exists_is_passed_over(database: asyncpg.Connection) -> None:
    """Origins belong to the whole cluster, subscriptions to one database."""
    now = await database.fetchval("SELECT subscriber.new_subscription_oid()")
    taken = [f"pg_{now + seconds}" for seconds in range(30)]
    for name in taken:
        await database.execute("SELECT subscriber.make_origin($1)", name)
    await create(database)
    assert await stored(database, "subid") == now + 30
    for name in taken:
        await database.execute("SELECT pg_replication_origin_drop($1)", name)


async def test_the_servers_log_has_no_connection_string(database: asyncpg.Connection, target: Server) -> None:
    """The fixtures of all tests search the servers' logs, too. Here the server logs each statement."""
    start = target.log.stat().st_size
    await database.execute("SET log_statement = 'all'; SET log_parameter_max_length_on_error = -1")
    password = f"host=nowhere password={MARK}"
    await run(database, f"CREATE SUBSCRIPTION s CONNECTION '{password}' PUBLICATION p WITH (connect = false)")
    await run(database, f"ALTER SUBSCRIPTION s CONNECTION '{password} dbname=other'")
    await fails(database, f"CREATE SUBSCRIPTION s CONNECTION '{password}' PUBLICATION p WITH (connect = false)")
    await database.execute("SET log_statement = 'none'")
    text = target.log.read_bytes()[start:].decode()
    assert "INSERT INTO subscriber.subscription " in text
    assert "UPDATE subscriber.subscription SET subconninfo" in text
    assert MARK not in text
    assert await stored(database, "subconninfo") == f"{password} dbname=other"
